// What blocks of a launch do, counted by running them: instructions per pipe and traffic, and which lines of global
// memory a block touches that its neighbours touch too.
#pragma once

#include "machine.h"

namespace sass {

// Per block (of a cluster: of all its blocks together). Instructions are warp instructions; sectors have 32 bytes.
#define SASS_COUNTS(X)                                                                                          \
  X(instructions) X(fma) X(imad) X(half) X(alu) X(fp64) X(mufu) X(memory) X(uniform) X(branch) X(tensor)         \
  X(shared_accesses) X(wavefronts) X(global_loads) X(sectors_loaded) X(global_stores) X(sectors_stored)          \
  X(local_accesses) X(tensor_bytes_loaded) X(tensor_bytes_stored) X(tensor_clock_columns) X(barriers) X(complete)

struct Counts {
#define SASS_FIELD(name) double name = 0;
  SASS_COUNTS(SASS_FIELD)
#undef SASS_FIELD
};

Counts count_block(const Program&, const Launch&, const std::vector<Allocation>&, const std::vector<u8>* banks, u64 seed,
                   u64 block, u64 limit);

// Lines of 128 bytes of each allocation that a block touches within `limit` instructions, and how many of them each of
// two other blocks touches too.
struct Footprint {
  std::vector<double> lines, with_first, with_second;
};
Footprint footprint(const Program&, const Launch&, const std::vector<Allocation>&, const std::vector<u8>* banks, u64 seed,
                    const u64 blocks[3], u64 limit);

}  // namespace sass
