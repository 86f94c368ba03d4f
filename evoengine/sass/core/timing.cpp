#include "timing.h"

#include <algorithm>
#include <cmath>

#include "sm.h"

namespace sass {

namespace {

// ULDC UR, c[bank][UR + offset]
bool has_uniform_index(const Instruction& i) {
  return i.operands.size() > 1 && i.operands[1].kind == Operand::Kind::Constant && i.operands[1].uniform >= 0;
}

bool has_registers_for_a(const Instruction& i) {
  return i.operands.size() > 1 && i.operands[1].kind == Operand::Kind::Register;
}

}  // namespace

// ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

void Timing::start_cluster(double at) {
  clusters.push_back(make_cluster(*this, request.blocks[next_block]));
  u64 age = next_block++;
  for (size_t rank = 0; rank < clusters.back()->blocks.size(); rank++) {
    Block& block = *clusters.back()->blocks[rank];
    Sm& sm = chips[rank];
    sm.started = std::max(at, sm.started + (chips.size() > 1 ? rates.cluster_interval : rates.block_interval));
    for (Warp& w : block.warps) {
      auto slot = std::make_unique<Slot>();
      slot->context = std::unique_ptr<Context>(new Context{*this, w});
      slot->warp = &w;
      slot->sm = int(rank);
      slot->age = age;
      // warps go to sub-partitions by their number: wgmma needs the four of a warpgroup on four of them
      slot->part = int(w.number + (block.warps.size() % PARTS ? age : 0)) % PARTS;
      const int turn = 2 * w.number / PARTS;
      slot->ready = slot->fixed = sm.started + turn;
      slot->issued = slot->ready - 1;
      sm.parts[slot->part].slots.push_back(slot.get());
      slots.push_back(std::move(slot));
      living++;
    }
  }
}

void Timing::end_warp(Slot& slot) {
  Part& part = chips[slot.sm].parts[slot.part];
  part.slots.erase(std::find(part.slots.begin(), part.slots.end(), &slot));
  if (part.last == &slot) part.last = nullptr;
  living--;
  changes++;
  Cluster* own = slot.warp->block->cluster;
  for (auto& block : own->blocks)
    if (!block->done()) return;
  result.ended += own->blocks.size();
  double ended = std::max(now, settled[own]);
  for (Sm& sm : chips) sm.adrift = std::max(sm.adrift, rates.block_drift * (ended - sm.started));
  settled.erase(own);
  result.clocks = std::max(result.clocks, ended);
  if (next_block < request.blocks.size()) start_cluster(ended + rates.block_start);
}

// ── issue ───────────────────────────────────────────────────────────────────────────────────────────────────────────

void Timing::poll(Slot& slot) {
  if (slot.polled == changes) return;
  slot.polled = changes;
  Wait::Kind kind = slot.warp->wait.kind;
  if (is_waiting(*this, *slot.warp)) return;
  bool transaction = kind == Wait::Kind::TransactionBarrier;
  double from = kind == Wait::Kind::Barrier ? std::max(now, chips[slot.sm].barriers) : now;
  slot.wait_over = from + (kind == Wait::Kind::Barrier ? rates.barrier_latency : transaction ? rates.mbarrier_wake : 1);
  slot.ready = std::max(slot.ready, slot.wait_over);
}

// When the pipe takes the instruction, as far as it is known now.
double Timing::accepts(const Sm& sm, const Part& part, const Instruction& i) const {
  bool two = rates.fma_interval < 2;  // FP32 on two half-wide pipes, of which one multiplies integers too
  switch (i.pipe) {
    case Pipe::Fma: return two ? std::min(part.fma, part.heavy) : part.heavy;
    case Pipe::FmaHeavy: return part.heavy;
    case Pipe::Half: return std::max(part.half[i.second_half], part.heavy);
    case Pipe::Alu: return part.alu;
    case Pipe::Fp64: return part.fp64;
    case Pipe::Mufu: return part.mufu - rates.mufu_interval;  // one may wait before the pipe
    case Pipe::Uniform: return part.uniform;
    case Pipe::Tensor:
      if (!is_group_product(i)) return std::floor(part.tensor);
      return double(sm.waiting.size()) < rates.hgmma_queue ? 0 : sm.tensor;
    case Pipe::Memory: {
      double queued = std::max(part.memory, sm.lsu - rates.memory_queue);
      // an SM has at most so many misses outstanding
      return std::max(queued, std::max(sm.misses_l2 - 600, sm.misses_dram - 1200));
    }
    default: return 0;
  }
}

// Whether the banks can read the sources within the window of three clocks after issue.
bool Timing::ports_free(const Part& part, int index) const {
  for (int bank = 0; bank < 2; bank++)
    if (reads[index][bank] && std::max(part.ports[bank], now) + reads[index][bank] > now + READ_WINDOW) return false;
  return true;
}

bool Timing::issue(Sm& sm, Part& part) {
  Slot* best = nullptr;
  const std::vector<Instruction>& code = program->code;
  for (Slot* slot : part.slots) {
    if (slot->warp->wait.kind != Wait::Kind::None) {
      poll(*slot);
      if (slot->warp->wait.kind != Wait::Kind::None) continue;
    }
    if (slot->ready > now) continue;
    const Instruction& i = code[slot->warp->pc];
    if (accepts(sm, part, i) > now || !ports_free(part, slot->warp->pc)) {
      slot->pipe_busy = true;
      continue;
    }
    if (!best || slot == part.last || (best != part.last && slot->age < best->age)) best = slot;
  }
  if (!best) return false;
  int index = best->warp->pc;
  const Instruction& i = code[index];
  running = best;
  Step done = step(*best->context);
  if (done == Step::Waiting) {
    best->waited = true;
    best->waited_for = best->warp->wait.kind;
    best->polled = 0;
    return true;
  }
  part.last = best;
  issued(sm, part, *best, i, index);
  return true;
}

void Timing::occupy(Sm& sm, Part& part, const Instruction& i, double& done, double& read) {
  bool two = rates.fma_interval < 2;
  switch (i.pipe) {
    case Pipe::Fma: occupy_fma(sm, part); break;
    case Pipe::FmaHeavy: {
      double interval = i.high ? std::max(rates.imad_interval, rates.imad_high_interval) : rates.imad_interval;
      part.heavy = now + arithmetic(sm, interval);
      result.fma += two ? interval / 2 : interval;
    } break;
    case Pipe::Half: {
      // two pipes, of which HFMA2.MMA has one, give one a clock together: the other kinds alone take two clocks
      double interval = arithmetic(sm, std::max(2.0, rates.half_interval));
      part.half[i.second_half] = now + interval;
      if (rates.half_interval >= 2) part.half[!i.second_half] = now + interval;
    } break;
    case Pipe::Alu:
      part.alu = now + arithmetic(sm, rates.alu_interval);
      result.alu += rates.alu_interval;
      break;
    case Pipe::Fp64:
      part.fp64 = now + rates.fp64_interval;
      done = now + rates.fp64_interval + 8;
      break;
    case Pipe::Mufu:
      occupy_mufu(sm, part, done, read);
      if (i.op == Op::REDUX) done += rates.redux_latency - rates.mufu_latency;
      break;
    case Pipe::Branch:
      if (i.op == Op::BAR) sm.barriers = std::max(sm.barriers, now) + rates.barrier_interval;
      break;
    case Pipe::Uniform:
      part.uniform = now + rates.uniform_interval;
      result.uniform += rates.uniform_interval;
      done = now + rates.uniform_latency;
      break;
    case Pipe::Tensor:
      if (!is_group_product(i)) {
        double work = (i.fp16_sums ? rates.hmma_fp16_interval : rates.hmma_interval) * i.mma_work;
        double clocks = std::max(work, rates.hmma_least);
        part.tensor = std::max(part.tensor, now) + clocks;
        result.tensor += clocks;
        result.tensor_work += work / PARTS;
        done = now + rates.hmma_latency;
      }
      break;
    case Pipe::Memory:
      part.memory = now + rates.memory_interval;
      result.memory += rates.memory_interval;
      if (i.op == Op::MOVM)
        sm.lsu = std::max(sm.lsu, now) + rates.wavefront_clocks;  // through shared memory's crossbar
      done = now + (i.op == Op::SYNCS ? rates.mbarrier_latency : rates.shuffle_latency);
      read = now + 8;
      break;
    default: break;
  }
}

// Clocks of a pipe for an instruction: more while a wgmma's sums move through the register file.
double Timing::arithmetic(const Sm& sm, double interval) const {
  return sm.tensor > now ? std::max(interval, sm.traffic * rates.hgmma_arithmetic_interval) : interval;
}

// FP32 instructions take turns at the register file with a wgmma's sums (see end_product).
void Timing::occupy_fma(Sm& sm, Part& part) {
  bool two = rates.fma_interval < 2;
  (two && part.fma <= part.heavy ? part.fma : part.heavy) = now + arithmetic(sm, 2);
  result.fma += two ? 1 : 2;
  if (sm.tensor > now) part.taken += rates.hgmma_fma_turns;
}

// While a wgmma's sums move through the register file, MUFU loses a part of its rate.
void Timing::occupy_mufu(Sm& sm, Part& part, double& done, double& read) {
  double start = std::max(now, part.mufu);
  double slowly = rates.mufu_interval / std::fma(-rates.hgmma_mufu_loss, sm.traffic, 1);
  double beside = std::max(0.0, sm.tensor - start);
  double takes = beside >= slowly ? slowly : std::fma(1 - beside / slowly, rates.mufu_interval, beside);
  part.mufu = start + takes;
  result.mufu += takes;
  done = part.mufu - rates.mufu_interval + rates.mufu_latency;
  read = start + 10;
}

// Clocks from a wgmma to what its warp issues next.
double Timing::issue_gap(Slot& slot, const Instruction& i) {
  slot.ladder = now - slot.last_product > LADDER_RESET ? 1 : slot.ladder + 1;
  slot.last_product = now;
  if (slot.ladder <= LADDER) return rates.hgmma_issue;
  return has_registers_for_a(i) ? rates.hgmma_issue_registers : rates.hgmma_issue_shared;
}

// Warps that ask for a fence at the same time get it together; one that asks while another is pending waits longer.
double Timing::fence_latency(Sm& sm) {
  bool with_others = now<sm.fenced + TOGETHER, busy = sm.fence> now;
  if (!with_others) sm.fenced = now;
  double latency = busy && !with_others ? rates.membar_busy_latency : rates.membar_latency;
  sm.fence = std::max(sm.fence, now + latency);
  return latency;
}

// Clocks for which a fence or a barrier of a cluster holds its warp up at least.
double Timing::latency_of_order(Sm& sm, const Instruction& i) {
  if (i.pipe == Pipe::Memory) return i.a && i.op == Op::MEMBAR ? fence_latency(sm) : 0;
  return i.pipe == Pipe::Uniform && i.op == Op::UCGABAR_WAIT ? rates.cluster_barrier_latency : 0;
}

void Timing::issued(Sm& sm, Part& part, Slot& slot, const Instruction& i, int index) {
  Warp& w = *slot.warp;
  attribute(slot, index);
  result.issued++;
  result.issue++;
  result.issues[index]++;
  for (int bank = 0; bank < 2; bank++) part.ports[bank] = std::max(part.ports[bank], now) + reads[index][bank];
  double done = now + 5, read = now + 3;
  bool far = false;
  occupy(sm, part, i, done, read);
  if (i.op == Op::CCTL && i.opcode == "CCTL.IVALL") sm.l1->forget();
  const Access& access = slot.context->access;
  if (access.space != Access::Space::None && !access.asynchronous && access.lanes)
    touch(sm, slot, access, done, read, far);
  for (auto [barrier, at] : {std::pair{i.write_barrier, done}, {i.read_barrier, read}}) {
    if (barrier > 5) continue;
    if (at > slot.scoreboard[barrier]) slot.long_scoreboard[barrier] = far;
    slot.scoreboard[barrier] = std::max(slot.scoreboard[barrier], at);
  }
  slot.issued = now;
  slot.waited = slot.pipe_busy = false;
  changes += i.pipe == Pipe::Branch || i.pipe == Pipe::Memory || i.pipe == Pipe::None;
  if (next(w) < 0) {
    end_warp(slot);
    return;
  }
  double from = now + std::max<int>(1, i.stall);
  if (w.pc != index + 1) from = std::max(from, now + rates.branch_clocks);
  from = std::max(from, now + latency_of_order(sm, i));
  if (i.pipe == Pipe::Tensor && is_group_product(i)) from = std::max(from, now + issue_gap(slot, i));
  if (has_uniform_index(i)) from = std::max(from, now + rates.indexed_uniform_latency);
  slot.fixed = from;
  set_ready(slot, from);
  if (w.wait.kind != Wait::Kind::None) {
    slot.waited = true;
    slot.waited_for = w.wait.kind;
    slot.polled = 0;
  }
}

void Timing::set_ready(Slot& slot, double from) {
  u8 mask = program->code[slot.warp->pc].wait_mask;
  for (int n = 0; n < 6; n++)
    if (mask >> n & 1) from = std::max(from, slot.scoreboard[n]);
  slot.ready = from;
}

// Shares out the clocks between a warp's last issue and this one among what it waited for.
void Timing::attribute(Slot& slot, int index) {
  auto& stalls = result.stalls[index];
  double at = slot.issued + 1;
  auto until = [&](double end, Stall reason) {
    end = std::min(end, now);
    if (end > at) stalls[int(reason)] += end - at;
    at = std::max(at, end);
  };
  until(slot.fixed, Stall::Fixed);
  u8 mask = program->code[index].wait_mask;
  double near = 0, far = 0;
  for (int n = 0; n < 6; n++)
    if (mask >> n & 1)
      (slot.long_scoreboard[n] ? far : near) = std::max(slot.long_scoreboard[n] ? far : near, slot.scoreboard[n]);
  until(near, Stall::ShortScoreboard);
  until(far, Stall::LongScoreboard);
  if (slot.waited) {
    Stall reason = slot.waited_for == Wait::Kind::Products             ? Stall::Wgmma
                   : slot.waited_for == Wait::Kind::TransactionBarrier ? Stall::TransactionBarrier
                   : slot.waited_for == Wait::Kind::Copies             ? Stall::AsyncCopy
                                                                       : Stall::Barrier;
    until(slot.wait_over, reason);
  }
  bool memory = program->code[index].pipe == Pipe::Memory;
  until(now, !slot.pipe_busy ? Stall::NotSelected : memory ? Stall::MemoryQueue : Stall::Pipe);
}

// ── register ports ──────────────────────────────────────────────────────────────────────────────────────────────────

namespace {

// Reads of each of the two banks by the arithmetic instruction at `index`. A source that the instruction before it kept
// for reuse is not read again. (Huerta et al., arXiv 2503.20481: a bank gives one register of a warp per clock.)
std::array<u8, 2> reads_of(const std::vector<Instruction>& code, size_t index) {
  const Instruction& i = code[index];
  std::array<u8, 2> reads{0, 0};
  bool fixed = i.pipe == Pipe::Fma || i.pipe == Pipe::FmaHeavy || i.pipe == Pipe::Alu || i.pipe == Pipe::Half;
  if (!fixed) return reads;
  for (size_t n = 1; n < i.operands.size() && n < 4; n++) {
    const Operand& o = i.operands[n];
    if (o.kind != Operand::Kind::Register || o.index == RZ) continue;
    bool kept = false;
    if (index > 0 && n < code[index - 1].operands.size()) {
      const Operand& before = code[index - 1].operands[n];
      kept =
          (code[index - 1].reuse >> (n - 1) & 1) && before.kind == Operand::Kind::Register && before.index == o.index;
    }
    if (!kept) reads[o.index & 1]++;
  }
  return reads;
}

}  // namespace

// ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────────

Timing::Timing(const TimingRequest& asked, int sms) : request(asked), rates(asked.rates), chips(sms) {
  for (Sm& sm : chips) {
    sm.l1 = std::make_unique<L1>(rates.l1_bytes);
    sm.asked.resize(request.traffic.size() + 1);
  }
}

// Keeps at most MOST_PROGRESS notes: where there are more, every second one goes, and the steps become twice as long.
void Timing::note_progress() {
  if (result.issued < next_note) return;
  next_note = result.issued + note_step;
  result.progress.push_back({now, double(result.issued), result.tensor_work, result.stored, double(result.ended)});
  if (result.progress.size() < MOST_PROGRESS) return;
  for (size_t n = 0; 2 * n + 1 < result.progress.size(); n++) result.progress[n] = result.progress[2 * n + 1];
  result.progress.resize(MOST_PROGRESS / 2);
  note_step *= 2;
}

// When the next instruction can issue or the next work lands.
double Timing::soonest() const {
  double at = events.empty() ? NEVER : events.top().at;
  for (const Sm& sm : chips)
    for (const Part& part : sm.parts)
      for (const Slot* slot : part.slots) {
        if (slot->warp->wait.kind != Wait::Kind::None) continue;
        const Instruction& i = program->code[slot->warp->pc];
        double ports = ports_free(part, slot->warp->pc) ? 0 : now + 1;
        at = std::min(at, std::max({slot->ready, accepts(sm, part, i), ports}));
      }
  if (at >= NEVER) throw Fault{"warps wait for what never comes", true};
  return std::max(now + 1, std::ceil(at));
}

Timed Timing::simulate() {
  size_t size = program->code.size();
  result.issues.assign(size, 0);
  result.stalls.assign(size, {});
  for (size_t n = 0; n < size; n++) reads.push_back(reads_of(program->code, n));
  for (int n = 0; n < request.resident && next_block < request.blocks.size(); n++) start_cluster(0);
  while (living) {
    land_due();
    bool any = false;
    for (Sm& sm : chips) {
      sm.next_part = (sm.next_part + 1) % PARTS;
      for (int n = 0; n < PARTS; n++) any |= issue(sm, sm.parts[(sm.next_part + n) % PARTS]);
    }
    note_progress();
    if (request.limit && result.issued >= request.limit) break;
    now = any ? now + 1 : soonest();
  }
  result.finished = !living;
  if (result.finished) {
    result.clocks = std::max(result.clocks, now);
    for (Sm& sm : chips) {
      result.clocks = std::max({result.clocks, sm.l2, sm.l2_in, sm.dram + sm.unwritten});
      for (auto [place, until] : sm.combined) result.clocks = std::max(result.clocks, until);
    }
  } else {
    result.clocks = now;
  }
  result.l2 = std::max(result.l2, result.l2_in);
  double hits = 0, requests = 0;
  for (Sm& sm : chips) hits += sm.l1->hits, requests += sm.l1->requests;
  result.l1_hits = requests ? hits / requests : 0;
  return result;
}

Timed time_sm(const Program& program, const Launch& launch, std::vector<Allocation> allocations,
              const std::vector<u8>* banks, u64 seed, const TimingRequest& request) {
  Timing machine(request, int(launch.cluster[0] * launch.cluster[1] * launch.cluster[2]));
  machine.program = &program;
  machine.launch = launch;
  machine.memory.allocations = std::move(allocations);
  std::copy(banks, banks + 8, machine.banks);
  machine.seed = seed;
  machine.products_left = MODEL_PRODUCTS;
  u64 blocks = u64(launch.grid[0]) * launch.grid[1] * launch.grid[2];
  u64 timed = std::max<u64>(1, request.blocks.size() * launch.cluster[0] * launch.cluster[1] * launch.cluster[2]);
  machine.alike = u32(std::max<u64>(1, blocks / timed));
  for (auto [counter, sum] : request.added) machine.memory.store(counter, &sum, 4);
  return machine.simulate();
}

}  // namespace sass
