#include "counting.h"

#include <algorithm>

#include "caches.h"
#include "functional.h"

namespace sass {

namespace {

struct Counter : Observer {
  Counts counts;

  void saw(const Context& c, const Instruction& i) override {
    counts.instructions++;
    switch (i.pipe) {
      case Pipe::Fma: counts.fma++; break;
      case Pipe::FmaHeavy: counts.imad++; break;
      case Pipe::Half: counts.half++; break;
      case Pipe::Alu: counts.alu++; break;
      case Pipe::Fp64: counts.fp64++; break;
      case Pipe::Mufu: counts.mufu++; break;
      case Pipe::Memory: counts.memory++; break;
      case Pipe::Uniform: counts.uniform++; break;
      case Pipe::Branch: counts.branch++; break;
      case Pipe::Tensor: counts.tensor++; break;
      case Pipe::None: break;
    }
    counts.barriers += i.opcode.starts_with("BAR.");
    if (c.lanes && c.access.space != Access::Space::None) add(c.access);
  }

  void add(const Access& access) {
    u64 found[4 * LANES];
    switch (access.space) {
      case Access::Space::Shared:
        counts.shared_accesses++;
        counts.wavefronts += wavefronts(access);
        break;
      case Access::Space::Global:
        (access.store ? counts.global_stores : counts.global_loads)++;
        (access.store ? counts.sectors_stored : counts.sectors_loaded) += pieces(access, 5, found);
        break;
      case Access::Space::Local: counts.local_accesses++; break;
      default: break;
    }
  }

  void began(const Completion& work) override {
    if (work.queue == Completion::Queue::TensorLoad) counts.tensor_bytes_loaded += double(work.bytes) / work.destinations;
    if (work.queue == Completion::Queue::TensorStore) counts.tensor_bytes_stored += work.bytes;
    if (work.queue == Completion::Queue::Product) counts.tensor_clock_columns += work.n * work.k / 16.0;
  }
};

struct Lines : Observer {
  std::vector<u64> seen;

  void saw(const Context& c, const Instruction&) override {
    if (!c.lanes || c.access.space != Access::Space::Global) return;
    u64 found[4 * LANES];
    int count = pieces(c.access, 7, found);
    seen.insert(seen.end(), found, found + count);
    if (seen.size() > 1 << 20) tidy();
  }

  void began(const Completion& work) override {
    bool tensor = work.queue == Completion::Queue::TensorLoad || work.queue == Completion::Queue::TensorStore;
    if (!tensor) return;
    // rows of a box lie apart; what matters is how many lines and whether neighbours touch the same ones
    for (int byte = 0; byte < work.bytes; byte += 128) seen.push_back((work.address + byte) >> 7);
  }

  void tidy() {
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
  }
};

std::vector<u64> lines_of(const Program& program, const Launch& launch, const std::vector<Allocation>& allocations,
                          const std::vector<u8>* banks, u64 seed, u64 block, u64 limit) {
  Lines lines;
  observe(program, launch, allocations, banks, seed, block, limit, lines);
  lines.tidy();
  return std::move(lines.seen);
}

size_t common(const std::vector<u64>& one, const std::vector<u64>& other, u64 from, u64 to) {
  size_t count = 0;
  auto a = std::lower_bound(one.begin(), one.end(), from), b = std::lower_bound(other.begin(), other.end(), from);
  while (a != one.end() && b != other.end() && *a < to && *b < to) {
    if (*a == *b) count++, a++, b++;
    else if (*a < *b) a++;
    else b++;
  }
  return count;
}

}  // namespace

Counts count_block(const Program& program, const Launch& launch, const std::vector<Allocation>& allocations,
                   const std::vector<u8>* banks, u64 seed, u64 block, u64 limit) {
  Counter counter;
  counter.counts.complete = observe(program, launch, allocations, banks, seed, block, limit, counter);
  return counter.counts;
}

Footprint footprint(const Program& program, const Launch& launch, const std::vector<Allocation>& allocations,
                    const std::vector<u8>* banks, u64 seed, const u64 blocks[3], u64 limit) {
  std::vector<u64> touched[3];
  for (int n = 0; n < 3; n++) touched[n] = lines_of(program, launch, allocations, banks, seed, blocks[n], limit);
  Footprint found;
  for (const Allocation& a : allocations) {
    u64 from = a.address >> 7, to = (a.address + a.bytes + 127) >> 7;
    found.lines.push_back(double(common(touched[0], touched[0], from, to)));
    found.with_first.push_back(double(common(touched[0], touched[1], from, to)));
    found.with_second.push_back(double(common(touched[0], touched[2], from, to)));
  }
  return found;
}

}  // namespace sass
