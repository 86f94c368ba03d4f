// ---- gather: the rows of a tile (shared_tile/ldmatrix.cuh) from anywhere, by cp.async of THREADS threads ----
// Row i + j comes from `from + offset_of(i, j)`, a multiple of 8 elements, where i is known to the compiler and j is of
// the thread. The first `rows` rows exist; the others become zeros, and nothing is read for them. Every thread asks for
// the offsets of all of its rows, so that lanes may tell one another; for rows that do not exist any answer will do.
// Include before: copy_async.
template <class Tile, int ROWS, int THREADS, class OffsetOf>
__device__ __forceinline__ void gather(T* to, const T* from, int thread, int rows, const OffsetOf& offset_of) {
    constexpr int STEP = THREADS / Tile::WIDTH;
    static_assert(ROWS % STEP == 0, "all threads move equally many rows");
    int own = Tile::moved_row(thread), chunk = Tile::moved_chunk(thread);
#pragma unroll
    for (int first = 0; first < ROWS; first += STEP) {
        bool exists = first + own < rows;
        long long offset = offset_of(first, own);
        const T* source = from + (exists ? offset : 0ll) + chunk * 8;
#pragma unroll
        for (int c = 0; c < Tile::CHUNKS; c += Tile::WIDTH)
            copy_async<16>(to + Tile::element_at(first + own, c + chunk), source + c * 8, exists ? 16 : 0);
    }
}
