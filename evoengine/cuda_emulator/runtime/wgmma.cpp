// wgmma. A thread that begins one only notes it. The product of the whole warpgroup is formed when threads wait for it
// and no other thread of the block can run, those aside that are held back: so late that a place handed on too early
// has been filled again. Its A registers are read then; its tiles in shared memory then too, or as soon as the first
// thread begins it: so early that a tile which only other threads have waited for is not there yet. Of A each warp
// reads its own 16 rows, as soon as its own first thread begins the product (FlashAttention-3's kernels rely on that:
// a warp that stores rows of P fences them and synchronises itself alone). A wait ends when the product of all four
// warps is complete. Registers are host memory on a thread's stack. wgmma.fence keeps a snapshot of that stack:
// registers that differ from it have been written since.
#include "internal.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace evo_emu {

namespace {

constexpr unsigned group_size = 128;
constexpr unsigned max_pending = 128, max_accumulators = 8, max_tiles = 32;

// Pending accumulators of one thread: their values, while the registers themselves are NaN.
struct Accumulator {
    float* registers;
    unsigned count, uses;
    float values[128];
};

constexpr unsigned max_depth = 32;  // of bytes; 16 of others

// The operands as floats, [k][row].
struct alignas(64) Tiles {
    float a[max_depth * 64], b[max_depth * 256];
    const struct Operation* of;
};

struct Operation {
    Wgmma wgmma;
    unsigned group;
    unsigned begun, ended;  // by how many threads
    unsigned warps_begun;   // a bit each
    unsigned char accumulator[group_size];
    const unsigned* a[group_size][4];
    unsigned a_values[group_size][4];
};

struct Warpgroup {
    Operation operations[max_pending];  // the n-th is at n % max_pending
    Tiles tiles[max_tiles];             // of the n-th at n % max_tiles, where they were read early
    unsigned begun, computed;
    Gate gate;
    char text[128];
};

struct Thread {
    unsigned begun, ended, committed;
    unsigned waits_until;  // that many have been computed
    Accumulator accumulators[max_accumulators];
    char *snapshot, *from, *to;
    size_t capacity;
};

Warpgroup* warpgroups;  // from the first use on: most kernels have none
unsigned early;         // of eight products so many have their tiles read when they begin
Thread* threads;

bool all_nan(const float* registers, unsigned count) {
    uint32_t all = ~0u;
    for (unsigned i = 0; i < count; ++i) all &= __builtin_bit_cast(uint32_t, registers[i]);
    return all == ~0u;
}

// As evo_emu::poison leaves it. The compiler may fill a variable later than where it is declared.
bool is_uninitialised(uint32_t word) { return word == 0xffffffff || word == 0xfffdfffd; }

void check_fenced(const Thread& t, const void* registers, unsigned count, const char* what, int line) {
    if (!t.from) crash("wgmma at line %d: no wgmma.fence has come before the thread's first", line);
    const char* p = static_cast<const char*>(registers);
    bool covered = p >= t.from && p + 4 * count <= t.to;
    if (covered && !memcmp(p, t.snapshot + (p - t.from), 4 * count)) return;
    for (unsigned i = 0; i < count; ++i) {
        uint32_t now, then;
        memcpy(&now, p + 4 * i, 4);
        if (is_uninitialised(now)) continue;
        if (covered) memcpy(&then, t.snapshot + (p - t.from) + 4 * i, 4);
        if (!covered || now != then)
            crash("wgmma at line %d: %s register %u has been written since the thread's last wgmma.fence", line, what,
                  i);
    }
}

unsigned take_accumulator(Thread& t, float* registers, unsigned count, int line) {
    Accumulator* free = nullptr;
    for (Accumulator& a : t.accumulators) {
        if (!a.uses) {
            free = &a;
            continue;
        }
        if (registers >= a.registers + a.count || a.registers >= registers + count) continue;
        if (a.registers != registers || a.count != count)
            crash("wgmma at line %d: its accumulators overlap those of a pending wgmma of another shape", line);
        if (!all_nan(registers, count))
            crash("wgmma at line %d: accumulators have been written while a wgmma on them was pending", line);
        ++a.uses;
        return unsigned(&a - t.accumulators);
    }
    if (!free) crash("wgmma at line %d: more than %u pending accumulators of one thread", line, max_accumulators);
    check_fenced(t, registers, count, "accumulator", line);
    free->registers = registers;
    free->count = count;
    free->uses = 1;
    memcpy(free->values, registers, count * sizeof(float));
    memset(registers, 0xff, count * sizeof(float));
    return unsigned(free - t.accumulators);
}

bool same_instruction(const Wgmma& x, const Wgmma& y) {
    return x.line == y.line && x.columns == y.columns && x.a == y.a && x.b == y.b && x.accumulate == y.accumulate &&
           x.scale_a == y.scale_a && x.scale_b == y.scale_b && x.transposed_a == y.transposed_a &&
           x.transposed_b == y.transposed_b && x.element == y.element && !x.registers == !y.registers;
}

void read_a(const Wgmma& w, Tiles& tiles, unsigned first_row, unsigned rows) {
    if (w.registers) return;
    read_matrix(tiles.a, w.a, 64, first_row, rows, w.transposed_a, w.element, "wgmma's A", w.line);
}

void read_b(const Wgmma& w, Tiles& tiles) {
    read_matrix(tiles.b, w.b, w.columns, 0, w.columns, w.transposed_b, w.element, "wgmma's B", w.line);
}

// The n-th wgmma of a thread is the n-th of all 128: they need not come at the same time, but to the same instruction.
Operation& join(Warpgroup& g, Thread& t, const Wgmma& wgmma) {
    Operation& op = g.operations[t.begun % max_pending];
    Tiles& tiles = g.tiles[t.begun % max_tiles];
    if (t.begun == g.begun) {
        if (g.begun >= max_pending && op.ended != group_size)
            crash("wgmma at line %d: more than %u pending wgmma of the warpgroup", wgmma.line, max_pending);
        op.wgmma = wgmma;
        op.group = t.committed;
        op.begun = op.ended = op.warps_begun = 0;
        tiles.of = nullptr;
        if (random_below(8) < early) read_b(wgmma, tiles), tiles.of = &op;
        ++g.begun;
    } else if (!same_instruction(op.wgmma, wgmma)) {
        crash("wgmma at line %d: other threads of the warpgroup are at %s", wgmma.line,
              op.wgmma.line == wgmma.line ? "the same line with other operands" : "another one: it has diverged");
    } else if (op.group != t.committed) {
        crash("wgmma at line %d: other threads of the warpgroup have committed %u groups, this one %u", wgmma.line,
              op.group, t.committed);
    }
    const unsigned warp = current % group_size / 32;
    if (tiles.of == &op && !(op.warps_begun >> warp & 1)) read_a(wgmma, tiles, 16 * warp, 16);
    op.warps_begun |= 1u << warp;
    ++t.begun;
    ++op.begun;
    return op;
}

// Row of accumulator register i of a thread, and its column (PTX ISA, "Register fragments for
// wgmma.mma_async.m64nNk16").
unsigned row_of(unsigned thread, unsigned i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
unsigned column_of(unsigned thread, unsigned i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

void read_a_registers(const Operation& op, unsigned first_thread, float* a) {
    for (unsigned thread = 0; thread < group_size; ++thread)
        for (unsigned i = 0; i < 4; ++i) {
            unsigned word = *op.a[thread][i];
            if (word != op.a_values[thread][i])
                crash("wgmma at line %d: A register %u of thread %u has been written before the wait for it",
                      op.wgmma.line, i, rank_of(first_thread + thread));
            // An A fragment is laid out as two blocks of 8 columns of an accumulator, two elements to a word; of bytes
            // each of those is two.
            const unsigned each = is_byte(op.wgmma.element) ? 2 : 1;
            for (unsigned part = 0; part < 2 * each; ++part) {
                unsigned element = 2 * i + part / each, k = column_of(thread, element) * each + part % each;
                a[k * 64 + row_of(thread, element)] = element_value(word >> 16 / each * part, op.wgmma.element);
            }
        }
}

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));

// Adds the products of as many columns as a Vector has to C, in the order of k.
template <class Vector>
void add_columns(float* c, const float* a, const float* b, unsigned columns, unsigned depth, float sign) {
    for (unsigned row = 0; row < 64; row += 4) {
        Vector sums[4];
        for (unsigned r = 0; r < 4; ++r) sums[r] = *reinterpret_cast<Vector*>(c + (row + r) * columns);
        for (unsigned k = 0; k < depth; ++k) {
            const Vector right = *reinterpret_cast<const Vector*>(b + k * columns);
            for (unsigned r = 0; r < 4; ++r) sums[r] += sign * a[k * 64 + row + r] * right;
        }
        for (unsigned r = 0; r < 4; ++r) *reinterpret_cast<Vector*>(c + (row + r) * columns) = sums[r];
    }
}

void compute(Operation& op, Tiles& kept, unsigned first_thread) {
    const Wgmma& w = op.wgmma;
    const unsigned n = w.columns;
    static Tiles late;
    alignas(64) static float c[64 * 256];
    Tiles& tiles = kept.of == &op ? kept : late;
    if (&tiles == &late) read_a(w, late, 0, 64), read_b(w, late);
    float *a = tiles.a, *b = tiles.b;
    if (w.registers) read_a_registers(op, first_thread, a);
    const float sign = float(w.scale_a * w.scale_b);
    // Calls `copy(of C, of a thread)` for each two neighbouring elements, which neighbouring registers hold.
    auto each_pair = [&](auto copy) {
        for (unsigned thread = 0; thread < group_size; ++thread) {
            float* own = threads[first_thread + thread].accumulators[op.accumulator[thread]].values;
            float* at = c + row_of(thread, 0) * n + column_of(thread, 0);
            for (unsigned i = 0; i < n / 2; i += 4) copy(at + 2 * i, own + i), copy(at + 2 * i + 8 * n, own + i + 2);
        }
    };
    const bool integers = w.element == Element::s8;
    if (w.accumulate && !integers) each_pair([](float* of_c, const float* own) { memcpy(of_c, own, 8); });
    else memset(c, 0, 64 * n * sizeof(float));
    const unsigned depth = is_byte(w.element) ? 32 : 16;
    unsigned column = 0;
    for (; column + 16 <= n; column += 16) add_columns<Sixteen>(c + column, a, b + column, n, depth, sign);
    if (column < n) add_columns<Eight>(c + column, a, b + column, n, depth, sign);
    if (!integers) return each_pair([](const float* of_c, float* own) { memcpy(own, of_c, 8); });
    each_pair([&](const float* of_c, float* own) {  // 32 products of bytes are exact in a float
        for (unsigned j = 0; j < 2; ++j) {
            const int before = w.accumulate ? __builtin_bit_cast(int, own[j]) : 0;
            own[j] = __builtin_bit_cast(float, int(unsigned(before) + unsigned(int(of_c[j]))));
        }
    });
}

// Returns the accumulators and updates the fence's snapshot, because the thread did not write them.
void release(Thread& t, Accumulator& a, int line) {
    if (--a.uses) return;
    if (reinterpret_cast<char*>(a.registers) < static_cast<char*>(__builtin_frame_address(0)))
        crash("wgmma at line %d: its accumulators went out of scope before they were waited for", line);
    if (!all_nan(a.registers, a.count))
        crash("wgmma at line %d: its accumulators have been written before they were waited for", line);
    memcpy(a.registers, a.values, a.count * sizeof(float));
    char* p = reinterpret_cast<char*>(a.registers);
    if (p >= t.from && p + 4 * a.count <= t.to) memcpy(t.snapshot + (p - t.from), a.values, a.count * sizeof(float));
}

}  // namespace

void reset_wgmma(unsigned first_block) {
    early = unsigned(random_below(9));
    if (!warpgroups) return;
    const unsigned first = first_fiber(first_block), end = end_of_block(first_block + kernel.cluster - 1);
    for (unsigned group = first / group_size; group * group_size < end; ++group) {
        Warpgroup& g = warpgroups[group];
        if (!g.begun) continue;
        g.begun = g.computed = 0;
        for (Operation& op : g.operations) op.begun = op.ended = 0;
    }
    for (unsigned i = first; i < end; ++i) {
        Thread& t = threads[i];
        t.from = t.to = nullptr;
        t.committed = 0;
        if (!t.begun) continue;
        t.begun = t.ended = 0;
        for (Accumulator& a : t.accumulators) a.uses = 0;
    }
}

void wgmma_fence() {
    if (!warpgroups) {
        warpgroups = static_cast<Warpgroup*>(map_zeroed(max_fibers / group_size * sizeof(Warpgroup), "wgmma"));
        threads = static_cast<Thread*>(map_zeroed(max_fibers * sizeof(Thread), "wgmma"));
    }
    Thread& t = threads[current];
    t.from = static_cast<char*>(__builtin_frame_address(0));
    t.to = stack_top(current);
    size_t bytes = size_t(t.to - t.from);
    if (bytes > t.capacity) {
        t.snapshot = static_cast<char*>(realloc(t.snapshot, t.capacity = 2 * bytes));
        if (!t.snapshot) crash("the emulator has no memory left for wgmma.fence");
    }
    memcpy(t.snapshot, t.from, bytes);
}

void wgmma_begin(float* const* accumulators, const Wgmma& wgmma) {
    const unsigned group = current / group_size, within = current % group_size;
    if (!warpgroups) crash("wgmma at line %d: no wgmma.fence has come before the thread's first", wgmma.line);
    if ((group + 1) * group_size > end_of_block(own_block()))
        crash("wgmma at line %d: the thread is in no whole warpgroup of 128 threads", wgmma.line);
    for (unsigned i = 1; i < wgmma.columns / 2; ++i)
        if (accumulators[i] != accumulators[0] + i)
            crash("wgmma at line %d: the emulator requires the accumulators to be one array, in order", wgmma.line);
    Thread& t = threads[current];
    Operation& op = join(warpgroups[group], t, wgmma);
    op.accumulator[within] = (unsigned char)take_accumulator(t, accumulators[0], wgmma.columns / 2, wgmma.line);
    if (lane() == 0)
        visit(Visit::product, uint64_t(wgmma.line), false, wgmma.columns * (is_byte(wgmma.element) ? 2 : 1));
    if (!wgmma.registers) return;
    for (unsigned i = 0; i < 4; ++i) {
        check_fenced(t, wgmma.registers[i], 1, "A", wgmma.line);
        op.a[within][i] = wgmma.registers[i];
        op.a_values[within][i] = *wgmma.registers[i];
    }
}

void wgmma_commit() {
    if (threads) ++threads[current].committed;
}

void wgmma_wait(unsigned groups_left, int line) {
    if (!threads) return;
    Thread& t = threads[current];
    Warpgroup& g = warpgroups[current / group_size];
    auto operation = [&](unsigned i) -> Operation& { return g.operations[i % max_pending]; };
    for (t.waits_until = t.ended; t.waits_until < t.begun; ++t.waits_until)
        if (operation(t.waits_until).group + groups_left >= t.committed) break;
    while (g.computed < t.waits_until) {
        g.gate = {.name = g.text, .line = line};
        wait_at(&g.gate, nullptr);
    }
    for (; t.ended < t.waits_until; ++t.ended) {
        Operation& op = operation(t.ended);
        release(t, t.accumulators[op.accumulator[current % group_size]], op.wgmma.line);
        ++op.ended;
    }
}

// Called when no thread can run but those held back: forms what is waited for first in one of the warpgroups, if all of
// it has been begun by all of its threads. Says whether that was so.
bool finish_a_wgmma() {
    if (!warpgroups) return false;
    const unsigned groups = fiber_count / group_size, first = groups ? unsigned(random_below(groups)) : 0;
    for (unsigned i = 0; i < groups; ++i) {
        const unsigned group = (first + i) % groups, start = group * group_size;
        Warpgroup& g = warpgroups[group];
        unsigned until = ~0u, waiter = 0;
        for (unsigned thread = start; thread < start + group_size; ++thread)
            if (fibers[thread].gate == &g.gate && threads[thread].waits_until < until)
                until = threads[waiter = thread].waits_until;
        if (until == ~0u) continue;
        const unsigned before = g.computed, interrupted = current;
        stand_in_for(waiter);  // who sees its block's memory, and whom a message shall name
        for (; g.computed < until && g.operations[g.computed % max_pending].begun == group_size; ++g.computed)
            compute(g.operations[g.computed % max_pending], g.tiles[g.computed % max_tiles], start);
        stand_in_for(interrupted);
        if (g.computed == before) continue;
        note_progress();
        for (unsigned thread = start; thread < start + group_size; ++thread)
            if (fibers[thread].gate == &g.gate) wake(thread);
        return true;
    }
    return false;
}

void name_stuck_wgmma() {
    if (!warpgroups) return;
    for (unsigned i = 0; i * group_size < fiber_count; ++i) {
        Warpgroup& g = warpgroups[i];
        const Operation& op = g.operations[g.computed % max_pending];
        snprintf(g.text, sizeof g.text, "wgmma.wait_group for the wgmma of line %d, begun by %u of its 128 threads",
                 op.wgmma.line, op.begun);
    }
}

}  // namespace evo_emu
