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

}  // namespace

int wavefronts(const Access& access) {
  u64 addresses[LANES];
  int count = 0;
  for (u32 rest = access.lanes; rest; rest &= rest - 1) addresses[count++] = access.addresses[__builtin_ctz(rest)];
  if (!count) return 0;
  int words = std::max(1, access.bytes / 4);
  if (access.matrix) words = 4;
  if (words == 1) return passes(addresses, count, 1);
  // Wider accesses take the lanes in halves or quarters; lanes that share an address share its pass.
  int per_pass = 32 / words, total = 0;
  for (int first = 0; first < count; first += per_pass)
    total += passes(addresses + first, std::min(per_pass, count - first), words);
  if (access.matrix) return total;
  std::sort(addresses, addresses + count);
  int distinct = std::unique(addresses, addresses + count) - addresses;
  int all_at_once = std::max(passes(addresses, distinct, words), (distinct * words + 31) / 32);
  return std::min(total, all_at_once);
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
  if (!l || !(l->present >> (sector & 3) & 1)) return -1;
  hits++;
  return l->at[sector & 3];
}

void L1::fetched(u64 sector, double at) {
  Line* l = line(sector >> 2, true);
  l->present |= 1 << (sector & 3);
  l->at[sector & 3] = at;
}

}  // namespace sass
