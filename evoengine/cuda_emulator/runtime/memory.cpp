// Guarded memory: every tensor, the dynamic shared memory and every static shared variable has a reservation of its own
// with inaccessible surroundings. The space between a part and its pages holds canaries, NaN in every floating type, so
// a read beyond the end yields NaN and a write breaks a canary.
#include "internal.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace evo_emu {

const size_t page = size_t(sysconf(_SC_PAGESIZE));
uint64_t seed;
Launch launch;
Kernel kernel;
unsigned round_of_launches;
char* dynamic_shared;
unsigned long shared_shift;
unsigned dynamic_start;

namespace {

constexpr size_t tensor_guard = size_t(1) << 30;
constexpr size_t shared_guard = 16 << 20;
// wmma asks for 32 bytes, nothing in a kernel for more; the less alignment, the nearer the guard to the tensor's end.
constexpr size_t tensor_alignment = 32;
// A block's window of shared memory starts at a multiple of 1,024, as the hardware keeps 1 KiB for itself before it.
constexpr size_t window_alignment = 1024, least_dynamic_alignment = 16;
// Shared addresses: dynamic memory from 0, or from behind the static variables, which have their own addresses here:
// variable i around (i + 1) << 20. The same of block i of the cluster, as all its blocks may name it, from (i + 4)
// << 28.
constexpr unsigned variable_shift = 20, cluster_shift = 28, first_window = 4;
constexpr unsigned max_tensors = 256, max_variables = max_shared_parts - 1, max_declarations = 1024;
constexpr long near = 64;
// From one resident block's part of a shared variable, or of dynamic memory, to the next one's.
constexpr size_t block_shift = size_t(64) << 20;

struct Region {
    RegionKind kind;
    const char* name;
    char *reserved, *mapped, *start, *end, *mapped_end, *reserved_end;
};

// What the blocks have of shared memory: a variable, or the dynamic part, block by block.
struct SharedPart {
    Region first;     // of the first resident block
    unsigned mapped;  // blocks
};

struct Declared {
    unsigned long bytes, alignment;  // no bytes: dynamic
    unsigned owner;
};

Region tensors[max_tensors];
char tensor_names[max_tensors][64];
unsigned tensor_count;
SharedPart dynamic_part, variables[max_variables];
unsigned variable_count;
Declared declared[max_declarations];
unsigned declared_count;

// Canaries that are checked at every switch of threads: after shared memory, as the first resident block has it, and
// around outputs, where an extra row would begin.
struct Watched {
    const char *from, *to;
    const Region* region;
    bool shared;
};
Watched watched[max_variables + 1 + 2 * max_tensors];
unsigned watched_count;

size_t round_up(size_t bytes, size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

unsigned char canary(const char* p) { return uintptr_t(p) & 1 ? 0xff : 0xfd; }

void write_canaries(char* p, char* end) {
    for (; p < end; ++p) *p = char(canary(p));
}

const char* broken_canary(const char* p, const char* end) {
    for (; p < end && uintptr_t(p) % 8; ++p)
        if ((unsigned char)*p != canary(p)) return p;
    uint64_t broken = 0;
    const char* q = p;
    for (; q + 8 <= end; q += 8) broken |= *reinterpret_cast<const uint64_t*>(q) ^ 0xfffdfffdfffdfffdu;
    if (!broken) p = q;
    for (; p < end; ++p)
        if ((unsigned char)*p != canary(p)) return p;
    return nullptr;
}

void lay_out(Region& r, RegionKind kind, const char* name, char* reserved, size_t guard, size_t bytes, size_t alignment,
             bool end_flush) {
    const size_t usable = round_up(bytes, page);
    r.kind = kind;
    r.name = name;
    r.reserved = reserved;
    r.mapped = reserved + guard;
    r.mapped_end = r.mapped + usable;
    r.reserved_end = r.mapped_end + guard;
    r.start = end_flush ? r.mapped + (usable - bytes) / alignment * alignment : r.mapped;
    r.end = r.start + bytes;
}

void make_usable(const Region& r) {
    const size_t usable = size_t(r.mapped_end - r.mapped);
    if (usable && mprotect(r.mapped, usable, PROT_READ | PROT_WRITE))
        crash("the emulator cannot get %zu bytes for %s", usable, r.name);
    write_canaries(r.mapped, r.start);
    write_canaries(r.end, r.mapped_end);
}

char* reserve(size_t bytes, const char* name) {
    void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) crash("the emulator cannot reserve %zu bytes for %s", bytes, name);
    return static_cast<char*>(memory);
}

Region shifted(Region r, unsigned block) {
    const size_t shift = block * block_shift;
    for (char** p : {&r.reserved, &r.mapped, &r.start, &r.end, &r.mapped_end, &r.reserved_end}) *p += shift;
    return r;
}

Region dynamic_of(unsigned block) { return shifted(dynamic_part.first, block); }

void reserve_part(SharedPart& part, RegionKind kind, const char* name, size_t bytes, size_t alignment, size_t lead) {
    char* memory = part.first.reserved;
    if (!memory) memory = reserve((checked ? max_resident : max_cluster) * block_shift, name);
    if (part.mapped) mprotect(memory, part.mapped * block_shift, PROT_NONE);
    lay_out(part.first, kind, name, memory, shared_guard, lead + bytes, alignment, seed % 2 == 0);
    part.first.start += lead;
    part.mapped = 0;
}

void map_part(SharedPart& part, unsigned blocks) {
    for (; part.mapped < blocks; ++part.mapped) make_usable(shifted(part.first, part.mapped));
}

[[noreturn]] void report_outside(const Region& r, const char* address, const char* access, bool with_thread) {
    char text[256];
    long offset = address - r.start, bytes = r.end - r.start;
    const char* preposition = strcmp(access, "read") ? "to" : "of";
    if (r.kind == RegionKind::dynamic_shared)
        snprintf(text, sizeof text, "out-of-bounds %s %s shared memory at offset %ld of %ld", access, preposition,
                 offset, bytes);
    else if (r.kind == RegionKind::static_shared)
        snprintf(text, sizeof text, "out-of-bounds %s %s shared variable %s at offset %ld of %ld", access, preposition,
                 r.name, offset, bytes);
    else if (address < r.start)
        snprintf(text, sizeof text, "out-of-bounds %s of %s: %ld bytes before its start", access, r.name, -offset);
    else snprintf(text, sizeof text, "out-of-bounds %s of %s: %ld bytes past its end", access, r.name, offset - bytes);
    finish(exit_crashed, text, with_thread);
}

void check_canaries(const Region& r) {
    if (const char* p = broken_canary(r.end, r.mapped_end)) report_outside(r, p, "write", false);
    if (const char* p = broken_canary(r.mapped, r.start)) report_outside(r, p, "write", false);
}

}  // namespace

// With what must not be touched around it.
size_t room_of_tensor(size_t bytes) { return round_up(bytes, page) + 2 * tensor_guard; }

void* map_zeroed(size_t bytes, const char* what) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) crash("the emulator cannot reserve %zu bytes for %s", bytes, what);
    return memory;
}

char* map_tensor(const char* name, size_t bytes, unsigned element, RegionKind kind, bool end_flush) {
    if (tensor_count == max_tensors) crash("more than %u tensors", max_tensors);
    char* kept_name = tensor_names[tensor_count];
    snprintf(kept_name, sizeof tensor_names[0], "%s", name);
    Region& r = tensors[tensor_count++];
    const bool shared_by_blocks = checked && kind != RegionKind::input;
    const size_t whole = room_of_tensor(bytes);
    char* memory = shared_by_blocks ? place_tracked(whole) : reserve(whole, name);
    lay_out(r, kind, kept_name, memory, tensor_guard, bytes, tensor_alignment, end_flush);
    make_usable(r);
    if (shared_by_blocks) track(r.start, bytes, element, r.name);
    return r.start;
}

void protect_tensor(const char* tensor, bool writable) {
    for (unsigned i = 0; i < tensor_count; ++i) {
        const Region& r = tensors[i];
        if (r.start != tensor || r.mapped == r.mapped_end) continue;
        mprotect(r.mapped, size_t(r.mapped_end - r.mapped), writable ? PROT_READ | PROT_WRITE : PROT_READ);
    }
}

void declare_static_shared(unsigned long bytes, unsigned long alignment, unsigned owner) {
    if (declared_count == max_declarations) crash("more than %u declarations of shared memory", max_declarations);
    declared[declared_count++] = {bytes, alignment, owner};
}

void declare_dynamic_shared(unsigned long alignment, unsigned owner) { declare_static_shared(0, alignment, owner); }

// Where dynamic shared memory begins, behind the static variables of the kernel and of functions that it may call.
void begin_kernels_memory() {
    size_t static_bytes = 0, alignment = least_dynamic_alignment;
    for (unsigned i = 0; i < declared_count; ++i) {
        const Declared& d = declared[i];
        if (d.owner && d.owner != kernel.number) continue;
        if (d.bytes) static_bytes = round_up(static_bytes, d.alignment) + d.bytes;
        else alignment = std::max(alignment, size_t(d.alignment));
    }
    dynamic_start = unsigned(round_up(static_bytes, alignment));
    const size_t lead = dynamic_start % window_alignment;
    reserve_part(dynamic_part, RegionKind::dynamic_shared, "shared memory", launch.shared_bytes, window_alignment,
                 lead);
    watched_count = 0;
}

void map_shared(unsigned block) {
    map_part(dynamic_part, block + 1);
    for (unsigned i = 0; i < variable_count; ++i) map_part(variables[i], block + 1);
}

unsigned long shared_shift_of(unsigned block) { return block * block_shift; }
char* shared_of(unsigned block) { return dynamic_part.first.start + block * block_shift; }

// The resident block in whose shared memory the address lies; max_resident: none.
unsigned block_of_shared(const volatile void* address) {
    auto* p = static_cast<const volatile char*>(address);
    auto block_in = [&](const SharedPart& part) {
        const char* first = part.first.reserved;
        if (!first || p < first || p >= first + resident * block_shift) return max_resident;
        const auto block = unsigned((p - first) / block_shift);
        const Region r = shifted(part.first, block);
        return p >= r.start && p < r.end ? block : max_resident;
    };
    unsigned found = block_in(dynamic_part);
    for (unsigned i = 0; i < variable_count && found == max_resident; ++i) found = block_in(variables[i]);
    return found;
}

SharedPlace locate(unsigned shared) {
    unsigned window = (shared >> cluster_shift) - first_window;
    if (window < max_cluster) return {first_of_cluster(own_block()) + window, shared % (1u << cluster_shift)};
    return {own_block(), shared};
}

unsigned map_to_block(unsigned shared, unsigned block, int line) {
    if (block >= kernel.cluster) crash("mapa at line %d: block %u of a cluster of %u", line, block, kernel.cluster);
    if (shared >= 1u << cluster_shift)
        crash("mapa at line %d: the emulator takes addresses of the block's own shared memory", line);
    return shared + ((block + first_window) << cluster_shift);
}

unsigned rank_of_shared(const void* generic, int line) {
    const unsigned block = block_of_shared(generic);
    if (block == max_resident) crash("the address at line %d is not in shared memory", line);
    return block - first_of_cluster(block);
}

void* map_to_block(const void* generic, unsigned block, int line) {
    if (block >= kernel.cluster) crash("mapa at line %d: block %u of a cluster of %u", line, block, kernel.cluster);
    return (char*)generic + (long(block) - long(rank_of_shared(generic, line))) * long(block_shift);
}

char* map_shared_variable(const char* name, size_t bytes, size_t alignment) {
    if (variable_count == max_variables) crash("more than %u shared variables", max_variables);
    SharedPart& part = variables[variable_count++];
    reserve_part(part, RegionKind::static_shared, name, bytes, alignment, 0);
    map_part(part, resident);
    for (unsigned i = 0; i < resident; ++i) memset(shifted(part.first, i).start, unset_shared(), bytes);
    watched_count = 0;
    return part.first.start;
}

unsigned shared_offset(const void* generic) {
    const char* p = static_cast<const char*>(generic);
    const Region own = dynamic_of(own_block());
    if (p >= own.reserved && p < own.reserved_end) return dynamic_start + unsigned(p - own.start);
    for (unsigned i = 0; i < variable_count; ++i) {
        const Region r = shifted(variables[i].first, own_block());
        if (p >= r.reserved && p < r.reserved_end) return ((i + 1) << variable_shift) + unsigned(p - r.start);
    }
    crash("__cvta_generic_to_shared of an address that is not in shared memory");
}

unsigned shared_parts() { return 1 + variable_count; }

// The part in or near which a shared address lies.
unsigned shared_part(unsigned shared) {
    const unsigned part = ((shared + (1u << (variable_shift - 1))) >> variable_shift) % (1u << (32 - variable_shift));
    if (part > variable_count) crash("shared address 0x%x belongs to no shared memory of the kernel", shared);
    return part;
}

SharedSpan shared_span(unsigned block, unsigned part) {
    if (!part) return {shared_of(block), dynamic_start, launch.shared_bytes};
    const Region r = shifted(variables[part - 1].first, block);
    return {r.start, part << variable_shift, unsigned(r.end - r.start)};
}

void* shared_address(unsigned offset) {
    const SharedPlace place = locate(offset);
    const SharedSpan span = shared_span(place.block, shared_part(place.shared));
    return span.memory + int(place.shared - span.first);
}

void poison_shared(unsigned block) {
    memset(shared_of(block), unset_shared(), launch.shared_bytes);
    poison_async(block);
    for (unsigned i = 0; i < variable_count; ++i) {
        const Region r = shifted(variables[i].first, block);
        memset(r.start, unset_shared(), size_t(r.end - r.start));
    }
}

namespace {

void watch_near_canaries() {
    auto watch = [](const char* from, const char* to, const Region& r, bool shared) {
        if (from < to) watched[watched_count++] = {from, to, &r, shared};
    };
    auto watch_behind = [&](const Region& r) {
        watch(r.end, std::min(r.mapped_end, r.end + window_alignment), r, true);
    };
    watch_behind(dynamic_part.first);
    for (unsigned i = 0; i < variable_count; ++i) watch_behind(variables[i].first);
    for (unsigned i = 0; i < tensor_count; ++i) {
        const Region& r = tensors[i];
        if (r.kind == RegionKind::input) continue;
        watch(r.end, std::min(r.end + near, r.mapped_end), r, false);
        watch(std::max(r.start - near, r.mapped), r.start, r, false);
    }
}

}  // namespace

// Called at every switch of threads, so that the writing thread is known. Writes further off are found when the block
// ends.
void check_near_canaries() {
    if (!watched_count) watch_near_canaries();
    for (unsigned i = 0; i < watched_count; ++i) {
        const Watched& w = watched[i];
        const size_t shift = w.shared ? shared_shift : 0;
        const char* p = broken_canary(w.from + shift, w.to + shift);
        if (p) report_outside(w.shared ? shifted(*w.region, own_block()) : *w.region, p, "write", true);
    }
}

// When a cluster has ended.
void check_all_canaries(unsigned first_block) {
    for (unsigned block = first_block; block < first_block + kernel.cluster; ++block) {
        check_canaries(dynamic_of(block));
        for (unsigned i = 0; i < variable_count; ++i) check_canaries(shifted(variables[i].first, block));
    }
    for (unsigned i = 0; i < tensor_count; ++i)
        if (tensors[i].kind != RegionKind::input) check_canaries(tensors[i]);
}

void report_fault(const char* address, const char* access) {
    auto look_at = [&](const Region& r) {
        if (address < r.reserved || address >= r.reserved_end) return;
        if (address < r.start || address >= r.end) report_outside(r, address, access, true);
        crash("write to read-only input %s at byte %ld", r.name, long(address - r.start));
    };
    for (unsigned i = 0; i < tensor_count; ++i) look_at(tensors[i]);
    for (unsigned block = 0; block < resident; ++block) {
        look_at(dynamic_of(block));
        for (unsigned i = 0; i < variable_count; ++i) look_at(shifted(variables[i].first, block));
    }
}

}  // namespace evo_emu
