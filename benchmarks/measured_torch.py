"""What torch takes for the problems of benchmarks/measured_h100.py, and what their kernels ought to compute.

    python benchmarks/measured_torch.py DIR           on the GPU; a line on the input says for how many seconds
    python benchmarks/measured_torch.py DIR --expected FILE.json [--seconds N] [--device cpu]
    python benchmarks/measured_torch.py DIR --beside FILE.json [--seconds N]

The second writes a sample of each problem's outputs as the workload's reference computes them from the contents that
measured_h100.py draws, at the places where it samples what kernels wrote. The third times the rows of DIR and torch's
kernels in turns, on normal numbers both, so that clocks and contents are the same for all.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "evoengine" / "__init__.py").is_file())
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402 # its usual name

from benchmarks.measured_bench import FLUSH_BYTES, ROLES, SAMPLE_BYTES, SAMPLES, Launches, load, read_rows  # noqa: E402
from evoengine.devices import cuda_api  # noqa: E402

Call = Callable[[], object]
Make = Callable[[], Call]
"""allocates tensors and returns the call to time"""
Row = dict[str, Any]
SLEEP_CLOCKS = 400_000
REPETITIONS, TURNS = 10, 12


def normal(*shape: int, kind: torch.dtype) -> torch.Tensor:
    """Return normal numbers; of bytes those that a normal number times 32 rounds to."""
    drawn = torch.randn(shape, device="cuda", dtype=torch.bfloat16 if kind.itemsize < 4 else torch.float32)
    return (drawn * 32 if kind == torch.int8 else drawn).to(kind)


# ── baselines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def baselines(rows: Sequence[Row]) -> int:
    known = [r for r in rows if r["config"] or r["set"] in ("fast.cu", "FlashAttention-3")]
    problems = dict.fromkeys((r["set"].partition(" ")[0], r["problem"]) for r in known)
    seconds = float(sys.stdin.readline())
    begun = time.monotonic()
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda}), flush=True)
    for workload, problem in problems:
        for name, make in calls(workload, problem):
            if time.monotonic() - begun > seconds:
                return 0
            found: Row = {"problem": problem, "name": name}
            try:
                found |= times(make(), flush)
            except Exception as error:  # a library that does not support the problem is no failure
                found["error"] = str(error)[:200]
            print(json.dumps(found), flush=True)
            torch.cuda.empty_cache()
    print(json.dumps({"end": round(time.monotonic() - begun, 1)}), flush=True)
    return 0


def times(call: Call, flush: torch.Tensor) -> dict[str, list[float]]:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    found = {}
    for name, cold in (("warm_us", False), ("cold_us", True)):
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPETITIONS)
        ]
        for begin, end in pairs:
            if cold:
                flush.sum()
            else:
                torch.cuda._sleep(SLEEP_CLOCKS)
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        found[name] = [round(begin.elapsed_time(end) * 1e3, 3) for begin, end in pairs]
    return found


def beside(folder: Path, rows: Sequence[Row], out: Path, seconds: float) -> int:
    """Time the rows of each problem and torch's calls in turns with a cold L2, for as long as there is time."""
    begun, found = time.monotonic(), []
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    cuda_api.use_primary_context()
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["set"].partition(" ")[0], row["problem"]), []).append(row)
    for (workload, problem), own in groups.items():
        if time.monotonic() - begun > seconds:
            break
        makes = [(row["id"], partial(_launched, folder, row)) for row in own] + list(calls(workload, problem))
        contenders, failed = [], {}
        for name, make in makes:
            try:
                call = make()
                for _ in range(3):
                    call()
                torch.cuda.synchronize()
                contenders.append((name, call))
            except Exception as error:  # a library that does not support the problem is no failure
                failed[name] = str(error)[:200]
        found.append({"problem": problem, "times": _in_turns(contenders, flush), "failed": failed})
        out.write_text(json.dumps(found) + "\n")
        del contenders
        torch.cuda.empty_cache()
    print(f"beside: {len(found)} of {len(groups)} problems, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return 0


def _in_turns(contenders: Sequence[tuple[str, Call]], flush: torch.Tensor) -> dict[str, list[float]]:
    """Return µs of each contender; every repetition times all of them one after the other."""
    pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name, _ in contenders}
    for _ in range(TURNS):
        for name, call in contenders:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CLOCKS)
            flush.sum()
            begin.record()
            call()
            end.record()
            pairs[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: [round(b.elapsed_time(e) * 1e3, 3) for b, e in of] for name, of in pairs.items()}


def _launched(folder: Path, row: Row) -> Call:
    """Return the launches of a row on tensors of its own, whose inputs are normal numbers."""
    tensors = {name: _buffer(*buffer) for name, buffer in row["buffers"].items()}
    module, _ = load(folder, row)
    launches = Launches(row, module, {name: tensor.data_ptr() for name, tensor in tensors.items()})

    def call(_held: object = tensors) -> None:
        launches.queue()

    return call


def _buffer(size: int, dtype: str, role: str) -> torch.Tensor:
    if role == "in" and dtype not in ("int32", "uint8"):
        return normal(size // DTYPES[dtype].itemsize, kind=DTYPES[dtype])
    if role == "in" and dtype == "uint8":
        return torch.randint(64, (size,), dtype=torch.uint8, device="cuda")  # FP8 codes, none of them NaN
    if role in ROLES:
        return torch.zeros(size, dtype=torch.uint8, device="cuda")
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(role))), dtype=torch.uint8).cuda()


def calls(workload: str, text: str) -> Iterator[tuple[str, Make]]:
    """Yield names and calls of torch that compute the problem, or nearly: the name then says what differs."""
    if workload == "DeepGEMM":
        return  # torch computes gemm's and grouped-gemm's problems of the same sizes
    if workload == "fast.cu":
        yield "matmul bf16", partial(_square, int(text.partition("^")[0]))
        return
    from evoengine.workloads import parse_problem

    of_text, problem = parse_problem(text)
    if workload in ("decode", "rms_norm", "rowwise"):
        yield "copy of as many bytes", partial(_copy, int(of_text.min_dram_bytes(problem)) // 2)
    of = "attention" if workload == "FlashAttention-3" else workload
    yield from KNOWN[of](problem) if of in KNOWN else _own_baselines(text)


def _own_baselines(text: str) -> Iterator[tuple[str, Make]]:
    """Yield the baselines of the workload itself, on tensors that it draws."""
    from evoengine.workloads import parse_problem
    from evoengine.workloads.base import Case

    workload, problem = parse_problem(text)
    tensors = workload.tensors()

    def make(name: str) -> Call:
        return tensors.baseline(name, problem, tensors.draw(Case("baseline", problem), 0, "cuda").inputs)

    for name in tensors.baselines(problem):
        yield name, partial(make, name)


def _copy(half: int) -> Call:
    """Return a copy of `half` bytes, which reads and writes twice as many in all."""
    source, to = (torch.zeros(half, dtype=torch.uint8, device="cuda") for _ in range(2))
    return lambda: to.copy_(source)


def _square(n: int) -> Call:
    a, b = normal(n, n, kind=torch.bfloat16), normal(n, n, kind=torch.bfloat16)
    return lambda: a @ b.t()


def _gemm(p: Any) -> Iterator[tuple[str, Make]]:
    def halves() -> Call:
        a, b, bias = normal(p.m, p.k, kind=DTYPES[p.dtype]), normal(p.k, p.n, kind=DTYPES[p.dtype]), None
        if p.has_bias:
            bias = normal(p.n, kind=DTYPES[p.dtype])
            return lambda: torch.addmm(bias, a, b)
        return lambda: a @ b

    if p.dtype in HALVES:
        yield "matmul", halves
        return
    a_nk = partial(normal, p.m, p.k, kind=DTYPES[p.dtype]), partial(normal, p.n, p.k, kind=DTYPES[p.dtype])
    if p.dtype == "int8":

        def of_int() -> Call:
            a, b = a_nk[0](), a_nk[1]().t()
            return lambda: torch._int_mm(a, b)

        yield "_int_mm, without scales", of_int
        return

    def of_fp8(scales: tuple[tuple[int, ...], tuple[int, ...]], fast: bool) -> Call:
        a, b = a_nk[0](), a_nk[1]().t()
        one, other = (torch.ones(shape, device="cuda") for shape in scales)
        if scales[0][1:] not in ((), (1,)):  # those of blocks are asked for by columns
            one, other = one.t().contiguous().t(), other.t().contiguous().t()
        options = {"scale_a": one, "scale_b": other, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return lambda: torch._scaled_mm(a, b, **options)

    if p.scales == "block":
        blocks = -(-p.k // 128)
        yield "_scaled_mm by blocks", partial(of_fp8, ((p.m, blocks), (blocks, -(-p.n // 128))), False)
    yield "_scaled_mm by rows", partial(of_fp8, ((p.m, 1), (1, p.n)), False)
    yield "_scaled_mm by tensors", partial(of_fp8, ((), ()), False)
    yield "_scaled_mm by tensors, fast sums", partial(of_fp8, ((), ()), True)


def _grouped(p: Any) -> Iterator[tuple[str, Make]]:
    kind = DTYPES[p.dtype]

    def ends() -> torch.Tensor:
        return torch.from_numpy(np.cumsum(p.rows, dtype=np.int32)).cuda()

    def grouped() -> Call:
        a, b, offs = normal(p.m, p.k, kind=kind), normal(p.groups, p.n, p.k, kind=kind), ends()
        return lambda: torch._grouped_mm(a, b.mT, offs=offs)

    def scaled(fast: bool) -> Call:
        a, b, offs = normal(p.m, p.k, kind=kind), normal(p.groups, p.n, p.k, kind=kind), ends()
        scale_a, scale_b = torch.ones(p.m, device="cuda"), torch.ones(p.groups, p.n, device="cuda")
        options = {"offs": offs, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return lambda: torch._scaled_grouped_mm(a, b.mT, scale_a, scale_b, **options)

    def one_by_one() -> Call:
        b = [normal(p.n, p.k, kind=kind).t() for _ in p.rows]
        parts = [normal(rows, p.k, kind=kind) for rows in p.rows]
        multiply = torch._int_mm if p.dtype == "int8" else torch.matmul
        return lambda: [multiply(x, y) for x, y in zip(parts, b, strict=True) if len(x)]

    if p.dtype in HALVES:
        yield "_grouped_mm", grouped
    elif p.dtype == "fp8_e4m3":
        yield "_scaled_grouped_mm by rows", partial(scaled, False)
        yield "_scaled_grouped_mm by rows, fast sums", partial(scaled, True)
    if p.dtype != "fp8_e4m3":
        yield "a product for each group", one_by_one


def _backends() -> dict[str, Any]:
    from torch.nn.attention import SDPBackend

    names = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
    return {name: getattr(SDPBackend, name) for name in names}


def _sdpa(backend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1])


def _attention(p: Any) -> Iterator[tuple[str, Make]]:
    def make(backend: Any) -> Call:
        shapes = ((p.heads, p.seq_q), (p.kv_heads, p.seq_k), (p.kv_heads, p.seq_k))
        q, k, v = (normal(p.batch, *shape, p.head_dim, kind=DTYPES[p.dtype]) for shape in shapes)
        return lambda: _sdpa(backend, q, k, v, p.causal)

    for name, backend in _backends().items():
        yield f"SDPA {name}", partial(make, backend)


def _backward(p: Any) -> Iterator[tuple[str, Make]]:
    def make(backend: Any) -> Call:
        shapes = ((p.heads, p.seq_q), (p.kv_heads, p.seq_k), (p.kv_heads, p.seq_k))
        given = [normal(p.batch, *shape, p.head_dim, kind=DTYPES[p.dtype]).requires_grad_() for shape in shapes]
        out = _sdpa(backend, *given, p.causal)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, given, gradient, retain_graph=True)

    for name, backend in _backends().items():
        yield f"SDPA backward {name}", partial(make, backend)


def _decode(p: Any) -> Iterator[tuple[str, Make]]:
    kind = DTYPES[p.dtype]

    def latent() -> Call:
        q = normal(p.batch, p.heads * p.seq_q, p.head_dim, kind=kind)
        kv = normal(p.batch, p.seq_k, p.head_dim, kind=kind)
        v = kv[..., : p.head_dim_v]
        return lambda: torch.softmax(q @ kv.mT, -1) @ v

    def make(backend: Any) -> Call:
        q = normal(p.batch, p.heads, p.seq_q, p.head_dim, kind=kind)
        k, v = (normal(p.batch, p.kv_heads, p.seq_k, p.head_dim, kind=kind) for _ in "kv")
        return lambda: _sdpa(backend, q, k, v, False)

    if p.latent:
        yield "matmul, softmax, matmul, without pages", latent
        return
    differs = ", without pages" * bool(p.page) + f", cache in {p.dtype}" * bool(p.cache)
    for name, backend in _backends().items():
        yield f"SDPA {name}{differs}", partial(make, backend)


def _varlen(p: Any) -> Iterator[tuple[str, Make]]:
    kind = DTYPES[p.dtype]

    def packed() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rows = ((p.total_q, p.heads), (p.total_kv, p.kv_heads), (p.total_kv, p.kv_heads))
        lengths = (p.lens, p.kv_lens)
        return (
            [normal(*shape, p.head_dim, kind=kind) for shape in rows],
            [torch.from_numpy(np.cumsum((0, *of), dtype=np.int32)).cuda() for of in lengths],
        )

    def by_varlen() -> Call:
        from torch.nn.attention.varlen import varlen_attn

        (q, k, v), cumulative = packed()
        sizes = max(p.lens), max(p.kv_lens)
        for options in (
            {"window_size": (-1, 0 if p.causal else -1), "enable_gqa": p.heads != p.kv_heads},
            {"window_size": (-1, 0 if p.causal else -1)},
            {"is_causal": p.causal},
        ):
            call = partial(varlen_attn, q, k, v, *cumulative, *sizes, **options)
            try:
                call()
                return call
            except TypeError:  # another version of torch has other options
                continue
        raise RuntimeError("varlen_attn takes none of the options")

    def by_flash() -> Call:
        (q, k, v), cumulative = packed()
        sizes = max(p.lens), max(p.kv_lens)
        return lambda: torch.ops.aten._flash_attention_forward(q, k, v, *cumulative, *sizes, 0.0, p.causal, False)

    def nested(backend: Any) -> Call:
        given, (of_q, of_k) = packed()
        heads = p.heads // p.kv_heads
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(x.repeat_interleave(n, 1) if n > 1 else x, offsets).transpose(1, 2)
            for x, n, offsets in zip(given, (1, heads, heads), (of_q, of_k, of_k), strict=True)
        )
        return lambda: _sdpa(backend, q, k, v, p.causal)

    differs = ", without pages" * bool(p.page)
    yield f"varlen_attn{differs}", by_varlen
    yield f"_flash_attention_forward{differs}", by_flash
    if p.lens == p.kv_lens:
        for name, backend in _backends().items():
            yield f"SDPA of nested tensors {name}", partial(nested, backend)


def _convolution(p: Any) -> Iterator[tuple[str, Make]]:
    def make() -> Call:
        height, width = p.height + p.filter_h - 1, p.width + p.filter_w - 1
        image = normal(1, 1, height, width, kind=torch.float32)
        weights = normal(1, 1, p.filter_h, p.filter_w, kind=torch.float32)
        return lambda: F.conv2d(image, weights)

    yield "conv2d", make


def _rms_norm(p: Any) -> Iterator[tuple[str, Make]]:
    def make() -> Call:
        x, r = (normal(p.rows, p.hidden, kind=DTYPES[p.dtype]) for _ in "xr")
        w = normal(p.hidden, kind=DTYPES[p.dtype])
        return lambda: F.rms_norm(x + r, (p.hidden,), w)

    yield "add, rms_norm", make


HALVES = ("fp16", "bf16")
DTYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8, "int32": torch.int32,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip # a table
KNOWN: Mapping[str, Callable[[Any], Iterator[tuple[str, Make]]]] = {
    "attention": _attention, "attention-backward": _backward, "convolution": _convolution, "decode": _decode,
    "gemm": _gemm, "grouped-gemm": _grouped, "rms_norm": _rms_norm, "varlen": _varlen,
}  # fmt: skip # a table


# ── what kernels ought to compute ───────────────────────────────────────────────────────────────────────────────────

REFERENCES = ("reference", "rounded_once", "library")
"""of a workload's tensors: in float64, in float32, and by a library, where memory does not suffice for the others"""


def expected(rows: Sequence[Row], out: Path, seconds: float, device: str) -> int:
    """Write a sample of each output of each problem, in the order of the rows, for as long as there is time."""
    begun, found = time.monotonic(), []
    firsts: dict[str, Row] = {}
    for row in rows:
        if row["config"]:
            firsts.setdefault(row["problem"], row)
    for problem, row in firsts.items():
        if time.monotonic() - begun > seconds:
            break
        try:
            how, samples = _expected_of(row, device)
            found.append({"problem": problem, "how": how, "samples": samples})
        except Exception as error:
            found.append({"problem": problem, "error": f"{type(error).__name__}: {str(error)[:200]}"})
        if device == "cuda":
            torch.cuda.empty_cache()
        out.write_text(json.dumps(found) + "\n")
    print(f"expected: {len(found)} of {len(firsts)} problems, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return 0


def _expected_of(row: Row, device: str) -> tuple[str, dict[str, list[float]]]:
    from evoengine.workloads import parse_problem

    workload, problem = parse_problem(row["problem"])
    inputs = _inputs(row, workload.parameters(problem, row["config"]), device)
    tensors, why = workload.tensors(), ""
    for how in REFERENCES:
        try:
            outputs = getattr(tensors, how)(problem, inputs)
            return how, {name: sampled(row["buffers"][name], data) for name, data in outputs.items()}
        except (torch.OutOfMemoryError, NotImplementedError) as error:
            why = f"{how}: {str(error)[:80]}"
            if device == "cuda":
                torch.cuda.empty_cache()
    raise MemoryError(why)


def _inputs(row: Row, parameters: Sequence[Any], device: str) -> dict[str, torch.Tensor]:
    """Return the inputs of the row with the contents that measured_h100.py gives them."""
    from evoengine.devices.base import TensorParameter
    from evoengine.sass.launch import DRAWN_BYTES, drawn_bytes

    found = {}
    for p in parameters:
        if not isinstance(p, TensorParameter) or p.output:
            continue
        size, dtype, role = row["buffers"][p.name]
        if role == "in":
            one = torch.from_numpy(drawn_bytes(dtype, DRAWN_BYTES).copy()).to(device)
            data = one.repeat(-(-size // DRAWN_BYTES))[:size].clone()
        else:
            data = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(role))), dtype=torch.uint8).to(device)
        found[p.name] = data.view(DTYPES[dtype]).view(p.shape)
    return found


def sampled(buffer: Sequence[Any], output: torch.Tensor) -> list[float]:
    """Return the elements that measured_h100.py reads of an output."""
    size, dtype, _ = buffer
    some = np.random.default_rng(size).integers(0, max(1, size // SAMPLE_BYTES), SAMPLES)
    at = torch.from_numpy(some * (SAMPLE_BYTES // DTYPES[dtype].itemsize)).to(output.device)
    return [float(f"{v:.6g}") for v in output.reshape(-1)[at].double().tolist()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--expected", type=Path, metavar="FILE")
    parser.add_argument("--beside", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    rows = read_rows(options.folder)
    if options.expected:
        return expected(rows, options.expected, options.seconds, options.device)
    if options.beside:
        return beside(options.folder, rows, options.beside, options.seconds)
    return baselines(rows)


if __name__ == "__main__":
    sys.exit(main())
