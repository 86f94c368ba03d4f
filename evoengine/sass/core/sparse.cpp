#include "sparse.h"

#include <algorithm>

namespace sass {

namespace {

constexpr u8 UNWRITTEN = 0xff;  // NaN in every floating type

// The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators"); Pool in
// evoengine/devices/pool.py computes the same.
u64 mixed(u64 x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

}  // namespace

u8* Sparse::page(u64 number) {
  if (number == last) return last_page;
  std::unique_ptr<u8[]>& found = pages[number];
  if (!found) {
    const bool given = kind == SparseKind::Input || kind == SparseKind::InOut;
    if (given && (pool->touched += PAGE) > pool->limit) {
      pages.erase(number);
      throw GivenUp{};
    }
    found.reset(new u8[PAGE]);
    if (given)
      std::memcpy(found.get(), pool->pages + mixed(number ^ u64(argument + 1) << 48) % pool->count * PAGE, PAGE);
    else std::memset(found.get(), kind == SparseKind::Zeroed ? 0 : UNWRITTEN, PAGE);
  }
  last = number;
  return last_page = found.get();
}

void Sparse::load(u64 offset, void* to, u32 size) {
  for (u8* at = static_cast<u8*>(to); size;) {
    const u32 within = u32(offset % PAGE), part = std::min(size, PAGE - within);
    std::memcpy(at, page(offset / PAGE) + within, part);
    at += part, offset += part, size -= part;
  }
}

void Sparse::store(u64 offset, const void* from, u32 size) {
  for (const u8* at = static_cast<const u8*>(from); size;) {
    const u32 within = u32(offset % PAGE), part = std::min(size, PAGE - within);
    std::memcpy(page(offset / PAGE) + within, at, part);
    at += part, offset += part, size -= part;
  }
}

}  // namespace sass
