// ---- mma_issue: a warp's product of two operands, K elements deep ----
// A in registers, as Accumulator::convert_a packs it.
template <int STRIPES, int K>
struct RegisterA {
    unsigned words[STRIPES][K / 4];

    __device__ __forceinline__ void read(unsigned (&a)[4], int stripe, int step) const {
#pragma unroll
        for (int w = 0; w < 4; ++w) a[w] = words[stripe][4 * step + w];
    }
};

// acc += A B for STRIPES stripes of 16 rows. A is RegisterA or SharedA, B is KMajorB or MnMajorB
// (shared_tile/ldmatrix.cuh).
template <int K, int STRIPES, int N, class Sum, class A, class B>
__device__ __forceinline__ void issue(Accumulator<N, Sum> (&acc)[STRIPES], const A& a, const B& b) {
#pragma unroll
    for (int step = 0; step < K / 16; ++step) {
        unsigned word_a[STRIPES][4];
#pragma unroll
        for (int i = 0; i < STRIPES; ++i) a.read(word_a[i], i, step);
#pragma unroll
        for (int j = 0; j < N / 8; j += 2) {
            unsigned word_b[4];
            b.read(word_b, step, j);
#pragma unroll
            for (int i = 0; i < STRIPES; ++i) {
                mma_m16n8k16(acc[i].d + 4 * j, word_a[i], word_b[0], word_b[1]);
                mma_m16n8k16(acc[i].d + 4 * j + 4, word_a[i], word_b[2], word_b[3]);
            }
        }
    }
}
