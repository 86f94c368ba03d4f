// mbarriers. The eight bytes in shared memory are a tag that identifies the barrier, so that a barrier that was never
// initialised, or was overwritten, is detected at its next use.
#include "clocks.h"

#include <cstdio>
#include <cstring>

namespace evo_emu {

namespace {

constexpr unsigned max_barriers = 256, max_landings = 1 << 16;
constexpr unsigned most_arrivals = (1 << 20) - 1;  // PTX ISA, "mbarrier contents"
constexpr uint64_t tag = 0x6d62617272696572;
constexpr unsigned spins_allowed = 1000;

struct Barrier {
    Gate gate;  // where threads wait for the phase
    char text[192];
    unsigned block, shared;
    unsigned count;    // arrivals per phase
    unsigned phase;    // number of the current one
    unsigned pending;  // arrivals it still needs, including those in flight
    long bytes;        // transaction bytes expected, including those in flight
    unsigned arrivals_in_flight;
    long bytes_in_flight;
    PendingCompletion* first;  // copies in flight, newest first
    bool published;            // to the asynchronous proxy
    bool valid;
    When initialised;
    unsigned met;            // which meeting of the cluster makes that known, by fence.mbarrier_init; 0: none
    Passed *arrived, *over;  // by the arrivals of the phase, and of the one before
};

struct Barriers {
    Barrier of[max_barriers];
    unsigned count;
};

Barriers all_barriers[max_resident];  // of the cluster that begins with the block
PendingCompletion landings[max_landings], *free_landings;
unsigned used_landings;

Barriers& barriers_of(unsigned block) { return all_barriers[first_of_cluster(block)]; }

// `reach`: what is done to the block that the barrier belongs to, if it is another one.
Barrier& find(unsigned shared, const char* what, int line, decltype(reach_block)* reach = reach_block) {
    if (shared % 8) crash("misaligned %s at line %d: shared address %u is not a multiple of 8", what, line, shared);
    const SharedPlace place = locate(shared);
    reach(place.block, what, {nullptr, line});
    uint64_t found;
    memcpy(&found, shared_address(shared), sizeof found);
    found ^= tag;
    Barriers& all = barriers_of(place.block);
    const Barrier& b = all.of[found < all.count ? found : 0];
    if (found >= all.count || b.block != place.block || b.shared != place.shared || !b.valid)
        crash("%s at line %d: there is no mbarrier at shared address %u: not initialised yet, or overwritten", what,
              line, shared);
    const bool met = b.met && fibers[current].meetings >= b.met;
    if (keeps_order() && !met && !is_known(b.initialised, current))
        crash("%s at line %d: nothing orders it behind the mbarrier.init at shared address %u", what, line,
              place.shared);
    return all.of[found];
}

PendingCompletion* take_landing() {
    if (PendingCompletion* found = free_landings) {
        free_landings = found->next;
        return found;
    }
    if (used_landings == max_landings) crash("more than %u asynchronous copies in flight", max_landings);
    return &landings[used_landings++];
}

void give_back(PendingCompletion* landing) {
    landing->next = free_landings;
    free_landings = landing;
}

void add(Barrier& b, const PendingCompletion& landing) {
    PendingCompletion* place = take_landing();
    *place = landing;
    place->next = b.first;
    b.first = place;
    b.arrivals_in_flight += landing.arrivals;
    b.bytes_in_flight += landing.bytes;
}

unsigned open_arrivals(const Barrier& b) { return b.pending - b.arrivals_in_flight; }

// Whether the phase is over as soon as pending work has landed.
bool can_end(const Barrier& b) { return !open_arrivals(b) && b.bytes == b.bytes_in_flight; }

void end_phase(Barrier& b) {
    while (PendingCompletion* landing = b.first) {
        landing->land(*landing);
        b.first = landing->next;
        give_back(landing);
    }
    if (keeps_order()) copy(b.over, b.arrived);
    ++b.phase;
    b.pending = b.count;
    b.bytes = b.bytes_in_flight = b.arrivals_in_flight = 0;
    wake_block(&b.gate, b.block);
}

// After a change: a phase without pending work ends at once, otherwise when the first of the waiting threads polls.
void settle(Barrier& b) {
    if (!can_end(b)) return;
    if (!b.first) return end_phase(b);
    wake_block(&b.gate, b.block);
}

bool is_over(const Barrier& b, unsigned parity) { return (b.phase & 1) != parity; }

Barrier& find_waited(unsigned shared, unsigned parity, const char* what, int line) {
    if (parity > 1) crash("%s at line %d: parity %u, which must be 0 or 1", what, line, parity);
    if (locate(shared).shared != shared) crash("%s at line %d: a thread waits in its own block alone", what, line);
    return find(shared, what, line);
}

void wait_for_end(Barrier& b, unsigned parity, int line) {
    while (!is_over(b, parity)) {
        if (can_end(b)) {
            end_phase(b);
            break;
        }
        b.gate.line = line;
        wait_at(&b.gate, nullptr);
    }
    if (keeps_order()) depart(current, b.over);
    visit(Visit::wait, b.shared);
}

// A wait may always fail, so the first one of a thread for a phase does: a kernel that does not repeat it has not
// waited.
bool spurious_failure(const Barrier& b) {
    Fiber& f = fibers[current];
    if (f.refused_by == b.shared && f.refused_phase == b.phase) return false;
    f.refused_by = b.shared;
    f.refused_phase = b.phase;
    return true;
}

// Threads drift apart at barriers: sometimes one falls behind, a little or so far that the others pass on a buffer and
// have it filled again meanwhile.
void fall_behind() {
    if (random_below(16)) return;
    for (unsigned rounds = 1u << random_below(8); rounds; --rounds) yield();
}

}  // namespace

void clear_barriers(unsigned first_block) {
    Barriers& all = barriers_of(first_block);
    for (; all.count; --all.count) {
        Barrier& b = all.of[all.count - 1];
        while (PendingCompletion* landing = b.first) {
            b.first = landing->next;
            give_back(landing);
        }
        if (keeps_order()) clear(b.arrived), clear(b.over);
    }
}

void barrier_init(unsigned shared, unsigned count, int line) {
    if (shared % 8)
        crash("misaligned mbarrier.init at line %d: shared address %u is not a multiple of 8", line, shared);
    if (!count || count > most_arrivals)
        crash("mbarrier.init at line %d: %u arrivals, of 1 to %u", line, count, most_arrivals);
    Barriers& all = barriers_of(own_block());
    for (unsigned i = 0; i < all.count; ++i)
        if (all.of[i].valid && all.of[i].block == own_block() && all.of[i].shared == shared)
            crash("mbarrier.init at line %d: there is an mbarrier at shared address %u already", line, shared);
    if (all.count == max_barriers) crash("more than %u mbarriers in a block", max_barriers);
    Barrier& b = all.of[all.count];
    Passed *arrived = b.arrived, *over = b.over;  // of another barrier, before
    b = {};
    b.arrived = arrived, b.over = over;
    b.gate.name = b.text;
    b.block = own_block();
    b.shared = shared;
    b.count = b.pending = count;
    b.valid = true;
    if (keeps_order()) b.initialised = now(current);
    uint64_t contents = tag ^ all.count++;
    memcpy(shared_address(shared), &contents, sizeof contents);
}

void barrier_invalidate(unsigned shared, int line) {
    find(shared, "mbarrier.inval", line).valid = false;
    memset(shared_address(shared), 0xff, sizeof tag);
}

void publish_barriers() {
    Barriers& all = barriers_of(own_block());
    for (unsigned i = 0; i < all.count; ++i) all.of[i].published |= all.of[i].block == own_block();
}

// fence.mbarrier_init.release.cluster, by the thread that initialised them.
void fence_barrier_inits() {
    publish_barriers();
    Barriers& all = barriers_of(own_block());
    for (unsigned i = 0; i < all.count; ++i) {
        Barrier& b = all.of[i];
        const bool own = b.block == own_block() && (!keeps_order() || b.initialised.thread == rank_of(current));
        if (own && !b.met) b.met = meetings_of_cluster(b.block) + 1;
    }
}

unsigned long long barrier_arrive(unsigned shared, unsigned count, unsigned bytes, int line) {
    Barrier& b = find(shared, "mbarrier.arrive", line);
    unsigned open = open_arrivals(b);
    if (!open && can_end(b))
        crash(
            "mbarrier.arrive at line %d: phase %u of the mbarrier at shared address %u has all its %u arrivals, "
            "and the block has not waited for the copies in flight to it",
            line, b.phase, shared, b.count);
    if (count > open)
        crash("mbarrier.arrive at line %d: %u arrivals at shared address %u, where phase %u lacks %u of %u", line,
              count, shared, b.phase, open, b.count);
    if (keeps_order()) settle_accesses(), arrive(current, b.arrived);
    note_progress();
    unsigned phase = b.phase;
    b.pending -= count;
    b.bytes += bytes;
    settle(b);
    fall_behind();
    return phase;
}

void barrier_expect(unsigned shared, unsigned bytes, int line) {
    find(shared, "mbarrier.expect_tx", line).bytes += bytes;
}

// Work begins that will land in that block, at the barrier there.
void barrier_promise(unsigned block, unsigned shared, PendingCompletion landing, const char* what, int line) {
    const unsigned rank = block - first_of_cluster(block);
    // The block must wait for what lands (check_nothing_in_flight): no other order is asked for.
    Barrier& b = find(block == own_block() ? shared : map_to_block(shared, rank, line), what, line, require_alive);
    landing.block = block;
    if (!b.published)
        crash(
            "%s at line %d: no fence.mbarrier_init or fence.proxy.async has come since the mbarrier at shared address "
            "%u was initialised",
            what, line, shared);
    if (lands_at_once()) {
        landing.land(landing);
        landing.land = [](const PendingCompletion&) {};
    }
    add(b, landing);
    settle(b);
}

void barrier_arrive_after_copies(unsigned shared, bool counted, int line) {
    Barrier& b = find(shared, "cp.async.mbarrier.arrive", line);
    if (!counted) ++b.pending;
    if (!open_arrivals(b))
        crash(
            "cp.async.mbarrier.arrive.noinc at line %d: phase %u of the mbarrier at shared address %u has all its %u "
            "arrivals",
            line, b.phase, shared, b.count);
    if (keeps_order()) settle_accesses(), arrive(current, b.arrived);
    PendingCompletion landing{};
    landing.land = [](const PendingCompletion& l) { land_copies(fibers[l.after.fiber].queue, l.after.copies); };
    landing.arrivals = 1;
    landing.after = {current, copies_begun(fibers[current].queue)};
    add(b, landing);
    settle(b);
}

bool barrier_try_wait(unsigned shared, unsigned parity, int line) {
    Barrier& b = find_waited(shared, parity, "mbarrier.try_wait", line);
    if (!is_over(b, parity) && spurious_failure(b)) return false;
    wait_for_end(b, parity, line);
    fall_behind();
    return true;
}

// Never blocks, so that a thread may poll several barriers in turn; one that polls only this one for long waits.
bool barrier_test_wait(unsigned shared, unsigned parity, int line) {
    Barrier& b = find_waited(shared, parity, "mbarrier.test_wait", line);
    unsigned& spins = fibers[current].spins;
    if (!is_over(b, parity)) {
        if (spurious_failure(b)) return spins = 0, false;
        if (!can_end(b) && ++spins < spins_allowed) return yield(), false;
    }
    wait_for_end(b, parity, line);
    fall_behind();
    return true;
}

void name_stuck_barriers() {
    for (unsigned block = 0; block < resident; block += kernel.cluster)
        for (unsigned i = 0; i < all_barriers[block].count; ++i) {
            Barrier& b = all_barriers[block].of[i];
            snprintf(b.text, sizeof b.text,
                     "mbarrier at shared address %u, whose phase %u (parity %u) lacks %u of %u arrivals "
                     "and %ld bytes",
                     b.shared, b.phase, b.phase & 1, open_arrivals(b), b.count, b.bytes - b.bytes_in_flight);
        }
}

void check_nothing_in_flight(unsigned first_block) {
    const Barriers& all = barriers_of(first_block);
    for (unsigned i = 0; i < all.count; ++i)
        for (const PendingCompletion* landing = all.of[i].first; landing; landing = landing->next)
            if (landing->bytes)
                crash("the block ended with %u bytes in flight to shared address %u, for which no thread waited",
                      landing->bytes, landing->shared);
}

}  // namespace evo_emu
