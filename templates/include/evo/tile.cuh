// ---- tile: the whole block brings ROWS x COLS elements from global to shared memory, VECTOR elements at a time ----
// `from` points to rows of COLS contiguous elements of which the first `valid` exist; the others become zeros, so that
// what lies behind a tensor's end is never read and never turns into NaN. Rows in shared memory are STRIDE apart.
template <int ROWS, int COLS, int STRIDE, int VECTOR, int THREADS>
__device__ __forceinline__ void load_tile(T* tile, const T* from, int valid) {
    constexpr int PER_ROW = COLS / VECTOR;
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
        int row = i / PER_ROW, col = i % PER_ROW * VECTOR;
        Vector<VECTOR> x = {};
        if (row < valid) x = read_vector<VECTOR>(from + row * COLS + col);
        write_vector<VECTOR>(tile + row * STRIDE + col, x);
    }
}
