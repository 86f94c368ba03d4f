#include "products.h"

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

void multiply(Lanes* d, const Left& left, const Right& right, int columns, int k) {
  for (int j = 0; j < columns / 8; j++)
    for (int half = 0; half < 2; half++) {
      Eight* even = reinterpret_cast<Eight*>(d[4 * j + 2 * half].v);
      Eight* odd = reinterpret_cast<Eight*>(d[4 * j + 2 * half + 1].v);
      Eight sums[8] = {even[0], even[1], even[2], even[3], odd[0], odd[1], odd[2], odd[3]};
      for (int depth = 0; depth < k; depth++) {
        const Eight* a = reinterpret_cast<const Eight*>(left.of[depth][half]);
        Four e = *reinterpret_cast<const Four*>(&right.of[depth][0][4 * j]);
        Four o = *reinterpret_cast<const Four*>(&right.of[depth][1][4 * j]);
        Eight evens = __builtin_shufflevector(e, e, 0, 1, 2, 3, 0, 1, 2, 3);
        Eight odds = __builtin_shufflevector(o, o, 0, 1, 2, 3, 0, 1, 2, 3);
        for (int n = 0; n < 4; n++) {
          sums[n] += a[n] * evens;
          sums[n + 4] += a[n] * odds;
        }
      }
      for (int n = 0; n < 4; n++) {
        even[n] = sums[n];
        odd[n] = sums[n + 4];
      }
    }
}

}  // namespace sass
