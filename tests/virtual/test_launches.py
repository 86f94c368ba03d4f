"""Triton launches on the virtual GPU compute what they should; faults are named by the line of the Triton source."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from evoengine.devices.base import KernelRaced
from evoengine.errors import UsageError
from evoengine.sass.core import Races
from evoengine.virtual import activate, deactivate
from evoengine.virtual import arguments as module_arguments
from evoengine.virtual import device as module
from evoengine.virtual.device import RaceWarning, VirtualGpu, VirtualGpuError
from tests.support.exhaustive import more
from tests.support.machine_code import require_tools

triton = pytest.importorskip("triton", reason="Triton is not installed")
import torch  # noqa: E402

from benchmarks import triton_kernels  # noqa: E402
from tests.virtual import triton_kernels as kernels  # noqa: E402

N = 5000
imported_before = triton.testing.do_bench
"""as a program has it that imports it before there is a virtual GPU"""


pytestmark = pytest.mark.usefixtures("compiled_anew")


@pytest.fixture
def gpu():
    require_tools()
    yield activate("h100")
    deactivate()


def line_of(text: str) -> int:
    lines = Path(kernels.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def add(kernel, x, y, out, n, **options):
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, **options)


# ── what is computed ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_launch_computes_and_is_predicted(gpu: VirtualGpu):
    x, y, out = torch.randn(N), torch.randn(N), torch.full((N + 8,), 7.0)
    add(kernels.add, x, y, out, N, BLOCK=1024)
    assert torch.equal(out[:N], x + y) and (out[N:] == 7.0).all()
    assert 1 < gpu.now.us < 10
    assert "add            1" in gpu.summary() and "num_warps=4" in gpu.summary()


def test_views_of_one_storage_are_read_and_written_in_place(gpu: VirtualGpu):
    whole = torch.arange(3 * N, dtype=torch.float32)
    before = whole.clone()
    add(kernels.add, whole[:N], whole[N : 2 * N], whole[:N], N, BLOCK=1024)
    assert torch.equal(whole[:N], before[:N] + before[N : 2 * N]) and torch.equal(whole[N:], before[N:])


def test_scalars_of_all_kinds_and_none_are_passed(gpu: VirtualGpu):
    out = torch.zeros(32, dtype=torch.float64)
    kernels.store_scalars[(1,)](out, None, True, -5, 2**40, 0.25, BLOCK=32)
    assert (out == 2**40 - 5 + 0.25).all()


@pytest.mark.parametrize("name", ["h100", *more(["a100", "l4", "rtx3090", "rtx2080ti"])])
def test_shared_memory_barriers_and_tensor_cores_work(gpu: VirtualGpu, name: str):
    activate(name)
    x, out = torch.randn(3, 300), torch.empty(3, 300)
    triton_kernels.softmax[(3,)](x, out, 300, BLOCK=512)
    torch.testing.assert_close(out, torch.softmax(x, 1))
    a, b, c = torch.randn(70, 96).half(), torch.randn(96, 40).half(), torch.empty(70, 40)
    triton_kernels.matmul[(2, 1)](a, b, c, 70, 40, 96, M=64, N=64, K=32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "bytes_"),
    [(torch.float8_e4m3fn, triton.language.float8e4nv), *more([(torch.float8_e5m2, triton.language.float8e5)])],
)
def test_products_of_bytes_of_which_one_operand_is_in_registers(gpu: VirtualGpu, dtype, bytes_):
    a, b, out = torch.randn(64, 128), torch.randn(32, 128).to(dtype), torch.empty(64, 32)
    kernels.rounded_product[(1,)](a, b, out, K=128, BYTES=bytes_)
    expected = a.to(dtype).float() @ b.float().t()
    # each of the four instructions cuts its 32 products and the sums to 13 bits below the largest
    torch.testing.assert_close(out, expected, rtol=0, atol=4 * 34 * 2.0**-13 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["h100", *more(["a100"])])
def test_host_tensor_descriptors_are_tensor_maps_or_pointers(gpu: VirtualGpu, name: str):
    from triton.tools.tensor_descriptor import TensorDescriptor

    activate(name)
    whole = torch.randn(65, 128).half()
    source, target = whole[1:], torch.zeros(64, 128).half()
    both = [TensorDescriptor.from_tensor(t, [32, 64]) for t in (source, target)]
    kernels.copy_tile[(2, 2)](*both, ROWS=32, COLS=64)
    assert torch.equal(target, source)


DTYPES = [torch.float16, torch.float8_e5m2, torch.float64, torch.int32, torch.uint8, torch.int64]


@pytest.mark.parametrize("dtype", [torch.int8, *more(DTYPES)])
def test_tensor_maps_that_a_program_makes_have_elements_of_every_type(gpu: VirtualGpu, dtype):
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
    source, target = (torch.randn(50, 96) * 9).to(dtype), torch.zeros(50, 96).to(dtype)
    kernels.copy_by_own_map[(2, 3)](source, target, 50, 96, ROWS=32, COLS=32)
    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))


def test_a_tensor_map_has_up_to_five_dimensions(gpu: VirtualGpu):
    from triton.tools.tensor_descriptor import TensorDescriptor

    source, target = torch.randn(2, 4, 2, 4, 32).half(), torch.zeros(1, 2, 1, 2, 16).half()
    box = [1, 2, 1, 2, 16]
    both = [TensorDescriptor.from_tensor(tensor, box) for tensor in (source, target)]
    kernels.copy_block[(1,)](*both, *box)
    assert torch.equal(target, source[1:, 2:, 1:, 2:, 16:])


def test_a_table_has_addresses_of_tensors_that_are_no_arguments(gpu: VirtualGpu):
    rows, other = [torch.randn(64) for _ in range(3)], torch.randn(64)
    out = torch.empty(64)
    kernels.sum_of_pointed[(1,)](torch.tensor([row.data_ptr() for row in rows]), out, 3, N=64)
    torch.testing.assert_close(out, sum(rows))
    wild = torch.tensor([rows[0].data_ptr(), other.data_ptr() + 8 * 256 * 4096])
    with pytest.raises(VirtualGpuError, match="outside all tensors"):
        kernels.sum_of_pointed[(1,)](wild, out, 2, N=64)


def test_what_a_kernel_prints_is_printed_and_an_assertion_that_fails_is_an_error(gpu: VirtualGpu, capfd):
    x = torch.tensor([1.5])
    says = triton.JITFunction(kernels.says.fn, debug=True)
    says[(1,)](x, 2, num_warps=1)
    assert "value: 1.5" in capfd.readouterr().out
    with pytest.raises(VirtualGpuError, match=r"triton_kernels.py:\d+: .*: assertion `n is too large` failed"):
        says[(1,)](x, 4)


# ── what is reported ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_mask_is_an_error_with_the_line_of_the_load(gpu: VirtualGpu):
    x, y, out = torch.randn(N), torch.randn(N), torch.empty(N)
    line = line_of("tl.load(x + at) +")
    with pytest.raises(VirtualGpuError, match=rf"\(triton_kernels.py:{line}\).* outside all tensors; .* into x"):
        add(kernels.add_without_mask, x, y, out, N, BLOCK=1024)
    assert "failed: kernel add_without_mask" in gpu.summary()


def test_a_race_warns_with_the_line_of_the_store_and_the_launch_is_completed(gpu: VirtualGpu):
    out = torch.full((190,), -1, dtype=torch.int32)
    line = line_of("tl.store(out + at, at * 0 + number")
    with pytest.warns(RaceWarning, match=rf"\(triton_kernels.py:{line}\).* nothing orders the two") as found:
        kernels.overlap[(3,)](out, 190, BLOCK=64)
    assert found[0].filename == __file__
    assert gpu.raced and "race: kernel overlap" in gpu.summary()
    assert out[1:63].eq(0).all() and out[64:126].eq(1).all() and out[127:].eq(2).all()


def test_warps_that_load_an_element_which_another_one_stores_race_only_if_they_do_so_by_another_instruction(gpu):
    """A tile of 32 elements has four warps, of which three compute what nobody stores."""
    x = torch.arange(30.0)
    kernels.double_in_place[(1,)](x, 30, BLOCK=32)
    assert torch.equal(x, 2 * torch.arange(30.0)) and not gpu.raced
    x = torch.arange(120.0)
    kernels.scale_in_place[(1,)](x, 120, BLOCK=128, num_warps=8)
    torch.testing.assert_close(x, torch.arange(120.0) / 119)
    assert not gpu.raced
    with pytest.warns(RaceWarning, match="which `.*LDG.* reads in .* nothing orders the two|which `.*STG.* writes in"):
        kernels.add_the_next_in_place[(1,)](torch.arange(250.0), 250, BLOCK=256)
    with pytest.warns(RaceWarning, match="counter, which `.*: nothing orders the two"):
        kernels.count_without_a_barrier[(1,)](torch.zeros(64), torch.zeros(1, dtype=torch.int32), BLOCK=64)


def test_after_a_race_the_launch_begins_from_what_it_found(gpu: VirtualGpu, monkeypatch):
    """Its first attempt, whose writes are undone, has added to the counter already."""
    counter, attempts, run = torch.zeros(1, dtype=torch.int32), [], module.core.run

    def raced_at_its_end(*arguments, races, **options):
        attempts.append(races)
        run(*arguments, races=races, **options)
        if races:
            raise KernelRaced("at its end")

    monkeypatch.setattr(module.core, "run", raced_at_its_end)
    with pytest.warns(RaceWarning, match="kernel increment: at its end"):
        kernels.increment[(5,)](counter)
    assert counter.item() == 5 and attempts == [Races.NO_REPLICAS, Races.NONE]


def test_a_barrier_that_is_taken_out_of_the_binary_is_a_race(gpu: VirtualGpu, monkeypatch):
    """Several of them; the same kernel with all of them has none."""
    x, out, listing = torch.randn(3, 300), torch.empty(3, 300), module.linked_listing
    triton_kernels.softmax[(3,)](x, out, 300, BLOCK=512)
    assert not gpu.raced
    monkeypatch.setattr(module, "linked_listing", lambda *of: re.sub(r"BAR\.SYNC[^;]*;", "NOP;", listing(*of)))
    with pytest.warns(RaceWarning, match="kernel softmax, .* shared address .*: nothing orders the two"):
        triton_kernels.softmax[(3,)](x, out, 300, BLOCK=512, num_warps=2)


def test_a_tensor_that_is_not_on_the_cpu_is_refused_with_what_to_do(gpu: VirtualGpu):
    elsewhere = torch.empty(N, device="meta")
    with pytest.raises(VirtualGpuError, match="argument out is a tensor on meta; .* leave device=... out"):
        add(kernels.add, torch.empty(N), torch.empty(N), elsewhere, N, BLOCK=1024)


def test_a_launch_of_hours_is_refused_or_sampled(gpu: VirtualGpu, monkeypatch):
    monkeypatch.setattr(module, "INSTRUCTIONS_PER_SECOND", 0.1)
    x, y, out = torch.randn(N), torch.randn(N), torch.zeros(N)
    with pytest.raises(VirtualGpuError, match="kernel add: executing it would take about .* hours; with --sample"):
        add(kernels.add, x, y, out, N, BLOCK=128)
    assert not out.any()
    sampling = activate("h100", sample=True)
    add(kernels.add, x, y, out, N, BLOCK=128)
    assert 0 < out.count_nonzero() <= 128
    assert "1 launches were sampled" in sampling.summary()


def test_a_launch_is_predicted_whose_blocks_make_tensor_maps_in_much_scratch_memory(gpu: VirtualGpu):
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
    blocks = module_arguments.WHOLE_BYTES // 128 + 1
    x = torch.zeros(blocks * 8, 64, dtype=torch.float16)
    gpu.only_predicts = True
    kernels.copy_by_own_map[(blocks, 1)](x, torch.empty_like(x), len(x), 64, ROWS=8, COLS=64)
    assert gpu.now.unpredicted == 0 and gpu.now.us > 0


def test_products_of_tensor_cores_count_towards_the_hours(monkeypatch):
    require_tools()
    monkeypatch.setattr(module, "PRODUCTS_PER_SECOND", 1.0)
    a, b, out = torch.randn(64, 32).half(), torch.randn(32, 64).half(), torch.zeros(64, 64)
    try:
        for gpu in ("h100", "a100", "rtx5090"):  # the last without predicted times
            activate(gpu)
            with pytest.raises(VirtualGpuError, match=r"executing it would take about 36\.4 hours"):
                triton_kernels.matmul[(1, 1)](a, b, out, 64, 64, 32, M=64, N=64, K=32)
    finally:
        deactivate()


# ── benchmarks ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_do_bench_gives_the_predicted_time_and_executes_once(gpu: VirtualGpu):
    counter = torch.zeros(1, dtype=torch.int32)
    ms = triton.testing.do_bench(lambda: kernels.increment[(8,)](counter))
    assert counter.item() == 8
    counter.zero_()
    before = gpu.now.us
    kernels.increment[(8,)](counter)
    assert ms == pytest.approx((gpu.now.us - before) / 1e3) and counter.item() == 8


def test_what_launches_nothing_has_no_time(gpu: VirtualGpu):
    assert triton.testing.do_bench(lambda: torch.ones(3) + 1) == math.inf


def test_a_benchmark_that_fails_ends(gpu: VirtualGpu):
    counter, calls = torch.zeros(1, dtype=torch.int32), []

    def fails_later():
        calls.append(1)
        if len(calls) > 2:
            raise KeyError
        kernels.increment[(1,)](counter)

    with pytest.raises(KeyError):
        imported_before(fails_later)
    kernels.increment[(1,)](counter)
    assert counter.item() == 2


def test_an_autotuner_picks_by_prediction_and_executes_the_best_alone(gpu: VirtualGpu):
    n = 1 << 19
    x, y, out = torch.randn(n), torch.randn(n), torch.empty(n)
    add(kernels.tuned_add, x, y, out, n)
    assert torch.equal(out, x + y)
    times = {config.kwargs["BLOCK"]: ms[0] for config, ms in kernels.tuned_add.configs_timings.items()}
    assert times[1024] < times[32] and kernels.tuned_add.best_config.kwargs["BLOCK"] == 1024
    assert gpu.now.launches == 3 and "2 launches of benchmarks" in gpu.summary()


def test_when_it_is_gone_its_kernels_are_freed_and_triton_asks_for_its_own_gpu(gpu: VirtualGpu):
    kernels.increment[(1,)](torch.zeros(1, dtype=torch.int32))
    (compiled,) = kernels.increment.device_caches[0][0].values()
    deactivate()
    triton.runtime.driver.active.utils.unload_module(compiled.module)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="0 active drivers"):
            kernels.increment[(1,)](torch.zeros(1, dtype=torch.int32))


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_gpu_whose_machine_code_cannot_be_executed_is_refused():
    with pytest.raises(UsageError, match="tcgen05 are missing; that of sm_75 to sm_90 and sm_120 can"):
        activate("b200")


def test_a_gpu_without_rates_executes_and_predicts_no_time():
    require_tools()
    gpu = activate("rtx5090")
    try:
        counter = torch.zeros(1, dtype=torch.int32)
        kernels.increment[(2,)](counter)
        assert counter.item() == 2
        assert "no time is predicted: the model of machine code knows sm_75" in gpu.summary()
        assert math.isinf(triton.testing.do_bench(lambda: kernels.increment[(2,)](counter)))
    finally:
        deactivate()


@pytest.mark.parametrize("version", ["3.6.0", "4.0.0", "unknown"])
def test_another_version_of_triton_is_refused(monkeypatch, version: str):
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(UsageError, match=rf"this is Triton {version}; a virtual GPU works with 3.7 to 3.9"):
        activate("h100")
