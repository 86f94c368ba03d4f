// Accesses that threads of other blocks may see: the runtime hears of each before it is made (races.cpp).
#pragma once
#include <evo_emu/cuda.h>

namespace evo_emu {

// Not to be instrumented: the runtime knows of the access.
template <class T> __attribute__((no_sanitize("thread"))) inline T load_plainly(const volatile T* p) {
    T value;
    __builtin_memcpy(&value, (const void*)p, sizeof(T));
    return value;
}
template <class T> __attribute__((no_sanitize("thread"))) inline void store_plainly(volatile T* p, const T& value) {
    __builtin_memcpy((void*)p, &value, sizeof(T));
}

#if EVO_EMU_CHECKED
inline void need_checks() {}
#else
void need_checks();  // not there: build.py compiles the kernel once more
#endif

template <class T> inline T strong_load(const volatile T* p, Order order, Scope scope, int line) {
    need_checks();
    strong_access(p, sizeof(T), {order, scope, true, false, false, line});
    return load_plainly(p);
}
template <class T> inline void strong_store(volatile T* p, const T& value, Order order, Scope scope, int line) {
    need_checks();
    strong_access(p, sizeof(T), {order, scope, false, true, false, line});
    store_plainly(p, value);
}
// Threads switch only where they wait or look at memory, so what `change` makes of the old value is stored atomically.
template <class T, class Change>
inline T strong_update(volatile T* p, Change change, Order order, Scope scope, bool legacy, int line) {
    need_checks();
    strong_access(p, sizeof(T), {order, scope, true, true, legacy, line});
    const T old = load_plainly(p);
    store_plainly(p, T(change(old)));
    return old;
}

template <class T> struct WithoutVolatile { using type = T; };
template <class T> struct WithoutVolatile<volatile T> { using type = T; };
template <class T> using Plain = typename WithoutVolatile<T>::type;

// Operations of atomics: what becomes of the value.
struct Add { template <class T> static T apply(T old, T v) { return T(old + v); } };
struct Sub { template <class T> static T apply(T old, T v) { return T(old - v); } };
struct Max { template <class T> static T apply(T old, T v) { return old > v ? old : v; } };
struct Min { template <class T> static T apply(T old, T v) { return old < v ? old : v; } };
struct Or { template <class T> static T apply(T old, T v) { return T(old | v); } };
struct And { template <class T> static T apply(T old, T v) { return T(old & v); } };
struct Xor { template <class T> static T apply(T old, T v) { return T(old ^ v); } };
struct Exch { template <class T> static T apply(T, T v) { return v; } };
struct Inc { static unsigned apply(unsigned old, unsigned highest) { return old >= highest ? 0 : old + 1; } };
struct Dec {
    static unsigned apply(unsigned old, unsigned highest) { return old == 0 || old > highest ? highest : old - 1; }
};

}  // namespace evo_emu

// Relaxed, and of device scope unless their name says another.
#define EVO_EMU_ATOMIC_OF_SCOPE(name, operation, scope)                                                       \
    template <class T>                                                                                        \
    inline evo_emu::Plain<T> name(T* p, evo_emu::Exactly<evo_emu::Plain<T>> v, int line = __builtin_LINE()) { \
        return evo_emu::strong_update((evo_emu::Plain<T>*)p,                                                  \
                                      [v](auto old) { return evo_emu::operation::apply(old, v); },            \
                                      evo_emu::Order::relaxed, evo_emu::Scope::scope, true, line);            \
    }
#define EVO_EMU_ATOMIC(name)                                       \
    EVO_EMU_ATOMIC_OF_SCOPE(atomic##name, name, device)            \
    EVO_EMU_ATOMIC_OF_SCOPE(atomic##name##_block, name, block)     \
    EVO_EMU_ATOMIC_OF_SCOPE(atomic##name##_system, name, device)
EVO_EMU_ATOMIC(Add) EVO_EMU_ATOMIC(Sub) EVO_EMU_ATOMIC(Max) EVO_EMU_ATOMIC(Min) EVO_EMU_ATOMIC(Or)
EVO_EMU_ATOMIC(And) EVO_EMU_ATOMIC(Xor) EVO_EMU_ATOMIC(Exch) EVO_EMU_ATOMIC(Inc) EVO_EMU_ATOMIC(Dec)
#undef EVO_EMU_ATOMIC
#undef EVO_EMU_ATOMIC_OF_SCOPE

#define EVO_EMU_CAS(name, scope)                                                                              \
    template <class T>                                                                                        \
    inline evo_emu::Plain<T> name(T* p, evo_emu::Exactly<evo_emu::Plain<T>> expected,                         \
                                  evo_emu::Exactly<evo_emu::Plain<T>> desired, int line = __builtin_LINE()) { \
        return evo_emu::strong_update((evo_emu::Plain<T>*)p,                                                  \
                                      [=](auto old) { return old == expected ? desired : old; },              \
                                      evo_emu::Order::relaxed, evo_emu::Scope::scope, true, line);            \
    }
EVO_EMU_CAS(atomicCAS, device)
EVO_EMU_CAS(atomicCAS_block, block)
EVO_EMU_CAS(atomicCAS_system, device)
#undef EVO_EMU_CAS

// Vectors are atomic member by member (sm_90).
inline float2 atomicAdd(float2* p, float2 v, int line = __builtin_LINE()) {
    return evo_emu::strong_update(p, [v](float2 old) { return float2{old.x + v.x, old.y + v.y}; },
                                  evo_emu::Order::relaxed, evo_emu::Scope::device, true, line);
}
inline float4 atomicAdd(float4* p, float4 v, int line = __builtin_LINE()) {
    return evo_emu::strong_update(
        p, [v](float4 old) { return float4{old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w}; },
        evo_emu::Order::relaxed, evo_emu::Scope::device, true, line);
}
