"""What evoengine.torch calls: a tuned kernel where one fits, torch elsewhere."""

from __future__ import annotations

import hashlib
import json
import struct
import threading
import warnings
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch.nn import functional

import evoengine.torch as tuned
from evoengine.errors import NothingFound, UsageError
from evoengine.ledger.store import open_ledger
from evoengine.publish.folder import write_folder
from evoengine.records import EXECUTOR, Kind
from evoengine.torch import kernels, operators
from tests.support.ledger_examples import a_figure, a_verdict, add_ranked, start_run
from tests.torch.conftest import CONFIGS, bundle_of, halfs

ATTENTION = "attention:b2,h4,s64,d64,fp16,kv2"


@pytest.fixture
def qkv():
    return halfs(2, 4, 64, 64), halfs(2, 2, 64, 64), halfs(2, 2, 64, 64)


def expected(q, k, v, causal=False, scale=None):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]) if causal else None
    return functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)


def quiet(call, *given, **named):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*given, **named)


# which kernel


def test_a_kernel_of_an_export_is_launched_on_the_tensors(h100, exports, qkv):
    tuned.use(exports(ATTENTION))
    out = quiet(tuned.attention, *qkv)
    (found,) = h100.launches()
    assert found.pointers == (*(t.data_ptr() for t in qkv), out.data_ptr())
    assert out.shape == qkv[0].shape and out.dtype == torch.float16


def test_a_kernel_is_chosen_once_for_each_shape(h100, exports, qkv, monkeypatch):
    tuned.use(exports(ATTENTION))
    asked = []
    monkeypatch.setattr(kernels.Exports, "offers", count(kernels.Exports.offers, asked))
    for _ in range(3):
        tuned.attention(*qkv)
    tuned.attention(*(t[:1] for t in qkv))
    assert len(asked) == 2 and h100.get("launches") == 4


def test_a_program_with_ever_new_shapes_remembers_a_bounded_number(h100, exports, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_CALLS", 5)
    tuned.use(exports("b1,h2,s64,d64,fp16"))
    for length in range(40, 60):
        q = halfs(1, 2, length, 64)
        quiet(tuned.attention, q, q, q)
        assert 0 < len(kernels.KERNELS.chosen) == len(kernels.KERNELS.origins) <= 5


def count(function, calls):
    def counted(*given):
        calls.append(given)
        return function(*given)

    return counted


def test_the_kernel_tuned_for_the_nearest_lengths_serves_others(h100, exports, tmp_path, qkv):
    exports("attention:b2,h4,s8192,d64,fp16,kv2", {"family": "wmma", "tile_m": 128, "tile_n": 64}, name="all/long")
    exports("attention:b2,h4,s128,d64,fp16,kv2", name="all/short")
    exports("attention:b2,h4,s64,d128,fp16,kv2", name="all/wide")
    exports("attention:b2,h4,s64,d64,fp16,kv2,causal", name="all/masked")
    tuned.use(tmp_path / "all")
    quiet(tuned.attention, *qkv)
    assert h100.launches()[0].grid == (1, 4, 2)
    assert [*kernels.KERNELS.origins.values()] == [str(tmp_path / "all" / "short")]


@pytest.mark.parametrize(
    ("problem", "gpu"),
    [("attention:b2,h4,s64,d128,fp16", "h100"), ("attention:b2,h4,s64,d64,bf16,kv2", "h100"), (ATTENTION, "h200")],
)
def test_torch_computes_what_no_kernel_fits_and_that_is_said_once(h100, exports, qkv, problem, gpu):
    tuned.use(exports(problem, gpu=gpu))
    with pytest.warns(tuned.NoKernel, match=f"torch computes {ATTENTION} on h100: no place that was named has") as said:
        found = [tuned.attention(*qkv) for _ in range(3)]
    assert len(said) == 1 and h100.launches() == []
    torch.testing.assert_close(found[2], expected(*qkv))


def test_the_first_place_with_a_kernel_counts(h100, exports, qkv, tmp_path):
    other = exports("attention:b2,h4,s64,d128,fp16", name="other")
    own = exports(ATTENTION, name="own")
    exports(ATTENTION, {"family": "wmma", "tile_m": 128, "tile_n": 64}, name="third")
    tuned.use(other, own, tmp_path / "third")
    quiet(tuned.attention, *qkv)
    assert [*kernels.KERNELS.origins.values()] == [str(own)]


def test_the_environment_names_places_where_a_program_does_not(h100, exports, qkv, monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", fresh := kernels.Kernels())
    monkeypatch.setattr(operators, "KERNELS", fresh)
    monkeypatch.setenv(kernels.PLACES_VARIABLE, str(exports(ATTENTION)))
    quiet(tuned.attention, *qkv)
    assert h100.get("launches") == 1


def test_threads_choose_one_kernel(h100, exports, qkv, monkeypatch):
    tuned.use(exports(ATTENTION))
    asked = []
    monkeypatch.setattr(kernels.Exports, "offers", count(kernels.Exports.offers, asked))
    threads = [threading.Thread(target=tuned.attention, args=qkv) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1 and h100.get("launches") == 8


@pytest.fixture
def ledger(tmp_path):
    """Two kernels of one problem, 42 and 40 TFLOPS; both judges finished with the first."""
    with open_ledger(str(tmp_path / "a.db"), create=True) as opened:
        run = start_run(opened)
        config = CONFIGS["attention"]
        opened.best_trial = add_ranked(opened, run, a_figure(42.0, Kind.MEASURED), config, "attention")
        add_ranked(opened, run, a_figure(40.0, Kind.MEASURED), config | {"tile_m": 128}, "other")
        yield opened


def of_the_ledger():
    return halfs(1, 2, 64, 32), halfs(1, 2, 64, 32), halfs(1, 2, 64, 32)


def test_the_best_kernel_of_a_ledger_is_launched(h100, ledger, tmp_path):
    ledger.record_verdict(ledger.best_trial, replace(a_verdict(), device=EXECUTOR))
    tuned.use(tmp_path / "a.db")
    with pytest.warns(tuned.NoKernel, match="no place that was named has a kernel"):
        tuned.attention(*(halfs(1, 2, 64, 64) for _ in range(3)))
    out = quiet(tuned.attention, *of_the_ledger())
    assert h100.launches()[0].pointers[3] == out.data_ptr()
    assert f"trial {ledger.best_trial} of" in [*kernels.KERNELS.origins.values()][1]


def test_a_kernel_of_a_ledger_whose_gate_was_not_finished_is_not_called(h100, ledger, tmp_path):
    tuned.use(tmp_path / "a.db")
    with pytest.warns(tuned.NoKernel, match="its gate is not finished; evoengine best"):
        tuned.attention(*of_the_ledger())
    assert h100.launches() == []


class FakeServer:
    """Answers as evoengine's service does, for one problem."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, url):
        self.url = url

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def best(self, gpu, problem):
        self.asked.append((gpu, problem))
        if problem != ATTENTION:
            raise NothingFound("none")
        return {"source_sha256": "00"}

    def bundle(self, sha256, gpu):
        files = bundle_of(ATTENTION)
        hostile = {name: b"raise SystemExit('ran')\n" for name in files if name.endswith(".py")}
        return files | hostile


def test_no_python_of_a_server_runs(h100, qkv, monkeypatch):
    monkeypatch.setattr("evoengine.service.client.Client", FakeServer)
    tuned.use("https://tuner.example")
    out = quiet(tuned.attention, *qkv)
    assert h100.launches()[0].pointers[3] == out.data_ptr()
    assert FakeServer.asked[-1] == ("h100", ATTENTION)
    with pytest.warns(tuned.NoKernel, match="no place that was named"):
        tuned.attention(*(t[:, :, :32] for t in qkv))


# what is passed on


def test_the_scale_reaches_the_kernel(h100, exports, qkv):
    tuned.use(exports(ATTENTION))
    tuned.attention(*qkv, scale=0.25)
    tuned.attention(*qkv)
    scales = [struct.unpack("f", struct.pack("i", found.scalars[4]))[0] for found in h100.launches()]
    assert scales == [0.25, 0.125]


def test_strides_that_a_kernel_cannot_follow_are_copied(h100, exports, qkv):
    tuned.use(exports(ATTENTION))
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv)
    for _ in range(2):
        out = quiet(tuned.attention, q, k, v)
        assert h100.launches()[-1].pointers[0] != q.data_ptr()
        assert out.shape == q.shape


def test_tensors_with_seq_before_heads(h100, exports, qkv):
    tuned.use(exports(ATTENTION))
    out = quiet(tuned.attention, *(t.transpose(1, 2) for t in qkv), layout="bshd")
    assert out.shape == (2, 64, 4, 64)
    assert h100.launches()[0].pointers[0] == qkv[0].data_ptr()


def test_autocast_chooses_the_kernel_of_its_dtype(h100, exports, qkv):
    tuned.use(exports(ATTENTION))
    with torch.autocast("cpu", torch.float16):
        out = quiet(tuned.attention, *(t.float() for t in qkv))
    assert out.dtype == torch.float16 and h100.get("launches") == 1


@pytest.mark.parametrize("layout", ["", ",b_nk"])
def test_a_linear_layer_calls_the_product_of_its_weight_s_layout(h100, exports, layout):
    h100.set("scalars", 3)
    exports("gemm:m6,n8,k16,fp16,bias_gelu", name="all/kn")
    tuned.use(exports("gemm:m6,n8,k16,fp16,b_nk,bias_gelu", name="all/nk").parent)
    x, weight, bias = halfs(2, 3, 16), halfs(8, 16) if layout else halfs(16, 8).t(), halfs(8)
    out = quiet(tuned.linear, x, weight, bias, "gelu")
    (found,) = h100.launches()
    assert out.shape == (2, 3, 8) and found.scalars[:3] == (6, 8, 16)
    assert found.pointers == (x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr())
    assert next(iter(kernels.KERNELS.origins.values())).endswith("nk" if layout else "kn")


def test_a_weight_that_no_kernel_reads_is_said(h100, exports):
    tuned.use(exports("gemm:m6,n8,k16,fp16"))
    x, weight = halfs(6, 16), halfs(8, 32)[:, ::2]
    with pytest.warns(tuned.NoKernel, match=r"kernels read weight as it is contiguous, \[n, k\]"):
        torch.testing.assert_close(tuned.linear(x, weight), functional.linear(x, weight))


def test_rms_norm_adds_the_residual(h100, exports):
    h100.set("scalars", 1)
    tuned.use(exports("rms_norm:rows6,hidden32,fp16"))
    x, residual, weight = halfs(2, 3, 32), halfs(2, 3, 32), halfs(32)
    y, total = quiet(tuned.rms_norm, x, weight, residual)
    assert y.shape == total.shape == x.shape
    assert h100.launches()[0].pointers[:3] == (x.data_ptr(), residual.data_ptr(), weight.data_ptr())


def test_rms_norm_of_another_eps_is_torch_s(h100, exports):
    tuned.use(exports("rms_norm:rows6,hidden32,fp16"))
    x, residual, weight = halfs(6, 32), halfs(6, 32), halfs(32)
    with pytest.warns(tuned.NoKernel, match="compiled for an eps of 1e-6, and it is 1e-05"):
        y, total = tuned.rms_norm(x, weight, residual, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, functional.rms_norm(x + residual, (32,), weight, 1e-5))


def test_rms_norm_without_a_residual_is_the_operator_on_rows(h100, exports):
    h100.set("scalars", 1)
    tuned.use(exports("rowwise:rms_norm,rows6,hidden32,fp16"))
    x, weight = halfs(2, 3, 32), halfs(32)
    y = quiet(tuned.rms_norm, x, weight)
    assert y.shape == x.shape and h100.launches()[0].pointers[:2] == (x.data_ptr(), weight.data_ptr())
    with pytest.warns(tuned.NoKernel, match="compiled for an eps of 1e-6, and it is 1e-05"):
        torch.testing.assert_close(tuned.rms_norm(x, weight, eps=1e-5), functional.rms_norm(x, (32,), weight, 1e-5))


def test_another_operator_of_the_same_inputs_is_no_rms_norm(h100, exports):
    tuned.use(exports("rowwise:softmax,rows6,hidden32,fp16"))
    x, weight = halfs(6, 32), halfs(32)
    with pytest.warns(tuned.NoKernel, match="torch computes rowwise"):
        torch.testing.assert_close(tuned.rms_norm(x, weight), functional.rms_norm(x, (32,), weight, 1e-6))


def test_any_kernel_by_its_name(h100, exports):
    h100.set("scalars", 1)
    tuned.use(exports("rms_norm:rows6,hidden32,fp16"))
    norm = tuned.op("rms_norm", lambda x, residual, weight: (x, x + residual))
    y, total = quiet(norm, halfs(6, 32), halfs(6, 32), halfs(32))
    assert h100.get("launches") == 1 and y.shape == total.shape == (6, 32)
    with pytest.warns(tuned.NoKernel, match=r"torch computes rms_norm of float16 \[5, 32\], float16"):
        norm(x := halfs(5, 32), residual := halfs(5, 32), halfs(32))
    del x, residual


def test_kernels_of_the_same_inputs_are_told_apart_by_variables_of_their_problems(h100, exports):
    h100.set("scalars", 3)
    tuned.use(exports("gemm:m6,n32,k16,fp16,relu"))
    inputs = halfs(6, 16), halfs(16, 32), halfs(32)
    relu = tuned.op("gemm", lambda a, b, bias: (a @ b).relu(), epilogue="relu")
    assert quiet(relu, *inputs).shape == (6, 32) and h100.get("launches") == 1
    gelu = tuned.op("gemm", lambda a, b, bias: functional.gelu(a @ b), epilogue="gelu")
    with pytest.warns(tuned.NoKernel, match="torch computes gemm"):
        gelu(*inputs)
    assert h100.get("launches") == 1


# for torch


ALL = {
    "attention": (tuned.attention, [(1, 2, 3, 4), (1, 1, 4, 4), (1, 1, 4, 2)]),
    "causal": (
        lambda q, k, v: tuned.attention(q, k, v, causal=True, scale=0.3),
        [(1, 1, 3, 4), (1, 1, 4, 4), (1, 1, 4, 4)],
    ),
    "bshd": (lambda q, k, v: tuned.attention(q, k, v, layout="bshd"), [(1, 3, 2, 4), (1, 4, 2, 4), (1, 4, 2, 4)]),
    "linear": (tuned.linear, [(2, 3, 5), (4, 5)]),
    "gelu": (lambda x, w, b: tuned.linear(x, w, b, "gelu"), [(3, 5), (4, 5), (4,)]),
    "rms_norm": (lambda x, w, r: tuned.rms_norm(x, w, r), [(3, 5), (5,), (3, 5)]),
    "rms_norm alone": (lambda x, w: tuned.rms_norm(x, w), [(3, 5), (5,)]),
}


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tuned.NoKernel)
        yield


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_those_of_torch(name, silent):
    call, shapes = ALL[name]
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(call, given)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_the_compiler_traces_all_of_it(name, gradients, silent):
    call, shapes = ALL[name]
    given = [torch.randn(s, requires_grad=gradients) for s in shapes]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), call(*given))
    if gradients:
        found = [torch.autograd.grad(total(f(*given)), given) for f in (compiled, call)]
        torch.testing.assert_close(*found)


def total(out):
    return sum(t.sum() for t in out) if isinstance(out, tuple) else out.sum()


def test_the_compiled_program_launches_the_kernel(h100, exports, qkv):
    tuned.use(exports(ATTENTION))
    compiled = torch.compile(lambda q, k, v: tuned.attention(q, k, v) + 1, fullgraph=True, backend="aot_eager")
    compiled(*qkv)
    assert h100.get("launches") == 1


def test_without_a_kernel_of_the_backward_pass_both_passes_are_torch_s(h100, exports, qkv):
    """Its backward pass would compute the forward pass again, which costs more than a kernel gains."""
    tuned.use(exports(ATTENTION))
    q, k, v = (t.requires_grad_() for t in qkv)
    with pytest.warns(tuned.NoKernel, match="torch computes attention-backward:"):
        tuned.attention(q, k, v).backward(grad := halfs(2, 4, 64, 64))
    assert h100.get("launches") == 0
    found = [t.grad for t in qkv]
    wanted = torch.autograd.grad(operators.sdpa(q, k, v, False, 0.125), (q, k, v), grad)
    torch.testing.assert_close(found, [*wanted])


@pytest.mark.parametrize(
    ("operator", "given"),
    [
        ("attention", lambda: (halfs(1, 2, 8, 32), halfs(1, 2, 8, 32), halfs(1, 2, 8, 32), True, 0.2)),
        ("linear", lambda: (torch.randn(2, 8), torch.randn(4, 8), None, None)),
        ("rms_norm", lambda: (torch.randn(2, 8), torch.randn(8), torch.randn(2, 8), 1e-6)),
    ],
)
def test_torch_s_own_check_of_operators_passes(operator, given, silent):
    found = torch.library.opcheck(getattr(torch.ops.evoengine, operator).default, given())
    assert set(found.values()) == {"SUCCESS"}


# bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tuned.attention(*[halfs(1, 1, 1, 32)] * 3, layout="hbsd"), "layout is 'hbsd'; it must be 'bhsd' or"),
        (lambda: tuned.linear(halfs(1, 8), halfs(8, 8), activation="tanh"), "activation is 'tanh'; it must be None"),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_place_that_is_none_is_refused(tmp_path):
    with pytest.raises(NothingFound, match="no ledger at .*absent.db"):
        tuned.use(tmp_path / "absent.db")


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"module": "../x", "kernel": "attention"}', b"[" * 9999])
def test_a_damaged_export_is_said_and_torch_computes(h100, exports, qkv, text):
    folder = exports(ATTENTION)
    (folder / "kernel.json").write_bytes(text)
    tuned.use(folder)
    with pytest.warns(tuned.NoKernel, match="is not the kernel.json of an exported kernel"):
        torch.testing.assert_close(tuned.attention(*qkv), expected(*qkv))


def test_a_binary_that_was_changed_is_refused_at_the_call(exports, qkv):
    folder = exports(ATTENTION)
    (folder / "kernel.cubin").write_bytes(b"\x7fELF other")
    tuned.use(folder)
    with pytest.raises(RuntimeError, match="is not the binary that kernel.json describes"):
        tuned.attention(*qkv)


def table_of(folder, *problems):
    """Write a dispatch table of attention kernels for these problems; return their loaders' names."""
    entries = []
    for problem in problems:
        files = bundle_of(problem)
        name = json.loads(files["kernel.json"])["module"]
        write_folder(folder / name, {file: data for file, data in files.items() if file != "SHA256SUMS"})
        sha256 = hashlib.sha256((folder / name / "SHA256SUMS").read_bytes()).hexdigest()
        entries.append({"problem": problem, "folder": name, "sha256": sha256})
    (folder / "table.json").write_text(json.dumps({"evoengine_table": 1, "entries": entries}))
    return [entry["folder"] for entry in entries]


def test_a_table_serves_sizes_between_those_that_it_has_and_torch_others(h100, tmp_path):
    (tmp_path / "table").mkdir()
    short, long = table_of(tmp_path / "table", "b1,h2,s64,d64,fp16", "b1,h2,s512,d64,fp16")
    tuned.use(tmp_path / "table")
    for length, name in ((64, short), (70, short), (500, long), (512, long)):
        q = halfs(1, 2, length, 64)
        quiet(tuned.attention, q, q, q)
        assert name in list(kernels.KERNELS.origins.values())[-1]
    q = halfs(1, 2, 513, 64)
    with pytest.warns(kernels.NoKernel, match="no place that was named has a kernel for it"):
        tuned.attention(q, q, q)


def test_a_changed_table_is_refused_when_it_is_named(h100, tmp_path):
    (tmp_path / "table").mkdir()
    (name,) = table_of(tmp_path / "table", "b1,h2,s64,d64,fp16")
    (tmp_path / "table" / name / "kernel.cubin").write_bytes(b"\x7fELF another")
    with pytest.raises(UsageError, match="is not the file that table.json pins"):
        tuned.use(tmp_path / "table")
