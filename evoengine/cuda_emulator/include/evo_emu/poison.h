// What a kernel has not set: NaN as float, half and bfloat16. Larger things are 0xFF throughout. Small ones are 0xFFFD
// in every half word: as whole numbers they are then far from any index or count, which -1 is not.
#pragma once

namespace evo_emu {

template <class T> constexpr void poison_one(T& x) {
    if (__builtin_is_constant_evaluated()) return;
    if constexpr (__is_trivially_constructible(T)) {
        constexpr unsigned long long small = 0xfffdfffdfffdfffd;
        if constexpr (sizeof(T) <= sizeof small)
            __builtin_memcpy((void*)__builtin_addressof(x), &small, sizeof(T));
        else
            __builtin_memset((void*)__builtin_addressof(x), 0xff, sizeof(T));
    }
}

template <class... T> constexpr void poison(T&... x) { (poison_one(x), ...); }

// The first member of a class with a constructor: fills the object before the constructor sets what it sets.
template <class T> struct Poison {
    constexpr Poison(T* object) {
        if (__builtin_is_constant_evaluated()) return;
        if constexpr (!__is_polymorphic(T)) __builtin_memset((void*)object, 0xff, sizeof(T));
    }
};

}  // namespace evo_emu
