// wgmma of 64 x columns x 16, of bytes x 32; the mnemonic's n becomes the template argument. Accumulators, and
// A in registers, are remembered by address until they are waited for, so they must be arrays that outlive the wait: in
// a function, take them by reference. See runtime/wgmma.cpp.
#pragma once
#include <evo_emu/runtime.h>

namespace evo_emu::ptx {

template <unsigned columns, class D> inline void wgmma(const D& d, Wgmma w, int line) {
    static_assert(sizeof d.of / sizeof d.of[0] == columns / 2 && columns % 8 == 0 && columns >= 8 && columns <= 256,
                  "an accumulator of 64 x n has n / 2 registers per thread, n a multiple of 8 up to 256");
    w.columns = columns;
    w.line = line;
    wgmma_begin((float* const*)d.of, w);
}

template <unsigned columns, class D>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k16_f32_f16_f16(D d, unsigned long long a, unsigned long long b,
                                                             bool scale_d, int scale_a, int scale_b, int trans_a,
                                                             int trans_b, int line = __builtin_LINE()) {
    wgmma<columns>(d, {nullptr, a, b, scale_d, scale_a, scale_b, trans_a, trans_b, Element::half}, line);
}
template <unsigned columns, class D, class A>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k16_f32_f16_f16(D d, Registers<A, 4> a, unsigned long long b, bool scale_d,
                                                             int scale_a, int scale_b, int trans_b,
                                                             int line = __builtin_LINE()) {
    wgmma<columns>(d, {(const unsigned* const*)a.of, 0, b, scale_d, scale_a, scale_b, 0, trans_b, Element::half}, line);
}
template <unsigned columns, class D>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k16_f32_bf16_bf16(D d, unsigned long long a, unsigned long long b,
                                                               bool scale_d, int scale_a, int scale_b, int trans_a,
                                                               int trans_b, int line = __builtin_LINE()) {
    wgmma<columns>(d, {nullptr, a, b, scale_d, scale_a, scale_b, trans_a, trans_b, Element::bfloat16}, line);
}
template <unsigned columns, class D, class A>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k16_f32_bf16_bf16(D d, Registers<A, 4> a, unsigned long long b,
                                                               bool scale_d, int scale_a, int scale_b, int trans_b,
                                                               int line = __builtin_LINE()) {
    wgmma<columns>(d, {(const unsigned* const*)a.of, 0, b, scale_d, scale_a, scale_b, 0, trans_b, Element::bfloat16}, line);
}

template <unsigned columns, class D>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k32_f32_e4m3_e4m3(D d, unsigned long long a, unsigned long long b,
                                                                bool scale_d, int scale_a, int scale_b,
                                                                int line = __builtin_LINE()) {
    wgmma<columns>(d, {nullptr, a, b, scale_d, scale_a, scale_b, 0, 0, Element::e4m3}, line);
}
template <unsigned columns, class D, class A>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k32_f32_e4m3_e4m3(D d, Registers<A, 4> a, unsigned long long b,
                                                                bool scale_d, int scale_a, int scale_b,
                                                                int line = __builtin_LINE()) {
    wgmma<columns>(d, {(const unsigned* const*)a.of, 0, b, scale_d, scale_a, scale_b, 0, 0, Element::e4m3}, line);
}
template <unsigned columns, class D>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k32_f32_e5m2_e5m2(D d, unsigned long long a, unsigned long long b,
                                                                bool scale_d, int scale_a, int scale_b,
                                                                int line = __builtin_LINE()) {
    wgmma<columns>(d, {nullptr, a, b, scale_d, scale_a, scale_b, 0, 0, Element::e5m2}, line);
}
template <unsigned columns, class D, class A>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k32_f32_e5m2_e5m2(D d, Registers<A, 4> a, unsigned long long b,
                                                                bool scale_d, int scale_a, int scale_b,
                                                                int line = __builtin_LINE()) {
    wgmma<columns>(d, {(const unsigned* const*)a.of, 0, b, scale_d, scale_a, scale_b, 0, 0, Element::e5m2}, line);
}
template <unsigned columns, class D>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k32_s32_s8_s8(D d, unsigned long long a, unsigned long long b,
                                                           bool scale_d, int line = __builtin_LINE()) {
    wgmma<columns>(d, {nullptr, a, b, scale_d, 1, 1, 0, 0, Element::s8}, line);
}
template <unsigned columns, class D, class A>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k32_s32_s8_s8(D d, Registers<A, 4> a, unsigned long long b, bool scale_d,
                                                           int line = __builtin_LINE()) {
    wgmma<columns>(d, {(const unsigned* const*)a.of, 0, b, scale_d, 1, 1, 0, 0, Element::s8}, line);
}

EVO_PTX void wgmma_fence_sync_aligned() { wgmma_fence(); }
EVO_PTX void wgmma_commit_group_sync_aligned() { wgmma_commit(); }
EVO_PTX void wgmma_wait_group_sync_aligned(unsigned groups_left, int line = __builtin_LINE()) {
    wgmma_wait(groups_left, line);
}

}  // namespace evo_emu::ptx
