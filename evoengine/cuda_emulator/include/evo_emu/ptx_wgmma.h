// wgmma of 64 x columns x 16 with fp32 accumulators; the mnemonic's n becomes the template argument. Accumulators, and
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
    wgmma_begin(d.of, w);
}

template <unsigned columns, class D>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k16_f32_f16_f16(D d, unsigned long long a, unsigned long long b,
                                                             bool scale_d, int scale_a, int scale_b, int trans_a,
                                                             int trans_b, int line = __builtin_LINE()) {
    wgmma<columns>(d, {nullptr, a, b, scale_d, scale_a, scale_b, trans_a, trans_b, false}, line);
}
template <unsigned columns, class D, class A>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k16_f32_f16_f16(D d, Registers<A, 4> a, unsigned long long b, bool scale_d,
                                                             int scale_a, int scale_b, int trans_b,
                                                             int line = __builtin_LINE()) {
    wgmma<columns>(d, {(const unsigned* const*)a.of, 0, b, scale_d, scale_a, scale_b, 0, trans_b, false}, line);
}
template <unsigned columns, class D>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k16_f32_bf16_bf16(D d, unsigned long long a, unsigned long long b,
                                                               bool scale_d, int scale_a, int scale_b, int trans_a,
                                                               int trans_b, int line = __builtin_LINE()) {
    wgmma<columns>(d, {nullptr, a, b, scale_d, scale_a, scale_b, trans_a, trans_b, true}, line);
}
template <unsigned columns, class D, class A>
EVO_PTX void wgmma_mma_async_sync_aligned_m64k16_f32_bf16_bf16(D d, Registers<A, 4> a, unsigned long long b,
                                                               bool scale_d, int scale_a, int scale_b, int trans_b,
                                                               int line = __builtin_LINE()) {
    wgmma<columns>(d, {(const unsigned* const*)a.of, 0, b, scale_d, scale_a, scale_b, 0, trans_b, true}, line);
}

EVO_PTX void wgmma_fence_sync_aligned() { wgmma_fence(); }
EVO_PTX void wgmma_commit_group_sync_aligned() { wgmma_commit(); }
EVO_PTX void wgmma_wait_group_sync_aligned(unsigned groups_left, int line = __builtin_LINE()) {
    wgmma_wait(groups_left, line);
}

}  // namespace evo_emu::ptx
