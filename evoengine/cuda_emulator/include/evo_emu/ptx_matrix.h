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
EVO_PTX void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(D d, A a, B b, C c, int line = __builtin_LINE()) {
    multiply_m16n8k16({d.of, (const unsigned* const*)a.of, (const unsigned* const*)b.of, c.of}, false, line);
}
template <class D, class A, class B, class C>
EVO_PTX void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(D d, A a, B b, C c, int line = __builtin_LINE()) {
    multiply_m16n8k16({d.of, (const unsigned* const*)a.of, (const unsigned* const*)b.of, c.of}, true, line);
}

}  // namespace evo_emu::ptx
