// The asynchronous proxy: wgmma and bulk copies do not read shared memory itself but a shadow of it, which only
// fence.proxy.async updates. They write to both. If the two differ, an ordinary store (or cp.async) has not been
// fenced, or came while its target was still in use.
#include "internal.h"

#include <cstdlib>
#include <cstring>

namespace evo_emu {

bool fences_due;

namespace {

// State for each part of a block's shared memory, kept from the first use on: most kernels have none.
struct Shadow {
    char* bytes;
    unsigned room;
};
Shadow shadows[max_resident][max_shared_parts];
bool has_shadows[max_resident];
bool fence_due[max_resident];
bool one_by_one;  // of this round each fence counts as it comes

// A part of a block's shared memory, and its state as the asynchronous proxy sees it.
struct Seen {
    SharedSpan span;
    char* shadow;

    char* there(unsigned shared) const { return span.memory + (shared - span.first); }
    char* seen(unsigned shared) const { return shadow + (shared - span.first); }
};

Seen seen_part(unsigned block, unsigned part) {
    const SharedSpan span = shared_span(block, part);
    Shadow& kept = shadows[block][part];
    has_shadows[block] = true;
    if (!kept.bytes || kept.room < span.bytes) {
        free(kept.bytes);
        kept.bytes = static_cast<char*>(malloc(span.bytes + 1));
        if (!kept.bytes) crash("the emulator has no memory left for the shadow of shared memory");
        kept.room = span.bytes;
        memset(kept.bytes, unset_shared(), span.bytes);
    }
    return {span, kept.bytes};
}

Seen seen_at(unsigned block, unsigned shared) { return seen_part(block, shared_part(shared)); }

void check_range(const Seen& part, unsigned shared, unsigned bytes, const char* what, int line) {
    const unsigned offset = shared - part.span.first, all = part.span.bytes;
    if (offset > all || bytes > all - offset)
        crash("%s at line %d reaches from %d to %d in %u bytes of shared memory", what, line, int(offset),
              int(offset + bytes), all);
}

void check_fenced(const Seen& part, unsigned shared, unsigned bytes, const char* verb, const char* what, int line) {
    const char *seen = part.seen(shared), *there = part.there(shared);
    if (!memcmp(seen, there, bytes)) return;
    unsigned i = 0;
    while (seen[i] == there[i]) ++i;
    crash(
        "%s at line %d %s shared memory at offset %u, which a store or cp.async has changed without a "
        "fence.proxy.async since, or too early",
        what, line, verb, shared - part.span.first + i);
}

void publish(unsigned block) {
    for (unsigned part = 0; part < shared_parts(); ++part) {
        const Seen one = seen_part(block, part);
        memcpy(one.shadow, one.span.memory, one.span.bytes);
    }
}

}  // namespace

// In most rounds all fences share one copy at the end: fences of many threads cost no more than one, and no store after
// a thread's fence is included, because the thread stops here until the round is over. But stores of threads without a
// fence are included, so in some rounds each fence makes its own copy of what was stored before it.
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
    for (unsigned part = 0; has_shadows[block] && part < shared_parts(); ++part) {
        const Seen one = seen_part(block, part);
        memset(one.shadow, unset_shared(), one.span.bytes);
    }
}

// `bytes` at the shared address as the asynchronous proxy sees them.
const char* async_read(unsigned shared, unsigned bytes, const char* what, int line) {
    const Seen part = seen_at(own_block(), shared);
    check_range(part, shared, bytes, what, line);
    check_fenced(part, shared, bytes, "reads", what, line);
    return part.seen(shared);
}

// The target of a bulk copy: NaN from now on. A store there that no fence orders before the copy may happen after it.
void async_write(unsigned block, unsigned shared, unsigned bytes, const char* what, int line) {
    require_alive(block, what, {nullptr, line});
    const Seen part = seen_at(block, shared);
    check_range(part, shared, bytes, what, line);
    check_fenced(part, shared, bytes, "writes", what, line);
    memset(part.there(shared), 0xff, bytes);
    memset(part.seen(shared), 0xff, bytes);
}

void async_fill(unsigned block, unsigned shared, const void* from, unsigned bytes) {
    const Seen part = seen_at(block, shared);
    memcpy(part.there(shared), from, bytes);
    memcpy(part.seen(shared), from, bytes);
}

}  // namespace evo_emu
