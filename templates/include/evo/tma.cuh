// ---- tma: tiles of a tensor between global and shared memory, moved by the copy engine (sm_90) ----
// A kernel takes a map as a parameter `const __grid_constant__ TensorMap m`. Coordinates name the first element of a
// tile, innermost dimension first; what lies outside of the tensor arrives as zeros and is not stored. One thread
// issues it for all. Shared addresses (address.cuh) are multiples of 128, of 8 times the swizzle where there is one.
struct alignas(128) TensorMap {
    unsigned long long opaque[16];
};

__device__ __forceinline__ unsigned long long address_of(const TensorMap& map) {
    return reinterpret_cast<unsigned long long>(&map);
}

// Early in the kernel, by one thread: the first tile need not wait for the map itself.
__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(address_of(map)) : "memory");
}

// The whole box's bytes count towards the barrier's phase, those outside of the tensor too: announce them by
// arrive_expect_tx (barrier.cuh).
__device__ __forceinline__ void tma_load(unsigned to, const TensorMap& map, unsigned barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3}], [%4];" ::
            "r"(to),
        "l"(address_of(map)), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void tma_load(unsigned to, const TensorMap& map, unsigned barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3, %4}], "
        "[%5];" ::"r"(to),
        "l"(address_of(map)), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void tma_load(unsigned to, const TensorMap& map, unsigned barrier, int x, int y, int z,
                                         int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, { %2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(address_of(map)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
        : "memory");
}

// What ordinary stores wrote must be fenced first (async_proxy_fence, then a barrier). The thread that stores commits
// and waits as well, before it ends or the tile is written again.
__device__ __forceinline__ void tma_store(const TensorMap& map, unsigned from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, { %1, %2}], [%3];" ::"l"(address_of(map)),
                 "r"(x), "r"(y), "r"(from)
                 : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap& map, unsigned from, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, { %1, %2, %3}], [%4];" ::"l"(address_of(map)),
        "r"(x), "r"(y), "r"(z), "r"(from)
        : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap& map, unsigned from, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, { %1, %2, %3, %4}], [%5];" ::"l"(address_of(map)),
        "r"(x), "r"(y), "r"(z), "r"(w), "r"(from)
        : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most PENDING of the latest groups of stores still read shared memory: enough to write there again or to end.
template <int PENDING>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
