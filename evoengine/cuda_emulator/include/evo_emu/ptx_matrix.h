// Warp-level matrix instructions: ldmatrix, stmatrix and mma.sync, whose lanes meet. See runtime/matrix.cpp.
#pragma once
#include <evo_emu/runtime.h>

namespace evo_emu::ptx {

#define EVO_EMU_MATRICES(store, transposed) \
    store((unsigned* const*)r.of, sizeof r / sizeof r.of[0], transposed, shared, line)

template <class R>
EVO_PTX void ldmatrix_sync_aligned_m8n8_x1_shared_b16(R r, unsigned shared, int line = __builtin_LINE()) {
    EVO_EMU_MATRICES(load_matrices, false);
}
template <class R>
EVO_PTX void ldmatrix_sync_aligned_m8n8_x2_shared_b16(R r, unsigned shared, int line = __builtin_LINE()) {
    EVO_EMU_MATRICES(load_matrices, false);
}
template <class R>
EVO_PTX void ldmatrix_sync_aligned_m8n8_x4_shared_b16(R r, unsigned shared, int line = __builtin_LINE()) {
    EVO_EMU_MATRICES(load_matrices, false);
}
template <class R>
EVO_PTX void ldmatrix_sync_aligned_m8n8_x1_trans_shared_b16(R r, unsigned shared, int line = __builtin_LINE()) {
    EVO_EMU_MATRICES(load_matrices, true);
}
template <class R>
EVO_PTX void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(R r, unsigned shared, int line = __builtin_LINE()) {
    EVO_EMU_MATRICES(load_matrices, true);
}
template <class R>
EVO_PTX void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(R r, unsigned shared, int line = __builtin_LINE()) {
    EVO_EMU_MATRICES(load_matrices, true);
}
template <class R>
EVO_PTX void stmatrix_sync_aligned_m8n8_x1_shared_b16(unsigned shared, R r, int line = __builtin_LINE()) {
    EVO_EMU_MATRICES(store_matrices, false);
}
template <class R>
EVO_PTX void stmatrix_sync_aligned_m8n8_x2_shared_b16(unsigned shared, R r, int line = __builtin_LINE()) {
    EVO_EMU_MATRICES(store_matrices, false);
}
template <class R>
EVO_PTX void stmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned shared, R r, int line = __builtin_LINE()) {
    EVO_EMU_MATRICES(store_matrices, false);
}
template <class R>
EVO_PTX void stmatrix_sync_aligned_m8n8_x1_trans_shared_b16(unsigned shared, R r, int line = __builtin_LINE()) {
    EVO_EMU_MATRICES(store_matrices, true);
}
template <class R>
EVO_PTX void stmatrix_sync_aligned_m8n8_x2_trans_shared_b16(unsigned shared, R r, int line = __builtin_LINE()) {
    EVO_EMU_MATRICES(store_matrices, true);
}
template <class R>
EVO_PTX void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned shared, R r, int line = __builtin_LINE()) {
    EVO_EMU_MATRICES(store_matrices, true);
}
#undef EVO_EMU_MATRICES

template <class D, class A, class B, class C>
inline void mma_m16n8(const D& d, const A& a, const B& b, const C& c, Element element, int line) {
    auto words = [](const auto& registers) { return (const unsigned* const*)registers.of; };
    multiply_m16n8({(float* const*)d.of, words(a), words(b), (const float* const*)c.of}, element, line);
}
template <class D, class A, class B, class C>
EVO_PTX void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(D d, A a, B b, C c, int line = __builtin_LINE()) {
    mma_m16n8(d, a, b, c, Element::half, line);
}
template <class D, class A, class B, class C>
EVO_PTX void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(D d, A a, B b, C c, int line = __builtin_LINE()) {
    mma_m16n8(d, a, b, c, Element::bfloat16, line);
}
template <class D, class A, class B, class C>
EVO_PTX void mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32(D d, A a, B b, C c, int line = __builtin_LINE()) {
    mma_m16n8(d, a, b, c, Element::e4m3, line);
}
template <class D, class A, class B, class C>
EVO_PTX void mma_sync_aligned_m16n8k32_row_col_f32_e5m2_e5m2_f32(D d, A a, B b, C c, int line = __builtin_LINE()) {
    mma_m16n8(d, a, b, c, Element::e5m2, line);
}
template <class D, class A, class B, class C>
EVO_PTX void mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(D d, A a, B b, C c, int line = __builtin_LINE()) {
    mma_m16n8(d, a, b, c, Element::s8, line);
}

}  // namespace evo_emu::ptx
