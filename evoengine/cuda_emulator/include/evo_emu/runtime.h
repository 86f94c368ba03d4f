// What a translated kernel asks of the runtime. No standard header: every candidate parses this.
#pragma once

struct uint3 {
    unsigned x, y, z;
};

namespace evo_emu {

using Dim = uint3;

// A parameter type that takes no part in the deduction of T.
template <class T> struct Identity { using type = T; };
template <class T> using Exactly = typename Identity<T>::type;

// A __constant__ variable of the source; a list of them ends with one without a name.
struct Constant {
    const char* name;
    void* at;
    unsigned long bytes;
};
extern const Constant constants[];

// A kernel of the source, described by the candidate's own translation unit (see kernel.h).
struct Kernel {
    const char* name;
    void (*invoke)(void* const* arguments);
    unsigned parameters;
    const char* kinds;  // per parameter: 'p' pointer, 'i' integer, 'f' floating point, 's' a structure
    const unsigned* sizes;
    unsigned least_blocks;  // per multiprocessor, by __launch_bounds__
    unsigned cluster;       // blocks side by side along x, by __cluster_dims__
    unsigned number;        // its place among the kernels of the text, from 1 on
};
extern Kernel kernel;  // the running one

// A variable of the device that kernels may write.
struct DeviceVariable {
    const char* name;
    void* at;
    unsigned long bytes;
    const DeviceVariable* next;
    DeviceVariable(const char* name, void* at, unsigned long bytes);  // adds itself to all_device_variables
};
extern const DeviceVariable* all_device_variables;

struct Entry {
    Kernel kernel;
    const Entry* next;
    explicit Entry(const Kernel& kernel);  // adds itself to all_entries
};
extern const Entry* all_entries;

// Whether the unit was compiled with every access to memory instrumented (races.cpp), and blocks run side by side.
extern const bool checked;

// Ends the process with the message, followed by the kernel, the running block and thread.
[[noreturn]] __attribute__((format(printf, 1, 2))) void crash(const char* format, ...);

// The running thread's number in its block, x running fastest, then y; warps are made of 32 in a row.
extern unsigned thread_rank;
inline unsigned lane() { return thread_rank & 31; }

// Lets other threads run first; the caller stays runnable.
void yield();

enum class Vote : unsigned char { none, count, conjunction, disjunction };

// All threads of the block meet here; the result is that of the vote over their predicates.
int block_barrier(const char* name, int line, int predicate, Vote vote);

// `threads` threads meet at the named barrier of PTX, whatever line they come from; 0 means all of the block.
void named_barrier(unsigned id, unsigned threads, bool wait, int line);

// The lanes of `mask` meet here. The last to arrive runs `combine` over all their payloads (indexed by lane; a null
// `combine` only meets); the others wait until it has.
using Combine = void (*)(void* const* payloads, unsigned mask);
// `barrier`: what a lane has stored before is seen by the others behind it, which exchanges of values do not promise.
void warp_rendezvous(const char* name, int line, unsigned mask, void* payload, Combine combine, bool barrier = false);

// Shared memory. The block's window begins with the static variables, and behind them lies the dynamic part, at a
// multiple of the strictest alignment that a declaration of it states. Variables are declared before main begins; each
// has a mapping of its own all the same, `shared_shift` bytes further on for each block that is resident beside the
// first. `owner`: the number of the kernel in whose body the declaration stands, 0 for functions that any may call.
extern char* dynamic_shared;
extern unsigned long shared_shift;
void declare_static_shared(unsigned long bytes, unsigned long alignment, unsigned owner);
void declare_dynamic_shared(unsigned long alignment, unsigned owner);
char* map_shared_variable(const char* name, unsigned long bytes, unsigned long alignment);
unsigned shared_offset(const void* generic);
void* shared_address(unsigned offset);
void* shared_access(unsigned offset, int line);  // the same, of an access that follows at once

// What a warp did at a site, for the gate's coverage: VisitKind in devices/base.py.
enum class Visit : unsigned char { wait, copy_wait, product, vote };
void visit(Visit kind, unsigned long site, bool came_true = false, unsigned count = 1);

// cp.async: bytes land at once, or at the wait that covers their group and are 0xFF until then.
void copy_async(unsigned shared, const void* global, unsigned bytes, unsigned source_bytes, int line);
void copy_async_commit();
void copy_async_wait(unsigned groups_left, int line);
void copy_async_wait_all(int line);

// ldmatrix and stmatrix of 1, 2 or 4 matrices of 8x8 16-bit elements; lane i gives the address of row i % 8 of matrix i
// / 8.
void load_matrices(unsigned* const* registers, unsigned count, bool transposed, unsigned shared, int line);
void store_matrices(unsigned* const* registers, unsigned count, bool transposed, unsigned shared, int line);

// What matrix products multiply. Sums are fp32, of s8 whole numbers of 32 bits in the place of floats.
enum class Element : unsigned char { half, bfloat16, e4m3, e5m2, s8 };
constexpr bool is_byte(Element element) { return element >= Element::e4m3; }

// mma.sync m16n8k16, of bytes m16n8k32: pointers to a lane's 4, 4, 2 and 4 registers.
struct MmaFragments {
    float* const* d;
    const unsigned *const *a, *const *b;
    const float* const* c;
};
void multiply_m16n8(const MmaFragments& fragments, Element element, int line);

// mbarriers, by shared address. A phase is over when its arrivals have come and its bytes have landed; bytes land
// at once or when somebody waits for them. The state that an arrival returns is the number of the phase.
void barrier_init(unsigned shared, unsigned count, int line);
void barrier_invalidate(unsigned shared, int line);
unsigned long long barrier_arrive(unsigned shared, unsigned count, unsigned bytes, int line);
void barrier_expect(unsigned shared, unsigned bytes, int line);
void barrier_arrive_after_copies(unsigned shared, bool counted, int line);
bool barrier_try_wait(unsigned shared, unsigned parity, int line);
bool barrier_test_wait(unsigned shared, unsigned parity, int line);
void publish_barriers();
void fence_barrier_inits();

// Clusters: the block's number in its own, a shared address as all its blocks may name it, and where all their threads
// meet.
unsigned cluster_rank();
unsigned map_to_block(unsigned shared, unsigned block, int line);
void* map_to_block(const void* generic, unsigned block, int line);
unsigned rank_of_shared(const void* generic, int line);  // of the block whose memory it is
void cluster_arrive(int line, bool releases = true);
void cluster_wait(int line);

// fence.proxy.async: wgmma and bulk copies see shared memory as it was at the last of these.
void fence_async_proxy();

// setmaxnreg: the block's warps share 64 Ki registers; asking for more than the others have left waits for them.
void change_registers(unsigned count, bool more, int line);

// elect.sync: the lane chosen among those of the mask; always the same for the same mask, and no lane in particular.
unsigned elect(unsigned mask, int line);

// wgmma by the 128 threads of a warpgroup, each of which calls these for itself. The accumulators are NaN from
// wgmma_begin to the wgmma_wait that covers the group; the product is formed then.
struct Wgmma {
    const unsigned* const* registers;  // A, where it is not in shared memory
    unsigned long long a, b;           // shared memory descriptors
    bool accumulate;
    int scale_a, scale_b, transposed_a, transposed_b;
    Element element;
    unsigned columns;
    int line;
};
void wgmma_begin(float* const* accumulators, const Wgmma& wgmma);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(unsigned groups_left, int line);

// Memory that threads of different blocks may share (races.cpp). Scopes as PTX has them; the system is one GPU here.
enum class Order : unsigned char { relaxed, acquire, release, acquire_release };
enum class Scope : unsigned char { weak, block, cluster, device };
struct Strong {
    Order order;
    Scope scope;
    bool reads, writes;
    bool legacy;  // an atomicAdd and its kin: behind the thread's own __threadfence it acquires what it reads
    int line;     // 0: the caller's
};
// Before an atomic access, or one to be seen by others: lets other threads run first, now and then. No thread runs
// between this and the access that the caller then makes.
void strong_access(const volatile void* address, unsigned long bytes, Strong strong);
void fence(Scope scope, int line);
// A weak compare-and-exchange may fail for no reason.
bool fails_now_and_then();
// A load by the path of data that no thread writes as long as the kernel runs.
void read_only_load(const void* address, unsigned long bytes, int line);

// Bulk copies (TMA). Loads land at once or at their barrier; stores leave at once or at the wait that covers their
// group, from shared memory as it is then. Tiles of a tensor go by a tensor map and the coordinates of their first element, innermost first.
void bulk_load(unsigned shared, const void* global, unsigned bytes, unsigned barrier, int line);
void bulk_store(void* global, unsigned shared, unsigned bytes, int line);
// The same, but adds floats to those that are there, each by itself and of device scope.
void bulk_add(void* global, unsigned shared, unsigned bytes, int line);
void tile_load(unsigned shared, const void* map, const int* at, unsigned rank, unsigned barrier, unsigned blocks,
               int line);
void tile_store(const void* map, const int* at, unsigned rank, unsigned shared, int line);
void bulk_commit();
// `read`: what was stored may not be there yet, and only shared memory may be used again.
void bulk_wait(unsigned groups_left, bool read);

// `Place` is a type of its own at every declaration and instantiation, so each has its own variable, as in CUDA.
template <class T, unsigned long least_alignment, unsigned owner, class Place> struct StaticShared {
    static constexpr unsigned long alignment = least_alignment > alignof(T) ? least_alignment : alignof(T);
    struct Declaration {
        Declaration() { declare_static_shared(sizeof(T), alignment, owner); }
    };
    static inline const Declaration declaration;
    static inline char* address = nullptr;
};
template <class T, unsigned long alignment, unsigned owner = 0, class Place>
inline T& shared_variable(const char* name, Place) {
    using Shared = StaticShared<T, alignment, owner, Place>;
    (void)&Shared::declaration;
    if (!Shared::address) Shared::address = map_shared_variable(name, sizeof(T), Shared::alignment);
    return *reinterpret_cast<T*>(Shared::address + shared_shift);
}

template <unsigned long alignment, unsigned owner> struct DynamicShared {
    struct Declaration {
        Declaration() { declare_dynamic_shared(alignment, owner); }
    };
    static inline const Declaration declaration;
};
template <class T, unsigned long alignment, unsigned owner = 0> inline T* const& dynamic_array() {
    (void)&DynamicShared<(alignment > alignof(T) ? alignment : alignof(T)), owner>::declaration;
    return reinterpret_cast<T* const&>(dynamic_shared);
}

}  // namespace evo_emu

extern evo_emu::Dim threadIdx, blockIdx, blockDim, gridDim;
