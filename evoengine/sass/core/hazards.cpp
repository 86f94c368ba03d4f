#include "hazards.h"

#include <algorithm>
#include <bitset>
#include <set>
#include <tuple>

#include "effects.h"

namespace sass {

namespace {

// ── latencies ───────────────────────────────────────────────────────────────────────────────────────────────────────

enum class Need : u8 { Read, Write, AfterRead };  // RAW, WAW, WAR
constexpr const char* NEEDS[] = {"RAW", "WAW", "WAR"};

enum class File : u8 { Register, Uniform, Predicate, UniformPredicate, Scoreboard };
constexpr const char* FILES[] = {"R", "UR", "P", "UP", "SB"};

File file_of(Slot16 slot) {
  return slot < UNIFORM_SLOTS             ? File::Register
         : slot < PREDICATE_SLOTS         ? File::Uniform
         : slot < UNIFORM_PREDICATE_SLOTS ? File::Predicate
         : slot < SCOREBOARD_SLOTS        ? File::UniformPredicate
                                          : File::Scoreboard;
}

constexpr int LONGEST = 64;  // clocks; no fixed latency is longer

struct Latency {
  u8 arch;
  Need need;
  Unit producer;
  File file;
  Unit consumer;
  u8 clocks;
  u32 count;
};

constexpr Latency LATENCIES[] = {
#define LATENCY(arch, need, producer, file, consumer, clocks, count) \
  {arch, Need::need, Unit::producer, File::file, Unit::consumer, clocks, count},
#include "fixed_latencies.inc"
#undef LATENCY
};

// Clocks by [need][producer][file][consumer]; 0 if unknown.
struct LatencyTable {
  u8 clocks[3][UNITS][5][UNITS] = {};

  explicit LatencyTable(int arch) {
    for (const Latency& l : LATENCIES)
      if (l.arch == arch) clocks[int(l.need)][int(l.producer)][int(l.file)][int(l.consumer)] = l.clocks;
  }
  bool knows(Need need, Unit producer, File file, Unit consumer) const {
    return clocks[int(need)][int(producer)][int(file)][int(consumer)] != 0;
  }
  // For an unknown pair, the latency that the least demanding consumer needs.
  int of(Need need, Unit producer, File file, Unit consumer) const {
    const auto& known = clocks[int(need)][int(producer)][int(file)];
    return known[int(consumer)] ? known[int(consumer)] : known[int(Unit::Other)];
  }
};

// ── what is pending ─────────────────────────────────────────────────────────────────────────────────────────────────

enum class PendingKind : u8 {
  Fixed,        // a result that is available after a latency
  Queued,       // a result that a scoreboard signals
  LateRead,     // a register that is still to be read
  FixedRead,    // a register that a tensor instruction reads over some clocks
  Product,      // a sum that wgmma has not finished
  ProductRead,  // a register that wgmma reads
  Unfenced,     // a register that wgmma must not touch before WARPGROUP.ARRIVE
};

struct Pending {
  Slot16 slot;
  PendingKind kind;
  u8 cover;  // scoreboards of which any one tells its end
  i32 at;    // clock of its issue
  u32 producer;
  Unit unit;      // that writes it, or reads it
  u8 groups;      // closed since: 1 for one of the last group, 0 for one of a group still open
  int16_t guard;  // slot of the predicate it was executed under, −1 − slot where it was negated; UNGUARDED
};
constexpr int16_t UNGUARDED = 32000;

// For registers that wgmma must not touch, any of the instructions is sufficient.
u32 told_apart_by(const Pending& p) { return p.kind == PendingKind::Unfenced ? 0 : p.producer; }

bool before(const Pending& a, const Pending& b) {
  return std::tuple(a.slot, a.kind, told_apart_by(a)) < std::tuple(b.slot, b.kind, told_apart_by(b));
}

struct State {
  std::vector<Pending> items;  // ordered by `before`; clocks are relative to the block's beginning, so at most 0
  int registers = 0;           // that a thread has: the fewest of all paths
};

// Joins a state into another; true if that changed it.
bool merge(State& to, const State& from) {
  bool changed = false;
  if (from.registers < to.registers) to.registers = from.registers, changed = true;
  std::vector<Pending> all;
  all.reserve(to.items.size() + from.items.size());
  auto t = to.items.begin();
  for (const Pending& f : from.items) {
    while (t != to.items.end() && before(*t, f)) all.push_back(*t++);
    if (t == to.items.end() || before(f, *t)) {
      all.push_back(f);
      changed = true;
      continue;
    }
    Pending both = *t++;
    const Pending was = both;
    both.cover &= f.cover;
    both.at = std::max(both.at, f.at);
    both.groups = std::min(both.groups, f.groups);
    if (both.guard != f.guard) both.guard = UNGUARDED;
    changed |= both.cover != was.cover || both.at != was.at || both.groups != was.groups || both.guard != was.guard;
    all.push_back(both);
  }
  all.insert(all.end(), t, to.items.end());
  to.items = std::move(all);
  return changed;
}

// ── one look ────────────────────────────────────────────────────────────────────────────────────────────────────────

// The successors of an instruction.
struct Successors {
  bool next = true;
  int target = -1;     // a branch's
  bool calls = false;  // to `target`, and back to the next instruction
  bool returns = false;
};

Successors successors(const Instruction& i) {
  Successors s;
  bool always = i.guard == PT && !i.guard_negated;
  for (const Operand& o : i.operands)
    if (o.kind == Operand::Kind::Label) s.target = o.target;
    else if (o.kind == Operand::Kind::Predicate || o.kind == Operand::Kind::UniformPredicate)
      always &= o.index == PT && !o.negate;
  if (i.op == Op::BRA || i.op == Op::JMP) s.next = !always || has(i, "DIV") || has(i, "CONV");
  else if (i.op == Op::CALL && i.operands[0].kind == Operand::Kind::Register) s.target = -1;  // of what is not known
  else if (i.op == Op::CALL) s.calls = true, s.next = !always;
  else if (i.op == Op::RET) s.returns = true, s.target = -1, s.next = !always;
  else if (i.op == Op::EXIT || i.op == Op::BRX || i.op == Op::BRXU || i.op == Op::JMX) s.target = -1, s.next = !always;
  else if (i.op != Op::WARPSYNC) s.target = -1;  // of BSSY: where lanes meet again
  return s;
}

class Look {
 public:
  Look(const Program& program, int arch, int registers) : code(program.code), table(arch), arch(arch) {
    for (const Instruction& i : code) effects.push_back(effects_of(i, arch));
    for (const Instruction& i : code)
      for (const Operand& o : i.operands)
        if (o.kind == Operand::Kind::Label && o.target >= 0) leaders.insert(o.target);
    for (const auto& [label, index] : program.labels) leaders.insert(index);
    for (const Effects& e : effects) has_products |= e.unit == Unit::Group;
    State entry;
    entry.registers = registers ? registers : RZ;
    reach({0, {}}, entry);
  }
  virtual ~Look() = default;

  // Follows every path until the pending items no longer change anywhere, and then reports once.
  void walk() {
    while (!waiting.empty()) {
      const Place place = *waiting.begin();
      waiting.erase(waiting.begin());
      block(place, states[place]);
    }
    reports = true;
    for (const auto& [place, state] : std::map(states)) block(place, state);
  }

 protected:
  // An instruction within calls: the indices that it returns to, innermost last.
  using Place = std::pair<int, std::vector<int>>;

  virtual void pair(Need need, const Pending& p, Unit consumer, int index) = 0;
  virtual void hazard(const Pending& p, int index, bool writes) = 0;
  virtual void uses(int index, const State&) = 0;

  void reach(const Place& place, const State& state) {
    if (place.first >= int(code.size()) || reports) return;
    auto [at, is_new] = states.try_emplace(place, state);
    if (is_new || merge(at->second, state)) waiting.insert(place);
  }

  void block(const Place& place, State state) {
    int now = 0;
    for (int index = place.first;; index++) {
      if (index != place.first && leaders.contains(index)) return reach({index, place.second}, aged(state, now));
      if (index >= int(code.size())) return;
      instruction(state, index, now);
      now += std::max<int>(1, code[index].stall);
      const Successors s = successors(code[index]);
      if (s.target < 0 && !s.returns && s.next && !s.calls) continue;
      const State after = aged(state, now + REFETCH);
      if (s.calls) {
        std::vector<int> stack = place.second;
        // ptxas leaves loops by calls that nothing returns from, so the outermost may be forgotten, never the innermost
        if (stack.size() == DEEPEST) stack.erase(stack.begin());
        stack.push_back(index + 1);
        if (s.target >= 0) reach({s.target, stack}, after);
      } else if (s.target >= 0) {
        reach({s.target, place.second}, after);
      }
      if (s.returns && !place.second.empty()) {
        std::vector<int> stack = place.second;
        const int back = stack.back();
        stack.pop_back();
        reach({back, stack}, after);
      }
      if (!s.next) return;
      if (s.target >= 0 || s.returns || s.calls) return reach({index + 1, place.second}, aged(state, now));
    }
  }

  // Clocks that a taken branch takes in addition to its stall count, at least: ptxas counts on some, and left 7 of 9
  // clocks across one.
  static constexpr int REFETCH = 4;

  // The state `now` clocks later, as the state of a new block.
  static State aged(const State& state, int now) {
    State out;
    out.registers = state.registers;
    for (Pending p : state.items) {
      p.at -= now;
      const bool over = p.at <= -LONGEST && (p.kind == PendingKind::Fixed || p.kind == PendingKind::FixedRead);
      if (p.kind != PendingKind::Fixed && p.kind != PendingKind::FixedRead) p.at = 0;
      if (!over) out.items.push_back(p);
    }
    return out;
  }

  void forget(State& state) {
    std::erase_if(state.items, [&](const Pending& p) {
      return (p.kind == PendingKind::Fixed || p.kind == PendingKind::FixedRead) && clock - p.at >= LONGEST;
    });
  }

  // One item behind another of the same slot.
  template <class F>
  static void each_of(State& state, Slot16 slot, F f) {
    auto at = std::lower_bound(state.items.begin(), state.items.end(), slot,
                               [](const Pending& p, Slot16 s) { return p.slot < s; });
    for (; at != state.items.end() && at->slot == slot; ++at) f(*at);
  }

  static void put(State& state, const Pending& p) {
    auto at = std::lower_bound(state.items.begin(), state.items.end(), p, before);
    if (at != state.items.end() && !before(p, *at)) *at = p;
    else state.items.insert(at, p);
  }

  static int16_t guard_of(const Instruction& i, const Effects& e) {
    if (e.guard == SLOTS) return UNGUARDED;
    return i.guard_negated ? int16_t(-1 - int(e.guard)) : int16_t(e.guard);
  }

  // Whether two instructions under these guards are never both executed by a lane.
  static bool excludes(int16_t a, int16_t b) { return a != UNGUARDED && b != UNGUARDED && a == -1 - b; }

  void instruction(State& state, int index, int now) {
    const Instruction& i = code[index];
    const Effects& e = effects[index];
    const int16_t guard = guard_of(i, e);
    clock = now;
    if (index % 16 == 0) forget(state);
    if (reports) uses(index, state);
    wait(state, index);
    for (const Use& u : e.reads) check_read(state, u, index, u.unit == Unit::Guard ? UNGUARDED : guard);
    for (const Use& u : e.writes)
      if (u.slot != ORDER_SLOT) check_write(state, u, index, guard);
    if (e.unit == Unit::Group) return group_product(state, index, now);
    if (i.op == Op::WARPGROUP) return warpgroup(state, i);
    if (i.op == Op::USETMAXREG)
      for (const Operand& o : i.operands)
        if (o.kind == Operand::Kind::Immediate) state.registers = int(o.immediate);
    overwrite(state, e, guard);
    cover(state, i, e);
    for (const auto& [slot, unit] : e.writes) {
      Pending p{slot, e.variable ? PendingKind::Queued : PendingKind::Fixed, 0, now, u32(index), unit, 0, guard};
      if (e.variable) p.cover = bit(i.write_barrier);
      if (e.variable && slot >= PREDICATE_SLOTS)
        p.cover |= bit(i.read_barrier);  // ATOM, where its address lies; MEMBAR
      put(state, p);
      if (has_products && slot < UNIFORM_SLOTS)
        put(state, {slot, PendingKind::Unfenced, 0, 0, u32(index), unit, 0, UNGUARDED});
    }
    for (Slot16 slot : e.late)
      if (!e.writes_to(slot))
        put(state, {slot, PendingKind::LateRead, u8(bit(i.read_barrier) | bit(i.write_barrier)), now, u32(index),
                    e.unit, 0, guard});
    if (multiplies(e.unit) && !e.variable)
      for (const auto& [slot, unit] : e.reads)
        if (slot < UNIFORM_SLOTS && !e.writes_to(slot))
          put(state, {slot, PendingKind::FixedRead, 0, now, u32(index), unit, 0, guard});
    for (u8 barrier : {i.write_barrier, i.read_barrier})
      if (barrier < 6) {
        std::erase_if(state.items, [&](const Pending& p) { return p.slot == SCOREBOARD_SLOTS + barrier; });
        put(state, {Slot16(SCOREBOARD_SLOTS + barrier), PendingKind::Fixed, 0, now, u32(index), e.unit, 0, guard});
      }
  }

  static bool multiplies(Unit unit) {
    return unit == Unit::Tensor || unit == Unit::ShortTensor || unit == Unit::IntegerTensor;
  }
  static u8 bit(u8 barrier) { return barrier < 6 ? u8(1 << barrier) : u8(0); }

  // The scoreboards that the control word and DEPBAR wait for.
  void wait(State& state, int index) {
    const Instruction& i = code[index];
    u8 mask = i.wait_mask;
    if (i.op == Op::DEPBAR && !i.operands.empty()) {
      const Operand& first = i.operands[0];
      if (first.kind == Operand::Kind::Scoreboard && i.operands.size() > 1 && !i.operands[1].immediate)
        mask |= u8(1 << first.index);
      for (size_t n = first.kind == Operand::Kind::Scoreboard ? 2 : 0; n < i.operands.size(); n++)
        if (i.operands[n].kind == Operand::Kind::Immediate) mask |= u8(i.operands[n].immediate & 63);
    }
    for (int s = 0; s < 6; s++)
      if (i.wait_mask >> s & 1)
        each_of(state, Slot16(SCOREBOARD_SLOTS + s),
                [&](const Pending& p) { pair(Need::Read, p, Unit::Scoreboard, index); });
    if (mask) std::erase_if(state.items, [&](const Pending& p) { return (p.cover & mask) != 0; });
    if (i.op == Op::BAR)  // it goes through the same queue
      std::erase_if(state.items, [&](const Pending& p) {
        return p.kind == PendingKind::LateRead && reads_in_order(effects[p.producer].queue, Queue::Shared);
      });
  }

  void check_read(State& state, const Use& use, int index, int16_t guard) {
    const Unit unit = use.unit;
    each_of(state, use.slot, [&](const Pending& p) {
      if (excludes(p.guard, guard)) return;
      if (p.kind == PendingKind::Fixed) return pair(Need::Read, p, unit, index);
      if (p.kind == PendingKind::Queued) return hazard(p, index, false);
      if (p.kind == PendingKind::Product && unit != Unit::Group) return hazard(p, index, false);
      if (unit == Unit::Group &&
          (p.kind == PendingKind::Unfenced || (p.kind == PendingKind::Product && !same_sums(p, index))))
        hazard(p, index, false);
    });
  }

  void check_write(State& state, const Use& use, int index, int16_t guard) {
    const Effects& e = effects[index];
    each_of(state, use.slot, [&](const Pending& p) {
      if (excludes(p.guard, guard)) return;
      const Queue queue = effects[p.producer].queue;
      switch (p.kind) {
        case PendingKind::Fixed: return pair(Need::Write, p, use.unit, index);
        case PendingKind::FixedRead: return pair(Need::AfterRead, p, use.unit, index);
        case PendingKind::Queued: return queue == e.queue && answers_in_order(queue) ? void() : hazard(p, index, true);
        case PendingKind::LateRead: return reads_in_order(queue, e.queue) ? void() : hazard(p, index, true);
        case PendingKind::Product:
          return e.unit == Unit::Group && same_sums(p, index) ? void() : hazard(p, index, true);
        case PendingKind::ProductRead: return e.unit == Unit::Group ? void() : hazard(p, index, true);
        case PendingKind::Unfenced: return e.unit == Unit::Group ? hazard(p, index, true) : void();
      }
    });
  }

  // Consecutive products may add to the same sums.
  bool same_sums(const Pending& p, int index) const {
    return code[p.producer].operands[0].index == code[index].operands[0].index &&
           effects[p.producer].writes.size() == effects[index].writes.size();
  }

  // A result of an instruction that is always executed, or executed under the same guard, replaces earlier ones.
  void overwrite(State& state, const Effects& e, int16_t guard) {
    auto written_over = [&](const Pending& p) {
      return (p.kind == PendingKind::Fixed || p.kind == PendingKind::Unfenced || p.kind == PendingKind::Queued) &&
             p.slot != ORDER_SLOT && e.writes_to(p.slot) && (guard == UNGUARDED || guard == p.guard);
    };
    if (!e.writes.empty()) std::erase_if(state.items, written_over);
    for (const auto& [slot, unit] : e.writes)
      if (slot >= PREDICATE_SLOTS)
        for (Pending& p : state.items)
          if (p.guard == slot || p.guard == -1 - int(slot)) p.guard = UNGUARDED;
  }

  // What this instruction's scoreboards signal about earlier ones in its queue.
  void cover(State& state, const Instruction& i, const Effects& e) {
    if (e.queue == Queue::None || (i.write_barrier > 5 && i.read_barrier > 5)) return;
    for (Pending& p : state.items) {
      const Queue queue = effects[p.producer].queue;
      if (p.kind == PendingKind::Queued && queue == e.queue && answers_in_order(queue)) p.cover |= bit(i.write_barrier);
      if (p.kind == PendingKind::LateRead && reads_in_order(queue, e.queue))
        p.cover |= bit(i.write_barrier) | bit(i.read_barrier);
    }
  }

  void group_product(State& state, int index, int now) {
    const Instruction& i = code[index];
    const Effects& e = effects[index];
    for (const auto& [slot, unit] : e.reads)
      if (slot < UNIFORM_SLOTS && !e.writes_to(slot))
        put(state, {slot, PendingKind::ProductRead, 0, now, u32(index), unit, 0, UNGUARDED});
    for (const auto& [slot, unit] : e.writes)
      put(state, {slot, PendingKind::Product, 0, now, u32(index), unit, 0, UNGUARDED});
    if (i.operands.back().kind != Operand::Kind::GroupScoreboard) return;
    for (Pending& p : state.items)
      if ((p.kind == PendingKind::Product || p.kind == PendingKind::ProductRead) && p.groups < 200) p.groups++;
  }

  void warpgroup(State& state, const Instruction& i) {
    if (has(i, "ARRIVE")) {
      std::erase_if(state.items, [](const Pending& p) { return p.kind == PendingKind::Unfenced; });
    } else if (i.operands.size() > 1) {
      const u32 left = i.operands[1].immediate;
      std::erase_if(state.items, [&](const Pending& p) {
        return (p.kind == PendingKind::Product || p.kind == PendingKind::ProductRead) && p.groups > left;
      });
    }
  }

  static constexpr size_t DEEPEST = 6;  // calls

  const std::vector<Instruction>& code;
  const LatencyTable table;
  const int arch;
  std::vector<Effects> effects;
  std::set<int> leaders;
  std::map<Place, State> states;
  std::set<Place> waiting;
  int clock = 0;  // of the instruction looked at, in its block
  bool has_products = false;
  bool reports = false;
};

std::string quoted(const Instruction& i) {
  char at[32];
  snprintf(at, sizeof at, " at 0x%x", i.address);
  return "`" + i.text + "`" + at;
}

class Check : public Look {
 public:
  Hazards result;
  Check(const Program& program, int arch, int registers) : Look(program, arch, registers) { walk(); }

 private:
  std::set<std::pair<int, int>> told;

  void pair(Need need, const Pending& p, Unit consumer, int index) override {
    if (!reports) return;
    const Unit producer = p.unit;
    const File file = file_of(p.slot);
    const int needed = table.of(need, producer, file, consumer), between = clock - p.at;
    if (between < LONGEST && !table.knows(need, producer, file, consumer))
      result.unseen[std::string(NEEDS[int(need)]) + " " + unit_name(producer) + " " + FILES[int(file)] + " " +
                    unit_name(consumer)]++;
    if (between < needed) {
      const char* verb = file == File::Scoreboard ? "waits for" : need == Need::Read ? "reads" : "overwrites";
      const char* what = file == File::Scoreboard ? "sets it" : need == Need::AfterRead ? "reads it" : "writes it";
      tell(p, index,
           std::string(verb) + " " + slot_name(p.slot) + " " + std::to_string(between) + " clocks after " +
               quoted(code[p.producer]) + ", which " + what + " after " + std::to_string(needed));
    }
  }

  void hazard(const Pending& p, int index, bool writes) override {
    if (!reports) return;
    const Instruction& producer = code[p.producer];
    auto is_fence = [](const Instruction& i) { return i.op == Op::FENCE; };
    if (p.slot == ORDER_SLOT && is_fence(producer) && is_fence(code[index])) return;  // one fence needs no other
    if (p.slot == ORDER_SLOT)
      return tell(p, index,
                  "comes before " + quoted(producer) + " is done" +
                      awaited(std::min(producer.write_barrier, producer.read_barrier)));
    std::string text =
        std::string(writes ? "overwrites" : "reads") + " " + slot_name(p.slot) + ", which " + quoted(producer);
    switch (p.kind) {
      case PendingKind::LateRead:
        text +=
            " may not have read" + awaited(producer.read_barrier < 6 ? producer.read_barrier : producer.write_barrier);
        break;
      case PendingKind::Product:
        text += " may not have written: no WARPGROUP.DEPBAR between them waits for its group";
        break;
      case PendingKind::ProductRead:
        text += " may not have read: no WARPGROUP.DEPBAR between them waits for its group";
        break;
      case PendingKind::Unfenced: text += " has written, and no WARPGROUP.ARRIVE lies between them"; break;
      default: text += " may not have written" + awaited(producer.write_barrier);
    }
    tell(p, index, text);
  }

  static std::string awaited(u8 barrier) {
    if (barrier > 5) return ": it sets no scoreboard";
    return ": nothing between them waits for scoreboard " + std::to_string(barrier);
  }

  void uses(int index, const State& state) override {
    const int highest = effects[index].highest;
    result.highest_register = std::max(result.highest_register, highest);
    if (highest < state.registers || !told.insert({index, -1}).second) return;
    result.found.push_back({index, index,
                            quoted(code[index]) + " uses R" + std::to_string(highest) + "; a thread has " +
                                std::to_string(state.registers) + " registers there"});
  }

  void tell(const Pending& p, int index, const std::string& text) {
    if (told.insert({index, int(p.producer)}).second)
      result.found.push_back({index, int(p.producer), quoted(code[index]) + " " + text});
  }
};

class Measure : public Look {
 public:
  std::string text;

  Measure(const Program& program, int arch) : Look(program, arch, 0) {
    walk();
    for (const auto& [key, count] : seen) {
      const auto [need, producer, file, consumer, clocks] = key;
      text += std::string(NEEDS[int(need)]) + " " + unit_name(producer) + " " + FILES[int(file)] + " " +
              unit_name(consumer) + " " + std::to_string(clocks) + " " + std::to_string(count) + "\n";
    }
  }

 private:
  std::map<std::tuple<Need, Unit, File, Unit, int>, int> seen;

  void pair(Need need, const Pending& p, Unit consumer, int) override {
    const int between = clock - p.at;
    if (reports && between < LONGEST) seen[{need, p.unit, file_of(p.slot), consumer, between}]++;
  }
  void hazard(const Pending&, int, bool) override {}
  void uses(int, const State&) override {}
};

using Slots = std::bitset<SLOTS>;

// Follows a loaded value along every path, by the registers that hold it or values computed from it.
class Followed {
 public:
  int store = -1;
  bool elsewhere = false;

  Followed(const Program& program, int load) : code(program.code) {
    Slots given;
    for (const Use& u : effects_of(code[load], ARCH).writes) given.set(u.slot);
    reach(load + 1, given);
    while (!waiting.empty() && !elsewhere) {
      const int index = *waiting.begin();
      waiting.erase(waiting.begin());
      step(index, states[index]);
    }
  }

 private:
  static constexpr int ARCH = 90;  // decides units and latencies, not what is read and written

  const std::vector<Instruction>& code;
  std::map<int, Slots> states;
  std::set<int> waiting;

  void reach(int index, const Slots& held) {
    if (held.none() || index < 0 || index >= int(code.size())) return;
    auto [at, is_new] = states.try_emplace(index, held);
    const Slots all = at->second | held;
    if (!is_new && all == at->second) return;
    at->second = all;
    waiting.insert(index);
  }

  bool reads(const Effects& e, const Slots& held) const {
    return std::any_of(e.reads.begin(), e.reads.end(), [&](const Use& u) { return held[u.slot]; });
  }

  void step(int index, Slots held) {
    const Instruction& i = code[index];
    const Effects e = effects_of(i, ARCH);
    const bool guarded = i.guard != PT || i.guard_negated, used = reads(e, held);
    const bool computes = i.pipe == Pipe::Fma || i.pipe == Pipe::FmaHeavy || i.pipe == Pipe::Half ||
                          i.pipe == Pipe::Alu || i.pipe == Pipe::Fp64 || i.pipe == Pipe::Mufu;
    if (used && (i.op == Op::STG || i.op == Op::ST)) {
      const Operand& to = i.operands[0];
      elsewhere |=
          (store >= 0 && store != index) || held[to.index] || held[to.index + 1] || (e.guard < SLOTS && held[e.guard]);
      store = index;
    } else if (used && (!computes || (e.guard < SLOTS && held[e.guard]))) {
      elsewhere = true;
    }
    for (const Use& u : e.writes)
      if (used) held.set(u.slot);
      else if (!guarded) held.reset(u.slot);
    const Successors s = successors(i);
    elsewhere |= (s.calls || s.returns) && held.any();
    reach(s.target, held);
    if (s.next) reach(index + 1, held);
  }
};

}  // namespace

int only_store_of(const Program& program, int load) {
  const Followed followed(program, load);
  return followed.elsewhere ? -1 : followed.store;
}

Hazards find_hazards(const Program& program, int arch, int registers) { return Check(program, arch, registers).result; }

void require_no_hazard(const Program& program, u32 arch, u32 registers) {
  auto [at, is_new] = program.hazards.try_emplace({arch, registers});
  if (is_new) {
    const Hazards hazards = find_hazards(program, int(arch), int(registers));
    if (!hazards.found.empty()) at->second = hazards.found[0].message;
    if (hazards.found.size() > 1) at->second += " (and " + std::to_string(hazards.found.size() - 1) + " more)";
  }
  if (!at->second.empty()) throw Fault{at->second};
}

std::string measure_latencies(const Program& program, int arch) { return Measure(program, arch).text; }

}  // namespace sass
