// The places where threads wait for one another, and the reports if that never ends.
#include "internal.h"

#include <cstdio>
#include <cstring>

namespace evo_emu {

namespace {

// Gates that some thread of so many waits at. A thread waits at one gate at most, so these never run out.
template <unsigned threads>
struct OpenGates {
    Gate gates[threads];
    unsigned highest;  // all gates from here on are free

    Gate* find(const char* name, int line, unsigned id, unsigned mask, Combine combine) {
        Gate* free = nullptr;
        for (unsigned i = 0; i < highest; ++i) {
            Gate& gate = gates[i];
            if (!gate.arrived) free = &gate;
            else if (gate.line == line && gate.id == id && gate.mask == mask && gate.combine == combine &&
                     !strcmp(gate.name, name))
                return &gate;
        }
        if (!free) free = &gates[highest++];
        free->name = name, free->line = line, free->id = id, free->mask = mask, free->combine = combine;
        free->need = free->arrived = free->lanes = 0;
        return free;
    }
};

OpenGates<max_threads> block_gates[max_resident];
OpenGates<warp_size> warp_gates[max_fibers / warp_size];

struct Ballot {
    int predicate, result;
};

int count_votes(const Gate* gate, Vote vote) {
    int set = 0, all = 0;
    for (unsigned i = first_fiber(own_block()); i < end_of_block(own_block()); ++i) {
        if (fibers[i].gate != gate) continue;
        set += static_cast<Ballot*>(fibers[i].payload)->predicate != 0;
        ++all;
    }
    return vote == Vote::count ? set : vote == Vote::conjunction ? set == all : set > 0;
}

bool same_place(const Gate& a, const Gate& b) { return a.line == b.line && a.id == b.id && !strcmp(a.name, b.name); }

// The waiting threads continue, with the knowledge of all that have arrived.
void open(Gate* gate) {
    gate->arrived = 0;
    const unsigned block = own_block();
    if (keeps_order()) {
        for (unsigned i = first_fiber(block); i < end_of_block(block); ++i)
            if (fibers[i].gate == gate) depart(i, gate->passed);
        clear(gate->passed);
    }
    wake_block(gate, block);
}

// A block's last warp may have fewer threads than lanes; nobody waits for lanes without one.
unsigned with_threads(unsigned mask) {
    const unsigned left = end_of_block(own_block()) - current / warp_size * warp_size;
    return left < warp_size ? mask & ((1u << left) - 1) : mask;
}

template <unsigned threads>
void clear(OpenGates<threads>& gates) {
    for (unsigned i = 0; i < gates.highest; ++i) clear(gates.gates[i].passed);
    gates.highest = 0;
}

}  // namespace

void clear_gates(unsigned first_block) {
    for (unsigned block = first_block; block < first_block + kernel.cluster; ++block) {
        clear(block_gates[block]);
        for (unsigned warp = first_fiber(block) / warp_size; warp * warp_size < end_of_block(block); ++warp)
            clear(warp_gates[warp]);
    }
    clear_cluster(first_block);
}

// A thread that has ended never arrives. The hardware tolerates that for barrier 0; CUDA C++ does not promise it.
int block_barrier(const char* name, int line, int predicate, Vote vote) {
    Ballot ballot{predicate, 0};
    Gate* gate = block_gates[own_block()].find(name, line, 0, 0, nullptr);
    gate->need = launch.threads;
    // The last thread queues with all the others: it must not always run ahead of them.
    fibers[current].gate = gate;
    fibers[current].payload = &ballot;
    if (checked) settle_accesses();
    if (++gate->arrived == launch.threads) {
        if (keeps_order()) meet(own_block());
        if (vote != Vote::none) {
            int result = count_votes(gate, vote);
            for (unsigned i = first_fiber(own_block()); i < end_of_block(own_block()); ++i)
                if (fibers[i].gate == gate) static_cast<Ballot*>(fibers[i].payload)->result = result;
        }
        open(gate);
        gate = nullptr;
    }
    wait_at(gate, &ballot);
    if (vote != Vote::none) visit(Visit::vote, uint64_t(line), ballot.result != 0);
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
    if (wait) fibers[current].gate = gate;
    if (keeps_order()) settle_accesses(), arrive(current, gate->passed);
    if (last) open(gate);
    if (wait) wait_at(last ? nullptr : gate, nullptr);
}

void warp_rendezvous(const char* name, int line, unsigned mask, void* payload, Combine combine, bool barrier) {
    const unsigned warp = current / warp_size, lane = current % warp_size;
    mask = with_threads(mask);
    if (!(mask >> lane & 1)) crash("%s at line %d: its mask 0x%08x lacks the calling lane %u", name, line, mask, lane);
    Gate* gate = warp_gates[warp].find(name, line, 0, mask, combine);
    ++gate->arrived;
    gate->lanes |= 1u << lane;
    if (keeps_order() && barrier) settle_accesses(), arrive(current, gate->passed);
    if (gate->lanes != mask) return wait_at(gate, payload);
    if (combine) {
        void* payloads[warp_size] = {};
        for (unsigned other = 0; other < warp_size; ++other)
            if (mask >> other & 1) payloads[other] = fibers[warp * warp_size + other].payload;
        payloads[lane] = payload;
        combine(payloads, mask);
    }
    gate->arrived = 0;
    if (keeps_order() && barrier) {
        for (unsigned other = 0; other < warp_size; ++other)
            if (mask >> other & 1) depart(warp * warp_size + other, gate->passed);
        clear(gate->passed);
    }
    note_progress();
    for (unsigned other = 0; other < warp_size; ++other)
        if (mask >> other & 1 && other != lane) wake(warp * warp_size + other);
    stay_behind_if_slow();
}

unsigned elect(unsigned mask, int line) {
    warp_rendezvous("elect.sync", line, mask, nullptr, nullptr);
    mask = with_threads(mask);
    unsigned lane = unsigned(seed + current / warp_size) % warp_size;
    while (!(mask >> lane & 1)) lane = (lane + 1) % warp_size;
    return lane;
}

namespace {

// The place where a thread waits: a gate, or none if it polls memory.
bool same_wait(unsigned a, unsigned b) {
    const Gate *x = fibers[a].gate, *y = fibers[b].gate;
    if (!x != !y) return false;
    if (x) return same_place(*x, *y);
    return fibers[a].polled_at.code == fibers[b].polled_at.code && fibers[a].polled_at.line == fibers[b].polled_at.line;
}

}  // namespace

void report_hang() {
    static char text[3072];
    static bool told[max_fibers];
    size_t used = 0;
    auto say = [&](const char* format, auto... values) {
        int wrote = snprintf(text + used, sizeof text - used, format, values...);
        used += size_t(wrote) < sizeof text - used ? size_t(wrote) : sizeof text - used - 1;
    };
    auto say_example = [&](unsigned fiber) {
        say("e.g. thread %s", thread_name(rank_of(fiber)).text);
        const Dim at = index_of_block(block_of(fiber));
        if (resident > kernel.cluster) say(" of block (%u,%u,%u)", at.x, at.y, at.z);
        say("%s", ")");
    };
    name_stuck_barriers();
    name_stuck_registers();
    name_stuck_wgmma();
    unsigned ended = 0, last_ended = 0;
    const unsigned threads = resident * launch.threads;
    for (unsigned i = 0; i < fiber_count; ++i) {
        if (rank_of(i) >= launch.threads) continue;
        if (fibers[i].ended) ++ended, last_ended = i;
        if (fibers[i].ended || told[i]) continue;
        unsigned waiting = 0;
        for (unsigned j = i; j < fiber_count; ++j) {
            if (fibers[j].ended || !same_wait(i, j)) continue;
            told[j] = true;
            ++waiting;
        }
        used ? say(", %u ", waiting) : say("hang: %u of %u threads ", waiting, threads);
        if (const Gate* gate = fibers[i].gate) {
            say("wait at %s", gate->name);
            gate->line ? say(" (line %d, ", gate->line) : say(" %u (", gate->id);
        } else if (fibers[i].polled) {
            say("look at memory that does not change (%s, ", line_name(fibers[i].polled_at).text);
        } else {
            say("wait for nothing that comes (");
        }
        say_example(i);
    }
    if (ended) say(", %u have ended (", ended), say_example(last_ended);
    const bool one_block = resident == kernel.cluster;
    if (!one_block) current = max_fibers;  // no block is to be named as the one that hangs
    finish(exit_hung, text, !one_block);
}

}  // namespace evo_emu
