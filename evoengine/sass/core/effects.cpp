#include "effects.h"

#include <algorithm>

#include "memory_ops.h"

namespace sass {

namespace {

using std::string_view;

bool one_of(string_view name, std::initializer_list<string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Instructions without a destination.
bool only_reads(string_view base) {
  return one_of(base,
                {"STG",          "STS",      "STL",           "ST",       "STSM",         "RED",     "REDG",
                 "BRA",          "JMP",      "BRX",           "EXIT",     "BAR",          "NOP",     "BSSY",
                 "BSYNC",        "BREAK",    "MEMBAR",        "ERRBAR",   "CGAERRBAR",    "CCTL",    "CCTLL",
                 "WARPSYNC",     "LDGSTS",   "LDGDEPBAR",     "DEPBAR",   "CALL",         "RET",     "UTMALDG",
                 "UTMASTG",      "UTMAREDG", "UBLKCP",        "UBLKRED",  "UTMACMDFLUSH", "UTMAPF",  "UBLKPF",
                 "UTMACCTL",     "FENCE",    "WARPGROUP",     "ARRIVES",  "NANOSLEEP",    "YIELD",   "UCGABAR_ARV",
                 "UCGABAR_WAIT", "BPT",      "ENDCOLLECTIVE", "PREFETCH", "ACQBULK",      "PREEXIT", "BRXU"});
}

struct Builder {
  const Instruction& i;
  Effects& e;
  string_view base;
  int arch;

  void add(std::vector<Use>& to, int slot, Unit unit) {
    const bool known =
        std::any_of(to.begin(), to.end(), [&](const Use& u) { return u.slot == slot && u.unit == unit; });
    if (!known) to.push_back({Slot16(slot), unit});
  }
  void add(std::vector<Use>& to, int slot) { add(to, slot, e.unit); }
  void registers(std::vector<Use>& to, int first, int count) {
    if (first == RZ || first < 0) return;
    for (int n = 0; n < count && first + n < RZ; n++) add(to, first + n);
    e.highest = std::max(e.highest, std::min(first + count - 1, RZ - 1));
  }
  void uniforms(std::vector<Use>& to, int first, int count) {
    if (first == URZ || first < 0) return;
    for (int n = 0; n < count && first + n < URZ; n++) add(to, UNIFORM_SLOTS + first + n);
  }

  // `count` registers that begin at the operand's; predicates are one whatever the count.
  void use(std::vector<Use>& to, const Operand& o, int count = 1) {
    switch (o.kind) {
      case Kind::Register: return registers(to, o.index, count);
      case Kind::Uniform: return uniforms(to, o.index, count);
      case Kind::Predicate:
        if (o.index != PT) add(to, PREDICATE_SLOTS + o.index);
        return;
      case Kind::UniformPredicate:
        if (o.index != PT) add(to, UNIFORM_PREDICATE_SLOTS + o.index);
        return;
      case Kind::Constant: registers(to, o.index, 1); return uniforms(to, o.uniform, 1);
      case Kind::MatrixDescriptor: return uniforms(to, o.index, o.text.starts_with("gdesc") ? 4 : 2);
      case Kind::Memory: return address(to, o);
      default: return;
    }
  }
  void read(size_t operand, int count = 1) {
    if (operand < i.operands.size()) use(e.reads, i.operands[operand], count);
  }
  void read_from(size_t operand, int count = 1) {
    for (; operand < i.operands.size(); operand++) read(operand, count);
  }
  void write(size_t operand, int count = 1) {
    if (operand < i.operands.size()) use(e.writes, i.operands[operand], count);
  }

  bool is_global() const {
    return one_of(base,
                  {"LDG", "STG", "LD", "ST", "ATOM", "ATOMG", "RED", "REDG", "CCTL", "PREFETCH", "QSPC", "LDGSTS"});
  }
  void address(std::vector<Use>& to, const Operand& o) {
    if (const size_t at = o.text.find("desc[UR"); at != o.text.npos)
      uniforms(to, std::atoi(o.text.c_str() + at + 7), 2);
    const bool far = is_global() && !(base == "LDGSTS" && &o == &i.operands[0]);
    registers(to, o.index, o.wide || (far && is_pair(i, o)) ? 2 : 1);
    uniforms(to, o.uniform, far || base[0] == 'U' ? 2 : 1);
  }

  int width() const {
    return has(i, "128") || has(i, "F32x4") || has(i, "F16x8") || has(i, "BF16x8") ? 4
           : has(i, "F32x2") || has(i, "F16x4") || has(i, "BF16x4")                ? 2
           : has(i, "64") || has(i, "U64") || has(i, "S64") || has(i, "F64")       ? 2
                                                                                   : 1;
  }
  // Instructions on 64-bit integers, whose registers are pairs.
  bool is_pair_of_words() const {
    return one_of(base,
                  {"IADD", "UIADD", "UIADD3", "MOV", "UMOV", "SEL", "USEL", "ISETP", "UISETP", "IMNMX", "UIMNMX"}) &&
           width() == 2;
  }
  bool wide(size_t modifier) const {
    if (modifier >= i.modifiers.size()) return false;
    const std::string& m = i.modifiers[modifier];
    return m == "F64" || m == "S64" || m == "U64";
  }

  void matrix_product() {
    const std::string& shape = i.modifiers.empty() ? i.opcode : i.modifiers[0];
    int a = 2, sums = 4, b = 0;
    if (base == "DMMA") {
      int depth = 4;
      if (std::sscanf(shape.c_str(), "16x8x%d", &depth) == 1) a = depth, sums = 8;
      b = depth / 2;
    } else if (base == "BMMA") {
      a = shape == "168256" ? 4 : 2;
    } else if (base == "QMMA") {
      a = 4;
      sums = has(i, "F16") ? 2 : 4;
    } else if (base == "IMMA") {
      a = shape == (i.sparse ? "16864" : "16832") ? 4 : shape == (i.sparse ? "16832" : "16816") ? 2 : 1;
      sums = shape == "8816" ? 2 : 4;
    } else if (base == "HMMA") {
      const bool whole_words = has(i, "TF32");
      if (i.sparse) a = shape == "16832" || (whole_words && shape == "16816") ? 4 : 2;
      else a = shape == "16816" || (whole_words && shape == "1688") ? 4 : 2;
      sums = i.modifiers.size() > 1 && i.modifiers[1] == "F16" ? 2 : 4;
    }
    write(0, sums);
    read(1, a);
    read(2, b ? b : i.sparse ? a : std::max(1, a / 2));
    read(3, sums);
    if (i.sparse) read(4);
  }

  void group_product() {
    int n = 0;
    if (!i.modifiers.empty()) std::sscanf(i.modifiers[0].c_str(), "64x%dx", &n);
    const int sums = i.modifiers.size() > 1 && i.modifiers[1] == "F16" ? n / 4 : n / 2;
    const bool from_registers = i.operands.size() > 1 && i.operands[1].kind == Kind::Register;
    write(0, sums);
    if (from_registers) read(1, 4);
    read(1 + from_registers);
    read(2 + from_registers, sums);
    read_from(3 + from_registers);
  }

  // P2R and R2P name no predicate: all that the mask chooses.
  void predicates(std::vector<Use>& to, const Operand& mask) {
    const int first = base[0] == 'U' ? UNIFORM_PREDICATE_SLOTS : PREDICATE_SLOTS;
    for (int p = 0; p < PT; p++)
      if (mask.kind != Kind::Immediate || mask.immediate >> p & 1) add(to, first + p);
  }

  // Destinations of what is left: a register or predicate, and the predicates that carry out of a sum.
  size_t destinations() {
    auto is_predicate_at = [&](size_t n) {
      return n < i.operands.size() &&
             (i.operands[n].kind == Kind::Predicate || i.operands[n].kind == Kind::UniformPredicate);
    };
    if (one_of(base,
               {"ISETP", "FSETP", "DSETP", "HSETP2", "UISETP", "UFSETP", "PLOP3", "UPLOP3", "SHFL", "ELECT", "QSPC"}))
      return 2;
    if (one_of(base, {"IMNMX", "UIMNMX"}) && is_pair_of_words()) return 3;
    if (one_of(base, {"VOTE", "VOTEU"})) return i.operands.size() - 1;
    if (base == "B2R") return i.operands.size();
    if (one_of(base, {"MATCH", "R2UR", "LDG", "LD"})) return is_predicate_at(0) ? 2 : 1;
    if (one_of(base, {"LOP3", "ULOP3"})) return is_predicate_at(0) ? 2 : 1;
    if (one_of(base, {"IADD3", "UIADD3", "IADD", "UIADD", "LEA", "ULEA", "IMAD", "UIMAD"})) {
      size_t n = 1;
      while (is_predicate_at(n)) n++;
      return n;
    }
    return 1;
  }

  void uniform_copy() {
    const Operand& first = i.operands[0];
    int dimensions = 0;
    for (int d = 1; d <= 5; d++)
      if (has(i, std::to_string(d) + "D")) dimensions = d;
    if (base == "UTMALDG") uniforms(e.reads, first.uniform, 2 + dimensions);
    if (one_of(base, {"UTMASTG", "UTMAREDG"})) uniforms(e.reads, first.uniform, 1 + dimensions);
    read_from(0);
    for (const Use& u : e.reads)
      if (u.slot >= UNIFORM_SLOTS && u.slot < PREDICATE_SLOTS) e.late.push_back(u.slot);
  }

  void operands() {
    if (i.operands.empty()) return;
    if (one_of(base, {"HMMA", "QMMA", "IMMA", "DMMA", "BMMA"})) return matrix_product();
    if (one_of(base, {"HGMMA", "QGMMA", "IGMMA"})) return group_product();
    if (one_of(base, {"UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED", "UTMAPF", "UBLKPF"}))
      return uniform_copy();
    if (one_of(base, {"P2R", "UP2UR"})) return write(0), predicates(e.reads, i.operands.back()), read_from(2);
    if (one_of(base, {"R2P", "UR2UP"})) return predicates(e.writes, i.operands.back()), read_from(1);
    if (one_of(base, {"STG", "ST", "STS", "STL"})) return read(0), read(1, width()), read_from(2);
    if (one_of(base, {"LDSM", "STSM"})) {
      const int count = has(i, "4") ? 4 : has(i, "2") ? 2 : 1;
      return base == "LDSM" ? (write(0, count), read(1)) : (read(0), read(1, count));
    }
    if (one_of(base, {"ATOM", "ATOMG", "ATOMS", "RED", "REDG"})) {
      size_t n = 0;
      for (; n < i.operands.size() && i.operands[n].kind != Kind::Memory; n++) write(n, width());
      read(n);
      const size_t addresses = e.reads.size();
      read_from(n + 1, width());
      for (size_t k = addresses; k < e.reads.size(); k++)
        if (e.reads[k].slot < UNIFORM_SLOTS) e.reads[k].unit = Unit::AtomicValue;
      return;
    }
    if (base == "SYNCS") return synchronisation();
    if (only_reads(base)) {
      if (one_of(base, {"RET", "BRX", "BRXU", "CALL"})) read(0, 2);
      return read_from(0);
    }
    if (base == "LEPC") return write(0, 2);
    const size_t first = destinations();
    for (size_t n = 0; n < first; n++) write(n, written());
    if (base == "IMAD" && has(i, "WIDE"))
      for (Use& u : e.writes)
        if (u.slot < UNIFORM_SLOTS) u.unit = u.slot == i.operands[0].index ? Unit::WideLow : Unit::WideHigh;
    sources(first);
  }

  int written() const {
    if (one_of(base, {"LDG", "LD", "LDS", "LDL", "LDC", "ULDC", "LDCU"})) return width();
    if (one_of(base, {"DADD", "DMUL", "DFMA", "DMNMX"})) return 2;
    if (one_of(base, {"IMAD", "UIMAD"})) return has(i, "WIDE") ? 2 : 1;
    if (is_pair_of_words()) return 2;
    if (base == "CS2R") return has(i, "32") ? 1 : 2;
    if (one_of(base, {"I2F", "UI2F"})) return has(i, "F64") ? 2 : 1;
    if (one_of(base, {"F2F", "UF2F", "FRND", "UFRND"})) return wide(0) ? 2 : 1;
    if (one_of(base, {"F2I", "UF2I"})) return has(i, "S64") || has(i, "U64") ? 2 : 1;
    return 1;
  }

  void sources(size_t first) {
    if (one_of(base, {"IMAD", "UIMAD"}) && has(i, "WIDE"))
      return read(first), read(first + 1), addend(first + 2), read_from(first + 3);
    if (one_of(base, {"DADD", "DMUL", "DFMA", "DMNMX", "DSETP"})) return read_from(first, 2);
    if (is_pair_of_words()) return read_from(first, 2);
    if (one_of(base, {"F2I", "UF2I"})) return read_from(first, has(i, "F64") ? 2 : 1);
    if (one_of(base, {"I2F", "UI2F"})) return read_from(first, has(i, "S64") || has(i, "U64") ? 2 : 1);
    if (one_of(base, {"F2F", "UF2F"})) return read_from(first, wide(1) ? 2 : 1);
    if (one_of(base, {"FRND", "UFRND"})) return read_from(first, wide(0) ? 2 : 1);
    if (base == "MATCH") return read_from(first, width());
    read_from(first);
  }

  // Of IMAD.WIDE: a pair of registers whose words are read, and written, one behind the other.
  void addend(size_t operand) {
    read(operand, 2);
    if (base != "IMAD" || i.operands[operand].kind != Kind::Register || i.operands[operand].index == RZ) return;
    const int first = i.operands[operand].index;
    for (size_t n = 0; n < e.reads.size(); n++)
      if (e.reads[n].slot == first || e.reads[n].slot == first + 1) {
        const bool multiplied = std::any_of(i.operands.begin(), i.operands.begin() + operand, [&](const Operand& o) {
          return &o != &i.operands[0] && o.kind == Kind::Register && o.index == int(e.reads[n].slot);
        });
        if (!multiplied) e.reads[n].unit = e.reads[n].slot == first ? Unit::WideLow : Unit::WideHigh;
      }
  }

  void synchronisation() {
    if (has(i, "EXCH")) {
      write(0, 2), read(1), read(2, 2);
      std::vector<Use> value;
      use(value, i.operands[2], 2);
      for (const Use& u : value) e.late.push_back(u.slot);
      return;
    }
    if (has(i, "ARRIVE")) return write(0, 2), read_from(1);
    if (has(i, "PHASECHK")) return write(0), read_from(1);
    read_from(0);
  }

  // A fence, and mbarrier.init, end when their scoreboard says so; what tells others of memory comes behind that.
  void order() {
    const bool fence = one_of(base, {"FENCE", "MEMBAR"});
    const bool tells = one_of(base, {"BAR", "UTMASTG", "UTMAREDG", "UTMALDG", "UBLKCP", "UBLKRED", "WARPGROUP",
                                     "UCGABAR_ARV", "RED", "REDG", "ATOM", "ATOMG"});
    const bool initialises = base == "SYNCS" && has(i, "EXCH");
    if (base == "FENCE" || tells || (base == "SYNCS" && has(i, "ARRIVE"))) add(e.reads, ORDER_SLOT);
    if ((fence || initialises) && (i.write_barrier < 6 || i.read_barrier < 6)) add(e.writes, ORDER_SLOT);
  }

  Unit unit() const {
    if (one_of(base, {"IMAD", "FFMA", "FMUL", "FADD", "FMUL32I", "FADD32I", "IDP"})) return Unit::Fma;
    if (base == "VIADD" && arch >= 90) return Unit::Fma;
    if (one_of(base, {"HADD2", "HMUL2", "HFMA2", "HMNMX2", "HSETP2", "HSET2"}))
      return has(i, "MMA") ? Unit::HalfHeavy : Unit::Half;
    if (base == "HMMA") {
      const char* const whole = has(i, "TF32") ? (i.sparse ? "16816" : "1688") : i.sparse ? "16832" : "16816";
      return has(i, whole) || (!i.sparse && has(i, "16816")) ? Unit::Tensor : Unit::ShortTensor;
    }
    if (base == "QMMA") return Unit::Tensor;
    if (one_of(base, {"IMMA", "DMMA", "BMMA"})) return Unit::IntegerTensor;
    if (one_of(base, {"LDC", "LDCU"})) return Unit::Indexed;
    if (one_of(base, {"HGMMA", "QGMMA", "IGMMA"})) return Unit::Group;
    if (one_of(base, {"DADD", "DMUL", "DFMA", "DMNMX", "DSETP"})) return Unit::Double;
    if (base == "CS2R") return i.operands.size() > 1 && i.operands[1].text == "SRZ" ? Unit::Special : Unit::Other;
    if (base == "SYNCS") return Unit::Sync;
    if (one_of(base, {"R2UR", "S2UR"})) return Unit::ToUniform;
    if (base == "P2R") return Unit::FromPredicates;
    if (one_of(base, {"VOTE", "VOTEU", "ELECT"})) return Unit::Vote;
    if (one_of(base, {"UMOV", "ULDC"})) return Unit::UniformMove;
    if (one_of(base, {"UFADD", "UFMUL", "UFFMA", "UFMNMX", "UFSETP", "UFSEL", "UFSET"})) return Unit::UniformFloat;
    if (one_of(base, {"MUFU", "F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV", "FCHK", "MATCH", "REDUX", "S2R"}))
      return Unit::Xu;
    switch (i.pipe) {
      case Pipe::Uniform: return base.starts_with("UTMA") || base.starts_with("UBLK") ? Unit::Memory : Unit::Uniform;
      case Pipe::Memory: return Unit::Memory;
      case Pipe::Branch: return Unit::Branch;
      case Pipe::Alu: return Unit::Alu;
      default: return Unit::Other;
    }
  }

  Queue queue() const {
    if (one_of(base, {"LDS", "STS", "LDSM", "STSM", "MOVM", "SHFL", "ATOMS"})) return Queue::Shared;
    if (one_of(base, {"LDG", "STG", "LD", "ST", "LDL", "STL", "LDGSTS", "ATOM", "ATOMG", "RED", "REDG"}))
      return Queue::Global;
    if (base == "LDC") return Queue::Constant;
    if (one_of(base, {"MUFU", "F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV", "FCHK"})) return Queue::Xu;
    if (one_of(base, {"S2R", "S2UR"})) return Queue::ToUniform;
    if (one_of(base, {"UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED"})) return Queue::TensorMemory;
    if (one_of(base, {"REDUX", "MATCH"})) return Queue::Reduce;
    if (base == "SYNCS") return Queue::Barriers;  // ptxas waits for what the last of several has read
    if (base == "HMMA" && arch == 75) return Queue::Tensor;
    if (base == "DMMA" && (i.write_barrier < 6 || i.read_barrier < 6)) return Queue::DoubleTensor;
    return Queue::None;
  }

  bool variable() const {
    if (i.write_barrier < 6 || i.read_barrier < 6) return true;
    if (one_of(base, {"BREV", "LDGDEPBAR", "SYNCS", "FENCE", "MEMBAR"})) return has(i, "PHASECHK");
    return queue() != Queue::None || base == "QSPC";
  }
};

}  // namespace

const char* unit_name(Unit unit) {
  static const char* const NAMES[] = {
#define SASS_NAME(name) #name,
      SASS_UNITS(SASS_NAME)
#undef SASS_NAME
  };
  return NAMES[int(unit)];
}

std::string slot_name(Slot16 slot) {
  if (slot < UNIFORM_SLOTS) return "R" + std::to_string(slot);
  if (slot < PREDICATE_SLOTS) return "UR" + std::to_string(slot - UNIFORM_SLOTS);
  if (slot < UNIFORM_PREDICATE_SLOTS) return "P" + std::to_string(slot - PREDICATE_SLOTS);
  if (slot < SCOREBOARD_SLOTS) return "UP" + std::to_string(slot - UNIFORM_PREDICATE_SLOTS);
  return slot < ORDER_SLOT ? "scoreboard " + std::to_string(slot - SCOREBOARD_SLOTS) : "the order of memory";
}

bool answers_in_order(Queue queue) {
  return queue == Queue::Shared || queue == Queue::Xu || queue == Queue::ToUniform || queue == Queue::Tensor ||
         queue == Queue::Constant || queue == Queue::Reduce;
}

bool reads_in_order(Queue a, Queue b) {
  auto in_memory = [](Queue q) { return q == Queue::Shared || q == Queue::Global; };
  return a != Queue::None && (a == b || (in_memory(a) && in_memory(b)));
}

Effects effects_of(const Instruction& i, int arch) {
  Effects e;
  Builder b{i, e, string_view(i.opcode).substr(0, i.opcode.find('.')), arch};
  e.unit = b.unit();
  e.queue = b.queue();
  e.variable = b.variable();
  b.operands();
  b.order();
  if (i.guard != PT) {
    e.guard = Slot16((i.guard_uniform ? UNIFORM_PREDICATE_SLOTS : PREDICATE_SLOTS) + i.guard);
    b.add(e.reads, e.guard, Unit::Guard);
  }
  if (e.variable)
    for (const Use& u : e.reads)
      if (u.slot < UNIFORM_SLOTS) e.late.push_back(u.slot);
  return e;
}

}  // namespace sass
