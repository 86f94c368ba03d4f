// ---- thread: where a thread stands in its block ----
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }

// A number that is the same in all lanes, and that the compiler knows to be: what depends on it is computed once for
// the warp, in uniform registers. All lanes take part.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Of 128 threads, as such a number: all lanes take part.
__device__ __forceinline__ int warpgroup() { return uniform(threadIdx.x / 128); }
