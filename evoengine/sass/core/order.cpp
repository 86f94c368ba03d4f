#include "order.h"

#include <algorithm>

namespace sass {

namespace {

bool is_proxy_work(const Instruction& i) {
  switch (i.op) {
    case Op::UBLKCP:
    case Op::UBLKPF:
    case Op::UBLKRED:
    case Op::UTMACCTL:
    case Op::UTMACMDFLUSH:
    case Op::UTMALDG:
    case Op::UTMAPF:
    case Op::UTMAREDG:
    case Op::UTMASTG: return true;
    default: return is_group_product(i);
  }
}

bool is_wide_fence(const Instruction& i) { return i.op == Op::MEMBAR && (has(i, "GPU") || has(i, "SYS")); }

}  // namespace

bool covers(const std::vector<u32>& known, const std::vector<u32>& told) {
  for (size_t n = 0; n < told.size(); n++)
    if (told[n] && (n >= known.size() || known[n] < told[n])) return false;
  return true;
}

static bool covers(const Foreign& known, const Foreign& told) {
  return std::all_of(told.begin(), told.end(), [&](const auto& one) {
    const auto at = known.find(one.first);
    return at != known.end() && covers(at->second, one.second);
  });
}

// Maps are shared, and copied only if each has something that the other lacks: blocks that wait for one another by
// atomics pass on the same knowledge again and again.
void raise(std::shared_ptr<const Foreign>& to, const std::shared_ptr<const Foreign>& from) {
  if (!from || to == from || (to && covers(*to, *from))) return;
  if (!to || covers(*from, *to)) {
    to = from;
    return;
  }
  auto both = std::make_shared<Foreign>(*to);
  for (const auto& [cluster, seen] : *from) raise((*both)[cluster], seen);
  to = both;
}

World::World(const Program& program, const Launch& launch) : program(program), launch(launch) {
  records.emplace_back();  // 0 is no record
  for (const Instruction& i : program.code) {
    fences |= is_wide_fence(i);
    talks |= i.strength == GPU_STRONG;
    proxies |= is_proxy_work(i);
  }
}

// ── agents ──────────────────────────────────────────────────────────────────────────────────────────────────────────

// Shadows of blocks that have ended: allocating memory costs more than clearing it.
static thread_local std::vector<SharedShadow> spare_shadows;

Order::Order(World& world, Cluster& cluster) : world(world), cluster(cluster) {
  u32 warps = 0;
  for (auto& block : cluster.blocks) {
    first_warp.push_back(warps);
    warps += u32(block->warps.size());
  }
  std::array<int, LANES> none;
  none.fill(-1);
  of_lanes.assign(warps, none);
  beside.assign(warps, {-1, -1, -1});
  stride = (warps + 15) / 8 * 8;
  agents.reserve(stride);
  barriers.resize(cluster.blocks.size() * 16);
  for (auto& block : cluster.blocks)
    for (Warp& w : block->warps)
      of_lanes[first_warp[block->rank] + w.number][0] = int(new_agent(AgentKind::Lanes, block->rank, w.number));
  for (auto& block : cluster.blocks) {
    if (spare_shadows.empty()) spare_shadows.emplace_back();
    shadows.push_back(std::move(spare_shadows.back()));
    spare_shadows.pop_back();
    shadows.back().clear(block->shared.size());
  }
  far.resize(cluster.blocks.size());
  is_over.resize(cluster.blocks.size());
}

Order::~Order() {
  for (SharedShadow& s : shadows) spare_shadows.push_back(std::move(s));
}

u32 Order::new_agent(AgentKind kind, u32 rank, int warp) {
  const u32 id = u32(agents.size());
  if (id >= MOST_AGENTS)
    throw Fault{"the executor orders the accesses of at most " + std::to_string(MOST_AGENTS) + " groups of lanes"};
  if (id >= stride) widen();
  Agent& a = agents.emplace_back();
  a.kind = kind;
  a.rank = rank;
  a.warp = warp;
  a.view.seen.assign(stride, 0);
  a.view.seen[id] = a.time;
  return id;
}

// Room for twice as many agents.
void Order::widen() {
  const u32 wide = 2 * stride;
  for (Agent& a : agents) a.view.seen.resize(wide);
  stride = wide;
}

u32 Order::group_of(const Warp& w, u8 leader) {
  int& id = of_lanes[first_warp[w.block->rank] + u32(w.number)][leader];
  if (id < 0) id = int(new_agent(AgentKind::Lanes, w.block->rank, w.number));
  return u32(id);
}

u32 Order::agent_of(const Warp& w) { return group_of(w, w.leader[__builtin_ctz(w.active)]); }

u32 Order::agent_of(const Warp& w, AgentKind kind) {
  const int number = kind == AgentKind::Products ? w.number / 4 * 4 : w.number;
  int& id =
      beside[first_warp[w.block->rank] + u32(number)][int(kind) - int(AgentKind::Copies) - (kind > AgentKind::Copies)];
  if (id < 0) id = int(new_agent(kind, w.block->rank, number));
  return u32(id);
}

// Nothing that an agent does from now on is known to others yet.
void Order::advance(u32 id) {
  Agent& a = agents[id];
  if (++a.time >= LATEST) throw Fault{"more barriers and fences than the executor counts"};
  a.view.seen[id] = a.time;
}

void Order::join(View& to, const View& from) const {
  raise(to.seen, from.seen);
  if (world.proxies) raise(to.fenced, from.fenced);
  raise(to.others, from.others);
  if (!world.fences) return;
  raise(to.published, from.published);
  raise(to.published_others, from.published_others);
}

void Order::regroup(const Warp& w, const u8 (&before)[LANES]) {
  auto id_of = [&](u8 leader) { return group_of(w, leader); };
  u32 involved = 0, changed = 0;  // leaders, as masks
  for (u32 rest = w.alive; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (w.leader[lane] == before[lane]) continue;
    changed |= 1u << w.leader[lane];
    involved |= 1u << w.leader[lane] | 1u << before[lane];
  }
  if (!changed) return;
  View views[LANES];
  for (u32 rest = involved; rest; rest &= rest - 1)
    views[__builtin_ctz(rest)] = agents[id_of(u8(__builtin_ctz(rest)))].view;
  for (u32 rest = changed; rest; rest &= rest - 1) {
    const int leader = __builtin_ctz(rest);
    u32 from = 0;
    for (u32 lanes = w.alive; lanes; lanes &= lanes - 1)
      if (const int lane = __builtin_ctz(lanes); w.leader[lane] == leader) from |= 1u << before[lane];
    Agent& agent = agents[id_of(u8(leader))];
    for (; from; from &= from - 1) {
      join(agent.view, views[__builtin_ctz(from)]);
      agent.threadfence |= agents[id_of(u8(__builtin_ctz(from)))].threadfence;
    }
  }
  for (u32 rest = involved; rest; rest &= rest - 1) advance(id_of(u8(__builtin_ctz(rest))));
}

void Order::meet(const Warp& w, u32 lanes) {
  u32 leaders = 0;
  for (; lanes; lanes &= lanes - 1) leaders |= 1u << w.leader[__builtin_ctz(lanes)];
  if (!(leaders & (leaders - 1))) return;
  View all;
  for (u32 rest = leaders; rest; rest &= rest - 1) {
    const u32 id = group_of(w, u8(__builtin_ctz(rest)));
    join(all, agents[id].view);
    advance(id);
  }
  for (u32 rest = leaders; rest; rest &= rest - 1) join(agents[group_of(w, u8(__builtin_ctz(rest)))].view, all);
}

// ── barriers ────────────────────────────────────────────────────────────────────────────────────────────────────────

void Order::arrive(const Warp& w, Meeting& at) {
  settle_far(w);
  hand_on(w, at);
}

void Order::hand_on(const Warp& w, Meeting& at) {
  const u32 id = agent_of(w);
  join(at.coming, agents[id].view);
  advance(id);
}

void Order::arrive_at_barrier(const Warp& w, Meeting& at) {
  const std::vector<u32>& seen = agents[agent_of(w)].view.seen;
  if (world.proxies)
    for (const int id : of_lanes[first_warp[w.block->rank] + u32(w.number)])
      if (id >= 0) agents[id].arrived = std::max(agents[id].arrived, seen[id]);
  hand_on(w, at);
}

void Order::acquire(const Warp& w, const Meeting& from) {
  View& view = agents[agent_of(w)].view;
  join(view, from.passed);
}

void Order::pass(Meeting& m) {
  m.passed = std::move(m.coming);
  m.coming = View{};
}

Meeting& Order::mbarrier(u32 address) { return mbarriers[address]; }

// What arrived in earlier phases is known too: a thread that waits for this phase may have skipped those.
void Order::complete_phase(u32 address) {
  Meeting& m = mbarriers[address];
  join(m.passed, m.coming);
  m.coming = View{};
  if (m.transfer < 0) return;
  Agent& a = agents[m.transfer];
  if (m.passed.seen.size() < stride) m.passed.seen.resize(stride);
  m.passed.seen[m.transfer] = a.time;
  advance(u32(m.transfer));
}

void Order::fence_proxy(const Warp& w) {
  if (!world.proxies) return;
  const u32 id = agent_of(w);
  raise(agents[id].view.fenced, agents[id].view.seen);
  advance(id);
}

// ── groups ──────────────────────────────────────────────────────────────────────────────────────────────────────────

void Order::close_group(Warp& w, AgentKind kind) {
  const u32 id = agent_of(w, kind);
  agents[id].closed.push_back(agents[id].time);
  advance(id);
}

void Order::wait_for(Warp& w, AgentKind kind, u32 landed) {
  if (!landed) return;
  const u32 id = agent_of(w, kind);
  const std::vector<u32>& closed = agents[id].closed;
  u32& seen = agents[agent_of(w)].view.seen[id];
  if (landed <= closed.size()) seen = std::max(seen, closed[landed - 1]);
}

// Each of the four warps closes the same groups: their number is the time.
void Order::wait_for_products(Warp& w, u32 landed) {
  const u32 id = agent_of(w, AgentKind::Products);
  u32& seen = agents[agent_of(w)].view.seen[id];
  seen = std::max(seen, landed);
}

void Order::copies_arrive(const Warp& w, u32 address) {
  const u32 id = agent_of(w, AgentKind::Copies);
  Meeting& m = mbarrier(address);
  arrive(w, m);
  if (m.coming.seen.size() < stride) m.coming.seen.resize(stride);
  m.coming.seen[id] = agents[id].time;
  advance(id);
}

}  // namespace sass
