#include "api.h"

#include <algorithm>
#include <exception>

#include "counting.h"
#include "functional.h"
#include "hazards.h"
#include "machine.h"
#include "sparse.h"
#include "timing.h"

using namespace sass;

namespace {

constexpr int OK = 0, CRASHED = 1, HUNG = 2, RACED = 3, RACED_IN_PARALLEL = 4;

void tell(const std::string& text, char* message, int size) { snprintf(message, size, "%s", text.c_str()); }

// Runs `work` and converts exceptions to a status and a message, because none may pass into Python.
template <class Work>
int guarded(Work work, char* message, int size) {
  try {
    work();
    return OK;
  } catch (const Fault& fault) {
    tell(fault.message, message, size);
    return fault.hung ? HUNG : !fault.race ? CRASHED : fault.in_parallel ? RACED_IN_PARALLEL : RACED;
  } catch (const std::exception& error) {
    tell(std::string("the executor failed: ") + error.what(), message, size);
    return CRASHED;
  }
}

Launch launch_of(const SassLaunch& from) {
  Launch to;
  std::copy_n(from.grid, 3, to.grid);
  std::copy_n(from.threads, 3, to.threads);
  std::copy_n(from.cluster, 3, to.cluster);
  to.shared_bytes = from.shared_bytes;
  to.reserved_shared = from.reserved_shared;
  to.local_bytes = from.local_bytes;
  to.registers = from.registers;
  to.arch = from.arch;
  to.barriers = from.barriers;
  to.mbarriers = from.mbarriers;
  to.sms = from.sms;
  return to;
}

std::vector<Allocation> allocations_of(const SassLaunch& from) {
  std::vector<Allocation> found;
  for (u32 n = 0; n < from.allocation_count; n++) {
    const SassAllocation& a = from.allocations[n];
    found.push_back({a.address, a.bytes, a.data, a.period, a.writable != 0, a.name, a.written});
  }
  std::sort(found.begin(), found.end(), [](const Allocation& a, const Allocation& b) { return a.address < b.address; });
  return found;
}

// The pages of the sparse ones among `allocations`, which point to them.
std::deque<Sparse> sparse_of(const SassLaunch& from, std::vector<Allocation>& allocations, Pool& pool) {
  std::deque<Sparse> found;
  for (u32 n = 0; n < from.allocation_count; n++) {
    const SassAllocation& given = from.allocations[n];
    if (!given.sparse) continue;
    Sparse& sparse = found.emplace_back();
    sparse.kind = SparseKind(given.sparse);
    sparse.argument = given.argument;
    sparse.bytes = given.bytes;
    sparse.pool = &pool;
    for (Allocation& a : allocations)
      if (a.address == given.address) a.sparse = &sparse;
  }
  return found;
}

// What `write_trace` of launches.cpp says of tracked pages.
std::vector<HeldPage> held_pages(const u8* from, u64 bytes) {
  std::vector<HeldPage> found;
  for (const u8* at = from; at < from + bytes;) {
    HeldPage& page = found.emplace_back();
    std::memcpy(&page.offset, at, 8), std::memcpy(&page.argument, at + 8, 4), std::memcpy(&page.bytes, at + 12, 4);
    page.contents = at + 16, page.marks = page.contents + page.bytes;
    at = page.marks + page.bytes;
  }
  return found;
}

// The allocations, with copies of those that are written and held whole, so that a kernel's counters start again.
struct Copied {
  std::vector<Allocation> allocations;
  std::vector<std::vector<u8>> copies;

  explicit Copied(const SassLaunch& from) : allocations(allocations_of(from)) {
    for (Allocation& a : allocations) {
      if (!a.writable || a.period != a.bytes) continue;
      copies.emplace_back(a.data, a.data + a.bytes);
      a.data = copies.back().data();
    }
  }
};

std::vector<std::vector<u8>> banks_of(const SassLaunch& from) {
  std::vector<std::vector<u8>> banks(8);
  for (u32 n = 0; n < from.bank_count; n++)
    banks.at(from.banks[n].index).assign(from.banks[n].data, from.banks[n].data + from.banks[n].bytes);
  return banks;
}

// The first block of each block's cluster, each once.
std::vector<u64> cluster_starts(const Launch& l, const uint64_t* blocks, int count) {
  std::vector<u64> found;
  u64 all = u64(l.grid[0]) * l.grid[1] * l.grid[2];
  auto start = [&](u64 block) {
    u64 at[3] = {block % l.grid[0], block / l.grid[0] % l.grid[1], block / l.grid[0] / l.grid[1]};
    for (int d = 0; d < 3; d++) at[d] -= at[d] % l.cluster[d];
    return (at[2] * l.grid[1] + at[1]) * l.grid[0] + at[0];
  };
  for (u64 n = 0; n < (count ? u64(count) : all); n++) {
    u64 block = count ? blocks[n] : n;
    if (block >= all) throw Fault{"block " + std::to_string(block) + " of a grid of " + std::to_string(all)};
    if (count ? std::find(found.begin(), found.end(), start(block)) == found.end() : start(block) == block)
      found.push_back(start(block));
  }
  return found;
}

}  // namespace

void* sass_decode(const char* listing, const char* entry, char* message, int size) {
  Program* program = nullptr;
  guarded([&] { program = new Program(decode(listing, entry)); }, message, size);
  return program;
}

void sass_free(void* program) { delete static_cast<Program*>(program); }

int sass_unknown(void* program, char* text, int size) {
  const auto& unknown = static_cast<Program*>(program)->unknown;
  std::string lines;
  for (const auto& [name, count] : unknown) lines += name + " " + std::to_string(count) + "\n";
  tell(lines, text, size);
  return int(unknown.size());
}

int sass_hazards(void* program, int arch, int registers, char* text, int size) {
  Hazards found = find_hazards(*static_cast<Program*>(program), arch, registers);
  std::string lines;
  for (const Hazard& hazard : found.found) lines += hazard.message + "\n";
  for (const auto& [pair, count] : found.unseen) lines += "unseen: " + pair + " " + std::to_string(count) + "\n";
  tell(lines, text, size);
  return int(found.found.size());
}

int sass_latencies(void* program, int arch, char* text, int size) {
  const std::string lines = measure_latencies(*static_cast<Program*>(program), arch);
  tell(lines, text, size);
  return int(lines.size());
}

static thread_local Ran last_run;

int sass_run(void* program, const SassLaunch* from, const uint64_t* blocks, int count, uint64_t limit, int races,
             int threads, char* message, int size) {
  return guarded(
      [&] {
        Launch launch = launch_of(*from);
        require_no_hazard(*static_cast<Program*>(program), launch.arch, launch.registers);
        require_declared_barriers(*static_cast<Program*>(program), launch);
        auto banks = banks_of(*from);
        last_run = {};
        last_run = run(*static_cast<Program*>(program), launch, allocations_of(*from), banks.data(), from->seed,
                       cluster_starts(launch, blocks, count), limit, Races(races), u32(threads));
      },
      message, size);
}

const void* sass_visits(uint64_t* count) {
  *count = last_run.visited.size();
  return last_run.visited.data();
}

const void* sass_printed(uint64_t* bytes) {
  *bytes = last_run.printed.size();
  return last_run.printed.data();
}

uint64_t sass_clusters_ended() { return clusters_ended; }

static thread_local std::vector<u8> last_traces;

int sass_run_blocks(void* program, const SassLaunch* from, const uint64_t* blocks, const uint64_t* limits, int count,
                    int together, const uint8_t* pool, uint64_t pool_pages, int tracked, const uint8_t* held,
                    uint64_t held_bytes, uint64_t limit, char* message, int size) {
  return guarded(
      [&] {
        Launch launch = launch_of(*from);
        require_no_hazard(*static_cast<Program*>(program), launch.arch, launch.registers);
        require_declared_barriers(*static_cast<Program*>(program), launch);
        auto banks = banks_of(*from);
        std::vector<Allocation> allocations = allocations_of(*from);
        Pool pooled{pool, pool_pages};
        std::deque<Sparse> sparse = sparse_of(*from, allocations, pooled);
        for (Sparse& one : sparse) one.tracked = tracked && one.kind != SparseKind::Input;
        std::vector<ChosenBlock> chosen;
        chosen.reserve(size_t(count));
        for (int n = 0; n < count; n++) chosen.push_back({cluster_starts(launch, blocks + n, 1)[0], limits[n]});
        last_traces.clear();
        last_traces = run_blocks(*static_cast<Program*>(program), launch, allocations, banks.data(), from->seed, chosen,
                                 size_t(together), held_pages(held, held_bytes), limit);
      },
      message, size);
}

const void* sass_traces(uint64_t* bytes) {
  *bytes = last_traces.size();
  return last_traces.data();
}

// ── the model ───────────────────────────────────────────────────────────────────────────────────────────────────────

#define SASS_NAME(name) #name "\n"
// what `Timed` says in single numbers
// clang-format off: a list of names
#define SASS_TIMES(X)                                                                                        \
  X(clocks) X(issued) X(finished) X(tensor_work) X(stored) X(ended) X(issue) X(fma) X(alu) X(mufu) X(tensor) \
  X(uniform) X(memory) X(shared) X(l2) X(dram) X(l1_hits)
// clang-format on

const char* sass_rate_names() { return SASS_RATES(SASS_NAME); }
const char* sass_count_names() { return SASS_COUNTS(SASS_NAME); }
const char* sass_touched_names() { return SASS_TOUCHED(SASS_NAME); }
const char* sass_time_names() { return SASS_TIMES(SASS_NAME); }
const char* sass_progress_names() { return SASS_PROGRESS(SASS_NAME); }
const char* sass_stall_names() {
  return "fixed\nshort scoreboard\nlong scoreboard\nbarrier\nmbarrier\nwgmma\nasync copy\npipe\nmemory queue\nnot "
         "selected\n";
}

int sass_size(void* program, int32_t* addresses) {
  const auto& code = static_cast<Program*>(program)->code;
  for (size_t n = 0; addresses && n < code.size(); n++) addresses[n] = code[n].address;
  return int(code.size());
}

#define SASS_PUT_COUNT(name) *counts++ = found.name;

int sass_count(void* program, const SassLaunch* from, uint64_t block, uint64_t limit, double* counts, double* end,
               char* message, int size) {
  return guarded(
      [&] {
        auto banks = banks_of(*from);
        Launch launch = launch_of(*from);
        Copied copied(*from);
        Counts found = count_block(*static_cast<Program*>(program), launch, copied.allocations, banks.data(),
                                   from->seed, cluster_starts(launch, &block, 1)[0], limit, *end);
        SASS_COUNTS(SASS_PUT_COUNT)
      },
      message, size);
}

int sass_count_lone_warp(void* program, const SassLaunch* from, uint64_t block, int warp, uint64_t limit,
                         uint64_t* instructions, char* message, int size) {
  return guarded(
      [&] {
        auto banks = banks_of(*from);
        Launch launch = launch_of(*from);
        Copied copied(*from);
        *instructions = count_lone_warp(*static_cast<Program*>(program), launch, copied.allocations, banks.data(),
                                        from->seed, cluster_starts(launch, &block, 1)[0], warp, limit);
      },
      message, size);
}

int sass_compared(void* program, const SassLaunch* from, const uint64_t* blocks, int count, uint64_t limit, int at,
                  double* values, char* message, int size) {
  return guarded(
      [&] {
        auto banks = banks_of(*from);
        Launch launch = launch_of(*from);
        Copied copied(*from);
        for (const auto& of_block : compared(*static_cast<Program*>(program), launch, copied.allocations, banks.data(),
                                             from->seed, cluster_starts(launch, blocks, count), limit, at))
          for (const Compared& one : of_block)
            for (double value : {one.one, one.other, one.after}) *values++ = value;
      },
      message, size);
}

int sass_survey(void* program, const SassLaunch* from, const uint64_t* blocks, int count, uint64_t limit,
                uint64_t whole_limit, double kept, double* counts, double* touched, char* message, int size) {
  return guarded(
      [&] {
        auto banks = banks_of(*from);
        Launch launch = launch_of(*from);
        Copied copied(*from);
        Survey all = survey(*static_cast<Program*>(program), launch, copied.allocations, banks.data(), from->seed,
                            cluster_starts(launch, blocks, count), limit, whole_limit, kept);
        for (const Counts& found : all.blocks) {
          SASS_COUNTS(SASS_PUT_COUNT)
        }
#define SASS_PUT_TOUCHED(name) *touched++ = found.name;
        for (const Touched& found : all.allocations) {
          SASS_TOUCHED(SASS_PUT_TOUCHED)
        }
      },
      message, size);
}

int sass_time(void* program, const SassLaunch* from, const SassTiming* asked, double* times, double* progress,
              int32_t* notes, uint64_t* issues, double* stalls, char* message, int size) {
  return guarded(
      [&] {
        auto banks = banks_of(*from);
        Launch launch = launch_of(*from);
        Copied copied(*from);
        TimingRequest request;
        const double* rate = asked->rates;
#define SASS_TAKE(name) request.rates.name = *rate++;
        SASS_RATES(SASS_TAKE)
        request.resident = int(asked->resident);
        request.blocks = cluster_starts(launch, asked->blocks, int(asked->block_count));
        request.limit = asked->limit;
        for (size_t n = 0; n < copied.allocations.size(); n++) {
          const SassTraffic& t = asked->traffic[n];
          request.traffic.push_back({t.loads_from_dram, t.stores_to_dram, t.loads_shared, t.sharers, t.in_step});
        }
        // a launch ends with a block that finds all others of its tile there, and may have more to do for that
        if (const Program& of = *static_cast<Program*>(program); !request.blocks.empty() && adds_to_counters(of)) {
          Copied apart(*from);
          request.added = added_by_others(of, launch, apart.allocations, banks.data(), from->seed,
                                          request.blocks.back(), request.blocks);
        }
        Timed found =
            time_sm(*static_cast<Program*>(program), launch, copied.allocations, banks.data(), from->seed, request);
#define SASS_TELL(name) *times++ = double(found.name);
        SASS_TIMES(SASS_TELL)
        *notes = int32_t(found.progress.size());
        for (const Progress& note : found.progress) {
#define SASS_NOTE(name) *progress++ = note.name;
          SASS_PROGRESS(SASS_NOTE)
        }
        if (issues) std::copy(found.issues.begin(), found.issues.end(), issues);
        if (stalls)
          for (const auto& reasons : found.stalls) stalls = std::copy(reasons.begin(), reasons.end(), stalls);
      },
      message, size);
}
