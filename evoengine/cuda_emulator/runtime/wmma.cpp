// wmma::mma_sync: gathers the operands of the 32 lanes, multiplies exactly, accumulates in fp32, scatters the result.
#include <mma.h>

#include "internal.h"

namespace nvcuda::wmma {

namespace {

struct Positions {
    unsigned short of[32][16];
};

constexpr Positions make_positions() {
    Positions p{};
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 16; ++i) p.of[lane][i] = (unsigned short)element_position(lane, i);
    return p;
}

constexpr Positions positions = make_positions();

// If an element is held twice, the copies are used by turns, so that a kernel that changed only one of them fails.
template <class F, class T>
inline void gather(float* matrix, const T* x, int lane) {
    constexpr int copies = F::num_elements / F::distinct;
#pragma GCC unroll 16
    for (int i = 0; i < F::distinct; ++i)
        matrix[positions.of[lane][i]] = float(x[i + F::distinct * ((lane + i) % copies)]);
}

}  // namespace

template <int m, int n, class T, class Accumulator>
void multiply_accumulate(void* const* payloads, unsigned) {
    constexpr int k = 16;
    using A = fragment<matrix_a, m, n, k, T, row_major>;
    using B = fragment<matrix_b, m, n, k, T, row_major>;
    using C = fragment<accumulator, m, n, k, Accumulator>;
    alignas(64) float a[m * k], b[k * n], c[m * n];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& operands = *static_cast<const MmaOperands*>(payloads[lane]);
        gather<A>(a, static_cast<const T*>(operands.a), lane);
        gather<B>(b, static_cast<const T*>(operands.b), lane);
        gather<C>(c, static_cast<const Accumulator*>(operands.c), lane);
    }
    for (int row = 0; row < m; ++row) {
        float sums[n];
        for (int column = 0; column < n; ++column) sums[column] = c[row * n + column];
#pragma GCC unroll 16
        for (int i = 0; i < k; ++i)
            for (int column = 0; column < n; ++column) sums[column] += a[row * k + i] * b[i * n + column];
        for (int column = 0; column < n; ++column) c[row * n + column] = sums[column];
    }
    for (int lane = 0; lane < 32; ++lane) {
        auto* d = static_cast<Accumulator*>(static_cast<const MmaOperands*>(payloads[lane])->d);
#pragma GCC unroll 16
        for (int i = 0; i < C::distinct; ++i) d[i] = Accumulator(c[positions.of[lane][i]]);
    }
}

#define EVO_EMU_SHAPE(m, n)                                                          \
    template void multiply_accumulate<m, n, __half, float>(void* const*, unsigned);  \
    template void multiply_accumulate<m, n, __half, __half>(void* const*, unsigned); \
    template void multiply_accumulate<m, n, __nv_bfloat16, float>(void* const*, unsigned);
EVO_EMU_SHAPE(16, 16)
EVO_EMU_SHAPE(32, 8)
EVO_EMU_SHAPE(8, 32)

}  // namespace nvcuda::wmma
