// A stand-in for libcuda.so.1 that needs no GPU: the public driver functions that evoengine and its exports call.
//
// Device memory is host memory. A launch is checked against the limits of an H100 and handed to a hook, which computes
// its result and says how long it takes. Time is simulated. It shows what the host's code does, never how fast a kernel
// is or how a GPU behaves. device.py says how it is controlled.

#include <sys/mman.h>

#include <cmath>
#include <unistd.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define DRIVER(name) extern "C" __attribute__((visibility("default"))) int name

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY_FOR_GPU = 209, INVALID_HANDLE = 400, NOT_FOUND = 500,
    NOT_READY = 600, ILLEGAL_ADDRESS = 700, LAUNCH_OUT_OF_RESOURCES = 701, MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, INVALID_CLUSTER_SIZE = 912,
};

struct Words { const char *name, *text; };
static const std::map<int, Words> WORDS = {
    {SUCCESS, {"CUDA_SUCCESS", "no error"}},
    {INVALID_VALUE, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {NOT_INITIALIZED, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
    {NO_DEVICE, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
    {INVALID_DEVICE, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
    {INVALID_IMAGE, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {INVALID_CONTEXT, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
    {NO_BINARY_FOR_GPU, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"}},
    {INVALID_HANDLE, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
    {NOT_FOUND, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {NOT_READY, {"CUDA_ERROR_NOT_READY", "device not ready"}},
    {ILLEGAL_ADDRESS, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {LAUNCH_OUT_OF_RESOURCES, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
    {MISALIGNED_ADDRESS, {"CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"}},
    {LAUNCH_FAILED, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
    {NOT_SUPPORTED, {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
    {CAPTURE_UNSUPPORTED,
     {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"}},
    {CAPTURE_INVALIDATED,
     {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"}},
    {INVALID_CLUSTER_SIZE, {"CUDA_ERROR_INVALID_CLUSTER_SIZE", "cluster misconfiguration"}},
};

static const char* setting(const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value ? value : otherwise;
}
static double number(const char* name, double otherwise) {
    const char* value = getenv(name);
    return value ? atof(value) : otherwise;
}

// ---- state: one device, one timeline --------------------------------------------------------------------------------

static const int CAPABILITY = 90, MAX_THREADS = 1024, MAX_GRID_YZ = 65535, REGISTERS_PER_BLOCK = 65536;
static const int SHARED_DEFAULT = 49152, SHARED_OPT_IN = 232448, SHARED_RESERVED = 1024;
static const size_t TOTAL_BYTES = size_t(80) << 30;
static const double BYTES_PER_US = 3e6, NEVER = std::numeric_limits<double>::infinity();

static std::recursive_mutex mutex;
static bool initialised;
static int sticky;  // once a kernel failed, every call gives its error
static double host_now, device_free;  // microseconds of simulated time
static long launches;
static std::map<std::string, long> calls;
static std::map<uint64_t, size_t> allocations;
static size_t allocated;
static std::map<std::string, long> live;  // objects that were made and not yet destroyed, by kind
static int context_object;
static thread_local void* current_context;

// FAKE_CUDA_FAIL=function:code:count,… : the first `count` calls of the function fail with the code.
static int injected(const std::string& function) {
    long nth = ++calls[function];
    std::string all = setting("FAKE_CUDA_FAIL", "");
    for (size_t at = 0; at < all.size();) {
        std::string one = all.substr(at, all.find(',', at) - at);
        at += one.size() + 1;
        char name[64];
        int code;
        long count;
        bool whole = sscanf(one.c_str(), "%63[^:]:%d:%ld", name, &code, &count) == 3;
        if (whole && function == name && nth <= count) return code;
    }
    return 0;
}

// What every call that needs a context begins with.
static int entered(const char* function, double host_us = 0.2) {
    host_now += host_us;
    if (int code = injected(function)) return code;
    if (!initialised) return NOT_INITIALIZED;
    if (!current_context) return INVALID_CONTEXT;
    return sticky;
}
#define LOCK std::lock_guard<std::recursive_mutex> guard(mutex)
#define ENTER(...) LOCK; if (int code = entered(__func__ __VA_OPT__(, ) __VA_ARGS__)) return code

static void spend(double us) { device_free = std::fmax(device_free, host_now) + us; }

// FAKE_CUDA_THROTTLE=from:to:factor : work that begins in this span of simulated µs takes `factor` times as long.
static double throttle_factor(double at) {
    double from, to, factor;
    if (sscanf(setting("FAKE_CUDA_THROTTLE", ""), "%lf:%lf:%lf", &from, &to, &factor) != 3) return 1;
    return at >= from && at < to ? factor : 1;
}

// ---- driver, device, context ----------------------------------------------------------------------------------------

static bool visible() {
    const char* named = getenv("CUDA_VISIBLE_DEVICES");
    return !named || *named;
}
static bool is_mig() { return number("FAKE_CUDA_MIG", 0) != 0; }

DRIVER(cuInit)(unsigned) {
    LOCK;
    if (int code = injected(__func__)) return code;
    if (!visible()) return NO_DEVICE;
    initialised = true;
    return SUCCESS;
}
// NVRTC asks for one of the driver's private tables; the stand-in has none of them, and says so.
DRIVER(cuGetExportTable)(const void** table, const void*) { *table = nullptr; return NOT_FOUND; }
DRIVER(cuDriverGetVersion)(int* version) { *version = int(number("FAKE_CUDA_DRIVER", 13000)); return SUCCESS; }
DRIVER(cuGetErrorName)(int code, const char** name) {
    auto found = WORDS.find(code);
    *name = found == WORDS.end() ? nullptr : found->second.name;
    return *name ? SUCCESS : INVALID_VALUE;
}
DRIVER(cuGetErrorString)(int code, const char** text) {
    auto found = WORDS.find(code);
    *text = found == WORDS.end() ? nullptr : found->second.text;
    return *text ? SUCCESS : INVALID_VALUE;
}
DRIVER(cuDeviceGetCount)(int* count) { *count = visible(); return initialised ? SUCCESS : NOT_INITIALIZED; }
DRIVER(cuDeviceGet)(int* device, int index) { *device = index; return index ? INVALID_DEVICE : SUCCESS; }
DRIVER(cuDeviceGetName)(char* name, int size, int) {
    snprintf(name, size, is_mig() ? "stand-in driver without a GPU MIG 1g.10gb" : "stand-in driver without a GPU");
    return SUCCESS;
}
static int uuid(unsigned char* to, unsigned char first) {
    for (int i = 0; i < 16; ++i) to[i] = i ? i : first;
    return SUCCESS;
}
DRIVER(cuDeviceGetUuid)(unsigned char* to, int) { return uuid(to, 0); }
DRIVER(cuDeviceGetUuid_v2)(unsigned char* to, int) { return uuid(to, is_mig() ? 0xff : 0); }
static size_t total_bytes() { return size_t(number("FAKE_CUDA_TOTAL_BYTES", TOTAL_BYTES)); }
DRIVER(cuDeviceTotalMem_v2)(size_t* bytes, int) { *bytes = total_bytes(); return SUCCESS; }
DRIVER(cuDeviceGetAttribute)(int* value, int attribute, int) {
    static const std::map<int, int> attributes = {
        {1, MAX_THREADS}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, MAX_GRID_YZ}, {7, MAX_GRID_YZ},
        {8, SHARED_DEFAULT}, {10, 32}, {12, REGISTERS_PER_BLOCK}, {16, 132}, {38, 50 << 20}, {39, 2048},
        {75, CAPABILITY / 10}, {76, CAPABILITY % 10}, {81, 233472}, {82, 65536}, {97, SHARED_OPT_IN}, {106, 32},
        {111, SHARED_RESERVED}, {120, 1},
    };
    auto found = attributes.find(attribute);
    *value = found == attributes.end() ? 0 : found->second;
    return found == attributes.end() ? INVALID_VALUE : SUCCESS;
}
DRIVER(cuDevicePrimaryCtxRetain)(void** context, int) {
    LOCK;
    if (int code = injected(__func__)) return code;
    *context = &context_object;
    return initialised ? SUCCESS : NOT_INITIALIZED;
}
DRIVER(cuCtxSetCurrent)(void* context) { current_context = context; return initialised ? SUCCESS : NOT_INITIALIZED; }
DRIVER(cuCtxGetCurrent)(void** context) { *context = current_context; return initialised ? SUCCESS : NOT_INITIALIZED; }
DRIVER(cuCtxGetDevice)(int* device) { *device = 0; return current_context ? SUCCESS : INVALID_CONTEXT; }
DRIVER(cuCtxResetPersistingL2Cache)() { ENTER(); return SUCCESS; }
DRIVER(cuCtxSynchronize)() {
    ENTER();
    if (device_free != NEVER) host_now = std::fmax(host_now, device_free);
    return sticky;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

static size_t free_bytes() {
    double others = number("FAKE_CUDA_OTHERS_BYTES", 0);
    return size_t(std::fmax(double(total_bytes()) - others - double(allocated), 0));
}
DRIVER(cuMemGetInfo_v2)(size_t* free, size_t* total) {
    ENTER();
    *free = free_bytes();
    *total = total_bytes();
    return SUCCESS;
}
DRIVER(cuMemAlloc_v2)(uint64_t* pointer, size_t size) {
    ENTER();
    if (!size) return INVALID_VALUE;
    if (size > free_bytes()) return OUT_OF_MEMORY;
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    *pointer = uint64_t(memory);
    allocations[*pointer] = size;
    allocated += size;
    return SUCCESS;
}
DRIVER(cuMemFree_v2)(uint64_t pointer) {
    ENTER();
    auto found = allocations.find(pointer);
    if (found == allocations.end()) return INVALID_VALUE;
    allocated -= found->second;
    munmap((void*)pointer, found->second);
    allocations.erase(found);
    return SUCCESS;
}
// The allocation that holds an address.
static std::map<uint64_t, size_t>::iterator allocation_of(uint64_t address) {
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return allocations.end();
    auto found = std::prev(next);
    return address < found->first + found->second ? found : allocations.end();
}
static bool holds(uint64_t address, size_t size) {
    auto found = allocation_of(address);
    return found != allocations.end() && address + size <= found->first + found->second;
}

// ---- streams, graphs, events ----------------------------------------------------------------------------------------

typedef std::function<void()> Node;
struct Graph { std::vector<Node> nodes; };
struct Stream { std::unique_ptr<Graph> capturing; };
struct Event { double at = -1; };
static Stream default_stream;

static Stream* stream_of(void* handle) { return uintptr_t(handle) < 16 ? &default_stream : (Stream*)handle; }
static int enqueue(void* stream, Node node) {
    if (auto& graph = stream_of(stream)->capturing) graph->nodes.push_back(std::move(node));
    else node();
    return SUCCESS;
}

DRIVER(cuMemsetD8Async)(uint64_t to, unsigned char value, size_t size, void* stream) {
    ENTER();
    return enqueue(stream, [=] {
        if (!holds(to, size)) { sticky = ILLEGAL_ADDRESS; return; }
        spend(size / BYTES_PER_US);
        bool whole = allocations.count(to) && allocations[to] == size;  // its pages come back as zeros
        if (value || !whole || madvise((void*)to, size, MADV_DONTNEED)) memset((void*)to, value, size);
    });
}
DRIVER(cuStreamCreate)(void** stream, unsigned) { ENTER(); *stream = new Stream; ++live["stream"]; return SUCCESS; }
DRIVER(cuStreamDestroy_v2)(void* stream) { LOCK; delete (Stream*)stream; --live["stream"]; return sticky; }
DRIVER(cuStreamBeginCapture_v2)(void* stream, int) {
    ENTER();
    if (stream_of(stream) == &default_stream) return CAPTURE_UNSUPPORTED;
    stream_of(stream)->capturing = std::make_unique<Graph>();
    return SUCCESS;
}
DRIVER(cuStreamEndCapture)(void* stream, void** graph) {
    ENTER();
    *graph = stream_of(stream)->capturing.release();
    ++live["graph"];
    return *graph ? SUCCESS : CAPTURE_INVALIDATED;
}
DRIVER(cuGraphInstantiateWithFlags)(void** executable, void* graph, uint64_t) {
    ENTER();
    *executable = new Graph(*(Graph*)graph);
    ++live["executable graph"];
    return SUCCESS;
}
DRIVER(cuGraphDestroy)(void* graph) { LOCK; delete (Graph*)graph; --live["graph"]; return sticky; }
DRIVER(cuGraphExecDestroy)(void* graph) { LOCK; delete (Graph*)graph; --live["executable graph"]; return sticky; }
DRIVER(cuGraphLaunch)(void* graph, void*) {
    ENTER(number("FAKE_CUDA_LAUNCH_US", 3));
    for (auto& node : ((Graph*)graph)->nodes) node();
    return SUCCESS;
}
DRIVER(cuEventCreate)(void** event, unsigned) { ENTER(); *event = new Event; ++live["event"]; return SUCCESS; }
DRIVER(cuEventDestroy_v2)(void* event) { LOCK; delete (Event*)event; --live["event"]; return sticky; }
DRIVER(cuEventRecord)(void* event, void* stream) {
    ENTER();
    if (stream_of(stream)->capturing) return NOT_SUPPORTED;
    ((Event*)event)->at = std::fmax(device_free, host_now);
    return SUCCESS;
}
// Whoever finds an event not done looks again later: by then it is, unless it never will be.
DRIVER(cuEventQuery)(void* event) {
    ENTER();
    double at = ((Event*)event)->at;
    if (at <= host_now) return SUCCESS;
    if (at != NEVER) host_now = at;
    return NOT_READY;
}
DRIVER(cuEventSynchronize)(void* event) {
    ENTER();
    if (((Event*)event)->at != NEVER) host_now = std::fmax(host_now, ((Event*)event)->at);
    return sticky;
}
static double tick(double at) {
    double width = number("FAKE_CUDA_TICK_US", 0.5);
    return width > 0 ? std::floor(at / width) * width : at;
}
DRIVER(cuEventElapsedTime)(float* milliseconds, void* start, void* end) {
    ENTER();
    double from = ((Event*)start)->at, to = ((Event*)end)->at;
    if (from < 0 || to < 0) return INVALID_HANDLE;
    if (from > host_now || to > host_now) return NOT_READY;
    *milliseconds = float((tick(to) - tick(from)) / 1e3);
    return SUCCESS;
}

// ---- modules: the cubin's own parameter layout, registers and limits ------------------------------------------------

struct Parameter { uint16_t offset, size; };
struct Function {
    std::string name;
    std::vector<Parameter> parameters;
    unsigned registers = 0, static_shared = 0, max_threads = MAX_THREADS, cluster = 1;
    int dynamic_allowed = SHARED_DEFAULT;
    std::weak_ptr<struct Module> module;
};
struct Module {
    std::string image;
    std::map<std::string, Function> functions;
    std::map<std::string, std::vector<char>> constants;  // __constant__ variables: name, contents
};
static std::map<void*, std::shared_ptr<Module>> modules;

template <class T> static T read(const std::string& from, size_t at) {
    T value{};
    if (at + sizeof value <= from.size()) memcpy(&value, from.data() + at, sizeof value);
    return value;
}
struct Section { std::string name; uint64_t offset, size; unsigned info; };
static std::vector<Section> sections_of(const std::string& image) {
    uint64_t table = read<uint64_t>(image, 40);
    unsigned count = read<uint16_t>(image, 60), names = read<uint16_t>(image, 62);
    uint64_t strings = read<uint64_t>(image, table + 64 * names + 24);
    std::vector<Section> found;
    for (unsigned i = 0; i < count; ++i) {
        uint64_t header = table + 64 * i, name = strings + read<uint32_t>(image, header);
        if (name >= image.size()) return {};
        found.push_back({image.c_str() + name, read<uint64_t>(image, header + 24), read<uint64_t>(image, header + 32),
                         read<uint32_t>(image, header + 44)});
    }
    return found;
}
// The attributes (EIATTR_…) of a .nv.info section; those of format 4 carry a payload.
static void each_attribute(const std::string& info, const std::function<void(unsigned, const std::string&)>& with) {
    for (size_t at = 0; at + 4 <= info.size();) {
        unsigned format = (unsigned char)info[at], attribute = (unsigned char)info[at + 1];
        size_t size = format == 4 ? read<uint16_t>(info, at + 2) : 0;
        with(attribute, info.substr(at + 4, size));
        at += 4 + size;
    }
}
static void read_limits(const std::string& info, Function& f) {
    each_attribute(info, [&](unsigned attribute, const std::string& data) {
        auto product = [&] { return read<uint32_t>(data, 0) * read<uint32_t>(data, 4) * read<uint32_t>(data, 8); };
        if (attribute == 0x17) {  // KPARAM_INFO: u32 index, u16 ordinal, u16 offset, u32 flags, of which 14 are the size
            unsigned ordinal = read<uint16_t>(data, 4);
            if (f.parameters.size() <= ordinal) f.parameters.resize(ordinal + 1);
            f.parameters[ordinal] = {read<uint16_t>(data, 6), uint16_t(read<uint32_t>(data, 8) >> 18)};
        }
        if (attribute == 0x05) f.max_threads = product();  // MAX_THREADS
        if (attribute == 0x3d) f.cluster = product();  // CTA_PER_CLUSTER
    });
}
// __constant__ variables are the symbols of kind OBJECT in .nv.constant3, whose contents begin as the section's.
static void read_constants(const std::vector<Section>& sections, Module& module) {
    const std::string& image = module.image;
    const Section *symbols = nullptr, *strings = nullptr;
    for (auto& s : sections) {
        if (s.name == ".symtab") symbols = &s;
        if (s.name == ".strtab") strings = &s;
    }
    if (!symbols || !strings) return;
    for (uint64_t at = symbols->offset; at < symbols->offset + symbols->size; at += 24) {
        unsigned section = read<uint16_t>(image, at + 6);
        bool object = (read<uint8_t>(image, at + 4) & 15) == 1;
        if (!object || section >= sections.size() || sections[section].name != ".nv.constant3") continue;
        uint64_t first = sections[section].offset + read<uint64_t>(image, at + 8);
        const char* contents = image.data() + first;
        const char* name = image.c_str() + strings->offset + read<uint32_t>(image, at);
        module.constants[name].assign(contents, contents + read<uint64_t>(image, at + 16));
    }
}
static int parse(const std::shared_ptr<Module>& module) {
    const std::string& image = module->image;
    unsigned abi = (unsigned char)image[8], flags = read<uint32_t>(image, 48);
    if (abi >= 8 && number("FAKE_CUDA_DRIVER", 13000) < 13000) return INVALID_IMAGE;  // CUDA 13's format
    if (int(abi >= 8 ? (flags >> 8) & 0xff : flags & 0xff) != CAPABILITY) return NO_BINARY_FOR_GPU;
    auto sections = sections_of(image);
    std::map<unsigned, unsigned> registers;  // by symbol
    for (auto& s : sections)
        if (s.name.rfind(".nv.info.", 0) == 0) {
            Function& f = module->functions[s.name.substr(9)];
            f.name = s.name.substr(9);
            f.module = module;
            read_limits(image.substr(s.offset, s.size), f);
        } else if (s.name == ".nv.info") {
            each_attribute(image.substr(s.offset, s.size), [&](unsigned attribute, const std::string& data) {
                if (attribute == 0x2f) registers[read<uint32_t>(data, 0)] = read<uint32_t>(data, 4);  // REGCOUNT
            });
        }
    for (auto& [name, f] : module->functions) {
        for (auto& s : sections) {
            if (s.name == ".text." + name) f.registers = registers[s.info & 0xffffff];
            if (s.name == ".nv.shared." + name) f.static_shared = unsigned(s.size) - SHARED_RESERVED;
        }
        f.dynamic_allowed = SHARED_DEFAULT - int(f.static_shared);
    }
    read_constants(sections, *module);
    return module->functions.empty() ? INVALID_IMAGE : SUCCESS;
}
static size_t image_bytes(const char* image) {
    std::string header(image, 64);
    uint64_t programs = read<uint64_t>(header, 32) + read<uint16_t>(header, 54) * read<uint16_t>(header, 56);
    uint64_t sections = read<uint64_t>(header, 40) + read<uint16_t>(header, 58) * read<uint16_t>(header, 60);
    return std::max(programs, sections);
}
DRIVER(cuModuleLoadData)(void** handle, const char* image) {
    ENTER(50);
    if (strncmp(image, "\x7f" "ELF", 4)) return INVALID_IMAGE;
    auto module = std::make_shared<Module>();
    module->image.assign(image, image_bytes(image));
    if (int code = parse(module)) return code;
    modules[*handle = module.get()] = module;
    ++live["module"];
    return SUCCESS;
}
// Waits for the module's kernels, as was seen on an H100 with a driver for CUDA 13.0.
DRIVER(cuModuleUnload)(void* handle) {
    std::unique_lock<std::recursive_mutex> guard(mutex);
    while (device_free == NEVER) {
        guard.unlock();
        usleep(1000);
        guard.lock();
    }
    live["module"] -= modules.erase(handle);
    return sticky;
}
DRIVER(cuModuleGetFunction)(Function** function, void* handle, const char* name) {
    ENTER();
    if (!modules.count(handle)) return INVALID_HANDLE;
    auto found = modules[handle]->functions.find(name);
    if (found == modules[handle]->functions.end()) return NOT_FOUND;
    *function = &found->second;
    return SUCCESS;
}
DRIVER(cuModuleGetGlobal_v2)(uint64_t* at, size_t* size, void* handle, const char* name) {
    ENTER();
    if (!modules.count(handle)) return INVALID_HANDLE;
    auto found = modules[handle]->constants.find(name);
    if (found == modules[handle]->constants.end()) return NOT_FOUND;
    *at = uint64_t(found->second.data());
    *size = found->second.size();
    return SUCCESS;
}
static bool in_a_constant(uint64_t address, size_t size) {
    for (auto& [handle, module] : modules)
        for (auto& [name, contents] : module->constants) {
            uint64_t first = uint64_t(contents.data());
            if (first <= address && address + size <= first + contents.size()) return true;
        }
    return false;
}
DRIVER(cuMemcpyHtoD_v2)(uint64_t to, const void* from, size_t size) {
    ENTER(size / BYTES_PER_US);
    if (!holds(to, size) && !in_a_constant(to, size)) return INVALID_VALUE;
    memcpy((void*)to, from, size);
    return SUCCESS;
}
DRIVER(cuProfilerStart)() { ENTER(); return SUCCESS; }
DRIVER(cuProfilerStop)() { ENTER(); return SUCCESS; }
DRIVER(cuMemcpyDtoH_v2)(void* to, uint64_t from, size_t size) {
    ENTER(size / BYTES_PER_US);
    if (!holds(from, size)) return INVALID_VALUE;
    memcpy(to, (const void*)from, size);
    return SUCCESS;
}
DRIVER(cuMemcpyDtoD_v2)(uint64_t to, uint64_t from, size_t size) {
    ENTER(size / BYTES_PER_US);
    if (!holds(to, size) || !holds(from, size)) return INVALID_VALUE;
    memmove((void*)to, (const void*)from, size);
    return SUCCESS;
}
DRIVER(cuFuncSetAttribute)(Function* f, int attribute, int value) {
    ENTER();
    if (attribute != 8 || value < 0 || value + int(f->static_shared) > SHARED_OPT_IN) return INVALID_VALUE;
    f->dynamic_allowed = value;
    return SUCCESS;
}

// ---- launches -------------------------------------------------------------------------------------------------------

struct Launch {
    const char* entry;
    const char* image;
    size_t image_bytes;
    unsigned grid[3], block[3], shared_bytes;
    int count;
    const char* const* parameters;
    const uint16_t* sizes;
    int constants;
    const char* const *constant_names, *const *constant_contents;
    const size_t* constant_sizes;
};
// Computes the result of a launch and tells its microseconds: 0, or the CUresult that it leaves behind, or HANGS.
typedef int (*Hook)(const Launch*, double* us);
static Hook hook;
static const int HANGS = -1;

// FAKE_CUDA_BREAK=n:code : the n-th kernel leaves this error behind (-1: it never ends).
static int broken(long nth) {
    long at;
    int code;
    return sscanf(setting("FAKE_CUDA_BREAK", ""), "%ld:%d", &at, &code) == 2 && at == nth ? code : 0;
}
typedef std::vector<std::string> Values;
static void execute(const std::weak_ptr<Module>& module, const Function* f, Launch launch, const Values& values) {
    auto loaded = module.lock();
    if (!loaded) { sticky = LAUNCH_FAILED; return; }  // it was unloaded: its code is no longer there
    std::vector<const char*> parameters;
    std::vector<uint16_t> sizes;
    std::vector<const char*> names, contents;
    std::vector<size_t> lengths;
    for (auto& [name, data] : loaded->constants) {
        names.push_back(name.c_str());
        contents.push_back(data.data());
        lengths.push_back(data.size());
    }
    for (auto& value : values) { parameters.push_back(value.data()); sizes.push_back(uint16_t(value.size())); }
    launch.entry = f->name.c_str();
    launch.image = loaded->image.data();
    launch.image_bytes = loaded->image.size();
    launch.count = int(values.size());
    launch.parameters = parameters.data();
    launch.sizes = sizes.data();
    launch.constants = int(names.size());
    launch.constant_names = names.data();
    launch.constant_contents = contents.data();
    launch.constant_sizes = lengths.data();
    double us = 1;
    int code = broken(++launches);
    if (!code && !sticky) code = hook ? hook(&launch, &us) : SUCCESS;
    double start = std::fmax(device_free, host_now);
    if (code == HANGS) device_free = NEVER;
    else if (code) sticky = code;
    else spend(us * throttle_factor(start));
}
static uint64_t block_registers(const Function* f, uint64_t threads) {
    return (threads + 31) / 32 * ((f->registers * 32 + 255) / 256 * 256);
}
static int check_limits(const Function* f, const unsigned* grid, const unsigned* block, unsigned shared) {
    uint64_t threads = uint64_t(block[0]) * block[1] * block[2], blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    if (!threads || !blocks || grid[1] > MAX_GRID_YZ || grid[2] > MAX_GRID_YZ) return INVALID_VALUE;
    if (threads > f->max_threads || block[2] > 64 || int64_t(shared) > f->dynamic_allowed) return INVALID_VALUE;
    if (grid[0] % f->cluster) return INVALID_CLUSTER_SIZE;
    return block_registers(f, threads) > REGISTERS_PER_BLOCK ? LAUNCH_OUT_OF_RESOURCES : SUCCESS;
}
// By registers, threads and shared memory alone (CUDA occupancy calculator).
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, Function* f, int threads, size_t shared) {
    ENTER();
    uint64_t by_registers = REGISTERS_PER_BLOCK / std::max(block_registers(f, threads), uint64_t(1));
    uint64_t by_shared = (SHARED_OPT_IN + SHARED_RESERVED) / (f->static_shared + shared + SHARED_RESERVED);
    *blocks = int(std::min({by_registers, by_shared, uint64_t(2048 / threads)}));
    return SUCCESS;
}
DRIVER(cuLaunchKernel)(
    Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    void* stream, void** parameters, void** extra
) {
    ENTER(number("FAKE_CUDA_LAUNCH_US", 3));
    Launch launch = {"", "", 0, {gx, gy, gz}, {bx, by, bz}, shared};
    if (extra || (!parameters && !f->parameters.empty())) return INVALID_VALUE;
    if (int code = check_limits(f, launch.grid, launch.block, shared)) return code;
    Values values;
    for (auto& p : f->parameters) values.emplace_back((const char*)parameters[values.size()], p.size);
    return enqueue(stream, [module = f->module, f, launch, values] { execute(module, f, launch, values); });
}

// ---- tensor maps: the fields, laid out as device.py reads them ------------------------------------------------------

struct TensorMap {
    uint64_t address, strides[4];
    uint32_t dims[5];
    uint16_t box[5];
    uint8_t type, rank, swizzle;
    uint8_t rest[128 - 40 - 20 - 10 - 3];
};
static_assert(sizeof(TensorMap) == 128);

DRIVER(cuTensorMapEncodeTiled)(
    TensorMap* to, int type, uint32_t rank, uint64_t address, const uint64_t* dims, const uint64_t* strides,
    const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill
) {
    LOCK;
    if (int code = injected(__func__)) return code;
    if (uintptr_t(to) % 64 || address % 16 || rank < 1 || rank > 5 || interleave || fill) return INVALID_VALUE;
    if (swizzle < 0 || swizzle > 3 || promotion < 0 || promotion > 3) return INVALID_VALUE;
    TensorMap map{};
    map.address = address;
    map.type = uint8_t(type);
    map.rank = uint8_t(rank);
    map.swizzle = uint8_t(swizzle);
    for (unsigned i = 0; i < rank; ++i) {
        if (!dims[i] || dims[i] > 1ull << 32 || !box[i] || box[i] > 256 || steps[i] != 1) return INVALID_VALUE;
        map.dims[i] = uint32_t(dims[i]);
        map.box[i] = uint16_t(box[i]);
    }
    for (unsigned i = 0; i + 1 < rank; ++i) {
        if (strides[i] % 16 || strides[i] >= 1ull << 40) return INVALID_VALUE;
        map.strides[i] = strides[i];
    }
    memcpy(to, &map, sizeof map);
    return SUCCESS;
}

// ---- for tests alone ------------------------------------------------------------------------------------------------

DRIVER(stand_in_hook)(Hook installed) { LOCK; hook = installed; return SUCCESS; }
DRIVER(stand_in_allocation)(uint64_t address, uint64_t* start, size_t* size) {
    LOCK;
    auto found = allocation_of(address);
    if (found == allocations.end()) return ILLEGAL_ADDRESS;
    *start = found->first;
    *size = found->second;
    return SUCCESS;
}
// Work that is no kernel of ours, as a library's: `compute` runs when its turn comes and gives its microseconds.
typedef double (*Compute)();
DRIVER(stand_in_work)(void* stream, Compute compute) {
    ENTER();
    return enqueue(stream, [=] {
        double us = compute();
        spend(us * throttle_factor(std::fmax(device_free, host_now)));
    });
}
// As in a new process: no error is sticky, no kernel hangs, no call is counted. What is allocated stays.
DRIVER(stand_in_reset)() {
    LOCK;
    sticky = 0;
    device_free = host_now;
    calls.clear();
    launches = 0;
    return SUCCESS;
}
// Simulated time passes on the host, as in code that takes long between two calls.
DRIVER(stand_in_advance)(double us) { LOCK; host_now += us; return SUCCESS; }
extern "C" __attribute__((visibility("default"))) double stand_in_now() { LOCK; return host_now; }
extern "C" __attribute__((visibility("default"))) double stand_in_throttle() { LOCK; return throttle_factor(host_now); }
extern "C" __attribute__((visibility("default"))) long stand_in_live(const char* kind) {
    LOCK;
    if (!strcmp(kind, "bytes")) return long(allocated);
    if (!strcmp(kind, "launches")) return launches;
    return live[kind];
}
