"""The cases of hardware_bits.py: probes of single instructions, and whole kernels, with the executor's results.

Inputs are drawn by fixed seeds. What the compiler refuses is left out by name; what the executor does not know is kept
without a result, so that the GPU's is on record.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conversion_probes import conversions, special_functions
from benchmarks.hardware_bits import Arrays, Case, compare_buffer, print_summary, report
from benchmarks.matrix_probes import mma, wgmma
from benchmarks.move_probes import async_copies, clusters, matrices, tma
from benchmarks.probe_store import ARCH, LIMIT, Store, Unsupported, argument_json, hash_of
from benchmarks.scalar_probes import (
    atomics,
    double_arithmetic,
    float_arithmetic,
    half_arithmetic,
    integers,
    sweeps,
    warps,
)
from evoengine.devices.base import (
    ConstantArgument,
    KernelFailure,
    ScalarArgument,
    ScratchArgument,
    TensorArgument,
    TensorMapArgument,
)
from evoengine.errors import UsageError
from evoengine.records import Launch as PlannedLaunch
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import Geometry, HostMemory, Memory, prepare
from evoengine.sass.listing import disassemble
from evoengine.stages.compile import CompileFailed, compile_source

# ── whole kernels ───────────────────────────────────────────────────────────────────────────────────────────────────


def record_launches(
    store: Store,
    name: str,
    cubin: bytes,
    source: str | None,
    calls: Sequence[Any],
    dtypes: Mapping[str, str],
    seed: int = 1,
) -> None:
    """Execute calls (KernelCall) in order over one memory, and store them with what they leave in outputs."""
    state = "executed"
    found: dict[str, np.ndarray] = {}
    kernels = {}
    try:
        for call in calls:
            program = Program(disassemble(cubin), call.entry)
            if program.unknown:
                raise Unsupported("unsupported: " + ", ".join(program.unknown))
            kernels[call.entry] = read_kernel(cubin, call.entry), program
        memory = Memory([(kernels[c.entry][0], c.arguments) for c in calls], seed)
        for call in calls:
            kernel, program = kernels[call.entry]
            launch = prepare(kernel, call.launch, call.arguments, seed, memory=memory)
            run(program, launch)
            found |= {a.name: a.held for a in launch.allocations}
    except (KernelFailure, UsageError) as error:
        state = f"failed: {error}"
    except Unsupported as error:
        state = str(error)
    buffers: dict[str, Any] = {}
    launches = []
    for call in calls:
        arguments = []
        for a in call.arguments:
            if isinstance(a, TensorArgument | ScratchArgument):
                arguments.append({"buffer": a.name})
            elif isinstance(a, ScalarArgument):
                arguments.append({"scalar": a.value.tobytes().hex()})
            elif isinstance(a, TensorMapArgument):
                arguments.append(argument_json(a))
            elif isinstance(a, ConstantArgument):
                arguments.append({"constant": a.name, "data": store.put(np.ascontiguousarray(a.data).tobytes())})
            else:
                return store.refuse(name, f"an argument of {type(a).__name__}")
            if isinstance(a, ScratchArgument):
                init = "zero" if a.zeroed else "ff"
                buffers[a.name] = {"bytes": a.bytes, "init": init, "role": "scratch", "regions": [], "expect": None}
            if isinstance(a, TensorArgument):
                data = np.ascontiguousarray(a.data)
                kind = dtypes.get(a.name) or {"uint16": "f16", "float32": "f32", "float16": "f16"}.get(
                    str(data.dtype), "u8"
                )
                buffers[a.name] = {
                    "bytes": data.nbytes,
                    "init": "ff" if a.output else store.put(data.tobytes()),
                    "role": "out" if a.output else "in",
                    "regions": [[a.name, kind]],
                    "expect": store.put(found[a.name].tobytes()) if a.output and state == "executed" else None,
                }
        threads = call.launch.block
        block = (threads, 1, 1) if isinstance(threads, int) else tuple(threads)
        launches.append(
            {
                "entry": call.entry,
                "grid": tuple(call.launch.grid),
                "block": block,
                "shared": call.launch.shared_bytes,
                "arguments": arguments,
            }
        )
    store.add(
        {
            "id": name,
            "executor": state,
            "cubin": store.put(cubin),
            "source": store.put(source.encode()) if source else None,
            "buffers": buffers,
            "inputs": [],
            "launches": launches,
        }
    )


PROBLEMS = (
    "attention:b1,h2,s256,d64,fp16",
    "attention:b1,h2,s256,d128,bf16,causal",
    "gemm:m256,n256,k256,fp16",
    "gemm:m200,n136,k264,bf16,bias_gelu",
    "rms_norm:rows8,hidden1000,bf16",
    "rms_norm:rows8,hidden777,fp32",
    "convolution:w64,h48,fw5,fh5",
)


def families(store: Store, problems: Sequence[str] = PROBLEMS) -> None:
    from benchmarks.drawn_binaries import _groups
    from evoengine.devices.base import Executed
    from evoengine.paths import asset
    from evoengine.records import CompiledCandidate
    from evoengine.search.evaluators import make_plans
    from evoengine.stages.gate import executor
    from evoengine.stages.render import render
    from evoengine.stages.verify import CannotJudge, verify

    bfloat = {"out": "bf16", "o": "bf16", "y": "bf16", "c": "bf16"}
    for problem in problems:
        for target, space, family in _groups(problem, "h100"):
            random = np.random.default_rng(hash_of(problem + family))
            wanted = [c for c in space.starts if c["family"] == family][:1]
            wanted += [c for c in space.sample(random, 60) if c["family"] == family][:1]
            for number, config in enumerate(wanted):
                name = f"kernel {problem} {family} {number}"
                begun = time.monotonic()
                try:
                    source = render(target, space, config, asset("templates"))
                    binary = compile_source(source, ARCH)
                    judge = executor(CompiledCandidate(0, source, binary))
                except (CompileFailed, CannotJudge) as error:
                    store.refuse(name, str(error))
                    continue
                taken: list[Any] = []

                def capture(rounds: Any, seed: int, taken: list[Any] = taken, judge: Any = judge) -> Executed:
                    done = judge.run(rounds, seed)
                    sizes = sum(a.data.nbytes for c in rounds[0] for a in c.arguments if isinstance(a, TensorArgument))
                    taken.append((sizes, rounds[0]))
                    return done

                plans = make_plans(space, target, config)
                verify(target.workload, plans.short[:6], capture, "executor", 5)
                small = sorted((t for t in taken if t[0] < 250_000), key=lambda t: -t[0])
                kinds = bfloat if "bf16" in problem else {}
                for k, (_, calls) in enumerate(small[:1] + small[-1:] if len(small) > 1 else small):
                    record_launches(store, f"{name}.{k}", binary.cubin, source.text, calls, kinds)
                print(f"  {name}: {len(taken)} cases, {time.monotonic() - begun:.1f} s", flush=True)


def triton(store: Store) -> None:
    from evoengine.devices.base import KernelCall
    from tests.sass.test_triton_kernels import DTYPES, FOLDER, OUTPUTS, RECORDS, arguments

    for found in RECORDS:
        if not found["file"].endswith("_90.cubin.gz"):
            continue
        cubin = gzip.decompress((FOLDER / found["file"]).read_bytes())
        launch = PlannedLaunch(tuple(found["grid"]), found["threads"], found["shared"])
        kinds = {
            n: {"*fp32": "f32", "*fp16": "f16"}[k] for n, k, _ in found["parameters"] if n in OUTPUTS and k in DTYPES
        }
        call = KernelCall(found["entry"], launch, arguments(found, np.random.default_rng(1)))
        record_launches(store, f"triton {found['kernel']}", cubin, None, [call], kinds)


ELEMENTWISE, MOVES, PRODUCTS, KERNELS, SWEEPS = "elementwise", "moves", "products", "kernels", "sweeps"
BUILDERS: Mapping[str, tuple[str, Callable[[Store], None]]] = {
    "special_functions": (ELEMENTWISE, special_functions),
    "conversions": (ELEMENTWISE, conversions),
    "float": (ELEMENTWISE, float_arithmetic),
    "half": (ELEMENTWISE, half_arithmetic),
    "double": (ELEMENTWISE, double_arithmetic),
    "integers": (ELEMENTWISE, integers),
    "warps": (ELEMENTWISE, warps),
    "mma": (PRODUCTS, mma),
    "wgmma": (PRODUCTS, wgmma),
    "matrices": (MOVES, matrices),
    "atomics": (MOVES, atomics),
    "async_copies": (MOVES, async_copies),
    "tma": (MOVES, tma),
    "clusters": (MOVES, clusters),
    "triton": (KERNELS, triton),
    "families": (KERNELS, families),
    "sweeps": (SWEEPS, sweeps),
}
"""name → the group whose cases share a process on the GPU, and what builds them"""


def prepare_all(folder: Path, only: Sequence[str] | None = None) -> None:
    """Build every case and store them in a folder."""
    store = Store(folder)
    try:
        for name, (store.group, build) in BUILDERS.items():
            if only and name not in only:
                continue
            begun, before = time.monotonic(), len(store.cases)
            print(f"{name} …", flush=True)
            build(store)
            print(f"{name}: {len(store.cases) - before} cases, {time.monotonic() - begun:.0f} s", flush=True)
    finally:
        store.close()
    print(f"{len(store.cases)} cases, {(folder / 'arrays.zip').stat().st_size:,} bytes")


# ── once more ───────────────────────────────────────────────────────────────────────────────────────────────────────


def execute_stored(case: Case, arrays: Arrays) -> dict[str, bytes]:
    """Return what the executor leaves in a stored case's outputs. Raises Unsupported."""
    cubin = arrays[case["cubin"]]
    listing = disassemble(cubin)
    made: dict[str, Any] = {}
    for name, buffer in case["buffers"].items():
        data = np.frombuffer(arrays.initial(buffer), np.uint8)
        made[name] = TensorArgument(name, data) if buffer["role"] == "in" else HostMemory(name, data.copy())
    calls = []
    for launch in case["launches"]:
        kernel, program = read_kernel(cubin, launch["entry"]), Program(listing, launch["entry"])
        if program.unknown:
            raise Unsupported("unsupported: " + ", ".join(program.unknown))
        passed = [_stored_argument(a, made, arrays) for a in launch["arguments"]]
        named = {a.name for a in passed}
        mapped = [made[name] for name in made if name not in named]
        calls.append((kernel, program, launch, passed, mapped))
    try:
        memory = Memory([(kernel, [*passed, *mapped]) for kernel, _, _, passed, mapped in calls], 1)
        for kernel, program, launch, passed, mapped in calls:
            geometry = Geometry(tuple(launch["grid"]), tuple(launch["block"]), launch["shared"])
            run(program, prepare(kernel, geometry, passed, 1, memory=memory, mapped=mapped), limit=LIMIT)
    except (KernelFailure, UsageError) as error:
        raise Unsupported(f"failed: {error}") from error
    return {n: made[n].data.tobytes() for n, b in case["buffers"].items() if b["role"] in ("out", "inout")}


def _stored_argument(a: dict[str, Any], made: dict[str, Any], arrays: Arrays) -> Any:
    if "buffer" in a:
        return made[a["buffer"]]
    if "scalar" in a:
        data = bytes.fromhex(a["scalar"])
        return ScalarArgument("scalar", np.frombuffer(data, f"<u{len(data)}")[0])
    if "constant" in a:
        return ConstantArgument(a["constant"], np.frombuffer(arrays[a["data"]], np.uint8))
    of = a["map"]
    sizes = (tuple(of[name]) for name in ("dims", "strides", "box"))
    return TensorMapArgument("map", of["tensor"], of["dtype"], *sizes, of["swizzle"])


def repeat(folder: Path, against: Path, out: Path, only: Sequence[str] | None = None) -> int:
    """Execute stored cases again and compare with the GPU's bits; returns an exit code."""
    arrays = Arrays(folder)
    cases = json.loads((folder / "manifest.json").read_text())["cases"]
    measured = {one["id"]: one for one in json.loads(against.with_suffix(".json").read_text())["results"]}
    done = []
    with np.load(against) as bits:
        for case in cases:
            known = measured.get(case["id"], {"gpu_error": "not run"})
            if "sweep" in case or "gpu_error" in known or (only and not case["id"].startswith(tuple(only))):
                continue
            found: dict[str, Any] = {"id": case["id"], "executor": "executed", "differences": []}
            begun = time.process_time()
            try:
                results = execute_stored(case, arrays)
            except Unsupported as error:
                found["executor"], results = str(error), {}
            inputs = {name: arrays[case["buffers"][name]["init"]] for name in case["inputs"]}
            for name, data in results.items():
                buffer, key = case["buffers"][name], f"{case['id']}|{name}"
                gpu = bits[key].tobytes() if key in bits else arrays[buffer["expect"]]
                found["differences"] += compare_buffer(name, buffer, gpu, data, inputs)
            found["equal"] = bool(results) and not found["differences"]
            found["seconds"] = round(time.process_time() - begun, 3)
            done.append(found)
    report(out, {"against": against.name}, cases, done, [])
    print_summary(done, [])
    return 0
