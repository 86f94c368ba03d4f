// Tensors too large to be held: a page is there once something has touched it. Of an input, or one that is written in
// place, it is a page of the launch's pool, chosen by a hash of tensor and page; of an output and of scratch memory it
// is what nothing has written.
#pragma once

#include <memory>
#include <unordered_map>

#include "machine.h"

namespace sass {

constexpr u32 PAGE = 4096;  // bytes, as in evoengine/devices/pool.py

enum class SparseKind : u8 { None, Input, Output, Scratch, Zeroed, InOut };  // as in evoengine/sass/launch.py

// What a launch's sparse inputs are made of, and how much of them has been touched.
struct Pool {
  const u8* pages = nullptr;
  u64 count = 0;
  u64 touched = 0, limit = ~0ull;  // bytes of inputs, in whole pages
};

struct GivenUp {};  // thrown where a block touches more of the inputs than it may

// Of each byte of a tracked page, which lie behind its contents.
constexpr u8 WRITTEN = 1, MISSED = 2, WRITTEN_NOW = 4;  // at any time; read before that; by the blocks that run now

struct Sparse {
  SparseKind kind = SparseKind::Input;
  bool tracked = false;  // whether pages have marks
  u32 argument = 0;      // its number among the launch's
  u64 bytes = 0;
  Pool* pool = nullptr;
  std::unordered_map<u64, std::unique_ptr<u8[]>> pages;  // by number
  u64 last = ~0ull;
  u8* last_page = nullptr;

  void load(u64 offset, void* to, u32 size);
  void store(u64 offset, const void* from, u32 size);
  void hold(u64 offset, const u8* contents, const u8* marks, u32 size);  // a page as earlier kernels left it
  u32 size_of(u64 page) const { return u32(bytes - page * PAGE < PAGE ? bytes - page * PAGE : PAGE); }

 private:
  u8* page(u64 number);
  u8* fresh(u64 number);
};

}  // namespace sass
