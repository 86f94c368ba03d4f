// Register hazards: an instruction that reads or overwrites a register before another has written or read it.
//
// The hardware checks nothing. After an instruction with a fixed latency the stall counts must cover it; after one with
// a variable latency a later instruction must wait for the scoreboard that it sets. Both are determined by the control
// words alone, so that every path through the program is checked once, before anything is executed.
#pragma once

#include "machine.h"

namespace sass {

struct Hazard {
  int at;        // index of the instruction that is issued too early
  int producer;  // index of the one it should have waited for
  std::string message;
};

// The results of an analysis of a program.
struct Hazards {
  std::vector<Hazard> found;          // each pair of instructions once
  std::map<std::string, int> unseen;  // pairs of units without a known latency → number of occurrences
  int highest_register = -1;          // on any path from the entry
};

// `registers` are those of a thread at launch; 0 if unknown.
Hazards find_hazards(const Program&, int arch, int registers);

// Throws Fault if the program has a hazard; analyses once for each architecture and number of registers.
void require_no_hazard(const Program&, u32 arch, u32 registers);

// The only store to global memory that a loaded value reaches, possibly after computation, but neither as an address
// nor through a decision; -1 if it reaches others too, or none. Indices of instructions.
int only_store_of(const Program&, int load);

// The distances that ptxas left between instructions one of which needs the other's result: lines of "KIND PRODUCER
// FILE CONSUMER CLOCKS COUNT". KIND is RAW, WAW or WAR; FILE is R, UR, P, UP or SB.
std::string measure_latencies(const Program&, int arch);

}  // namespace sass
