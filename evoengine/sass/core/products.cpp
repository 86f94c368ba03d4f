#include "products.h"

#include <algorithm>

#include "rounding.h"

namespace sass {

namespace {

typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));
typedef u32 EightWords __attribute__((vector_size(32)));
typedef i32 EightInts __attribute__((vector_size(32)));

// A half has 5 bits of exponent and 10 of fraction; without an exponent it is a whole multiple of 2^-24.
EightWords floats_of_halves(EightWords half) {
  EightWords magnitude = half & 0x7fff;
  EightWords infinite = EightWords(magnitude >= 0x7c00) & (112u << 23);
  EightWords normal = (magnitude << 13) + (112u << 23) + infinite;
  Eight tiny = __builtin_convertvector(EightInts(magnitude), Eight) * 0x1p-24f;
  return (magnitude < 0x400 ? EightWords(tiny) : normal) | (half & 0x8000) << 16;
}

}  // namespace

void to_floats(const u32* words, float* low, float* high, int count, Format format) {
  for (int n = 0; n < count; n += 8) {
    EightWords from, even, odd;
    std::memcpy(&from, words + n, sizeof from);
    if (format == Format::Half)
      even = floats_of_halves(from & 0xffff), odd = floats_of_halves(from >> 16);
    else if (format == Format::BFloat)
      even = from << 16, odd = from & 0xffff0000u;
    else
      even = odd = from & 0xffffe000u;
    std::memcpy(low + n, &even, sizeof even);
    std::memcpy(high + n, &odd, sizeof odd);
  }
}

// To the nearest, ties to even.
u16 to_half(float value) {
  u32 bits = as_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return u16(sign | 0x7fff);
  if (magnitude >= 0x477ff000) return u16(sign | 0x7c00);  // 65520 and above
  if (magnitude < 0x38800000) {                            // below 2^-14: a whole multiple of 2^-24
    float rounded = as_float(magnitude) + 0.5f;            // whose last bit is 2^-24
    return u16(sign | (as_bits(rounded) - as_bits(0.5f)));
  }
  u32 rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return u16(sign | ((rounded >> 13) - (112 << 10)));
}

void left_of_rows(Left& left, const float (*rows)[16], int k) {
  for (int d = 0; d < k; d++)
    for (int half = 0; half < 2; half++)
      for (int g = 0; g < 8; g++) {
        float value = rows[d][8 * half + g];
        *reinterpret_cast<Four*>(&left.of[d][half][4 * g]) = Four{value, value, value, value};
      }
}

void left_of_registers(Left& left, const Lanes* first, int registers, Format format, float sign) {
  float rows[MAX_K][16], low[LANES], high[LANES];
  int k = 0;
  for (int n = 0; n < registers; n++) {
    to_floats(first[n].v, low, high, LANES, format);
    for (int lane = 0; lane < LANES; lane++) {
      int row = lane / 4 + n % 2 * 8, t = lane % 4;
      if (format == Format::TFloat) {
        rows[k = n / 2 * 4 + t][row] = sign * low[lane];
        continue;
      }
      k = n / 2 * 8 + 2 * t;
      rows[k][row] = sign * low[lane];
      rows[k + 1][row] = sign * high[lane];
    }
  }
  left_of_rows(left, rows, registers * (format == Format::TFloat ? 2 : 4));
}

void right_of_registers(Right& right, const Lanes* first, int registers, Format format) {
  float low[LANES], high[LANES];
  for (int n = 0; n < registers; n++) {
    to_floats(first[n].v, low, high, LANES, format);
    for (int lane = 0; lane < LANES; lane++) {
      int column = lane / 4, t = lane % 4;
      if (format == Format::TFloat) {
        right.of[4 * n + t][column % 2][column / 2] = low[lane];
        continue;
      }
      right.of[8 * n + 2 * t][column % 2][column / 2] = low[lane];
      right.of[8 * n + 2 * t + 1][column % 2][column / 2] = high[lane];
    }
  }
}

// ── sums ────────────────────────────────────────────────────────────────────────────────────────────────────────────

namespace {

// Exponents that stand for zero, and for infinity and NaN: also together with any other.
constexpr i32 OF_ZERO = -1000, OF_INFINITY = 3000;
// Of the largest product or sum where 32-bit arithmetic is exact. What lies between ZEROS and LOWEST is a small number.
constexpr i32 ZEROS = -300, LOWEST = -90, HIGHEST = 120;

i32 exponent_of(float value, i32 least) {
  const u32 magnitude = as_bits(value) & 0x7fffffffu;
  const i32 exponent = std::max(i32(magnitude >> 23) - 127, least);
  return magnitude == 0 ? OF_ZERO : magnitude >= 0x7f800000u ? OF_INFINITY : exponent;
}

void exponents_of(const float* from, i16* to, int count, i32 least) {
  for (int n = 0; n < count; n++) to[n] = i16(exponent_of(from[n], least));
}

EightInts exponents_of(Eight values, i32 least) {
  const EightInts magnitude = EightInts(values) & 0x7fffffff;
  EightInts exponent = (magnitude >> 23) - 127;
  exponent = exponent > least ? exponent : least - (EightInts){};
  exponent = magnitude >= 0x7f800000 ? OF_INFINITY - (EightInts){} : exponent;
  return magnitude == 0 ? OF_ZERO - (EightInts){} : exponent;
}

// A sum as the tensor core leaves it: the bits beyond those that are kept cut off, or rounded to a half.
float sum_of(double exact, const Sums& how) {
  if (exact != exact) return as_float(0x7fffffffu);
  const u64 bits = std::bit_cast<u64>(exact);
  if (!how.halves && std::fabs(exact) < 0x1p-126) {  // to a whole multiple of the smallest float
    return float(std::trunc(exact * 0x1p149) * 0x1p-149);
  }
  if (!how.halves) return float(std::bit_cast<double>(bits >> (52 - how.kept) << (52 - how.kept)));
  const u64 cut = bits & ((1ull << 29) - 1), odd = (bits ^ cut) | u64(cut != 0) << 29;
  return half_to_float(to_half(float(std::bit_cast<double>(odd))));
}

// One element, of any values: `a` and `b` are `count` floats that lie `step_a` and `step_b` apart.
float exact_sum(float c, const float* a, size_t step_a, const float* b, size_t step_b, int count, const Sums& how) {
  i32 top = exponent_of(c, how.least_sum);
  double together = c;
  for (int k = 0; k < count; k++) {
    const float x = a[k * step_a], y = b[k * step_b];
    top = std::max(top, exponent_of(x, how.least) + exponent_of(y, how.least));
    together += double(x) * double(y);
  }
  if (!std::isfinite(together)) return sum_of(together, how);
  if (top < ZEROS) return 0;
  double sum = std::trunc(std::ldexp(double(c), how.fraction - top));
  for (int k = 0; k < count; k++)
    sum += std::trunc(std::ldexp(double(a[k * step_a]) * double(b[k * step_b]), how.fraction - top));
  return sum_of(std::ldexp(sum, top - how.fraction), how);
}

typedef i16 SixteenShorts __attribute__((vector_size(32)));
typedef i16 EightShorts __attribute__((vector_size(16)));
typedef double EightDoubles __attribute__((vector_size(64)));
typedef u64 EightLongs __attribute__((vector_size(64)));

struct Exponents {
  alignas(64) i16 left[MAX_K][2][LANES];
  alignas(64) i16 right[MAX_K][2][MAX_COLUMNS / 2];
};

// The sums of 16-bit lanes n of `top` and of 32-bit values: 8 elements from their exact parts.
Eight sums_of(EightInts products, EightInts start, EightInts top, const Sums& how) {
  const EightDoubles whole = __builtin_convertvector(products, EightDoubles) + __builtin_convertvector(start, EightDoubles);
  const EightLongs scale = __builtin_convertvector(EightInts(top + (1023 - how.fraction)), EightLongs) << 52;
  const EightLongs exact = EightLongs(whole * EightDoubles(scale));
  if (!how.halves)
    return __builtin_convertvector(EightDoubles(exact >> (52 - how.kept) << (52 - how.kept)), Eight);
  Eight out;
  for (int n = 0; n < 8; n++) out[n] = sum_of(std::bit_cast<double>(u64(exact[n])), how);
  return out;
}

// Columns 8j … 8j + 7 of rows g or g + 8, of which every second: four registers' eights, over `count` products from `first`.
void add_products(Eight* sums, const Left& left, const Right& right, const Exponents& exponents, int j, int half, int odd,
                  int first, int count, const Sums& how) {
  SixteenShorts top16[2];
  for (int k = first; k < first + count; k++) {
    u64 four;
    std::memcpy(&four, &exponents.right[k][odd][4 * j], sizeof four);
    typedef u64 FourLongs __attribute__((vector_size(32)));
    const SixteenShorts b = SixteenShorts(FourLongs{four, four, four, four});
    for (int n = 0; n < 2; n++) {
      const SixteenShorts e = *reinterpret_cast<const SixteenShorts*>(&exponents.left[k][half][16 * n]) + b;
      top16[n] = k == first || e > top16[n] ? e : top16[n];
    }
  }
  EightInts top[4], start[4], products[4] = {};
  Eight scale[4];
  EightInts unusual = {};
  for (int n = 0; n < 4; n++) {
    EightShorts own;
    std::memcpy(&own, reinterpret_cast<const i16*>(&top16[n / 2]) + n % 2 * 8, sizeof own);
    const EightInts e = __builtin_convertvector(own, EightInts), of_sum = exponents_of(sums[n], how.least_sum);
    top[n] = e > of_sum ? e : of_sum;
    unusual |= (top[n] > HIGHEST) | ((top[n] < LOWEST) & (top[n] > ZEROS));
    top[n] = top[n] > LOWEST ? top[n] : LOWEST - (EightInts){};
    scale[n] = Eight((127 + how.fraction - top[n]) << 23);
  }
  u64 any[4];
  std::memcpy(any, &unusual, sizeof any);
  if (any[0] | any[1] | any[2] | any[3]) {
    for (int lane = 0; lane < LANES; lane++) {
      float& sum = reinterpret_cast<float*>(sums)[lane];
      sum = exact_sum(sum, &left.of[first][half][lane], 2 * LANES, &right.of[first][odd][4 * j + lane % 4], MAX_COLUMNS,
                      count, how);
    }
    return;
  }
  for (int n = 0; n < 4; n++) start[n] = __builtin_convertvector(sums[n] * scale[n], EightInts);
  for (int k = first; k < first + count; k++) {
    const Eight* a = reinterpret_cast<const Eight*>(left.of[k][half]);
    const Four four = *reinterpret_cast<const Four*>(&right.of[k][odd][4 * j]);
    const Eight b = __builtin_shufflevector(four, four, 0, 1, 2, 3, 0, 1, 2, 3);
    for (int n = 0; n < 4; n++) products[n] += __builtin_convertvector(a[n] * b * scale[n], EightInts);
  }
  for (int n = 0; n < 4; n++) sums[n] = sums_of(products[n], start[n], top[n], how);
}

}  // namespace

Sums sums_of(Format format, u32 arch, int k, bool halves) {
  static constexpr int LEAST[] = {-14, -126, -126, -6, -14};
  const bool split = arch >= 80 && arch < 90 && k * (format == Format::TFloat ? 2 : 1) == 16;
  return {arch >= 90 ? 25 : 24, split ? k / 2 : k, 23, LEAST[int(format)], halves ? -14 : -126, halves};
}

Sums group_sums_of(Format format, int k, bool halves) {
  Sums how = sums_of(format, 90, k, halves);
  if (format == Format::E4M3 || format == Format::E5M2) how.fraction = how.kept = 13;
  return how;
}

void multiply(Lanes* d, const Left& left, const Right& right, int columns, int k, const Sums& how) {
  static thread_local Exponents exponents;
  for (int depth = 0; depth < k; depth++)
    for (int n = 0; n < 2; n++) {
      exponents_of(left.of[depth][n], exponents.left[depth][n], LANES, how.least);
      exponents_of(right.of[depth][n], exponents.right[depth][n], columns / 2, how.least);
    }
  for (int j = 0; j < columns / 8; j++)
    for (int half = 0; half < 2; half++)
      for (int odd = 0; odd < 2; odd++) {
        Eight sums[4], *of = reinterpret_cast<Eight*>(d[4 * j + 2 * half + odd].v);
        std::memcpy(sums, of, sizeof sums);
        for (int first = 0; first < k; first += how.block)
          add_products(sums, left, right, exponents, j, half, odd, first, std::min(how.block, k - first), how);
        std::memcpy(of, sums, sizeof sums);
      }
}

}  // namespace sass
