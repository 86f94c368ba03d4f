// ldmatrix, stmatrix and mma.sync: the lanes meet, the last to come does the work. Which lane holds what is the PTX
// ISA's ("Matrix fragments for mma.m16n8k16", "ldmatrix").
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "internal.h"

namespace evo_emu {

namespace {

// A row is read when its own lane gets there, not when the last one does, so that a missing __syncwarp shows.
struct Rows {
    uint16_t row[8];
    unsigned* const* registers;
};

// Lane l holds, of each 8x8 matrix, row l / 4, columns 2 (l % 4) and the next; of a transposed one, column l / 4.
template <class Move> void for_each_element(unsigned lane, bool transposed, Move move) {
    for (unsigned half = 0; half < 2; ++half) {
        unsigned along = lane / 4, across = 2 * (lane % 4) + half;
        move(transposed ? across : along, transposed ? along : across, 16 * half);
    }
}

template <unsigned count, bool transposed> void distribute(void* const* payloads, unsigned) {
    for (unsigned lane = 0; lane < warp_size; ++lane)
        for (unsigned matrix = 0; matrix < count; ++matrix) {
            unsigned word = 0;
            for_each_element(lane, transposed, [&](unsigned row, unsigned column, unsigned shift) {
                word |= unsigned(static_cast<Rows*>(payloads[8 * matrix + row])->row[column]) << shift;
            });
            *static_cast<Rows*>(payloads[lane])->registers[matrix] = word;
        }
}

template <unsigned count, bool transposed> void collect(void* const* payloads, unsigned) {
    for (unsigned lane = 0; lane < warp_size; ++lane)
        for (unsigned matrix = 0; matrix < count; ++matrix) {
            unsigned word = *static_cast<Rows*>(payloads[lane])->registers[matrix];
            for_each_element(lane, transposed, [&](unsigned row, unsigned column, unsigned shift) {
                static_cast<Rows*>(payloads[8 * matrix + row])->row[column] = uint16_t(word >> shift);
            });
        }
}

char* row_address(const char* name, unsigned shared, int line) {
    if (shared % 16) crash("misaligned %s at line %d: shared address %u is not a multiple of 16", name, line, shared);
    return static_cast<char*>(shared_address(shared));
}

template <class T> float low(unsigned word) { return float(T::from_bits((unsigned short)word)); }

// With g = lane / 4 and t = lane % 4: a0 (g, 2t), a1 (g + 8, 2t), a2 (g, 2t + 8), a3 (g + 8, 2t + 8); b0 (2t, g),
// b1 (2t + 8, g); c0, c1 (g, 2t), c2, c3 (g + 8, 2t); a word holds its element and the next along k.
template <class T> void multiply(void* const* payloads, unsigned) {
    float a[16][16], b[16][8], c[16][8];
    for (unsigned lane = 0; lane < warp_size; ++lane) {
        const auto& f = *static_cast<const MmaFragments*>(payloads[lane]);
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned half = 0; half < 2; ++half) {
            for (unsigned i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + i / 2 * 8 + half] = low<T>(*f.a[i] >> 16 * half);
            for (unsigned i = 0; i < 2; ++i) b[2 * t + i * 8 + half][g] = low<T>(*f.b[i] >> 16 * half);
            for (unsigned i = 0; i < 2; ++i) c[g + i * 8][2 * t + half] = *f.c[2 * i + half];
        }
    }
    for (unsigned row = 0; row < 16; ++row)
        for (unsigned k = 0; k < 16; ++k)
            for (unsigned column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    for (unsigned lane = 0; lane < warp_size; ++lane) {
        const auto& f = *static_cast<const MmaFragments*>(payloads[lane]);
        for (unsigned i = 0; i < 4; ++i) *f.d[i] = c[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
    }
}

constexpr Combine distributors[2][3] = {{distribute<1, false>, distribute<2, false>, distribute<4, false>},
                                        {distribute<1, true>, distribute<2, true>, distribute<4, true>}};
constexpr Combine collectors[2][3] = {{collect<1, false>, collect<2, false>, collect<4, false>},
                                      {collect<1, true>, collect<2, true>, collect<4, true>}};

}  // namespace

void load_matrices(unsigned* const* registers, unsigned count, bool transposed, unsigned shared, int line) {
    Rows rows{{}, registers};
    if (current % warp_size < 8 * count)
        __builtin_memcpy(rows.row, row_address("ldmatrix", shared, line), sizeof rows.row);
    warp_rendezvous("ldmatrix", line, ~0u, &rows, distributors[transposed][count / 2]);
}

void store_matrices(unsigned* const* registers, unsigned count, bool transposed, unsigned shared, int line) {
    Rows rows{{}, registers};
    warp_rendezvous("stmatrix", line, ~0u, &rows, collectors[transposed][count / 2]);
    if (current % warp_size < 8 * count)
        __builtin_memcpy(row_address("stmatrix", shared, line), rows.row, sizeof rows.row);
}

void multiply_m16n8k16(const MmaFragments& fragments, bool bfloat16, int line) {
    if (lane() == 0) visit(Visit::product, uint64_t(line), false, 8);
    warp_rendezvous("mma.sync", line, ~0u, const_cast<MmaFragments*>(&fragments),
                    bfloat16 ? multiply<__nv_bfloat16> : multiply<__half>);
}

}  // namespace evo_emu
