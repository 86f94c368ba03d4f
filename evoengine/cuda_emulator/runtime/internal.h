// Declarations that the parts of the runtime share. The runtime is compiled once per machine; candidates link against
// it.
#pragma once
#include <evo_emu/runtime.h>

#include <cstddef>
#include <cstdint>

namespace evo_emu {

constexpr unsigned max_threads = 1024;  // per block, as on every GPU; here also per cluster
constexpr unsigned max_cluster = 8;     // blocks
constexpr unsigned warp_size = 32;
// Threads resident at once. Each stack takes two mappings, of which Linux gives a process 65,530.
constexpr unsigned max_fibers = 24576;
constexpr unsigned max_resident = max_fibers / warp_size;  // blocks

// Exit codes by which the caller distinguishes failures; the reason is on standard error.
enum Exit { exit_crashed = 10, exit_hung = 11 };

struct Launch {
    Dim grid;
    unsigned threads;
    unsigned shared_bytes;
};

// Of the kernel's text: a line, or the return address of a call in its code (run.py finds the line).
struct Where {
    const void* code;
    int line;
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

struct Passed;  // what threads tell one another where they meet (clocks.h)

// A place where threads wait for one another: a block barrier, a named barrier or a warp collective.
struct Gate {
    const char* name;
    int line;       // 0 for named barriers, which threads may reach from anywhere
    unsigned id;    // of a named barrier
    unsigned mask;  // of a warp collective: the lanes that must come
    Combine combine;
    unsigned need, arrived;
    unsigned lanes;  // of a warp collective: the lanes that have come
    Passed* passed;  // by those that have arrived; null where no order is kept
};

struct Fiber {
    void* stack_pointer;
    Gate* gate;  // null: runnable or ended
    void* payload;
    bool ended;
    enum { away, arrived, passed } cluster_barrier;
    unsigned meetings;                   // of its cluster that it has waited for
    unsigned refused_by, refused_phase;  // the mbarrier, by address, whose wait said no last, and its phase
    unsigned spins;                      // test_waits in a row that said no
    const volatile void* polled;         // where the thread looked last, by an access that others may see
    Where polled_at;
    CopyQueue queue;
};

// A tensor map argument, in the emulator's own layout; run.py writes the same.
struct alignas(128) TensorMap {
    const TensorMap* self;  // the launch's own copy
    char* tensor;           // on the way here: its number among the tensors
    uint64_t strides[4];    // bytes, of dimension 1 and up
    uint32_t dims[5];       // innermost first, 1 beyond the rank
    uint16_t box[5];
    uint8_t element, rank;  // bytes; dimensions
    uint16_t swizzle;       // bytes, 16 for none
    char unused[46];
};
static_assert(sizeof(TensorMap) == 128);

// Pending work that will arrive at a barrier: it happens at once, or when the phase ends, which is when a thread waits
// for it.
struct PendingCompletion {
    void (*land)(const PendingCompletion&);
    PendingCompletion* next;
    unsigned bytes, arrivals;
    unsigned block, shared;  // where bytes land: the number of the resident block, and the address there
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
extern uint64_t seed;
extern Launch launch;
extern Fiber fibers[max_fibers];
extern unsigned current;            // index of the running fiber; max_fibers outside of the kernel
extern unsigned fiber_count;        // of all resident clusters, block by block
extern unsigned block_stride;       // from a block's first fiber to the next one's; the fibers between have ended
extern unsigned resident;           // blocks
extern unsigned round_of_launches;  // from 0 on

// Of the thread with that number in its block.
Dim index_in_block(unsigned rank);

// How a report names a thread: by its number if blocks are one-dimensional, otherwise by its three indices.
struct ThreadName {
    char text[24];
};
ThreadName thread_name(unsigned rank);

inline unsigned block_of(unsigned fiber) { return fiber / block_stride; }
inline unsigned rank_of(unsigned fiber) { return fiber % block_stride; }
inline unsigned own_block() { return block_of(current); }
// The first block of the cluster that a block belongs to.
inline unsigned first_of_cluster(unsigned block) { return block / kernel.cluster * kernel.cluster; }
inline unsigned first_fiber(unsigned block) { return block * block_stride; }
inline unsigned end_of_block(unsigned block) { return block * block_stride + launch.threads; }

// Where what belongs at the address lies with a swizzle of `width` bytes, 16 for none: chunks of 16 bytes are exchanged
// by 1, 2 or 3 of the address bits from 128 on, for 32, 64 and 128 bytes.
inline unsigned swizzled(unsigned address, unsigned width) { return address ^ (address >> 7 & (width / 16 - 1)) << 4; }

// Memory of so many objects, all zero, of which only what is touched is there.
void* map_zeroed(size_t bytes, const char* what);

// fibers.cpp
void begin_kernel(void* const* arguments);
void begin_cluster(unsigned first_block, uint64_t number);
void run_fibers();
unsigned cluster_that_ended();
char* stack_top(unsigned fiber);
void stand_in_for(unsigned fiber);
bool has_ended(unsigned block);
Dim index_of_block(unsigned block);
uint64_t number_of_block(unsigned block);
void note_progress();
void wake(unsigned fiber);
void wait_at(Gate* gate, void* payload);
void wake_block(const Gate* gate, unsigned block);
void wake_cluster(const Gate* gate, unsigned block);
void may_lag();
void stay_behind_if_slow();
bool is_on_stacks(const char* address);
uint64_t random_below(uint64_t bound);
bool lands_at_once();

// grid.cpp
void run_grid();
bool more_clusters_fit();
void run_blocks_from(uint64_t number);

// rendezvous.cpp
void clear_gates(unsigned first_block);
[[noreturn]] void report_hang();

// clusters.cpp
void clear_cluster(unsigned first_block);
void settle_cluster(unsigned block);
unsigned meetings_of_cluster(unsigned block);
void leave_cluster();
// The running thread accesses shared memory of that block, which may be another one: it must have begun, and not ended.
void require_alive(unsigned block, const char* what, Where where);
// The same, and the block must not end before.
void reach_block(unsigned block, const char* what, Where where);
void reach_address(const volatile void* address, Where where);

// memory.cpp
// A shared address: of which resident block, and the address there.
struct SharedPlace {
    unsigned block, shared;
};
// What a block has of shared memory: the dynamic part, which is part 0, or a static variable.
struct SharedSpan {
    char* memory;
    unsigned first, bytes;  // its shared address and size
};
constexpr unsigned max_shared_parts = 257;
enum class RegionKind { input, output, scratch, dynamic_shared, static_shared };
size_t room_of_tensor(size_t bytes);
char* map_tensor(const char* name, size_t bytes, unsigned element, RegionKind kind, bool end_flush);
void protect_tensor(const char* tensor, bool writable);
void map_shared(unsigned block);
void poison_shared(unsigned block);
char* shared_of(unsigned block);
unsigned long shared_shift_of(unsigned block);
unsigned block_of_shared(const volatile void* address);
void begin_kernels_memory();
extern unsigned dynamic_start;  // shared address of the first byte of dynamic shared memory
SharedPlace locate(unsigned shared);
// Bytes of shared memory that nothing has written: NaN, and zeros in launches that repeat one, as a GPU may have them.
inline int unset_shared() { return round_of_launches ? 0 : 0xff; }
unsigned shared_parts();
unsigned shared_part(unsigned shared);
SharedSpan shared_span(unsigned block, unsigned part);
void check_near_canaries();
void check_all_canaries(unsigned first_block);
void report_fault(const char* address, const char* access);

// pooled.cpp
constexpr size_t pool_page = 4096;  // bytes, on every machine
enum class PooledKind { input, output, scratch, zeroed, inout };
void set_pool(const char* pages, uint64_t count);
char* map_pooled(const char* name, unsigned argument, size_t bytes, PooledKind kind, bool end_flush);
void begin_chosen_block(uint64_t block, uint64_t limit);
void write_touched(bool given_up);
bool is_pooled(const char* address);
bool provide_page(const char* address, const char* access);

// copies.cpp
void drop_copies(CopyQueue& queue);
unsigned long copies_begun(const CopyQueue& queue);
void land_copies(CopyQueue& queue, unsigned long until);

// barriers.cpp
void clear_barriers(unsigned first_block);
void name_stuck_barriers();
void barrier_promise(unsigned block, unsigned shared, PendingCompletion landing, const char* what, int line);
void check_nothing_in_flight(unsigned first_block);

// async_proxy.cpp
extern bool fences_due;  // at the end of the round
void publish_shared();
void poison_async(unsigned block);
const char* async_read(unsigned shared, unsigned bytes, const char* what, int line);
void async_write(unsigned block, unsigned shared, unsigned bytes, const char* what, int line);
void async_fill(unsigned block, unsigned shared, const void* from, unsigned bytes);

// bulk.cpp
void know_tensor_map(TensorMap* map);
void forget_tensor_maps();
void check_stores_waited_for();

// operands.cpp
// Of the lower byte or halfword.
float element_value(unsigned bits, Element element);
void read_matrix(float* matrix, unsigned long long descriptor, unsigned extent, unsigned first, unsigned count,
                 bool transposed, Element element, const char* what, int line);

// wgmma.cpp
void reset_wgmma(unsigned first_block);
bool finish_a_wgmma();
void name_stuck_wgmma();

// registers.cpp
void reset_registers(unsigned first_block);
void name_stuck_registers();

// visits.cpp
void count_visits(bool wanted);
void end_visits(unsigned block);
void write_visits();

// clocks.cpp: who knows of what. Only of a checked kernel, and of one with clusters.
inline bool keeps_order() { return checked || kernel.cluster > 1; }
void begin_clocks(unsigned first_block);
void arrive(unsigned fiber, Passed*& at);
void depart(unsigned fiber, const Passed* from);
void meet(unsigned block);
void copy(Passed*& to, const Passed* from);
void clear(Passed* passed);

// races.cpp: accesses to memory that blocks share, and whether they are in order. Only of a checked kernel.
enum class Access : unsigned char { read, write };
void reserve_tracked(size_t bytes);
char* place_tracked(size_t bytes);
void track(char* start, size_t bytes, unsigned element, const char* name);
void begin_tracking();
void settle_accesses();
void track_access(Access access, const volatile void* address, size_t bytes, Where where);
void track_atomic(const void* address, size_t bytes, int line);
void track_store_under_way(const void* address, size_t bytes, int line);
void settle_stores_under_way(const void* address, size_t bytes, int line);

// main.cpp
void write_all(const void* from, size_t bytes);

// report.cpp
struct LineName {
    char text[32];
};
LineName line_name(Where where);
void install_handlers();
[[noreturn]] void finish(Exit code, const char* message, bool with_thread);

}  // namespace evo_emu
