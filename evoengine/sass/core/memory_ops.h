// Addresses of memory operands and checked access to what they point to: shared by loads, stores and atomics.
#pragma once

#include "lanes.h"

namespace sass {

constexpr int RANK_BIT = 24;  // of a shared address: the block's rank in its cluster

// Shared and local addresses: register × scale + uniform register + displacement, in 32 bits.
void addresses(Context&, const Operand&, Lanes& out);
// Global and generic addresses; `pair`: the register holds 64 bits.
void addresses(Context&, const Operand&, bool pair, u64 (&out)[LANES]);
// True where the operand's register is 64 bits wide.
bool is_pair(const Instruction&, const Operand&);

// Where a lane's bytes of shared or local memory lie. Throws Fault: misaligned or outside.
u8* shared_bytes(Context&, u32 address, u32 bytes, int lane);
u8* local_bytes(Context&, u32 address, u32 bytes, int lane);
// The same of a generic address that lies in a window; null for a global one.
u8* window_bytes(Context&, u64 address, u32 bytes, int lane);
void check_alignment(u64 address, u32 bytes, int lane);

// What an atomic operation, or a reduction in bulk, makes of what stands in memory: operation and type are the
// instruction's a and b. `with` is what a compare-and-swap stores.
u64 combine(const Instruction&, u64 old, u64 value, u64 with);
// Sets a and b by the modifiers of a reduction of 32-bit words or pairs of halves; false where they name none.
bool take_combination(Modifiers&, Instruction&);
// Takes the name of an operation; -1 where there is none.
int take_operation(Modifiers&);
// What such an operation makes of one element of a tensor map's type (number, see tensor_copy.cpp), 2 to 8 bytes.
// Throws Fault where there is no such operation on elements of that type.
u64 combine_elements(const Instruction&, int operation, u32 map_type, u64 old, u64 value);

// Whether a shared address is of another block of the cluster.
bool is_afar(const Context&, u32 address);
// Takes what says only how a memory instruction is cached, ordered or addressed. False: it goes past the L1.
bool take_caching(Modifiers&);
void note_access(Context&, Access::Space, int bytes, bool store, bool cached);

}  // namespace sass
