"""Micro-benchmarks of an H100's memory: shared memory and L1, L2 and DRAM, TMA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.hopper_bench import MB, SHARED, SMS, Bench, kernel, loop

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
