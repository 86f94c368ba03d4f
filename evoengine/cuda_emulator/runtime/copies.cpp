// cp.async: a copy lands at once, or only at the wait that covers its group. Until then its destination is 0xFF.
#include "internal.h"

#include <cstdlib>
#include <cstring>

namespace evo_emu {

namespace {

constexpr unsigned most_copies = 1 << 20;

void push(CopyQueue& queue, const Copy& copy) {
    if (queue.count == queue.capacity) {
        if (queue.capacity >= most_copies) crash("more than %u cp.async of one thread without a wait", most_copies);
        queue.capacity = queue.capacity ? 2 * queue.capacity : 64;
        queue.copies = static_cast<Copy*>(realloc(queue.copies, queue.capacity * sizeof(Copy)));
        if (!queue.copies) crash("the emulator has no memory left for cp.async");
    }
    queue.copies[queue.count++] = copy;
}

void land(const Copy& copy) {
    memcpy(copy.to, copy.from, copy.source_bytes);
    memset(copy.to + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

void land_next(CopyQueue& queue) {
    land(queue.copies[queue.first++]);
    if (queue.first < queue.count) return;
    queue.before += queue.count;
    queue.first = queue.count = 0;
}

void land_groups(CopyQueue& queue, unsigned groups) {
    while (queue.first < queue.count && queue.copies[queue.first].group < groups) land_next(queue);
}

}  // namespace

void copy_async(unsigned shared, const void* global, unsigned bytes, unsigned source_bytes, int line) {
    if (source_bytes == ~0u) source_bytes = bytes;
    if (source_bytes > bytes) crash("cp.async at line %d: %u source bytes for a copy of %u", line, source_bytes, bytes);
    if (shared % bytes)
        crash("misaligned cp.async at line %d: shared address %u is not a multiple of %u", line, shared, bytes);
    if (source_bytes && reinterpret_cast<uintptr_t>(global) % bytes)
        crash("misaligned cp.async at line %d: the global address is not a multiple of %u", line, bytes);
    char* to = static_cast<char*>(shared_address(shared));
    const char* from = static_cast<const char*>(global);
    // Touched now, so that an invalid address is attributed to this instruction.
    if (source_bytes) (void)(*(const volatile char*)from, *(const volatile char*)(from + source_bytes - 1));
    if (checked && source_bytes) track_access(Access::read, from, source_bytes, {nullptr, line});
    CopyQueue& queue = fibers[current].queue;
    const Copy copy{to, from, bytes, source_bytes, queue.committed};
    if (lands_at_once()) return land(copy);
    memset(to, 0xff, bytes);
    push(queue, copy);
}

void copy_async_commit() { ++fibers[current].queue.committed; }

void copy_async_wait(unsigned groups_left, int line) {
    visit(Visit::copy_wait, uint64_t(line));
    CopyQueue& queue = fibers[current].queue;
    if (queue.committed > groups_left) land_groups(queue, queue.committed - groups_left);
}

void copy_async_wait_all(int line) {
    visit(Visit::copy_wait, uint64_t(line));
    land_groups(fibers[current].queue, ~0u);
}

void drop_copies(CopyQueue& queue) {
    queue.before += queue.count;
    queue.first = queue.count = queue.committed = 0;
}

unsigned long copies_begun(const CopyQueue& queue) { return queue.before + queue.count; }

void land_copies(CopyQueue& queue, unsigned long until) {
    while (queue.first < queue.count && queue.before + queue.first < until) land_next(queue);
}

}  // namespace evo_emu
