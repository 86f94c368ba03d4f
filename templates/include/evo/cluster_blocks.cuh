// From 0 on.
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all its blocks meet, those that have ended aside; what was written before is seen after.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The first time, behind a barrier_init_fence: all have begun then, with their barriers. Nothing else that was written is
// seen after, as that would have each warp wait for all its memory accesses (MEMBAR).
__device__ __forceinline__ void cluster_begin() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// As barrier_arrive (barrier.cuh), at that block's barrier. Hands on what wgmma has read, no stores: a release by the
// whole cluster would have the warp wait for all its memory accesses (MEMBAR).
__device__ __forceinline__ void barrier_arrive_at(unsigned block, unsigned barrier) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}\n" ::"r"(barrier),
        "r"(block)
        : "memory");
}

// Four floats of that block's shared memory, at the address (a multiple of 16) that they have there.
__device__ __forceinline__ float4 read_four_at(unsigned block, unsigned address) {
    float4 x;
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %4, %5;\n"
        "ld.shared::cluster.v4.f32 { %0, %1, %2, %3}, [there];\n"
        "}\n"
        : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
        : "r"(address), "r"(block)
        : "memory");
    return x;
}
