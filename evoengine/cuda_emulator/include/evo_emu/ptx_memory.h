// Loads, stores, atomics and fences of PTX. The translator hands order, scope and type of an instruction over as
// template arguments: `ld.acquire.gpu.global.u32` becomes ld<Order::acquire, Scope::device, unsigned>. Weak accesses
// are what the compiler makes of them.
#pragma once
#include <evo_emu/atomics.h>

namespace evo_emu::ptx {

// Register and memory may differ in type and width: of equal width they hold the same bits.
template <class To, class From> inline To as_register(const From& from) {
    if constexpr (sizeof(To) == sizeof(From)) return __builtin_bit_cast(To, from);
    else return To(from);
}

template <bool shared, class T, class Address> inline T* place(Address address, int line) {
    if constexpr (shared) return static_cast<T*>(shared_access(unsigned((unsigned long)address), line));
    else return (T*)address;
}

template <Order order, Scope scope, class T> inline T load_at(T* p, int line) {
    if constexpr (scope == Scope::weak) return *p;
    else return strong_load(p, order, scope, line);
}
template <Order order, Scope scope, class T> inline void store_at(T* p, T value, int line) {
    if constexpr (scope == Scope::weak) *p = value;
    else strong_store(p, value, order, scope, line);
}

template <Order order, Scope scope, class T, bool shared, class D, class Address>
EVO_PTX void ld(D& d, Address address, int line = __builtin_LINE()) {
    d = as_register<D>(load_at<order, scope>(place<shared, T>(address, line), line));
}
template <Order order, Scope scope, class T, bool shared, class D, unsigned n, class Address>
EVO_PTX void ld(const Registers<D, n>& d, Address address, int line = __builtin_LINE()) {
    T* p = place<shared, T>(address, line);
    for (unsigned i = 0; i < n; ++i) d[i] = as_register<D>(load_at<order, scope>(p + i, line));
}
// By the read-only cache.
template <Order, Scope, class T, bool shared, class D, class Address>
EVO_PTX void ld_nc(D& d, Address address, int line = __builtin_LINE()) {
    d = as_register<D>(__ldg(place<shared, T>(address, line), line));
}
template <Order, Scope, class T, bool shared, class D, unsigned n, class Address>
EVO_PTX void ld_nc(const Registers<D, n>& d, Address address, int line = __builtin_LINE()) {
    T* p = place<shared, T>(address, line);
    for (unsigned i = 0; i < n; ++i) d[i] = as_register<D>(__ldg(p + i, line));
}
template <Order order, Scope scope, class T, bool shared, class Address, class X>
EVO_PTX void st(Address address, const X& value, int line = __builtin_LINE()) {
    store_at<order, scope>(place<shared, T>(address, line), as_register<T>(value), line);
}
template <Order order, Scope scope, class T, bool shared, class Address, class X, unsigned n>
EVO_PTX void st(Address address, const Registers<X, n>& values, int line = __builtin_LINE()) {
    T* p = place<shared, T>(address, line);
    for (unsigned i = 0; i < n; ++i) store_at<order, scope>(p + i, as_register<T>(values[i]), line);
}

template <class Operation, Order order, Scope scope, class T, bool shared, class Address, class X>
inline T update(Address address, const X& v, int line) {
    auto change = [&](T old) { return Operation::apply(old, as_register<T>(v)); };
    return strong_update(place<shared, T>(address, line), change, order, scope, false, line);
}

template <Order order, Scope scope, class T, bool shared, class D, class Address, class X>
EVO_PTX void atom_add(D&& d, Address address, const X& v, int line = __builtin_LINE()) {
    d = update<Add, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class D, class Address, class X>
EVO_PTX void atom_inc(D&& d, Address address, const X& v, int line = __builtin_LINE()) {
    d = update<Inc, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class D, class Address, class X>
EVO_PTX void atom_dec(D&& d, Address address, const X& v, int line = __builtin_LINE()) {
    d = update<Dec, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class D, class Address, class X>
EVO_PTX void atom_exch(D&& d, Address address, const X& v, int line = __builtin_LINE()) {
    d = update<Exch, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class D, class Address, class X>
EVO_PTX void atom_min(D&& d, Address address, const X& v, int line = __builtin_LINE()) {
    d = update<Min, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class D, class Address, class X>
EVO_PTX void atom_max(D&& d, Address address, const X& v, int line = __builtin_LINE()) {
    d = update<Max, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class D, class Address, class X>
EVO_PTX void atom_and(D&& d, Address address, const X& v, int line = __builtin_LINE()) {
    d = update<And, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class D, class Address, class X>
EVO_PTX void atom_or(D&& d, Address address, const X& v, int line = __builtin_LINE()) {
    d = update<Or, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class D, class Address, class X>
EVO_PTX void atom_xor(D&& d, Address address, const X& v, int line = __builtin_LINE()) {
    d = update<Xor, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class D, class Address, class E, class X>
EVO_PTX void atom_cas(D&& d, Address address, const E& expected, const X& desired, int line = __builtin_LINE()) {
    auto change = [&](T old) { return old == as_register<T>(expected) ? as_register<T>(desired) : old; };
    d = strong_update(place<shared, T>(address, line), change, order, scope, false, line);
}

template <Order order, Scope scope, class T, bool shared, class Address, class X>
EVO_PTX void red_add(Address address, const X& v, int line = __builtin_LINE()) {
    update<Add, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class Address, class X>
EVO_PTX void red_inc(Address address, const X& v, int line = __builtin_LINE()) {
    update<Inc, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class Address, class X>
EVO_PTX void red_dec(Address address, const X& v, int line = __builtin_LINE()) {
    update<Dec, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class Address, class X>
EVO_PTX void red_min(Address address, const X& v, int line = __builtin_LINE()) {
    update<Min, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class Address, class X>
EVO_PTX void red_max(Address address, const X& v, int line = __builtin_LINE()) {
    update<Max, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class Address, class X>
EVO_PTX void red_and(Address address, const X& v, int line = __builtin_LINE()) {
    update<And, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class Address, class X>
EVO_PTX void red_or(Address address, const X& v, int line = __builtin_LINE()) {
    update<Or, order, scope, T, shared>(address, v, line);
}
template <Order order, Scope scope, class T, bool shared, class Address, class X>
EVO_PTX void red_xor(Address address, const X& v, int line = __builtin_LINE()) {
    update<Xor, order, scope, T, shared>(address, v, line);
}

template <Scope scope> EVO_PTX void membar(int line = __builtin_LINE()) { fence(scope, line); }

}  // namespace evo_emu::ptx
