// A driver of our own for the exported loader: it writes down what it is asked, and two GPUs of it differ where a test
// says so. It launches nothing. Only functions that the loader calls, as cuda.h declares them.
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { GPUS = 2, ATTRIBUTES = 128, LAUNCHES = 4096 };
static struct context { int gpu; } contexts[GPUS] = {{0}, {1}}, foreign = {-1};
static _Thread_local struct context* current;
static struct function { int gpu, second; char image[16]; } functions[16], seconds[16];

// What a test may set.
int attributes[GPUS][ATTRIBUTES], resident[GPUS] = {1, 1}, version = 13050, load_code, encode_code;
int scalars = 5, maps, microseconds;  // of parameters after the four pointers; that a launch takes to read them
int sizes[32];          // bytes of each parameter of a kernel that is not attention, up to the first 0
char entry[32] = "attention";
int second_sizes[32];   // the same of the kernel behind it
char second[32];        // and its entry
// What a test may read.
int calls, encoded, loaded;
int launches;
struct launch {
    uint64_t pointers[4], stream;
    int32_t scalars[6], grid[3], block[3], shared, gpu;
    char image[16], maps[4][128];
} seen[LAUNCHES];
unsigned char given[LAUNCHES][512];  // all parameters of such a kernel's launches, one behind another
int shared_opted_in[GPUS];

void enter_foreign_context(void) { current = &foreign; }
int current_gpu(void) { return current ? current->gpu : -2; }

int cuCtxGetCurrent(void** context) { return ++calls, *context = current, 0; }
int cuCtxSetCurrent(void* context) { return ++calls, current = context, 0; }
int cuDeviceGet(int* device, int index) { return ++calls, *device = 70 + index, index < GPUS ? 0 : 101; }
int cuDeviceGetAttribute(int* value, int which, int device) { return ++calls, *value = attributes[device - 70][which], 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return ++calls, *context = &contexts[device - 70], 0; }
int cuDriverGetVersion(int* found) { return ++calls, *found = version, 0; }
int cuGetErrorString(int code, const char** text) { return *text = code == 201 ? "invalid device context" : "refused", 0; }
int cuModuleLoadData(void** module, const char* image) {
    ++calls;
    if (load_code) return load_code;
    if (!current || current->gpu < 0) return 201;
    struct function* f = &functions[__atomic_fetch_add(&loaded, 1, __ATOMIC_SEQ_CST) % 16];
    f->gpu = current->gpu, strncpy(f->image, image, 15);
    return *module = f, 0;
}
int cuModuleGetFunction(void** f, void* module, const char* name) {
    struct function* own = module;
    if (!strcmp(name, entry)) return ++calls, *f = own, 0;
    struct function* other = &seconds[own - functions];
    *other = *own, other->second = 1;
    return ++calls, *f = other, strcmp(name, second) ? 500 : 0;
}
char constant[64];  // a module's one __constant__ variable, w
int cuModuleGetGlobal_v2(size_t* address, size_t* bytes, void* module, const char* name) {
    return ++calls, *address = (size_t)constant, *bytes = sizeof constant, strcmp(name, "w") ? 500 : 0;
}
int cuMemcpyDtoDAsync_v2(size_t to, size_t from, size_t bytes, void* stream) {
    return ++calls, memcpy((void*)to, (void*)from, bytes), 0;
}
int cuMemsetD8Async(size_t to, unsigned char value, size_t bytes, void* stream) {
    return ++calls, memset((void*)to, value, bytes), 0;
}
int cuFuncSetAttribute(struct function* f, int attribute, int value) {
    return ++calls, shared_opted_in[f->gpu] = value, attribute == 8 && current->gpu == f->gpu ? 0 : 1;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, struct function* f, int threads, size_t shared) {
    return ++calls, *blocks = resident[f->gpu], threads == 384 && shared == 100000 ? 0 : 1;
}
int cuTensorMapEncodeTiled(char* to, int type, uint32_t rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int l2, int fill) {
    ++calls, __atomic_fetch_add(&encoded, 1, __ATOMIC_SEQ_CST);
    if (encode_code || (uintptr_t)to % 128 || rank < 2 || rank > 3) return encode_code ? encode_code : 1;
    int deep = rank == 3;
    uint64_t found[] = {(uint64_t)address, dims[0], dims[1], deep ? dims[2] : 1, strides[0], deep ? strides[1] : 0,
                        box[0], box[1], deep ? box[2] : 1, steps[0], steps[1], deep ? steps[2] : 1,
                        type, interleave, swizzle, l2 << 8 | fill};
    return memcpy(to, found, 128), 0;
}
int cuLaunchKernel(struct function* f, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, void* stream, void** parameters, void** extra) {
    ++calls;
    if (!current || current->gpu != f->gpu) return 201;
    if (extra || shared != (unsigned)shared_opted_in[f->gpu]) return 1;
    struct launch* to = &seen[__atomic_fetch_add(&launches, 1, __ATOMIC_SEQ_CST) % LAUNCHES];
    if (microseconds) usleep(microseconds);
    unsigned char* end = given[to - seen];
    const int* own = f->second ? second_sizes : sizes;
    for (int i = 0; own[i]; end += own[i++]) memcpy(end, parameters[i], own[i]);
    if (!sizes[0]) {
        for (int i = 0; i < 4; ++i) memcpy(&to->pointers[i], parameters[i], 8);
        for (int i = 0; i < scalars; ++i) memcpy(&to->scalars[i], parameters[4 + i], 4);
        for (int i = 0; i < maps; ++i) memcpy(to->maps[i], parameters[4 + scalars + i], 128);
    }
    int32_t grid[] = {x, y, z}, block[] = {block_x, block_y, block_z};
    memcpy(to->grid, grid, 12), memcpy(to->block, block, 12), memcpy(to->image, f->image, 16);
    return to->shared = shared, to->gpu = f->gpu, to->stream = (uint64_t)stream, 0;
}
