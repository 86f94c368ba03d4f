// Where threads wait for one another, and what is said when that never comes.
#include "internal.h"

#include <cstdio>
#include <cstring>

namespace evo_emu {

namespace {

// Gates that some thread waits at. A thread waits at one gate at most, so these never run out.
struct OpenGates {
    Gate gates[max_threads];
    unsigned highest;  // all gates from here on are free

    Gate* find(const char* name, int line, unsigned id, unsigned mask, Combine combine) {
        Gate* free = nullptr;
        for (unsigned i = 0; i < highest; ++i) {
            Gate& gate = gates[i];
            if (!gate.arrived)
                free = &gate;
            else if (gate.line == line && gate.id == id && gate.mask == mask && gate.combine == combine &&
                     !strcmp(gate.name, name))
                return &gate;
        }
        if (!free) free = &gates[highest++];
        *free = {name, line, id, mask, combine, 0, 0, 0};
        return free;
    }
};

OpenGates block_gates[max_cluster];
Gate cluster_gate{"barrier.cluster.wait"};
OpenGates warp_gates[max_threads / warp_size];

struct Ballot {
    int predicate, result;
};

int count_votes(const Gate* gate, Vote vote) {
    int set = 0, all = 0;
    for (unsigned i = 0; i < fiber_count; ++i) {
        if (fibers[i].gate != gate) continue;
        set += static_cast<Ballot*>(fibers[i].payload)->predicate != 0;
        ++all;
    }
    return vote == Vote::count ? set : vote == Vote::conjunction ? set == all : set > 0;
}

bool same_place(const Gate& a, const Gate& b) { return a.line == b.line && a.id == b.id && !strcmp(a.name, b.name); }

void open(Gate* gate) {
    gate->arrived = 0;
    wake_all(gate);
}

// A block's last warp may have fewer threads than lanes; nobody waits for lanes without one.
unsigned with_threads(unsigned mask) {
    const unsigned left = fiber_count - current / warp_size * warp_size;
    return left < warp_size ? mask & ((1u << left) - 1) : mask;
}

}  // namespace

void clear_gates() {
    for (auto& gates : block_gates) gates.highest = 0;
    for (auto& gates : warp_gates) gates.highest = 0;
}

// A thread that has ended never arrives. The hardware forgives that for barrier 0; CUDA C++ does not promise it.
int block_barrier(const char* name, int line, int predicate, Vote vote) {
    Ballot ballot{predicate, 0};
    Gate* gate = block_gates[own_block()].find(name, line, 0, 0, nullptr);
    gate->need = launch.threads;
    // The last one queues with all the others: it must not run on ahead of them every time.
    fibers[current].gate = gate;
    fibers[current].payload = &ballot;
    if (++gate->arrived == launch.threads) {
        if (vote != Vote::none) {
            int result = count_votes(gate, vote);
            for (unsigned i = 0; i < fiber_count; ++i)
                if (fibers[i].gate == gate) static_cast<Ballot*>(fibers[i].payload)->result = result;
        }
        open(gate);
        gate = nullptr;
    }
    wait_at(gate, &ballot);
    return ballot.result;
}

void named_barrier(unsigned id, unsigned threads, bool wait, int line) {
    if (id > 15) crash("named barrier %u at line %d: barriers are numbered 0 to 15", id, line);
    if (!threads) threads = launch.threads;
    if (threads % warp_size || threads > launch.threads)
        crash("named barrier %u at line %d expects %u threads: not a multiple of 32 within the block's %u", id, line,
              threads, launch.threads);
    Gate* gate = block_gates[own_block()].find("bar.sync", 0, id, 0, nullptr);
    if (gate->arrived && gate->need != threads)
        crash("named barrier %u at line %d expects %u threads where others expect %u", id, line, threads, gate->need);
    gate->need = threads;
    bool last = ++gate->arrived == threads;
    if (last) open(gate);
    if (!wait) return;
    if (last) return yield();
    wait_at(gate, nullptr);
}

void warp_rendezvous(const char* name, int line, unsigned mask, void* payload, Combine combine) {
    const unsigned warp = current / warp_size, lane = current % warp_size;
    mask = with_threads(mask);
    if (!(mask >> lane & 1)) crash("%s at line %d: its mask 0x%08x lacks the calling lane %u", name, line, mask, lane);
    Gate* gate = warp_gates[warp].find(name, line, 0, mask, combine);
    ++gate->arrived;
    gate->lanes |= 1u << lane;
    if (gate->lanes != mask) return wait_at(gate, payload);
    if (combine) {
        void* payloads[warp_size] = {};
        for (unsigned other = 0; other < warp_size; ++other)
            if (mask >> other & 1) payloads[other] = fibers[warp * warp_size + other].payload;
        payloads[lane] = payload;
        combine(payloads, mask);
    }
    gate->arrived = 0;
    for (unsigned other = 0; other < warp_size; ++other)
        if (mask >> other & 1 && other != lane) wake(warp * warp_size + other);
    stay_behind_if_slow();
}

// The barrier of a cluster: over when every thread that has not ended has arrived.
void settle_cluster() {
    for (unsigned i = 0; i < fiber_count; ++i)
        if (!fibers[i].ended && fibers[i].cluster_barrier != Fiber::arrived) return;
    for (unsigned i = 0; i < fiber_count; ++i) fibers[i].cluster_barrier = Fiber::passed;
    wake_all(&cluster_gate);
}

void cluster_arrive(int line) {
    Fiber& f = fibers[current];
    if (f.cluster_barrier != Fiber::away)
        crash("barrier.cluster.arrive at line %d: the thread has arrived before and not waited", line);
    f.cluster_barrier = Fiber::arrived;
    settle_cluster();
}

void cluster_wait(int line) {
    Fiber& f = fibers[current];
    if (f.cluster_barrier == Fiber::away) crash("barrier.cluster.wait at line %d: the thread has not arrived", line);
    if (f.cluster_barrier == Fiber::arrived) {
        cluster_gate.line = line;
        wait_at(&cluster_gate, nullptr);
    }
    f.cluster_barrier = Fiber::away;
}

unsigned cluster_rank() { return own_block(); }

unsigned elect(unsigned mask, int line) {
    warp_rendezvous("elect.sync", line, mask, nullptr, nullptr);
    mask = with_threads(mask);
    unsigned lane = unsigned(launch.seed + current / warp_size) % warp_size;
    while (!(mask >> lane & 1)) lane = (lane + 1) % warp_size;
    return lane;
}

void report_hang() {
    char text[2048];
    size_t used = 0;
    auto say = [&](const char* format, auto... values) {
        int wrote = snprintf(text + used, sizeof text - used, format, values...);
        used += size_t(wrote) < sizeof text - used ? size_t(wrote) : sizeof text - used - 1;
    };
    name_stuck_barriers();
    name_stuck_registers();
    name_stuck_wgmma();
    bool told[max_threads] = {};
    unsigned ended = 0, last_ended = 0;
    for (unsigned i = 0; i < fiber_count; ++i) {
        if (fibers[i].ended) ++ended, last_ended = i;
        const Gate* gate = fibers[i].gate;
        if (!gate || told[i]) continue;
        unsigned waiting = 0;
        for (unsigned j = i; j < fiber_count; ++j) {
            const Gate* other = fibers[j].gate;
            if (!other || !same_place(*other, *gate)) continue;
            told[j] = true;
            ++waiting;
        }
        used ? say(", %u wait at %s", waiting, gate->name)
             : say("hang: %u of %u threads wait at %s", waiting, fiber_count, gate->name);
        gate->line ? say(" (line %d, e.g. thread %s)", gate->line, thread_name(i).text)
                   : say(" %u (e.g. thread %s)", gate->id, thread_name(i).text);
    }
    if (ended) say(", %u have ended (e.g. thread %s)", ended, thread_name(last_ended).text);
    finish(exit_hung, text, false);
}

}  // namespace evo_emu
