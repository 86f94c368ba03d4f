"""Micro-benchmarks of what an H100's SMs share in memory: pieces of sectors, atomics, lines, the DRAM, clusters."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.hopper_bench import MB, SHARED, SMS, Bench, kernel, loop
from benchmarks.hopper_memory import FILL
from benchmarks.hopper_tensor import boxes_in_flight

# ── stores and atomics ──────────────────────────────────────────────────────────────────────────────────────────────

ROW = 512
STORES = {2: ("u16", "h", "(unsigned short)i"), 4: ("u32", "r", "i"), 8: ("v2.u32", "r", ""), 16: ("v4.u32", "r", "")}
ORDERS = ("side by side", "halves apart", "every second piece alone")


def pieces() -> Iterator[Bench]:
    """Stores of which each piece of `piece` bytes lies in another row of 512 bytes, in three orders of the pieces."""
    for each, piece in (
        (2, 2), (2, 16), (4, 4), (4, 8), (4, 16), (4, 32), (4, 64), (4, 128), (8, 8), (8, 32), (16, 16),
        (16, 32), (16, 512),
    ):  # fmt: skip
        kind, letter, value = STORES[each]
        words = max(1, each // 4)
        given = ", ".join(f'"{letter}"({value or "i"})' for _ in range(words))
        place = ", ".join(f"%{j + 1}" for j in range(words))
        place = f"{{{place}}}" if words > 1 else place
        lanes = piece // each
        text = loop(
            f"char* row = mine + i % {lanes} * {ROW * (32 // lanes)};\n"
            f"#pragma unroll 8\nfor (int j = 0; j < all; ++j) {{\n"
            f"int number = q == 0 ? j : q == 1 ? j % half * 2 + j / half : 2 * j;\n"
            f'asm volatile("st.global.{kind} [%0], {place};" :: "l"(row + number * {piece}), {given} : "memory");\n}}',
            f"int half = {max(1, ROW // piece // 2)}, all = q == 2 ? half : {ROW // piece};\n"
            f"char* mine = data + ((size_t)blockIdx.x * 8 + threadIdx.x / 32) * {32 * ROW} + "
            f"threadIdx.x % 32 / {lanes} * {ROW} + threadIdx.x % {lanes} * {each};",
        )
        for order, name in enumerate(ORDERS[: 3 if piece < 32 else 1]):
            count = max(1, ROW // piece // (2 if order == 2 else 1))
            for grid in (1, 16, SMS):
                if grid == 16 and (piece, each) not in ((4, 4), (16, 4), (32, 4), (128, 4)):
                    continue
                yield Bench(
                    "stores", f"stores of {each} bytes, {piece} in a row, {name}, {grid} SMs: clocks of an SM each",
                    text, grid=grid, threads=256, shared=SHARED, n=(4, 16) if count > 8 else (32, 128), ops=8 * count,
                    q=order, constant="l2_partial_clocks", data=SMS << 17, writes=True, predict=grid == 1,
                    expect={"STG": 1},
                )  # fmt: skip


# Where a lane's word lies, from block b, warp w, lane l and the number of the instruction j.
PLACES = {
    "its own line, 4 bytes a lane": "b * 65536 + w * 8192 + j % 16 * 512 + l * 4",
    "its own line, 16 bytes a lane": "b * 65536 + w * 8192 + j % 16 * 512 + l * 16",
    "a sector a lane": "b * 65536 + w * 8192 + j % 8 * 1024 + l * 32",
    "one word a warp": "b * 65536 + w * 8192 + j % 16 * 512",
    "one line, 4 bytes a lane, of all warps": "l * 4",
    "one word of all": "0",
    "a word anywhere in 256 bytes": "(h >> 8) % 64 * 4",
    "a word anywhere in 4 KB": "(h >> 8) % 1024 * 4",
    "a word anywhere in 1 MB": "(h >> 8) % 262144 * 4",
    "a word anywhere in 16 MB": "(h >> 8) % 4194304 * 4",
    "the same 16 KB in all blocks": "(w * 2048 + j % 16 * 128 + l * 4) % 16384",
    "the same 1 MB in all blocks": "(w * 131072 + j * 128 % 131072 + l * 4) % 1048576",
}
CHANGES = {
    "red.u32": 'asm volatile("red.global.add.u32 [%0], %1;" :: "l"(p), "r"(1) : "memory");',
    "red.f32": 'asm volatile("red.global.add.f32 [%0], %1;" :: "l"(p), "f"(1.f) : "memory");',
    "red.f16x2": 'asm volatile("red.global.add.noftz.f16x2 [%0], %1;" :: "l"(p), "r"(0x3c003c00) : "memory");',
    "red.v4.f32": 'asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" :: "l"(p), "f"(1.f) : "memory");',
    "atom.u32": 'asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(1) : "memory"); x ^= old;',
    "atom.f32": 'asm volatile("atom.global.add.f32 %0, [%1], %2;" : "=f"(f) : "l"(p), "f"(1.f) : "memory"); '
    "x ^= (int)f;",
}


def atomics() -> Iterator[Bench]:
    for change, code in CHANGES.items():
        for place, formula in PLACES.items():
            if ("16 bytes" in place) != (change == "red.v4.f32"):
                continue
            if change in ("red.f16x2", "atom.u32", "atom.f32") and place not in (
                "its own line, 4 bytes a lane", "a sector a lane", "one word of all", "a word anywhere in 16 MB",
                "the same 16 KB in all blocks",
            ):  # fmt: skip
                continue
            for lanes in (32, 1):
                if lanes == 1 and ("one word" not in place or change not in ("red.u32", "red.f32", "atom.u32")):
                    continue
                body = (
                    f"#pragma unroll\nfor (int k = 0; k < 8; ++k) {{ unsigned j = i * 8 + k; "
                    f"unsigned h = (j * 8192 + me) * "
                    f"2654435761u; h ^= h >> 15; h *= 2246822519u; char* p = data + (size_t)({formula}); {code} }}"
                )
                if lanes == 1:
                    body = f"if (threadIdx.x % 32 == 0) {{\n{body} }}"
                setup = (
                    "unsigned b = blockIdx.x, w = threadIdx.x / 32, l = threadIdx.x % 32, me = b * 256 + threadIdx.x, "
                    "x = 0, old = 0; float f = 0; (void)old; (void)f; (void)w; (void)l; (void)me;"
                )
                text = loop(body, setup, "sink[blockIdx.x * blockDim.x + threadIdx.x] = x;")
                slow = place == "one word of all" and lanes == 32
                for grid in (1, SMS):
                    yield Bench(
                        "atomics", f"{change}, {lanes} lanes, {place}, {grid} SMs: clocks of an SM each", text,
                        grid=grid, threads=256, shared=SHARED, n=(1, 3) if slow and grid > 1 else (4, 16), ops=64,
                        constant="l2_partial_clocks, l2_atomic_clocks", data=16 * MB, writes=True, predict=grid == 1,
                    )  # fmt: skip
    yield from shared_atomics()
    yield from copies_out()


def shared_atomics() -> Iterator[Bench]:
    for kind, code in {
        "u32": 'asm volatile("red.shared.add.u32 [%0], 1;" :: "r"(a + @ * 4096 % 16384) : "memory");\n',
        "f32": 'asm volatile("red.shared.add.f32 [%0], %1;" :: "r"(a + @ * 4096 % 16384), "f"(1.f) : "memory");\n',
    }.items():
        for name, place in (("own words", "l * 4"), ("8 lanes a word", "l / 8 * 4"), ("one word", "0")):
            body = "".join(code.replace("@", str(j)) for j in range(8))
            text = loop(body, f"{FILL}unsigned l = threadIdx.x % 32; u32 a = at(s) + {place} + threadIdx.x / 32 * 512;")
            for warps in (1, 8):
                yield Bench(
                    "atomics", f"atomics of shared memory, {kind}, {name}, {warps} warps: clocks of the SM each", text,
                    threads=32 * warps, shared=64 << 10, n=(16, 48), ops=8 * warps, predict=False,
                )  # fmt: skip


def copies_out() -> Iterator[Bench]:
    """Yield bulk stores and additions by the copy engine, with four groups in flight."""
    for name, form in {
        "store": "cp.async.bulk.global.shared::cta.bulk_group",
        "add f32": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
        "add f16": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16",
    }.items():
        for size in (1024, 8192):
            text = kernel(f"""for (int i = threadIdx.x; i < 16384; i += blockDim.x) ((u32*)s)[i] = 0;
asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
__syncthreads();
if (threadIdx.x == 0) {{
  char* mine = data + (size_t)blockIdx.x * q;
  u64 t0 = now();
  #pragma unroll 1
  for (int i = 0; i < n; ++i) {{
    asm volatile("{form} [%0], [%1], %2;" :: "l"(mine + i % 16 * {size}), "r"(at(s)), "r"({size}) : "memory");
    asm volatile("cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group.read 3;" ::: "memory");
  }}
  u64 t1 = now();
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  record(out, t0, t1);
}}""")  # fmt: skip
            for grid, own in ((1, True), (SMS, True), (SMS, False)):
                yield Bench(
                    "atomics", f"bulk {name} of {size} bytes, {grid} SMs, {'own lines' if own else 'the same 16'}",
                    text, grid=grid, threads=32, shared=SHARED, n=(64, 256), bytes=size, q=16 * size if own else 0,
                    unit="bytes/clock, SM", constant="l2_combine_clocks", data=SMS * 16 * 8192, writes=True,
                    predict=grid == 1,
                )  # fmt: skip


# ── lines that a few SMs load, and the DRAM ─────────────────────────────────────────────────────────────────────────


def sharers() -> Iterator[Bench]:
    boxes = boxes_in_flight(
        "int group = q ? blockIdx.x % (gridDim.x / p) : blockIdx.x / p, first = group * 2048, box = 0;"
    )
    loads = "".join(
        f'asm volatile("ld.global.L1::no_allocate.v4.u32 {{%0, %1, %2, %3}}, [%4];" : "=r"(y{j}.x), "=r"(y{j}.y), '
        f'"=r"(y{j}.z), "=r"(y{j}.w) : "l"(a + {j * 8192}) : "memory");\n'
        for j in range(4)
    )
    folded = " ".join(f"x ^= y{j}.x ^ y{j}.y ^ y{j}.z ^ y{j}.w;" for j in range(4))
    by_warps = loop(
        f"const char* a = mine + i % 8 * 32768 + threadIdx.x * 16;\n{loads}{folded}",
        "int group = q ? blockIdx.x % (gridDim.x / p) : blockIdx.x / p; u32 x = 0; uint4 y0, y1, y2, y3; "
        "const char* mine = data + (size_t)group * 262144;",
        "sink[blockIdx.x * blockDim.x + threadIdx.x] = x;", threads=512,
    )  # fmt: skip
    for text, name, common in (
        (boxes, "TMA", {"threads": 32, "box": 64, "ops": 8, "bytes": 8192, "n": (24, 96)}),
        (by_warps, "loads", {"threads": 512, "bytes": 32768, "n": (48, 192)}),
    ):
        for group in (1, 2, 4, 6, 12, 33, 66, 132):
            for apart in (0, 1):
                if apart and group in (1, 132):
                    continue
                yield Bench(
                    "sharers", f"{name}, {group} SMs load the same, {'apart' if apart else 'neighbours'}", text,
                    grid=SMS, shared=SHARED, unit="bytes/clock, SM", constant="l2_bytes_per_clock", p=group, q=apart,
                    data=SMS * 262144, predict=False, **common,  # type: ignore[arg-type]
                )  # fmt: skip


def dram() -> Iterator[Bench]:
    start = "size_t at16 = (size_t)blockIdx.x * blockDim.x + threadIdx.x, all = (size_t)n * 65536; "
    start += (
        "size_t step = (size_t)gridDim.x * blockDim.x; uint4 x = {}; uint4* to = (uint4*)data; (void)to; (void)step;\n"
    )
    turns = "#pragma unroll 4\nfor (size_t i = at16; i < all; i += step) "
    end = "if (x.x == 77) sink[0] = x.x ^ x.y ^ x.z ^ x.w;"
    fold = "{ uint4 y = %s; x.x ^= y.x; x.y ^= y.y; x.z ^= y.z; x.w ^= y.w; } "
    for reads, writes in ((1, 0), (0, 1), (1, 1), (2, 1), (3, 1), (7, 1), (1, 2), (1, 3)):
        body = "".join(fold % f"to[i + all * {k}]" for k in range(reads))
        body += "".join(f"to[i + all * {reads + k}] = uint4{{x.x, x.y, (u32)i, {k}}}; " for k in range(writes))
        parts = reads + writes
        size = 512 * MB if parts <= 2 else 256 * MB
        persistent = kernel(start + turns + "{ " + body + "}\n" + end, threads=512)
        once = kernel(start + "size_t i = at16; { " + body + "}\n" + end, threads=512)
        for name, text, grid in (("persistent", persistent, SMS * 4), ("one turn a thread", once, size // 16 // 512)):
            yield Bench(
                "dram", f"{reads} loads and {writes} stores of 16 bytes, {parts * size >> 20} MB, {name}", text,
                kind="events", grid=grid, threads=512, n=(size // 16 // 65536,) * 2, bytes=parts * size, unit="GB/s",
                constant="dram_efficiency, dram_turn_cost", data=parts * size, predict=False,
            )  # fmt: skip
        if (reads, writes) in ((1, 0), (0, 1), (1, 1)):
            for small in (8, 16, 32, 64, 128):
                yield Bench(
                    "dram", f"{reads} loads and {writes} stores of 16 bytes, {parts * small} MB again and again", once,
                    kind="events", grid=small * MB // 16 // 512, threads=512, n=(small * MB // 16 // 65536,) * 2,
                    bytes=parts * small * MB, unit="GB/s", constant="l2_kept_share", data=parts * small * MB,
                    predict=False,
                )  # fmt: skip
    yield from scattered()
    yield from loaded()


def scattered() -> Iterator[Bench]:
    """Pieces of 2^p bytes in random order, of 1 GiB: each once."""
    place = (
        "size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; unsigned lanes = p - 4, "
        "piece = (unsigned)(i >> lanes), mask = (1u << (30 - p)) - 1; piece = (piece * 2654435761u + 12345u) & mask; "
        "piece ^= piece >> 7; "
        "piece = (piece * 2246822519u) & mask; "
        "uint4* to = (uint4*)data + ((size_t)piece << lanes) + (i & ((1u << lanes) - 1));\n"
    )
    read = kernel(place + "uint4 y = *to; if (y.x == 77) sink[0] = y.y;", threads=512)
    write = kernel(place + "*to = uint4{1, 2, 3, 4};", threads=512)
    for name, text in (("loads", read), ("stores", write)):
        for p in (4, 5, 6, 7, 8, 9, 10, 12):
            yield Bench(
                "dram", f"{name} of {1 << p} bytes in random order, 256 MB of 1 GiB", text, kind="events",
                grid=(256 * MB >> 4) // 512, threads=512, n=(1, 1), p=p, bytes=256 * MB, unit="GB/s",
                constant="pieces of sectors", data=1 << 30, predict=False,
            )  # fmt: skip


def loaded() -> Iterator[Bench]:
    """Block 0 follows pointers through 1 GiB while the others load the same with pauses of p clocks."""
    chase = 'asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(x) :: "memory");\n' * 8
    text = kernel(f"""
if (blockIdx.x == 0) {{
  if (threadIdx.x) return;
  u64 x = (u64)data, g0 = nanoseconds();
  while (nanoseconds() - g0 < 20000) {{}}
  u64 t0 = now();
  #pragma unroll 1
  for (int i = 0; i < n; ++i) {{ {chase} }}
  out[0] = now() - t0;
  sink[0] = (u32)x;
}} else {{
  u64 g0 = nanoseconds(), t0 = now();
  u32 folded = 0, turn = 0;
  size_t offset = (size_t)blockIdx.x * 8110080 + threadIdx.x * 16;
  #pragma unroll 1
  for (; p >= 0 && nanoseconds() - g0 < 400000; ++turn) {{
    #pragma unroll
    for (int j = 0; j < 4; ++j) {{
      uint4 y; const char* a = data + (offset & ((1u << 30) - 1)); offset += 8192;
      asm volatile("ld.global.L1::no_allocate.v4.u32 {{%0, %1, %2, %3}}, [%4];" : "=r"(y.x), "=r"(y.y), "=r"(y.z),
        "=r"(y.w) : "l"(a) : "memory");
      folded ^= y.x;
    }}
    if (folded == 77) sink[1] = folded;
    if (p) pause(p);
  }}
  if (threadIdx.x == 0) {{ out[2 * blockIdx.x] = turn; out[2 * blockIdx.x + 1] = now() - t0; }}
}}""", threads=512)  # fmt: skip
    for p in (-1, 12000, 6000, 3000, 2000, 1500, 1200, 900, 600, 300, 0):
        yield Bench(
            "loaded", f"DRAM latency while others load, pauses of {p} clocks" if p >= 0 else "DRAM latency alone", text,
            kind="loaded", grid=SMS, threads=512, shared=SHARED, n=(20, 20), ops=160, p=p, bytes=32768, data=1 << 30,
            chase=16384, constant="dram_latency, dram_loaded_delay", predict=False,
        )  # fmt: skip


# ── clusters ────────────────────────────────────────────────────────────────────────────────────────────────────────


def clusters() -> Iterator[Bench]:
    """Boxes that each block of a cluster loads a part of for all of them, without a pause; loads of the neighbour's."""
    for blocks in (1, 2, 4):
        rows, mask = 64 // blocks, (1 << blocks) - 1
        load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        multicast = ".multicast::cluster" if blocks > 1 else ""
        given = ', "h"((unsigned short)' + f"{mask})" if blocks > 1 else ""
        issue = (
            f'expect(at(s + 8 * j), 8192); asm volatile("{load}{multicast} [%0], [%1, {{%2, %3}}], [%4]'
            f'{", %5" if blocks > 1 else ""};" :: "r"(at(s + 1024 + j * 8192) + part * {rows * 128}), "l"((u64)&map), '
            f'"r"(0), "r"(first + box * 64 + part * {rows}), "r"(at(s + 8 * j)){given} : "memory"); '
            "if (++box == 16) box = 0;"
        )
        # A block fills a stage again when all blocks of the cluster have said that theirs is free.
        free = (
            f"#pragma unroll\nfor (int b = 0; b < {blocks}; ++b) asm volatile("
            '"{\\n.reg .b32 r;\\nmapa.shared::cluster.u32 r, %0, %1;\\n'
            'mbarrier.arrive.shared::cluster.b64 _, [r];\\n}" :: "r"(at(s + 64 + 8 * j)), "r"(b) : "memory");'
        )
        text = kernel(
            f"""if (threadIdx.x == 0) {{
#pragma unroll
for (int j = 0; j < 4; ++j) {{ bar_init(at(s + 8 * j), 1); bar_init(at(s + 64 + 8 * j), {blocks}); }}
init_fence(); }}
cluster_sync();
if (threadIdx.x == 0) {{
int part = blockIdx.x % {blocks}, first = blockIdx.x / {blocks} * 1024, box = 0;
u64 t0 = now();
#pragma unroll
for (int j = 0; j < 4; ++j) {{ {issue} }}
#pragma unroll 1
for (int i = 0; i < n; ++i) {{
#pragma unroll
  for (int j = 0; j < 4; ++j) {{
    wait(at(s + 8 * j), i & 1);
    {free}
    wait(at(s + 64 + 8 * j), i & 1);
    {issue}
  }}
}}
u64 t1 = now();
#pragma unroll
for (int j = 0; j < 4; ++j) wait(at(s + 8 * j), n & 1);
record(out, t0, t1); }}
__syncwarp();
cluster_sync();""",
            tensor_map=True, cluster=blocks,
        )  # fmt: skip
        for grid in (blocks, SMS):
            yield Bench(
                "clusters", f"boxes of 8192 bytes, four in flight, multicast among {blocks} blocks, {grid} SMs", text,
                grid=grid, cluster=blocks, threads=32, shared=SHARED, box=rows, n=(24, 96), ops=4, bytes=8192,
                unit="bytes/clock, SM", data=SMS * 131072, predict=False,
            )  # fmt: skip
    loads = "".join(
        f'asm volatile("ld.shared::cluster.v4.u32 {{%0, %1, %2, %3}}, [%4];" : "=r"(y{j % 4}.x), "=r"(y{j % 4}.y), '
        f'"=r"(y{j % 4}.z), "=r"(y{j % 4}.w) : "r"(from + {j * 512}) : "memory");\n'
        for j in range(4)
    )
    setup = (
        "u32 own = at(s) + threadIdx.x % 32 * 16, from, x = 0; uint4 y0, y1, y2, y3;\n"
        'asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(from) : "r"(own), "r"(blockIdx.x ^ 1)); '
        "cluster_sync();\n"
    )
    text = loop(
        loads + "x ^= y0.x ^ y1.x ^ y2.x ^ y3.x;",
        setup,
        "sink[threadIdx.x] = x; cluster_sync();",
        cluster=2,
        threads=512,
    )
    for warps in (1, 4, 16):
        yield Bench(
            "clusters", f"LDS.128 of the neighbour's shared memory, {warps} warps of each of two", text, grid=2,
            cluster=2, threads=32 * warps, shared=16384, ops=4, bytes=512 * warps, unit="bytes/clock, SM",
            predict=False,
        )  # fmt: skip
