// Runs launches for their results, and for a model: launches.cpp, whose clusters get their turns by functional.cpp.
#pragma once

#include <atomic>

#include "machine.h"
#include "world.h"

namespace sass {

// How often a warp was at a site, as VISIT in evoengine/devices/base.py has it.
#pragma pack(push, 1)
struct Visited {
  u64 block;
  u32 warp;
  u8 kind;
  u64 site, count, came_true;
};
#pragma pack(pop)

// Throws Fault where the program names a barrier, or initialises an mbarrier, beyond those that its binary declares.
void require_declared_barriers(const Program&, const Launch&);

struct Ran {
  std::vector<Visited> visited;
  std::string printed;  // by printf
};

// Of the launch that runs, or ran last.
extern std::atomic<u64> clusters_ended;

// Runs clusters, each named by its first block's number in the grid. Throws Fault with the place. `limit` is in warp
// instructions, per block. `banks` are 8. `races` are those that are looked for. With several threads the draws are
// others than with one, and a Fault of a race may be one of stores of the same values, which are none: only one thread
// can tell.
Ran run(const Program&, const Launch&, std::vector<Allocation>, const std::vector<u8>* banks, u64 seed,
        std::vector<u64> clusters, u64 limit, Races races, u32 threads);

// A block that is run by itself; `input_limit` is in bytes of sparse inputs, in whole pages.
struct ChosenBlock {
  u64 number, input_limit;
};

// A page that a tracked sparse allocation has before the blocks run.
struct HeldPage {
  u64 offset;
  u32 argument, bytes;
  const u8 *contents, *marks;
};

// Runs blocks (of a cluster: all of it), each by itself, over sparse allocations that are as if never touched but for
// what is `held`, and others as they are; or each `together` of them in turn over the same, with one trace. Returns
// traces, one behind the other, as `read_traces` in evoengine/devices/pool.py reads them. Throws Fault with the place,
// also where a block executes more than `limit` warp instructions.
std::vector<u8> run_blocks(const Program&, const Launch&, const std::vector<Allocation>&, const std::vector<u8>* banks,
                           u64 seed, const std::vector<ChosenBlock>&, size_t together,
                           const std::vector<HeldPage>& held, u64 limit);

// What blocks do, for a model: `saw` is called after each instruction, `began` for each piece of asynchronous work.
struct Observer {
  virtual ~Observer() = default;
  virtual void saw(const Context&, const Instruction&) = 0;
  virtual void began(const Completion&) = 0;
};

// What an observer throws where it has seen enough.
struct LimitReached {};

// Runs one cluster, asynchronous work landing at once, until the observer has seen `limit` instructions of a block;
// what is beyond is left out. Returns whether it came to its end. `alike` is as in Machine. With `lone` that warp of
// each block runs as if the others had ended before. `added` is as in Machine.
bool observe(const Program&, const Launch&, std::vector<Allocation>, const std::vector<u8>* banks, u64 seed, u64 block,
             u64 limit, u32 alike, Observer&, int lone = -1, std::map<u64, Added>* added = nullptr);

}  // namespace sass
