// What the clusters of a launch share: records of accesses to global memory, and what atomics there have released.
#pragma once

#include <algorithm>
#include <map>
#include <unordered_map>

#include "machine.h"

namespace sass {

// Clocks up to which the agents of other clusters are known, by the number of the cluster's first block.
using Foreign = std::map<u64, std::vector<u32>>;

// One instruction's access to global memory, at one time of its agent.
constexpr int UNSEEN = -1, MIXED = -2;

struct GlobalAccess {
  u64 cluster;
  u32 agent, time;
  int index;  // of the instruction
  u32 rank;   // of the block in its cluster
  int warp, lane;
  u8 strength;          // of the instruction: two strong ones do not race where their scopes take in each other's block
  bool spread = false;  // of a load: whether its lanes load more than one address
  int read_by = UNSEEN;  // of a write: the one instruction by which its agent had read all that it writes, or MIXED
};

inline void raise(std::vector<u32>& to, const std::vector<u32>& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t n = 0; n < from.size(); n++) to[n] = std::max(to[n], from[n]);
}
void raise(std::shared_ptr<const Foreign>& to, const std::shared_ptr<const Foreign>& from);
bool covers(const std::vector<u32>& known, const std::vector<u32>& told);  // whether `told` would raise nothing

// Last accesses to an allocation that a kernel may write, by words of four bytes: the number of the record in bits 4…,
// in bits 0–3 which bytes it covers.
struct Shadow {
  std::vector<u32> writer;
  std::vector<u32> reader;  // empty until something reads
  std::unordered_map<u64, std::vector<u32>> more_writers, more_readers;
};

// What agents of one cluster have released by atomics.
struct Told {
  std::vector<u32> seen;
  std::shared_ptr<const Foreign> others;
};

// Races that are looked for: none; all but those of replicas, or all. Warps of a block are replicas where they load the
// same word of several by the same instruction and one of them then stores to it: compilers of tiles, such as Triton,
// let several warps compute an element and one of them store it. What the others loaded is taken to go nowhere; a
// number that all lanes load alike only where the program uses it for that store alone, since a branch may depend on
// it.
enum class Races : u8 { None, NoReplicas, All };

struct World {
  const Program& program;
  const Launch& launch;
  std::vector<GlobalAccess> records;
  Races races = Races::All;
  bool fences = false;                       // whether the program has a fence that other clusters could see
  bool talks = false;                        // whether blocks may tell each other something: atomics, strong accesses
  bool proxies = false;                      // whether it has work of the asynchronous proxy
  std::unordered_map<int, int> only_stores;  // see only_store_of: by the load's index, as far as it was asked for
  std::unordered_map<u64, std::map<u64, Told>> locations;  // address of an atomic → cluster → what it released there

  World(const Program&, const Launch&);
};

}  // namespace sass
