#include "caches.h"

#include <algorithm>

namespace sass {

namespace {

// Passes for some lanes' words: the most distinct words that any bank has to give.
int passes(const u64* addresses, int count, int words) {
  u64 seen[32][32];
  int held[32] = {};
  int most = 1;
  for (int n = 0; n < count; n++)
    for (int k = 0; k < words; k++) {
      u64 word = addresses[n] / 4 + k;
      int bank = word % 32;
      bool known = false;
      for (int j = held[bank] - 1; j >= 0 && !known; j--) known = seen[bank][j] == word;
      if (!known && held[bank] < 32) seen[bank][held[bank]++] = word;
      most = std::max(most, held[bank]);
    }
  return most;
}

// Whether each lane asks for what its neighbour asks for, or each for what the one two lanes away does.
bool same_in_pairs(const Access& access, u32 active) {
  for (int apart : {1, 2}) {
    bool all = true;
    for (u32 rest = active; rest && all; rest &= rest - 1) {
      int lane = __builtin_ctz(rest), other = lane ^ apart;
      all = !(active >> other & 1) || access.addresses[lane] == access.addresses[other];
    }
    if (all) return true;
  }
  return false;
}

}  // namespace

int phases(const Access& access, u32* lanes) {
  lanes[0] = access.lanes;
  if (access.bytes <= 4) return 1;
  int width = access.bytes == 8 ? 16 : 8, count = 0;
  for (int first = 0; first < LANES; first += 2 * width) {
    const u32 lanes_of_phase = (1u << width) - 1;
    u32 one = access.lanes & lanes_of_phase << first, other = access.lanes & lanes_of_phase << (first + width);
    if (one && other && same_in_pairs(access, one | other)) one |= other, other = 0;
    if (one) lanes[count++] = one;
    if (other) lanes[count++] = other;
  }
  return count;
}

int wavefronts(const Access& access) {
  u64 addresses[LANES];
  auto passes_of = [&](u32 lanes, int words) {
    int count = 0;
    for (; lanes; lanes &= lanes - 1) addresses[count++] = access.addresses[__builtin_ctz(lanes)];
    return passes(addresses, count, words);
  };
  if (!access.lanes) return 0;
  int total = 0;
  if (access.matrix) {  // rows of 16 bytes, of which the banks give eight at once
    for (int first = 0; first < LANES; first += 8)
      if (u32 rows = access.lanes & 0xffu << first) total += passes_of(rows, 4);
    return total;
  }
  u32 of_phase[4];
  int count = phases(access, of_phase);
  for (int n = 0; n < count; n++) total += passes_of(of_phase[n], std::max(1, access.bytes / 4));
  return total;
}

int lines(const Access& access) {
  u32 of_phase[4];
  u64 found[4 * LANES];
  Access part = access;
  int total = 0, count = phases(access, of_phase);
  for (int n = 0; n < count; n++) {
    part.lanes = of_phase[n];
    total += pieces(part, 7, found);
  }
  return total;
}

int pieces(const Access& access, int shift, u64* found) {
  int count = 0;
  for (u32 rest = access.lanes; rest; rest &= rest - 1) {
    u64 first = access.addresses[__builtin_ctz(rest)];
    for (u64 piece = first >> shift; piece <= (first + access.bytes - 1) >> shift; piece++) {
      bool known = false;
      for (int j = count - 1; j >= 0 && !known; j--) known = found[j] == piece;
      if (!known) found[count++] = piece;
    }
  }
  return count;
}

L1::L1(double bytes) {
  u64 held = std::max(64.0, bytes / 128);
  sets = std::max<u64>(1, held / WAYS);
  lines.resize(sets * WAYS);
}

L1::Line* L1::line(u64 tag, bool make) {
  Line* set = &lines[(tag * 0x9e3779b97f4a7c15ull >> 20) % sets * WAYS];
  Line* oldest = set;
  for (Line* l = set; l < set + WAYS; l++) {
    if (l->tag == tag) {
      l->used = ++ticks;
      return l;
    }
    if (l->used < oldest->used) oldest = l;
  }
  if (!make) return nullptr;
  oldest->tag = tag;
  oldest->present = 0;
  oldest->used = ++ticks;
  return oldest;
}

double L1::find(u64 sector) {
  requests++;
  Line* l = line(sector >> 2, false);
  if (!l || l->filled < forgotten || !(l->present >> (sector & 3) & 1)) return -1;
  hits++;
  return l->at[sector & 3];
}

void L1::forget() { forgotten = ticks + 1; }

void L1::fetched(u64 sector, double at) {
  Line* l = line(sector >> 2, true);
  if (l->filled < forgotten) l->present = 0;
  l->filled = ticks;
  l->present |= 1 << (sector & 3);
  l->at[sector & 3] = at;
}

}  // namespace sass
