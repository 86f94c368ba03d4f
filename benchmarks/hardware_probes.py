"""The cases of hardware_bits.py: probes of single instructions, and whole kernels, with the executor's results.

Inputs are drawn by fixed seeds. What the compiler refuses is left out by name; what the executor does not know is kept
without a result, so that the GPU's is on record.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import time
import zipfile
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hardware_bits import TYPES, Arrays, Case, compare_buffer, nan_of, print_summary, report
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
from evoengine.records import Source
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import DrawnArgument, Geometry, HostMemory, Memory, prepare
from evoengine.sass.listing import disassemble
from evoengine.stages.compile import CompileFailed, compile_source

ARCH = "sm_90a"
LIMIT = 2_000_000
ENTRY = "kernel"
PRELUDE = """#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
__device__ __forceinline__ u32 at_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
    asm volatile("{\\n.reg .pred done;\\nWAIT:\\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
                 "@done bra DONE;\\nbra WAIT;\\nDONE:\\n}\\n" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
}
"""
CTYPES = {"r": "u32", "h": "u16", "l": "u64"}
WIDTH = {"r": 4, "h": 2, "l": 8}

# ── the store ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Store:
    """Cases and their arrays, written to a folder.

    `group` is that of cases to come, which share a process on the GPU.
    """

    group = "probes"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._zip = zipfile.ZipFile(folder / "arrays.zip", "w", zipfile.ZIP_LZMA)
        self._names: set[str] = set()
        self.cases: list[dict[str, Any]] = []
        self.refused: list[dict[str, str]] = []

    def put(self, data: bytes) -> str:
        key = hashlib.sha256(data).hexdigest()[:20]
        if key not in self._names:
            self._names.add(key)
            self._zip.writestr(key, data)
        return key

    def add(self, case: dict[str, Any]) -> None:
        case |= {"number": len(self.cases), "group": self.group}
        if case["executor"].startswith("failed"):  # a kernel that may hang or fault: by itself, and last
            case["group"] = f"suspect {case['number']}"
        self.cases.append(case)
        if case["executor"].startswith(("unsupported", "failed")):
            print(f"  {case['id']}: {case['executor'][:160]}", flush=True)

    def refuse(self, name: str, why: str) -> None:
        self.refused.append({"id": name, "why": why[:300]})
        print(f"  {name}: refused: {why[:160]}", flush=True)

    def close(self) -> None:
        self._zip.close()
        found = {"cases": self.cases, "refused_by_the_compiler": self.refused}
        (self._folder / "manifest.json").write_text(json.dumps(found, indent=0) + "\n")


Regions = Sequence[tuple[str, str]]


@dataclass
class Buffer:
    """A buffer of a probe: contents of an input or of what is changed, or the bytes of an output."""

    name: str
    role: str
    data: bytes = b""
    bytes: int = 0
    regions: Regions = ()
    element_bytes: int = 0

    @property
    def size(self) -> int:
        return len(self.data) or self.bytes


def source_buffer(name: str, data: np.ndarray | bytes) -> Buffer:
    return Buffer(name, "in", data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes())


def result_buffer(name: str, size: int, kind: str, label: str = "", **more: Any) -> Buffer:
    return Buffer(name, "out", bytes=size, regions=[(label or name, kind)], **more)


@dataclass
class Probe:
    """One launch of a text's kernel; `arguments` name buffers, or are scalars and tensor maps."""

    name: str
    text: str
    buffers: list[Buffer]
    arguments: list[str | np.generic | TensorMapArgument]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    shared: int = 0
    inputs: list[str] = field(default_factory=list)


class Unsupported(Exception):
    """The executor cannot run a probe."""


def compile_text(text: str) -> bytes:
    return compile_source(Source(PRELUDE + text, ENTRY, PlannedLaunch((1, 1, 1), 32, 0)), ARCH).cubin


def execute(probe: Probe, cubin: bytes) -> dict[str, bytes]:
    """Return what the executor leaves in the outputs. Raises Unsupported."""
    program = Program(disassemble(cubin), ENTRY)
    if program.unknown:
        raise Unsupported("unsupported: " + ", ".join(program.unknown))
    kernel = read_kernel(cubin, ENTRY)
    made: dict[str, Any] = {}
    for b in probe.buffers:
        if b.role == "inout":
            made[b.name] = DrawnArgument(b.name, b.size, "uint8", True, np.frombuffer(b.data, np.uint8).copy())
        elif b.role == "in":
            made[b.name] = TensorArgument(b.name, np.frombuffer(b.data, np.uint8))
        else:
            made[b.name] = TensorArgument(b.name, np.empty(b.size, np.uint8), output=True)
    arguments = []
    for n, a in enumerate(probe.arguments):
        if isinstance(a, str):
            arguments.append(made[a])
        elif isinstance(a, TensorMapArgument):
            arguments.append(a)
        else:
            arguments.append(ScalarArgument(f"s{n}", a))  # type: ignore[arg-type]
    named = {a for a in probe.arguments if isinstance(a, str)}
    mapped = [made[b.name] for b in probe.buffers if b.name not in named]
    try:
        launch = prepare(kernel, Geometry(probe.grid, probe.block, probe.shared), arguments, 1, mapped=mapped)
        run(program, launch, limit=LIMIT)
    except (KernelFailure, UsageError) as error:
        raise Unsupported(f"failed: {error}") from error
    return {a.name: a.held.tobytes() for a in launch.allocations if a.name in made}


def record(store: Store, probe: Probe, cubin: bytes | None = None) -> None:
    """Compile, execute and store a probe."""
    if cubin is None:
        try:
            cubin = compile_text(probe.text)
        except CompileFailed as error:
            return store.refuse(probe.name, str(error))
    state, found = "executed", {}
    try:
        found = execute(probe, cubin)
    except Unsupported as error:
        state = str(error)
    buffers = {}
    for b in probe.buffers:
        output = b.role in ("out", "inout")
        buffers[b.name] = {
            "bytes": b.size,
            "init": store.put(b.data) if b.data else "ff",
            "role": b.role,
            "regions": [list(r) for r in b.regions],
            "expect": store.put(found[b.name]) if output and found else None,
            **({"element_bytes": b.element_bytes} if b.element_bytes else {}),
        }
    store.add(
        {
            "id": probe.name,
            "executor": state,
            "cubin": store.put(cubin),
            "source": store.put((PRELUDE + probe.text).encode()),
            "buffers": buffers,
            "inputs": probe.inputs,
            "launches": [
                {
                    "entry": ENTRY,
                    "grid": probe.grid,
                    "block": probe.block,
                    "shared": probe.shared,
                    "arguments": [_argument(a) for a in probe.arguments],
                }
            ],
        }
    )


def _argument(a: object) -> dict[str, Any]:
    if isinstance(a, str):
        return {"buffer": a}
    if isinstance(a, TensorMapArgument):
        return {
            "map": {
                "tensor": a.tensor,
                "dtype": a.dtype,
                "dims": a.dims,
                "strides": a.strides_bytes,
                "box": a.box,
                "swizzle": a.swizzle,
            }
        }
    assert isinstance(a, np.generic)
    return {"scalar": a.tobytes().hex()}


# ── elementwise probes ──────────────────────────────────────────────────────────────────────────────────────────────


def elementwise_text(ins: str, out: str, lines: Sequence[str]) -> str:
    """A kernel that writes [line][element]: PTX with $o, $a, $b, $c, or a C expression behind `=`."""
    names = "abc"[: len(ins)]
    parameters = ", ".join(f"const {CTYPES[kind]}* {n}_" for n, kind in zip(names, ins, strict=True))
    reads = " ".join(f"const {CTYPES[kind]} {n} = {n}_[i];" for n, kind in zip(names, ins, strict=True))
    body = []
    for number, line in enumerate(lines):
        if line.startswith("="):
            body.append(f"o_[{number} * n + i] = {line[1:]};")
            continue
        text = line.replace("%", "%%").replace("$o", "%0").replace('"', "")
        used = []
        for n, kind in zip(names, ins, strict=True):
            if f"${n}" in text:
                used.append(f'"{kind}"({n})')
                text = text.replace(f"${n}", f"%{len(used)}")
        body.append(
            f'{{ {CTYPES[out]} o; asm volatile("{{{text}}}" : "={out}"(o) : {", ".join(used)});'
            f" o_[{number} * n + i] = o; }}"
        )
    return (
        f'extern "C" __global__ void kernel({parameters}, {CTYPES[out]}* o_) {{\n'
        "  const int n = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        f"  {reads}\n  " + "\n  ".join(body) + "\n}\n"
    )


def elementwise(
    store: Store, name: str, out: str, inputs: Sequence[np.ndarray], lines: Sequence[tuple[str, str]]
) -> None:
    """Record lines (text, element type of the result) over the inputs; those that fail are told from the others."""
    by_width = {1: "h", 2: "h", 4: "r", 8: "l"}
    ins = "".join(by_width[x.itemsize] for x in inputs)
    size = inputs[0].size
    assert size % 128 == 0 and all(x.size == size for x in inputs), name
    count = [0]

    def probe(some: Sequence[tuple[str, str]], label: str) -> Probe:
        buffers = [source_buffer("abc"[k], x) for k, x in enumerate(inputs)]
        buffers.append(
            Buffer("o", "out", bytes=len(some) * size * WIDTH[out], regions=list(some), element_bytes=WIDTH[out])
        )
        names = [b.name for b in buffers]
        text = elementwise_text(ins, out, [text for text, _ in some])
        return Probe(label, text, buffers, list(names), (size // 128, 1, 1), (128, 1, 1), inputs=names[:-1])

    unknown: list[tuple[str, str]] = []

    def good(some: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of the lines that compile and execute, by halving."""
        if not some:
            return []
        one = probe(some, name)
        try:
            cubin = compile_text(one.text)
        except CompileFailed as error:
            if len(some) == 1:
                store.refuse(f"{name}: {some[0][0]}", str(error))
                return []
        else:
            program = Program(disassemble(cubin), ENTRY)
            if not program.unknown:
                try:
                    execute(one, cubin)
                    return list(some)
                except Unsupported:
                    pass
            if len(some) == 1:
                unknown.append(some[0])
                return []
        middle = len(some) // 2
        return good(some[:middle]) + good(some[middle:])

    kept = good(lines)
    for start in range(0, len(kept), 40):
        count[0] += 1
        record(store, probe(kept[start : start + 40], f"{name}_{count[0]}"))
    for start in range(0, len(unknown), 8):
        for line in unknown[start : start + 8]:
            count[0] += 1
            record(store, probe([line], f"{name}_{count[0]}_unknown"))


def words(values: Sequence[int], dtype: type = np.uint32) -> np.ndarray:
    return np.array([v % (1 << 8 * np.dtype(dtype).itemsize) for v in values], dtype)


def numbers(text: str) -> list[Any]:
    """Return the numbers of a text, as Python writes them."""
    return [literal_eval(number) for number in text.split()]


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


MANTISSAS = words(
    numbers(
        "0 1 2 0x7FFFFF 0x7FFFFE 0x400000 0x400001 0x3FFFFF 0x555555 0x2AAAAA 0x1000 0x1001 0xFFF 0x3000 0x2000"
        " 0x8000 0x8001 0x7FFF 0x18000 0x10000 0x80000 0x80001 0x180000 0x100000 0x100001 0x300000 0x7FF000 0x7F8000"
        " 0x700000 0x780000"
    )
)


def every_exponent(count: int, seed: int = 1) -> np.ndarray:
    """[512 · count] uint32 floats: `count` mantissas for each sign and exponent, special ones first."""
    random = np.random.default_rng(seed)
    drawn = random.integers(0, 1 << 23, (512, count), dtype=np.uint32)
    special = MANTISSAS[: min(count, len(MANTISSAS))]
    drawn[:, : len(special)] = special
    return (drawn | (np.arange(512, dtype=np.uint32) << 23)[:, None]).ravel()


SPECIAL = np.concatenate(
    [
        floats(
            *numbers(
                "0 -0.0 1 -1 2 0.5 1.5 -1.5 3 1e30 -1e30 1e-30 65504 65519 65520 65536 448 464 465 57344 61440 1e10"
                " 2147483647 -2147483648 4294967295 2.5 3.5 -0.5"
            )
        ),
        words(
            numbers(
                "0x7F800000 0xFF800000 0x7FC00000 0xFFC00000 0x7F800001 0x7FFFFFFF 0xFFA5A5A5 1 0x80000001 0x7FFFFF"
                " 0x807FFFFF 0x800000 0x80800000 0x7F7FFFFF 0xFF7FFFFF 0x3F7FFFFF 0x3F800001 0x33800000 0x00400000"
                " 0x80400000"
            )
        ),
    ]
)


def float_pairs(count: int, seed: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of floats: special with special, any bits, close magnitudes, cancelling, products near the ends."""
    random = np.random.default_rng(seed)
    x, y = (v.ravel() for v in np.meshgrid(SPECIAL, SPECIAL))
    rest = count - x.size
    a = random.integers(0, 1 << 32, rest, dtype=np.uint32)
    b = random.integers(0, 1 << 32, rest, dtype=np.uint32)
    turn = np.arange(rest) % 4
    near = (a & 0x7F800000) + (random.integers(-2, 3, rest) << 23) & 0x7F800000 | b & 0x807FFFFF
    b = np.where(turn == 1, near, b)
    b = np.where(turn == 2, (a ^ 0x80000000) + random.integers(-3, 4, rest), b)
    opposite = (((random.integers(0, 300, rest) - 23 + 127) - (a >> 23 & 0xFF).astype(np.int64)) & 0xFF) << 23
    b = np.where(turn == 3, opposite | (b & 0x807FFFFF), b)
    return np.concatenate([x, a]), np.concatenate([y, b.astype(np.uint32)])


def float_triples(count: int, seed: int = 3) -> tuple[np.ndarray, ...]:
    a, b = float_pairs(count, seed)
    random = np.random.default_rng(seed + 1)
    with np.errstate(all="ignore"):
        product = -(a.view(np.float32).astype(np.float64) * b.view(np.float32)).astype(np.float32)
    near = product.view(np.uint32) + random.integers(-4, 5, count).astype(np.uint32)
    turn = np.arange(count) % 4
    drawn = random.integers(0, 1 << 32, count, dtype=np.uint32)
    shifted = near + (random.integers(-26, 27, count) << 23).astype(np.uint32)
    c = np.where(
        turn == 0, random.choice(SPECIAL, count), np.where(turn == 1, near, np.where(turn == 2, shifted, drawn))
    )
    return a, b, c.astype(np.uint32)


EVERY16 = np.arange(65536, dtype=np.uint16)
SPECIAL16 = words(
    numbers(
        "0 0x8000 1 0x8001 0x3FF 0x400 0x8400 0x3C00 0xBC00 0x3C01 0x7BFF 0xFBFF 0x7C00 0xFC00 0x7C01 0x7E00 0xFE00"
        " 0x7FFF 0x3800 0x5555 0x7F80 0xFF80 0x7F81 0x7FC0 0x7F7F 0x3F80 0xBF80 0x0080 0x007F 0x8080"
    ),
    np.uint16,
)


def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


def half_words(count: int, arity: int, seed: int) -> tuple[np.ndarray, ...]:
    """Registers of two 16-bit floats each, special with special in the low halves first."""
    random = np.random.default_rng(seed)
    low = [random.integers(0, 65536, count, dtype=np.uint16) for _ in range(arity)]
    pairs = np.meshgrid(*[SPECIAL16] * 2)
    for k in range(min(arity, 2)):
        low[k][: pairs[k].size] = pairs[k].ravel()
    if arity == 3:
        low[2][::3] = random.choice(SPECIAL16, low[2][::3].size)
    near = slice(count // 2, None, 2)  # magnitudes that meet
    for k in range(arity):
        low[k][near] = low[k][near] & 0x83FF | (random.integers(12, 18, low[k][near].size) << 10).astype(np.uint16)
    return tuple(packed(x, np.roll(x[::-1], k)) for k, x in enumerate(low))


ROUNDINGS = ("rn", "rz", "rm", "rp")
ORDERS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def typed(kind: str, lines: Iterator[str] | Sequence[str]) -> list[tuple[str, str]]:
    return [(line, kind) for line in lines]


def compared_by(kind: str, flags: str = "") -> list[str]:
    return [f".reg .pred p; setp.{o}{flags}.{kind} p, $a, $b; selp.u32 $o, 1, 0, p;" for o in ORDERS]


def special_functions(store: Store) -> None:
    names = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos")
    lines = [f"{n}.approx{ftz}.f32 $o, $a;" for n in names for ftz in ("", ".ftz")] + ["tanh.approx.f32 $o, $a;"]
    elementwise(store, "mufu", "r", [every_exponent(48)], typed("f32", lines))
    exact = [f"{n}.{r}{ftz}.f32 $o, $a;" for n in ("rcp", "sqrt") for r in ROUNDINGS for ftz in ("", ".ftz")]
    elementwise(store, "rcp_sqrt", "r", [every_exponent(16, 5)], typed("f32", exact))
    both = packed(EVERY16, (EVERY16.astype(np.uint32) * 40503 + 12345).astype(np.uint16))
    pairs = [
        ("ex2.approx.f16x2 $o, $a;", "f16"),
        ("ex2.approx.ftz.f16x2 $o, $a;", "f16"),
        ("tanh.approx.f16x2 $o, $a;", "f16"),
        ("ex2.approx.ftz.bf16x2 $o, $a;", "bf16"),
        ("tanh.approx.bf16x2 $o, $a;", "bf16"),
    ]
    elementwise(store, "mufu_pairs", "r", [both[::4]], pairs)
    singles = [
        ("ex2.approx.f16 $o, $a;", "f16"),
        ("tanh.approx.f16 $o, $a;", "f16"),
        ("ex2.approx.ftz.bf16 $o, $a;", "bf16"),
        ("tanh.approx.bf16 $o, $a;", "bf16"),
    ]
    elementwise(store, "mufu_halves", "h", [EVERY16], singles)
    random = np.random.default_rng(8)
    ranges = []
    for low, high in ((0.5, 2), (0.99, 1.01), (-1, 1), (-20, 20), (1, 4), (-130, -120), (100, 1e5), (-3.2, 3.2)):
        ranges.append(random.uniform(low, high, 1024).astype(np.float32).view(np.uint32))
    elementwise(store, "mufu_ranges", "r", [np.concatenate(ranges)], typed("f32", lines))


def conversions(store: Store) -> None:
    one = every_exponent(30)
    wholes = ("rni", "rzi", "rmi", "rpi")
    words_out = [
        (f"cvt.{w}{ftz}{sat}.{t}.f32 $o, $a;", "u32")
        for w in wholes
        for ftz in ("", ".ftz")
        for sat in ("",)
        for t in ("s32", "u32")
    ]
    words_out += typed("f32", [f"cvt.{w}{ftz}.f32.f32 $o, $a;" for w in wholes for ftz in ("", ".ftz")])
    words_out += typed(
        "f32",
        [
            "cvt.sat.f32.f32 $o, $a;",
            "cvt.ftz.f32.f32 $o, $a;",
            "abs.f32 $o, $a;",
            "abs.ftz.f32 $o, $a;",
            "neg.ftz.f32 $o, $a;",
            "neg.f32 $o, $a;",
            *[
                f"cvt.{r}.tf32.f32 $o, $a;"
                for r in ("rna", "rn", "rz", "rn.relu", "rz.relu", "rna.satfinite", "rn.satfinite")
            ],
        ],
    )
    words_out += [
        (f".reg .pred p; testp.{t}.f32 p, $a; selp.u32 $o, 1, 0, p;", "u32")
        for t in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    ]
    elementwise(store, "cvt_f32", "r", [one[::2]], words_out)
    halves = [
        (f"cvt.{r}{more}.{t}.f32 $o, $a;", t)
        for t in ("f16", "bf16")
        for r in ROUNDINGS
        for more in ("", ".relu", ".satfinite", ".sat", ".ftz")
    ]
    halves += [(f"cvt.rzi{s}.{t}.f32 $o, $a;", "u16") for t in ("s16", "u16", "s8", "u8") for s in ("", ".sat")]
    elementwise(store, "cvt_f32_narrow", "h", [one], halves)
    elementwise(
        store,
        "cvt_f32_wide",
        "l",
        [one[::2]],
        [
            *typed(
                "u64", [f"cvt.{w}{f}.{t}.f32 $o, $a;" for w in wholes for t in ("s64", "u64") for f in ("", ".ftz")]
            ),
            ("cvt.f64.f32 $o, $a;", "f64"),
        ],
    )
    other = np.random.default_rng(4).permutation(one)
    pairs = [
        (f"cvt.{r}{more}.{t}x2.f32 $o, $a, $b;", t)
        for t in ("f16", "bf16")
        for r in ("rn", "rz")
        for more in ("", ".relu", ".satfinite")
    ]
    elementwise(store, "cvt_pack", "r", [one[::2], other[::2]], pairs)
    elementwise(
        store,
        "cvt_fp8",
        "h",
        [one, other],
        typed("u8", [f"cvt.rn.satfinite{m}.{t}x2.f32 $o, $a, $b;" for t in ("e4m3", "e5m2") for m in ("", ".relu")]),
    )
    both = packed(EVERY16, EVERY16[::-1])
    elementwise(
        store,
        "cvt_half_fp8",
        "h",
        [both],
        typed("u8", [f"cvt.rn.satfinite{m}.{t}x2.f16x2 $o, $a;" for t in ("e4m3", "e5m2") for m in ("", ".relu")]),
    )
    from_half = [
        ("cvt.f32.f16 $o, $a;", "f32"),
        ("cvt.f32.bf16 $o, $a;", "f32"),
        ("cvt.ftz.f32.f16 $o, $a;", "f32"),
        ("cvt.rn.f16x2.e4m3x2 $o, $a;", "f16"),
        ("cvt.rn.f16x2.e5m2x2 $o, $a;", "f16"),
        ("cvt.rn.relu.f16x2.e4m3x2 $o, $a;", "f16"),
        ("cvt.rn.relu.f16x2.e5m2x2 $o, $a;", "f16"),
    ]
    from_half += typed(
        "u32", [f"cvt.{w}.{t}.{f} $o, $a;" for w in wholes for t in ("s32", "u32") for f in ("f16", "bf16")]
    )
    elementwise(store, "cvt_half", "r", [EVERY16], from_half)
    narrow = [(f"cvt.{w}.{f}.{f} $o, $a;", f) for w in wholes for f in ("f16", "bf16")]
    narrow += [(f"cvt.{r}.bf16.f16 $o, $a;", "bf16") for r in ROUNDINGS]
    narrow += [(f"cvt.{r}.f16.bf16 $o, $a;", "f16") for r in ROUNDINGS]
    narrow += [
        ("abs.f16 $o, $a;", "f16"),
        ("neg.f16 $o, $a;", "f16"),
        ("abs.bf16 $o, $a;", "bf16"),
        ("cvt.sat.f16.f16 $o, $a;", "f16"),
    ]
    narrow += [
        (f"cvt.{w}{s}.{t}.f16 $o, $a;", "u16")
        for w in ("rni", "rzi")
        for t in ("s16", "u16", "s8", "u8")
        for s in ("", ".sat")
    ]
    narrow += [(f"cvt.{r}.{f}.{t} $o, $a;", f) for r in ROUNDINGS for f in ("f16", "bf16") for t in ("s16", "u16")]
    elementwise(store, "cvt_half_narrow", "h", [EVERY16[::4] ^ (EVERY16[::4] >> 3 & 3)], narrow)
    elementwise(
        store,
        "cvt_half_wide",
        "l",
        [EVERY16[::8]],
        [
            ("cvt.f64.f16 $o, $a;", "f64"),
            ("cvt.f64.bf16 $o, $a;", "f64"),
            *typed("u64", [f"cvt.rzi.{t}.{f} $o, $a;" for t in ("s64", "u64") for f in ("f16", "bf16")]),
        ],
    )
    random = np.random.default_rng(6)
    whole = np.concatenate(
        [
            int_values(2048, 5),
            random.integers(0, 1 << 32, 2048, dtype=np.uint32) >> random.integers(0, 32, 2048, dtype=np.uint32),
        ]
    )
    from_int = typed("f32", [f"cvt.{r}.f32.{t} $o, $a;" for r in ROUNDINGS for t in ("s32", "u32")])
    from_int += typed("f32", [f"cvt.rn.f32.{t} $o, $a;" for t in ("s8", "u8", "s16", "u16")])
    from_int += typed(
        "u32",
        [
            f"cvt{s}.{t}.{f} $o, $a;"
            for s in ("", ".sat")
            for t, f in (
                ("s8", "s32"),
                ("u8", "s32"),
                ("s16", "s32"),
                ("u16", "s32"),
                ("u8", "u32"),
                ("s8", "u32"),
                ("u32", "s32"),
            )
        ],
    )
    elementwise(store, "cvt_int", "r", [whole], from_int)
    elementwise(
        store,
        "cvt_int_narrow",
        "h",
        [whole],
        [(f"cvt.{r}.{f}.{t} $o, $a;", f) for r in ROUNDINGS for f in ("f16", "bf16") for t in ("s32", "u32")],
    )
    elementwise(store, "cvt_int_wide", "l", [whole], typed("f64", ["cvt.rn.f64.s32 $o, $a;", "cvt.rn.f64.u32 $o, $a;"]))
    long = long_values(2048, 7)
    elementwise(
        store,
        "cvt_long",
        "l",
        [long],
        typed("f64", [f"cvt.{r}.f64.{t} $o, $a;" for r in ROUNDINGS for t in ("s64", "u64")]),
    )
    elementwise(
        store,
        "cvt_long_float",
        "r",
        [long],
        typed("f32", [f"cvt.{r}.f32.{t} $o, $a;" for r in ROUNDINGS for t in ("s64", "u64")]),
    )
    elementwise(
        store,
        "cvt_long_half",
        "h",
        [long],
        [(f"cvt.rn.{f}.{t} $o, $a;", f) for f in ("f16", "bf16") for t in ("s64", "u64")],
    )
    double = doubles(2048, 8)
    elementwise(
        store,
        "cvt_double",
        "r",
        [double],
        typed("f32", [f"cvt.{r}{f}.f32.f64 $o, $a;" for r in ROUNDINGS for f in ("", ".ftz", ".sat")])
        + typed("u32", [f"cvt.{w}.{t}.f64 $o, $a;" for w in wholes for t in ("s32", "u32")]),
    )
    elementwise(
        store,
        "cvt_double_wide",
        "l",
        [double],
        typed("u64", [f"cvt.{w}.{t}.f64 $o, $a;" for w in wholes for t in ("s64", "u64")])
        + typed("f64", [f"cvt.{w}.f64.f64 $o, $a;" for w in wholes]),
    )
    elementwise(
        store,
        "cvt_double_half",
        "h",
        [double],
        [(f"cvt.{r}.{f}.f64 $o, $a;", f) for r in ROUNDINGS for f in ("f16", "bf16")],
    )


def int_values(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    special = words(
        numbers(
            "0 1 2 3 7 8 15 16 31 32 33 63 64 127 128 255 256 32767 32768 65535 65536 0xFFFFFF 0x1000000 0x1000001"
            " 0x1000003 0x7FFFFFFF 0x80000000 0x80000001 -1 -2 -128 -129 -32768 -32769 0x7F7F7F7F 0x80808080"
            " 0x12345678"
        )
    )
    some = random.integers(0, 1 << 32, count, dtype=np.uint32)
    return np.where(random.random(count) < 0.4, random.choice(special, count), some).astype(np.uint32)


def long_values(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    some = random.integers(0, 1 << 64, count, dtype=np.uint64) >> random.integers(0, 64, count).astype(np.uint64)
    special = np.array(
        [0, 1, 2**31, 2**32 - 1, 2**53 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**24 + 1], np.uint64
    )
    return np.where(random.random(count) < 0.2, random.choice(special, count), some).astype(np.uint64)


def doubles(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    special = np.array(
        [
            0.0,
            -0.0,
            1,
            -1,
            1.5,
            np.inf,
            -np.inf,
            5e-324,
            2.3e-308,
            1.8e308,
            65520,
            3.4028236e38,
            1e-45,
            2147483647.5,
            4294967296,
            9.3e18,
            1.9e19,
            0.5,
            2.5,
        ],
        np.float64,
    ).view(np.uint64)
    special = np.concatenate(
        [special, np.array([0x7FF0000000000001, 0x7FF8000000000000, 0xFFF8123456789ABC], np.uint64)]
    )
    bits = random.integers(0, 1 << 64, count, dtype=np.uint64)
    near = (bits & np.uint64(0x800FFFFFFFFFFFFF)) | (
        random.integers(1023 - 160, 1023 + 140, count).astype(np.uint64) << np.uint64(52)
    )
    near = np.where(random.random(count) < 0.3, near & np.uint64(0xFFFFFFFFF0000000), near)
    out = np.where(random.random(count) < 0.7, near, bits)
    return np.where(random.random(count) < 0.2, random.choice(special, count), out).astype(np.uint64)


def float_arithmetic(store: Store) -> None:
    a, b = float_pairs(8192)
    f = [
        f"{op}.{r}{ftz}{sat}.f32 $o, $a, $b;"
        for op in ("add", "mul")
        for r in ROUNDINGS
        for ftz in ("", ".ftz")
        for sat in ("", ".sat")
        if r == "rn" or not sat
    ]
    f += ["sub.rn.f32 $o, $a, $b;", "sub.rn.ftz.f32 $o, $a, $b;"]
    f += [
        f"{m}{ftz}{nan}{x}.f32 $o, $a, $b;"
        for m in ("min", "max")
        for ftz in ("", ".ftz")
        for nan in ("", ".NaN")
        for x in ("", ".xorsign.abs")
    ]
    f += ["copysign.f32 $o, $a, $b;"]
    f += [f"div.{d}.f32 $o, $a, $b;" for d in ("rn", "rz", "rn.ftz", "approx", "approx.ftz", "full", "full.ftz")]
    lines = typed("f32", f) + typed("u32", compared_by("f32") + compared_by("f32", ".ftz"))
    lines += [(f"set.{o}.{t}.f32 $o, $a, $b;", "u32") for o in ("lt", "geu") for t in ("u32", "f32")]
    elementwise(store, "float", "r", [a, b], lines)
    triples = float_triples(8192)
    fma = [
        f"fma.{r}{ftz}{sat}.f32 $o, $a, $b, $c;"
        for r in ROUNDINGS
        for ftz in ("", ".ftz")
        for sat in ("", ".sat")
        if r == "rn" or not sat
    ]
    elementwise(store, "fma", "r", list(triples), typed("f32", fma))


def half_arithmetic(store: Store) -> None:
    for t in ("f16", "bf16"):
        x = half_words(8192, 3, 11)
        ftzs = ("", ".ftz") if t == "f16" else ("",)
        two = [f"{op}.rn{f}{s}.{t}x2 $o, $a, $b;" for op in ("add", "sub", "mul") for f in ftzs for s in ("", ".sat")]
        two += [f"{op}.{t}x2 $o, $a, $b;" for op in ("add", "mul")]
        two += [
            f"{m}{f}{n}{s}.{t}x2 $o, $a, $b;"
            for m in ("min", "max")
            for f in ftzs
            for n in ("", ".NaN")
            for s in ("", ".xorsign.abs")
        ]
        lines = typed(t, two)
        lines += [(f"set.{o}.{t}x2.{t}x2 $o, $a, $b;", t) for o in ORDERS]
        lines += [
            (
                f".reg .pred p, q; setp.{o}.{t}x2 p|q, $a, $b; .reg .u32 x, y; selp.u32 x, 1, 0, p; "
                "selp.u32 y, 2, 0, q; or.b32 $o, x, y;",
                "u32",
            )
            for o in ORDERS
        ]
        lines += [(f"abs.{t}x2 $o, $a;", t), (f"neg.{t}x2 $o, $a;", t)]
        elementwise(store, f"pairs_{t}", "r", list(x[:2]), lines)
        elementwise(
            store,
            f"fma_{t}",
            "r",
            list(x),
            typed(
                t,
                [
                    f"fma.rn{f}{m}.{t}x2 $o, $a, $b, $c;"
                    for f in ftzs
                    for m in ("", ".sat", ".relu", ".oob", ".oob.relu")
                ],
            ),
        )
        single = [v.astype(np.uint16) for v in x]
        elementwise(
            store,
            f"single_{t}",
            "h",
            single[:2],
            typed(
                t,
                [f"{op}.rn.{t} $o, $a, $b;" for op in ("add", "sub", "mul")]
                + [f"{m}.{t} $o, $a, $b;" for m in ("min", "max")],
            ),
        )
        elementwise(
            store,
            f"mixed_{t}",
            "r",
            [x[0]],
            [
                (
                    "=__float_as_uint("
                    + (
                        "__half2float(__hadd(__ushort_as_half((u16)a), __ushort_as_half((u16)(a >> 16))))"
                        if t == "f16"
                        else "__bfloat162float(__hadd(__ushort_as_bfloat16((u16)a), "
                        "__ushort_as_bfloat16((u16)(a >> 16))))"
                    )
                    + ")",
                    "f32",
                )
            ],
        )


def double_arithmetic(store: Store) -> None:
    a, b, c = doubles(2048, 21), doubles(2048, 22), doubles(2048, 23)
    b[::5] = a[::5] ^ np.uint64(1 << 63) ^ np.uint64(5)
    with np.errstate(all="ignore"):
        c[::3] = (-(a.view(np.float64) * b.view(np.float64))).view(np.uint64)[::3] + np.uint64(2)
    lines = [f"{op}.{r}.f64 $o, $a, $b;" for op in ("add", "mul") for r in ROUNDINGS]
    lines += [f"{m}.f64 $o, $a, $b;" for m in ("min", "max")]
    lines += [f"div.{r}.f64 $o, $a, $b;" for r in ("rn", "rz")]
    elementwise(store, "double", "l", [a, b], typed("f64", lines))
    elementwise(store, "double_fma", "l", [a, b, c], typed("f64", [f"fma.{r}.f64 $o, $a, $b, $c;" for r in ROUNDINGS]))
    unary = [
        "rcp.rn.f64 $o, $a;",
        "sqrt.rn.f64 $o, $a;",
        "rsqrt.approx.f64 $o, $a;",
        "rsqrt.approx.ftz.f64 $o, $a;",
        "rcp.approx.ftz.f64 $o, $a;",
        "abs.f64 $o, $a;",
        "neg.f64 $o, $a;",
    ]
    elementwise(store, "double_unary", "l", [a], typed("f64", unary))
    elementwise(store, "double_compare", "r", [a, b], typed("u32", compared_by("f64")))


def integers(store: Store) -> None:
    a, b, c = int_values(4096, 31), int_values(4096, 32), int_values(4096, 33)
    nonzero = np.where(b == 0, 3, b).astype(np.uint32)
    one = [
        "popc.b32 $o, $a;",
        "brev.b32 $o, $a;",
        "clz.b32 $o, $a;",
        "abs.s32 $o, $a;",
        "neg.s32 $o, $a;",
        "not.b32 $o, $a;",
        "cnot.b32 $o, $a;",
    ]
    one += [f"bfind{s}.{t} $o, $a;" for s in ("", ".shiftamt") for t in ("u32", "s32")]
    two = [
        f"{op}.{t} $o, $a, $b;"
        for op in ("mul.lo", "mul.hi", "min", "max", "mul24.lo", "mul24.hi")
        for t in ("s32", "u32")
    ]
    two += [
        "add.sat.s32 $o, $a, $b;",
        "sub.sat.s32 $o, $a, $b;",
        "shl.b32 $o, $a, $b;",
        "shr.s32 $o, $a, $b;",
        "shr.u32 $o, $a, $b;",
        "min.relu.s32 $o, $a, $b;",
        "max.relu.s32 $o, $a, $b;",
    ]
    two += [f"{m}.{k} $o, $a, $b;" for m in ("min", "max", "min.relu", "max.relu", "add") for k in ("s16x2", "u16x2")]
    two += [f"bmsk.{m}.b32 $o, $a, $b;" for m in ("clamp", "wrap")]
    two += [f"szext.{m}.{t} $o, $a, $b;" for m in ("clamp", "wrap") for t in ("s32", "u32")]
    two += [
        f".reg .pred p; setp.{o}.{t} p, $a, $b; selp.u32 $o, 1, 0, p;"
        for o in ("lt", "le", "gt", "ge")
        for t in ("s32", "u32")
    ]
    two += [
        f"={f}(a, b)"
        for f in (
            "__vadd4",
            "__vsub2",
            "__vaddss2",
            "__vaddus4",
            "__vabsdiffu4",
            "__vabsdiffs4",
            "__vsadu4",
            "__vsads2",
            "__vavgu4",
            "__vmaxs4",
            "__vminu2",
            "__vcmpgts4",
            "__vseteq2",
            "__vabsss4",
        )
        if f != "__vabsss4"
    ]
    three = [f"mad.{k}.{t} $o, $a, $b, $c;" for k in ("lo", "hi") for t in ("s32", "u32")] + [
        "mad.hi.sat.s32 $o, $a, $b, $c;"
    ]
    three += [f"shf.{d}.{m}.b32 $o, $a, $b, $c;" for d in ("l", "r") for m in ("wrap", "clamp")]
    three += [f"prmt.b32{m} $o, $a, $b, $c;" for m in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")]
    three += [f"lop3.b32 $o, $a, $b, $c, {lut};" for lut in (0x80, 0x96, 0xE8, 0xCA, 0x1B, 0x57, 0xD8)]
    three += [f"bfe.{t} $o, $a, $b, $c;" for t in ("s32", "u32")] + [f"sad.{t} $o, $a, $b, $c;" for t in ("s32", "u32")]
    three += [f"dp4a.{x}.{y} $o, $a, $b, $c;" for x in ("s32", "u32") for y in ("s32", "u32")]
    three += [f"dp2a.{h}.{x}.{y} $o, $a, $b, $c;" for h in ("lo", "hi") for x in ("s32", "u32") for y in ("s32", "u32")]
    three += [f"bfi.b32 $o, $a, $b, $c, {n};" for n in (0, 5, 32, 40)]
    three += [
        "add.cc.u32 $o, $a, $b; addc.u32 $o, $o, $c;",
        "sub.cc.u32 $o, $a, $b; subc.u32 $o, $o, $c;",
        "mad.lo.cc.u32 $o, $a, $b, $c; madc.hi.u32 $o, $a, $b, $o;",
    ]
    signed = {"s32": "(int)a, (int)b, (int)c", "u32": "a, b, c", "s16x2": "a, b, c", "u16x2": "a, b, c"}
    for kind, given in signed.items():
        three += [
            f"=(u32){f}_{kind}{relu}({given})"
            for f in ("__viaddmax", "__viaddmin", "__vimax3", "__vimin3")
            for relu in (("", "_relu") if kind[0] == "s" else ("",))
        ]
    elementwise(store, "int_one", "r", [a], typed("u32", one))
    elementwise(store, "int_two", "r", [a, b], typed("u32", two))
    elementwise(store, "int_three", "r", [a, b, c], typed("u32", three))
    small = np.where(np.arange(4096) % 2, c & 63, c).astype(np.uint32)
    elementwise(
        store,
        "int_small",
        "r",
        [a, b & np.uint32(63), small],
        typed("u32", [x for x in three if x.startswith(("shf", "bfe", "prmt"))]),
    )
    elementwise(
        store,
        "int_divide",
        "r",
        [a, nonzero],
        typed("u32", [f"{d}.{t} $o, $a, $b;" for d in ("div", "rem") for t in ("s32", "u32")]),
    )
    elementwise(store, "int_wide", "l", [a, b], typed("u64", [f"mul.wide.{t} $o, $a, $b;" for t in ("s32", "u32")]))
    x, y = long_values(2048, 34), long_values(2048, 35)
    many = [
        f"{op} $o, $a, $b;"
        for op in ("mul.lo.u64", "mul.hi.u64", "mul.hi.s64", "add.u64", "sub.u64", "min.s64", "max.u64", "xor.b64")
    ]
    elementwise(store, "long", "l", [x, y], typed("u64", many))
    elementwise(
        store,
        "long_one",
        "r",
        [x],
        typed("u32", ["popc.b64 $o, $a;", "clz.b64 $o, $a;", "bfind.u64 $o, $a;", "bfind.s64 $o, $a;"]),
    )
    elementwise(store, "long_reverse", "l", [x], typed("u64", ["brev.b64 $o, $a;", "abs.s64 $o, $a;"]))
    elementwise(
        store,
        "long_divide",
        "l",
        [x, np.where(y == 0, 7, y).astype(np.uint64)],
        typed("u64", [f"{d}.{t} $o, $a, $b;" for d in ("div", "rem") for t in ("s64", "u64")]),
    )
    shift = int_values(2048, 36) & np.uint32(127)
    elementwise(
        store,
        "long_shift",
        "l",
        [x, shift],
        typed("u64", [f"{s} $o, $a, $b;" for s in ("shl.b64", "shr.u64", "shr.s64")]),
    )


def warps(store: Store) -> None:
    a = int_values(4096, 41)
    lane = np.random.default_rng(42).integers(0, 40, 4096).astype(np.uint32)
    lines = []
    for mode, limits in (
        ("up", (0, 0x1800, 0x0810)),
        ("down", (31, 0x181F, 0x1007)),
        ("bfly", (31, 0x181F, 0x1C07)),
        ("idx", (31, 0x181F, 0x1C07, 0x0003)),
    ):
        for c in limits:
            lines += [
                f".reg .pred p; .reg .u32 x; shfl.sync.{mode}.b32 x|p, $a, {by}, {c}, 0xffffffff; "
                "selp.u32 $o, 1, 0, p; mad.lo.u32 $o, x, 2, $o;"
                for by in ("$b", "1", "5")
            ]
    elementwise(store, "shuffle", "r", [a, lane], typed("u32", lines))
    few = np.random.default_rng(43).integers(0, 3, 4096).astype(np.uint32)
    few[:1024] = np.repeat(few[:32], 32)
    votes = [
        f".reg .pred p, q; setp.gt.u32 p, $a, 0; vote.sync.{m}.pred q, p, 0xffffffff; selp.u32 $o, 1, 0, q;"
        for m in ("all", "any", "uni")
    ]
    votes += [
        ".reg .pred p; setp.gt.u32 p, $a, 0; vote.sync.ballot.b32 $o, p, 0xffffffff;",
        "match.any.sync.b32 $o, $a, 0xffffffff;",
        ".reg .pred p; .reg .u32 x; match.all.sync.b32 x|p, $a, 0xffffffff; selp.u32 $o, 1, 0, p; xor.b32 $o, $o, x;",
        ".reg .pred p; .reg .u32 x; elect.sync x|p, 0xffffffff; selp.u32 $o, $a, x, p;",
    ]
    elementwise(store, "vote", "r", [few], typed("u32", votes))
    elementwise(
        store,
        "match_long",
        "r",
        [few.astype(np.uint64) << np.uint64(33)],
        typed("u32", ["match.any.sync.b64 $o, $a, 0xffffffff;"]),
    )
    redux = [
        f"redux.sync.{op} $o, $a, 0xffffffff;"
        for op in ("add.s32", "add.u32", "min.s32", "min.u32", "max.s32", "max.u32", "and.b32", "or.b32", "xor.b32")
    ]
    redux += [
        "=(threadIdx.x % 3 ? __reduce_add_sync(__activemask(), a) : __ballot_sync(__activemask(), a & 1))",
        "=(a & 1 ? __match_any_sync(__activemask(), a >> 30) : __reduce_min_sync(__activemask(), a))",
        "=(a & 1 ? __shfl_sync(__activemask(), a, 7) * 0 + __activemask() : 7u)",
    ]
    elementwise(store, "redux", "r", [a], typed("u32", redux))


def sweeps(store: Store) -> None:
    """Special functions over whole ranges of mantissas, for the GPU alone: tables can be read off them."""
    one = 0x3F800000
    plans = [
        ("ex2", one, 1, 1 << 23),
        ("lg2", one, 2, 1 << 22),
        ("rcp", one, 2, 1 << 22),
        ("rsqrt", one, 8, 1 << 21),
        ("sqrt", one, 8, 1 << 21),
        ("sin", 0x3E000000, 16, 1 << 21),
        ("cos", 0x3E000000, 16, 1 << 21),
        ("tanh", 0x3E000000, 24, 1 << 21),
        ("ex2", 0x3C000000, 16, 1 << 21),
        ("lg2", 0x3F000000, 8, 1 << 20),
        ("ex2", 0xC1000000, 8, 1 << 20),
    ]
    for name, start, stride, count in plans:
        ftz = "" if name == "tanh" else ".ftz"
        text = f"""extern "C" __global__ void kernel(u32* o, u32 start, u32 stride) {{
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  asm volatile("{name}.approx{ftz}.f32 %0, %1;" : "=r"(o[i]) : "r"(start + i * stride));
}}
"""
        case = Probe(
            f"sweep {name} from {start:#x} by {stride}",
            text,
            [result_buffer("o", 4 * count, "f32")],
            ["o", np.uint32(start), np.uint32(stride)],
            (count // 256, 1, 1),
            (256, 1, 1),
        )
        store.add(
            {
                "id": case.name,
                "executor": "not executed",
                "cubin": store.put(compile_text(text)),
                "source": store.put((PRELUDE + text).encode()),
                "inputs": [],
                "sweep": {"function": name, "start": start, "stride": stride},
                "buffers": {
                    "o": {"bytes": 4 * count, "init": "zero", "role": "out", "regions": [["o", "f32"]], "expect": None}
                },
                "launches": [
                    {
                        "entry": ENTRY,
                        "grid": case.grid,
                        "block": case.block,
                        "shared": 0,
                        "arguments": [_argument(a) for a in case.arguments],
                    }
                ],
            }
        )


# ── atomics ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def atomics(store: Store) -> None:
    """Each thread has a place of 16 bytes of its own, so that no order matters."""
    count = 2048
    f = float_pairs(count * 4, 51)
    h = half_words(count * 4, 2, 52)
    d = doubles(count * 2, 53), doubles(count * 2, 54)
    i = int_values(count * 4, 55), int_values(count * 4, 56)
    data = {"f32": f, "f16": h, "bf16": h, "f64": d, "u32": i}
    scalar = [
        ("atom.global.add.f32", "f32", "r", 1),
        ("red.global.add.f32", "f32", "r", 1),
        ("atom.global.add.noftz.f16x2", "f16", "r", 1),
        ("red.global.add.noftz.f16x2", "f16", "r", 1),
        ("atom.global.add.noftz.bf16x2", "bf16", "r", 1),
        ("red.global.add.noftz.bf16x2", "bf16", "r", 1),
        ("atom.global.add.f64", "f64", "l", 1),
        ("red.global.add.f64", "f64", "l", 1),
        ("atom.shared.add.f32", "f32", "r", 1),
        ("atom.shared.add.f64", "f64", "l", 1),
        ("atom.shared.add.noftz.f16x2", "f16", "r", 1),
        ("atom.shared.add.noftz.bf16x2", "bf16", "r", 1),
    ]
    scalar += [
        (f"{k}.{o}", "u32", "r", 1)
        for k in ("atom.global", "red.global", "atom.shared")
        for o in (
            "add.u32",
            "min.s32",
            "max.s32",
            "min.u32",
            "max.u32",
            "inc.u32",
            "dec.u32",
            "and.b32",
            "or.b32",
            "xor.b32",
        )
    ]
    scalar += [
        (f"{k}.{o}", "u32", "l", 1)
        for k in ("atom.global", "atom.shared")
        for o in ("add.u64", "min.s64", "max.u64", "xor.b64", "exch.b64")
    ]
    vectors = [
        ("red.global.v2.f32.add", "f32", "f", 2),
        ("red.global.v4.f32.add", "f32", "f", 4),
        ("atom.global.v4.f32.add", "f32", "f", 4),
        ("red.global.v2.f16x2.add.noftz", "f16", "r", 2),
        ("red.global.v4.f16x2.add.noftz", "f16", "r", 4),
        ("red.global.v4.bf16x2.add.noftz", "bf16", "r", 4),
        ("red.global.v2.f16x2.min.noftz", "f16", "r", 2),
        ("red.global.v4.bf16x2.max.noftz", "bf16", "r", 4),
    ]
    for name, kind, letter, wide in [*scalar, *vectors]:
        memory, value = data[kind]
        if kind == "f64":  # a loop around a compare-and-swap need not end on NaN
            memory, value = (np.where(nan_of(x, 52), 3, x).astype(np.uint64) for x in (memory, value))
        shared, reduces = ".shared" in name, name.startswith("red")
        stride = 16 // memory.itemsize if wide > 1 or letter != "l" else 2
        ctype = {"r": "u32", "f": "float", "l": "u64"}[letter]
        per = 16 // {"u32": 4, "float": 4, "u64": 8}[ctype]
        dst = [f"%{n}" for n in range(wide)]
        src = [f"%{n + (0 if reduces else wide) + 1}" for n in range(wide)]
        address = "%0" if reduces else f"%{wide}"
        braces = "{{{}}}".format if wide > 1 else str
        call = (
            f"{name} "
            + ("" if reduces else braces(", ".join(dst)) + ", ")
            + f"[{address}], "
            + braces(", ".join(src))
            + ";"
        )
        outs = "" if reduces else ", ".join(f'"={letter}"(y[{n}])' for n in range(wide))
        ins = ", ".join(f'"{letter}"(x[{n}])' for n in range(wide))
        place = '"r"(at_shared(s + threadIdx.x * PER))' if shared else '"l"(m + i * PER)'
        text = f"""extern "C" __global__ void kernel(const {ctype}* a, {ctype}* m, {ctype}* o) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  __shared__ {ctype} s[128 * PER];
  {ctype} x[PER], y[PER];
  for (int n = 0; n < PER; n++) x[n] = a[i * PER + n], y[n] = 0, s[threadIdx.x * PER + n] = m[i * PER + n];
  __syncthreads();
  asm volatile("{call}" : {outs} : {place}, {ins} : "memory");
  __syncthreads();
  for (int n = 0; n < PER; n++) o[i * PER + n] = {"s[threadIdx.x * PER + n]" if shared else "y[n]"};
}}
""".replace("PER", str(per))
        assert stride
        size = count * 16
        buffers = [
            source_buffer("a", value.tobytes()[:size]),
            Buffer("m", "inout", memory.tobytes()[:size], regions=[(name, kind if kind in TYPES else "u32")]),
            result_buffer(
                "o",
                size,
                kind,
                name + " (result)",
            ),
        ]
        record(
            store,
            Probe(
                f"atomic {name}", text, buffers, ["a", "m", "o"], (count // 128, 1, 1), (128, 1, 1), inputs=["a", "m"]
            ),
        )


# ── matrix products ─────────────────────────────────────────────────────────────────────────────────────────────────

SETS = ("normal", "wide", "cancel", "ladder", "ladder_ones", "tiny", "special")


def _values(kind: str, of: str, count: int, format_: str, random: np.random.Generator) -> np.ndarray:
    """Draw values of an operand (`of` a, b or c) as float64."""
    low, high = {"f16": (-14, 15), "e4m3": (-6, 8), "e5m2": (-14, 15)}.get(format_, (-60, 60))
    sign = random.choice([-1.0, 1.0], count)
    normal = random.standard_normal(count)
    if kind == "wide":
        if of == "c":
            low, high = max(low, -40), min(high, 40)
        return sign * np.ldexp(random.uniform(1, 2, count), random.integers(low, high, count))
    if kind == "cancel":
        if of == "c":
            return np.where(
                random.random(count) < 0.5, sign * 2.0 ** min(high, 12) * random.integers(1, 4, count), normal
            )
        big = random.random(count) < 0.25
        return np.where(big, sign * 2.0 ** min(high // 2 + 1, 6), normal / 64)
    if kind in ("ladder", "ladder_ones"):
        if of == "a":
            base = 1.0 if kind == "ladder" else random.choice([1.0, 1.5, 1.25, 1 + 2.0**-7, 1 + 2.0**-10], count)
            return sign * np.ldexp(base, -random.integers(0, 28, count))
        if of == "b":
            return sign if kind == "ladder" else sign * random.choice([1.0, 1 + 2.0**-7, 1 + 2.0**-10], count)
        zero = random.random(count) < 0.4
        return np.where(zero, 0.0, sign * np.ldexp(random.uniform(1, 2, count), random.integers(-30, 6, count)))
    if kind == "tiny":
        if of == "c":
            return sign * np.ldexp(random.uniform(1, 2, count), random.integers(-150, -20, count))
        if of == "a":
            return sign * np.ldexp(random.uniform(0.01, 2, count), low)
        return sign * np.ldexp(random.uniform(0.01, 2, count), random.integers(low, 3, count))
    if kind == "special":
        at = random.random(count)
        out = np.where(at < 0.02, sign * np.inf, np.where(at < 0.03, np.nan, np.where(at < 0.12, sign * 0.0, normal)))
        return np.where((at > 0.98) & (of != "b"), sign * 2.0**high, out)
    return normal


def _fp8(values: np.ndarray, mantissa: int) -> np.ndarray:
    """Round float64 to e4m3 or e5m2 by looking for the nearest of all bytes."""
    bits = np.arange(128)
    exponent, fraction = bits >> mantissa, bits & (1 << mantissa) - 1
    bias = 7 if mantissa == 3 else 15
    known = np.where(
        exponent > 0,
        np.ldexp(1 + fraction / (1 << mantissa), exponent - bias),
        np.ldexp(fraction / (1 << mantissa), 1 - bias),
    )
    top = 0x7E if mantissa == 3 else 0x7B
    magnitude = np.abs(values)
    place = np.searchsorted(known[: top + 1], np.nan_to_num(magnitude, posinf=1e30)).clip(0, top)
    out = np.where(np.isnan(values), 0x7F, np.where(np.isinf(values), 0x7C if mantissa == 2 else 0x7F, place))
    return (out | np.signbit(values) << 7).astype(np.uint8)


def encode(values: np.ndarray, format_: str, random: np.random.Generator) -> np.ndarray:
    """Return the bits of float64 values in a format, flat uint8."""
    with np.errstate(all="ignore"):
        if format_ == "f16":
            return values.astype(np.float16).view(np.uint8)
        if format_ == "f64":
            return values.view(np.uint8)
        single = values.astype(np.float32).view(np.uint32)
    if format_ == "bf16":
        nan = np.isnan(values)
        return np.where(nan, 0x7FC1, single + 0x7FFF + (single >> 16 & 1) >> 16).astype(np.uint16).view(np.uint8)
    if format_ == "tf32":  # what lies below the 19 bits is noise
        noise = random.integers(0, 1 << 13, len(values), dtype=np.uint32)
        keep = np.isfinite(values) & (values != 0)
        return np.where(keep, single ^ noise & np.uint32(0x1FFF), single).astype(np.uint32).view(np.uint8)
    if format_ in ("e4m3", "e5m2"):
        return _fp8(values, 3 if format_ == "e4m3" else 2)
    return single.view(np.uint8)


def operand(kind: str, of: str, size: int, format_: str, random: np.random.Generator) -> bytes:
    """Return `size` bytes of an operand."""
    if format_ in ("s8", "u8", "s4", "u4", "b1"):
        return bytes(random.integers(0, 256, size, dtype=np.uint8))
    if format_ == "s32":
        return (
            int_values(size // 4, int(random.integers(1 << 30))).tobytes()
            if kind == "special"
            else (random.integers(-(1 << 20), 1 << 20, size // 4, dtype=np.int32).tobytes())
        )
    width = {"f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "f64": 8}.get(format_, 4)
    return encode(_values(kind, of, size // width, format_, random), format_, random).tobytes()


def mma(store: Store) -> None:
    """Each warp multiplies fragments of its own; sets of inputs are regions of as many warps."""
    f32 = [(f"m16n8k{k}", t, t, "f32") for t, ks in (("f16", (8, 16)), ("bf16", (8, 16)), ("tf32", (4, 8))) for k in ks]
    shapes = [*f32, ("m16n8k8", "f16", "f16", "f16"), ("m16n8k16", "f16", "f16", "f16")]
    shapes += [("m8n8k4", "f64", "f64", "f64"), *[(f"m16n8k{k}", "f64", "f64", "f64") for k in (4, 8, 16)]]
    shapes += [(f"m16n8k{k}", a, b, "s32") for k in (16, 32) for a in ("s8", "u8") for b in ("s8", "u8")]
    shapes += [
        ("m8n8k16", "s8", "u8", "s32"),
        ("m16n8k64", "s4", "u4", "s32"),
        ("m16n8k32", "u4", "s4", "s32"),
        ("m16n8k256", "b1", "b1", "s32"),
        ("m16n8k128", "b1", "b1", "s32"),
    ]
    shapes += [("m16n8k32", a, b, c) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for c in ("f32", "f16")]
    bits = {
        "f16": 16,
        "bf16": 16,
        "tf32": 32,
        "f64": 64,
        "s8": 8,
        "u8": 8,
        "s4": 4,
        "u4": 4,
        "b1": 1,
        "e4m3": 8,
        "e5m2": 8,
        "f32": 32,
        "s32": 32,
    }
    plans = [
        (shape, a, b, c, more)
        for shape, a, b, c in shapes
        for more in (
            (".and.popc", ".xor.popc")
            if a == "b1"
            else ("", ".satfinite")
            if (c == "s32" and (a, b) == ("s8", "s8"))
            else ("",)
        )
    ]
    for shape, a, b, c, more in plans:
        m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
        letter, word = ("d", 8) if a == "f64" else ("r", 4)
        counts = [x * y * w // 32 // (8 * word) for x, y, w in ((m, k, bits[a]), (n, k, bits[b]), (m, n, bits[c]))]
        if min(counts) < 1:
            continue
        na, nb, nc = counts
        ctype = "double" if letter == "d" else "u32"
        lists, at = [], 0
        for size in (nc, na, nb, nc):
            lists.append("{" + ", ".join(f"%{at + j}" for j in range(size)) + "}")
            at += size
        middle = more if a != "b1" else ""
        call = (
            f"mma.sync.aligned.{shape}.row.col{middle}.{c}.{a}.{b}.{c}{more if a == 'b1' else ''} "
            + ", ".join(lists)
            + ";"
        )
        outs = ", ".join(f'"={letter}"(d[{j}])' for j in range(nc))
        ins = ", ".join(f'"{letter}"({v}[{j}])' for v, size in (("x", na), ("y", nb), ("z", nc)) for j in range(size))
        text = f"""extern "C" __global__ void 
kernel(const {ctype}* a, const {ctype}* b, const {ctype}* c, {ctype}* o) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  {ctype} x[{na}], y[{nb}], z[{nc}], d[{nc}];
  for (int n = 0; n < {na}; n++) x[n] = a[i * {na} + n];
  for (int n = 0; n < {nb}; n++) y[n] = b[i * {nb} + n];
  for (int n = 0; n < {nc}; n++) z[n] = c[i * {nc} + n];
  asm volatile("{call}" : {outs} : {ins});
  for (int n = 0; n < {nc}; n++) o[i * {nc} + n] = d[n];
}}
"""
        integer = c == "s32"
        sets = ("normal", "special") if integer else SETS
        per = 4
        random = np.random.default_rng(abs(hash_of(call)))
        parts: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}
        for kind in sets:
            for of, format_, size in (("a", a, na), ("b", b, nb), ("c", c, nc)):
                parts[of].append(operand(kind, of, per * 32 * size * word, format_, random))
        buffers = [source_buffer(of, b"".join(x)) for of, x in parts.items()]
        total = len(buffers[2].data)
        kind_of = {"s32": "u32"}.get(c, c)
        buffers.append(Buffer("o", "out", bytes=total, regions=[(s, kind_of) for s in sets]))
        record(
            store,
            Probe(
                f"mma {shape} {c}.{a}.{b}{more}",
                text,
                buffers,
                ["a", "b", "c", "o"],
                (len(sets), 1, 1),
                (32 * per, 1, 1),
            ),
        )


def hash_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def wgmma_text(n: int, k: int, a: str, b: str, c: str, from_registers: bool, trans: str, steps: int = 1) -> str:
    registers = n // 4 if c == "f16" else n // 2
    letter, ctype = ("f", "float") if c == "f32" else ("r", "u32")
    d = ", ".join(f"%{j}" for j in range(registers))
    at = registers
    first = "{" + ", ".join(f"%{at + j}" for j in range(4)) + "}" if from_registers else f"%{at}"
    at += 4 if from_registers else 1
    tail = "" if c == "s32" else ", 1, 1"
    call = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{c}.{a}.{b} {{{d}}}, {first}, %{at}, p{tail}{trans};"
    outs = ", ".join(f'"+{letter}"(d[{j}])' for j in range(registers))
    left = ", ".join(f'"r"(x[{j}])' for j in range(4)) if from_registers else '"l"(of_a + s * step_a)'
    return f"""extern "C" __global__ void __launch_bounds__(128)
kernel(const uint4* a, const uint4* b, const {ctype}* c, {ctype}* o, int bytes_a, int bytes_b, u64 like_a, u64 like_b,
       int accumulate, u64 step_a, u64 step_b) {{
  extern __shared__ __align__(1024) unsigned char shared[];
  const int block = blockIdx.x, t = threadIdx.x;
  for (int i = t; i < bytes_a / 16; i += 128) reinterpret_cast<uint4*>(shared)[i] = a[block * bytes_a / 16 + i];
  unsigned char* there = shared + (bytes_a + 1023) / 1024 * 1024;
  for (int i = t; i < bytes_b / 16; i += 128) reinterpret_cast<uint4*>(there)[i] = b[block * bytes_b / 16 + i];
  fence_async();
  __syncthreads();
  u32 x[4];
  for (int i = 0; i < 4; i++) x[i] = reinterpret_cast<const u32*>(shared)[t * 4 + i];
  {ctype} d[{registers}];
  for (int i = 0; i < {registers}; ++i) d[i] = c[(block * 128 + t) * {registers} + i];
  const u64 of_a = like_a + (at_shared(shared) >> 4), of_b = like_b + (at_shared(there) >> 4);
  for (int i = 0; i < {registers}; ++i) asm volatile("" : "+{letter}"(d[i]) :: "memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int s = 0; s < {steps}; s++)
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{at + 1}, 0; {call}}}" : {outs}
                 : {left}, "l"(of_b + s * step_b), "r"((int)(accumulate || s)));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < {registers}; ++i) asm volatile("" : "+{letter}"(d[i]) :: "memory");
  for (int i = 0; i < {registers}; ++i) o[(block * 128 + t) * {registers} + i] = d[i];
}}
"""


SWIZZLE_CODE = {16: 0, 128: 1, 64: 2, 32: 3}


def descriptor(width: int, leading: int, stride: int) -> int:
    """Return a descriptor's bits without the start address; strides in bytes."""
    return (leading >> 4) << 16 | (stride >> 4) << 32 | SWIZZLE_CODE[width] << 62


def wgmma_case(
    store: Store,
    name: str,
    n: int,
    a: str,
    b: str,
    c: str,
    *,
    registers: bool = False,
    trans: tuple[int, int] | None = None,
    like_a: int,
    like_b: int,
    bytes_a: int,
    bytes_b: int,
    sets: Sequence[str],
    accumulate: int = 1,
    steps: int = 1,
    step_a: int = 0,
    step_b: int = 0,
) -> None:
    k = {"f16": 16, "bf16": 16, "tf32": 8}.get(a, 32)
    transposed = "" if trans is None else f", {trans[1]}" if registers else f", {trans[0]}, {trans[1]}"
    text = wgmma_text(n, k, a, b, c, registers, transposed, steps)
    random = np.random.default_rng(hash_of(name))
    size_c = 64 * n * (2 if c == "f16" else 4)
    left = b"".join(operand(s, "a", bytes_a, a, random) for s in sets)
    right = b"".join(operand(s, "b", bytes_b, b, random) for s in sets)
    sums = b"".join(operand(s, "c", size_c, c, random) for s in sets)
    regions = [(s, {"s32": "u32"}.get(c, c)) for s in sets]
    buffers = [
        source_buffer("a", left),
        source_buffer("b", right),
        source_buffer("c", sums),
        Buffer("o", "out", bytes=len(sums), regions=regions),
    ]
    scalars = [
        np.int32(bytes_a),
        np.int32(bytes_b),
        np.uint64(like_a),
        np.uint64(like_b),
        np.int32(accumulate),
        np.uint64(step_a >> 4),
        np.uint64(step_b >> 4),
    ]
    shared = -(-bytes_a // 1024) * 1024 + bytes_b
    record(
        store,
        Probe(f"wgmma {name}", text, buffers, ["a", "b", "c", "o", *scalars], (len(sets), 1, 1), (128, 1, 1), shared),
    )


def wgmma(store: Store) -> None:
    """Numbers first, in the layout without a swizzle, which is dense; then layouts with plain numbers."""
    dense = partial(wgmma_case, store)
    for a, b, c in (
        ("f16", "f16", "f32"),
        ("f16", "f16", "f16"),
        ("bf16", "bf16", "f32"),
        ("tf32", "tf32", "f32"),
        ("e4m3", "e4m3", "f32"),
        ("e4m3", "e5m2", "f32"),
        ("e5m2", "e4m3", "f32"),
        ("e5m2", "e5m2", "f32"),
        ("e4m3", "e4m3", "f16"),
        ("e5m2", "e5m2", "f16"),
        ("s8", "s8", "s32"),
        ("u8", "u8", "s32"),
        ("s8", "u8", "s32"),
    ):
        sets = ("normal", "special") if c == "s32" else SETS
        trans = (0, 0) if a in ("f16", "bf16") else None
        for registers in (False, True):
            for n in (8,) if a not in ("f16", "bf16", "tf32") else (8, 24) if registers or c != "f32" else (16, 32):
                dense(
                    f"{c}.{a}.{b} n{n}{' RS' if registers else ''}",
                    n,
                    a,
                    b,
                    c,
                    registers=registers,
                    trans=trans,
                    like_a=descriptor(16, 1024, 128),
                    like_b=descriptor(16, n * 16, 128),
                    bytes_a=2048,
                    bytes_b=32 * n,
                    sets=sets,
                )
    dense(
        "no accumulation",
        8,
        "f16",
        "f16",
        "f32",
        trans=(0, 0),
        like_a=descriptor(16, 1024, 128),
        like_b=descriptor(16, 128, 128),
        bytes_a=2048,
        bytes_b=256,
        sets=("normal", "special"),
        accumulate=0,
    )
    dense(
        "four steps in one group",
        16,
        "f16",
        "f16",
        "f32",
        trans=(0, 0),
        like_a=descriptor(128, 16, 1024),
        like_b=descriptor(128, 16, 1024),
        bytes_a=8192,
        bytes_b=2048,
        sets=("wide", "ladder"),
        steps=4,
        step_a=32,
        step_b=32,
    )
    for width in (16, 32, 64, 128):
        for ta, tb in ((0, 0), (1, 0), (0, 1), (1, 1)):
            n = 64
            group = 8 * width
            # K-major without a swizzle: leading along k, stride along rows; transposed the other way round
            plain = {0: (1024, 128), 1: (128, 1024)}
            of_a = plain[ta] if width == 16 else (64 * 2 * 16 if ta else 16, group)
            of_b = plain[tb] if width == 16 else (64 * 2 * 16 if tb else 16, group)
            if width != 16 and ta:
                of_a = (2 * group, group)
            if width != 16 and tb:
                of_b = (2 * group, group)
            dense(
                f"layout {width} bytes, transposed {ta} {tb}",
                n,
                "f16",
                "f16",
                "f32",
                trans=(ta, tb),
                like_a=descriptor(width, *of_a),
                like_b=descriptor(width, *of_b),
                bytes_a=8192,
                bytes_b=8192,
                sets=("normal",),
            )
    for width in (32, 64, 128):
        dense(
            f"layout {width} bytes of tf32",
            32,
            "tf32",
            "tf32",
            "f32",
            like_a=descriptor(width, 16, 8 * width),
            like_b=descriptor(width, 16, 8 * width),
            bytes_a=8192,
            bytes_b=4096,
            sets=("normal",),
        )
        dense(
            f"layout {width} bytes of e4m3",
            32,
            "e4m3",
            "e4m3",
            "f32",
            like_a=descriptor(width, 16, 8 * width),
            like_b=descriptor(width, 16, 8 * width),
            bytes_a=8192,
            bytes_b=4096,
            sets=("normal",),
        )
    dense(
        "a start within the pattern",
        32,
        "f16",
        "f16",
        "f32",
        trans=(0, 0),
        like_a=descriptor(128, 16, 1024) + (64 >> 4),
        like_b=descriptor(128, 16, 1024) + (32 >> 4),
        bytes_a=9216,
        bytes_b=5120,
        sets=("normal",),
    )
    dense(
        "a start at the pattern's third row",
        32,
        "f16",
        "f16",
        "f32",
        trans=(0, 0),
        like_a=descriptor(128, 16, 1024) + (256 >> 4),
        like_b=descriptor(128, 16, 1024) + (128 >> 4),
        bytes_a=9216,
        bytes_b=5120,
        sets=("normal",),
    )
    for n in (128, 176, 256):
        dense(
            f"{n} columns",
            n,
            "bf16",
            "bf16",
            "f32",
            trans=(0, 0),
            like_a=descriptor(128, 16, 1024),
            like_b=descriptor(128, 16, 1024),
            bytes_a=8192,
            bytes_b=128 * n,
            sets=("normal",),
        )


# ── moves ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def matrices(store: Store) -> None:
    tile = np.random.default_rng(61).integers(0, 1 << 16, 512, dtype=np.uint16)
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            regs = ", ".join(f"%{j}" for j in range(count))
            outs = ", ".join(f'"=r"(r[{j}])' for j in range(count))
            text = f"""extern "C" __global__ void kernel(const u16* a, u32* o) {{
  __shared__ __align__(16) u16 s[1024];
  for (int i = threadIdx.x; i < 512; i += 32) s[i / 8 * 16 + i % 8] = a[i];
  __syncwarp();
  u32 r[4] = {{0, 0, 0, 0}};
  asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{regs}}}, [%{count}];" : {outs}
               : "r"(at_shared(s + 16 * (threadIdx.x * 7 % 32))) : "memory");
  for (int i = 0; i < 4; i++) o[threadIdx.x * 4 + i] = r[i];
}}
"""
            buffers = [source_buffer("a", tile), result_buffer("o", 512, "u32")]
            record(store, Probe(f"ldmatrix x{count}{trans}", text, buffers, ["a", "o"]))
            ins = ", ".join(f'"r"(r[{j}])' for j in range(count))
            regs = ", ".join(f"%{j + 1}" for j in range(count))
            text = f"""extern "C" __global__ void kernel(const u32* a, u16* o) {{
  __shared__ __align__(16) u16 s[256];
  for (int i = threadIdx.x; i < 256; i += 32) s[i] = i;
  u32 r[4];
  for (int i = 0; i < 4; i++) r[i] = a[threadIdx.x * 4 + i];
  __syncwarp();
  asm volatile("stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%0], {{{regs}}};"
               :: "r"(at_shared(s + 8 * (threadIdx.x * 7 % 32))), {ins} : "memory");
  __syncwarp();
  for (int i = threadIdx.x; i < 256; i += 32) o[i] = s[i];
}}
"""
            buffers = [source_buffer("a", tile[:256]), result_buffer("o", 512, "u16")]
            record(store, Probe(f"stmatrix x{count}{trans}", text, buffers, ["a", "o"]))
    text = """extern "C" __global__ void kernel(const u32* a, u32* o) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(o[threadIdx.x]) : "r"(a[threadIdx.x])); }"""
    record(store, Probe("movmatrix", text, [source_buffer("a", tile[:64]), result_buffer("o", 128, "u32")], ["a", "o"]))


def async_copies(store: Store) -> None:
    data = np.random.default_rng(62).integers(0, 1 << 32, 1024, dtype=np.uint32)
    for size, kind in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
        text = f"""extern "C" __global__ void kernel(const u8* a, u32* o) {{
  __shared__ __align__(16) u32 s[512];
  const int t = threadIdx.x;
  for (int i = 0; i < 4; i++) s[t * 4 + i] = 0xABCD0000 + i;
  __syncthreads();
  asm volatile("cp.async.{kind}.shared.global [%0], [%1], {size}, %2;" :: "r"(at_shared(s + t * 4)), "l"(a + t * 16),
               "r"(t % ({size} + 1)) : "memory");
  asm volatile("cp.async.commit_group;\\ncp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  for (int i = 0; i < 4; i++) o[t * 4 + i] = s[t * 4 + i];
}}
"""
        record(
            store,
            Probe(
                f"cp.async {kind} {size}, zeros beyond",
                text,
                [source_buffer("a", data), result_buffer("o", 2048, "u8")],
                ["a", "o"],
                (1, 1, 1),
                (128, 1, 1),
            ),
        )
    text = """extern "C" __global__ void kernel(const u8* a, u8* o) {
  __shared__ __align__(128) u8 s[4096];
  __shared__ __align__(8) u64 bar;
  const u32 b = at_shared(&bar);
  if (threadIdx.x == 0) {
    init_barrier(b, 1);
    expect(b, 2048 + 16 + 48);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(at_shared(s)), "l"(a + 16), "r"(2048), "r"(b) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(at_shared(s + 2048)), "l"(a), "r"(16), "r"(b) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(at_shared(s + 2064)), "l"(a + 3072), "r"(48), "r"(b) : "memory");
    wait_for(b, 0);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(o), "r"(at_shared(s)), "r"(2112)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}
"""
    record(
        store,
        Probe(
            "cp.async.bulk there and back", text, [source_buffer("a", data), result_buffer("o", 2112, "u8")], ["a", "o"]
        ),
    )
    for op, t, kind in (
        ("add", "u32", "u32"),
        ("add.noftz", "f16", "f16"),
        ("add.noftz", "bf16", "bf16"),
        ("add", "f32", "f32"),
        ("min", "s32", "u32"),
        ("max", "f16", "f16"),
    ):
        text = f"""extern "C" __global__ void kernel(const u32* a, u32* m) {{
  __shared__ __align__(128) u32 s[512];
  for (int i = threadIdx.x; i < 512; i += 32) s[i] = a[i];
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{t} [%0], [%1], %2;"
                 :: "l"(m), "r"(at_shared(s)),
                 "r"(2048) : "memory");
    asm volatile("cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;" ::: "memory");
  }}
}}
"""
        x = (
            [v[::4] for v in half_words(2048, 2, 63)]
            if kind in ("f16", "bf16")
            else (float_pairs(4096, 64) if kind == "f32" else (data, data[::-1]))
        )
        record(
            store,
            Probe(
                f"cp.reduce.async.bulk {op}.{t}",
                text,
                [
                    source_buffer("a", x[0][:512]),
                    Buffer("m", "inout", np.ascontiguousarray(x[1][:512]).tobytes(), regions=[("m", kind)]),
                ],
                ["a", "m"],
            ),
        )


CODES = {"fp16": 2, "bf16": 2, "fp32": 4}


def tma(store: Store) -> None:
    """Boxes of tensors of 1 to 5 dimensions at places within, across every edge and outside."""
    plans = [
        ("fp16", (1000,), (64,), 0),
        ("fp32", (70, 40), (8, 16), 0),
        ("fp16", (70, 72), (8, 64), 128),
        ("bf16", (37, 40), (16, 32), 64),
        ("fp16", (37, 40), (16, 16), 32),
        ("fp32", (20, 40), (16, 32), 128),
        ("fp32", (20, 40), (9, 8), 32),
        ("fp16", (5, 11, 24), (2, 4, 16), 0),
        ("fp16", (5, 11, 72), (2, 4, 64), 128),
        ("fp16", (3, 4, 7, 16), (2, 2, 4, 8), 0),
        ("bf16", (3, 2, 4, 7, 16), (1, 2, 2, 4, 8), 0),
        ("fp16", (12, 200), (4, 256), 0),
    ]
    for dtype, shape, box, swizzle in plans:
        rank, wide = len(shape), CODES[dtype]
        unit = "u16" if wide == 2 else "u32"
        strides = [wide * int(np.prod(shape[i:])) for i in range(1, rank)][::-1]
        if any(s % 16 for s in strides):
            shape = (*shape[:-1], shape[-1] + 8 - shape[-1] % 8)
            strides = [wide * int(np.prod(shape[i:])) for i in range(1, rank)][::-1]
        tensor_map = TensorMapArgument("map", "a", dtype, shape[::-1], tuple(strides), box[::-1], swizzle)
        count = int(np.prod(box))
        random = np.random.default_rng(hash_of(f"{dtype}{shape}{box}{swizzle}"))
        tensor = random.integers(0, 1 << 8 * wide, int(np.prod(shape)), dtype=np.uint16 if wide == 2 else np.uint32)
        places = [
            [0] * rank,
            [s // 2 for s in shape],
            [-1] * rank,
            [s - 1 for s in shape],
            [-100] * rank,
            [s for s in shape],
        ]
        places += [[int(random.integers(-b, s + b)) for s, b in zip(shape, box, strict=True)] for _ in range(6)]
        coordinates = np.zeros((len(places), 5), np.int32)
        for row, place in zip(coordinates, places, strict=True):
            row[:rank] = place[::-1]
        regs = ", ".join(f"%{j + 3}" for j in range(rank))
        at = ", ".join(f'"r"(at[blockIdx.x * 5 + {j}])' for j in range(rank))
        common = "struct alignas(128) Map { u64 opaque[16]; };\n"
        text = (
            common
            + f"""extern "C" __global__ void
kernel(const {unit}* a, const int* at, const __grid_constant__ Map map, {unit}* o) {{
  extern __shared__ __align__(1024) {unit} s[];
  __shared__ __align__(8) u64 bar;
  const u32 b = at_shared(&bar);
  for (int i = threadIdx.x; i < {count}; i += 128) s[i] = 0x5a5a;
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {{
    init_barrier(b, 1);
  }}
  __syncthreads();
  if (threadIdx.x == 0) {{
    expect(b, {count * wide});
    asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {{{regs}}}], [%2];"
                 :: "r"(at_shared(s)), "l"(&map), "r"(b), {at} : "memory");
  }}
  wait_for(b, 0);
  for (int i = threadIdx.x; i < {count}; i += 128) o[blockIdx.x * {count} + i] = s[i];
}}
"""
        )
        name = f"{dtype} {shape} box {box} swizzle {swizzle}"
        regions = [(f"at {p}", f"u{8 * wide}") for p in places]
        buffers = [
            source_buffer("a", tensor),
            source_buffer("at", coordinates),
            Buffer("o", "out", bytes=len(places) * count * wide, regions=regions),
        ]
        record(
            store,
            Probe(
                f"tma load {name}",
                text,
                buffers,
                ["a", "at", tensor_map, "o"],
                (len(places), 1, 1),
                (128, 1, 1),
                count * wide,
            ),
        )
        regs = ", ".join(f"%{j + 2}" for j in range(rank))
        for op in ("", "add", "min", "max", "and", "xor"):
            if op and (swizzle or rank > 2 or (op in ("and", "xor") and dtype != "fp32")):
                continue
            instruction = (
                f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{op}"
                if op
                else f"cp.async.bulk.tensor.{rank}d.global.shared::cta"
            )
            # one block, place after place, so that those that overlap have an order
            text = (
                common
                + f"""extern "C" __global__ void
kernel(const {unit}* a, const int* at, const __grid_constant__ Map map, {unit}* m) {{
  extern __shared__ __align__(1024) {unit} s[];
  for (int place = 0; place < {len(places)}; place++) {{
    for (int i = threadIdx.x; i < {count}; i += 128) s[i] = a[i] + place;
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {{
      asm volatile("{instruction}.bulk_group [%0, {{{regs}}}], [%1];"
                   :: "l"(&map), "r"(at_shared(s)), {at.replace("blockIdx.x", "place")} : "memory");
      asm volatile("cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;" ::: "memory");
    }}
    __syncthreads();
  }}
}}
"""
            )
            # of reductions, small numbers: those that hardware may flush are another probe's
            image = random.integers(0, 1 << 8 * wide, count, dtype=tensor.dtype)
            held = tensor
            if op and op not in ("and", "xor"):
                kind = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}[dtype]
                view = np.uint16 if wide == 2 else np.uint32
                image = np.frombuffer(operand("normal", "a", count * wide, kind, random), view)
                held = np.frombuffer(operand("normal", "a", tensor.nbytes, kind, random), view)
            stored = TensorMapArgument("map", "m", dtype, shape[::-1], tuple(strides), box[::-1], swizzle)
            kind = f"u{8 * wide}" if not op else {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}[dtype]
            buffers = [
                source_buffer("a", image),
                source_buffer("at", coordinates),
                Buffer("m", "inout", held.tobytes(), regions=[("m", kind)]),
            ]
            record(
                store,
                Probe(
                    f"tma {'reduce ' + op if op else 'store'} {name}",
                    text,
                    buffers,
                    ["a", "at", stored, "m"],
                    (1, 1, 1),
                    (128, 1, 1),
                    count * wide,
                ),
            )


def clusters(store: Store) -> None:
    data = np.random.default_rng(71).integers(0, 1 << 32, 4096, dtype=np.uint32)
    text = """extern "C" __global__ void __cluster_dims__(4, 1, 1) kernel(const u32* a, u32* o) {
  __shared__ __align__(16) u32 s[128];
  const int t = threadIdx.x, i = blockIdx.x * 128 + t;
  u32 rank, other, x, w, v;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  s[t] = a[i];
  sync_cluster();
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other)
               : "r"(at_shared(s + (t + 5) % 128)), "r"((rank + 1) % 4));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(other) : "memory");
  sync_cluster();
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(at_shared(s + t)), "r"((rank + 3) % 4));
  asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(other), "r"(x ^ rank) : "memory");
  sync_cluster();
  w = s[t];
  sync_cluster();
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(at_shared(s + t)), "r"((rank + 2) % 4));
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(v) : "r"(other), "r"(a[i] | 1) : "memory");
  sync_cluster();
  o[i * 4] = x, o[i * 4 + 1] = w, o[i * 4 + 2] = s[t], o[i * 4 + 3] = v;
}
"""
    record(
        store,
        Probe(
            "cluster: mapa, ld, st, atom",
            text,
            [source_buffer("a", data[:1024]), result_buffer("o", 1024 * 16, "u32")],
            ["a", "o"],
            (8, 1, 1),
            (128, 1, 1),
        ),
    )
    common = "struct alignas(128) Map { u64 opaque[16]; };\n"
    text = (
        common
        + """extern "C" __global__ void __cluster_dims__(2, 1, 1)
kernel(const u32* a, const __grid_constant__ Map map, u32* o) {
  extern __shared__ __align__(1024) u32 s[];
  __shared__ __align__(8) u64 bar;
  const u32 b = at_shared(&bar);
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  for (int i = threadIdx.x; i < 1024; i += 128) s[i] = 7;
  if (threadIdx.x == 0) { init_barrier(b, 1); expect(b, 4096); }
  fence_async();
  sync_cluster();
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" :: "r"(at_shared(s + rank * 512)), "l"(&map),
                 "r"((int)(blockIdx.x / 2 * 32)),
                 "r"((int)(rank * 16 - 4)), "r"(b), "h"((u16)3) : "memory");
  wait_for(b, 0);
  sync_cluster();
  for (int i = threadIdx.x; i < 1024; i += 128) o[blockIdx.x * 1024 + i] = s[i];
}
"""
    )
    tensor_map = TensorMapArgument("map", "a", "fp32", (64, 24), (256,), (32, 16), 128)
    record(
        store,
        Probe(
            "cluster: multicast",
            text,
            [source_buffer("a", data[: 64 * 24]), result_buffer("o", 4 * 4096, "u32")],
            ["a", tensor_map, "o"],
            (4, 1, 1),
            (128, 1, 1),
            4096,
        ),
    )
    text = """extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel(const u32* a, u32* o) {
  __shared__ __align__(128) u32 s[256], r[256];
  __shared__ __align__(8) u64 bar;
  const u32 b = at_shared(&bar);
  u32 rank, there, barrier;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  for (int i = threadIdx.x; i < 256; i += 128) s[i] = a[blockIdx.x * 256 + i];
  if (threadIdx.x == 0) { init_barrier(b, 1); expect(b, 1024); }
  fence_async();
  sync_cluster();
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at_shared(r)), "r"(rank ^ 1));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(b), "r"(rank ^ 1));
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(there), "r"(at_shared(s)), "r"(1024), "r"(barrier) : "memory");
  wait_for(b, 0);
  for (int i = threadIdx.x; i < 256; i += 128) o[blockIdx.x * 256 + i] = r[i];
  sync_cluster();
}
"""
    record(
        store,
        Probe(
            "cluster: bulk copy to the other block",
            text,
            [source_buffer("a", data[:1024]), result_buffer("o", 4096, "u32")],
            ["a", "o"],
            (4, 1, 1),
            (128, 1, 1),
        ),
    )


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
                arguments.append(_argument(a))
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
    from evoengine.stages.gate import CannotJudge, executor
    from evoengine.stages.render import render
    from evoengine.stages.verify import verify

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
