// Runs blocks for their results: warps in turns that a seed draws, asynchronous work landing at moments that it draws.
//
// Hardware promises nothing of either. Work lands at once in some runs, as late as it may in others, and anywhere
// between in the rest: a kernel that reads before it waits, or fills a stage that is still read, gives wrong results
// in one of them.
#include "functional.h"

#include <algorithm>

namespace sass {

namespace {

enum class Landing { Early, Late, Mixed };

struct Random {  // SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators")
  u64 state;
  u64 next() {
    u64 x = state += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
  }
  u32 below(u32 n) { return u32(next() % n); }
};

constexpr u32 LONGEST_TURN = 64;  // instructions of one warp

struct Functional : Machine {
  Random random{0};
  Landing landing = Landing::Mixed;
  std::deque<Completion> pending;  // in the order they began
  Observer* observer = nullptr;

  void begin(Completion&& work) override {
    if (observer) observer->began(work);
    bool product = work.queue == Completion::Queue::Product;
    if (landing == Landing::Early && !product && !is_behind(work)) {
      work.land();
      return;
    }
    pending.push_back(std::move(work));
    if (landing == Landing::Early && product) land_product(*pending.back().warp);
  }

  bool is_behind(const Completion& work) const {
    return std::any_of(pending.begin(), pending.end(),
                       [&](const Completion& p) { return p.warp == work.warp && p.queue == work.queue; });
  }

  // Lands one piece of work, drawn among those that are first of their queue; false where none can.
  bool land_one() {
    u32 count = u32(pending.size());
    for (u32 from = count ? random.below(count) : 0, n = 0; n < count; n++) {
      u32 chosen = (from + n) % count;
      if (pending[chosen].queue == Completion::Queue::Product) {
        if (land_product(*pending[chosen].warp)) return true;
        continue;
      }
      for (u32 first = 0; first < chosen; first++)
        if (pending[first].warp == pending[chosen].warp && pending[first].queue == pending[chosen].queue) chosen = first;
      land(chosen);
      return true;
    }
    return false;
  }

  // A product is one of four warps: it lands for all of them together, once each has begun it. Kernels build on that:
  // one warp frees for all four what its product has read.
  bool land_product(const Warp& warp) {
    constexpr u32 missing = ~0u;
    u32 first[4] = {missing, missing, missing, missing};
    for (u32 n = u32(pending.size()); n-- > 0;) {
      const Completion& p = pending[n];
      if (p.queue == Completion::Queue::Product && p.warp->block == warp.block && p.warp->number / 4 == warp.number / 4)
        first[p.warp->number % 4] = n;
    }
    std::sort(first, first + 4);
    if (first[3] == missing) return false;
    for (int n = 3; n >= 0; n--) land(first[n]);
    return true;
  }

  void land(u32 index) {
    Completion work = std::move(pending[index]);
    pending.erase(pending.begin() + index);
    work.land();
  }
};

std::string place(const Functional& machine, const Warp& w) {
  const Block& b = *w.block;
  const Instruction& i = machine.program->code[w.pc];
  char text[160];
  snprintf(text, sizeof text, "block (%u, %u, %u), warp %d, at 0x%x: ", b.index[0], b.index[1], b.index[2], w.number, i.address);
  return text + i.text;
}

struct LimitReached {};

// One turn of a warp; true where it did anything.
bool turn(Functional& machine, Warp& w, u64& left) {
  Context context{machine, w, 0, {}, -1, 0, {}, 0, false};
  bool moved = false;
  u32 length = 1 + machine.random.below(LONGEST_TURN);
  for (u32 n = 0; n < length; n++) {
    if (is_waiting(machine, w)) break;
    if (next(w) < 0) break;
    const Instruction& instruction = machine.program->code[w.pc];
    if (step(context) == Step::Waiting) break;
    moved = true;
    if (machine.observer) {
      machine.observer->saw(context, instruction);
      if (!left--) throw LimitReached{};
    } else if (!left--) {
      throw Fault{"no end after as many instructions as it may take", true};
    }
    if (machine.landing == Landing::Mixed && !machine.pending.empty() && machine.random.below(8) == 0) machine.land_one();
  }
  return moved;
}

void run_cluster(Functional& machine, Cluster& cluster, u64 limit) {
  std::vector<Warp*> warps;
  for (auto& block : cluster.blocks)
    for (Warp& w : block->warps) warps.push_back(&w);
  u64 left = limit * cluster.blocks.size();
  Warp* current = warps[0];
  try {
    while (!warps.empty()) {
      for (size_t n = warps.size(); n > 1; n--) std::swap(warps[n - 1], warps[machine.random.below(u32(n))]);
      bool moved = false;
      for (Warp* w : warps) moved |= turn(machine, *(current = w), left);
      std::erase_if(warps, [](Warp* w) { return w->done(); });
      if (!moved && !warps.empty() && !machine.land_one()) {
        current = warps[0];
        throw Fault{std::to_string(warps.size()) + " warps wait for what never comes", true};
      }
    }
    while (machine.land_one()) {
    }
  } catch (Fault& fault) {
    fault.message = place(machine, *current) + ": " + fault.message;
    throw;
  }
}

void prepare(Functional& machine, const Program& program, const Launch& launch, std::vector<Allocation>&& allocations,
             const std::vector<u8>* banks, u64 seed) {
  machine.program = &program;
  machine.launch = launch;
  machine.memory.allocations = std::move(allocations);
  std::copy(banks, banks + 8, machine.banks);
  machine.seed = machine.random.state = seed;
}

}  // namespace

bool observe(const Program& program, const Launch& launch, std::vector<Allocation> allocations, const std::vector<u8>* banks,
             u64 seed, u64 block, u64 limit, u32 alike, Observer& observer) {
  Functional machine;
  prepare(machine, program, launch, std::move(allocations), banks, seed);
  machine.landing = Landing::Early;
  machine.observer = &observer;
  machine.alike = alike;
  machine.products_left = MODEL_PRODUCTS;
  try {
    run_cluster(machine, *make_cluster(machine, block), limit);
    return true;
  } catch (const LimitReached&) {
    return false;
  }
}

void run(const Program& program, const Launch& launch, std::vector<Allocation> allocations, const std::vector<u8>* banks,
         u64 seed, const std::vector<u64>& blocks, u64 limit) {
  Functional machine;
  prepare(machine, program, launch, std::move(allocations), banks, seed);
  machine.landing = Landing(machine.random.below(3));
  for (u64 block : blocks) run_cluster(machine, *make_cluster(machine, block), limit);
}

}  // namespace sass
