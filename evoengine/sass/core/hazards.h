// Register hazards: an instruction that reads or overwrites a register before another has written or read it.
//
// The hardware checks nothing. Of an instruction with a fixed latency the stall counts behind it must make up for it; of
// one with a variable latency a later instruction must wait for the scoreboard that it sets. Both are decided by the
// control words alone, so that every path through the program is checked once, before anything is executed.
#pragma once

#include "machine.h"

namespace sass {

struct Hazard {
  int at;        // index of the instruction that comes too early
  int producer;  // of the one it should have waited for
  std::string message;
};

// What comes out of one look at a program.
struct Hazards {
  std::vector<Hazard> found;       // each pair of instructions once
  std::map<std::string, int> unseen;  // pairs of units of which no latency is known → how often they stand there
  int highest_register = -1;       // on any path from the entry
};

// `registers` are those a thread has at launch; 0 where it is not known.
Hazards find_hazards(const Program&, int arch, int registers);

// Throws Fault where the program has a hazard; looks once for each architecture and number of registers.
void require_no_hazard(const Program&, u32 arch, u32 registers);

// The one store to global memory that what a load gives goes into, computed with perhaps, but neither as an address nor to
// decide anything; -1 where it goes elsewhere too, or nowhere. Indices of instructions.
int only_store_of(const Program&, int load);

// How far apart ptxas has put instructions of which one needs the other's result: "KIND PRODUCER FILE CONSUMER CLOCKS
// COUNT" a line. KIND is RAW, WAW or WAR; FILE is R, UR, P, UP or SB.
std::string measure_latencies(const Program&, int arch);

}  // namespace sass
