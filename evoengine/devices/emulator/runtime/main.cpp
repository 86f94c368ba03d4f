// Reads one launch from standard input, runs it, writes the output tensors to standard output in argument order. Where
// the launch names blocks, only these run, and what each touched of pooled tensors follows.
#include "internal.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

using namespace evo_emu;

namespace {

// The wire format; run.py writes the same.
struct LaunchHeader {
    uint64_t seed;
    int64_t parent;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes, arguments;
    uint32_t chosen;     // blocks to run, which follow; 0: all
    uint32_t constants;  // arguments behind the kernel's parameters
    uint64_t pool_bytes;  // of the pool, which follows them
};
struct ChosenBlock {
    uint64_t number, input_limit;  // bytes of pooled inputs at which it is given up
};
struct ArgumentHeader {
    uint64_t bytes;
    // 't' input tensor, 'o' output tensor, 'T' and 'O' the same pooled, 'i' integer, 'f' floating point, 'm' tensor map,
    // 'c' the contents of a __constant__ variable
    char kind;
    char name[55];
};
struct Argument {
    ArgumentHeader header;
    char* data;
};

constexpr unsigned max_arguments = 256;
constexpr unsigned max_constants = 64;
constexpr unsigned max_chosen = 256;
constexpr uint64_t max_blocks = 1 << 24;

Argument arguments[max_arguments];
void* values[max_arguments];
struct { void* at; uint64_t bytes; } filled[max_constants];
ChosenBlock chosen[max_chosen];
unsigned chosen_count;

void read_all(void* to, size_t bytes) {
    for (char* p = static_cast<char*>(to); bytes;) {
        ssize_t got = read(STDIN_FILENO, p, bytes);
        if (got <= 0) crash("the launch ends early");
        p += got;
        bytes -= size_t(got);
    }
}

void write_all(const char* p, size_t bytes) {
    while (bytes) {
        ssize_t put = write(STDOUT_FILENO, p, bytes);
        if (put <= 0) crash("the results cannot be written");
        p += put;
        bytes -= size_t(put);
    }
}

bool is_pooled(const Argument& a) { return a.header.kind == 'T' || a.header.kind == 'O'; }
bool is_tensor(const Argument& a) { return a.header.kind == 't' || a.header.kind == 'o' || is_pooled(a); }

void check_parameter(unsigned i) {
    const ArgumentHeader& given = arguments[i].header;
    char kind = kernel.kinds[i];
    unsigned size = kernel.sizes[i];
    char fits = given.kind == 'm' ? 's' : given.kind;
    if (kind == 'p' ? is_tensor(arguments[i]) : kind == fits && size == given.bytes) return;
    const char* takes = kind == 'p' ? "pointer" : kind == 'f' ? "float" : kind == 'i' ? "integer" : "structure";
    if (is_tensor(arguments[i]))
        crash("parameter %u takes a %u-byte %s, the launch gives tensor %s", i, size, takes, given.name);
    crash("parameter %u takes a %u-byte %s, the launch gives %s, a %u-byte %s", i, size, takes, given.name,
          unsigned(given.bytes), given.kind == 'f' ? "float" : given.kind == 'm' ? "tensor map" : "integer");
}

void check_cluster() {
    if (kernel.cluster == 1) return;
    if (kernel.cluster > max_cluster)
        crash("clusters of %u blocks: the emulator runs %u at most", kernel.cluster, max_cluster);
    if (launch.grid.x % kernel.cluster)
        crash("a grid of %u blocks along x, which clusters of %u do not divide", launch.grid.x, kernel.cluster);
    if (launch.threads % 128 || launch.threads * kernel.cluster > max_threads)
        crash("a cluster of %u blocks of %u threads: the emulator runs whole warpgroups, %u threads at most",
              kernel.cluster, launch.threads, max_threads);
}

// A process whose parent died before prctl took hold would outlive it.
void die_with(pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(exit_crashed);
}

void read_chosen(const LaunchHeader& header) {
    if (header.chosen > max_chosen) crash("%u chosen blocks: the emulator runs %u at most", header.chosen, max_chosen);
    chosen_count = header.chosen;
    read_all(chosen, chosen_count * sizeof *chosen);
    if (!header.pool_bytes) return;
    auto* pool = static_cast<char*>(malloc(header.pool_bytes));
    if (!pool) crash("the emulator has no memory for the pool");
    read_all(pool, header.pool_bytes);
    set_pool(pool, header.pool_bytes / pool_page);
}

char* map_argument(const Argument& a, unsigned i) {
    bool output = a.header.kind == 'o' || a.header.kind == 'O', end_flush = (launch.seed + i) % 2 == 0;
    if (is_pooled(a)) return map_pooled(a.header.name, i, a.header.bytes, output, end_flush);
    return map_tensor(a.header.name, a.header.bytes, output, end_flush);
}

const Constant& find_constant(const ArgumentHeader& given) {
    for (const Constant* found = constants; found->name; ++found) {
        if (strcmp(found->name, given.name)) continue;
        if (given.bytes > found->bytes)
            crash("__constant__ %s has %lu bytes, the launch gives %lu", given.name, found->bytes, given.bytes);
        return *found;
    }
    crash("the kernel has no __constant__ variable %s", given.name);
}

void read_constant_headers(unsigned count) {
    if (count > max_constants) crash("%u constants: the emulator takes %u at most", count, max_constants);
    for (unsigned i = 0; i < count; ++i) {
        ArgumentHeader given;
        read_all(&given, sizeof given);
        filled[i] = {find_constant(given).at, given.bytes};
    }
}

void read_launch() {
    LaunchHeader header;
    read_all(&header, sizeof header);
    die_with(pid_t(header.parent));
    read_chosen(header);
    gridDim = {header.grid[0], header.grid[1], header.grid[2]};
    blockDim = {header.block[0], header.block[1], header.block[2]};
    const uint64_t threads = uint64_t(blockDim.x) * blockDim.y * blockDim.z;
    if (!threads || threads > max_threads)
        crash("a block of %lu threads: it must have 1 to %u", threads, max_threads);
    launch = {gridDim, unsigned(threads), header.shared_bytes, header.seed};
    check_cluster();
    fiber_count = kernel.cluster * launch.threads;
    if (header.arguments != kernel.parameters)
        crash("the kernel takes %u parameters, the launch gives %u", kernel.parameters, header.arguments);
    for (unsigned i = 0; i < header.arguments; ++i) {
        read_all(&arguments[i].header, sizeof(ArgumentHeader));
        check_parameter(i);
    }
    read_constant_headers(header.constants);
    for (unsigned i = 0; i < header.arguments; ++i) {
        Argument& a = arguments[i];
        if (is_tensor(a)) {
            a.data = map_argument(a, i);
            values[i] = &a.data;
        } else {
            values[i] = a.data = static_cast<char*>(aligned_alloc(128, 128));
        }
        if (!is_pooled(a)) read_all(a.data, a.header.bytes);
    }
    for (unsigned i = 0; i < header.constants; ++i) read_all(filled[i].at, filled[i].bytes);
    for (unsigned i = 0; i < header.arguments; ++i) {
        if (arguments[i].header.kind != 'm') continue;
        auto* map = reinterpret_cast<TensorMap*>(arguments[i].data);
        map->tensor = arguments[reinterpret_cast<uintptr_t>(map->tensor)].data;
        know_tensor_map(map);
    }
    protect_inputs();
    map_dynamic_shared();
    make_stacks();
}

// The cluster whose first block has that number, x running fastest.
void run_blocks_from(uint64_t number) {
    uint64_t row = number / launch.grid.x;
    Dim first = {unsigned(number % launch.grid.x), unsigned(row % launch.grid.y), unsigned(row / launch.grid.y)};
    Dim indices[max_cluster] = {first, {first.x + 1, first.y, first.z}};
    poison_shared();
    run_cluster(values, indices);
    check_all_canaries();
}

// One after the other in a process that ends where a block is given up; the next process goes on behind that.
void run_chosen() {
    const pid_t parent = getpid();
    void* shared = mmap(nullptr, sizeof(unsigned), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) crash("the emulator has no memory for the number of blocks done");
    auto& begun = *static_cast<volatile unsigned*>(shared);
    while (begun < chosen_count) {
        pid_t child = fork();
        if (child < 0) crash("the emulator cannot start a process");
        if (child == 0) {
            die_with(parent);
            while (begun < chosen_count) {
                const ChosenBlock& block = chosen[begun];
                begun = begun + 1;
                begin_chosen_block(block.number, block.input_limit);
                run_blocks_from(block.number / kernel.cluster * kernel.cluster);
                write_touched(false);
            }
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status)) {  // a fault of the kernel is reported there: somebody killed the process
            signal(WTERMSIG(status), SIG_DFL);
            raise(WTERMSIG(status));
        }
        if (WEXITSTATUS(status)) _exit(WEXITSTATUS(status));
    }
}

void run_grid() {
    uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z, clusters = blocks / kernel.cluster;
    if (!blocks || blocks > max_blocks) crash("a grid of %lu blocks: the emulator runs 1 to %lu", blocks, max_blocks);
    auto* order = static_cast<uint32_t*>(malloc(clusters * sizeof(uint32_t)));
    if (!order) crash("the emulator has no memory for the order of the blocks");
    for (uint32_t i = 0; i < clusters; ++i) order[i] = i;
    for (uint64_t i = clusters; i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
    for (uint64_t i = 0; i < clusters; ++i) run_blocks_from(uint64_t(order[i]) * kernel.cluster);
    free(order);
}

}  // namespace

int main() {
    rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    install_handlers();
    read_launch();
    if (chosen_count) {
        run_chosen();
        return 0;
    }
    run_grid();
    for (unsigned i = 0; i < kernel.parameters; ++i)
        if (arguments[i].header.kind == 'o') write_all(arguments[i].data, arguments[i].header.bytes);
    return 0;
}
