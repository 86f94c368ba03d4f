// The PTX instructions the emulator knows. This file and those it includes are the table: the translator reads every
// function marked EVO_PTX, and an instruction `a.b::c.d` of inline assembly becomes a call of `a_b_c_d` with its
// operands in order. Outputs come by reference; `[address]` operands and immediates by value; `{r0, r1, …}` as
// evo_emu::Registers. What does not change what an instruction does here (cache hints, `::cta`) is dropped before the
// look-up.
#pragma once
#include <evo_emu/runtime.h>

namespace evo_emu {

// A brace list of PTX registers: pointers, so that one type serves outputs and inputs.
template <class T, unsigned n>
struct Registers {
    T* of[n];
    T& operator[](unsigned i) const { return *of[i]; }
};
template <class T> struct Value { using type = T; };
template <class T> struct Value<T&> { using type = T; };
template <class First, class... More>
inline Registers<typename Value<First>::type, 1 + sizeof...(More)> registers(First&& first, More&&... more) {
    using T = typename Value<First>::type;
    return {{&first, (T*)&more...}};
}

// `{c0, c1, …}` in `[map, {c0, c1, …}]`: the tile's first element, innermost dimension first.
template <unsigned n>
struct Coordinates {
    int of[n];
};
template <class... C>
inline Coordinates<sizeof...(C)> coordinates(C... c) {
    return {{int(c)...}};
}

// `[operand + bytes]`
template <class T>
inline T* displaced(T* p, long bytes) {
    return reinterpret_cast<T*>(reinterpret_cast<unsigned long>(p) + bytes);
}
template <class T>
inline T displaced(T address, long bytes) {
    return address + T(bytes);
}

}  // namespace evo_emu

namespace evo_emu::ptx {

#define EVO_PTX [[maybe_unused]] static inline

template <class Address>
inline const void* global_pointer(Address address) {
    return (const void*)address;
}

// cp.async (PTX ISA, data movement): `source_bytes` < `bytes` fills the rest with zeros.
template <class Address>
EVO_PTX void cp_async_ca_shared_global(unsigned shared, Address global, unsigned bytes, unsigned source_bytes = ~0u,
                                       int line = __builtin_LINE()) {
    if (bytes != 4 && bytes != 8 && bytes != 16) crash("cp.async.ca of %u bytes at line %d: 4, 8 or 16", bytes, line);
    copy_async(shared, global_pointer(global), bytes, source_bytes, line);
}
template <class Address>
EVO_PTX void cp_async_cg_shared_global(unsigned shared, Address global, unsigned bytes, unsigned source_bytes = ~0u,
                                       int line = __builtin_LINE()) {
    if (bytes != 16) crash("cp.async.cg of %u bytes at line %d: only 16 is legal", bytes, line);
    copy_async(shared, global_pointer(global), bytes, source_bytes, line);
}
EVO_PTX void cp_async_commit_group() { copy_async_commit(); }
EVO_PTX void cp_async_wait_group(unsigned groups_left, int line = __builtin_LINE()) {
    copy_async_wait(groups_left, line);
}
EVO_PTX void cp_async_wait_all(int line = __builtin_LINE()) { copy_async_wait_all(line); }

EVO_PTX void ex2_approx_f32(float& d, float a) { d = exp2f(a); }
EVO_PTX void ex2_approx_ftz_f32(float& d, float a) {
    constexpr float least = 0x1p-126f;
    float r = exp2f(__builtin_fabsf(a) < least ? 0.0f : a);
    d = r < least ? 0.0f : r;
}

// Each bit of `table` is the result for the bits of a, b and c that its number has.
EVO_PTX void lop3_b32(unsigned& d, unsigned a, unsigned b, unsigned c, unsigned table) {
    d = 0;
    for (unsigned i = 0; i < 8; ++i)
        if (table >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
}

EVO_PTX void bar_sync(unsigned id, unsigned threads = 0, int line = __builtin_LINE()) {
    named_barrier(id, threads, true, line);
}
EVO_PTX void barrier_sync(unsigned id, unsigned threads = 0, int line = __builtin_LINE()) {
    named_barrier(id, threads, true, line);
}
EVO_PTX void bar_arrive(unsigned id, unsigned threads, int line = __builtin_LINE()) {
    named_barrier(id, threads, false, line);
}
EVO_PTX void bar_warp_sync(unsigned mask, int line = __builtin_LINE()) {
    warp_rendezvous("bar.warp.sync", line, mask, nullptr, nullptr, true);
}

}  // namespace evo_emu::ptx

#include <evo_emu/ptx_barrier.h>
#include <evo_emu/ptx_bulk.h>
#include <evo_emu/ptx_matrix.h>
#include <evo_emu/ptx_wgmma.h>
