// Arithmetic functions of the CUDA C++ Programming Guide, on the host's libm. The fast variants (__expf …) come at full
// precision: a candidate's last bits are judged on the GPU, its logic here.
#pragma once

extern "C" {
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float powf(float, float) noexcept;
float tanhf(float) noexcept;
float sinf(float) noexcept;
float cosf(float) noexcept;
float erff(float) noexcept;
double exp(double) noexcept;
double log(double) noexcept;
}

inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float fmaxf(float a, float b) { return a > b || b != b ? a : b; }
inline float fminf(float a, float b) { return a < b || b != b ? a : b; }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float floorf(float x) { return __builtin_floorf(x); }
inline float ceilf(float x) { return __builtin_ceilf(x); }
inline float rintf(float x) { return __builtin_rintf(x); }
inline float truncf(float x) { return __builtin_truncf(x); }
inline float ldexpf(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
inline float fdividef(float a, float b) { return a / b; }

inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// The _rn forms are never contracted into an FMA; going through memory keeps the compiler from it.
inline float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
inline float __fsub_rn(float a, float b) { volatile float r = a - b; return r; }
inline float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

inline constexpr int max(int a, int b) { return a > b ? a : b; }
inline constexpr int min(int a, int b) { return a < b ? a : b; }
inline constexpr unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline constexpr unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline constexpr unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline constexpr unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline constexpr unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline constexpr unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline constexpr long max(long a, long b) { return a > b ? a : b; }
inline constexpr long min(long a, long b) { return a < b ? a : b; }
inline constexpr long long max(long long a, long long b) { return a > b ? a : b; }
inline constexpr long long min(long long a, long long b) { return a < b ? a : b; }
inline constexpr unsigned long max(unsigned long a, unsigned long b) { return a > b ? a : b; }
inline constexpr unsigned long min(unsigned long a, unsigned long b) { return a < b ? a : b; }
inline constexpr unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline constexpr unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return a > b || b != b ? a : b; }
inline double min(double a, double b) { return a < b || b != b ? a : b; }
inline int abs(int x) { return x < 0 ? -x : x; }

inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }

inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline int __float2int_rn(float x) { return int(__builtin_rintf(x)); }
inline int __float2int_rd(float x) { return int(__builtin_floorf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline int __mul24(int a, int b) { return a * b; }

template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }

// Threads switch only where they wait, so a plain read-modify-write is atomic here.
template <class T> inline T evo_emu_exchange(T* p, T desired) { T old = *p; *p = desired; return old; }
template <class T> inline T atomicAdd(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, T(*p + v)); }
template <class T> inline T atomicSub(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, T(*p - v)); }
template <class T> inline T atomicMax(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, *p > v ? *p : v); }
template <class T> inline T atomicMin(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, *p < v ? *p : v); }
template <class T> inline T atomicOr(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, T(*p | v)); }
template <class T> inline T atomicAnd(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, T(*p & v)); }
template <class T> inline T atomicExch(T* p, evo_emu::Exactly<T> v) { return evo_emu_exchange(p, v); }
template <class T> inline T atomicCAS(T* p, evo_emu::Exactly<T> expected, evo_emu::Exactly<T> desired) {
    return *p == expected ? evo_emu_exchange(p, desired) : *p;
}
