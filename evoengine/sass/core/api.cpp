#include "api.h"

#include <algorithm>
#include <exception>

#include "functional.h"
#include "machine.h"

using namespace sass;

namespace {

constexpr int OK = 0, CRASHED = 1, HUNG = 2;

void tell(const std::string& text, char* message, int size) { snprintf(message, size, "%s", text.c_str()); }

// Runs `work`; what it throws becomes a status and a message, since no exception may pass into Python.
template <class Work>
int guarded(Work work, char* message, int size) {
  try {
    work();
    return OK;
  } catch (const Fault& fault) {
    tell(fault.message, message, size);
    return fault.hung ? HUNG : CRASHED;
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
  return to;
}

std::vector<Allocation> allocations_of(const SassLaunch& from) {
  std::vector<Allocation> found;
  for (u32 n = 0; n < from.allocation_count; n++) {
    const SassAllocation& a = from.allocations[n];
    found.push_back({a.address, a.bytes, a.data, a.period, a.writable != 0, a.name});
  }
  std::sort(found.begin(), found.end(), [](const Allocation& a, const Allocation& b) { return a.address < b.address; });
  return found;
}

std::vector<std::vector<u8>> banks_of(const SassLaunch& from) {
  std::vector<std::vector<u8>> banks(8);
  for (u32 n = 0; n < from.bank_count; n++)
    banks.at(from.banks[n].index).assign(from.banks[n].data, from.banks[n].data + from.banks[n].bytes);
  return banks;
}

// The first block of each cluster, each once.
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

int sass_run(void* program, const SassLaunch* from, const uint64_t* blocks, int count, uint64_t limit, char* message, int size) {
  return guarded(
      [&] {
        Launch launch = launch_of(*from);
        auto banks = banks_of(*from);
        run(*static_cast<Program*>(program), launch, allocations_of(*from), banks.data(), from->seed,
            cluster_starts(launch, blocks, count), limit);
      },
      message, size);
}
