// Order's record of global memory that a kernel may write: races between blocks, and between the warps of one.
//
// Two stores of the same contents to the same bytes do not race: on hardware either order leaves the same.
#include "hazards.h"
#include "order.h"

namespace sass {

// The number of the agent's record for what the instruction does now.
u32 Order::record(u32 id, const Warp& w, const Instruction& i) {
  Agent& a = agents[id];
  const int index = int(index_of(i));
  if (a.record && a.recorded_at == a.time && a.recorded_index == index) return a.record;
  if (world.records.size() >= MOST_RECORDS) throw Fault{"more accesses to global memory than the executor records"};
  a.record = u32(world.records.size());
  a.recorded_at = a.time;
  a.recorded_index = index;
  // A strong access behind a fence is known to whoever knows the fence: both make one release.
  const std::vector<u32>& published = a.view.published;
  const bool releases = i.strength == GPU_STRONG && id < published.size() && published[id];
  const u32 time = releases ? published[id] : a.time;
  world.records.push_back({cluster.first, id, time, index, a.rank, w.number, __builtin_ctz(w.active), i.strength});
  return a.record;
}

// Whether what the record is of came before all that an agent with this view does now.
bool Order::knows(const View& view, u32 number) const {
  const GlobalAccess& r = world.records[number];
  if (r.cluster == cluster.first) return r.agent < view.seen.size() && view.seen[r.agent] >= r.time;
  if (!view.others) return false;
  const auto known = view.others->find(r.cluster);
  return known != view.others->end() && r.agent < known->second.size() && known->second[r.agent] >= r.time;
}

std::string Order::race_text(const GlobalTouch& t, u32 lane, u64 offset, u32 number, bool wrote) const {
  const GlobalAccess& r = world.records[number];
  const Instruction& other = world.program.code[r.index];
  const Launch& l = world.launch;
  const u32 x = l.cluster[0], y = l.cluster[1];
  const u64 block[3] = {r.cluster % l.grid[0] + r.rank % x, r.cluster / l.grid[0] % l.grid[1] + r.rank / x % y,
                        r.cluster / l.grid[0] / l.grid[1] + r.rank / x / y};
  char text[192], place[160];
  snprintf(text, sizeof text, "lane %u %s byte %llu of %s, which `", lane, t.kind == Touch::Read ? "reads" : "writes",
           (unsigned long long)offset, t.allocation->name.c_str());
  snprintf(place, sizeof place, "` at 0x%x %s in block (%llu, %llu, %llu), warp %d: nothing orders the two",
           other.address, wrote ? "writes" : "reads", (unsigned long long)block[0], (unsigned long long)block[1],
           (unsigned long long)block[2], r.warp);
  return text + other.text + place;
}

// By which instruction the agent's warp has last read this word; MIXED where it has not.
int Order::own_read(const GlobalTouch& t, u64 word) const {
  const GlobalAccess& own = world.records[t.record];
  const Shadow& shadow = *t.allocation->shadow;
  auto is_own = [&](u32 entry) {
    const GlobalAccess& r = world.records[entry >> 4];
    return entry >> 4 && r.cluster == own.cluster && r.rank == own.rank && r.warp == own.warp;
  };
  if (is_own(shadow.reader[word])) return world.records[shadow.reader[word] >> 4].index;
  if (const auto more = shadow.more_readers.find(word); more != shadow.more_readers.end())
    for (auto entry = more->second.rbegin(); entry != more->second.rend(); ++entry)
      if (is_own(*entry)) return world.records[*entry >> 4].index;
  return MIXED;
}

// Whether one of the two has read this word by the same instruction as the other, one word of several or for that store
// alone, and then stores to it.
bool Order::are_replicas(const GlobalTouch& t, u64 word, u32 record, bool wrote) const {
  const GlobalAccess &own = world.records[t.record], &other = world.records[record];
  if (own.cluster != other.cluster || own.rank != other.rank) return false;
  auto goes_nowhere = [&](const GlobalAccess& load, int store) {
    if (load.spread) return true;
    const auto [at, is_new] = world.only_stores.try_emplace(load.index, -1);
    if (is_new) at->second = only_store_of(world.program, load.index);
    return at->second == store;
  };
  if (wrote) return t.kind == Touch::Read && other.read_by == own.index && goes_nowhere(own, other.index);
  return t.kind == Touch::Write && own_read(t, word) == other.index && goes_nowhere(other, own.index);
}

// A replica does not store by the instruction by which another warp stores what it has read: what it computes goes
// nowhere. False where it has done so before; a later store by it is a race.
bool Order::excuse(const GlobalTouch& t, u32 lane, u64 offset, u32 record, bool wrote) {
  const GlobalAccess &own = world.records[t.record], &other = world.records[record];
  const GlobalAccess &reader = wrote ? own : other, &writer = wrote ? other : own;
  const u64 store = store_of(reader.rank, reader.warp, writer.index);
  if (stored_by.contains(store)) return false;
  if (!excused.contains(store)) excused[store] = race_text(t, lane, offset, record, wrote);
  return true;
}

u64 Order::store_of(u32 rank, int warp, int index) const { return (u64(rank) << 16 | u64(warp)) << 32 | u32(index); }

GlobalTouch Order::begin_global(const Warp& w, const Instruction& i, const Allocation& a, Touch kind, bool spread) {
  const u32 id = agent_of(w), number = record(id, w, i);
  world.records[number].spread |= spread;
  if (kind == Touch::Write && world.races == Races::NoReplicas) {
    const u64 store = store_of(w.block->rank, w.number, int(index_of(i)));
    stored_by.insert(store);
    if (const auto found = excused.find(store); found != excused.end()) throw Fault{found->second, false, true};
  }
  return {kind, i.strength, &a, &agents[id].view, number};
}

GlobalTouch Order::begin_global_store(Warp& w, const Instruction& i, const Allocation& a) {
  const u32 id = agent_of(w, AgentKind::Stores), number = record(id, w, i);
  return {Touch::Write, 0, &a, &agents[agent_of(w)].view, number};
}

void Order::touch_global(const GlobalTouch& t, u32 lane, u64 offset, u32 bytes, const u8* before, const u8* after) {
  Shadow& shadow = *t.allocation->shadow;
  const u32 mask = bytes >= 4 ? 15 : ((1u << bytes) - 1) << (offset & 3);
  const bool writes = t.kind != Touch::Read;
  auto conflicts = [&](u32 entry) {
    const u32 number = entry >> 4;
    if (!number || number == t.record || !(entry & mask) || knows(*t.view, number)) return false;
    const GlobalAccess& r = world.records[number];
    const u8 needed = r.cluster == cluster.first ? BLOCK_STRONG : GPU_STRONG;
    return t.strength < needed || r.strength < needed;
  };
  u64 word = offset / 4;
  auto check = [&](u32 entry, bool wrote) {
    if (!conflicts(entry) || (writes && wrote && after && !std::memcmp(before, after, bytes))) return;
    if (world.races == Races::NoReplicas && are_replicas(t, word, entry >> 4, wrote) &&
        excuse(t, lane, offset, entry >> 4, wrote))
      return;
    throw Fault{race_text(t, lane, offset, entry >> 4, wrote), false, true};
  };
  auto check_more = [&](auto& more, bool wrote) {
    if (more.empty()) return;
    if (const auto at = more.find(word); at != more.end())
      for (u32 entry : at->second) check(entry, wrote);
  };
  if (!writes && shadow.reader.empty()) shadow.reader.assign(shadow.writer.size(), 0);
  for (; word * 4 < offset + bytes; word++) {
    u32& writer = shadow.writer[word];
    check(writer, true);
    check_more(shadow.more_writers, true);
    u32& last = writes ? writer : shadow.reader[word];
    auto& more = writes ? shadow.more_writers : shadow.more_readers;
    if (writes && !shadow.reader.empty()) {
      check(shadow.reader[word], false);
      check_more(shadow.more_readers, false);
      if (world.races == Races::NoReplicas) {
        int& by = world.records[t.record].read_by;
        const int now = t.kind == Touch::Write ? own_read(t, word) : MIXED;
        by = by == UNSEEN || by == now ? now : MIXED;
      }
      if (mask == 15) shadow.reader[word] = 0, shadow.more_readers.erase(word);
    }
    if (last >> 4 == t.record) {
      last |= mask;
      continue;
    }
    // what this one does not stand for is kept beside it
    const bool kept = writes ? last & 15 & ~mask : last >> 4 && (last & 15 & ~mask || !knows(*t.view, last >> 4));
    if (kept) more[word].push_back(writes ? last & ~mask : last);
    else if (writes && mask == 15 && !more.empty()) more.erase(word);
    last = t.record << 4 | mask;
  }
}

void Order::touch_global_range(const GlobalTouch& t, u32 lane, u64 offset, u64 bytes, const u8* before,
                               const u8* after) {
  while (bytes) {
    u32 size = 16;
    while (size > bytes || offset % size) size /= 2;
    touch_global(t, lane, offset, size, before, after);
    if (after) before += size, after += size;
    offset += size;
    bytes -= size;
  }
}

// ── release and acquire by atomics
// ───────────────────────────────────────────────────────────────────────────────────────────────

void Order::publish(const Warp& w, bool threadfence) {
  settle_far(w);
  if (!world.fences) return;
  const u32 id = agent_of(w);
  refresh(w);
  View& view = agents[id].view;
  raise(view.published, view.seen);
  raise(view.published_others, view.others);
  agents[id].threadfence |= threadfence;
  advance(id);
}

void Order::refresh(const Warp& w) {
  Agent& a = agents[agent_of(w)];
  for (const auto& [of, told] : a.observed) take(a.view, of, told);
  a.observed.clear();
}

// What agents of a cluster told is of itself, and of others: perhaps of this one.
void Order::take(View& view, u64 of, const Told& told) const {
  auto knows_of = [&](u64 first, const std::vector<u32>& seen) {
    if (first == cluster.first) return covers(view.seen, seen);
    if (!view.others) return false;
    const auto at = view.others->find(first);
    return at != view.others->end() && covers(at->second, seen);
  };
  auto known = [&](const auto& one) { return knows_of(one.first, one.second); };
  if (knows_of(of, told.seen) && (!told.others || std::all_of(told.others->begin(), told.others->end(), known))) return;
  auto others = told.others ? std::make_shared<Foreign>(*told.others) : std::make_shared<Foreign>();
  raise((*others)[of], told.seen);
  if (const auto own = others->find(cluster.first); own != others->end()) {
    raise(view.seen, own->second);
    others->erase(own);
  }
  if (!others->empty()) raise(view.others, others);
}

// Strong stores and atomics tell what was published before them: a fence comes first, as `st.release` is compiled. What
// they tell of this cluster needs none. Strong loads, and atomics that return a value, take in what they read at the
// next fence, as `ld.acquire` and `atom.acquire` are compiled; an atomic behind its own __threadfence takes it in at
// once, since programs that count the blocks that are done build on that (CUDA C++ Programming Guide, "Memory Fence
// Functions").
void Order::synchronise(const Warp& w, const Instruction& i, u64 address, Touch kind) {
  if (!world.fences || !i.strength) return;
  const u32 id = agent_of(w);
  const bool reads = kind == Touch::Read || (kind == Touch::Atomic && i.op != Op::RED && i.op != Op::REDG);
  if (reads)
    if (const auto found = world.locations.find(address); found != world.locations.end())
      for (const auto& [of, told] : found->second) {
        if (i.strength < GPU_STRONG && of != cluster.first) continue;
        if (kind == Touch::Atomic && agents[id].threadfence) {
          take(agents[id].view, of, told);
          continue;
        }
        Told& observed = agents[id].observed[of];
        raise(observed.seen, told.seen);
        raise(observed.others, told.others);
      }
  if (kind == Touch::Read) return;
  const View& view = agents[id].view;
  if (view.published.empty()) return;
  auto& at = world.locations[address];
  if (kind == Touch::Write) at.clear();
  raise(at[cluster.first].seen, view.published);
  raise(at[cluster.first].others, view.published_others);
  advance(id);
}

}  // namespace sass
