#pragma once

#include "machine.h"

namespace sass {

// Runs the blocks (numbers in the grid; of a cluster its first), one cluster after the other. Throws Fault with the
// place. `limit` is in warp instructions, per block. `banks` are 8.
void run(const Program&, const Launch&, std::vector<Allocation>, const std::vector<u8>* banks, u64 seed,
         const std::vector<u64>& blocks, u64 limit);

// What blocks do, for a model: `saw` is called after each instruction, `began` for each piece of asynchronous work.
struct Observer {
  virtual ~Observer() = default;
  virtual void saw(const Context&, const Instruction&) = 0;
  virtual void began(const Completion&) = 0;
};

// Runs the blocks as `run` does, asynchronous work landing at once, until the observer has seen `limit` instructions of
// a block; what is beyond is left out. Returns whether all came to their end. `alike` is as in Machine.
bool observe(const Program&, const Launch&, std::vector<Allocation>, const std::vector<u8>* banks, u64 seed, u64 block,
             u64 limit, u32 alike, Observer&);

}  // namespace sass
