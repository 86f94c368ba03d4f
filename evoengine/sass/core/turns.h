// Clusters that run for their results: functional.cpp gives their warps turns, launches.cpp begins and ends them.
#pragma once

#include "functional.h"
#include "order.h"

namespace sass {

enum class Landing { Early, Late, Mixed };

struct Random {  // SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators")
  u64 state;
  u64 next() {
    u64 x = state += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
  }
  u32 below(u32 n) { return u32(next() % n); }
};

constexpr u32 LATEST_COMER = 4;     // to a place, of the warps there, whose cluster lags
constexpr u32 LONGEST_TURN = 64;    // instructions of one warp
constexpr u32 LONGEST_TICK = 1000;  // clocks between two reads of the clock

// A cluster that runs.
struct Resident {
  std::unique_ptr<Cluster> cluster;
  std::unique_ptr<Order> order;
  std::vector<Warp*> warps;        // that have not ended
  std::deque<Completion> pending;  // in the order they began
  u64 left = 0;                    // instructions
  u64 idle = 0;                    // rounds without an act
  bool lags = false, has_lagged = false;
};

struct Functional : Machine {
  Random random{0};
  Landing landing = Landing::Mixed;
  Resident* current = nullptr;
  Observer* observer = nullptr;
  int lone = -1;  // the one warp of a block that runs; -1: all do
  Visits counted;
  std::vector<u8> lags_at;  // [instruction]: of the comers to it, the number of the one whose cluster lags; 0: none
  bool lag_often = false;   // more clusters than one may lag at a place
  Random clocks{0};
  u64 now = 0;  // what the clock was read as last

  void draw_from(u64 state) {
    random.state = state;
    clocks.state = ~state;
    now = clocks.next() >> 8;
  }

  // A result that follows the clock differs from launch to launch; a wait for some clocks ends.
  u64 clock() override { return now += 1 + clocks.below(LONGEST_TICK); }

  void begin(Completion&& work) override;
  bool is_behind(const Completion& work) const;
  // Lands one piece of work, drawn among those that are first of their queue; false where none can.
  bool land_one();
  void land_stores() override;
  // A product is one of four warps: it lands for all of them together, once each has begun it. Kernels build on that:
  // one warp frees for all four what its product has read.
  bool land_product(const Warp& warp);
  void land(u32 index);
};

// One turn of each warp of a cluster; false where none of them can go on and nothing lands.
bool run_round(Functional&, Resident&);

// The kernel, block, warp and instruction, for a message.
std::string place(const Functional&, const Warp&);

}  // namespace sass
