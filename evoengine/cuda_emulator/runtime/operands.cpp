// Operands of wgmma in shared memory, as described by their 64-bit descriptors (PTX ISA, "Asynchronous warpgroup-level
// matrix shared memory layout"): the address of element (i, k), where i is a row of A or a column of B.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "internal.h"

namespace evo_emu {

namespace {

struct Descriptor {
    unsigned start, leading, stride;  // bytes
    unsigned width;                   // of the swizzle, in bytes: 16 for none
};

Descriptor decode(unsigned long long bits, const char* what, int line) {
    constexpr unsigned widths[] = {16, 128, 64, 32};
    auto field = [&](unsigned from) { return unsigned(bits >> from & 0x3fff) << 4; };
    Descriptor d{field(0), field(16), field(32), widths[bits >> 62]};
    if (bits >> 49 & 7)
        crash("%s at line %d: base offset %u in its descriptor; the emulator knows only operands that start a pattern",
              what, line, unsigned(bits >> 49 & 7));
    if (d.start & (8 * d.width - 1) & ~127u)
        crash(
            "%s at line %d: with a %u-byte swizzle its shared address %u must be at the start of a pattern of %u bytes",
            what, line, d.width, d.start, 8 * d.width);
    return d;
}

// Eight neighbours lie in one chunk: along k for an operand as it is, along i for a transposed one. `chunk` counts them
// in that direction, `other` the elements in the other one.
unsigned chunk_address(const Descriptor& d, bool transposed, unsigned chunk, unsigned other) {
    const unsigned per_row = d.width / 16;
    unsigned address = d.start + other % 8 * d.width;
    if (per_row == 1 && transposed) address += chunk * d.stride + other / 8 * d.leading;
    else if (per_row == 1 || transposed)
        address += chunk / per_row * d.leading + chunk % per_row * 16 + other / 8 * d.stride;
    else address += chunk * 16 + other / 8 * d.stride;
    return swizzled(address, d.width);
}

template <class T>
void read_elements(float* to, unsigned step, const char* chunk) {
    for (unsigned j = 0; j < 8; ++j) {
        unsigned short bits;
        __builtin_memcpy(&bits, chunk + 2 * j, 2);
        to[j * step] = float(T::from_bits(bits));
    }
}

void read_bytes(float* to, unsigned step, const char* chunk, Element element) {
    for (unsigned j = 0; j < 16; ++j) to[j * step] = element_value((unsigned char)chunk[j], element);
}

// Four bits of exponent, three of fraction; all ones is NaN, and there is no infinity.
float e4m3_value(unsigned byte) {
    const unsigned exponent = byte >> 3 & 15, fraction = byte & 7;
    if ((byte & 0x7f) == 0x7f) return __builtin_nanf("");
    const float size =
        exponent ? __builtin_ldexpf(float(8 + fraction), int(exponent) - 10) : __builtin_ldexpf(float(fraction), -9);
    return byte & 0x80 ? -size : size;
}

}  // namespace

float element_value(unsigned bits, Element element) {
    switch (element) {
        case Element::bfloat16: return float(__nv_bfloat16::from_bits((unsigned short)bits));
        case Element::half: return float(__half::from_bits((unsigned short)bits));
        case Element::e4m3: return e4m3_value(bits & 0xff);
        case Element::e5m2: return float(__half::from_bits((unsigned short)(bits << 8)));
        case Element::s8: return float((signed char)bits);
    }
    __builtin_unreachable();
}

// matrix[k * extent + i], k from 0 to 15 (of bytes, which are not transposed, to 31), i from `first` on and `count` of
// them, both multiples of 8.
void read_matrix(float* matrix, unsigned long long descriptor, unsigned extent, unsigned first, unsigned count,
                 bool transposed, Element element, const char* what, int line) {
    const Descriptor d = decode(descriptor, what, line);
    const unsigned first_chunk = transposed ? first / 8 : 0, chunks = transposed ? count / 8 : 2;
    const unsigned first_other = transposed ? 0 : first, others = transposed ? 16 : count;
    for (unsigned other = first_other; other < first_other + others; ++other)
        for (unsigned chunk = first_chunk; chunk < first_chunk + chunks; ++chunk) {
            const char* found = async_read(chunk_address(d, transposed, chunk, other), 16, what, line);
            if (is_byte(element)) {
                read_bytes(matrix + chunk * 16 * extent + other, extent, found, element);
                continue;
            }
            float* to = transposed ? matrix + other * extent + chunk * 8 : matrix + chunk * 8 * extent + other;
            (element == Element::bfloat16 ? read_elements<__nv_bfloat16>
                                          : read_elements<__half>)(to, transposed ? 1 : extent, found);
        }
}

}  // namespace evo_emu
