// Bulk copies and TMA: the asynchronous proxy moves blocks of shared memory at once, or as late as a kernel can notice.
#include "internal.h"

#include <algorithm>
#include <cstring>

namespace evo_emu {

namespace {

constexpr unsigned max_maps = 64, max_stores = 1 << 14;

const TensorMap* maps[max_maps];
unsigned map_count;

struct Store {
    const TensorMap* map;  // null for a plain block
    char* to;
    unsigned shared, bytes, fiber, group;
    int at[5], line;
    bool done, was_read;  // shared memory was read, and a thread has waited for that
    bool adds;            // floats, to what is there
};

Store stores[max_stores];
unsigned store_count;
unsigned committed[max_fibers];

void check_aligned(const char* what, uintptr_t address, unsigned alignment, const char* which, int line) {
    if (address % alignment)
        crash("misaligned %s at line %d: the %s address is not a multiple of %u", what, line, which, alignment);
}

// The tensor map at the address that a kernel gave, as the launch gave it, for a box that begins at `at`.
const TensorMap* find_map(const void* given, const int* at, unsigned rank, const char* what, int line) {
    check_aligned(what, reinterpret_cast<uintptr_t>(given), 64, "tensor map's", line);
    const TensorMap* map = static_cast<const TensorMap*>(given)->self;
    bool known = std::find(maps, maps + map_count, map) != maps + map_count;
    if (!known || memcmp(map, given, sizeof *map) != 0)
        crash("%s at line %d: there is no tensor map at its address", what, line);
    if (const long begins = long(at[0]) * map->element; begins % 16)
        crash("%s at line %d: its box begins %ld bytes into a row, which must be a multiple of 16", what, line, begins);
    if (map->rank != rank) crash("%s at line %d: %u coordinates for a tensor map of %u", what, line, rank, map->rank);
    return map;
}

unsigned tile_bytes(const TensorMap& map) {
    unsigned bytes = map.element;
    for (unsigned extent : map.box) bytes *= extent;
    return bytes;
}

// Calls move(shared address of the row, first byte of the row in the tensor, where in the row the tensor is, how many
// bytes of it) for every row of the box; no bytes where the row lies outside of the tensor.
template <class Move>
void for_each_row(const TensorMap& map, const int* at, unsigned shared, Move move) {
    const unsigned row_bytes = map.box[0] * map.element;
    const long first = std::max<long>(0, -long(at[0])), last = std::min<long>(map.box[0], long(map.dims[0]) - at[0]);
    unsigned i[5] = {};
    for (unsigned rows = tile_bytes(map) / row_bytes; rows; --rows, shared += row_bytes) {
        uintptr_t from = reinterpret_cast<uintptr_t>(map.tensor) + long(at[0]) * map.element;  // may wrap around
        bool inside = first < last;
        for (unsigned d = 1; d < map.rank; ++d) {
            long coordinate = long(at[d]) + i[d];
            inside &= coordinate >= 0 && coordinate < long(map.dims[d]);
            from += uintptr_t(coordinate) * map.strides[d - 1];
        }
        move(shared, reinterpret_cast<char*>(from), unsigned(inside ? first * map.element : 0),
             unsigned(inside ? (last - first) * map.element : 0));
        for (unsigned d = 1; d < 5 && ++i[d] == map.box[d]; ++d) i[d] = 0;
    }
}

constexpr unsigned max_row = 256 * 8;

void land_tile(const PendingCompletion& landing) {
    const TensorMap& map = *landing.tile.map;
    for_each_row(map, landing.tile.at, landing.shared,
                 [&](unsigned to, const char* from, unsigned first, unsigned bytes) {
                     char row[max_row] = {};
                     memcpy(row + first, from + first, bytes);
                     for (unsigned chunk = 0; chunk < map.box[0] * map.element; chunk += 16)
                         async_fill(landing.block, swizzled(to + chunk, map.swizzle), row + chunk, 16);
                 });
}

// Calls move(first byte, bytes) for every row of global memory that the store writes.
template <class Move>
void for_each_target(const Store& store, Move move) {
    if (!store.map) return move(store.to, store.bytes);
    for_each_row(*store.map, store.at, store.shared,
                 [&](unsigned, char* to, unsigned first, unsigned bytes) { move(to + first, bytes); });
}

void perform_add(const Store& store) {
    if (checked) track_atomic(store.to, store.bytes, store.line);
    auto* to = reinterpret_cast<float*>(store.to);
    auto* from = reinterpret_cast<const float*>(async_read(store.shared, store.bytes, "a bulk addition", store.line));
    for (unsigned i = 0; i < store.bytes / sizeof(float); ++i) to[i] += from[i];
}

void perform(const Store& store) {
    if (store.adds) return perform_add(store);
    if (checked)
        for_each_target(store, [&](char* to, unsigned bytes) { track_store_under_way(to, bytes, store.line); });
    if (!store.map) {
        memcpy(store.to, async_read(store.shared, store.bytes, "a bulk store", store.line), store.bytes);
        return;
    }
    const TensorMap& map = *store.map;
    for_each_row(map, store.at, store.shared, [&](unsigned shared, char* to, unsigned first, unsigned bytes) {
        char row[max_row];
        for (unsigned chunk = 0; chunk < map.box[0] * map.element; chunk += 16)
            memcpy(row + chunk, async_read(swizzled(shared + chunk, map.swizzle), 16, "a TMA store", store.line), 16);
        memcpy(to + first, row + first, bytes);
    });
}

void add(Store store, const char* what) {
    async_read(store.shared, store.bytes, what, store.line);  // what is not fenced is laid to the store that reads it
    if (store_count == max_stores) crash("more than %u pending bulk stores", max_stores);
    store.fiber = current;
    store.group = committed[current];
    if (lands_at_once()) perform(store), store.done = true;
    stores[store_count++] = store;
}

}  // namespace

void forget_tensor_maps() { map_count = store_count = 0; }

void know_tensor_map(TensorMap* map) {
    if (map_count == max_maps) crash("more than %u tensor maps", max_maps);
    map->self = maps[map_count++] = map;
}

void bulk_load(unsigned shared, const void* global, unsigned bytes, unsigned barrier, int line) {
    check_aligned("cp.async.bulk", shared, 16, "shared", line);
    check_aligned("cp.async.bulk", reinterpret_cast<uintptr_t>(global), 16, "global", line);
    if (!bytes || bytes % 16) crash("cp.async.bulk at line %d: %u bytes, which must be a multiple of 16", line, bytes);
    const char* from = static_cast<const char*>(global);
    (void)(*(const volatile char*)from, *(const volatile char*)(from + bytes - 1));
    if (checked) track_access(Access::read, from, bytes, {nullptr, line});
    async_write(own_block(), shared, bytes, "cp.async.bulk", line);
    PendingCompletion landing{};
    landing.land = [](const PendingCompletion& l) { async_fill(l.block, l.shared, l.from, l.bytes); };
    landing.bytes = bytes;
    landing.shared = shared;
    landing.from = from;
    barrier_promise(own_block(), barrier, landing, "cp.async.bulk", line);
}

// To the same place, and for the barrier at the same place, of every block of the cluster that has its bit set.
void tile_load(unsigned shared, const void* given, const int* at, unsigned rank, unsigned barrier, unsigned blocks,
               int line) {
    const TensorMap* map = find_map(given, at, rank, "a TMA load", line);
    check_aligned("TMA load", shared, 128, "shared", line);
    if (!blocks || blocks >> kernel.cluster)
        crash("a TMA load at line %d: to blocks 0x%x of a cluster of %u", line, blocks, kernel.cluster);
    PendingCompletion landing{};
    landing.land = land_tile;
    landing.bytes = tile_bytes(*map);
    landing.shared = shared;
    landing.tile.map = map;
    std::copy(at, at + rank, landing.tile.at);
    if (checked)
        for_each_row(*map, landing.tile.at, shared, [&](unsigned, const char* from, unsigned first, unsigned bytes) {
            if (bytes) track_access(Access::read, from + first, bytes, {nullptr, line});
        });
    for (unsigned rank = 0; rank < kernel.cluster; ++rank) {
        if (!(blocks >> rank & 1)) continue;
        const unsigned block = first_of_cluster(own_block()) + rank;
        async_write(block, shared, tile_bytes(*map), "a TMA load", line);
        barrier_promise(block, barrier, landing, "a TMA load", line);
    }
}

namespace {

void begin_plain(bool adds, void* global, unsigned shared, unsigned bytes, int line) {
    const char* name = adds ? "cp.reduce.async.bulk" : "cp.async.bulk";
    check_aligned(name, shared, 16, "shared", line);
    check_aligned(name, reinterpret_cast<uintptr_t>(global), 16, "global", line);
    if (!bytes || bytes % 16) crash("%s at line %d: %u bytes, which must be a multiple of 16", name, line, bytes);
    Store store{nullptr, static_cast<char*>(global), shared, bytes, 0, 0, {}, line, false, false, adds};
    add(store, adds ? "a bulk addition" : "a bulk store");
}

}  // namespace

void bulk_store(void* global, unsigned shared, unsigned bytes, int line) {
    begin_plain(false, global, shared, bytes, line);
}

void bulk_add(void* global, unsigned shared, unsigned bytes, int line) {
    begin_plain(true, global, shared, bytes, line);
}

void tile_store(const void* given, const int* at, unsigned rank, unsigned shared, int line) {
    const TensorMap* map = find_map(given, at, rank, "a TMA store", line);
    check_aligned("TMA store", shared, 128, "shared", line);
    Store store{map, nullptr, shared, tile_bytes(*map), 0, 0, {}, line, false, false, false};
    std::copy(at, at + rank, store.at);
    add(store, "a TMA store");
}

void bulk_commit() { ++committed[current]; }

void bulk_wait(unsigned groups_left, bool read) {
    unsigned kept = 0;
    for (unsigned i = 0; i < store_count; ++i) {
        Store& store = stores[i];
        const bool waited_for = store.fiber == current && store.group + groups_left < committed[current];
        if (waited_for && !store.done) perform(store), store.done = true;
        if (waited_for && read) store.was_read = true;
        if (waited_for && !read && checked && !store.adds)
            for_each_target(store, [&](char* to, unsigned bytes) { settle_stores_under_way(to, bytes, store.line); });
        if (!waited_for || (read && checked)) stores[kept++] = store;
    }
    store_count = kept;
}

// A block's shared memory ceases to exist when the block ends, even if it is still being read.
void check_stores_waited_for() {
    unsigned kept = 0;
    for (unsigned i = 0; i < store_count; ++i) {
        if (stores[i].fiber != current) stores[kept++] = stores[i];
        else if (!stores[i].was_read)
            crash("the thread ended without cp.async.bulk.commit_group and wait_group for its store at line %d",
                  stores[i].line);
    }
    store_count = kept;
}

}  // namespace evo_emu
