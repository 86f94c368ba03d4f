// Which accesses to memory are ordered, and a Fault where two that conflict are not: a race, whatever the schedule was.
//
// An agent is a group of lanes that runs together, or what works beside the warps: copies by LDGSTS, bytes on their way
// to an mbarrier, the products of a warpgroup, stores by TMA. Each agent counts its own time, which passes when it tells
// others of what it did, and knows how far it has seen each other one (vector clocks; Flanagan and Freund, "FastTrack",
// PLDI 2009). Barriers, mbarriers, waits for groups, and lanes that meet, pass that knowledge on. The asynchronous proxy
// sees what an agent had seen before a proxy fence, other clusters what it had seen before a fence of the GPU's scope.
#pragma once

#include <unordered_map>

#include "machine.h"
#include "world.h"

namespace sass {

// How far an agent, or what passed through a barrier, has seen the agents of the cluster, and of others.
struct View {
  std::vector<u32> seen;       // by agent: its time
  std::vector<u32> fenced;     // what the asynchronous proxy sees of that
  std::vector<u32> published;  // what other clusters may see of it
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
  std::map<u64, Told> observed;  // of other agents, by their cluster: strong loads read it, and a fence takes it in
  // the last record it made of an access to global memory
  u32 record = 0, recorded_at = 0;
  int recorded_index = -1;
};

// What has come to a barrier in this phase, and what has passed.
struct Meeting {
  View coming, passed;
  int transfer = -1;  // of an mbarrier: the agent whose bytes come, whose time is the phase
};

// Shared memory of one block, by words of four bytes and lines of sixteen.
struct SharedShadow {
  std::vector<u64> writer;   // [word]
  std::vector<u64> readers;  // [line]: a bit for each agent, modulo 64
  std::vector<u64> reads;    // [line][stride]
  std::unordered_map<u32, std::vector<u64>> more;  // word → writers of its other bytes
};

enum class Touch : u8 { Read, Write, Atomic };

// An instruction that touches global memory which a kernel may write.
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

  // The groups of a warp's lanes were these, by the first lane of each, and are now those that the warp has.
  void regroup(const Warp&, const u8 (&before)[LANES]);

  // ── shared memory ──
  // Each lane touches `bytes` at its address, which has the block's rank in bits 24…; `data` are the words it stores.
  void touch(const Warp&, const Instruction&, Touch, u32 lanes, const u32* addresses, u32 bytes, const Lanes* data);
  // LDGSTS: what the warp's open group of copies will write.
  void copy(Warp&, const Instruction&, u32 lanes, const u32* addresses, u32 bytes);
  // TMA to lines of sixteen bytes of shared memory, told to the mbarrier of the address in the same block.
  void transfer(const Warp&, const Instruction&, const u32* lines, size_t count, u32 barrier);
  // Lines that TMA stores from, or a product reads; `records`: later writes must wait for it.
  void read_lines(Warp&, const Instruction&, AgentKind, const u32* lines, size_t count, bool records);

  // ── what passes knowledge on ──
  void arrive(const Warp&, Meeting&);            // at a barrier, with all that the lanes have seen
  void acquire(const Warp&, const Meeting&);     // what passed
  static void pass(Meeting&);                    // the phase is complete
  Meeting& barrier(u32 rank, u32 index) { return barriers[rank * 16 + index]; }
  Meeting& of_cluster() { return cluster_barrier; }
  Meeting& mbarrier(u32 address);
  void complete_phase(u32 address);              // of the mbarrier there
  void copies_arrive(const Warp&, u32 address);  // when they have landed
  void fence_proxy(const Warp&);
  void close_group(Warp&, AgentKind);
  void wait_for(Warp&, AgentKind, u32 groups_landed);
  void wait_for_products(Warp&, u32 groups_landed);

  // ── global memory ──
  GlobalTouch begin_global(const Warp&, const Instruction&, const Allocation&, Touch);
  GlobalTouch begin_global_store(Warp&, const Instruction&, const Allocation&);  // by TMA
  // A lane's bytes, in no more than sixteen that are aligned; of stores what is there, and what shall be.
  void touch_global(const GlobalTouch&, u32 lane, u64 offset, u32 bytes, const u8* before, const u8* after);
  void publish(const Warp&);  // MEMBAR of the GPU's scope
  void refresh(const Warp&);  // CCTL.IVALL: takes in what strong loads read
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
  void read_word(const Toucher&, SharedShadow&, u32 word, u32 mask, u32 lane);
  void check_before_write(const Toucher&, SharedShadow&, u32 offset, u32 bytes, u32 lane);
  void place_write(const Toucher&, SharedShadow&, u32 offset, u32 bytes, u32 lane);
  u32 record(u32 agent, const Warp&, const Instruction&);
  bool knows(const View&, u32 record) const;
  void take(View&, u64 of, const Told&) const;
  [[noreturn]] void global_race(const GlobalTouch&, u32 lane, u64 offset, u32 record, bool wrote) const;
  [[noreturn]] void race(const Toucher&, u32 rank, u32 offset, u32 lane, u64 entry, bool wrote) const;

  World& world;
  Cluster& cluster;
  std::vector<Agent> agents;
  std::vector<std::array<int, LANES>> of_lanes;  // [warp in the cluster][first lane of the group]
  std::vector<std::array<int, 3>> beside;        // [warp in the cluster]: copies, stores, products
  std::vector<u32> first_warp;                   // of each block, in the cluster
  std::vector<SharedShadow> shadows;             // of each block
  std::vector<Meeting> barriers;
  Meeting cluster_barrier;
  std::unordered_map<u32, Meeting> mbarriers;
  u32 stride;
};

}  // namespace sass
