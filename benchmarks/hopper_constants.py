"""Micro-benchmarks that measure what evoengine/sass/chips.toml says of an H100: latencies, intervals, rates, clocks.

    python benchmarks/hopper_constants.py --prepare DIR           on any machine: compiles, reads the listings, predicts
    python benchmarks/hopper_constants.py --from DIR --out FILE   on an H100: measures, in about a minute

The second needs the checkout and NumPy, but neither a compiler nor torch. Each group runs in a process of its own with
a time limit, so that a fault or a hang costs no more than its group; FILE is written after each. A value is a slope
between two lengths of a loop, in which all that happens once cancels, unless its unit says otherwise. FILE has beside
each value the constant of chips.toml that it tells of, and what the model predicts of the same machine code.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SMS = 132
GROUP_SECONDS = 20.0
BENCH_SECONDS = 5.0
POWER_SECONDS = 1.2
"""of sustained work at each duty"""
ALL_SECONDS = 74.0
REPEATS = 7
SHARED = 120 << 10
"""bytes of shared memory, of which no two blocks fit on an SM"""
MB = 1 << 20
FLUSHED = 256 * MB
KEPT = ("group", "name", "unit", "constant", "predicted", "timed", "n", "ops", "p", "q", "grid", "threads")
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


# ── arithmetic ──────────────────────────────────────────────────────────────────────────────────────────────────────

FLOATS = '"+f"(x{j}) : "f"(a), "f"(b)'
WORDS = '"+r"(x{j}) : "r"(a), "r"(b)'
DOUBLES = '"+d"(x{j}) : "d"(a), "d"(b)'
AS_FLOAT = "{{.reg .f32 t;\\nmov.b32 t, %0;\\n{};}}"
AS_SHORT = "{{.reg .b16 t;\\n{};}}"
OTHERS = {
    "f2i": ("u32", AS_FLOAT.format("cvt.rni.s32.f32 %0, t"), WORDS, "F2I", ""),
    "i2f_s8": ("u32", "{.reg .f32 t;\\ncvt.rn.f32.s8 t, %0;\\nmov.b32 %0, t;}", WORDS, "I2F", ""),
    "f2fp_bf16": ("u32", AS_FLOAT.format("cvt.rn.bf16x2.f32 %0, t, %3"), WORDS + ', "f"(c)', "F2F", ""),
    "e4m3_f16x2": ("u32", AS_SHORT.format("cvt.u16.u32 t, %0;\\ncvt.rn.f16x2.e4m3x2 %0, t"), WORDS, "F2FP", ""),
    "f16x2_e4m3": (
        "u32", AS_SHORT.format("cvt.rn.satfinite.e4m3x2.f16x2 t, %0;\\ncvt.u32.u16 %0, t"), WORDS, "F2FP", "",
    ),
    "f16_f32": ("u32", "{.reg .b16 l, h;\\n.reg .f32 t;\\nmov.b32 {l, h}, %0;\\ncvt.f32.f16 t, l;\\nmov.b32 %0, t;}",
                WORDS, "HADD2", "half_interval"),
    "ex2_f16x2": ("u32", "ex2.approx.f16x2 %0, %0;", WORDS, "MUFU", ""),
    "tanh_f16x2": ("u32", "tanh.approx.f16x2 %0, %0;", WORDS, "MUFU", ""),
    "lg2": ("float", "lg2.approx.ftz.f32 %0, %0;", FLOATS, "MUFU", "mufu_interval"),
    "imad_hi": ("u32", "mul.hi.u32 %0, %0, %1;", WORDS, "IMAD", ""),
    "dp4a": ("u32", "dp4a.s32.s32 %0, %1, %2, %0;", WORDS, "IDP", ""),
    "setp+selp": ("u32", "{.reg .pred q;\\nsetp.lt.u32 q, %0, %1;\\nselp.u32 %0, %2, %0, q;}", WORDS, "ISETP", ""),
    "ballot": ("u32", "{.reg .pred q;\\nsetp.ne.u32 q, %0, 0;\\nvote.sync.ballot.b32 %0, q, -1;}", WORDS, "VOTE", ""),
    "clz": ("u32", "clz.b32 %0, %0;", WORDS, "FLO", ""),
}  # fmt: skip
ARITHMETIC = {
    "fma": ("float", "fma.rn.f32 %0, %0, %1, %2;", FLOATS, "FFMA", "fma_interval"),
    "add": ("float", "add.rn.f32 %0, %0, %1;", FLOATS, "FADD", "fma_interval"),
    "fmnmx": ("float", "min.f32 %0, %0, %1;\\nmax.f32 %0, %0, %2;", FLOATS, "FMNMX", "alu_interval"),
    "imad": ("u32", "mad.lo.u32 %0, %0, %1, %2;", WORDS, "IMAD", "imad_interval"),
    "lop3": ("u32", "lop3.b32 %0, %0, %1, %2, 0x1b;", WORDS, "LOP3", "alu_interval"),
    "shf": ("u32", "shf.l.wrap.b32 %0, %0, %1, %2;", WORDS, "SHF", "alu_interval"),
    "prmt": ("u32", "prmt.b32 %0, %0, %1, %2;", WORDS, "PRMT", "alu_interval"),
    "iadd3": ("u32", "{.reg .u32 t;\\nadd.u32 t, %0, %1;\\nadd.u32 %0, t, %2;}", WORDS, "IADD3", "alu_interval"),
    "ex2": ("float", "ex2.approx.ftz.f32 %0, %0;", FLOATS, "MUFU", "mufu_interval"),
    "rcp+add": ("float", "rcp.approx.ftz.f32 %0, %0;\\nadd.rn.f32 %0, %0, %1;", FLOATS, "MUFU", "mufu_interval"),
    "rsq": ("float", "rsqrt.approx.ftz.f32 %0, %0;", FLOATS, "MUFU", "mufu_interval"),
    "tanh": ("float", "tanh.approx.f32 %0, %0;", FLOATS, "MUFU", "mufu_interval"),
    "hfma2": ("u32", "fma.rn.f16x2 %0, %0, %1, %2;", WORDS, "HFMA2", "half_interval"),
    "hfma2_bf16": ("u32", "fma.rn.bf16x2 %0, %0, %1, %2;", WORDS, "HFMA2", "half_interval"),
    "dfma": ("double", "fma.rn.f64 %0, %0, %1, %2;", DOUBLES, "DFMA", "fp64_interval"),
    "f2fp": ("u32", "{.reg .f32 t;\\nmov.b32 t, %0;\\ncvt.rn.f16x2.f32 %0, t, %3;}", WORDS + ', "f"(c)', "F2F", ""),
    "i2f": ("u32", "{.reg .f32 t;\\ncvt.rn.f32.s32 t, %0;\\nmov.b32 %0, t;}", WORDS, "I2F", ""),
    "popc": ("u32", "popc.b32 %0, %0;", WORDS, "POPC", ""),
    "shfl": ("u32", "shfl.sync.bfly.b32 %0, %0, 1, 31, -1;", WORDS, "SHFL", "memory_interval"),
    "redux": ("u32", "redux.sync.add.s32 %0, %0, -1;", WORDS, "REDUX", ""),
    **OTHERS,
}
"""name → type, PTX, operands, opcode, the constant of its interval"""
LATENCIES = {"ex2": "mufu_latency", "shfl": "shuffle_latency"}


def operation(name: str, chain: int) -> str:
    kind, ptx, operands, *_ = ARITHMETIC[name]
    return f'asm volatile("{ptx}" : {operands.format(j=chain)});\n'


def operands(name: str, chains: int) -> str:
    kind = ARITHMETIC[name][0]
    first = " ".join(f"{kind} x{j} = ({kind})(threadIdx.x + {j});" for j in range(chains))
    return f"{kind} a = ({kind})(p + 3), b = ({kind})(q + 1); float c = p + 2; {first}"


def total(name: str, chains: int) -> str:
    kind = ARITHMETIC[name][0]
    added = " + ".join(f"x{j}" for j in range(chains))
    return f"{kind} sum = {added}; *({kind}*)(sink + 2 * (blockIdx.x * blockDim.x + threadIdx.x)) = sum;"


def arithmetic() -> Iterator[Bench]:
    for name, (_, _, _, opcode, constant) in ARITHMETIC.items():
        each = 2 if name == "fmnmx" else 1
        for chains in (1, 8):
            count = 128 // each
            body = "".join(operation(name, i % chains) for i in range(count))
            text = loop(body, operands(name, chains), total(name, chains))
            expect = {opcode: 100}
            if chains == 1:
                yield Bench(
                    "arithmetic", f"{name} latency", text, ops=count * each,
                    constant=LATENCIES.get(name, "fixed_latencies.inc"), expect=expect,
                )  # fmt: skip
                continue
            for warps in (1, 4):
                yield Bench(
                    "arithmetic", f"{name} interval, {warps} warps a sub-core", text, threads=128 * warps,
                    ops=count * each * warps, constant=constant, expect=expect,
                )  # fmt: skip
    for first, second in (("fma", "lop3"), ("fma", "imad"), ("fma", "ex2"), ("lop3", "ex2"), ("fma", "hfma2")):
        yield beside_each_other(first, second)
    yield from control()


def beside_each_other(first: str, second: str) -> Bench:
    """Return two kinds of instructions in turn, four warps on each sub-core: the clocks of a pair."""
    one, two = ARITHMETIC[first][0], ARITHMETIC[second][0]
    body, setup = "", [f"{one} a = ({one})(p + 3), b = ({one})(q + 1);", "float c = p + 2;"]
    for j in range(8):
        setup.append(f"{one} x{j} = ({one})(threadIdx.x + {j}); {two} y{j} = ({two})(threadIdx.x * 3 + {j});")
    setup.append(f"{two} d = ({two})(p + 5), e = ({two})(q + 2);")
    renamed = ARITHMETIC[second][2].replace("x{j}", "y{j}").replace("(a)", "(d)").replace("(b)", "(e)")
    for i in range(64):
        body += operation(first, i % 8)
        body += f'asm volatile("{ARITHMETIC[second][1]}" : {renamed.format(j=i % 8)});\n'
    added = " + ".join(f"(float)x{j} + (float)y{j}" for j in range(8))
    text = loop(body, "\n".join(setup), f"*(float*)(sink + blockIdx.x * blockDim.x + threadIdx.x) = {added};")
    expect = {ARITHMETIC[first][3]: 60, ARITHMETIC[second][3]: 60}
    return Bench("arithmetic", f"{first} and {second}, a pair", text, threads=512, ops=64 * 4, expect=expect)


def control() -> Iterator[Bench]:
    for links in (1, 4, 16):
        body = "".join(operation("fma", 0) for _ in range(links))
        text = loop(body, operands("fma", 1), total("fma", 1))
        yield Bench(
            "arithmetic", f"turn of a loop with {links} dependent FFMA", text, n=(256, 1024), constant="branch_clocks"
        )
    for name, first, opcode in (("uldc", "p", "ULDC"), ("ldc", "threadIdx.x * q", "LDC")):
        for kilobytes in (1, 8, 32, 64):
            body = 'asm volatile("ld.const.u32 %0, [%1];" : "=r"(y) : "r"(x)); x = (x + y + 64) & MASK;\n' * 16
            text = loop(
                body.replace("MASK", str(kilobytes * 1024 - 1)),
                f"u32 y, x = {first};", "sink[threadIdx.x] = x + table[p];", outside="__constant__ u32 table[16384];",
            )  # fmt: skip
            yield Bench(
                "arithmetic", f"{name} chase with an addition and an and, {kilobytes} KB", text, ops=16,
                constant="constant_latency" + ", uniform_latency" * (name == "uldc"), expect={opcode: 16}, n=(256, 512),
                predict=kilobytes == 1,
            )  # fmt: skip


# ── shared memory and L1 ────────────────────────────────────────────────────────────────────────────────────────────

FILL = "for (int i = threadIdx.x; i < 16384; i += blockDim.x) ((u32*)s)[i] = 0;\n__syncthreads();\n"


def shared_memory() -> Iterator[Bench]:
    kinds = {"32": ("u32", "%0", 1), "64": ("v2.u32", "{%0, %1}", 2), "128": ("v4.u32", "{%0, %1, %2, %3}", 4)}
    common: dict[str, Any] = {"group": "shared", "shared": 64 << 10}
    for bits, (kind, registers, words) in kinds.items():
        extra = "".join(f', "=r"(y{j})' for j in range(words - 1))
        for name, place in (("conflict-free", f"threadIdx.x % 32 * {4 * words}"), ("broadcast", "0")):
            body = f'asm volatile("ld.volatile.shared.{kind} {registers}, [%0];" : "+r"(x){extra} :: "memory");\n' * 32
            setup = f"{FILL}u32 x = at(s) + {place}; *(volatile u32*)(s + {place}) = x; u32 y0 = 0, y1 = 0, y2 = 0;"
            text = loop(body, setup, "sink[threadIdx.x] = x + y0 + y1 + y2;")
            yield Bench(
                name=f"lds.{bits} latency, {name}", text=text, ops=32, constant="lds_latency", expect={"LDS": 32},
                **common,
            )  # fmt: skip
        outs = [", ".join(f'"=r"(x{j * words + w})' for w in range(words)) for j in range(8)]
        body = "".join(
            f'asm volatile("ld.volatile.shared.{kind} {registers}, [%{words}];" : {outs[j % 8]} : "r"(a + {j * 512}) '
            ': "memory");\n'
            for j in range(32)
        )
        declared = "u32 " + ", ".join(f"x{j}" for j in range(8 * words)) + ";"
        finish = "sink[threadIdx.x] = " + " + ".join(f"x{j}" for j in range(8 * words)) + ";"
        text = loop(body, f"{FILL}{declared} u32 a = at(s) + threadIdx.x % 32 * {4 * words};", finish)
        for warps in (1, 4, 16):
            yield Bench(
                name=f"lds.{bits} interval of the SM, {warps} warps", text=text, threads=32 * warps, ops=32 * warps,
                constant="memory_interval" if warps == 1 else "wavefront_clocks", expect={"LDS": 32}, **common,
            )  # fmt: skip
    yield from conflicts(common)
    yield from matrix_loads(common)
    yield from issue_ladders(common)
    yield from first_level()


def conflicts(common: dict[str, Any]) -> Iterator[Bench]:
    for ways in (2, 4, 8, 16, 32):
        place = f"(threadIdx.x % 32 * {ways * 4})"
        setup = f"{FILL}u32 x = at(s) + {place}; *(volatile u32*)(s + {place}) = x;"
        body = 'asm volatile("ld.volatile.shared.u32 %0, [%0];" : "+r"(x) :: "memory");\n' * 32
        yield Bench(
            name=f"lds.32 latency, {ways}-way conflict", text=loop(body, setup, "sink[threadIdx.x] = x;"), ops=32,
            constant="lds_latency + wavefronts", expect={"LDS": 32}, **common,
        )  # fmt: skip
    for ways in (1, 2, 4, 8, 16, 32):
        declared = "u32 " + ", ".join(f"x{j}" for j in range(8)) + ";"
        setup = f"{FILL}{declared} u32 a = at(s) + threadIdx.x % 32 * {ways * 4};"
        body = "".join(
            f'asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x{j % 8}) : "r"(a + {j * 512}) : "memory");\n'
            for j in range(32)
        )
        finish = "sink[threadIdx.x] = " + " + ".join(f"x{j}" for j in range(8)) + ";"
        yield Bench(
            name=f"lds.32 of the SM, {ways}-way conflict, 16 warps", text=loop(body, setup, finish), threads=512,
            ops=32 * 16, constant="wavefront_clocks", expect={"LDS": 32}, **common,
        )  # fmt: skip
        stores = "".join(
            f'asm volatile("st.volatile.shared.u32 [%0], %1;" :: "r"(a + {j * 512}), "r"(x0) : "memory");\n'
            for j in range(32)
        )
        setup = f"{FILL}u32 x0 = threadIdx.x; u32 a = at(s) + threadIdx.x % 32 * {ways * 4};"
        yield Bench(
            name=f"sts.32 of the SM, {ways}-way conflict, 16 warps", text=loop(stores, setup), threads=512,
            ops=32 * 16, constant="wavefront_clocks", expect={"STS": 32}, **common,
        )  # fmt: skip
    body = "".join(
        'asm volatile("st.volatile.shared.u32 [%0], %0;\\nld.volatile.shared.u32 %0, [%0];" : "+r"(x) :: "memory");\n'
        for _ in range(16)
    )
    yield Bench(
        name="sts.32 and lds.32 of the same word, latency", ops=16, expect={"STS": 16, "LDS": 16}, **common,
        text=loop(body, f"{FILL}u32 x = at(s) + threadIdx.x % 32 * 4;", "sink[threadIdx.x] = x;"),
    )  # fmt: skip


def matrix_loads(common: dict[str, Any]) -> Iterator[Bench]:
    # Matrix 0 holds, for each lane, the address of its row, so that a load gives the next load's addresses.
    rows = "u32 x = at(s) + threadIdx.x % 32 * 16; if (threadIdx.x < 32) ((volatile u32*)s)[threadIdx.x] = x;\n"
    for count in (1, 2, 4):
        others = "".join(f", %{j}" for j in range(1, count))
        outs = "".join(f', "=r"(y{j})' for j in range(count - 1))
        form = f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16"
        body = f'asm volatile("{form} {{%0{others}}}, [%0];" : "+r"(x){outs} :: "memory");\n' * 32
        text = loop(body, f"{FILL}{rows}u32 y0 = 0, y1 = 0, y2 = 0;", "sink[threadIdx.x] = x + y0 + y1 + y2;")
        yield Bench(
            name=f"ldmatrix.x{count} latency", text=text, ops=32, constant="lds_latency + wavefronts",
            expect={"LDSM": 32}, **common,
        )  # fmt: skip
        registers = "{" + ", ".join(f"%{j}" for j in range(count)) + "}"
        outs = [", ".join(f'"=r"(x{j * count + w})' for w in range(count)) for j in range(8)]
        body = "".join(
            f'asm volatile("{form} {registers}, [%{count}];" : {outs[j % 8]} : "r"(a + {j * 512}) : "memory");\n'
            + (f"x ^= {' ^ '.join(f'x{i}' for i in range(8 * count))};\n" if j % 8 == 7 else "")
            for j in range(32)
        )
        declared = "u32 x = 0, " + ", ".join(f"x{j}" for j in range(8 * count)) + ";"
        finish = "sink[threadIdx.x] = x;"
        text = loop(body, f"{FILL}{declared} u32 a = at(s) + threadIdx.x % 32 * 16;", finish)
        for warps in (1, 4, 16):
            yield Bench(
                name=f"ldmatrix.x{count} interval of the SM, {warps} warps", text=text, threads=32 * warps,
                ops=32 * warps, constant="matrix_wavefront_clocks", expect={"LDSM": 32}, **common,
            )  # fmt: skip
    body = "".join(
        f'asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {{%1, %1, %1, %1}};" :: "r"(a + {j * 512}), '
        '"r"(a) : "memory");\n'
        for j in range(32)
    )
    for warps in (1, 4, 16):
        yield Bench(
            name=f"stmatrix.x4 interval of the SM, {warps} warps", ops=32 * warps, threads=32 * warps,
            text=loop(body, f"{FILL}u32 a = at(s) + threadIdx.x % 32 * 16;"), constant="matrix_wavefront_clocks",
            expect={"STSM": 32}, **common,
        )  # fmt: skip


def ladder(steps: Sequence[int], once: str, setup: str = "", after: str = "", end: str = "", **options: Any) -> str:
    """Return a kernel that times `steps` of an instruction, n times each, from rest; `after` runs when it is timed."""
    parts = [setup]
    for number, step in enumerate(steps):
        body = "".join(once.replace("@", str(j)) for j in range(step))
        parts.append(
            f"#pragma unroll 1\nfor (int i = 0; i < n; ++i) {{\n__syncthreads(); pause(600); __syncthreads();\n"
            f"u64 t0 = now();\n{body}u64 t1 = now();\n{after}\n"
            f"if (threadIdx.x == 0) out[{number} * n + i] = t1 - t0;\n}}"
        )
    return kernel("\n".join([*parts, end]), **options)


STEPS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24)


def issue_ladders(common: dict[str, Any]) -> Iterator[Bench]:
    # Behind the clock all registers are read, so that none of them is the one that the clock is read into.
    declared = "u32 x = 0, " + ", ".join(f"x{j} = 0" for j in range(24)) + ";"
    used = "x ^= " + " ^ ".join(f"x{j}" for j in range(24)) + ";"
    end = "sink[threadIdx.x] = x;"
    for ways in (1, 8):
        setup = f"{FILL}{declared} u32 a = at(s) + threadIdx.x % 32 * {4 * ways};"
        loads = 'asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x@) : "r"(a + @ * 512) : "memory");\n'
        stores = 'asm volatile("st.volatile.shared.u32 [%0], %1;" :: "r"(a + @ * 512), "r"(x@) : "memory");\n'
        for name, once, opcode in (("lds.32", loads, "LDS"), ("sts.32", stores, "STS")):
            yield Bench(
                name=f"{name}, {ways}-way conflict: clocks until k are issued", kind="ladder", steps=STEPS, n=(16, 16),
                text=ladder(STEPS, once, setup, used, end), constant="memory_interval, memory_queue", predict=False,
                expect={opcode: sum(STEPS)}, **common,
            )  # fmt: skip
    setup = "float " + ", ".join(f"f{j} = threadIdx.x + {j}" for j in range(24)) + ";"
    end = "*(float*)(sink + threadIdx.x) = " + " + ".join(f"f{j}" for j in range(24)) + ";"
    yield Bench(
        name="ex2: clocks until k are issued", kind="ladder", steps=STEPS, n=(16, 16), predict=False, **common,
        text=ladder(STEPS, 'asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(f@) :: "memory");\n', setup, end=end),
        constant="mufu_interval", expect={"MUFU": sum(STEPS)},
    )  # fmt: skip


def first_level() -> Iterator[Bench]:
    body = 'asm volatile("ld.global.u64 %0, [%0];" : "+l"(x) :: "memory");\n' * 16
    text = loop(body, "u64 x = (u64)data;", "sink[threadIdx.x] = (u32)x;")
    yield Bench(
        "shared", "L1 hit, latency", text, kind="chase", ops=16, constant="l1_latency", data=16 << 10, chase=128,
        n=(64, 192), predict=False, expect={"LDG": 16},
    )  # fmt: skip
    for bits, (kind, words) in {"32": ("u32", 1), "128": ("v4.u32", 4)}.items():
        registers = "{" + ", ".join(f"%{j}" for j in range(words)) + "}" if words > 1 else "%0"
        outs = [", ".join(f'"=r"(x{j * words + w})' for w in range(words)) for j in range(8)]
        body = "".join(
            f'asm volatile("ld.global.{kind} {registers}, [%{words}];" : {outs[j % 8]} : "l"(a + {j * 512}) '
            ': "memory");\n' + (f"x ^= {' ^ '.join(f'x{i}' for i in range(8 * words))};\n" if j % 8 == 7 else "")
            for j in range(16)
        )
        declared = "u32 " + ", ".join(f"x{j}" for j in range(8 * words)) + ";"
        finish = "sink[threadIdx.x] = x;"
        setup = f"u32 x = 0; {declared} const char* own = data + threadIdx.x % 32 * {4 * words};"
        # Addresses change from turn to turn, or ptxas would take the loads out of the loop.
        body = f"const char* a = own + (i & 1) * 8192;\n{body}"
        for warps in (4, 16):
            yield Bench(
                "shared", f"L1 hits of {bits} bits, interval of the SM, {warps} warps",
                loop(body, setup, finish, threads=512),
                threads=32 * warps, ops=16 * warps, constant="sm_memory_interval, l1_bytes_per_clock",
                expect={"LDG": 16},
            )  # fmt: skip


# ── barriers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def barriers() -> Iterator[Bench]:
    for warps in (1, 2, 4, 8, 16, 32):
        for name, ptx in (("__syncthreads", "bar.sync 0;"), ("named barrier", f"bar.sync 1, {32 * warps};")):
            text = loop(f'asm volatile("{ptx}" ::: "memory");\n' * 16)
            yield Bench(
                "barriers", f"{name} of {warps} warps", text, threads=32 * warps, ops=16, constant="barrier_latency",
                expect={"BAR.SYNC": 16},
            )  # fmt: skip
    start = "if (threadIdx.x == 0) { bar_init(at(s), 1); bar_init(at(s + 8), 1); init_fence(); }\n"
    common: dict[str, Any] = {"group": "barriers", "shared": 1024}
    yield Bench(
        name="mbarrier.try_wait that need not wait", text=loop("wait(at(s), 1);\n" * 16, start), ops=16,
        constant="mbarrier_latency", **common,
    )  # fmt: skip
    yield Bench(
        name="mbarrier arrive, interval of one thread", ops=16, **common, threads=32,
        text=loop("if (threadIdx.x == 0) { " + "arrive(at(s)); " * 16 + "}\n", start),
    )  # fmt: skip
    ping = (
        "if (threadIdx.x == 0) { arrive(at(s)); wait(at(s + 8), i & 1); }\n"
        "else if (threadIdx.x == 32) { wait(at(s), i & 1); arrive(at(s + 8)); }\n"
    )
    yield Bench(
        name="mbarrier: arrive, wake and arrive back, half of it", text=loop(ping, start), ops=2, threads=64,
        n=(64, 192), constant="mbarrier_wake", **common,
    )  # fmt: skip
    named = (
        'if (threadIdx.x < 32) { asm volatile("bar.arrive 1, 64;\\nbar.sync 2, 64;" ::: "memory"); }\n'
        'else { asm volatile("bar.sync 1, 64;\\nbar.arrive 2, 64;" ::: "memory"); }\n'
    )
    yield Bench(
        name="named barriers: arrive, wake and arrive back, half of it", text=loop(named), ops=2, threads=64,
        n=(64, 192), **common,
    )  # fmt: skip
    yield Bench(
        name="fence.proxy.async with nothing before it", ops=16, **common,
        text=loop('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");\n' * 16),
    )  # fmt: skip
    for blocks in (2, 4, 8):
        for warps in (1, 4, 8):
            for name, call in (("relaxed", "cluster_relaxed();\n"), ("with its fences", "cluster_sync();\n")):
                yield Bench(
                    "barriers", f"cluster barrier, {name}, of {blocks} blocks of {warps} warps", grid=blocks,
                    cluster=blocks, text=loop(call * 8, cluster=blocks, finish="cluster_sync();"), ops=8,
                    threads=32 * warps,
                )  # fmt: skip
    # Each block's words hold their own address in the cluster, which the neighbour's loads give back to it.
    mapa = 'asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"({0}) : "r"(own), "r"({1}));\n'
    setup = (
        "u32 own = at(s) + threadIdx.x % 32 * 4, x, mine;\n"
        + mapa.replace("{0}", "x").replace("{1}", "blockIdx.x ^ 1")
        + mapa.replace("{0}", "mine").replace("{1}", "blockIdx.x")
        + "*(volatile u32*)(s + threadIdx.x % 32 * 4) = mine; cluster_sync();\n"
    )
    body = 'asm volatile("ld.shared::cluster.u32 %0, [%0];" : "+r"(x) :: "memory");\n' * 16
    yield Bench(
        name="load from the neighbour's shared memory, latency", grid=2, cluster=2, ops=16, **common,
        text=loop(body, setup, "sink[threadIdx.x] = x; cluster_sync();", cluster=2), predict=False,
    )  # fmt: skip


# ── tensor cores ────────────────────────────────────────────────────────────────────────────────────────────────────

PRODUCTS = {
    "fp16": ("m16n8k16", "f32.f16.f16.f32", "float", 4, 4, 2, "hmma_interval"),
    "fp16 summed in fp16": ("m16n8k16", "f16.f16.f16.f16", "u32", 2, 4, 2, "hmma_fp16_interval"),
    "bf16": ("m16n8k16", "f32.bf16.bf16.f32", "float", 4, 4, 2, "hmma_interval"),
    "tf32": ("m16n8k8", "f32.tf32.tf32.f32", "float", 4, 4, 2, "hmma_interval"),
    "int8": ("m16n8k32", "s32.s8.s8.s32", "int", 4, 4, 2, "hmma_fp16_interval"),
    "fp8": ("m16n8k32", "f32.e4m3.e4m3.f32", "float", 4, 4, 2, ""),
    "fp16 of half the depth": ("m16n8k8", "f32.f16.f16.f32", "float", 4, 2, 1, ""),
}
"""name → shape, types, C type and registers of the sums, registers of A and B, constant"""


def mma() -> Iterator[Bench]:
    for name, (shape, types, kind, sums, left, right, constant) in PRODUCTS.items():
        numbers = iter(range(sums + left + right))
        out, one, two = ("{" + ", ".join(f"%{next(numbers)}" for _ in range(m)) + "}" for m in (sums, left, right))
        letter = "f" if kind == "float" else "r"
        given = ", ".join(f'"r"(a[{i}])' for i in range(left + right))
        for chains in (1, 4, 8):
            body = ""
            for i in range(32):
                results = ", ".join(f'"+{letter}"(c[{i % chains}][{r}])' for r in range(sums))
                instruction = f"mma.sync.aligned.{shape}.row.col.{types} {out}, {one}, {two}, {out};"
                body += f'asm volatile("{instruction}" : {results} : {given});\n'
            setup = f"{kind} c[{chains}][{sums}] = {{}}; u32 a[6] = {{threadIdx.x, 1, 2, 3, 4, 5}};"
            finish = (
                f"{kind} sum = 0;\n#pragma unroll\nfor (int i = 0; i < {chains * sums}; ++i) "
                f"sum += c[i / {sums}][i % {sums}];\n*({kind}*)(sink + threadIdx.x) = sum;"
            )
            text = loop(body, setup, finish)
            if chains == 1:
                yield Bench("mma", f"{shape} {name} latency", text, ops=32, constant="hmma_latency")
                continue
            for warps in (1, 2, 4) if chains == 4 else (1,):
                yield Bench(
                    "mma", f"{shape} {name} interval, {warps} warps a sub-core, {chains} chains", text,
                    threads=128 * warps, ops=32 * warps, constant=constant, predict=chains == 4,
                )  # fmt: skip


def product(n: int, a: str = "ss", kind: str = "fp16", sums: str = "f32") -> str:
    """Return one wgmma of `n` columns as an asm statement that sums into d."""
    registers = n // 4 if sums == "f16" else n // 2
    letter = {"f32": "f", "f16": "r", "s32": "r"}[sums]
    types, depth = {
        "fp16": ("f16", 16),
        "bf16": ("bf16", 16),
        "tf32": ("tf32", 8),
        "fp8": ("e4m3", 32),
        "int8": ("s8", 32),
    }[kind]
    outs = ", ".join(f"%{i}" for i in range(registers))
    results = ", ".join(f'"+{letter}"(d[{i}])' for i in range(registers))
    r = registers
    scales = "" if kind == "int8" else ", 1, 1"
    transposed = depth == 16
    if a == "ss":
        given, inputs, on = f"%{r}, %{r + 1}", '"l"(da + 2 * (@ & 3)), "l"(db + 2 * (@ & 3))', r + 2
        scales += ", 0, 0" if transposed else ""
    else:
        given = f"{{%{r}, %{r + 1}, %{r + 2}, %{r + 3}}}, %{r + 4}"
        inputs, on = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db + 2 * (@ & 3))', r + 5
        scales += ", 0" if transposed else ""
    return (
        f'asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{on}, 0;\\n'
        f'wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{sums}.{types}.{types} {{{outs}}}, {given}, p{scales};\\n}}"\n'
        f' : {results} : {inputs}, "r"(accumulate));\n'
    )


def sums_of(n: int, sums: str = "f32") -> tuple[str, str]:
    """Return the declaration of d and the statement that stores its sum."""
    kind, registers = {"f32": ("float", n // 2), "f16": ("u32", n // 4), "s32": ("u32", n // 2)}[sums]
    declared = f"{kind} d[{registers}];\n#pragma unroll\nfor (int i = 0; i < {registers}; ++i) d[i] = 0;\n"
    letter = "f" if kind == "float" else "r"
    # The empty asm keeps the sum behind the wait; else ptxas would wait after every product.
    stored = (
        f"{kind} sum = 0;\n#pragma unroll\nfor (int i = 0; i < {registers}; ++i) "
        f'asm volatile("" : "+{letter}"(d[i]) :: "memory");\n'
        f"#pragma unroll\nfor (int i = 0; i < {registers}; ++i) sum += d[i];\n"
        f"*({kind}*)(sink + blockIdx.x * blockDim.x + threadIdx.x) = sum;"
    )
    return declared, stored


TILES = """
for (int i = threadIdx.x; i < 24576; i += blockDim.x) ((u32*)s)[i] = 0;
asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
__syncthreads();
u64 da = matrix(at(s)), db = matrix(at(s) + 32768); (void)da;
int accumulate = q + 1; u32 a[4] = {1, 2, 3, 4}; (void)a;
"""
TILES_BYTES = 98304


def many(n: int, count: int, **kinds: str) -> str:
    return "".join(product(n, **kinds).replace("@", str(j)) for j in range(count))


def steady(n: int, count: int = 8, threads: int = 128, **kinds: str) -> str:
    """Return a kernel that commits `count` products a turn and waits for those of the turn before."""
    declared, stored = sums_of(n, kinds.get("sums", "f32"))
    body = f"fence();\n{many(n, count, **kinds)}commit();\npending<1>();\n"
    return loop(body, declared + TILES, f"pending<0>();\n{stored}", threads=threads)


def wgmma() -> Iterator[Bench]:
    common: dict[str, Any] = {"group": "wgmma", "shared": TILES_BYTES}
    per_column = "hgmma_clocks_per_column x N"
    for n in (8, 16, 32, 64, 96, 128, 192, 256):
        most = 4 if n <= 128 else 3 if n <= 192 else 2
        for a in ("ss", "rs"):
            for groups in (1, 2, 4) if n in (64, 128) and a == "ss" else (1, 2):
                if groups > most:
                    continue
                yield Bench(
                    name=f"n{n} {a} fp16, {groups} warpgroups: clocks of the SM each", threads=128 * groups,
                    text=steady(n, a=a, threads=128 * groups), ops=8 * groups, constant=per_column,
                    expect={"HGMMA": 8}, **common,
                )  # fmt: skip
            declared, stored = sums_of(n)
            body = f"fence();\n{many(n, 1, a=a)}commit();\npending<0>();\n"
            yield Bench(
                name=f"n{n} {a} fp16, alone, from fence to wait", threads=128, constant="hgmma_latency + N/2",
                text=loop(body, declared + TILES, stored, threads=128), expect={"HGMMA": 1}, **common,
            )  # fmt: skip
    for n in (128, 256):
        for kind, sums in (("bf16", "f32"), ("fp16", "f16"), ("tf32", "f32"), ("fp8", "f32"), ("int8", "s32")):
            for groups in (1, 2):
                yield Bench(
                    name=f"n{n} ss {kind} summed in {sums}, {groups} warpgroups", threads=128 * groups,
                    text=steady(n, threads=128 * groups, kind=kind, sums=sums), ops=8 * groups, constant=per_column,
                    **common,
                )  # fmt: skip
    for n in (64, 128):
        declared, stored = sums_of(n)
        body = f"fence();\n{many(n, 8)}commit();\npending<0>();\n"
        yield Bench(
            name=f"n{n} ss fp16, eight, from fence to wait", threads=128, constant="hgmma_latency + 8 N/2",
            text=loop(body, declared + TILES, stored, threads=128), **common,
        )  # fmt: skip
        apart = f"fence();\n{many(n, 1)}commit();\n" * 8 + "pending<0>();\n"
        yield Bench(
            name=f"n{n} ss fp16, eight, each with a fence and a commit, to one wait", threads=128,
            text=loop(apart, declared + TILES, stored, threads=128), **common,
        )  # fmt: skip
    yield Bench(
        name="commit and wait with nothing under way", threads=128, ops=8, **common,
        text=loop("commit();\npending<0>();\n" * 8, TILES, threads=128),
    )  # fmt: skip
    yield Bench(
        name="wait with nothing under way", threads=128, ops=8, **common,
        text=loop("pending<0>();\n" * 8, TILES, threads=128),
    )  # fmt: skip
    for n, a in ((8, "ss"), (64, "ss"), (128, "ss"), (256, "ss"), (64, "rs"), (128, "rs")):
        # ptxas takes minutes for a hundred products of 256 columns in one kernel.
        steps = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16) if n <= 64 else (1, 2, 4, 6, 7, 8, 9, 11)
        steps = steps if n <= 128 else (1, 2, 4, 8)
        declared, stored = sums_of(n)
        text = ladder(
            steps, product(n, a=a), declared + TILES + "fence();\n", "commit();\npending<0>();", stored, threads=128
        )
        yield Bench(
            name=f"n{n} {a} fp16: clocks until k are issued", kind="ladder", steps=steps, threads=128, n=(16, 16),
            text=text, constant="hgmma_issue, hgmma_issue_shared, hgmma_issue_registers", predict=False, **common,
            expect={"HGMMA": sum(steps)},
        )  # fmt: skip


# ── tensor cores beside other work ──────────────────────────────────────────────────────────────────────────────────

SIDES = ("ex2", "fma", "lop3", "fmnmx", "f2fp", "imad", "shfl", "hfma2")


def side_work(name: str, count: int) -> str:
    each = 2 if name == "fmnmx" else 1
    return "".join(operation(name, i % 8) for i in range(count // each))


def beside_products(n: int, a: str, groups: int, declared: str, turn: str, end: str) -> str:
    """Return a kernel of which one warpgroup multiplies for q turns, and `groups` others repeat n times `turn`."""
    sums, stored = sums_of(n)
    stored = stored.replace("sink +", "sink + 8192 +")
    # q counts the turns here, so it cannot choose whether products accumulate
    tiles = TILES.replace("q + 1", "n | 1")
    return kernel(f"""{tiles}
u64 t0, t1;
if (threadIdx.x < 128) {{
  if (!p) return;
  {sums}
  asm volatile("bar.sync 1, {128 * (groups + 1)};" ::: "memory");
  t0 = now();
  #pragma unroll 1
  for (int i = 0; i < q; ++i) {{
    fence();
    {many(n, 8, a=a)}
    commit();
    pending<1>();
    if (threadIdx.x == 0) out[64 + i] = now();
  }}
  t1 = now();
  pending<0>();
  {stored}
}} else {{
  {declared}
  if (p) asm volatile("bar.sync 1, {128 * (groups + 1)};" ::: "memory");
  if (p) pause(2000);
  t0 = now();
  #pragma unroll 1
  for (int i = 0; i < n; ++i) {{
    {turn}
  }}
  t1 = now();
  {end}
}}
record(out, t0, t1);""", threads=128 * (groups + 1))  # fmt: skip


def beside() -> Iterator[Bench]:
    """A warpgroup keeps the tensor cores full for q turns, others repeat n turns of another instruction."""
    cases = [(name, 128, "ss", 1) for name in SIDES]
    cases += [("ex2", n, "ss", 1) for n in (64, 176, 192, 256)] + [("ex2", n, "rs", 1) for n in (128, 176)]
    cases += [("ex2", 128, "ss", 2), ("fma", 192, "ss", 1), ("fma", 256, "ss", 1), ("fma", 128, "rs", 1)]
    cases += [("ex2", 192, "ss", 2), ("lop3", 256, "ss", 1), ("f2fp", 192, "ss", 1)]
    for name, n, a, groups in cases:
        text = beside_products(n, a, groups, operands(name, 8), side_work(name, 64), total(name, 8))
        yield Bench(
            "beside", f"{name} of {groups} warps a sub-core beside n{n} {a}", text, kind="beside", n=(24, 96),
            threads=128 * (groups + 1), shared=TILES_BYTES, ops=64 * groups, steps=(8 * n // 2,), predict=False,
            constant="hgmma_mufu_loss" if name == "ex2" else "", expect={"HGMMA": 8, ARITHMETIC[name][3]: 60},
        )  # fmt: skip
    yield from mixes()


def mixes() -> Iterator[Bench]:
    """Two warpgroups of which one multiplies and one has `share` as many clocks of MUFU's: the clocks of both."""
    for n, share in ((64, 1.0), (128, 0.5), (128, 0.75), (128, 1.0), (192, 0.5), (192, 1.0), (256, 0.5), (256, 1.0)):
        declared, stored = sums_of(n)
        count = int(share * 8 * n / 2 / 8)
        text = kernel(f"""{TILES}
u64 t0, t1;
__syncthreads();
if (threadIdx.x < 128) {{
  {declared}
  t0 = now();
  #pragma unroll 1
  for (int i = 0; i < n; ++i) {{
    fence();
    {many(n, 8)}
    commit();
    pending<1>();
  }}
  pending<0>();
  t1 = now();
  {stored}
}} else {{
  {operands("ex2", 8)}
  t0 = now();
  #pragma unroll 1
  for (int i = 0; i < n; ++i) {{
    {side_work("ex2", count)}
  }}
  t1 = now();
  {total("ex2", 8).replace("sink +", "sink + 8192 +")}
}}
record(out, t0, t1);""", threads=256)  # fmt: skip
        yield Bench(
            "beside", f"8 x n{n} ss in one warpgroup, MUFU work of {share:g} of its clocks in another", text,
            threads=256, shared=TILES_BYTES, constant="hgmma_mufu_loss", n=(32, 128),
            expect={"HGMMA": 8, "MUFU": count},
        )  # fmt: skip


# ── L2 and DRAM ─────────────────────────────────────────────────────────────────────────────────────────────────────


def memory() -> Iterator[Bench]:
    body = 'asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(x) :: "memory");\n' * 8
    text = loop(body, "u64 x = (u64)data;", "sink[threadIdx.x] = (u32)x;")
    for size, name in ((MB, "1 MB"), (16 * MB, "16 MB"), (32 * MB, "32 MB")):
        yield Bench(
            "memory", f"L2 hit, latency, {name}", text, kind="chase", ops=8, constant="l2_latency", data=size,
            chase=size // 4096, n=(256, 768), predict=False,
        )  # fmt: skip
    for size, name in ((256 * MB, "256 MB"), (512 * MB, "512 MB")):
        yield Bench(
            "memory", f"DRAM, latency, {name}", text, kind="cold", ops=8, constant="dram_latency", data=size,
            chase=size // 65536, n=(256, 1024), predict=False,
        )  # fmt: skip
    each = kernel("""
u64 x = (u64)data;
#pragma unroll 1
for (int turn = 0; turn < 2; ++turn)
  #pragma unroll 1
  for (int i = 0; i < n; ++i) {
    u64 t0 = now();
    asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(x) :: "memory");
    if (x == 1) sink[0] = 1;
    u64 t1 = now();
    out[i] = t1 - t0;
  }
sink[threadIdx.x] = (u32)x;""")
    yield Bench(
        "memory", "L2 hit, each of 2048 lines (near and far)", each, kind="chase_samples", threads=1, n=(2048, 2048),
        constant="l2_latency", data=MB, chase=512, predict=False,
    )  # fmt: skip
    yield from second_level_rates()
    yield from dram_rates()


def second_level_rates() -> Iterator[Bench]:
    loads = "".join(
        f'asm volatile("ld.global.L1::no_allocate.v4.u32 {{%0, %1, %2, %3}}, [%4];" : "=r"(y{j}.x), "=r"(y{j}.y), '
        f'"=r"(y{j}.z), "=r"(y{j}.w) : "l"(a + {j * 8192}) : "memory");\n'
        for j in range(4)
    )
    folded = " ".join(f"x ^= y{j}.x ^ y{j}.y ^ y{j}.z ^ y{j}.w;" for j in range(4))
    body = (
        f"const char* a = mine + (size_t)at32 * 32768 + threadIdx.x * 16; if (++at32 == p) at32 = 0;\n{loads}{folded}"
    )
    setup = "u32 x = 0; int at32 = 0; uint4 y0, y1, y2, y3; const char* mine = data + (size_t)blockIdx.x * q * 32768;"
    text = loop(body, setup, "sink[blockIdx.x * blockDim.x + threadIdx.x] = x;", threads=512)
    common: dict[str, Any] = {"group": "rates", "grid": SMS, "shared": SHARED, "unit": "bytes/clock, SM"}
    for chunks in (1, 2, 4, 6, 8, 9, 10, 12, 16, 24):
        size = chunks * SMS * 32768
        yield Bench(
            name=f"loads, private lines, {size / 1e6:.0f} MB", text=text, threads=512, n=(48, 192), p=chunks, q=chunks,
            bytes=32768, constant="l2_private_bytes_per_clock" if size < 45e6 else "", data=size,
            predict=chunks in (8, 24), expect={"LDG": 4}, **common,
        )  # fmt: skip
    for size in (1, 4, 16, 32, 48, 100):
        chunks = size * MB // 32768
        yield Bench(
            name=f"loads, the same lines in all SMs, {size} MB", text=text, threads=512,
            n=(max(128, chunks), max(384, 2 * chunks)), p=chunks, q=0, bytes=32768,
            constant="l2_bytes_per_clock" if size <= 32 else "", data=size * MB, predict=size == 16, **common,
        )  # fmt: skip


def dram_rates() -> Iterator[Bench]:
    start = "size_t at16 = (size_t)blockIdx.x * blockDim.x + threadIdx.x, all = (size_t)n * 65536, "
    start += "step = (size_t)gridDim.x * blockDim.x; uint4 x = {}; uint4* to = (uint4*)data; (void)to;\n"
    turns = "#pragma unroll 8\nfor (size_t i = at16; i < all; i += step) "
    end = "sink[at16] = x.x ^ x.y ^ x.z ^ x.w;"
    codes = {
        "read": (f"{turns}{{ uint4 y = to[i]; x.x ^= y.x; x.y ^= y.y; x.z ^= y.z; x.w ^= y.w; }}", 1),
        "write": (f"{turns}to[i] = uint4{{(u32)i, 1, 2, 3}};", 1),
        "copy": (f"{turns}to[i + all] = to[i];", 2),
    }
    for name, (code, factor) in codes.items():
        yield Bench(
            "rates", f"DRAM {name}, 1 GiB", kernel(start + code + end, threads=512), kind="events", grid=SMS * 4,
            threads=512, n=(1024, 1024), bytes=factor << 30, unit="GB/s", constant="dram_efficiency x 3350",
            data=factor << 30, predict=False,
        )  # fmt: skip


# ── TMA ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def tma() -> Iterator[Bench]:
    start = (
        "if (threadIdx.x == 0) {\n#pragma unroll\nfor (int i = 0; i < 16; ++i) bar_init(at(s + 8 * i), 1);\n"
        "init_fence(); }\n__syncthreads();\n"
    )
    for rows in (8, 32, 64, 128, 256):
        text = kernel(
            f"""{start}if (threadIdx.x == 0) {{
int row = 0;
#pragma unroll 1
for (int i = 0; i < 2 * n; ++i) {{
  u64 t0 = now();
  expect(at(s), {rows * 128});
  load_box(at(s + 1024), map, at(s), row);
  wait(at(s), i & 1);
  u64 t1 = now();
  row = i + 1 == n ? 0 : row + {rows};
  if (i >= n) out[i - n] = t1 - t0;
}} }}""",
            tensor_map=True,
        )
        yield Bench(
            "tma", f"box of {rows * 128} bytes, from expect_tx until the wait is over", text, kind="samples",
            n=(32, 32), box=rows, data=rows * 128 * 32, shared=rows * 128 + 1024, constant="tma_latency", predict=False,
        )  # fmt: skip
    bulk = kernel(
        f"""{start}if (threadIdx.x == 0) {{
const char* from = data;
#pragma unroll 1
for (int i = 0; i < 2 * n; ++i) {{
  u64 t0 = now();
  expect(at(s), 8192);
  load_bulk(at(s + 1024), from, 8192, at(s));
  wait(at(s), i & 1);
  u64 t1 = now();
  from = i + 1 == n ? data : from + 8192;
  if (i >= n) out[i - n] = t1 - t0;
}} }}"""
    )
    yield Bench(
        "tma", "bulk copy of 8192 bytes without a map, until the wait is over", bulk, kind="samples", n=(32, 32),
        data=8192 * 32, shared=16384, constant="tma_latency", predict=False,
    )  # fmt: skip
    steps = (1, 2, 3, 4, 6, 8, 12, 16)
    text = ladder(
        steps, "if (threadIdx.x == 0) load_box(at(s + 1024 + @ * 1024), map, at(s), @ * 8);\n",
        f"{start}int phase = 0;", "", tensor_map=True,
    )  # fmt: skip
    # The phase may only end when all boxes have been announced, which happens behind the timed part.
    for number, step in enumerate(steps):
        text = text.replace(
            f"\nif (threadIdx.x == 0) out[{number} * n + i]",
            f"if (threadIdx.x == 0) {{ expect(at(s), {step * 1024}); wait(at(s), phase); }} phase ^= 1;\n"
            f"if (threadIdx.x == 0) out[{number} * n + i]",
        )
    yield Bench(
        "tma", "boxes of 1024 bytes: clocks until k are issued", text, kind="ladder", steps=steps, n=(16, 16), box=8,
        data=1 << 16, shared=1024 + 16 * 1024, constant="tma_issue", predict=False, expect={"UTMALDG": sum(steps)},
    )  # fmt: skip
    yield from tma_rates(start)
    yield from multicasts(start)


def tma_rates(start: str) -> Iterator[Bench]:
    def text(stages: int, rows: int) -> str:
        issue = f"expect(at(s + 8 * j), {rows * 128}); load_box(at(s + 1024 + j * {rows * 128}), map, at(s + 8 * j), "
        issue += f"first + box * {rows}); if (++box == p) box = 0;"
        return kernel(
            f"""{start}if (threadIdx.x == 0) {{
int first = blockIdx.x * q * {rows}, box = 0;
u64 t0 = now();
#pragma unroll
for (int j = 0; j < {stages}; ++j) {{ {issue} }}
#pragma unroll 1
for (int i = 0; i < n; ++i) {{
#pragma unroll
  for (int j = 0; j < {stages}; ++j) {{ wait(at(s + 8 * j), i & 1); {issue} }}
}}
u64 t1 = now();
#pragma unroll
for (int j = 0; j < {stages}; ++j) wait(at(s + 8 * j), n & 1);
record(out, t0, t1); }}""",
            tensor_map=True,
        )

    def bench(stages: int, rows: int, grid: int, boxes: int, private: bool, constant: str, *, predict: bool) -> Bench:
        size = boxes * rows * 128 * (grid if private else 1)
        lines = "private lines" if private else "the same lines in all"
        turns = max(48, -(-4 * 64 * 64 // (stages * rows)))
        least = -(-boxes // stages)
        return Bench(
            "tma", f"{stages} boxes of {rows * 128} bytes in flight, {grid} SMs, {lines}, {size / 1e6:.1f} MB",
            text(stages, rows), grid=grid, threads=32, shared=max(SHARED, 1024 + stages * rows * 128),
            n=(max(turns // 2, least), max(2 * turns, 2 * least)), p=boxes, q=boxes if private else 0, box=rows,
            ops=stages, bytes=rows * 128, unit="bytes/clock, SM", constant=constant, data=size, predict=predict,
        )  # fmt: skip

    for rows, counts in ((32, (1, 2, 4, 8, 12, 16)), (64, (1, 2, 3, 4, 6, 8, 12)), (128, (1, 2, 3, 4, 6, 8, 12))):
        for stages in counts:
            yield bench(stages, rows, 1, 16, True, "tma_bytes_per_clock, tma_in_flight_bytes", predict=rows == 64)
    for stages in (1, 2, 4, 6, 8):
        yield bench(stages, 64, SMS, 16, True, "l2_private_tma_bytes_per_clock", predict=False)
    for boxes in (4, 8, 16, 24, 32, 40, 48, 64, 96):
        yield bench(8, 64, SMS, boxes, True, "l2_private_tma_bytes_per_clock", predict=boxes in (32, 96))
    for megabytes in (1, 4, 16, 32, 100):
        yield bench(8, 64, SMS, megabytes * 128, False, "l2_bytes_per_clock", predict=megabytes == 16)


def multicasts(start: str) -> Iterator[Bench]:
    for blocks in (2, 4):
        mask = (1 << blocks) - 1
        for name, share in (("one block loads the box for all", 1), ("each block loads its part for all", blocks)):
            rows = 64 // share
            issue = (
                'asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes'
                '.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" '
                f':: "r"(at(s + 1024) + part * {rows * 128}), "l"((u64)&map), "r"(0), '
                f'"r"(i % 16 * 64 + part * {rows}), '
                f'"r"(at(s)), "h"((unsigned short){mask}) : "memory");'
            )
            who = "blockIdx.x % CLUSTER == 0" if share == 1 else "true"
            text = kernel(
                f"""{start}int part = {"0" if share == 1 else f"blockIdx.x % {blocks}"};
#pragma unroll 1
for (int i = 0; i < 2 * n; ++i) {{
  if (threadIdx.x == 0) expect(at(s), 8192);
  cluster_sync();
  u64 t0 = now();
  if (threadIdx.x == 0 && {who.replace("CLUSTER", str(blocks))}) {{ {issue} }}
  wait(at(s), i & 1);
  u64 t1 = now();
  if (i >= n && threadIdx.x == 0) out[blockIdx.x * n + i - n] = t1 - t0;
  cluster_sync();
}}""",
                tensor_map=True, cluster=blocks,
            )  # fmt: skip
            yield Bench(
                "tma", f"multicast of 8192 bytes to {blocks} blocks, {name}", text, kind="samples", n=(32, 32),
                box=rows, data=16 * 8192, shared=1024 + 8192, grid=blocks, cluster=blocks, steps=(blocks,),
                constant="multicast_latency + tma_latency", predict=False,
            )  # fmt: skip


# ── launches and clocks ─────────────────────────────────────────────────────────────────────────────────────────────


def launches() -> Iterator[Bench]:
    empty = kernel("if (n == -1) out[0] = 1;")
    yield Bench("launches", "empty kernels", empty, kind="launches", unit="µs", constant="launch_us", predict=False)
    for threads in (32, 128, 256, 1024):
        yield Bench(
            "launches", f"blocks of {threads} threads that end at once, clocks of an SM each", empty, kind="blocks",
            threads=threads, constant="block_start", predict=False,
        )  # fmt: skip
    yield Bench(
        "launches", "blocks of 128 threads with 64 KB of shared memory that end at once", empty, kind="blocks",
        threads=128, shared=64 << 10, constant="block_start", predict=False,
    )  # fmt: skip
    spin = kernel("if (threadIdx.x == 0) { u64 t0 = now(), g0 = nanoseconds(); while (now() - t0 < 4000000) {} "
                  "out[0] = now() - t0; out[1] = nanoseconds() - g0; }")  # fmt: skip
    yield Bench("launches", "clock of an idle GPU", spin, kind="mhz", unit="MHz", constant="boost_ghz", predict=False)


def power() -> Iterator[Bench]:
    """Bursts of products on random halves, one every p clocks or without a pause: the clock that the board sustains."""
    n, count = 256, 8
    declared, stored = sums_of(n)
    random = (
        "for (u32 i = threadIdx.x; i < 24576; i += blockDim.x) { u32 h = (i + blockIdx.x * 77777) * 2654435761u;\n"
        "h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;\n"
        "((u32*)s)[i] = (h & 0x83ff83ffu) | 0x38003800u; }\n"
    )
    tiles = TILES.replace("for (int i = threadIdx.x; i < 24576; i += blockDim.x) ((u32*)s)[i] = 0;", random)
    text = kernel(f"""{declared}{tiles}
u64 g0 = nanoseconds(), t0 = now(), next = t0, done = 0;
#pragma unroll 1
while (!__syncthreads_or(threadIdx.x == 0 && nanoseconds() - g0 >= (u64)n * 1000)) {{
  #pragma unroll 1
  for (int i = 0; i < 8; ++i) {{
    next += p;
    if (q) {{
      #pragma unroll 1
      for (int j = 0; j < 4; ++j) {{
        fence();
        accumulate = j;
        {many(n, count)}
        commit();
        pending<0>();
      }}
      ++done;
    }}
    if (p) while ((long long)(next - now()) > 0) asm volatile("nanosleep.u32 200;" ::: "memory");
  }}
}}
u64 t1 = now(), g1 = nanoseconds();
if (threadIdx.x == 0) {{ u64* to = out + blockIdx.x * 4; to[0] = t1 - t0; to[1] = g1 - g0; to[2] = done; to[3] = 0; }}
{stored}""", threads=256)  # fmt: skip
    for duty in (100, 75, 50, 37, 25, 12, 0):
        clocks = 2 * 4 * count * n // 2
        yield Bench(
            "power", f"tensor cores busy for {duty} % of the time", text, kind="power", grid=SMS, threads=256,
            shared=TILES_BYTES, unit="MHz", constant="boost_ghz, power_knee, power_base", n=(20000, 20000),
            p=clocks * 100 // duty * (duty < 100) if duty else 65536, q=int(duty > 0), steps=(clocks,),
            predict=False, expect={"HGMMA": count},
        )  # fmt: skip


GROUPS: dict[str, Callable[[], Iterator[Bench]]] = {
    "launches": launches, "wgmma": wgmma, "beside": beside, "tma": tma, "memory": memory, "mma": mma,
    "arithmetic": arithmetic, "shared": shared_memory, "barriers": barriers, "power": power,
}  # fmt: skip
"""what measures, in the order of its worth; `memory` yields the group `rates` too"""


# ── preparation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prepare(folder: Path, seconds: float, groups: dict[str, Callable[[], Iterator[Bench]]] = GROUPS) -> int:
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


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Gpu:
    """The device through the driver: memory, launches, and what they leave in `out`."""

    def __init__(self, folder: Path) -> None:
        from evoengine.devices import cuda_api

        self.api = cuda_api
        cuda_api._PROTOTYPES |= {
            "cuMemAlloc_v2": (ctypes.c_void_p, ctypes.c_size_t),
            "cuMemFree_v2": (ctypes.c_uint64,),
            "cuMemcpyDtoH_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t),
            "cuCtxSynchronize": (),
        }
        cuda_api.use_primary_context()
        self.archive = zipfile.ZipFile(folder / ARCHIVE)
        self.functions: dict[tuple[str, int], Any] = {}
        self.out, self.sink = self.allocate(1 << 20), self.allocate(1 << 22)
        self.data, self.data_bytes, self.held = 0, 0, (0, 0)

    def allocate(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        self.api.call("cuMemAlloc_v2", ctypes.byref(pointer), size)
        self.api.memset(pointer.value, 0, size)
        return pointer.value

    def function(self, bench: Bench, key: str) -> Any:
        """Return the kernel; where the driver refuses the cubin, from the source by this machine's own compiler."""
        wanted = (key, bench.shared)
        if wanted not in self.functions:
            try:
                module = self.api.Module(self.archive.read(f"{key}.cubin"))
            except self.api.CudaError as error:
                print(f"{bench.name}: {error}; compiling it here", flush=True)
                module = self.api.Module(compiled_here(self.archive.read(f"{key}.cu").decode()))
            function = module.function("k")
            function.allow_shared(bench.shared)
            self.functions[wanted] = function
        return self.functions[wanted]

    def buffer(self, bench: Bench) -> None:
        """Let `data` be what the bench reads: zeros, or a chain of pointers in random order."""
        wanted = (bench.data, bench.chase)
        if self.held == wanted or (not bench.chase and not self.held[1] and bench.data <= self.data_bytes):
            return
        if bench.data > self.data_bytes:
            if self.data:
                self.api.call("cuMemFree_v2", self.data)
            self.data, self.data_bytes = self.allocate(bench.data), bench.data
        self.api.memset(self.data, 0, self.data_bytes)
        if bench.chase:
            count = bench.data // bench.chase
            order = np.concatenate([[0], 1 + np.random.default_rng(1).permutation(count - 1)])
            words = np.zeros(bench.data // 8, np.uint64)
            words[order * (bench.chase // 8)] = self.data + np.roll(order, -1) * bench.chase
            self.api.call("cuMemcpyHtoD_v2", self.data, words.tobytes(), bench.data)
        self.held = wanted

    def launch(self, bench: Bench, key: str, n: int, p: int, q: int, grid: int | None = None, stream: int = 0) -> None:
        values: list[Any] = [np.uint64(self.out), np.uint64(self.sink), np.uint64(self.data)]
        values += [np.int32(n), np.int32(p), np.int32(q)]
        if bench.box:
            values.append(self.tensor_map(bench))
        parameters = self.api.Parameters(values)
        size = (grid or bench.grid, 1, 1)
        self.function(bench, key).launch(size, (bench.threads, 1, 1), bench.shared, parameters, stream)

    def tensor_map(self, bench: Bench) -> bytes:
        """Return the map of `data` as rows of 64 halves, swizzled by 128 bytes."""
        memory = ctypes.create_string_buffer(256)
        start = -ctypes.addressof(memory) % 128
        dims, box = (ctypes.c_uint64 * 2)(64, bench.data // 128), (ctypes.c_uint32 * 2)(64, bench.box)
        strides, ones = (ctypes.c_uint64 * 2)(128, 128), (ctypes.c_uint32 * 2)(1, 1)
        self.api.call(
            "cuTensorMapEncodeTiled", ctypes.addressof(memory) + start, 6, 2, self.data, dims, strides, box, ones,
            0, 3, 3, 0,
        )  # fmt: skip
        return memory.raw[start : start + 128]

    def wait(self) -> None:
        self.api.call("cuCtxSynchronize")

    def read(self, words: int) -> np.ndarray:
        """Return the first words of `out` [words] uint64, when all launches have ended."""
        self.wait()
        found = np.empty(words, np.uint64)
        self.api.call("cuMemcpyDtoH_v2", found.ctypes.data, self.out, found.nbytes)
        return found

    def sum_of_sink(self) -> int:
        found = np.empty(1 << 12, np.uint32)
        self.api.call("cuMemcpyDtoH_v2", found.ctypes.data, self.sink, found.nbytes)
        return int(found.sum(dtype=np.uint64))

    def spans(self, bench: Bench) -> np.ndarray:
        """Return from the first warp's start to the last one's end, [blocks] clocks."""
        warps = bench.threads // 32
        pairs = self.read(2 * bench.grid * warps).reshape(bench.grid, warps, 2).astype(np.int64)
        return (pairs[:, :, 1].max(1) - pairs[:, :, 0].min(1)).astype(float)

    def timed(self, call: Callable[[], None]) -> float:
        """Return the microseconds of what `call` queues."""
        start, end = self.api.Event(), self.api.Event()
        start.record()
        call()
        end.record()
        self.wait()
        return float(start.elapsed_us(end))


def compiled_here(text: str) -> bytes:
    """Return the cubin by this machine's own NVRTC, which CuPy finds."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    nvrtc.compileProgram(program, ("--gpu-architecture=sm_90a", "--std=c++17"))
    return bytes(nvrtc.getCUBIN(program)) + b"\0"  # CuPy omits the last byte, a zero


def of(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"value": statistics.median(values), "min": min(values), "max": max(values)}


def slope(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    """Take the slope of two lengths; for kind `cold` with other lines in the L2 before each launch."""
    flush = gpu.allocate(FLUSHED) if bench.kind == "cold" else 0
    gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
    found, spans = [], []
    for _ in range(REPEATS):
        clocks = []
        for n in bench.n:
            if flush:
                gpu.api.memset(flush, 0, FLUSHED)
            gpu.launch(bench, key, n, bench.p, bench.q)
            clocks.append(float(np.median(gpu.spans(bench))))
        spans.append(clocks)
        found.append(value_of(bench, clocks))
    if flush:
        gpu.api.call("cuMemFree_v2", flush)
    return {**of(found), "spans": spans[-1]}


def ladder_times(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    n = bench.n[0]
    for _ in range(2):
        gpu.launch(bench, key, n, bench.p, bench.q)
    times = gpu.read(n * len(bench.steps)).reshape(-1, n)
    return {"ladder": {k: of([float(x) for x in row]) for k, row in zip(bench.steps, times, strict=True)}}


def samples(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    for _ in range(2):
        gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
    times = gpu.read(bench.n[0] * bench.grid).astype(float)
    histogram = Counter(int(x) // 8 * 8 for x in times)
    return {**of(list(times)), "histogram of 8 clocks": dict(sorted(histogram.items()))}


def side_by_side(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    """Time the side work alone and beside products, and the products between its start and its end."""
    alone, both, turn = [], [], []
    for beside_products in (0, 1):
        turns = 64
        for _ in range(REPEATS):
            clocks = []
            for n in bench.n:
                while True:
                    gpu.launch(bench, key, n, beside_products, turns)
                    words = gpu.read(64 + turns).astype(np.int64)
                    pairs = words[: 2 * bench.threads // 32].reshape(-1, 2)
                    side = (int(pairs[4:, 0].min()), int(pairs[4:, 1].max()))
                    if not beside_products or words[63 + turns] > side[1] or turns > 1500:
                        break
                    turns *= 2
                clocks.append(float(side[1] - side[0]))
                if beside_products and n == bench.n[1]:
                    stamps = words[64 : 64 + turns]
                    stamps = stamps[(stamps > side[0]) & (stamps < side[1])]
                    turn.append(float(stamps[-1] - stamps[0]) / max(1, len(stamps) - 1))
            (both if beside_products else alone).append(value_of(bench, clocks))
    loss = 1 - statistics.median(alone) / statistics.median(both)
    return {
        **of(both), "alone": of(alone), "loss of rate": loss, "clocks of eight products": of(turn),
        "their clocks by the data sheet": bench.steps[0], "turns": turns,
    }  # fmt: skip


def by_events(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
    times = [gpu.timed(lambda: gpu.launch(bench, key, bench.n[0], bench.p, bench.q)) for _ in range(REPEATS)]
    return of([bench.bytes / us / 1e3 for us in times])


def launch_times(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    function = gpu.function(bench, key)
    values = [np.uint64(gpu.out), np.uint64(gpu.sink), np.uint64(gpu.data), np.int32(0), np.int32(0), np.int32(0)]
    parameters = gpu.api.Parameters(values)

    def run(count: int, grid: int = 1, on: int = 0) -> None:
        for _ in range(count):
            function.launch((grid, 1, 1), (32, 1, 1), 0, parameters, on)

    run(10)
    graph = gpu.api.Graph(lambda on: run(200, on=on))
    wide = gpu.api.Graph(lambda on: run(200, grid=SMS, on=on))
    graph.launch()
    wide.launch()
    between = [gpu.timed(lambda: None) for _ in range(30)]
    single = [gpu.timed(lambda: run(1)) for _ in range(30)]
    return {
        **of([gpu.timed(graph.launch) / 200 for _ in range(REPEATS)]),
        "in a graph, 132 blocks": of([gpu.timed(wide.launch) / 200 for _ in range(REPEATS)]),
        "back to back in a stream": of([gpu.timed(lambda: run(1000)) / 1000 for _ in range(REPEATS)]),
        "two events with nothing between them": of(between),
        "one launch between two events": of(single),
    }


def block_starts(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    few, many_blocks = SMS * 100, SMS * 1000
    gpu.launch(bench, key, 0, 0, 0, grid=many_blocks)
    found = []
    for _ in range(REPEATS):
        times = [gpu.timed(lambda g=g: gpu.launch(bench, key, 0, 0, 0, grid=g)) for g in (few, many_blocks)]
        found.append((times[1] - times[0]) / 900 * 1980)
    return {**of(found), "at MHz": 1980}


def places_of(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
    return {"value": float(bench.grid), "min": 0.0, "max": 0.0, "places": [int(x) for x in gpu.read(bench.grid)]}


def idle_clock(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    found = []
    for _ in range(REPEATS):
        gpu.launch(bench, key, 0, 0, 0)
        clocks, nanoseconds = gpu.read(2).astype(float)
        found.append(clocks / nanoseconds * 1e3)
    return of(found)


def sustained(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    """Repeat launches for POWER_SECONDS, and report the last half: MHz, use of the tensor cores, watts."""
    board, rows = Board(), []
    start = time.monotonic()
    while time.monotonic() - start < POWER_SECONDS:
        gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
        gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
        time.sleep(0.025)
        reading = board.read()
        words = gpu.read(4 * SMS).reshape(SMS, 4).astype(float)
        clocks, nanoseconds, bursts = (float(np.median(words[:, i])) for i in range(3))
        use = bursts * bench.steps[0] / clocks
        rows.append({"MHz": clocks / nanoseconds * 1e3, "use": use, **reading})
    late = rows[len(rows) // 2 :]
    result: dict[str, Any] = of([row["MHz"] for row in late])
    result["use of the tensor cores"] = statistics.median(row["use"] for row in late)
    result["course"] = rows[:: max(1, len(rows) // 8)]
    for name in ("W", "NVML MHz", "°C"):
        if name in rows[-1]:
            result[name] = statistics.median(row[name] for row in late)
    return result


def clock_of(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    """Return the clock and the use of the tensor cores of launches of which each finds the GPU rested."""
    rows, board = [], Board()
    for _ in range(REPEATS):
        time.sleep(0.02)
        gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
        words = gpu.read(5 * bench.grid).astype(float)
        clocks, nanoseconds, turns, _ = np.median(words[: 4 * bench.grid].reshape(-1, 4), axis=0)
        rows.append((clocks / nanoseconds * 1e3, turns * bench.steps[0] / clocks, clocks / turns))
        side = float(np.median(words[4 * bench.grid :])) / clocks * 1e3
    mhz, use, turn = (statistics.median(row[i] for row in rows) for i in range(3))
    found = of([row[0] for row in rows]) if bench.kind == "clock" else of([row[2] for row in rows])
    more = {"MHz": mhz, "use of the tensor cores": use, "clocks of a turn": turn, "turns beside, in 1000 clocks": side}
    return {**found, **more, **board.read()}


def loaded_latency(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    """Return block 0's latency, and the bytes a clock and SM that the other blocks loaded meanwhile."""
    found, rates = [], []
    for _ in range(REPEATS):
        gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
        words = gpu.read(2 * bench.grid).astype(float)
        found.append(words[0] / bench.ops)
        turns, clocks = words[2::2], words[3::2]
        rates.append(float(np.median(turns * bench.bytes / clocks)) if bench.p >= 0 else 0.0)
    return {**of(found), "bytes/clock of each of the other SMs": statistics.median(rates)}


class Board:
    """What NVML's sensors say; nothing where there is no NVML. It only reads."""

    def __init__(self) -> None:
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
            self.device = ctypes.c_void_p()
            self.works = not self.nvml.nvmlInit_v2() and not self.nvml.nvmlDeviceGetHandleByIndex_v2(
                0, ctypes.byref(self.device)
            )
        except (OSError, AttributeError):
            self.works = False

    def read(self) -> dict[str, float]:
        if not self.works:
            return {}
        value, reasons, found = ctypes.c_uint(), ctypes.c_ulonglong(), {}
        for name, call, argument, scale in (
            ("W", "nvmlDeviceGetPowerUsage", None, 1e-3), ("NVML MHz", "nvmlDeviceGetClockInfo", 1, 1.0),
            ("°C", "nvmlDeviceGetTemperature", 0, 1.0),
        ):  # fmt: skip
            arguments = () if argument is None else (argument,)
            if not self.nvml[call](self.device, *arguments, ctypes.byref(value)):
                found[name] = value.value * scale
        with suppress(AttributeError):
            if not self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.device, ctypes.byref(reasons)):
                found["reasons"] = float(reasons.value)
        return found


KINDS: dict[str, Callable[[Gpu, Bench, str], dict[str, Any]]] = {
    "slope": slope, "chase": slope, "cold": slope, "ladder": ladder_times, "samples": samples, "chase_samples": samples,
    "beside": side_by_side, "events": by_events, "launches": launch_times, "blocks": block_starts,
    "mhz": idle_clock, "power": sustained, "clock": clock_of, "clock_turns": clock_of, "loaded": loaded_latency,
    "places": places_of,
}  # fmt: skip


def bench_of(entry: dict[str, Any]) -> Bench:
    own = {name: value for name, value in entry.items() if name in Bench.__dataclass_fields__}
    return Bench(**{**own, "text": "", "n": tuple(own["n"]), "steps": tuple(own["steps"])})


def measure_group(folder: Path, group: str, first: int) -> int:
    """Measure a group's benches from number `first` on, a line of JSON for each; the process of its own."""
    entries = [e for e in json.loads((folder / MANIFEST).read_text())["benches"] if e["group"] == group]
    gpu = Gpu(folder)
    for number, entry in enumerate(entries[first:], first):
        print(json.dumps({"begins": number}), flush=True)
        bench, start = bench_of(entry), time.monotonic()
        # A hung kernel blocks this thread in the driver; the parent goes on behind the bench in a new process.
        watchdog = threading.Timer(BENCH_SECONDS, os._exit, (3,))
        watchdog.start()
        try:
            gpu.buffer(bench)
            gpu.wait()
            result = KINDS[bench.kind](gpu, bench, entry["key"])
            result["sum"] = gpu.sum_of_sink()
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:300]}
        watchdog.cancel()
        result["seconds"] = round(time.monotonic() - start, 4)
        print(json.dumps({"number": number, "result": result}), flush=True)
        if "CUDA_ERROR" in result.get("error", ""):
            return 1
    return 0


def measure(folder: Path, out: Path, groups: Sequence[str]) -> int:
    """Measure all groups, each in processes of its own, and write FILE after each."""
    manifest = json.loads((folder / MANIFEST).read_text())
    results: dict[str, Any] = {"constants": manifest["constants"], "benches": [], "log": []}
    names = list(dict.fromkeys(entry["group"] for entry in manifest["benches"]))
    start = time.monotonic()
    with suppress(Exception):  # the groups' processes say what is wrong
        from evoengine.devices import cuda_api

        cuda_api.use_primary_context()  # keeps the driver initialised from one group's process to the next
    for group in [name for name in names if not groups or name in groups]:
        entries = [entry for entry in manifest["benches"] if entry["group"] == group]
        first, tries = 0, 0
        began = time.monotonic()
        while first < len(entries) and tries < 4:
            left = min(began + GROUP_SECONDS, start + ALL_SECONDS) - time.monotonic()
            if left < 1:
                results["log"].append(f"{group}: no time left for {len(entries) - first} benches")
                break
            done, reached, said = run_group(folder, group, first, left)
            results["log"] += [f"{group}: {line}" for line in said]
            for number, result in sorted(done.items()):
                entry = entries[number]
                results["benches"].append({**{name: entry[name] for name in KEPT}, **result})
                show(entry, result)
            first, tries = reached + 1, tries + 1
        results["seconds"] = time.monotonic() - start
        out.write_text(json.dumps(results, indent=1))
        print(f"-- {group}: {time.monotonic() - began:.1f} s, {results['seconds']:.1f} s in all", flush=True)
    return 0


def run_group(folder: Path, group: str, first: int, seconds: float) -> tuple[dict[int, dict[str, Any]], int, list[str]]:
    """Return the results by number, the last bench that was begun, and what the process said besides."""
    command = [sys.executable, __file__, "--from", str(folder), "--group", group, "--first", str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        text = process.communicate(timeout=seconds)[0]
        said = []
    except subprocess.TimeoutExpired:
        process.kill()
        text = process.communicate()[0]
        said = [f"killed after {seconds:.0f} s"]
    done, reached = {}, first - 1
    for line in text.splitlines():
        try:
            about = json.loads(line)
            if "begins" in about:
                reached = about["begins"]
            else:
                done[about["number"]] = about["result"]
        except (ValueError, TypeError, KeyError):
            said.append(line)
    return done, max(reached, first), said[-30:]


def show(entry: dict[str, Any], result: dict[str, Any]) -> None:
    text = f"{entry['group']:10} {entry['name'][:74]:74}"
    if "value" in result:
        text += f" {result['min']:9.2f} {result['value']:9.2f} {result['max']:9.2f} {entry['unit']}"
        text += f"; predicted {entry['predicted']:.2f}" if isinstance(entry["predicted"], float) else ""
        text += f"; loss {result['loss of rate']:.3f}" if "loss of rate" in result else ""
    elif "ladder" in result:
        text += " " + ", ".join(f"{k}: {row['value']:.0f}" for k, row in result["ladder"].items())
    else:
        text += " " + result["error"]
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=600, help="after which nothing more is predicted")
    parser.add_argument("--from", type=Path, dest="source", metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--groups", nargs="*", default=[], help="only these")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.prepare:
        return min(1, prepare(asked.prepare, asked.seconds))
    if asked.group:
        return measure_group(asked.source, asked.group, asked.first)
    if not asked.source or not asked.out:
        parser.error("give --prepare DIR, or --from DIR and --out FILE")
    return measure(asked.source, asked.out, asked.groups)


if __name__ == "__main__":
    sys.exit(main())
