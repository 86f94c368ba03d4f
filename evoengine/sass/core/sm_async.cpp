// Asynchronous work of an SM: copies by TMA, and wgmmas on the tensor cores.
//
// A wgmma starts when its warpgroup's four warps have issued it and the tensor cores are free, in turn. It takes N/2
// clocks, or as long as shared memory takes to give its operands. While it computes, its sums move through the register
// file, which costs the other pipes a part of their rates (timing.cpp).
#include "sm.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace sass {

void Timing::begin(Completion&& work) {
  Slot& slot = *running;
  double at = now, read;
  bool far = false;
  switch (work.queue) {
    case Completion::Queue::Copy: touch(chips[slot.sm], slot, work.access, at, read, far); break;
    case Completion::Queue::TensorLoad: at = load_box(slot, work); break;
    case Completion::Queue::TensorStore: at = store_box(slot, work); break;
    case Completion::Queue::Product:
      begin_product(chips[slot.sm], slot, std::make_shared<Completion>(std::move(work)));
      return;
  }
  land(slot, std::make_shared<Completion>(std::move(work)), at);
}

void Timing::send(Warp&, std::function<void()> act) {
  auto work = std::make_shared<Completion>();
  work->land = std::move(act);
  events.push({now + rates.remote_arrival_latency, order++, std::move(work), nullptr});
}

void Timing::land(Slot& slot, std::shared_ptr<Completion> work, double at) {
  double& last = slot.last_landing[int(work->queue)];
  last = at = std::max(at, last);
  events.push({at, order++, std::move(work), nullptr});
}

void Timing::land_due() {
  while (!events.empty() && events.top().at <= now) {
    Event due = events.top();
    events.pop();
    if (due.work) {
      due.work->land();
      changes++;
    } else {
      end_product(*due.sm);
    }
  }
}

// ── TMA ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

// When the box has landed. A multicast is read from the L2 once: the SMs that it reaches share the cost.
double Timing::load_box(Slot& slot, const Completion& work) {
  int allocation = work.sectors ? allocation_at(work.address) : int(request.traffic.size());
  int reached = std::min<int>(work.destinations, int(chips.size()));
  double l2 = work.sectors * load_clocks(allocation, true) / reached;
  double latest = 0;
  for (int n = 0; n < reached; n++) {
    Sm& sm = chips[(slot.sm + n) % chips.size()];
    sm.asked[allocation].loaded += double(work.sectors) / reached;
    double dram = dram_clocks(sm, allocation, double(work.sectors) / reached);
    sm.tma = std::max(sm.tma, now) + std::max({work.bytes / rates.tma_bytes_per_clock, l2, rates.tma_issue});
    sm.l2 = std::max(sm.l2, now - rates.l2_burst) + l2;
    if (dram) load_dram(sm, now, dram, true);
    sm.port = std::max(sm.port, now) + work.bytes / PORT_BYTES;
    result.l2 += l2;
    double arrives = std::max(sm.tma, sm.l2) + rates.tma_latency;
    if (dram)
      arrives = std::max(arrives, std::max(sm.dram, now) + rates.tma_latency + dram_latency() - rates.l2_latency);
    latest = std::max(latest, arrives);
  }
  return latest + (reached > 1 ? rates.multicast_latency : 0);
}

// When the L2 has the box. What it combines with what is there it loads first, as it does for atomics.
double Timing::store_box(Slot& slot, const Completion& work) {
  Sm& sm = chips[slot.sm];
  int allocation = work.sectors ? allocation_at(work.address) : int(request.traffic.size());
  double share = size_t(allocation) < request.traffic.size() ? request.traffic[allocation].stores_to_dram : 0;
  double l2 = work.sectors * std::max(rates.l2_store_clocks, SECTOR / rates.l2_private_tma_bytes_per_clock);
  double dram = share * work.sectors * SECTOR / rates.dram_bytes_per_clock;
  double combined = now;
  if (work.combines && work.sectors) {
    l2 = std::max(l2, work.sectors * rates.l2_combine_clocks);
    work.rows([&](u64 address, u32 bytes) {
      for (u64 sector = address >> 5; sector <= (address + bytes - 1) >> 5; sector++)
        combined = std::max(combined, combine(sm, allocation, sector, 1, now));
    });
    sm.asked[allocation].loaded += work.sectors;
    dram = dram_clocks(sm, allocation, work.sectors);
    if (dram) load_dram(sm, now, dram, true);
  }
  sm.tma = std::max(sm.tma, now) + std::max(work.bytes / rates.tma_bytes_per_clock, rates.tma_issue);
  sm.l2_in = std::max(sm.l2_in, now) + l2;
  store_dram(sm, now, dram);
  sm.port = std::max(sm.port, now) + work.bytes / PORT_BYTES;
  result.l2_in += l2;
  result.stored += work.sectors;
  return std::max({sm.tma, sm.l2_in, combined}) + rates.tma_latency;
}

// ── wgmma ───────────────────────────────────────────────────────────────────────────────────────────────────────────

void Timing::begin_product(Sm& sm, Slot& slot, std::shared_ptr<Completion> work) {
  const Warp* group = slot.warp - slot.warp->number % PARTS;
  std::deque<Product>& begun = sm.begun[group];
  auto has_this_warp = [&](const Product& p) {
    return std::any_of(p.warps.begin(), p.warps.end(), [&](const auto& piece) { return piece.first == &slot; });
  };
  auto own = std::find_if_not(begun.begin(), begun.end(), has_this_warp);
  if (own == begun.end()) own = begun.insert(begun.end(), Product{});
  own->warps.emplace_back(&slot, std::move(work));
  if (own->warps.size() < PARTS) return;
  sm.waiting.push_back(std::move(*own));
  begun.erase(own);
  if (sm.tensor <= now) start_product(sm);
}

void Timing::start_product(Sm& sm) {
  if (sm.waiting.empty()) {
    sm.traffic = 0;
    return;
  }
  sm.running = std::move(sm.waiting.front());
  sm.waiting.pop_front();
  const Completion& work = *sm.running.warps[0].second;
  double columns = work.n * rates.hgmma_clocks_per_column;
  // B, and A where it lies in shared memory, are read once for the four warps together
  double operands = (work.n * 32.0 + (work.a_in_registers ? 0 : 2048)) / PORT_BYTES;
  double start = std::max(now, sm.tensor);
  sm.port = std::max(sm.port, start) + operands;
  sm.running.begun = start;
  sm.running.alone = columns;
  // what TMA has in flight need not have been written yet
  sm.tensor = std::max(start + columns, sm.port - rates.tma_in_flight_bytes / PORT_BYTES);
  sm.traffic = columns / (sm.tensor - start);
  result.tensor += PARTS * columns;
  result.tensor_work += columns;
  events.push({sm.tensor, order++, nullptr, &sm});
}

// A wgmma leaves some turns at the register file to others. Where FP32 instructions took more, it is late by as much;
// the four sub-cores compute it together, so the one that is latest holds up the others.
void Timing::end_product(Sm& sm) {
  double taken = 0;
  for (Part& part : sm.parts) taken = std::max(taken, part.taken);
  double end = sm.running.begun + std::fma(rates.hgmma_turns, sm.running.alone, taken);
  if (end > sm.tensor) {
    sm.tensor = end;
    events.push({sm.tensor, order++, nullptr, &sm});
    return;
  }
  for (Part& part : sm.parts) part.taken = 0;
  for (auto& [slot, piece] : sm.running.warps) land(*slot, piece, sm.tensor + rates.hgmma_latency);
  start_product(sm);
}

}  // namespace sass
