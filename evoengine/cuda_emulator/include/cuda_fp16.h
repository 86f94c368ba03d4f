// half: the compiler's _Float16, with CUDA's names.
#pragma once
#include <evo_emu/float16.h>

struct alignas(2) __half {
    _Float16 value;

    __half() = default;
    __half(float f) : value(_Float16(f)) {}
    __half(double d) : value(_Float16(d)) {}
    __half(int i) : value(_Float16(float(i))) {}
    __half(unsigned u) : value(_Float16(float(u))) {}
    operator float() const { return float(value); }

    unsigned short bits() const { return __builtin_bit_cast(unsigned short, value); }
    static __half from_bits(unsigned short bits) {
        __half h;
        h.value = __builtin_bit_cast(_Float16, bits);
        return h;
    }
};
EVO_EMU_FLOAT16(__half, __half2)
using half = __half;
using half2 = __half2;
using __half_raw = unsigned short;

inline __half __float2half(float f) { return __half(f); }
inline __half __float2half_rn(float f) { return __half(f); }
inline __half __double2half(double d) { return __half(d); }
inline float __half2float(__half h) { return float(h); }
inline __half __int2half_rn(int i) { return __half(i); }
inline __half __uint2half_rn(unsigned u) { return __half(u); }
inline int __half2int_rn(__half h) { return __float2int_rn(float(h)); }
inline int __half2int_rz(__half h) { return int(float(h)); }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float2half2_rn(float f) { return {__half(f), __half(f)}; }
inline __half2 __float22half2_rn(float2 f) { return {__half(f.x), __half(f.y)}; }
inline float2 __half22float2(__half2 h) { return {float(h.x), float(h.y)}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half h) { return {h, h}; }
inline __half __low2half(__half2 h) { return h.x; }
inline __half __high2half(__half2 h) { return h.y; }
inline __half2 __lows2half2(__half2 a, __half2 b) { return {a.x, b.x}; }
inline __half2 __highs2half2(__half2 a, __half2 b) { return {a.y, b.y}; }
inline __half2 __lowhigh2highlow(__half2 h) { return {h.y, h.x}; }
inline unsigned short __half_as_ushort(__half h) { return h.bits(); }
inline short __half_as_short(__half h) { return short(h.bits()); }
inline __half __ushort_as_half(unsigned short bits) { return __half::from_bits(bits); }
inline __half __short_as_half(short bits) { return __half::from_bits((unsigned short)bits); }
