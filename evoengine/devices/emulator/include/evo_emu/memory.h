// Loads and stores with a cache hint, which changes nothing here, and atomics.
#pragma once
#include <evo_emu/runtime.h>

#define EVO_EMU_LOAD(name) \
    template <class T> inline T name(const T* p) { return *p; }
#define EVO_EMU_STORE(name) \
    template <class T> inline void name(T* p, evo_emu::Exactly<T> v) { *p = v; }
EVO_EMU_LOAD(__ldg) EVO_EMU_LOAD(__ldcg) EVO_EMU_LOAD(__ldca) EVO_EMU_LOAD(__ldcs)
EVO_EMU_LOAD(__ldlu) EVO_EMU_LOAD(__ldcv)
EVO_EMU_STORE(__stcg) EVO_EMU_STORE(__stcs) EVO_EMU_STORE(__stwb) EVO_EMU_STORE(__stwt)
#undef EVO_EMU_LOAD
#undef EVO_EMU_STORE

// Threads switch only where they wait, so a plain read-modify-write is atomic here.
template <class T> inline T evo_emu_exchange(T* p, T desired) { T old = *p; *p = desired; return old; }
template <class T> inline T atomicAdd(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, T(*p + v)); }
template <class T> inline T atomicSub(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, T(*p - v)); }
template <class T> inline T atomicMax(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, *p > v ? *p : v); }
template <class T> inline T atomicMin(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, *p < v ? *p : v); }
template <class T> inline T atomicOr(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, T(*p | v)); }
template <class T> inline T atomicAnd(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, T(*p & v)); }
template <class T> inline T atomicXor(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, T(*p ^ v)); }
template <class T> inline T atomicExch(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, v); }
template <class T> inline T atomicCAS(T* p, evo_emu::Exactly<T> expected, evo_emu::Exactly<T> desired) {
    return *p == expected ? evo_emu_exchange(p, desired) : *p;
}
inline unsigned atomicInc(unsigned* p, unsigned highest) { return evo_emu_exchange(p, *p >= highest ? 0 : *p + 1); }
inline unsigned atomicDec(unsigned* p, unsigned highest) {
    return evo_emu_exchange(p, *p == 0 || *p > highest ? highest : *p - 1);
}
// Vectors are atomic member by member (sm_90).
inline float2 atomicAdd(float2* p, float2 v) { return evo_emu_exchange(p, {p->x + v.x, p->y + v.y}); }
inline float4 atomicAdd(float4* p, float4 v) {
    return evo_emu_exchange(p, {p->x + v.x, p->y + v.y, p->z + v.z, p->w + v.w});
}
#define EVO_EMU_SCOPED(name)                                                                                   \
    template <class T> inline T name##_block(T* p, evo_emu::Exactly<T> v) { return name(p, v); }              \
    template <class T> inline T name##_system(T* p, evo_emu::Exactly<T> v) { return name(p, v); }
EVO_EMU_SCOPED(atomicAdd) EVO_EMU_SCOPED(atomicSub) EVO_EMU_SCOPED(atomicMax) EVO_EMU_SCOPED(atomicMin)
EVO_EMU_SCOPED(atomicOr) EVO_EMU_SCOPED(atomicAnd) EVO_EMU_SCOPED(atomicXor) EVO_EMU_SCOPED(atomicExch)
#undef EVO_EMU_SCOPED
