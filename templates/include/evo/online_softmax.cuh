// ---- online_softmax: softmax in base 2 over rows whose scores come tile by tile ----
// Stands for minus infinity. It is finite, so that MASKED - MASKED is 0 and not NaN, and far below any real score.
constexpr float MASKED = -1e30f;
constexpr float LOG2_E = 1.4426950408889634f;

{% include "evo/exp2.cuh" %}

// 2^(x scale + offset) on the FMA pipe, where MUFU is the bottleneck; exponents may be up to 127. Those below -126, of
// masked scores too, count as -126: t, which is the exponent on its way from -126 to 130, is clamped for nothing by the
// FMA that computes it (FFMA.SAT), and its rounding is as that of exponents of 2^-17. The bits of 1.5 * 2^23 plus the
// exponent end in the nearest whole number n (Cody and Waite); 2^f of the rest is a polynomial, minimax over [-1/2, 1/2]
// with a relative error of 7.5e-5 (a sixth of fp16's rounding), and n is added to its own exponent.
__device__ __forceinline__ float exp2_fma(float x, float scale, float offset) {
    constexpr float RANGE = 256.0f, LEAST = -126.0f, WHOLE = 12582912.0f + LEAST;
    float t = __saturatef(fmaf(x, scale / RANGE, (offset - LEAST) / RANGE));
    float shifted = fmaf(t, RANGE, WHOLE), f = fmaf(t, RANGE, WHOLE - shifted);
    float y = fmaf(fmaf(fmaf(0.05517167f, f, 0.24261113f), f, 0.69326097f), f, 0.99992806f);
    return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}

// Maximum and sum over groups of LANES neighbouring lanes (a power of two); every lane of the warp takes part.
template <int LANES>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

template <int LANES>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// The state of one row, which LANES neighbouring lanes share: each has a part of its columns. Outputs are kept in units
// of 2^row_max; where the maximum rises by no more than RESCALE_THRESHOLD powers of two it stays behind.
template <int LANES, int RESCALE_THRESHOLD = 0>
struct OnlineSoftmax {
    float row_max;  // of the scaled scores so far
    float row_sum;  // of P so far, in this lane's columns

    __device__ __forceinline__ void start() { row_max = MASKED, row_sum = 0.0f; }

    // Takes up the next tile, whose largest scaled score in this lane's columns is `tile_max`. Returns what earlier
    // outputs must be multiplied by.
    __device__ __forceinline__ float rescale(float tile_max) {
        float top = fmaxf(row_max, lanes_max<LANES>(tile_max));
        if (RESCALE_THRESHOLD > 0 && top <= row_max + float(RESCALE_THRESHOLD)) top = row_max;
        float factor = exp2_approx(row_max - top);
        row_max = top;
        row_sum *= factor;
        return factor;
    }

    // The last factor of the outputs: one over the whole row's sum.
    __device__ __forceinline__ float normalise() const { return __fdividef(1.0f, lanes_sum<LANES>(row_sum)); }
{% if lse is defined %}

    // The natural logarithm of the sum of the exponentials of the scaled scores.
    __device__ __forceinline__ float lse() const {
        constexpr float LN_2 = 0.6931471805599453f;
        return (row_max + log2f(lanes_sum<LANES>(row_sum))) * LN_2;
    }
{% endif %}
};

// Four neighbouring scores: scaled; all but the first `visible` masked; their maximum; 2^(x - row_max); the sum.
__device__ __forceinline__ float4 scale_four(float4 x, float scale) {
    return make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
}

__device__ __forceinline__ float4 mask_four(float4 x, int visible) {
    return make_float4(visible > 0 ? x.x : MASKED, visible > 1 ? x.y : MASKED, visible > 2 ? x.z : MASKED,
                       visible > 3 ? x.w : MASKED);
}

__device__ __forceinline__ float max_four(float4 x) { return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)); }

__device__ __forceinline__ float4 exp2_four(float4 x, float row_max) {
    return make_float4(exp2_approx(x.x - row_max), exp2_approx(x.y - row_max), exp2_approx(x.z - row_max),
                       exp2_approx(x.w - row_max));
}

__device__ __forceinline__ float sum_four(float4 x) { return (x.x + x.y) + (x.z + x.w); }
