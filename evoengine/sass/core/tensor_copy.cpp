// UTMALDG, UTMASTG, UTMAREDG, UBLKCP and UBLKRED: tiles of tensors and plain blocks, between global and shared memory.
//
// Operands, as compiled code shows: [UR8] is the shared address, at UR9 the barrier's (loads only), then the
// coordinates, innermost first; [UR4] the generic address of the tensor map; a multicast's mask is in the upper half
// of a third register. A plain block's third register has its size in units of 16 bytes in the lower half.
//
// A map's address is CONSTANT_WINDOW plus its offset in bank 0 for __grid_constant__ parameters, whose base sm_90 code
// reads from c[0x0][0x198] and adds the offset in the parameters to; or it is in global memory.
#include <algorithm>

#include "async.h"
#include "memory_ops.h"
#include "order.h"

namespace sass {

namespace {

struct TensorMap {
  u64 address;
  u64 strides[4];  // bytes, of the dimensions but the innermost
  u32 dims[5];
  u16 box[5];
  u8 element_bytes, rank, type;
  u16 swizzle;  // bytes; 16 for none
  bool nan;     // whether what lies outside of the tensor reads as NaN

  u32 row_bytes() const { return u32(box[0]) * element_bytes; }
  u32 rows() const { return u32(box[1]) * box[2] * box[3] * box[4]; }
  u32 bytes() const { return row_bytes() * rows(); }
};

// The 128 bytes of a tensor map as hardware has them, by what ptxas makes of `tensormap.replace`: address, then a word
// of fields, four strides in units of 16 bytes, their upper four bits, five dims less one, and element strides (three
// bits each) and boxes (bytes) less one.
struct Packed {
  u64 address;
  u32 fields, strides[4], upper, dims[5], element_strides_and_box, boxes;
  u8 unused[68];

  u32 field(int at, int bits) const { return fields >> at & ((1u << bits) - 1); }
};
static_assert(sizeof(Packed) == 128);

constexpr int MAP_BYTES = 128;
constexpr int RANK_AT = 4, TYPE_AT = 7, INTERLEAVE_AT = 11, SWIZZLE_AT = 13, FILL_AT = 15;
// by type: u8 u16 u32 s32 u64 s64 f16 f32 f32.ftz f64 bf16; TF32, which rounds, and packed types are not executed
constexpr u8 ELEMENT_BYTES[16] = {1, 2, 4, 4, 8, 8, 2, 4, 0, 8, 2};

TensorMap unpacked(const Packed& p) {
  TensorMap map{};
  map.address = p.address;
  map.rank = u8(p.field(RANK_AT, 3) + 1);
  map.type = u8(p.field(TYPE_AT, 4));
  map.element_bytes = ELEMENT_BYTES[map.type];
  map.swizzle = u16(16u << p.field(SWIZZLE_AT, 2));
  map.nan = p.field(FILL_AT, 1);
  for (int d = 0; d < 4; d++) map.strides[d] = (u64(p.upper >> 4 * d & 15) << 32 | p.strides[d]) << 4;
  for (int d = 0; d < 5; d++) {
    const bool used = d < map.rank;
    map.dims[d] = used ? p.dims[d] + 1 : 1;
    map.box[d] = u16(used ? (d ? p.boxes >> 8 * (d - 1) & 255 : p.element_strides_and_box >> 24) + 1 : 1);
  }
  return map;
}

struct Tile {
  TensorMap map;
  i32 at[5] = {0, 0, 0, 0, 0};
  u32 shared = 0;
};

constexpr u32 MAX_ROW = 256 * 8;

u32 swizzled(u32 address, u32 width) { return address ^ (address >> 7 & (width / 16 - 1)) << 4; }

TensorMap map_at(Context& c, u64 address, u32 rank, const Instruction& i) {
  Packed packed;
  char place[64];
  snprintf(place, sizeof place, ": tensor map at 0x%llx ", (unsigned long long)address);
  if (address % 64) throw Fault{named(i) + place + "is not at a multiple of 64"};
  const std::vector<u8>& bank = c.machine.banks[0];
  u64 offset = address - CONSTANT_WINDOW;
  if (address < CONSTANT_WINDOW || offset > 0xffffffff) c.machine.memory.load(address, &packed, MAP_BYTES);
  else if (offset + MAP_BYTES <= bank.size()) std::memcpy(&packed, bank.data() + offset, MAP_BYTES);
  else throw Fault{named(i) + place + "is outside of the parameters"};
  const TensorMap map = unpacked(packed);
  const bool strided = packed.element_strides_and_box & 0x7fff;
  if (map.rank > 5 || !map.address || map.address % 16) throw Fault{named(i) + place + "is none"};
  if (!map.element_bytes || packed.field(INTERLEAVE_AT, 2) || strided)
    throw Fault{named(i) + place + "has elements of type " + std::to_string(packed.field(TYPE_AT, 4)) +
                ", is interleaved or strides over elements: that is not executed"};
  if (map.rank != rank)
    throw Fault{named(i) + place + "has " + std::to_string(map.rank) + " dimensions, not " + std::to_string(rank)};
  return map;
}

// Calls move(shared offset from the tile's start, global address of the row, first byte inside the tensor, bytes
// inside) for each row of the box; no bytes where the row is outside of the tensor.
template <class Move>
void for_each_row(const Tile& tile, Move move) {
  const TensorMap& m = tile.map;
  i64 first = std::max<i64>(0, -i64(tile.at[0])), last = std::min<i64>(m.box[0], i64(m.dims[0]) - tile.at[0]);
  u32 i[5] = {0, 0, 0, 0, 0};
  for (u32 row = 0; row < m.rows(); row++) {
    u64 address = m.address + i64(tile.at[0]) * m.element_bytes;
    bool inside = first < last;
    for (u32 d = 1; d < m.rank; d++) {
      i64 coordinate = i64(tile.at[d]) + i[d];
      inside &= coordinate >= 0 && coordinate < i64(m.dims[d]);
      address += u64(coordinate) * m.strides[d - 1];
    }
    move(row * m.row_bytes(), address, inside ? u32(first) * m.element_bytes : 0,
         inside ? u32(last - first) * m.element_bytes : 0);
    for (u32 d = 1; d < 5 && ++i[d] == m.box[d]; d++) i[d] = 0;
  }
}

// A swizzle goes by the address, so that hardware takes a box that begins within its pattern, as CUTLASS's do. The gate
// asks for what PTX says.
u32 shared_alignment(const TensorMap& m, const Warp& w) {
  return std::max(128u, m.swizzle == 16 || !w.strict ? 128u : 8u * m.swizzle);
}

Tile tile_of(Context& c, const Instruction& i, int first_coordinate, const u32* at) {
  Tile tile;
  tile.map = map_at(c, uniform_pair(c.warp, i.operands[1].uniform) + u64(i64(i.operands[1].offset)), u32(i.a), i);
  tile.shared = at[0];
  for (int d = 0; d < i.a; d++) tile.at[d] = i32(at[first_coordinate + d]);
  if (const i64 begins = i64(tile.at[0]) * tile.map.element_bytes; begins % 16)
    throw Fault{named(i) + ": its box begins " + std::to_string(begins) +
                " bytes into a row, which hardware takes for an illegal instruction: it must be a multiple of 16"};
  return tile;
}

// What a copy of a tile tells whoever times it.
Completion completion_of(Warp& w, Completion::Queue queue, const Tile& tile) {
  Completion work;
  work.queue = queue;
  work.warp = &w;
  work.bytes = int(tile.map.bytes());
  for_each_row(tile, [&](u32, u64 from, u32 first, u32 bytes) {
    if (!bytes) return;
    if (!work.sectors) work.address = from + first;
    work.sectors += int(((from + first + bytes - 1) >> 5) - ((from + first) >> 5)) + 1;
  });
  work.rows = [tile](const std::function<void(u64, u32)>& row) {
    for_each_row(tile, [&](u32, u64 from, u32 first, u32 bytes) {
      if (bytes) row(from + first, bytes);
    });
  };
  return work;
}

// Shared memory may be another block's once its own has ended. To a model that is no fault, as it takes no results.
bool is_alive(const Machine& machine, const Block& block, const Instruction& by) {
  if (block.done() && !machine.is_model()) throw Fault{named(by) + ": its block has ended without waiting for it"};
  return !block.done();
}

// The address and the barrier's in each block that is loaded to; one alone without a multicast.
struct Destination {
  Block* block;
  u32 shared, barrier;
};

std::vector<Destination> destinations(Context& c, const Instruction& i, u32 shared, u32 barrier, int mask_register) {
  Block* own = c.warp.block;
  if (mask_register < 0) return {{own, shared, barrier}};
  u32 mask = c.warp.u[mask_register] >> 16;
  size_t ranks = own->cluster->blocks.size();
  if (!mask || mask >> ranks)
    throw Fault{named(i) + ": to the blocks of mask " + std::to_string(mask) + ", of a cluster of " +
                std::to_string(ranks)};
  std::vector<Destination> found;
  for (u32 rank = 0; rank < ranks; rank++)
    if (mask >> rank & 1) found.push_back({own, (shared & 0xffffff) | rank << 24, (barrier & 0xffffff) | rank << 24});
  return found;
}

void check_destinations(const std::vector<Destination>& to, u32 bytes, u32 alignment, const Instruction& i) {
  for (const Destination& d : to) {
    Block *block = d.block, *there = d.block;
    shared_bytes(block, d.shared, bytes, alignment, i);
    shared_bytes(there, d.barrier, 8, 8, i);
  }
}

// Of a load with a cache hint, desc[UR4]: 64 bits of a policy, as createpolicy makes them for all of the accesses.
int eviction_of(const Warp& w, const Instruction& i) {
  const Operand& hint = i.operands.back();
  if (hint.kind != Operand::Kind::MatrixDescriptor) return 0;
  u32 policy = w.u[hint.index + 1] >> 24;
  return policy == 0x12 ? -1 : policy == 0x14 ? 1 : 0;
}

// Lines of sixteen bytes of shared memory that a tile takes.
std::vector<u32> lines_of(const Tile& tile) {
  const TensorMap& m = tile.map;
  std::vector<u32> lines;
  lines.reserve(m.bytes() / 16);
  for (u32 at = 0; at < m.bytes(); at += 16) lines.push_back(swizzled((tile.shared & 0xffffff) + at, m.swizzle));
  return lines;
}

std::vector<u32> lines_of(u32 shared, u32 bytes) {
  std::vector<u32> lines;
  for (u32 at = 0; at < bytes; at += 16) lines.push_back((shared & 0xffffff) + at);
  return lines;
}

// Orders what a copy to shared memory writes there and what it reads of memory that the kernel may write.
void order_load(Order& order, Context& c, const Instruction& i, const std::vector<Destination>& to,
                const std::vector<u32>& lines) {
  for (const Destination& d : to) order.transfer(c.warp, i, lines.data(), lines.size(), d.barrier);
}

void order_global(Order& order, Context& c, const Instruction& i, Touch kind, u64 address, u64 bytes) {
  const Allocation& a = c.machine.memory.find(address, 1, false);
  if (!a.shadow) return;
  order.touch_global_range(order.begin_global(c.warp, i, a, kind), u32(__builtin_ctz(c.lanes)), address - a.address,
                           std::min(bytes, a.address + a.bytes - address));
}

// Orders what a store writes to global memory. Where another store to it is not ordered, that one lands, which it may
// at any time, so that the contents can be compared.
void order_global_store(Order& order, Context& c, const Instruction& i, u64 address, const u8* contents, u64 bytes) {
  GlobalMemory& memory = c.machine.memory;
  const Allocation& a = memory.find(address, bytes, true);
  if (!a.shadow) return;
  const GlobalTouch touch = order.begin_global_store(c.warp, i, a);
  const u32 lane = u32(__builtin_ctz(c.lanes));
  try {
    order.touch_global_range(touch, lane, address - a.address, bytes);
  } catch (const Fault& fault) {
    if (!fault.race) throw;
    c.machine.land_stores();
    std::vector<u8> before(bytes);
    memory.load(address, before.data(), u32(bytes));
    order.touch_global_range(touch, lane, address - a.address, bytes, before.data(), contents);
  }
}

// UTMALDG.3D[.MULTICAST] [UR8], [UR4][, UR6]
Step load_tile(Context& c, const Instruction& i) {
  const u32* at = c.warp.u + i.operands[0].uniform;
  Tile tile = tile_of(c, i, 2, at);
  auto to = destinations(c, i, at[0], at[1], i.b ? i.operands[2].index : -1);
  check_destinations(to, tile.map.bytes(), shared_alignment(tile.map, c.warp), i);
  if (Order* order = order_of(c)) {
    order_load(*order, c, i, to, lines_of(tile));
    for_each_row(tile, [&](u32, u64 from, u32 first, u32 bytes) {
      if (bytes) order_global(*order, c, i, Touch::Read, from + first, bytes);
    });
  }
  Completion work = completion_of(c.warp, Completion::Queue::TensorLoad, tile);
  work.destinations = int(to.size());
  work.eviction = eviction_of(c.warp, i);
  work.land = [tile, to, own = c.warp.block, machine = &c.machine, by = &i] {
    if (!is_alive(*machine, *own, *by)) return;
    const TensorMap& m = tile.map;
    for_each_row(tile, [&](u32 offset, u64 from, u32 first, u32 bytes) {
      alignas(16) u8 row[MAX_ROW] = {};
      if (m.nan)
        for (u32 at = 0; at < m.row_bytes(); at++) row[at] = (at + 1) % m.element_bytes ? 0xff : 0x7f;
      if (bytes) machine->memory.load(from + first, row + first, bytes);
      for (const Destination& d : to) {
        u8* shared = d.block->cluster->blocks[d.shared >> 24]->shared.data();
        for (u32 chunk = 0; chunk < m.row_bytes(); chunk += 16)
          std::memcpy(shared + swizzled((d.shared & 0xffffff) + offset + chunk, m.swizzle), row + chunk, 16);
      }
    });
    for (const Destination& d : to) change_barrier(*d.block, d.barrier, 0, -i64(m.bytes()), 0, *by);
  };
  c.machine.begin(std::move(work));
  return Step::Done;
}

// Combines elements with those in memory by the instruction's operation, c less one.
void combine_row(GlobalMemory& memory, const TensorMap& m, const Instruction& by, u64 to, const u8* from, u32 bytes) {
  for (u32 at = 0; at < bytes; at += m.element_bytes) {
    u64 old = 0, value = 0;
    memory.load(to + at, &old, m.element_bytes);
    std::memcpy(&value, from + at, m.element_bytes);
    value = combine_elements(by, by.c - 1, m.type, old, value);
    memory.store(to + at, &value, m.element_bytes);
  }
}

// Copies the tile's row at `offset` out of shared memory.
void copy_row(const Tile& tile, const Block& block, u32 offset, u8* row) {
  const u32 from = (tile.shared & 0xffffff) + offset;
  for (u32 chunk = 0; chunk < tile.map.row_bytes(); chunk += 16)
    std::memcpy(row + chunk, block.shared.data() + swizzled(from + chunk, tile.map.swizzle), 16);
}

// UTMASTG.3D [UR8], [UR4], and UTMAREDG.3D.ADD: c = one more than the operation
Step store_tile(Context& c, const Instruction& i) {
  const u32* at = c.warp.u + i.operands[0].uniform;
  Tile tile = tile_of(c, i, 1, at);
  own_bytes(*c.warp.block, tile.shared, tile.map.bytes(), shared_alignment(tile.map, c.warp), i);
  if (Order* order = order_of(c)) {
    const std::vector<u32> lines = lines_of(tile);
    order->read_lines(c.warp, i, AgentKind::Stores, lines.data(), lines.size());
    for_each_row(tile, [&](u32 offset, u64 to, u32 first, u32 bytes) {
      alignas(16) u8 row[MAX_ROW];
      if (!bytes) return;
      if (i.c) return order_global(*order, c, i, Touch::Atomic, to + first, bytes);
      copy_row(tile, *c.warp.block, offset, row);
      order_global_store(*order, c, i, to + first, row + first, bytes);
    });
  }
  Completion work = completion_of(c.warp, Completion::Queue::TensorStore, tile);
  work.combines = i.c;
  work.land = [tile, warp = &c.warp, machine = &c.machine, by = &i] {
    if (!is_alive(*machine, *warp->block, *by)) return;
    for_each_row(tile, [&](u32 offset, u64 to, u32 first, u32 bytes) {
      if (!bytes) return;
      alignas(16) u8 row[MAX_ROW];
      copy_row(tile, *warp->block, offset, row);
      if (by->c) combine_row(machine->memory, tile.map, *by, to + first, row + first, bytes);
      else machine->memory.store(to + first, row + first, bytes);
    });
    warp->tensor_stores.land();
  };
  c.warp.tensor_stores.add();
  c.machine.begin(std::move(work));
  return Step::Done;
}

constexpr u32 UNIT = 16;

// What a copy of plain bytes tells whoever times it.
void one_row(Completion& work, u64 address, u32 bytes) {
  work.address = address;
  work.sectors = int(((address + bytes - 1) >> 5) - (address >> 5)) + 1;
  work.rows = [address, bytes](const std::function<void(u64, u32)>& row) { row(address, bytes); };
}

// UBLKCP.S.G[.MULTICAST] [UR4], [UR8], UR10: bytes to shared memory, and to the barrier at UR5.
Step load_bytes(Context& c, const Instruction& i) {
  const u32* at = c.warp.u + i.operands[0].uniform;
  u32 size = c.warp.u[i.operands[2].index], bytes = (size & 0xffff) * UNIT;
  u64 from = uniform_pair(c.warp, i.operands[1].uniform);
  if (from % UNIT) throw Fault{named(i) + ": its global address is not a multiple of 16"};
  if (!bytes) throw Fault{named(i) + ": copies no bytes"};
  auto to = destinations(c, i, at[0], at[1], i.b ? i.operands[2].index : -1);
  check_destinations(to, bytes, UNIT, i);
  c.machine.memory.find(from, bytes, false);
  if (Order* order = order_of(c)) {
    order_load(*order, c, i, to, lines_of(at[0], bytes));
    order_global(*order, c, i, Touch::Read, from, bytes);
  }
  Completion work;
  work.queue = Completion::Queue::TensorLoad;
  work.warp = &c.warp;
  work.bytes = int(bytes);
  work.destinations = int(to.size());
  work.eviction = eviction_of(c.warp, i);
  one_row(work, from, bytes);
  work.land = [to, from, bytes, own = c.warp.block, machine = &c.machine, by = &i] {
    if (!is_alive(*machine, *own, *by)) return;
    for (const Destination& d : to) {
      Block* block = d.block;
      machine->memory.load(from, shared_bytes(block, d.shared, bytes, UNIT, *by), bytes);
      change_barrier(*d.block, d.barrier, 0, -i64(bytes), 0, *by);
    }
  };
  c.machine.begin(std::move(work));
  return Step::Done;
}

// UBLKCP.G.S [UR8], [UR4], UR10, and UBLKRED.G.S.ADD: c = combined with what is there, as `combine` reads a and b
Step store_bytes(Context& c, const Instruction& i) {
  u64 to = uniform_pair(c.warp, i.operands[0].uniform);
  u32 from = c.warp.u[i.operands[1].uniform], bytes = (c.warp.u[i.operands[2].index] & 0xffff) * UNIT;
  if (to % UNIT) throw Fault{named(i) + ": its global address is not a multiple of 16"};
  if (!bytes) throw Fault{named(i) + ": copies no bytes"};
  own_bytes(*c.warp.block, from, bytes, UNIT, i);
  c.machine.memory.find(to, bytes, true);
  if (Order* order = order_of(c)) {
    const std::vector<u32> lines = lines_of(from, bytes);
    order->read_lines(c.warp, i, AgentKind::Stores, lines.data(), lines.size());
    if (i.c) order_global(*order, c, i, Touch::Atomic, to, bytes);
    else order_global_store(*order, c, i, to, c.warp.block->shared.data() + (from & 0xffffff), bytes);
  }
  Completion work;
  work.queue = Completion::Queue::TensorStore;
  work.combines = i.c;
  work.warp = &c.warp;
  work.bytes = int(bytes);
  one_row(work, to, bytes);
  work.land = [to, from, bytes, warp = &c.warp, machine = &c.machine, by = &i] {
    if (!is_alive(*machine, *warp->block, *by)) return;
    const u8* shared = warp->block->shared.data() + (from & 0xffffff);
    if (!by->c) machine->memory.store(to, shared, bytes);
    for (u32 at = 0; by->c && at < bytes; at += 4) {
      u32 old, value;
      machine->memory.load(to + at, &old, 4);
      std::memcpy(&value, shared + at, 4);
      value = u32(combine(*by, old, value, 0));
      machine->memory.store(to + at, &value, 4);
    }
    warp->tensor_stores.land();
  };
  c.warp.tensor_stores.add();
  c.machine.begin(std::move(work));
  return Step::Done;
}

bool take_rank(Modifiers& m, Instruction& i) {
  for (int rank = 1; rank <= 5; rank++)
    if (m.take(std::to_string(rank) + "D")) i.a = rank;
  return i.a > 0;
}

bool is_uniform_address(const Operand& o) { return o.kind == Operand::Kind::Memory && o.uniform >= 0 && o.index < 0; }

// Operands but a cache hint, desc[UR4], at the end.
size_t operands_without_hint(const Instruction& i) {
  size_t n = i.operands.size();
  return n && i.operands[n - 1].kind == Operand::Kind::MatrixDescriptor ? n - 1 : n;
}

}  // namespace

Execute prepare_tensor_load(Instruction& i) {
  Modifiers m(i);
  bool rank = take_rank(m, i);
  i.b = m.take("MULTICAST");
  bool operands = operands_without_hint(i) == (i.b ? 3 : 2) && is_uniform_address(i.operands[0]) &&
                  is_uniform_address(i.operands[1]);
  return rank && operands && m.none_left() ? load_tile : nullptr;
}

Execute prepare_tensor_store(Instruction& i) {
  Modifiers m(i);
  bool rank = take_rank(m, i);
  bool operands =
      operands_without_hint(i) == 2 && is_uniform_address(i.operands[0]) && is_uniform_address(i.operands[1]);
  return rank && operands && m.none_left() ? store_tile : nullptr;
}

Execute prepare_tensor_reduction(Instruction& i) {
  Modifiers m(i);
  i.c = take_operation(m) + 1;
  bool rank = take_rank(m, i);
  bool operands =
      operands_without_hint(i) == 2 && is_uniform_address(i.operands[0]) && is_uniform_address(i.operands[1]);
  return i.c && rank && operands && m.none_left() ? store_tile : nullptr;
}

Execute prepare_bulk_copy(Instruction& i) {
  Modifiers m(i);
  if (operands_without_hint(i) != 3 || i.modifiers.size() < 2) return nullptr;
  bool load = i.modifiers[0] == "S" && i.modifiers[1] == "G", store = i.modifiers[0] == "G" && i.modifiers[1] == "S";
  m.take("S"), m.take("G");
  i.b = m.take("MULTICAST");
  if (!m.none_left()) return nullptr;
  return load ? load_bytes : store && !i.b ? store_bytes : nullptr;
}

Execute prepare_bulk_reduction(Instruction& i) {
  Modifiers m(i);
  const bool operands = operands_without_hint(i) == 3 && m.take("G") && m.take("S");
  i.c = 1;
  return operands && take_combination(m, i) && m.none_left() ? store_bytes : nullptr;
}

}  // namespace sass
