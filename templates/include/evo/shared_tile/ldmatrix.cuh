// ---- shared_tile: ROWS x COLS elements for ldmatrix, in chunks of 16 bytes placed so that no banks conflict ----
// Eight lanes at a time read one chunk of eight rows (ldmatrix) or move WIDTH chunks of 8 / WIDTH rows; they take
// each of the eight places of a wavefront, 128 bytes, once. PADDED: rows lie an odd number of chunks apart, so that
// eight of them begin in eight places. Else chunks are exchanged by XOR with the row, within SPAN of them: where SPAN
// is 4, two rows share a wavefront. Include before: copy_async, ldmatrix, thread.
template <int ROWS, int COLS, bool PADDED>
struct SharedTile {
    static constexpr int CHUNKS = COLS / 8;
    static constexpr int WIDTH = CHUNKS % 8 == 0 ? 8 : 4;
    static constexpr int ROW_CHUNKS = CHUNKS + (PADDED ? 1 : 0);
    static constexpr int SPAN = PADDED ? 2 : WIDTH;
    static constexpr int BYTES = ROWS * ROW_CHUNKS * 16;
    static_assert(CHUNKS % WIDTH == 0, "neighbouring threads move whole parts of a row");

    static __device__ __forceinline__ int swizzle(int row) { return PADDED ? 0 : row % 8 / (8 / SPAN); }

    // Of a chunk's first element, counted from the tile's.
    static __device__ __forceinline__ int element_at(int row, int chunk) {
        return (row * ROW_CHUNKS + (chunk ^ swizzle(row))) * 8;
    }

    // The row and chunk that a thread moves first; the others are multiples of 8 rows and of WIDTH chunks away.
    static __device__ __forceinline__ int moved_row(int thread) {
        if (!PADDED || WIDTH == 8) return thread / WIDTH;
        return thread / 32 * 8 + thread / 4 % 2 * 4 + thread / 8 % 4;
    }
    static __device__ __forceinline__ int moved_chunk(int thread) { return thread % WIDTH; }

    // Loads the tile by cp.async of all THREADS. `from` points to its first element in a matrix whose rows lie `stride`
    // elements apart, a multiple of 8. The first `rows` rows exist, and their first `cols` columns, a multiple of 8;
    // all else becomes zeros, and nothing is read at its address.
    template <int THREADS>
    static __device__ __forceinline__ void load(T* to, const T* from, long long stride, int rows, int cols) {
        copy<THREADS, false>(to, from, stride, rows, cols);
    }

    // Of rows of COLS contiguous elements.
    template <int THREADS>
    static __device__ __forceinline__ void load(T* to, const T* from, int rows) {
        copy<THREADS, true>(to, from, COLS, rows, COLS);
    }

    template <int THREADS, bool ALL_COLS, class Stride>
    static __device__ __forceinline__ void copy(T* to, const T* from, Stride stride, int rows, int cols) {
        constexpr int STEP = THREADS / WIDTH;
        int first = moved_row(threadIdx.x), chunk = moved_chunk(threadIdx.x);
        to += element_at(first, chunk);
        from += first * stride + chunk * 8;
        rows -= first, cols -= chunk * 8;  // a comparison with a constant takes no register, unlike a sum with one
#pragma unroll
        for (int row = 0; row < ROWS; row += STEP) {
            if (row + STEP > ROWS && first + row >= ROWS) break;
#pragma unroll
            for (int c = 0; c < CHUNKS; c += WIDTH) {
                bool exists = row < rows && (ALL_COLS || c * 8 < cols);
                copy_async<16>(to + (row * ROW_CHUNKS + c) * 8, from + row * stride + c * 8, exists ? 16 : 0);
            }
        }
    }

    // The same for any stride, by ordinary loads of single elements.
    template <int THREADS>
    static __device__ __forceinline__ void load_elements(T* to, const T* from, long long stride, int rows, int cols) {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            int row = i / CHUNKS, chunk = i % CHUNKS;
            const T* source = from + row * stride + chunk * 8;
            T* place = to + element_at(row, chunk);
#pragma unroll
            for (int e = 0; e < 8; ++e) place[e] = row < rows && chunk * 8 + e < cols ? source[e] : T(0.0f);
        }
    }
};

// What a lane addresses for ldmatrix_x4, relative to a block of 16 x 16 that starts at a multiple of 8 rows and an even
// chunk. All that depends on the lane is in two numbers; the rest of an address is known to the compiler.
template <class Tile>
struct LaneChunk {
    unsigned row_bytes, exchange;

    __device__ __forceinline__ LaneChunk(int row, int chunk)
        : row_bytes((row * Tile::ROW_CHUNKS + chunk / Tile::SPAN * Tile::SPAN) * 16),
          exchange((chunk % Tile::SPAN ^ Tile::swizzle(row)) * 16) {}

    __device__ __forceinline__ unsigned address(unsigned tile, int row, int chunk) const {
        constexpr int SPAN = Tile::SPAN;
        return tile + row_bytes + (exchange ^ chunk % SPAN * 16) + row * Tile::ROW_CHUNKS * 16 +
               chunk / SPAN * SPAN * 16;
    }
};

// Operands of mma.sync in a tile at a shared address, 16 x 16 at a time. What a lane addresses of A, and of B from rows
// along n: upper left, lower left, upper right, lower right; of B from rows along k, the two in the middle exchanged.

// Operand A: 16 rows from `row` on, columns 16 step to 16 step + 15.
template <class Tile>
struct SharedA {
    unsigned tile;
    int row;  // of stripe 0

    __device__ __forceinline__ void read(unsigned (&a)[4], int stripe, int step) const {
        const LaneChunk<Tile> lane_chunk(lane() % 16, lane() / 16);
        ldmatrix_x4(a, lane_chunk.address(tile, row + stripe * 16, 2 * step));
    }
};

// Operand A, whose row k of the tile is along m. Its rows begin `first_chunk` chunks into those; from there on all chunks
// up to the next multiple of SPAN are its own.
template <class Tile>
struct MnMajorA {
    unsigned tile;
    int first_chunk;

    __device__ __forceinline__ void read(unsigned (&a)[4], int stripe, int step) const {
        const LaneChunk<Tile> lane_chunk(lane() % 8 + lane() / 16 * 8, first_chunk + lane() / 8 % 2);
        ldmatrix_x4_trans(a, lane_chunk.address(tile, step * 16, 2 * stripe));
    }
};

// Operand B, whose row n of the tile is along k: columns n of B from `column` + 8 j on, rows 16 step to 16 step + 15.
template <class Tile>
struct KMajorB {
    unsigned tile;
    int column = 0;  // a multiple of 8

    __device__ __forceinline__ void read(unsigned (&b)[4], int step, int j) const {
        const LaneChunk<Tile> lane_chunk(column + lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
        ldmatrix_x4(b, lane_chunk.address(tile, j * 8, 2 * step));
    }
};

// Operand B, whose row k of the tile is along n. Its columns begin `first_chunk` chunks into the rows; from there on
// all chunks up to the next multiple of SPAN are its own.
template <class Tile>
struct MnMajorB {
    unsigned tile;
    int first_chunk;

    __device__ __forceinline__ void read(unsigned (&b)[4], int step, int j) const {
        const LaneChunk<Tile> lane_chunk(lane() % 16, first_chunk + lane() / 16);
        ldmatrix_x4_trans(b, lane_chunk.address(tile, step * 16, j));
    }
};
