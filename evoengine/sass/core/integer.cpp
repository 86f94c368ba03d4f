// Integer sums, products, comparisons, minima and maxima; the same for vector and uniform registers.
#include <algorithm>

#include "lanes.h"

namespace sass {
namespace {

// ── sums ────────────────────────────────────────────────────────────────────────────────────────────────────────────

// A source of a sum with a carry: −b is ~b + 1, and the one counts towards the carry.
void add_source(Context& c, const Operand& o, Wide& sum) {
  Lanes s;
  const Lanes& x = plain(c, o, s);
  const u32 flip = o.negate || o.invert ? ALL : 0;
  for (int l = 0; l < LANES; ++l) sum[l] += u64(x[l] ^ flip) + o.negate;
}

// IADD3 R, [P, [P,]] a, b, c [, P [, P]], IADD of two: a = first source, b = .X, c = sources
Step iadd3(Context& c, const Instruction& i) {
  const int first = i.a;
  if (first == 1 && !i.b) {
    Lanes s, t, r, out;
    const Lanes &x = integer(c, i.operands[1], s), &y = integer(c, i.operands[2], t);
    if (i.c == 2) each(out, [&](int l) { return x[l] + y[l]; });
    else {
      const Lanes& z = integer(c, i.operands[3], r);
      each(out, [&](int l) { return x[l] + y[l] + z[l]; });
    }
    write(c, i.operands[0], out);
    return Step::Done;
  }
  Wide sum{};
  for (int k = 0; k < i.c; ++k) add_source(c, i.operands[first + k], sum);
  if (i.b)
    for (size_t k = first + i.c; k < i.operands.size(); ++k) {
      const u32 carry = predicate(c, i.operands[k]);
      for (int l = 0; l < LANES; ++l) sum[l] += carry >> l & 1;
    }
  Lanes out;
  each(out, [&](int l) { return u32(sum[l]); });
  for (int k = 1; k < first; ++k)
    write_predicate(c, i.operands[k], bits([&](int l) { return sum[l] >> 32 >= u64(k); }));
  write(c, i.operands[0], out);
  return Step::Done;
}

// IADD.64, UIADD3.64 R, [P, [P,]] a, b [, c] [, P [, P]]: sums of pairs. a = first source, b = .X, c = sources
Step add_pairs(Context& c, const Instruction& i) {
  unsigned __int128 sum[LANES] = {};
  Wide x;
  for (int k = i.a; k < i.a + i.c; ++k) {
    const Operand& o = i.operands[k];
    load_pair(c, o, x);
    const u64 flip = o.negate || o.invert ? ~u64(0) : 0;
    for (int l = 0; l < LANES; ++l) sum[l] += (x[l] ^ flip), sum[l] += o.negate;
  }
  for (size_t k = i.a + i.c; k < i.operands.size(); ++k) {
    const u32 carry = predicate(c, i.operands[k]);
    for (int l = 0; l < LANES; ++l) sum[l] += carry >> l & 1;
  }
  for (int k = 1; k < i.a; ++k)
    write_predicate(c, i.operands[k], bits([&](int l) { return u64(sum[l] >> 64) >= u64(k); }));
  Wide out;
  for (int l = 0; l < LANES; ++l) out[l] = u64(sum[l]);
  write_wide(c, i.operands[0], out);
  return Step::Done;
}

template <int SOURCES>
Execute prepare_add(Instruction& i) {
  Modifiers m(i);
  const bool pairs = m.take("64");
  i.b = m.take("X");
  i.a = 1 + predicates_after(i, 1);
  i.c = SOURCES;
  const int carries = int(i.operands.size()) - i.a - SOURCES;
  if (!m.none_left() || carries < 0 || (!i.b && carries)) return nullptr;
  return pairs ? add_pairs : iadd3;
}

u32 add(u32 x, u32 y, const Instruction&) { return x + y; }

// VIADD.16x2 R, x, y: each half by itself, its sign too
Step add_halfwords(Context& c, const Instruction& i) {
  Lanes s, t, out;
  const Lanes &x = plain(c, i.operands[1], s), &y = plain(c, i.operands[2], t);
  const u32 p = i.operands[1].negate ? ALL : 1, q = i.operands[2].negate ? ALL : 1;
  each(out, [&](int l) { return u32(u16(x[l] * p + y[l] * q)) | ((x[l] >> 16) * p + (y[l] >> 16) * q) << 16; });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_viadd(Instruction& i) {
  Modifiers m(i);
  const bool halfwords = m.take("16x2");
  return !m.none_left() || i.operands.size() != 3 ? nullptr : halfwords ? add_halfwords : binary<add>;
}

// ── products ────────────────────────────────────────────────────────────────────────────────────────────────────────

Step imad(Context& c, const Instruction& i) {
  return ternary<[](u32 x, u32 y, u32 z, const Instruction&) { return x * y + z; }>(c, i);
}

// Everything but the low word without a carry. a = first source, b = .X, c = signed, d = 0 low, 1 high, 2 both words
Step imad_wide(Context& c, const Instruction& i) {
  const Operand &a = i.operands[i.a], &b = i.operands[i.a + 1], &addend = i.operands[i.a + 2];
  Lanes s, t;
  Wide z;
  const Lanes &x = plain(c, a, s), &y = plain(c, b, t);
  if (i.d) load_wide(c, addend, z);
  else {
    Lanes r;
    const Lanes& low = plain(c, addend, r);
    for (int l = 0; l < LANES; ++l) z[l] = low[l];
  }
  const u32 carry = i.b ? predicate(c, i.operands[i.a + 3]) : 0;
  const bool negate = a.negate != b.negate;
  Wide out;
  u32 carries = 0;
  for (int l = 0; l < LANES; ++l) {
    u64 product = i.c ? u64(i64(i32(x[l])) * i64(i32(y[l]))) : u64(x[l]) * y[l];
    if (negate) product = 0 - product;
    const u64 other = addend.invert ? ~z[l] : addend.negate ? 0 - z[l] : z[l];
    const u64 sum = product + other;
    out[l] = sum + (carry >> l & 1);
    carries |= u32(sum < product || out[l] < sum) << l;
  }
  if (i.a > 1) write_predicate(c, i.operands[1], carries);
  if (i.d == 2) {
    write_wide(c, i.operands[0], out);
    return Step::Done;
  }
  const int shift = i.d == 1 ? 32 : 0;
  Lanes word;
  each(word, [&](int l) { return u32(out[l] >> shift); });
  write(c, i.operands[0], word);
  return Step::Done;
}

Execute prepare_imad(Instruction& i) {
  Modifiers m(i);
  const bool moves = m.take("MOV") | m.take("SHL") | m.take("IADD");
  (void)moves;  // names of what the products with 1 and 2ⁿ are used for
  i.c = !m.take("U32");
  m.take("S32");
  i.b = m.take("X");
  i.d = m.take("HI") ? 1 : m.take("WIDE") ? 2 : 0;
  i.a = 1 + predicates_after(i, 1);
  if (!m.none_left() || int(i.operands.size()) < i.a + 3 + i.b || i.a > 2) return nullptr;
  if (i.d == 0 && i.a > 1) return nullptr;
  return i.d == 0 && !i.b ? imad : imad_wide;
}

// Sums of products of bytes or of halfwords and bytes: a = width of x's parts, b = signs (1 x, 2 y), c = .HI
Step idp(Context& c, const Instruction& i) {
  Lanes s, t, r, out;
  const Lanes &x = integer(c, i.operands[1], s), &y = integer(c, i.operands[2], t), &z = integer(c, i.operands[3], r);
  const int width = i.a, parts = 32 / width;
  for (int l = 0; l < LANES; ++l) {
    i64 sum = i32(z[l]);
    for (int k = 0; k < parts; ++k) {
      const u32 p = x[l] >> (k * width) & ((1u << width) - 1), q = y[l] >> ((k + (i.c ? 2 : 0)) * 8) & 0xff;
      const i64 signed_p = width == 8 ? i64(int8_t(p)) : i64(int16_t(p));
      sum += (i.b & 1 ? signed_p : i64(p)) * (i.b & 2 ? i64(int8_t(q)) : i64(q));
    }
    out[l] = u32(sum);
  }
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_idp(Instruction& i) {
  if (i.modifiers.empty() || i.operands.size() != 4) return nullptr;
  i.a = i.modifiers[0] == "4A" ? 8 : i.modifiers[0] == "2A" ? 16 : 0;
  std::vector<std::string> types;
  for (size_t k = 1; k < i.modifiers.size(); ++k) {
    if (i.modifiers[k] == "HI") i.c = 1;
    else if (i.modifiers[k] != "LO") types.push_back(i.modifiers[k]);
  }
  if (!i.a || types.size() != 2) return nullptr;
  i.b = (types[0][0] == 'S') | (types[1][0] == 'S') << 1;
  return idp;
}

// ── shifted sums ────────────────────────────────────────────────────────────────────────────────────────────────────

// a = first source, b = .X, c = 0 low word, 1 high word of {c, a}, 2 high word of a's sign extension
Step lea(Context& c, const Instruction& i) {
  const Operand &value = i.operands[i.a], &other = i.operands[i.a + 1];
  const int last = i.a + 2 + (i.c == 1);
  const u32 shift = i.operands[last].immediate & 31;
  Lanes s, t, r, out;
  const Lanes &x = plain(c, value, s), &y = plain(c, other, t);
  Wide v;
  if (i.c == 1) {
    const Lanes& high = plain(c, i.operands[i.a + 2], r);
    for (int l = 0; l < LANES; ++l) v[l] = u64(high[l]) << 32 | x[l];
  } else {
    for (int l = 0; l < LANES; ++l) v[l] = i.c == 2 ? u64(i64(i32(x[l]))) : x[l];
  }
  // The carry of a difference is set if nothing is borrowed, also for x - 0: hence the complement plus one.
  const bool difference = value.negate && !i.c;
  if (value.negate && !difference)
    for (int l = 0; l < LANES; ++l) v[l] = 0 - v[l];
  const u32 carry = i.b ? predicate(c, i.operands[last + 1]) : 0;
  const int down = i.c ? 32 : 0;
  const u32 flip = other.negate || other.invert ? ALL : 0;
  Wide sum;
  for (int l = 0; l < LANES; ++l)
    sum[l] = u64(u32(v[l] << shift >> down) ^ (difference ? ALL : 0)) + difference + (y[l] ^ flip) + other.negate +
             (carry >> l & 1);
  each(out, [&](int l) { return u32(sum[l]); });
  if (i.a > 1) write_predicate(c, i.operands[1], bits([&](int l) { return sum[l] >> 32 != 0; }));
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_lea(Instruction& i) {
  Modifiers m(i);
  const bool high = m.take("HI");
  i.b = m.take("X");
  i.c = m.take("SX32") ? 2 : high;
  i.a = 1 + predicates_after(i, 1);
  const int sources = 3 + (i.c == 1) + i.b;
  if (!m.none_left() || i.a > 2 || int(i.operands.size()) != i.a + sources) return nullptr;
  return i.operands[i.a + 2 + (i.c == 1)].kind == Kind::Immediate ? lea : nullptr;
}

// ── comparisons ─────────────────────────────────────────────────────────────────────────────────────────────────────

enum class Comparison { LT, EQ, LE, GT, NE, GE, Never, Always };
const char* const ORDERS[] = {"LT", "EQ", "LE", "GT", "NE", "GE", "F", "T", nullptr};

template <class T, class Values>
u32 compare(int comparison, const Values& x, const Values& y) {
  switch (Comparison(comparison)) {
    case Comparison::LT: return bits([&](int l) { return T(x[l]) < T(y[l]); });
    case Comparison::EQ: return bits([&](int l) { return x[l] == y[l]; });
    case Comparison::LE: return bits([&](int l) { return T(x[l]) <= T(y[l]); });
    case Comparison::GT: return bits([&](int l) { return T(x[l]) > T(y[l]); });
    case Comparison::NE: return bits([&](int l) { return x[l] != y[l]; });
    case Comparison::GE: return bits([&](int l) { return T(x[l]) >= T(y[l]); });
    case Comparison::Never: return 0;
    case Comparison::Always: return ALL;
  }
}

// ISETP P, P, a, b, P [, P]: a = order, b = unsigned, c = join, d = .EX
Step isetp(Context& c, const Instruction& i) {
  Lanes s, t;
  const Lanes &x = integer(c, i.operands[2], s), &y = integer(c, i.operands[3], t);
  auto held = [&](int order) { return i.b ? compare<u32>(order, x, y) : compare<i32>(order, x, y); };
  u32 result = held(i.a);
  if (i.d) {  // the high words of two pairs: what the low words gave decides where they are equal
    const u32 low = predicate(c, i.operands[5]), equal = held(int(Comparison::EQ));
    result = (result & ~equal) | (low & equal);
  }
  const u32 beside = predicate(c, i.operands[4]);
  write_predicate(c, i.operands[0], join(i.c, result, beside));
  write_predicate(c, i.operands[1], join(i.c, ~result, beside));
  return Step::Done;
}

// ISETP.S64, .U64: the same of pairs
Step compare_pairs(Context& c, const Instruction& i) {
  Wide x, y;
  load_pair(c, i.operands[2], x), load_pair(c, i.operands[3], y);
  const u32 result = i.b ? compare<u64>(i.a, x, y) : compare<i64>(i.a, x, y), beside = predicate(c, i.operands[4]);
  write_predicate(c, i.operands[0], join(i.c, result, beside));
  write_predicate(c, i.operands[1], join(i.c, ~result, beside));
  return Step::Done;
}

Execute prepare_isetp(Instruction& i) {
  Modifiers m(i);
  i.a = take_one(m, ORDERS);
  if (m.take("S64") || m.take("U64")) {
    i.b = has(i, "U64");
    i.c = take_join(m);
    return i.a >= 0 && m.none_left() && i.operands.size() == 5 && !is_changed(i, 2, 3) ? compare_pairs : nullptr;
  }
  i.b = m.take("U32");
  m.take("S32");
  i.d = m.take("EX");
  i.c = take_join(m);
  return i.a >= 0 && m.none_left() && int(i.operands.size()) == 5 + i.d ? isetp : nullptr;
}

template <class T>
u32 smaller(u32 x, u32 y) {
  return T(x) < T(y) ? x : y;
}
template <class T>
u32 larger(u32 x, u32 y) {
  return T(x) > T(y) ? x : y;
}

// In 32 bits or in halfwords
template <class T>
u32 pick(bool least, u32 x, u32 y) {
  if constexpr (sizeof(T) == 4) return least ? smaller<T>(x, y) : larger<T>(x, y);
  else {
    const T low = least ? std::min(T(x), T(y)) : std::max(T(x), T(y));
    const T high = least ? std::min(T(x >> 16), T(y >> 16)) : std::max(T(x >> 16), T(y >> 16));
    return u32(u16(low)) | u32(u16(high)) << 16;
  }
}

// min or max of all sources, a = what comes first (0 nothing, 1 the sum of two), b = .RELU, c = sources
template <class T>
Step minmax(Context& c, const Instruction& i) {
  Lanes s, t, r, out;
  const u32 least = predicate(c, i.operands[1 + i.c]);
  const Lanes &x = integer(c, i.operands[1], s), &y = integer(c, i.operands[2], t);
  const Lanes& z = i.c == 3 ? integer(c, i.operands[3], r) : y;
  for (int l = 0; l < LANES; ++l) {
    const bool small = least >> l & 1;
    u32 v;
    if (i.a && sizeof(T) == 4) v = pick<T>(small, x[l] + y[l], z[l]);
    else if (i.a) v = pick<T>(small, u32(u16(x[l] + y[l])) | ((x[l] >> 16) + (y[l] >> 16)) << 16, z[l]);
    else v = pick<T>(small, pick<T>(small, x[l], y[l]), z[l]);
    out[l] = i.b ? pick<T>(false, v, 0) : v;
  }
  write(c, i.operands[0], out);
  return Step::Done;
}

// IMNMX.S64 P, P, R, a, b, P, P: for pairs. The meaning of the predicates after P is unknown, so they must be unused.
template <class T>
Step minmax_pairs(Context& c, const Instruction& i) {
  Wide x, y, out;
  load_pair(c, i.operands[3], x), load_pair(c, i.operands[4], y);
  const u32 least = predicate(c, i.operands[5]);
  for (int l = 0; l < LANES; ++l) out[l] = (T(x[l]) < T(y[l])) == bool(least >> l & 1) ? x[l] : y[l];
  write_wide(c, i.operands[2], out);
  return Step::Done;
}

Execute prepare_minmax_pairs(Instruction& i) {
  Modifiers m(i);
  const bool is_signed = m.take("S64");
  if (!is_signed && !m.take("U64")) return nullptr;
  if (!m.none_left() || i.operands.size() != 7 || predicates_after(i, 0) != 2 || is_changed(i, 3, 4)) return nullptr;
  for (int k : {0, 1, 6})
    if (i.operands[k].index != PT) return nullptr;
  return is_predicate(i.operands[5]) && i.operands[6].negate ? is_signed ? minmax_pairs<i64> : minmax_pairs<u64>
                                                             : nullptr;
}

Execute prepare_minmax(Instruction& i) {
  if (has(i, "S64") || has(i, "U64")) return prepare_minmax_pairs(i);
  static const char* const TYPES[] = {"S32", "U32", "S16x2", "U16x2", nullptr};
  static const Execute FORMS[] = {minmax<i32>, minmax<u32>, minmax<int16_t>, minmax<u16>};
  Modifiers m(i);
  i.b = m.take("RELU");
  const int type = std::max(0, take_one(m, TYPES));
  i.a = i.opcode.starts_with("VIADDMNMX");
  i.c = i.a || i.opcode.find("MNMX3") != std::string::npos ? 3 : 2;
  const size_t last = size_t(i.c) + 1;
  if (!m.none_left() || i.operands.size() <= last || !is_predicate(i.operands[last])) return nullptr;
  return i.operands.size() == last + 1 ? FORMS[type] : nullptr;
}

}  // namespace

const Opcode INTEGER[] = {
    {"IADD3", Pipe::Alu, prepare_add<3>},
    {"UIADD3", Pipe::Uniform, prepare_add<3>},
    {"IADD", Pipe::Alu, prepare_add<2>},
    {"UIADD", Pipe::Uniform, prepare_add<2>},
    {"VIADD", Pipe::FmaHeavy, prepare_viadd},
    {"UVIADD", Pipe::Uniform, prepare_viadd},
    {"IMAD", Pipe::FmaHeavy, prepare_imad},
    {"UIMAD", Pipe::Uniform, prepare_imad},
    {"IDP", Pipe::FmaHeavy, prepare_idp},
    {"LEA", Pipe::Alu, prepare_lea},
    {"ULEA", Pipe::Uniform, prepare_lea},
    {"ISETP", Pipe::Alu, prepare_isetp},
    {"UISETP", Pipe::Uniform, prepare_isetp},
    {"IMNMX", Pipe::Alu, prepare_minmax},
    {"UIMNMX", Pipe::Uniform, prepare_minmax},
    {"VIMNMX", Pipe::Alu, prepare_minmax},
    {"UVIMNMX", Pipe::Uniform, prepare_minmax},
    {"VIMNMX3", Pipe::Alu, prepare_minmax},
    {"UVIMNMX3", Pipe::Uniform, prepare_minmax},
    {"VIADDMNMX", Pipe::Alu, prepare_minmax},
    {nullptr, Pipe::None, nullptr},
};

}  // namespace sass
