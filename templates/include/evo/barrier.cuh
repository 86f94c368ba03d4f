// ---- barrier: threads wait for one another and for asynchronous copies (mbarrier and friends, sm_90) ----
// A barrier is 8 bytes of shared memory, named by its shared address (address.cuh). A phase ends when `count` arrivals
// have come and all bytes announced have landed; then the next begins. Waiting is for the end of the last phase of a
// parity: the n-th use of a barrier, from 0, has parity n & 1, and on a fresh barrier a wait for parity 1 is over at
// once.
__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// After the last barrier_init and before the __syncthreads behind which others use them; TMA then knows them too.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces bytes that TMA will load (tma.cuh) before the phase may end.
__device__ __forceinline__ void arrive_expect_tx(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives once all cp.async that this thread has begun have landed; takes the place of one of the `count` arrivals.
__device__ __forceinline__ void copy_async_arrive(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// try_wait sleeps for a while on its own, so the loop does not burn issue slots.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// wgmma and TMA see what ordinary stores and cp.async have written to shared memory only after this, by the threads
// that wrote, before they arrive where others wait, or by those that waited.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barriers (`id` 1 to 15; 0 is that of __syncthreads) for `threads` of the block, a multiple of 32: those that
// sync go on when all have come, those that arrive do not wait.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// All four warps of a warpgroup give registers back to the block, or take more and wait until others have given them: a
// kernel whose warpgroups ask for more in all than it was launched with (168 per thread for three of them) never ends.
// Without __launch_bounds__(THREADS, BLOCKS) the compiler ignores both. COUNT is a multiple of 8 from 24 to 256.
template <int COUNT>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// True in one lane of the warp, all of which take part; cheaper than a comparison of lane numbers, as the compiler
// knows that it is one lane.
__device__ __forceinline__ bool elect_one() {
    unsigned chosen;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(chosen));
    return chosen != 0;
}
