"""Probes of moves: ldmatrix and stmatrix, cp.async, TMA, and the shared memory of clusters."""

from __future__ import annotations

import numpy as np

from benchmarks.matrix_probes import operand
from benchmarks.probe_store import Buffer, Probe, Store, hash_of, record, result_buffer, source_buffer
from benchmarks.probe_values import float_pairs, half_words
from evoengine.devices.base import (
    TensorMapArgument,
)

# ── moves ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def matrices(store: Store) -> None:
    tile = np.random.default_rng(61).integers(0, 1 << 16, 512, dtype=np.uint16)
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            regs = ", ".join(f"%{j}" for j in range(count))
            outs = ", ".join(f'"=r"(r[{j}])' for j in range(count))
            text = f"""extern "C" __global__ void kernel(const u16* a, u32* o) {{
  __shared__ __align__(16) u16 s[1024];
  for (int i = threadIdx.x; i < 512; i += 32) s[i / 8 * 16 + i % 8] = a[i];
  __syncwarp();
  u32 r[4] = {{0, 0, 0, 0}};
  asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{regs}}}, [%{count}];" : {outs}
               : "r"(at_shared(s + 16 * (threadIdx.x * 7 % 32))) : "memory");
  for (int i = 0; i < 4; i++) o[threadIdx.x * 4 + i] = r[i];
}}
"""
            buffers = [source_buffer("a", tile), result_buffer("o", 512, "u32")]
            record(store, Probe(f"ldmatrix x{count}{trans}", text, buffers, ["a", "o"]))
            ins = ", ".join(f'"r"(r[{j}])' for j in range(count))
            regs = ", ".join(f"%{j + 1}" for j in range(count))
            text = f"""extern "C" __global__ void kernel(const u32* a, u16* o) {{
  __shared__ __align__(16) u16 s[256];
  for (int i = threadIdx.x; i < 256; i += 32) s[i] = i;
  u32 r[4];
  for (int i = 0; i < 4; i++) r[i] = a[threadIdx.x * 4 + i];
  __syncwarp();
  asm volatile("stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%0], {{{regs}}};"
               :: "r"(at_shared(s + 8 * (threadIdx.x * 7 % 32))), {ins} : "memory");
  __syncwarp();
  for (int i = threadIdx.x; i < 256; i += 32) o[i] = s[i];
}}
"""
            buffers = [source_buffer("a", tile[:256]), result_buffer("o", 512, "u16")]
            record(store, Probe(f"stmatrix x{count}{trans}", text, buffers, ["a", "o"]))
    text = """extern "C" __global__ void kernel(const u32* a, u32* o) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(o[threadIdx.x]) : "r"(a[threadIdx.x])); }"""
    record(store, Probe("movmatrix", text, [source_buffer("a", tile[:64]), result_buffer("o", 128, "u32")], ["a", "o"]))


def async_copies(store: Store) -> None:
    data = np.random.default_rng(62).integers(0, 1 << 32, 1024, dtype=np.uint32)
    for size, kind in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
        text = f"""extern "C" __global__ void kernel(const u8* a, u32* o) {{
  __shared__ __align__(16) u32 s[512];
  const int t = threadIdx.x;
  for (int i = 0; i < 4; i++) s[t * 4 + i] = 0xABCD0000 + i;
  __syncthreads();
  asm volatile("cp.async.{kind}.shared.global [%0], [%1], {size}, %2;" :: "r"(at_shared(s + t * 4)), "l"(a + t * 16),
               "r"(t % ({size} + 1)) : "memory");
  asm volatile("cp.async.commit_group;\\ncp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  for (int i = 0; i < 4; i++) o[t * 4 + i] = s[t * 4 + i];
}}
"""
        record(
            store,
            Probe(
                f"cp.async {kind} {size}, zeros beyond",
                text,
                [source_buffer("a", data), result_buffer("o", 2048, "u8")],
                ["a", "o"],
                (1, 1, 1),
                (128, 1, 1),
            ),
        )
    text = """extern "C" __global__ void kernel(const u8* a, u8* o) {
  __shared__ __align__(128) u8 s[4096];
  __shared__ __align__(8) u64 bar;
  const u32 b = at_shared(&bar);
  if (threadIdx.x == 0) {
    init_barrier(b, 1);
    expect(b, 2048 + 16 + 48);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(at_shared(s)), "l"(a + 16), "r"(2048), "r"(b) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(at_shared(s + 2048)), "l"(a), "r"(16), "r"(b) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(at_shared(s + 2064)), "l"(a + 3072), "r"(48), "r"(b) : "memory");
    wait_for(b, 0);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(o), "r"(at_shared(s)), "r"(2112)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}
"""
    record(
        store,
        Probe(
            "cp.async.bulk there and back", text, [source_buffer("a", data), result_buffer("o", 2112, "u8")], ["a", "o"]
        ),
    )
    for op, t, kind in (
        ("add", "u32", "u32"),
        ("add.noftz", "f16", "f16"),
        ("add.noftz", "bf16", "bf16"),
        ("add", "f32", "f32"),
        ("min", "s32", "u32"),
        ("max", "f16", "f16"),
    ):
        text = f"""extern "C" __global__ void kernel(const u32* a, u32* m) {{
  __shared__ __align__(128) u32 s[512];
  for (int i = threadIdx.x; i < 512; i += 32) s[i] = a[i];
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{t} [%0], [%1], %2;"
                 :: "l"(m), "r"(at_shared(s)),
                 "r"(2048) : "memory");
    asm volatile("cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;" ::: "memory");
  }}
}}
"""
        x = (
            [v[::4] for v in half_words(2048, 2, 63)]
            if kind in ("f16", "bf16")
            else (float_pairs(4096, 64) if kind == "f32" else (data, data[::-1]))
        )
        record(
            store,
            Probe(
                f"cp.reduce.async.bulk {op}.{t}",
                text,
                [
                    source_buffer("a", x[0][:512]),
                    Buffer("m", "inout", np.ascontiguousarray(x[1][:512]).tobytes(), regions=[("m", kind)]),
                ],
                ["a", "m"],
            ),
        )


CODES = {"fp16": 2, "bf16": 2, "fp32": 4}


def tma(store: Store) -> None:
    """Boxes of tensors of 1 to 5 dimensions at places within, across every edge and outside."""
    plans = [
        ("fp16", (1000,), (64,), 0),
        ("fp32", (70, 40), (8, 16), 0),
        ("fp16", (70, 72), (8, 64), 128),
        ("bf16", (37, 40), (16, 32), 64),
        ("fp16", (37, 40), (16, 16), 32),
        ("fp32", (20, 40), (16, 32), 128),
        ("fp32", (20, 40), (9, 8), 32),
        ("fp16", (5, 11, 24), (2, 4, 16), 0),
        ("fp16", (5, 11, 72), (2, 4, 64), 128),
        ("fp16", (3, 4, 7, 16), (2, 2, 4, 8), 0),
        ("bf16", (3, 2, 4, 7, 16), (1, 2, 2, 4, 8), 0),
        ("fp16", (12, 200), (4, 256), 0),
    ]
    for dtype, shape, box, swizzle in plans:
        rank, wide = len(shape), CODES[dtype]
        unit = "u16" if wide == 2 else "u32"
        strides = [wide * int(np.prod(shape[i:])) for i in range(1, rank)][::-1]
        if any(s % 16 for s in strides):
            shape = (*shape[:-1], shape[-1] + 8 - shape[-1] % 8)
            strides = [wide * int(np.prod(shape[i:])) for i in range(1, rank)][::-1]
        tensor_map = TensorMapArgument("map", "a", dtype, shape[::-1], tuple(strides), box[::-1], swizzle)
        count = int(np.prod(box))
        random = np.random.default_rng(hash_of(f"{dtype}{shape}{box}{swizzle}"))
        tensor = random.integers(0, 1 << 8 * wide, int(np.prod(shape)), dtype=np.uint16 if wide == 2 else np.uint32)
        places = [
            [0] * rank,
            [s // 2 for s in shape],
            [-1] * rank,
            [s - 1 for s in shape],
            [-100] * rank,
            [s for s in shape],
        ]
        places += [[int(random.integers(-b, s + b)) for s, b in zip(shape, box, strict=True)] for _ in range(6)]
        coordinates = np.zeros((len(places), 5), np.int32)
        for row, place in zip(coordinates, places, strict=True):
            row[:rank] = place[::-1]
        regs = ", ".join(f"%{j + 3}" for j in range(rank))
        at = ", ".join(f'"r"(at[blockIdx.x * 5 + {j}])' for j in range(rank))
        common = "struct alignas(128) Map { u64 opaque[16]; };\n"
        text = (
            common
            + f"""extern "C" __global__ void
kernel(const {unit}* a, const int* at, const __grid_constant__ Map map, {unit}* o) {{
  extern __shared__ __align__(1024) {unit} s[];
  __shared__ __align__(8) u64 bar;
  const u32 b = at_shared(&bar);
  for (int i = threadIdx.x; i < {count}; i += 128) s[i] = 0x5a5a;
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {{
    init_barrier(b, 1);
  }}
  __syncthreads();
  if (threadIdx.x == 0) {{
    expect(b, {count * wide});
    asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {{{regs}}}], [%2];"
                 :: "r"(at_shared(s)), "l"(&map), "r"(b), {at} : "memory");
  }}
  wait_for(b, 0);
  for (int i = threadIdx.x; i < {count}; i += 128) o[blockIdx.x * {count} + i] = s[i];
}}
"""
        )
        name = f"{dtype} {shape} box {box} swizzle {swizzle}"
        regions = [(f"at {p}", f"u{8 * wide}") for p in places]
        buffers = [
            source_buffer("a", tensor),
            source_buffer("at", coordinates),
            Buffer("o", "out", bytes=len(places) * count * wide, regions=regions),
        ]
        record(
            store,
            Probe(
                f"tma load {name}",
                text,
                buffers,
                ["a", "at", tensor_map, "o"],
                (len(places), 1, 1),
                (128, 1, 1),
                count * wide,
            ),
        )
        regs = ", ".join(f"%{j + 2}" for j in range(rank))
        for op in ("", "add", "min", "max", "and", "xor"):
            if op and (swizzle or rank > 2 or (op in ("and", "xor") and dtype != "fp32")):
                continue
            instruction = (
                f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{op}"
                if op
                else f"cp.async.bulk.tensor.{rank}d.global.shared::cta"
            )
            # one block, place after place, so that those that overlap have an order
            text = (
                common
                + f"""extern "C" __global__ void
kernel(const {unit}* a, const int* at, const __grid_constant__ Map map, {unit}* m) {{
  extern __shared__ __align__(1024) {unit} s[];
  for (int place = 0; place < {len(places)}; place++) {{
    for (int i = threadIdx.x; i < {count}; i += 128) s[i] = a[i] + place;
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {{
      asm volatile("{instruction}.bulk_group [%0, {{{regs}}}], [%1];"
                   :: "l"(&map), "r"(at_shared(s)), {at.replace("blockIdx.x", "place")} : "memory");
      asm volatile("cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;" ::: "memory");
    }}
    __syncthreads();
  }}
}}
"""
            )
            # of reductions, small numbers: those that hardware may flush are another probe's
            image = random.integers(0, 1 << 8 * wide, count, dtype=tensor.dtype)
            held = tensor
            if op and op not in ("and", "xor"):
                kind = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}[dtype]
                view = np.uint16 if wide == 2 else np.uint32
                image = np.frombuffer(operand("normal", "a", count * wide, kind, random), view)
                held = np.frombuffer(operand("normal", "a", tensor.nbytes, kind, random), view)
            stored = TensorMapArgument("map", "m", dtype, shape[::-1], tuple(strides), box[::-1], swizzle)
            kind = f"u{8 * wide}" if not op else {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}[dtype]
            buffers = [
                source_buffer("a", image),
                source_buffer("at", coordinates),
                Buffer("m", "inout", held.tobytes(), regions=[("m", kind)]),
            ]
            record(
                store,
                Probe(
                    f"tma {'reduce ' + op if op else 'store'} {name}",
                    text,
                    buffers,
                    ["a", "at", stored, "m"],
                    (1, 1, 1),
                    (128, 1, 1),
                    count * wide,
                ),
            )


def clusters(store: Store) -> None:
    data = np.random.default_rng(71).integers(0, 1 << 32, 4096, dtype=np.uint32)
    text = """extern "C" __global__ void __cluster_dims__(4, 1, 1) kernel(const u32* a, u32* o) {
  __shared__ __align__(16) u32 s[128];
  const int t = threadIdx.x, i = blockIdx.x * 128 + t;
  u32 rank, other, x, w, v;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  s[t] = a[i];
  sync_cluster();
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other)
               : "r"(at_shared(s + (t + 5) % 128)), "r"((rank + 1) % 4));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(other) : "memory");
  sync_cluster();
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(at_shared(s + t)), "r"((rank + 3) % 4));
  asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(other), "r"(x ^ rank) : "memory");
  sync_cluster();
  w = s[t];
  sync_cluster();
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(at_shared(s + t)), "r"((rank + 2) % 4));
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(v) : "r"(other), "r"(a[i] | 1) : "memory");
  sync_cluster();
  o[i * 4] = x, o[i * 4 + 1] = w, o[i * 4 + 2] = s[t], o[i * 4 + 3] = v;
}
"""
    record(
        store,
        Probe(
            "cluster: mapa, ld, st, atom",
            text,
            [source_buffer("a", data[:1024]), result_buffer("o", 1024 * 16, "u32")],
            ["a", "o"],
            (8, 1, 1),
            (128, 1, 1),
        ),
    )
    common = "struct alignas(128) Map { u64 opaque[16]; };\n"
    text = (
        common
        + """extern "C" __global__ void __cluster_dims__(2, 1, 1)
kernel(const u32* a, const __grid_constant__ Map map, u32* o) {
  extern __shared__ __align__(1024) u32 s[];
  __shared__ __align__(8) u64 bar;
  const u32 b = at_shared(&bar);
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  for (int i = threadIdx.x; i < 1024; i += 128) s[i] = 7;
  if (threadIdx.x == 0) { init_barrier(b, 1); expect(b, 4096); }
  fence_async();
  sync_cluster();
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" :: "r"(at_shared(s + rank * 512)), "l"(&map),
                 "r"((int)(blockIdx.x / 2 * 32)),
                 "r"((int)(rank * 16 - 4)), "r"(b), "h"((u16)3) : "memory");
  wait_for(b, 0);
  sync_cluster();
  for (int i = threadIdx.x; i < 1024; i += 128) o[blockIdx.x * 1024 + i] = s[i];
}
"""
    )
    tensor_map = TensorMapArgument("map", "a", "fp32", (64, 24), (256,), (32, 16), 128)
    record(
        store,
        Probe(
            "cluster: multicast",
            text,
            [source_buffer("a", data[: 64 * 24]), result_buffer("o", 4 * 4096, "u32")],
            ["a", tensor_map, "o"],
            (4, 1, 1),
            (128, 1, 1),
            4096,
        ),
    )
    text = """extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel(const u32* a, u32* o) {
  __shared__ __align__(128) u32 s[256], r[256];
  __shared__ __align__(8) u64 bar;
  const u32 b = at_shared(&bar);
  u32 rank, there, barrier;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  for (int i = threadIdx.x; i < 256; i += 128) s[i] = a[blockIdx.x * 256 + i];
  if (threadIdx.x == 0) { init_barrier(b, 1); expect(b, 1024); }
  fence_async();
  sync_cluster();
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at_shared(r)), "r"(rank ^ 1));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(b), "r"(rank ^ 1));
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(there), "r"(at_shared(s)), "r"(1024), "r"(barrier) : "memory");
  wait_for(b, 0);
  for (int i = threadIdx.x; i < 256; i += 128) o[blockIdx.x * 256 + i] = r[i];
  sync_cluster();
}
"""
    record(
        store,
        Probe(
            "cluster: bulk copy to the other block",
            text,
            [source_buffer("a", data[:1024]), result_buffer("o", 4096, "u32")],
            ["a", "o"],
            (4, 1, 1),
            (128, 1, 1),
        ),
    )
