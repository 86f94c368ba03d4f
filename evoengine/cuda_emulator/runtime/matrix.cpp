// ldmatrix, stmatrix and mma.sync: the lanes meet, and the last one to arrive does the work. The assignment of elements
// to lanes is that of the PTX ISA ("Matrix fragments for mma.m16n8k16", "ldmatrix").
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "internal.h"

namespace evo_emu {

namespace {

// A row is read when its own lane arrives, not when the last one does, so that a missing __syncwarp is exposed.
struct Rows {
    uint16_t row[8];
    unsigned* const* registers;
};

// Lane l holds, of each 8x8 matrix, row l / 4, columns 2 (l % 4) and the next; of a transposed one, column l / 4.
template <class Move>
void for_each_element(unsigned lane, bool transposed, Move move) {
    for (unsigned half = 0; half < 2; ++half) {
        unsigned along = lane / 4, across = 2 * (lane % 4) + half;
        move(transposed ? across : along, transposed ? along : across, 16 * half);
    }
}

template <unsigned count, bool transposed>
void distribute(void* const* payloads, unsigned) {
    for (unsigned lane = 0; lane < warp_size; ++lane)
        for (unsigned matrix = 0; matrix < count; ++matrix) {
            unsigned word = 0;
            for_each_element(lane, transposed, [&](unsigned row, unsigned column, unsigned shift) {
                word |= unsigned(static_cast<Rows*>(payloads[8 * matrix + row])->row[column]) << shift;
            });
            *static_cast<Rows*>(payloads[lane])->registers[matrix] = word;
        }
}

template <unsigned count, bool transposed>
void collect(void* const* payloads, unsigned) {
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

// With g = lane / 4 and t = lane % 4: a0 (g, 2t), a1 (g + 8, 2t), a2 (g, 2t + 8), a3 (g + 8, 2t + 8); b0 (2t, g),
// b1 (2t + 8, g); c0, c1 (g, 2t), c2, c3 (g + 8, 2t); a word holds its element and the next along k. Of bytes k counts
// pairs of them. Sums of s8 are whole numbers, to which those of the 32 products are added.
template <Element element>
void multiply(void* const* payloads, unsigned) {
    constexpr bool integers = element == Element::s8;
    constexpr unsigned each = is_byte(element) ? 2 : 1;
    float a[16][16 * each], b[16 * each][8], c[16][8];
    for (unsigned lane = 0; lane < warp_size; ++lane) {
        const auto& f = *static_cast<const MmaFragments*>(payloads[lane]);
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned half = 0; half < 2; ++half) {
            for (unsigned e = 0; e < each; ++e) {
                const unsigned shift = 16 * half + 8 * e;
                for (unsigned i = 0; i < 4; ++i)
                    a[g + i % 2 * 8][(2 * t + i / 2 * 8 + half) * each + e] = element_value(*f.a[i] >> shift, element);
                for (unsigned i = 0; i < 2; ++i)
                    b[(2 * t + i * 8 + half) * each + e][g] = element_value(*f.b[i] >> shift, element);
            }
            for (unsigned i = 0; i < 2; ++i) c[g + i * 8][2 * t + half] = integers ? 0.0f : *f.c[2 * i + half];
        }
    }
    for (unsigned row = 0; row < 16; ++row)
        for (unsigned k = 0; k < 16 * each; ++k)
            for (unsigned column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    for (unsigned lane = 0; lane < warp_size; ++lane) {
        const auto& f = *static_cast<const MmaFragments*>(payloads[lane]);
        for (unsigned i = 0; i < 4; ++i) {
            const float sum = c[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
            if constexpr (integers)
                *f.d[i] = __builtin_bit_cast(float, __builtin_bit_cast(unsigned, *f.c[i]) + unsigned(int(sum)));
            else *f.d[i] = sum;
        }
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

void multiply_m16n8(const MmaFragments& fragments, Element element, int line) {
    constexpr Combine multipliers[] = {multiply<Element::half>, multiply<Element::bfloat16>, multiply<Element::e4m3>,
                                       multiply<Element::e5m2>, multiply<Element::s8>};
    if (lane() == 0) visit(Visit::product, uint64_t(line), false, is_byte(element) ? 16 : 8);
    warp_rendezvous("mma.sync", line, ~0u, const_cast<MmaFragments*>(&fragments), multipliers[unsigned(element)]);
}

}  // namespace evo_emu
