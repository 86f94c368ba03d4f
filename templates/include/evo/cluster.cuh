// ---- cluster: blocks, side by side along x, that run together and reach each other's shared memory (sm_90) ----
// The kernel carries __cluster_dims__(2, 1, 1), or another number where no tile goes to several blocks. Barriers and tiles lie at the same place in both blocks. A block must
// not be reached before it has begun and set up its barriers, or after it has ended: hence cluster_sync first and last.
constexpr unsigned CLUSTER = 2;

{% include "evo/cluster_blocks.cuh" %}

// As tma_load (tma.cuh), into both blocks; the bytes count at the barriers of both.
__device__ __forceinline__ void tma_load_multicast(unsigned to, const TensorMap& map, unsigned barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, { %2, %3}], [%4], %5;" ::"r"(to),
        "l"(address_of(map)), "r"(x), "r"(y), "r"(barrier), "h"((unsigned short)((1 << CLUSTER) - 1))
        : "memory");
}

__device__ __forceinline__ void tma_load_multicast(unsigned to, const TensorMap& map, unsigned barrier, int x, int y,
                                              int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, { %2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(address_of(map)), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"((unsigned short)((1 << CLUSTER) - 1))
        : "memory");
}
