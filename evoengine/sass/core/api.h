// The C interface that evoengine/sass/core.py calls by ctypes. Structs have the same layout there.
#pragma once

#include <cstdint>

extern "C" {

struct SassBank {
  uint32_t index, bytes;
  const uint8_t* data;
};

struct SassAllocation {
  uint64_t address, bytes;
  uint8_t* data;
  uint64_t period;
  uint32_t writable, unused;
  const char* name;
};

struct SassLaunch {
  uint32_t grid[3], threads[3], cluster[3];
  uint32_t shared_bytes, reserved_shared, local_bytes, registers, arch;
  uint32_t bank_count, allocation_count;
  const SassBank* banks;
  const SassAllocation* allocations;
  uint64_t seed;
};

// A program, or null with the reason in `message`. Unknown opcodes are no error: `sass_unknown` names them.
void* sass_decode(const char* listing, const char* entry, char* message, int size);
void sass_free(void* program);
// Unknown opcodes, "NAME count\n" each, cut to `size`; returns how many there are.
int sass_unknown(void* program, char* text, int size);

// Runs blocks (numbers in the grid; clusters run whole; none named: all). Returns 0, 1 crashed, 2 hung; the reason goes
// to `message`. `limit` is in warp instructions, per block.
int sass_run(void* program, const SassLaunch*, const uint64_t* blocks, int count, uint64_t limit, char* message, int size);

}
