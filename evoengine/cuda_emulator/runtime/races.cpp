// Memory that blocks share: outputs and scratch memory. Of every part of it is kept who wrote it last and who has read
// it since. Two accesses by different threads, one of them a write, are in order where one thread knows of the other's
// (clocks.cpp), or where both are strong and of a scope that holds both threads; else they race, whatever the schedule.
// The rules are those of the PTX ISA, "Memory Consistency Model". A store that changes nothing is not a write here, as
// CUDA lets threads store the same value to one place.
//
// The compiler calls the handlers at the end of this file (-fsanitize=thread) before every access of a checked kernel.
#include "clocks.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace evo_emu {

namespace {

// An access: block, thread and clock as When has them, where in the text, and of which scope if it was strong.
struct Mark {
    uint64_t block : 25, thread : 10, clock : 29;
    uint64_t where : 48, is_line : 1, scope : 2;
};
constexpr uint32_t under_way = (1u << 29) - 1;  // as the clock of a store whose end nobody has waited for

struct Cell {
    Mark write, read;
    uint32_t readers;  // number of a list of reads besides, all since the write; 0: none
};

// A part of a tensor is as small as the smallest access to it so far.
struct Tracked {
    char *start, *end;
    const char* name;
    unsigned shift;  // log2 of the bytes of a part
    Cell* cells;
    size_t cell_bytes;  // of the mapping
};

struct Readers {
    unsigned count;
    Mark marks[7];
};

template <class T, unsigned n>
constexpr unsigned count_of(const T (&)[n]) {
    return n;
}

// A place through which threads synchronise.
struct Place {
    const volatile void* address;  // null: free
    uint32_t block;                // whose shared memory it is in; 0: global memory
    Released released;
    unsigned observers;
    When observed_by[16];  // who has read its contents, by strong accesses
};

constexpr unsigned max_tracked = 256;
constexpr unsigned max_reader_lists = 1 << 20;

char *arena, *arena_end, *arena_next;
const char *variables_start, *variables_end;  // of the device
Tracked tracked[max_tracked];
unsigned tracked_count;
Readers* reader_lists;
unsigned reader_list_count;
Place* places;
unsigned place_count, place_capacity;

// A store whose effect is not complete yet: its change is determined when the thread is here again.
struct {
    const char* address;
    unsigned bytes;  // 0: none
    Where where;
    bool strong;
    char before[16];
} unsettled;

Mark mark_of(const When& when, Where where, Scope scope) {
    const auto code = uint64_t(where.line ? uintptr_t(where.line) : uintptr_t(where.code));
    return {when.block, when.thread, when.clock, code & ((uint64_t(1) << 48) - 1), where.line != 0, uint64_t(scope)};
}
When when_of(const Mark& m) { return {uint32_t(m.block), uint16_t(m.thread), uint32_t(m.clock)}; }
Where where_of(const Mark& m) {
    if (m.is_line) return {nullptr, int(m.where)};
    return {reinterpret_cast<const void*>(uintptr_t(m.where)), 0};
}

Tracked* find_tracked(const char* address) {
    static Tracked* last = tracked;
    if (address >= last->start && address < last->end) return last;
    for (unsigned i = 0; i < tracked_count; ++i)
        if (address >= tracked[i].start && address < tracked[i].end) return last = &tracked[i];
    return nullptr;
}

void map_cells(Tracked& t) {
    t.cell_bytes = ((size_t(t.end - t.start) >> t.shift) + 1) * sizeof(Cell);
    t.cells = static_cast<Cell*>(map_zeroed(t.cell_bytes, t.name));
}

// Parts of half the size, each with the whole one's past.
void split_parts(Tracked& t, unsigned shift) {
    const Tracked before = t;
    t.shift = shift;
    map_cells(t);
    const unsigned more = before.shift - shift;
    for (size_t i = 0; i < size_t(t.end - t.start) >> shift; ++i) {
        const Cell& whole = before.cells[i >> more];
        if (whole.write.block || whole.read.block) t.cells[i] = whole;
        // A list of reads belongs to one part.
        if (whole.readers && i & ((1u << more) - 1)) {
            t.cells[i].readers = reader_list_count;
            reader_lists[reader_list_count++ % max_reader_lists] = reader_lists[whole.readers];
        }
    }
    munmap(before.cells, before.cell_bytes);
}

size_t hash_of(const volatile void* address, uint32_t block) {
    return size_t((uintptr_t(address) >> 1 ^ uintptr_t(block) << 40) * 0x9e3779b97f4a7c15u >> 20);
}

Place* find_place(const volatile void* address, uint32_t block) {
    if (!place_capacity) return nullptr;
    for (size_t i = hash_of(address, block);; ++i) {
        Place& p = places[i & (place_capacity - 1)];
        if (!p.address) return nullptr;
        if (p.address == address && p.block == block) return &p;
    }
}

Place& make_place(const volatile void* address, uint32_t block);

void grow_places() {
    Place* before = places;
    const unsigned count = place_capacity;
    place_capacity = count ? 2 * count : 1024;
    places = static_cast<Place*>(calloc(place_capacity, sizeof(Place)));
    if (!places) crash("the emulator has no memory left for places that threads synchronise through");
    place_count = 0;
    for (unsigned i = 0; i < count; ++i)
        if (before[i].address)
            memcpy((void*)&make_place(before[i].address, before[i].block), &before[i], sizeof(Place));
    free(before);
}

Place& make_place(const volatile void* address, uint32_t block) {
    if (Place* found = find_place(address, block)) return *found;
    if (2 * place_count >= place_capacity) grow_places();
    ++place_count;
    size_t i = hash_of(address, block);
    while (places[i & (place_capacity - 1)].address) ++i;
    Place& p = places[i & (place_capacity - 1)];
    p.address = address;
    p.block = block;
    return p;
}

// What both scopes must hold for two threads to be seen by one another.
Scope scope_between(uint32_t block, uint32_t other) {
    if (block == other) return Scope::block;
    return (block - 1) / kernel.cluster == (other - 1) / kernel.cluster ? Scope::cluster : Scope::device;
}

bool is_own(const Mark& m) {
    const When own = now(current);
    return m.block == own.block && m.thread == own.thread;
}

bool both_strong(const Mark& m, Scope scope) {
    return std::min(Scope(m.scope), scope) >= scope_between(uint32_t(m.block), now(current).block);
}

bool is_ordered(const Mark& m) { return m.clock == under_way ? false : is_own(m) || is_known(when_of(m), current); }

// Whether the thread, or one it knows of, has read what the strong write wrote, of up to 8 bytes.
bool is_observed(const char* address, const Mark& m) {
    if (!m.scope) return false;
    for (uintptr_t alignment = 1; alignment <= 8; alignment *= 2) {
        const Place* place = find_place(reinterpret_cast<const char*>(uintptr_t(address) & -alignment), 0);
        for (unsigned i = 0; place && i < place->observers; ++i)
            if (is_known(place->observed_by[i], current)) return true;
    }
    return false;
}

const char* name_of(Access access, Scope scope) {
    static const char* const names[2][4] = {
        {"read", "atomic read of block scope", "atomic read of cluster scope", "atomic read of device scope"},
        {"write", "atomic write of block scope", "atomic write of cluster scope", "atomic write of device scope"}};
    return names[access == Access::write][unsigned(scope)];
}

[[noreturn]] void report(const Tracked& t, const char* address, Access access, Where where, Scope scope,
                         Access other_access, const Mark& other) {
    const uint64_t number = other.block - 1, row = number / launch.grid.x;
    const Dim at{unsigned(number % launch.grid.x), unsigned(row % launch.grid.y), unsigned(row / launch.grid.y)};
    const bool stored = other.clock == under_way;
    crash("race on %s at byte %ld: %s at %s and %s at %s by block (%u,%u,%u), thread %s, %s", t.name,
          long(address - t.start), name_of(access, scope), line_name(where).text,
          stored ? "bulk store" : name_of(other_access, Scope(other.scope)), line_name(where_of(other)).text, at.x,
          at.y, at.z, thread_name(other.thread).text,
          stored ? "whose end nobody has waited for" : "which nothing orders");
}

void check(const Tracked& t, const char* address, const Cell& cell, Access access, Where where, Scope scope) {
    auto races = [&](const Mark& m) {
        if (!m.block || (is_own(m) && m.clock != under_way) || both_strong(m, scope)) return false;
        return !is_ordered(m) && !is_observed(address, m);
    };
    if (races(cell.write)) report(t, address, access, where, scope, Access::write, cell.write);
    if (access == Access::read) return;
    if (races(cell.read)) report(t, address, access, where, scope, Access::read, cell.read);
    if (!cell.readers) return;
    const Readers& more = reader_lists[cell.readers];
    for (unsigned i = 0; i < more.count; ++i)
        if (races(more.marks[i])) report(t, address, access, where, scope, Access::read, more.marks[i]);
}

void add_reader(Cell& cell, const Mark& m) {
    if (!cell.read.block || is_own(cell.read) || is_ordered(cell.read)) {
        // Of a thread's own reads the weak one counts: it is in order with less.
        const bool was_weak = is_own(cell.read) && !cell.read.scope;
        cell.read = m;
        if (was_weak) cell.read.scope = 0;
        return;
    }
    if (!cell.readers) {
        if (!reader_lists) {
            reader_lists = static_cast<Readers*>(map_zeroed(max_reader_lists * sizeof(Readers), "lists of readers"));
            reader_list_count = 1;
        }
        if (reader_list_count == max_reader_lists) return;
        cell.readers = reader_list_count++;
        reader_lists[cell.readers].count = 0;
    }
    Readers& more = reader_lists[cell.readers];
    for (unsigned i = 0; i < more.count; ++i)
        if (is_own(more.marks[i]) || is_ordered(more.marks[i])) return void(more.marks[i] = m);
    if (more.count < count_of(more.marks)) return void(more.marks[more.count++] = m);
    more.marks[random_below(count_of(more.marks))] = m;
}

void record(Cell& cell, Access access, const Mark& m) {
    if (access == Access::read) return add_reader(cell, m);
    cell.write = m;
    cell.read = {};
    if (cell.readers) reader_lists[cell.readers].count = 0;
}

template <class Visitor>
void for_each_part(const char* address, size_t bytes, Visitor visitor) {
    Tracked* t = find_tracked(address);
    if (!t) return;
    const auto offset = size_t(address - t->start);
    bytes = std::min(bytes, size_t(t->end - address));
    unsigned shift = t->shift;
    while (shift && ((offset | bytes) & ((size_t(1) << shift) - 1))) --shift;
    if (shift < t->shift) split_parts(*t, shift);
    for (size_t i = offset >> t->shift; i << t->shift < offset + bytes; ++i)
        visitor(*t, t->start + (i << t->shift), t->cells[i]);
}

void access_parts(Access access, const char* address, size_t bytes, Where where, Scope scope) {
    const Mark own = mark_of(now(current), where, scope);
    auto is_repeated = [&](const Mark& m) {
        return m.block == own.block && m.thread == own.thread && m.clock == own.clock && !m.scope;
    };
    for_each_part(address, bytes, [&](Tracked& t, const char* at, Cell& cell) {
        if (access == Access::read && (is_repeated(cell.read) || is_repeated(cell.write))) return;
        check(t, at, cell, access, where, scope);
        record(cell, access, own);
    });
}

bool is_tracked(const volatile void* address) {
    auto* p = static_cast<const volatile char*>(address);
    return (p >= arena && p < arena_end) || (p >= variables_start && p < variables_end);
}

void settle() {
    const unsigned bytes = unsettled.bytes;
    if (!bytes) return;
    unsettled.bytes = 0;
    if (!memcmp(unsettled.address, unsettled.before, bytes)) return;
    note_progress();
    if (!unsettled.strong) access_parts(Access::write, unsettled.address, bytes, unsettled.where, Scope::weak);
}

void leave_unsettled(const char* address, size_t bytes, Where where, bool strong) {
    unsettled.address = address;
    unsettled.bytes = unsigned(bytes);
    unsettled.where = where;
    unsettled.strong = strong;
    memcpy(unsettled.before, address, bytes);
}

void plain_access(Access access, const char* address, size_t bytes, Where where) {
    settle();
    if (current == max_fibers) return;
    if (access == Access::read || bytes > sizeof unsettled.before) {
        if (access == Access::write) note_progress();
        return access_parts(access, address, bytes, where, Scope::weak);
    }
    const Tracked* t = find_tracked(address);  // none beside a tensor: the guard pages and canaries see to it
    if (t && bytes <= size_t(t->end - address)) leave_unsettled(address, bytes, where, false);
}

}  // namespace

void reserve_tracked(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) crash("the emulator cannot reserve %zu bytes for tensors", bytes);
    arena = arena_next = static_cast<char*>(memory);
    arena_end = arena + bytes;
}

char* place_tracked(size_t bytes) {
    char* found = arena_next;
    arena_next += bytes;
    if (arena_next > arena_end) crash("the emulator has reserved too little for tensors");
    return found;
}

void track(char* start, size_t bytes, unsigned element, const char* name) {
    if (tracked_count == max_tracked) crash("more than %u tensors that kernels write", max_tracked);
    unsigned shift = 0;
    while (shift < 2 && 2u << shift <= element) ++shift;
    Tracked& t = tracked[tracked_count++];
    t = {start, start + bytes, name, shift, nullptr, 0};
    map_cells(t);
    if (start >= arena && start < arena_end) return;
    if (!variables_start || start < variables_start) variables_start = start;
    if (t.end > variables_end) variables_end = t.end;
}

// A kernel begins: all earlier events are known.
void begin_tracking() {
    for (unsigned i = 0; i < tracked_count; ++i) madvise(tracked[i].cells, tracked[i].cell_bytes, MADV_DONTNEED);
    for (unsigned i = 0; i < place_capacity; ++i) {
        if (!places[i].address) continue;
        clear(places[i].released);
        free(places[i].released.own);
    }
    if (place_capacity) memset((void*)places, 0, place_capacity * sizeof(Place));
    place_count = 0;
    reader_list_count = 1;
}

void settle_accesses() { settle(); }

void track_access(Access access, const volatile void* address, size_t bytes, Where where) {
    auto* p = const_cast<const char*>(static_cast<const volatile char*>(address));
    if (is_tracked(p)) plain_access(access, p, bytes, where);
}

// A relaxed change of device scope that others may make as well.
void track_atomic(const void* address, size_t bytes, int line) {
    if (!is_tracked(address)) return;
    settle();
    for (Access access : {Access::read, Access::write})
        access_parts(access, static_cast<const char*>(address), bytes, {nullptr, line}, Scope::device);
    note_progress();
}

void track_store_under_way(const void* address, size_t bytes, int line) {
    if (!is_tracked(address)) return;
    settle();
    auto* p = static_cast<const char*>(address);
    access_parts(Access::write, p, bytes, {nullptr, line}, Scope::weak);
    When when = now(current);
    when.clock = under_way;
    for_each_part(p, bytes,
                  [&](Tracked&, const char*, Cell& c) { c.write = mark_of(when, {nullptr, line}, Scope::weak); });
    note_progress();
}

void settle_stores_under_way(const void* address, size_t bytes, int line) {
    if (!is_tracked(address)) return;
    const Mark own = mark_of(now(current), {nullptr, line}, Scope::weak);
    for_each_part(static_cast<const char*>(address), bytes, [&](Tracked&, const char*, Cell& cell) {
        if (is_own(cell.write) && cell.write.clock == under_way) cell.write = own;
    });
}

namespace {

// Others may change what the thread looks at: they run first, now and then, and always where it has just looked. Before
// a thread changes global memory its block may lag: atomics race with nothing, but are early or late.
void let_others_run(const volatile void* address, bool changes_global, Where where) {
    Fiber& f = fibers[current];
    const bool again = f.polled == address;
    f.polled = address;
    f.polled_at = where;
    if (changes_global && !again) may_lag();
    if (again || !random_below(4)) yield();
}

// What the place passes from the threads that wrote it to the one that reads. `block`: in whose shared memory it is, by
// its number in the grid, plus one; 0 for global memory.
void synchronise(const char* address, uint32_t block, const Strong& s) {
    Place* place = find_place(address, block);
    if (place && s.reads) {
        const bool at_once = s.order == Order::acquire || s.order == Order::acquire_release;
        acquire_from(place->released, current, s.scope, at_once || (s.legacy && has_fenced(current, Scope::device)));
    }
    if (!s.writes) {
        if (!place) place = &make_place(address, block);
        if (place->observers < count_of(place->observed_by)) place->observed_by[place->observers++] = now(current);
        return;
    }
    const bool by_itself = s.order == Order::release || s.order == Order::acquire_release;
    if (!place && !by_itself && !has_fenced(current, Scope::block)) return;
    if (!place) place = &make_place(address, block);
    if (!s.reads) clear(place->released);
    release_to(place->released, current, s.scope, by_itself);
    place->observers = 0;
}

void strong(const volatile void* volatile_address, size_t bytes, const Strong& s, Where where) {
    auto* address = const_cast<const char*>(static_cast<const volatile char*>(volatile_address));
    const bool global = is_tracked(address) || is_pooled(address);
    const unsigned owner = global ? max_resident : block_of_shared(address);
    if (current == max_fibers || (!global && owner == max_resident)) return;
    settle();
    if (!global) reach_block(owner, "an access", where);
    let_others_run(address, global && s.writes, where);
    if (global) access_parts(s.writes ? Access::write : Access::read, address, bytes, where, s.scope);
    synchronise(address, global ? 0 : uint32_t(number_of_block(owner) + 1), s);
    if (s.writes && (!global || find_tracked(address))) leave_unsettled(address, bytes, where, true);
}

}  // namespace

void strong_access(const volatile void* address, unsigned long bytes, Strong s) {
    if (checked) strong(address, bytes, s, {__builtin_return_address(0), s.line});
}

void fence(Scope scope, int) {
    if (!checked) return;
    settle();
    if (!random_below(4)) yield();
    fence_clocks(current, scope);
}

bool fails_now_and_then() { return !random_below(8); }

void read_only_load(const void* address, unsigned long bytes, int line) {
    if (!is_tracked(address)) return;
    settle();
    for_each_part(static_cast<const char*>(address), bytes, [&](Tracked& t, const char* at, Cell& cell) {
        if (!cell.write.block) return;
        const Mark& w = cell.write;
        const uint64_t number = w.block - 1, row = number / launch.grid.x;
        crash(
            "%s at byte %ld is read through the read-only cache at line %d, and the kernel writes it at %s by block "
            "(%u,%u,%u), thread %s",
            t.name, long(at - t.start), line, line_name(where_of(w)).text, unsigned(number % launch.grid.x),
            unsigned(row % launch.grid.y), unsigned(row / launch.grid.y), thread_name(w.thread).text);
    });
}

}  // namespace evo_emu

// The ABI of -fsanitize=thread, common to GCC and Clang.
namespace {

using namespace evo_emu;

inline void plain(Access access, const void* address, size_t bytes, const void* code) {
    if (is_tracked(address)) return plain_access(access, static_cast<const char*>(address), bytes, {code, 0});
    if (kernel.cluster > 1) reach_address(address, {code, 0});
}

inline void volatile_access(bool writes, const void* address, size_t bytes, const void* code) {
    strong(address, bytes, {Order::relaxed, Scope::device, !writes, writes, false, 0}, {code, 0});
}

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define EVO_EMU_ACCESSES(bytes)                                                                                  \
    void __tsan_read##bytes(void* p) { plain(Access::read, p, bytes, __builtin_return_address(0)); }             \
    void __tsan_write##bytes(void* p) { plain(Access::write, p, bytes, __builtin_return_address(0)); }           \
    void __tsan_unaligned_read##bytes(void* p) { plain(Access::read, p, bytes, __builtin_return_address(0)); }   \
    void __tsan_unaligned_write##bytes(void* p) { plain(Access::write, p, bytes, __builtin_return_address(0)); } \
    void __tsan_volatile_read##bytes(void* p) { volatile_access(false, p, bytes, __builtin_return_address(0)); } \
    void __tsan_volatile_write##bytes(void* p) { volatile_access(true, p, bytes, __builtin_return_address(0)); } \
    void __tsan_unaligned_volatile_read##bytes(void* p) {                                                        \
        volatile_access(false, p, bytes, __builtin_return_address(0));                                           \
    }                                                                                                            \
    void __tsan_unaligned_volatile_write##bytes(void* p) {                                                       \
        volatile_access(true, p, bytes, __builtin_return_address(0));                                            \
    }
// clang-format off: each defines functions
EVO_EMU_ACCESSES(1) EVO_EMU_ACCESSES(2) EVO_EMU_ACCESSES(4) EVO_EMU_ACCESSES(8) EVO_EMU_ACCESSES(16)
// clang-format on
#undef EVO_EMU_ACCESSES

    void __tsan_read_range(void* p, size_t bytes) {
    plain(Access::read, p, bytes, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t bytes) { plain(Access::write, p, bytes, __builtin_return_address(0)); }

// In place of the C library's in a checked kernel (build.py).
void* evo_emu_memcpy(void* to, const void* from, size_t bytes) {
    plain(Access::read, from, bytes, __builtin_return_address(0));
    plain(Access::write, to, bytes, __builtin_return_address(0));
    return memcpy(to, from, bytes);
}
void* evo_emu_memmove(void* to, const void* from, size_t bytes) {
    plain(Access::read, from, bytes, __builtin_return_address(0));
    plain(Access::write, to, bytes, __builtin_return_address(0));
    return memmove(to, from, bytes);
}
void* evo_emu_memset(void* to, int value, size_t bytes) {
    plain(Access::write, to, bytes, __builtin_return_address(0));
    return memset(to, value, bytes);
}
}
