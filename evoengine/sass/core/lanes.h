// Helpers for all files of opcodes: a value for each lane, and the forms that instructions share.
#pragma once

#include <cstdlib>

#include "machine.h"

namespace sass {

template <class F>
inline void each(Lanes& out, F value) {
  for (int l = 0; l < LANES; ++l) out[l] = value(l);
}

// A bit for each lane in which `condition` holds.
template <class F>
inline u32 bits(F condition) {
  u32 out = 0;
  for (int l = 0; l < LANES; ++l) out |= u32(bool(condition(l))) << l;
  return out;
}

inline bool is_predicate(const Operand& o) { return o.kind == Kind::Predicate || o.kind == Kind::UniformPredicate; }

// The number of predicates after the destination: IADD3 R1, P0, P1, … has 2.
inline int predicates_after(const Instruction& i, int first) {
  int n = 0;
  while (first + n < int(i.operands.size()) && is_predicate(i.operands[first + n])) ++n;
  return n;
}

// A 64-bit value of each lane, of a pair of registers.
struct Wide {
  u64 v[LANES];
  u64& operator[](int i) { return v[i]; }
  u64 operator[](int i) const { return v[i]; }
};

inline void load_wide(Context& c, const Operand& o, Wide& out) {
  Lanes s, t;
  const Lanes &low = plain(c, o, s), &high = upper(c, o, t);
  for (int l = 0; l < LANES; ++l) out[l] = u64(high[l]) << 32 | low[l];
}

// The same if `wide`, otherwise the operand's 32 bits: nothing need exist after a constant.
inline void load_value(Context& c, const Operand& o, bool wide, Wide& out) {
  if (wide) return load_wide(c, o, out);
  Lanes s;
  const Lanes& low = plain(c, o, s);
  for (int l = 0; l < LANES; ++l) out[l] = low[l];
}

// Values of a 64-bit integer: an immediate printed with a minus is negative, and it may have 64 bits.
inline void load_pair(Context& c, const Operand& o, Wide& out) {
  const bool minus = o.text[0] == '-';
  if (o.kind != Kind::Immediate || o.text.compare(minus, 2, "0x")) return load_wide(c, o, out);
  const u64 magnitude = std::strtoull(o.text.c_str() + minus, nullptr, 16);
  for (int l = 0; l < LANES; ++l) out[l] = minus ? 0 - magnitude : magnitude;
}

// Whether one of the operands is negated, inverted or an absolute value.
inline bool is_changed(const Instruction& i, int first, int last) {
  for (int k = first; k <= last; ++k)
    if (i.operands[k].negate || i.operands[k].invert || i.operands[k].absolute) return true;
  return false;
}

inline void write_wide(Context& c, const Operand& o, const Wide& from) {
  Lanes low, high;
  for (int l = 0; l < LANES; ++l) low[l] = u32(from[l]), high[l] = u32(from[l] >> 32);
  write(c, o, low);
  write(c, o, high, 1);
}

// Both registers of a pair, or only the low word.
inline void write_typed(Context& c, const Operand& o, bool pair, const Wide& out) {
  if (pair) return write_wide(c, o, out);
  Lanes low;
  each(low, [&](int l) { return u32(out[l]); });
  write(c, o, low);
}

// `execute` of an instruction whose single result is a function of one, two or three integers and of its `a` and `b`.
template <auto F>
Step unary(Context& c, const Instruction& i) {
  Lanes s, out;
  const Lanes& x = integer(c, i.operands[1], s);
  each(out, [&](int l) { return F(x[l], i); });
  write(c, i.operands[0], out);
  return Step::Done;
}

template <auto F>
Step binary(Context& c, const Instruction& i) {
  Lanes s, t, out;
  const Lanes &x = integer(c, i.operands[1], s), &y = integer(c, i.operands[2], t);
  each(out, [&](int l) { return F(x[l], y[l], i); });
  write(c, i.operands[0], out);
  return Step::Done;
}

template <auto F>
Step ternary(Context& c, const Instruction& i) {
  Lanes s, t, r, out;
  const Lanes &x = integer(c, i.operands[1], s), &y = integer(c, i.operands[2], t), &z = integer(c, i.operands[3], r);
  each(out, [&](int l) { return F(x[l], y[l], z[l], i); });
  write(c, i.operands[0], out);
  return Step::Done;
}

// How a comparison's result is combined with the instruction's predicate.
enum Join { AND, OR, XOR };
inline int take_join(Modifiers& m) { return m.take("AND") ? AND : m.take("OR") ? OR : m.take("XOR") ? XOR : AND; }
inline u32 join(int how, u32 x, u32 y) { return how == AND ? x & y : how == OR ? x | y : x ^ y; }

// The position of the modifier in a list that ends with null, removed from the modifiers; -1 if there is none.
inline int take_one(Modifiers& m, const char* const* names) {
  for (int k = 0; names[k]; ++k)
    if (m.take(names[k])) return k;
  return -1;
}

}  // namespace sass
