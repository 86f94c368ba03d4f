// Calls of absolute addresses: of functions in the kernel's own section, whose addresses count from its start, and of
// functions of the driver, printf and assert. The ABI, as compiled code shows it: arguments begin in R4, each in one
// register or an aligned pair, the result is in R4, and the return address is that of the next instruction.
// vprintf(format, arguments) finds its arguments in local memory as in a C struct, floats as doubles.
#include <cstdio>

#include "lanes.h"
#include "memory_ops.h"

namespace sass {

namespace {

constexpr u32 LONGEST_TEXT = 4096;        // bytes of a string that a kernel prints
constexpr size_t MOST_PRINTED = 1 << 20;  // bytes, as the driver's buffer
constexpr int FIRST_ARGUMENT = 4;

u64 pair_of(const Context& c, int index, int lane) {
  return u64(c.warp.r[index + 1][lane]) << 32 | c.warp.r[index][lane];
}

void load(Context& c, u64 address, void* to, u32 bytes, int lane) {
  if (const u8* held = window_bytes(c, address, bytes, lane)) std::memcpy(to, held, bytes);
  else c.machine.memory.load(address, to, bytes);
}

std::string text_at(Context& c, u64 address, int lane) {
  std::string text;
  for (char next; text.size() < LONGEST_TEXT; text += next) {
    load(c, address + text.size(), &next, 1, lane);
    if (!next) break;
  }
  return text;
}

// A conversion specification after % in a format.
struct Conversion {
  std::string flags;  // with width and precision
  int stars = 0;
  bool wide = false;
  char letter = 0;
};

Conversion conversion_at(const std::string& format, size_t& at) {
  Conversion found;
  for (; at < format.size() && std::string_view("-+ #0123456789.*").find(format[at]) != std::string_view::npos; at++) {
    found.stars += format[at] == '*';
    found.flags += format[at];
  }
  for (; at < format.size() && std::string_view("hlLqjzt").find(format[at]) != std::string_view::npos; at++)
    found.wide |= format[at] != 'h';
  if (at < format.size()) found.letter = format[at++];
  return found;
}

// The arguments of printf in memory, each at a multiple of its size.
struct Arguments {
  Context& c;
  u64 at;
  int lane;

  template <class T>
  T next() {
    at = (at + sizeof(T) - 1) / sizeof(T) * sizeof(T);
    T value;
    load(c, at, &value, sizeof value, lane);
    at += sizeof value;
    return value;
  }
};

std::string with(const Conversion& of, const std::string& length, const auto& value) {
  char text[2 * LONGEST_TEXT];
  snprintf(text, sizeof text, ("%" + of.flags + length + of.letter).c_str(), value);
  return text;
}

std::string converted(Conversion of, Arguments& from) {
  for (size_t star; (star = of.flags.find('*')) != of.flags.npos;)
    of.flags.replace(star, 1, std::to_string(from.next<i32>()));
  if (of.flags.size() > 32) return "?";
  switch (of.letter) {
    case '%': return "%";
    case 'd':
    case 'i': return of.wide ? with(of, "ll", (long long)from.next<i64>()) : with(of, "", from.next<i32>());
    case 'u':
    case 'x':
    case 'X':
    case 'o': return of.wide ? with(of, "ll", (unsigned long long)from.next<u64>()) : with(of, "", from.next<u32>());
    case 'c': return with(of, "", from.next<i32>());
    case 'e':
    case 'E':
    case 'f':
    case 'F':
    case 'g':
    case 'G':
    case 'a':
    case 'A': return with(of, "", from.next<double>());
    case 'p': return with(of, "", reinterpret_cast<const void*>(from.next<u64>()));
    case 's': {
      const u64 at = from.next<u64>();
      return with(of, "", text_at(from.c, at, from.lane).c_str());
    }
    default: return "?";
  }
}

void print(Context& c, int lane) {
  const std::string format = text_at(c, pair_of(c, FIRST_ARGUMENT, lane), lane);
  Arguments from{c, pair_of(c, FIRST_ARGUMENT + 2, lane), lane};
  std::string text;
  i32 arguments = 0;
  for (size_t at = 0; at < format.size();) {
    if (format[at++] != '%') {
      text += format[at - 1];
      continue;
    }
    const Conversion conversion = conversion_at(format, at);
    arguments += conversion.letter != '%';
    text += converted(conversion, from);
  }
  std::string& printed = c.machine.printed;
  if (printed.size() + text.size() <= MOST_PRINTED) printed += text;
  c.warp.r[FIRST_ARGUMENT][lane] = u32(arguments);
}

// __assertfail(message, file, line, function, bytes of a character)
void assert_failed(Context& c, int lane) {
  const int at = FIRST_ARGUMENT;
  throw Fault{"lane " + std::to_string(lane) + ": " + text_at(c, pair_of(c, at + 2, lane), lane) + ":" +
              std::to_string(c.warp.r[at + 4][lane]) + ": " + text_at(c, pair_of(c, at + 6, lane), lane) +
              ": assertion `" + text_at(c, pair_of(c, at, lane), lane) + "` failed"};
}

}  // namespace

// CALL.ABS R12: the address is in a pair of registers.
Step call_absolute(Context& c, const Instruction& i) {
  const int index = i.operands[0].index, first = __builtin_ctz(c.lanes);
  const u64 target = pair_of(c, index, first);
  if (target - BUILTINS >= PROVIDED * BUILTIN_BYTES) {
    if (target >= u64(c.machine.program->code.size()) * 16)
      throw Fault{"a call of an address that has no function: " + i.text};
    for (u32 rest = c.lanes; rest; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      if (pair_of(c, index, lane) >= u64(c.machine.program->code.size()) * 16)
        throw Fault{"a call of an address that has no function: " + i.text};
      c.jump_lanes.v[lane] = c.warp.r[index][lane] / 16;
    }
    c.jump = -2;
    c.jumping = c.lanes;
    return Step::Done;
  }
  for (u32 rest = c.lanes; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (pair_of(c, index, lane) != target) throw Fault{"lanes that call different functions of the driver: " + i.text};
    if ((target - BUILTINS) / BUILTIN_BYTES == 0) print(c, lane);
    else assert_failed(c, lane);
  }
  return Step::Done;
}

// LEPC R20[, `(.L_x_1)]: the address of the label, or of the instruction itself.
Step load_address(Context& c, const Instruction& i) {
  const Operand* label = nullptr;
  for (const Operand& o : i.operands)
    if (o.kind == Operand::Kind::Label) label = &o;
  if (label && label->target < 0) throw Fault{"the address of nothing that is known: " + i.text};
  const u32 address = label ? u32(label->target) * 16 : u32(i.address);
  Lanes low, high;
  each(low, [&](int) { return address; });
  each(high, [&](int) { return 0u; });
  write(c, i.operands[0], low);
  write(c, i.operands[0], high, 1);
  return Step::Done;
}

}  // namespace sass
