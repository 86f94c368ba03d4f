// Guarded memory: every tensor, the dynamic shared memory and every static shared variable lie in a reservation of
// their own whose neighbourhood cannot be touched. What is left between a part and its pages holds canaries, NaN in
// every floating type, so a read beyond the end shows as NaN and a write as a broken canary.
#include "internal.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace evo_emu {

const size_t page = size_t(sysconf(_SC_PAGESIZE));
Launch launch;
char* dynamic_shared;
unsigned dynamic_start;

namespace {

constexpr size_t tensor_guard = size_t(1) << 30;
constexpr size_t shared_guard = 16 << 20;
// wmma asks for 32 bytes, nothing in a kernel for more; the less alignment, the nearer the guard to the tensor's end.
constexpr size_t tensor_alignment = 32;
// A block's window of shared memory starts at a multiple of 1,024, as the hardware keeps 1 KiB for itself before it.
constexpr size_t window_alignment = 1024, least_dynamic_alignment = 16;
// Shared addresses: dynamic memory from 0, or from behind the static variables, which have their own addresses here:
// variable i around (i + 1) << 20. Dynamic memory of block i of the cluster, as all its blocks may name it, from
// (i + 4) << 28.
constexpr unsigned variable_shift = 20, cluster_shift = 28, first_window = 4;
constexpr unsigned max_regions = 512;
constexpr long near = 64;

struct Region {
    RegionKind kind;
    char name[64];
    char *reserved, *mapped, *start, *end, *mapped_end, *reserved_end;
};

Region regions[max_regions];
unsigned region_count;
Region *dynamic_regions[max_cluster], *variables[max_regions];
unsigned variable_count;
size_t static_bytes, dynamic_alignment = least_dynamic_alignment;

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

Region* map_region(RegionKind kind, const char* name, size_t bytes, size_t alignment, size_t guard, bool end_flush) {
    if (region_count == max_regions) crash("more than %u tensors and shared variables", max_regions);
    size_t usable = (bytes + page - 1) / page * page;
    void* memory = mmap(nullptr, usable + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) crash("the emulator cannot reserve %zu bytes for %s", usable + 2 * guard, name);
    Region& r = regions[region_count++];
    r.kind = kind;
    snprintf(r.name, sizeof r.name, "%s", name);
    r.reserved = static_cast<char*>(memory);
    r.mapped = r.reserved + guard;
    r.mapped_end = r.mapped + usable;
    r.reserved_end = r.mapped_end + guard;
    if (usable && mprotect(r.mapped, usable, PROT_READ | PROT_WRITE))
        crash("the emulator cannot get %zu bytes for %s", usable, name);
    r.start = end_flush ? r.mapped + (usable - bytes) / alignment * alignment : r.mapped;
    r.end = r.start + bytes;
    write_canaries(r.mapped, r.start);
    write_canaries(r.end, r.mapped_end);
    return &r;
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
    else
        snprintf(text, sizeof text, "out-of-bounds %s of %s: %ld bytes past its end", access, r.name, offset - bytes);
    finish(exit_crashed, text, with_thread);
}

void check_canaries(const Region& r, bool all, bool with_thread) {
    const char* end = all || r.mapped_end - r.end <= long(window_alignment) ? r.mapped_end : r.end + window_alignment;
    if (const char* p = broken_canary(r.end, end)) report_outside(r, p, "write", with_thread);
    if (!all) return;
    if (const char* p = broken_canary(r.mapped, r.start)) report_outside(r, p, "write", with_thread);
}

}  // namespace

char* map_tensor(const char* name, size_t bytes, bool output, bool end_flush) {
    RegionKind kind = output ? RegionKind::output : RegionKind::input;
    return map_region(kind, name, bytes, tensor_alignment, tensor_guard, end_flush)->start;
}

void protect_inputs() {
    for (unsigned i = 0; i < region_count; ++i)
        if (regions[i].kind == RegionKind::input)
            mprotect(regions[i].mapped, size_t(regions[i].mapped_end - regions[i].mapped), PROT_READ);
}

void declare_static_shared(unsigned long bytes, unsigned long alignment) {
    static_bytes = round_up(static_bytes, alignment) + bytes;
}

void declare_dynamic_shared(unsigned long alignment) { dynamic_alignment = std::max(dynamic_alignment, alignment); }

void map_dynamic_shared() {
    dynamic_start = unsigned(round_up(static_bytes, dynamic_alignment));
    const size_t lead = dynamic_start % window_alignment;
    for (unsigned i = 0; i < kernel.cluster; ++i) {
        Region* r = map_region(RegionKind::dynamic_shared, "shared memory", lead + launch.shared_bytes,
                               window_alignment, shared_guard, launch.seed % 2 == 0);
        write_canaries(r->start, r->start + lead);
        r->start += lead;
        dynamic_regions[i] = r;
    }
    dynamic_shared = dynamic_regions[0]->start;
}

char* shared_of(unsigned block) { return dynamic_regions[block]->start; }

SharedPlace locate(unsigned shared) {
    unsigned window = (shared >> cluster_shift) - first_window;
    if (window < max_cluster) return {window, shared % (1u << cluster_shift)};
    return {own_block(), shared};
}

unsigned map_to_block(unsigned shared, unsigned block, int line) {
    if (block >= kernel.cluster) crash("mapa at line %d: block %u of a cluster of %u", line, block, kernel.cluster);
    if (locate(shared).shared != shared || shared >= 1u << (variable_shift - 1))
        crash("mapa at line %d: the emulator takes addresses of the block's own dynamic shared memory", line);
    return shared + ((block + first_window) << cluster_shift);
}

void* map_shared_variable(const char* name, size_t bytes, size_t alignment) {
    if (kernel.cluster > 1) crash("shared variable %s: the emulator's clusters have dynamic shared memory alone", name);
    Region* r = map_region(RegionKind::static_shared, name, bytes, alignment, shared_guard, launch.seed % 2 == 0);
    memset(r->start, 0xff, bytes);
    variables[variable_count++] = r;
    return r->start;
}

unsigned shared_offset(const void* generic) {
    const char* p = static_cast<const char*>(generic);
    const Region& own = *dynamic_regions[own_block()];
    if (p >= own.reserved && p < own.reserved_end) return dynamic_start + unsigned(p - own.start);
    for (unsigned i = 0; i < variable_count; ++i)
        if (p >= variables[i]->reserved && p < variables[i]->reserved_end)
            return ((i + 1) << variable_shift) + unsigned(p - variables[i]->start);
    crash("__cvta_generic_to_shared of an address that is not in shared memory");
}

void* shared_address(unsigned offset) {
    if (SharedPlace place = locate(offset); place.shared != offset) return shared_of(place.block) + (place.shared - dynamic_start);
    unsigned part = (offset + (1u << (variable_shift - 1))) >> variable_shift;
    part %= 1u << (32 - variable_shift);
    if (part > variable_count) crash("shared address 0x%x belongs to no shared memory of the kernel", offset);
    int within = int(offset - (part << variable_shift));
    return part ? variables[part - 1]->start + within : shared_of(own_block()) + (within - int(dynamic_start));
}

void poison_shared() {
    for (unsigned i = 0; i < kernel.cluster; ++i) memset(shared_of(i), 0xff, launch.shared_bytes);
    poison_async();
    for (unsigned i = 0; i < variable_count; ++i)
        memset(variables[i]->start, 0xff, size_t(variables[i]->end - variables[i]->start));
}

// Called at every switch of threads, so that the thread that wrote is known. Around an output only the nearest bytes
// are looked at, where a row too many begins; what lies further off is found when the block ends.
void check_near_canaries() {
    for (unsigned i = 0; i < kernel.cluster; ++i) check_canaries(*dynamic_regions[i], false, true);
    for (unsigned i = 0; i < variable_count; ++i) check_canaries(*variables[i], false, true);
    for (unsigned i = 0; i < region_count; ++i) {
        const Region& r = regions[i];
        if (r.kind != RegionKind::output) continue;
        if (const char* p = broken_canary(r.end, std::min(r.end + near, r.mapped_end))) report_outside(r, p, "write", true);
        if (const char* p = broken_canary(std::max(r.start - near, r.mapped), r.start)) report_outside(r, p, "write", true);
    }
}

void check_all_canaries() {
    for (unsigned i = 0; i < region_count; ++i)
        if (regions[i].kind != RegionKind::input) check_canaries(regions[i], true, false);
}

void report_fault(const char* address, const char* access) {
    for (unsigned i = 0; i < region_count; ++i) {
        const Region& r = regions[i];
        if (address < r.reserved || address >= r.reserved_end) continue;
        if (address < r.start || address >= r.end) report_outside(r, address, access, true);
        crash("write to read-only input %s at byte %ld", r.name, long(address - r.start));
    }
}

}  // namespace evo_emu
