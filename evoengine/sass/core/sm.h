// The parts of an SM as timing.cpp, sm_memory.cpp and sm_async.cpp work on them.
#pragma once

#include <map>
#include <memory>
#include <queue>
#include <unordered_map>

#include "caches.h"
#include "timing.h"

namespace sass {

constexpr int PARTS = 4;
constexpr double NEVER = 1e18;
constexpr double SECTOR = 32;                // bytes of a cache line that are fetched together
constexpr u64 LOCAL_ADDRESSES = 1ull << 60;  // where spills of an SM's warps lie among global addresses
constexpr double READ_WINDOW = 3;            // clocks in which an arithmetic instruction reads its sources
constexpr double PORT_BYTES = 128;           // of shared memory per clock: 32 banks of 4 bytes
constexpr int LADDER = 7;                    // wgmmas that issue at `hgmma_issue`; those behind them more slowly,
constexpr double TOGETHER = 32;              // clocks within which fences are one
constexpr double LADDER_RESET = 64;  // until so many clocks have passed without one (FlashGPU-Sim, PARAMETERS.md)

// A warp on an SM, with what it waits for.
struct Slot {
  std::unique_ptr<Context> context;
  Warp* warp;
  int part, sm;
  u64 age;             // of its block: lower is older
  double issued = -1;  // last
  double fixed = 0;    // from stall count and branches
  double ready = 0;    // with scoreboards
  double scoreboard[6] = {};
  bool long_scoreboard[6] = {};
  bool waited = false;  // at a barrier or for asynchronous work, since its last issue
  double wait_over = 0;
  Wait::Kind waited_for = Wait::Kind::None;
  bool pipe_busy = false;
  double last_landing[4] = {};  // per queue: work lands in order
  u64 polled = 0;
  int ladder = 0;  // wgmmas issued behind one another
  double last_product = -NEVER;
};

struct Part {
  double fma = 0, heavy = 0, alu = 0, half[2] = {0, 0}, fp64 = 0, mufu = 0, uniform = 0, memory = 0, tensor = 0;
  double ports[2] = {0, 0};  // register banks: when each has read all that it was asked for
  double taken = 0;          // turns that FP32 instructions took while a wgmma computed
  Slot* last = nullptr;
  std::vector<Slot*> slots;
};

// A wgmma that some warps of its warpgroup have begun; it can start when all four have.
struct Product {
  std::vector<std::pair<Slot*, std::shared_ptr<Completion>>> warps;
  double begun = 0, alone = 0;  // when the tensor cores began it, and the clocks that it takes them alone
};

// What is asked of an allocation, what of it has been charged to the DRAM so far, and what has waited for it.
struct Asked {
  double loaded = 0, charged = 0, missed = 0;
};

struct Sm {
  Part parts[PARTS];
  double started = -NEVER;  // when its last block's first warp did
  double barriers = 0;      // until when arrivals at barriers are taken, one after the other
  double lsu = 0, l2 = 0, dram = 0, tma = 0;
  double unwritten = 0;  // clocks of the DRAM for what was stored and is in the L2 still
  double adrift = 0;     // clocks by which blocks that ended at unlike times have moved SMs from one another
  double apart = 0;      // clocks by which waiting for the DRAM has moved SMs from one another
  double met = 0;        // the same by waiting for slices of the L2 that combine
  double l2_in = 0;      // what SMs send to the L2 travels apart from what they get of it
  double sent = 0;       // until when the SM itself sends what it stores
  double apart_in = 0;   // as `apart`, by waiting for the L2 to take what SMs store
  double misses_l2 = 0, misses_dram = 0;  // until when l2 and dram work for loads and stores, TMA's boxes left out
  std::vector<Asked> asked;               // per allocation, in sectors
  double fenced = -NEVER, fence = 0;      // when the GPU's pending fence began, and when it ends
  double exchange = 0;                    // until when it sends or gets what lies in other blocks of a cluster
  double port = 0;                        // until when the banks of shared memory have work
  double tensor = 0;                      // until when the tensor cores compute wgmmas, one at a time
  double traffic = 0;                     // of the running wgmma's clocks those in which its sums move: 1 at full rate
  Product running;                        // the wgmma that computes
  std::map<const Warp*, std::deque<Product>> begun;  // by warpgroup
  std::deque<Product> waiting;                       // for the tensor cores
  // by what lies in a slice of the L2 together: until when it works on atomics
  std::unordered_map<u64, double> combined;
  int next_part = 0;
  std::unique_ptr<L1> l1;
};

struct Event {
  double at;
  u64 order;
  std::shared_ptr<Completion> work;  // null: the wgmma that `sm` computes should be done
  Sm* sm;
  bool operator>(const Event& other) const { return at != other.at ? at > other.at : order > other.order; }
};

class Timing : public Machine {
 public:
  Timing(const TimingRequest& asked, int sms);

  Timed simulate();
  void begin(Completion&&) override;
  void send(Warp&, std::function<void()> act) override;
  u64 clock() override { return u64(now); }

 private:
  // timing.cpp
  void start_cluster(double at);
  void poll(Slot&);
  double accepts(const Sm&, const Part&, const Instruction&) const;
  bool ports_free(const Part&, int index) const;
  bool issue(Sm&, Part&);
  void issued(Sm&, Part&, Slot&, const Instruction&, int index);
  void occupy(Sm&, Part&, const Instruction&, double& done, double& read);
  void occupy_mufu(Sm&, Part&, double& done, double& read);
  void occupy_fma(Sm&, Part&);
  double arithmetic(const Sm&, double interval) const;
  double issue_gap(Slot&, const Instruction&);
  double fence_latency(Sm&);
  double latency_of_order(Sm&, const Instruction&);
  void set_ready(Slot&, double from);
  void attribute(Slot&, int index);
  void end_warp(Slot&);
  void note_progress();
  double soonest() const;
  // sm_memory.cpp
  void touch(Sm&, Slot&, const Access&, double& done, double& read, bool& far);
  void touch_shared(Sm&, const Access&, double start, double& done, double& read);
  double fetch(Sm&, const u64* sectors, int count, double start, bool cached, bool ahead);
  double store(Sm&, const Access&, const u64* sectors, int count, double start, bool local);
  double change(Sm&, const Access&, const u64* sectors, int count, double start);
  double combine(Sm&, int allocation, u64 sector, double turns, double start);
  double load_clocks(int allocation, bool tma) const;
  double dram_clocks(Sm&, int allocation, double sectors);
  bool misses_l2(Sm&, int allocation, double sectors);
  double dram_latency() const;
  void write_back(Sm&, double start);
  void load_dram(Sm&, double start, double clocks, bool ahead);
  bool store_dram(Sm&, double start, double clocks);
  void settle(const Slot&, double at);
  int allocation_at(u64 address);
  int local_sectors(const Slot&, const Access&, u64* sectors) const;
  // sm_async.cpp
  double load_box(Slot&, const Completion&);
  double store_box(Slot&, const Completion&);
  void begin_product(Sm&, Slot&, std::shared_ptr<Completion>);
  void start_product(Sm&);
  void end_product(Sm&);
  void land(Slot&, std::shared_ptr<Completion>, double at);
  void land_due();

  const TimingRequest& request;
  const Rates& rates;
  std::vector<Sm> chips;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::unique_ptr<Slot>> slots;
  std::unordered_map<const Cluster*, double> settled;  // when the L2 has told of all that it stored
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
  std::vector<std::array<u8, 2>> reads;  // per instruction
  size_t next_block = 0, living = 0, found = 0;
  double now = 0;
  u64 changes = 1, order = 0, next_note = 1, note_step = 1;
  Slot* running = nullptr;
  Timed result;
};

}  // namespace sass
