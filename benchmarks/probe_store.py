"""Probes: a kernel with its buffers, executed by the executor, and the folder that keeps what each left there."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evoengine.devices.base import (
    KernelFailure,
    ScalarArgument,
    TensorArgument,
    TensorMapArgument,
)
from evoengine.errors import UsageError
from evoengine.records import Launch as PlannedLaunch
from evoengine.records import Source
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import DrawnArgument, Geometry, prepare
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
                    "arguments": [argument_json(a) for a in probe.arguments],
                }
            ],
        }
    )


def argument_json(a: object) -> dict[str, Any]:
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


def hash_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
