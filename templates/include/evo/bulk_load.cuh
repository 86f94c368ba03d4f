// ---- bulk_load: bytes that lie one behind the other, to shared memory by the copy engine (sm_90) ----
// By one thread; `bytes` and both addresses are multiples of 16. The bytes count towards the barrier's phase: announce them
// by arrive_expect_tx (barrier.cuh).
__device__ __forceinline__ void bulk_load(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
