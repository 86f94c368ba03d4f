// Runs blocks for their results: the seed draws the turns of warps, the blocks that run at once, and when asynchronous
// work lands.
//
// Hardware promises nothing of these. Work lands at once in some runs, as late as it may in others, and anywhere
// between in the rest. Clusters that may tell each other something lag at drawn places until the others have come as
// far as they can. Order finds races whatever was drawn; what it cannot see, such as how atomics follow one another,
// may show in the results.
#include <algorithm>
#include <atomic>
#include <thread>

#include "sparse.h"
#include "turns.h"

namespace sass {

std::atomic<u64> clusters_ended{0};

constexpr size_t LONGEST_NAME = 120;  // of a kernel in a message: those of templates fill pages

std::string place(const Functional& machine, const Warp& w) {
  const Block& b = *w.block;
  const Instruction& i = machine.program->code[w.pc];
  char text[160];
  snprintf(text, sizeof text, ", block (%u, %u, %u), warp %d, at 0x%x: ", b.index[0], b.index[1], b.index[2], w.number,
           i.address);
  std::string name = machine.program->entry;
  if (name.size() > LONGEST_NAME) name = name.substr(0, LONGEST_NAME) + "…";
  return "kernel " + name + text + i.text;
}

namespace {

constexpr u32 MOST_RESIDENT = 8;  // clusters that run at once from the start
constexpr u32 MANY = 72;          // clusters that run at once in some launches of enough: twice a warp and more
constexpr u32 MOST_WARPS = 2048;  // of them
constexpr u32 MOST_LAG = 4096;    // turns of each warp
constexpr u64 IDLE_UNTIL_ONE_GOES_ON = 16;  // turns of each warp without an act, after which one that lags goes on
constexpr u64 IDLE_TURNS = 64;              // of each warp without an act, after which one more cluster begins
constexpr u64 PATIENCE = 32'768;  // instructions of each warp without an act, after which all of a GPU wait in vain
constexpr u64 IDLE_LIMIT = 20'000'000;  // instructions without an act by anybody, after which all wait in vain

// What the largest GPU of each architecture has (CUDA C++ Programming Guide, "Compute Capabilities"; SMs by NVIDIA's
// data sheets): SMs, and of each of them threads, blocks and bytes of shared memory.
struct Largest {
  u32 arch, sms, threads, blocks, shared;
};
constexpr Largest LARGEST[] = {{75, 72, 1024, 16, 64 << 10},   {80, 108, 2048, 32, 164 << 10},
                               {86, 84, 1536, 16, 100 << 10},  {89, 142, 1536, 24, 100 << 10},
                               {90, 132, 2048, 32, 228 << 10}, {120, 188, 1536, 24, 100 << 10}};
constexpr u32 REGISTERS = 65536;  // of an SM

// How many clusters of the launch a GPU of its architecture holds at once, at most.
size_t most_resident(const Launch& l) {
  const Largest* of = LARGEST;
  for (const Largest& one : LARGEST)
    if (one.arch <= l.arch) of = &one;
  const u32 warps = (l.threads[0] * l.threads[1] * l.threads[2] + LANES - 1) / LANES;
  u32 blocks = std::min(of->blocks, of->threads / (warps * LANES));
  if (l.registers) blocks = std::min(blocks, REGISTERS / (l.registers * warps * LANES));
  if (l.shared_bytes) blocks = std::min(blocks, of->shared / (l.shared_bytes + l.reserved_shared));
  return std::max<size_t>(1, size_t(of->sms) * blocks / (l.cluster[0] * l.cluster[1] * l.cluster[2]));
}

Resident admit(Functional& machine, World* world, u64 first, u64 limit) {
  Resident r;
  r.cluster = make_cluster(machine, first);
  r.left = limit * r.cluster->blocks.size();
  for (auto& block : r.cluster->blocks)
    for (Warp& w : block->warps) {
      if (machine.lone >= 0 && int(w.number) != machine.lone) {
        w.alive = 0;
        continue;
      }
      r.warps.push_back(&w);
      w.strict = world != nullptr;
      w.draw = u32(machine.random.next());
    }
  if (world && world->races != Races::None) {
    r.order = std::make_unique<Order>(*world, *r.cluster);
    r.cluster->order = r.order.get();
  }
  return r;
}

[[noreturn]] void hang(const Functional& machine, const std::vector<Resident>& residents, bool polled) {
  size_t waiting = 0;
  for (const Resident& r : residents) waiting += r.warps.size();
  const std::string at = place(machine, *residents[0].warps[0]) + ": ";
  if (machine.observer && polled)
    throw Fault{at + std::to_string(IDLE_LIMIT / 1'000'000) +
                    " million instructions without a store or an arrival: it waits for " +
                    "another block, and blocks are predicted one at a time, or its work is too long to be counted",
                true};
  throw Fault{at + std::to_string(waiting) + " warps wait for what never comes", true};
}

[[noreturn]] void hang_beside_others(const Functional& machine, const std::vector<Resident>& residents) {
  const Launch& l = machine.launch;
  const size_t blocks = residents.size() * l.cluster[0] * l.cluster[1] * l.cluster[2];
  throw Fault{place(machine, *residents[0].warps[0]) + ": " + std::to_string(blocks) +
                  " blocks wait for others, which cannot begin: no GPU of sm_" + std::to_string(l.arch) +
                  " holds more of them at once",
              true};
}

void add_visits(Functional& machine, const Resident& r, std::vector<Visited>& to) {
  const u32(&grid)[3] = machine.launch.grid;
  for (const auto& [site, count] : machine.counted.counts) {
    const Block& b = *site.warp->block;
    if (b.cluster != r.cluster.get()) continue;
    const u64 block = (u64(b.index[2]) * grid[1] + b.index[1]) * grid[0] + b.index[0];
    to.push_back({block, u32(site.warp->number), u8(site.kind), site.number, count.all, count.came_true});
  }
  std::erase_if(machine.counted.counts,
                [&](const auto& item) { return item.first.warp->block->cluster == r.cluster.get(); });
}

// Where clusters lag: at every place in launches of many and some others, else at every second.
void draw_lags(Functional& machine) {
  const std::vector<Instruction>& code = machine.program->code;
  const bool all = !machine.lag_often || machine.random.below(2);
  machine.lags_at.assign(code.size(), 0);
  for (size_t n = 0; n < code.size(); n++)
    if ((code[n].strength == GPU_STRONG || code[n].changes_global) && (all || machine.random.below(2)))
      machine.lags_at[n] = u8(1 + machine.random.below(1 + machine.random.below(LATEST_COMER)));
}

// How many clusters run at once: few, or more than a warp looks back at.
size_t draw_room(Functional& machine, size_t clusters) {
  const Launch& l = machine.launch;
  const u32 warps =
      l.cluster[0] * l.cluster[1] * l.cluster[2] * ((l.threads[0] * l.threads[1] * l.threads[2] + LANES - 1) / LANES);
  const size_t few = 2 + machine.random.below(MOST_RESIDENT - 1), many = std::min(MANY, MOST_WARPS / warps);
  return clusters > LANES && machine.random.below(4) ? std::max(few, many) : few;
}

bool let_one_go_on(Functional& machine, std::vector<Resident>& residents) {
  const size_t count = residents.size(), from = count ? machine.random.below(u32(count)) : 0;
  for (size_t n = 0; n < count; n++)
    if (Resident& r = residents[(from + n) % count]; r.lags) return r.lags = false, true;
  return false;
}

// Runs clusters, several at a time where blocks may tell each other something. Where all that run are at a loss, one
// that lags goes on; where none does, more begin: another block may be what they wait for.
void run_clusters(Functional& machine, World* world, const std::vector<u64>& firsts, u64 limit,
                  std::vector<Visited>* visited) {
  std::vector<Resident> residents;
  const size_t most = world ? most_resident(machine.launch) : firsts.size();
  size_t begun = 0, room = 1;
  if (world && world->talks && firsts.size() > 1) {
    room = std::min(draw_room(machine, firsts.size()), most);
    machine.lag_often = firsts.size() <= LANES;  // each that goes on later waits beside all others
    draw_lags(machine);
  }
  u64 acts = 0, idle = 0, rounds = 0;  // idle: turns of warps since the last act; rounds: since one that lagged went on
  while (begun < firsts.size() || !residents.empty()) {
    size_t running =
        size_t(std::count_if(residents.begin(), residents.end(), [](const Resident& r) { return !r.lags; }));
    for (; running < room && begun < firsts.size(); running++)
      residents.push_back(admit(machine, world, firsts[begun++], limit));
    bool moved = false;
    u64 warps = 0;
    for (Resident& r : residents) {
      if (r.lags) continue;
      warps += r.warps.size();
      moved |= run_round(machine, r);
    }
    for (Resident& r : residents)
      if (r.warps.empty() && visited) add_visits(machine, r, *visited);
    clusters_ended += std::erase_if(residents, [](const Resident& r) { return r.warps.empty(); });
    idle = machine.acts == acts ? idle + warps : 0;
    acts = machine.acts;
    if ((!moved || idle >= IDLE_UNTIL_ONE_GOES_ON * warps || ++rounds > MOST_LAG) &&
        let_one_go_on(machine, residents)) {
      idle = rounds = 0;
      continue;
    }
    if (moved && idle < IDLE_TURNS * warps) continue;
    if (residents.empty()) continue;
    const bool in_vain =
        !moved || idle * LONGEST_TURN / 2 > std::max(IDLE_LIMIT, begun < firsts.size() ? PATIENCE * warps : 0);
    if (begun < firsts.size() && residents.size() < most) {
      room = std::min(most, residents.size() + 1 + residents.size() / 8);
      idle = 0;
    } else if (in_vain && begun < firsts.size()) {
      hang_beside_others(machine, residents);
    } else if (in_vain) {
      hang(machine, residents, moved);
    }
  }
}

void prepare(Functional& machine, const Program& program, const Launch& launch, std::vector<Allocation>&& allocations,
             const std::vector<u8>* banks, u64 seed) {
  machine.program = &program;
  machine.launch = launch;
  machine.memory.allocations = std::move(allocations);
  std::copy(banks, banks + 8, machine.banks);
  machine.seed = seed;
  machine.draw_from(seed);
}

// Marks in `written` the bytes that the launch has stored to.
void mark_written(const Allocation& a) {
  const Shadow& shadow = *a.shadow;
  for (size_t word = 0; word < shadow.writer.size(); word++)
    if (shadow.writer[word]) a.written[word] |= u8(shadow.writer[word] & 15);
  for (const auto& [word, entries] : shadow.more_writers)
    for (u32 entry : entries) a.written[word] |= u8(entry & 15);
}

// Appends what one block touched of sparse allocations; of tracked ones the marks follow upon the contents.
void write_trace(std::vector<u8>& to, u64 block, bool given_up, const std::vector<Allocation>& allocations) {
  auto put = [&](const auto& value) {
    const u8* bytes = reinterpret_cast<const u8*>(&value);
    to.insert(to.end(), bytes, bytes + sizeof value);
  };
  u32 count = 0;
  for (const Allocation& a : allocations) count += a.sparse ? u32(a.sparse->pages.size()) : 0;
  put(block), put(u32(given_up)), put(count);
  for (const Allocation& a : allocations) {
    if (!a.sparse) continue;
    for (const auto& [number, page] : a.sparse->pages) {
      const SparseKind kind = a.sparse->kind;
      const bool told =
          a.sparse->tracked || kind == SparseKind::Output || kind == SparseKind::Zeroed || kind == SparseKind::InOut;
      const u32 size = told ? a.sparse->size_of(number) : 0;
      put(u64(number * PAGE)), put(a.sparse->argument), put(size);
      to.insert(to.end(), page.get(), page.get() + size);
      if (a.sparse->tracked) to.insert(to.end(), page.get() + PAGE, page.get() + PAGE + size);
    }
  }
}

}  // namespace

void require_declared_barriers(const Program& program, const Launch& launch) {
  auto fault = [](const Instruction& i, const std::string& uses, u32 declared, const char* what) {
    char at[32];
    snprintf(at, sizeof at, "at 0x%x: ", i.address);
    throw Fault{at + i.text + uses + std::to_string(declared) + what};
  };
  u32 initialised = 0;
  for (const Instruction& i : program.code) {
    const bool named = i.op == Op::BAR && !i.operands.empty() && i.operands[0].kind == Operand::Kind::Immediate;
    if (named && i.operands[0].immediate >= launch.barriers)
      fault(i, " names barrier " + std::to_string(i.operands[0].immediate) + ", and the binary declares ",
            launch.barriers, " barriers");
    if (i.op == Op::SYNCS && has(i, "EXCH") && ++initialised > launch.mbarriers)
      fault(i, " initialises an mbarrier beyond the ", launch.mbarriers, " that the binary declares");
  }
}

bool observe(const Program& program, const Launch& launch, std::vector<Allocation> allocations,
             const std::vector<u8>* banks, u64 seed, u64 block, u64 limit, u32 alike, Observer& observer, int lone,
             std::map<u64, Added>* added) {
  Functional machine;
  prepare(machine, program, launch, std::move(allocations), banks, seed);
  machine.landing = Landing::Early;
  machine.observer = &observer;
  machine.lone = lone;
  machine.alike = alike;
  machine.added = added;
  machine.products_left = MODEL_PRODUCTS;
  try {
    run_clusters(machine, nullptr, {block}, limit, nullptr);
    return true;
  } catch (const LimitReached&) {
    return false;
  }
}

namespace {

// Several clusters one after the other, with records of their own of who touched what.
struct Worker {
  Functional machine;
  World world;
  std::deque<Shadow> shadows;
  std::vector<Visited> visited;

  Worker(const Program& program, const Launch& launch, std::vector<Allocation> allocations,
         const std::vector<u8>* banks, u64 seed, Races races)
      : world(program, launch) {
    prepare(machine, program, launch, std::move(allocations), banks, seed);
    machine.landing = Landing(machine.random.below(3));
    machine.visits = &machine.counted;
    world.races = races;
    for (Allocation& a : machine.memory.allocations) {
      if (races == Races::None || !a.writable || a.period != a.bytes) continue;
      a.shadow = &shadows.emplace_back();
      a.shadow->writer.assign((a.bytes + 3) / 4, 0);
    }
  }

  Ran ran(std::string printed) {
    for (const Allocation& a : machine.memory.allocations)
      if (a.shadow && a.written) mark_written(a);
    return {std::move(visited), std::move(printed)};
  }
};

// The bytes of each word that a worker has written, and those that it has read since; see Shadow.
void add_touched(const Shadow& shadow, std::vector<u8>& written, std::vector<u8>& read) {
  for (size_t n = 0; n < shadow.writer.size(); n++) written[n] = shadow.writer[n] >> 4 ? shadow.writer[n] & 15 : 0;
  for (size_t n = 0; n < shadow.reader.size(); n++) read[n] = shadow.reader[n] >> 4 ? shadow.reader[n] & 15 : 0;
  for (const auto& [word, entries] : shadow.more_writers)
    for (u32 entry : entries) written[word] |= u8(entry & 15);
  for (const auto& [word, entries] : shadow.more_readers)
    for (u32 entry : entries) read[word] |= u8(entry & 15);
}

// Whether clusters of two workers touched the same bytes, one of them by a write. Blocks that cannot tell each other
// anything race then, unless both stored the same.
bool conflict(const std::deque<Worker>& workers) {
  for (size_t a = 0; a < workers[0].shadows.size(); a++) {
    const size_t words = workers[0].shadows[a].writer.size();
    std::vector<u8> all_written(words), all_read(words), written(words), read(words);
    for (const Worker& worker : workers) {
      std::fill(read.begin(), read.end(), u8(0));
      add_touched(worker.shadows[a], written, read);
      u8 both = 0;
      for (size_t n = 0; n < words; n++) {
        both |= u8((written[n] & (all_written[n] | all_read[n])) | (read[n] & all_written[n]));
        all_written[n] |= written[n];
        all_read[n] |= read[n];
      }
      if (both) return true;
    }
  }
  return false;
}

constexpr size_t CHUNKS = 64;  // of the clusters, each with draws of its own, whoever runs it

// Runs clusters that cannot tell each other anything on several threads. Each chunk is run as if it were alone, so that
// results do not depend on how many threads there are.
Ran run_in_parallel(const Program& program, const Launch& launch, const std::vector<Allocation>& allocations,
                    const std::vector<u8>* banks, u64 seed, const std::vector<u64>& clusters, u64 limit, Races races,
                    size_t threads) {
  const size_t chunks = std::min(CHUNKS, clusters.size());
  std::deque<Worker> workers;
  for (size_t n = 0; n < threads; n++) workers.emplace_back(program, launch, allocations, banks, seed, races);
  std::atomic<size_t> next{threads}, failed{chunks};  // chunks; the first that failed, behind which none matters
  std::vector<std::string> printed(chunks);
  std::vector<Fault> faults(chunks);
  // Each thread begins with a chunk of its own, so that every thread takes part however late it starts.
  auto work = [&](Worker& worker, size_t own) {
    for (size_t chunk = own; chunk < chunks; chunk = next++) {
      if (chunk > failed) continue;
      worker.machine.draw_from(seed + chunk * 0x9e3779b97f4a7c15ull);
      worker.machine.landing = Landing(worker.machine.random.below(3));
      worker.machine.printed.clear();
      try {
        run_clusters(worker.machine, &worker.world,
                     {clusters.begin() + long(chunk * clusters.size() / chunks),
                      clusters.begin() + long((chunk + 1) * clusters.size() / chunks)},
                     limit, &worker.visited);
      } catch (const Fault& fault) {
        faults[chunk] = fault;
        for (size_t first = failed; chunk < first && !failed.compare_exchange_weak(first, chunk);) {
        }
      } catch (const std::exception& error) {
        faults[chunk] = Fault{std::string("the executor failed: ") + error.what()};
        failed = 0;
        next = chunks;
      }
      printed[chunk] = std::move(worker.machine.printed);
    }
  };
  std::vector<std::thread> others;
  for (size_t n = 1; n < threads; n++) others.emplace_back([&, n] { work(workers[n], n); });
  work(workers[0], 0);
  for (std::thread& other : others) other.join();
  if (failed < chunks)
    for (const Fault& fault : faults)
      if (!fault.message.empty()) throw Fault{fault.message, fault.hung, fault.race, true};
  if (races != Races::None && conflict(workers))
    throw Fault{"blocks touch the same memory, one of them by a write", false, true, true};
  Ran all;
  for (const std::string& text : printed) all.printed += text;
  for (Worker& worker : workers) {
    Ran one = worker.ran("");
    all.visited.insert(all.visited.end(), one.visited.begin(), one.visited.end());
  }
  return all;
}

constexpr u64 MOST_SHADOWED = 1ull << 32;  // bytes of memory, times threads, of which accesses are recorded

// How many threads are of use: one for blocks that may tell each other something, which must run side by side.
size_t useful_threads(const World& world, const std::vector<Allocation>& allocations, size_t clusters, u32 threads) {
  u64 shadowed = 1;
  for (const Allocation& a : allocations) shadowed += a.writable && a.period == a.bytes ? a.bytes : 0;
  if (world.talks || clusters < 4) return 1;
  return size_t(std::clamp<u64>(MOST_SHADOWED / shadowed, 1, std::min<u64>(threads, clusters / 2)));
}

}  // namespace

Ran run(const Program& program, const Launch& launch, std::vector<Allocation> allocations, const std::vector<u8>* banks,
        u64 seed, std::vector<u64> clusters, u64 limit, Races races, u32 threads) {
  clusters_ended = 0;
  if (threads > 1) {
    const size_t useful = useful_threads(World(program, launch), allocations, clusters.size(), threads);
    if (useful > 1) return run_in_parallel(program, launch, allocations, banks, seed, clusters, limit, races, useful);
  }
  Worker worker(program, launch, std::move(allocations), banks, seed, races);
  Functional& machine = worker.machine;
  const bool all_begin =
      clusters.size() <= most_resident(launch);  // others begin in their order, as programs build on it
  if (worker.world.talks && all_begin && (clusters.size() <= LANES || machine.random.below(2)))
    for (size_t n = clusters.size(); n > 1; n--) std::swap(clusters[n - 1], clusters[machine.random.below(u32(n))]);
  run_clusters(machine, &worker.world, clusters, limit, &worker.visited);
  return worker.ran(std::move(machine.printed));
}

std::vector<u8> run_blocks(const Program& program, const Launch& launch, const std::vector<Allocation>& allocations,
                           const std::vector<u8>* banks, u64 seed, const std::vector<ChosenBlock>& blocks,
                           size_t together, const std::vector<HeldPage>& held, u64 limit) {
  std::vector<u8> traces;
  for (size_t n = 0; n < blocks.size(); n++) {
    const ChosenBlock& block = blocks[n];
    Functional machine;
    prepare(machine, program, launch, std::vector<Allocation>(allocations), banks, seed + block.number);
    machine.landing = Landing(machine.random.below(3));
    for (Allocation& a : machine.memory.allocations) {
      if (!a.sparse || n % together) continue;
      a.sparse->pages.clear();
      a.sparse->last = ~0ull;
      a.sparse->pool->touched = 0;
      a.sparse->pool->limit = block.input_limit;
      for (const HeldPage& page : held)
        if (page.argument == a.sparse->argument) a.sparse->hold(page.offset, page.contents, page.marks, page.bytes);
    }
    World world(program, launch);
    bool given_up = false;
    try {
      run_clusters(machine, &world, {block.number}, limit, nullptr);
    } catch (const GivenUp&) {
      given_up = true;
      n += together - 1 - n % together;
    }
    if ((n + 1) % together == 0) write_trace(traces, block.number, given_up, machine.memory.allocations);
  }
  return traces;
}

}  // namespace sass
