// ---- shared_tile: ROWS x COLS elements for wgmma, as TMA and the hardware's swizzle lay them out ----
// A tile lies in slabs of 64 or 32 columns, all rows of one slab before the next. Within a slab, chunk of 16 bytes `i`
// stands at place swizzled(i), so that 8 rows of one column of chunks fall into different banks. A tile begins at a
// multiple of 1024 bytes. Include before: accumulator, cluster, copy_async, stmatrix, tma, wgmma.

// A tile as an operand: its shared memory descriptor, whose addresses and strides count units of 16 bytes, and what is
// added to that for each 16 elements along k.
template <int ROWS, int CHUNKS>
struct KMajor {  // rows of elements along k
    static constexpr bool TRANSPOSED = false;
    unsigned long long first;

    __device__ __forceinline__ unsigned long long at(int step) const {
        return first + (step * 2 % CHUNKS + step * 2 / CHUNKS * ROWS * CHUNKS);
    }
};

template <int CHUNKS>
struct MnMajor {  // rows of elements along n
    static constexpr bool TRANSPOSED = true;
    unsigned long long first;

    __device__ __forceinline__ unsigned long long at(int step) const { return first + step * 16 * CHUNKS; }
};

template <int ROWS, int COLS>
struct SharedTile {
    static constexpr int SLAB_BYTES = COLS % 64 == 0 ? 128 : 64;  // of a row; the swizzle spans as many
    static constexpr int CHUNKS = SLAB_BYTES / 16;                // likewise
    static constexpr int SLABS = COLS / 8 / CHUNKS;
    static constexpr int BYTES = ROWS * COLS * sizeof(T);

    static __device__ __forceinline__ int swizzled(int i) { return i ^ i / 8 % CHUNKS; }

    // Where a chunk of a row lies.
    static __device__ __forceinline__ int offset(int row, int slab, int chunk) {
        return 16 * swizzled((slab * ROWS + row) * CHUNKS + chunk);
    }

    // By one thread and TMA: a box of the tensor map is ROWS x a slab. (row, col) is the tile's first element; `outer`
    // are the coordinates of further dimensions. What lies outside of the tensor arrives as zeros.
    template <class... Outer>
    static __device__ __forceinline__ void load(unsigned char* tile, const TensorMap& map, unsigned full, int row,
                                                int col, Outer... outer) {
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            unsigned to = shared_address(tile + slab * ROWS * SLAB_BYTES);
            tma_load(to, map, full, col + slab * CHUNKS * 8, row, outer...);
        }
    }

    // This block's part of the rows, to all blocks of the cluster: the others load the other parts. A box has so many
    // rows less.
    template <class... Outer>
    static __device__ __forceinline__ void load_multicast(unsigned char* tile, const TensorMap& map, unsigned full,
                                                          int row, int col, Outer... outer) {
        int first = cluster_rank() * (ROWS / CLUSTER);
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            unsigned to = shared_address(tile + (slab * ROWS + first) * SLAB_BYTES);
            tma_load_multicast(to, map, full, col + slab * CHUNKS * 8, row + first, outer...);
        }
    }

    // By the THREADS of a warpgroup and cp.async: `from` points to rows of COLS contiguous elements of which the first
    // `rows` exist. The others become zeros, which neither fault nor turn into NaN in a product with 0. A thread's
    // chunks are a multiple of 128 apart, where the swizzle repeats: one offset serves all.
    template <int THREADS>
    static __device__ __forceinline__ void load(unsigned char* tile, const T* from, int rows) {
        static_assert(THREADS == 128, "so far apart the swizzle repeats");
        constexpr int STEP = 128 / CHUNKS;
        int first = threadIdx.x % 128 / CHUNKS;
        const T* source = from + first * COLS + threadIdx.x % CHUNKS * 8;
        unsigned char* to = tile + 16 * swizzled(threadIdx.x % 128);
#pragma unroll 2
        for (int row = first; row < ROWS; row += STEP) {
            bool exists = row < rows;
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab) {
                const T* chunk = exists ? source + slab * CHUNKS * 8 : from;
                copy_async<16>(to + slab * ROWS * SLAB_BYTES, chunk, exists ? 16 : 0);
            }
            source += STEP * COLS, to += STEP * SLAB_BYTES;
        }
    }

    // A warp's 16 rows from `first_row` on. Each eight lanes write a column of chunks, which the swizzle spreads over
    // all banks.
    template <int N>
    static __device__ __forceinline__ void store(unsigned char* tile, int first_row, const Accumulator<N>& acc) {
        static_assert(N <= COLS);
#pragma unroll
        for (int c = 0; c < N / 16; ++c) {
            int row = first_row + lane() % 16, chunk = 2 * c + lane() / 16;
            const float* x = acc.d + 8 * c;
            unsigned word[4] = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
            stmatrix_x4(shared_address(tile + offset(row, chunk / CHUNKS, chunk % CHUNKS)), word);
        }
    }

    // As an operand that begins at `row`, a multiple of 8.
    static __device__ __forceinline__ KMajor<ROWS, CHUNKS> k_major(const unsigned char* tile, int row = 0) {
        return {matrix_descriptor<SLAB_BYTES>(shared_address(tile + row * SLAB_BYTES), 0, 8 * SLAB_BYTES)};
    }
    static __device__ __forceinline__ MnMajor<CHUNKS> mn_major(const unsigned char* tile) {
        return {matrix_descriptor<SLAB_BYTES>(shared_address(tile), ROWS * SLAB_BYTES, 8 * SLAB_BYTES)};
    }
};
