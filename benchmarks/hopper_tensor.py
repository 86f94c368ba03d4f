"""Micro-benchmarks of an H100's tensor cores, alone and beside other work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.hopper_arithmetic import ARITHMETIC, operands, operation, total
from benchmarks.hopper_bench import Bench, kernel, loop
from benchmarks.hopper_memory import ladder

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
        name="commit and wait with nothing in flight", threads=128, ops=8, **common,
        text=loop("commit();\npending<0>();\n" * 8, TILES, threads=128),
    )  # fmt: skip
    yield Bench(
        name="wait with nothing in flight", threads=128, ops=8, **common,
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
