// Times one SM, or as many as a cluster has blocks, by the control words and a chip's rates. Clocks throughout.
#pragma once

#include "machine.h"

namespace sass {

// A chip's rates; chips.toml says what each is and where it comes from. Intervals are clocks between two warp
// instructions of one sub-partition, unless they say otherwise.
// clang-format off: a list of names
#define SASS_RATES(X)                                                                                                \
  X(fma_interval) X(imad_interval) X(half_interval) X(alu_interval) X(fp64_interval) X(mufu_interval)                \
  X(imad_high_interval) X(uniform_interval) X(hmma_interval) X(hmma_fp16_interval) X(mufu_latency) \
  X(uniform_latency) X(constant_latency) X(shuffle_latency) X(redux_latency) X(indexed_uniform_latency)              \
  X(wide_interval) X(conflict_latency) X(memory_interval) X(sm_memory_interval) X(wavefront_clocks)                  \
  X(matrix_wavefront_clocks) X(lds_latency) X(l1_bytes_per_clock) X(l1_latency) X(l1_bytes) X(l2_bytes_per_clock)    \
  X(l2_private_bytes_per_clock) X(l2_private_tma_bytes_per_clock) X(l2_store_clocks) X(l2_partial_clocks)            \
  X(l2_reduce_clocks) X(l2_atomic_clocks) X(l2_combine_clocks) X(l2_latency) X(dram_bytes_per_clock) X(dram_latency) \
  X(branch_clocks) X(barrier_latency) X(barrier_interval) X(block_start) X(block_interval) X(memory_queue)           \
  X(hmma_latency) X(hmma_least) X(hgmma_clocks_per_column) X(hgmma_latency) X(hgmma_mufu_loss)                       \
  X(hgmma_arithmetic_interval) X(hgmma_turns) X(hgmma_fma_turns) X(hgmma_queue) X(hgmma_issue) X(hgmma_issue_shared) \
  X(hgmma_issue_registers) X(membar_latency) X(membar_busy_latency) X(cluster_barrier_latency) X(cluster_interval)   \
  X(remote_latency) X(remote_arrival_latency) X(remote_bytes_per_clock) X(copy_latency) X(block_drift)               \
  X(torn_copy_clocks) X(torn_copy_sectors) X(l2_burst) X(mbarrier_latency) X(mbarrier_wake) X(tma_latency)           \
  X(tma_issue) X(tma_bytes_per_clock) X(tma_in_flight_bytes) X(multicast_latency) X(l2_written_bytes)                \
  X(dram_turn_cost) X(dram_loaded_delay) X(local_from_dram)
// clang-format on

struct Rates {
#define SASS_FIELD(name) double name = 0;
  SASS_RATES(SASS_FIELD)
#undef SASS_FIELD
};

enum class Stall : u8 {
  Fixed,
  ShortScoreboard,
  LongScoreboard,
  Barrier,
  TransactionBarrier,
  Wgmma,
  AsyncCopy,
  Pipe,
  MemoryQueue,
  NotSelected,
};
constexpr int STALLS = 10;

// What of an allocation's traffic reaches the DRAM, and what of it other SMs ask for too.
struct Traffic {
  double loads_from_dram = 1, stores_to_dram = 1;  // of the bytes that blocks load, and store
  double loads_shared = 0;                         // of the bytes loaded: those that another block of the wave loads
  double sharers = 1;                              // SMs that load what one of them does,
  double in_step = 1;                              // and those of them that do so at the same time
};

struct TimingRequest {
  Rates rates;
  int resident = 1;              // blocks on an SM at once
  std::vector<u64> blocks;       // in the order one SM gets them; of clusters the first of each
  u64 limit = 0;                 // warp instructions of all blocks, at which it stops; 0: none
  std::vector<Traffic> traffic;  // per allocation, in the launch's order
  std::map<u64, u64> added;      // by address, what counters hold before, of 4 bytes
};

// How far an SM had come.
// clang-format off: a list of names
#define SASS_PROGRESS(X) X(clocks) X(issued) X(tensor_work) X(stored) X(ended)
// clang-format on
struct Progress {
#define SASS_FIELD(name) double name = 0;
  SASS_PROGRESS(SASS_FIELD)
#undef SASS_FIELD
};
constexpr int MOST_PROGRESS = 256;

struct Timed {
  double clocks = 0;  // until the last block ended, or the limit was reached
  u64 issued = 0;
  bool finished = false;
  double tensor_work = 0;  // clocks of one sub-partition's tensor core that were begun
  double stored = 0;       // sectors
  u64 ended = 0;           // blocks
  // busy clocks of the four sub-partitions together; of the SM for those of the second line
  double issue = 0, fma = 0, alu = 0, mufu = 0, tensor = 0, uniform = 0, memory = 0;
  double shared = 0, l2 = 0, l2_in = 0, dram = 0;
  double l1_hits = 0;
  std::vector<Progress> progress;                  // evenly spaced in issued instructions
  std::vector<u64> issues;                         // per instruction
  std::vector<std::array<double, STALLS>> stalls;  // clocks per instruction and reason, over all warps
};

// `launch`, `allocations` and `banks` as for `run`. Throws Fault.
Timed time_sm(const Program&, const Launch&, std::vector<Allocation>, const std::vector<u8>* banks, u64 seed,
              const TimingRequest&);

}  // namespace sass
