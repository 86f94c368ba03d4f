// Rounding, comparison and conversion of floats: shared by the files of floating-point opcodes.
#pragma once

#include <bit>
#include <cfenv>
#include <cmath>

#include "lanes.h"

namespace sass {

constexpr u32 NAN_BITS = 0x7fffffffu;  // the NaN that arithmetic returns

inline u32 canonical(float f) { return f != f ? NAN_BITS : as_bits(f); }
inline u32 flush(u32 bits) { return (bits & 0x7f800000u) ? bits : bits & 0x80000000u; }
inline u32 saturate(u32 bits) {
  const float f = as_float(bits);
  return !(f > 0) ? 0 : f > 1 ? as_bits(1.0f) : bits;
}

enum Rounding { NEAREST, DOWN, UPWARD, TRUNCATE };
inline int take_rounding(Modifiers& m) {
  static const char* const ROUNDINGS[] = {"RN", "RM", "RP", "RZ", nullptr};
  return std::max(0, take_one(m, ROUNDINGS));
}

// Sets the rounding of arithmetic during its lifetime. The barriers keep the compiler from moving arithmetic on memory
// out of it.
class Rounded {
 public:
  explicit Rounded(int rounding) : before_(std::fegetround()) {
    static const int MODES[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
    std::fesetround(MODES[rounding]);
    __asm__ volatile("" ::: "memory");
  }
  ~Rounded() {
    __asm__ volatile("" ::: "memory");
    std::fesetround(before_);
  }
  Rounded(const Rounded&) = delete;
  Rounded& operator=(const Rounded&) = delete;

 private:
  int before_;
};

// The result of an operation x y + z on doubles that is NaN: the NaN among its sources, quiet and with its own sign;
// that of x only if no other source is NaN.
constexpr u64 DOUBLE_NAN = 0xfff8000000000000ull;
inline u64 carried_nan(u64 x, u64 y, u64 z) {
  for (u64 source : {y, z, x})
    if (source << 1 > 0x7ff0000000000000ull << 1) return source | 1ull << 51;
  return DOUBLE_NAN;
}

// Operations on `SOURCES` floats or doubles.
struct Add {
  static constexpr int SOURCES = 2;
  template <class T>
  static T of(T x, T y, T) {
    return x + y;
  }
};
struct Multiply {
  static constexpr int SOURCES = 2;
  template <class T>
  static T of(T x, T y, T) {
    return x * y;
  }
};
struct MultiplyAdd {
  static constexpr int SOURCES = 3;
  template <class T>
  static T of(T x, T y, T z) {
    return std::fma(x, y, z);
  }
};

// Comparisons of floats: the first eight hold for ordered values, U… also where one is NaN.
// clang-format off: a list of names
enum FloatOrder {
  F_LT, F_EQ, F_LE, F_GT, F_NE, F_GE, F_NUM, F_NAN, F_LTU, F_EQU, F_LEU, F_GTU, F_NEU, F_GEU, F_F, F_T
};
// clang-format on
inline const char* const FLOAT_ORDERS[] = {"LT",  "EQ",  "LE",  "GT",  "NE",  "GE", "NUM", "NAN",  "LTU",
                                           "EQU", "LEU", "GTU", "NEU", "GEU", "F",  "T",   nullptr};

// `x(l)` and `y(l)` give the lanes' values.
template <class X, class Y>
u32 compare_floats(int order, X x, Y y) {
  switch (order) {
    case F_LT: return bits([&](int l) { return x(l) < y(l); });
    case F_EQ: return bits([&](int l) { return x(l) == y(l); });
    case F_LE: return bits([&](int l) { return x(l) <= y(l); });
    case F_GT: return bits([&](int l) { return x(l) > y(l); });
    case F_NE: return bits([&](int l) { return x(l) < y(l) || x(l) > y(l); });
    case F_GE: return bits([&](int l) { return x(l) >= y(l); });
    case F_NUM: return bits([&](int l) { return x(l) == x(l) && y(l) == y(l); });
    case F_NAN: return bits([&](int l) { return x(l) != x(l) || y(l) != y(l); });
    case F_LTU: return bits([&](int l) { return !(x(l) >= y(l)); });
    case F_EQU: return bits([&](int l) { return !(x(l) < y(l) || x(l) > y(l)); });
    case F_LEU: return bits([&](int l) { return !(x(l) > y(l)); });
    case F_GTU: return bits([&](int l) { return !(x(l) <= y(l)); });
    case F_NEU: return bits([&](int l) { return x(l) != y(l); });
    case F_GEU: return bits([&](int l) { return !(x(l) < y(l)); });
    default: return order == F_T ? ALL : 0;
  }
}

// ── halves ──────────────────────────────────────────────────────────────────────────────────────────────────────────

inline float half_to_float(u32 half) {
  constexpr u32 EXPONENT = 0x7c00u << 13;
  const u32 shifted = (half & 0x7fff) << 13, exponent = shifted & EXPONENT;
  const u32 normal = shifted + (112u << 23), special = normal + (112u << 23);
  const u32 small = as_bits(as_float(shifted + (113u << 23)) - as_float(113u << 23));
  const u32 magnitude = exponent == EXPONENT ? special : exponent == 0 ? small : normal;
  return as_float(magnitude | (half & 0x8000) << 16);
}

inline float bfloat_to_float(u32 bits) { return as_float(bits << 16); }

// To the nearest, ties to even; a NaN becomes 0x7fff.
inline u32 float_to_half(float value) {
  constexpr u32 MAGIC = (127u - 15 + 23 - 10 + 1) << 23;
  const u32 all = as_bits(value), u = all & 0x7fffffffu;
  const u32 normal = (u + 0xc8000fffu + (u >> 13 & 1)) >> 13;
  const u32 small = as_bits(as_float(u) + as_float(MAGIC)) - MAGIC;
  const u32 magnitude = u >= 0x47800000u ? 0x7c00u : u < (113u << 23) ? small : normal;
  return u > 0x7f800000u ? 0x7fffu : magnitude | (all >> 16 & 0x8000u);
}

inline u32 float_to_bfloat(float value) {
  const u32 u = as_bits(value);
  return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (u + 0x7fffu + (u >> 16 & 1)) >> 16;
}

// A float format by the bits of its fields; the largest exponent holds infinities and NaN unless `finite`.
struct FloatFormat {
  int exponent, mantissa;
  bool finite = false;  // E4M3: only all ones is NaN
};
constexpr FloatFormat HALF_FORMAT{5, 10}, BFLOAT_FORMAT{8, 7}, FLOAT_FORMAT{8, 23};
constexpr FloatFormat TFLOAT_FORMAT{8, 10}, DOUBLE_FORMAT{11, 52};
constexpr FloatFormat E4M3_FORMAT{4, 3, true}, E5M2_FORMAT{5, 2};

// The result of .RELU for a float: values below +0 become +0, a NaN remains.
inline float positive(float v) { return v > 0 || v != v ? v : 0.0f; }

// F2FP.F16.F32.PACK_AB R, high, low: b = rounding, c = .RELU, d = .SATFINITE. In half.cpp, as attention packs much.
Step pack_halves(Context&, const Instruction&);
Step pack_bfloats(Context&, const Instruction&);

// The value in the format, rounded; `saturates`: the largest finite value in place of an infinity.
u32 to_format(double value, FloatFormat format, int rounding, bool saturates = false);

}  // namespace sass
