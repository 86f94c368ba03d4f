// setmaxnreg: the registers that a block gets at its launch, passed from warp to warp. A warp that ends releases none.
#include "internal.h"

#include <algorithm>
#include <cstdio>

namespace evo_emu {

namespace {

constexpr unsigned per_multiprocessor = 1 << 16;
constexpr unsigned granule = 8, least = 24, most = 256;

unsigned held[max_fibers / warp_size];  // per thread of each warp
unsigned spare[max_resident];           // of each block: per-thread registers of one warp, not held by any
char text[128];
Gate gate{text};
unsigned wanted, wanted_of;

bool grant(unsigned warp, unsigned count) {
    if (count > held[warp] + spare[own_block()]) return false;
    spare[own_block()] -= count - held[warp];
    held[warp] = count;
    return true;
}

}  // namespace

// What ptxas gives a kernel that uses setmaxnreg: all there is for so many blocks, evenly, in units of 8 per thread.
void reset_registers(unsigned first_block) {
    const unsigned warps = (launch.threads + warp_size - 1) / warp_size;
    const unsigned threads = std::max(kernel.least_blocks, 1u) * warps * warp_size;
    const unsigned share = std::min(per_multiprocessor / threads / granule * granule, most);
    const unsigned end = first_block + kernel.cluster;
    for (unsigned w = first_fiber(first_block) / warp_size; w * warp_size < end_of_block(end - 1); ++w) held[w] = share;
    for (unsigned block = first_block; block < end; ++block) spare[block] = 0;
}

// With all 32 lanes there, one asks for all; the others wait with it.
void change_registers(unsigned count, bool more, int line) {
    const unsigned warp = current / warp_size;
    const char* name = more ? "setmaxnreg.inc" : "setmaxnreg.dec";
    if (count % granule || count < least || count > most)
        crash("%s at line %d: %u registers, which must be a multiple of 8 from 24 to 256", name, line, count);
    if (more ? count < held[warp] : count > held[warp])
        crash("%s at line %d: to %u registers from %u", name, line, count, held[warp]);
    warp_rendezvous(name, line, ~0u, nullptr, nullptr);
    if (count == held[warp]) return;  // another lane has seen to it
    if (!more) {
        spare[own_block()] += held[warp] - count;
        held[warp] = count;
        return wake_block(&gate, own_block());
    }
    while (count != held[warp] && !grant(warp, count)) {
        wanted = count - held[warp], wanted_of = own_block();
        gate.line = line;
        wait_at(&gate, nullptr);
    }
}

void name_stuck_registers() {
    snprintf(text, sizeof text, "setmaxnreg.inc for %u more registers per thread, of which the block has %u left",
             wanted, spare[wanted_of]);
}

}  // namespace evo_emu
