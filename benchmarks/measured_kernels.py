"""The data set of benchmarks/measured_h100.py: kernels as machine code, their launches, and the model's predictions.

A folder holds rows.jsonl, a row a line, and cubins/ and sources/, gzipped and named by the first half of the cubin's
SHA-256. A row states its set, problem and kernel; `kernels` in stream order, each with entry, grid, block, shared
bytes and parameters; `buffers` by name, [bytes, dtype, role], where the role is in, out (zeroed), scratch (zeroed, no
result), zero (zeroed before every launch) or the contents themselves; and `predicted` with a cold and with a warm L2.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import fast_cu
from benchmarks import flash_attention_3 as fa3
from benchmarks.classic_kernels import Classic, all_of_them
from benchmarks.measured_bench import ROLES
from evoengine import workloads
from evoengine.accuracy.compilers import FLAGS, InstalledNvrtc, compile_and_list
from evoengine.devices.base import (
    ScalarArgument,
    ScratchParameter,
    StructArgument,
    TensorMapArgument,
    TensorParameter,
    is_passed,
)
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import Binary, Source
from evoengine.sass.chip import find_chip
from evoengine.sass.core import Program
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import DrawnArgument, Geometry, Launch, prepare
from evoengine.sass.listing import disassemble
from evoengine.sass.predict import MODEL_VERSION, Prediction, predict
from evoengine.space.space import SearchSpace, load_space
from evoengine.stages.compile import compile_source
from evoengine.stages.predict import SEED, _drawn, _in_stream_order
from evoengine.stages.render import render
from evoengine.stages.screen import screen_binary, screen_launch
from evoengine.workloads.base import Target, taken

GPU, ARCH = "h100", "sm_90a"
LONGEST_US = 60_000
"""predicted; a longer kernel is left out, as it would take the time of many others"""
Row = dict[str, Any]


@dataclass(frozen=True)
class Made:
    """One kernel of a row, to predict and to launch."""

    entry: str
    program: Program
    launch: Launch
    geometry: Geometry


# ── what is written of a launch ─────────────────────────────────────────────────────────────────────────────────────


def parameter(argument: object) -> Any:
    """Return a parameter as JSON: the name of a buffer, {"s": hex}, {"map": …} or {"struct": bytes, "parts": …}."""
    if isinstance(argument, ScalarArgument):
        return {"s": argument.value.tobytes().hex()}
    if isinstance(argument, TensorMapArgument):
        a = argument
        return {"map": [a.name, a.tensor, a.dtype, a.dims, a.strides_bytes, a.box, a.swizzle]}
    if isinstance(argument, StructArgument):
        return {"struct": argument.bytes, "parts": [[at, parameter(part)] for at, part in argument.parts]}
    if isinstance(argument, DrawnArgument):
        return argument.name
    raise TypeError(f"no parameter for a measured launch: {argument!r}")


def buffers_of(made: Sequence[Made], zeroed: Sequence[str], scratch: Sequence[str]) -> dict[str, list[Any]]:
    """Return name → [bytes, dtype, role] of all memory that the launches use."""
    dtypes: dict[str, str] = {}
    contents: dict[str, np.ndarray] = {}

    def note(argument: object) -> None:
        if isinstance(argument, StructArgument):
            for _, part in argument.parts:
                note(part)
        elif isinstance(argument, TensorMapArgument):
            dtypes.setdefault(argument.tensor, argument.dtype)
        elif isinstance(argument, DrawnArgument):
            dtypes[argument.name] = argument.dtype
            if argument.contents is not None:
                contents[argument.name] = argument.contents

    for one in made:
        for argument in one.launch.arguments:
            note(argument)
    found: dict[str, list[Any]] = {}
    for one in made:
        for allocation in one.launch.allocations:
            name, role = allocation.name, "out" if allocation.writable else "in"
            role = "scratch" if name in scratch else role
            if name.startswith(".nv."):
                continue  # the module's own variables
            if name in contents:
                role = base64.b64encode(zlib.compress(contents[name].tobytes(), 9)).decode()
            found[name] = [allocation.bytes, dtypes[name], "zero" if name in zeroed else role]
    return found


POLICIES = ("cold", "warm")


def predicted(
    made: Sequence[Made], flops: float, dram_bytes: float, policies: Sequence[str] = POLICIES
) -> dict[str, dict[str, Any]]:
    chip = find_chip(GPU)
    found = {}
    for name in policies:
        cold = name == "cold"
        of_all = flops, dram_bytes if cold else 0.0
        work = of_all if len(made) == 1 else (0.0, 0.0)
        each = [predict(one.program, one.launch, chip, *work, cold=cold) for one in made]
        roofline_us = max(of_all[0] / chip.peak_flops, of_all[1] / chip.dram) * 1e6
        p: Prediction = _in_stream_order(each, roofline_us)
        found[name] = {
            "us": round(p.time_us, 3), "clocks": round(p.clocks), "ghz": round(p.ghz, 4), "low_us": round(p.low_us, 3),
            "high_us": round(p.high_us, 3), "class": p.kernel_class, "bound": p.bound,
            "shares": {n: round(s, 3) for n, s in p.shares.items() if s >= 0.01},
        }  # fmt: skip
    return found


def passed_of(cubin: bytes, made: Made) -> list[Any]:
    """Return the arguments that are the kernel's parameters, without memory that only its tensor maps point to."""
    return [a for a in made.launch.arguments if is_passed(a)][: len(read_kernel(cubin, made.entry).parameters)]


def row_of(
    named: tuple[str, str, str], cubin: bytes, made: Sequence[Made], flops: float, dram_bytes: float,
    zeroed: Sequence[str] = (), config: Mapping[str, Any] | None = None, scratch: Sequence[str] = (),
    policies: Sequence[str] = POLICIES,
) -> Row:  # fmt: skip
    start = time.process_time()
    prediction = predicted(made, flops, dram_bytes, policies)
    key = hashlib.sha256(cubin).hexdigest()[:32]
    return {
        "id": hashlib.sha256("|".join((*named, key)).encode()).hexdigest()[:12],
        "set": named[0], "problem": named[1], "kernel": named[2], "config": config, "cubin": key,
        "kernels": [
            {"entry": m.entry, "grid": m.geometry.grid, "block": m.geometry.threads, "shared": m.geometry.shared_bytes,
             "parameters": [parameter(a) for a in passed_of(cubin, m)],
             **({"cluster": m.geometry.cluster} if m.geometry.cluster else {})}
            for m in made
        ],
        "buffers": buffers_of(made, zeroed, scratch), "flops": flops, "dram_bytes": dram_bytes, "model": MODEL_VERSION,
        "predicted": prediction, "cpu_s": round(time.process_time() - start, 2),
    }  # fmt: skip


# ── the sets ────────────────────────────────────────────────────────────────────────────────────────────────────────

OWN: Sequence[tuple[str, Mapping[str, int]]] = (
    ("b2,h16,s2048,d64,fp16", {"wgmma": 20, "mma": 14, "wmma": 12, "scalar": 6}),
    ("b1,h16,s4096,d128,fp16,causal", {"wgmma": 20, "mma": 12, "wmma": 10}),
    ("gemm:m4096,n4096,k4096,fp16", {"wgmma": 18, "mma": 14}),
    ("rms_norm:rows4096,hidden4096,bf16", {"warp": 10, "block": 14}),
    ("convolution:w4096,h4096,fw17,fh17", {"shared": 14, "direct": 10}),
    ("b2,h16,kv4,s2048,d128,bf16", {"wgmma": 14, "mma": 10}),
    ("gemm:m512,n512,k512,bf16", {"wgmma": 12, "mma": 12}),
    ("b1,h32,s8192,d64,fp16", {"wgmma": 14}),
    ("gemm:m64,n8192,k8192,bf16", {"wgmma": 12, "mma": 12}),
    ("gemm:m8192,n8192,k8192,fp16", {"wgmma": 12}),
    ("b2,h8,s512,d64,fp16,causal", {"wgmma": 10, "mma": 8, "wmma": 6, "scalar": 6}),
    ("rms_norm:rows64,hidden8192,bf16", {"warp": 6, "block": 10}),
    ("rms_norm:rows65536,hidden1024,fp16", {"warp": 8, "block": 8}),
    ("convolution:w2048,h2048,fw5,fh5", {"shared": 10, "direct": 8}),
    ("gemm:m2048,n1024,k4096,fp16,bias", {"wgmma": 12, "mma": 10}),
)
"""problem → how many configurations of each family"""


def space_of(problem: str) -> tuple[Target, SearchSpace]:
    workload, parsed = workloads.parse_problem(problem)
    gpu = find_gpu(GPU)
    return Target(workload, parsed, gpu), load_space(asset("search_spaces") / f"{workload.name}.toml", parsed, gpu)


def configurations(problem: str, family: str, count: int) -> list[Mapping[str, Any]]:
    """Return up to half as many start points, then random draws, and half as many again for those that are rejected."""
    _, space = space_of(problem)
    starts = [c for c in space.starts if c["family"] == family]
    random = np.random.default_rng(20)
    random.shuffle(starts)
    found = {json.dumps(c): c for c in starts[: (count + 1) // 2]}
    for c in space.sample(random, 40 * count):
        if c["family"] == family and len(found) < count * 3 // 2 + 1:
            found.setdefault(json.dumps(c), c)
    return list(found.values())


def own(problem: str, config: Mapping[str, Any], folder: Path, policies: Sequence[str] = POLICIES) -> Row | str:
    """Return the row of a configuration, or why a search would not rank it; without policies it is not predicted."""
    target, space = space_of(problem)
    compiled = compiled_of(target, space, config)
    if isinstance(compiled, str):
        return compiled
    source, binary = compiled
    parameters = target.workload.parameters(target.problem, config)
    arguments = [_drawn(p, contents_of(target, config)) for p in parameters]
    made = []
    for entry, launch in source.launch.kernels(source.entry):
        geometry = Geometry(launch.grid, launch.block, launch.shared_bytes)
        prepared = prepare(read_kernel(binary.cubin, entry), launch, taken(target.workload, entry, arguments), SEED)
        made.append(Made(entry, Program(binary.listing, entry), prepared, geometry))
    workload = target.workload.name
    named = " ".join(f"{k}={v}" for k, v in config.items() if k != "family")
    row = row_of(
        (f"{workload} {config['family']}", str(target.problem), named), binary.cubin, made, target.flops,
        target.min_dram_bytes, config=config, scratch=[p.name for p in parameters if isinstance(p, ScratchParameter)],
        policies=policies,
    )  # fmt: skip
    keep(folder, row, binary.cubin, source.text, binary.options)
    return row


def compiled_of(target: Target, space: SearchSpace, config: Mapping[str, Any]) -> tuple[Source, Binary] | str:
    """Return a candidate's text and binary, or why a search would not rank it."""
    source = render(target, space, config, asset("templates"))
    if why := screen_launch(source.launch, target.gpu):
        return why
    binary = compile_source(source, ARCH)
    return screen_binary(binary, source, target.gpu, space.cost(config), timed=True) or (source, binary)


LSE = "lse"


def contents_of(target: Target, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the inputs that may not be drawn freely: indices, and the LSE that keeps weights of a backward pass small.

    All tensors of a dtype begin alike, so that a query is its own key: of head_dim d its logit is about √d.
    """
    found = dict(target.workload.indices(target.problem, config, SEED))
    for p in target.workload.parameters(target.problem, config):
        if p.name == LSE and isinstance(p, TensorParameter):
            found[LSE] = np.full(p.bytes // 4, math.sqrt(target.problem.variables()["head_dim"]) + 3, np.float32)
            found[LSE] = found[LSE].view(np.uint8)
    return found


def classic(one: Classic, folder: Path) -> Row | str:
    found = compile_and_list(InstalledNvrtc(), one.text, ARCH, ())
    geometry = Geometry(one.grid, one.threads, one.shared)
    made = Made(
        "kernel", Program(found.listing, "kernel"), _launch(found.cubin, "kernel", geometry, one.arguments()), geometry
    )
    row = row_of((one.set, one.problem, one.name), found.cubin, [made], one.flops, one.dram_bytes)
    keep(folder, row, found.cubin, one.text, " ".join((f"-arch={ARCH}", *FLAGS)))
    return row


def _launch(cubin: bytes, entry: str, geometry: Geometry, arguments: Sequence[Any]) -> Launch:
    return prepare(read_kernel(cubin, entry), geometry, arguments, 0)


def fast_cu_row(file: Path, number: int, size: int, folder: Path) -> Row | str:
    program, launch = fast_cu.launch(file, number, size)
    text = fast_cu.text(file, number)
    found = compile_and_list(InstalledNvrtc(), text, ARCH, ("-default-device",))
    entry = fast_cu.kernel_names(found.cubin)[0]
    kernel = read_kernel(found.cubin, entry)
    geometry = Geometry(launch.grid, launch.threads, launch.shared_bytes - kernel.shared_bytes)
    made = Made(entry, program, launch, geometry)
    row = row_of(
        ("fast.cu", f"{size}^3 bf16", f"K{number}"), found.cubin, [made], 2.0 * size**3, 6.0 * size**2
    )  # fmt: skip
    keep(folder, row, found.cubin, text, " ".join((f"-arch={ARCH}", *FLAGS, "-default-device")))
    return row


FA3_PROBLEMS = (
    ("d64_192x192", (2, 16, 2048, 64)),
    ("d64_192x192", (1, 32, 8192, 64)),
    ("d64_192x128", (2, 16, 2048, 64)),
    ("d64_192x128", (1, 32, 8192, 64)),
    ("d64_causal_192x128", (2, 32, 8192, 64, True)),
    ("d64_causal_192x128", (4, 16, 2048, 64, True)),
    ("d128_128x176", (4, 16, 4096, 128)),
    ("d128_128x176", (1, 16, 16384, 128)),
    ("d128_causal_128x128", (1, 16, 4096, 128, True)),
    ("d128_causal_128x128", (2, 16, 8192, 128, True)),
    ("d256_128x80", (4, 8, 4096, 256)),
    ("d256_128x80", (2, 8, 1024, 256)),
)
"""machine code, and the batch, heads, length, head dimension and mask that it runs on"""


def fa3_row(cubins: Path, name: str, problem: fa3.Problem, folder: Path) -> Row | str:
    cubin = (cubins / f"{name}.cubin").read_bytes()
    program, kernel = fa3.read(cubins, name)
    launch = fa3.launch(kernel, fa3.KERNELS[name].tile, problem)
    geometry = Geometry(launch.grid, launch.threads, launch.shared_bytes - kernel.shared_bytes)
    named = f"b{problem.batch},h{problem.heads},s{problem.seqlen},d{problem.dim},fp16" + ",causal" * problem.causal
    made = Made(kernel.entry, program, launch, geometry)
    row = row_of(("FlashAttention-3", named, name), cubin, [made], problem.flops, 0.0, zeroed=("counter",))
    keep(folder, row, cubin, None, "")
    return row


TRITON = Path(__file__).resolve().parents[1] / "tests" / "sass" / "data" / "triton"
POINTERS = {"*fp32": ("fp32", 4), "*fp16": ("fp16", 2), "*bf16": ("bf16", 2), "*i32": ("int32", 4)}
OUTPUTS = ("out", "c_ptr", "Y_ptr", "partial", "lock")


def triton_launches() -> Iterator[tuple[Path, Mapping[str, Any], Mapping[str, Any], tuple[int, int, int]]]:
    """Yield the binary, its record, the sizes to launch it with, name → shape or number, and the grid."""
    records = {r["kernel"]: r for r in json.loads((TRITON / "launches.json").read_text()) if "_90." in r["file"]}

    def of(name: str, grid: tuple[int, int, int], **sizes: Any) -> Any:
        return TRITON / records[name]["file"], records[name], sizes, grid

    for rows in (1024, 32768):
        yield of("softmax", (rows, 1, 1), x=[rows, 1000], out=[rows, 1000], cols=1000)
        yield of("layer_norm", (rows, 1, 1), x=[rows, 512], gain=[512], out=[rows, 512], cols=512)
        yield of("cumsum", (rows, 1, 1), x=[rows, 512], out=[rows, 512], cols=512)
        yield of("sort", (rows, 1, 1), x=[rows, 256], out=[rows, 256])
        halves = {name: [rows, 777] for name in ("a_ptr", "b_ptr", "c_ptr")}
        yield of("_swiglu_forward_kernel", (rows, 1, 1), **halves, stride=777)
        sizes = {"Y_ptr": [rows, 1024], "Y_row_stride": 1024, "X_ptr": [rows, 1024], "X_row_stride": 1024}
        yield of("_softmax_single_block_forward_kernel", (rows, 1, 1), **sizes, n_cols=1024)
    for n in (1024, 8192):
        yield of("transpose", (n // 32, n // 32, 1), x=[n, n], out=[n, n], rows=n, cols=n)
    for n in (512, 2048, 4096):
        yield of("matmul", (n // 64, n // 64, 1), a=[n, n], b=[n, n], out=[n, n], m=n, n=n, k=n)
    for rows, keys in ((4096, 4096), (32768, 2048)):
        yield of("attention", (rows // 64, 1, 1), q=[rows, 64], k=[keys, 64], v=[keys, 64], out=[rows, 64], keys=keys)
    yield of("column_sums", (132, 1, 1), x=[132 * 16, 100], out=[100], partial=[100], rows=132 * 16, cols=100)


def triton_row(
    file: Path, record: Mapping[str, Any], sizes: Mapping[str, Any], grid: tuple[int, int, int], folder: Path
) -> Row | str:
    cubin = file.read_bytes()
    cubin = gzip.decompress(cubin) if file.suffix == ".gz" else cubin
    arguments: list[Any] = []
    for name, kind, given in record["parameters"]:
        value = sizes.get(name, given)
        if kind in POINTERS:
            dtype, each = POINTERS[kind]
            arguments.append(DrawnArgument(name, int(np.prod(value)) * each, dtype, output=name in OUTPUTS))
        else:
            arguments.append(ScalarArgument(name, (np.float32 if kind == "fp32" else np.int32)(value)))
    arguments += [ScalarArgument(name, np.int64(0)) for name in ("global_scratch", "profile_scratch")]
    entry, geometry = record["entry"], Geometry(grid, (record["threads"], 1, 1), record["shared"])
    launch = _launch(cubin, entry, geometry, arguments)
    for allocation in launch.allocations:
        if allocation.name == "lock":
            allocation.held[:] = 0
    made = Made(entry, Program(disassemble(cubin), entry), launch, geometry)
    problem = (
        " ".join(f"{name}={value}" for name, value in sizes.items() if isinstance(value, int)) or f"grid {grid[0]}"
    )
    if "x" in sizes or "a_ptr" in sizes or "X_ptr" in sizes:
        problem = f"{grid[0]} blocks, {problem}"
    kernel = record.get("label", record["kernel"].strip("_"))
    work = 2.0 * sizes["m"] * sizes["n"] * sizes["k"] if "m" in sizes else 0.0
    row = row_of(
        ("Triton", f"{record['kernel'].strip('_')} {problem}", kernel), cubin, [made], work, 0.0, zeroed=("lock",)
    )
    keep(folder, row, cubin, None, "")
    return row


def extra_triton(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any], Mapping[str, Any], tuple[int, int, int]]]:
    """Yield what benchmarks/triton_hopper.py compiled into a folder: its records state sizes and grid."""
    if (folder / "launches.json").is_file():
        for record in json.loads((folder / "launches.json").read_text()):
            yield folder / record["file"], record, record["sizes"], tuple(record["grid"])


def keep(folder: Path, row: Row, cubin: bytes, source: str | None, options: str) -> None:
    for kind, data in (("cubins", cubin), ("sources", f"// {options}\n{source}".encode() if source else None)):
        path = folder / kind / f"{row['cubin']}.gz"
        if data is not None and not path.exists():
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_bytes(gzip.compress(data, 9, mtime=0))
            os.replace(scratch, path)


# ── predicting again ────────────────────────────────────────────────────────────────────────────────────────────────


def made_of(row: Row, folder: Path) -> list[Made]:
    """Return the kernels of a row that the folder holds, to predict them again."""
    cubin = gzip.decompress((folder / "cubins" / f"{row['cubin']}.gz").read_bytes())
    listing = disassemble(cubin)
    made = []
    for kernel in row["kernels"]:
        given, buffers = kernel["parameters"], row["buffers"]
        arguments = [_argument(one, buffers, f"p{n}") for n, one in enumerate(given)]
        pointed_at = {one["map"][1] for one in given if "map" in one}
        mapped = [
            _argument(name, buffers, name) for name in sorted(pointed_at - {n for n in given if isinstance(n, str)})
        ]
        of_cluster = tuple(kernel["cluster"]) if "cluster" in kernel else None
        geometry = Geometry(tuple(kernel["grid"]), tuple(kernel["block"]), kernel["shared"], of_cluster)
        launch = prepare(read_kernel(cubin, kernel["entry"]), geometry, arguments, SEED, mapped=mapped)
        for allocation in launch.allocations:
            if allocation.name in row["buffers"] and row["buffers"][allocation.name][2] == "zero":
                allocation.held[:] = 0
        made.append(Made(kernel["entry"], Program(listing, kernel["entry"]), launch, geometry))
    return made


def _argument(given: Any, buffers: Mapping[str, Sequence[Any]], name: str) -> Any:
    """Return the argument that `parameter` wrote."""
    if isinstance(given, str):
        size, dtype, role = buffers[given]
        contents = None
        if role not in ROLES:
            contents = np.frombuffer(zlib.decompress(base64.b64decode(role)), np.uint8)
        return DrawnArgument(given, size, dtype, role in ROLES[1:], contents)
    if "s" in given:
        return ScalarArgument(name, np.void(bytes.fromhex(given["s"])))
    if "map" in given:
        map_name, tensor, dtype, dims, strides, box, swizzle = given["map"]
        return TensorMapArgument(map_name, tensor, dtype, tuple(dims), tuple(strides), tuple(box), swizzle)
    parts = tuple((at, _argument(part, buffers, f"{name}.{at}")) for at, part in given["parts"])
    return StructArgument(name, given["struct"], parts)


def predict_again(row: Row, folder: Path) -> Row | str:
    """Return the row with the current model's predictions in place of those made before it was measured, or why not."""
    start = time.process_time()
    try:
        policies = tuple(row["predicted"]) or ("cold",)
        found = predicted(made_of(row, folder), row["flops"], row["dram_bytes"], policies)
    except Exception as error:  # named, as in `attempt`
        return f"{row['set']}, {row['problem']}, {row['kernel']}: {type(error).__name__}: {error}"
    return {**row, "model": MODEL_VERSION, "predicted": found, "cpu_s": round(time.process_time() - start, 2)}


def predict_folder_again(folder: Path, out: Path, processes: int, only: str) -> None:
    """Write the folder's rows with the current model's predictions to `out`, a line of JSON a row."""
    wanted = [row for row in map(json.loads, _lines(folder / "rows.jsonl")) if only in row["set"]]
    with ProcessPoolExecutor(processes) as pool, out.open("w") as file:
        for row in pool.map(predict_again, wanted, [folder] * len(wanted)):
            if isinstance(row, str):
                print(row, file=sys.stderr)
            else:
                print(json.dumps(row, ensure_ascii=False), file=file, flush=True)


# ── preparing ───────────────────────────────────────────────────────────────────────────────────────────────────────

Task = Callable[[Path], Row | str]


def groups(shared: Path) -> Iterator[tuple[str, int, list[Task]]]:
    """Yield each group's name, how many rows it needs, and tasks that make one each, or say why there is none."""
    measured = shared / "measured_kernels" / "fast_cu"
    yield "fast.cu", 99, [
        partial(fast_cu_row, measured / f"matmul_{number}.cuh", number, size)
        for size in (4096, 2048, 8192, 1024) for number in fast_cu.VARIANTS
    ]  # fmt: skip
    cubins = shared / "fa3_machine_code"
    yield "FlashAttention-3", 99, [partial(fa3_row, cubins, name, fa3.Problem(*sizes)) for name, sizes in FA3_PROBLEMS]
    yield "Triton", 99, [partial(triton_row, *given) for given in triton_launches()]
    extra = [partial(triton_row, *given) for given in extra_triton(Path(os.environ.get("TRITON_EXTRA", "/nowhere")))]
    if extra:
        yield "Triton for Hopper", 99, extra
    classics: dict[str, list[Task]] = {}
    for one in all_of_them():
        classics.setdefault(one.set, []).append(partial(classic, one))
    for name, tasks in classics.items():
        yield name, 99, tasks
    for problem, families in OWN:
        for family, count in families.items():
            tasks = [partial(own, problem, c) for c in configurations(problem, family, count)]
            yield f"{problem} {family}", count, tasks


def attempt(name: str, task: Task, folder: Path) -> tuple[str, Row | str]:
    try:
        found = task(folder)
    except Exception as error:  # what cannot be compiled, launched or predicted is counted, not raised
        found = f"{type(error).__name__}: {error}"
    if isinstance(found, dict):
        us = found["predicted"].get("cold", {"us": 0.0})["us"]
        if not math.isfinite(us) or us > LONGEST_US:
            found = f"predicted at {us} µs, which is too long here"
    return name, found


def make_folder(folder: Path) -> None:
    for kind in ("cubins", "sources"):
        (folder / kind).mkdir(parents=True, exist_ok=True)


def prepare_folder(
    folder: Path, of_set: Iterable[tuple[str, int, list[Task]]], processes: int, seconds: float, only: str = ""
) -> None:
    """Write a data set, a row at a time, round-robin over groups; rows that the folder has already are kept."""
    make_folder(folder)
    begun = time.monotonic()
    wanted = [(name, count, list(tasks)) for name, count, tasks in of_set if only in name]
    queue: list[tuple[str, Task]] = []
    for turn in range(max(len(tasks) for _, _, tasks in wanted)):
        queue += [(name, tasks[turn]) for name, _, tasks in wanted if turn < len(tasks)]
    left = {name: count for name, count, _ in wanted}
    seen = {json.loads(line)["id"] for line in _lines(folder / "rows.jsonl")}
    with (
        ProcessPoolExecutor(processes) as pool,
        (folder / "rows.jsonl").open("a") as rows,
        (folder / "left_out.txt").open("a") as out,
    ):
        running = set()
        at = 0
        while (at < len(queue) or running) and time.monotonic() - begun < seconds:
            while at < len(queue) and len(running) < processes + 1:
                name, task = queue[at]
                at += 1
                if left[name] > 0:
                    running.add(pool.submit(attempt, name, task, folder))
            for done in as_completed(running):
                running.discard(done)
                name, found = done.result()
                if isinstance(found, str):
                    print(f"{name}: {found}", file=out, flush=True)
                elif found["id"] not in seen:
                    seen.add(found["id"])
                    left[name] -= 1
                    print(json.dumps(found, ensure_ascii=False), file=rows, flush=True)
                    print(
                        f"{time.monotonic() - begun:.0f} s, {at}/{len(queue)}, {len(seen)} rows: {name}",
                        file=sys.stderr,
                    )
                break
        pool.shutdown(wait=False, cancel_futures=True)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def write_tools(folder: Path, texts: Mapping[str, str]) -> None:
    """Compile the kernels that benchmarks/measured_h100.py itself needs into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(InstalledNvrtc().compile(text, ARCH, ()), 9, mtime=0))
