// ---- rows_for_ldmatrix: loads a shared_tile of ldmatrix from rows that lie anywhere ----
// By cp.async of all THREADS: the first `count` of `rows` exist, each of whole chunks, and the others become zeros;
// nothing is read at their addresses, and none is asked for.
template <class Tile, int ROWS, int THREADS, class Rows>
__device__ __forceinline__ void load_rows(T* to, const Rows& rows, int count) {
    constexpr int STEP = THREADS / Tile::WIDTH;
    int first = Tile::moved_row(threadIdx.x), chunk = Tile::moved_chunk(threadIdx.x);
    to += Tile::element_at(first, chunk);
#pragma unroll
    for (int row = 0; row < ROWS; row += STEP) {
        if (row + STEP > ROWS && first + row >= ROWS) break;
        bool exists = first + row < count;
        const T* from = exists ? rows.row(first + row) + chunk * 8 : nullptr;
#pragma unroll
        for (int c = 0; c < Tile::CHUNKS; c += Tile::WIDTH)
            copy_async<16>(to + (row * Tile::ROW_CHUNKS + c) * 8, from + c * 8, exists ? 16 : 0);
    }
}

// Rows that lie a stride apart.
template <class Tile, int ROWS, int THREADS>
__device__ __forceinline__ void load_rows(T* to, const PackedRows& rows, int count) {
    Tile::template copy<THREADS, true>(to, rows.first, rows.stride, count, 8 * Tile::CHUNKS);
}
