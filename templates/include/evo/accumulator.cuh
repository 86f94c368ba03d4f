// ---- accumulator: 16 rows x N columns of a product, as mma.sync and wgmma leave them in a warp's registers ----
// A lane has two half rows, `half` 0 and 1, and shares each with the other three lanes of its quad.
template <int N>
struct Accumulator {
    static constexpr int SIZE = N / 2;
    float d[SIZE];

    static __device__ __forceinline__ int half(int i) { return i / 2 % 2; }
    // Among the warp's 16 rows.
    static __device__ __forceinline__ int row(int half) { return lane() / 4 + 8 * half; }
    static __device__ __forceinline__ int column(int i) { return i / 4 * 8 + lane() % 4 * 2 + i % 2; }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) d[i] = 0.0f;
    }
};
