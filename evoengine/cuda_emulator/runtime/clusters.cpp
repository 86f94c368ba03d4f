// Blocks of a cluster: the barrier of all their threads, and their accesses to one another's shared memory. That memory
// exists from the begin of its block to its end, and an access by another block must be ordered with both, in every
// schedule: the thread must know of something that the block did, and one of the block's threads must know of the
// access when it ends.
#include "clocks.h"

#include <cstring>

namespace evo_emu {

namespace {

// Of the cluster that begins with the block.
Gate cluster_gates[max_resident];
unsigned meetings[max_resident];  // of all its threads

// A thread's last access to the shared memory of another block; knowledge of it includes earlier ones.
struct FarAccess {
    uint32_t clock;  // of the thread; 0: none that the block does not know of
    const char* what;
    Where where;
};
FarAccess far_accesses[max_resident][max_threads];  // [block][thread of its cluster]

unsigned rank_of_block(unsigned block) { return block - first_of_cluster(block); }
unsigned threads_of_cluster() { return kernel.cluster * block_stride; }

// A block has ended while nothing orders its end with an access to its shared memory.
[[noreturn]] void report_outlived(unsigned block, unsigned fiber, const FarAccess& access) {
    crash(
        "block %u of the cluster ends, and its shared memory is reached by %s at %s, block %u, thread %s: nothing "
        "orders the two",
        rank_of_block(block), access.what, line_name(access.where).text, rank_of_block(block_of(fiber)),
        thread_name(rank_of(fiber)).text);
}

}  // namespace

void clear_cluster(unsigned first_block) {
    cluster_gates[first_block].name = "barrier.cluster.wait";
    clear(cluster_gates[first_block].passed);
    meetings[first_block] = 0;
    if (kernel.cluster == 1) return;
    for (unsigned block = first_block; block < first_block + kernel.cluster; ++block)
        memset((void*)far_accesses[block], 0, threads_of_cluster() * sizeof(FarAccess));
}

void require_alive(unsigned block, const char* what, Where where) {
    if (block == own_block()) return;
    if (has_ended(block))
        crash("%s at %s reaches shared memory of block %u of the cluster, which has ended", what, line_name(where).text,
              rank_of_block(block));
    if (!fibers[current].meetings && !knows_block(uint32_t(number_of_block(block) + 1), current))
        crash(
            "%s at %s reaches shared memory of block %u of the cluster, which may not have begun: no barrier of the "
            "cluster lies before it",
            what, line_name(where).text, rank_of_block(block));
}

void reach_block(unsigned block, const char* what, Where where) {
    if (block == own_block()) return;
    require_alive(block, what, where);
    far_accesses[block][current - first_fiber(first_of_cluster(block))] = {now(current).clock, what, where};
}

void reach_address(const volatile void* address, Where where) {
    if (current == max_fibers) return;
    const unsigned block = block_of_shared(address);
    if (block < max_resident) reach_block(block, "an access", where);
}

void* shared_access(unsigned shared, int line) {
    if (kernel.cluster > 1) reach_block(locate(shared).block, "an access", {nullptr, line});
    return shared_address(shared);
}

// The running thread has ended.
void leave_cluster() {
    if (kernel.cluster == 1) return;
    const unsigned block = own_block(), first = first_fiber(first_of_cluster(block));
    for (unsigned i = 0; i < threads_of_cluster(); ++i) {
        FarAccess& access = far_accesses[block][i];
        if (!access.clock) continue;
        const unsigned fiber = first + i;
        const When when{uint32_t(number_of_block(block_of(fiber)) + 1), uint16_t(rank_of(fiber)), access.clock};
        if (is_known(when, current)) access.clock = 0;
        else if (has_ended(block)) report_outlived(block, fiber, access);
    }
}

// The barrier of a cluster: complete when every thread that has not ended has arrived.
void settle_cluster(unsigned block) {
    const unsigned first = first_of_cluster(block);
    const unsigned start = first_fiber(first), end = end_of_block(first + kernel.cluster - 1);
    for (unsigned i = start; i < end; ++i)
        if (!fibers[i].ended && fibers[i].cluster_barrier != Fiber::arrived) return;
    Gate& gate = cluster_gates[first];
    ++meetings[first];
    for (unsigned i = start; i < end; ++i) {
        fibers[i].cluster_barrier = Fiber::passed;
        if (keeps_order() && !fibers[i].ended) depart(i, gate.passed);
    }
    if (keeps_order()) clear(gate.passed);
    wake_cluster(&gate, block);
}

// Without `releases` what the thread did is not known to those who wait: only that it has begun, and the mbarriers
// behind whose initialisation it had a fence.
void cluster_arrive(int line, bool releases) {
    Fiber& f = fibers[current];
    if (f.cluster_barrier != Fiber::away)
        crash("barrier.cluster.arrive at line %d: the thread has arrived before and not waited", line);
    f.cluster_barrier = Fiber::arrived;
    if (checked) settle_accesses();
    if (keeps_order() && releases) arrive(current, cluster_gates[first_of_cluster(own_block())].passed);
    settle_cluster(own_block());
}

void cluster_wait(int line) {
    Fiber& f = fibers[current];
    if (f.cluster_barrier == Fiber::away) crash("barrier.cluster.wait at line %d: the thread has not arrived", line);
    if (f.cluster_barrier == Fiber::arrived) {
        Gate& gate = cluster_gates[first_of_cluster(own_block())];
        gate.line = line;
        wait_at(&gate, nullptr);
    }
    f.cluster_barrier = Fiber::away;
    f.meetings = meetings_of_cluster(own_block());
}

unsigned meetings_of_cluster(unsigned block) { return meetings[first_of_cluster(block)]; }

unsigned cluster_rank() { return rank_of_block(own_block()); }

}  // namespace evo_emu
