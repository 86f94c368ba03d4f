"""What a program that asks for CUDA gets: repeated launches, benchmarks, graphs and Proton's profiles."""

from __future__ import annotations

import json
import math

import pytest

from evoengine.virtual import activate, deactivate
from evoengine.virtual.device import VirtualGpu
from tests.support.machine_code import require_tools

triton = pytest.importorskip("triton", reason="Triton is not installed")
import torch  # noqa: E402

from evoengine.virtual.map_cuda import cuda_on_cpu  # noqa: E402
from tests.virtual import triton_kernels as kernels  # noqa: E402

N = 3000


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    require_tools()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    device = activate("h100")
    with cuda_on_cpu(device, drop_repeats=True):
        yield device
    deactivate()


@pytest.fixture
def executed(gpu: VirtualGpu, monkeypatch) -> list[str]:
    """Names of the kernels that are executed from now on."""
    names, own = [], gpu._execute
    monkeypatch.setattr(gpu, "_execute", lambda use, *of: names.append(use.name) or own(use, *of))
    return names


def sum_of(x, y):
    out = torch.empty(N, device="cuda")
    kernels.add[(triton.cdiv(N, 1024),)](x, y, out, N, BLOCK=1024)
    return out


def test_of_launches_whose_results_are_dropped_the_first_alone_is_executed(gpu, executed):
    x, y = torch.randn(N, device="cuda"), torch.randn(N).cuda()
    for _ in range(50):
        sum_of(x, y)
    kept = sum_of(x, y)
    assert executed == ["add"] and gpu.now.launches == 51
    assert torch.equal(kept, x + y) and executed == ["add", "add"]
    assert "49 launches of benchmarks, of autotuners, or without an effect were predicted" in gpu.summary()


def test_a_result_that_is_seen_by_any_way_is_computed_from_what_the_inputs_were(gpu):
    x, y = torch.randn(N), torch.randn(N)
    sum_of(x, y)
    expected = x + y
    view = sum_of(x, y)[5:]
    x.zero_()
    assert torch.equal(view, expected[5:])
    array, other = sum_of(y, y).numpy(), sum_of(y, x)
    assert (array == 2 * y.numpy()).all() and torch.equal(other, y)


def test_launches_that_change_what_they_read_are_all_executed(gpu, executed):
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(5):
        kernels.increment[(3,)](counter)
    assert counter.item() == 15 and executed == ["increment"] * 5


def test_memory_that_is_not_pytorchs_is_written_at_once(gpu):
    import numpy as np

    x = torch.randn(N)
    for _ in range(3):
        array = np.zeros(N, np.float32)
        kernels.add[(3,)](x, x, torch.from_numpy(array), N, BLOCK=1024)
        assert (array == 2 * x.numpy()).all()


def test_a_product_that_is_repeated_is_the_same_until_something_changes(gpu):
    a, b = torch.randn(20, 30), torch.randn(30, 10)
    first = (a @ b).data_ptr()
    assert (a @ b).data_ptr() == first
    kept = a @ b
    expected = kept.clone()
    kept.add_(1)
    assert torch.equal(a @ b, expected)
    a.zero_()
    assert not (a @ b).any()


def test_products_of_fp16_are_added_up_in_fp32_and_have_gradients(gpu):
    a, b = torch.randn(64, 512).half(), torch.randn(512, 32).half()
    exact = a.float() @ b.float()
    assert torch.equal(a @ b, exact.half()) and torch.equal(torch.addmm(b[:1], a, b), (exact + b[:1]).half())
    assert torch.equal(torch.nn.functional.linear(a, b.T), exact.half())
    weights = b.clone().requires_grad_()
    (a @ weights).float().sum().backward()
    assert weights.grad is not None and weights.grad.dtype == torch.float16
    assert torch.allclose(weights.grad, a.float().sum(0)[:, None].expand(512, 32).half(), atol=2e-2)


def test_torch_compile_finds_what_it_knows_of_torch(gpu):
    assert torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2)).tolist() == [2, 2]


# ── benchmarks, graphs, profiles ────────────────────────────────────────────────────────────────────────────────────


def test_benchmarks_call_twice_and_what_launches_nothing_once(gpu, executed):
    x, calls = torch.randn(N), []
    for bench in (triton.testing.do_bench, triton.testing.do_bench_cudagraph):
        before = gpu.now.us
        ms = bench(lambda: calls.append(sum_of(x, x)), quantiles=[0.5, 0.2, 0.8])
        assert ms == pytest.approx([(gpu.now.us - before) / 2e3] * 3)
    assert len(calls) == 4 and executed == ["add", "add"]
    assert triton.testing.do_bench(lambda: calls.append(0)) == math.inf and len(calls) == 5


def test_a_graph_is_executed_when_it_is_captured_and_by_each_replay(gpu):
    x, counter = torch.ones(N), torch.zeros(1, dtype=torch.int32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.increment[(2,)](counter)
        twice = x * 2
        out = sum_of(twice, x)
        halved = out.div_(2)
    assert counter.item() == 2 and (halved == 1.5).all()
    x.fill_(4)
    graph.replay()
    assert counter.item() == 4 and (twice == 8).all() and (halved == 6).all() and halved is out
    graph.reset()
    graph.replay()
    assert counter.item() == 4


def test_proton_writes_predicted_times_of_the_scopes(gpu, tmp_path):
    import triton.profiler as proton

    x = torch.randn(N)
    session = proton.start(str(tmp_path / "profile"), hook="triton")
    with proton.scope("outer", {"bytes": 100}):
        before = gpu.now.us
        sum_of(x, x)
        each = gpu.now.us - before
        proton.deactivate(session)
        sum_of(x, x)
        proton.activate(session)
    sum_of(x, x)
    proton.finalize()
    root, info = json.loads((tmp_path / "profile.hatchet").read_text())
    outer, alone = root["children"]
    assert outer["frame"]["name"] == "outer" and outer["metrics"] == {"bytes": 100}
    for add in (alone, *outer["children"]):
        assert add["frame"]["name"] == "add" and add["metrics"]["count"] == 1
        assert add["metrics"]["time (ns)"] == pytest.approx(1e3 * each)
    assert info["CUDA"]["0"]["num_sms"] == gpu.gpu.sms
