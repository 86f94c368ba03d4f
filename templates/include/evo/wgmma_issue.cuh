// ---- wgmma_issue: a warpgroup's product of two operands, K elements deep ----
// A in registers, as Accumulator::convert_a packs it: stays as it is until the wait.
template <int WORDS>
struct RegisterA {
    static constexpr bool TRANSPOSED = false;
    unsigned words[WORDS];

    __device__ __forceinline__ const unsigned* at(int step) const { return words + 4 * step; }
};

template <bool TRANS_B, bool TRANS_A, int COUNT, class Sum>
__device__ __forceinline__ void wgmma(Sum (&d)[COUNT], unsigned long long a, unsigned long long b, int accumulate) {
    wgmma_ss<TRANS_B, TRANS_A>(d, a, b, accumulate);
}

template <bool TRANS_B, bool, int COUNT, class Sum>
__device__ __forceinline__ void wgmma(Sum (&d)[COUNT], const unsigned* a, unsigned long long b, int accumulate) {
    wgmma_rs<TRANS_B>(d, a, b, accumulate);
}

// acc += A B, or A B where `accumulate` is 0: issued here as one group, there after the wgmma_wait that covers it. A
// has a warpgroup's 64 rows and is in registers or, as B is, in shared memory (shared_tile/wgmma.cuh).
template <int K, int N, class Sum, class A, class B>
__device__ __forceinline__ void issue(Accumulator<N, Sum>& acc, const A& a, const B& b, int accumulate) {
    warpgroup_fence_operand(acc.d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < K / 16; ++step)
        wgmma<B::TRANSPOSED, A::TRANSPOSED>(acc.d, a.at(step), b.at(step), step > 0 ? 1 : accumulate);
    wgmma_commit();
}

// Until at most PENDING of the latest groups are in flight; the product that this ends may be read from then on.
template <int PENDING, int N, class Sum>
__device__ __forceinline__ void wait_for(Accumulator<N, Sum>& acc) {
    wgmma_wait<PENDING>();
    warpgroup_fence_operand(acc.d);
}
