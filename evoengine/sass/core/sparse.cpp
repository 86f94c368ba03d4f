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
    fresh(number);
    if (given)
      std::memcpy(found.get(), pool->pages + mixed(number ^ u64(argument + 1) << 48) % pool->count * PAGE, PAGE);
    else std::memset(found.get(), kind == SparseKind::Zeroed ? 0 : UNWRITTEN, PAGE);
  }
  last = number;
  return last_page = found.get();
}

u8* Sparse::fresh(u64 number) {
  std::unique_ptr<u8[]>& found = pages[number];
  found.reset(new u8[tracked ? 2 * PAGE : PAGE]);
  if (tracked) std::memset(found.get() + PAGE, 0, PAGE);
  return found.get();
}

void Sparse::hold(u64 offset, const u8* contents, const u8* marks, u32 size) {
  u8* to = fresh(offset / PAGE);
  std::memset(to, UNWRITTEN, PAGE);
  std::memcpy(to, contents, size);
  for (u32 n = 0; n < size; n++) to[PAGE + n] = marks[n] & WRITTEN;
}

void Sparse::load(u64 offset, void* to, u32 size) {
  for (u8* at = static_cast<u8*>(to); size;) {
    const u32 within = u32(offset % PAGE), part = std::min(size, PAGE - within);
    u8* from = page(offset / PAGE) + within;
    std::memcpy(at, from, part);
    for (u8* mark = from + PAGE; tracked && mark < from + PAGE + part; mark++) *mark |= *mark & WRITTEN ? 0 : MISSED;
    at += part, offset += part, size -= part;
  }
}

void Sparse::store(u64 offset, const void* from, u32 size) {
  for (const u8* at = static_cast<const u8*>(from); size;) {
    const u32 within = u32(offset % PAGE), part = std::min(size, PAGE - within);
    u8* to = page(offset / PAGE) + within;
    std::memcpy(to, at, part);
    for (u8* mark = to + PAGE; tracked && mark < to + PAGE + part; mark++) *mark |= WRITTEN | WRITTEN_NOW;
    at += part, offset += part, size -= part;
  }
}

}  // namespace sass
