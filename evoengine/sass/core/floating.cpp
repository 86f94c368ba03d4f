// Arithmetic on 32-bit floats, comparisons, selections and the special functions.
#include "rounding.h"

namespace sass {
namespace {

// ── arithmetic ──────────────────────────────────────────────────────────────────────────────────────────────────────

template <class Op>
Step float_arithmetic(Context& c, const Instruction& i) {
  Lanes s, t, r, out;
  const Lanes &x = floating(c, i.operands[1], s), &y = floating(c, i.operands[2], t);
  const Lanes& z = Op::SOURCES == 3 ? floating(c, i.operands[3], r) : y;
  each(out, [&](int l) { return canonical(Op::of(as_float(x[l]), as_float(y[l]), as_float(z[l]))); });
  write(c, i.operands[0], out);
  return Step::Done;
}

template <class Op>
[[gnu::noinline]] void calculate(const Lanes& x, const Lanes& y, const Lanes& z, Lanes& out, int rounding) {
  const Rounded rounded(rounding);
  each(out, [&](int l) { return canonical(Op::of(as_float(x[l]), as_float(y[l]), as_float(z[l]))); });
  __asm__ volatile("" ::"r"(&out) : "memory");
}

// a = .FTZ, b = .SAT, c = rounding
template <class Op>
Step arithmetic_with(Context& c, const Instruction& i) {
  Lanes source[3], out;
  for (int k = 0; k < Op::SOURCES; ++k) {
    Lanes scratch;
    const Lanes& x = floating(c, i.operands[k + 1], scratch);
    if (i.a) each(source[k], [&](int l) { return flush(x[l]); });
    else source[k] = x;
  }
  calculate<Op>(source[0], source[1], source[Op::SOURCES - 1], out, i.c);
  if (i.a) each(out, [&](int l) { return flush(out[l]); });
  if constexpr (std::is_same_v<Op, Multiply>)  // a result is flushed if only rounding makes it normal
    if (i.a)
      each(out, [&](int l) {
        const bool tiny = std::fabs(double(as_float(source[0][l])) * as_float(source[1][l])) < 0x1p-126;
        return tiny ? out[l] & 0x80000000u : out[l];
      });
  if (i.b) each(out, [&](int l) { return saturate(out[l]); });
  write(c, i.operands[0], out);
  return Step::Done;
}

template <class Op>
Execute prepare_float_arithmetic(Instruction& i) {
  Modifiers m(i);
  i.a = m.take("FTZ");
  i.b = m.take("SAT");
  i.c = take_rounding(m);
  if (!m.none_left() || i.operands.size() != Op::SOURCES + 1) return nullptr;
  return i.a || i.b || i.c ? arithmetic_with<Op> : float_arithmetic<Op>;
}

const char* const SCALES[] = {"D8", "D4", "D2", "", "M2", "M4", "M8", nullptr};

// FMUL.M8, FMUL.D2: the product times a power of two, rounded once. a = .FTZ, b = .SAT, c = rounding, d = the power
Step scaled_product(Context& c, const Instruction& i) {
  Lanes s, t, out;
  const Lanes &x = floating(c, i.operands[1], s), &y = floating(c, i.operands[2], t);
  const double scale = i.d < 0 ? 1.0 / (1 << -i.d) : double(1 << i.d);
  const bool flushes = i.a;
  {
    const Rounded rounded(i.c);
    for (int l = 0; l < LANES; ++l) {  // a double holds the product of two floats exactly
      const volatile double product =
          scale * as_float(flushes ? flush(x[l]) : x[l]) * as_float(flushes ? flush(y[l]) : y[l]);
      const volatile float rounded_once = float(product);
      out[l] = canonical(rounded_once);
    }
  }
  if (i.a) each(out, [&](int l) { return flush(out[l]); });
  if (i.b) each(out, [&](int l) { return saturate(out[l]); });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_multiply(Instruction& i) {
  Modifiers m(i);
  const int scale = take_one(m, SCALES);
  if (scale < 0) return prepare_float_arithmetic<Multiply>(i);
  i.d = scale - 3;
  i.a = m.take("FTZ");
  i.b = m.take("SAT");
  i.c = take_rounding(m);
  return m.none_left() && i.operands.size() == 3 ? scaled_product : nullptr;
}

// FMNMX R, x, y, P: the predicate selects the smaller. a = .FTZ, b = .NAN, c = .XORSIGN
Step fmnmx(Context& c, const Instruction& i) {
  Lanes s, t, u, v, out;
  const Lanes &x = floating(c, i.operands[1], s), &y = floating(c, i.operands[2], t);
  // XORSIGN uses the signs before |…| removes them
  const Lanes &x_sign = plain(c, i.operands[1], u), &y_sign = plain(c, i.operands[2], v);
  const u32 least = predicate(c, i.operands[3]), keep = i.c ? 0x7fffffffu : ALL, signs = ~keep;
  const bool flushes = i.a, spreads = i.b;
  each(out, [&](int l) {
    const u32 p = flushes ? flush(x[l]) : x[l], q = flushes ? flush(y[l]) : y[l];
    const u32 pk = p & keep, qk = q & keep;
    // ordered as integers, so that −0 < +0
    const i32 po = i32(pk) < 0 ? i32(pk ^ 0x7fffffffu) : i32(pk), qo = i32(qk) < 0 ? i32(qk ^ 0x7fffffffu) : i32(qk);
    const bool p_nan = (pk & 0x7fffffffu) > 0x7f800000u, q_nan = (qk & 0x7fffffffu) > 0x7f800000u;
    const bool first = (least >> l & 1) ? po < qo : po > qo;
    u32 v = first ? pk : qk;
    v = p_nan ? qk : q_nan ? pk : v;
    v |= (x_sign[l] ^ y_sign[l]) & signs;
    const bool none = spreads ? p_nan | q_nan : p_nan & q_nan;
    return none ? NAN_BITS : v;
  });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_fmnmx(Instruction& i) {
  Modifiers m(i);
  i.a = m.take("FTZ");
  i.b = m.take("NAN");
  i.c = m.take("XORSIGN");
  return m.none_left() && i.operands.size() == 4 ? fmnmx : nullptr;
}

// FSEL R, x, y, P. a = .FTZ
Step fsel(Context& c, const Instruction& i) {
  Lanes s, t, out;
  const Lanes &x = floating(c, i.operands[1], s), &y = floating(c, i.operands[2], t);
  const u32 first = predicate(c, i.operands[3]);
  const bool flushes = i.a;
  each(out, [&](int l) {
    const u32 v = first >> l & 1 ? x[l] : y[l];
    return flushes ? flush(v) : v;
  });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_fsel(Instruction& i) {
  Modifiers m(i);
  i.a = m.take("FTZ");
  return m.none_left() && i.operands.size() == 4 ? fsel : nullptr;
}

// ── comparisons ─────────────────────────────────────────────────────────────────────────────────────────────────────

// a = order, b = .FTZ
u32 compared(Context& c, const Instruction& i, const Operand& a, const Operand& b) {
  Lanes s, t;
  const Lanes &x = floating(c, a, s), &y = floating(c, b, t);
  if (!i.b) return compare_floats(i.a, [&](int l) { return as_float(x[l]); }, [&](int l) { return as_float(y[l]); });
  return compare_floats(
      i.a, [&](int l) { return as_float(flush(x[l])); }, [&](int l) { return as_float(flush(y[l])); });
}

// FSETP P, P, x, y, P. c = join
Step fsetp(Context& c, const Instruction& i) {
  const u32 result = compared(c, i, i.operands[2], i.operands[3]), beside = predicate(c, i.operands[4]);
  write_predicate(c, i.operands[0], join(i.c, result, beside));
  write_predicate(c, i.operands[1], join(i.c, ~result, beside));
  return Step::Done;
}

// FSET R, x, y, P: all ones, or 1.0 where d = .BF
Step fset(Context& c, const Instruction& i) {
  const u32 beside = predicate(c, i.operands[3]);
  const u32 result = join(i.c, compared(c, i, i.operands[1], i.operands[2]), beside), yes = i.d ? as_bits(1.0f) : ALL;
  Lanes out;
  each(out, [&](int l) { return result >> l & 1 ? yes : 0; });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_compare(Instruction& i) {
  Modifiers m(i);
  const bool to_predicate = i.opcode.find("FSETP") != std::string::npos;
  i.d = m.take("BF");
  i.b = m.take("FTZ");
  i.a = take_one(m, FLOAT_ORDERS);
  i.c = take_join(m);
  if (i.a < 0 || !m.none_left() || i.operands.size() != (to_predicate ? 5u : 4u)) return nullptr;
  return to_predicate ? fsetp : fset;
}

// FCHK P, x, y: whether x / y by reciprocal and correction could fail at the ends of the exponent range.
Step fchk(Context& c, const Instruction& i) {
  Lanes s, t;
  const Lanes &x = floating(c, i.operands[1], s), &y = floating(c, i.operands[2], t);
  write_predicate(c, i.operands[0], bits([&](int l) {
                    const int p = int(x[l] >> 23 & 0xff), q = int(y[l] >> 23 & 0xff);
                    const bool plain_values = p >= 25 && p <= 254 && q >= 2 && q <= 252;
                    return !(plain_values && p - q >= -124 && p - q <= 125);
                  }));
  return Step::Done;
}

Execute prepare_fchk(Instruction& i) {
  Modifiers m(i);
  m.take("DIVIDE");
  return m.none_left() && i.operands.size() == 3 ? fchk : nullptr;
}

// ── special functions ───────────────────────────────────────────────────────────────────────────────────────────────

enum Function { RCP, RSQ, SQRT, EX2, LG2, SIN, COS, TANH, RCP64H, RSQ64H };
const char* const FUNCTIONS[] = {"RCP", "RSQ", "SQRT", "EX2", "LG2", "SIN", "COS", "TANH", "RCP64H", "RSQ64H", nullptr};

// SIN and COS of turns: hardware truncates the argument to multiples of 2^-25 of a turn.
float of_turns(bool cosine, float turns) {
  if (!std::isfinite(turns)) return NAN;
  constexpr u32 QUARTER = 1u << 23;
  constexpr double UNIT = 1.570796326794896619231 / QUARTER;
  const u32 whole = u32(std::fmod(std::fabs(double(turns)), 1.0) * (4.0 * QUARTER));
  const u32 quarters = (whole / QUARTER + cosine) % 4, rest = whole % QUARTER;
  const double sine = std::sin(UNIT * (quarters % 2 ? QUARTER - rest : rest));
  const bool negative = (quarters >= 2) != (!cosine && std::signbit(turns));
  return float(negative ? -sine : sine);
}

float special_function(int function, float x) {
  switch (function) {
    case RCP: return 1.0f / x;
    case RSQ: return float(1.0 / std::sqrt(double(x)));
    case SQRT: return std::sqrt(x);
    case EX2: return std::exp2(x);
    case LG2: return std::log2(x);
    case SIN: return of_turns(false, x);
    case COS: return of_turns(true, x);
    default: return std::fabs(x) < 0x1p-8f ? x : std::tanh(x);  // the same for small numbers
  }
}

// The high word of the result for a double whose high word is given.
u32 high_function(int function, u32 high) {
  const double x = std::bit_cast<double>(u64(high) << 32);
  const double y = function == RCP64H ? 1.0 / x : 1.0 / std::sqrt(x);
  return y != y ? 0x7fffffffu : u32(std::bit_cast<u64>(y) >> 32);
}

// a = function, b = 1 on halves, 2 on bfloats
Step mufu(Context& c, const Instruction& i) {
  Lanes s, out{};
  const Operand& from = i.operands[1];
  const Lanes& x = i.b ? plain(c, from, s) : floating(c, from, s);
  for (int l = 0; l < LANES; ++l) {
    if (!(c.lanes >> l & 1)) continue;
    if (i.a >= RCP64H) out[l] = high_function(i.a, x[l]);
    else if (i.b) {
      u32 half = (from.part == 2 ? x[l] >> 16 : x[l]) & 0xffff;
      if (from.absolute) half &= 0x7fff;
      if (from.negate) half ^= 0x8000;
      const float value = special_function(i.a, i.b == 1 ? half_to_float(half) : bfloat_to_float(half));
      // truncated, not rounded; a bfloat has float's exponent range, in which MUFU flushes subnormals except for TANH
      out[l] = value >= 0x1p16f && i.b == 1
                   ? 0x7c00
                   : to_format(i.b == 2 && i.a != TANH ? as_float(flush(as_bits(value))) : value,
                               i.b == 1 ? HALF_FORMAT : BFLOAT_FORMAT, TRUNCATE);
    } else if (i.a == TANH) out[l] = canonical(special_function(TANH, as_float(x[l])));
    else out[l] = flush(canonical(special_function(i.a, as_float(flush(x[l])))));
  }
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_mufu(Instruction& i) {
  Modifiers m(i);
  i.a = take_one(m, FUNCTIONS);
  i.b = m.take("F16") ? 1 : m.take("BF16") ? 2 : 0;
  return i.a >= 0 && m.none_left() && i.operands.size() == 2 ? mufu : nullptr;
}

}  // namespace

const Opcode FLOATING[] = {
    {"FADD", Pipe::Fma, prepare_float_arithmetic<Add>},
    {"UFADD", Pipe::Uniform, prepare_float_arithmetic<Add>},
    {"FMUL", Pipe::Fma, prepare_multiply},
    {"UFMUL", Pipe::Uniform, prepare_multiply},
    {"FFMA", Pipe::Fma, prepare_float_arithmetic<MultiplyAdd>},
    {"UFFMA", Pipe::Uniform, prepare_float_arithmetic<MultiplyAdd>},
    {"FADD32I", Pipe::Fma, prepare_float_arithmetic<Add>},
    {"FMUL32I", Pipe::Fma, prepare_float_arithmetic<Multiply>},
    {"FMNMX", Pipe::Alu, prepare_fmnmx},
    {"UFMNMX", Pipe::Uniform, prepare_fmnmx},
    {"FSEL", Pipe::Alu, prepare_fsel},
    {"UFSEL", Pipe::Uniform, prepare_fsel},
    {"FSET", Pipe::Alu, prepare_compare},
    {"UFSET", Pipe::Uniform, prepare_compare},
    {"FSETP", Pipe::Alu, prepare_compare},
    {"UFSETP", Pipe::Uniform, prepare_compare},
    {"FCHK", Pipe::Mufu, prepare_fchk},
    {"MUFU", Pipe::Mufu, prepare_mufu},
    {nullptr, Pipe::None, nullptr},
};

}  // namespace sass
