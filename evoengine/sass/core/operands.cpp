// Reads and writes the operands of an instruction for all lanes of a warp.
#include "machine.h"

namespace sass {
namespace {

const Lanes& fill(Lanes& lanes, u32 value) {
  for (int l = 0; l < LANES; ++l) lanes[l] = value;
  return lanes;
}

const Lanes& constants(Context& c, const Operand& o, Lanes& scratch, u32 plus) {
  const u32 offset = u32(o.offset) + plus;
  if (o.index < 0 || o.index == RZ) {
    const u32 base = o.uniform < 0 ? 0 : c.warp.u[o.uniform];
    return fill(scratch, constant(c, o.bank, base + offset));
  }
  const u32 base = o.uniform < 0 ? 0 : c.warp.u[o.uniform];
  for (int l = 0; l < LANES; ++l)
    scratch[l] = c.lanes >> l & 1 ? constant(c, o.bank, base + c.warp.r[o.index][l] + offset) : 0;
  return scratch;
}

}  // namespace

u32 constant(Context& c, int bank, u32 offset) {
  const std::vector<u8>& bytes = c.machine.banks[bank];
  if (u64(offset) + 4 > bytes.size())
    throw Fault{"constant memory c[" + std::to_string(bank) + "] has " + std::to_string(bytes.size()) +
                " bytes; 4 were read at " + std::to_string(offset)};
  u32 value;
  std::memcpy(&value, bytes.data() + offset, 4);
  return value;
}

const Lanes& plain(Context& c, const Operand& o, Lanes& scratch) {
  switch (o.kind) {
    case Kind::Register: return c.warp.r[o.index];
    case Kind::Uniform: return fill(scratch, c.warp.u[o.index]);
    case Kind::Immediate: return fill(scratch, o.immediate);
    case Kind::Constant: return constants(c, o, scratch, 0);
    default: throw Fault{"operand " + o.text + " holds no value"};
  }
}

const Lanes& integer(Context& c, const Operand& o, Lanes& scratch) {
  const Lanes& from = plain(c, o, scratch);
  if (!(o.negate || o.invert || o.absolute)) return from;
  const u32 flip = o.invert ? ALL : 0, sign = o.negate ? ALL : 0;
  if (o.absolute)
    for (int l = 0; l < LANES; ++l) scratch[l] = i32(from[l]) < 0 ? 0 - from[l] : from[l];
  else
    for (int l = 0; l < LANES; ++l) scratch[l] = from[l];
  for (int l = 0; l < LANES; ++l) scratch[l] = ((scratch[l] ^ flip) ^ sign) - sign;
  return scratch;
}

const Lanes& floating(Context& c, const Operand& o, Lanes& scratch) {
  const Lanes& from = plain(c, o, scratch);
  if (!(o.negate || o.absolute)) return from;
  const u32 keep = o.absolute ? 0x7fffffffu : ALL, flip = o.negate ? 0x80000000u : 0;
  for (int l = 0; l < LANES; ++l) scratch[l] = (from[l] & keep) ^ flip;
  return scratch;
}

const Lanes& upper(Context& c, const Operand& o, Lanes& scratch) {
  switch (o.kind) {
    case Kind::Register: return c.warp.r[o.index == RZ ? RZ : o.index + 1];
    case Kind::Uniform: return fill(scratch, c.warp.u[o.index == URZ ? URZ : o.index + 1]);
    case Kind::Constant: return constants(c, o, scratch, 4);
    default: return fill(scratch, 0);
  }
}

u32 predicate(Context& c, const Operand& o) {
  const u32 bits = o.kind == Kind::UniformPredicate ? (c.warp.up[o.index] ? ALL : 0) : c.warp.p[o.index];
  return o.negate ? ~bits : bits;
}

void write(Context& c, const Operand& o, const Lanes& from, int plus) {
  if (o.kind == Kind::Uniform) {
    if (o.index != URZ) c.warp.u[o.index + plus] = from[0];
    return;
  }
  if (o.index == RZ) return;
  Lanes& to = c.warp.r[o.index + plus];
  if (c.lanes == ALL) {
    to = from;
    return;
  }
  const u32 lanes = c.lanes;
  for (int l = 0; l < LANES; ++l) to[l] = lanes >> l & 1 ? from[l] : to[l];
}

void write_predicate(Context& c, const Operand& o, u32 bits) {
  if (o.index == PT) return;
  if (o.kind == Kind::UniformPredicate) c.warp.up[o.index] = bits & 1;
  else c.warp.p[o.index] = (c.warp.p[o.index] & ~c.lanes) | (bits & c.lanes);
}

u32 uniform(Context& c, const Operand& o) {
  Lanes scratch;
  if (o.kind == Kind::Uniform && !o.negate && !o.invert) return c.warp.u[o.index];
  return integer(c, o, scratch)[0];
}

}  // namespace sass
