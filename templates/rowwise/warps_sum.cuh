constexpr int WARPS_PER_ROW = OWN_THREADS / 32;
constexpr int PLACES = MEETINGS > 1 ? 2 : 1;

template <typename Sum>
__device__ __forceinline__ float4 packed(const Sum& sum) {
    float four[4] = {};
#pragma unroll
    for (int i = 0; i < Sum::WORDS; ++i) four[i] = sum.word[i];
    return make_float4(four[0], four[1], four[2], four[3]);
}

template <typename Sum>
__device__ __forceinline__ void add_packed(Sum& sum, float4 read) {
    float four[4] = {read.x, read.y, read.z, read.w};
    Sum other;
#pragma unroll
    for (int i = 0; i < Sum::WORDS; ++i) other.word[i] = four[i];
    sum.add(other);
}

// The sum over a row's warps in this block, which meet in `place`.
template <typename Sum>
__device__ __forceinline__ Sum warps_sum(Sum own, float4* place) {
    own = lanes_sum<32>(own);
    if (threadIdx.x % 32 == 0) place[threadIdx.x % OWN_THREADS / 32] = packed(own);
    __syncthreads();
    Sum total;
#pragma unroll
    for (int warp = 0; warp < WARPS_PER_ROW; ++warp) add_packed(total, place[warp]);
    return total;
}
