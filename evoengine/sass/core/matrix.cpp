// Matrices of a warp: their way between shared memory and registers (LDSM, STSM), their transposition (MOVM), and the
// products that are done when the instruction is (HMMA, QMMA, IMMA, DMMA). Fragments are the PTX ISA's ("Matrix
// fragments for mma", "ldmatrix").
#include <algorithm>
#include <bit>

#include "async.h"
#include "matrix.h"
#include "memory_ops.h"
#include "order.h"
#include "products.h"
#include "rounding.h"

namespace sass {

namespace {

void check_whole_warp(const Context& c, const Instruction& i) {
  if (c.lanes != ALL) throw Fault{named(i) + ": executed by a part of the warp's lanes; it is for all 32 together"};
}

// ── 8 by 8 matrices of 16-bit elements ──────────────────────────────────────────────────────────────────────────────

// A lane holds two neighbours of row lane / 4, so the register of all lanes is the matrix, row by row.
Lanes transposed(const Lanes& matrix) {
  u16 from[8][8], to[8][8];
  std::memcpy(from, matrix.v, sizeof from);
  for (int row = 0; row < 8; row++)
    for (int column = 0; column < 8; column++) to[column][row] = from[row][column];
  Lanes out;
  std::memcpy(out.v, to, sizeof to);
  return out;
}

constexpr int TRANSPOSED = 1, ROW_BYTES = 16;

// The rows of `count` matrices in shared memory; lane 8j + r gives the address of row r of matrix j. `stored` are the
// matrices that will be stored there.
void matrix_rows(Context& c, const Instruction& i, const Operand& address, int count, const Lanes* stored, u8** rows) {
  check_whole_warp(c, i);
  Lanes at;
  addresses(c, address, at);
  Access& access = c.access;
  access.space = Access::Space::Shared;
  access.atomic = access.asynchronous = false;
  access.matrix = access.cached = true;
  access.bytes = ROW_BYTES;
  access.lanes = count == 4 ? ALL : (1u << 8 * count) - 1;
  for (int lane = 0; lane < 8 * count; lane++) {
    rows[lane] = own_bytes(*c.warp.block, at[lane], ROW_BYTES, ROW_BYTES, i);
    access.addresses[lane] = at[lane] & 0xffffff;
    at[lane] = u32(access.addresses[lane]) | c.warp.block->rank << 24;
  }
  Order* order = order_of(c);
  if (!order) return;
  Lanes words[4];
  for (int row = 0; stored && row < 8 * count; row++)
    for (int k = 0; k < 4; k++) words[k][row] = stored[row / 8][row % 8 * 4 + k];
  order->touch(c.warp, i, stored ? Touch::Write : Touch::Read, access.lanes, at.v, ROW_BYTES, words);
}

Step load_matrices(Context& c, const Instruction& i) {
  u8* rows[LANES];
  matrix_rows(c, i, i.operands[1], i.b, nullptr, rows);
  c.access.store = false;
  Lanes loaded[4];
  for (int row = 0; row < 8 * i.b; row++) std::memcpy(&loaded[row / 8].v[row % 8 * 4], rows[row], ROW_BYTES);
  for (int n = 0; n < i.b; n++) write(c, i.operands[0], i.a == TRANSPOSED ? transposed(loaded[n]) : loaded[n], n);
  return Step::Done;
}

Step store_matrices(Context& c, const Instruction& i) {
  u8* rows[LANES];
  Lanes stored[4];
  for (int n = 0; n < i.b; n++) {
    const Lanes& from = c.warp.r[i.operands[1].index + n];
    stored[n] = i.a == TRANSPOSED ? transposed(from) : from;
  }
  matrix_rows(c, i, i.operands[0], i.b, stored, rows);
  c.access.store = true;
  for (int row = 0; row < 8 * i.b; row++) std::memcpy(rows[row], &stored[row / 8].v[row % 8 * 4], ROW_BYTES);
  return Step::Done;
}

// LDSM.16.M88.4, LDSM.16.MT88.2, LDSM.16.M88
bool take_matrices(Instruction& i) {
  Modifiers m(i);
  bool halves = m.take("16");
  i.a = m.take("MT88") ? TRANSPOSED : 0;
  bool shape = i.a == TRANSPOSED || m.take("M88");
  i.b = m.take("4") ? 4 : m.take("2") ? 2 : 1;
  return halves && shape && m.none_left() && i.operands.size() == 2;
}

Execute prepare_load_matrices(Instruction& i) { return take_matrices(i) ? load_matrices : nullptr; }

Execute prepare_store_matrices(Instruction& i) {
  bool known = take_matrices(i) && i.operands[1].kind == Operand::Kind::Register && i.operands[1].index != RZ;
  return known ? store_matrices : nullptr;
}

Step transpose(Context& c, const Instruction& i) {
  check_whole_warp(c, i);
  Lanes scratch;
  write(c, i.operands[0], transposed(integer(c, i.operands[1], scratch)));
  return Step::Done;
}

Execute prepare_transpose(Instruction& i) {
  Modifiers m(i);
  bool known = m.take("16") && m.take("MT88") && i.operands.size() == 2;
  return known && m.none_left() ? transpose : nullptr;
}

// ── HMMA ────────────────────────────────────────────────────────────────────────────────────────────────────────────

// `count` registers that begin at an operand's, zeros for RZ.
void registers_from(const Context& c, const Operand& o, int count, Lanes* to) {
  for (int n = 0; n < count; n++)
    if (o.index == RZ) to[n] = Lanes{};
    else to[n] = c.warp.r[o.index + n];
}

bool all_registers(const Instruction& i) {
  for (const Operand& o : i.operands)
    if (o.kind != Operand::Kind::Register || o.negate || o.absolute) return false;
  return i.operands.size() == 4 && i.operands[0].index != RZ;
}

// Of a sparse product the metadata and which lanes have them: HMMA.SP.16832.F32 R4, R8, R12, R4, R0, 0x1
bool known_registers(const Instruction& i) {
  if (!i.sparse) return all_registers(i);
  Instruction dense = i;
  if (i.operands.size() != 6 || i.operands[5].kind != Operand::Kind::Immediate) return false;
  dense.operands.resize(4);
  return all_registers(dense) && i.operands[4].kind == Operand::Kind::Register && i.operands[4].index != RZ;
}

Chosen chosen_columns(const Context& c, const Instruction& i, Format format, int k) {
  return chosen_columns(c.warp.r[i.operands[4].index], format, k, int(i.operands[5].immediate));
}

// Two registers of packed halves ↔ four of floats.
void unpack_sums(const Lanes* packed, Lanes* sums) {
  auto floats = [&](int n) { return reinterpret_cast<float*>(sums[n].v); };
  for (int half = 0; half < 2; half++)
    to_floats(packed[half].v, floats(2 * half), floats(2 * half + 1), LANES, Format::Half);
}

Lanes packed_sums(const Lanes& even, const Lanes& odd) {
  Lanes out;
  for (int lane = 0; lane < LANES; lane++)
    out[lane] = to_half(as_float(even[lane])) | u32(to_half(as_float(odd[lane]))) << 16;
  return out;
}

constexpr int HALF_SUMS = 1;

// HMMA.16816.F32.BF16 R4, R8, R12, R4: i.a registers of A, half as many of B.
Step multiply_halves(Context& c, const Instruction& i) {
  check_whole_warp(c, i);
  Format format = Format(i.c);
  Lanes fragments[4], sums[4];
  Left left;
  Right right;
  registers_from(c, i.operands[1], i.a, fragments);
  left_of_registers(left, fragments, i.a, format, 1.0f);
  const int k = i.a * (format == Format::TFloat ? 2 : 4), whole = i.sparse ? 2 * k : k;
  if (i.sparse) spread(left, whole, chosen_columns(c, i, format, whole));
  const int right_registers = i.sparse ? i.a : i.a / 2;
  registers_from(c, i.operands[2], right_registers, fragments);
  right_of_registers(right, fragments, right_registers, format);
  if (i.b == HALF_SUMS) {
    registers_from(c, i.operands[3], 2, fragments);
    unpack_sums(fragments, sums);
  } else {
    registers_from(c, i.operands[3], 4, sums);
  }
  Sums how = sums_of(format, c.machine.launch.arch, k, i.b == HALF_SUMS);
  if (i.sparse) how.block *= 2;
  how.rough = c.machine.is_model();
  multiply(sums, left, right, 8, whole, how);
  if (i.b == HALF_SUMS)
    for (int n = 0; n < 2; n++) write(c, i.operands[0], packed_sums(sums[2 * n], sums[2 * n + 1]), n);
  else
    for (int n = 0; n < 4; n++) write(c, i.operands[0], sums[n], n);
  return Step::Done;
}

Execute prepare_multiply_halves(Instruction& i) {
  Modifiers m(i);
  int depth = m.take("16832") ? 32 : m.take("16816") ? 16 : m.take("1688") ? 8 : m.take("1684") ? 4 : 0;
  if (i.sparse) depth /= 2;  // of what is there of A
  i.b = m.take("F16") ? HALF_SUMS : 0;
  bool sums = i.b == HALF_SUMS || m.take("F32");
  Format format = m.take("BF16") ? Format::BFloat : m.take("TF32") ? Format::TFloat : Format::Half;
  i.c = int(format);
  i.a = format == Format::TFloat ? depth / 2 : depth / 4;
  bool shape = format == Format::TFloat ? depth == 8 || depth == 4 : depth == 16 || depth == 8;
  return sums && shape && m.none_left() && known_registers(i) ? multiply_halves : nullptr;
}

// QMMA.16832.F32.E4M3.E5M2 R4, R8, R12, R4: of FP8. i.a is A's format, i.b B's, i.c = HALF_SUMS
Step multiply_small_floats(Context& c, const Instruction& i) {
  check_whole_warp(c, i);
  Lanes fragments[4], sums[4];
  Left left;
  Right right;
  const bool halves = i.c == HALF_SUMS;
  registers_from(c, i.operands[1], 4, fragments);
  left_of_registers(left, fragments, 4, Format(i.a), 1.0f);
  registers_from(c, i.operands[2], 2, fragments);
  right_of_registers(right, fragments, 2, Format(i.b));
  registers_from(c, i.operands[3], halves ? 2 : 4, halves ? fragments : sums);
  if (halves) unpack_sums(fragments, sums);
  Sums how = byte_sums_of(Format(i.a), Format(i.b), c.machine.launch.arch, halves);
  how.rough = c.machine.is_model();
  multiply(sums, left, right, 8, BYTES_K, how);
  if (halves)
    for (int n = 0; n < 2; n++) write(c, i.operands[0], packed_sums(sums[2 * n], sums[2 * n + 1]), n);
  else
    for (int n = 0; n < 4; n++) write(c, i.operands[0], sums[n], n);
  return Step::Done;
}

Execute prepare_multiply_small_floats(Instruction& i) {
  const std::vector<std::string>& m = i.modifiers;
  if (m.size() != 4 || m[0] != "16832" || !all_registers(i)) return nullptr;
  auto format_of = [](const std::string& name) { return int(name == "E5M2" ? Format::E5M2 : Format::E4M3); };
  auto known = [](const std::string& name) { return name == "E5M2" || name == "E4M3"; };
  i.a = format_of(m[2]), i.b = format_of(m[3]), i.c = m[1] == "F16" ? HALF_SUMS : 0;
  return (m[1] == "F16" || m[1] == "F32") && known(m[2]) && known(m[3]) ? multiply_small_floats : nullptr;
}

// ── IMMA, DMMA ──────────────────────────────────────────────────────────────────────────────────────────────────────

// The bytes of a register from place `first` on: each row of eight has 16, four of them in a lane.
template <int WIDTH>
void bytes_of(i16 (*rows)[WIDTH], int first, const Lanes& held, bool is_signed) {
  for (int lane = 0; lane < LANES; lane++)
    for (int n = 0; n < 4; n++) {
      const u32 byte = held[lane] >> 8 * n & 0xff;
      rows[lane / 4][first + lane % 4 * 4 + n] = i16(is_signed ? i8(byte) : i32(byte));
    }
}

// IMMA.16832.S8.U8 R4, R8.ROW, R12.COL, R4: i.a registers of A; one has 8 rows, four bytes along k to a word.
// i.d = .SAT: the sum that 32 bits hold, once all is added
Step multiply_bytes(Context& c, const Instruction& i) {
  check_whole_warp(c, i);
  int halves = i.a == 1 ? 1 : 2, depths = i.a == 4 ? 2 : 1;
  Lanes a[4], b[4], sums[4];
  registers_from(c, i.operands[1], i.a, a);
  registers_from(c, i.operands[2], i.sparse ? 2 * depths : depths, b);
  Chosen chosen;
  if (i.sparse) chosen = chosen_columns(c, i, Format::E4M3, 32 * depths);
  registers_from(c, i.operands[3], 2 * halves, sums);
  i16 left[16][32], right[8][64];
  for (int d = 0; d < depths; d++)
    for (int half = 0; half < halves; half++) bytes_of(left + 8 * half, 16 * d, a[2 * d + half], i.b);
  for (int d = 0; d < (i.sparse ? 2 : 1) * depths; d++) bytes_of(right, 16 * d, b[d], i.c);
  for (int n = 0; n < 2 * halves; n++)
    for (int lane = 0; lane < LANES; lane++) {
      const int row = lane / 4 + n / 2 * 8, column = 2 * (lane % 4) + n % 2;
      i32 added = 0;
      if (i.sparse)
        for (int k = 0; k < 16 * depths; k++) added += left[row][k] * right[column][chosen.column[row][k]];
      else
        for (int k = 0; k < 16 * depths; k++) added += left[row][k] * right[column][k];
      const i64 sum = i64(i32(sums[n][lane])) + added;
      sums[n][lane] = u32(i.d ? std::clamp<i64>(sum, INT32_MIN, INT32_MAX) : sum);
    }
  for (int n = 0; n < 2 * halves; n++) write(c, i.operands[0], sums[n], n);
  return Step::Done;
}

Execute prepare_multiply_bytes(Instruction& i) {
  i.d = i.modifiers.size() == 4 && i.modifiers[3] == "SAT";
  if (int(i.modifiers.size()) != 3 + i.d || !known_registers(i)) return nullptr;
  const std::string &a = i.operands[1].text, &b = i.operands[2].text;
  if (a.find(".ROW") == a.npos || b.find(".COL") == b.npos) return nullptr;
  const std::string &shape = i.modifiers[0], &left = i.modifiers[1], &right = i.modifiers[2];
  bool bytes = (left == "S8" || left == "U8") && (right == "S8" || right == "U8");
  if (i.sparse) i.a = shape == "16864" ? 4 : shape == "16832" ? 2 : 0;
  else i.a = shape == "16832" ? 4 : shape == "16816" ? 2 : shape == "8816" ? 1 : 0;
  i.b = left == "S8";
  i.c = right == "S8";
  return bytes && i.a ? multiply_bytes : nullptr;
}

double double_of(const Lanes* pair, int lane) {
  u64 bits = pair[0][lane] | u64(pair[1][lane]) << 32;
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

// DMMA.16x8x8 R4, R8, R12, R4: pairs of a are (row g, k t), (g + 8, t), (g, t + 4), …; of b (k t, column g),
// (t + 4, g), …; of sums (g, 2t), (g, 2t + 1) and those of g + 8. One product after the other is added, each rounded
// once. i.a = rows of eight, i.b = depths of four
Step multiply_doubles(Context& c, const Instruction& i) {
  check_whole_warp(c, i);
  Lanes a[16], b[8], sums[8];
  registers_from(c, i.operands[1], 2 * i.a * i.b, a);
  registers_from(c, i.operands[2], 2 * i.b, b);
  registers_from(c, i.operands[3], 4 * i.a, sums);
  for (int n = 0; n < 2 * i.a; n++)
    for (int lane = 0; lane < LANES; lane++) {
      double sum = double_of(sums + 2 * n, lane);
      for (int k = 0; k < 4 * i.b; k++) {
        const double left = double_of(a + 2 * (k / 4 * i.a + n / 2), lane / 4 * 4 + k % 4);
        const double right = double_of(b + 2 * (k / 4), (lane % 4 * 2 + n % 2) * 4 + k % 4);
        const double next = std::fma(left, right, sum);
        auto bits = [](double x) { return std::bit_cast<u64>(x); };
        sum = next != next ? std::bit_cast<double>(carried_nan(bits(left), bits(right), bits(sum))) : next;
      }
      const u64 bits = std::bit_cast<u64>(sum);
      sums[2 * n][lane] = u32(bits);
      sums[2 * n + 1][lane] = u32(bits >> 32);
    }
  for (int n = 0; n < 4 * i.a; n++) write(c, i.operands[0], sums[n], n);
  return Step::Done;
}

Execute prepare_multiply_doubles(Instruction& i) {
  Modifiers m(i);
  i.a = m.take("884") || m.take("8x8x4") ? 1 : 2;
  i.b = i.a == 1 || m.take("16x8x4") ? 1 : m.take("16x8x8") ? 2 : m.take("16x8x16") ? 4 : 0;
  return i.b && m.none_left() && all_registers(i) ? multiply_doubles : nullptr;
}

// BMMA.168256.AND.POPC R4, R8.ROW, R12.COL, R4: how many bits are set in both. i.a registers of A, of 8 rows and 128
// bits along k, 32 to a lane
Step multiply_bits(Context& c, const Instruction& i) {
  check_whole_warp(c, i);
  Lanes a[4], b[2], sums[4];
  registers_from(c, i.operands[1], i.a, a);
  registers_from(c, i.operands[2], i.a / 2, b);
  registers_from(c, i.operands[3], 4, sums);
  for (int n = 0; n < 4; n++)
    for (int lane = 0; lane < LANES; lane++)
      for (int k = 0; k < 2 * i.a; k++) {
        const u32 left = a[k / 4 * 2 + n / 2][lane / 4 * 4 + k % 4];
        sums[n][lane] += u32(std::popcount(left & b[k / 4][(lane % 4 * 2 + n % 2) * 4 + k % 4]));
      }
  for (int n = 0; n < 4; n++) write(c, i.operands[0], sums[n], n);
  return Step::Done;
}

Execute prepare_multiply_bits(Instruction& i) {
  Modifiers m(i);
  i.a = m.take("168256") ? 4 : m.take("168128") ? 2 : 0;
  return i.a && m.take("AND") && m.take("POPC") && m.none_left() && all_registers(i) ? multiply_bits : nullptr;
}

}  // namespace

const Opcode MATRIX[] = {
    {"LDSM", Pipe::Memory, prepare_load_matrices},
    {"STSM", Pipe::Memory, prepare_store_matrices},
    {"MOVM", Pipe::Memory, prepare_transpose},
    {"HMMA", Pipe::Tensor, prepare_multiply_halves},
    {"QMMA", Pipe::Tensor, prepare_multiply_small_floats},
    {"IMMA", Pipe::Tensor, prepare_multiply_bytes},
    {"DMMA", Pipe::Tensor, prepare_multiply_doubles},
    {"BMMA", Pipe::Tensor, prepare_multiply_bits},
    {"HGMMA", Pipe::Tensor, prepare_group_product},
    {"QGMMA", Pipe::Tensor, prepare_group_product},
    {"IGMMA", Pipe::Tensor, prepare_group_product},
    {nullptr, Pipe::None, nullptr},
};

}  // namespace sass
