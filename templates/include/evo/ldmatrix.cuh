// ---- ldmatrix: 8x8 matrices of T from shared memory to the operands of mma.sync (sm_75 and later) ----
// All lanes of the warp take part. Lane i gives the shared address (address.cuh) of row i % 8 of matrix i / 8, a
// multiple of 16. Word j of a lane is of matrix j: row lane / 4, columns 2 * (lane % 4) and the next; from a transposed
// matrix it is column lane / 4, rows 2 * (lane % 4) and the next. So operand B is read as it lies where
// its rows run along k, and transposed where they run along its columns.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&word)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&word)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(address)
                 : "memory");
}
