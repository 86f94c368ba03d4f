"""cp.async: bytes have landed at the wait that covers their group, and may or may not have before."""

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed
from tests.support.copy_async_kernels import COMMIT, WAIT, WAIT_ALL, copy

SEEDS = (0, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_committed_copy_lands_at_its_wait(emulate, seed):
    expected, o = copy(emulate, COMMIT, WAIT, seed=seed)
    np.testing.assert_array_equal(o, expected)


def test_wait_all_covers_what_was_not_committed(emulate):
    expected, o = copy(emulate, "", WAIT_ALL)
    np.testing.assert_array_equal(o, expected)


@pytest.mark.parametrize(("commit", "wait"), [("", WAIT), (COMMIT, "")], ids=["not committed", "not waited for"])
def test_a_copy_that_no_wait_covers_lands_at_once_or_never(emulate, commit, wait):
    landed = []
    for seed in range(16):
        expected, o = copy(emulate, commit, wait, seed=seed)
        assert (np.isnan(o) | (o == expected)).all()
        landed.append(float(np.mean(o == expected)))
    assert landed.count(0.0) >= 4 and max(landed) > 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_another_threads_copy_is_not_there_without_a_barrier(emulate, seed):
    assert np.isnan(copy(emulate, COMMIT, WAIT, sync="", seed=seed)[1]).any()


@pytest.mark.parametrize("kept", [0, 4, 8, 12])
def test_the_bytes_beyond_the_source_size_are_zero(emulate, kept):
    expected, o = copy(emulate, COMMIT, WAIT, bytes=kept)
    np.testing.assert_array_equal(o[:, : kept // 4], expected[:, : kept // 4])
    assert not o[:, kept // 4 :].any()


PIPELINE = """
extern "C" __global__ void f(const float* a, float* o, int tiles) {
    __shared__ __align__(16) float stage[2][128];
    for (int t = 0; t <= tiles; ++t) {
        if (t < tiles) {
            unsigned to = (unsigned)__cvta_generic_to_shared(&stage[t % 2][4 * threadIdx.x]);
            asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16;"
                         :: "r"(to), "l"(a + 128 * t + 4 * threadIdx.x) : "memory");
        }
        asm volatile("cp.async.commit_group;");
        if (t == 0) continue;
        asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
        __syncthreads();
        for (int i = 0; i < 4; ++i) o[(t - 1) * 128 + 32 * i + threadIdx.x] = stage[(t - 1) % 2][32 * i + threadIdx.x];
        SYNC
    }
}
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("left", "sync"), [(1, "__syncthreads();"), (2, "__syncthreads();"), (1, "")])
def test_a_double_buffer_needs_its_exact_wait_and_both_barriers(emulate, left, sync, seed):
    a = np.arange(5 * 128, dtype=np.float32)
    text = PIPELINE.replace("LEFT", str(left)).replace("SYNC", sync)
    o = emulate(text, a, np.zeros_like(a), np.int32(5), seed=seed)["o"]
    assert np.array_equal(o, a) == (left == 1 and sync != "")


BAD = """
extern "C" __global__ void f(const float* a, float* o, int from, int to) {
    extern __shared__ __align__(16) float tile[];
    unsigned address = (unsigned)__cvta_generic_to_shared(tile) + to;
    asm volatile("cp.async.cg.shared.global [%0], [%1], BYTES;" :: "r"(address), "l"(a + from));
}
"""


@pytest.mark.parametrize(
    ("bytes", "source", "target", "message"),
    [
        (16, 0, 0, None),
        (16, 128, 0, "out-of-bounds read of a: 0 bytes past its end"),
        (16, 0, 512, "out-of-bounds write to shared memory at offset 512 of 512"),
        (16, 0, -16, "out-of-bounds write to shared memory at offset -16 of 512"),
        (16, 1, 0, "misaligned cp.async at line 5: the global address is not a multiple of 16"),
        (16, 0, 8, "misaligned cp.async at line 5: shared address 8 is not a multiple of 16"),
        (8, 0, 0, "cp.async.cg of 8 bytes at line 5: only 16 is legal"),
    ],
)
def test_a_bad_address_is_laid_to_the_copy_that_gave_it(emulate, bytes, source, target, message):
    def launch():
        a, o = np.zeros(128, np.float32), np.zeros(1, np.float32)
        emulate(BAD.replace("BYTES", str(bytes)), a, o, np.int32(source), np.int32(target), threads=1, shared=512)

    if message is None:
        launch()
    else:
        with pytest.raises(KernelCrashed, match=message):
            launch()
