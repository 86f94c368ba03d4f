// Converts the output of `nvdisasm -hex` to a Program.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <unordered_map>

#include "machine.h"

namespace sass {
namespace {

using std::string;
using std::string_view;

string_view trim(string_view s) {
  while (!s.empty() && (s.front() == ' ' || s.front() == '\t')) s.remove_prefix(1);
  while (!s.empty() && (s.back() == ' ' || s.back() == '\t' || s.back() == '\r')) s.remove_suffix(1);
  return s;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// An unsigned integer, decimal or after 0x; -1 if the text is none.
i64 number(string_view s) {
  int base = 10;
  if (s.starts_with("0x")) s.remove_prefix(2), base = 16;
  u64 value = 0;
  auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value, base);
  if (s.empty() || error != std::errc() || end != s.data() + s.size()) return -1;
  return i64(value);
}

// The number after a prefix (R12 → 12), `zero` for the name ending in Z or T (RZ, PT); -1 if it is neither.
int indexed(string_view s, string_view prefix, string_view zero_name, int zero) {
  if (s == zero_name) return zero;
  if (!s.starts_with(prefix) || s.size() == prefix.size() || !is_digit(s[prefix.size()])) return -1;
  return int(number(s.substr(prefix.size())));
}
int register_index(string_view s) { return indexed(s, "R", "RZ", RZ); }
int uniform_index(string_view s) { return indexed(s, "UR", "URZ", URZ); }

// Removes and returns the next part of a text separated by `separator`.
string_view next_part(string_view& s, char separator) {
  const size_t at = s.find(separator);
  string_view part = s.substr(0, at);
  s = at == s.npos ? string_view() : s.substr(at + 1);
  return part;
}

// A suffix of a register: R4.H0_H0, R5.B1. False for an unknown one.
bool suffix(Operand& o, string_view s) {
  static const std::pair<string_view, int> PARTS[] = {
      {"H1_H0", 0}, {"H0_H0", 1}, {"H1_H1", 2}, {"H0", 1}, {"H1", 2},  {"H0_H1", 3},
      {"B0", 4},    {"B1", 5},    {"B2", 6},    {"B3", 7}, {"F32", 8},
  };
  if (s == "64") return o.wide = true;
  if (s == "reuse") return true;                             // the control word has it too
  if (s == "ROW" || s == "COL" || s == "SIGN") return true;  // IMMA and PLOP3 read the operand's text
  for (const auto& [name, part] : PARTS)
    if (s == name) return o.part = u8(part), true;
  return false;
}

// The contents of the brackets of a memory operand or of a constant: registers and a displacement joined by +.
bool brackets(Operand& o, string_view s) {
  while (!s.empty()) {
    string_view term = trim(next_part(s, '+'));
    if (term.empty()) continue;
    if (term[0] == 'R' || term[0] == 'U') {
      string_view name = next_part(term, '.');
      const int index = name[0] == 'R' ? register_index(name) : uniform_index(name);
      if (index < 0) return false;
      (name[0] == 'R' ? o.index : o.uniform) = index;
      while (!term.empty()) {
        const string_view mark = next_part(term, '.');
        if (mark[0] == 'X') o.scale = u8(number(mark.substr(1)));
        else if (mark == "64") o.wide = o.wide || name[0] == 'R';
        else if (mark != "U32" && mark != "reuse") return false;
      }
    } else {
      const bool minus = term[0] == '-';
      const i64 value = number(term.substr(minus));
      if (value < 0) return false;
      o.offset += int(minus ? -value : value);
    }
  }
  return true;
}

// c[0x0][0x160], c[0x0][R4+0x10], c[0x0] [0x160].H0_H0; a bank named by a register is not supported.
bool constant_operand(Operand& o, string_view s) {
  o.kind = Operand::Kind::Constant;
  const size_t close = s.find(']'), open = s.find('[', 2), end = s.rfind(']');
  if (close == s.npos || open == s.npos || end < open) return false;
  const i64 bank = number(s.substr(2, close - 2));
  if (bank < 0 || bank > 7) return false;
  o.bank = int(bank);
  string_view suffixes = s.substr(end + 1);
  next_part(suffixes, '.');
  while (!suffixes.empty())
    if (!suffix(o, next_part(suffixes, '.'))) return false;
  return brackets(o, s.substr(open + 1, end - open - 1));
}

bool register_operand(Operand& o, string_view s) {
  string_view name = next_part(s, '.');
  using K = Operand::Kind;
  if ((o.index = register_index(name)) >= 0) o.kind = K::Register;
  else if ((o.index = uniform_index(name)) >= 0) o.kind = K::Uniform;
  else if ((o.index = indexed(name, "P", "PT", PT)) >= 0) o.kind = K::Predicate;
  else if ((o.index = indexed(name, "UP", "UPT", PT)) >= 0) o.kind = K::UniformPredicate;
  else if ((o.index = indexed(name, "B", "", -1)) >= 0) o.kind = K::Barrier;
  else if ((o.index = indexed(name, "SB", "", -1)) >= 0) o.kind = K::Scoreboard;
  else if ((o.index = indexed(name, "gsb", "", -1)) >= 0) o.kind = K::GroupScoreboard;
  else return false;
  while (!s.empty())
    if (!suffix(o, next_part(s, '.'))) return false;
  return true;
}

// An immediate. Integers are as printed; floats and relocated values are bits 32…63 of the encoding.
bool immediate_operand(Operand& o, string_view s, u64 word, bool from_encoding) {
  o.kind = Operand::Kind::Immediate;
  const bool minus = s[0] == '-';
  const string_view digits = s.substr(minus || s[0] == '+');
  const i64 value = digits.starts_with("0x") ? number(digits) : -1;
  if (value >= 0 && !from_encoding) {
    o.immediate = u32(minus ? -value : value);
    return true;
  }
  o.immediate = u32(word >> 32);
  return value >= 0 || is_digit(digits[0]) || digits.find("INF") != s.npos || digits.find("NAN") != s.npos ||
         digits.find('@') != s.npos;
}

// The scoreboards in braces as a mask: {3,1}.
bool set_operand(Operand& o, string_view s) {
  o.kind = Operand::Kind::Immediate;
  string_view list = s.substr(1, s.size() - 2);
  while (!list.empty()) {
    const i64 bit = number(trim(next_part(list, ',')));
    if (bit < 0 || bit > 31) return false;
    o.immediate |= 1u << bit;
  }
  return true;
}

bool operand(Operand& o, string_view s, u64 word, bool from_encoding) {
  using K = Operand::Kind;
  const string_view whole = s;
  auto named = [&](K kind) { return o.kind = kind, o.text = string(s), true; };
  if (s.starts_with("`(")) return s = s.substr(2, s.size() - 3), named(K::Label);
  if (s.starts_with("SR") || s == "PR" || s == "UPR") return named(K::Special);
  if (s.starts_with("gdesc[") || (s.starts_with("desc[") && s.find("][") == s.npos)) {
    const size_t open = s.find('['), close = s.find(']');
    o.index = uniform_index(s.substr(open + 1, close - open - 1));
    return named(K::MatrixDescriptor) && o.index >= 0;
  }
  if (s[0] == '{') return named(K::Immediate) && set_operand(o, s);
  if (s[0] == '[' || s.starts_with("desc[")) {
    named(K::Memory);
    const size_t open = s.rfind('[');
    return s.back() == ']' && brackets(o, s.substr(open + 1, s.size() - open - 2));
  }
  const bool has_sign = s.size() > 1 && (s[0] == '-' || s[0] == '+');
  const char first = s[has_sign];
  if (is_digit(first) || (has_sign && (first == 'I' || first == 'Q' || first == 'N')))
    return named(K::Immediate) && immediate_operand(o, s, word, from_encoding);

  if (s[0] == '-' || s[0] == '!') o.negate = true, s.remove_prefix(1);
  if (!s.empty() && s[0] == '~') o.invert = true, s.remove_prefix(1);
  if (!s.empty() && s[0] == '|') {
    o.absolute = true;
    const size_t close = s.find('|', 1);
    if (close == s.npos) return false;
    string inside(s.substr(1, close - 1));
    inside += s.substr(close + 1);
    o.text = inside;
    const bool known = inside.starts_with("c[") ? constant_operand(o, o.text) : register_operand(o, o.text);
    return known;
  }
  o.text = string(s);
  if (s.starts_with("c[")) return constant_operand(o, s);
  if (register_operand(o, s)) return true;
  o.text = string(whole);
  return immediate_operand(o, whole, word, from_encoding);
}

bool is_half(string_view base) {
  return base == "HFMA2" || base == "HADD2" || base == "HMUL2" || base == "HSETP2" || base == "HSET2" ||
         base == "HMNMX2";
}
// Floats whose 32-bit immediate is in the encoding even if nvdisasm prints it as an integer.
bool is_float(string_view base) {
  if (base.starts_with("UF")) base.remove_prefix(1);
  return is_half(base) || base == "FADD" || base == "FMUL" || base == "FFMA" || base == "FSEL" || base == "FSETP" ||
         base == "FSET" || base == "FMNMX" || base == "DADD" || base == "DMUL" || base == "DFMA" || base == "DSETP" ||
         base == "DMNMX" || base == "DSET" || base == "FCHK" || base == "FADD32I" || base == "FMUL32I";
}

// Splits at commas outside brackets, and at spaces: `RET.REL.NODEC R2 `(f)`.
bool operands(Instruction& i, string_view s, string_view base) {
  bool known = true;
  size_t begin = 0;
  int depth = 0;
  i.operands.reserve(6);
  auto add = [&](string_view part) {
    part = trim(part);
    if (part.empty()) return;
    Operand o;
    if (!operand(o, part, i.word[0], is_float(base))) known = false;
    Operand* last = i.operands.empty() ? nullptr : &i.operands.back();
    const bool pair = last && is_half(base) && o.kind == Operand::Kind::Immediate && last->kind == o.kind;
    if (!pair) i.operands.push_back(std::move(o));  // two halves are one immediate of 32 bits
  };
  for (size_t at = 0; at < s.size(); ++at) {
    const char c = s[at];
    if (c == '[' || c == '(' || c == '{') ++depth;
    if (c == ']' || c == ')' || c == '}') --depth;
    const bool space = c == ' ' && s.substr(at + 1, 1) != "[";  // c[0x0] [0x160] is one operand
    if (depth == 0 && (c == ',' || space)) add(s.substr(begin, at - begin)), begin = at + 1;
  }
  add(s.substr(begin));
  return known;
}

void control(Instruction& i) {
  const u64 w = i.word[1];
  auto field = [&](int at, int bits) { return u8((w >> at) & ((1u << bits) - 1)); };
  i.stall = field(41, 4);
  i.write_barrier = field(46, 3);
  i.read_barrier = field(49, 3);
  i.wait_mask = field(52, 6);
  i.reuse = field(58, 4);
}

Op op_of(string_view base) {
#define SASS_NAME(name) {#name, Op::name},
  static const std::unordered_map<string_view, Op> OPS = {SASS_OPS(SASS_NAME)};
#undef SASS_NAME
  const auto found = OPS.find(base);
  return found == OPS.end() ? Op::Other : found->second;
}

// `@!UP0 IADD3.X R1, …` without its semicolon. False if an operand or the guard is unknown.
bool instruction(Instruction& i, string_view s) {
  s = trim(s);
  i.text = string(s);
  if (const size_t note = s.find("(*\""); note != s.npos) s = trim(s.substr(0, note));
  bool known = true;
  if (s[0] == '@') {
    string_view guard = next_part(s, ' ').substr(1);
    if (guard[0] == '!') i.guard_negated = true, guard.remove_prefix(1);
    if (guard[0] == 'U') i.guard_uniform = true, guard.remove_prefix(1);
    i.guard = indexed(guard, "P", "PT", PT);
    known = i.guard >= 0;
    s = trim(s);
  }
  string_view name = next_part(s, ' ');
  i.opcode = string(name);
  const string_view base = next_part(name, '.');
  i.op = op_of(base);
  while (!name.empty()) i.modifiers.emplace_back(next_part(name, '.'));
  i.sparse = !i.modifiers.empty() && i.modifiers[0] == "SP";
  if (i.sparse) i.modifiers.erase(i.modifiers.begin());
  control(i);
  return operands(i, s, base) && known;
}

const Opcode* opcode(string_view base) {
  static const auto* names = [] {
    auto* all = new std::unordered_map<string_view, const Opcode*>;
    for (const Opcode* table :
         {INTEGER, BITS, MOVES, WARPS, FLOATING, DOUBLE, HALF, CONVERT, CONTROL, MEMORY, ATOMIC, MATRIX, ASYNC})
      for (const Opcode* o = table; o->name; ++o) all->emplace(o->name, o);
    return all;
  }();
  const auto found = names->find(base);
  return found == names->end() ? nullptr : found->second;
}

// Products of 8 × 8 × 4 in an instruction that multiplies matrices, of a warp: the shape is in its first modifier, as
// rows, columns and depth in decimal digits (16816, 8x8x4, 64x128x16, of whose rows a warp has 16). 0 of any other
// instruction.
u32 products_of(const Instruction& i, string_view base) {
  static constexpr string_view PRODUCTS[] = {"HMMA", "QMMA", "IMMA", "DMMA", "HGMMA", "QGMMA", "IGMMA"};
  if (std::find(std::begin(PRODUCTS), std::end(PRODUCTS), base) == std::end(PRODUCTS)) return 0;
  const string shape = i.modifiers.empty() ? "" : i.modifiers[0];
  u32 rows = 0, columns = 0, depth = 0;
  const u32 of_whole = i.sparse ? 2 : 1;  // half of A's elements are multiplied
  if (std::sscanf(shape.c_str(), "%ux%ux%u", &rows, &columns, &depth) == 3)
    return (rows == 64 ? 16 : rows) * columns * depth / 256 / of_whole;
  rows = shape.starts_with("16") ? 16 : 8;  // 16816, 1688, 1684, 16832; 884, 8816
  depth = u32(std::atoi(shape.c_str() + (rows == 16 ? 3 : 2)));
  return std::max(1u, rows * 8 * depth / 256 / of_whole);
}

// The executor's requirements on every instruction that it runs.
void classify(Instruction& i, string_view base) {
  auto is_one_of = [&](std::initializer_list<string_view> names) {
    return std::find(names.begin(), names.end(), base) != names.end();
  };
  const bool atomic = is_one_of({"ATOM", "ATOMG", "RED", "REDG"});
  if (atomic || (is_one_of({"LD", "LDG", "ST", "STG"}) && (has(i, "STRONG") || has(i, "MMIO"))))
    i.strength = has(i, "SM") || has(i, "CTA") ? BLOCK_STRONG : GPU_STRONG;
  if (is_one_of({"UBLKRED", "UTMAREDG"}))
    i.strength = GPU_STRONG;  // each element by itself, relaxed and of the GPU's scope
  i.changes_global = atomic || is_one_of({"ST", "STG", "UTMASTG", "UTMAREDG", "UBLKRED"});
  i.acts = is_one_of({"ST",      "STG",     "STS",      "STSM",        "LDGSTS",     "LDGDEPBAR",    "ARRIVES",
                      "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP",      "UBLKRED",    "UTMACMDFLUSH", "HGMMA",
                      "QGMMA",   "IGMMA",   "BAR",      "UCGABAR_ARV", "USETMAXREG", "EXIT"}) ||
           (base == "SYNCS" && !has(i, "PHASECHK")) || (base == "ATOMS" && has(i, "ARRIVE"));
  if (const u32 products = products_of(i, base)) {
    i.visit = Visit::Product, i.products = products;
    i.fp16_sums = base == "IMMA" || ((base == "HMMA" || base == "QMMA") && has(i, "F16"));
    i.mma_work = base == "DMMA" ? 1
                                : products / 8.0 *
                                      (base == "IMMA" || base == "QMMA" ? 0.5
                                       : has(i, "TF32")                 ? 2
                                                                        : 1);
  }
  i.second_half = base == "HFMA2" && has(i, "MMA");
  i.high = base == "IMAD" && has(i, "HI");
  // VOTEU.ALL is a compiler's own: whether a uniform instruction may stand for one under a predicate.
  if (is_one_of({"VOTE", "VOTEU", "REDUX"}) && !(base == "VOTEU" && has(i, "ALL"))) i.visit = Visit::Vote;
}

// A loop around a compare-and-swap begins with a plain load of the comparand: if another thread stores at the same
// time, the swap fails. That load has the swap's address, or loads the register that is compared; any other load is
// ordered.
void mark_optimistic(std::vector<Instruction>& code) {
  constexpr size_t NEAR = 16;  // instructions from the load to the swap
  auto is = [](const Instruction& i, std::initializer_list<string_view> names) {
    return std::find(names.begin(), names.end(), string_view(i.opcode).substr(0, i.opcode.find('.'))) != names.end();
  };
  for (size_t k = 0; k < code.size(); k++) {
    if (!is(code[k], {"ATOM", "ATOMG", "ATOMS"}) || !(has(code[k], "CAS") || has(code[k], "CAST"))) continue;
    const bool shared = is(code[k], {"ATOMS"});
    const auto place = std::find_if(code[k].operands.begin(), code[k].operands.end(),
                                    [](const Operand& o) { return o.kind == Operand::Kind::Memory; });
    if (place == code[k].operands.end()) continue;
    const Operand* compared = place + 1 < code[k].operands.end() ? &*(place + 1) : nullptr;
    for (size_t n = k - std::min(k, NEAR); n < k; n++) {
      if (!(shared ? is(code[n], {"LDS", "LD"}) : is(code[n], {"LDG", "LD"})) || code[n].operands.size() < 2) continue;
      const Operand &to = code[n].operands[code[n].operands.size() - 2], &from = code[n].operands.back();
      const bool same = from.kind == place->kind && from.index == place->index && from.uniform == place->uniform &&
                        from.offset == place->offset;
      code[n].optimistic |= same || (compared && to.kind == compared->kind && to.index == compared->index);
    }
  }
}

void prepare(Program& program, Instruction& i, bool known) {
  const string_view base = string_view(i.opcode).substr(0, i.opcode.find('.'));
  const Opcode* o = opcode(base);
  classify(i, base);
  if (o && known) {
    i.pipe = o->pipe;
    i.execute = o->prepare(i);
  }
  if (!i.execute) ++program.unknown[i.opcode];
}

// The lines of the section, from after its .section to the next one.
string_view section(string_view listing, string_view entry) {
  const string head = ".section\t.text." + string(entry);
  size_t at = 0;
  while ((at = listing.find(head, at)) != listing.npos) {
    at += head.size();
    if (at < listing.size() && (listing[at] == ',' || listing[at] == '"')) break;
  }
  if (at == listing.npos) throw Fault{"the listing has no section .text." + string(entry)};
  const size_t end = listing.find("\t.section\t", at);
  return listing.substr(at, end == listing.npos ? end : end - at);
}

u64 encoding(string_view comment) {  // /* 0x00000a00ff017b82 */
  const size_t at = comment.find("0x");
  u64 value = 0;
  if (at != comment.npos) std::from_chars(comment.data() + at + 2, comment.data() + comment.size(), value, 16);
  return value;
}

}  // namespace

bool has(const Instruction& i, string_view modifier) {
  for (const string& m : i.modifiers)
    if (m == modifier) return true;
  return false;
}

bool Modifiers::take(string_view name) {
  for (size_t k = 0; k < left.size(); ++k)
    if (left[k] == name) return left.erase(left.begin() + long(k)), true;
  return false;
}

namespace {

// Appends the instructions and labels of a section; `known` states for which instructions every operand is known.
void append(Program& program, std::vector<bool>& known, string_view rest) {
  const int base = int(program.code.size()) * 16;
  program.code.reserve(program.code.size() + rest.size() / 220);
  next_part(rest, '\n');
  while (!rest.empty()) {
    const string_view line = trim(next_part(rest, '\n'));
    if (line.starts_with("//----")) break;
    if (line.starts_with("/*")) {
      const size_t end = line.find("*/"), semicolon = line.find(';', end), comment = line.rfind("/*");
      if (semicolon == line.npos) {  // the second word of the previous instruction
        if (!program.code.empty()) program.code.back().word[1] = encoding(line), control(program.code.back());
        continue;
      }
      Instruction& i = program.code.emplace_back();
      std::from_chars(line.data() + 2, line.data() + end, i.address, 16);
      i.address += base;
      i.word[0] = encoding(line.substr(comment));
      known.push_back(instruction(i, line.substr(end + 2, semicolon - end - 2)));
    } else if (line.ends_with(':')) {
      program.labels[string(line.substr(0, line.size() - 1))] = int(program.code.size());
    }
  }
}

// An immediate that the driver fills in, `32@lo(…)` or `32@hi(…)`: of a label, a number, or the value in the encoding
// if it belongs to the kernel itself. False for the address of anything else.
bool relocate(const Program& program, Operand& o) {
  const string_view text = o.text;
  const bool high = text.starts_with("32@hi(");
  if (!high && !text.starts_with("32@lo(")) return true;
  if (const size_t at = text.find(".L_x_"); at != text.npos) {
    const auto label = program.labels.find(string(text.substr(at, text.find_first_of("@)", at) - at)));
    if (label == program.labels.end()) return false;
    o.immediate = high ? 0 : u32(label->second) * 16;
    return true;
  }
  if (text.substr(6).starts_with("0x")) {
    u64 value = 0;
    std::from_chars(text.data() + 8, text.data() + text.size(), value, 16);
    o.immediate = u32(high ? value >> 32 : value);
    return true;
  }
  return text.find(program.entry) != text.npos;
}

}  // namespace

Program decode(string_view listing, string_view entry) {
  Program program;
  program.entry = string(entry);
  std::vector<bool> known;
  append(program, known, section(listing, entry));
  for (size_t k = 0; k < program.code.size(); k++) {  // functions in sections of their own, and what they call
    if (program.code[k].op != Op::CALL) continue;
    for (size_t n = 0; n < program.code[k].operands.size(); n++) {
      const string name = program.code[k].operands[n].text;
      if (program.code[k].operands[n].kind != Operand::Kind::Label || program.labels.contains(name)) continue;
      if (listing.find(".section\t.text." + name + ",") != listing.npos) append(program, known, section(listing, name));
    }
  }
  for (size_t k = 0; k < program.code.size(); ++k) {
    for (Operand& o : program.code[k].operands)
      if (o.kind == Operand::Kind::Label)
        if (const auto label = program.labels.find(o.text); label != program.labels.end()) o.target = label->second;
    for (Operand& o : program.code[k].operands)
      if (o.kind == Operand::Kind::Immediate && !relocate(program, o)) ++program.unknown[o.text];
    prepare(program, program.code[k], known[k]);
  }
  mark_optimistic(program.code);
  return program;
}

}  // namespace sass
