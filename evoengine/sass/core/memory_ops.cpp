// Loads, stores and prefetches of global, shared, local, constant and generic memory.
#include "memory_ops.h"

#include "async.h"
#include "order.h"

namespace sass {
namespace {

constexpr u64 WINDOW = 1ull << 32;

[[noreturn]] void fault(const char* what, u64 address, u32 bytes, int lane, const std::string& where) {
  char text[96];
  snprintf(text, sizeof text, "lane %d: %s of %u bytes at 0x%llx", lane, what, bytes, (unsigned long long)address);
  throw Fault{text + where};
}

}  // namespace

// ── addresses ───────────────────────────────────────────────────────────────────────────────────────────────────────

void addresses(Context& c, const Operand& o, Lanes& out) {
  const u32 fixed = u32(o.offset) + (o.uniform < 0 ? 0 : c.warp.u[o.uniform]);
  if (o.index < 0) {
    each(out, [&](int) { return fixed; });
    return;
  }
  const Lanes& base = c.warp.r[o.index];
  const u32 scale = o.scale;
  each(out, [&](int l) { return base[l] * scale + fixed; });
}

void addresses(Context& c, const Operand& o, bool pair, u64 (&out)[LANES]) {
  u64 fixed = u64(i64(o.offset));
  if (o.uniform >= 0 && o.uniform != URZ) fixed += u64(c.warp.u[o.uniform + 1]) << 32 | c.warp.u[o.uniform];
  if (o.index < 0 || o.index == RZ) {
    for (int l = 0; l < LANES; ++l) out[l] = fixed;
    return;
  }
  const Lanes &low = c.warp.r[o.index], &high = c.warp.r[pair ? o.index + 1 : RZ];
  for (int l = 0; l < LANES; ++l) out[l] = (u64(high[l]) << 32 | low[l]) + fixed;
}

bool is_pair(const Instruction& i, const Operand& o) {
  return o.wide || (has(i, "E") && o.text.find(".U32") == std::string::npos);
}

void check_alignment(u64 address, u32 bytes, int lane) {
  if (address & (bytes - 1)) fault("misaligned access", address, bytes, lane, "");
}

u8* shared_bytes(Context& c, u32 address, u32 bytes, int lane) {
  check_alignment(address, bytes, lane);
  const u32 rank = address >> RANK_BIT, offset = address & ((1u << RANK_BIT) - 1);
  const auto& blocks = c.warp.block->cluster->blocks;
  if (rank >= blocks.size())
    fault("access", address, bytes, lane,
          " of block " + std::to_string(rank) + "'s shared memory, in a cluster of " + std::to_string(blocks.size()));
  std::vector<u8>& shared = blocks[rank]->shared;
  if (u64(offset) + bytes > shared.size())
    fault("access", offset, bytes, lane, ", outside of " + std::to_string(shared.size()) + " bytes of shared memory");
  return shared.data() + offset;
}

u8* local_bytes(Context& c, u32 address, u32 bytes, int lane) {
  check_alignment(address, bytes, lane);
  const u32 each_lane = c.machine.launch.local_bytes;
  if (u64(address) + bytes > each_lane)
    fault("access", address, bytes, lane, ", outside of " + std::to_string(each_lane) + " bytes of local memory");
  return c.warp.local.data() + u64(lane) * each_lane + address;
}

u8* window_bytes(Context& c, u64 address, u32 bytes, int lane) {
  if (address - SHARED_WINDOW < WINDOW) return shared_bytes(c, u32(address - SHARED_WINDOW), bytes, lane);
  if (address - LOCAL_WINDOW < WINDOW) return local_bytes(c, u32(address - LOCAL_WINDOW), bytes, lane);
  if (address - CONSTANT_WINDOW >= WINDOW) return nullptr;
  std::vector<u8>& bank = c.machine.banks[0];
  const u64 offset = address - CONSTANT_WINDOW;
  check_alignment(offset, bytes, lane);
  if (offset + bytes > bank.size()) fault("access", offset, bytes, lane, ", outside of constant memory");
  return bank.data() + offset;
}

bool take_caching(Modifiers& m) {
  static const char* const IGNORED[] = {"E",  "U",       "SYS",    "WEAK",    "CONSTANT", "LU",   "EL",   "EF",
                                        "VC", "PRIVATE", "LTC64B", "LTC128B", "LTC256B",  "SPIN", nullptr};
  static const char* const PAST_L1[] = {"GPU", "NA", "MMIO", "CV", nullptr};
  // an SM's own L1 is sufficient for what only its threads must see (ld.global.ca is STRONG.SM)
  const bool of_sm = m.take("SM") | m.take("CTA");
  bool cached = !m.take("STRONG") || of_sm;
  while (take_one(m, IGNORED) >= 0) {
  }
  while (take_one(m, PAST_L1) >= 0) cached = false;
  return cached;
}

bool is_afar(const Context& c, u32 address) { return address >> RANK_BIT != c.warp.block->rank; }

void note_access(Context& c, Access::Space space, int bytes, bool store, bool cached) {
  Access& a = c.access;
  a.space = space;
  a.store = store;
  a.atomic = a.asynchronous = a.matrix = a.afar = false;
  a.cached = cached;
  a.bytes = bytes;
  a.lanes = c.lanes;
}

namespace {

// ── loads and stores ────────────────────────────────────────────────────────────────────────────────────────────────

using Space = Access::Space;

// Fields that `prepare` sets: a = bytes, negative for signed ones; b = the register is a pair; c = cached; d = generic
constexpr int WORDS = 4;

struct Data {
  Lanes word[WORDS];
};

template <class F>
inline void for_lanes(u32 lanes, F f) {
  for (u32 rest = lanes; rest; rest &= rest - 1) f(__builtin_ctz(rest));
}

// Copies a lane's bytes to its words, `from` of any alignment.
inline void take_bytes(Data& data, int lane, const u8* from, u32 bytes) {
  u32 words[WORDS] = {};
  std::memcpy(words, from, bytes);
  for (u32 k = 0; k * 4 < bytes; ++k) data.word[k][lane] = words[k];
}

inline void give_bytes(const Data& data, int lane, u8* to, u32 bytes) {
  u32 words[WORDS];
  for (u32 k = 0; k * 4 < bytes; ++k) words[k] = data.word[k][lane];
  std::memcpy(to, words, bytes);
}

void write_loaded(Context& c, const Instruction& i, Data& data) {
  if (i.a == -1) each(data.word[0], [&](int l) { return u32(i32(int8_t(data.word[0][l]))); });
  if (i.a == -2) each(data.word[0], [&](int l) { return u32(i32(int16_t(data.word[0][l]))); });
  for (int k = 0; k * 4 < std::abs(i.a); ++k) write(c, i.operands[0], data.word[k], k);
}

void read_stored(Context& c, const Instruction& i, Data& data) {
  const Operand& from = i.operands[1];
  for (int k = 0; k * 4 < i.a; ++k) {
    const bool held = from.kind == Kind::Register && from.index != RZ;
    if (held) data.word[k] = c.warp.r[from.index + k];
    else each(data.word[k], [&](int) { return from.kind == Kind::Immediate && k == 0 ? from.immediate : 0u; });
  }
}

// Orders the accesses of each lane to global memory that the kernel may write.
template <bool STORE>
void order_global(Order& order, Context& c, const Instruction& i, const u64 (&at)[LANES], u32 bytes, const Data& data) {
  const Touch kind = STORE ? Touch::Write : Touch::Read;
  const Allocation* of = nullptr;
  GlobalTouch touch{};
  u64 before = 0;
  bool spread = false;
  for_lanes(c.lanes, [&](int l) { spread |= at[l] != at[__builtin_ctz(c.lanes)]; });
  for_lanes(c.lanes, [&](int l) {
    if (i.strength && at[l] != before) order.synchronise(c.warp, i, before = at[l], kind);
    const Allocation& a = c.machine.memory.find(at[l], bytes, STORE);
    if (!a.shadow) return;
    if (&a != of) touch = order.begin_global(c.warp, i, *(of = &a), kind, spread);
    const u64 offset = at[l] - a.address;
    u32 words[WORDS];
    if (STORE)
      for (u32 k = 0; k * 4 < bytes; ++k) words[k] = data.word[k][l];
    order.touch_global(touch, u32(l), offset, bytes, a.data + offset, STORE ? reinterpret_cast<u8*>(words) : nullptr);
  });
}

// Moves each lane's bytes between `data` and global memory. Usually all lanes are in one allocation, held whole.
template <bool STORE>
void move_global(Context& c, const Instruction& i, const u64 (&at)[LANES], u32 bytes, Data& data) {
  GlobalMemory& memory = c.machine.memory;
  for_lanes(c.lanes, [&](int l) { check_alignment(at[l], bytes, l); });
  const Allocation& a = memory.find(at[__builtin_ctz(c.lanes)], bytes, STORE);
  const bool whole = a.period == a.bytes;
  if (Order* order = order_of(c); order && (i.strength || a.writable) && !i.optimistic)
    order_global<STORE>(*order, c, i, at, bytes, data);
  for_lanes(c.lanes, [&](int l) {
    const u64 offset = at[l] - a.address;
    if (whole && offset < a.bytes && offset + bytes <= a.bytes) {
      if constexpr (STORE) give_bytes(data, l, a.data + offset, bytes);
      else take_bytes(data, l, a.data + offset, bytes);
      return;
    }
    u8 copy[16];
    if constexpr (STORE) {
      give_bytes(data, l, copy, bytes);
      memory.store(at[l], copy, bytes);
    } else {
      memory.load(at[l], copy, bytes);
      take_bytes(data, l, copy, bytes);
    }
  });
}

Space space_of(u64 address) {
  if (address - SHARED_WINDOW < WINDOW) return Space::Shared;
  if (address - LOCAL_WINDOW < WINDOW) return Space::Local;
  return address - CONSTANT_WINDOW < WINDOW ? Space::Constant : Space::Global;
}

// Generic addresses: the lanes of each window, then the others as global memory.
template <bool STORE>
void move_generic(Context& c, const Instruction& i, u64 (&at)[LANES], u32 bytes, Data& data) {
  const u32 lanes = c.lanes;
  u32 global = 0, shared = 0;
  u8* there[LANES];
  Lanes near;
  for_lanes(lanes, [&](int l) {
    there[l] = window_bytes(c, at[l], bytes, l);
    near[l] = u32(at[l]);
    if (!there[l]) global |= 1u << l;
    else if (space_of(at[l]) == Space::Shared) shared |= 1u << l;
    else if (STORE && space_of(at[l]) == Space::Constant) fault("a store to constant memory", at[l], bytes, l, "");
  });
  if (Order* order = order_of(c); order && shared && !i.optimistic)
    order->touch(c.warp, i, STORE ? Touch::Write : Touch::Read, shared, near.v, bytes, STORE ? data.word : nullptr);
  for_lanes(lanes & ~global, [&](int l) {
    if constexpr (STORE) give_bytes(data, l, there[l], bytes);
    else take_bytes(data, l, there[l], bytes);
  });
  c.access.space = space_of(at[__builtin_ctz(lanes)]);
  if (global) {
    c.lanes = global;
    move_global<STORE>(c, i, at, bytes, data);
    c.lanes = lanes;
  }
  if (c.access.space != Space::Global)
    for (int l = 0; l < LANES; ++l) c.access.addresses[l] = u32(at[l]);
  c.access.afar = c.access.space == Space::Shared && is_afar(c, u32(at[__builtin_ctz(lanes)]));
}

template <bool STORE>
Step global(Context& c, const Instruction& i) {
  const Operand& memory = i.operands[STORE ? 0 : 1];
  const u32 bytes = u32(std::abs(i.a));
  note_access(c, Space::Global, int(bytes), STORE, i.c);
  addresses(c, memory, i.b, c.access.addresses);
  Data data;
  if (STORE) read_stored(c, i, data);
  u64 at[LANES];
  std::memcpy(at, c.access.addresses, sizeof at);
  if (i.d) move_generic<STORE>(c, i, at, bytes, data);
  else move_global<STORE>(c, i, at, bytes, data);
  if (!STORE) write_loaded(c, i, data);
  return Step::Done;
}

// Whether a load looks at an mbarrier before sm_90: its lanes then know what has arrived there in phases so far.
bool looks_at_barrier(Context& c, Order& order, const Lanes& at) {
  const u32 address = at[__builtin_ctz(c.lanes)] & ~7u;
  if (c.machine.launch.arch >= 90 || !holds_barrier(*c.warp.block, address)) return false;
  order.acquire(c.warp, order.mbarrier(address));
  return true;
}

template <bool STORE, Space SPACE>
Step near(Context& c, const Instruction& i) {
  const Operand& memory = i.operands[STORE ? 0 : 1];
  const u32 bytes = u32(std::abs(i.a));
  note_access(c, SPACE, int(bytes), STORE, true);
  Lanes at;
  addresses(c, memory, at);
  for (int l = 0; l < LANES; ++l) c.access.addresses[l] = at[l];
  Data data;
  if (STORE) read_stored(c, i, data);
  u8* there[LANES];
  Block& own = *c.warp.block;
  const u32 first = own.rank << RANK_BIT;
  for_lanes(c.lanes, [&](int l) {
    const u32 offset = at[l] - first;
    if constexpr (SPACE == Space::Local) there[l] = local_bytes(c, at[l], bytes, l);
    else if (offset < own.shared.size() && offset + bytes <= own.shared.size() && !(offset & (bytes - 1)))
      there[l] = own.shared.data() + offset;
    else there[l] = shared_bytes(c, at[l], bytes, l);
  });
  if constexpr (SPACE == Space::Shared)
    if (Order* order = order_of(c); order && !i.optimistic && (STORE || !looks_at_barrier(c, *order, at)))
      order->touch(c.warp, i, STORE ? Touch::Write : Touch::Read, c.lanes, at.v, bytes, STORE ? data.word : nullptr);
  for_lanes(c.lanes, [&](int l) {
    if constexpr (STORE) give_bytes(data, l, there[l], bytes);
    else take_bytes(data, l, there[l], bytes);
  });
  if (!STORE) write_loaded(c, i, data);
  return Step::Done;
}

// LDC, ULDC, LDCU R, c[bank][…]
Step ldc(Context& c, const Instruction& i) {
  const Operand& o = i.operands[1];
  const u32 bytes = u32(std::abs(i.a)), fixed = u32(o.offset) + (o.uniform < 0 ? 0 : c.warp.u[o.uniform]);
  const bool by_lane = o.index >= 0 && o.index != RZ;
  const std::vector<u8>& bank = c.machine.banks[o.bank];
  note_access(c, Space::Constant, int(bytes), false, true);
  Data data;
  auto read = [&](int l, u32 at) {
    check_alignment(at, bytes, l);
    if (u64(at) + bytes > bank.size())
      fault("access", at, bytes, l,
            ", outside of " + std::to_string(bank.size()) + " bytes of constant bank " + std::to_string(o.bank));
    c.access.addresses[l] = at;
    take_bytes(data, l, bank.data() + at, bytes);
  };
  if (by_lane) {
    for_lanes(c.lanes, [&](int l) { read(l, fixed + c.warp.r[o.index][l]); });
  } else {
    read(0, fixed);
    for (int k = 0; k * 4 < int(bytes); ++k) each(data.word[k], [value = data.word[k][0]](int) { return value; });
    for (int l = 1; l < LANES; ++l) c.access.addresses[l] = fixed;
  }
  write_loaded(c, i, data);
  return Step::Done;
}

// Bytes of one lane, negative for sign-extended values.
int take_size(Modifiers& m) {
  static const char* const SIZES[] = {"U8", "S8", "U16", "S16", "32", "64", "128", nullptr};
  static const int BYTES[] = {1, -1, 2, -2, 4, 8, 16};
  const int size = take_one(m, SIZES);
  return size < 0 ? 4 : BYTES[size];
}

template <Execute EXECUTE, bool STORE, bool GENERIC = false>
Execute prepare_memory(Instruction& i) {
  Modifiers m(i);
  i.a = take_size(m);
  if (STORE) i.a = std::abs(i.a);
  i.c = take_caching(m);
  i.d = GENERIC;
  if (!m.none_left() || i.operands.size() != 2) return nullptr;
  const Operand& memory = i.operands[STORE ? 0 : 1];
  if (memory.kind != Kind::Memory) return nullptr;
  i.b = is_pair(i, memory);
  return EXECUTE;
}

Execute prepare_ldc(Instruction& i) {
  Modifiers m(i);
  i.a = take_size(m);
  m.take("IL"), m.take("IS"), m.take("ISL");
  return m.none_left() && i.operands.size() == 2 && i.operands[1].kind == Kind::Constant ? ldc : nullptr;
}

// ── the rest ────────────────────────────────────────────────────────────────────────────────────────────────────────

enum Window { OWN_SHARED, CLUSTER_SHARED, LOCAL, GLOBAL };

// QSPC P, R, [R]: whether a generic address is in a window. a = window
Step qspc(Context& c, const Instruction& i) {
  u64 at[LANES];
  addresses(c, i.operands.back(), true, at);
  const u32 own = c.warp.block->rank;
  write_predicate(
      c, i.operands[0], bits([&](int l) {
        const Space space = space_of(at[l]);
        if (i.a == OWN_SHARED) return space == Space::Shared && u32(at[l]) >> RANK_BIT == own;
        return space == (i.a == CLUSTER_SHARED ? Space::Shared : i.a == LOCAL ? Space::Local : Space::Global);
      }));
  return Step::Done;
}

Execute prepare_qspc(Instruction& i) {
  static const char* const WINDOWS[] = {"S", "D", "L", "G", nullptr};
  Modifiers m(i);
  m.take("E");
  i.a = take_one(m, WINDOWS);
  return i.a >= 0 && m.none_left() && i.operands.size() == 3 ? qspc : nullptr;
}

Execute prepare_ignored(Instruction&) { return nothing; }  // prefetches and caches that do not exist here

// CCTL.IVALL: later loads see the stores of others.
Step invalidate_cache(Context& c, const Instruction&) {
  if (Order* order = order_of(c)) order->refresh(c.warp);
  return Step::Done;
}
Execute prepare_cache(Instruction& i) { return has(i, "IVALL") ? invalidate_cache : nothing; }

}  // namespace

const Opcode MEMORY[] = {
    {"LDG", Pipe::Memory, prepare_memory<global<false>, false>},
    {"STG", Pipe::Memory, prepare_memory<global<true>, true>},
    {"LD", Pipe::Memory, prepare_memory<global<false>, false, true>},
    {"ST", Pipe::Memory, prepare_memory<global<true>, true, true>},
    {"LDS", Pipe::Memory, prepare_memory<near<false, Space::Shared>, false>},
    {"STS", Pipe::Memory, prepare_memory<near<true, Space::Shared>, true>},
    {"LDL", Pipe::Memory, prepare_memory<near<false, Space::Local>, false>},
    {"STL", Pipe::Memory, prepare_memory<near<true, Space::Local>, true>},
    {"LDC", Pipe::Memory, prepare_ldc},
    {"ULDC", Pipe::Uniform, prepare_ldc},
    {"LDCU", Pipe::Uniform, prepare_ldc},
    {"QSPC", Pipe::Memory, prepare_qspc},
    {"CCTL", Pipe::Memory, prepare_cache},
    {"CCTLL", Pipe::Memory, prepare_ignored},
    {"PREFETCH", Pipe::Memory, prepare_ignored},
    {nullptr, Pipe::None, nullptr},
};

}  // namespace sass
