// What the parts of the runtime share. The runtime is compiled once per machine; candidates link against it.
#pragma once
#include <evo_emu/runtime.h>

#include <cstddef>
#include <cstdint>

namespace evo_emu {

constexpr unsigned max_threads = 1024;  // per block, as on every GPU; here also per cluster
constexpr unsigned max_cluster = 2;     // blocks
constexpr unsigned warp_size = 32;

// Exit codes by which the caller tells the failures apart; the reason is on standard error.
enum Exit { exit_crashed = 10, exit_hung = 11 };

struct Launch {
    Dim grid;
    unsigned threads;
    unsigned shared_bytes;
    uint64_t seed;
};

struct Copy {
    char* to;
    const char* from;
    unsigned bytes, source_bytes, group;
};

struct CopyQueue {
    Copy* copies;
    unsigned first, count, capacity;
    unsigned committed;
    unsigned long before;  // copies of the thread that came before copies[0]
};

// A place where threads wait for one another: a block barrier, a named barrier or a warp collective.
struct Gate {
    const char* name;
    int line;       // 0 for named barriers, which threads may reach from anywhere
    unsigned id;    // of a named barrier
    unsigned mask;  // of a warp collective: the lanes that must come
    Combine combine;
    unsigned need, arrived;
    unsigned lanes;  // of a warp collective: the lanes that have come
};

struct Fiber {
    void* stack_pointer;
    Gate* gate;  // null: runnable or ended
    void* payload;
    bool ended;
    enum { away, arrived, passed } cluster_barrier;
    unsigned refused_by, refused_phase;  // the mbarrier, by address, whose wait said no last, and its phase
    unsigned spins;                      // test_waits in a row that said no
    CopyQueue queue;
};

// A tensor map argument, in the emulator's own layout; run.py writes the same.
struct alignas(128) TensorMap {
    const TensorMap* self;  // the launch's own copy
    char* tensor;           // on the way here: the number of its argument
    uint64_t strides[4];    // bytes, of dimension 1 and up
    uint32_t dims[5];       // innermost first, 1 beyond the rank
    uint16_t box[5];
    uint8_t element, rank;  // bytes; dimensions
    uint16_t swizzle;       // bytes, 16 for none
    char unused[46];
};
static_assert(sizeof(TensorMap) == 128);

// What is under way to a barrier: it happens at once, or when the phase ends, which is when somebody waits for it.
struct PendingCompletion {
    void (*land)(const PendingCompletion&);
    PendingCompletion* next;
    unsigned bytes, arrivals;
    unsigned block, shared;  // where bytes land: the block's number in its cluster, and the address there
    union {
        struct {
            unsigned fiber;
            unsigned long copies;
        } after;
        const char* from;
        struct {
            const TensorMap* map;
            int at[5];
        } tile;
    };
};

extern const size_t page;  // bytes
extern Launch launch;
extern Fiber fibers[max_threads];
extern unsigned current;  // index of the running fiber; max_threads outside of the kernel
extern unsigned fiber_count;  // threads of a cluster, block by block

// Of the thread with that number in its block.
Dim index_in_block(unsigned rank);

// How a report calls a thread: its number where blocks are a row, else all three of its indices.
struct ThreadName {
    char text[24];
};
ThreadName thread_name(unsigned fiber);

inline unsigned block_of(unsigned fiber) { return fiber / launch.threads; }
inline unsigned own_block() { return block_of(current); }

// Where what belongs at the address lies with a swizzle of `width` bytes, 16 for none: chunks of 16 bytes are exchanged
// by 1, 2 or 3 of the address bits from 128 on, for 32, 64 and 128 bytes.
inline unsigned swizzled(unsigned address, unsigned width) { return address ^ (address >> 7 & (width / 16 - 1)) << 4; }

// fibers.cpp
void make_stacks();
char* stack_top(unsigned fiber);
void run_cluster(void* const* arguments, const Dim* blocks);
void stand_in_for(unsigned fiber);
bool has_ended(unsigned block);
void wake(unsigned fiber);
void wait_at(Gate* gate, void* payload);
void wake_all(const Gate* gate);
void stay_behind_if_slow();
bool is_on_stacks(const char* address);
uint64_t random_below(uint64_t bound);
bool lands_at_once();

// rendezvous.cpp
void clear_gates();
void settle_cluster();
[[noreturn]] void report_hang();

// memory.cpp
// A shared address: of which block of the cluster, and the address there.
struct SharedPlace {
    unsigned block, shared;
};
enum class RegionKind { input, output, dynamic_shared, static_shared };
char* map_tensor(const char* name, size_t bytes, bool output, bool end_flush);
void protect_inputs();
void map_dynamic_shared();
void poison_shared();
char* shared_of(unsigned block);
extern unsigned dynamic_start;  // shared address of the first byte of dynamic shared memory
SharedPlace locate(unsigned shared);
void check_near_canaries();
void check_all_canaries();
void report_fault(const char* address, const char* access);

// pooled.cpp
constexpr size_t pool_page = 4096;  // bytes, on every machine
void set_pool(const char* pages, uint64_t count);
char* map_pooled(const char* name, unsigned argument, size_t bytes, bool output, bool end_flush);
void begin_chosen_block(uint64_t block, uint64_t limit);
void write_touched(bool given_up);
bool provide_page(const char* address, const char* access);

// copies.cpp
void drop_copies(CopyQueue& queue);
unsigned long copies_begun(const CopyQueue& queue);
void land_copies(CopyQueue& queue, unsigned long until);

// barriers.cpp
void clear_barriers();
void name_stuck_barriers();
void barrier_promise(unsigned block, unsigned shared, PendingCompletion landing, const char* what, int line);
void check_nothing_under_way();

// async_proxy.cpp
extern unsigned fences_due;  // at the end of the round: a bit for each block of the cluster
void publish_shared();
void poison_async();
const char* async_read(unsigned shared, unsigned bytes, const char* what, int line);
void async_write(unsigned block, unsigned shared, unsigned bytes, const char* what, int line);
void async_fill(unsigned block, unsigned shared, const void* from, unsigned bytes);

// bulk.cpp
void know_tensor_map(TensorMap* map);
void check_stores_waited_for();

// operands.cpp
float element_value(unsigned short bits, bool bfloat16);
void read_matrix(float* matrix, unsigned long long descriptor, unsigned extent, unsigned first, unsigned count,
                 bool transposed, bool bfloat16, const char* what, int line);

// wgmma.cpp
void reset_wgmma();
bool finish_a_wgmma();
void name_stuck_wgmma();

// registers.cpp
void reset_registers();
void name_stuck_registers();

// report.cpp
void install_handlers();
[[noreturn]] void finish(Exit code, const char* message, bool with_thread);

}  // namespace evo_emu
