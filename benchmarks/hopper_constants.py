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
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hopper_bench import MB, SHARED, SMS, Bench, kernel, loop, prepare
from benchmarks.hopper_gpu import measure, measure_group

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


def boxes_in_flight(first: str) -> str:
    """Return a kernel of one warp a block that keeps eight boxes of 8 KB in flight, n times.

    `first` declares `first`, the row that the block's boxes begin at, and `box`, the number of the next of its 32.
    """
    issue = (
        "expect(at(s + 8 * j), 8192); load_box(at(s + 1024 + j * 8192), map, at(s + 8 * j), first + box * 64); "
        "if (++box == 32) box = 0;"
    )
    return kernel(f"""if (threadIdx.x == 0) {{
#pragma unroll
for (int i = 0; i < 16; ++i) bar_init(at(s + 8 * i), 1);
init_fence(); }}
__syncthreads();
if (threadIdx.x == 0) {{
{first}
u64 t0 = now();
#pragma unroll
for (int j = 0; j < 8; ++j) {{ {issue} }}
#pragma unroll 1
for (int i = 0; i < n; ++i) {{
#pragma unroll
  for (int j = 0; j < 8; ++j) {{ wait(at(s + 8 * j), i & 1); {issue} }}
}}
u64 t1 = now();
#pragma unroll
for (int j = 0; j < 8; ++j) wait(at(s + 8 * j), n & 1);
record(out, t0, t1); }}""", tensor_map=True)  # fmt: skip


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
        return min(1, prepare(asked.prepare, asked.seconds, GROUPS))
    if asked.group:
        return measure_group(asked.source, asked.group, asked.first)
    if not asked.source or not asked.out:
        parser.error("give --prepare DIR, or --from DIR and --out FILE")
    return measure(asked.source, asked.out, asked.groups)


if __name__ == "__main__":
    sys.exit(main())
