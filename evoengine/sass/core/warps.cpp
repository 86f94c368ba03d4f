// What the lanes of a warp tell each other: votes, shuffles, matches, reductions.
#include "lanes.h"

namespace sass {
namespace {

enum Vote { VOTE_ALL, VOTE_ANY, VOTE_EQUAL };

// VOTE.ALL [R,] P, P: the ballot and the vote of the lanes that execute. a = vote, b = first predicate
Step vote(Context& c, const Instruction& i) {
  const u32 yes = predicate(c, i.operands[i.b + 1]) & c.lanes;
  const bool all = yes == c.lanes, none = yes == 0;
  const bool result = i.a == VOTE_ALL ? all : i.a == VOTE_ANY ? !none : all || none;
  if (i.b) {
    Lanes ballot;
    each(ballot, [&](int) { return yes; });
    write(c, i.operands[0], ballot);
  }
  write_predicate(c, i.operands[i.b], result ? ALL : 0);
  return Step::Done;
}

Execute prepare_vote(Instruction& i) {
  static const char* const VOTES[] = {"ALL", "ANY", "EQ", nullptr};
  Modifiers m(i);
  i.a = take_one(m, VOTES);
  i.b = !i.operands.empty() && !is_predicate(i.operands[0]);
  if (i.a < 0 || !m.none_left()) return nullptr;
  if (i.b && i.operands.size() == 2) {  // VOTE.ANY R, P: the ballot alone
    Operand none;
    none.kind = Kind::Predicate;
    none.index = PT;
    i.operands.insert(i.operands.begin() + 1, none);
  }
  return int(i.operands.size()) == i.b + 2 ? vote : nullptr;
}

enum class Shuffle { Idx, Up, Down, Bfly };

// SHFL P, R, value, lane, limits: the lane's number or distance; limits = clamp and, from bit 8, mask of segments.
Step shfl(Context& c, const Instruction& i) {
  Lanes s, t, r, out;
  const Lanes &x = integer(c, i.operands[2], s), &by = integer(c, i.operands[3], t);
  const Lanes& limits = integer(c, i.operands[4], r);
  u32 inside = 0;
  for (int l = 0; l < LANES; ++l) {
    const u32 segment = limits[l] >> 8 & 31, clamp = limits[l] & 31, b = by[l] & 31, lane = u32(l);
    const u32 low = lane & segment, high = low | (clamp & ~segment);
    u32 from = lane;
    bool valid = true;
    switch (Shuffle(i.a)) {
      case Shuffle::Idx: from = low | (b & ~segment), valid = from <= high; break;
      case Shuffle::Up: from = lane - b, valid = i32(from) >= i32(high); break;
      case Shuffle::Down: from = lane + b, valid = from <= high; break;
      case Shuffle::Bfly: from = lane ^ b, valid = from <= high; break;
    }
    out[l] = x[valid ? from & 31 : lane];
    inside |= u32(valid) << l;
  }
  write_predicate(c, i.operands[0], inside);
  write(c, i.operands[1], out);
  return Step::Done;
}

Execute prepare_shfl(Instruction& i) {
  static const char* const FORMS[] = {"IDX", "UP", "DOWN", "BFLY", nullptr};
  Modifiers m(i);
  i.a = take_one(m, FORMS);
  return i.a >= 0 && m.none_left() && i.operands.size() == 5 ? shfl : nullptr;
}

// MATCH.ANY R, value; MATCH.ALL P, R, value: lanes with the same value. a = all, b = pairs, c = has a predicate
Step match(Context& c, const Instruction& i) {
  const Operand& from = i.operands[i.c + 1];
  Wide x;
  load_wide(c, from, x);
  if (!i.b)
    for (int l = 0; l < LANES; ++l) x[l] = u32(x[l]);
  Lanes out;
  u32 same = 0;
  for (int l = 0; l < LANES; ++l) {
    out[l] = bits([&](int k) { return x[k] == x[l]; }) & c.lanes;
    if (out[l] == c.lanes) same |= 1u << l;
  }
  if (i.a) each(out, [&](int l) { return same >> l & 1 ? c.lanes : 0; });
  if (i.c) write_predicate(c, i.operands[0], same);
  write(c, i.operands[i.c], out);
  return Step::Done;
}

Execute prepare_match(Instruction& i) {
  Modifiers m(i);
  i.a = m.take("ALL");
  if (!i.a) m.take("ANY");
  i.b = m.take("U64");
  m.take("U32");
  i.c = predicates_after(i, 0);
  return m.none_left() && i.c <= 1 && int(i.operands.size()) == i.c + 2 ? match : nullptr;
}

enum Reduction { R_AND, R_OR, R_XOR, R_SUM, R_MIN, R_MAX };

// REDUX UR, R: over the lanes that execute. a = reduction, b = signed
Step redux(Context& c, const Instruction& i) {
  Lanes s;
  const Lanes& x = integer(c, i.operands[1], s);
  bool first = true;
  u32 v = 0;
  for (int l = 0; l < LANES; ++l) {
    if (!(c.lanes >> l & 1)) continue;
    const bool less = i.b ? i32(x[l]) < i32(v) : x[l] < v;
    if (first) v = x[l];
    else if (i.a == R_AND) v &= x[l];
    else if (i.a == R_OR) v |= x[l];
    else if (i.a == R_XOR) v ^= x[l];
    else if (i.a == R_SUM) v += x[l];
    else if (less == (i.a == R_MIN)) v = x[l];
    first = false;
  }
  Lanes out;
  each(out, [&](int) { return v; });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_redux(Instruction& i) {
  static const char* const REDUCTIONS[] = {"AND", "OR", "XOR", "SUM", "MIN", "MAX", nullptr};
  Modifiers m(i);
  i.a = std::max(0, take_one(m, REDUCTIONS));
  i.b = m.take("S32");
  m.take("U32");
  return m.none_left() && i.operands.size() == 2 ? redux : nullptr;
}

}  // namespace

const Opcode WARPS[] = {
    {"VOTE", Pipe::Alu, prepare_vote},    {"VOTEU", Pipe::Uniform, prepare_vote}, {"SHFL", Pipe::Memory, prepare_shfl},
    {"MATCH", Pipe::Mufu, prepare_match}, {"REDUX", Pipe::Mufu, prepare_redux},   {nullptr, Pipe::None, nullptr},
};

}  // namespace sass
