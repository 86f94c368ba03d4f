// The asynchronous proxy: wgmma and bulk copies do not see dynamic shared memory itself but a shadow of it, which is
// brought up to date by fence.proxy.async alone. What they write goes to both. So where the two differ, an ordinary
// store (or cp.async) has not been fenced, or came while its target was still in use.
#include "internal.h"

#include <cstdlib>
#include <cstring>

namespace evo_emu {

bool fences_due;

namespace {

// Kept from the first use on: most kernels have none.
char* shadow[max_resident];
unsigned shadow_bytes[max_resident];
bool fence_due[max_resident];
bool one_by_one;  // of this round each fence counts as it comes

char* shadow_at(unsigned block, unsigned shared) { return shadow[block] + (shared - dynamic_start); }
char* memory_at(unsigned block, unsigned shared) { return shared_of(block) + (shared - dynamic_start); }

void need_shadow(unsigned block) {
    if (shadow[block] && shadow_bytes[block] >= launch.shared_bytes) return;
    free(shadow[block]);
    shadow[block] = static_cast<char*>(malloc(launch.shared_bytes + 1));
    if (!shadow[block]) crash("the emulator has no memory left for the shadow of shared memory");
    shadow_bytes[block] = launch.shared_bytes;
    memset(shadow[block], 0xff, launch.shared_bytes);
}

void check_range(unsigned block, unsigned shared, unsigned bytes, const char* what, int line) {
    need_shadow(block);
    if (shared >= 1u << 19 && shared < ~0u - (1u << 19))
        crash("%s at line %d: the emulator wants its operand in dynamic shared memory", what, line);
    const unsigned offset = shared - dynamic_start;
    if (offset > launch.shared_bytes || bytes > launch.shared_bytes - offset)
        crash("%s at line %d reaches from %d to %d in %u bytes of shared memory", what, line, int(offset),
              int(offset + bytes), launch.shared_bytes);
}

void check_fenced(unsigned block, unsigned shared, unsigned bytes, const char* verb, const char* what, int line) {
    const char *seen = shadow_at(block, shared), *there = memory_at(block, shared);
    if (!memcmp(seen, there, bytes)) return;
    unsigned i = 0;
    while (seen[i] == there[i]) ++i;
    crash(
        "%s at line %d %s shared memory at offset %u, which a store or cp.async has changed without a "
        "fence.proxy.async since, or too early",
        what, line, verb, shared - dynamic_start + i);
}

}  // namespace

namespace {

void publish(unsigned block) {
    need_shadow(block);
    memcpy(shadow[block], shared_of(block), launch.shared_bytes);
}

}  // namespace

// In most rounds all share one copy at the end: fences of many threads cost no more than that of one, and no store that
// comes after a thread's fence gets in, as the thread stops here until the round is over. But it lets in what threads
// without a fence have stored, so in some rounds each fence makes its own copy: of what was stored before it.
void fence_async_proxy() {
    publish_barriers();
    fences_due = fence_due[own_block()] = true;
    if (one_by_one) publish(own_block());
    yield();
}

void publish_shared() {
    for (unsigned i = 0; i < resident; ++i) {
        if (fence_due[i] && !one_by_one) publish(i);
        fence_due[i] = false;
    }
    fences_due = false;
    one_by_one = !random_below(4);
}

// In the middle of a round with fences that wait for its end, as others do while blocks begin, these must come about.
void poison_async(unsigned block) {
    if (!fences_due) one_by_one = !random_below(4);
    fence_due[block] = false;
    if (!shadow[block]) return;
    need_shadow(block);
    memset(shadow[block], 0xff, launch.shared_bytes);
}

// `bytes` at the shared address as the asynchronous proxy sees them.
const char* async_read(unsigned shared, unsigned bytes, const char* what, int line) {
    check_range(own_block(), shared, bytes, what, line);
    check_fenced(own_block(), shared, bytes, "reads", what, line);
    return shadow_at(own_block(), shared);
}

// Where a bulk copy will land: NaN from now on. A store there that no fence has ordered before the copy may come after.
void async_write(unsigned block, unsigned shared, unsigned bytes, const char* what, int line) {
    require_alive(block, what, {nullptr, line});
    check_range(block, shared, bytes, what, line);
    check_fenced(block, shared, bytes, "writes", what, line);
    memset(memory_at(block, shared), 0xff, bytes);
    memset(shadow_at(block, shared), 0xff, bytes);
}

void async_fill(unsigned block, unsigned shared, const void* from, unsigned bytes) {
    memcpy(memory_at(block, shared), from, bytes);
    memcpy(shadow_at(block, shared), from, bytes);
}

}  // namespace evo_emu
