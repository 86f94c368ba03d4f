// Addresses of memory operands and checked accesses to them: shared by loads, stores and atomics.
#pragma once

#include "lanes.h"

namespace sass {

constexpr int RANK_BIT = 24;  // of a shared address: the block's rank in its cluster

// Shared and local addresses: register × scale + uniform register + displacement, in 32 bits.
void addresses(Context&, const Operand&, Lanes& out);
// Global and generic addresses; `pair`: the register holds 64 bits.
void addresses(Context&, const Operand&, bool pair, u64 (&out)[LANES]);
// True if the operand's register is 64 bits wide.
bool is_pair(const Instruction&, const Operand&);

// The host address of a lane's bytes of shared or local memory. Throws Fault: misaligned or outside.
u8* shared_bytes(Context&, u32 address, u32 bytes, int lane);
u8* local_bytes(Context&, u32 address, u32 bytes, int lane);
// The same for a generic address in a window; null for a global one.
u8* window_bytes(Context&, u64 address, u32 bytes, int lane);
void check_alignment(u64 address, u32 bytes, int lane);

// The result of an atomic operation, or of a bulk reduction, on a value in memory: operation and type are the
// instruction's a and b. `with` is what a compare-and-swap stores.
u64 combine(const Instruction&, u64 old, u64 value, u64 with);
// Sets a and b from the modifiers of a reduction of 32-bit words or pairs of halves; false if they name none.
bool take_combination(Modifiers&, Instruction&);
// Reads the name of an operation; -1 if there is none.
int take_operation(Modifiers&);
// The result of such an operation on one element of a tensor map's type (number, see tensor_copy.cpp), 2 to 8 bytes.
// Throws Fault if there is no such operation on elements of that type.
u64 combine_elements(const Instruction&, int operation, u32 map_type, u64 old, u64 value);

// Whether a shared address belongs to another block of the cluster.
bool is_afar(const Context&, u32 address);
// Reads modifiers that state only how a memory instruction is cached, ordered or addressed. False: it bypasses the L1.
bool take_caching(Modifiers&);
void note_access(Context&, Access::Space, int bytes, bool store, bool cached);

}  // namespace sass
