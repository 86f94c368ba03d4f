// Whether this block is the last of a tile's splits, which then all have left their parts: for all threads. Sets the
// count back for the next launch.
__device__ __forceinline__ bool last_of(int* arrived, unsigned char* shared) {
    int* before = reinterpret_cast<int*>(shared);
    __syncthreads();
    if (threadIdx.x == 0) {
        int count;
        // one fence, where __threadfence before and behind an atomicAdd are two
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(count) : "l"(arrived) : "memory");
        if (count == SPLITS - 1) *arrived = 0;
        *before = count;
    }
    __syncthreads();
    return *before == SPLITS - 1;
}
