// Every CUDA thread of the resident clusters (usually of one block) is a fiber with its own stack. In each round all
// runnable fibers run once, in an order drawn from the seed, until they wait or end; fibers that are woken meanwhile
// run in the next round. The scheduler's own stack runs when a cluster has ended or another one is to begin (grid.cpp).
#include "internal.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#if !defined(__x86_64__) || defined(EVO_EMU_UCONTEXT)
#include <ucontext.h>
#endif

evo_emu::Dim threadIdx, blockIdx, blockDim, gridDim;

namespace evo_emu {

unsigned thread_rank;

Fiber fibers[max_fibers];
unsigned current = max_fibers, fiber_count, block_stride, resident;

namespace {

constexpr size_t stack_bytes = 256 << 10;
constexpr unsigned most_lag = 4096;     // rounds
constexpr unsigned most_that_lag = 32;  // blocks of a launch: each keeps its stacks while others begin
// Numbers of rounds without a change, in which threads only poll, after which a delayed block continues, another
// cluster is started, and the launch counts as hung.
constexpr unsigned idle_until_one_goes_on = 16, idle_until_more = 64, idle_until_hang = 20000;

// Wide enough that no frame of sane size steps over it, and an odd number of pages, so that equal frames of different
// fibers fall into different cache sets.
size_t stack_guard() { return 17 * page; }
size_t stack_stride() { return stack_bytes + stack_guard(); }

struct Block {
    Dim index;
    uint64_t number;
    unsigned ended;  // threads
};

char* stacks;
unsigned stack_count;
void* main_stack_pointer;
void* const* kernel_arguments;
uint64_t random_state;

unsigned order[2][max_fibers];
unsigned *round_now = order[0], *round_next = order[1];
unsigned round_size, round_position, next_size;
unsigned slow_first, slow_end;
unsigned seldom;      // the slow ones run in one of so many rounds
unsigned slow_until;  // round at which others are drawn
unsigned round_number;
unsigned lags_at;                   // the change of global memory before which every second block lags
unsigned changes[max_resident];     // of global memory, of each block
unsigned lags_until[max_resident];  // of each block, the round before which it is held back
unsigned lags_left;                 // blocks that may still lag
unsigned at_once;                   // of eight copies so many land when they begin, the others when they are waited for
Block blocks[max_resident];
unsigned ended_cluster = max_resident;  // its first block; max_resident: none
unsigned long progress, progress_before;
unsigned idle_rounds;
bool wants_main;  // the scheduler's stack is to run next

void fiber_main();

#if defined(__x86_64__) && !defined(EVO_EMU_UCONTEXT)

// Saves the registers that the System V ABI requires a callee to preserve, and swaps stacks.
asm(R"(
    .text
    .type evo_emu_switch, @function
evo_emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size evo_emu_switch, .-evo_emu_switch
)");
extern "C" void evo_emu_switch(void** save, void* load);

void switch_stack(void** save, void* load) { evo_emu_switch(save, load); }

void* fresh_stack(unsigned fiber) {
    void** top = reinterpret_cast<void**>(stack_top(fiber)) - 8;
    for (int i = 0; i < 8; ++i) top[i] = nullptr;
    top[6] = reinterpret_cast<void*>(fiber_main);  // after six registers; a return address of null above it
    return top;
}

#else

ucontext_t contexts[max_fibers], main_context;

void switch_stack(void** save, void* load) {
    *save = save == &main_stack_pointer ? &main_context : &contexts[(Fiber*)save - fibers];
    swapcontext(static_cast<ucontext_t*>(*save), static_cast<ucontext_t*>(load));
}

void* fresh_stack(unsigned fiber) {
    getcontext(&contexts[fiber]);
    contexts[fiber].uc_stack.ss_sp = stacks + fiber * stack_stride() + stack_guard();
    contexts[fiber].uc_stack.ss_size = size_t(stack_top(fiber) - static_cast<char*>(contexts[fiber].uc_stack.ss_sp));
    contexts[fiber].uc_link = nullptr;
    makecontext(&contexts[fiber], fiber_main, 0);
    return &contexts[fiber];
}

#endif

// For some rounds a few lanes, one warp, one warpgroup, one block, or none, run far slower than the others, which
// exposes everything that only a barrier prevents the others from doing meanwhile.
unsigned draw_slow_size() {
    constexpr unsigned warpgroup = 4 * warp_size;
    switch (random_below(5)) {
        case 0:
        case 1: return 1;
        case 2: return warpgroup;
        case 3: return resident > 1 ? launch.threads : warp_size;
        default: return warp_size;
    }
}

void draw_slow_ones(bool with_first_thread) {
    const unsigned size = std::min(draw_slow_size(), launch.threads);
    const unsigned groups = (launch.threads + size - 1) / size;  // of a block
    const unsigned drawn = with_first_thread ? 0 : unsigned(random_below(resident * groups + 1));
    slow_first = first_fiber(drawn / groups) + drawn % groups * size;
    slow_end = slow_first + size;
    if (size == 1) slow_end += unsigned(random_below(warp_size - slow_first % warp_size));  // lanes of one warp
    seldom = random_below(2) ? 16 : 4096;
    slow_until = round_number + (8u << random_below(6));
}

bool lags(unsigned fiber) { return round_number < lags_until[fiber / block_stride]; }
bool is_slow(unsigned fiber) { return (fiber >= slow_first && fiber < slow_end) || lags(fiber); }

unsigned count_now(bool (*are)(unsigned fiber)) {
    unsigned count = 0;
    for (unsigned i = 0; i < round_size; ++i) count += are(round_now[i]);
    return count;
}

void hold_back(bool (*held)(unsigned fiber)) {
    const unsigned kept = round_size - count_now(held);
    for (unsigned i = 0, to = 0; i < round_size; ++i) {
        unsigned fiber = round_now[i];
        if (held(fiber)) round_next[next_size++] = fiber;
        else round_now[to++] = fiber;
    }
    round_size = kept;
}

bool only_slow_ones_can_run() {
    for (unsigned i = 0; i < next_size; ++i)
        if (!is_slow(round_next[i])) return false;
    return true;
}

void let_one_go_on() {
    const unsigned from = unsigned(random_below(resident));
    for (unsigned i = 0; i < resident; ++i) {
        unsigned& until = lags_until[(from + i) % resident];
        if (round_number < until) return void(until = 0);
    }
}

// Threads that poll memory change nothing: if only they run, deferred work is completed, then another cluster is
// started, and finally a hang is reported.
void count_idle_rounds() {
    if (progress != progress_before || next_size == 0) {
        progress_before = progress;
        idle_rounds = 0;
        return;
    }
    if (++idle_rounds % idle_until_one_goes_on == 0) let_one_go_on();
    if (idle_rounds % idle_until_more == 0 && more_clusters_fit()) wants_main = true;
    if (idle_rounds == idle_until_hang) report_hang();
}

// Products are formed as late as they can be: when whoever waits for one, or is slow, is all there is. Waiting for the
// slow ones too would hide what the others may do with a product before the slow ones are done with something else.
void start_round() {
    if (fences_due) publish_shared();
    count_idle_rounds();
    const bool due = only_slow_ones_can_run() && (next_size == 0 || random_below(4));
    if (due || idle_rounds) finish_a_wgmma();
    std::swap(round_now, round_next);
    round_size = next_size;
    round_position = next_size = 0;
    for (unsigned i = round_size; i > 1; --i) std::swap(round_now[i - 1], round_now[random_below(i)]);
    if (++round_number >= slow_until) draw_slow_ones(false);
    while (round_size && count_now(lags) == round_size) {
        if (!wants_main && !more_clusters_fit()) {
            let_one_go_on();
            continue;
        }
        wants_main = true;
        return hold_back(lags);
    }
    const bool all_slow = count_now(is_slow) == round_size;
    hold_back(random_below(seldom) && !all_slow ? is_slow : lags);
}

// Switches to the next runnable fiber, which may be the caller itself.
void switch_away() {
    if (checked) settle_accesses();
    check_near_canaries();
    if (!wants_main && round_position == round_size) start_round();
    void** save = &fibers[current].stack_pointer;
    if (wants_main) {
        current = max_fibers;
        switch_stack(save, main_stack_pointer);
        return;
    }
    if (round_size == 0) report_hang();
    unsigned next = round_now[round_position++];
    if (next == current) return;
    stand_in_for(next);
    switch_stack(save, fibers[next].stack_pointer);
}

void fiber_main() {
    kernel.invoke(kernel_arguments);
    check_stores_waited_for();
    fibers[current].ended = true;
    note_progress();
    const unsigned block = own_block(), first = first_of_cluster(block);
    ++blocks[block].ended;
    leave_cluster();
    settle_cluster(block);
    bool all = true;
    for (unsigned i = first; i < first + kernel.cluster; ++i) all &= has_ended(i);
    if (all) ended_cluster = first, wants_main = true;
    switch_away();
    __builtin_unreachable();
}

void make_stacks() {
    const size_t bytes = max_fibers * stack_stride();
    void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) crash("the emulator cannot reserve %zu bytes for the stacks", bytes);
    stacks = static_cast<char*>(memory);
}

void open_stacks(unsigned count) {
    if (!stacks) make_stacks();
    for (; stack_count < count; ++stack_count)
        if (mprotect(stacks + stack_count * stack_stride() + stack_guard(), stack_bytes, PROT_READ | PROT_WRITE))
            crash("the emulator cannot get the stack of thread %u", stack_count);
}

}  // namespace

char* stack_top(unsigned fiber) { return stacks + (fiber + 1) * stack_stride() - (fiber % 16) * 192; }

// xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled"), scaled down.
uint64_t random_below(uint64_t bound) {
    if (!random_state) random_state = (seed + 1) * 0x9e3779b97f4a7c15u | 1;
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return uint64_t((unsigned __int128)(random_state * 0x2545f4914f6cdd1du) * bound >> 64);
}

// A copy may land as soon as it begins or as late as its wait: each exposes faults that the other hides.
bool lands_at_once() { return random_below(8) < at_once; }

bool is_on_stacks(const char* address) {
    return stacks && address >= stacks && address < stacks + max_fibers * stack_stride();
}

void note_progress() { ++progress; }

void wake(unsigned fiber) {
    fibers[fiber].gate = nullptr;
    round_next[next_size++] = fiber;
}

namespace {

void wake_between(const Gate* gate, unsigned first, unsigned end) {
    note_progress();
    for (unsigned i = first; i < end; ++i)
        if (fibers[i].gate == gate) wake(i);
}

}  // namespace

void wake_block(const Gate* gate, unsigned block) { wake_between(gate, first_fiber(block), end_of_block(block)); }

void wake_cluster(const Gate* gate, unsigned block) {
    const unsigned first = first_of_cluster(block);
    wake_between(gate, first_fiber(first), end_of_block(first + kernel.cluster - 1));
}

void yield() {
    wake(current);
    switch_away();
}

// The caller's block is delayed until others have advanced far, which exposes accesses that are not ordered.
void may_lag() {
    if (++changes[own_block()] != lags_at || !lags_left || random_below(2)) return;
    --lags_left;
    lags_until[own_block()] = round_number + most_lag;
    yield();
}

// The last thread to arrive at a meeting would otherwise be the first to continue.
void stay_behind_if_slow() {
    if (is_slow(current)) yield();
}

void wait_at(Gate* gate, void* payload) {
    fibers[current].gate = gate;
    fibers[current].payload = payload;
    switch_away();
}

Dim index_in_block(unsigned rank) {
    const unsigned row = rank / blockDim.x;
    return {rank % blockDim.x, row % blockDim.y, row / blockDim.y};
}

// What a thread sees without asking for it. Also for what happens on a thread's behalf while no thread runs.
void stand_in_for(unsigned fiber) {
    current = fiber;
    if (fiber == max_fibers) return;
    const unsigned block = block_of(fiber);
    thread_rank = rank_of(fiber);
    threadIdx = index_in_block(thread_rank);
    blockIdx = blocks[block].index;
    dynamic_shared = shared_of(block);
    shared_shift = shared_shift_of(block);
}

bool has_ended(unsigned block) { return blocks[block].ended == launch.threads; }
Dim index_of_block(unsigned block) { return blocks[block].index; }
uint64_t number_of_block(unsigned block) { return blocks[block].number; }

// No cluster is resident yet.
void begin_kernel(void* const* arguments) {
    kernel_arguments = arguments;
    resident = fiber_count = 0;
    next_size = round_size = round_position = round_number = idle_rounds = 0;
    // One block at a time has its threads one behind the other; warps and warpgroups begin at whole numbers of them.
    // warpgroups of a block begin at a multiple of their size
    lags_at = 1 + unsigned(random_below(1u << random_below(4)));
    lags_left = most_that_lag;
    block_stride = checked || launch.threads > 128 ? (launch.threads + 127) / 128 * 128 : launch.threads;
}

// The cluster whose first block has that number, x running fastest, as the resident blocks from `first_block` on.
void begin_cluster(unsigned first_block, uint64_t number) {
    const unsigned end = first_block + kernel.cluster;
    if (end > resident) {
        resident = end;
        fiber_count = resident * block_stride;
        open_stacks(fiber_count);
    }
    for (unsigned i = first_block; i < end; ++i, ++number) {
        const uint64_t row = number / launch.grid.x;
        const Dim index{unsigned(number % launch.grid.x), unsigned(row % launch.grid.y), unsigned(row / launch.grid.y)};
        blocks[i] = {index, number, 0};
        lags_until[i] = changes[i] = 0;
        map_shared(i);
        poison_shared(i);
    }
    clear_gates(first_block);
    clear_barriers(first_block);
    reset_registers(first_block);
    reset_wgmma(first_block);
    if (keeps_order()) begin_clocks(first_block);
    at_once = random_below(2) ? 0 : unsigned(random_below(9));
    draw_slow_ones(random_below(2));  // the first thread often prepares what all the others use
    for (unsigned i = first_fiber(first_block); i < first_fiber(end); ++i) {
        Fiber& f = fibers[i];
        f.ended = rank_of(i) >= launch.threads;
        f.gate = nullptr;
        if (f.ended) continue;
        f.cluster_barrier = Fiber::away;
        f.meetings = 0;
        f.refused_by = ~0u;
        f.polled = nullptr;
        drop_copies(f.queue);
        f.stack_pointer = fresh_stack(i);
        wake(i);
    }
    note_progress();
}

// Runs until a cluster has ended, or only another cluster can help.
void run_fibers() {
    wants_main = false;
    if (round_position == round_size) start_round();
    if (wants_main) return;
    if (round_size == 0) report_hang();
    stand_in_for(round_now[round_position++]);
    switch_stack(&main_stack_pointer, fibers[current].stack_pointer);
}

// Its first block; max_resident where none has ended since it was last asked.
unsigned cluster_that_ended() { return std::exchange(ended_cluster, max_resident); }

}  // namespace evo_emu
