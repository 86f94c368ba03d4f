// Conversions between integers and floats, between floats, rounding to whole numbers, packing of halves and bytes.
#include <limits>

#include "rounding.h"

namespace sass {

u32 to_format(double value, FloatFormat format, int rounding, bool saturates) {
  const u64 all = std::bit_cast<u64>(value);
  const bool negative = all >> 63;
  const int mantissa = format.mantissa, bias = (1 << (format.exponent - 1)) - 1, smallest = 1 - bias;
  const u32 sign = u32(negative) << (format.exponent + mantissa);
  const u32 ones = (1u << (format.exponent + mantissa)) - 1;  // all of exponent and mantissa
  if (value != value) return ones;
  const u32 infinity = format.finite ? ones : ((1u << format.exponent) - 1) << mantissa, largest = infinity - 1;
  const u32 beyond = saturates ? largest : infinity;
  if (std::isinf(value)) return sign | beyond;

  const int stored = int(all >> 52 & 0x7ff), exponent = std::max(stored, 1) - 1023;
  const u64 significand = (all & ((1ull << 52) - 1)) | u64(stored != 0) << 52;
  const int shift = std::min(63, 52 - mantissa + std::max(0, smallest - exponent));
  const u64 kept = significand >> shift, rest = significand & ((1ull << shift) - 1), half = 1ull << (shift - 1);
  const bool away = rounding == NEAREST    ? rest > half || (rest == half && (kept & 1))
                    : rounding == TRUNCATE ? false
                                           : rest && (rounding == DOWN) == negative;
  const bool overflows = exponent > bias + 1;
  const u64 field = exponent < smallest ? 0 : u64(exponent + bias - 1) << mantissa;  // kept has the leading one
  u64 out = overflows ? beyond : field + kept + away;
  if (out >= infinity) {
    const bool cut = rounding == TRUNCATE || (rounding == UPWARD && negative) || (rounding == DOWN && !negative);
    out = cut ? largest : beyond;
  }
  return sign | u32(out);
}

namespace {

// ── types ───────────────────────────────────────────────────────────────────────────────────────────────────────────

const char* const INTEGERS[] = {"U8", "S8", "U16", "S16", "U32", "S32", "U64", "S64", nullptr};
const char* const FLOATS[] = {"F16", "F32", "F64", "BF16", nullptr};
enum { T_U8, T_S8, T_U16, T_S16, T_U32, T_S32, T_U64, T_S64 };
enum { T_F16, T_F32, T_F64, T_BF16 };

// The bits that an operand's suffix names, moved down.
u32 narrowed(const Operand& o, u32 x) { return o.part >= 4 ? x >> (8 * (o.part - 4)) : o.part == 2 ? x >> 16 : x; }

// A lane's float of the type as a double, which represents all of them exactly.
double read_float(int type, const Operand& o, u64 bits, bool flushes) {
  double value;
  if (type == T_F64) {
    value = std::bit_cast<double>(o.kind == Kind::Immediate ? bits << 32 : bits);
  } else if (type == T_F32) {
    value = as_float(flushes ? flush(u32(bits)) : u32(bits));
  } else {
    const u32 half = narrowed(o, u32(bits)) & 0xffff;
    value = type == T_F16 ? half_to_float(half) : bfloat_to_float(half);
  }
  if (o.absolute) value = std::fabs(value);
  return o.negate ? -value : value;
}

// A NaN converted to or from a double keeps its sign and the first bits of its mantissa, and becomes quiet.
u64 converted_nan(u64 bits, FloatFormat to) {
  const int width = to.exponent + to.mantissa;
  const u64 exponent = ((1ull << to.exponent) - 1) << to.mantissa, mantissa = bits << 12 >> (64 - to.mantissa);
  return bits >> 63 << width | exponent | mantissa | 1ull << (to.mantissa - 1);
}

u64 write_float(int type, double value, int rounding, bool from_double = false) {
  static constexpr FloatFormat FORMATS[] = {HALF_FORMAT, FLOAT_FORMAT, DOUBLE_FORMAT, BFLOAT_FORMAT};
  if (value != value && (from_double || type == T_F64)) return converted_nan(std::bit_cast<u64>(value), FORMATS[type]);
  if (type == T_F64) return std::bit_cast<u64>(value);
  if (type == T_F32) return rounding ? to_format(value, FLOAT_FORMAT, rounding) : canonical(float(value));
  return to_format(value, type == T_F16 ? HALF_FORMAT : BFLOAT_FORMAT, rounding);
}

// ── integers to floats ──────────────────────────────────────────────────────────────────────────────────────────────

// Its value, truncated to a double's 53 bits with the last one set if something was cut off.
double odd_double(u64 magnitude, bool negative) {
  const int over = 11 - std::countl_zero(magnitude | 1);
  double value = double(magnitude);
  if (over > 0) {
    const u64 kept = magnitude >> over | ((magnitude & ((1ull << over) - 1)) != 0);
    value = std::ldexp(double(kept), over);
  }
  return negative ? -value : value;
}

[[gnu::noinline]] u64 integer_to_double(u64 x, bool is_signed, int rounding) {
  volatile u64 from = x;
  const Rounded rounded(rounding);
  volatile double to = is_signed ? double(i64(from)) : double(from);
  return std::bit_cast<u64>(double(to));
}

// a = integer's type, b = float's type
void take_types(Modifiers& m, Instruction& i) {
  i.a = take_one(m, INTEGERS);
  if (i.a < 0) i.a = T_S32;
  i.b = take_one(m, FLOATS);
  if (i.b < 0) i.b = T_F32;
}

// a = integer's type, b = float's type, c = rounding
Step i2f(Context& c, const Instruction& i) {
  const Operand& from = i.operands[1];
  const bool is_signed = i.a & 1;
  if (i.a >= T_U32 && i.a <= T_S32 && i.b == T_F32 && i.c == NEAREST) {
    Lanes s, out;
    const Lanes& x = integer(c, from, s);
    if (is_signed) each(out, [&](int l) { return as_bits(float(i32(x[l]))); });
    else each(out, [&](int l) { return as_bits(float(x[l])); });
    write(c, i.operands[0], out);
    return Step::Done;
  }
  Wide x, out;
  load_value(c, from, i.a >= T_U64, x);
  const int width = 8 << (i.a / 2);
  for (int l = 0; l < LANES; ++l) {
    u64 v = i.a >= T_U64 ? x[l] : narrowed(from, u32(x[l]));
    const int left = 64 - width;
    v = is_signed ? u64(i64(v << left) >> left) : v << left >> left;
    if (from.absolute && i64(v) < 0) v = 0 - v;
    if (from.negate) v = 0 - v;
    const bool negative = is_signed && i64(v) < 0;
    const double value = odd_double(negative ? 0 - v : v, negative);
    if (i.b == T_F64) out[l] = integer_to_double(v, is_signed, i.c);
    else out[l] = to_format(value, i.b == T_F32 ? FLOAT_FORMAT : i.b == T_F16 ? HALF_FORMAT : BFLOAT_FORMAT, i.c);
  }
  write_typed(c, i.operands[0], i.b == T_F64, out);
  return Step::Done;
}

Execute prepare_i2f(Instruction& i) {
  Modifiers m(i);
  take_types(m, i);
  i.c = take_rounding(m);
  return m.none_left() && i.operands.size() == 2 ? i2f : nullptr;
}

struct Range {
  i64 least, most;
};

// For an integer type of 8 or 16 bits.
Range range_of(int type) {
  const int width = 8 << (type / 2);
  const i64 half = 1ll << (width - 1);
  return type & 1 ? Range{-half, half - 1} : Range{0, 2 * half - 1};
}

// ── floats to integers and to whole numbers ─────────────────────────────────────────────────────────────────────────

enum Whole { TO_NEAREST, TO_FLOOR, TO_CEILING, TO_ZERO };
int take_whole(Modifiers& m) {
  static const char* const NAMES[] = {"RN", "FLOOR", "CEIL", "TRUNC", nullptr};
  return std::max(0, take_one(m, NAMES));
}
double to_whole(double x, int how) {
  switch (how) {
    case TO_FLOOR: return std::floor(x);
    case TO_CEILING: return std::ceil(x);
    case TO_ZERO: return std::trunc(x);
    default: return std::nearbyint(x);
  }
}

// The nearest integer that the type represents. NaN: 0 or the smallest value (all ones for unsigned types).
u64 to_integer(double x, int type, bool nan_is_zero) {
  const int width = 8 << (type / 2);
  const bool is_signed = type & 1;
  const u64 top = 1ull << (width - 1);
  if (x != x) return nan_is_zero ? 0 : top;
  if (is_signed) {
    const double limit = std::ldexp(1.0, width - 1);
    return x >= limit ? top - 1 : x < -limit ? 0 - top : u64(i64(x));
  }
  return x <= 0 ? 0 : x >= std::ldexp(1.0, width) ? top - 1 + top : u64(x);
}

// a = integer's type, b = float's type, c = how it is rounded, d = 1 .FTZ | 2 .NTZ
Step f2i(Context& c, const Instruction& i) {
  const Operand& from = i.operands[1];
  Wide x, out;
  load_value(c, from, i.b == T_F64, x);
  for (int l = 0; l < LANES; ++l)
    out[l] = to_integer(to_whole(read_float(i.b, from, x[l], i.d & 1), i.c), i.a, i.d & 2);
  write_typed(c, i.operands[0], i.a >= T_U64, out);
  return Step::Done;
}

Execute prepare_f2i(Instruction& i) {
  Modifiers m(i);
  take_types(m, i);
  i.c = take_whole(m);
  i.d = m.take("FTZ") | m.take("NTZ") << 1;
  return m.none_left() && i.operands.size() == 2 ? f2i : nullptr;
}

// a = type, b = .FTZ, c = how it is rounded
Step frnd(Context& c, const Instruction& i) {
  const Operand& from = i.operands[1];
  Wide x, out;
  load_value(c, from, i.a == T_F64, x);
  for (int l = 0; l < LANES; ++l) out[l] = write_float(i.a, to_whole(read_float(i.a, from, x[l], i.b), i.c), NEAREST);
  write_typed(c, i.operands[0], i.a == T_F64, out);
  return Step::Done;
}

Execute prepare_frnd(Instruction& i) {
  Modifiers m(i);
  i.a = take_one(m, FLOATS);
  if (i.a < 0) i.a = T_F32;
  i.b = m.take("FTZ");
  i.c = take_whole(m);
  return m.none_left() && i.operands.size() == 2 ? frnd : nullptr;
}

// F2F.to.from: a = to, b = from, c = rounding, d = .FTZ
Step f2f(Context& c, const Instruction& i) {
  const Operand& from = i.operands[1];
  Wide x, out;
  load_value(c, from, i.b == T_F64, x);
  for (int l = 0; l < LANES; ++l) {
    out[l] = write_float(i.a, read_float(i.b, from, x[l], i.d), i.c, i.b == T_F64);
    if (i.d && i.a == T_F32) out[l] = flush(u32(out[l]));
  }
  write_typed(c, i.operands[0], i.a == T_F64, out);
  return Step::Done;
}

Execute prepare_f2f(Instruction& i) {
  std::vector<int> types;
  Modifiers m(i);
  for (const std::string& name : i.modifiers)
    for (int k = 0; FLOATS[k]; ++k)
      if (name == FLOATS[k]) types.push_back(k), m.take(name);
  i.d = m.take("FTZ");
  i.c = take_rounding(m);
  if (!m.none_left() || types.size() != 2 || i.operands.size() != 2) return nullptr;
  i.a = types[0], i.b = types[1];
  return f2f;
}

// I2I.U8.S32.SAT: the nearest value of the type, extended to 32 bits. a = type
Step i2i(Context& c, const Instruction& i) {
  Lanes s, out;
  const Lanes& x = integer(c, i.operands[1], s);
  const Range range = range_of(i.a);
  each(out, [&](int l) { return u32(std::clamp(i64(i32(x[l])), range.least, range.most)); });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_i2i(Instruction& i) {
  Modifiers m(i);
  const bool known = m.take("S32") && m.take("SAT");
  i.a = take_one(m, INTEGERS);
  return known && i.a >= 0 && i.a <= T_S16 && m.none_left() && i.operands.size() == 2 ? i2i : nullptr;
}

// ── packing ─────────────────────────────────────────────────────────────────────────────────────────────────────────

// F2FP.F16.F32.MERGE_C R, x, RZ: one half. a = its type, b = rounding, c = .RELU, d = .SATFINITE
Step narrow_half(Context& c, const Instruction& i) {
  Lanes s, out;
  const Lanes& x = floating(c, i.operands[1], s);
  const FloatFormat format = i.a == T_BF16 ? BFLOAT_FORMAT : HALF_FORMAT;
  each(out, [&](int l) { return to_format(i.c ? positive(as_float(x[l])) : as_float(x[l]), format, i.b, i.d); });
  write(c, i.operands[0], out);
  return Step::Done;
}

// F2FP.TF32.F32.PACK_B R, x. b = rounding, c = .RELU
Step narrow_float(Context& c, const Instruction& i) {
  Lanes s, out;
  const Lanes& x = floating(c, i.operands[1], s);
  each(out,
       [&](int l) { return to_format(i.c ? positive(as_float(x[l])) : as_float(x[l]), TFLOAT_FORMAT, i.b) << 13; });
  write(c, i.operands[0], out);
  return Step::Done;
}

// Two bytes from two floats, or from a register's halves (b), below the low halfword of the last operand. a = 1 E5M2, c
// = .RELU, d = .SATFINITE
Step pack_bytes(Context& c, const Instruction& i) {
  const FloatFormat format = i.a ? E5M2_FORMAT : E4M3_FORMAT;
  auto byte = [&](float v) { return to_format(i.c ? positive(v) : v, format, NEAREST, i.d); };
  if (i.b) {
    Lanes s, r, out;
    const Lanes &x = plain(c, i.operands[1], s), &above = plain(c, i.operands[2], r);
    each(out, [&](int l) {
      return byte(half_to_float(x[l] & 0xffff)) | byte(half_to_float(x[l] >> 16)) << 8 | above[l] << 16;
    });
    write(c, i.operands[0], out);
    return Step::Done;
  }
  Lanes s, t, r, out;
  const Lanes &x = floating(c, i.operands[1], s), &y = floating(c, i.operands[2], t);
  const Lanes& above = plain(c, i.operands[3], r);
  each(out, [&](int l) { return byte(as_float(y[l])) | byte(as_float(x[l])) << 8 | above[l] << 16; });
  write(c, i.operands[0], out);
  return Step::Done;
}

// Two bytes of the operand as halves. a = 1 E5M2, c = .RELU
Step unpack_bytes(Context& c, const Instruction& i) {
  Lanes s, out;
  const Operand& from = i.operands[1];
  const Lanes& x = plain(c, from, s);
  auto half = [&](u32 byte) -> u32 {
    if ((byte & 0x7f) > (i.a ? 0x7cu : 0x7eu)) return 0x7fff;
    if (i.c && byte & 0x80) return 0;
    if (i.a) return byte << 8;
    const u32 exponent = byte >> 3 & 15, mantissa = byte & 7;
    const double value = exponent ? std::ldexp(8.0 + mantissa, int(exponent) - 10) : std::ldexp(double(mantissa), -9);
    return float_to_half(float(byte & 0x80 ? -value : value));
  };
  each(out, [&](int l) {
    const u32 v = narrowed(from, x[l]);
    return half(v & 0xff) | half(v >> 8 & 0xff) << 16;
  });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_f2fp(Instruction& i) {
  Modifiers m(i);
  const bool relu = m.take("RELU"), finite = m.take("SATFINITE");
  const bool e4m3 = m.take("E4M3"), e5m2 = m.take("E5M2");
  i.c = relu;
  i.d = finite;
  if (e4m3 || e5m2) {
    i.a = e5m2;
    if (m.take("UNPACK_B")) return m.take("F16") && m.none_left() && i.operands.size() == 2 ? unpack_bytes : nullptr;
    i.b = m.take("UNPACK_B_MERGE_C");
    m.take(i.b ? "F16" : "F32");
    const bool packs = i.b || m.take("PACK_AB_MERGE_C");
    return packs && m.none_left() && int(i.operands.size()) == 4 - i.b ? pack_bytes : nullptr;
  }
  i.b = take_rounding(m);
  if (m.take("TF32")) {
    const bool known = m.take("F32") && m.take("PACK_B") && !finite;
    return known && m.none_left() && i.operands.size() == 2 ? narrow_float : nullptr;
  }
  const bool bfloat = m.take("BF16");
  i.a = bfloat ? T_BF16 : T_F16;
  m.take("F16");
  m.take("F32");
  if (m.take("MERGE_C")) {  // only with nothing to merge
    const bool alone = i.operands.size() == 3 && i.operands[2].kind == Kind::Register && i.operands[2].index == RZ;
    return alone && m.none_left() ? narrow_half : nullptr;
  }
  return m.take("PACK_AB") && m.none_left() && i.operands.size() == 3 ? bfloat ? pack_bfloats : pack_halves : nullptr;
}

// I2IP packs two integers, saturated: R = low halfword or bytes of y, then of x, then the third operand. a = type
Step i2ip(Context& c, const Instruction& i) {
  Lanes s, t, r, out;
  const Lanes &x = integer(c, i.operands[1], s), &y = integer(c, i.operands[2], t), &above = plain(c, i.operands[3], r);
  const int width = 8 << (i.a / 2);
  const Range range = range_of(i.a);
  const u32 mask = u32((1ull << width) - 1);
  auto part = [&](u32 v) { return u32(std::clamp(i64(i32(v)), range.least, range.most)) & mask; };
  each(out, [&](int l) { return part(y[l]) | part(x[l]) << width | (width == 8 ? above[l] << 16 : 0); });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_i2ip(Instruction& i) {
  Modifiers m(i);
  m.take("SAT");
  m.take("S32");
  i.a = take_one(m, INTEGERS);
  return i.a >= 0 && i.a <= T_S16 && m.none_left() && i.operands.size() == 4 ? i2ip : nullptr;
}

// F2IP.U8.F32.TRUNC.NTZ R, x, y, RZ: the same of two floats. a = type, c = how they are rounded, d = NaN gives zero
Step f2ip(Context& c, const Instruction& i) {
  Lanes s, t, r, out;
  const Lanes &x = floating(c, i.operands[1], s), &y = floating(c, i.operands[2], t),
              &above = plain(c, i.operands[3], r);
  auto part = [&](u32 v) { return u32(to_integer(to_whole(as_float(v), i.c), i.a, i.d)) & 0xff; };
  each(out, [&](int l) { return part(y[l]) | part(x[l]) << 8 | above[l] << 16; });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_f2ip(Instruction& i) {
  Modifiers m(i);
  i.a = take_one(m, INTEGERS);
  i.c = take_whole(m);
  i.d = m.take("NTZ");
  const bool known = m.take("F32") && (i.a == T_U8 || i.a == T_S8);
  return known && m.none_left() && i.operands.size() == 4 ? f2ip : nullptr;
}

}  // namespace

// clang-format off: an opcode per line
const Opcode CONVERT[] = {
    {"I2F", Pipe::Mufu, prepare_i2f},
    {"UI2F", Pipe::Uniform, prepare_i2f},
    {"I2FP", Pipe::Alu, prepare_i2f},
    {"UI2FP", Pipe::Uniform, prepare_i2f},
    {"F2I", Pipe::Mufu, prepare_f2i},
    {"UF2I", Pipe::Uniform, prepare_f2i},
    {"FRND", Pipe::Mufu, prepare_frnd},
    {"UFRND", Pipe::Uniform, prepare_frnd},
    {"F2F", Pipe::Mufu, prepare_f2f},
    {"UF2F", Pipe::Uniform, prepare_f2f},
    {"F2FP", Pipe::Alu, prepare_f2fp},
    {"UF2FP", Pipe::Uniform, prepare_f2fp},
    {"I2IP", Pipe::Alu, prepare_i2ip},
    {"UI2IP", Pipe::Uniform, prepare_i2ip},
    {"F2IP", Pipe::Alu, prepare_f2ip},
    {"UF2IP", Pipe::Uniform, prepare_f2ip},
    {"I2I", Pipe::Alu, prepare_i2i},
    {"UI2I", Pipe::Uniform, prepare_i2i},
    {nullptr, Pipe::None, nullptr},
};
// clang-format on

}  // namespace sass
