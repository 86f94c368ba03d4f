// Atomic operations on global, shared and generic memory: one lane after the other.
#include "async.h"
#include "memory_ops.h"
#include "order.h"
#include "rounding.h"

#include <tuple>

namespace sass {
namespace {

enum Operation { ADD, MIN, MAX, INC, DEC, AND_BITS, OR_BITS, XOR_BITS, EXCH, CAS, CAST, POPC_INC };
const char* const OPERATIONS[] = {"ADD", "MIN", "MAX",  "INC", "DEC",  "AND",
                                  "OR",  "XOR", "EXCH", "CAS", "CAST", nullptr};
enum Type { U32_TYPE, S32_TYPE, U64_TYPE, S64_TYPE, F32_TYPE, F64_TYPE, F16_PAIR, BF16_PAIR };

float add_floats(float x, float y, bool flushes) {
  if (!flushes) return x + y;
  const float sum = as_float(flush(as_bits(x))) + as_float(flush(as_bits(y)));
  return as_float(flush(as_bits(sum)));
}

u32 add_pair(int type, u32 x, u32 y) {
  u32 out = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const u32 p = x >> shift & 0xffff, q = y >> shift & 0xffff;
    const double sum = type == F16_PAIR ? double(half_to_float(p)) + double(half_to_float(q))
                                        : double(bfloat_to_float(p)) + double(bfloat_to_float(q));
    out |= to_format(sum, type == F16_PAIR ? HALF_FORMAT : BFLOAT_FORMAT, NEAREST) << shift;
  }
  return out;
}

// The smaller or larger of two pairs: −0 is below +0, and of a NaN and a number the result is the number.
u32 pick_pair(int type, bool least, u32 x, u32 y) {
  const i32 infinity = type == F16_PAIR ? 0x7c00 : 0x7f80;
  u32 out = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    auto of = [&](u32 v) { return i32(v >> shift & 0xffff); };
    auto order = [](i32 v) { return v & 0x8000 ? -(v & 0x7fff) - 1 : v; };
    const bool x_nan = (of(x) & 0x7fff) > infinity, y_nan = (of(y) & 0x7fff) > infinity;
    const bool first = y_nan || (!x_nan && (order(of(x)) < order(of(y))) == least);
    out |= u32(x_nan && y_nan ? 0x7fff : first ? of(x) : of(y)) << shift;
  }
  return out;
}

u64 smaller_or_larger(int type, bool least, u64 x, u64 y) {
  if (type == F16_PAIR || type == BF16_PAIR) return pick_pair(type, least, u32(x), u32(y));
  bool less;
  if (type == S32_TYPE) less = i32(x) < i32(y);
  else if (type == S64_TYPE) less = i64(x) < i64(y);
  else less = x < y;
  return less == least ? x : y;
}

void load_value(Context& c, const Instruction& i, size_t index, bool wide, Wide& out) {
  if (index >= i.operands.size()) {
    for (int l = 0; l < LANES; ++l) out[l] = 0;
    return;
  }
  load_wide(c, i.operands[index], out);
  if (!wide)
    for (int l = 0; l < LANES; ++l) out[l] = u32(out[l]);
}

// Orders one lane's access; `there`: in shared memory, otherwise in global memory.
void order_atomic(Order& order, Context& c, const Instruction& i, bool there, u64 address, u32 bytes, int lane) {
  if (there) {
    Lanes at;
    at[lane] = u32(address);
    return order.touch(c.warp, i, Touch::Atomic, 1u << lane, at.v, bytes, nullptr);
  }
  order.synchronise(c.warp, i, address, Touch::Atomic);
  const Allocation& a = c.machine.memory.find(address, bytes, true);
  if (!a.shadow) return;
  const GlobalTouch touch = order.begin_global(c.warp, i, a, Touch::Atomic);
  order.touch_global(touch, u32(lane), address - a.address, bytes, nullptr, nullptr);
}

// Reads, combines and stores one lane's value; returns the previous value.
u64 exchange(Context& c, const Instruction& i, u8* there, u64 address, u64 value, u64 with, u32 bytes) {
  u64 old = 0;
  if (there) std::memcpy(&old, there, bytes);
  else c.machine.memory.load(address, &old, bytes);
  const bool counts = i.a == ADD && i.b <= S64_TYPE && !there && i.c > 0;
  const u64 now = combine(i, old, counts ? value * c.machine.alike : value, with);
  if (there) std::memcpy(there, &now, bytes);
  else c.machine.memory.store(address, &now, bytes);
  c.machine.acts += now != old;
  if (counts && c.machine.added) {
    Added& added = (*c.machine.added)[address];
    added.sum += value;
    added.times++;
  }
  return old;
}

// The register receives the previous value or, for CAST, whether the exchange took place, for which sm_120 has only a
// predicate. A predicate in addition to a register states that the memory supports the operation, as all memory here
// does.
void write_old(Context& c, const Instruction& i, const Wide& old, u32 exchanged, bool wide) {
  for (int k = 0; k < i.c; ++k) {
    const Operand& to = i.operands[k];
    if (is_predicate(to)) write_predicate(c, to, i.a == CAST && i.c == 1 ? exchanged : ALL);
    else if (i.a == CAST) {  // 64 bits in both registers
      Wide out;
      for (int l = 0; l < LANES; ++l) out[l] = exchanged >> l & 1;
      write_typed(c, to, wide, out);
    } else {
      write_typed(c, to, wide, old);
    }
  }
}

void note_shared(Context& c, int lane, u32 address) {
  c.access.space = Access::Space::Shared;
  c.access.afar = is_afar(c, address);
  c.access.addresses[lane] = address;
}

// a = operation, b = type, c = operands before the address, d = space: 0 global, 1 generic, 2 shared
Step atomic(Context& c, const Instruction& i) {
  const bool wide = i.b == U64_TYPE || i.b == S64_TYPE || i.b == F64_TYPE;
  const u32 bytes = wide ? 8 : 4;
  const Operand& memory = i.operands[i.c];
  note_access(c, i.d == 2 ? Access::Space::Shared : Access::Space::Global, int(bytes), true, false);
  c.access.atomic = true;
  u64 at[LANES];
  if (i.d == 2) {
    Lanes near;
    addresses(c, memory, near);
    for (int l = 0; l < LANES; ++l) at[l] = near[l];
  } else {
    addresses(c, memory, is_pair(i, memory), at);
  }
  std::memcpy(c.access.addresses, at, sizeof at);
  Wide value, with, old{};
  load_value(c, i, size_t(i.c) + 1, wide, value);
  load_value(c, i, size_t(i.c) + 2, wide, with);
  u32 exchanged = 0;
  for (u32 rest = c.lanes; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    u8* there = nullptr;
    if (i.d == 2) there = shared_bytes(c, u32(at[l]), bytes, l);
    if (i.d == 1) there = window_bytes(c, at[l], bytes, l);
    if (!there) check_alignment(at[l], bytes, l);
    else if (i.d == 1) note_shared(c, l, u32(at[l]));
    if (Order* order = order_of(c); order && (!there || i.d == 2 || at[l] >= SHARED_WINDOW))
      order_atomic(*order, c, i, there, at[l], bytes, l);
    old[l] = exchange(c, i, there, at[l], value[l], with[l], bytes);
    exchanged |= u32(old[l] == value[l]) << l;
  }
  write_old(c, i, old, exchanged, wide);
  return Step::Done;
}

// Floats, or pairs of halves, that lie side by side. a = operation, b = type, c = operands before the address, d = how
// many
Step combine_vectors(Context& c, const Instruction& i) {
  const u32 bytes = u32(4 * i.d);
  const Operand& memory = i.operands[i.c];
  note_access(c, Access::Space::Global, int(bytes), true, false);
  c.access.atomic = true;
  u64 at[LANES];
  addresses(c, memory, is_pair(i, memory), at);
  std::memcpy(c.access.addresses, at, sizeof at);
  for (int k = 0; k < i.d; ++k) {
    Operand value = i.operands[i.c + 1], to = i.operands[0];
    if (value.index != RZ) value.index += k;
    Lanes s, old{};
    const Lanes& x = integer(c, value, s);
    for (u32 rest = c.lanes; rest; rest &= rest - 1) {
      const int l = __builtin_ctz(rest);
      check_alignment(at[l], bytes, l);
      const u64 address = at[l] + u64(4 * k);
      if (Order* order = order_of(c)) order_atomic(*order, c, i, false, address, 4, l);
      old[l] = u32(exchange(c, i, nullptr, address, x[l], 0, 4));
    }
    for (int n = 0; n < i.c; ++n) {
      to = i.operands[n];
      if (is_predicate(to)) write_predicate(c, to, ALL);
      else if (to.index != RZ) write(c, to, old, k);
    }
  }
  return Step::Done;
}

int take_type(Modifiers& m) {
  if (m.take("F32")) return F32_TYPE;
  if (m.take("F64")) return F64_TYPE;
  if (m.take("F16x2")) return F16_PAIR;
  if (m.take("BF16x2") || m.take("BF16_V2")) return BF16_PAIR;
  if (m.take("S64")) return S64_TYPE;
  if (m.take("64") || m.take("U64")) return U64_TYPE;
  if (m.take("S32")) return S32_TYPE;
  m.take("U32"), m.take("32");
  return U32_TYPE;
}

template <int SPACE>
Execute prepare_atomic(Instruction& i) {
  Modifiers m(i);
  if (SPACE == 2 && m.take("ARRIVE")) return m.take("64") && m.none_left() ? prepare_arrival_by_atomic(i) : nullptr;
  if (m.take("POPC")) i.a = m.take("INC") ? POPC_INC : -1;
  else if (m.take("SAFEADD")) i.a = ADD;
  else i.a = take_one(m, OPERATIONS);
  int side_by_side = m.take("F32x2") ? 2 : m.take("F32x4") ? 4 : 0;
  i.b = side_by_side ? F32_TYPE : take_type(m);
  for (const auto& [name, type, registers] :
       {std::tuple("F16x4", F16_PAIR, 2), {"F16x8", F16_PAIR, 4}, {"BF16x4", BF16_PAIR, 2}, {"BF16x8", BF16_PAIR, 4}})
    if (m.take(name)) i.b = type, side_by_side = registers;
  m.take("FTZ"), m.take("RN");
  take_caching(m);
  i.d = SPACE;
  i.c = 0;
  while (i.c < int(i.operands.size()) && i.operands[i.c].kind != Kind::Memory) ++i.c;
  const int values = int(i.operands.size()) - i.c - 1;
  if (side_by_side) {
    i.d = side_by_side;
    const bool known = i.a == ADD || (i.b != F32_TYPE && (i.a == MIN || i.a == MAX));
    return known && SPACE != 2 && m.none_left() && i.c <= 2 && values == 1 ? combine_vectors : nullptr;
  }
  const bool of_floats = i.b == F32_TYPE || i.b == F64_TYPE;
  if ((i.a == MIN || i.a == MAX) && of_floats) return nullptr;
  const int needed = i.a == POPC_INC ? 0 : i.a == CAS || i.a == CAST ? 2 : 1;
  return i.a >= 0 && m.none_left() && i.c <= 2 && values == needed ? atomic : nullptr;
}

}  // namespace

static u64 combined(int operation, int type, bool flushes, u64 old, u64 value, u64 with) {
  switch (operation) {
    case ADD:
      if (type == F32_TYPE) return canonical(add_floats(as_float(u32(old)), as_float(u32(value)), flushes));
      if (type == F64_TYPE) return std::bit_cast<u64>(std::bit_cast<double>(old) + std::bit_cast<double>(value));
      if (type == F16_PAIR || type == BF16_PAIR) return add_pair(type, u32(old), u32(value));
      return old + value;
    case MIN: return smaller_or_larger(type, true, old, value);
    case MAX: return smaller_or_larger(type, false, old, value);
    case INC: return old >= value ? 0 : old + 1;
    case DEC: return old == 0 || old > value ? value : old - 1;
    case AND_BITS: return old & value;
    case OR_BITS: return old | value;
    case XOR_BITS: return old ^ value;
    case EXCH: return value;
    case POPC_INC: return old + 1;
    default: return old == value ? with : old;  // CAS, CAST: `value` is the comparand
  }
}

u64 combine(const Instruction& i, u64 old, u64 value, u64 with) {
  return combined(i.a, i.b, has(i, "FTZ"), old, value, with);
}

int take_operation(Modifiers& m) { return take_one(m, OPERATIONS); }

u64 combine_elements(const Instruction& i, int operation, u32 map_type, u64 old, u64 value) {
  static constexpr int TYPES[11] = {-1,       -1,       U32_TYPE, S32_TYPE, U64_TYPE, S64_TYPE,
                                    F16_PAIR, F32_TYPE, -1,       -1,       BF16_PAIR};
  const int type = map_type < 11 ? TYPES[map_type] : -1;
  const bool orders = operation == MIN || operation == MAX, counts = operation == INC || operation == DEC;
  const bool known = operation == ADD || (orders ? type != F32_TYPE : counts ? type == U32_TYPE : type <= S64_TYPE);
  if (type < 0 || !known)
    throw Fault{named(i) + ": its tensor map has elements of type " + std::to_string(map_type) +
                ", which it does not combine"};
  return combined(operation, type, false, old, value, 0);
}

bool take_combination(Modifiers& m, Instruction& i) {
  i.a = take_one(m, OPERATIONS);
  i.b = m.take("F16") ? F16_PAIR : m.take("BF16") ? BF16_PAIR : take_type(m);
  m.take("RN");
  const bool pairs = i.b == F16_PAIR || i.b == BF16_PAIR, whole = i.b == U32_TYPE || i.b == S32_TYPE;
  if (i.a == ADD) return whole || pairs || i.b == F32_TYPE;
  if (i.a == MIN || i.a == MAX) return whole || pairs;
  return whole && i.a > MAX && i.a <= XOR_BITS;
}

// clang-format off: an opcode per line
const Opcode ATOMIC[] = {
    {"ATOM", Pipe::Memory, prepare_atomic<1>},
    {"ATOMG", Pipe::Memory, prepare_atomic<0>},
    {"ATOMS", Pipe::Memory, prepare_atomic<2>},
    {"RED", Pipe::Memory, prepare_atomic<1>},
    {"REDG", Pipe::Memory, prepare_atomic<0>},
    {nullptr, Pipe::None, nullptr},
};
// clang-format on

}  // namespace sass
