// Steps of warps whose lanes may diverge, global memory, and the preparation of blocks.
#include "machine.h"

#include <algorithm>

#include "async.h"
#include "order.h"
#include "sparse.h"

namespace sass {

// ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Allocation& GlobalMemory::find(u64 address, u32 bytes, bool write) {
  auto holds = [&](const Allocation& a) { return address >= a.address && address + bytes <= a.address + a.bytes; };
  if (last >= allocations.size() || !holds(allocations[last])) {
    auto after = std::upper_bound(allocations.begin(), allocations.end(), address,
                                  [](u64 at, const Allocation& a) { return at < a.address; });
    if (after == allocations.begin() || !holds(*(after - 1))) {
      char text[96];
      snprintf(text, sizeof text, "%s of %u bytes at global address 0x%llx, outside all tensors",
               write ? "a store" : "a load", bytes, (unsigned long long)address);
      std::string near;
      if (after != allocations.begin()) {
        const Allocation& a = *(after - 1);
        near = "; " + std::to_string(address - a.address) + " bytes into " + a.name + ", which has " +
               std::to_string(a.bytes);
      }
      throw Fault{text + near};
    }
    last = after - 1 - allocations.begin();
  }
  Allocation& found = allocations[last];
  if (write && !found.writable) throw Fault{"a store to " + found.name + ", which is an input"};
  return found;
}

void GlobalMemory::load(u64 address, void* to, u32 bytes) {
  const Allocation& a = find(address, bytes, false);
  u64 at = address - a.address;
  if (a.sparse) return a.sparse->load(at, to, bytes);
  if (a.period == a.bytes) {
    std::memcpy(to, a.data + at, bytes);
    return;
  }
  at %= a.period;
  u32 first = std::min<u64>(bytes, a.period - at);
  std::memcpy(to, a.data + at, first);
  if (first < bytes) std::memcpy(static_cast<u8*>(to) + first, a.data, bytes - first);
}

void GlobalMemory::store(u64 address, const void* from, u32 bytes) {
  Allocation& a = find(address, bytes, true);
  if (a.sparse) return a.sparse->store(address - a.address, from, bytes);
  if (a.period == a.bytes) std::memcpy(a.data + (address - a.address), from, bytes);
}

// ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

namespace {

constexpr u8 POISON = 0xfe;  // of registers and memory that nothing has written: NaN in half, bfloat and, twice, float

void start(Warp& w, Block& block, int number, u32 threads, u32 local_bytes) {
  std::memset(w.r, POISON, sizeof w.r);
  std::memset(&w.r[RZ], 0, sizeof w.r[RZ]);
  std::memset(w.u, POISON, sizeof w.u);
  std::memset(w.p, 0, sizeof w.p);
  std::memset(w.up, 0, sizeof w.up);
  std::memset(w.convergence, 0, sizeof w.convergence);
  std::memset(w.arrived, 0, sizeof w.arrived);
  std::memset(w.lane_pc, 0, sizeof w.lane_pc);
  w.u[URZ] = 0;
  w.p[PT] = ALL;
  w.up[PT] = true;
  w.number = number;
  w.block = &block;
  u32 left = threads - number * LANES;
  w.alive = left >= LANES ? ALL : (1u << left) - 1;
  w.active = w.alive;
  w.local.assign(size_t(local_bytes) * LANES, POISON);
}

}  // namespace

std::unique_ptr<Cluster> make_cluster(Machine& machine, u64 first) {
  const Launch& l = machine.launch;
  u32 at[3] = {u32(first % l.grid[0]), u32(first / l.grid[0] % l.grid[1]), u32(first / l.grid[0] / l.grid[1])};
  u32 threads = l.threads[0] * l.threads[1] * l.threads[2];
  auto cluster = std::make_unique<Cluster>();
  cluster->first = first;
  u32 ranks = l.cluster[0] * l.cluster[1] * l.cluster[2];
  for (u32 rank = 0; rank < ranks; rank++) {
    auto block = std::make_unique<Block>();
    u32 within[3] = {rank % l.cluster[0], rank / l.cluster[0] % l.cluster[1], rank / l.cluster[0] / l.cluster[1]};
    for (int d = 0; d < 3; d++) block->index[d] = at[d] / l.cluster[d] * l.cluster[d] + within[d];
    block->rank = rank;
    block->cluster = cluster.get();
    block->shared.assign(l.reserved_shared + l.shared_bytes, POISON);
    block->warps = std::vector<Warp>((threads + LANES - 1) / LANES);
    for (size_t n = 0; n < block->warps.size(); n++) start(block->warps[n], *block, n, threads, l.local_bytes);
    cluster->blocks.push_back(std::move(block));
  }
  return cluster;
}

// ── warps ───────────────────────────────────────────────────────────────────────────────────────────────────────────

bool is_waiting(Machine& machine, Warp& w) {
  if (w.wait.kind == Wait::Kind::None) return false;
  bool waits = false;
  switch (w.wait.kind) {
    case Wait::Kind::None: break;
    case Wait::Kind::Barrier: waits = w.block->barriers[w.wait.index].generation == w.wait.phase; break;
    case Wait::Kind::TransactionBarrier:
      waits = !transaction_phase_done(machine, *w.block, w.wait.index, w.wait.phase);
      break;
    case Wait::Kind::Copies: waits = w.copies.open(w.wait.index) > int(w.wait.phase); break;
    case Wait::Kind::Products: waits = w.products.open(0) > int(w.wait.phase); break;
    case Wait::Kind::TensorStores: waits = w.tensor_stores.open(w.wait.index) > int(w.wait.phase); break;
    case Wait::Kind::ClusterBarrier: waits = w.block->cluster->generation == w.wait.phase; break;
    case Wait::Kind::Registers: waits = w.block->free_registers < int(w.wait.index); break;
  }
  if (waits) return true;
  if (w.wait.kind == Wait::Kind::Barrier) {
    const NamedBarrier& b = w.block->barriers[w.wait.index];
    w.reduction = w.reduced == Reduced::Count ? b.counted
                  : w.reduced == Reduced::Or  ? b.counted > 0
                                              : b.counted == b.arrived_before;
    if (Order* order = w.block->cluster->order) order->acquire(w, order->barrier(w.block->rank, w.wait.index));
  }
  w.wait = Wait{};
  return false;
}

namespace {

// The running group continues until it waits for others or its turn ends (`group` is -1); then one is drawn.
int next_group(Warp& w, u32 ready) {
  if (w.group < 0 || !(ready >> w.group & 1) || w.leader[w.group] != w.group) {
    u32 leaders = 0;
    for (u32 rest = ready; rest; rest &= rest - 1) leaders |= 1u << w.leader[__builtin_ctz(rest)];
    w.draw = w.draw * 1664525u + 1013904223u;  // Numerical Recipes, ranqd1
    for (u32 skipped = (w.draw >> 16) % u32(__builtin_popcount(leaders)); skipped; skipped--) leaders &= leaders - 1;
    w.group = __builtin_ctz(leaders);
  }
  w.active = 0;
  for (u32 rest = ready; rest; rest &= rest - 1)
    if (const int lane = __builtin_ctz(rest); w.leader[lane] == w.group) w.active |= 1u << lane;
  return w.pc = w.lane_pc[w.group];
}

}  // namespace

int next(Warp& w) {
  if (!w.alive) return -1;
  if (w.together) {
    w.active = w.alive;
    return w.pc;
  }
  u32 ready = w.alive & ~w.parked;
  if (!ready) throw Fault{"lanes of a warp wait for each other at different places", true};
  if (w.strict) return next_group(w, ready);
  if (!(ready & ~w.deferred)) w.deferred = 0;
  u32 choice = ready & ~w.deferred;
  int lowest = w.lane_pc[__builtin_ctz(choice)];
  for (u32 rest = choice; rest; rest &= rest - 1) lowest = std::min(lowest, w.lane_pc[__builtin_ctz(rest)]);
  w.active = 0;
  for (u32 rest = ready; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    if (w.lane_pc[lane] == lowest) w.active |= 1u << lane;
  }
  w.pc = lowest;
  return lowest;
}

namespace {

void spread(Warp& w) {
  for (int lane = 0; lane < LANES; lane++) w.lane_pc[lane] = w.pc;
  w.together = false;
}

void gather(Warp& w) {
  if (w.parked & w.alive || !w.alive) return;
  if (w.strict) {
    const int leader = __builtin_ctz(w.alive);
    for (u32 rest = w.alive; rest; rest &= rest - 1)
      if (w.leader[__builtin_ctz(rest)] != leader) return;
  }
  int at = w.lane_pc[__builtin_ctz(w.alive)];
  for (u32 rest = w.alive; rest; rest &= rest - 1)
    if (w.lane_pc[__builtin_ctz(rest)] != at) return;
  w.together = true;
  w.deferred = 0;
  w.pc = at;
}

// The lanes form groups of those with the same position and the same state.
void group(Warp& w, u32 lanes) {
  u8 before[LANES];
  std::memcpy(before, w.leader, sizeof before);
  for (u32 rest = lanes; rest;) {
    const int first = __builtin_ctz(rest);
    u32 together = 0;
    for (u32 others = rest; others; others &= others - 1) {
      const int lane = __builtin_ctz(others);
      if (w.lane_pc[lane] != w.lane_pc[first] || (w.parked >> lane & 1) != (w.parked >> first & 1)) continue;
      together |= 1u << lane;
      w.leader[lane] = u8(first);
    }
    rest &= ~together;
  }
  if (Order* order = w.block->cluster->order) order->regroup(w, before);
}

void go_on(Warp& w, u32 lanes) {
  for (u32 rest = lanes; rest; rest &= rest - 1) w.lane_pc[__builtin_ctz(rest)]++;
  w.parked &= ~lanes;
  if (!w.strict || !lanes) return;
  if (Order* order = w.block->cluster->order) order->meet(w, lanes);
  group(w, lanes);
}

void after_exit(Warp& w) {
  if (!w.together) {
    for (int b = 0; b < 16; b++)
      if (w.arrived[b]) release(w, b);
    if (w.synced) release(w, AT_WARPSYNC);
    if (w.at_barrier) release(w, AT_BAR);
    gather(w);
  }
  for (int b = 0; b < 16; b++) check_barrier(*w.block, b);
  check_cluster_barrier(*w.block->cluster);
}

}  // namespace

namespace {

// BAR counts whole warps: lanes that reach it separately continue as one group, which executes it.
void release_to_barrier(Warp& w) {
  w.at_barrier &= w.alive;
  if (!w.at_barrier || w.at_barrier != w.alive) return;
  const int at = w.lane_pc[__builtin_ctz(w.alive)];
  for (u32 rest = w.alive; rest; rest &= rest - 1)
    if (w.lane_pc[__builtin_ctz(rest)] != at)
      throw Fault{"lanes of a warp wait at different barriers of the block", true};
  w.parked = w.at_barrier = 0;
  group(w, w.alive);
}

}  // namespace

// Whether these lanes have met in the same call: a lane deeper in a recursion uses the same barrier for others.
static bool await_each_other(const Warp& w, int barrier, u32 lanes) {
  for (u32 rest = lanes; rest; rest &= rest - 1)
    if ((w.convergence[barrier][__builtin_ctz(rest)] & w.alive) != lanes) return false;
  return true;
}

void release(Warp& w, int where) {
  if (where == AT_BAR) return release_to_barrier(w);
  u32& arrived = where == AT_WARPSYNC ? w.synced : w.arrived[where];
  const u32 here = arrived & w.alive;
  u32 met = 0;
  for (u32 rest = here; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const u32 needed = (where == AT_WARPSYNC ? w.sync_mask[lane] : w.convergence[where][lane]) & w.alive;
    if ((here & needed) == needed && (where == AT_WARPSYNC || await_each_other(w, where, needed))) met |= 1u << lane;
  }
  go_on(w, met & w.parked);
  arrived = here & ~met;
}

void check_barrier(Block& block, int index) {
  NamedBarrier& barrier = block.barriers[index];
  if (!barrier.arrived) return;
  u32 expected = barrier.expected;
  if (!expected)
    for (const Warp& w : block.warps) expected += __builtin_popcount(w.alive);
  if (barrier.arrived < expected) return;
  barrier.counted = barrier.true_ones;
  barrier.arrived_before = barrier.arrived;
  barrier.arrived = barrier.true_ones = 0;
  barrier.expected = 0;
  barrier.generation++;
  if (Order* order = block.cluster->order) Order::pass(order->barrier(block.rank, u32(index)));
}

u32 lanes_to_execute(const Warp& w, const Instruction& i) {
  if (i.guard == PT && !i.guard_negated) return w.active;
  const u32 guard = i.guard_uniform ? (w.up[i.guard] ? ALL : 0) : w.p[i.guard];
  return w.active & (i.guard_negated ? ~guard : guard);
}

Step step(Context& c) {
  Warp& w = c.warp;
  const Instruction& i = c.machine.program->code[w.pc];
  const u32 lanes = lanes_to_execute(w, i);
  c.lanes = lanes;
  c.access.space = Access::Space::None;
  c.jumping = c.finished = 0;
  c.jump = -1;
  c.parked = NOWHERE;
  c.looked = false;
  if (lanes) {
    if (!i.execute) throw Fault{"opcode " + i.opcode + " is unknown"};
    if (i.execute(c, i) == Step::Waiting) return Step::Waiting;
  }
  const bool parks = c.parked != NOWHERE;
  if (w.together && !c.jumping && !parks && !c.finished) {
    w.pc++;
    return Step::Done;
  }
  if (w.together && c.jumping == w.alive && c.jump >= 0) {
    w.pc = c.jump;
    return Step::Done;
  }
  if (w.together) spread(w);
  int here = w.pc;
  const u32 stay = parks ? c.lanes : 0;
  for (u32 rest = w.active & ~stay; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    bool jumps = c.jumping >> lane & 1;
    w.lane_pc[lane] = !jumps ? here + 1 : c.jump == -2 ? int(c.jump_lanes[lane]) : c.jump;
    if (jumps && w.lane_pc[lane] <= here) w.deferred |= 1u << lane;
  }
  w.parked |= stay;
  w.alive &= ~c.finished;
  if (c.finished)
    if (Order* order = order_of(c)) order->end(w, w.block->done());
  if (w.strict && (c.jumping || parks || c.finished)) group(w, w.active & w.alive);
  if (parks) release(w, c.parked);
  if (c.finished) after_exit(w);
  gather(w);
  return Step::Done;
}

}  // namespace sass
