"""Prepare micro-benchmarks of an H100: compile their kernels, check the listings, predict. Any machine will do.

`hopper_constants.py` and its neighbours state them, and `hopper_gpu.py` measures what was prepared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SMS = 132
SHARED = 120 << 10
"""bytes of shared memory, of which no two blocks fit on an SM"""
MB = 1 << 20
ARCHIVE, MANIFEST = "kernels.zip", "manifest.json"


@dataclass(frozen=True, slots=True)
class Bench:
    """A kernel and how its times become a value.

    `n` are the two lengths of its loop, `ops` what the value is divided by for each turn of it, `expect` the machine
    instructions that its listing must have at least, by the start of their opcode.
    """

    group: str
    name: str
    text: str
    kind: str = "slope"
    grid: int = 1
    threads: int = 32
    shared: int = 0
    n: tuple[int, int] = (16, 48)
    ops: float = 1.0
    unit: str = "clocks"
    constant: str = ""
    bytes: int = 0
    """of each op: the value is bytes/clock; for kind `events` those of the launch, in GB/s"""
    p: int = 0
    q: int = 0
    data: int = 1 << 16
    """bytes of the buffer"""
    writes: bool = False
    """to the buffer"""
    chase: int = 0
    """distance in bytes of the pointers that the buffer holds, each to the next in random order; 0: zeros"""
    box: int = 0
    """rows of 128 bytes of the boxes of the tensor map over the buffer"""
    steps: tuple[int, ...] = ()
    """of a ladder: how many instructions each of its times covers"""
    cluster: int = 1
    predict: bool = True
    expect: dict[str, int] = field(default_factory=dict)


HEAD = """
typedef unsigned long long u64; typedef unsigned u32;
struct alignas(128) TensorMap { u64 opaque[16]; };
extern __shared__ __align__(1024) unsigned char s[];
#define DEV __device__ __forceinline__
DEV u64 now() { u64 t; asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) :: "memory"); return t; }
DEV u64 nanoseconds() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory"); return t; }
DEV u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void record(u64* out, u64 t0, u64 t1) {
  if (threadIdx.x % 32 == 0) {
    u64* to = out + 2 * (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
    to[0] = t0; to[1] = t1;
  }
}
DEV void pause(int clocks) { u64 t = now(); while (now() - t < clocks) {} }
DEV void bar_init(u32 b, u32 count) { \
asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(count) : "memory"); }
DEV void init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEV void arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b) : "memory"); }
DEV void expect(u32 b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(b), "r"(bytes) : "memory");
}
DEV void wait(u32 b, u32 parity) {
  asm volatile("{\\n.reg .pred done;\\nAGAIN:\\n"
    "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n@done bra DONE;\\nbra AGAIN;\\nDONE:\\n}\\n"
    :: "r"(b), "r"(parity) : "memory");
}
DEV void load_box(u32 to, const TensorMap& map, u32 b, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
    :: "r"(to), "l"((u64)&map), "r"(0), "r"(row), "r"(b) : "memory");
}
DEV void load_bulk(u32 to, const char* from, u32 bytes, u32 b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
    :: "r"(to), "l"(from), "r"(bytes), "r"(b) : "memory");
}
DEV void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int K> DEV void pending() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(K) : "memory"); }
DEV u64 matrix(u32 address) { return 1ull << 62 | (u64)(1024 >> 4) << 32 | (address & 0x3ffff) >> 4; }
DEV void cluster_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
}
DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
}
"""


def kernel(code: str, *, threads: int = 1024, tensor_map: bool = False, outside: str = "", cluster: int = 1) -> str:
    """Return a source whose kernel `k` has that body."""
    more = ", const __grid_constant__ TensorMap map" if tensor_map else ""
    dims = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    return (
        f'{HEAD}{outside}\nextern "C" __global__ void {dims}__launch_bounds__({threads}, 1)\n'
        f"k(u64* out, u32* sink, char* data, int n, int p, int q{more}) {{\n{code}\n}}\n"
    )


def loop(body: str, setup: str = "", finish: str = "", **options: Any) -> str:
    """Return a kernel that times n turns of `body` on every warp."""
    return kernel(
        f"{setup}\n__syncthreads();\nu64 t0 = now();\n#pragma unroll 1\nfor (int i = 0; i < n; ++i) {{\n{body}\n}}\n"
        f"u64 t1 = now();\n{finish}\nrecord(out, t0, t1);",
        **options,
    )


# ── preparation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prepare(folder: Path, seconds: float, groups: dict[str, Callable[[], Iterator[Bench]]]) -> int:
    """Compile all kernels, check their listings and predict until `seconds` are over; write manifest and archive.

    What the folder has already, kernels and predictions, is not made again. Return how many benches their listing
    refutes.
    """
    by_text: dict[str, list[Bench]] = {}
    for group in groups.values():
        for bench in group():
            by_text.setdefault(key_of(bench.text), []).append(bench)
    folder.mkdir(parents=True, exist_ok=True)
    there: dict[str, bytes] = {}
    told: dict[tuple[str, str], Any] = {}
    if (folder / ARCHIVE).exists():
        with zipfile.ZipFile(folder / ARCHIVE) as old:
            there = {name: old.read(name) for name in old.namelist()}
    if (folder / MANIFEST).exists():
        old_entries = json.loads((folder / MANIFEST).read_text())["benches"]
        told = {(entry["key"], entry["name"]): entry["predicted"] for entry in old_entries}
    cubins = [there.get(f"{key}.cubin") for key in by_text]
    entries: list[dict[str, Any]] = []
    until = [time.time() + seconds] * len(by_text)
    packed = {"compression": zipfile.ZIP_DEFLATED, "compresslevel": 9}
    with zipfile.ZipFile(folder / ARCHIVE, "w", **packed) as archive, ProcessPoolExecutor(2) as pool:
        asked = [
            [replace(b, predict=b.predict and told.get((key, b.name)) is None) for b in benches]
            for key, benches in by_text.items()
        ]
        done = pool.map(prepare_text, asked, cubins, until)
        for (key, benches), (cubin, found) in zip(by_text.items(), done, strict=True):
            archive.writestr(f"{key}.cu", benches[0].text)
            archive.writestr(f"{key}.cubin", cubin)
            for bench, about in zip(benches, found, strict=True):
                about["predicted"] = about["predicted"] or told.get((key, bench.name))
                entries.append({**{k: v for k, v in asdict(bench).items() if k != "text"}, "key": key, **about})
    (folder / MANIFEST).write_text(json.dumps({"benches": entries, "constants": constants()}, indent=1))
    refuted = [entry for entry in entries if entry["missing"]]
    for entry in refuted:
        print(f"{entry['group']}: {entry['name']}: {entry['missing']}", file=sys.stderr)
    return len(refuted)


def constants() -> dict[str, float]:
    from evoengine.sass.chip import find_chip

    chip = find_chip("h100")
    return {**chip.rates, **{name: rate.value for name, rate in chip.stated.items()}}


def prepare_command(description: str, groups: dict[str, Callable[[], Iterator[Bench]]]) -> int:
    """Prepare the groups as the command line says; return the exit status: 1 where a listing refutes a bench."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="DIR", required=True)
    parser.add_argument("--seconds", type=float, default=600, help="after which nothing more is predicted")
    asked = parser.parse_args()
    return min(1, prepare(asked.prepare, asked.seconds, groups))


def prepare_text(benches: Sequence[Bench], cubin: bytes | None, until: float) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the cubin of benches of one text, and of each what the listing lacks, has, and the prediction."""
    from evoengine.accuracy.compilers import InstalledNvrtc
    from evoengine.sass.listing import disassemble

    cubin = cubin or InstalledNvrtc().compile(benches[0].text, "sm_90a", ())
    listing = disassemble(cubin)
    between = timed_opcodes(listing)
    found = []
    for bench in benches:
        missing = {
            opcode: f"{sum(m for name, m in between.items() if name.startswith(opcode))} of {least}"
            for opcode, least in bench.expect.items()
            if sum(m for name, m in between.items() if name.startswith(opcode)) < least
        }
        about: dict[str, Any] = {"missing": missing, "timed": dict(between.most_common(12)), "predicted": None}
        waits = sum(m for name, m in between.items() if name.startswith("WARPGROUP.DEPBAR"))
        products = sum(m for name, m in between.items() if "GMMA" in name)
        if waits > bench.text.count("pending<") and 2 * waits > products:
            missing["WARPGROUP.DEPBAR"] = f"{waits}, more than were written"
        if bench.predict and time.time() < until:
            try:
                about["predicted"] = predicted(bench, cubin, listing)
            except Exception as error:  # a kernel that the model cannot read is a result as well
                about["predicted"] = f"{type(error).__name__}: {error}"[:200]
        found.append(about)
    return cubin, found


def timed_opcodes(listing: str) -> Counter[str]:
    """Return the opcodes from the first to the last reading of the clock, in the listing's order."""
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", listing, re.MULTILINE)
    reads = [at for at, (opcode, rest) in enumerate(lines) if "SR_CLOCK" in rest]
    if len(reads) < 2:
        return Counter(opcode for opcode, _ in lines)
    return Counter(opcode for opcode, _ in lines[reads[0] + 1 : reads[-1]])


def predicted(bench: Bench, cubin: bytes, listing: str) -> float:
    """Return the bench's value by the model, by the same slope."""
    from evoengine.devices.base import ScalarArgument, TensorMapArgument
    from evoengine.sass.chip import find_chip
    from evoengine.sass.core import Program
    from evoengine.sass.cubin import read_kernel
    from evoengine.sass.launch import DrawnArgument, Geometry, prepare
    from evoengine.sass.predict import predict

    program, kernel_of = Program(listing, "k"), read_kernel(cubin, "k")
    zeros = None if bench.writes else np.zeros(min(bench.data, MB), np.uint8)
    clocks = []
    for n in bench.n:
        arguments: list[Any] = [
            DrawnArgument("out", 1 << 20, "int32", True),
            DrawnArgument("sink", 1 << 20, "int32", True),
            DrawnArgument("data", bench.data, "uint8", bench.writes, contents=zeros),
            *(ScalarArgument(name, np.int32(value)) for name, value in (("n", n), ("p", bench.p), ("q", bench.q))),
        ]
        if bench.box:
            dims = (64, bench.data // 128)
            arguments.append(TensorMapArgument("map", "data", "fp16", dims, (128,), (64, bench.box), 128))
        geometry = Geometry((bench.grid, 1, 1), (bench.threads, 1, 1), bench.shared)
        launch = prepare(kernel_of, geometry, arguments, 0)
        clocks.append(predict(program, launch, find_chip("h100"), cold=False).clocks)
    return value_of(bench, clocks)


def value_of(bench: Bench | Any, clocks: Sequence[float]) -> float:
    """Return the slope of two lengths' clocks in the bench's unit."""
    slope = (clocks[1] - clocks[0]) / (bench.n[1] - bench.n[0]) / bench.ops
    return bench.bytes / slope if bench.bytes and slope else slope
