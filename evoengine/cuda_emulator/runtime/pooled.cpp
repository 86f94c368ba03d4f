// Tensors that are too large to be held: only address space is reserved for them, and a page gets its contents when a
// thread first touches it. For an input, or a tensor that is written in place, these are a page of the launch's pool,
// chosen by a hash of tensor and page; for an output they are NaN. The surroundings of a tensor are never accessible.
#include "internal.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace evo_emu {

namespace {

// An offset of elements of 4 bytes that overflowed 32 bits must not lead to another tensor.
constexpr size_t pooled_guard = size_t(1) << 34;
constexpr size_t pooled_alignment = 32;
constexpr unsigned max_pooled = 64, max_touched = 1 << 16;
constexpr unsigned char unwritten = 0xff;  // NaN in every floating type

struct Pooled {
    char name[64];
    PooledKind kind;
    unsigned argument;
    char *reserved, *mapped, *start, *end, *mapped_end, *reserved_end;
};

struct Touched {
    const Pooled* tensor;
    char* page;
};

// A touched page as it goes to run.py; the bytes of an output, or of zeroed memory, follow.
struct PageHeader {
    uint64_t offset;
    uint32_t argument, bytes;
};
struct BlockHeader {
    uint64_t block;
    uint32_t given_up, pages;
};

Pooled pooled_tensors[max_pooled];
unsigned pooled_count;
Touched touched[max_touched];
unsigned touched_count;
const char* pool;
uint64_t pool_pages, input_limit, input_bytes;
uint64_t running_block;

// The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators"); Pool in
// devices/pool.py computes the same.
uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

Pooled* find(const char* address) {
    for (unsigned i = 0; i < pooled_count; ++i)
        if (address >= pooled_tensors[i].reserved && address < pooled_tensors[i].reserved_end)
            return &pooled_tensors[i];
    return nullptr;
}

// The tensor's pages count from its first byte, whatever page of the machine that lies in.
void fill_from_pool(const Pooled& t, char* page_start) {
    char *from = std::max(page_start, t.start), *to = std::min(page_start + page, t.end);
    while (from < to) {
        uint64_t offset = uint64_t(from - t.start), number = offset / pool_page, within = offset % pool_page;
        size_t bytes = std::min<size_t>(size_t(to - from), pool_page - within);
        uint64_t chosen = mixed(number ^ uint64_t(t.argument + 1) << 48) % pool_pages;
        memcpy(from, pool + chosen * pool_page + within, bytes);
        from += bytes;
    }
}

[[noreturn]] void report_outside(const Pooled& t, const char* address, const char* access, bool with_thread) {
    char text[256];
    bool before = address < t.start;
    snprintf(text, sizeof text, "out-of-bounds %s of %s: %ld bytes %s", access, t.name,
             before ? long(t.start - address) : long(address - t.end), before ? "before its start" : "past its end");
    finish(exit_crashed, text, with_thread);
}

size_t bytes_of_tensor(const Pooled& t, char* page_start) {
    return size_t(std::min(page_start + page, t.end) - std::max(page_start, t.start));
}

void check_surroundings(const Touched& one) {
    const Pooled& t = *one.tensor;
    for (char* p = one.page; p < one.page + page; ++p)
        if ((p < t.start || p >= t.end) && (unsigned char)*p != unwritten) report_outside(t, p, "write", false);
}

}  // namespace

void set_pool(const char* pages, uint64_t count) {
    pool = pages;
    pool_pages = count;
}

char* map_pooled(const char* name, unsigned argument, size_t bytes, PooledKind kind, bool end_flush) {
    if (pooled_count == max_pooled) crash("more than %u pooled tensors", max_pooled);
    if (!pool_pages) crash("tensor %s is pooled, and the launch brings no pool", name);
    size_t usable = (bytes + page - 1) / page * page;
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, usable + 2 * pooled_guard, PROT_NONE, flags, -1, 0);
    if (memory == MAP_FAILED) crash("the emulator cannot reserve %zu bytes for %s", usable + 2 * pooled_guard, name);
    Pooled& t = pooled_tensors[pooled_count++];
    snprintf(t.name, sizeof t.name, "%s", name);
    t.kind = kind;
    t.argument = argument;
    t.reserved = static_cast<char*>(memory);
    t.mapped = t.reserved + pooled_guard;
    t.mapped_end = t.mapped + usable;
    t.reserved_end = t.mapped_end + pooled_guard;
    t.start = end_flush ? t.mapped + (usable - bytes) / pooled_alignment * pooled_alignment : t.mapped;
    t.end = t.start + bytes;
    return t.start;
}

// Resets all pages to untouched.
void begin_chosen_block(uint64_t block, uint64_t limit) {
    running_block = block;
    input_limit = limit;
    input_bytes = 0;
    for (unsigned i = 0; i < touched_count; ++i) mprotect(touched[i].page, page, PROT_NONE);
    touched_count = 0;
}

// Writes what the block has touched so far to standard output.
void write_touched(bool given_up) {
    BlockHeader header{running_block, given_up, touched_count};
    write_all(&header, sizeof header);
    for (unsigned i = 0; i < touched_count; ++i) {
        const Pooled& t = *touched[i].tensor;
        if (t.kind != PooledKind::input) check_surroundings(touched[i]);
        char *from = std::max(touched[i].page, t.start), *to = std::min(touched[i].page + page, t.end);
        bool told = t.kind != PooledKind::input && t.kind != PooledKind::scratch;
        PageHeader one{uint64_t(from - t.start), t.argument, told ? uint32_t(to - from) : 0};
        write_all(&one, sizeof one);
        write_all(from, one.bytes);
    }
}

bool is_pooled(const char* address) { return find(address); }

// Whether the access may be retried because the page exists now.
bool provide_page(const char* address, const char* access) {
    const Pooled* t = find(address);
    if (!t) return false;
    if (address < t->mapped || address >= t->mapped_end) report_outside(*t, address, access, true);
    char* start = t->mapped + size_t(address - t->mapped) / page * page;
    for (unsigned i = 0; i < touched_count; ++i)
        if (touched[i].page == start)
            crash("write to read-only input %s at byte %ld", t->name, long(address - t->start));
    if (touched_count == max_touched) crash("the block touches more than %u pages", max_touched);
    bool given = t->kind == PooledKind::input || t->kind == PooledKind::inout;
    if (given && (input_bytes += page) > input_limit) {
        write_touched(true);
        _exit(0);
    }
    touched[touched_count++] = {t, start};
    if (mprotect(start, page, PROT_READ | PROT_WRITE)) crash("the emulator cannot get a page for %s", t->name);
    memset(start, unwritten, page);
    if (t->kind == PooledKind::zeroed) memset(std::max(start, t->start), 0, bytes_of_tensor(*t, start));
    if (given) fill_from_pool(*t, start);
    if (t->kind == PooledKind::input) mprotect(start, page, PROT_READ);
    return true;
}

}  // namespace evo_emu
