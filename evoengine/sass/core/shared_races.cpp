// Order's record of shared memory: who wrote each byte last, and who has read it since.
#include "memory_ops.h"
#include "order.h"

namespace sass {

namespace {

// A write: bytes of the word in bits 0–3, lane 4–8, instruction 9–27, atomic 28, others in `more` 29, agent 30–39,
// time.
u64 write_entry(u32 agent, u32 time, u32 index, u32 lane, bool atomic, u32 bytes) {
  return u64(time) << 40 | u64(agent) << 30 | u64(atomic) << 28 | u64(index & 0x7ffff) << 9 | lane << 4 | bytes;
}
constexpr u64 OTHERS = 1ull << 29, BY_ATOMIC = 1ull << 28;
u32 writer_agent(u64 entry) { return u32(entry >> 30) & 1023; }
u32 writer_time(u64 entry) { return u32(entry >> 40); }

// A read: bytes of the line in bits 0–15, lane 16–20, instruction 21–39, time.
u64 read_entry(u32 time, u32 index, u32 lane, u32 bytes) {
  return u64(time) << 40 | u64(index & 0x7ffff) << 21 | u64(lane) << 16 | bytes;
}
u32 read_time(u64 entry) { return u32(entry >> 40); }

constexpr u32 OFFSET = 0xffffff;

}  // namespace

// Who touches shared memory, and what it has seen.
struct Order::Toucher {
  const Order& order;
  u32 index;  // of the instruction
  u32 rank;   // whose memory
  u32 agent;  // that the touch is laid to
  u32 time;
  const u32* seen;  // what was seen by whoever began it
  Touch kind = Touch::Read;
  const View* proxy = nullptr;  // of the asynchronous proxy: what other writes must have been fenced in
  const u8* memory = nullptr;   // the block's bytes
  const Lanes* data = nullptr;  // what is stored

  bool knows(u64 entry) const {
    const u32 writer = writer_agent(entry), at = writer_time(entry);
    if (seen[writer] < at) return false;
    if (!proxy || !entry) return true;
    const AgentKind kind = order.agents[writer].kind;
    if (kind != AgentKind::Lanes && kind != AgentKind::Copies) return true;
    return (writer < proxy->fenced.size() && proxy->fenced[writer] >= at) || is_exchanged(entry);
  }
  // Whether an mbarrier's init by SYNCS.EXCH came before a barrier. PTX asks for a proxy fence there too; but the
  // exchange returns what was in memory, so it is over when its warp arrives. Of 4e9 bytes that an H100 loaded by TMA
  // behind init and barrier none was overwritten, of as many behind init alone 0.02 % (benchmarks/notes/h100.md).
  bool is_exchanged(u64 entry) const {
    const u32 writer = writer_agent(entry);
    if (kind != Touch::Write || order.agents[writer].arrived < writer_time(entry)) return false;
    return order.world.program.code[u32(entry >> 9) & 0x7ffff].op == Op::SYNCS;
  }
  // Whether the lane stores what is there already.
  bool stores_the_same(u32 offset, u32 bytes, u32 lane) const {
    if (!data || !memory) return false;
    u32 words[4];
    for (u32 k = 0; k * 4 < bytes; k++) words[k] = data[k][lane];
    return !std::memcmp(words, memory + offset, bytes);
  }
};

void Order::race(const Toucher& t, u32 rank, u32 offset, u32 lane, u64 entry, bool wrote) const {
  u32 agent = t.agent, index = u32(entry >> (wrote ? 9 : 21)) & 0x7ffff,
      other_lane = u32(entry >> (wrote ? 4 : 16)) & 31;
  if (wrote) agent = writer_agent(entry);
  else {
    const SharedShadow& s = shadows[rank];
    for (u32 id = 0; id < s.has_read.size(); id++)
      if (s.has_read[id] && s.reads[id][offset / 16] == entry) agent = id;
  }
  const Agent& a = agents[agent];
  const Instruction& other = world.program.code[index];
  const bool unfenced = wrote && t.proxy && t.seen[agent] >= writer_time(entry);
  char place[96];
  snprintf(place, sizeof place, "lane %u %s shared address 0x%x", lane, t.kind == Touch::Read ? "reads" : "writes",
           offset);
  std::string text = place;
  if (cluster.blocks.size() > 1) text += " of block " + std::to_string(rank) + " of the cluster";
  char at[64];
  snprintf(at, sizeof at, "` at 0x%x", other.address);
  text += ", which `" + other.text + at;
  std::string of = " of warp " + std::to_string(a.warp);
  if (cluster.blocks.size() > 1) of += " of block " + std::to_string(a.rank);
  switch (a.kind) {
    case AgentKind::Lanes:
      text += (wrote ? " writes in lane " : " reads in lane ") + std::to_string(other_lane) + of;
      break;
    case AgentKind::Copies: text += of + " writes"; break;
    case AgentKind::Transfer: text += " writes"; break;
    case AgentKind::Products: text += " of the warpgroup of warp " + std::to_string(a.warp) + " reads"; break;
    case AgentKind::Stores: text += of + " reads"; break;
  }
  if (unfenced) text += ": no proxy fence (fence.proxy.async) lies between them";
  else if (a.kind == AgentKind::Transfer) text += ": its mbarrier was not waited for";
  else if (a.kind == AgentKind::Lanes) text += ": nothing orders the two";
  else text += ": its group was not waited for";
  throw Fault{text, false, true};
}

// ── begins and ends of blocks ───────────────────────────────────────────────────────────────────────────────────────

// The shared memory of a block is there from when it has begun, and may be another's as soon as it has ended.
void Order::misses(const FarTouch& touch, u32 rank, const char* what) const {
  const Agent& a = agents[touch.agent];
  const Instruction& i = world.program.code[touch.index];
  char at[64];
  snprintf(at, sizeof at, "` at 0x%x", i.address);
  throw Fault{"block " + std::to_string(rank) + " of the cluster " + what + ", whose shared memory `" + i.text + at +
                  (touch.kind == Touch::Read ? " reads" : " writes") + " in lane " + std::to_string(touch.lane) +
                  " of warp " + std::to_string(a.warp) + " of block " + std::to_string(a.rank) +
                  ": nothing orders the two",
              false, true};
}

// Whether anything that a warp of the block did is known.
bool Order::knows_begun(const std::vector<u32>& seen, u32 rank) const {
  for (u32 id = 0; id < agents.size(); id++)
    if (seen[id] && agents[id].kind == AgentKind::Lanes && agents[id].rank == rank) return true;
  return false;
}

void Order::note_far(const FarTouch& touch, u32 rank) {
  if (is_over[rank]) misses(touch, rank, "ends");
  if (!knows_begun(agents[touch.agent].view.seen, rank)) misses(touch, rank, "may not have begun");
  std::vector<FarTouch>& held = far[rank];
  std::erase_if(held, [&](const FarTouch& t) { return t.agent == touch.agent; });  // whoever knows this one knows those
  held.push_back(touch);
}

// barrier.cluster.arrive.relaxed, which is UCGABAR_ARV without a MEMBAR before it, orders no accesses to memory.
void Order::arrive_at_cluster(const Warp& w) {
  const std::vector<u32>& seen = agents[agent_of(w)].view.seen;
  for (std::vector<FarTouch>& held : far)
    for (FarTouch& t : held)
      if (seen[t.agent] >= t.time || t.agent == agent_of(w)) t.left |= !t.fenced;
  arrive_at_barrier(w, cluster_barrier);
}

void Order::settle_far(const Warp& w) {
  const u32 id = agent_of(w);
  const std::vector<u32>& seen = agents[id].view.seen;
  for (std::vector<FarTouch>& held : far)
    for (FarTouch& t : held)
      if (seen[t.agent] >= t.time || t.agent == id) t.fenced = true, t.left = false;
}

void Order::end(const Warp& w, bool whole) {
  const u32 rank = w.block->rank;
  const std::vector<u32>& seen = agents[agent_of(w)].view.seen;
  std::erase_if(far[rank],
                [&](const FarTouch& t) { return t.agent < seen.size() && seen[t.agent] >= t.time && !t.left; });
  if (!whole) return;
  is_over[rank] = true;
  if (!far[rank].empty()) misses(far[rank].front(), rank, "ends");
}

// ── one lane ────────────────────────────────────────────────────────────────────────────────────────────────────────

void Order::read_word(const Toucher& t, SharedShadow& s, u32 word, u32 mask, u32 lane) {
  const u64 entry = s.writer[word];
  if (!t.knows(entry) && (entry & mask)) race(t, t.rank, word * 4, lane, entry, true);
  if (entry & OTHERS)
    for (u64 other : s.more[word])
      if (!t.knows(other) && (other & mask)) race(t, t.rank, word * 4, lane, other, true);
}

void Order::check_before_write(const Toucher& t, SharedShadow& s, u32 offset, u32 bytes, u32 lane) {
  const u32 mask = bytes >= 4 ? 15 : ((1u << bytes) - 1) << (offset & 3);
  auto conflicts = [&](u64 entry) {
    if (!(entry & mask) || t.knows(entry)) return false;
    if (t.kind == Touch::Atomic && entry & BY_ATOMIC) return false;
    return t.proxy || !t.stores_the_same(offset, bytes, lane);
  };
  for (u32 word = offset / 4; word * 4 < offset + bytes; word++) {
    const u64 entry = s.writer[word];
    if (conflicts(entry)) race(t, t.rank, word * 4, lane, entry, true);
    if (entry & OTHERS)
      for (u64 other : s.more[word])
        if (conflicts(other)) race(t, t.rank, word * 4, lane, other, true);
  }
  const u32 line = offset / 16, touched = ((1u << bytes) - 1) << (offset & 15);
  for (u64 rest = s.readers[line]; rest; rest &= rest - 1)
    for (u32 id = u32(__builtin_ctzll(rest)); id < s.has_read.size(); id += 64) {
      if (!s.has_read[id]) continue;
      const u64 entry = s.reads[id][line];
      if (id != t.agent && read_time(entry) > t.seen[id] && (entry & touched))
        race(t, t.rank, offset, lane, entry, false);
    }
}

void Order::place_write(const Toucher& t, SharedShadow& s, u32 offset, u32 bytes, u32 lane) {
  const u32 mask = bytes >= 4 ? 15 : ((1u << bytes) - 1) << (offset & 3);
  u64 entry = write_entry(t.agent, t.time, t.index, lane, t.kind == Touch::Atomic, mask);
  for (u32 word = offset / 4; word * 4 < offset + bytes; word++) {
    u64& at = s.writer[word];
    if (t.kind == Touch::Atomic && at & BY_ATOMIC && (at & OTHERS || !t.knows(at))) {
      // atomics of other agents that this one does not know are kept: they race with what reads behind it
      std::vector<u64>& others = s.more[word];
      others.push_back(at & ~OTHERS);
      std::erase_if(others, [&](u64 other) { return writer_agent(other) == t.agent || t.knows(other); });
      for (size_t n = others.size(); n-- > 1;)
        if (writer_agent(others[n - 1]) == writer_agent(others.back())) others.erase(others.begin() + long(n - 1));
      at = others.empty() ? entry : entry | OTHERS;
      continue;
    }
    if (mask == 15 || !(at & 15 & ~mask)) {
      if (at & OTHERS) s.more.erase(word);
      at = entry;
    } else if (at >> 30 == entry >> 30) {
      at = entry | (at & 15) | (at & OTHERS);
    } else {
      s.more[word].push_back(at & ~u64(mask) & ~OTHERS);
      at = entry | OTHERS;
    }
  }
  if (bytes == 16) s.readers[offset / 16] = 0;
}

// ── warps ───────────────────────────────────────────────────────────────────────────────────────────────────────────

void Order::touch(const Warp& w, const Instruction& i, Touch kind, u32 lanes, const u32* addresses, u32 bytes,
                  const Lanes* data) {
  if (agents.size() == 1 && !world.proxies) return;
  const u32 id = agent_of(w), index = index_of(i);
  Toucher t{*this, index, 0, id, agents[id].time, agents[id].view.seen.data(), kind};
  t.data = data;
  if (cluster.blocks.size() > 1)
    for (u32 rest = lanes; rest; rest &= rest - 1) {
      const u32 lane = u32(__builtin_ctz(rest)), rank = addresses[lane] >> RANK_BIT;
      if (rank != w.block->rank) note_far({id, t.time, index, lane, kind}, rank);
    }
  if (kind == Touch::Read) return read(t, lanes, addresses, bytes);
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const u32 lane = u32(__builtin_ctz(rest)), offset = addresses[lane] & OFFSET;
    t.rank = addresses[lane] >> RANK_BIT;
    t.memory = cluster.blocks[t.rank]->shared.data();
    check_before_write(t, shadows[t.rank], offset, bytes, lane);
    place_write(t, shadows[t.rank], offset, bytes, lane);
  }
}

void Order::read(Toucher& t, u32 lanes, const u32* addresses, u32 bytes) {
  const u64 bit = 1ull << t.agent % 64;
  const u32 all = (1u << bytes) - 1;
  u64 known = ~0ull;  // agent and time of a write that was found known
  u32 before = ~0u;
  SharedShadow* s = nullptr;
  u64* reads = nullptr;
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const u32 lane = u32(__builtin_ctz(rest)), address = addresses[lane], offset = address & OFFSET;
    if (address == before) continue;
    before = address;
    if (!s || t.rank != address >> RANK_BIT) {
      t.rank = address >> RANK_BIT;
      s = &shadows[t.rank];
      reads = s->reads_of(t.agent).data();
    }
    const u32 mask = bytes >= 4 ? 15 : all << (offset & 3);
    for (u32 word = offset / 4; word * 4 < offset + bytes; word++) {
      const u64 writer = s->writer[word];
      if (writer >> 30 == known && !(writer & OTHERS)) continue;
      read_word(t, *s, word, mask, lane);
      if (writer & mask) known = writer >> 30;
    }
    const u32 line = offset / 16, touched = all << (offset & 15);
    u64& entry = reads[line];
    if (s->readers[line] & bit && read_time(entry) == t.time) {
      entry |= touched;
    } else {
      entry = read_entry(t.time, t.index, lane, touched);
      s->readers[line] |= bit;
    }
  }
}

// ── beside the warps ────────────────────────────────────────────────────────────────────────────────────────────────

void Order::copy(Warp& w, const Instruction& i, u32 lanes, const u32* addresses, u32 bytes) {
  const u32 id = agent_of(w, AgentKind::Copies), issuer = agent_of(w);
  Toucher t{*this, index_of(i), w.block->rank, id, agents[id].time, agents[issuer].view.seen.data(), Touch::Write};
  SharedShadow& s = shadows[t.rank];
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const u32 lane = u32(__builtin_ctz(rest)), offset = addresses[lane] & OFFSET;
    check_before_write(t, s, offset, bytes, lane);
    place_write(t, s, offset, bytes, lane);
  }
}

void Order::transfer(const Warp& w, const Instruction& i, const u32* lines, size_t count, u32 barrier) {
  const u32 rank = barrier >> RANK_BIT, issuer = agent_of(w);
  Lanes of_barrier;
  const u32 leader = u32(__builtin_ctz(w.active));
  of_barrier[leader] = barrier;
  touch(w, i, Touch::Read, 1u << leader, of_barrier.v, 8, nullptr);  // that it was initialised must be known
  Meeting& m = mbarrier(barrier);
  if (m.transfer < 0) {
    const int made = int(new_agent(AgentKind::Transfer, rank, w.number));
    m.transfer = made;
  }
  const View& view = agents[issuer].view;
  join(m.coming, view);
  const u32 id = u32(m.transfer), lane = u32(__builtin_ctz(w.active));
  Toucher t{*this, index_of(i), rank, id, agents[id].time, view.seen.data(), Touch::Write, &view};
  for (size_t n = 0; n < count; n++) {
    check_before_write(t, shadows[rank], lines[n], 16, lane);
    place_write(t, shadows[rank], lines[n], 16, lane);
  }
}

void Order::read_lines(Warp& w, const Instruction& i, AgentKind kind, const u32* lines, size_t count) {
  const u32 id = agent_of(w, kind), index = index_of(i), lane = u32(__builtin_ctz(w.active));
  const u32 time = kind == AgentKind::Products ? w.products.closed + 1 : agents[id].time;
  const View& view = agents[agent_of(w)].view;
  const Toucher t{*this, index, w.block->rank, id, time, view.seen.data(), Touch::Read, &view};
  SharedShadow& s = shadows[t.rank];
  const u64 entry = read_entry(time, index, lane, 0xffff), bit = 1ull << id % 64;
  u64* const reads = s.reads_of(id).data();
  u64 known = ~0ull;
  for (size_t n = 0; n < count; n++) {
    const u32 word = lines[n] / 4, line = lines[n] / 16;
    const u64* writer = &s.writer[word];
    const u64 differing = (writer[0] ^ known) | (writer[1] ^ known) | (writer[2] ^ known) | (writer[3] ^ known);
    const bool same = !(differing >> 30) && !((writer[0] | writer[1] | writer[2] | writer[3]) & OTHERS);
    if (!same) {
      for (u32 k = 0; k < 4; k++) read_word(t, s, word + k, 15, lane);
      known = writer[0];
    }
    reads[line] = entry;
    s.readers[line] |= bit;
  }
}

}  // namespace sass
