"""Micro-benchmarks of what an H100's SMs copy and exchange: what `hopper_contention.py` leaves open.

    python benchmarks/hopper_exchange.py --prepare DIR            on any machine
    python benchmarks/hopper_constants.py --from DIR --out FILE   on an H100, which measures what any DIR holds

cp.async into rows of shared memory, loads and stores between the blocks of a cluster, arrivals there, launches of
clusters, instructions by what they read and write beside wgmmas, lines that SMs at a distance share, pieces of rows
that warps load of the DRAM.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hopper_bench import MB, SHARED, SMS, Bench, kernel, loop, prepare_command
from benchmarks.hopper_memory import FILL
from benchmarks.hopper_tensor import TILES, TILES_BYTES, beside_products, boxes_in_flight, product, sums_of

# ── cp.async ────────────────────────────────────────────────────────────────────────────────────────────────────────

COPY = (
    'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + {0} * step), "l"(from + {0} * far) '
    ': "memory");\n'
)
COMMIT = 'asm volatile("cp.async.commit_group;" ::: "memory");\n'


def pending(groups: int) -> str:
    return f'asm volatile("cp.async.wait_group {groups};" ::: "memory");\n'


def copy_setup(lanes: int, pad: int, swizzled: bool) -> str:
    """Return what places a thread's pieces: `lanes` of 16 bytes a row, rows `pad` bytes apart beyond their length.

    Rows lie 8 KB apart in memory, as those of a matrix do; a block has 256 KB of its own.
    """
    column = (
        f"(threadIdx.x % {lanes} ^ threadIdx.x / {lanes} % {min(8, lanes)})" if swizzled else f"threadIdx.x % {lanes}"
    )
    return (
        f"int rows = blockDim.x / {lanes}, step = rows * {lanes * 16 + pad}, far = rows * 8192;\n"
        f"u32 to = at(s) + threadIdx.x / {lanes} * {lanes * 16 + pad} + {column} * 16;\n"
        f"const char* from = data + (size_t)blockIdx.x * 128 + (size_t)(threadIdx.x / {lanes}) * 8192 "
        f"+ threadIdx.x % {lanes} * 16;\n"
    )


def copies() -> Iterator[Bench]:
    layouts = [
        (8, 0, True), (8, 0, False), (8, 16, False), (8, 32, False), (8, 64, False), (4, 0, True), (4, 16, False),
        (4, 64, False), (16, 0, True), (16, 16, False), (32, 16, False),
    ]  # fmt: skip
    for lanes, pad, swizzled in layouts:
        name = f"rows of {16 * lanes} bytes, {'swizzled' if swizzled else f'{pad} bytes apart'}"
        setup = copy_setup(lanes, pad, swizzled)
        four = "".join(COPY.format(j) for j in range(4)) + COMMIT
        for threads in (128, 256):
            text = loop(four + pending(2), setup, pending(0))
            for grid in (1, SMS):
                if threads == 128 and grid > 1:
                    continue
                yield Bench(
                    "copies", f"cp.async, {threads} threads, {name}, {grid} SMs: clocks of an SM each", text, grid=grid,
                    threads=threads, shared=SHARED, n=(64, 256), ops=4 * threads // 32, data=8 * MB,
                    constant="ldgsts", expect={"LDGSTS": 4}, predict=grid == 1,
                )  # fmt: skip
        if (lanes, pad) not in ((8, 0), (8, 16), (4, 16)) or (lanes == 8 and not pad and not swizzled):
            continue
        for count, threads in ((1, 32), (1, 128), (4, 128), (8, 128), (12, 128), (4, 256), (8, 256)):
            body = "".join(COPY.format(j) for j in range(count)) + COMMIT + pending(0) + "__syncthreads();\n"
            text = loop(body, setup)
            for grid in (1, SMS):
                yield Bench(
                    "copies", f"{count} cp.async of {threads} threads, wait, barrier, {name}, {grid} SMs: a turn", text,
                    grid=grid, threads=threads, shared=SHARED, n=(32, 128), data=8 * MB, constant="ldgsts",
                    expect={"LDGSTS": count}, predict=grid == 1,
                )  # fmt: skip
    yield from through_registers()
    yield from steps()


def through_registers() -> Iterator[Bench]:
    """The same by a load of 16 bytes and a store to shared memory."""
    for lanes, pad in ((8, 0), (8, 16)):
        setup = copy_setup(lanes, pad, pad == 0)
        loads = "".join(
            f'asm volatile("ld.global.cg.v4.u32 {{%0, %1, %2, %3}}, [%4];" : "=r"(y{j}.x), "=r"(y{j}.y), "=r"(y{j}.z), '
            f'"=r"(y{j}.w) : "l"(from + {j} * far) : "memory");\n'
            for j in range(4)
        )
        stores = "".join(
            f'asm volatile("st.shared.v4.u32 [%0], {{%1, %2, %3, %4}};" '
            f':: "r"(to + {j} * step), "r"(y{j}.x), "r"(y{j}.y), '
            f'"r"(y{j}.z), "r"(y{j}.w) : "memory");\n'
            for j in range(4)
        )
        text = loop(loads + stores + "__syncthreads();\n", setup + "uint4 y0, y1, y2, y3;\n")
        for grid in (1, SMS):
            yield Bench(
                "copies", f"4 loads and stores of 256 threads, barrier, {pad} bytes apart, {grid} SMs: a turn", text,
                grid=grid, threads=256, shared=SHARED, n=(32, 128), data=8 * MB, expect={"LDG": 4, "STS": 4},
                predict=grid == 1,
            )  # fmt: skip


def steps() -> Iterator[Bench]:
    """A k-step of a GEMM by mma.sync with one buffer: copies, wait, barrier, LDSM and products, barrier."""
    for pad in (0, 16):
        setup = copy_setup(8, pad, pad == 0) + (
            f"u32 rows_at = at(s) + (threadIdx.x / 32 * 16 + threadIdx.x % 16) * {128 + pad} "
            "+ threadIdx.x % 32 / 16 * 16;\n"
            "u32 m[8] = {}; float c[8][4] = {};\n"
        )
        copied = "".join(COPY.format(j) for j in range(8)) + COMMIT + pending(0) + "__syncthreads();\n"
        used = "".join(
            'asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : '
            f'"=r"(m[{4 * (k % 2)}]), "=r"(m[{4 * (k % 2) + 1}]), "=r"(m[{4 * (k % 2) + 2}]), '
            f'"=r"(m[{4 * (k % 2) + 3}]) : "r"(rows_at + {32 * k}) '
            ': "memory");\n'
            + "".join(
                f'asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%0,%1,%2,%3}}, {{%4,%5,%6,%7}}, '
                f'{{%8,%9}}, {{%0,%1,%2,%3}};" : "+f"(c[{j}][0]), "+f"(c[{j}][1]), "+f"(c[{j}][2]), "+f"(c[{j}][3]) : '
                f'"r"(m[{4 * (k % 2)}]), "r"(m[{4 * (k % 2) + 1}]), "r"(m[{4 * (k % 2) + 2}]), '
                f'"r"(m[{4 * (k % 2) + 3}]), '
                f'"r"(m[{4 * (k % 2) + j % 4}]), "r"(m[{4 * (k % 2) + (j + 1) % 4}]));\n'
                for j in range(8)
            )
            for k in range(4)
        )
        end = (
            "float sum = 0;\n#pragma unroll\nfor (int i = 0; i < 32; ++i) sum += c[i / 4][i % 4];\n"
            "*(float*)(sink + blockIdx.x * blockDim.x + threadIdx.x) = sum;"
        )
        text = loop(copied + used + "__syncthreads();\n", setup, end)
        for grid in (1, SMS):
            yield Bench(
                "copies",
                f"8 cp.async of 128 threads, wait, LDSM and 32 products, {pad} bytes apart, {grid} SMs: a turn",
                text, grid=grid, threads=128, shared=SHARED, n=(32, 128), data=8 * MB, predict=grid == 1,
                expect={"LDGSTS": 8, "HMMA": 32, "LDSM": 4},
            )  # fmt: skip


# ── clusters ────────────────────────────────────────────────────────────────────────────────────────────────────────

BARRIERS = "if (threadIdx.x == 0) { bar_init(at(s), 1); bar_init(at(s + 8), 1); init_fence(); }\ncluster_sync();\n"
MAPA = 'asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"({0}) : "r"({1}), "r"({2}));\n'
RANK = 'u32 rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));\n'


def clusters() -> Iterator[Bench]:
    arrive_at = (
        'asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(there) : "memory");\n'
    )
    for blocks in (2, 4, 8):
        setup = BARRIERS + RANK + "u32 there;\n" + MAPA.format("there", "at(s)", f"(rank + {blocks // 2}) % {blocks}")
        last = blocks // 2
        ping = (
            f"if (threadIdx.x == 0 && rank == 0) {{ {arrive_at} wait(at(s), i & 1); }}\n"
            f"else if (threadIdx.x == 0 && rank == {last}) {{ wait(at(s), i & 1); {arrive_at} }}\n"
        )
        yield Bench(
            "exchange", f"mbarrier of another block, clusters of {blocks}: arrive, wake and arrive back, half of it",
            loop(ping, setup, "cluster_sync();", cluster=blocks), grid=blocks, cluster=blocks, threads=32, ops=2,
            shared=1024, n=(64, 192), constant="remote_latency", predict=False,
        )  # fmt: skip
    own = BARRIERS + RANK + "u32 there;\n" + MAPA.format("there", "at(s)", "rank")
    yield Bench(
        "exchange", "mbarrier of the own block by its address in the cluster: arrive and wait", loop(
            f"if (threadIdx.x == 0) {{ {arrive_at} wait(at(s), i & 1); }}\n", own, "cluster_sync();", cluster=2
        ), grid=2, cluster=2, threads=32, ops=1, shared=1024, n=(64, 192), predict=False,
    )  # fmt: skip
    yield Bench(
        "exchange", "mbarrier of another block: arrivals, interval of one thread",
        loop(
            "if (threadIdx.x == 0 && rank == 0) { " + arrive_at * 8 + "}\n",
            BARRIERS + RANK + "u32 there;\n" + MAPA.format("there", "at(s)", "rank ^ 1"), "cluster_sync();", cluster=2,
        ), grid=2, cluster=2, threads=32, ops=8, shared=1024, predict=False,
    )  # fmt: skip
    yield from fences()
    yield from exchanged()
    for blocks in (1, 2, 4, 8):
        text = kernel("if (n == -1) out[0] = 1;", cluster=blocks)
        for threads, shared in ((128, 0), (1024, 0), (256, 100 << 10)):
            yield Bench(
                "starts", f"clusters of {blocks} blocks of {threads} threads, {shared >> 10} KB, that end at once: "
                "clocks of an SM a block", text, kind="blocks", threads=threads, shared=shared, cluster=blocks,
                constant="block_start", predict=False,
            )  # fmt: skip
        met = kernel("cluster_sync(); if (n == -1) out[0] = 1;", cluster=blocks)
        yield Bench(
            "starts", f"clusters of {blocks} blocks of 256 threads that meet once: clocks of an SM a block", met,
            kind="blocks", threads=256, cluster=blocks, constant="cluster_barrier_latency", predict=False,
        )  # fmt: skip


def residents() -> Iterator[Bench]:
    """Blocks of 128 threads that wait for 100 us each, 16 for each SM: 1000 if all run at once, 500 if half of them."""
    wait = "u64 g0 = nanoseconds(); while (nanoseconds() - g0 < 100000) {} if (n == -1) out[0] = 1;"
    for blocks in (1, 2, 4, 8):
        text = kernel(wait, cluster=blocks, threads=128).replace("(128, 1)", "(128, 16)")
        for each in (4, 8, 12, 16):
            yield Bench(
                "residents", f"{each} blocks of 128 threads for each SM, clusters of {blocks}: 1e5 / us", text,
                kind="events",
                grid=SMS * each // blocks * blocks, threads=128, cluster=blocks, n=(1, 1), bytes=100_000_000, unit="",
                constant="cluster_blocks", predict=False,
            )  # fmt: skip


def fences() -> Iterator[Bench]:
    """Fences and barriers of clusters of `each` blocks an SM of 128 threads, on all SMs: the clocks of a turn."""
    fence_all = 'asm volatile("fence.acq_rel.gpu;" ::: "memory");\n'
    in_cluster = 'asm volatile("fence.acq_rel.cluster;" ::: "memory");\n'
    store = "*(volatile u32*)(data + ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 4) = i;\n"
    load = (
        'asm volatile("ld.global.u32 %0, [%1];" : "=r"(y) : "l"(data + threadIdx.x * 4 + i % 4 * 512) : "memory"); '
        "x ^= y;\n"
    )
    cases = {
        "a fence of the GPU": (fence_all, 1, {"MEMBAR": 1}),
        "a fence of the cluster": (in_cluster, 2, {}),
        "a store and a fence of the GPU": (store + fence_all, 1, {"MEMBAR": 1}),
        "a fence of the GPU and a load that was in the L1": (fence_all + load, 1, {"MEMBAR": 1}),
        "a barrier of the cluster with its fences": ("cluster_sync();\n", 2, {"UCGABAR": 1}),
        "a barrier of the cluster without fences": ("cluster_relaxed();\n", 2, {"UCGABAR": 1}),
    }
    for name, (body, blocks, expect) in cases.items():
        end = "sink[blockIdx.x * blockDim.x + threadIdx.x] = x;" + (" cluster_sync();" if blocks > 1 else "")
        text = loop(body, "u32 x = 0, y = 0; (void)y;\n", end, cluster=blocks, threads=128).replace(
            "(128, 1)", "(128, 16)"
        )
        for each in (1, 2, 4, 8, 16):
            for one in (True, False) if blocks == 1 and each == 1 else (False,):
                yield Bench(
                    "exchange", f"{name}, {each} blocks of 128 threads on {'an SM' if one else 'each SM'}: a turn",
                    text, grid=1 if one else SMS * each, cluster=blocks, threads=128, n=(16, 64), data=8 * MB,
                    writes=True, constant="membar_latency", predict=False, expect=expect,
                )  # fmt: skip


def exchanged() -> Iterator[Bench]:
    """Stores and additions of all warps in the shared memory of a neighbour: what an SM has of them a clock."""
    start = FILL + RANK + "u32 there, own;\n"
    forms = {
        "stores of 4 bytes": ("st.shared::cluster.u32 [%0], %1;", '"r"(i)', 4),
        "stores of 16 bytes": ("st.shared::cluster.v4.u32 [%0], {%1, %1, %1, %1};", '"r"(i)', 16),
        "additions of 4 bytes": ("red.shared::cluster.add.u32 [%0], %1;", '"r"(i)', 4),
        "additions of floats": ("red.relaxed.cluster.shared::cluster.add.f32 [%0], %1;", '"f"(1.f)', 4),
    }
    for name, (ptx, value, size) in forms.items():
        for far in (0, 1):
            body = "".join(
                f'asm volatile("{ptx}" :: "r"(there + {j * size * 32}), {value} : "memory");\n' for j in range(8)
            )
            each = f"own = at(s) + threadIdx.x / 32 * {size * 256} % 32768 + threadIdx.x % 32 * {size};\n"
            setup = start + each + MAPA.format("there", "own", f"rank ^ {far}") + "cluster_sync();\n"
            text = loop(body, setup, "cluster_sync();", cluster=2, threads=512)
            for warps in (1, 4, 16):
                for grid in (2, SMS) if warps == 16 else (2,):
                    yield Bench(
                        "exchange", f"{name} of {'the neighbour' if far else 'itself'}, {warps} warps of each of "
                        f"{grid} SMs: clocks of an SM each", text, grid=grid, cluster=2, threads=32 * warps,
                        n=(16, 64), shared=64 << 10, ops=8 * warps, constant="remote_bytes_per_clock", predict=False,
                    )  # fmt: skip
    words = FILL + RANK + "u32 x = at(s) + threadIdx.x % 32 * 4, mine;\n"
    for blocks in (2, 4, 8):
        setup = (
            words
            + MAPA.format("mine", "x", "rank")
            + "*(volatile u32*)(s + threadIdx.x % 32 * 4) = mine; cluster_sync();\n"
        )
        setup += f"u32 of = (rank + {blocks // 2}) % {blocks};\n" + MAPA.format("x", "x", "of")
        body = 'asm volatile("ld.shared::cluster.u32 %0, [%0];" : "+r"(x) :: "memory");\n' * 16
        # from the second load on a block loads its own words by their address in the cluster
        yield Bench(
            "exchange",
            f"load by an address in the cluster, clusters of {blocks}, of the block that holds what is loaded",
            loop(body, setup, "sink[threadIdx.x] = x; cluster_sync();", cluster=blocks), grid=blocks, cluster=blocks,
            ops=16, shared=64 << 10, constant="remote_latency", predict=False,
        )  # fmt: skip
    bulk = (
        'asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" '
        ':: "r"(there + 32768), "r"(at(s) + 32768), "r"(p), "r"(there) : "memory");\n'
    )
    for size in (1024, 8192):
        setup = FILL + BARRIERS + RANK + "u32 there;\n" + MAPA.format("there", "at(s)", "rank ^ 1")
        body = "if (threadIdx.x == 0) { expect(at(s), p); }\n"
        body += f"cluster_relaxed();\nif (threadIdx.x == 0) {{ {bulk} wait(at(s), i & 1); }}\n__syncwarp();\n"
        yield Bench(
            "exchange",
            f"bulk copy of {size} bytes to the neighbour and back at once, with a barrier of the cluster: a turn",
            loop(body, setup, "cluster_sync();", cluster=2), grid=2, cluster=2, threads=32, shared=64 << 10, n=(32, 96),
            p=size, predict=False,
        )  # fmt: skip


# ── instructions by what they read and write, beside wgmmas ─────────────────────────────────────────────────────────

READS: dict[str, tuple[str, str]] = {
    "lop3 of one register": ("u32", "lop3.b32 %0, %0, 0x12345, 0x777, 0x1b;"),
    "lop3 of two": ("u32", "lop3.b32 %0, %0, %1, 0x777, 0x1b;"),
    "lop3 of three": ("u32", "lop3.b32 %0, %0, %1, %2, 0x1b;"),
    "fmul of one": ("f32", "mul.rn.f32 %0, %0, 0f3F8CCCCD;"),
    "fadd of two": ("f32", "add.rn.f32 %0, %0, %1;"),
    "ffma of two": ("f32", "fma.rn.f32 %0, %0, %1, 0f3F8CCCCD;"),
    "ffma of three": ("f32", "fma.rn.f32 %0, %0, %1, %2;"),
    "fmnmx of two": ("f32", "min.f32 %0, %0, %1;"),
    "f2fp of two": ("u32", "{.reg .f32 t;\\nmov.b32 t, %0;\\ncvt.rn.f16x2.f32 %0, t, t;}"),
    "ex2": ("f32", "ex2.approx.ftz.f32 %0, %0;"),
    "hfma2 of three": ("u32", "fma.rn.f16x2 %0, %0, %1, %2;"),
}
"""PTX by name; %1 and %2 are one of four registers each, in turn, so that none is kept for reuse"""
PATTERNS: dict[str, tuple[str, ...]] = {
    **{name: (name,) * 16 for name in READS},
    "ex2, ffma": ("ex2", "ffma of three") * 8,
    "ex2, 2 fadd": ("ex2", "fadd of two", "fadd of two") * 5,
    "ex2, 2 fmnmx": ("ex2", "fmnmx of two", "fmnmx of two") * 5,
    "ex2, f2fp": ("ex2", "f2fp of two") * 8,
    "ex2, ffma, fadd, fmnmx": ("ex2", "ffma of three", "fadd of two", "fmnmx of two") * 4,
    "ex2, ffma, fadd, fmnmx, half a f2fp": (
        "ex2", "ffma of three", "fadd of two", "fmnmx of two", "f2fp of two", "ex2", "ffma of three", "fadd of two",
        "fmnmx of two",
    ) * 2,
    "4 ex2, 4 ffma, 4 fadd, 4 fmnmx": (
        *("ex2",) * 4, *("ffma of three",) * 4, *("fadd of two",) * 4, *("fmnmx of two",) * 4
    ),
    "ffma, fmnmx": ("ffma of three", "fmnmx of two") * 8,
    "fadd, fmnmx": ("fadd of two", "fmnmx of two") * 8,
    "fmul, fmnmx": ("fmul of one", "fmnmx of two") * 8,
    "fadd, lop3 of one": ("fadd of two", "lop3 of one register") * 8,
}  # fmt: skip


def pattern(names: Sequence[str], chains: int) -> tuple[str, str, str]:
    declared = "".join(
        f"float f{j} = threadIdx.x + {j}.5f; u32 w{j} = threadIdx.x * 7 + {j};\n" for j in range(chains)
    ) + "".join(f"float g{j} = p + {j}.25f; u32 v{j} = p * 3 + {j};\n" for j in range(8))
    body = ""
    for i, name in enumerate(names):
        kind, ptx = READS[name]
        mine, other, letter = ("f", "g", "f") if kind == "f32" else ("w", "v", "r")
        first = f'"+{letter}"({mine}{i % chains})'
        body += f'asm volatile("{ptx}" : {first} : "{letter}"({other}{i % 4}), "{letter}"({other}{4 + i % 4}));\n'
    added = " + ".join([f"f{j}" for j in range(chains)] + [f"(float)w{j}" for j in range(chains)])
    return declared, body, f"*(float*)(sink + 65536 + blockIdx.x * blockDim.x + threadIdx.x) = {added};"


def registers() -> Iterator[Bench]:
    cases = [(name, 128, "ss", 1) for name in PATTERNS]
    cases += [
        (name, 128, "rs", 1) for name in ("ex2", "fadd of two", "fmnmx of two", "ex2, ffma, fadd, fmnmx, half a f2fp")
    ]
    cases += [(name, 256, "ss", 1) for name in ("ex2", "fadd of two", "lop3 of one register", "ex2, ffma, fadd, fmnmx")]
    cases += [
        (name, 128, "ss", 2)
        for name in ("ex2", "fadd of two", "lop3 of three", "fmnmx of two", "ex2, ffma, fadd, fmnmx", "ffma of three")
    ]
    for name, n, a, groups in cases:
        names = PATTERNS[name]
        work, turn, end = pattern(names, 8)
        text = beside_products(n, a, groups, work, turn * 4, end)
        yield Bench(
            "registers", f"{name}, {groups} warps a sub-core: clocks each beside n{n} {a}", text, kind="beside",
            n=(24, 96), threads=128 * (groups + 1), shared=TILES_BYTES, ops=4 * len(names) * groups,
            steps=(8 * n // 2,), predict=False,
            constant="hgmma_arithmetic_interval", expect={"HGMMA": 8},
        )  # fmt: skip
    yield from turns()


def turns() -> Iterator[Bench]:
    """Warpgroups that make A in registers, start eight products of it, do softmax work and wait: the clocks of a turn.

    With A in shared memory they make the same words, and do not use them.
    """
    names = PATTERNS["ex2, ffma, fadd, fmnmx, half a f2fp"]
    for n, a, groups, repeats in (
        (n, a, groups, repeats)
        for n in (64, 128)
        for a in ("ss", "rs")
        for groups in (1, 2, 3)
        for repeats in (2, 4, 8)
    ):
        if groups == 3 and (repeats == 2 or n == 128):
            continue
        declared, stored = sums_of(n)
        work, turn, end = pattern(names, 8)
        made = "".join(
            f'asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(made[{j}][{k}]) : "f"(f{(j + k) % 8}), "f"(f{j}));\n'
            for j in range(8)
            for k in range(4)
        )
        products = "".join(
            product(n, a=a).replace("@", str(j)).replace('"r"(a[', f'"r"(made[{j}][') for j in range(8)
        )  # fmt: skip
        body = f"{made}fence();\n{products}commit();\n{turn * repeats}pending<0>();\n"
        kept = (
            "made[0][0] ^= made[7][3]; w0 ^= made[0][0];\n"
            if a == "rs"
            else "#pragma unroll\nfor (int j = 0; j < 32; ++j) w0 ^= made[j / 4][j % 4];\n"
        )
        text = loop(
            body, declared + TILES + work + "u32 made[8][4];\n", kept + stored + "\n" + end, threads=128 * groups
        )
        yield Bench(
            "registers", f"{groups} warpgroups: 32 f2fp, 8 x n{n} {a}, {18 * repeats} instructions of softmax: a turn",
            text,
            threads=128 * groups, shared=TILES_BYTES, n=(16, 64), ops=1, expect={"HGMMA": 8, "MUFU": 4 * repeats},
        )  # fmt: skip


# ── lines that SMs at a distance share; where blocks go ─────────────────────────────────────────────────────────────


def distances() -> Iterator[Bench]:
    text = boxes_in_flight(
        "int b = blockIdx.x, group = b / (2 * p) * p + b % p, first = (q & 1 ? group : b) * 2048, box = 0;\n"
        "if (q >> 1 && b / p % 2) pause(q >> 1);"
    )
    for p, q in [(1, 0)] + [(p, 1) for p in (1, 2, 3, 4, 6, 8, 11, 16, 22, 33, 44, 66)]:
        for late in (0, 400, 4000) if (p, q) in ((1, 1), (66, 1)) else (0,):
            yield Bench(
                "distances", f"TMA, two SMs load the same, {p} blocks apart, one {late} clocks later" if q else
                "TMA, lines of their own", text, grid=SMS, shared=SHARED, unit="bytes/clock, SM", threads=32, box=64,
                ops=8, bytes=8192, n=(24, 96), p=p, q=q | late << 1, constant="l2_bytes_per_clock", data=SMS * 262144,
                predict=False,
            )  # fmt: skip
    for blocks in (1, 2):
        places = kernel(
            'u32 sm; asm volatile("mov.u32 %0, %%smid;" : "=r"(sm)); if (threadIdx.x == 0) '
            "out[blockIdx.x] = sm; pause(20000);", cluster=blocks,
        )  # fmt: skip
        yield Bench(
            "distances", f"the SM of each of 132 blocks, clusters of {blocks}", places, kind="places", grid=SMS,
            cluster=blocks, shared=SHARED, n=(1, 1), unit="", predict=False,
        )  # fmt: skip


# ── rows of the DRAM ────────────────────────────────────────────────────────────────────────────────────────────────


def rows() -> Iterator[Bench]:
    """512 MB in rows of 2 KB, of which some lanes of 16 bytes load a piece at a time; written as they were loaded."""
    for lanes in (2, 4, 8, 16, 32):
        each = 128 // lanes
        load = f"uint4 y[{each}];\n#pragma unroll\nfor (int j = 0; j < {each}; ++j) y[j] = from[j * {lanes}];\n"
        fold = f"uint4 x = {{}};\n#pragma unroll\nfor (int j = 0; j < {each}; ++j) x.x ^= y[j].x ^ y[j].w;\n"
        store = f"#pragma unroll\nfor (int j = 0; j < {each}; ++j) to[j * {lanes}] = y[j];\n"
        where = (
            f"size_t row = (size_t)blockIdx.x * (256 / {lanes}) + threadIdx.x / {lanes};\n"
            f"const uint4* from = (const uint4*)data + row * 128 + threadIdx.x % {lanes};\n"
        )
        to = f"uint4* to = (uint4*)data + ((size_t)1 << 24) + row * 128 + threadIdx.x % {lanes};\n"
        if each > 32:
            load = (
                f"uint4 x = {{}};\n#pragma unroll 16\nfor (int j = 0; j < {each}; ++j) "
                f"{{ uint4 y = from[j * {lanes}]; x.x ^= y.x ^ y.w; }}\n"
            )
            fold = store = ""
        whole = 256 * MB
        read = kernel(where + load + fold + "if (x.x == 77) sink[0] = x.y;", threads=256)
        yield Bench(
            "rows", f"loads of {16 * lanes} bytes a row of 2 KB, {each} a thread", read, kind="events",
            grid=whole // 2048 * lanes // 256, threads=256, n=(1, 1), bytes=whole, unit="GB/s", data=2 * whole,
            constant="dram", predict=False,
        )  # fmt: skip
        if store:
            both = kernel(where + to + load + store, threads=256)
            yield Bench(
                "rows", f"loads and stores of {16 * lanes} bytes a row of 2 KB, {each} a thread", both, kind="events",
                grid=whole // 2048 * lanes // 256, threads=256, n=(1, 1), bytes=2 * whole, unit="GB/s",
                data=2 * whole, constant="dram", predict=False,
            )  # fmt: skip
    # a row at a time of each block, with a barrier behind its loads and its stores behind that
    for threads in (32, 64, 128, 256):
        for size in (1024, 2048, 4096, 16384):
            each = size // 16 // threads
            if each < 1 or each > 16:
                continue
            text = kernel(
                f"""#pragma unroll 1
for (size_t row = blockIdx.x; row < n; row += gridDim.x) {{
const uint4* from = (const uint4*)data + row * {size // 16} + threadIdx.x;
uint4* to = (uint4*)(data + {256 * MB}u) + row * {size // 16} + threadIdx.x;
uint4 y[{each}]; u32 x = 0;
#pragma unroll
for (int j = 0; j < {each}; ++j) {{ y[j] = from[j * {threads}]; x ^= y[j].x; }}
x = __syncthreads_or(x == 77);
#pragma unroll
for (int j = 0; j < {each}; ++j) {{ y[j].x ^= x; to[j * {threads}] = y[j]; }}
}}""",
                threads=threads,
            )
            for name, grid in (("one row a block", 256 * MB // size), ("persistent", SMS * (2048 // threads // 2))):
                yield Bench(
                    "rows",
                    f"rows of {size} bytes, blocks of {threads} threads, barrier between loads and stores, {name}",
                    text, kind="events", grid=grid, threads=threads, n=(256 * MB // size,) * 2, bytes=512 * MB,
                    unit="GB/s", data=512 * MB, constant="dram", predict=False,
                )  # fmt: skip


GROUPS: dict[str, Callable[[], Iterator[Bench]]] = {
    "copies": copies, "clusters": clusters, "residents": residents, "registers": registers, "distances": distances,
    "rows": rows,
}  # fmt: skip
"""what measures, in the order of its worth; `clusters` yields the groups `exchange` and `starts`"""


if __name__ == "__main__":
    sys.exit(prepare_command(__doc__, GROUPS))
