// Branches, convergence, calls, and barriers of a block.
#include "order.h"

namespace sass {

Step call_absolute(Context&, const Instruction&);  // in calls.cpp
Step load_address(Context&, const Instruction&);

namespace {

// ── branches ────────────────────────────────────────────────────────────────────────────────────────────────────────

int target_of(const Instruction& i) {
  for (const Operand& o : i.operands)
    if (o.kind == Operand::Kind::Label) return o.target;
  return -1;
}

// The lanes continue at the label.
Step jump(Context& c, const Instruction& i, u32 lanes) {
  c.jump = target_of(i);
  if (c.jump < 0) throw Fault{"a jump to nowhere: " + i.text};
  c.jumping = lanes;
  return Step::Done;
}

// Each lane continues at the offset from `start`, in bytes, that the first operand states.
Step jump_by_lane(Context& c, const Instruction& i, i64 start) {
  Lanes scratch;
  const Lanes& to = integer(c, i.operands[0], scratch);
  const i64 end = i64(c.machine.program->code.size()) * 16;
  for (int lane = 0; lane < LANES; lane++) {
    const i64 address = start + i32(to[lane]);
    if ((c.lanes >> lane & 1) && (address < 0 || address >= end)) throw Fault{"a jump out of the kernel: " + i.text};
    c.jump_lanes.v[lane] = u32(address / 16);
  }
  c.jump = -2;
  c.jumping = c.lanes;
  return Step::Done;
}

Step branch(Context& c, const Instruction& i) {
  u32 taken = c.lanes;
  for (const Operand& o : i.operands)
    if (o.kind == Operand::Kind::Predicate || o.kind == Operand::Kind::UniformPredicate) taken &= predicate(c, o);
  if (i.a == 1 && taken) taken = c.warp.active;              // .ANY: if one lane branches, all do
  if (i.a == 2 && c.warp.active == c.warp.alive) taken = 0;  // .DIV: only if lanes have diverged
  return taken ? jump(c, i, taken) : Step::Done;
}

Execute prepare_branch(Instruction& i) {
  Modifiers m(i);
  m.take("U");
  m.take("CONV");
  m.take("REL");
  m.take("NODEC");
  m.take("NOINC");
  i.a = m.take("ANY") ? 1 : m.take("DIV") ? 2 : 0;
  return m.none_left() ? branch : nullptr;
}

Step branch_indirect(Context& c, const Instruction& i) {  // BRX R2 -0x10: relative to the next instruction
  const i32 offset = i.operands.size() > 1 ? i32(i.operands[1].immediate) : i.operands[0].offset;
  return jump_by_lane(c, i, i64(i.address) + 16 + offset);
}

Execute prepare_branch_indirect(Instruction&) { return branch_indirect; }

// The caller puts the return address into registers before the call. CALL.REL R6 `(entry): through a pointer to a
// function
Step call(Context& c, const Instruction& i) {
  return i.operands[0].kind == Operand::Kind::Register ? jump_by_lane(c, i, 0) : jump(c, i, c.lanes);
}

Execute prepare_call(Instruction& i) {
  Modifiers m(i);
  m.take("NOINC");
  const bool absolute = m.take("ABS"), relative = m.take("REL");
  if (i.operands.empty() || absolute == relative || !m.none_left()) return nullptr;
  if (absolute && i.operands[0].kind == Operand::Kind::Register) return call_absolute;
  return i.operands[0].kind == Operand::Kind::Register || target_of(i) >= 0 ? call : nullptr;
}

Step back(Context& c, const Instruction& i) { return jump_by_lane(c, i, 0); }

Execute prepare_back(Instruction& i) {
  Modifiers m(i);
  m.take("NODEC");
  return (m.take("REL") || m.take("ABS")) && m.none_left() ? back : nullptr;
}

Step leave(Context& c, const Instruction& i) {
  u32 leaving = c.lanes;
  for (const Operand& o : i.operands)
    if (o.kind == Operand::Kind::Predicate) leaving &= predicate(c, o);
  c.finished = leaving;
  return Step::Done;
}

Execute prepare_leave(Instruction&) { return leave; }

Step trap(Context&, const Instruction& i) { throw Fault{"the kernel ended itself by a trap: " + i.text}; }
Execute prepare_trap(Instruction&) { return trap; }

// ── convergence ─────────────────────────────────────────────────────────────────────────────────────────────────────

Step set_convergence(Context& c, const Instruction& i) {
  const int barrier = i.operands[0].index;
  for (u32 rest = c.lanes; rest; rest &= rest - 1) c.warp.convergence[barrier][__builtin_ctz(rest)] = c.lanes;
  c.warp.arrived[barrier] &= ~c.lanes;
  return Step::Done;
}

Execute prepare_set_convergence(Instruction& i) {
  Modifiers m(i);
  m.take("RELIABLE");
  m.take("RECONVERGENT");
  return m.none_left() ? set_convergence : nullptr;
}

Step converge(Context& c, const Instruction& i) {
  Warp& w = c.warp;
  if (w.together) return Step::Done;
  w.arrived[i.a] |= c.lanes;
  c.parked = i.a;
  return Step::Done;
}

Execute prepare_converge(Instruction& i) {
  Modifiers m(i);
  m.take("RELIABLE");
  m.take("RECONVERGENT");
  if (i.operands.empty() || i.operands[0].kind != Operand::Kind::Barrier) return nullptr;
  i.a = i.operands[0].index;
  return m.none_left() ? converge : nullptr;
}

Step leave_convergence(Context& c, const Instruction& i) {
  u32 leaving = c.lanes;
  int barrier = -1;
  for (const Operand& o : i.operands)
    if (o.kind == Operand::Kind::Predicate) leaving &= predicate(c, o);
    else if (o.kind == Operand::Kind::Barrier) barrier = o.index;
  if (barrier < 0) throw Fault{"BREAK without a barrier: " + i.text};
  u32 before[LANES];  // lanes in another call of a recursion keep their own masks in the same barrier
  std::memcpy(before, c.warp.convergence[barrier], sizeof before);
  for (u32 rest = leaving; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    for (int l = 0; l < LANES; ++l)
      if (before[l] == before[lane]) c.warp.convergence[barrier][l] &= ~(1u << lane);
  }
  if (c.warp.arrived[barrier]) release(c.warp, barrier);
  return Step::Done;
}

Execute prepare_leave_convergence(Instruction& i) {
  Modifiers m(i);
  m.take("RELIABLE");
  return m.none_left() ? leave_convergence : nullptr;
}

// BMOV moves a convergence barrier's lanes to or from a register, to save it across a call.
Step move_convergence(Context& c, const Instruction& i) {
  const Operand &to = i.operands[0], &from = i.operands[1];
  Lanes value, scratch;
  if (from.kind == Operand::Kind::Barrier) std::memcpy(value.v, c.warp.convergence[from.index], sizeof value.v);
  else value = integer(c, from, scratch);
  if (to.kind != Operand::Kind::Barrier) write(c, to, value);
  for (u32 rest = c.lanes; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (i.a) c.warp.convergence[from.index][lane] = 0;
    if (to.kind == Operand::Kind::Barrier) c.warp.convergence[to.index][lane] = value[lane];
  }
  return Step::Done;
}

Execute prepare_move_convergence(Instruction& i) {
  Modifiers m(i);
  m.take("32");
  m.take("PQUAD");
  i.a = m.take("CLEAR");
  bool known = i.operands.size() == 2 &&
               (i.operands[0].kind == Operand::Kind::Barrier || i.operands[1].kind == Operand::Kind::Barrier);
  return m.none_left() && known ? move_convergence : nullptr;
}

// WARPSYNC mask: all lanes of the mask meet, or all lanes if none is given.
Step synchronise_warp(Context& c, const Instruction& i) {
  Warp& w = c.warp;
  if (w.together) return Step::Done;
  Lanes mask, scratch;
  if (i.a) mask = integer(c, i.operands[0], scratch);
  for (u32 rest = c.lanes; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    w.sync_mask[lane] = i.a ? mask[lane] | 1u << lane : ALL;
  }
  w.synced |= c.lanes;
  c.parked = AT_WARPSYNC;
  return Step::Done;
}

Execute prepare_synchronise_warp(Instruction& i) {
  Modifiers m(i);
  const bool all = m.take("ALL");
  i.a = !all && !i.operands.empty() &&
        (i.operands[0].kind == Operand::Kind::Register || i.operands[0].kind == Operand::Kind::Immediate);
  m.take("EXCLUSIVE");
  m.take("COLLECTIVE");
  return m.none_left() ? synchronise_warp : nullptr;
}

// ── barriers of a block ─────────────────────────────────────────────────────────────────────────────────────────────

u32 first_lane(Context& c, const Operand& o) {
  Lanes scratch;
  return integer(c, o, scratch)[__builtin_ctz(c.lanes)];
}

// BAR.SYNC barrier[, threads]; BAR.ARV barrier, threads; BAR.RED barrier[, threads], P. a = waits, b = reduces, c =
// Reduced
Step barrier(Context& c, const Instruction& i) {
  Warp& w = c.warp;
  if (!w.together && w.strict) {
    w.at_barrier |= c.lanes;
    c.parked = AT_BAR;
    return Step::Done;
  }
  if (!w.together && w.active != w.alive) {  // counts whole warps: these lanes wait for the others
    c.jump = w.pc;
    c.jumping = c.lanes;
    return Step::Done;
  }
  u32 index = i.operands.empty() ? 0 : first_lane(c, i.operands[0]);
  u32 expected = 0;
  for (size_t n = 1; n < i.operands.size(); n++)
    if (i.operands[n].kind != Operand::Kind::Predicate) expected = first_lane(c, i.operands[n]);
  if (index >= 16) throw Fault{"BAR with barrier " + std::to_string(index) + ": there are 16"};
  if (w.strict && index >= c.machine.launch.barriers)
    throw Fault{"BAR with barrier " + std::to_string(index) + ": the binary declares " +
                std::to_string(c.machine.launch.barriers)};
  NamedBarrier& b = w.block->barriers[index];
  if (b.arrived && b.expected != expected)
    throw Fault{"barrier " + std::to_string(index) + " is waited at with different numbers of threads"};
  b.expected = expected;
  // with a number of threads, a warp counts as 32; it is a multiple of the warp size
  b.arrived += expected ? LANES : __builtin_popcount(w.alive);
  if (i.b) {
    b.true_ones += u32(__builtin_popcount(predicate(c, i.operands.back()) & c.lanes));
    w.reduced = Reduced(i.c);
  }
  if (i.a) w.wait = {Wait::Kind::Barrier, index, b.generation};
  if (Order* order = w.block->cluster->order) order->arrive_at_barrier(w, order->barrier(w.block->rank, index));
  check_barrier(*w.block, index);
  return Step::Done;
}

Execute prepare_barrier(Instruction& i) {
  Modifiers m(i);
  m.take("DEFER_BLOCKING");
  bool sync = m.take("SYNC"), arrive = m.take("ARV");
  i.b = m.take("RED");
  i.c = int(m.take("AND") ? Reduced::And : m.take("OR") ? Reduced::Or : Reduced::Count);
  m.take("POPC");
  i.a = sync || i.b;
  const bool has_predicate = !i.operands.empty() && i.operands.back().kind == Kind::Predicate;
  return (i.a || arrive) && i.b == has_predicate && m.none_left() ? barrier : nullptr;
}

// B2R.RESULT R[, P]: the result of the warp's last BAR.RED; the predicate states whether it is nonzero
Step barrier_result(Context& c, const Instruction& i) {
  Lanes out;
  each(out, [&](int) { return c.warp.reduction; });
  write(c, i.operands[0], out);
  if (i.operands.size() > 1) write_predicate(c, i.operands[1], c.warp.reduction ? ALL : 0);
  return Step::Done;
}

Execute prepare_barrier_result(Instruction& i) {
  Modifiers m(i);
  const bool result = m.take("RESULT");
  return result && m.none_left() && (i.operands.size() == 1 || i.operands.size() == 2) ? barrier_result : nullptr;
}

Execute prepare_load_address(Instruction& i) {
  return !i.operands.empty() && i.operands[0].kind == Operand::Kind::Register && i.modifiers.empty() ? load_address
                                                                                                     : nullptr;
}

Execute prepare_no_operation(Instruction&) { return nothing; }

}  // namespace

const Opcode CONTROL[] = {
    {"BRA", Pipe::Branch, prepare_branch},
    {"JMP", Pipe::Branch, prepare_branch},
    {"BRX", Pipe::Branch, prepare_branch_indirect},
    {"BRXU", Pipe::Branch, prepare_branch_indirect},
    {"CALL", Pipe::Branch, prepare_call},
    {"RET", Pipe::Branch, prepare_back},
    {"LEPC", Pipe::Branch, prepare_load_address},
    {"EXIT", Pipe::Branch, prepare_leave},
    {"BPT", Pipe::Branch, prepare_trap},
    {"BSSY", Pipe::Branch, prepare_set_convergence},
    {"BSYNC", Pipe::Branch, prepare_converge},
    {"BREAK", Pipe::Branch, prepare_leave_convergence},
    {"BMOV", Pipe::Branch, prepare_move_convergence},
    {"WARPSYNC", Pipe::Branch, prepare_synchronise_warp},
    {"BAR", Pipe::Branch, prepare_barrier},
    {"B2R", Pipe::Branch, prepare_barrier_result},
    {"NOP", Pipe::None, prepare_no_operation},
    {"YIELD", Pipe::Branch, prepare_no_operation},
    {"NANOSLEEP", Pipe::Branch, prepare_no_operation},
    {"ENDCOLLECTIVE", Pipe::Branch, prepare_no_operation},
    {nullptr, Pipe::None, nullptr},
};

}  // namespace sass
