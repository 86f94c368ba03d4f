// ---- wgmma_issue: a warpgroup's product of two tiles, K elements deep ----
// acc += A B, or A B where `accumulate` is 0: issued here as one group, there after the wgmma_wait that covers it. A is
// of a warpgroup's 64 rows; operands are those of SharedTile (shared_tile/wgmma.cuh).
template <int K, int N, class A, class B>
__device__ __forceinline__ void issue(Accumulator<N>& acc, const A& a, const B& b, int accumulate) {
    wgmma_hold(acc.d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < K / 16; ++step)
        wgmma_ss<B::TRANSPOSED>(acc.d, a.at(step), b.at(step), step > 0 ? 1 : accumulate);
    wgmma_commit();
}
