// Happens-before over shared and global memory by vector clocks (Flanagan and Freund, "FastTrack", PLDI 2009): throws a
// Fault for two conflicting accesses that are not ordered, in every schedule.
//
// An agent is a group of lanes that runs together, or work beside the warps: copies by LDGSTS, bytes on their way to an
// mbarrier, products of a warpgroup, stores by TMA. Each agent has a clock, which advances when it releases what it
// did, and knows the clock of each other agent up to which it has acquired. Barriers, mbarriers, waits for groups and
// the convergence of lanes release and acquire. The asynchronous proxy sees what an agent knew before a proxy fence;
// other clusters see what it knew before a fence of GPU scope.
#pragma once

#include <unordered_map>
#include <unordered_set>

#include "machine.h"
#include "world.h"

namespace sass {

// The clocks up to which an agent, or what passed through a barrier, knows the agents of its cluster and of others.
struct View {
  std::vector<u32> seen;       // [agent]
  std::vector<u32> fenced;     // [agent]: visible to the asynchronous proxy
  std::vector<u32> published;  // [agent]: visible to other clusters
  std::shared_ptr<const Foreign> others, published_others;
};

enum class AgentKind : u8 { Lanes, Copies, Transfer, Products, Stores };

struct Agent {
  AgentKind kind = AgentKind::Lanes;
  u32 rank = 0;  // of its block in the cluster
  int warp = 0;  // its number; of Products that of the first of four
  u32 time = 1;
  std::vector<u32> closed;  // Copies, Stores: the time of each group's end
  View view;                // of Lanes
  u32 arrived = 0;  // of Lanes: the time up to which all came before an arrival at a barrier of the block or cluster
  bool threadfence = false;      // whether it has executed a MEMBAR.SC of GPU scope
  std::map<u64, Told> observed;  // of other agents, by their cluster: strong loads read it, and a fence takes it in
  // the last record it made of an access to global memory
  u32 record = 0, recorded_at = 0;
  int recorded_index = -1;
};

// What has arrived at a barrier in this phase, and what has passed.
struct Meeting {
  View coming, passed;
  int transfer = -1;  // of an mbarrier: the agent whose bytes come, whose time is the phase
};

// Last accesses to the shared memory of one block, by words of four bytes and lines of sixteen.
struct SharedShadow {
  std::vector<u64> writer;              // [word]
  std::vector<u64> readers;             // [line]: a bit for each agent, modulo 64
  std::vector<std::vector<u64>> reads;  // [agent][line]; valid of agents in `has_read`
  std::vector<bool> has_read;

  void clear(size_t bytes) {
    const size_t lines = (bytes + 15) / 16;
    writer.assign(lines * 4, 0);
    readers.assign(lines, 0);
    has_read.clear();
    more.clear();
  }
  std::vector<u64>& reads_of(u32 agent) {
    if (agent >= has_read.size()) has_read.resize(agent + 1);
    if (agent >= reads.size()) reads.resize(agent + 1);
    if (!has_read[agent]) reads[agent].assign(readers.size(), 0);
    has_read[agent] = true;
    return reads[agent];
  }
  std::unordered_map<u32, std::vector<u64>> more;  // word → writers of its other bytes
};

enum class Touch : u8 { Read, Write, Atomic };

// An access to the shared memory of another block of the cluster.
struct FarTouch {
  u32 agent, time, index, lane;
  Touch kind;
  bool fenced = false;  // whether a fence or an mbarrier's arrival follows, by whoever knows it
  bool left = false;    // whether an arrival at the cluster's barrier came before that: it hands on no unfenced access
};

// An instruction that accesses global memory which a kernel may write.
struct GlobalTouch {
  Touch kind;
  u8 strength;
  const Allocation* allocation;
  const View* view;  // of whoever began it
  u32 record;
};

class Order {
 public:
  Order(World&, Cluster&);
  Order(const Order&) = delete;
  ~Order();

  // Lanes have joined or left groups: `before` are the leaders they had.
  void regroup(const Warp&, const u8 (&before)[LANES]);
  // Lanes have met, perhaps at different positions, so that they do not become one group.
  void meet(const Warp&, u32 lanes);

  // ── shared memory ──
  // Each lane accesses `bytes` at its address, which has the block's rank in bits 24…; `data` are the words it stores.
  void touch(const Warp&, const Instruction&, Touch, u32 lanes, const u32* addresses, u32 bytes, const Lanes* data);
  // LDGSTS: writes of the warp's open group of copies.
  void copy(Warp&, const Instruction&, u32 lanes, const u32* addresses, u32 bytes);
  // TMA writes lines of sixteen bytes of shared memory and completes on the mbarrier at an address of the same block.
  void transfer(const Warp&, const Instruction&, const u32* lines, size_t count, u32 barrier);
  // Lanes of the warp end; with `whole` the block has ended, and what others did in its shared memory must be known to
  // one of its lanes.
  void end(const Warp&, bool whole);
  // A product or a store by TMA reads lines: writes to them must wait for its group.
  void read_lines(Warp&, const Instruction&, AgentKind, const u32* lines, size_t count);

  // ── release and acquire ──
  void arrive(const Warp&, Meeting&);             // at an mbarrier
  void arrive_at_barrier(const Warp&, Meeting&);  // of the block
  void arrive_at_cluster(const Warp&);
  void acquire(const Warp&, const Meeting&);
  static void pass(Meeting&);  // the phase is complete
  Meeting& barrier(u32 rank, u32 index) { return barriers[rank * 16 + index]; }
  Meeting& of_cluster() { return cluster_barrier; }
  Meeting& mbarrier(u32 address);
  void complete_phase(u32 address);              // of the mbarrier there
  void copies_arrive(const Warp&, u32 address);  // the lanes' copies so far arrive when they land
  void fence_proxy(const Warp&);
  void close_group(Warp&, AgentKind);
  void wait_for(Warp&, AgentKind, u32 groups_landed);
  void wait_for_products(Warp&, u32 groups_landed);

  // ── global memory ──
  GlobalTouch begin_global(const Warp&, const Instruction&, const Allocation&, Touch, bool spread = false);
  GlobalTouch begin_global_store(Warp&, const Instruction&, const Allocation&);  // by TMA
  // At most sixteen bytes within an aligned sixteen; of stores what is there and what will be, or null.
  void touch_global(const GlobalTouch&, u32 lane, u64 offset, u32 bytes, const u8* before, const u8* after);
  // any bytes
  void touch_global_range(const GlobalTouch&, u32 lane, u64 offset, u64 bytes, const u8* before = nullptr,
                          const u8* after = nullptr);
  void publish(const Warp&, bool threadfence);  // MEMBAR of GPU scope; a __threadfence is one with .SC
  void refresh(const Warp&);                    // CCTL.IVALL: acquires what strong loads observed
  void synchronise(const Warp&, const Instruction&, u64 address, Touch);  // by an atomic, a strong load or store

 private:
  static constexpr u32 MOST_AGENTS = 1024, LATEST = 1u << 23, MOST_RECORDS = 1u << 27;

  u32 agent_of(const Warp&);
  u32 agent_of(const Warp&, AgentKind);
  u32 new_agent(AgentKind, u32 rank, int warp);
  void widen();
  void advance(u32 agent);
  void join(View& to, const View& from) const;
  u32 index_of(const Instruction& i) const { return u32(&i - world.program.code.data()); }

  struct Toucher;
  u32 group_of(const Warp& w, u8 leader);
  void read(Toucher&, u32 lanes, const u32* addresses, u32 bytes);
  void read_word(const Toucher&, SharedShadow&, u32 word, u32 mask, u32 lane);
  void check_before_write(const Toucher&, SharedShadow&, u32 offset, u32 bytes, u32 lane);
  void place_write(const Toucher&, SharedShadow&, u32 offset, u32 bytes, u32 lane);
  u32 record(u32 agent, const Warp&, const Instruction&);
  bool knows(const View&, u32 record) const;
  void take(View&, u64 of, const Told&) const;
  bool are_replicas(const GlobalTouch&, u64 word, u32 record, bool wrote) const;
  int own_read(const GlobalTouch&, u64 word) const;
  std::string race_text(const GlobalTouch&, u32 lane, u64 offset, u32 record, bool wrote) const;
  bool excuse(const GlobalTouch&, u32 lane, u64 offset, u32 record, bool wrote);
  u64 store_of(u32 rank, int warp, int index) const;
  [[noreturn]] void race(const Toucher&, u32 rank, u32 offset, u32 lane, u64 entry, bool wrote) const;
  void note_far(const FarTouch&, u32 rank);
  void settle_far(const Warp&);
  void hand_on(const Warp&, Meeting&);
  [[noreturn]] void misses(const FarTouch&, u32 rank, const char* what) const;
  bool knows_begun(const std::vector<u32>& seen, u32 rank) const;

  World& world;
  Cluster& cluster;
  std::vector<Agent> agents;
  std::vector<std::array<int, LANES>> of_lanes;  // [warp in the cluster][first lane of the group]
  std::vector<std::array<int, 3>> beside;        // [warp in the cluster]: copies, stores, products
  std::vector<u32> first_warp;                   // of each block, in the cluster
  std::vector<SharedShadow> shadows;             // of each block
  std::vector<std::vector<FarTouch>> far;        // of each block: by others, known to no lane of it that has ended
  std::vector<bool> is_over;                     // of each block: whether it has ended
  std::vector<Meeting> barriers;
  Meeting cluster_barrier;
  std::unordered_map<u32, Meeting> mbarriers;
  u32 stride;
  // Stores to global memory by block, warp and instruction: those that happened, and the races of replicas, which must
  // not happen.
  std::unordered_set<u64> stored_by;
  std::unordered_map<u64, std::string> excused;
};

// Of the warp's cluster; null where nobody asks.
inline Order* order_of(const Context& c) { return c.warp.block->cluster->order; }

}  // namespace sass
