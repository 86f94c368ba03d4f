"""Micro-benchmarks of parts of an H100 that several things share: what `hopper_constants.py` leaves open.

    python benchmarks/hopper_contention.py --prepare DIR          on any machine
    python benchmarks/hopper_constants.py --from DIR --out FILE   on an H100, which measures what any DIR holds

Clocks under load, stores of pieces of sectors, atomics, instructions of several kinds beside wgmmas, lines that a few
SMs load, loads of the DRAM while it is busy, MOVM, code that is longer than an instruction cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hopper_arithmetic import ARITHMETIC, operands, operation, total
from benchmarks.hopper_bench import SHARED, SMS, Bench, kernel, loop, prepare_command
from benchmarks.hopper_lines import atomics, clusters, dram, pieces, sharers
from benchmarks.hopper_memory import FILL
from benchmarks.hopper_tensor import TILES, TILES_BYTES, beside_products, many, sums_of

# ── the clock under load ────────────────────────────────────────────────────────────────────────────────────────────

DRAWN = """
for (u32 i = threadIdx.x; i < 24576; i += blockDim.x) { u32 h = (i + blockIdx.x * 77777) * 2654435761u;
  h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;
  ((u32*)s)[i] = (h & 0x83ff83ffu) | 0x38003800u; }
"""
ZEROS = "for (int i = threadIdx.x; i < 24576; i += blockDim.x) ((u32*)s)[i] = 0;"
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"


def repeated(name: str, count: int) -> str:
    return "".join(operation(name, i % 8) for i in range(count))


def products(n: int, a: str = "ss", pause: int = 0) -> tuple[str, str, str, int]:
    """Return declarations, a turn, the end and a turn's clocks of the tensor cores, of each of two warpgroups."""
    declared, stored = sums_of(n)
    turn = f"fence();\n{many(n, 8, a=a)}commit();\npending<0>();\n"
    if pause:
        turn += f"pause({pause});\n"
    return declared, turn, stored, 8 * n // 2


def mma_turn() -> tuple[str, str, str, int]:
    body = "".join(
        f'asm volatile("{MMA} {{%0,%1,%2,%3}}, {{%4,%5,%6,%7}}, {{%8,%9}}, {{%0,%1,%2,%3}};" : "+f"(c[{j % 8}][0]), '
        f'"+f"(c[{j % 8}][1]), "+f"(c[{j % 8}][2]), "+f"(c[{j % 8}][3]) : "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]), '
        f'"r"(m[{j % 4}]), "r"(m[{(j + 1) % 4}]));\n'
        for j in range(32)
    )
    declared = "float c[8][4] = {}; u32 m[4]; for (int i = 0; i < 4; ++i) m[i] = ((u32*)s)[threadIdx.x * 4 + i];\n"
    stored = (
        "float sum = 0;\n#pragma unroll\nfor (int i = 0; i < 32; ++i) sum += c[i / 4][i % 4];\n"
        "*(float*)(sink + blockIdx.x * blockDim.x + threadIdx.x) = sum;"
    )
    return declared, body, stored, 2 * 32 * 4


def plain_turn(name: str) -> tuple[str, str, str, int]:
    return operands(name, 8), repeated(name, 128), total(name, 8), 0


LOADS = (
    "uint4 y; u32 folded = 0;\nconst char* mine = data + (size_t)blockIdx.x * 262144 + threadIdx.x % 128 * 16;\n",
    "".join(
        f'asm volatile("ld.global.L1::no_allocate.v4.u32 {{%0, %1, %2, %3}}, [%4];" : "=r"(y.x), "=r"(y.y), "=r"(y.z), '
        f'"=r"(y.w) : "l"(mine + ((turn * 8 + {j}) % 128) * 2048) : "memory"); folded ^= y.x;\n'
        for j in range(8)
    ),
    "if (folded == 77) sink[threadIdx.x] = folded;\n",
)
BOXES = (
    "if (threadIdx.x == 256) {\n#pragma unroll\nfor (int j = 0; j < 8; ++j) bar_init(at(s + 98304 + 8 * j), 1);\n"
    "init_fence();\n#pragma unroll\nfor (int j = 0; j < 8; ++j) { expect(at(s + 98304 + 8 * j), 8192); "
    "load_box(at(s + 99328 + j * 8192), map, at(s + 98304 + 8 * j), blockIdx.x * 1024 + j * 64); } }\n",
    "if (threadIdx.x == 256) {\n#pragma unroll\nfor (int j = 0; j < 8; ++j) { wait(at(s + 98304 + 8 * j), turn & 1); "
    "expect(at(s + 98304 + 8 * j), 8192); load_box(at(s + 99328 + j * 8192), map, at(s + 98304 + 8 * j), "
    "blockIdx.x * 1024 + (turn % 2 * 8 + j) * 64); } }\nif (threadIdx.x >= 288) __nanosleep(1000);\n__syncwarp();\n",
    "if (threadIdx.x == 256) {\n#pragma unroll\nfor (int j = 0; j < 8; ++j) wait(at(s + 98304 + 8 * j), turn & 1); }\n",
)


def beside_load(main: tuple[str, str, str, int], side: tuple[str, str, str] | None, drawn: bool, boxes: bool) -> str:
    """Return a kernel whose first 256 threads take n turns of `main`, the others turns of `side` until these end."""
    declared, turn, stored, _ = main
    tiles = TILES.replace(ZEROS, DRAWN if drawn else ZEROS)
    work, again, end = side or ("", "__nanosleep(500);", "")
    return kernel(f"""{tiles}
volatile int* stop = (volatile int*)(s + 98304 + 512);
if (threadIdx.x == 0) *stop = 0;
__syncthreads();
if (threadIdx.x < 256) {{
  {declared}
  asm volatile("bar.sync 1, 256;" ::: "memory");
  u64 g0 = nanoseconds(), t0 = now();
  #pragma unroll 1
  for (int i = 0; i < n; ++i) {{
    {turn}
  }}
  u64 t1 = now(), g1 = nanoseconds();
  if (threadIdx.x % 128 == 0) *stop = *stop + 1;
  if (threadIdx.x == 0) {{ u64* to = out + blockIdx.x * 4; to[0] = t1 - t0; to[1] = g1 - g0; to[2] = n; to[3] = 0; }}
  {stored}
}} else {{
  {work}
  int turn = 0;
  #pragma unroll 1
  for (; !*stop; ++turn) {{
    {again}
  }}
  {end}
  if (threadIdx.x == 256) out[4 * gridDim.x + blockIdx.x] = turn;
}}""", threads=384, tensor_map=boxes)  # fmt: skip


def clocks() -> Iterator[Bench]:
    wide, quarter = products(256), products(64)
    softmax = (
        operands("ex2", 8),
        repeated("ex2", 8) + "__syncwarp();",
        total("ex2", 8).replace("sink", "sink + 65536"),
    )
    fma = (operands("fma", 8), repeated("fma", 64), total("fma", 8).replace("sink", "sink + 65536"))
    slow_fma = (fma[0], repeated("fma", 16) + "pause(96);", fma[2])
    cases: list[tuple[str, Any, Any, bool]] = [
        ("n256 ss of zeros", wide, None, False),
        ("n256 ss", wide, None, True),
        ("n128 rs", products(128, "rs"), None, True),
        ("n64 ss", quarter, None, True),
        *((f"n128 ss with pauses of {p} clocks", products(128, pause=p), None, True) for p in (200, 500, 1000, 3000)),
        ("n256 ss beside TMA at full rate", wide, BOXES, True),
        ("n256 ss beside loads at full rate", wide, LOADS, True),
        ("n128 ss with pauses of 500 clocks beside TMA", products(128, pause=500), BOXES, True),
        ("n256 ss beside MUFU", wide, softmax, True),
        ("n128 ss with pauses of 500 clocks beside MUFU", products(128, pause=500), softmax, True),
        ("n256 ss beside FFMA", wide, fma, True),
        ("n256 ss beside a little FFMA", wide, slow_fma, True),
        ("n128 ss with pauses of 500 clocks beside FFMA", products(128, pause=500), fma, True),
        ("mma.sync", mma_turn(), None, True),
        ("mma.sync of zeros", mma_turn(), None, False),
        ("mma.sync beside loads", mma_turn(), LOADS, True),
        ("mma.sync beside FFMA", mma_turn(), fma, True),
        ("FFMA", plain_turn("fma"), None, True),
        ("MUFU", plain_turn("ex2"), None, True),
        ("LOP3", plain_turn("lop3"), None, True),
        ("FFMA beside loads", plain_turn("fma"), LOADS, True),
        ("DFMA", plain_turn("dfma"), None, True),
        ("pauses alone", ("", "pause(2000);", "", 0), None, True),
        ("pauses beside TMA", ("", "pause(2000);", "", 0), BOXES, True),
        ("pauses beside loads", ("", "pause(2000);", "", 0), LOADS, True),
    ]
    for name, main, side, drawn in cases:
        boxes = side is BOXES
        # a turn's clocks are a guess here, for a launch of about a third of a millisecond
        guess = {"DFMA": 1200, "MUFU": 2100, "LOP3": 520}.get(name, 2100 if "pauses" in name else max(2 * main[3], 300))
        yield Bench(
            "clocks", name, beside_load(main, side, drawn, boxes), kind="clock", grid=SMS, threads=384,
            shared=TILES_BYTES + 1024 + 65536, unit="MHz", constant="boost_ghz, boost_tensor_ghz, boost_full_ghz",
            n=(600_000 // guess,) * 2, steps=(main[3] if name.startswith("mma") else 2 * main[3],),
            data=SMS * 262144, box=64 if boxes else 0, predict=False,
        )  # fmt: skip


# ── several kinds of instructions beside wgmmas ─────────────────────────────────────────────────────────────────────

MIXES: dict[str, dict[str, int]] = {
    "ex2 1, fma 1": {"ex2": 8, "fma": 8},
    "ex2 1, fma 2": {"ex2": 8, "fma": 16},
    "ex2 1, fma 4": {"ex2": 8, "fma": 32},
    "ex2 1, lop3 2": {"ex2": 8, "lop3": 16},
    "fma 1, lop3 1": {"fma": 16, "lop3": 16},
    "fma 1, imad 1": {"fma": 16, "imad": 16},
    "fma 1, f2fp 1": {"fma": 16, "f2fp": 16},
    "lop3 1, imad 1": {"lop3": 16, "imad": 16},
    "ex2 2, fma 2, add 2, fmnmx 2, f2fp 1": {"ex2": 8, "fma": 8, "add": 8, "fmnmx": 4, "f2fp": 4},
    "ex2 3, fma 9, add 4, fmnmx 4, f2fp 2, imad 1": {
        "ex2": 6, "fma": 18, "add": 8, "fmnmx": 4, "f2fp": 4, "imad": 2,
    },
}  # fmt: skip
"""by how many of each in a turn; fmnmx counts for two. The last is softmax with a quarter of the exponentials on FMA"""


def mixed(mix: dict[str, int], prefix: str = "") -> tuple[str, str, str, int]:
    """Return declarations, a turn, the end, and how many instructions a turn has, the kinds evenly spread."""
    declared, ends = [], []
    for name in mix:
        kind = ARITHMETIC[name][0]
        declared.append(
            f"{kind} a_{name} = ({kind})(p + 3), b_{name} = ({kind})(p * 2 + 1); "
            + " ".join(f"{kind} {name}{j} = ({kind})(threadIdx.x + {j});" for j in range(4))
        )
        ends += [f"(float){name}{j}" for j in range(4)]
    order = sorted((i / count, name, i) for name, count in mix.items() for i in range(count))
    body = ""
    for _, name, i in order:
        _, ptx, given, *_ = ARITHMETIC[name]
        named = given.replace("x{j}", f"{name}{i % 4}").replace("(a)", f"(a_{name})").replace("(b)", f"(b_{name})")
        body += f'asm volatile("{ptx}" : {named});\n'
    each = sum(count * (2 if name == "fmnmx" else 1) for name, count in mix.items())
    finish = f"*(float*)(sink + 65536 + blockIdx.x * blockDim.x + threadIdx.x) = {' + '.join(ends)};"
    return "float c = p + 2; (void)c;\n" + "\n".join(declared), body, finish, each


def mixtures() -> Iterator[Bench]:
    for (name, mix), (n, a) in (
        (pair, case) for pair in MIXES.items() for case in ((128, "ss"), (128, "rs"), (64, "ss"))
    ):
        if n == 64 and "fmnmx" not in name:
            continue
        work, turn, end, each = mixed(mix)
        text = beside_products(n, a, 1, work, turn * 2, end)
        yield Bench(
            "mixtures", f"{name}: clocks each of {each} instructions beside n{n} {a}", text, kind="beside", n=(24, 96),
            threads=256, shared=TILES_BYTES, ops=2 * each, steps=(8 * n // 2,), predict=False,
            constant="hgmma_mufu_loss, hgmma_arithmetic_interval, hgmma_fma_turns", expect={"HGMMA": 8},
        )  # fmt: skip
    yield from overlapped()
    yield from beside_shared_memory()


def overlapped() -> Iterator[Bench]:
    """Warpgroups that each start eight products, do softmax work while these run, and wait: the clocks of a turn."""
    for name, groups, turns, a in (
        ("ex2 2, fma 2, add 2, fmnmx 2, f2fp 1", 1, 2, "ss"),
        ("ex2 2, fma 2, add 2, fmnmx 2, f2fp 1", 2, 2, "ss"),
        ("ex2 2, fma 2, add 2, fmnmx 2, f2fp 1", 2, 4, "ss"),
        ("ex2 2, fma 2, add 2, fmnmx 2, f2fp 1", 3, 2, "ss"),
        ("ex2 2, fma 2, add 2, fmnmx 2, f2fp 1", 2, 4, "rs"),
        ("ex2 3, fma 9, add 4, fmnmx 4, f2fp 2, imad 1", 2, 2, "ss"),
        ("ex2 3, fma 9, add 4, fmnmx 4, f2fp 2, imad 1", 2, 4, "ss"),
        ("ex2 3, fma 9, add 4, fmnmx 4, f2fp 2, imad 1", 3, 2, "ss"),
    ):
        declared, stored = sums_of(128)
        work, turn, end, each = mixed(MIXES[name])
        body = f"fence();\n{many(128, 8, a=a)}commit();\n{turn * turns}pending<0>();\n"
        text = loop(body, declared + TILES + work, stored + "\n" + end, threads=128 * groups)
        yield Bench(
            "mixtures", f"{groups} warpgroups, each 8 x n128 {a} over {turns * each} instructions of {name}: a turn",
            text, threads=128 * groups, shared=TILES_BYTES, n=(16, 64), ops=1, expect={"HGMMA": 8, "MUFU": 6 * turns},
        )  # fmt: skip


def beside_shared_memory() -> Iterator[Bench]:
    """Two warpgroups multiply while a third uses shared memory until they end: the clocks of eight products of each."""
    read = "".join(
        f'asm volatile("ld.volatile.shared.v4.u32 {{%0, %1, %2, %3}}, [%4];" : "=r"(y.x), "=r"(y.y), "=r"(y.z), '
        f'"=r"(y.w) : "r"(a0 + {j * 512}) : "memory");\n'
        for j in range(8)
    )
    written = "".join(
        f'asm volatile("st.volatile.shared.v4.u32 [%0], {{%1, %1, %1, %1}};" :: "r"(a0 + {j * 512}), "r"(turn) '
        ': "memory");\n'
        for j in range(8)
    )
    start = "uint4 y; u32 a0 = at(s) + 99328 + threadIdx.x % 32 * 16; (void)y;\n"
    sides: dict[str, Any] = {
        "nothing": None,
        "LDS.128": (start, read, ""),
        "STS.128": (start, written, ""),
        "TMA": BOXES,
    }
    for side, work in sides.items():
        for n, a in ((256, "ss"), (128, "ss"), (128, "rs"), (64, "ss")):
            main = products(n, a)
            main = (main[0], main[1].replace("pending<0>", "pending<1>"), "pending<0>();\n" + main[2], main[3])
            yield Bench(
                "mixtures", f"2 x 8 x n{n} {a} beside {side}", beside_load(main, work, False, side == "TMA"),
                kind="clock_turns", grid=SMS, threads=384, shared=TILES_BYTES + 1024 + 65536, n=(200, 200),
                steps=(2 * main[3],), box=64 if side == "TMA" else 0, data=SMS * 131072, predict=False,
                constant="hgmma_clocks_per_column",
            )  # fmt: skip


# ── MOVM, other products, FFMA beside LDS, long code ────────────────────────────────────────────────────────────────


def matrices() -> Iterator[Bench]:
    turned = 'asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x@));\n'
    declared = " ".join(f"u32 x{j} = threadIdx.x + {j};" for j in range(8))
    end = "sink[threadIdx.x] = " + " ^ ".join(f"x{j}" for j in range(8)) + ";"
    for chains, warps in ((1, 1), (8, 4), (8, 8), (8, 16)):
        body = "".join(turned.replace("@", str(j % chains)) for j in range(32))
        yield Bench(
            "matrices", f"MOVM, {chains} chains, {warps} warps: clocks of a sub-core each", loop(body, declared, end),
            threads=32 * warps, ops=32 * max(1, warps // 4), expect={"MOVM": 32},
        )  # fmt: skip
    declared_mma, one, stored, _ = mma_turn()
    lines = one.strip().splitlines()
    for each in (1, 2, 4):
        body = "".join(
            line + "\n" + "".join(turned.replace("@", str((each * i + k) % 8)) for k in range(each))
            for i, line in enumerate(lines)
        )
        yield Bench(
            "matrices", f"mma.sync and {each} MOVM, 8 warps: clocks of a sub-core for these",
            loop(body, FILL + declared + declared_mma, f"{end}\n{stored.replace('sink +', 'sink + 8192 +')}"),
            threads=256, shared=64 << 10, ops=32 * 2, expect={"MOVM": 32},
        )  # fmt: skip
    load = (
        'asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(x@), "=r"(y) : "r"(a + #) '
        ': "memory");\n'
    )
    body = "".join(
        turned.replace("@", str(j % 4))
        + load.replace("@", str(4 + j % 4)).replace("#", str(512 * j))
        + f"x{j % 4} ^= x{4 + j % 4} ^ y;\n"
        for j in range(16)
    )
    yield Bench(
        "matrices", "LDSM.x2 and MOVM, 8 warps: clocks of a sub-core for both",
        loop(body, f"{FILL}{declared} u32 y = 0; u32 a = at(s) + threadIdx.x % 32 * 16;", end + "sink[0] = y;"),
        threads=256, shared=64 << 10, ops=16 * 2, expect={"MOVM": 16, "LDSM": 16},
    )  # fmt: skip
    for kind, sums in (("fp8", "f32"), ("int8", "s32"), ("tf32", "f32"), ("bf16", "f32")):
        d, stored = sums_of(128, sums)
        body = f"fence();\n{many(128, 8, a='rs', kind=kind, sums=sums)}commit();\npending<1>();\n"
        yield Bench(
            "matrices", f"n128 rs {kind}, 2 warpgroups", loop(body, d + TILES, f"pending<0>();\n{stored}", threads=256),
            threads=256, shared=TILES_BYTES, ops=16, constant="hgmma_clocks_per_column", predict=False,
        )  # fmt: skip
    for n, a, scales in (
        (128, "ss", "1, 1, 0, 1"),
        (128, "ss", "1, 1, 1, 0"),
        (128, "rs", "1, 1, 1"),
        (256, "ss", "1, 1, 0, 1"),
    ):
        d, stored = sums_of(n)
        usual = "1, 1, 0, 0" if a == "ss" else "1, 1, 0"
        body = f"fence();\n{many(n, 8, a=a).replace(usual, scales)}commit();\npending<1>();\n"
        yield Bench(
            "matrices", f"n{n} {a} fp16, transposed as {scales}, 2 warpgroups",
            loop(body, d + TILES, f"pending<0>();\n{stored}", threads=256), threads=256, shared=TILES_BYTES, ops=16,
            constant="hgmma_clocks_per_column", predict=False,
        )  # fmt: skip
    yield from scalar_products()
    yield from long_code()
    yield from first_boxes()


def scalar_products() -> Iterator[Bench]:
    """Outer products of registers that LDS fills, as SIMT GEMM has them: the clocks of a sub-core for an FFMA."""
    for rows, columns, threads in ((8, 8, 128), (8, 8, 256), (4, 4, 256), (4, 4, 512), (8, 4, 256), (1, 8, 256)):

        def loads(name: str, count: int, offset: str) -> str:
            if count < 4:
                return "".join(f"{name}[{i}] = ((volatile float*)s)[{offset} + {i}];" for i in range(count))
            return "".join(
                f'asm volatile("ld.shared.v4.f32 {{%0, %1, %2, %3}}, [%4];" : "=f"({name}[{4 * i}]), '
                f'"=f"({name}[{4 * i + 1}]), "=f"({name}[{4 * i + 2}]), "=f"({name}[{4 * i + 3}]) : '
                f'"r"(at((float*)s + {offset} + {4 * i})) : "memory");'
                for i in range(count // 4)
            )

        body = (
            "#pragma unroll\nfor (int k = 0; k < 8; ++k) {\n"
            + loads("u", rows, f"k * 128 + threadIdx.x / 16 % 8 * {rows}")
            + loads("v", columns, f"2048 + k * 128 + threadIdx.x % 16 * {columns}")
            + f"\n#pragma unroll\nfor (int x = 0; x < {rows}; ++x)\n#pragma unroll\n"
            f"for (int y = 0; y < {columns}; ++y) "
            "d[x][y] = fmaf(u[x], v[y], d[x][y]);\n}"
        )
        setup = f"{FILL}float d[{rows}][{columns}] = {{}}, u[{rows}], v[{columns}];"
        end = (
            f"float sum = 0;\n#pragma unroll\nfor (int i = 0; i < {rows * columns}; ++i) "
            f"sum += d[i / {columns}][i % {columns}];"
            "\n*(float*)(sink + threadIdx.x) = sum;"
        )
        yield Bench(
            "matrices", f"outer products of {rows} x {columns} from LDS, {threads} threads: clocks of an FFMA",
            loop(body, setup, end, threads=threads), threads=threads, shared=64 << 10, n=(32, 128),
            ops=8 * rows * columns * threads // 128, expect={"FFMA": 8 * rows * columns},
        )  # fmt: skip


def long_code() -> Iterator[Bench]:
    for count in (1024, 3072, 6144, 12288):
        text = loop(repeated("fma", count), operands("fma", 8), total("fma", 8))
        for warps in (1, 4, 16):
            yield Bench(
                "matrices", f"a loop of {count} FFMA, {warps} warps: clocks of a sub-core each", text,
                threads=32 * warps, n=(4, 16), ops=count * max(1, warps // 4), predict=False, expect={"FFMA": count},
            )  # fmt: skip


def first_boxes() -> Iterator[Bench]:
    """The first box that a launch loads on each SM, whose tensor map nothing has fetched, and the second."""
    text = kernel(
        """if (threadIdx.x == 0) {
bar_init(at(s), 1); init_fence();
#pragma unroll 1
for (int i = 0; i < 2; ++i) {
  u64 t0 = now();
  expect(at(s), 1024);
  load_box(at(s + 1024), map, at(s), blockIdx.x * 8);
  wait(at(s), i);
  out[i * gridDim.x + blockIdx.x] = now() - t0;
} }""",
        tensor_map=True,
    )
    yield Bench(
        "matrices", "first box of each SM in a launch, then the same again", text, kind="samples", n=(2, 2), grid=SMS,
        box=8, data=SMS * 1024, shared=SHARED, constant="tma_latency", predict=False,
    )  # fmt: skip


GROUPS: dict[str, Callable[[], Iterator[Bench]]] = {
    "clocks": clocks, "stores": pieces, "mixtures": mixtures, "atomics": atomics, "matrices": matrices,
    "sharers": sharers, "dram": dram, "clusters": clusters,
}  # fmt: skip
"""what measures, in the order of its worth; `dram` yields the group `loaded` too"""


if __name__ == "__main__":
    sys.exit(prepare_command(__doc__, GROUPS))
