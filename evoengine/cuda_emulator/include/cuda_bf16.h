// bfloat16: the upper half of a float, rounded to nearest even.
#pragma once
#include <evo_emu/float16.h>

struct alignas(2) __nv_bfloat16 {
    unsigned short value;

    __nv_bfloat16() = default;
    __nv_bfloat16(float f) {
        unsigned bits = __float_as_uint(f);
        value = isnan(f) ? 0x7fff : (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    // Through float rounded to odd, so that the second rounding sees what the first one dropped.
    __nv_bfloat16(double d) : __nv_bfloat16(round_to_odd(d)) {}
    __nv_bfloat16(int i) : __nv_bfloat16(double(i)) {}
    __nv_bfloat16(unsigned u) : __nv_bfloat16(double(u)) {}
    operator float() const { return __uint_as_float(unsigned(value) << 16); }

    unsigned short bits() const { return value; }
    static __nv_bfloat16 from_bits(unsigned short bits) {
        __nv_bfloat16 b;
        b.value = bits;
        return b;
    }
    static float round_to_odd(double d) {
        float f = float(d);
        if (double(f) == d || isnan(f) || isinf(f)) return f;
        unsigned bits = __float_as_uint(f);
        bool away = __builtin_fabs(double(f)) > __builtin_fabs(d);
        return __uint_as_float((away ? bits - 1 : bits) | 1);
    }
};
EVO_EMU_FLOAT16(__nv_bfloat16, __nv_bfloat162)
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __double2bfloat16(double d) { return __nv_bfloat16(d); }
inline float __bfloat162float(__nv_bfloat16 b) { return float(b); }
inline __nv_bfloat16 __int2bfloat16_rn(int i) { return __nv_bfloat16(i); }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float2bfloat162_rn(float f) { return {__nv_bfloat16(f), __nv_bfloat16(f)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 f) { return {__nv_bfloat16(f.x), __nv_bfloat16(f.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 b) { return {float(b.x), float(b.y)}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 b) { return {b, b}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 b) { return b.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 b) { return b.y; }
inline __nv_bfloat162 __lowhigh2highlow(__nv_bfloat162 b) { return {b.y, b.x}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.bits(); }
inline short __bfloat16_as_short(__nv_bfloat16 b) { return short(b.bits()); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16::from_bits(bits); }
inline __nv_bfloat16 __short_as_bfloat16(short bits) { return __nv_bfloat16::from_bits((unsigned short)bits); }
