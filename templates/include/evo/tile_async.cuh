// ---- tile_async: a tile as in tile.cuh, by cp.async ----
// The caller commits and waits. A row that does not exist is given an address that does, and takes nothing from there.
template <int ROWS, int COLS, int STRIDE, int VECTOR, int THREADS>
__device__ __forceinline__ void load_tile_async(T* tile, const T* from, int valid) {
    constexpr int PER_ROW = COLS / VECTOR, BYTES = VECTOR * sizeof(T);
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
        int row = i / PER_ROW, col = i % PER_ROW * VECTOR;
        bool exists = row < valid;
        copy_async<BYTES>(tile + row * STRIDE + col, exists ? from + row * COLS + col : from, exists ? BYTES : 0);
    }
}
