// ---- accumulator: 16 rows x N columns of a product, as mma.sync and wgmma leave them in a warp's registers ----
// A lane has a part of two rows, `half` 0 and 1, and shares both with the other three lanes of its quad.
template <int N, class Number = float>
struct Accumulator {
    static constexpr int SIZE = N / 2;
    Number d[SIZE];

    static __device__ __forceinline__ int half(int i) { return i / 2 % 2; }
    // Among the warp's 16 rows.
    static __device__ __forceinline__ int row(int half) { return lane() / 4 + 8 * half; }
    static __device__ __forceinline__ int column(int i) { return i / 4 * 8 + lane() % 4 * 2 + i % 2; }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) d[i] = Number(0);
    }

    // The maximum of a row in this lane's columns.
    __device__ __forceinline__ float row_max(int half) const {
        float top = fmaxf(d[2 * half], d[2 * half + 1]);
#pragma unroll
        for (int i = 2 * half + 4; i < SIZE; i += 4) top = fmaxf(top, fmaxf(d[i], d[i + 1]));
        return top;
    }

    // The same by comparing bits as whole numbers, three at a time on Hopper: right where it is not negative. Of negative
    // numbers alone it is the smallest.
    __device__ __forceinline__ int row_max_bits(int half) const {
        int top = max(__float_as_int(d[2 * half]), __float_as_int(d[2 * half + 1]));
#pragma unroll
        for (int i = 2 * half + 4; i < SIZE; i += 4)
            top = max(max(top, __float_as_int(d[i])), __float_as_int(d[i + 1]));
        return top;
    }

    __device__ __forceinline__ void scale_rows(const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) d[i] *= factor[half(i)];
    }

    // As operand A of a product that is N deep: words 4 c to 4 c + 3 are of columns 16 c to 16 c + 15. Two neighbouring
    // elements make a word, and no lane gives any to another.
    __device__ __forceinline__ void convert_a(unsigned (&a)[N / 4]) const {
#pragma unroll
        for (int j = 0; j < SIZE / 2; ++j) a[j] = pack(d[2 * j], d[2 * j + 1]);
    }
};
