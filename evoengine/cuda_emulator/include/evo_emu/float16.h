// Arithmetic shared by half and bfloat16: CUDA's operators and intrinsics, every operation rounded to its type.
#pragma once
#include <evo_emu/cuda.h>

namespace evo_emu {

// Both types compute in float and round once. That is exact for + - * / (float carries more than twice the bits); a
// fused multiply-add goes through double, where the product is exact.
template <class T> inline T fused(T a, T b, T c) {
    return T(__builtin_fma(double(float(a)), double(float(b)), double(float(c))));
}

}  // namespace evo_emu

#define EVO_EMU_FLOAT16(T, T2)                                                                              \
    struct alignas(4) T2 {                                                                                  \
        T x, y;                                                                                             \
        T2() = default;                                                                                     \
        T2(T x, T y) : x(x), y(y) {}                                                                        \
    };                                                                                                      \
    inline T operator+(T a, T b) { return T(float(a) + float(b)); }                                         \
    inline T operator-(T a, T b) { return T(float(a) - float(b)); }                                         \
    inline T operator*(T a, T b) { return T(float(a) * float(b)); }                                         \
    inline T operator/(T a, T b) { return T(float(a) / float(b)); }                                         \
    inline T operator-(T a) { return T::from_bits(a.bits() ^ 0x8000); }                                     \
    inline T operator+(T a) { return a; }                                                                   \
    inline T& operator+=(T& a, T b) { return a = a + b; }                                                   \
    inline T& operator-=(T& a, T b) { return a = a - b; }                                                   \
    inline T& operator*=(T& a, T b) { return a = a * b; }                                                   \
    inline T& operator/=(T& a, T b) { return a = a / b; }                                                   \
    inline bool operator==(T a, T b) { return float(a) == float(b); }                                       \
    inline bool operator!=(T a, T b) { return float(a) != float(b); }                                       \
    inline bool operator<(T a, T b) { return float(a) < float(b); }                                         \
    inline bool operator>(T a, T b) { return float(a) > float(b); }                                         \
    inline bool operator<=(T a, T b) { return float(a) <= float(b); }                                       \
    inline bool operator>=(T a, T b) { return float(a) >= float(b); }                                       \
    inline T __hadd(T a, T b) { return a + b; }                                                             \
    inline T __hsub(T a, T b) { return a - b; }                                                             \
    inline T __hmul(T a, T b) { return a * b; }                                                             \
    inline T __hdiv(T a, T b) { return a / b; }                                                             \
    inline T __hfma(T a, T b, T c) { return evo_emu::fused(a, b, c); }                                      \
    inline T __hneg(T a) { return -a; }                                                                     \
    inline T __habs(T a) { return T::from_bits(a.bits() & 0x7fff); }                                        \
    inline T __hmax(T a, T b) { return T(fmaxf(float(a), float(b))); }                                      \
    inline T __hmin(T a, T b) { return T(fminf(float(a), float(b))); }                                      \
    inline bool __hlt(T a, T b) { return a < b; }                                                           \
    inline bool __hle(T a, T b) { return a <= b; }                                                          \
    inline bool __hgt(T a, T b) { return a > b; }                                                           \
    inline bool __hge(T a, T b) { return a >= b; }                                                          \
    inline bool __heq(T a, T b) { return a == b; }                                                          \
    inline bool __hne(T a, T b) { return a != b; }                                                          \
    inline bool __hisnan(T a) { return isnan(float(a)); }                                                   \
    inline int __hisinf(T a) { return isinf(float(a)) ? (float(a) > 0 ? 1 : -1) : 0; }                      \
    inline T hexp(T a) { return T(expf(float(a))); }                                                        \
    inline T hexp2(T a) { return T(exp2f(float(a))); }                                                      \
    inline T hlog(T a) { return T(logf(float(a))); }                                                        \
    inline T hlog2(T a) { return T(log2f(float(a))); }                                                      \
    inline T hrcp(T a) { return T(1.0f / float(a)); }                                                       \
    inline T hsqrt(T a) { return T(sqrtf(float(a))); }                                                      \
    inline T hrsqrt(T a) { return T(rsqrtf(float(a))); }                                                    \
    inline T2 operator+(T2 a, T2 b) { return {a.x + b.x, a.y + b.y}; }                                      \
    inline T2 operator-(T2 a, T2 b) { return {a.x - b.x, a.y - b.y}; }                                      \
    inline T2 operator*(T2 a, T2 b) { return {a.x * b.x, a.y * b.y}; }                                      \
    inline T2 operator/(T2 a, T2 b) { return {a.x / b.x, a.y / b.y}; }                                      \
    inline T2 operator-(T2 a) { return {-a.x, -a.y}; }                                                      \
    inline T2& operator+=(T2& a, T2 b) { return a = a + b; }                                                \
    inline T2& operator-=(T2& a, T2 b) { return a = a - b; }                                                \
    inline T2& operator*=(T2& a, T2 b) { return a = a * b; }                                                \
    inline T2 __hadd2(T2 a, T2 b) { return a + b; }                                                         \
    inline T2 __hsub2(T2 a, T2 b) { return a - b; }                                                         \
    inline T2 __hmul2(T2 a, T2 b) { return a * b; }                                                         \
    inline T2 __h2div(T2 a, T2 b) { return a / b; }                                                         \
    inline T2 __hneg2(T2 a) { return -a; }                                                                  \
    inline T2 __habs2(T2 a) { return {__habs(a.x), __habs(a.y)}; }                                          \
    inline T2 __hfma2(T2 a, T2 b, T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }          \
    inline T2 __hmax2(T2 a, T2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                          \
    inline T2 __hmin2(T2 a, T2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                          \
    inline T2 h2exp(T2 a) { return {hexp(a.x), hexp(a.y)}; }                                                \
    inline T2 h2exp2(T2 a) { return {hexp2(a.x), hexp2(a.y)}; }                                             \
    inline T2 h2rcp(T2 a) { return {hrcp(a.x), hrcp(a.y)}; }                                                \
    inline T2 h2log(T2 a) { return {hlog(a.x), hlog(a.y)}; }                                                \
    inline T2 h2log2(T2 a) { return {hlog2(a.x), hlog2(a.y)}; }                                             \
    inline T2 h2sqrt(T2 a) { return {hsqrt(a.x), hsqrt(a.y)}; }                                             \
    inline T2 h2rsqrt(T2 a) { return {hrsqrt(a.x), hrsqrt(a.y)}; }                                          \
    inline T hsin(T a) { return T(sinf(float(a))); }                                                        \
    inline T hcos(T a) { return T(cosf(float(a))); }                                                        \
    inline T htanh(T a) { return T(tanhf(float(a))); }                                                      \
    inline T2 h2tanh(T2 a) { return {htanh(a.x), htanh(a.y)}; }                                             \
    inline T hfloor(T a) { return T(floorf(float(a))); }                                                    \
    inline T hceil(T a) { return T(ceilf(float(a))); }                                                      \
    inline T hrint(T a) { return T(rintf(float(a))); }                                                      \
    inline T htrunc(T a) { return T(truncf(float(a))); }                                                    \
    inline float __low2float(T2 a) { return float(a.x); }                                                   \
    inline float __high2float(T2 a) { return float(a.y); }
