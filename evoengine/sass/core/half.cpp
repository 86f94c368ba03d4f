// Arithmetic on pairs of halves or bfloats in one register.
#include "rounding.h"

namespace sass {
namespace {

// Formats of the pair.
struct F16 {
  static constexpr u32 EXPONENT = 0x7c00, ONE = 0x3c00;
  static float widen(u32 x) { return half_to_float(x); }
  static u32 narrow(float x) { return float_to_half(x); }
};
struct BF16 {
  static constexpr u32 EXPONENT = 0x7f80, ONE = 0x3f80;
  static float widen(u32 x) { return bfloat_to_float(x); }
  static u32 narrow(float x) { return float_to_bfloat(x); }
};

// The operand as two halves in one register, with its selection of halves and its signs applied. Part 8, which sm_75
// uses for __float2half_rz, is a float, truncated to a half.
void load_pair(Context& c, const Operand& o, Lanes& out) {
  Lanes s;
  const Lanes& x = plain(c, o, s);
  const u32 keep = o.absolute ? 0x7fff7fffu : ALL, flip = o.negate ? 0x80008000u : 0;
  const int part = o.part;
  if (part == 8) {
    each(out, [&](int l) { return ((to_format(as_float(x[l]), HALF_FORMAT, TRUNCATE) * 0x10001u) & keep) ^ flip; });
    return;
  }
  each(out, [&](int l) {
    const u32 v = x[l], low = v & 0xffff, high = v >> 16;
    const u32 chosen = part == 1 ? low | low << 16 : part == 2 ? high | high << 16 : part == 3 ? high | low << 16 : v;
    return (chosen & keep) ^ flip;
  });
}

template <class F>
u32 flush_half(u32 x) {
  return x & F::EXPONENT ? x : x & 0x8000u;
}

template <class F>
void flush_pair(Lanes& x) {
  each(x, [&](int l) { return flush_half<F>(x[l] & 0xffff) | flush_half<F>(x[l] >> 16) << 16; });
}

// x·y + z in the format, rounded once: each longer format records in its last bit that something was cut off.
template <class F>
u32 fused(u32 x, u32 y, u32 z) {
  const double product = double(F::widen(x)) * double(F::widen(y)), other = double(F::widen(z));
  const double sum = product + other, part = sum - product;
  const double error = (product - (sum - part)) + (other - part);
  u64 wide = std::bit_cast<u64>(sum);
  const bool up = (error > 0) == (sum > 0);
  if (error != 0 && error == error && !(wide & 1)) wide += up ? 1 : u64(-1);
  const double odd = std::bit_cast<double>(wide);
  const float near = float(odd);
  u32 narrow = as_bits(near);
  const double gap = odd - double(near);
  if (gap != 0 && gap == gap && !(narrow & 1)) narrow += ((gap > 0) == (odd > 0)) ? 1 : u32(-1);
  return sum != sum ? 0x7fffu : F::narrow(as_float(narrow));
}

// a = .FTZ, b = .SAT, c = .RELU
template <class F>
void finish(Context& c, const Instruction& i, Lanes& out) {
  if (i.a) flush_pair<F>(out);
  auto limit = [&](u32 x) {
    const bool nan = (x & 0x7fff) > F::EXPONENT, negative = x & 0x8000;
    if (i.b) return nan || negative ? 0u : x > F::ONE ? F::ONE : x;
    return negative && !nan ? 0u : x;
  };
  if (i.b || i.c) each(out, [&](int l) { return limit(out[l] & 0xffff) | limit(out[l] >> 16) << 16; });
  write(c, i.operands[0], out);
}

// HADD2, HMUL2, HFMA2 as one: d = 0 x·1 + y, 1 x·y − 0, 2 x·y + z
template <class F>
Step half_arithmetic(Context& c, const Instruction& i) {
  Lanes source[3], out;
  const int last = i.d == 2 ? 3 : 2;
  for (int k = 0; k < last; ++k) {
    load_pair(c, i.operands[k + 1], source[k]);
    if (i.a) flush_pair<F>(source[k]);
  }
  constexpr u32 ONES = F::ONE | F::ONE << 16;
  const Lanes &x = source[0], &y = source[1], &z = source[2];
  auto calculate = [&](int l, int shift) {
    const u32 p = x[l] >> shift & 0xffff, q = y[l] >> shift & 0xffff;
    if (i.d == 0) return fused<F>(p, ONES & 0xffff, q);
    const u32 sign = (p ^ q) & 0x8000;  // adding a zero of the product's sign keeps it
    return fused<F>(p, q, i.d == 1 ? sign : z[l] >> shift & 0xffff);
  };
  each(out, [&](int l) { return calculate(l, 0) | calculate(l, 16) << 16; });
  finish<F>(c, i, out);
  return Step::Done;
}

// HADD2.F32 R, x, y: the sum of the low halves as a float
template <class F>
Step add_float(Context& c, const Instruction& i) {
  Lanes x, y, out;
  load_pair(c, i.operands[1], x);
  load_pair(c, i.operands[2], y);
  each(out, [&](int l) { return canonical(F::widen(x[l] & 0xffff) + F::widen(y[l] & 0xffff)); });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_arithmetic(Instruction& i) {
  Modifiers m(i);
  const bool bfloat = m.take("BF16_V2") || m.take("BF16");
  const bool to_float = m.take("F32");
  m.take("MMA");  // the pipe it runs on
  m.take("OOB");  // replaces a NaN that a copy filled in for elements outside its tensor; no copy here does
  i.a = m.take("FTZ");
  i.b = m.take("SAT");
  i.c = m.take("RELU");
  i.d = i.opcode.starts_with("HADD2") ? 0 : i.opcode.starts_with("HMUL2") ? 1 : 2;
  if (!m.none_left() || i.operands.size() != (i.d == 2 ? 4u : 3u)) return nullptr;
  if (to_float) return i.d == 0 && !i.a && !i.b && !i.c ? (bfloat ? add_float<BF16> : add_float<F16>) : nullptr;
  return bfloat ? half_arithmetic<BF16> : half_arithmetic<F16>;
}

// The operand without its changes of sign.
Operand unsigned_of(Operand o) {
  o.absolute = o.negate = false;
  return o;
}

// HMNMX2 R, x, y, P: the predicate selects the smaller. a = .FTZ, b = .NAN, c = .XORSIGN
template <class F>
Step hmnmx2(Context& c, const Instruction& i) {
  Lanes x, y, x_sign, y_sign, out;
  load_pair(c, i.operands[1], x);
  load_pair(c, i.operands[2], y);
  load_pair(c, unsigned_of(i.operands[1]), x_sign);  // XORSIGN uses the signs before |…| removes them
  load_pair(c, unsigned_of(i.operands[2]), y_sign);
  if (i.a) flush_pair<F>(x), flush_pair<F>(y);
  const u32 least = predicate(c, i.operands[3]);
  auto pick = [&](int l, int shift) -> u32 {
    const u32 p = x[l] >> shift & 0xffff, q = y[l] >> shift & 0xffff, keep = i.c ? 0x7fff : 0xffff;
    const bool p_nan = (p & 0x7fff) > F::EXPONENT, q_nan = (q & 0x7fff) > F::EXPONENT;
    if (i.b ? p_nan || q_nan : p_nan && q_nan) return 0x7fffu;
    const u32 pk = p & keep, qk = q & keep;
    const i32 po = pk & 0x8000 ? -i32(pk & 0x7fff) - 1 : i32(pk), qo = qk & 0x8000 ? -i32(qk & 0x7fff) - 1 : i32(qk);
    const bool first = (least >> l & 1) ? po < qo : po > qo;
    return (p_nan ? qk : q_nan ? pk : first ? pk : qk) | ((x_sign[l] ^ y_sign[l]) >> shift & ~keep & 0xffff);
  };
  each(out, [&](int l) { return pick(l, 0) | pick(l, 16) << 16; });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_hmnmx2(Instruction& i) {
  Modifiers m(i);
  const bool bfloat = m.take("BF16_V2") || m.take("BF16");
  i.a = m.take("FTZ");
  i.b = m.take("NAN");
  i.c = m.take("XORSIGN");
  if (!m.none_left() || i.operands.size() != 4) return nullptr;
  return bfloat ? hmnmx2<BF16> : hmnmx2<F16>;
}

template <class F>
Step packed(Context& c, const Instruction& i, FloatFormat format) {
  Lanes s, t, out;
  const Lanes &high = floating(c, i.operands[1], s), &low = floating(c, i.operands[2], t);
  auto relu = [&](u32 x) { return i.c ? positive(as_float(x)) : as_float(x); };
  if (i.b == NEAREST && !i.d && !i.c)
    each(out, [&](int l) { return F::narrow(as_float(low[l])) | F::narrow(as_float(high[l])) << 16; });
  else
    each(out, [&](int l) {
      return to_format(relu(low[l]), format, i.b, i.d) | to_format(relu(high[l]), format, i.b, i.d) << 16;
    });
  write(c, i.operands[0], out);
  return Step::Done;
}

// Both comparisons: a = order, b = .FTZ
template <class F>
void compared(Context& c, const Instruction& i, int first, u32 (&result)[2]) {
  Lanes x, y;
  load_pair(c, i.operands[first], x);
  load_pair(c, i.operands[first + 1], y);
  if (i.b) flush_pair<F>(x), flush_pair<F>(y);
  for (int k = 0; k < 2; ++k)
    result[k] = compare_floats(
        i.a, [&](int l) { return F::widen(x[l] >> (16 * k) & 0xffff); },
        [&](int l) { return F::widen(y[l] >> (16 * k) & 0xffff); });
}

// HSETP2 P, P, x, y, P: one predicate for each half; with d = .H_AND both halves together. c = join
template <class F>
Step hsetp2(Context& c, const Instruction& i) {
  u32 result[2];
  compared<F>(c, i, 2, result);
  const u32 beside = predicate(c, i.operands[4]), both = result[0] & result[1];
  write_predicate(c, i.operands[0], join(i.c, i.d ? both : result[0], beside));
  write_predicate(c, i.operands[1], join(i.c, i.d ? ~both : result[1], beside));
  return Step::Done;
}

// HSET2 R, x, y, P: all ones, or 1.0 where d = .BF
template <class F>
Step hset2(Context& c, const Instruction& i) {
  u32 result[2];
  compared<F>(c, i, 1, result);
  const u32 beside = predicate(c, i.operands[3]), yes = i.d ? F::ONE : 0xffffu;
  const u32 low = join(i.c, result[0], beside), high = join(i.c, result[1], beside);
  Lanes out;
  each(out, [&](int l) { return (low >> l & 1 ? yes : 0) | (high >> l & 1 ? yes << 16 : 0); });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_half_compare(Instruction& i) {
  Modifiers m(i);
  const bool to_predicate = i.opcode.starts_with("HSETP2"), bfloat = m.take("BF16_V2") || m.take("BF16");
  i.d = to_predicate ? m.take("H_AND") : m.take("BF");
  i.b = m.take("FTZ");
  i.a = take_one(m, FLOAT_ORDERS);
  i.c = take_join(m);
  if (i.a < 0 || !m.none_left() || i.operands.size() != (to_predicate ? 5u : 4u)) return nullptr;
  if (to_predicate) return bfloat ? hsetp2<BF16> : hsetp2<F16>;
  return bfloat ? hset2<BF16> : hset2<F16>;
}

}  // namespace

Step pack_halves(Context& c, const Instruction& i) { return packed<F16>(c, i, HALF_FORMAT); }
Step pack_bfloats(Context& c, const Instruction& i) { return packed<BF16>(c, i, BFLOAT_FORMAT); }

const Opcode HALF[] = {
    {"HADD2", Pipe::Half, prepare_arithmetic},
    {"HMUL2", Pipe::Half, prepare_arithmetic},
    {"HFMA2", Pipe::Half, prepare_arithmetic},
    {"HMNMX2", Pipe::Alu, prepare_hmnmx2},
    {"HSETP2", Pipe::Half, prepare_half_compare},
    {"HSET2", Pipe::Half, prepare_half_compare},
    {nullptr, Pipe::None, nullptr},
};

}  // namespace sass
