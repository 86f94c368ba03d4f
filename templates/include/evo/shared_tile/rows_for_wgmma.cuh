// ---- rows_for_wgmma: loads a shared_tile of wgmma from rows that lie anywhere ----
// By cp.async of the THREADS of a warpgroup: the first `count` of `rows` exist, each of whole chunks, and the others become
// zeros; nothing is read at their addresses, and none is asked for.
template <class Tile, int ROWS, int THREADS, class Rows>
__device__ __forceinline__ void load_rows(unsigned char* to, const Rows& rows, int count) {
    static_assert(THREADS == 128, "so far apart the swizzle repeats");
    constexpr int STEP = 128 / Tile::CHUNKS;
    int first = threadIdx.x % 128 / Tile::CHUNKS, chunk = threadIdx.x % Tile::CHUNKS;
    to += 16 * Tile::swizzled(threadIdx.x % 128);
#pragma unroll 2
    for (int row = first; row < ROWS; row += STEP) {
        bool exists = row < count;
        const T* from = exists ? rows.row(row) + chunk * 8 : nullptr;
#pragma unroll
        for (int slab = 0; slab < Tile::SLABS; ++slab)
            copy_async<16>(to + slab * ROWS * Tile::SLAB_BYTES, from + slab * Tile::CHUNKS * 8, exists ? 16 : 0);
        to += STEP * Tile::SLAB_BYTES;
    }
}

// Rows that lie a stride apart.
template <class Tile, int ROWS, int THREADS>
__device__ __forceinline__ void load_rows(unsigned char* to, const PackedRows& rows, int count) {
    static_assert(THREADS == 128, "so far apart the swizzle repeats");
    constexpr int STEP = 128 / Tile::CHUNKS;
    int first = threadIdx.x % 128 / Tile::CHUNKS;
    const T* source = rows.row(first) + threadIdx.x % Tile::CHUNKS * 8;
    to += 16 * Tile::swizzled(threadIdx.x % 128);
#pragma unroll 2
    for (int row = first; row < ROWS; row += STEP) {
        bool exists = row < count;
#pragma unroll
        for (int slab = 0; slab < Tile::SLABS; ++slab) {
            const T* chunk = exists ? source + slab * Tile::CHUNKS * 8 : rows.first;
            copy_async<16>(to + slab * ROWS * Tile::SLAB_BYTES, chunk, exists ? 16 : 0);
        }
        source += STEP * rows.stride, to += STEP * Tile::SLAB_BYTES;
    }
}
