// Shifts, logic and bits of integers; the same for vector and uniform registers.
#include <bit>

#include "lanes.h"

namespace sass {
namespace {

// ── shifts ──────────────────────────────────────────────────────────────────────────────────────────────────────────

// SHF: {c, a} as 64 bits by b. a = right, b = signed, c = bits of the largest shift (32, 64), d = 1 wraps | 2 high word
Step shf(Context& c, const Instruction& i) {
  Lanes s, t, r, out;
  const Lanes &low = integer(c, i.operands[1], s), &by = integer(c, i.operands[2], t);
  const Lanes& high = integer(c, i.operands[3], r);
  const u32 most = u32(i.c), wraps = i.d & 1;
  const int down = i.d & 2 ? 32 : 0;
  const bool right = i.a, sign = i.b;
  for (int l = 0; l < LANES; ++l) {
    const u64 v = u64(high[l]) << 32 | low[l];
    const u32 n = wraps ? by[l] & (most - 1) : by[l] < most ? by[l] : most;
    const u32 first = n < 63 ? n : 63, second = n - first;  // 64 in two steps
    u64 result;
    if (!right) result = v << first << second;
    else if (sign) result = u64(i64(v) >> first >> second);
    else result = v >> first >> second;
    out[l] = u32(result >> down);
  }
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_shf(Instruction& i) {
  static const char* const TYPES[] = {"U32", "S32", "U64", "S64", nullptr};
  Modifiers m(i);
  i.a = m.take("R");
  if (!i.a && !m.take("L")) return nullptr;
  const int type = take_one(m, TYPES);
  i.b = type & 1;
  i.c = type >= 2 ? 64 : 32;
  i.d = m.take("W") | m.take("HI") << 1;
  return type >= 0 && m.none_left() && i.operands.size() == 4 ? shf : nullptr;
}

// ── logic ───────────────────────────────────────────────────────────────────────────────────────────────────────────

// The function whose value for bits a, b, c is bit 4a + 2b + c of the table.
struct Table {
  u32 bit[8];
  explicit Table(u32 table) {
    for (int k = 0; k < 8; ++k) bit[k] = table >> k & 1 ? ALL : 0;
  }
  static u32 mux(u32 by, u32 yes, u32 no) { return no ^ (by & (yes ^ no)); }
  u32 operator()(u32 a, u32 b, u32 c) const {
    return mux(a, mux(b, mux(c, bit[7], bit[6]), mux(c, bit[5], bit[4])),
               mux(b, mux(c, bit[3], bit[2]), mux(c, bit[1], bit[0])));
  }
};

// LOP3.LUT [P,] R, a, b, c, table, P: a = destination, b = the table, c = .PAND
Step lop3(Context& c, const Instruction& i) {
  Lanes s, t, r, out;
  const int d = i.a;
  const Lanes &x = integer(c, i.operands[d + 1], s), &y = integer(c, i.operands[d + 2], t),
              &z = integer(c, i.operands[d + 3], r);
  const Table table{u32(i.b)};
  each(out, [&](int l) { return table(x[l], y[l], z[l]); });
  if (d) {
    const u32 some = bits([&](int l) { return out[l] != 0; }), beside = predicate(c, i.operands[d + 5]);
    write_predicate(c, i.operands[0], i.c ? some & beside : some | beside);
  }
  write(c, i.operands[d], out);
  return Step::Done;
}

Execute prepare_lop3(Instruction& i) {
  Modifiers m(i);
  m.take("LUT");
  i.c = m.take("PAND");
  i.a = predicates_after(i, 0);
  if (!m.none_left() || i.a > 1 || int(i.operands.size()) != i.a + 6) return nullptr;
  const Operand& table = i.operands[i.a + 4];
  i.b = int(table.immediate);
  return table.kind == Kind::Immediate ? lop3 : nullptr;
}

// A predicate, or the sign bit of a register.
u32 predicate_or_sign(Context& c, const Operand& o) {
  if (o.kind != Kind::Register) return predicate(c, o);
  const u32 signs = bits([&](int l) { return c.warp.r[o.index][l] >> 31; });
  return o.negate ? ~signs : signs;
}

// PLOP3.LUT P, P, a, b, c, table, table
Step plop3(Context& c, const Instruction& i) {
  const u32 x = predicate_or_sign(c, i.operands[2]), y = predicate_or_sign(c, i.operands[3]);
  const u32 z = predicate_or_sign(c, i.operands[4]);
  const u32 first = Table{i.operands[5].immediate}(x, y, z), second = Table{i.operands[6].immediate}(x, y, z);
  write_predicate(c, i.operands[0], first);
  write_predicate(c, i.operands[1], second);
  return Step::Done;
}

Execute prepare_plop3(Instruction& i) {
  Modifiers m(i);
  m.take("LUT");
  for (size_t n = 2; n < 5 && n < i.operands.size(); ++n)
    if (i.operands[n].kind == Kind::Register && i.operands[n].text.find(".SIGN") == std::string::npos) return nullptr;
  return m.none_left() && i.operands.size() == 7 ? plop3 : nullptr;
}

// ── bits ────────────────────────────────────────────────────────────────────────────────────────────────────────────

u32 absolute(u32 x, const Instruction&) { return i32(x) < 0 ? 0 - x : x; }
u32 population(u32 x, const Instruction&) { return u32(std::popcount(x)); }

u32 reverse(u32 x, const Instruction&) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}

// The highest bit that is one; for a negative signed number the highest that is zero. a = signed, b = from the top
u32 leading(u32 x, const Instruction& i) {
  if (i.a && i32(x) < 0) x = ~x;
  if (!x) return ALL;
  const u32 at = 31 - u32(std::countl_zero(x));
  return i.b ? 31 - at : at;
}

// `width` ones from bit `start`. a = wraps
u32 bit_mask(u32 start, u32 width, const Instruction& i) {
  if (i.a) start &= 31, width &= 31;
  const u64 ones = width >= 32 ? ~0u : (1u << width) - 1;
  return start >= 32 ? 0 : u32(ones << start);
}

// The low `width` bits extended. a = wraps, b = unsigned
u32 extend(u32 x, u32 width, const Instruction& i) {
  if (i.a) width &= 31;
  if (width >= 32) return x;
  if (width == 0) return 0;
  const u32 left = 32 - width;
  return i.b ? x << left >> left : u32(i32(x << left) >> left);
}

// |x − y|, then + z. a = unsigned
u32 difference(u32 x, u32 y, u32 z, const Instruction& i) {
  const bool less = i.a ? x < y : i32(x) < i32(y);
  return (less ? y - x : x - y) + z;
}

// The same for each byte; their sum plus z if a = .ACC. b = signed
u32 byte_differences(u32 x, u32 y, u32 z, const Instruction& i) {
  u32 bytes = 0, sum = z;
  for (int shift = 0; shift < 32; shift += 8) {
    const u32 p = x >> shift & 0xff, q = y >> shift & 0xff;
    const i32 apart = i.b ? i32(int8_t(p)) - i32(int8_t(q)) : i32(p) - i32(q);
    const u32 distance = u32(apart < 0 ? -apart : apart);
    bytes |= (distance & 0xff) << shift;
    sum += distance;
  }
  return i.a ? sum : bytes;
}

Execute prepare_byte_differences(Instruction& i) {
  Modifiers m(i);
  i.a = m.take("ACC");
  i.b = m.take("S8");
  if (!i.b && !m.take("U8")) return nullptr;
  return m.none_left() && i.operands.size() == 4 ? ternary<byte_differences> : nullptr;
}

template <auto F, int SOURCES>
Execute prepare_plain(Instruction& i) {
  if (!i.modifiers.empty() || int(i.operands.size()) != SOURCES + 1) return nullptr;
  if constexpr (SOURCES == 1) return unary<F>;
  else return ternary<F>;
}

Execute prepare_flo(Instruction& i) {
  Modifiers m(i);
  i.a = !m.take("U32");
  i.b = m.take("SH");
  return m.none_left() && i.operands.size() == 2 ? unary<leading> : nullptr;
}

Execute prepare_bmsk(Instruction& i) {
  Modifiers m(i);
  m.take("C");
  i.a = m.take("W");
  return m.none_left() && i.operands.size() == 3 ? binary<bit_mask> : nullptr;
}

Execute prepare_sgxt(Instruction& i) {
  Modifiers m(i);
  i.a = m.take("W");
  i.b = m.take("U32");
  return m.none_left() && i.operands.size() == 3 ? binary<extend> : nullptr;
}

Execute prepare_difference(Instruction& i) {
  Modifiers m(i);
  i.a = m.take("U32");
  return m.none_left() && i.operands.size() == 4 ? ternary<difference> : nullptr;
}

}  // namespace

const Opcode BITS[] = {
    {"SHF", Pipe::Alu, prepare_shf},
    {"USHF", Pipe::Uniform, prepare_shf},
    {"LOP3", Pipe::Alu, prepare_lop3},
    {"ULOP3", Pipe::Uniform, prepare_lop3},
    {"PLOP3", Pipe::Alu, prepare_plop3},
    {"UPLOP3", Pipe::Uniform, prepare_plop3},
    {"IABS", Pipe::Alu, prepare_plain<absolute, 1>},
    {"UIABS", Pipe::Uniform, prepare_plain<absolute, 1>},
    {"POPC", Pipe::Mufu, prepare_plain<population, 1>},
    {"UPOPC", Pipe::Uniform, prepare_plain<population, 1>},
    {"BREV", Pipe::Mufu, prepare_plain<reverse, 1>},
    {"UBREV", Pipe::Uniform, prepare_plain<reverse, 1>},
    {"FLO", Pipe::Mufu, prepare_flo},
    {"UFLO", Pipe::Uniform, prepare_flo},
    {"BMSK", Pipe::Alu, prepare_bmsk},
    {"UBMSK", Pipe::Uniform, prepare_bmsk},
    {"SGXT", Pipe::Alu, prepare_sgxt},
    {"USGXT", Pipe::Uniform, prepare_sgxt},
    {"VABSDIFF", Pipe::Alu, prepare_difference},
    {"VABSDIFF4", Pipe::Alu, prepare_byte_differences},
    {nullptr, Pipe::None, nullptr},
};

}  // namespace sass
