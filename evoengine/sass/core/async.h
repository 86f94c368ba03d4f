// Asynchronous work and how its completion is signalled: transaction barriers, groups of copies, shared memory of a
// cluster.
#pragma once

#include "machine.h"

namespace sass {

// The instruction and its position, for messages about work that lands after its warp has continued.
std::string named(const Instruction&);

// The bytes at a shared address, which has the rank of its block in the cluster in bits 24…; throws Fault if there is
// no such block, if it has ended, or if the address is misaligned. `block` becomes the owner.
u8* shared_bytes(Block*& block, u32 address, u32 bytes, u32 alignment, const Instruction& by);
// The same for an instruction that reaches only its own block, whether the address has its rank or 0.
u8* own_bytes(Block& block, u32 address, u32 bytes, u32 alignment, const Instruction& by);

// Two uniform registers as 64 bits.
inline u64 uniform_pair(const Warp& w, int index) { return w.u[index] | u64(w.u[index + 1]) << 32; }

// Transaction barriers (mbarrier) at shared addresses.
//
// A change of a barrier: arrivals, bytes (or copies) that are expected (positive) or have arrived (negative), and
// arrivals that will be missing in later phases too. Returns the previous state. Throws Fault if there is no barrier,
// or if more arrives than may.
u64 change_barrier(Block& from, u32 address, u32 arrivals, i64 transactions, u32 leaving, const Instruction& by);
// Whether the phase of `parity` of the mbarrier at `address` (shared, with the rank in the cluster) has completed.
bool transaction_phase_done(Machine&, Block&, u32 address, u32 parity);

// barrier.cluster: its generation advances when all threads of the cluster that have not ended have arrived.
void check_cluster_barrier(Cluster&);

// Whether the eight bytes at a shared address of the block are an mbarrier of sm_80 to sm_89.
bool holds_barrier(const Block&, u32 address);

// Functions of other files that ASYNC[] in async.cpp names.
Execute prepare_transaction_barrier(Instruction&);  // SYNCS
Execute prepare_arrival_by_atomic(Instruction&);    // ATOMS.ARRIVE
Execute prepare_copies_arrive(Instruction&);        // ARRIVES
Execute prepare_tensor_load(Instruction&);          // UTMALDG
Execute prepare_tensor_store(Instruction&);         // UTMASTG
Execute prepare_tensor_reduction(Instruction&);     // UTMAREDG
Execute prepare_bulk_copy(Instruction&);            // UBLKCP
Execute prepare_bulk_reduction(Instruction&);       // UBLKRED

}  // namespace sass
