// The parts of an SM as timing.cpp and sm_memory.cpp work on them.
#pragma once

#include <memory>
#include <queue>

#include "caches.h"
#include "timing.h"

namespace sass {

constexpr int PARTS = 4;
constexpr double NEVER = 1e18;
constexpr u64 LOCAL_ADDRESSES = 1ull << 60;  // where spills of an SM's warps lie among global addresses
constexpr double READ_WINDOW = 3;            // clocks in which an arithmetic instruction reads its sources

// A warp on an SM, with what it waits for.
struct Slot {
  std::unique_ptr<Context> context;
  Warp* warp;
  int part, sm;
  u64 age;                  // of its block: lower is older
  double issued = -1;       // last
  double fixed = 0;         // from stall count and branches
  double ready = 0;         // with scoreboards
  double scoreboard[6] = {};
  bool long_scoreboard[6] = {};
  bool waited = false;      // at a barrier or for asynchronous work, since its last issue
  double wait_over = 0;
  Wait::Kind waited_for = Wait::Kind::None;
  bool pipe_busy = false;
  double last_landing[4] = {};  // per queue: work lands in order
  u64 polled = 0;
};

struct Part {
  double fma = 0, heavy = 0, alu = 0, half = 0, fp64 = 0, mufu = 0, uniform = 0, memory = 0, tensor = 0;
  double ports[2] = {0, 0};  // register banks: when each has read all that it was asked for
  bool wgmma_runs = false;
  double lost = 0;
  Slot* last = nullptr;
  std::vector<Slot*> slots;
};

struct Sm {
  Part parts[PARTS];
  double lsu = 0, l2 = 0, dram = 0, tma = 0, dram_due = 0;
  double asked = 0, missed = 0;  // sectors loaded, of the L1 or past it
  double misses_l2 = 0, misses_dram = 0;  // until when l2 and dram work for loads and stores, TMA's boxes left out
  int next_part = 0;
  std::unique_ptr<L1> l1;
};

struct Event {
  double at;
  u64 order;
  Completion* work;
  bool operator>(const Event& other) const { return at != other.at ? at > other.at : order > other.order; }
};

class Timing : public Machine {
 public:
  Timing(const TimingRequest& asked, int sms) : request(asked), rates(asked.rates), chips(sms) {
    for (Sm& sm : chips) sm.l1 = std::make_unique<L1>(rates.l1_bytes);
  }

  Timed simulate();
  void begin(Completion&&) override;
  u64 clock() override { return u64(now); }

 private:
  void start_cluster(double at);
  void poll(Slot&);
  double accepts(const Sm&, const Part&, const Instruction&) const;
  bool ports_free(const Part&, int index) const;
  bool issue(Sm&, Part&);
  void issued(Sm&, Part&, Slot&, const Instruction&, int index);
  void occupy(Part&, const Instruction&, double& done, double& read);
  void touch(Sm&, Slot&, const Access&, double& done, double& read, bool& far);
  double fetch(Sm&, const u64* sectors, int count, double start, bool cached);
  void set_ready(Slot&, double from);
  void attribute(Slot&, int index);
  void end_warp(Slot&);
  void land_due();

  const TimingRequest& request;
  const Rates& rates;
  std::vector<Sm> chips;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::unique_ptr<Slot>> slots;
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
  std::vector<std::unique_ptr<Completion>> works;
  std::vector<std::array<u8, 2>> reads;  // per instruction
  size_t next_block = 0, living = 0;
  double now = 0;
  u64 changes = 1, order = 0;
  Slot* running = nullptr;
  Timed result;
};

}  // namespace sass
