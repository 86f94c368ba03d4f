// Arithmetic functions of the CUDA C++ Programming Guide, on the host's libm. The fast variants (__expf …) come at full
// precision: a candidate's last bits are judged on the GPU, its logic here.
#pragma once

#define EVO_EMU_LIBM(name)           \
    extern "C" float name##f(float) noexcept; \
    extern "C" double name(double) noexcept;  \
    inline float name(float x) { return name##f(x); }
#define EVO_EMU_LIBM2(name)                  \
    extern "C" float name##f(float, float) noexcept; \
    extern "C" double name(double, double) noexcept; \
    inline float name(float x, float y) { return name##f(x, y); }
EVO_EMU_LIBM(exp) EVO_EMU_LIBM(exp2) EVO_EMU_LIBM(exp10) EVO_EMU_LIBM(expm1)
EVO_EMU_LIBM(log) EVO_EMU_LIBM(log2) EVO_EMU_LIBM(log10) EVO_EMU_LIBM(log1p) EVO_EMU_LIBM(logb)
EVO_EMU_LIBM(sin) EVO_EMU_LIBM(cos) EVO_EMU_LIBM(tan) EVO_EMU_LIBM(asin) EVO_EMU_LIBM(acos) EVO_EMU_LIBM(atan)
EVO_EMU_LIBM(sinh) EVO_EMU_LIBM(cosh) EVO_EMU_LIBM(tanh) EVO_EMU_LIBM(asinh) EVO_EMU_LIBM(acosh) EVO_EMU_LIBM(atanh)
EVO_EMU_LIBM(erf) EVO_EMU_LIBM(erfc) EVO_EMU_LIBM(tgamma) EVO_EMU_LIBM(lgamma) EVO_EMU_LIBM(cbrt)
EVO_EMU_LIBM2(pow) EVO_EMU_LIBM2(atan2) EVO_EMU_LIBM2(hypot) EVO_EMU_LIBM2(fmod) EVO_EMU_LIBM2(remainder)
EVO_EMU_LIBM2(fdim) EVO_EMU_LIBM2(nextafter)
#undef EVO_EMU_LIBM
#undef EVO_EMU_LIBM2

#define EVO_EMU_BUILTIN(name)                                   \
    inline float name##f(float x) { return __builtin_##name##f(x); } \
    inline float name(float x) { return __builtin_##name##f(x); }    \
    inline double name(double x) { return __builtin_##name(x); }
EVO_EMU_BUILTIN(sqrt) EVO_EMU_BUILTIN(fabs) EVO_EMU_BUILTIN(floor) EVO_EMU_BUILTIN(ceil) EVO_EMU_BUILTIN(rint)
EVO_EMU_BUILTIN(nearbyint) EVO_EMU_BUILTIN(trunc) EVO_EMU_BUILTIN(round)
#undef EVO_EMU_BUILTIN

inline float pow(float x, int y) { return powf(x, float(y)); }
inline double pow(double x, int y) { return pow(x, double(y)); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float fmaxf(float a, float b) { return a > b || b != b ? a : b; }
inline float fminf(float a, float b) { return a < b || b != b ? a : b; }
inline float fmax(float a, float b) { return fmaxf(a, b); }
inline float fmin(float a, float b) { return fminf(a, b); }
inline double fmax(double a, double b) { return a > b || b != b ? a : b; }
inline double fmin(double a, double b) { return a < b || b != b ? a : b; }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
inline float rhypotf(float x, float y) { return 1.0f / hypotf(x, y); }
inline float norm3df(float x, float y, float z) { return __builtin_sqrtf(x * x + y * y + z * z); }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
inline float sinpif(float x) { return float(sin(x * 3.14159265358979323846)); }
inline float cospif(float x) { return float(cos(x * 3.14159265358979323846)); }
inline void sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline void sincos(double x, double* s, double* c) { *s = sin(x), *c = cos(x); }
inline float ldexpf(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
inline float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
inline float scalbnf(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
inline float frexpf(float x, int* exponent) { return __builtin_frexpf(x, exponent); }
inline float modff(float x, float* whole) { return __builtin_modff(x, whole); }
inline int ilogbf(float x) { return __builtin_ilogbf(x); }
inline float copysignf(float x, float sign) { return __builtin_copysignf(x, sign); }
inline float copysign(float x, float sign) { return __builtin_copysignf(x, sign); }
inline double copysign(double x, double sign) { return __builtin_copysign(x, sign); }
inline long lroundf(float x) { return long(__builtin_roundf(x)); }
inline long lrintf(float x) { return long(__builtin_rintf(x)); }
inline float fdividef(float a, float b) { return a / b; }

inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline void __sincosf(float x, float* s, float* c) { sincosf(x, s, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double x) { return 1.0 / x; }
inline double __dsqrt_rn(double x) { return __builtin_sqrt(x); }
// The _rn forms are never contracted into an FMA; going through memory keeps the compiler from it.
inline float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
inline float __fsub_rn(float a, float b) { volatile float r = a - b; return r; }
inline float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
inline double __dadd_rn(double a, double b) { volatile double r = a + b; return r; }
inline double __dsub_rn(double a, double b) { volatile double r = a - b; return r; }
inline double __dmul_rn(double a, double b) { volatile double r = a * b; return r; }
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
inline constexpr unsigned long max(long a, unsigned long b) { return max((unsigned long)a, b); }
inline constexpr unsigned long max(unsigned long a, long b) { return max(a, (unsigned long)b); }
inline constexpr unsigned long min(long a, unsigned long b) { return min((unsigned long)a, b); }
inline constexpr unsigned long min(unsigned long a, long b) { return min(a, (unsigned long)b); }
inline constexpr unsigned long long max(long long a, unsigned long long b) { return max((unsigned long long)a, b); }
inline constexpr unsigned long long max(unsigned long long a, long long b) { return max(a, (unsigned long long)b); }
inline constexpr unsigned long long min(long long a, unsigned long long b) { return min((unsigned long long)a, b); }
inline constexpr unsigned long long min(unsigned long long a, long long b) { return min(a, (unsigned long long)b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(double(a), b); }
inline double min(float a, double b) { return fmin(double(a), b); }
inline double max(double a, float b) { return fmax(a, double(b)); }
inline double min(double a, float b) { return fmin(a, double(b)); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline long labs(long x) { return abs(x); }
inline long long llabs(long long x) { return abs(x); }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }

inline bool isnan(float x) { return x != x; }
inline bool isnan(double x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool signbit(double x) { return __builtin_signbit(x); }
