// ---- softmax: row operations in base 2 ----
// Stands for minus infinity. It is finite, so that MASKED - MASKED is 0 and not NaN, and far below any real score.
constexpr float MASKED = -1e30f;
constexpr float LOG2_E = 1.4426950408889634f;

// 2^x by one MUFU instruction; exp2f adds three more for denormal results, which a softmax may lose.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Largest and sum over groups of LANES neighbouring lanes (a power of two); every lane of the warp takes part.
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

// Four neighbouring scores: scaled; all but the first `visible` masked; the largest; their weights under the row's
// largest; the sum.
__device__ __forceinline__ float4 scale_four(float4 x, float scale) {
    return make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
}

__device__ __forceinline__ float4 mask_four(float4 x, int visible) {
    return make_float4(visible > 0 ? x.x : MASKED, visible > 1 ? x.y : MASKED, visible > 2 ? x.z : MASKED,
                       visible > 3 ? x.w : MASKED);
}

__device__ __forceinline__ float max_four(float4 x) { return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)); }

__device__ __forceinline__ float4 exp2_four(float4 x, float largest) {
    return make_float4(exp2_approx(x.x - largest), exp2_approx(x.y - largest), exp2_approx(x.z - largest),
                       exp2_approx(x.w - largest));
}

__device__ __forceinline__ float sum_four(float4 x) { return (x.x + x.y) + (x.z + x.w); }
