// ---- thread: where a thread stands in its block ----
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
__device__ __forceinline__ int warpgroup() { return threadIdx.x / 128; }
