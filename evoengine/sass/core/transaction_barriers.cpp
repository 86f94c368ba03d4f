// SYNCS: transaction barriers (mbarrier), in the eight bytes of shared memory that hardware keeps them in; at the end
// those of sm_80 to sm_89, which know no transactions.
//
// ptxas writes 2^20 − count into bits 1…20 and 43…62; mbarrier.pending_count reads bits 43…62, waits compare bit 63.
// So bits 1…20 are the arrivals expected of each phase and 43…62 those still to come in this one, both negated; bit 63
// is the phase's parity. Here bits 21…41 hold what is expected less what has come, and bit 0 marks a barrier that was
// initialised; what hardware keeps there is not known and no instruction reads it.
#include "async.h"
#include "memory_ops.h"
#include "order.h"

namespace sass {

namespace {

constexpr u32 MOST = (1u << 20) - 1;  // arrivals, and bytes of one phase (PTX ISA, "mbarrier")

struct Barrier {
  u32 expected, pending;
  i64 transactions;
  u32 parity;
};

u64 negated(u32 count) { return ((1u << 20) - count) & MOST; }

Barrier unpack(u64 word) {
  i64 transactions = word >> 21 & 0x1fffff;
  if (transactions >> 20) transactions -= 1 << 21;
  return {u32(negated(word >> 1 & MOST)), u32(negated(word >> 43 & MOST)), transactions, u32(word >> 63)};
}

u64 pack(const Barrier& b) {
  u64 transactions = u64(b.transactions) & 0x1fffff;
  return 1 | negated(b.expected) << 1 | transactions << 21 | negated(b.pending) << 43 | u64(b.parity) << 63;
}

[[noreturn]] void fault(const Instruction& by, u32 address, const std::string& why) {
  char text[64];
  snprintf(text, sizeof text, " at the mbarrier at shared address 0x%x: ", address & 0xffffff);
  throw Fault{named(by) + text + why};
}

bool is_barrier(u64 word) { return word & 1 && !(word >> 42 & 1) && negated(word >> 1 & MOST); }

u32 in_own(const Block& block, u32 address) { return (address & 0xffffff) | block.rank << 24; }

u64 load(const u8* from) {
  u64 word;
  std::memcpy(&word, from, 8);
  return word;
}

Barrier read(const u8* from, u32 address, const Instruction& by) {
  u64 word = load(from);
  if (!is_barrier(word)) fault(by, address, "none was initialised there, or it was overwritten");
  return unpack(word);
}

}  // namespace

u64 change_barrier(Block& from, u32 address, u32 arrivals, i64 transactions, u32 leaving, const Instruction& by) {
  Block* block = &from;
  u8* at = shared_bytes(block, address, 8, 8, by);
  Barrier b = read(at, address, by);
  u64 before = load(at);
  b.transactions += transactions;
  if (b.transactions > MOST || b.transactions < -i64(MOST))
    fault(by, address, std::to_string(b.transactions) + " bytes expected of one phase, of " + std::to_string(MOST));
  if (arrivals > b.pending)
    fault(by, address,
          std::to_string(arrivals) + " arrivals where the phase waits for " + std::to_string(b.pending) + " of " +
              std::to_string(b.expected));
  b.pending -= arrivals;
  b.expected -= leaving;
  if (!b.pending && !b.transactions) {
    b.pending = b.expected;
    b.parity ^= 1;
    if (from.cluster->order) from.cluster->order->complete_phase(address);
  }
  u64 word = pack(b);
  std::memcpy(at, &word, 8);
  return before;
}

bool transaction_phase_done(Machine& machine, Block& own, u32 address, u32 parity) {
  Block* block = &own;
  const Instruction& by = machine.program->code[0];
  u64 word = load(shared_bytes(block, address, 8, 8, by));
  return !is_barrier(word) || unpack(word).parity != parity;
}

namespace {

// The barrier's own eight bytes: whoever uses it must know that it was initialised.
void order_access(Context& c, const Instruction& i, int lane, u32 address, Touch kind) {
  Order* order = order_of(c);
  if (!order) return;
  Lanes at;
  at[lane] = address;
  order->touch(c.warp, i, kind, 1u << lane, at.v, 8, nullptr);
}

// Gives each lane a barrier's word before its arrival, unless nobody wants it.
Step give_state(Context& c, const Instruction& i, const Lanes (&state)[2]) {
  if (i.operands[0].index == RZ) return Step::Done;
  write(c, i.operands[0], state[0]);
  write(c, i.operands[0], state[1], 1);
  return Step::Done;
}

// SYNCS.EXCH.64 URZ, [UR8+0x10], UR4: mbarrier.init, whose value ptxas computes.
Step initialise(Context& c, const Instruction& i) {
  Lanes places, low, high;
  addresses(c, i.operands[1], places);
  int lane = __builtin_ctz(c.lanes);
  u64 value = integer(c, i.operands[2], low)[lane] | u64(upper(c, i.operands[2], high)[lane]) << 32;
  u8* at = own_bytes(*c.warp.block, places[lane], 8, 8, i);
  u32 count = u32(negated(value >> 1 & MOST));
  if (!count || value != (negated(count) << 1 | negated(count) << 43))
    fault(i, places[lane], "an initial value that is no count of 1 to " + std::to_string(MOST));
  u64 before = load(at);
  order_access(c, i, lane, in_own(*c.warp.block, places[lane]), Touch::Write);
  value |= 1;
  std::memcpy(at, &value, 8);
  Lanes out;
  for (int half = 0; half < 2; half++) {
    for (u32& v : out.v) v = u32(before >> 32 * half);
    write(c, i.operands[0], out, half && i.operands[0].index != URZ && i.operands[0].index != RZ);
  }
  return Step::Done;
}

Step invalidate(Context& c, const Instruction& i) {
  Lanes places;
  addresses(c, i.operands[0], places);
  for (int lane = 0; lane < LANES; lane++) {
    if (!(c.lanes >> lane & 1)) continue;
    u8* at = own_bytes(*c.warp.block, places[lane], 8, 8, i);
    read(at, places[lane], i);
    order_access(c, i, lane, in_own(*c.warp.block, places[lane]), Touch::Write);
    std::memset(at, 0, 8);
  }
  return Step::Done;
}

// What an arrival does beside one arrival and the bytes of its register: A1T0 no bytes, ART0 the register's arrivals,
// A0TR bytes without arrival, A0TX bytes that have come, A0T1 one copy more to wait for.
enum Arrival { OneAndBytes, One, Many, Bytes, BytesCome, Copy };

// SYNCS.ARRIVE.TRANS64[.A1T0 …] R2, [R4+UR8], R6; .RED returns nothing and reaches other blocks of the cluster.
Step arrive(Context& c, const Instruction& i) {
  Lanes places, scratch, state[2];
  addresses(c, i.operands[1], places);
  const Lanes& value = integer(c, i.operands[2], scratch);
  u32 ordered = ~0u;  // lanes most often arrive at one barrier
  for (int lane = 0; lane < LANES; lane++) {
    if (!(c.lanes >> lane & 1)) continue;
    u32 arrivals = i.a == OneAndBytes || i.a == One ? 1 : i.a == Many ? value[lane] : 0;
    i64 bytes = i.a == OneAndBytes || i.a == Bytes ? i64(value[lane]) : i.a == Copy;
    if (i.a == BytesCome) bytes = -i64(value[lane]);
    if (!i.b) own_bytes(*c.warp.block, places[lane], 8, 8, i);
    u32 address = i.b ? places[lane] : in_own(*c.warp.block, places[lane]);
    if (Order* order = order_of(c); order && address != ordered) {
      order_access(c, i, lane, ordered = address, Touch::Read);
      if (arrivals) order->arrive(c.warp, order->mbarrier(address));
    }
    if (i.b) {  // through the network between SMs, also to the block itself
      c.machine.send(c.warp, [block = c.warp.block, address, arrivals, bytes, by = &i] {
        change_barrier(*block, address, arrivals, bytes, by->c ? arrivals : 0, *by);
      });
      continue;
    }
    u64 before = change_barrier(*c.warp.block, address, arrivals, bytes, i.c ? arrivals : 0, i);
    state[0].v[lane] = u32(before);
    state[1].v[lane] = u32(before >> 32);
  }
  return give_state(c, i, state);
}

// SYNCS.PHASECHK.TRANS64[.TRYWAIT] P0, [R4+UR8], R6: has the phase of the parity in bit 31 of R6 completed?
Step check_phase(Context& c, const Instruction& i) {
  Lanes places, scratch;
  addresses(c, i.operands[1], places);
  const Lanes& parity = integer(c, i.operands[2], scratch);
  u32 passed = 0, ordered = ~0u;
  for (int lane = 0; lane < LANES; lane++) {
    if (!(c.lanes >> lane & 1)) continue;
    u8* at = own_bytes(*c.warp.block, places[lane], 8, 8, i);
    const u32 address = in_own(*c.warp.block, places[lane]);
    Order* order = order_of(c);
    if (order && address != ordered) order_access(c, i, lane, address, Touch::Read);
    if (read(at, places[lane], i).parity == parity[lane] >> 31) continue;
    if (order && address != ordered) order->acquire(c.warp, order->mbarrier(address));
    ordered = address;
    if (c.machine.visits && !passed) c.machine.visits->add(c.warp, Visit::Wait, address & 0xffffff);
    passed |= 1u << lane;
  }
  // Lanes that run apart look again, as others of the warp may be those that they wait for.
  c.looked = !passed;
  if (i.a && !passed && c.warp.together) {
    int lane = __builtin_ctz(c.lanes);
    c.warp.wait = {Wait::Kind::TransactionBarrier, in_own(*c.warp.block, places[lane]), parity[lane] >> 31};
    return Step::Waiting;
  }
  write_predicate(c, i.operands[0], passed);
  return Step::Done;
}

// ── sm_80 to sm_89 ──────────────────────────────────────────────────────────────────────────────────────────────────
//
// There a program changes both words of a barrier itself: ptxas stores 2^30 − count and 2^31 − count, adds to the upper
// word for arrivals that complete no phase, to the lower for those that leave, and reads the upper one to compare its
// bit 31, the phase's parity. So the lower word has the arrivals expected of each phase and the other bits of the upper
// one those still to come, both negated. Hardware adds an arrival and begins the next phase.

constexpr u32 PARITY = 1u << 31, ARRIVALS = PARITY - 1, FEWEST = 1u << 30;

bool is_barrier_in_words(u64 word) {
  const u32 expected = u32(word), pending = u32(word >> 32) & ARRIVALS;
  return expected < FEWEST && expected >= FEWEST - MOST && pending >= PARITY - MOST;
}

u8* barrier_in_words(Block& block, u32 address, const Instruction& by) {
  u8* at = own_bytes(block, address, 8, 8, by);
  if (!is_barrier_in_words(load(at))) fault(by, address, "none was initialised there, or it was overwritten");
  return at;
}

u64 arrive_by_words(Block& block, u32 address, const Instruction& by) {
  u8* at = barrier_in_words(block, address, by);
  const u64 before = load(at);
  const u32 expected = u32(before);
  u32 pending = u32(before >> 32);
  pending++;
  if (!(pending & ARRIVALS)) {
    pending |= expected + FEWEST;
    if (Order* order = block.cluster->order) order->complete_phase(in_own(block, address));
  }
  const u64 word = expected | u64(pending) << 32;
  std::memcpy(at, &word, 8);
  return before;
}

// ATOMS.ARRIVE.64 R4, [R2]: one arrival of each lane, which gets the barrier's words before it.
Step arrive_by_atomic(Context& c, const Instruction& i) {
  Lanes places, state[2];
  addresses(c, i.operands[1], places);
  note_access(c, Access::Space::Shared, 8, true, false);
  c.access.atomic = true;
  for (int lane = 0; lane < LANES; lane++) {
    if (!(c.lanes >> lane & 1)) continue;
    c.access.addresses[lane] = places[lane];
    const u32 address = in_own(*c.warp.block, places[lane]);
    barrier_in_words(*c.warp.block, places[lane], i);
    if (Order* order = order_of(c)) {
      order_access(c, i, lane, address, Touch::Atomic);
      order->arrive(c.warp, order->mbarrier(address));
    }
    const u64 before = arrive_by_words(*c.warp.block, places[lane], i);
    state[0].v[lane] = u32(before);
    state[1].v[lane] = u32(before >> 32);
  }
  return give_state(c, i, state);
}

// When the lane's copies so far have landed, it arrives, or they count as one that was expected (TRANSCNT).
// b: by words
Step copies_arrive(Context& c, const Instruction& i) {
  Lanes places;
  addresses(c, i.operands[0], places);
  if (Order* order = order_of(c))
    for (u32 rest = c.lanes, ordered = ~0u; rest; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      const u32 address = in_own(*c.warp.block, places[lane]);
      if (address == ordered) continue;
      order_access(c, i, lane, ordered = address, Touch::Read);
      order->copies_arrive(c.warp, address);
    }
  Completion done;
  done.queue = Completion::Queue::Copy;
  done.warp = &c.warp;
  Block* block = c.warp.block;
  done.land = [block, places, lanes = c.lanes, by = &i] {
    if (by->b) {
      for (int lane = 0; lane < LANES; lane++)
        if (lanes >> lane & 1) arrive_by_words(*block, places[lane], *by);
      return;
    }
    u32 arrivals = by->a ? 1 : 0;
    i64 copies = by->a ? 0 : -1;
    for (int lane = 0; lane < LANES; lane++)
      if (lanes >> lane & 1) change_barrier(*block, in_own(*block, places[lane]), arrivals, copies, 0, *by);
  };
  c.machine.begin(std::move(done));
  return Step::Done;
}

}  // namespace

bool holds_barrier(const Block& block, u32 address) {
  const u32 offset = address & 0xffffff;
  return offset + 8 <= block.shared.size() && is_barrier_in_words(load(block.shared.data() + offset));
}

Execute prepare_arrival_by_atomic(Instruction& i) { return i.operands.size() == 2 ? arrive_by_atomic : nullptr; }

Execute prepare_transaction_barrier(Instruction& i) {
  Modifiers m(i);
  size_t operands = i.operands.size();
  if (m.take("EXCH")) return m.take("64") && m.none_left() && operands == 3 ? initialise : nullptr;
  if (m.take("CCTL")) return m.take("IV") && m.none_left() && operands == 1 ? invalidate : nullptr;
  if (m.take("PHASECHK")) {
    bool known = m.take("TRANS64");
    i.a = m.take("TRYWAIT");
    return known && m.none_left() && operands == 3 ? check_phase : nullptr;
  }
  if (!m.take("ARRIVE") || !m.take("TRANS64")) return nullptr;
  i.a = m.take("A1T0")   ? One
        : m.take("ART0") ? Many
        : m.take("A0TR") ? Bytes
        : m.take("A0TX") ? BytesCome
        : m.take("A0T1") ? Copy
                         : OneAndBytes;
  i.b = m.take("RED");
  i.c = m.take("OPTOUT");
  return m.none_left() && operands == 3 ? arrive : nullptr;
}

Execute prepare_copies_arrive(Instruction& i) {
  Modifiers m(i);
  bool known = m.take("LDGSTSBAR") && m.take("64");
  i.a = m.take("ARVCNT");
  i.b = !i.a && !m.take("TRANSCNT");  // of sm_80 to sm_89, where all are arrivals
  return known && m.none_left() && i.operands.size() == 1 ? copies_arrive : nullptr;
}

}  // namespace sass
