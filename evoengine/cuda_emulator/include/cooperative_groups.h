// Cooperative groups: the block, tiles of a warp, and what of grids and clusters a launch without a grid-wide barrier
// has. Every member that meets others takes the caller's line, as the collectives do.
#pragma once
#include <evo_emu/cuda.h>

#define EVO_EMU_UNSUPPORTED(why) __attribute__((error(why)))

namespace cooperative_groups {

namespace details {

// As exchange of collectives.h does, for values of any size.
template <class T>
inline T moved(const char* name, int line, unsigned mask, T value, unsigned source) {
    if constexpr (sizeof(T) <= 8) return evo_emu::exchange(name, line, mask, value, source);
    constexpr unsigned count = (sizeof(T) + 7) / 8;
    unsigned long long words[count] = {};
    __builtin_memcpy(words, &value, sizeof(T));
    for (auto& word : words) word = evo_emu::exchange(name, line, mask, word, source);
    __builtin_memcpy((void*)&value, words, sizeof(T));
    return value;
}

}  // namespace details

class thread_block {
public:
    static void sync(EVO_EMU_LINE) { evo_emu::block_barrier("thread_block::sync", line, 0, evo_emu::Vote::none); }
    static unsigned thread_rank() { return evo_emu::thread_rank; }
    static unsigned num_threads() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned size() { return num_threads(); }
    static dim3 group_index() { return blockIdx; }
    static dim3 thread_index() { return threadIdx; }
    static dim3 group_dim() { return blockDim; }
    static dim3 dim_threads() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

// `n` threads in a row, a power of two up to 32.
template <unsigned n, class Parent = void>
class thread_block_tile {
    static_assert(n && (n & (n - 1)) == 0 && n <= 32, "the emulator knows tiles of 1, 2, 4, 8, 16 or 32 threads");
    unsigned rank_among_tiles, tiles;

public:
    thread_block_tile(unsigned rank, unsigned count) : rank_among_tiles(rank), tiles(count) {}
    template <class Other>
    thread_block_tile(const thread_block_tile<n, Other>& o)
        : rank_among_tiles(o.meta_group_rank()), tiles(o.meta_group_size()) {}

    static unsigned mask() { return (n == 32 ? ~0u : (1u << n % 32) - 1) << (evo_emu::lane() & ~(n - 1)); }
    static void sync(EVO_EMU_LINE) { evo_emu::warp_rendezvous("tile.sync", line, mask(), nullptr, nullptr, true); }
    static unsigned thread_rank() { return evo_emu::lane() & (n - 1); }
    static constexpr unsigned num_threads() { return n; }
    static constexpr unsigned size() { return n; }
    unsigned meta_group_rank() const { return rank_among_tiles; }
    unsigned meta_group_size() const { return tiles; }

    template <class T> T shfl(T value, int source, EVO_EMU_LINE) const {
        return details::moved("tile.shfl", line, mask(), value, evo_emu::lane_in_segment(source, n));
    }
    template <class T> T shfl_up(T value, unsigned delta, EVO_EMU_LINE) const {
        return details::moved("tile.shfl_up", line, mask(), value, evo_emu::lane_above(delta, n));
    }
    template <class T> T shfl_down(T value, unsigned delta, EVO_EMU_LINE) const {
        return details::moved("tile.shfl_down", line, mask(), value, evo_emu::lane_below(delta, n));
    }
    template <class T> T shfl_xor(T value, unsigned across, EVO_EMU_LINE) const {
        return details::moved("tile.shfl_xor", line, mask(), value, evo_emu::lane_across(int(across), n));
    }
    unsigned ballot(int predicate, EVO_EMU_LINE) const {
        const unsigned set = evo_emu::vote("tile.ballot", line, mask(), predicate);
        return evo_emu::voted(line, set >> (evo_emu::lane() & ~(n - 1)));
    }
    int any(int predicate, EVO_EMU_LINE) const {
        return evo_emu::voted(line, evo_emu::vote("tile.any", line, mask(), predicate) != 0);
    }
    int all(int predicate, EVO_EMU_LINE) const {
        return evo_emu::voted(line, evo_emu::vote("tile.all", line, mask(), !predicate) == 0);
    }
    template <class T> unsigned match_any(T value, EVO_EMU_LINE) const {
        return __match_any_sync(mask(), value, line) >> (evo_emu::lane() & ~(n - 1));
    }
};
template <unsigned n> inline thread_block_tile<n, thread_block> tiled_partition(const thread_block&) {
    return {evo_emu::thread_rank / n, (thread_block::num_threads() + n - 1) / n};
}
template <unsigned n, unsigned m, class Parent>
inline thread_block_tile<n, thread_block_tile<m, Parent>> tiled_partition(const thread_block_tile<m, Parent>& parent) {
    static_assert(n <= m, "a tile is no larger than what it is a part of");
    return {parent.thread_rank() / n, m / n};
}

// Those that happen to run together: any set that holds the caller, so the least helpful one is given (collectives.h).
class coalesced_group {
public:
    static void sync() {}
    static unsigned thread_rank() { return 0; }
    static unsigned num_threads() { return 1; }
    static unsigned size() { return 1; }
    static unsigned meta_group_rank() { return 0; }
    static unsigned meta_group_size() { return 1; }
    template <class T> T shfl(T value, int) const { return value; }
    template <class T> T shfl_up(T value, unsigned) const { return value; }
    template <class T> T shfl_down(T value, unsigned) const { return value; }
    static unsigned ballot(int predicate) { return predicate != 0; }
    static int any(int predicate) { return predicate != 0; }
    static int all(int predicate) { return predicate != 0; }
};
inline coalesced_group coalesced_threads() { return {}; }

// Any of the groups above, its size known at run time; 0 stands for the block.
class thread_group {
    unsigned tile;

public:
    thread_group(const thread_block&) : tile(0) {}
    template <unsigned n, class Parent> thread_group(const thread_block_tile<n, Parent>&) : tile(n) {}
    thread_group(const coalesced_group&) : tile(1) {}
    explicit thread_group(unsigned threads) : tile(threads) {}

    void sync(EVO_EMU_LINE) const {
        if (!tile) return thread_block::sync(line);
        const unsigned first = evo_emu::lane() & ~(tile - 1), lanes = tile == 32 ? ~0u : (1u << tile) - 1;
        evo_emu::warp_rendezvous("tile.sync", line, lanes << first, nullptr, nullptr, true);
    }
    unsigned thread_rank() const { return tile ? evo_emu::lane() & (tile - 1) : evo_emu::thread_rank; }
    unsigned num_threads() const { return tile ? tile : thread_block::num_threads(); }
    unsigned size() const { return num_threads(); }
};
inline thread_group tiled_partition(const thread_group& parent, unsigned threads, int line = __builtin_LINE()) {
    if (!threads || threads > 32 || threads & (threads - 1) || threads > parent.size())
        evo_emu::crash("tiled_partition into %u threads at line %d: a power of two up to 32 that the group has",
                       threads, line);
    return thread_group(threads);
}

class grid_group {
public:
    EVO_EMU_UNSUPPORTED("a barrier of the whole grid needs a cooperative launch, which nobody makes here")
    void sync() const;
    static bool is_valid() { return false; }
    static unsigned long long num_blocks() { return (unsigned long long)gridDim.x * gridDim.y * gridDim.z; }
    static unsigned long long block_rank() {
        return blockIdx.x + gridDim.x * (blockIdx.y + (unsigned long long)gridDim.y * blockIdx.z);
    }
    static unsigned long long num_threads() { return num_blocks() * thread_block::num_threads(); }
    static unsigned long long size() { return num_threads(); }
    static unsigned long long thread_rank() {
        return block_rank() * thread_block::num_threads() + evo_emu::thread_rank;
    }
    static dim3 block_index() { return blockIdx; }
    static dim3 dim_blocks() { return gridDim; }
    static dim3 group_dim() { return gridDim; }
};
inline grid_group this_grid() { return {}; }

class cluster_group {
public:
    static void sync(EVO_EMU_LINE) { evo_emu::cluster_arrive(line), evo_emu::cluster_wait(line); }
    static unsigned block_rank() { return evo_emu::cluster_rank(); }
    static unsigned num_blocks() { return evo_emu::kernel.cluster; }
    static unsigned num_threads() { return num_blocks() * thread_block::num_threads(); }
    static unsigned thread_rank() { return block_rank() * thread_block::num_threads() + evo_emu::thread_rank; }
    static unsigned query_shared_rank(const void* p, EVO_EMU_LINE) { return evo_emu::rank_of_shared(p, line); }
    template <class T> static T* map_shared_rank(T* p, int block, EVO_EMU_LINE) {
        return static_cast<T*>(evo_emu::map_to_block((const void*)p, unsigned(block), line));
    }
};
inline cluster_group this_cluster() { return {}; }

template <class Group> inline void sync(const Group& group, EVO_EMU_LINE) { group.sync(line); }
inline void sync(const coalesced_group&) {}
template <class Group> inline auto thread_rank(const Group& group) { return group.thread_rank(); }
template <class Group> inline auto group_size(const Group& group) { return group.size(); }

}  // namespace cooperative_groups
