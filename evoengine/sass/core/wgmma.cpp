// HGMMA, QGMMA of FP8 and IGMMA of 8-bit integers: products of a warpgroup, 64 x N x 32 bytes, from matrices in shared
// memory as their 64-bit descriptors tell (PTX ISA, "Asynchronous warpgroup-level matrix shared memory layout"). Each
// warp forms its own 16 rows.
//
// HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8].tnspA.tnspB, R24, UP0, gsb0: A's descriptor is in UR8 and UR9, B's in UR10
// and UR11, also where A is in registers; without UP0 the sums begin at zero; gsb0 closes a group.
#include "async.h"
#include "matrix.h"
#include "order.h"
#include "products.h"

#include <algorithm>

namespace sass {

namespace {

constexpr int CHUNK = 16;  // bytes that lie together whatever the layout

struct Descriptor {
  u32 start, leading, stride;  // bytes
  u32 width;                   // of the swizzle, in bytes: 16 for none
  bool operator==(const Descriptor&) const = default;
};

// With `strict`, as the gate asks, a matrix begins with its swizzle's pattern.
Descriptor descriptor_of(u64 bits, const char* which, const Instruction& by, bool strict) {
  constexpr u32 widths[] = {16, 128, 64, 32};
  auto field = [&](int from) { return u32(bits >> from & 0x3fff) << 4; };
  Descriptor d{field(0), field(16), field(32), widths[bits >> 62]};
  auto fault = [&](const std::string& why) {
    char text[64];
    snprintf(text, sizeof text, ": %s's descriptor 0x%016llx has ", which, (unsigned long long)bits);
    throw Fault{named(by) + text + why};
  };
  if (bits >> 49 & 7) fault("a base offset; the executor knows only matrices that start a swizzle's pattern");
  if (strict && d.start & (8 * d.width - 1) & ~127u)
    fault("a start that is not at a multiple of " + std::to_string(8 * d.width) + " for its swizzle");
  return d;
}

struct IssuedProduct {
  Warp* warp;
  const Instruction* by;
  int n, k;
  Format format, format_b;
  bool integers, signed_a, signed_b, saturates;  // IGMMA
  int d, c;                                      // first registers; c is RZ for sums that begin at zero
  int a_register;                                // -1: A is in shared memory
  Descriptor a, b;
  bool sparse;
  int metadata, selector;  // of a sparse A; `k` is that of what is there of it
  bool transposed_a, transposed_b;
  bool half_sums, rough;
  float sign;
};

// Element (i, k) of a matrix is in row i of A, column i of B. A chunk's elements are neighbours along k, or along i in
// a transposed matrix. So many chunks in that direction and elements in the other one, each from the `first` on.
struct Chunks {
  u32 first, count, first_other, others;
  bool operator==(const Chunks&) const = default;
};

u32 whole_k(const IssuedProduct& p) { return u32(p.sparse ? 2 * p.k : p.k); }

Chunks of_left(const IssuedProduct& p) {
  const u32 row = u32(p.warp->number % 4 * 16);
  return p.transposed_a ? Chunks{row / 8, 2, 0, 16} : Chunks{0, 2, row, 16};
}
Chunks of_right(const IssuedProduct& p) {
  return p.transposed_b ? Chunks{0, u32(p.n) / 8, 0, whole_k(p)} : Chunks{0, p.sparse ? 4u : 2u, 0, u32(p.n)};
}

constexpr size_t MAX_CHUNKS = 4 * MAX_COLUMNS;

// The places of chunks in shared memory, [other][chunk].
struct Places {
  Descriptor of;
  Chunks chunks;
  bool transposed;
  size_t shared, count = 0;  // bytes that the block has; places
  u32 at[MAX_CHUNKS];
};

size_t compute_chunks(const IssuedProduct& p, const Descriptor& d, bool transposed, const Chunks& chunks, u32* places) {
  const u32 per_row = d.width / CHUNK;
  u32 along[MAX_COLUMNS / 8];
  for (u32 n = 0; n < chunks.count; n++) {
    const u32 chunk = chunks.first + n;
    if (per_row == 1) along[n] = chunk * (transposed ? d.stride : d.leading);
    else along[n] = chunk / per_row * d.leading + chunk % per_row * CHUNK;
  }
  const u32 across = per_row == 1 && transposed ? d.leading : d.stride;
  u32 highest = 0, *to = places;
  for (u32 other = chunks.first_other; other < chunks.first_other + chunks.others; other++) {
    const u32 start = d.start + other % 8 * d.width + other / 8 * across;
    for (u32 n = 0; n < chunks.count; n++) {
      const u32 at = start + along[n];
      *to = at ^ (at >> 7 & (per_row - 1)) << 4;
      highest = std::max(highest, *to++);
    }
  }
  const size_t size = p.warp->block->shared.size();
  if (highest + CHUNK > size) {
    char text[64];
    snprintf(text, sizeof text, ": its matrix reaches shared address 0x%x, outside of the ",
             *std::find_if(places, to, [&](u32 at) { return at + CHUNK > size; }));
    throw Fault{named(*p.by) + text + std::to_string(size) + " bytes that the block has"};
  }
  return size_t(to - places);
}

// The same matrices come again and again: four warps multiply by one, and loops come back to it.
const Places& find_chunks(const IssuedProduct& p, const Descriptor& d, bool transposed, const Chunks& chunks) {
  static thread_local Places known[64];
  Places& found = known[(d.start >> 4 ^ d.start >> 10 ^ chunks.others * 5 ^ chunks.first_other) % 64];
  const size_t shared = p.warp->block->shared.size();
  const bool same = found.count && found.of == d && found.chunks == chunks && found.transposed == transposed;
  if (same && found.shared == shared) return found;
  found.count = 0;
  const size_t count = compute_chunks(p, d, transposed, chunks, found.at);  // or throws
  found.of = d, found.chunks = chunks, found.transposed = transposed, found.shared = shared, found.count = count;
  return found;
}

// Bytes of A: [row][k], of B: [column][k], as they lie along k.
void read_bytes(const IssuedProduct& p, const Descriptor& d, const Chunks& chunks, u8* to) {
  const u32* places = find_chunks(p, d, false, chunks).at;
  const u8* shared = p.warp->block->shared.data();
  for (u32 n = 0; n < chunks.others * chunks.count; n++) std::memcpy(to + n * CHUNK, shared + places[n], CHUNK);
}

void bytes_of_registers(const Lanes* first, u8 (*to)[2 * CHUNK]) {
  for (int n = 0; n < 4; n++)
    for (int lane = 0; lane < LANES; lane++)
      std::memcpy(to[lane / 4 + n % 2 * 8] + n / 2 * 16 + lane % 4 * 4, &first[n].v[lane], 4);
}

void form_of_integers(const IssuedProduct& p) {
  Warp& w = *p.warp;
  u8 left[16][2 * CHUNK], right[MAX_COLUMNS][2 * CHUNK];
  if (p.a_register >= 0) bytes_of_registers(w.r + p.a_register, left);
  else read_bytes(p, p.a, of_left(p), left[0]);
  read_bytes(p, p.b, of_right(p), right[0]);
  for (int n = 0; n < p.n / 2; n++)
    for (int lane = 0; lane < LANES; lane++) {
      const u8 *row = left[lane / 4 + n / 2 % 2 * 8], *column = right[n / 4 * 8 + lane % 4 * 2 + n % 2];
      i64 sum = p.c == RZ ? 0 : i32(w.r[p.c + n][lane]);
      for (int k = 0; k < p.k; k++)
        sum += (p.signed_a ? i32(i8(row[k])) : i32(row[k])) * (p.signed_b ? i32(i8(column[k])) : i32(column[k]));
      w.r[p.d + n][lane] = u32(p.saturates ? std::clamp<i64>(sum, INT32_MIN, INT32_MAX) : sum);
    }
}

void read_left_bytes(const IssuedProduct& p, Left& left) {
  u8 bytes[16][2 * CHUNK];
  float rows[MAX_K][16];
  read_bytes(p, p.a, of_left(p), bytes[0]);
  const float* value = floats_of_bytes(p.format);
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < p.k; k++) rows[k][row] = p.sign * value[bytes[row][k]];
  left_of_rows(left, rows, p.k);
}

void read_right_bytes(const IssuedProduct& p, Right& right) {
  u8 bytes[MAX_COLUMNS * MAX_K];
  read_bytes(p, p.b, of_right(p), bytes);
  const float* value = floats_of_bytes(p.format_b);
  const int depth = int(whole_k(p));
  for (int column = 0; column < p.n; column++)
    for (int k = 0; k < depth; k++) right.of[k][column % 2][column / 2] = value[bytes[column * depth + k]];
}

void read_left(const IssuedProduct& p, Left& left) {
  if (has_bytes(p.format)) return read_left_bytes(p, left);
  float rows[MAX_K][16];
  u32 words[16][4];
  float low[16][4], high[16][4];
  const u32* places = find_chunks(p, p.a, p.transposed_a, of_left(p)).at;
  const u8* shared = p.warp->block->shared.data();
  if (p.transposed_a) {
    for (u32 k = 0; k < 16; k++)
      for (u32 chunk = 0; chunk < 2; chunk++) {
        std::memcpy(words[0], shared + places[2 * k + chunk], CHUNK);
        to_floats(words[0], low[0], high[0], 4, p.format);
        for (int n = 0; n < 4; n++) rows[k][8 * chunk + 2 * n] = low[0][n], rows[k][8 * chunk + 2 * n + 1] = high[0][n];
      }
  } else {
    int per_word = p.format == Format::TFloat ? 1 : 2;
    for (u32 chunk = 0; chunk < 2; chunk++) {
      for (u32 row = 0; row < 16; row++) std::memcpy(words[row], shared + places[2 * row + chunk], CHUNK);
      to_floats(words[0], low[0], high[0], 64, p.format);
      for (int row = 0; row < 16; row++)
        for (int n = 0; n < 4; n++) {
          int k = per_word * (4 * int(chunk) + n);
          rows[k][row] = low[row][n];
          if (per_word == 2) rows[k + 1][row] = high[row][n];
        }
    }
  }
  for (int k = 0; k < p.k; k++)
    for (float& value : rows[k]) value *= p.sign;
  left_of_rows(left, rows, p.k);
}

// Words of two columns, next to each other along k: [k][column / 2].
void read_right_transposed(const IssuedProduct& p, const u32* places, Right& right) {
  const u8* shared = p.warp->block->shared.data();
  for (u32 k = 0; k < whole_k(p); k++) {
    u32 words[MAX_COLUMNS / 2];
    for (int chunk = 0; chunk < p.n / 8; chunk++) std::memcpy(words + 4 * chunk, shared + *places++, CHUNK);
    to_floats(words, right.of[k][0], right.of[k][1], p.n / 2, p.format);
  }
}

typedef u32 FourWords __attribute__((vector_size(16)));

void transpose_words(FourWords (&m)[4]) {
  const FourWords left_above = __builtin_shufflevector(m[0], m[1], 0, 4, 1, 5);
  const FourWords right_above = __builtin_shufflevector(m[0], m[1], 2, 6, 3, 7);
  const FourWords left_below = __builtin_shufflevector(m[2], m[3], 0, 4, 1, 5);
  const FourWords right_below = __builtin_shufflevector(m[2], m[3], 2, 6, 3, 7);
  m[0] = __builtin_shufflevector(left_above, left_below, 0, 1, 4, 5);
  m[1] = __builtin_shufflevector(left_above, left_below, 2, 3, 6, 7);
  m[2] = __builtin_shufflevector(right_above, right_below, 0, 1, 4, 5);
  m[3] = __builtin_shufflevector(right_above, right_below, 2, 3, 6, 7);
}

// Words along k, eight to a column: sorted by word, then by even and odd columns, so that each becomes two rows of
// `right` at once.
void read_right(const IssuedProduct& p, Right& right) {
  const u32* places = find_chunks(p, p.b, p.transposed_b, of_right(p)).at;
  if (p.transposed_b) return read_right_transposed(p, places, right);
  const int chunks = p.sparse ? 4 : 2;
  alignas(16) u32 words[16][2][MAX_COLUMNS / 2];
  const u8* shared = p.warp->block->shared.data();
  for (int column = 0; column < p.n; column += 8)
    for (int chunk = 0; chunk < chunks; chunk++)
      for (int odd = 0; odd < 2; odd++) {
        FourWords own[4];  // of each second column
        for (int n = 0; n < 4; n++)
          std::memcpy(&own[n], shared + places[chunks * (column + 2 * n + odd) + chunk], CHUNK);
        transpose_words(own);
        for (int n = 0; n < 4; n++) std::memcpy(&words[4 * chunk + n][odd][column / 2], &own[n], sizeof own[n]);
      }
  for (int word = 0; word < 4 * chunks; word++)
    for (int odd = 0; odd < 2; odd++)
      if (p.format == Format::TFloat)
        to_floats(words[word][odd], right.of[word][odd], right.of[word + MAX_K / 2][odd], p.n / 2, p.format);
      else to_floats(words[word][odd], right.of[2 * word][odd], right.of[2 * word + 1][odd], p.n / 2, p.format);
}

Sums sums_of(const IssuedProduct& p) {
  Sums how = group_sums_of(p.format, p.format_b, int(whole_k(p)), p.half_sums);
  how.rough = p.rough;
  return how;
}

void add_to_halves(Warp& w, const IssuedProduct& p, const Left& left, const Right& right) {
  static thread_local Lanes sums[MAX_COLUMNS / 2];
  const int registers = p.n / 4;
  auto floats = [&](int n) { return reinterpret_cast<float*>(sums[n].v); };
  for (int n = 0; n < registers; n++)
    if (p.c == RZ) sums[2 * n] = sums[2 * n + 1] = Lanes{};
    else to_floats(w.r[p.c + n].v, floats(2 * n), floats(2 * n + 1), LANES, Format::Half);
  multiply(sums, left, right, p.n, int(whole_k(p)), sums_of(p));
  for (int n = 0; n < registers; n++)
    for (int lane = 0; lane < LANES; lane++)
      w.r[p.d + n][lane] = to_half(floats(2 * n)[lane]) | u32(to_half(floats(2 * n + 1)[lane])) << 16;
}

void form(const IssuedProduct& p) {
  static thread_local Left left;
  static thread_local Right right;
  Warp& w = *p.warp;
  if (w.block->done()) throw Fault{named(*p.by) + ": its block has ended without waiting for it"};
  if (p.integers) return form_of_integers(p);
  if (p.a_register >= 0) left_of_registers(left, w.r + p.a_register, 4, p.format, p.sign);
  else read_left(p, left);
  if (p.sparse) spread(left, int(whole_k(p)), chosen_columns(w.r[p.metadata], p.format, int(whole_k(p)), p.selector));
  if (has_bytes(p.format)) read_right_bytes(p, right);
  else read_right(p, right);
  if (p.half_sums) return add_to_halves(w, p, left, right);
  if (p.c == RZ) std::memset(w.r + p.d, 0, sizeof(Lanes) * size_t(p.n / 2));
  else if (p.c != p.d) std::memmove(w.r + p.d, w.r + p.c, sizeof(Lanes) * size_t(p.n / 2));
  multiply(w.r + p.d, left, right, p.n, int(whole_k(p)), sums_of(p));
}

// Lines of shared memory that the warp's part of the product reads: its 16 rows of A, all of B.
void order_reads(Order& order, const IssuedProduct& p) {
  auto read = [&](const Places& places) {
    order.read_lines(*p.warp, *p.by, AgentKind::Products, places.at, places.count);
  };
  if (p.a_register < 0) read(find_chunks(p, p.a, p.transposed_a, of_left(p)));
  read(find_chunks(p, p.b, p.transposed_b, of_right(p)));
}

constexpr int TRANSPOSED_A = 1, TRANSPOSED_B = 2, NEGATIVE_A = 4, NEGATIVE_B = 8;  // in Instruction::b
constexpr int SUMS_IN_HALF = 16, CLOSES = 32, SATURATES = 64;
enum { SIGNED_A = 1, SIGNED_B = 2, BYTES_ARE_INTEGERS = 4 };  // in Instruction::d, of IGMMA; of others d is B's format

Step begin_product(Context& c, const Instruction& i) {
  Warp& w = c.warp;
  if (c.lanes != ALL) throw Fault{named(i) + ": executed by a part of the warp's lanes; it is for all 32 together"};
  size_t at = i.operands[1].kind == Operand::Kind::Register ? 2 : 1;  // of the descriptor
  IssuedProduct p;
  p.warp = &w;
  p.by = &i;
  p.n = i.a;
  p.format = Format(i.c);
  p.integers = i.op == Op::IGMMA;
  p.format_b = p.integers ? p.format : Format(i.d);
  p.signed_a = i.d & SIGNED_A, p.signed_b = i.d & SIGNED_B, p.saturates = i.b & SATURATES;
  p.k = i.op != Op::HGMMA ? 32 : p.format == Format::TFloat ? 8 : 16;
  p.d = i.operands[0].index;
  p.c = i.operands[at + 1].index;
  for (size_t n = at + 2; n < i.operands.size(); n++)
    if (i.operands[n].kind == Operand::Kind::UniformPredicate && !(predicate(c, i.operands[n]) & 1)) p.c = RZ;
  p.sparse = i.sparse;
  p.metadata = p.selector = 0;
  for (size_t n = at + 2; i.sparse && n < i.operands.size(); n++)
    if (i.operands[n].kind == Kind::Register) p.metadata = i.operands[n].index;
    else if (i.operands[n].kind == Kind::Immediate) p.selector = int(i.operands[n].immediate);
  p.a_register = at == 2 ? i.operands[1].index : -1;
  int descriptors = i.operands[at].index;
  p.a = at == 2 || descriptors == URZ ? Descriptor{} : descriptor_of(uniform_pair(w, descriptors), "A", i, w.strict);
  p.b = descriptors == URZ ? Descriptor{} : descriptor_of(uniform_pair(w, descriptors + 2), "B", i, w.strict);
  p.transposed_a = i.b & TRANSPOSED_A;
  p.transposed_b = i.b & TRANSPOSED_B;
  p.half_sums = i.b & SUMS_IN_HALF;
  p.sign = !(i.b & NEGATIVE_A) == !(i.b & NEGATIVE_B) ? 1.0f : -1.0f;
  Completion work;
  work.queue = Completion::Queue::Product;
  work.warp = &w;
  work.n = p.n;
  work.a_in_registers = p.a_register >= 0;
  work.bytes = 32 * (p.n * (p.sparse ? 2 : 1) + (work.a_in_registers ? 0 : 16));
  p.rough = c.machine.is_model();
  const bool formed = c.machine.takes_product();
  work.land = [p, formed] {
    if (formed) form(p);
    p.warp->products.land();
  };
  // ptxas closes a group by a product without operands: HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0
  const bool empty = descriptors == URZ;
  if (empty) work.land = [warp = &w] { warp->products.land(); };
  else if (Order* order = order_of(c)) order_reads(*order, p);
  w.products.add();
  if (i.b & CLOSES) w.products.close(0);
  c.machine.begin(std::move(work));
  return Step::Done;
}

// The modifiers behind gdesc[UR8]; false for one that is not known.
bool take_descriptor(const std::string& text, int& flags) {
  size_t at = text.find(']', text.find("gdesc["));
  if (at == text.npos) return false;
  std::string rest = text.substr(at + 1, text.find_first_of(", ", at) - at - 1);
  const std::pair<const char*, int> known[] = {
      {".tnspA", TRANSPOSED_A}, {".tnspB", TRANSPOSED_B}, {".negA", NEGATIVE_A}, {".negB", NEGATIVE_B}};
  for (const auto& [name, flag] : known)
    if (size_t found = rest.find(name); found != rest.npos) {
      flags |= flag;
      rest.erase(found, std::strlen(name));
    }
  return rest.empty();
}

// 64x128x16 → 128, 0 where it is no shape of HGMMA
int columns_of(const Instruction& i, int depth) {
  int rows = 0, n = 0, k = 0;
  if (std::sscanf(i.modifiers[0].c_str(), "%dx%dx%d", &rows, &n, &k) != 3 || rows != 64) return 0;
  if (k != (i.sparse ? 2 * depth : depth)) return 0;
  return n % 8 == 0 && n >= 8 && n <= MAX_COLUMNS ? n : 0;
}

bool known_operands(const Instruction& i) {
  size_t at = i.operands.size() > 1 && i.operands[1].kind == Kind::Register ? 2 : 1;
  if (i.operands.size() < at + 2 || i.operands[at].kind != Kind::MatrixDescriptor) return false;
  if (i.operands[0].kind != Kind::Register || i.operands[at + 1].kind != Kind::Register) return false;
  for (size_t n = at + 2; n < i.operands.size(); n++) {
    const Kind kind = i.operands[n].kind;
    const bool of_sparse = i.sparse && (kind == Kind::Register || kind == Kind::Immediate);
    if (kind != Kind::UniformPredicate && kind != Kind::GroupScoreboard && !of_sparse) return false;
  }
  return true;
}

// QGMMA.64x128x32.F32.E4M3.E5M2, IGMMA.64x128x32.S8.U8[.SAT]
Execute prepare_byte_product(Instruction& i) {
  const bool integers = i.op == Op::IGMMA;
  const std::vector<std::string>& m = i.modifiers;
  const size_t types = integers ? 1 : 2;
  auto is = [&](size_t n, const char* name) { return n < m.size() && m[n] == name; };
  i.a = columns_of(i, 32);
  i.b = i.c = i.d = 0;
  if (!take_descriptor(i.text, i.b) || !i.a || m.size() < types + 2 || (integers && i.sparse)) return nullptr;
  if (i.operands[1].kind == Operand::Kind::Register && i.operands[1].negate) i.b |= NEGATIVE_A;
  if (i.b & (integers ? ~0 : TRANSPOSED_A | TRANSPOSED_B)) return nullptr;
  if (integers) {
    i.d = BYTES_ARE_INTEGERS | (is(1, "S8") ? SIGNED_A : 0) | (is(2, "S8") ? SIGNED_B : 0);
    if (is(3, "SAT")) i.b |= SATURATES;
    if (!(i.d & SIGNED_A || is(1, "U8")) || !(i.d & SIGNED_B || is(2, "U8"))) return nullptr;
  } else {
    i.c = int(is(2, "E5M2") ? Format::E5M2 : Format::E4M3);
    i.d = int(is(3, "E5M2") ? Format::E5M2 : Format::E4M3);
    if (is(1, "F16")) i.b |= SUMS_IN_HALF;
    const bool named =
        (is(1, "F16") || is(1, "F32")) && (is(2, "E5M2") || is(2, "E4M3")) && (is(3, "E5M2") || is(3, "E4M3"));
    if (!named) return nullptr;
  }
  if (i.operands.back().kind == Operand::Kind::GroupScoreboard) i.b |= CLOSES;
  return m.size() == types + 2 + bool(i.b & SATURATES) ? begin_product : nullptr;
}

}  // namespace

Execute prepare_group_product(Instruction& i) {
  Modifiers m(i);
  if (i.modifiers.empty() || !known_operands(i)) return nullptr;
  if (i.op != Op::HGMMA) return prepare_byte_product(i);
  Format format = m.take("BF16") ? Format::BFloat : m.take("TF32") ? Format::TFloat : Format::Half;
  i.c = i.d = int(format);
  i.a = columns_of(i, format == Format::TFloat ? 8 : 16);
  m.take(i.modifiers[0]);
  i.b = m.take("F16") ? SUMS_IN_HALF : 0;
  bool sums = i.b || m.take("F32");
  if (!take_descriptor(i.text, i.b)) return nullptr;
  if (i.operands[1].kind == Operand::Kind::Register && i.operands[1].negate) i.b |= NEGATIVE_A;
  if (i.operands.back().kind == Operand::Kind::GroupScoreboard) i.b |= CLOSES;
  bool shape = i.a && !(format == Format::TFloat && i.b & (TRANSPOSED_A | TRANSPOSED_B | SUMS_IN_HALF));
  return sums && shape && m.none_left() ? begin_product : nullptr;
}

}  // namespace sass
