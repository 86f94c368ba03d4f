// What loads, stores and asynchronous work cost an SM, and when they land.
#include "sm.h"

#include <algorithm>
#include <cmath>

namespace sass {

// ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────

// When all of the sectors are there. What misses the L1 passes the SM's share of the L2 and, for a part, of the DRAM.
double Timing::fetch(Sm& sm, const u64* sectors, int count, double start, bool cached) {
  double latest = start;
  for (int n = 0; n < count; n++) {
    sm.asked++;
    double there = cached ? sm.l1->find(sectors[n]) : -1;
    if (there >= 0) {
      latest = std::max(latest, there);
      continue;
    }
    sm.l2 = std::max(sm.l2, start) + 32 / rates.l2_bytes_per_clock;
    result.l2 += 32 / rates.l2_bytes_per_clock;
    double arrives = sm.l2 + rates.l2_latency;
    // the share is one of all requests, and only those that miss the L1 come here
    double share = std::min(1.0, request.dram_share * sm.asked / ++sm.missed);
    sm.dram_due += share;
    sm.dram = std::max(sm.dram, start) + share * 32 / rates.dram_bytes_per_clock;
    result.dram += share * 32 / rates.dram_bytes_per_clock;
    if (sm.dram_due >= 1) {
      sm.dram_due -= 1;
      arrives = std::max(arrives, sm.dram + rates.dram_latency);
    }
    sm.misses_l2 = sm.l2;
    sm.misses_dram = sm.dram;
    if (cached) sm.l1->fetched(sectors[n], arrives);
    latest = std::max(latest, arrives);
  }
  return latest;
}

void Timing::touch(Sm& sm, Slot& slot, const Access& access, double& done, double& read, bool& far) {
  double start = std::max(now + rates.memory_interval, sm.lsu);
  if (access.space == Access::Space::Constant) {
    done = now + rates.constant_latency;
    read = now + 10;
    return;
  }
  if (access.space == Access::Space::Shared) {
    double wavefront = access.matrix ? rates.matrix_wavefront_clocks : rates.wavefront_clocks;
    double takes = std::max(rates.sm_memory_interval, wavefronts(access) * wavefront);
    sm.lsu = start + takes;
    result.shared += takes;
    done = sm.lsu + rates.lds_latency;
    read = sm.lsu + 4;
    return;
  }
  Access copy;
  const Access* own = &access;
  if (access.space == Access::Space::Local) {  // threads' words lie beside each other
    copy = access;
    for (u32 rest = access.lanes; rest; rest &= rest - 1) {
      int lane = __builtin_ctz(rest);
      copy.addresses[lane] = LOCAL_ADDRESSES + (u64(slot.age * 64 + slot.warp->number) << 24) + access.addresses[lane] / 4 * 128 + lane * 4;
    }
    own = &copy;
  }
  u64 sectors[4 * LANES];
  u64 lines[4 * LANES];
  int line_count = pieces(*own, 7, lines), sector_count = pieces(*own, 5, sectors);
  double bytes = double(__builtin_popcount(access.lanes)) * access.bytes;
  double takes = std::max({rates.sm_memory_interval, double(line_count), std::ceil(bytes / rates.l1_bytes_per_clock)});
  sm.lsu = start + takes;
  result.shared += takes;
  read = sm.lsu + 4;
  far = true;
  if (access.store && access.space == Access::Space::Local) {
    for (int n = 0; n < sector_count; n++) sm.l1->fetched(sectors[n], sm.lsu);
    sm.misses_l2 = sm.l2 = std::max(sm.l2, start) + sector_count * 32 / rates.l2_bytes_per_clock;
    done = sm.lsu + rates.l1_latency;
  } else if (access.store && !access.atomic) {
    double clocks = sector_count * 32 / rates.l2_bytes_per_clock, share = request.dram_share * sector_count * 32 / rates.dram_bytes_per_clock;
    sm.misses_l2 = sm.l2 = std::max(sm.l2, sm.lsu) + clocks;
    sm.misses_dram = sm.dram = std::max(sm.dram, sm.lsu) + share;
    result.l2 += clocks;
    result.dram += share;
    done = sm.l2;
  } else {
    done = std::max(sm.lsu + rates.l1_latency, fetch(sm, sectors, sector_count, start, access.cached && !access.atomic));
  }
}

// ── asynchronous work ───────────────────────────────────────────────────────────────────────────────────────────────

void Timing::begin(Completion&& work) {
  Slot& slot = *running;
  Sm& sm = chips[slot.sm];
  Part& part = sm.parts[slot.part];
  double at = now, read;
  bool far = false;
  switch (work.queue) {
    case Completion::Queue::Copy:
      touch(sm, slot, work.access, at, read, far);
      break;
    case Completion::Queue::TensorLoad: {
      double clocks = work.bytes / rates.tma_bytes_per_clock;
      double l2 = double(work.bytes) / work.destinations / rates.l2_bytes_per_clock;
      sm.tma = std::max(sm.tma, now) + std::max(clocks, l2);
      sm.l2 = std::max(sm.l2, now) + l2;
      result.l2 += l2;
      double share = request.dram_share * work.bytes / work.destinations / rates.dram_bytes_per_clock;
      sm.dram = std::max(sm.dram, now) + share;
      result.dram += share;
      at = std::max({sm.tma, sm.l2, sm.dram}) + rates.tma_latency;
      break;
    }
    case Completion::Queue::TensorStore: {
      double l2 = work.bytes / rates.l2_bytes_per_clock;
      sm.tma = std::max(sm.tma, now) + l2;
      sm.l2 = std::max(sm.l2, now) + l2;
      result.l2 += l2;
      double share = request.dram_share * work.bytes / rates.dram_bytes_per_clock;
      sm.dram = std::max(sm.dram, now) + share;
      result.dram += share;
      at = sm.tma + rates.tma_latency;
      break;
    }
    case Completion::Queue::Product: {
      // a warp's 16 rows; B, and A where it lies in shared memory, are read once for the four warps together
      double shared = (work.n * 32.0 + (work.a_in_registers ? 0 : 2048)) / 128 * work.k / 16;
      double clocks = std::max(work.n * rates.hgmma_clocks_per_column * work.k / 16, shared);
      double start = std::max(now + 2, part.tensor);
      if (request.tensor_excludes_mufu) start = std::max(start, part.mufu);
      part.tensor = start + clocks;
      part.wgmma_runs = true;
      result.tensor += clocks;
      at = part.tensor + rates.hgmma_latency;
      break;
    }
  }
  double& last = slot.last_landing[int(work.queue)];
  last = at = std::max(at, last);
  works.push_back(std::make_unique<Completion>(std::move(work)));
  events.push({at, order++, works.back().get()});
}

void Timing::land_due() {
  while (!events.empty() && events.top().at <= now) {
    Completion* work = events.top().work;
    events.pop();
    work->land();
    work->land = nullptr;
    changes++;
  }
  if (events.empty()) works.clear();
}

}  // namespace sass
