import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run
from evoengine.devices.base import KernelCrashed, KernelHung, ScalarArgument, TensorArgument
from evoengine.errors import ToolDied
from evoengine.records import Launch, Source
from tests.support.waiting import wait_for

ORDER = """
extern "C" __global__ void order(int* blocks, int* threads) {
    __shared__ int next;
    if (threadIdx.x == 0) next = 0;
    __syncthreads();
    int place = atomicAdd(&next, 1);
    if (blockIdx.x == 0) threads[place] = threadIdx.x;
    if (threadIdx.x == 0) blocks[1 + atomicAdd(blocks, 1)] = blockIdx.x;
}
"""


def test_every_seed_is_another_order_of_blocks_and_threads_and_the_same_each_time(emulate):
    def orders(seed):
        zeros = np.zeros(17, np.int32), np.zeros(64, np.int32)
        got = emulate(ORDER, *zeros, grid=(16, 1, 1), threads=64, seed=seed)
        return tuple(got["blocks"][1:]), tuple(got["threads"])

    drawn = [orders(seed) for seed in (0, 1, 2, 3)]
    assert orders(2) == drawn[2]
    for kind, count in ((0, 16), (1, 64)):
        assert len({d[kind] for d in drawn}) == 4
        assert all(sorted(d[kind]) == list(range(count)) for d in drawn)


def test_a_good_kernel_gives_the_same_bits_for_every_seed_over_a_grid_of_three_dimensions(emulate, floats):
    text = """
extern "C" __global__ void f(const float* a, float* o) {
    __shared__ float tile[64];
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    tile[threadIdx.x] = a[block * blockDim.x + threadIdx.x];
    __syncthreads();
    o[block * blockDim.x + threadIdx.x] = tile[(threadIdx.x + 1) % blockDim.x] + block;
}
"""
    a = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
    right = np.roll(a, -1, axis=1) + np.arange(24, dtype=np.float32)[:, None]
    for seed in range(3):
        o = emulate(text, a, np.zeros_like(a), grid=(2, 3, 4), threads=64, seed=seed)["o"]
        np.testing.assert_array_equal(o, right)


def test_all_tensors_come_back_by_name_with_their_type_and_shape_and_inputs_as_they_were(emulate):
    text = 'extern "C" __global__ void f(const short* a, double* o, long long n, float s) { o[n] = a[1] * s; }'
    a = np.arange(4, dtype=np.int16).reshape(2, 2)
    o = np.full((3, 1), 7.0)
    got = emulate(text, a, o, np.int64(2), np.float32(2.5), threads=1)
    assert {name: (v.dtype, v.shape) for name, v in got.items()} == {"a": (a.dtype, (2, 2)), "o": (o.dtype, (3, 1))}
    assert got["o"].ravel().tolist() == [7, 7, 2.5]
    np.testing.assert_array_equal(got["a"], a)
    assert o.ravel().tolist() == [7, 7, 7]


TAKES = 'extern "C" __global__ void f(float* o, int n, float s) {}'


ONE_WARP = Launch((1, 1, 1), 32, 0)


def launch_takes(*arguments, launch=ONE_WARP):
    o = TensorArgument("o", np.zeros(4, np.float32), output=True)
    run(build(Source(TAKES, "f", launch), "sm_90a"), "f", launch, [o, *arguments], 0, 20)


N, S = ScalarArgument("n", np.int32(1)), ScalarArgument("s", np.float32(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((N, S), None),
        ((N,), "the kernel takes 3 parameters, the launch gives 2, kernel f"),
        ((S, N), "parameter 1 takes a 4-byte integer, the launch gives s, a 4-byte float, kernel f"),
        ((ScalarArgument("n", np.int64(1)), S), "1 takes a 4-byte integer, the launch gives n, a 8-byte integer"),
        ((TensorArgument("n", np.zeros(1)), S), "parameter 1 takes a 4-byte integer, the launch gives tensor n"),
    ],
)
def test_arguments_must_match_the_kernels_parameters(arguments, message):
    if message is None:
        launch_takes(*arguments)
    else:
        with pytest.raises(KernelCrashed, match=message):
            launch_takes(*arguments)


def test_a_block_has_at_most_1024_threads():
    launch_takes(N, S, launch=Launch((1, 1, 1), 1024, 0))
    with pytest.raises(KernelCrashed, match="a block of 1025 threads: it must have 1 to 1024"):
        launch_takes(N, S, launch=Launch((1, 1, 1), 1025, 0))


SPIN = 'extern "C" __global__ void spin(const int* n, float* o) { while (n[0] == 0) o[0] += 1; }'


def test_a_thread_that_computes_for_ever_is_ended_by_the_timeout(emulate, floats):
    with pytest.raises(KernelHung, match=r"no end after 0.3 s, kernel spin, grid \(2, 1, 1\)"):
        emulate(SPIN, np.zeros(1, np.int32), floats(1), timeout=0.3, grid=(2, 1, 1))


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("__trap();", "__trap at line 2, kernel f"),
        ("assert(n == 1);", "assertion failed at line 2: n == 1, kernel f"),
        ("o[0] = 100 / n;", "integer division by zero, kernel f"),
        ('asm volatile("bar.sync 16;");', "named barrier 16 at line 2: barriers are numbered 0 to 15"),
    ],
)
def test_a_kernel_that_gives_up_is_told_with_its_thread(emulate, floats, statement, message):
    text = f'extern "C" __global__ void f(float* o, int n) {{\n if (threadIdx.x == 9) {{ {statement} }} }}'
    with pytest.raises(KernelCrashed, match=message + r".*block \(0,0,0\), thread 9"):
        emulate(text, floats(1), np.int32(0))


def test_a_process_that_dies_without_a_word_is_named_by_its_signal(tmp_path):
    executable = tmp_path / "dies"
    executable.write_text("#!/bin/sh\nkill -9 $$\n")
    executable.chmod(0o755)
    with pytest.raises(ToolDied, match="the emulator's process, kernel f, was ended by SIGKILL"):
        run(executable, "f", Launch((1, 1, 1), 32, 0), [], 0, 20)


def test_the_kernel_dies_with_the_process_that_launched_it(tmp_path):
    executable = build(Source(SPIN, "spin", Launch((1, 1, 1), 1, 0)), "sm_90a")
    script = (
        "import numpy as np; from pathlib import Path; from evoengine.records import Launch\n"
        "from evoengine.devices.base import TensorArgument; from evoengine.cuda_emulator.run import run\n"
        f"run(Path({str(executable)!r}), 'spin', Launch((1, 1, 1), 1, 0),"
        " [TensorArgument('n', np.zeros(1, np.int32)), TensorArgument('o', np.zeros(1, np.float32), True)], 0, 60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        child = wait_for(lambda: child_running(parent.pid, executable.name))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_for(lambda: not alive(child))
    finally:
        parent.kill()


def child_running(parent, name):
    """The pid of the child once it runs the kernel: it has asked to die with its parent before it reads a tensor."""
    children = f"/proc/{parent}/task/{parent}/children"
    if not os.path.exists(children):
        return None
    with open(children) as file:
        for pid in file.read().split():
            with open(f"/proc/{pid}/stat") as stat:
                fields = stat.read().rsplit(")", 1)
            if name[:15] in fields[0] and fields[1].split()[0] == "R" and int(fields[1].split()[11]) > 2:
                return int(pid)
    return None


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_launch_is_limited_by_its_own_time_and_not_by_that_of_a_busy_machine(tmp_path):
    executable = build(
        Source('extern "C" __global__ void f(int* o) { *o = 5; }', "f", Launch((1, 1, 1), 32, 0)), "sm_90a"
    )
    late = tmp_path / "late"
    late.write_text(f"#!/bin/sh\nsleep 1.2\nexec {executable}\n")
    late.chmod(0o755)
    got = run(late, "f", Launch((1, 1, 1), 32, 0), (TensorArgument("o", np.zeros(1, np.int32), output=True),), 1, 1.0)
    assert got["o"][0] == 5
