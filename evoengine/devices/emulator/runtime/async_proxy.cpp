// The asynchronous proxy: wgmma and bulk copies do not see dynamic shared memory itself but a shadow of it, which is
// brought up to date by fence.proxy.async alone. What they write goes to both. So where the two differ, an ordinary
// store (or cp.async) has not been fenced, or came while its target was still in use.
#include "internal.h"

#include <cstdlib>
#include <cstring>

namespace evo_emu {

bool fence_due;

namespace {

char* shadow;  // kept from the first use on: most kernels have none

void need_shadow() {
    if (shadow) return;
    shadow = static_cast<char*>(malloc(launch.shared_bytes + 1));
    if (!shadow) crash("the emulator has no memory left for the shadow of shared memory");
    memset(shadow, 0xff, launch.shared_bytes);
}

void check_range(unsigned shared, unsigned bytes, const char* what, int line) {
    need_shadow();
    if (shared >= 1u << 19 && shared < ~0u - (1u << 19))
        crash("%s at line %d: the emulator wants its operand in dynamic shared memory", what, line);
    if (shared > launch.shared_bytes || bytes > launch.shared_bytes - shared)
        crash("%s at line %d reaches from %d to %d in %u bytes of shared memory", what, line, int(shared),
              int(shared + bytes), launch.shared_bytes);
}

void check_fenced(unsigned shared, unsigned bytes, const char* verb, const char* what, int line) {
    const char *seen = shadow + shared, *there = dynamic_shared + shared;
    if (!memcmp(seen, there, bytes)) return;
    unsigned i = 0;
    while (seen[i] == there[i]) ++i;
    crash(
        "%s at line %d %s shared memory at offset %u, which a store or cp.async has changed without a "
        "fence.proxy.async since, or too early",
        what, line, verb, shared + i);
}

}  // namespace

// The whole round shares one copy: fences of many threads cost no more than that of one, and no store that comes after
// a thread's fence gets in, as the thread stops here until the round is over.
void fence_async_proxy() {
    publish_barriers();
    fence_due = true;
    yield();
}

void publish_shared() {
    need_shadow();
    memcpy(shadow, dynamic_shared, launch.shared_bytes);
    fence_due = false;
}

void poison_async() {
    if (shadow) memset(shadow, 0xff, launch.shared_bytes);
}

// `bytes` at the shared address as the asynchronous proxy sees them.
const char* async_read(unsigned shared, unsigned bytes, const char* what, int line) {
    check_range(shared, bytes, what, line);
    check_fenced(shared, bytes, "reads", what, line);
    return shadow + shared;
}

// Where a bulk copy will land: NaN from now on. A store there that no fence has ordered before the copy may come after.
char* async_write(unsigned shared, unsigned bytes, const char* what, int line) {
    check_range(shared, bytes, what, line);
    check_fenced(shared, bytes, "writes", what, line);
    memset(dynamic_shared + shared, 0xff, bytes);
    memset(shadow + shared, 0xff, bytes);
    return dynamic_shared + shared;
}

void async_fill(unsigned shared, const void* from, unsigned bytes) {
    memcpy(dynamic_shared + shared, from, bytes);
    memcpy(shadow + shared, from, bytes);
}

}  // namespace evo_emu
