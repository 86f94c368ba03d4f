// Reads rounds of launches from standard input, runs them over the same tensors, and writes the outputs after each
// round to standard output, finally the visits of warps. If the launch names blocks, only these run, followed by what
// each touched of pooled tensors.
#include "internal.h"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace evo_emu;

namespace {

// The wire format; run.py writes the same. Behind the header come the tensors, the chosen blocks and the pool; then,
// for each round, the contents of inputs and the calls.
struct Header {
    uint64_t seed;
    int64_t parent;
    uint32_t rounds, tensors;
    uint32_t chosen;  // blocks to run, which follow; 0: all
    uint32_t fill;    // the byte that outputs hold before the first round
    uint64_t pool_bytes;
};
struct TensorHeader {
    uint64_t bytes;
    uint32_t argument;  // its number among the arguments of the first kernel
    uint32_t element;   // bytes
    // 'i' input, with contents for each round, 'b' one that may be written too; 'x' output with contents for the first;
    // 'o' output, 's' scratch memory,
    // 'z' zeroed scratch memory; 'I', 'O', 'S' and 'Z' the same pooled
    char kind;
    char name[55];
};
struct ChosenBlock {
    uint64_t number, input_limit;  // bytes of pooled inputs at which it is given up
    uint64_t follows;              // whether it finds memory as the block before left it, and has one trace with it
};
struct CallHeader {
    uint32_t grid[3], block[3];
    uint32_t shared_bytes;
    uint32_t arguments;  // the kernel's parameters
    uint32_t constants;  // arguments behind them
    char entry[128];
};
struct ArgumentHeader {
    uint64_t bytes;
    uint32_t tensor;  // its number; of a struct how many relocations follow its value
    // 't' tensor that is read, 'o' one that may be written; with a value that follows all headers: 'i' integer,
    // 'f' floating point, 's' struct, 'm' tensor map, 'c' the contents of a __constant__ variable
    char kind;
    char name[51];
};

// The offset in a struct at which the address of a tensor, for a pointer or a tensor map, must be written.
struct Relocation {
    uint32_t at, tensor, is_map, offset;
};

constexpr unsigned max_struct = 4096;
constexpr unsigned max_arguments = 256;
constexpr unsigned max_constants = 64;
constexpr unsigned max_tensors = 256;
constexpr unsigned max_chosen = 256;

struct Tensor {
    TensorHeader header;
    char* data;
};

Tensor tensors[max_tensors];
unsigned tensor_count;
bool viewed[max_tensors];  // by a tensor map or a struct of the kernel
unsigned char fill;
ArgumentHeader arguments[max_arguments + max_constants];
alignas(128) char scalars[max_arguments][max_struct];
void* values[max_arguments];
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

// A process whose parent died before prctl took effect would outlive it.
void die_with(pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(exit_crashed);
}

// ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────────────────

bool is_output(const Tensor& t) { return strchr("oxb", t.header.kind) != nullptr; }

char* map_pooled_tensor(const TensorHeader& t, bool end_flush) {
    const PooledKind kind = t.kind == 'I'   ? PooledKind::input
                            : t.kind == 'O' ? PooledKind::output
                            : t.kind == 'S' ? PooledKind::scratch
                            : t.kind == 'B' ? PooledKind::inout
                                            : PooledKind::zeroed;
    return map_pooled(t.name, t.argument, t.bytes, kind, end_flush);
}

void map_own_tensor(Tensor& t, bool end_flush) {
    const char kind = t.header.kind;
    const RegionKind region = kind == 'i'                  ? RegionKind::input
                              : kind == 's' || kind == 'z' ? RegionKind::scratch
                                                           : RegionKind::output;
    t.data = map_tensor(t.header.name, t.header.bytes, t.header.element, region, end_flush);
    if (!strchr("ixb", kind)) memset(t.data, kind == 'z' ? 0 : kind == 's' ? 0xff : fill, t.header.bytes);
}

void read_tensors(unsigned count) {
    if (count > max_tensors) crash("%u tensors: the emulator takes %u at most", count, max_tensors);
    tensor_count = count;
    for (unsigned i = 0; i < count; ++i) read_all(&tensors[i].header, sizeof(TensorHeader));
    if (!checked) return;
    size_t whole = 0;
    for (unsigned i = 0; i < count; ++i) whole += room_of_tensor(tensors[i].header.bytes);
    reserve_tracked(whole);
}

void map_tensors() {
    for (unsigned i = 0; i < tensor_count; ++i) {
        Tensor& t = tensors[i];
        const bool end_flush = (seed + i) % 2 == 0, pooled = t.header.kind >= 'A' && t.header.kind <= 'Z';
        pooled ? void(t.data = map_pooled_tensor(t.header, end_flush)) : map_own_tensor(t, end_flush);
    }
}

void read_contents(unsigned round) {
    for (unsigned i = 0; i < tensor_count; ++i) {
        const Tensor& t = tensors[i];
        if (!strchr("ib", t.header.kind) && (t.header.kind != 'x' || round)) continue;
        protect_tensor(t.data, true);
        read_all(t.data, t.header.bytes);
    }
}

// ── kernels ─────────────────────────────────────────────────────────────────────────────────────────────────────────

void find_kernel(const char* name) {
    for (const Entry* e = all_entries; e; e = e->next) {
        if (strcmp(e->kernel.name, name) != 0) continue;
        kernel = e->kernel;
        return;
    }
    kernel.name = name;
    crash("the source has no such kernel");
}

void check_parameter(unsigned i) {
    const ArgumentHeader& given = arguments[i];
    const char kind = kernel.kinds[i];
    const unsigned size = kernel.sizes[i];
    const bool is_tensor = given.kind == 't' || given.kind == 'o';
    const char fits = given.kind == 'm' ? 's' : given.kind;
    if (kind == 'p' ? is_tensor : kind == fits && size == given.bytes) return;
    const char* takes = kind == 'p' ? "pointer" : kind == 'f' ? "float" : kind == 'i' ? "integer" : "structure";
    if (is_tensor) crash("parameter %u takes a %u-byte %s, the launch gives tensor %s", i, size, takes, given.name);
    crash("parameter %u takes a %u-byte %s, the launch gives %s, a %u-byte %s", i, size, takes, given.name,
          unsigned(given.bytes),
          given.kind == 'f'   ? "float"
          : given.kind == 'm' ? "tensor map"
          : given.kind == 's' ? "structure"
                              : "integer");
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

void set_geometry(const CallHeader& call) {
    gridDim = {call.grid[0], call.grid[1], call.grid[2]};
    blockDim = {call.block[0], call.block[1], call.block[2]};
    const uint64_t threads = uint64_t(blockDim.x) * blockDim.y * blockDim.z;
    if (!threads || threads > max_threads) crash("a block of %lu threads: it must have 1 to %u", threads, max_threads);
    launch = {gridDim, unsigned(threads), call.shared_bytes};
    check_cluster();
}

const Constant& find_constant(const ArgumentHeader& given) {
    for (const Constant* found = constants; found->name; ++found) {
        if (strcmp(found->name, given.name) != 0) continue;
        if (given.bytes > found->bytes)
            crash("__constant__ %s has %lu bytes, the launch gives %lu", given.name, found->bytes, given.bytes);
        return *found;
    }
    crash("the kernel has no __constant__ variable %s", given.name);
}

void place_map(TensorMap* map) {
    const auto number = reinterpret_cast<uintptr_t>(map->tensor);
    viewed[number] = true;
    map->tensor = tensors[number].data;
    know_tensor_map(map);
}

void read_value(unsigned i) {
    const ArgumentHeader& given = arguments[i];
    if (given.kind == 't' || given.kind == 'o') {
        values[i] = &tensors[given.tensor].data;
        return;
    }
    if (given.bytes > sizeof scalars[i]) crash("argument %s has %lu bytes", given.name, given.bytes);
    read_all(values[i] = scalars[i], given.bytes);
    if (given.kind == 'm') place_map(static_cast<TensorMap*>(values[i]));
    for (unsigned n = given.kind == 's' ? given.tensor : 0; n; --n) {
        Relocation to;
        read_all(&to, sizeof to);
        char* at = scalars[i] + to.at;
        if (to.is_map) {
            place_map(reinterpret_cast<TensorMap*>(at));
        } else {
            char* pointer = tensors[to.tensor].data + to.offset;
            viewed[to.tensor] = true;
            memcpy(at, &pointer, sizeof pointer);
        }
    }
}

// What the kernel may write, and nothing else.
void protect_tensors(unsigned count) {
    for (unsigned i = 0; i < tensor_count; ++i) {
        bool writable = viewed[i] && !strchr("iI", tensors[i].header.kind);
        for (unsigned j = 0; j < count; ++j) writable |= arguments[j].kind == 'o' && arguments[j].tensor == i;
        protect_tensor(tensors[i].data, writable);
    }
}

void read_call() {
    static CallHeader call;
    read_all(&call, sizeof call);
    find_kernel(call.entry);
    set_geometry(call);
    if (call.arguments != kernel.parameters)
        crash("the kernel takes %u parameters, the launch gives %u", kernel.parameters, call.arguments);
    if (call.arguments > max_arguments) crash("%u arguments: the emulator takes %u", call.arguments, max_arguments);
    if (call.constants > max_constants)
        crash("%u constants: the emulator takes %u at most", call.constants, max_constants);
    const unsigned count = call.arguments + call.constants;
    for (unsigned i = 0; i < count; ++i) read_all(&arguments[i], sizeof(ArgumentHeader));
    for (unsigned i = 0; i < call.arguments; ++i) check_parameter(i);
    for (unsigned i = call.arguments; i < count; ++i) find_constant(arguments[i]);
    forget_tensor_maps();
    memset(viewed, 0, sizeof viewed);
    for (unsigned i = 0; i < call.arguments; ++i) read_value(i);
    for (unsigned i = call.arguments; i < count; ++i) read_all(find_constant(arguments[i]).at, arguments[i].bytes);
    protect_tensors(call.arguments);
}

// ── chosen blocks ───────────────────────────────────────────────────────────────────────────────────────────────────

void read_chosen(const Header& header) {
    if (header.chosen > max_chosen) crash("%u chosen blocks: the emulator runs %u at most", header.chosen, max_chosen);
    chosen_count = header.chosen;
    read_all(chosen, chosen_count * sizeof *chosen);
    if (!header.pool_bytes) return;
    auto* pool = static_cast<char*>(malloc(header.pool_bytes));
    if (!pool) crash("the emulator has no memory for the pool");
    read_all(pool, header.pool_bytes);
    set_pool(pool, header.pool_bytes / pool_page);
}

// One block after the other. If a block is aborted the process ends, and its parent starts another one for the rest.
void run_chosen() {
    for (unsigned i = 0; i < chosen_count; ++i) {
        if (!chosen[i].follows) begin_chosen_block(chosen[i].number, chosen[i].input_limit);
        run_blocks_from(chosen[i].number / kernel.cluster * kernel.cluster);
        if (i + 1 == chosen_count || !chosen[i + 1].follows) write_touched(false);
    }
}

void run_call() {
    read_call();
    begin_kernels_memory();
    begin_kernel(values);
    if (checked) begin_tracking();
    chosen_count ? run_chosen() : run_grid();
}

void run_round(unsigned round) {
    round_of_launches = round;
    count_visits(!chosen_count && round == 0);
    uint32_t calls;
    read_all(&calls, sizeof calls);
    read_contents(round);
    for (; calls; --calls) run_call();
    for (unsigned i = 0; i < tensor_count; ++i)
        if (is_output(tensors[i]) && !chosen_count) write_all(tensors[i].data, tensors[i].header.bytes);
}

}  // namespace

namespace evo_emu {

const Entry* all_entries;
const DeviceVariable* all_device_variables;

Entry::Entry(const Kernel& described) : kernel(described), next(all_entries) { all_entries = this; }

DeviceVariable::DeviceVariable(const char* name, void* at, unsigned long bytes)
    : name(name), at(at), bytes(bytes), next(all_device_variables) {
    all_device_variables = this;
}

void write_all(const void* from, size_t bytes) {
    for (auto* p = static_cast<const char*>(from); bytes;) {
        ssize_t put = write(STDOUT_FILENO, p, bytes);
        if (put <= 0) crash("the results cannot be written");
        p += put;
        bytes -= size_t(put);
    }
}

}  // namespace evo_emu

int main() {
    rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    install_handlers();
    Header header;
    read_all(&header, sizeof header);
    die_with(pid_t(header.parent));
    seed = header.seed;
    fill = (unsigned char)header.fill;
    read_tensors(header.tensors);
    read_chosen(header);
    map_tensors();
    if (checked)
        for (const DeviceVariable* v = all_device_variables; v; v = v->next)
            track(static_cast<char*>(v->at), v->bytes, 4, v->name);
    for (unsigned round = 0; round < header.rounds; ++round) run_round(round);
    if (!chosen_count) write_visits();
    _exit(0);  // nothing is to be taken down
}
