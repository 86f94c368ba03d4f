// ---- stmatrix: the way back of ldmatrix_x4, from registers to four 8x8 matrices in shared memory (sm_90) ----
// Accumulators of mma.sync and wgmma, packed two to a word, leave in 16-byte rows without bank conflicts.
__device__ __forceinline__ void stmatrix_x4(unsigned address, const unsigned (&word)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
                 "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
}
