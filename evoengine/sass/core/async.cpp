// Copies by LDGSTS, waits for groups of asynchronous work, fences, clusters, and registers passed between warps; and
// the table of all asynchronous opcodes.
#include "async.h"

#include "memory_ops.h"
#include "order.h"

namespace sass {

// ── what the files of asynchronous opcodes share ────────────────────────────────────────────────────────────────────

std::string named(const Instruction& i) {
  char at[32];
  snprintf(at, sizeof at, " at 0x%x", i.address);
  return "`" + i.text + "`" + at;
}

namespace {

[[noreturn]] void wrong_address(const Instruction& by, u32 address, const std::string& why) {
  char place[48];
  snprintf(place, sizeof place, " at shared address 0x%x: ", address);
  throw Fault{named(by) + place + why};
}

}  // namespace

u8* shared_bytes(Block*& block, u32 address, u32 bytes, u32 alignment, const Instruction& by) {
  const auto& blocks = block->cluster->blocks;
  u32 rank = address >> 24, offset = address & 0xffffff;
  if (rank >= blocks.size())
    wrong_address(by, address, "block " + std::to_string(rank) + " of a cluster of " + std::to_string(blocks.size()));
  Block* owner = blocks[rank].get();
  if (owner != block && owner->done()) wrong_address(by, address, "that block of the cluster has ended");
  block = owner;
  if (u64(offset) + bytes > owner->shared.size())
    wrong_address(by, address, "outside of the " + std::to_string(owner->shared.size()) + " bytes that the block has");
  if (offset % alignment) wrong_address(by, address, "not a multiple of " + std::to_string(alignment));
  return owner->shared.data() + offset;
}

u8* own_bytes(Block& block, u32 address, u32 bytes, u32 alignment, const Instruction& by) {
  u32 rank = address >> 24;
  if (rank && rank != block.rank)
    wrong_address(by, address, "of another block of the cluster, which the instruction does not reach");
  Block* own = &block;
  return shared_bytes(own, (address & 0xffffff) | block.rank << 24, bytes, alignment, by);
}

namespace {

// ── LDGSTS ──────────────────────────────────────────────────────────────────────────────────────────────────────────

constexpr int ZERO_FILL = 1;

struct GlobalCopy {
  u32 lanes, from_memory;  // those that copy; the others write zeros
  Lanes to;
  alignas(16) u8 data[LANES][16];
};

// Sectors whose bytes do not all land in one aligned piece of 32 bytes.
int torn_sectors(const Access& from, const Lanes& to) {
  int found = 0;
  u64 last = ~0ull;
  for (int lane = 1; lane < LANES; lane++) {
    const u64 sector = from.addresses[lane] >> 5;
    const bool both = (from.lanes >> (lane - 1) & 3) == 3 && from.addresses[lane - 1] >> 5 == sector;
    if (!both || sector == last || to[lane] >> 5 == to[lane - 1] >> 5) continue;
    found++;
    last = sector;
  }
  return found;
}

void order_sources(Order& order, Context& c, const Instruction& i, const Access& access, u32 bytes) {
  for (u32 rest = access.lanes; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const Allocation& a = c.machine.memory.find(access.addresses[lane], 1, false);
    if (!a.shadow) continue;
    const GlobalTouch touch = order.begin_global(c.warp, i, a, Touch::Read);
    order.touch_global_range(touch, u32(lane), access.addresses[lane] - a.address, std::min<u64>(bytes, a.bytes));
  }
}

// LDGSTS.E.BYPASS.128 [R4], desc[UR8][R6.64], P0: without P0 all 16 bytes are zeros. .ZFILL: zeros at the end, as many
// as the address exceeds a multiple of the size.
Step copy(Context& c, const Instruction& i) {
  u32 bytes = u32(i.b);
  GlobalCopy work;
  work.lanes = c.lanes;
  work.from_memory = c.lanes & (i.operands.size() > 2 ? predicate(c, i.operands[2]) : ALL);
  addresses(c, i.operands[0], work.to);
  u64 sources[LANES];
  addresses(c, i.operands[1], i.d, sources);
  Access& access = c.access;
  access.space = Access::Space::Global;
  access.store = access.atomic = access.matrix = false;
  access.asynchronous = true;
  access.bytes = i.b;
  access.cached = i.b < 16;  // where those of 16 bytes do not bypass the L1, they took no less for what it had
  access.lanes = work.from_memory;
  for (int lane = 0; lane < LANES; lane++) {
    if (!(c.lanes >> lane & 1)) continue;
    own_bytes(*c.warp.block, work.to[lane], bytes, bytes, i);
    std::memset(work.data[lane], 0, 16);
    if (!(work.from_memory >> lane & 1)) continue;
    u64 from = sources[lane];
    u32 zeros = u32(from % bytes);
    if (zeros && i.a != ZERO_FILL) {
      char place[64];
      snprintf(place, sizeof place, ": global address 0x%llx is not a multiple of ", (unsigned long long)from);
      throw Fault{named(i) + place + std::to_string(bytes)};
    }
    access.addresses[lane] = from - zeros;
    c.machine.memory.load(from - zeros, work.data[lane], bytes - zeros);
  }
  if (Order* order = order_of(c)) {
    order_sources(*order, c, i, access, bytes);
    order->copy(c.warp, i, c.lanes, work.to.v, bytes);
  }
  Completion landing;
  landing.queue = Completion::Queue::Copy;
  landing.warp = &c.warp;
  landing.bytes = i.b * __builtin_popcount(work.from_memory);
  access.torn = torn_sectors(access, work.to);
  landing.access = access;
  landing.land = [warp = &c.warp, work, bytes] {
    Block& block = *warp->block;
    for (int lane = 0; lane < LANES; lane++)
      if (work.lanes >> lane & 1) std::memcpy(block.shared.data() + (work.to[lane] & 0xffffff), work.data[lane], bytes);
    warp->copies.land();
  };
  c.warp.copies.add();
  c.machine.begin(std::move(landing));
  return Step::Done;
}

Execute prepare_copy(Instruction& i) {
  Modifiers m(i);
  bool extended = m.take("E");
  i.b = m.take("128") ? 16 : m.take("64") ? 8 : 4;
  m.take("BYPASS");
  i.a = m.take("ZFILL") ? ZERO_FILL : 0;
  for (const char* hint : {"LTC64B", "LTC128B", "LTC256B"}) m.take(hint);
  size_t operands = i.operands.size();
  i.d = operands >= 2 && is_pair(i, i.operands[1]);
  bool predicated = operands == 3 && i.operands[2].kind == Operand::Kind::Predicate;
  return extended && m.none_left() && (operands == 2 || predicated) ? copy : nullptr;
}

// ── groups ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Step close_copies(Context& c, const Instruction& i) {
  c.warp.copies.close(i.write_barrier);
  if (Order* order = order_of(c)) order->close_group(c.warp, AgentKind::Copies);
  return Step::Done;
}
Execute prepare_close_copies(Instruction& i) { return i.modifiers.empty() ? close_copies : nullptr; }

Step close_stores(Context& c, const Instruction& i) {
  c.warp.tensor_stores.close(i.read_barrier);
  if (Order* order = order_of(c)) order->close_group(c.warp, AgentKind::Stores);
  return Step::Done;
}
Execute prepare_close_stores(Instruction& i) { return i.modifiers.empty() ? close_stores : nullptr; }

Step groups_landed(Context& c, const Instruction& i, u32 scoreboard, u32 left) {
  Warp& w = c.warp;
  const u32 copies = w.copies.landed(scoreboard, left);
  if (c.machine.visits && copies) c.machine.visits->add(w, Visit::CopyWait, u64(i.address));
  if (Order* order = order_of(c)) {
    order->wait_for(w, AgentKind::Copies, copies);
    order->wait_for(w, AgentKind::Stores, w.tensor_stores.landed(scoreboard, left));
  }
  return Step::Done;
}

// DEPBAR.LE SB0, 2: until at most two of the groups are pending that LDGDEPBAR and UTMACMDFLUSH closed with that
// scoreboard. Other scoreboards order only operations that are immediate here.
Step wait_for_groups(Context& c, const Instruction& i) {
  const u32 scoreboard = u32(i.operands[0].index), left = i.operands[1].immediate;
  Warp& w = c.warp;
  if (w.copies.open(scoreboard) > int(left)) w.wait = {Wait::Kind::Copies, scoreboard, left};
  else if (w.tensor_stores.open(scoreboard) > int(left)) w.wait = {Wait::Kind::TensorStores, scoreboard, left};
  else return groups_landed(c, i, scoreboard, left);
  return Step::Waiting;
}

Execute prepare_wait_for_groups(Instruction& i) {
  Modifiers m(i);
  // DEPBAR {5,4}: registers have their final values already
  if (m.none_left() && i.operands.size() == 1 && i.operands[0].kind == Operand::Kind::Immediate) return nothing;
  bool scoreboard = i.operands.size() >= 2 && i.operands[0].kind == Operand::Kind::Scoreboard &&
                    i.operands[1].kind == Operand::Kind::Immediate;
  return m.take("LE") && m.none_left() && scoreboard ? wait_for_groups : nullptr;
}

// WARPGROUP.DEPBAR.LE gsb0, 0x1
Step wait_for_products(Context& c, const Instruction& i) {
  u32 left = i.operands[1].immediate;
  if (c.warp.products.open(0) <= int(left)) {
    if (Order* order = order_of(c)) order->wait_for_products(c.warp, c.warp.products.landed(0, left));
    return Step::Done;
  }
  c.warp.wait = {Wait::Kind::Products, 0, left};
  return Step::Waiting;
}

Execute prepare_warpgroup(Instruction& i) {
  Modifiers m(i);
  if (m.take("ARRIVE")) return m.none_left() ? nothing : nullptr;
  bool known = m.take("DEPBAR") && m.take("LE") && i.operands.size() == 2;
  return known && m.none_left() ? wait_for_products : nullptr;
}

// ── clusters ────────────────────────────────────────────────────────────────────────────────────────────────────────

Step arrive_at_cluster(Context& c, const Instruction& i) {
  Warp& w = c.warp;
  if (w.cluster_arrived & c.lanes) throw Fault{named(i) + ": arrives again before it has waited"};
  w.cluster_arrived |= c.lanes;
  w.cluster_generation = w.block->cluster->generation;
  if (Order* order = order_of(c)) order->arrive_at_cluster(w);
  check_cluster_barrier(*w.block->cluster);
  return Step::Done;
}

Step wait_for_cluster(Context& c, const Instruction& i) {
  Warp& w = c.warp;
  if (w.cluster_generation == NEVER_ARRIVED) throw Fault{named(i) + ": waits where it has not arrived"};
  if (w.block->cluster->generation != w.cluster_generation) {
    if (Order* order = order_of(c)) order->acquire(w, order->of_cluster());
    return Step::Done;
  }
  w.wait = {Wait::Kind::ClusterBarrier, 0, w.cluster_generation};
  return Step::Waiting;
}

Execute prepare_arrive_at_cluster(Instruction& i) { return i.modifiers.empty() ? arrive_at_cluster : nullptr; }
Execute prepare_wait_for_cluster(Instruction& i) { return i.modifiers.empty() ? wait_for_cluster : nullptr; }

// ── warps ───────────────────────────────────────────────────────────────────────────────────────────────────────────

// ELECT P0, UR4, PT: the lowest executing lane, its number in UR4. Older toolkits write ~URZ, a mask of all lanes.
Step elect(Context& c, const Instruction& i) {
  Lanes scratch;
  const Operand& of = i.operands[2];
  u32 candidates = c.lanes & (of.kind == Operand::Kind::Uniform ? integer(c, of, scratch)[0] : predicate(c, of));
  int leader = candidates ? __builtin_ctz(candidates) : 0;
  write_predicate(c, i.operands[0], candidates ? 1u << leader : 0);
  if (i.operands[1].index != URZ) c.warp.u[i.operands[1].index] = u32(leader);
  return Step::Done;
}

Execute prepare_elect(Instruction& i) {
  bool known = i.modifiers.empty() && i.operands.size() == 3 && i.operands[0].kind == Operand::Kind::Predicate &&
               i.operands[1].kind == Operand::Kind::Uniform;
  return known ? elect : nullptr;
}

int registers_of(const Context& c) { return c.warp.registers ? c.warp.registers : int(c.machine.launch.registers); }

// USETMAXREG.DEALLOC.CTAPOOL 0x28
Step give_registers(Context& c, const Instruction& i) {
  int wanted = int(i.operands[0].immediate), held = registers_of(c);
  if (wanted > held)
    throw Fault{named(i) + ": would keep " + std::to_string(wanted) + " registers of " + std::to_string(held)};
  c.warp.block->free_registers += held - wanted;
  c.warp.registers = wanted;
  return Step::Done;
}

// USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8: waits until other warps release registers.
Step take_registers(Context& c, const Instruction& i) {
  int wanted = int(i.operands[1].immediate), held = registers_of(c);
  if (wanted < held)
    throw Fault{named(i) + ": would have " + std::to_string(wanted) + " registers after " + std::to_string(held)};
  if (c.warp.block->free_registers < wanted - held) {
    c.warp.wait = {Wait::Kind::Registers, u32(wanted - held)};
    return Step::Waiting;
  }
  c.warp.block->free_registers -= wanted - held;
  c.warp.registers = wanted;
  write_predicate(c, i.operands[0], ALL);
  return Step::Done;
}

Execute prepare_registers(Instruction& i) {
  Modifiers m(i);
  bool pool = m.take("CTAPOOL"), give = m.take("DEALLOC"), take = m.take("TRY_ALLOC");
  if (!pool || !m.none_left()) return nullptr;
  if (give && i.operands.size() == 1) return give_registers;
  return take && i.operands.size() == 2 ? take_registers : nullptr;
}

// ── fences ──────────────────────────────────────────────────────────────────────────────────────────────────────────

// There is one memory here, and every warp sees writes at once: fences only order accesses.
Step fence(Context& c, const Instruction& i) {
  Order* order = order_of(c);
  if (order && i.a) order->publish(c.warp, has(i, "SC"));
  return Step::Done;
}

// MEMBAR.SC.GPU
Execute prepare_fence(Instruction& i) {
  Modifiers m(i);
  m.take("ALL"), m.take("SC"), m.take("CTA"), m.take("VC");
  i.a = m.take("GPU") || m.take("SYS");
  return m.none_left() ? fence : nullptr;
}

Step fence_proxy(Context& c, const Instruction&) {
  if (Order* order = order_of(c)) order->fence_proxy(c.warp);
  return Step::Done;
}

// FENCE.VIEW.ASYNC.S
Execute prepare_fence_proxy(Instruction& i) {
  Modifiers m(i);
  const bool known = m.take("VIEW") && m.take("ASYNC");
  m.take("S"), m.take("G"), m.take("T");
  return known && m.none_left() ? fence_proxy : nullptr;
}

template <const char* const* known>
Execute prepare_nothing(Instruction& i) {
  Modifiers m(i);
  for (const char* const* name = known; *name; name++) m.take(*name);
  return m.none_left() ? nothing : nullptr;
}

constexpr const char* NO_MODIFIERS[] = {nullptr};
constexpr const char* MAPS[] = {"PF", "IV", nullptr};
constexpr const char* PREFETCHES[] = {"L2", "1D", "2D", "3D", "4D", "5D", nullptr};

}  // namespace

void check_cluster_barrier(Cluster& cluster) {
  bool any = false;
  for (auto& block : cluster.blocks)
    for (Warp& w : block->warps) {
      if (w.alive & ~w.cluster_arrived) return;
      any |= w.cluster_arrived != 0;
    }
  if (!any) return;
  for (auto& block : cluster.blocks)
    for (Warp& w : block->warps) w.cluster_arrived = 0;
  cluster.generation++;
  if (cluster.order) Order::pass(cluster.order->of_cluster());
}

const Opcode ASYNC[] = {
    {"LDGSTS", Pipe::Memory, prepare_copy},
    {"LDGDEPBAR", Pipe::Memory, prepare_close_copies},
    {"DEPBAR", Pipe::None, prepare_wait_for_groups},
    {"ARRIVES", Pipe::Memory, prepare_copies_arrive},
    {"SYNCS", Pipe::Memory, prepare_transaction_barrier},
    {"UTMALDG", Pipe::Uniform, prepare_tensor_load},
    {"UTMASTG", Pipe::Uniform, prepare_tensor_store},
    {"UTMAREDG", Pipe::Uniform, prepare_tensor_reduction},
    {"UBLKCP", Pipe::Uniform, prepare_bulk_copy},
    {"UBLKRED", Pipe::Uniform, prepare_bulk_reduction},
    {"UTMACMDFLUSH", Pipe::Uniform, prepare_close_stores},
    {"UTMAPF", Pipe::Uniform, prepare_nothing<PREFETCHES>},
    {"UBLKPF", Pipe::Uniform, prepare_nothing<PREFETCHES>},
    {"UTMACCTL", Pipe::Uniform, prepare_nothing<MAPS>},
    {"WARPGROUP", Pipe::None, prepare_warpgroup},
    {"UCGABAR_ARV", Pipe::Uniform, prepare_arrive_at_cluster},
    {"UCGABAR_WAIT", Pipe::Uniform, prepare_wait_for_cluster},
    {"ELECT", Pipe::Alu, prepare_elect},
    {"USETMAXREG", Pipe::Uniform, prepare_registers},
    {"MEMBAR", Pipe::Memory, prepare_fence},
    {"FENCE", Pipe::Memory, prepare_fence_proxy},
    {"ERRBAR", Pipe::Memory, prepare_nothing<NO_MODIFIERS>},
    {"CGAERRBAR", Pipe::Memory, prepare_nothing<NO_MODIFIERS>},
    {"ACQBULK", Pipe::None, prepare_nothing<NO_MODIFIERS>},
    {"PREEXIT", Pipe::None, prepare_nothing<NO_MODIFIERS>},
    {nullptr, Pipe::None, nullptr},
};

}  // namespace sass
