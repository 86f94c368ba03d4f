#pragma once

#include "machine.h"

namespace sass {

// Runs the blocks (numbers in the grid; of a cluster its first), one cluster after the other. Throws Fault with the
// place. `limit` is in warp instructions, per block. `banks` are 8.
void run(const Program&, const Launch&, std::vector<Allocation>, const std::vector<u8>* banks, u64 seed,
         const std::vector<u64>& blocks, u64 limit);

}  // namespace sass
