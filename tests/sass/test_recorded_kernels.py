"""Machine code of kernels such as tuners' benchmarks record, executed and held against NumPy: small ones written here,
and chosen blocks of the recorded ones themselves where EVOENGINE_RECORDED_KERNELS names their folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from evoengine.accuracy.compilers import InstalledNvrtc, compile_and_list
from evoengine.accuracy.dataset import Buffer, RecordedKernel, find_recordings, read_kernel, read_recording
from evoengine.devices.base import ScalarArgument, TensorArgument
from evoengine.gpu import find_gpu
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import read_kernel as read_binary
from evoengine.sass.launch import DrawnArgument, Geometry, Launch, prepare
from tests.support.exhaustive import more
from tests.support.machine_code import require_tools

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")
RECORDED = os.environ.get("EVOENGINE_RECORDED_KERNELS")
ROWS = 4
"""configurations of each recorded kernel that are executed"""
random = np.random.default_rng(7)


def some(*architectures: str) -> list:
    """As cases: these, and the others exhaustive. Each architecture is one of some kernel's."""
    return [*architectures, *more(arch for arch in ARCHITECTURES if arch not in architectures)]


def normal(*shape: int) -> np.ndarray:
    return random.standard_normal(shape, np.float32)


def execute(
    text: str, arch: str, geometry: Geometry, arguments: Sequence, constants: Mapping[str, np.ndarray] | None = None,
    blocks: Sequence[int] = (), entry: str = "kernel",
) -> Launch:  # fmt: skip
    require_tools()
    compiled = compile_and_list(InstalledNvrtc(), text, arch, ())
    program = Program(compiled.listing, entry)
    assert program.unknown == {}
    binary = read_binary(compiled.cubin, entry)
    of_binary = {name: value.tobytes() for name, value in (constants or {}).items() if name in binary.constants}
    launch = prepare(binary, geometry, arguments, 1, of_binary)
    run(program, launch, blocks)
    return launch


# ── references ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Expected:
    """Values in float64, and the size of what was summed for each: rounding is in proportion to it."""

    values: np.ndarray
    summed: np.ndarray

    def check(self, found: np.ndarray) -> None:
        np.testing.assert_array_less(np.abs(found - self.values), 2e-6 * self.summed + 1e-30)


def convolved(image: np.ndarray, weights: np.ndarray, y: np.ndarray, x: np.ndarray) -> Expected:
    values, summed = np.zeros(len(y)), np.zeros(len(y))
    for (i, j), weight in np.ndenumerate(weights.astype(np.float64)):
        part = image[y + i, x + j] * weight
        values += part
        summed += np.abs(part)
    return Expected(values, summed)


def multiplied(a: np.ndarray, b: np.ndarray, c: np.ndarray, m: np.ndarray, n: np.ndarray) -> Expected:
    """Of A [k, m], B [k, n] and what stood in C, the elements (m, n) of A transposed times B plus C."""
    rows, columns = np.unique(m), np.unique(n)
    left, right = a[:, rows].astype(np.float64), b[:, columns].astype(np.float64)
    at = np.searchsorted(rows, m), np.searchsorted(columns, n)
    return Expected((left.T @ right)[at] + c, (np.abs(left).T @ np.abs(right))[at] + np.abs(c))


def dedispersed(samples: np.ndarray, shifts: np.ndarray, step: float, dm: np.ndarray, sample: np.ndarray) -> np.ndarray:
    """Whole numbers below 2**24, which float32 sums exactly."""
    total = np.zeros(len(dm))
    for channel, shift in enumerate(shifts):
        whole = (dm.astype(np.float32) * np.float32(step) * shift).astype(np.uint32)
        total += samples[channel, sample + whole]
    return total


# ── small kernels ───────────────────────────────────────────────────────────────────────────────────────────────────

CONVOLUTION = """
__constant__ float weights[25];
extern "C" __global__ void kernel(float *out, const float *image) {
    __shared__ float tile[8 + 4][32 + 4 + 1];
    int x0 = blockIdx.x * 32, y0 = blockIdx.y * 8;
    for (int y = threadIdx.y; y < 12; y += 4)
        for (int x = threadIdx.x; x < 36; x += 32)
            if (y0 + y < 24 && x0 + x < 74) tile[y][x] = __ldg(&image[(y0 + y) * 74 + x0 + x]);
    __syncthreads();
    #pragma unroll
    for (int turn = 0; turn < 2; turn++) {
        int y = threadIdx.y + 4 * turn;
        float sum = 0;
        for (int i = 0; i < 5; i++)
            for (int j = 0; j < 5; j++) sum += tile[y + i][threadIdx.x + j] * weights[i * 5 + j];
        if (y0 + y < 20 && x0 + threadIdx.x < 70) out[(y0 + y) * 70 + x0 + threadIdx.x] = sum;
    }
}
"""
PRODUCT = """
extern "C" __global__ void kernel(const float4 *a, const float2 *b, float *c, int m, int n, int k, float beta) {
    __shared__ float4 left[16][8];
    __shared__ float2 right[16][8];
    float sum[4][2] = {};
    for (int from = 0; from < k; from += 16) {
        for (int row = threadIdx.y; row < 16; row += 8) {
            left[row][threadIdx.x] = a[((from + row) * m + blockIdx.x * 32) / 4 + threadIdx.x];
            right[row][threadIdx.x] = b[((from + row) * n + blockIdx.y * 16) / 2 + threadIdx.x];
        }
        __syncthreads();
        #pragma unroll
        for (int row = 0; row < 16; row++) {
            float4 x = left[row][threadIdx.x];
            float2 y = right[row][threadIdx.y];
            float of_a[4] = {x.x, x.y, x.z, x.w}, of_b[2] = {y.x, y.y};
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 2; j++) sum[i][j] += of_a[i] * of_b[j];
        }
        __syncthreads();
    }
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < 4; i++) {
            float *at = c + (blockIdx.y * 16 + threadIdx.y * 2 + j) * m + blockIdx.x * 32 + threadIdx.x * 4 + i;
            *at = sum[i][j] + beta * *at;
        }
}
"""
DEDISPERSION = """
extern "C" __global__ void kernel(const unsigned char *samples, float *out, const float *shifts) {
    int sample = blockIdx.x * 40 + threadIdx.x, dm = blockIdx.y * 6 + threadIdx.y * 2;
    for (int turn = 0; turn < 2; turn++, dm++) {
        if (sample >= 100 || dm >= 15) continue;
        float sum = 0;
        for (int channel = 0; channel < 37; channel++) {
            unsigned shift = (dm * 0.3f) * shifts[channel];
            sum += samples[channel * 160 + sample + shift];
        }
        out[dm * 100 + sample] = sum;
    }
}
"""


@pytest.mark.parametrize("arch", some("sm_75", "sm_90a"))
def test_a_convolution_through_shared_and_constant_memory(arch):
    image, weights, out = normal(24, 74), normal(5, 5), np.empty((20, 70), np.float32)
    arguments = [TensorArgument("out", out, True), TensorArgument("image", image)]
    launch = execute(CONVOLUTION, arch, Geometry((3, 3, 1), (32, 4, 1)), arguments, {"weights": weights})
    y, x = np.indices(out.shape).reshape(2, -1)
    convolved(image, weights, y, x).check(launch.results()["out"].reshape(-1))


@pytest.mark.parametrize("arch", some("sm_80", "sm_86"))
def test_a_product_in_tiles_of_registers_that_adds_to_what_was_there(arch):
    m, n, k = 96, 48, 64
    a, b, c = normal(k, m), normal(k, n), normal(n, m)
    arguments = [
        *(TensorArgument("a", a), TensorArgument("b", b), DrawnArgument("c", c.nbytes, "fp32", True, c.reshape(-1))),
        *(ScalarArgument(name, np.int32(size)) for name, size in (("m", m), ("n", n), ("k", k))),
        ScalarArgument("beta", np.float32(1)),
    ]
    launch = execute(PRODUCT, arch, Geometry((m // 32, n // 16, 1), (8, 8, 1)), arguments)
    found = held(launch, "c", np.float32).reshape(n, m)
    at_n, at_m = np.indices(found.shape).reshape(2, -1)
    multiplied(a, b, c[at_n, at_m], at_m, at_n).check(found[at_n, at_m])


@pytest.mark.parametrize("arch", some("sm_89"))
def test_a_dedispersion_of_bytes_at_shifts_from_memory(arch):
    samples = random.integers(0, 256, (37, 160), np.uint8)
    shifts, out = np.linspace(12, 0, 37, dtype=np.float32), np.empty((15, 100), np.float32)
    arguments = [
        TensorArgument("samples", samples),
        TensorArgument("out", out, True),
        TensorArgument("shifts", shifts),
    ]
    launch = execute(DEDISPERSION, arch, Geometry((3, 3, 1), (40, 3, 1)), arguments)
    dm, sample = np.indices(out.shape).reshape(2, -1)
    np.testing.assert_array_equal(launch.results()["out"].reshape(-1), dedispersed(samples, shifts, 0.3, dm, sample))


def test_a_wrong_weight_is_seen():
    image, weights = normal(24, 74), normal(5, 5)
    y, x = np.indices((20, 70)).reshape(2, -1)
    other = weights.copy()
    other[2, 3] *= 1.001
    with pytest.raises(AssertionError):
        convolved(image, weights, y, x).check(convolved(image, other, y, x).values)


# ── the recorded ones ───────────────────────────────────────────────────────────────────────────────────────────────


def held(launch: Launch, name: str, dtype: type) -> np.ndarray:
    return next(a.held for a in launch.allocations if a.name == name).view(dtype)


def expected_of(name: str, values: Mapping[str, np.ndarray], at: np.ndarray) -> Expected | np.ndarray:
    """Of a recorded kernel, at places [n] of its output."""
    if name.startswith("convolution"):
        image, weights = values["input"].reshape(4110, 4110), values["d_filter"][:225].reshape(15, 15)
        return convolved(image, weights, at // 4096, at % 4096)
    if name == "gemm":
        a, b = values["agm"].reshape(4096, 4096), values["bgm"].reshape(4096, 4096)
        return multiplied(a, b, values["cgm"][at].astype(np.float64), at % 4096, at // 4096)
    samples = values["input"].reshape(1536, 25650)
    return dedispersed(samples, values["shifts"], 0.02, at // 25000, at % 25000)


def recorded() -> list[Path]:
    return sorted(p.parent for p in Path(RECORDED).glob("*/kernel.json")) if RECORDED else []


def check_blocks(kernel: RecordedKernel, arch: str, config: Mapping[str, object]) -> int:
    """Runs the first, a middle and the last block; returns how many elements they wrote."""
    buffers = {b.name: b for b in (*kernel.arguments, *kernel.constants) if isinstance(b, Buffer)}
    values = {name: buffer.contents(config, most=None) for name, buffer in buffers.items()}
    output = next(name for name, buffer in buffers.items() if buffer.output)
    values[output] = random.standard_normal(len(values[output]), np.float32)
    arguments = [
        DrawnArgument(a.name, a.bytes(config), str(a.dtype), a.output, values[a.name])
        if isinstance(a, Buffer)
        else a.argument(config)
        for a in kernel.arguments
    ]
    geometry = kernel.geometry(config)
    last = geometry.grid[0] * geometry.grid[1] - 1
    middle = geometry.grid[1] // 2 * geometry.grid[0] + geometry.grid[0] // 3
    constants = {c.name: values[c.name] for c in kernel.constants}
    launch = execute(
        kernel.source(config), arch, geometry, arguments, constants, sorted({0, middle, last}), kernel.entry
    )
    found = held(launch, output, np.float32)
    at = np.flatnonzero(found.view(np.uint32) != values[output].view(np.uint32))
    expected = expected_of(kernel.name, values, at)
    if isinstance(expected, Expected):
        expected.check(found[at])
    else:
        np.testing.assert_array_equal(found[at], expected)
    return len(at)


@pytest.mark.skipif(not RECORDED, reason="EVOENGINE_RECORDED_KERNELS names no folder of recorded kernels")
@pytest.mark.parametrize("folder", recorded(), ids=lambda folder: folder.name)
def test_blocks_of_a_recorded_kernel(folder):
    kernel = read_kernel(folder)
    recording = read_recording(find_recordings(folder)[0], kernel)
    for row in recording.rows[:ROWS]:
        written = check_blocks(kernel, find_gpu(recording.gpu).arch, row.config)
        threads = np.prod(kernel.geometry(row.config).threads)
        assert written >= threads, f"{row.config}: {written} elements by three blocks of {threads} threads"
