// 2^x by one MUFU instruction; exp2f adds three more for denormal results, which a softmax may lose.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
