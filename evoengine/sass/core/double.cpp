// Arithmetic on 64-bit floats, each in a pair of registers; an immediate is the upper word.
#include "rounding.h"

namespace sass {
namespace {

constexpr u64 SIGN = 0x8000000000000000ull;

struct Doubles {
  double v[LANES];
  double operator[](int l) const { return v[l]; }
};

// The bits unchanged, without signs.
void load_bits(Context& c, const Operand& o, Wide& out) {
  load_wide(c, o, out);
  if (o.kind == Kind::Immediate)
    for (int l = 0; l < LANES; ++l) out[l] <<= 32;
}

void load_doubles(Context& c, const Operand& o, Doubles& out) {
  Wide x;
  load_bits(c, o, x);
  for (int l = 0; l < LANES; ++l) {
    u64 bits = x[l];
    if (o.absolute) bits &= ~SIGN;
    if (o.negate) bits ^= SIGN;
    out.v[l] = std::bit_cast<double>(bits);
  }
}

u64 canonical_bits(double d) { return d != d ? DOUBLE_NAN : std::bit_cast<u64>(d); }

template <class Op>
[[gnu::noinline]] void calculate(const Doubles& x, const Doubles& y, const Doubles& z, Wide& out, int rounding) {
  const Rounded rounded(rounding);
  for (int l = 0; l < LANES; ++l) out[l] = canonical_bits(Op::of(x[l], y[l], z[l]));
  __asm__ volatile("" ::"r"(&out) : "memory");
}

// a = rounding
template <class Op>
Step arithmetic(Context& c, const Instruction& i) {
  Doubles source[3];
  Wide out;
  Wide raw[3];
  for (int k = 0; k < Op::SOURCES; ++k)
    load_doubles(c, i.operands[k + 1], source[k]), load_bits(c, i.operands[k + 1], raw[k]);
  calculate<Op>(source[0], source[1], source[Op::SOURCES - 1], out, i.a);
  for (int l = 0; l < LANES; ++l)
    if (out[l] == DOUBLE_NAN) out[l] = carried_nan(raw[0][l], raw[1][l], Op::SOURCES == 3 ? raw[2][l] : 0);
  write_wide(c, i.operands[0], out);
  return Step::Done;
}

template <class Op>
Execute prepare_arithmetic(Instruction& i) {
  Modifiers m(i);
  i.a = take_rounding(m);
  return m.none_left() && i.operands.size() == Op::SOURCES + 1 ? arithmetic<Op> : nullptr;
}

// DSETP P, P, x, y, P. a = order, b = join
Step dsetp(Context& c, const Instruction& i) {
  Doubles x, y;
  load_doubles(c, i.operands[2], x);
  load_doubles(c, i.operands[3], y);
  const u32 result = compare_floats(i.a, [&](int l) { return x[l]; }, [&](int l) { return y[l]; });
  const u32 beside = predicate(c, i.operands[4]);
  write_predicate(c, i.operands[0], join(i.b, result, beside));
  write_predicate(c, i.operands[1], join(i.b, ~result, beside));
  return Step::Done;
}

// DSETP.MIN P, P, x, y, P: whether x is the result of a minimum, and whether neither is a number. a = smaller
Step dsetp_pick(Context& c, const Instruction& i) {
  Doubles x, y;
  load_doubles(c, i.operands[2], x);
  load_doubles(c, i.operands[3], y);
  const u32 beside = predicate(c, i.operands[4]);
  auto first = [&](int l) {
    if (x[l] != x[l] || y[l] != y[l]) return x[l] == x[l];
    if (x[l] == y[l]) return std::signbit(x[l]) == bool(i.a);
    return (x[l] < y[l]) == bool(i.a);
  };
  write_predicate(c, i.operands[0], bits(first) & beside);
  write_predicate(c, i.operands[1], bits([&](int l) { return x[l] != x[l] && y[l] != y[l]; }) & beside);
  return Step::Done;
}

Execute prepare_dsetp(Instruction& i) {
  Modifiers m(i);
  if (has(i, "MIN") || has(i, "MAX")) {
    i.a = m.take("MIN");
    m.take("MAX");
    return m.take("AND") && m.none_left() && i.operands.size() == 5 ? dsetp_pick : nullptr;
  }
  i.a = take_one(m, FLOAT_ORDERS);
  i.b = take_join(m);
  return i.a >= 0 && m.none_left() && i.operands.size() == 5 ? dsetp : nullptr;
}

// DMNMX R, x, y, P: for a NaN the result is the other operand
Step dmnmx(Context& c, const Instruction& i) {
  Doubles x, y;
  load_doubles(c, i.operands[1], x);
  load_doubles(c, i.operands[2], y);
  const u32 least = predicate(c, i.operands[3]);
  Wide out;
  for (int l = 0; l < LANES; ++l)
    out[l] = canonical_bits(least >> l & 1 ? std::fmin(x[l], y[l]) : std::fmax(x[l], y[l]));
  write_wide(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_dmnmx(Instruction& i) { return i.modifiers.empty() && i.operands.size() == 4 ? dmnmx : nullptr; }

}  // namespace

const Opcode DOUBLE[] = {
    {"DADD", Pipe::Fp64, prepare_arithmetic<Add>},
    {"DMUL", Pipe::Fp64, prepare_arithmetic<Multiply>},
    {"DFMA", Pipe::Fp64, prepare_arithmetic<MultiplyAdd>},
    {"DSETP", Pipe::Fp64, prepare_dsetp},
    {"DMNMX", Pipe::Fp64, prepare_dmnmx},
    {nullptr, Pipe::None, nullptr},
};

}  // namespace sass
