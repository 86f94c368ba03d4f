// The C interface that evoengine/sass/core.py calls by ctypes. Structs have the same layout there.
#pragma once

#include <cstdint>

extern "C" {

struct SassBank {
  uint32_t index, bytes;
  const uint8_t* data;
};

struct SassAllocation {
  uint64_t address, bytes;
  uint8_t* data;
  uint64_t period;
  uint32_t writable;
  uint16_t sparse, argument;  // its SparseKind; where it is sparse, its number among the launch's arguments
  const char* name;
  uint8_t* written;  // by words of four bytes: a bit for each byte stored to is set; null where nobody asks
};

struct SassLaunch {
  uint32_t grid[3], threads[3], cluster[3];
  uint32_t shared_bytes, reserved_shared, local_bytes, registers, arch, barriers, mbarriers, sms;
  uint32_t bank_count, allocation_count;
  const SassBank* banks;
  const SassAllocation* allocations;
  uint64_t seed;
};

// A program, or null with the reason in `message`. Unknown opcodes are no error: `sass_unknown` names them.
void* sass_decode(const char* listing, const char* entry, char* message, int size);
void sass_free(void* program);
// Unknown opcodes, "NAME count\n" each, cut to `size`; returns how many there are.
int sass_unknown(void* program, char* text, int size);

// Register hazards on any path (hazards.h), one per line, then pairs of units without a known latency after "unseen: ";
// cut to `size`. Returns the number of hazards. `registers`: of a thread at launch.
int sass_hazards(void* program, int arch, int registers, char* text, int size);
// What measure_latencies tells; returns its length, of which `size` − 1 bytes are given.
int sass_latencies(void* program, int arch, char* text, int size);

// Runs blocks (numbers in the grid; clusters run whole; none named: all). Returns 0, 1 crashed, 2 hung, 3 a race, 4 a
// race found by one of several threads; the reason goes to `message`. `limit` is in warp instructions per block;
// `races` selects the checks, as in world.h; `threads` as of `run` in functional.h.
int sass_run(void* program, const SassLaunch*, const uint64_t* blocks, int count, uint64_t limit, int races,
             int threads, char* message, int size);
// The number of clusters that have ended in the current launch, in any thread.
uint64_t sass_clusters_ended();
// The output of the calling thread's last run: `bytes` bytes, valid until that thread's next run.
const void* sass_printed(uint64_t* bytes);
// The counts of the warps of the calling thread's last run at sites: `count` records of the layout of VISIT in
// evoengine/devices/base.py, valid until that thread's next run.
const void* sass_visits(uint64_t* count);

// Runs blocks by themselves; see run_blocks in functional.h. `limits` are in bytes of sparse inputs, whose pages are
// those of the pool: `pool_pages` of 4096 bytes; each `together` of the blocks share one memory. Where `tracked`,
// traces have marks of the bytes of what kernels may write (sparse.h), and `held` is the pages of such a trace,
// `held_bytes` in all, that memory has before. Returns as sass_run does.
int sass_run_blocks(void* program, const SassLaunch*, const uint64_t* blocks, const uint64_t* limits, int count,
                    int together, const uint8_t* pool, uint64_t pool_pages, int tracked, const uint8_t* held,
                    uint64_t held_bytes, uint64_t limit, char* message, int size);
// The traces of the calling thread's last run of blocks: `bytes` bytes, valid until that thread's next one.
const void* sass_traces(uint64_t* bytes);

// Names of rates, counts, what blocks touch, times and progress, in the order of the arrays below, each ended by a
// newline.
const char* sass_rate_names();
const char* sass_count_names();
const char* sass_touched_names();
const char* sass_time_names();
const char* sass_progress_names();
const char* sass_stall_names();

// The functions below leave tensors unchanged: each call works on copies of those that kernels write.

// Counts of one block (of a cluster: of all of it), run for at most `limit` warp instructions, and in `end` at how many
// it would end, as its loops tell; 0 where they do not.
int sass_count(void* program, const SassLaunch*, uint64_t block, uint64_t limit, double* counts, double* end,
               char* message, int size);
int sass_count_lone_warp(void* program, const SassLaunch*, uint64_t block, int warp, uint64_t limit,
                         uint64_t* instructions, char* message, int size);

// The values that blocks compare first, see `compared` in counting.h: `values` [blocks][instructions, or 1][3].
int sass_compared(void* program, const SassLaunch*, const uint64_t* blocks, int count, uint64_t limit, int at,
                  double* values, char* message, int size);

// Counts of each of some blocks, and their accesses to each allocation; see Survey in counting.h.
int sass_survey(void* program, const SassLaunch*, const uint64_t* blocks, int count, uint64_t limit,
                uint64_t whole_limit, double kept, double* counts, double* touched, char* message, int size);

// Of an allocation, see Traffic in timing.h.
struct SassTraffic {
  double loads_from_dram, stores_to_dram, loads_shared, sharers, in_step;
};

struct SassTiming {
  const double* rates;
  const uint64_t* blocks;
  const SassTraffic* traffic;
  uint64_t block_count, limit;
  uint32_t resident, unused;
};

// Times one SM. `progress` has room for 256 notes; their number goes to `notes`. `issues` and `stalls` may be null:
// instructions, and clocks per instruction and reason.
int sass_time(void* program, const SassLaunch*, const SassTiming*, double* times, double* progress, int32_t* notes,
              uint64_t* issues, double* stalls, char* message, int size);

// Instructions of the program; the byte offset of each goes to `addresses` unless that is null.
int sass_size(void* program, int32_t* addresses);
}
