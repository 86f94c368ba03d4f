// ---- shared_tile: ROWS x COLS elements for wgmma, as TMA and the hardware's swizzle lay them out ----
// A tile lies in slabs of 64 or 32 columns, all rows of one slab before the next. Within a slab, chunk of 16 bytes `i`
// stands at place swizzled(i), so that 8 rows of one column of chunks fall into different banks. A tile begins at a
// multiple of 1024 bytes.
template <int CHUNKS>
__device__ __forceinline__ int swizzled(int i) {
    return i ^ i / 8 % CHUNKS;
}

// Operands of wgmma: a shared memory descriptor, whose addresses and strides count units of 16 bytes, and what is added
// to it for each 16 elements along k.
template <int ROWS, int CHUNKS>
struct KMajor {  // rows of elements along k
    static constexpr bool TRANSPOSED = false;
    unsigned long long first;

    __device__ __forceinline__ unsigned long long at(int step) const {
        return first + step * 2 % CHUNKS + step * 2 / CHUNKS * ROWS * CHUNKS;
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
    static constexpr int SLAB_BYTES = COLS % 64 == 0 ? 128 : 64;  // of a row, and what the swizzle repeats after
    static constexpr int CHUNKS = SLAB_BYTES / 16;                // likewise
    static constexpr int SLABS = COLS / 8 / CHUNKS;
    static constexpr int BYTES = ROWS * COLS * sizeof(T);

    // By one thread: a box of the tensor map is ROWS x a slab. (row, col) is the tile's first element; `outer` are the
    // coordinates of further dimensions. The caller announces BYTES at `barrier`.
    template <class... Outer>
    static __device__ __forceinline__ void load(unsigned char* tile, const TensorMap& map, unsigned barrier, int row,
                                                int col, Outer... outer) {
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
            tma_load(shared_address(tile + slab * ROWS * SLAB_BYTES), map, barrier, col + slab * CHUNKS * 8, row, outer...);
    }

    // The operand that begins at a row, a multiple of 8.
    static __device__ __forceinline__ KMajor<ROWS, CHUNKS> k_major(const unsigned char* tile, int row = 0) {
        return {matrix_descriptor<SLAB_BYTES>(shared_address(tile + row * SLAB_BYTES), 0, 8 * SLAB_BYTES)};
    }
    static __device__ __forceinline__ MnMajor<CHUNKS> mn_major(const unsigned char* tile) {
        return {matrix_descriptor<SLAB_BYTES>(shared_address(tile), ROWS * SLAB_BYTES, 8 * SLAB_BYTES)};
    }
};
