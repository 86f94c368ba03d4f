// Moves and selections, special registers, and moves between the files of registers.
#include <bit>

#include "lanes.h"

namespace sass {
namespace {

// ── moves and selections ────────────────────────────────────────────────────────────────────────────────────────────

Step mov(Context& c, const Instruction& i) {
  Lanes s;
  write(c, i.operands[0], integer(c, i.operands[1], s));
  return Step::Done;
}

Step mov_pair(Context& c, const Instruction& i) {
  Wide x;
  load_pair(c, i.operands[1], x);
  write_wide(c, i.operands[0], x);
  return Step::Done;
}

Execute prepare_mov(Instruction& i) {
  Modifiers m(i);
  if (m.take("64")) return m.none_left() && i.operands.size() == 2 && !is_changed(i, 1, 1) ? mov_pair : nullptr;
  m.take("32I");
  return m.none_left() && i.operands.size() == 2 ? mov : nullptr;
}

Step sel(Context& c, const Instruction& i) {
  Lanes s, t, out;
  const Lanes &x = integer(c, i.operands[1], s), &y = integer(c, i.operands[2], t);
  const u32 first = predicate(c, i.operands[3]);
  each(out, [&](int l) { return first >> l & 1 ? x[l] : y[l]; });
  write(c, i.operands[0], out);
  return Step::Done;
}

Step sel_pair(Context& c, const Instruction& i) {
  Wide x, y;
  load_pair(c, i.operands[1], x), load_pair(c, i.operands[2], y);
  const u32 first = predicate(c, i.operands[3]);
  for (int l = 0; l < LANES; ++l) x[l] = first >> l & 1 ? x[l] : y[l];
  write_wide(c, i.operands[0], x);
  return Step::Done;
}

Execute prepare_sel(Instruction& i) {
  Modifiers m(i);
  const bool pair = m.take("64");
  if (!m.none_left() || i.operands.size() != 4 || (pair && is_changed(i, 1, 2))) return nullptr;
  return pair ? sel_pair : sel;
}

enum Permute { BYTES, F4E, B4E, RC8, ECL, ECR, RC16 };
const char* const PERMUTES[] = {"IDX", "F4E", "B4E", "RC8", "ECL", "ECR", "RC16", nullptr};

// The selector of the forms that name a pattern, as the nibbles of the plain form.
u32 selector(int form, u32 by) {
  if (form == BYTES) return by;
  const u32 n = by & 3;
  u32 out = 0;
  for (u32 k = 0; k < 4; ++k) {
    const u32 byte = form == F4E   ? n + k
                     : form == B4E ? (n - k) & 7
                     : form == RC8 ? n
                     : form == ECL ? std::max(k, n)
                     : form == ECR ? std::min(k, n)
                                   : (n & 1) * 2 + (k & 1);
    out |= byte << (4 * k);
  }
  return out;
}

// PRMT R, low, selector, high: each nibble names a byte of {high, low}; its top bit repeats the byte's sign
u32 permute(u32 low, u32 by, u32 high, const Instruction& i) {
  const u64 from = u64(high) << 32 | low;
  const u32 nibbles = selector(i.a, by);
  u32 out = 0;
  for (int k = 0; k < 4; ++k) {
    const u32 nibble = nibbles >> (4 * k) & 15;
    u32 byte = u32(from >> (8 * (nibble & 7))) & 0xff;
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= byte << (8 * k);
  }
  return out;
}

Execute prepare_prmt(Instruction& i) {
  Modifiers m(i);
  i.a = std::max(0, take_one(m, PERMUTES));
  return m.none_left() && i.operands.size() == 4 ? ternary<permute> : nullptr;
}

// ── special registers ───────────────────────────────────────────────────────────────────────────────────────────────

// clang-format off: a list of names
enum Special {
  ZERO, LANE, WARP, WARP_COUNT, VIRTUAL_WARP, VIRTUAL_WARPS, THREAD, TID_X, TID_Y, TID_Z, NTID_X, NTID_Y, NTID_Z,
  CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z, RANK, CLUSTER_X, CLUSTER_Y, CLUSTER_Z, NCLUSTER_X,
  NCLUSTER_Y, NCLUSTER_Z, IN_CLUSTER_X, IN_CLUSTER_Y, IN_CLUSTER_Z, SIZE_CLUSTER_X, SIZE_CLUSTER_Y, SIZE_CLUSTER_Z,
  CLUSTER_BLOCKS, SHARED_LOW, SHARED_HIGH, LOCAL_LOW, LOCAL_HIGH, SHARED_BYTES, DYNAMIC_BYTES, CLOCK_LOW, CLOCK_HIGH,
  TIMER_LOW, TIMER_HIGH, EQUAL_MASK, LESS_MASK, UP_TO_MASK, GREATER_MASK, FROM_MASK, ACTIVE_MASK, SM, SMS, GRID,
  CLUSTER_COPY,
};
// clang-format on
// clang-format off: a list of pairs
const std::pair<const char*, Special> SPECIALS[] = {
    {"SRZ", ZERO}, {"SR_LANEID", LANE}, {"SR_WARPID", WARP}, {"SR_VIRTID", VIRTUAL_WARP},
    {"SR_NWARPID", WARP_COUNT}, {"SR_VIRTCFG", VIRTUAL_WARPS}, {"SR_TID", THREAD},
    {"SR_TID.X", TID_X}, {"SR_TID.Y", TID_Y}, {"SR_TID.Z", TID_Z}, {"SR_NTID.X", NTID_X}, {"SR_NTID.Y", NTID_Y},
    {"SR_NTID.Z", NTID_Z}, {"SR_CTAID.X", CTAID_X}, {"SR_CTAID.Y", CTAID_Y}, {"SR_CTAID.Z", CTAID_Z},
    {"SR_NCTAID.X", NCTAID_X}, {"SR_NCTAID.Y", NCTAID_Y}, {"SR_NCTAID.Z", NCTAID_Z}, {"SR_CgaCtaId", RANK},
    {"SR_CLUSTER_CTARANK", RANK}, {"SR_CLUSTERID.X", CLUSTER_X}, {"SR_CLUSTERID.Y", CLUSTER_Y},
    {"SR_CLUSTERID.Z", CLUSTER_Z}, {"SR_NCLUSTERID.X", NCLUSTER_X}, {"SR_NCLUSTERID.Y", NCLUSTER_Y},
    {"SR_NCLUSTERID.Z", NCLUSTER_Z}, {"SR_CLUSTER_CTAID.X", IN_CLUSTER_X}, {"SR_CLUSTER_CTAID.Y", IN_CLUSTER_Y},
    {"SR_CLUSTER_CTAID.Z", IN_CLUSTER_Z}, {"SR_CTAID_IN_CLUSTER.X", IN_CLUSTER_X},
    {"SR_CTAID_IN_CLUSTER.Y", IN_CLUSTER_Y}, {"SR_CTAID_IN_CLUSTER.Z", IN_CLUSTER_Z},
    {"SR_CLUSTER_NCTAID.X", SIZE_CLUSTER_X}, {"SR_CLUSTER_NCTAID.Y", SIZE_CLUSTER_Y},
    {"SR_CLUSTER_NCTAID.Z", SIZE_CLUSTER_Z}, {"SR_CgaSize", CLUSTER_COPY}, {"SR_CLUSTER_NCTARANK", CLUSTER_BLOCKS},
    {"SR_SWINLO", SHARED_LOW}, {"SR_SWINHI", SHARED_HIGH}, {"SR_LWINLO", LOCAL_LOW}, {"SR_LWINHI", LOCAL_HIGH},
    {"SR_SMEMSZ", SHARED_BYTES}, {"SR_TOTALSMEMSZ", SHARED_BYTES}, {"SR_DYNAMICSMEMSZ", DYNAMIC_BYTES},
    {"SR_CLOCKLO", CLOCK_LOW}, {"SR_CLOCKHI", CLOCK_HIGH}, {"SR_GLOBALTIMERLO", TIMER_LOW},
    {"SR_GLOBALTIMERHI", TIMER_HIGH}, {"SR_EQMASK", EQUAL_MASK}, {"SR_LTMASK", LESS_MASK}, {"SR_LEMASK", UP_TO_MASK},
    {"SR_GTMASK", GREATER_MASK}, {"SR_GEMASK", FROM_MASK}, {"SR_ACTIVEMASK", ACTIVE_MASK}, {"SR_SMID", SM},
    {"SR_VIRTUALSMID", SM}, {"SR_NSMID", SMS}, {"SR_GRIDID", GRID},
};
// clang-format on

int special(const Operand& o) {
  for (const auto& [name, which] : SPECIALS)
    if (o.text == name) return which;
  return -1;
}

u32 lane_mask(Special which, int lane) {
  const u32 one = 1u << lane, below = one - 1;
  switch (which) {
    case EQUAL_MASK: return one;
    case LESS_MASK: return below;
    case UP_TO_MASK: return below | one;
    case GREATER_MASK: return ~(below | one);
    default: return ~below;
  }
}

u32 thread_index(const Launch& launch, u32 thread, int axis) {
  const u32 x = launch.threads[0], y = launch.threads[1];
  return axis == 0 ? thread % x : axis == 1 ? thread / x % y : thread / (x * y);
}

constexpr u64 TIMER_EPOCH = 1'750'000'000'000'000'000;  // nanoseconds since 1970, as a GPU counts them
constexpr u32 SLOTS = 32;                               // places of warps that an SM has at least

// The SM of a block is drawn, because no kernel may depend on it.
u32 sm_of(const Context& c) {
  const Block& block = *c.warp.block;
  const u64 number = (u64(block.index[2]) << 42) + (u64(block.index[1]) << 21) + block.index[0];
  const u64 drawn = (number + c.machine.seed + 1) * 0x9e3779b97f4a7c15ull;
  return u32((drawn >> 33) % c.machine.launch.sms);
}

// Values that do not differ between the lanes.
u32 of_warp(Context& c, Special which) {
  const Launch& l = c.machine.launch;
  const Block& block = *c.warp.block;
  auto along = [&](Special first) { return int(which) - int(first); };
  switch (which) {
    case WARP: return u32(c.warp.number);
    case WARP_COUNT: return u32(block.warps.size());
    case VIRTUAL_WARP: return (u32(c.warp.number) + sm_of(c)) % SLOTS << 8;  // %warpid: no kernel may depend on it
    case VIRTUAL_WARPS: return 64u << 8;                                     // of an SM; only sm_90 reads it here
    case NTID_X:
    case NTID_Y:
    case NTID_Z: return l.threads[along(NTID_X)];
    case CTAID_X:
    case CTAID_Y:
    case CTAID_Z: return block.index[along(CTAID_X)];
    case NCTAID_X:
    case NCTAID_Y:
    case NCTAID_Z: return l.grid[along(NCTAID_X)];
    case RANK: return block.rank;
    case CLUSTER_X:
    case CLUSTER_Y:
    case CLUSTER_Z: return block.index[along(CLUSTER_X)] / l.cluster[along(CLUSTER_X)];
    case NCLUSTER_X:
    case NCLUSTER_Y:
    case NCLUSTER_Z: return l.grid[along(NCLUSTER_X)] / l.cluster[along(NCLUSTER_X)];
    case IN_CLUSTER_X:
    case IN_CLUSTER_Y:
    case IN_CLUSTER_Z: return block.index[along(IN_CLUSTER_X)] % l.cluster[along(IN_CLUSTER_X)];
    case SIZE_CLUSTER_X:
    case SIZE_CLUSTER_Y:
    case SIZE_CLUSTER_Z: return l.cluster[along(SIZE_CLUSTER_X)];
    case CLUSTER_BLOCKS: return l.cluster[0] * l.cluster[1] * l.cluster[2];
    case SHARED_LOW: return u32(SHARED_WINDOW);
    case SHARED_HIGH: return u32(SHARED_WINDOW >> 32);
    case LOCAL_LOW: return u32(LOCAL_WINDOW);
    case LOCAL_HIGH: return u32(LOCAL_WINDOW >> 32);
    case SHARED_BYTES:
    case DYNAMIC_BYTES: return l.shared_bytes;
    case CLOCK_LOW: return u32(c.machine.clock());
    case CLOCK_HIGH: return u32(c.machine.clock() >> 32);
    case TIMER_LOW: return u32(TIMER_EPOCH + c.machine.clock());
    case TIMER_HIGH: return u32((TIMER_EPOCH + c.machine.clock()) >> 32);
    case ACTIVE_MASK: return c.warp.active;
    case SM: return sm_of(c);
    case SMS: return l.sms;
    // sm_100 and later subtract as many times 160 from the place of the clusters' sizes in bank 0, where the launch put
    // them
    case CLUSTER_COPY: return l.arch < 100 ? l.cluster[0] * l.cluster[1] * l.cluster[2] : 0;
    default: return 0;
  }
}

u32 read_special(Context& c, Special which, int lane) {
  const u32 thread = u32(c.warp.number) * LANES + u32(lane);
  const Launch& l = c.machine.launch;
  switch (which) {
    case LANE: return u32(lane);
    case THREAD:
      return thread_index(l, thread, 0) | thread_index(l, thread, 1) << 16 | thread_index(l, thread, 2) << 26;
    case TID_X: return thread_index(l, thread, 0);
    case TID_Y: return thread_index(l, thread, 1);
    case TID_Z: return thread_index(l, thread, 2);
    case EQUAL_MASK:
    case LESS_MASK:
    case UP_TO_MASK:
    case GREATER_MASK:
    case FROM_MASK: return lane_mask(which, lane);
    default: return 0;
  }
}

bool by_lane(Special which) {
  return which == LANE || (which >= THREAD && which <= TID_Z) || (which >= EQUAL_MASK && which <= FROM_MASK);
}

// a = which
Step s2r(Context& c, const Instruction& i) {
  const Special which = Special(i.a);
  Lanes out;
  if (by_lane(which)) each(out, [&](int l) { return read_special(c, which, l); });
  else each(out, [value = of_warp(c, which)](int) { return value; });
  write(c, i.operands[0], out);
  return Step::Done;
}

Execute prepare_s2r(Instruction& i) {
  if (!i.modifiers.empty() || i.operands.size() != 2) return nullptr;
  i.a = special(i.operands[1]);
  return i.a < 0 ? nullptr : s2r;
}

// CS2R writes a pair, CS2R.32 one register. a = which, b = one register
Step cs2r(Context& c, const Instruction& i) {
  s2r(c, i);
  if (i.b) return Step::Done;
  const bool paired = i.a == CLOCK_LOW || i.a == TIMER_LOW;
  Lanes high;
  each(high, [value = paired ? of_warp(c, Special(i.a + 1)) : 0u](int) { return value; });
  write(c, i.operands[0], high, 1);
  return Step::Done;
}

Execute prepare_cs2r(Instruction& i) {
  Modifiers m(i);
  i.b = m.take("32");
  m.take("64");
  if (!m.none_left() || i.operands.size() != 2) return nullptr;
  i.a = special(i.operands[1]);
  return i.a < 0 ? nullptr : cs2r;
}

// ── between the files of registers ──────────────────────────────────────────────────────────────────────────────────

// R2UR [P,] UR, R: the first lane's value; the predicate holds the lanes that have another. a = predicate, b = .OR
Step r2ur(Context& c, const Instruction& i) {
  Lanes s;
  const Lanes& x = integer(c, i.operands[i.a + 1], s);
  if (!c.lanes) return Step::Done;
  const u32 value = x[std::countr_zero(c.lanes)];
  if (i.a) {
    const u32 others = bits([&](int l) { return x[l] != value; });
    write_predicate(c, i.operands[0], i.b ? others | predicate(c, i.operands[0]) : others);
  }
  const Operand& to = i.operands[i.a];
  if (to.index != URZ) c.warp.u[to.index] = value;
  return Step::Done;
}

Execute prepare_r2ur(Instruction& i) {
  Modifiers m(i);
  i.b = m.take("OR");
  i.a = predicates_after(i, 0);
  return m.none_left() && i.a <= 1 && int(i.operands.size()) == i.a + 2 ? r2ur : nullptr;
}

// The byte that the suffix of a register or an opcode names: .B1 is 8 bits up.
int take_byte(Modifiers& m) {
  static const char* const BYTES_OF[] = {"B0", "B1", "B2", "B3", nullptr};
  return 8 * std::max(0, take_one(m, BYTES_OF));
}

// P2R R, PR, base, mask: the predicates selected by the mask replace bits of the base. a = bits up, b = uniform
Step p2r(Context& c, const Instruction& i) {
  Lanes s, t, out;
  const Lanes &base = integer(c, i.operands[2], s), &mask = integer(c, i.operands[3], t);
  for (int l = 0; l < LANES; ++l) {
    u32 all = 0;
    for (int p = 0; p < 7; ++p) all |= (i.b ? u32(c.warp.up[p]) : c.warp.p[p] >> l & 1) << p;
    const u32 at = (mask[l] & 0x7f) << i.a;
    out[l] = (base[l] & ~at) | (all << i.a & at);
  }
  write(c, i.operands[0], out);
  return Step::Done;
}

// R2P PR, R, mask: a = bits up, b = uniform
Step r2p(Context& c, const Instruction& i) {
  Lanes s, t;
  const Lanes &x = plain(c, i.operands[1], s), &mask = integer(c, i.operands[2], t);
  const u32 chosen = mask[0] & 0x7f;
  for (int p = 0; p < 7; ++p) {
    if (!(chosen >> p & 1)) continue;
    const u32 value = bits([&](int l) { return x[l] >> (i.a + p) & 1; });
    if (i.b) c.warp.up[p] = value & 1;
    else c.warp.p[p] = (c.warp.p[p] & ~c.lanes) | (value & c.lanes);
  }
  return Step::Done;
}

Execute prepare_predicates(Instruction& i) {
  Modifiers m(i);
  const bool to_register = i.opcode.starts_with("P2R") || i.opcode.starts_with("UP2UR");
  i.a = take_byte(m);
  i.b = i.pipe == Pipe::Uniform;
  if (!m.none_left() || i.operands.size() != (to_register ? 4u : 3u)) return nullptr;
  if (!to_register && i.operands[1].part >= 4) i.a = 8 * (i.operands[1].part - 4);
  return to_register ? p2r : r2p;
}

}  // namespace

const Opcode MOVES[] = {
    {"MOV", Pipe::Alu, prepare_mov},
    {"MOV32I", Pipe::Alu, prepare_mov},
    {"UMOV", Pipe::Uniform, prepare_mov},
    {"SEL", Pipe::Alu, prepare_sel},
    {"USEL", Pipe::Uniform, prepare_sel},
    {"PRMT", Pipe::Alu, prepare_prmt},
    {"UPRMT", Pipe::Uniform, prepare_prmt},
    {"S2R", Pipe::Mufu, prepare_s2r},
    {"S2UR", Pipe::Mufu, prepare_s2r},
    {"CS2R", Pipe::Alu, prepare_cs2r},
    {"R2UR", Pipe::Alu, prepare_r2ur},
    {"P2R", Pipe::Alu, prepare_predicates},
    {"R2P", Pipe::Alu, prepare_predicates},
    {"UP2UR", Pipe::Uniform, prepare_predicates},
    {"UR2UP", Pipe::Uniform, prepare_predicates},
    {nullptr, Pipe::None, nullptr},
};

}  // namespace sass
