#include "products.h"

#include <algorithm>
#include <array>

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
    if (format == Format::Half) even = floats_of_halves(from & 0xffff), odd = floats_of_halves(from >> 16);
    else if (format == Format::BFloat) even = from << 16, odd = from & 0xffff0000u;
    else even = odd = from & 0xffffe000u;
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

const float* floats_of_bytes(Format format) {
  static const auto* tables = [] {
    auto* all = new std::array<std::array<float, 256>, 2>;
    for (u32 byte = 0; byte < 256; byte++) {
      const u32 exponent = byte >> 3 & 15, mantissa = byte & 7;
      const double value = exponent ? std::ldexp(8.0 + mantissa, int(exponent) - 10) : std::ldexp(double(mantissa), -9);
      (*all)[0][byte] = (byte & 0x7f) == 0x7f ? NAN : float(byte & 0x80 ? -value : value);
      (*all)[1][byte] = half_to_float(byte << 8);
    }
    return all;
  }();
  return (*tables)[format == Format::E5M2].data();
}

void left_of_registers(Left& left, const Lanes* first, int registers, Format format, float sign) {
  float rows[MAX_K][16], low[LANES], high[LANES];
  if (has_bytes(format)) {
    const float* value = floats_of_bytes(format);
    for (int n = 0; n < registers; n++)
      for (int lane = 0; lane < LANES; lane++)
        for (int byte = 0; byte < 4; byte++)
          rows[n / 2 * 16 + lane % 4 * 4 + byte][lane / 4 + n % 2 * 8] =
              sign * value[first[n][lane] >> 8 * byte & 0xff];
    return left_of_rows(left, rows, 8 * registers);
  }
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
  if (has_bytes(format)) {
    const float* value = floats_of_bytes(format);
    for (int n = 0; n < registers; n++)
      for (int lane = 0; lane < LANES; lane++)
        for (int byte = 0; byte < 4; byte++)
          right.of[16 * n + lane % 4 * 4 + byte][lane / 4 % 2][lane / 8] = value[first[n][lane] >> 8 * byte & 0xff];
    return;
  }
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

Chosen chosen_columns(const Lanes& metadata, Format format, int k, int selector) {
  Chosen chosen;
  const int together = format == Format::TFloat ? 2 : 4, nibbles = k / together;  // one for as many columns
  for (int row = 0; row < 16; row++) {
    const int half = row / 8, first = row % 8 * 4;
    for (int n = 0; n < nibbles; n++) {
      int lane, shift;
      if (has_bytes(format)) lane = first + half + 2 * (nibbles == 16 ? n / 8 : selector), shift = n % 8 * 4;
      else lane = first + (nibbles == 8 ? 2 * selector + n / 4 : selector), shift = 16 * half + n % 4 * 4;
      const u32 bits = metadata[lane] >> shift & 15;
      if (format == Format::TFloat) chosen.column[row][n] = u8(2 * n + (bits >> 3));  // 1110 or 0100
      else chosen.column[row][2 * n] = u8(4 * n + (bits & 3)), chosen.column[row][2 * n + 1] = u8(4 * n + (bits >> 2));
    }
  }
  return chosen;
}

void spread(Left& left, int k, const Chosen& chosen) {
  static thread_local Left whole;
  std::memset(&whole, 0, sizeof whole.of[0] * size_t(k));
  for (int n = 0; n < k / 2; n++)
    for (int half = 0; half < 2; half++)
      for (int g = 0; g < 8; g++)
        *reinterpret_cast<Four*>(&whole.of[chosen.column[8 * half + g][n]][half][4 * g]) +=
            *reinterpret_cast<const Four*>(&left.of[n][half][4 * g]);
  std::memcpy(&left, &whole, sizeof whole.of[0] * size_t(k));
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

// Lanes at once, as wide as the processor's registers, and its first four lanes repeated.
#ifdef __AVX512BW__
constexpr int WIDE = 16;
#define REPEATED 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3
#else
constexpr int WIDE = 8;
#define REPEATED 0, 1, 2, 3, 0, 1, 2, 3
#endif
constexpr int VECTORS = LANES / WIDE;
typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef i32 Ints __attribute__((vector_size(4 * WIDE)));
typedef u32 Words __attribute__((vector_size(4 * WIDE)));
typedef i16 Shorts __attribute__((vector_size(2 * WIDE)));
typedef i16 TwiceShorts __attribute__((vector_size(4 * WIDE)));  // of two parts
typedef u64 Longs __attribute__((vector_size(4 * WIDE)));

Ints exponents_of(Floats values, i32 least) {
  const Ints magnitude = Ints(values) & 0x7fffffff;
  Ints exponent = (magnitude >> 23) - 127;
  exponent = exponent > least ? exponent : least - (Ints){};
  exponent = magnitude >= 0x7f800000 ? OF_INFINITY - (Ints){} : exponent;
  return magnitude == 0 ? OF_ZERO - (Ints){} : exponent;
}

// A sum as the tensor core leaves it: the bits beyond those that are kept cut off, or rounded to a half.
float sum_of(double exact, const Sums& how) {
  if (exact != exact) return as_float(0x7fffffffu);
  const u64 bits = std::bit_cast<u64>(exact);
  if (!how.halves && std::fabs(exact) < 0x1p-126) {               // to a whole multiple of the smallest float
    return float(std::trunc(exact * 0x1p149) * 0x1p-149) + 0.0f;  // never −0
  }
  if (!how.halves) return float(std::bit_cast<double>(bits >> (52 - how.kept) << (52 - how.kept)));
  const u64 cut = bits & ((1ull << 29) - 1), odd = (bits ^ cut) | u64(cut != 0) << 29;
  return half_to_float(to_half(float(std::bit_cast<double>(odd)))) + 0.0f;
}

// One element, of any values: `a` and `b` are `count` floats that lie `step_a` and `step_b` apart.
float exact_sum(float c, const float* a, size_t step_a, const float* b, size_t step_b, int count, const Sums& how) {
  i32 top = exponent_of(c, how.least_sum);
  double together = c;
  for (int k = 0; k < count; k++) {
    const float x = a[k * step_a], y = b[k * step_b];
    top = std::max(top, exponent_of(x, how.least) + exponent_of(y, how.least_right));
    together += double(x) * double(y);
  }
  if (!std::isfinite(together)) return sum_of(together, how);
  if (top < ZEROS) return 0;
  double sum = std::trunc(std::ldexp(double(c), how.fraction - top));
  for (int k = 0; k < count; k++)
    sum += std::trunc(std::ldexp(double(a[k * step_a]) * double(b[k * step_b]), how.fraction - top));
  return sum_of(std::ldexp(sum, top - how.fraction), how);
}

struct Exponents {
  alignas(64) i16 left[MAX_K][2][LANES];
  alignas(64) i16 right[MAX_K][2][MAX_COLUMNS / 2];
};

// Four floats for each row; as many lanes are read as are at once.
Floats repeated(const float* four) {
  Floats x;
  std::memcpy(&x, four, sizeof x);
  return __builtin_shufflevector(x, x, REPEATED);
}

// Whole multiples of 2^(top - fraction) as sums.
Floats sums_of(Ints whole, Ints top, const Sums& how) {
  const Ints sign = whole & i32(0x80000000);
  const Words magnitude = Words(whole < 0 ? -whole : whole);
  Ints bits = Ints(__builtin_convertvector(Ints(magnitude), Floats));  // rounded to the nearest
  const Words back = Words(__builtin_convertvector(Floats(bits), Ints));
  bits += Ints(back > magnitude);                       // cut off
  if (how.halves) bits |= Ints(back != magnitude) & 1;  // odd where something was cut off
  else bits &= i32(ALL << (23 - how.kept));
  const Floats cut = Floats(bits | sign) * Floats((127 - how.fraction + top) << 23);
  if (!how.halves) return cut;
  Floats out;
  for (int n = 0; n < WIDE; n++) out[n] = half_to_float(to_half(cut[n])) + 0.0f;
  return out;
}

bool any(Ints flags) {
  u64 words[WIDE / 2], found = 0;
  std::memcpy(words, &flags, sizeof words);
  for (u64 word : words) found |= word;
  return found;
}

// Lane 4g + t: column 8j + 2t, or 8j + 2t + 1 where `odd`, of row g, or of row 8 + g where `half`.
struct Place {
  int j, half, odd, first, count;  // products `first` … `first` + `count` - 1
};

// Adds the products; false where that takes exact_sum.
bool add_products(Floats* sums, const Left& left, const Right& right, const Exponents& exponents, const Place& at,
                  const Sums& how) {
  TwiceShorts tops[VECTORS / 2];
  for (TwiceShorts& top : tops) top = 2 * OF_ZERO - (TwiceShorts){};
  for (int k = at.first; k < at.first + at.count; k++) {
    u64 own;
    std::memcpy(&own, &exponents.right[k][at.odd][4 * at.j], sizeof own);
    for (int n = 0; n < VECTORS / 2; n++) {
      const TwiceShorts e =
          reinterpret_cast<const TwiceShorts*>(exponents.left[k][at.half])[n] + TwiceShorts(own - (Longs){});
      tops[n] = e > tops[n] ? e : tops[n];
    }
  }
  Ints top[VECTORS], products[VECTORS] = {}, unusual = {};
  Floats scale[VECTORS];
  for (int n = 0; n < VECTORS; n++) {
    Shorts own;
    std::memcpy(&own, reinterpret_cast<const i16*>(tops) + WIDE * n, sizeof own);
    const Ints e = __builtin_convertvector(own, Ints), of_sum = exponents_of(sums[n], how.least_sum);
    top[n] = e > of_sum ? e : of_sum;
    unusual |= (top[n] > HIGHEST) | ((top[n] < LOWEST) & (top[n] > ZEROS));
    top[n] = top[n] > LOWEST ? top[n] : LOWEST - (Ints){};
    scale[n] = Floats((127 + how.fraction - top[n]) << 23);
  }
  if (any(unusual)) return false;
  for (int k = at.first; k < at.first + at.count; k++) {
    const Floats* a = reinterpret_cast<const Floats*>(left.of[k][at.half]);
    const Floats b = repeated(&right.of[k][at.odd][4 * at.j]);
    for (int n = 0; n < VECTORS; n++) products[n] += __builtin_convertvector(a[n] * b * scale[n], Ints);
  }
  for (int n = 0; n < VECTORS; n++) {
    const Ints start = __builtin_convertvector(sums[n] * scale[n], Ints);
    const Ints whole = Ints(Words(products[n]) + Words(start));
    unusual |= ((products[n] ^ whole) & (start ^ whole)) < 0;
    products[n] = whole;
  }
  if (any(unusual)) return false;
  for (int n = 0; n < VECTORS; n++) sums[n] = sums_of(products[n], top[n], how);
  return true;
}

void add_exactly(Floats* sums, const Left& left, const Right& right, const Place& at, const Sums& how) {
  for (int lane = 0; lane < LANES; lane++) {
    float& sum = reinterpret_cast<float*>(sums)[lane];
    sum = exact_sum(sum, &left.of[at.first][at.half][lane], 2 * LANES, &right.of[at.first][at.odd][4 * at.j + lane % 4],
                    MAX_COLUMNS, at.count, how);
  }
}

}  // namespace

Sums sums_of(Format format, u32 arch, int k, bool halves) {
  static constexpr int LEAST[] = {-14, -126, -126, -6, -14};
  const bool split = arch >= 80 && arch < 90 && k * (format == Format::TFloat ? 2 : 1) == 16;
  const int least = LEAST[int(format)];
  return {arch >= 90 ? 25 : 24, split ? k / 2 : k, 23, least, least, halves ? -14 : -126, halves};
}

Sums group_sums_of(Format left, Format right, int k, bool halves) {
  Sums how = sums_of(left, 90, k, halves);
  how.least_right = sums_of(right, 90, k, halves).least;
  if (has_bytes(left)) how.fraction = how.kept = 13;
  return how;
}

Sums byte_sums_of(Format left, Format right, u32 arch, bool halves) {
  Sums how = group_sums_of(left, right, BYTES_K, halves);
  if (arch < 90) how.block = BYTES_K / 2;
  return how;
}

namespace {

void multiply_roughly(Lanes* d, const Left& left, const Right& right, int columns, int k) {
  for (int j = 0; j < columns / 8; j++)
    for (int n = 0; n < 4; n++) {
      Floats sums[VECTORS];
      std::memcpy(sums, d[4 * j + n].v, sizeof sums);
      for (int depth = 0; depth < k; depth++) {
        const Floats* a = reinterpret_cast<const Floats*>(left.of[depth][n / 2]);
        const Floats b = repeated(&right.of[depth][n % 2][4 * j]);
        for (int part = 0; part < VECTORS; part++) sums[part] += a[part] * b;
      }
      std::memcpy(d[4 * j + n].v, sums, sizeof sums);
    }
}

}  // namespace

void multiply(Lanes* d, const Left& left, const Right& right, int columns, int k, const Sums& how) {
  if (how.rough) return multiply_roughly(d, left, right, columns, k);
  static thread_local Exponents exponents;
  for (int depth = 0; depth < k; depth++)
    for (int n = 0; n < 2; n++) {
      exponents_of(left.of[depth][n], exponents.left[depth][n], LANES, how.least);
      exponents_of(right.of[depth][n], exponents.right[depth][n], columns / 2, how.least_right);
    }
  for (int j = 0; j < columns / 8; j++)
    for (int n = 0; n < 4; n++) {
      Floats sums[VECTORS];
      std::memcpy(sums, d[4 * j + n].v, sizeof sums);
      for (int first = 0; first < k; first += how.block) {
        const Place at{j, n / 2, n % 2, first, std::min(how.block, k - first)};
        if (!add_products(sums, left, right, exponents, at, how)) add_exactly(sums, left, right, at, how);
      }
      std::memcpy(d[4 * j + n].v, sums, sizeof sums);
    }
}

}  // namespace sass
