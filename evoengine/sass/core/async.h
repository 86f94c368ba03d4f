// Asynchronous work and what it tells of its end: transaction barriers, groups of copies, shared memory of a cluster.
#pragma once

#include "machine.h"

namespace sass {

// The instruction and where it stands, for messages of work that lands after its warp has gone on.
std::string named(const Instruction&);

// The bytes at a shared address, which has the rank of its block in the cluster in bits 24…; throws Fault where the
// block has none such, has ended, or the address is misaligned. `block` becomes the one that owns them.
u8* shared_bytes(Block*& block, u32 address, u32 bytes, u32 alignment, const Instruction& by);
// The same for an instruction that reaches its own block alone, whether the address has its rank or 0.
u8* own_bytes(Block& block, u32 address, u32 bytes, u32 alignment, const Instruction& by);

// Two uniform registers as 64 bits.
inline u64 uniform_pair(const Warp& w, int index) { return w.u[index] | u64(w.u[index + 1]) << 32; }

// Transaction barriers (mbarrier) at shared addresses.
//
// The change of one: arrivals that come, bytes (or copies) that are expected, positive, or have come, negative, and
// arrivals that will not come in later phases either. Returns the state before. Throws Fault where no barrier is, or
// more comes than may.
u64 change_barrier(Block& from, u32 address, u32 arrivals, i64 transactions, u32 leaving, const Instruction& by);
// Whether the phase of `parity` of the mbarrier at `address` (shared, with the rank in the cluster) has completed.
bool transaction_phase_done(Machine&, Block&, u32 address, u32 parity);

// barrier.cluster: its generation passes where all threads of the cluster that have not ended have arrived.
void check_cluster_barrier(Cluster&);

// What ASYNC[] in async.cpp names of the other files.
Execute prepare_transaction_barrier(Instruction&);    // SYNCS
Execute prepare_copies_arrive(Instruction&);          // ARRIVES
Execute prepare_tensor_load(Instruction&);            // UTMALDG
Execute prepare_tensor_store(Instruction&);           // UTMASTG
Execute prepare_tensor_reduction(Instruction&);       // UTMAREDG
Execute prepare_bulk_copy(Instruction&);              // UBLKCP
Execute prepare_bulk_reduction(Instruction&);         // UBLKRED

}  // namespace sass
