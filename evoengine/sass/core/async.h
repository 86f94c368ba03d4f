// Transaction barriers, as machine.cpp asks for them.
#pragma once

#include "machine.h"

namespace sass {

// Whether the phase of `parity` of the mbarrier at `address` (shared, with the rank in the cluster) has completed.
bool transaction_phase_done(Machine&, Block&, u32 address, u32 parity);

}  // namespace sass
