// Products of 16 rows and a multiple of 8 columns, as the lanes of a warp hold them.
//
// With g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix fragments for mma.m16n8k16"): accumulator registers 4j … 4j + 3
// of a lane are (row g, column 8j + 2t), (g, 8j + 2t + 1), (g + 8, 8j + 2t), (g + 8, 8j + 2t + 1). So one register of
// all lanes is a row of A for every four lanes times every second column of B, repeated for every g.
#pragma once

#include "machine.h"

namespace sass {

enum class Format : u8 { Half, BFloat, TFloat, E4M3, E5M2 };  // TFloat: 32 bits, of which 19 count

constexpr int MAX_K = 64, MAX_COLUMNS = 256, BYTES_K = 32;  // the last of mma.sync of bytes

// How a tensor core adds products to a sum. Of `block` products and the sum the largest exponent is taken (a product's
// is that of its factors added; a subnormal number has the smallest exponent of its format), all are cut off `fraction`
// bits below it, added exactly, and the result is cut to `kept` bits of fraction, or rounded to a half where sums are
// halves.
//
// M. Fasi, N. Higham, M. Mikaitis, S. Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021; P. Xie, Y.
// Wang, F. Yang, M. Yang, "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores", arXiv:2511.10909,
// whose parameters these are; those of sm_90 agree with an H100 in every probe of benchmarks/hardware_probes.py.
struct Sums {
  int fraction, block, kept;
  int least, least_right, least_sum;  // exponents of normal numbers: of factors, of sums
  bool halves;
  bool rough = false;  // added as floats, for a model: what a kernel does hardly depends on the last bits
};
// Of mma.sync: `k` products in all. Of bytes fewer bits are kept, of sums too; on sm_89 of 16 products at a time.
Sums sums_of(Format, u32 arch, int k, bool halves);
Sums group_sums_of(Format left, Format right, int k, bool halves);
Sums byte_sums_of(Format left, Format right, u32 arch, bool halves);

// A: [k][row, row + 8][lane], every lane's own rows.
struct alignas(64) Left {
  float of[MAX_K][2][LANES];
};

// B: [k][even columns, odd columns][column / 2].
struct alignas(64) Right {
  float of[MAX_K][2][MAX_COLUMNS / 2];
  float beyond[12];  // is read with the last columns
};

// The two halves of each word as floats: the lower ones and the upper ones; of TFloat the same whole word twice. Works
// on eight words at a time: all three have room for `count` rounded up.
void to_floats(const u32* words, float* low, float* high, int count, Format);
u16 to_half(float);
// Of E4M3 or E5M2, by byte.
const float* floats_of_bytes(Format);
inline bool has_bytes(Format f) { return f == Format::E4M3 || f == Format::E5M2; }

// A's fragments in `registers` registers that begin at `first`: 2 or 4 of two halves each, of TFloat, or 4 of bytes.
void left_of_registers(Left&, const Lanes* first, int registers, Format, float sign);
// rows[k][row] spread over the lanes.
void left_of_rows(Left&, const float (*rows)[16], int k);
void right_of_registers(Right&, const Lanes* first, int registers, Format);

// A sparse A has two of each four elements along k, of TFloat one of each two: column[row][n] is where its n-th stands
// in the whole A. Metadata are in the lanes that `selector` chooses (PTX ISA, "Matrix fragments for mma.sp"; CUTLASS,
// cute/atom/mma_traits_sm90_gmma_sparse.hpp), `k` is that of the whole A.
struct Chosen {
  u8 column[16][MAX_K / 2];
};
Chosen chosen_columns(const Lanes& metadata, Format, int k, int selector);
// Of the `k` / 2 columns that are there, the whole A.
void spread(Left&, int k, const Chosen&);

// d[4j … 4j + 3] += A B for `columns` columns; d are registers that hold floats, also where sums are halves.
void multiply(Lanes* d, const Left&, const Right&, int columns, int k, const Sums&);

}  // namespace sass
