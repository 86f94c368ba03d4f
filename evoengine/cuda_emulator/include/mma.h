// nvcuda::wmma for half and bfloat16 inputs, shapes 16x16x16, 32x8x16 and 8x32x16.
//
// The programming guide leaves open which lane holds which element of a fragment, so the map here is one that no kernel
// can have guessed: the i-th elements of the 32 lanes fill the next whole rows together, the lanes permuted again for
// every i. It is the same for every fragment of equal rows and columns, which is all CUDA promises. As on hardware,
// half fragments of matrix_a and matrix_b hold 16 elements per lane, some of them twice.
//
// mma_sync is a meeting of the warp; load_matrix_sync and store_matrix_sync are not: each lane moves its own elements
// when it gets there, so a missing __syncwarp shows.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int m, int n, int k> struct Extent;
template <int m, int n, int k> struct Extent<matrix_a, m, n, k> { static constexpr int rows = m, columns = k; };
template <int m, int n, int k> struct Extent<matrix_b, m, n, k> { static constexpr int rows = k, columns = n; };
template <int m, int n, int k> struct Extent<accumulator, m, n, k> { static constexpr int rows = m, columns = n; };

template <class Use, class T> inline constexpr int least_elements = 0;
template <> inline constexpr int least_elements<matrix_a, __half> = 16;
template <> inline constexpr int least_elements<matrix_b, __half> = 16;

// Position, in row-major order, of element i of a lane.
constexpr int element_position(int lane, int i) { return i * 32 + ((lane * 5 + i * 11) & 31); }

template <class Use, int m, int n, int k, class T, class Layout = void>
struct fragment {
    static_assert((m == 16 && n == 16 && k == 16) || (m == 32 && n == 8 && k == 16) || (m == 8 && n == 32 && k == 16),
                  "the emulator knows the shapes 16x16x16, 32x8x16 and 8x32x16");
    static constexpr int rows = Extent<Use, m, n, k>::rows, columns = Extent<Use, m, n, k>::columns;
    static constexpr int distinct = rows * columns / 32;
    enum { num_elements = distinct > least_elements<Use, T> ? distinct : least_elements<Use, T> };
    enum { num_storage_elements = num_elements };
    using element_type = T;
    using storage_element_type = T;
    T x[num_elements];
};

template <class T>
inline void check_matrix(const char* name, const T* p, unsigned ldm, int line) {
    if (reinterpret_cast<unsigned long>(p) % 32)
        evo_emu::crash("misaligned %s at line %d: the pointer is not a multiple of 32 bytes", name, line);
    if (ldm * sizeof(T) % 16)
        evo_emu::crash("%s at line %d: leading dimension %u is not a multiple of %u elements", name, line, ldm,
                       unsigned(16 / sizeof(T)));
}

template <bool by_row, class F, class T>
inline void load_elements(F& f, const T* p, unsigned ldm) {
    const int lane = int(evo_emu::lane());
    for (int i = 0; i < F::distinct; ++i) {
        int q = element_position(lane, i), row = q / F::columns, column = q % F::columns;
        T element = by_row ? p[row * size_t(ldm) + column] : p[column * size_t(ldm) + row];
        for (int copy = i; copy < F::num_elements; copy += F::distinct) f.x[copy] = element;
    }
}

template <bool by_row, class F, class T>
inline void store_elements(T* p, const F& f, unsigned ldm) {
    const int lane = int(evo_emu::lane());
    for (int i = 0; i < F::distinct; ++i) {
        int q = element_position(lane, i), row = q / F::columns, column = q % F::columns;
        (by_row ? p[row * size_t(ldm) + column] : p[column * size_t(ldm) + row]) = f.x[i];
    }
}

template <class Layout> inline constexpr bool is_row_major = false;
template <> inline constexpr bool is_row_major<row_major> = true;

template <class Use, int m, int n, int k, class T, class Layout>
inline void load_matrix_sync(fragment<Use, m, n, k, T, Layout>& f, const T* p, unsigned ldm, EVO_EMU_LINE) {
    check_matrix("wmma::load_matrix_sync", p, ldm, line);
    load_elements<is_row_major<Layout>>(f, p, ldm);
}
template <int m, int n, int k, class T>
inline void load_matrix_sync(fragment<accumulator, m, n, k, T>& f, const T* p, unsigned ldm, layout_t layout,
                             EVO_EMU_LINE) {
    check_matrix("wmma::load_matrix_sync", p, ldm, line);
    layout == mem_row_major ? load_elements<true>(f, p, ldm) : load_elements<false>(f, p, ldm);
}
template <int m, int n, int k, class T>
inline void store_matrix_sync(T* p, const fragment<accumulator, m, n, k, T>& f, unsigned ldm, layout_t layout,
                              EVO_EMU_LINE) {
    check_matrix("wmma::store_matrix_sync", p, ldm, line);
    layout == mem_row_major ? store_elements<true>(p, f, ldm) : store_elements<false>(p, f, ldm);
}

template <class Use, int m, int n, int k, class T, class Layout>
inline void fill_fragment(fragment<Use, m, n, k, T, Layout>& f, evo_emu::Exactly<T> value) {
    for (int i = 0; i < f.num_elements; ++i) f.x[i] = value;
}

struct MmaOperands {
    void* d;
    const void *a, *b, *c;
};
// Compiled once, in the runtime.
template <int m, int n, class T, class Accumulator>
void multiply_accumulate(void* const* payloads, unsigned mask);

template <int m, int n, int k, class T, class LayoutA, class LayoutB, class Accumulator>
inline void mma_sync(fragment<accumulator, m, n, k, Accumulator>& d, const fragment<matrix_a, m, n, k, T, LayoutA>& a,
                     const fragment<matrix_b, m, n, k, T, LayoutB>& b,
                     const fragment<accumulator, m, n, k, Accumulator>& c, EVO_EMU_LINE) {
    MmaOperands operands{d.x, a.x, b.x, c.x};
    if (evo_emu::lane() == 0) evo_emu::visit(evo_emu::Visit::product, (unsigned long)line, false, 16);
    evo_emu::warp_rendezvous("wmma::mma_sync", line, 0xffffffffu, &operands, multiply_accumulate<m, n, T, Accumulator>);
}

}  // namespace nvcuda::wmma
