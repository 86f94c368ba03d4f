// Does fast.cu's kernel 11 race visibly on a GPU? Exact products of small integers, compared element by element.
// python -m benchmarks.own_hopper_kernels FOLDER --texts DIR writes unchanged.cuh, fence.cuh, wait.cuh, end.cuh and
// mended.cuh; in DIR, for each of them:
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -DHEADER='"unchanged.cuh"' fast_cu_races.cu -o races
//   ./races: 200 launches at each size, eight back to back; ./races once M N K: one launch (for compute-sanitizer)
#include <cuda.h>
#include <cuda_bf16.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#undef assert
#define assert(x) ((void)0)
typedef __nv_bfloat16 bf16;
#include HEADER

#define CALL(x) do { auto e = (x); if (e) { std::printf("%s: error %d\n", #x, (int)e); std::fflush(stdout); std::exit(3); } } while (0)
constexpr int TM = 128, TN = 256, STAGES = 3, SPACE = 128, COPIES = 8;

__global__ void draw(bf16* x, size_t n, unsigned seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        unsigned h = (unsigned)i * 2654435761u ^ seed; h ^= h >> 15; h *= 2246822519u; h ^= h >> 13;
        x[i] = __float2bfloat16((float)((int)(h % 5) - 2));
    }
}
// C [n, m] = B [n, k] A [m, k]^T in exact float sums
__global__ void naive(const bf16* a, const bf16* b, bf16* c, int m, int n, int k) {
    __shared__ float as[16][17], bs[16][17];
    int i = blockIdx.x * 16 + threadIdx.x, j = blockIdx.y * 16 + threadIdx.y;
    float sum = 0;
    for (int p = 0; p < k; p += 16) {
        as[threadIdx.y][threadIdx.x] = __bfloat162float(a[(size_t)(blockIdx.x * 16 + threadIdx.y) * k + p + threadIdx.x]);
        bs[threadIdx.y][threadIdx.x] = __bfloat162float(b[(size_t)j * k + p + threadIdx.x]);
        __syncthreads();
        for (int q = 0; q < 16; ++q) sum += as[threadIdx.x][q] * bs[threadIdx.y][q];
        __syncthreads();
    }
    c[(size_t)j * m + i] = __float2bfloat16(sum);
}
__global__ void compare(const bf16* x, const bf16* y, size_t n, unsigned long long* found) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        if (__bfloat16_as_ushort(x[i]) != __bfloat16_as_ushort(y[i])) {
            atomicAdd(&found[0], 1ull);
            atomicMin(&found[1], (unsigned long long)i);
        }
}
static CUtensorMap map_of(bf16* of, int rows, int columns, int box_rows, int box_columns, bool swizzle) {
    CUtensorMap map;
    cuuint64_t dims[] = {64, (cuuint64_t)rows, (cuuint64_t)columns / 64}, strides[] = {2ull * columns, 128};
    cuuint32_t box[] = {64, (cuuint32_t)box_rows, (cuuint32_t)box_columns / 64}, steps[] = {1, 1, 1};
    static void* encode = nullptr;
    cudaDriverEntryPointQueryResult status;
    if (!encode) CALL(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &status));
    CALL(reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, of, dims, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
        CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return map;
}
static std::vector<int> order(int m, int n) {  // tiles row by row, dealt out to 64 clusters
    std::vector<int> space(64 * SPACE, -1), many(64, 0);
    int tiles_m = m / (2 * TM), tiles_n = n / TN, at = 0;
    for (int i = 0; i < tiles_m; ++i)
        for (int j = 0; j < tiles_n; ++j, ++at) space[(at % 64) * SPACE + many[at % 64]++] = i << 16 | j;
    return space;
}
static void launch(int m, int n, int k, CUtensorMap a, CUtensorMap b, CUtensorMap c, int* space) {
    auto* kernel = M11::matmulKernel11<TM, TN, 64, 384, STAGES, 128, 2, 1>;
    constexpr size_t bytes = sizeof(M11::SMem<TM, TN, 64, STAGES>);
    static bool set = false;
    if (!set) CALL(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    set = true;
    kernel<<<128, 384, bytes>>>(m, n, k, c, a, b, space);
}
static void run(int m, int n, int k, int rounds) {
    bf16 *a[2], *b[2], *c[COPIES], *expected[2];
    int* space;
    unsigned long long* found;
    for (int i = 0; i < 2; ++i) {
        CALL(cudaMalloc(&a[i], 2ull * m * k)); CALL(cudaMalloc(&b[i], 2ull * n * k)); CALL(cudaMalloc(&expected[i], 2ull * m * n));
        draw<<<256, 256>>>(a[i], (size_t)m * k, 17 + i); draw<<<256, 256>>>(b[i], (size_t)n * k, 91 + i);
        naive<<<dim3(m / 16, n / 16), dim3(16, 16)>>>(a[i], b[i], expected[i], m, n, k);
    }
    for (int i = 0; i < COPIES; ++i) CALL(cudaMalloc(&c[i], 2ull * m * n));
    auto tiles = order(m, n);
    CALL(cudaMalloc(&space, tiles.size() * 4)); CALL(cudaMemcpy(space, tiles.data(), tiles.size() * 4, cudaMemcpyHostToDevice));
    CALL(cudaMalloc(&found, 16 * COPIES));
    CALL(cudaDeviceSynchronize());
    CUtensorMap map_a[2], map_b[2], map_c[COPIES];
    for (int i = 0; i < 2; ++i) map_a[i] = map_of(a[i], m, k, TM, 64, true), map_b[i] = map_of(b[i], n, k, TN, 64, true);
    for (int i = 0; i < COPIES; ++i) map_c[i] = map_of(c[i], n, m, TN, TM, false);
    int wrong_launches = 0;
    unsigned long long wrong = 0, most = 0, first = ~0ull;
    for (int r = 0; r < rounds; ++r) {
        for (int i = 0; i < COPIES; ++i) CALL(cudaMemset(c[i], 0xff, 2ull * m * n));
        for (int i = 0; i < COPIES; ++i) launch(m, n, k, map_a[i % 2], map_b[i % 2], map_c[i], space);
        CALL(cudaGetLastError());
        std::vector<unsigned long long> seen(2 * COPIES);
        for (int i = 0; i < COPIES; ++i) seen[2 * i] = 0, seen[2 * i + 1] = ~0ull;
        CALL(cudaMemcpy(found, seen.data(), 16 * COPIES, cudaMemcpyHostToDevice));
        for (int i = 0; i < COPIES; ++i) compare<<<512, 256>>>(c[i], expected[i % 2], (size_t)m * n, found + 2 * i);
        CALL(cudaMemcpy(seen.data(), found, 16 * COPIES, cudaMemcpyDeviceToHost));
        for (int i = 0; i < COPIES; ++i) {
            wrong_launches += seen[2 * i] != 0; wrong += seen[2 * i]; most = std::max(most, seen[2 * i]);
            if (seen[2 * i]) first = std::min(first, seen[2 * i + 1]);
        }
    }
    std::vector<float> times;
    cudaEvent_t begin, end; CALL(cudaEventCreate(&begin)); CALL(cudaEventCreate(&end));
    for (int r = 0; r < (rounds > 1 ? 15 : 0); ++r) {
        CALL(cudaEventRecord(begin)); launch(m, n, k, map_a[0], map_b[0], map_c[0], space); CALL(cudaEventRecord(end));
        CALL(cudaEventSynchronize(end)); float ms; CALL(cudaEventElapsedTime(&ms, begin, end)); times.push_back(1000 * ms);
    }
    std::sort(times.begin(), times.end());
    std::printf("%s m%d n%d k%d: %d of %d launches wrong, %llu elements in all, %llu at most, first at row %lld column %lld; median %.1f us\n",
        HEADER, m, n, k, wrong_launches, rounds * COPIES, wrong, most, wrong ? (long long)(first / m) : -1, wrong ? (long long)(first % m) : -1,
        times.empty() ? 0.f : times[times.size() / 2]);
    std::fflush(stdout);
    for (int i = 0; i < 2; ++i) cudaFree(a[i]), cudaFree(b[i]), cudaFree(expected[i]);
    for (auto x : c) cudaFree(x);
    cudaFree(space); cudaFree(found);
}
int main(int argc, char** argv) {
    CALL(cudaFree(nullptr));
    if (argc == 5 && !std::strcmp(argv[1], "once")) {
        int m = std::atoi(argv[2]), n = std::atoi(argv[3]), k = std::atoi(argv[4]);
        bf16 *a, *b, *c; int* space; auto tiles = order(m, n);
        CALL(cudaMalloc(&a, 2ull * m * k)); CALL(cudaMalloc(&b, 2ull * n * k)); CALL(cudaMalloc(&c, 2ull * m * n)); CALL(cudaMalloc(&space, tiles.size() * 4));
        CALL(cudaMemset(a, 0, 2ull * m * k)); CALL(cudaMemset(b, 0, 2ull * n * k));
        CALL(cudaMemcpy(space, tiles.data(), tiles.size() * 4, cudaMemcpyHostToDevice));
        launch(m, n, k, map_of(a, m, k, TM, 64, true), map_of(b, n, k, TN, 64, true), map_of(c, n, m, TN, TM, false), space);
        CALL(cudaDeviceSynchronize());
        std::printf("%s once m%d n%d k%d: done\n", HEADER, m, n, k);
        return 0;
    }
    for (int k : {64, 128, 192, 512, 4096}) run(4096, 4096, k, 25);
    run(8192, 8192, 64, 25);
}
