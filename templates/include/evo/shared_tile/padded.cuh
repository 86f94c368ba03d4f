// ---- shared_tile: ROWS x COLS elements for ordinary loads and nvcuda::wmma, with PAD elements behind each row ----
template <int ROWS, int COLS, int PAD, int VECTOR, bool ASYNC>
struct SharedTile {
    static constexpr int STRIDE = COLS + PAD;
    static constexpr int BYTES = ROWS * STRIDE * sizeof(T);
    static_assert(STRIDE % VECTOR == 0 && COLS % VECTOR == 0, "a vector must not straddle rows");

    // Loads the tile by all THREADS, VECTOR elements at a time: ASYNC by cp.async, which the caller commits and waits
    // for, else through registers. `from` points to rows of COLS contiguous elements of which the first `rows` exist;
    // the others become zeros, so that what lies behind a tensor's end is never read and never turns into NaN.
    template <int THREADS>
    static __device__ __forceinline__ void load(T* tile, const T* from, int rows) {
        constexpr int PER_ROW = COLS / VECTOR;
#pragma unroll 4
        for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
            int row = i / PER_ROW, col = i % PER_ROW * VECTOR;
            if constexpr (ASYNC) {
                // A row that does not exist is given an address that does, and takes nothing from there.
                constexpr int COPIED = VECTOR * sizeof(T);
                bool exists = row < rows;
                copy_async<COPIED>(tile + row * STRIDE + col, exists ? from + row * COLS + col : from,
                                   exists ? COPIED : 0);
            } else {
                Vector<VECTOR> x = {};
                if (row < rows) x = read_vector<VECTOR>(from + row * COLS + col);
                write_vector<VECTOR>(tile + row * STRIDE + col, x);
            }
        }
    }
};
