"""A kernel of one warp that copies by cp.async, with any commit and wait."""

import numpy as np

COPY = """
extern "C" __global__ void f(const float* a, float* o, int bytes) {
    extern __shared__ __align__(16) float tile[];
    unsigned to = (unsigned)__cvta_generic_to_shared(tile + 4 * threadIdx.x);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(a + 4 * threadIdx.x), "r"(bytes));
    COMMIT
    WAIT
    SYNC
    for (int i = 0; i < 4; ++i) o[4 * threadIdx.x + i] = tile[4 * (31 - threadIdx.x) + i];
}
"""
COMMIT = 'asm volatile("cp.async.commit_group;" ::: "memory");'
WAIT = 'asm volatile("cp.async.wait_group 0;" ::: "memory");'
WAIT_ALL = 'asm volatile("cp.async.wait_all;" ::: "memory");'


def copy(emulate, commit, wait, sync="__syncthreads();", bytes=16, **options):
    a = np.arange(128, dtype=np.float32)
    text = COPY.replace("COMMIT", commit).replace("WAIT", wait).replace("SYNC", sync)
    o = emulate(text, a, np.zeros(128, np.float32), np.int32(bytes), shared=512, **options)["o"]
    return a.reshape(32, 4)[::-1], o.reshape(32, 4)
