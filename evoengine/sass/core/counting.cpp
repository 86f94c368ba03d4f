#include "counting.h"

#include <algorithm>
#include <climits>

#include "caches.h"
#include "functional.h"

namespace sass {

namespace {

struct Counter : Observer {
  Counts counts;

  void saw(const Context& c, const Instruction& i) override {
    counts.instructions++;
    counts.of_first_warps += c.warp.number == 0;
    counts.of_last_warps += size_t(c.warp.number) + 1 == c.warp.block->warps.size();
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
      case Pipe::Tensor:
        counts.tensor++;
        if (!is_group_product(i)) (i.fp16_sums ? counts.hmma_fp16 : counts.hmma) += i.mma_work;
        break;
      case Pipe::None: break;
    }
    counts.barriers += i.op == Op::BAR;
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
    if (work.queue == Completion::Queue::TensorLoad) {
      counts.tensor_bytes_loaded += double(work.bytes) / work.destinations;
      counts.tensor_sectors_loaded += double(work.sectors) / work.destinations;
    }
    if (work.queue == Completion::Queue::TensorStore) {
      counts.tensor_bytes_stored += work.bytes;
      counts.tensor_sectors_stored += work.sectors;
    }
    if (work.queue == Completion::Queue::Product) counts.tensor_clock_columns += work.n;
  }
};

constexpr int PIECE = 6;  // log2 of 64 bytes

// Pieces of memory with how often they were asked for, by how many blocks, and how many of these came first; open
// addressing.
class Pieces {
 public:
  // `waits`: how often the warp that asks has waited for its loads before. `passed`: bytes that the block has brought
  // through the L2; the piece adds its own where it is new, or no longer among the `kept` that the L2 has of them.
  void add(u64 piece, u32 block, u32 sectors, u32 waits, double& passed, double kept) {
    if (2 * ++added > table.size()) grow();
    Entry& e = at(piece);
    const bool other = e.last != block, again = !other && passed - e.passed > kept;
    if (other) {
      e.in_step = !e.blocks || waits < e.waits ? 1 : e.in_step + (waits == e.waits);
      e.waits = e.blocks ? std::min(e.waits, waits) : waits;
      e.blocks++;
    }
    if (other || again) passed += double(1 << PIECE) / e.blocks;  // what several blocks ask for comes once
    e.came_again = again || (!other && e.came_again);
    e.passed = passed;
    e.last = block;
    e.asked += sectors;
    if (e.came_again) e.again += sectors;
  }

  template <class F>
  void each(F f) const {
    for (const Entry& e : table)
      if (e.blocks) f(e);
  }

  bool has(u64 piece) const {
    if (table.empty()) return false;
    size_t n = place(piece);
    while (table[n].blocks && table[n].piece != piece) n = (n + 1) & (table.size() - 1);
    return table[n].blocks;
  }

 private:
  struct Entry {
    u64 piece = 0;
    u32 asked = 0, blocks = 0, last = ~0u, waits = 0, in_step = 0, again = 0;
    bool came_again = false;
    double passed = 0;  // before it was last asked for
  };

  // neighbours lie beside each other, as they are asked for one after the other
  size_t place(u64 piece) const {
    return ((piece >> 3) * 0x9e3779b97f4a7c15ull >> 20 << 3 | (piece & 7)) & (table.size() - 1);
  }

  Entry& at(u64 piece) {
    size_t n = place(piece);
    while (table[n].blocks && table[n].piece != piece) n = (n + 1) & (table.size() - 1);
    table[n].piece = piece;
    return table[n];
  }

  void grow() {
    std::vector<Entry> old(std::max<size_t>(1 << 12, 2 * table.size()));
    old.swap(table);
    added = 1;
    for (const Entry& e : old)
      if (e.blocks) at(e.piece) = e, added++;
  }

  std::vector<Entry> table;
  size_t added = 0;
};

constexpr std::array<u64, 2> UNREACHED = {~0ull, 0};

struct Surveyor : Counter {
  Pieces loaded, stored;
  u32 block = 0;
  double passed = 0;                   // bytes that the block has brought through the L2
  double kept = INFINITY;              // of them by the L2
  const Pieces* whole = nullptr;       // of the block that is run longer
  std::vector<u32> found;              // per allocation: sectors loaded where something was stored before
  std::vector<double> first;           // per allocation: instructions up to the first load, NAN before it
  std::vector<std::array<u32, 2>> in;  // of this block, per allocation: pieces loaded, those of them in `whole`
  std::vector<int> eviction;           // per allocation: loads that ask for the last, less those that ask for the first
  std::vector<int> boxes;              // per allocation: all loads by TMA
  std::vector<std::array<u64, 2>> reached;  // per allocation: lowest and highest piece loaded
  struct Loading {
    u8 scoreboards = 0;  // of pending loads
    u32 waits = 0;       // for loads, so far
  };
  std::vector<Loading> warps;  // of the block
  u32 waits = 0;               // of the warp that runs
  const std::vector<Allocation>& allocations;

  explicit Surveyor(const std::vector<Allocation>& all)
      : found(all.size()),
        first(all.size(), NAN),
        in(all.size()),
        eviction(all.size()),
        boxes(all.size()),
        reached(all.size(), UNREACHED),
        allocations(all) {}

  void saw(const Context& c, const Instruction& i) override {
    Counter::saw(c, i);
    const Block& own = *c.warp.block;
    warps.resize(own.warps.size() * own.cluster->blocks.size());
    Loading& loading = warps[own.rank * own.warps.size() + c.warp.number];
    if (i.wait_mask & loading.scoreboards) loading.scoreboards = 0, loading.waits++;
    if (!c.lanes || c.access.space != Access::Space::Global) return;
    if (!c.access.store && i.write_barrier < 6) loading.scoreboards |= 1 << i.write_barrier;
    waits = loading.waits;
    u64 sectors[4 * LANES];
    int count = pieces(c.access, 5, sectors);
    for (int n = 0; n < count; n++) touch(sectors[n] >> 1, 1, c.access.store && !c.access.atomic);
  }

  void began(const Completion& work) override {
    Counter::began(work);
    if (!work.rows) return;
    waits = 0;  // what asks for boxes does not wait for them
    bool store = work.queue == Completion::Queue::TensorStore && !work.combines;
    if (int n = work.sectors && !store ? allocation_of(work.address >> PIECE) : -1; n >= 0) {
      eviction[n] += work.eviction;
      boxes[n]++;
    }
    work.rows([&](u64 address, u32 bytes) {
      for (u64 piece = address >> PIECE; piece <= (address + bytes - 1) >> PIECE; piece++) touch(piece, 2, store);
    });
  }

  void touch(u64 piece, u32 sectors, bool store) {
    int n = store ? -1 : allocation_of(piece);
    if (n >= 0 && stored.has(piece)) {
      found[n] += sectors;
      return;
    }
    (store ? stored : loaded).add(piece, block, sectors, waits, passed, kept);
    if (n >= 0 && !store) reached[n] = {std::min(reached[n][0], piece), std::max(reached[n][1], piece)};
    if (n >= 0 && std::isnan(first[n])) first[n] = counts.instructions;
    if (!whole || n < 0) return;
    in[n][0]++;
    in[n][1] += whole->has(piece);
  }

  int allocation_of(u64 piece) const {
    u64 last = ((piece + 1) << PIECE) - 1;
    auto after = std::upper_bound(allocations.begin(), allocations.end(), last,
                                  [](u64 at, const Allocation& a) { return at < a.address; });
    return int(after - allocations.begin()) - 1;
  }
};

constexpr double PIECE_BYTES = 1 << PIECE;

void sum(const Surveyor& all, std::vector<Touched>& to, bool half) {
  all.loaded.each([&](const auto& of) {
    int n = all.allocation_of(of.piece);
    if (n < 0) return;
    (half ? to[n].bytes_loaded_half : to[n].bytes_loaded) += PIECE_BYTES;
    if (half) return;
    to[n].loaded += of.asked;
    to[n].loaded_again += of.again;
    if (of.blocks > 1) to[n].loaded_together += of.asked;
    to[n].loaders += of.blocks;
    to[n].loaders_in_step += of.in_step;
  });
  all.stored.each([&](const auto& of) {
    int n = all.allocation_of(of.piece);
    if (n < 0) return;
    (half ? to[n].bytes_stored_half : to[n].bytes_stored) += PIECE_BYTES;
    if (!half) to[n].stored += of.asked;
  });
}

// Says where the loads since the last call began and ended.
void reach(Surveyor& all, std::vector<Touched>& to, double Touched::* lowest, double Touched::* highest) {
  for (size_t n = 0; n < to.size(); n++) {
    const auto [first, last] = all.reached[n];
    const bool none = first > last;
    to[n].*lowest = none ? INFINITY : double(first << PIECE) - double(all.allocations[n].address);
    to[n].*highest = none ? -INFINITY : double((last + 1) << PIECE) - double(all.allocations[n].address);
    all.reached[n] = UNREACHED;
  }
}

}  // namespace

Survey survey(const Program& program, const Launch& launch, const std::vector<Allocation>& allocations,
              const std::vector<u8>* banks, u64 seed, const std::vector<u64>& blocks, u64 limit, u64 whole_limit,
              double kept) {
  Surveyor one(allocations), each(allocations);
  each.kept = kept;
  u32 all = launch.grid[0] * launch.grid[1] * launch.grid[2];
  auto run = [&](Surveyor& surveyor, u64 block, u64 most, u32 alike) {
    surveyor.counts = {};
    surveyor.warps.clear();
    surveyor.counts.complete = observe(program, launch, allocations, banks, seed, block, most, alike, surveyor);
  };
  size_t middle = blocks.size() / 2;
  // of tiles that blocks take by a counter, the others of the grid take those between two of its own
  run(one, blocks[middle], whole_limit, all);
  each.whole = &one.loaded;
  Survey found;
  found.allocations.resize(allocations.size());
  std::vector<std::array<double, 2>> in(allocations.size());  // blocks that load of it, sum of their shares
  for (size_t n = 0; n < blocks.size(); n++) {
    std::fill(each.in.begin(), each.in.end(), std::array<u32, 2>{});
    each.block = u32(n);
    run(each, blocks[n], limit, 1);
    found.blocks.push_back(each.counts);
    for (size_t a = 0; a < in.size(); a++)
      if (each.in[a][0]) in[a][0]++, in[a][1] += double(each.in[a][1]) / each.in[a][0];
    if (n + 1 != blocks.size() / 2) continue;
    sum(each, found.allocations, true);
    reach(each, found.allocations, &Touched::lowest_half, &Touched::highest_half);
  }
  sum(each, found.allocations, false);
  reach(each, found.allocations, &Touched::lowest, &Touched::highest);
  one.loaded.each([&](const auto& of) {
    int n = one.allocation_of(of.piece);
    if (n < 0) return;
    found.allocations[n].whole_loaded += of.asked;
    found.allocations[n].whole_bytes_loaded += PIECE_BYTES;
    found.allocations[n].whole_first = one.first[n];
  });
  for (size_t a = 0; a < in.size(); a++)
    if (2 * std::abs(each.eviction[a]) > each.boxes[a]) found.allocations[a].eviction = each.eviction[a] > 0 ? 1 : -1;
  for (size_t a = 0; a < in.size(); a++) found.allocations[a].whole_found = one.found[a];
  for (size_t a = 0; a < in.size(); a++) found.allocations[a].in_whole = in[a][0] ? in[a][1] / in[a][0] : 0;
  return found;
}

namespace {

bool compares_integers(const Instruction& i) {
  return (i.op == Op::ISETP || i.op == Op::UISETP) && i.operands.size() > 3;
}

// An operand of a comparison in the first executing lane. Constants are 0: they are the same in all blocks.
double compared(const Context& c, const Operand& o) {
  const int lane = __builtin_ctz(c.lanes);
  switch (o.kind) {
    case Kind::Register: return o.index == RZ ? 0 : i32(c.warp.r[o.index][lane]);
    case Kind::Uniform: return o.index == URZ ? 0 : i32(c.warp.u[o.index]);
    case Kind::Immediate: return i32(o.immediate);
    default: return 0;
  }
}

// Where an instruction of these goes, as an index; -1 where it is none. ptxas leaves loops by CALL.REL too.
int target_of(const Instruction& i, std::initializer_list<Op> of) {
  if (std::find(of.begin(), of.end(), i.op) == of.end()) return -1;
  for (const Operand& o : i.operands)
    if (o.kind == Kind::Label) return o.target;
  return i.op == Op::EXIT ? INT_MAX : -1;
}

// Predicts from the loops of its first warp when a block will end: the operands of the comparison that repeats or
// leaves a loop come nearer to each other each time.
struct Ending : Counter {
  struct Loop {
    int begin, end;  // instructions
    int comparison;
    double first = 0, last = 0;  // differences of what is compared
    double begun = 0, seen = 0;  // instructions of the block by then
    u32 times = 0;
    bool nearer = true;

    bool tells() const { return times >= FEWEST && nearer && last < first; }
  };

  static constexpr u32 FEWEST = 3;
  const Program& program;
  std::vector<Loop> loops;
  std::vector<std::vector<int>> at;  // by instruction: the loops whose comparison it is

  explicit Ending(const Program& of) : program(of), at(of.code.size()) {
    for (int end = 0; end < int(program.code.size()); end++)
      if (const int begin = target_of(program.code[size_t(end)], {Op::BRA}); begin >= 0 && begin < end)
        for (int leaves = begin; leaves <= end; leaves++) add(begin, end, leaves);
  }

  // The branch at `leaves` repeats the loop or leaves it, by a predicate that a comparison before it in the loop has
  // set.
  void add(int begin, int end, int leaves) {
    const Instruction& branch = program.code[size_t(leaves)];
    const int target = target_of(branch, {Op::BRA, Op::CALL, Op::EXIT});
    if (target < 0 || branch.guard == PT || (leaves < end && begin <= target && target <= end)) return;
    for (int k = leaves - 1; k >= begin; k--) {
      const Instruction& i = program.code[size_t(k)];
      if (!compares_integers(i) || (i.op == Op::UISETP) != branch.guard_uniform) continue;
      if (i.operands[0].index != branch.guard && i.operands[1].index != branch.guard) continue;
      const auto upper = std::find(i.modifiers.begin(), i.modifiers.end(), "EX");
      if (upper != i.modifiers.end()) return;  // of a number of 64 bits
      at[size_t(k)].push_back(int(loops.size()));
      loops.push_back({begin, end, k});
      return;
    }
  }

  void saw(const Context& c, const Instruction& i) override {
    Counter::saw(c, i);
    if (c.warp.number || c.warp.block->rank || !c.lanes) return;
    for (int n : at[size_t(&i - program.code.data())]) {
      Loop& loop = loops[size_t(n)];
      const double apart = std::abs(value(c, i.operands[2]) - value(c, i.operands[3]));
      if (!loop.times++) loop.first = apart, loop.begun = counts.instructions;
      else if (apart >= loop.last) loop.nearer = false;
      loop.last = apart, loop.seen = counts.instructions;
    }
  }

  static double value(const Context& c, const Operand& o) {
    if (o.kind != Kind::Constant) return compared(c, o);
    const std::vector<u8>& bank = c.machine.banks[o.bank];
    i32 found = 0;
    if (o.offset >= 0 && size_t(o.offset) + 4 <= bank.size()) std::memcpy(&found, bank.data() + o.offset, 4);
    return found;
  }

  struct OfLoop {
    double at = INFINITY;  // instructions of the block at the loop's end
    bool reached = false;
  };

  // Instructions of the block at its end. 0 where no loop tells, where one around it has not gone round often enough,
  // or where another as long as it comes behind. Of several comparisons by which a loop is left the one counts that
  // comes true first.
  double end() const {
    std::map<std::pair<int, int>, OfLoop> all;
    for (const Loop& loop : loops) {
      OfLoop& of = all[{loop.begin, loop.end}];
      of.reached |= loop.times > 0;
      if (!loop.tells()) continue;
      const double each = (loop.seen - loop.begun) / (loop.first - loop.last);
      of.at = std::min(of.at, loop.seen + each * loop.last);
    }
    double found = 0;
    for (const auto& [loop, of] : all) {
      if (of.at == INFINITY) continue;
      for (const auto& [other, behind] : all) {
        if (behind.at != INFINITY || other == loop) continue;
        if (other.first <= loop.first && loop.second <= other.second) return 0;
        const bool long_too = 2 * (other.second - other.first) >= loop.second - loop.first;
        if (!behind.reached && long_too && other.first > loop.second) return 0;
      }
      found = std::max(found, of.at);
    }
    return found;
  }
};

}  // namespace

Counts count_block(const Program& program, const Launch& launch, const std::vector<Allocation>& allocations,
                   const std::vector<u8>* banks, u64 seed, u64 block, u64 limit, double& end) {
  Ending counter(program);
  u32 alike = launch.grid[0] * launch.grid[1] * launch.grid[2];
  counter.counts.complete = observe(program, launch, allocations, banks, seed, block, limit, alike, counter);
  end = counter.end();
  return counter.counts;
}

u64 count_lone_warp(const Program& program, const Launch& launch, const std::vector<Allocation>& allocations,
                    const std::vector<u8>* banks, u64 seed, u64 block, int warp, u64 limit) {
  struct : Observer {
    u64 seen = 0;
    void saw(const Context&, const Instruction&) override { seen++; }
    void began(const Completion&) override {}
  } observer;
  observe(program, launch, allocations, banks, seed, block, limit, 1, observer, warp);
  return observer.seen;
}

namespace {

struct FirstComparisons : Observer {
  const Program& program;
  const int at;
  std::vector<Compared> found;
  u64 seen = 0;

  FirstComparisons(const Program& of, int only) : program(of), at(only), found(only < 0 ? of.code.size() : 1) {}

  void saw(const Context& c, const Instruction& i) override {
    seen++;
    if (!c.lanes || !compares_integers(i)) return;
    const int index = int(&i - program.code.data());
    if (at >= 0 && index != at) return;
    Compared& first = found[at < 0 ? size_t(index) : 0];
    if (!std::isnan(first.after)) return;
    first = {compared(c, i.operands[2]), compared(c, i.operands[3]), double(seen)};
    if (at >= 0) throw LimitReached{};
  }

  void began(const Completion&) override {}
};

}  // namespace

std::vector<std::vector<Compared>> compared(const Program& program, const Launch& launch,
                                            const std::vector<Allocation>& allocations, const std::vector<u8>* banks,
                                            u64 seed, const std::vector<u64>& blocks, u64 limit, int at) {
  std::vector<std::vector<Compared>> found;
  for (u64 block : blocks) {
    FirstComparisons observer(program, at);
    observe(program, launch, allocations, banks, seed, block, limit, 1, observer);
    found.push_back(std::move(observer.found));
  }
  return found;
}

namespace {

constexpr u64 MOST_FOLLOWED = 1'000'000;  // warp instructions of clusters that are run for what they add to counters

struct Adding : Observer {
  std::map<u64, Added> added;
  u64 seen = 0;

  void saw(const Context& c, const Instruction&) override {
    seen++;
    if (c.access.atomic && again()) throw LimitReached{};
  }

  void began(const Completion&) override {}

  bool again() const {
    return std::any_of(added.begin(), added.end(), [](const auto& of) { return of.second.times > 1; });
  }
};

}  // namespace

bool adds_to_counters(const Program& program) {
  return std::any_of(program.code.begin(), program.code.end(), [](const Instruction& i) {
    return i.opcode.starts_with("ATOM.") || i.opcode.starts_with("ATOMG.");
  });
}

std::map<u64, u64> added_by_others(const Program& program, const Launch& launch,
                                   const std::vector<Allocation>& allocations, const std::vector<u8>* banks, u64 seed,
                                   u64 block, const std::vector<u64>& but) {
  u64 left = MOST_FOLLOWED;
  auto added_by = [&](u64 one, std::map<u64, Added>& added) {
    Adding observer;
    bool whole = observe(program, launch, allocations, banks, seed, one, left, 1, observer, -1, &observer.added);
    whole = whole && !observer.again();
    left -= std::min(left, observer.seen);
    added = std::move(observer.added);
    return whole && left;
  };
  std::map<u64, Added> own, theirs;
  if (!added_by(block, own) || own.empty()) return {};
  std::map<u64, u64> found;
  const u64 at[3] = {block % launch.grid[0], block / launch.grid[0] % launch.grid[1],
                     block / launch.grid[0] / launch.grid[1]};
  u64 apart = 1;
  for (int d = 0; d < 3; apart *= launch.grid[d++])
    for (i64 step : {-i64(launch.cluster[d]), i64(launch.cluster[d])})
      for (i64 to = i64(at[d]) + step; to >= 0 && to < i64(launch.grid[d]); to += step) {
        const u64 other = block + u64(to - i64(at[d])) * apart;
        if (!added_by(other, theirs)) return {};
        const bool timed = std::find(but.begin(), but.end(), other) != but.end();
        bool shares = false;
        for (const auto& [address, of] : theirs) {
          if (!own.contains(address)) continue;
          shares = true;
          if (!timed) found[address] += of.sum;
        }
        if (!shares) break;
      }
  return found;
}

}  // namespace sass
