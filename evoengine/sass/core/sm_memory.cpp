// What loads and stores cost an SM, and when their data are there.
#include "sm.h"

#include <algorithm>
#include <cmath>

namespace sass {

namespace {

constexpr double HEADER = 8;  // bytes that travel to the L2 beside the data of each line (GPGPU-Sim, WRITE_PACKET_SIZE)
// Sectors of a store that it does not fill.
int partial(const Access& access, const u64* sectors, int count) {
  if (__builtin_popcount(access.lanes) * access.bytes == count * SECTOR) return 0;
  int found = 0;
  for (int n = 0; n < count; n++) {
    int bytes = 0;
    for (u32 rest = access.lanes; rest; rest &= rest - 1)
      bytes += access.addresses[__builtin_ctz(rest)] >> 5 == sectors[n] ? access.bytes : 0;
    found += bytes < SECTOR;
  }
  return found;
}

constexpr int TAGS = 4;   // lines that the L1 looks up in a clock
constexpr int SLICE = 8;  // log2 of the bytes side by side that lie in one slice of the L2 (Accel-Sim, dramid@8)
constexpr int SECTOR_WORDS = 8;

}  // namespace

// The sectors of a warp's words in local memory: those of its threads lie beside each other, and go through the L1.
int Timing::local_sectors(const Slot& slot, const Access& access, u64* sectors) const {
  const u64 first = LOCAL_ADDRESSES + (u64(slot.age * 64 + slot.warp->number) << 24);
  Access words = access;
  words.bytes = 4;
  int count = 0;
  for (int k = 0; k < std::max(1, access.bytes / 4); k++) {
    for (u32 rest = access.lanes; rest; rest &= rest - 1) {
      int lane = __builtin_ctz(rest);
      words.addresses[lane] = first + (access.addresses[lane] / 4 + k) * 128 + lane * 4;
    }
    count += pieces(words, 5, sectors + count);
  }
  return count;
}

int Timing::allocation_at(u64 address) {
  const std::vector<Allocation>& all = memory.allocations;
  auto holds = [&](size_t n) {
    return n < all.size() && address >= all[n].address && address < all[n].address + all[n].bytes;
  };
  if (!holds(found)) {
    auto after =
        std::upper_bound(all.begin(), all.end(), address, [](u64 at, const Allocation& a) { return at < a.address; });
    found = after == all.begin() ? all.size() : after - 1 - all.begin();
    if (!holds(found)) found = all.size();  // local memory
  }
  return int(found);
}

// Clocks of an SM's share of the L2 for a sector. Lines that several SMs load lie near each of them; of those of one SM
// alone half lie behind the other partition.
double Timing::load_clocks(int allocation, bool tma) const {
  double alone = tma ? rates.l2_private_tma_bytes_per_clock : rates.l2_private_bytes_per_clock;
  double shared = size_t(allocation) < request.traffic.size() ? request.traffic[allocation].loads_shared : 0;
  return SECTOR * (shared / rates.l2_bytes_per_clock + (1 - shared) / alone);
}

// Clocks of an SM's share of the DRAM for what of the sectors just asked for has to come from there.
double Timing::dram_clocks(Sm& sm, int allocation, double sectors) {
  bool local = size_t(allocation) >= request.traffic.size();
  Asked& asked = sm.asked[allocation];
  double from_dram = local ? rates.local_from_dram : request.traffic[allocation].loads_from_dram;
  double due = std::fma(from_dram, asked.loaded, -asked.charged);
  if (due < 0.5 * sectors) return 0;
  // of a sector the DRAM gives its piece, one or two sectors, of a box the part that is due
  double charged = sectors > 1 ? std::min(due, sectors) : due < 1.5 ? 1 : 2;
  asked.charged += charged;
  return charged * SECTOR / rates.dram_bytes_per_clock;
}

// From a request on, without its turn: requests of all SMs meet at its banks the more often the busier it is.
double Timing::dram_latency() const {
  double use = now > 0 ? std::min(1.0, result.dram / now / double(chips.size())) : 0;
  return rates.dram_latency * (1 + rates.dram_loaded_delay * use * use);
}

// Whether the sectors just asked for are in flight from the DRAM, for this SM or for others that ask for the same at
// the same time.
bool Timing::misses_l2(Sm& sm, int allocation, double sectors) {
  bool local = size_t(allocation) >= request.traffic.size();
  Asked& asked = sm.asked[allocation];
  double share =
      local ? rates.local_from_dram : request.traffic[allocation].loads_from_dram * request.traffic[allocation].in_step;
  if (std::fma(std::min(1.0, share), asked.loaded, -asked.missed) < 0.5 * sectors) return false;
  asked.missed += sectors;
  return true;
}

// The DRAM writes back what the L2 holds while nothing is loaded.
void Timing::write_back(Sm& sm, double start) {
  double written = std::min(sm.unwritten, std::max(0.0, start - sm.dram));
  sm.unwritten -= written;
  sm.dram += written;
}

// Loads wait for an SM's share of the DRAM, and in turns for what is written back. SMs whose warps once had to wait for
// one another's loads do not ask at the same time again: each goes on when it was served. So a share that was idle for
// no longer than the longest wait so far is had later. Copies that run `ahead` of what needs them hide such waits, and
// leave SMs in step until their first blocks have ended.
void Timing::load_dram(Sm& sm, double start, double clocks, bool ahead) {
  write_back(sm, start);
  double turn = std::min(sm.unwritten, clocks);
  sm.unwritten -= turn;
  sm.dram = std::max(sm.dram, start - (ahead ? sm.adrift : sm.apart)) + clocks + turn * rates.dram_turn_cost;
  if (!ahead) sm.apart = std::max(sm.apart, sm.dram - start);
  result.dram += clocks;
}

// Whether the L2 holds so much that the store waits for the DRAM.
bool Timing::store_dram(Sm& sm, double start, double clocks) {
  write_back(sm, start);
  sm.unwritten += clocks;
  result.dram += clocks;
  double beyond = sm.unwritten - rates.l2_written_bytes / rates.dram_bytes_per_clock;
  if (beyond <= 0) return false;
  sm.unwritten -= beyond;
  sm.dram = std::max(sm.dram, start) + beyond;
  return true;
}

// When all of the sectors are there. What misses the L1 passes the SM's share of the L2 and, for a part, of the DRAM.
double Timing::fetch(Sm& sm, const u64* sectors, int count, double start, bool cached, bool ahead) {
  double latest = start;
  u64 line = ~0ull;
  double dram = 0;  // clocks for the sector: the first of a line may pay for one before it, too
  bool missed = false;
  for (int n = 0; n < count; n++) {
    int allocation = allocation_at(sectors[n] << 5);
    sm.asked[allocation].loaded++;
    double there = cached ? sm.l1->find(sectors[n]) : -1;
    if (there >= 0) {
      latest = std::max(latest, there);
      continue;
    }
    double l2 = load_clocks(allocation, false);
    sm.misses_l2 = sm.l2 = std::max(sm.l2, ahead ? start - rates.l2_burst : start) + l2;
    result.l2 += l2;
    double arrives = std::max(sm.l2, start) + rates.l2_latency;
    if (sectors[n] >> 2 != line) {
      line = sectors[n] >> 2;
      dram = dram_clocks(sm, allocation, 1);
      missed = misses_l2(sm, allocation, 1);
    } else {
      if (dram) dram = SECTOR / rates.dram_bytes_per_clock, sm.asked[allocation].charged++;
      if (missed) sm.asked[allocation].missed++;
    }
    if (dram) {
      load_dram(sm, start, dram, ahead);
      sm.misses_dram = sm.dram;
    }
    if (dram || missed) arrives = std::max(arrives, std::max(dram ? sm.dram : start, start) + dram_latency());
    if (cached) sm.l1->fetched(sectors[n], arrives);
    latest = std::max(latest, arrives);
  }
  return latest;
}

// When the L2 has taken the sectors. An SM sends one a clock, or a part of one every two clocks. Where all SMs store at
// once, the L2 takes them more slowly; SMs that had to wait for one another then do not store at the same time again,
// so a share that was idle for no longer than the longest wait so far is had later, as of the DRAM.
double Timing::store(Sm& sm, const Access& access, const u64* sectors, int count, double start, bool local) {
  int lines = 0;
  for (int n = 0; n < count; n++) lines += n == 0 || sectors[n] >> 2 != sectors[n - 1] >> 2;
  int parts = local ? 0 : partial(access, sectors, count);
  double l2 = (count * SECTOR + lines * HEADER) / rates.l2_private_bytes_per_clock;
  l2 = std::max(l2, (count - parts) * rates.l2_store_clocks + parts * rates.l2_partial_clocks);
  sm.sent = std::max(sm.sent, start) + count + parts;
  sm.l2_in = std::max(sm.l2_in, start - sm.apart_in) + l2;
  sm.apart_in = std::max(sm.apart_in, sm.l2_in - start);
  double taken = sm.misses_l2 = std::max(sm.sent, sm.l2_in);
  result.l2_in += l2;
  int allocation = local ? int(request.traffic.size()) : allocation_at(sectors[0] << 5);
  bool known = size_t(allocation) < request.traffic.size();
  double share = known ? request.traffic[allocation].stores_to_dram : rates.local_from_dram;
  double dram = share * count * SECTOR / rates.dram_bytes_per_clock;
  if (store_dram(sm, start, dram)) sm.misses_dram = sm.dram;
  if (!local) result.stored += count;
  return taken;
}

// When a slice of the L2 has combined a sector with what comes for it, `turns` times, for all SMs that change the
// sector. SMs that met there once do not meet there again: as of the DRAM, time for which a slice was idle is had
// later.
double Timing::combine(Sm& sm, int allocation, u64 sector, double turns, double start) {
  double sharers = size_t(allocation) < request.traffic.size() ? request.traffic[allocation].sharers : 1;
  double& until = sm.combined[sector >> (SLICE - 5)];
  until = std::max(until, start - sm.met) + turns * sharers * rates.l2_atomic_clocks;
  sm.met = std::max(sm.met, until - start);
  return until;
}

// When the L2 has done the atomics. It does the words of a sector together, and one that several lanes change once for
// each of them. What had to come from the DRAM goes back there.
double Timing::change(Sm& sm, const Access& access, const u64* sectors, int count, double start) {
  u8 lanes[4 * LANES][SECTOR_WORDS] = {};
  for (u32 rest = access.lanes; rest; rest &= rest - 1)
    for (int k = 0; k < std::max(1, access.bytes / 4); k++) {
      u64 word = access.addresses[__builtin_ctz(rest)] / 4 + k;
      int n = int(std::find(sectors, sectors + count, word / SECTOR_WORDS) - sectors);
      lanes[n][word % SECTOR_WORDS]++;
    }
  double turns = 0, done = start;
  for (int n = 0; n < count; n++) {
    int of_sector = *std::max_element(lanes[n], lanes[n] + SECTOR_WORDS);
    turns += of_sector;
    done = std::max(done, combine(sm, allocation_at(sectors[n] << 5), sectors[n], of_sector, start));
  }
  double l2 = turns * std::max(rates.l2_reduce_clocks, (SECTOR + HEADER) / rates.l2_private_bytes_per_clock);
  sm.l2_in = std::max(sm.l2_in, start) + l2;
  result.l2_in += l2;
  int allocation = allocation_at(sectors[0] << 5);
  double share = size_t(allocation) < request.traffic.size() ? request.traffic[allocation].loads_from_dram : 0;
  if (store_dram(sm, start, share * count * SECTOR / rates.dram_bytes_per_clock)) sm.misses_dram = sm.dram;
  return sm.misses_l2 = std::max(done, sm.l2_in);
}

// A block has not ended before the L2 has told of what it stored.
void Timing::settle(const Slot& slot, double at) {
  double& last = settled[slot.warp->block->cluster];
  last = std::max(last, at);
}

void Timing::touch_shared(Sm& sm, const Access& access, double start, double& done, double& read) {
  double wavefront = access.matrix ? rates.matrix_wavefront_clocks : rates.wavefront_clocks;
  int count = wavefronts(access);
  double takes = std::max(rates.sm_memory_interval, count * wavefront);
  sm.lsu = start + takes;
  sm.port = std::max(sm.port, start) + takes;
  result.shared += takes;
  u32 of_phase[4];
  int later = access.matrix ? count - 1 : count + phases(access, of_phase) - 2;
  done = sm.lsu + rates.lds_latency + later * rates.conflict_latency;
  read = sm.lsu + 4;
  if (!access.afar) return;
  double bytes = double(__builtin_popcount(access.lanes)) * access.bytes;
  sm.exchange = std::max(sm.exchange, start) + bytes / rates.remote_bytes_per_clock;
  done = std::max(done, sm.exchange + rates.remote_latency);
}

void Timing::touch(Sm& sm, Slot& slot, const Access& access, double& done, double& read, bool& far) {
  Part& part = sm.parts[slot.part];
  int bytes_of_lane = access.matrix ? 4 * (__builtin_popcount(access.lanes) / 8) : access.bytes;
  part.memory = std::max(part.memory, now + rates.wide_interval * bytes_of_lane / 16);
  double start = std::max(now + rates.memory_interval, sm.lsu);
  if (access.space == Access::Space::Constant) {
    done = now + rates.constant_latency;
    read = now + 10;
    return;
  }
  if (access.space == Access::Space::Shared) return touch_shared(sm, access, start, done, read);
  bool local = access.space == Access::Space::Local;
  u64 sectors[4 * LANES];
  int sector_count = local ? local_sectors(slot, access, sectors) : pieces(access, 5, sectors);
  int line_count = local ? (sector_count + 3) / 4 : lines(access), passes = local ? line_count : wavefronts(access);
  double bytes = double(__builtin_popcount(access.lanes)) * access.bytes;
  double takes = std::max({rates.sm_memory_interval, std::ceil(double(line_count) / TAGS), double(passes),
                           std::ceil(bytes / rates.l1_bytes_per_clock)});
  if (access.asynchronous) takes += access.torn * rates.torn_copy_clocks;
  sm.lsu = start + takes;
  sm.port = std::max(sm.port, start) + takes;
  result.shared += takes;
  read = sm.lsu + 4;
  far = true;
  if (access.store && !access.atomic) {
    double taken = store(sm, access, sectors, sector_count, sm.lsu, local);
    if (!local) settle(slot, taken + rates.l2_latency);
    done = local ? sm.lsu + rates.l1_latency : taken;
    for (int n = 0; local && n < sector_count; n++) sm.l1->fetched(sectors[n], sm.lsu);
  } else {
    done = std::max(sm.lsu + rates.l1_latency,
                    fetch(sm, sectors, sector_count, start, access.cached && !access.atomic, access.asynchronous));
    if (access.asynchronous) {
      double again = access.torn * rates.torn_copy_sectors * SECTOR / rates.l2_private_bytes_per_clock;
      sm.misses_l2 = sm.l2 = std::max(sm.l2, start - rates.l2_burst) + again;
      result.l2 += again;
      done = std::max(done, sm.l2 + rates.l2_latency) + rates.copy_latency;
    }
    if (access.atomic) {
      done = std::max(done, change(sm, access, sectors, sector_count, start) + rates.l2_latency);
      settle(slot, done);
    }
  }
}

}  // namespace sass
