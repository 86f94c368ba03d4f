"""Micro-benchmarks of an SM of an H100: instructions, control, barriers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.hopper_bench import Bench, loop

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
