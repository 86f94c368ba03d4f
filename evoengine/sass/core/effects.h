// The registers and predicates that an instruction reads and writes, when, and what else its control word orders.
#pragma once

#include "machine.h"

namespace sass {

// A register or predicate as one number: R0…R254, UR0…UR62, P0…P6, UP0…UP6, then the six scoreboards, and the order of
// memory, which fences establish and publishing instructions require.
using Slot16 = u16;
constexpr Slot16 UNIFORM_SLOTS = 256, PREDICATE_SLOTS = 320, UNIFORM_PREDICATE_SLOTS = 328, SCOREBOARD_SLOTS = 336;
constexpr Slot16 ORDER_SLOT = 342;
constexpr int SLOTS = 343;

// R12, UP3, scoreboard 2
std::string slot_name(Slot16);

// Instructions that deliver results and read operands with the same latency.
// clang-format off: a list of names
#define SASS_UNITS(X)                                                                                             \
  X(Other) X(Fma) X(WideLow) X(WideHigh) X(Alu) X(Half) X(HalfHeavy) X(Tensor) X(ShortTensor) X(IntegerTensor)    \
  X(Double) X(Uniform) X(UniformMove) X(UniformFloat) X(Special) X(ToUniform) X(FromPredicates) X(Vote) X(Memory) \
  X(AtomicValue) X(Indexed) X(Sync) X(Xu) X(Branch) X(Group) X(Scoreboard) X(Guard)
// clang-format on
enum class Unit : u8 {
#define SASS_NAME(name) name,
  SASS_UNITS(SASS_NAME)
#undef SASS_NAME
};
#define SASS_ONE(name) +1
constexpr int UNITS = 0 SASS_UNITS(SASS_ONE);
#undef SASS_ONE
const char* unit_name(Unit);

// The queues in which instructions of variable latency wait.
// clang-format off: a list of names
enum class Queue : u8 {
  None, Shared, Global, Constant, Xu, Reduce, Barriers, ToUniform, Tensor, DoubleTensor, TensorMemory
};
// clang-format on
// Whether the scoreboard of a later instruction shows that an earlier one's result is available too.
bool answers_in_order(Queue);
// Whether instructions of the two queues read their registers in the order of issue.
bool reads_in_order(Queue, Queue);

// A register that an instruction reads or writes, and the latency class of the access: IMAD.WIDE reads the upper word
// of its addend later than the lower one, and an atomic its value later than its address.
struct Use {
  Slot16 slot;
  Unit unit;
};

struct Effects {
  std::vector<Use> reads;  // guard and everything else
  std::vector<Use> writes;
  std::vector<Slot16> late;  // those of `reads` that are read at an unknown time after issue
  Slot16 guard = SLOTS;      // slot of the predicate before the instruction
  Unit unit = Unit::Other;
  Queue queue = Queue::None;
  bool variable = false;  // its results arrive after an unknown time
  int highest = -1;       // register read or written

  bool writes_to(Slot16 slot) const {
    for (const Use& u : writes)
      if (u.slot == slot) return true;
    return false;
  }
};

Effects effects_of(const Instruction&, int arch);

}  // namespace sass
