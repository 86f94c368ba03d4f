// The cost of a memory access: wavefronts of shared memory, sectors of global memory, and the L1 of one SM.
#pragma once

#include "machine.h"

namespace sass {

// Lanes that the banks serve together, in up to four phases: half warps for 8 bytes a lane, quarters for 16, two of
// which are one phase if lanes request the same in pairs. Returns the number of phases.
int phases(const Access&, u32* lanes);

// Passes over the 32 banks that a shared access takes.
int wavefronts(const Access&);

// Lines of 128 bytes that a global access looks up, phase by phase.
int lines(const Access&);

// The distinct sectors of 32 bytes, or lines of 128, that the lanes touch; `found` has room for 32·(16/32+1)·2.
int pieces(const Access&, int shift, u64* found);

// Sectors of the L1 with the clock at which each arrives; 16 ways, least recently used.
class L1 {
 public:
  explicit L1(double bytes);
  // The clock at which the sector arrives, or a negative number if it must be fetched; then `fetched` records its
  // arrival.
  double find(u64 sector);
  void fetched(u64 sector, double at);
  void forget();
  double hits = 0, requests = 0;

 private:
  struct Line {
    u64 tag = ~0ull, used = 0, filled = 0;
    u8 present = 0;
    double at[4];
  };
  Line* line(u64 tag, bool make);
  static constexpr int WAYS = 16;
  std::vector<Line> lines;
  u64 sets, ticks = 0, forgotten = 0;
};

}  // namespace sass
