// Bits and whole numbers: the intrinsics of the CUDA C++ Programming Guide and the conversions to and from floats.
#pragma once

inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
inline double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }

// Beyond the range of the whole number the hardware gives its nearest end, and 0 for a float that is not a number.
template <class I, class F> inline I evo_emu_saturated(F x) {
    constexpr bool is_signed = I(-1) < I(0);
    constexpr I highest = is_signed ? I((1ull << (sizeof(I) * 8 - 1)) - 1) : I(-1);
    constexpr I lowest = is_signed ? I(-highest - 1) : I(0);
    if (x != x) return 0;
    return x >= F(highest) ? highest : x <= F(lowest) ? lowest : I(x);
}
#define EVO_EMU_TO_INTEGER(F, of, I, to)                                                                     \
    inline I __##of##2##to##_rn(F x) { return evo_emu_saturated<I>(rint(x)); }                               \
    inline I __##of##2##to##_rz(F x) { return evo_emu_saturated<I>(trunc(x)); }                              \
    inline I __##of##2##to##_rd(F x) { return evo_emu_saturated<I>(floor(x)); }                              \
    inline I __##of##2##to##_ru(F x) { return evo_emu_saturated<I>(ceil(x)); }
EVO_EMU_TO_INTEGER(float, float, int, int)
EVO_EMU_TO_INTEGER(float, float, unsigned, uint)
EVO_EMU_TO_INTEGER(float, float, long long, ll)
EVO_EMU_TO_INTEGER(float, float, unsigned long long, ull)
EVO_EMU_TO_INTEGER(double, double, int, int)
EVO_EMU_TO_INTEGER(double, double, unsigned, uint)
EVO_EMU_TO_INTEGER(double, double, long long, ll)
EVO_EMU_TO_INTEGER(double, double, unsigned long long, ull)
#undef EVO_EMU_TO_INTEGER
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline float __ull2float_rn(unsigned long long x) { return float(x); }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return double(x); }
inline float __double2float_rn(double x) { return float(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned long long __brevll(unsigned long long x) {
    unsigned long long reversed = 0;
    for (int i = 0; i < 64; ++i) reversed |= (x >> i & 1) << (63 - i);
    return reversed;
}
inline unsigned __brev(unsigned x) { return unsigned(__brevll(x) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
inline unsigned __sad(int a, int b, unsigned c) {
    return c + (a > b ? unsigned(a) - unsigned(b) : unsigned(b) - unsigned(a));
}
inline unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a > b ? a - b : b - a); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned chosen = 0;
    for (int i = 0; i < 4; ++i) chosen |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return chosen;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return unsigned(((unsigned long long)high << 32 | low) << (by & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return unsigned(((unsigned long long)high << 32 | low) >> (by & 31));
}
template <class Byte> inline int evo_emu_dot(unsigned a, unsigned b, int c) {
    for (int i = 0; i < 4; ++i) c += int(Byte(a >> 8 * i)) * int(Byte(b >> 8 * i));
    return c;
}
inline int __dp4a(int a, int b, int c) { return evo_emu_dot<signed char>(unsigned(a), unsigned(b), c); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    return unsigned(evo_emu_dot<unsigned char>(a, b, int(c)));
}
