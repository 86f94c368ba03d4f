// Times one SM, or as many as a cluster has blocks, by the control words and a chip's rates. Clocks throughout.
#pragma once

#include "machine.h"

namespace sass {

// A chip's rates; chips.toml says what each is and where it comes from. Intervals are clocks between two warp
// instructions of one sub-partition, unless they say otherwise.
#define SASS_RATES(X)                                                                                                 \
  X(fma_interval) X(imad_interval) X(half_interval) X(alu_interval) X(fp64_interval) X(mufu_interval)                 \
  X(uniform_interval) X(hmma_interval) X(hgmma_clocks_per_column) X(mufu_latency) X(uniform_latency)                  \
  X(constant_latency) X(shuffle_latency) X(memory_interval) X(sm_memory_interval) X(wavefront_clocks) X(lds_latency)  \
  X(l1_bytes_per_clock) X(l1_latency) X(l1_bytes) X(l2_bytes_per_clock) X(l2_latency) X(dram_bytes_per_clock)         \
  X(dram_latency) X(branch_clocks) X(barrier_latency) X(mbarrier_latency) X(hgmma_latency) X(tma_latency)             \
  X(tma_bytes_per_clock) X(block_start) X(memory_queue) X(hmma_latency) X(matrix_wavefront_clocks)

struct Rates {
#define SASS_FIELD(name) double name = 0;
  SASS_RATES(SASS_FIELD)
#undef SASS_FIELD
};

enum class Stall : u8 {
  Fixed, ShortScoreboard, LongScoreboard, Barrier, TransactionBarrier, Wgmma, AsyncCopy, Pipe, MemoryQueue, NotSelected,
};
constexpr int STALLS = 10;

struct TimingRequest {
  Rates rates;
  int resident = 1;              // blocks on an SM at once
  std::vector<u64> blocks;       // in the order one SM gets them; of clusters the first of each
  u64 limit = 0;                 // warp instructions of all blocks, at which it stops
  double dram_share = 0;         // of what is asked of the L1, or by TMA, that comes from the DRAM
  bool tensor_excludes_mufu = false;
  double issue_lost = 0;         // share of arithmetic issue lost while wgmma runs
};

struct Timed {
  double clocks = 0;             // until the last block ended, or the limit was reached
  double late_clocks = 0;        // of the second half of the instructions, where it was
  u64 issued = 0, late_issued = 0;
  bool finished = false;
  u64 ended = 0;                 // blocks
  // busy clocks of the four sub-partitions together; of the SM for the last four
  double issue = 0, fma = 0, alu = 0, mufu = 0, tensor = 0, uniform = 0, memory = 0, shared = 0, l2 = 0, dram = 0;
  double l1_hits = 0;
  std::vector<u64> issues;                       // per instruction
  std::vector<std::array<double, STALLS>> stalls;  // clocks per instruction and reason, over all warps
};

// `launch`, `allocations` and `banks` as for `run`. Throws Fault.
Timed time_sm(const Program&, const Launch&, std::vector<Allocation>, const std::vector<u8>* banks, u64 seed,
              const TimingRequest&);

}  // namespace sass
