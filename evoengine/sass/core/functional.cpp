// Gives the warps of a cluster turns in a random order, and completes their asynchronous work.
#include "turns.h"

#include <algorithm>

namespace sass {

void Functional::begin(Completion&& work) {
  std::deque<Completion>& pending = current->pending;
  if (observer) observer->began(work);
  bool product = work.queue == Completion::Queue::Product;
  if (landing == Landing::Early && !product && !is_behind(work)) {
    work.land();
    return;
  }
  pending.push_back(std::move(work));
  if (landing == Landing::Early && product) land_product(*pending.back().warp);
}

bool Functional::is_behind(const Completion& work) const {
  return std::any_of(current->pending.begin(), current->pending.end(),
                     [&](const Completion& p) { return p.warp == work.warp && p.queue == work.queue; });
}

bool Functional::land_one() {
  const std::deque<Completion>& pending = current->pending;
  u32 count = u32(pending.size());
  std::vector<const Warp*> unready;  // the first warp of each warpgroup none of whose products can land
  for (u32 from = count ? random.below(count) : 0, n = 0; n < count; n++) {
    u32 chosen = (from + n) % count;
    const Warp* warp = pending[chosen].warp;
    if (pending[chosen].queue == Completion::Queue::Product) {
      const Warp* group = warp - warp->number % 4;
      if (std::find(unready.begin(), unready.end(), group) != unready.end()) continue;
      if (land_product(*warp)) return true;
      unready.push_back(group);
      continue;
    }
    for (u32 first = 0; first < chosen; first++)
      if (pending[first].warp == warp && pending[first].queue == pending[chosen].queue) chosen = first;
    land(chosen);
    return true;
  }
  return false;
}

void Functional::land_stores() {
  auto is_store = [](const Completion& p) { return p.queue == Completion::Queue::TensorStore; };
  const std::deque<Completion>& pending = current->pending;
  for (auto at = pending.begin(); (at = std::find_if(pending.begin(), pending.end(), is_store)) != pending.end();)
    land(u32(at - pending.begin()));
}

bool Functional::land_product(const Warp& warp) {
  constexpr u32 missing = ~0u;
  u32 first[4] = {missing, missing, missing, missing}, found = 0, n = 0;
  for (const Completion& p : current->pending) {
    const Warp& w = *p.warp;
    u32& own = first[w.number % 4];
    if (p.queue == Completion::Queue::Product && own == missing && w.block == warp.block &&
        w.number / 4 == warp.number / 4) {
      own = n;
      if (++found == 4) break;
    }
    n++;
  }
  if (found < 4) return false;
  std::sort(first, first + 4);
  for (int k = 3; k >= 0; k--) land(first[k]);
  return true;
}

void Functional::land(u32 index) {
  Completion work = std::move(current->pending[index]);
  current->pending.erase(current->pending.begin() + index);
  work.land();
  acts++;
}

namespace {

constexpr u64 IDLE_ROUNDS = 16;  // without an act, after which pending work lands that nothing waited for

bool came_true(Context& c, const Instruction& i) {
  const Operand& result = i.operands[0];
  const int lane = __builtin_ctz(c.lanes);
  if (result.kind == Operand::Kind::Register && result.index != RZ) return c.warp.r[result.index][lane];
  if (result.kind == Operand::Kind::Uniform && result.index != URZ) return c.warp.u[result.index];
  for (const Operand& o : i.operands)
    if (o.kind == Operand::Kind::Predicate || o.kind == Operand::Kind::UniformPredicate)
      return predicate(c, o) >> lane & 1;
  return false;
}

// Called before an access through which other clusters may be observed.
bool begins_to_lag(Functional& machine, const Warp& w, const Instruction& i) {
  u8& left = machine.lags_at[size_t(w.pc)];
  Resident& r = *machine.current;
  if (!left || r.has_lagged || !lanes_to_execute(w, i) || --left) return false;
  if (machine.lag_often) left = u8(1 + machine.random.below(LATEST_COMER));
  return r.lags = r.has_lagged = true;
}

// One turn of a warp; true if it did anything.
bool turn(Functional& machine, Warp& w, u64& left) {
  Context context{machine, w};
  bool moved = false;
  u32 length = 1 + machine.random.below(LONGEST_TURN);
  w.group = -1;
  for (u32 n = 0; n < length; n++) {
    if (is_waiting(machine, w)) break;
    if (next(w) < 0) break;
    const Instruction& instruction = machine.program->code[w.pc];
    if (!machine.lags_at.empty() && begins_to_lag(machine, w, instruction)) return true;
    if (step(context) == Step::Waiting) break;
    moved = true;
    machine.acts += instruction.acts && context.lanes;
    if (machine.visits && instruction.visit != Visit::None && context.lanes)
      machine.visits->add(w, instruction.visit, u64(instruction.address),
                          instruction.visit == Visit::Vote && came_true(context, instruction), instruction.products);
    if (machine.observer) {
      machine.observer->saw(context, instruction);
      if (!left--) throw LimitReached{};
    } else if (!left--) {
      throw Fault{"no end after as many instructions as it may take", true};
    }
    if (context.looked && context.lanes) break;
    if (machine.landing == Landing::Mixed && !machine.current->pending.empty() && machine.random.below(8) == 0)
      machine.land_one();
  }
  return moved;
}

}  // namespace

bool run_round(Functional& machine, Resident& r) {
  machine.current = &r;
  Warp* current = r.warps[0];
  try {
    const u64 acts = machine.acts;
    bool moved = false;
    for (size_t n = r.warps.size(); n > 1; n--) std::swap(r.warps[n - 1], r.warps[machine.random.below(u32(n))]);
    for (Warp* w : r.warps)
      if (!r.lags) moved |= turn(machine, *(current = w), r.left);
    std::erase_if(r.warps, [](Warp* w) { return w->done(); });
    if (r.warps.empty()) {
      while (machine.land_one()) {
      }
      return true;
    }
    r.idle = machine.acts == acts ? r.idle + 1 : 0;
    if (!moved || r.idle >= IDLE_ROUNDS) moved |= machine.land_one();
    return moved;
  } catch (Fault& fault) {
    fault.message = place(machine, *current) + ": " + fault.message;
    throw;
  }
}

}  // namespace sass
