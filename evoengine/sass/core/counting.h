// What blocks of a launch do, counted by running them: instructions per pipe and traffic, and which global memory
// blocks touch together.
#pragma once

#include <cmath>
#include <map>

#include "machine.h"

namespace sass {

// Per block (of a cluster: of all its blocks together). Instructions are warp instructions; sectors have 32 bytes;
// `hmma` is in m16n8k16. `of_first_warps`,
// `of_last_warps`: instructions of the first and last warp of each block.
// clang-format off: a list of names
#define SASS_COUNTS(X)                                                                                               \
  X(instructions) X(fma) X(imad) X(half) X(alu) X(fp64) X(mufu) X(memory) X(uniform) X(branch) X(tensor) X(hmma)     \
  X(hmma_fp16) X(shared_accesses) X(wavefronts) X(global_loads) X(sectors_loaded) X(global_stores) X(sectors_stored) \
  X(local_accesses) X(tensor_bytes_loaded) X(tensor_bytes_stored) X(tensor_sectors_loaded) X(tensor_sectors_stored)  \
  X(tensor_clock_columns) X(barriers) X(of_first_warps) X(of_last_warps) X(complete)
// clang-format on

struct Counts {
#define SASS_FIELD(name) double name = 0;
  SASS_COUNTS(SASS_FIELD)
#undef SASS_FIELD
};

// What blocks touch of an allocation: sectors that they ask for, each time they do, and bytes that any of them touches,
// counted in pieces of 64 bytes, which is what a DRAM gives at the least.
// clang-format off: a list of names
#define SASS_TOUCHED(X)                                                                                        \
  X(loaded) X(loaded_again) X(loaded_together) X(stored) X(bytes_loaded_half) X(bytes_loaded)                  \
  X(bytes_stored_half) X(bytes_stored) X(whole_loaded) X(whole_bytes_loaded) X(whole_found) X(whole_first)     \
  X(in_whole) X(loaders) X(loaders_in_step) X(eviction) X(lowest_half) X(highest_half) X(lowest) X(highest)
// clang-format on

struct Touched {
#define SASS_FIELD(name) double name = 0;
  SASS_TOUCHED(SASS_FIELD)
#undef SASS_FIELD
};

// Loads of what was stored before do not count among them. `loaded_again`: sectors in pieces that a block comes back
// to when the L2 no longer keeps them. `…_half`: by the first half of the blocks;
// `loaded_together`: sectors asked for in pieces that more than one block loads. `whole_…`: by the one block that is
// run longer; `whole_found`: sectors that it loads after it stored there, `whole_first`: its instructions before it
// first loads; `in_whole`: of what another block loads at its beginning, the share in pieces that the one loads at any
// time, in the mean over the others and 1 for the one itself. `loaders`: blocks that load a piece, summed over pieces,
// and `loaders_in_step` those of them that come to it first, having waited for loads no more often than any other.
// `eviction`: as most loads of it ask for, first (-1), last (1) or neither (0). `lowest`, `highest`: where the pieces
// begin and end that the second half of the blocks loads, in bytes from the allocation's start; infinite where it loads
// none.
struct Survey {
  std::vector<Counts> blocks;
  std::vector<Touched> allocations;
};

// Runs each block (of clusters the first) for at most `limit` warp instructions, and the middle one for `whole_limit`.
// One finds in global memory what those before it have left there. The L2 keeps the last `kept` bytes of what each
// block loads and stores.
Survey survey(const Program&, const Launch&, const std::vector<Allocation>&, const std::vector<u8>* banks, u64 seed,
              const std::vector<u64>& blocks, u64 limit, u64 whole_limit, double kept);

// Runs one block that stands for all of the grid: what it adds to a counter, each of them does. `end`: at how many
// instructions it would end if its loops went on as they did within the limit; 0 where they do not tell.
Counts count_block(const Program&, const Launch&, const std::vector<Allocation>&, const std::vector<u8>* banks,
                   u64 seed, u64 block, u64 limit, double& end);

// Instructions of one of its warps, run alone. Throws Fault where that one waits for others.
u64 count_lone_warp(const Program&, const Launch&, const std::vector<Allocation>&, const std::vector<u8>* banks,
                    u64 seed, u64 block, int warp, u64 limit);

// What an integer comparison compared when a block first came to it, and after how many warp instructions of the block
// that was: as 32-bit integers of the first lane. NaN where the block did not come to it.
struct Compared {
  double one = NAN, other = NAN, after = NAN;
};

// What each block (of clusters the first) compared within its first `limit` warp instructions, at every instruction of
// the program or, with `at` of 0 and more, at that one alone, behind which a block is not run on.
std::vector<std::vector<Compared>> compared(const Program&, const Launch&, const std::vector<Allocation>&,
                                            const std::vector<u8>* banks, u64 seed, const std::vector<u64>& blocks,
                                            u64 limit, int at);

// Whether the program has atomics whose results it takes.
bool adds_to_counters(const Program&);

// By address, what the launch's other clusters add to counters to which the cluster of `block` adds once. Clusters that
// share a counter lie side by side along an axis of the grid, and those that `but` names are left out. Nothing where
// that takes too long to find out, or a counter is added to again and again, as it is by blocks that take tiles. Leaves
// in memory what they store.
std::map<u64, u64> added_by_others(const Program&, const Launch&, const std::vector<Allocation>&,
                                   const std::vector<u8>* banks, u64 seed, u64 block, const std::vector<u64>& but);

}  // namespace sass
