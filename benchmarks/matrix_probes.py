"""Probes of matrix products, and of copies and exchanges through shared memory and clusters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.probe_store import Buffer, Probe, Store, hash_of, record, source_buffer
from benchmarks.probe_values import int_values

# ── matrix products ─────────────────────────────────────────────────────────────────────────────────────────────────

SETS = ("normal", "wide", "cancel", "ladder", "ladder_ones", "tiny", "special")


def _values(kind: str, of: str, count: int, format_: str, random: np.random.Generator) -> np.ndarray:
    """Draw values of an operand (`of` a, b or c) as float64."""
    low, high = {"f16": (-14, 15), "e4m3": (-6, 8), "e5m2": (-14, 15)}.get(format_, (-60, 60))
    sign = random.choice([-1.0, 1.0], count)
    normal = random.standard_normal(count)
    if kind == "wide":
        if of == "c":
            low, high = max(low, -40), min(high, 40)
        return sign * np.ldexp(random.uniform(1, 2, count), random.integers(low, high, count))
    if kind == "cancel":
        if of == "c":
            return np.where(
                random.random(count) < 0.5, sign * 2.0 ** min(high, 12) * random.integers(1, 4, count), normal
            )
        big = random.random(count) < 0.25
        return np.where(big, sign * 2.0 ** min(high // 2 + 1, 6), normal / 64)
    if kind in ("ladder", "ladder_ones"):
        if of == "a":
            base = 1.0 if kind == "ladder" else random.choice([1.0, 1.5, 1.25, 1 + 2.0**-7, 1 + 2.0**-10], count)
            return sign * np.ldexp(base, -random.integers(0, 28, count))
        if of == "b":
            return sign if kind == "ladder" else sign * random.choice([1.0, 1 + 2.0**-7, 1 + 2.0**-10], count)
        zero = random.random(count) < 0.4
        return np.where(zero, 0.0, sign * np.ldexp(random.uniform(1, 2, count), random.integers(-30, 6, count)))
    if kind == "tiny":
        if of == "c":
            return sign * np.ldexp(random.uniform(1, 2, count), random.integers(-150, -20, count))
        if of == "a":
            return sign * np.ldexp(random.uniform(0.01, 2, count), low)
        return sign * np.ldexp(random.uniform(0.01, 2, count), random.integers(low, 3, count))
    if kind == "special":
        at = random.random(count)
        out = np.where(at < 0.02, sign * np.inf, np.where(at < 0.03, np.nan, np.where(at < 0.12, sign * 0.0, normal)))
        return np.where((at > 0.98) & (of != "b"), sign * 2.0**high, out)
    return normal


def _fp8(values: np.ndarray, mantissa: int) -> np.ndarray:
    """Round float64 to e4m3 or e5m2 by looking for the nearest of all bytes."""
    bits = np.arange(128)
    exponent, fraction = bits >> mantissa, bits & (1 << mantissa) - 1
    bias = 7 if mantissa == 3 else 15
    known = np.where(
        exponent > 0,
        np.ldexp(1 + fraction / (1 << mantissa), exponent - bias),
        np.ldexp(fraction / (1 << mantissa), 1 - bias),
    )
    top = 0x7E if mantissa == 3 else 0x7B
    magnitude = np.abs(values)
    place = np.searchsorted(known[: top + 1], np.nan_to_num(magnitude, posinf=1e30)).clip(0, top)
    out = np.where(np.isnan(values), 0x7F, np.where(np.isinf(values), 0x7C if mantissa == 2 else 0x7F, place))
    return (out | np.signbit(values) << 7).astype(np.uint8)


def encode(values: np.ndarray, format_: str, random: np.random.Generator) -> np.ndarray:
    """Return the bits of float64 values in a format, flat uint8."""
    with np.errstate(all="ignore"):
        if format_ == "f16":
            return values.astype(np.float16).view(np.uint8)
        if format_ == "f64":
            return values.view(np.uint8)
        single = values.astype(np.float32).view(np.uint32)
    if format_ == "bf16":
        nan = np.isnan(values)
        return np.where(nan, 0x7FC1, single + 0x7FFF + (single >> 16 & 1) >> 16).astype(np.uint16).view(np.uint8)
    if format_ == "tf32":  # what lies below the 19 bits is noise
        noise = random.integers(0, 1 << 13, len(values), dtype=np.uint32)
        keep = np.isfinite(values) & (values != 0)
        return np.where(keep, single ^ noise & np.uint32(0x1FFF), single).astype(np.uint32).view(np.uint8)
    if format_ in ("e4m3", "e5m2"):
        return _fp8(values, 3 if format_ == "e4m3" else 2)
    return single.view(np.uint8)


def operand(kind: str, of: str, size: int, format_: str, random: np.random.Generator) -> bytes:
    """Return `size` bytes of an operand."""
    if format_ in ("s8", "u8", "s4", "u4", "b1"):
        return bytes(random.integers(0, 256, size, dtype=np.uint8))
    if format_ == "s32":
        return (
            int_values(size // 4, int(random.integers(1 << 30))).tobytes()
            if kind == "special"
            else (random.integers(-(1 << 20), 1 << 20, size // 4, dtype=np.int32).tobytes())
        )
    width = {"f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "f64": 8}.get(format_, 4)
    return encode(_values(kind, of, size // width, format_, random), format_, random).tobytes()


def mma(store: Store) -> None:
    """Each warp multiplies fragments of its own; sets of inputs are regions of as many warps."""
    f32 = [(f"m16n8k{k}", t, t, "f32") for t, ks in (("f16", (8, 16)), ("bf16", (8, 16)), ("tf32", (4, 8))) for k in ks]
    shapes = [*f32, ("m16n8k8", "f16", "f16", "f16"), ("m16n8k16", "f16", "f16", "f16")]
    shapes += [("m8n8k4", "f64", "f64", "f64"), *[(f"m16n8k{k}", "f64", "f64", "f64") for k in (4, 8, 16)]]
    shapes += [(f"m16n8k{k}", a, b, "s32") for k in (16, 32) for a in ("s8", "u8") for b in ("s8", "u8")]
    shapes += [
        ("m8n8k16", "s8", "u8", "s32"),
        ("m16n8k64", "s4", "u4", "s32"),
        ("m16n8k32", "u4", "s4", "s32"),
        ("m16n8k256", "b1", "b1", "s32"),
        ("m16n8k128", "b1", "b1", "s32"),
    ]
    shapes += [("m16n8k32", a, b, c) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for c in ("f32", "f16")]
    bits = {
        "f16": 16,
        "bf16": 16,
        "tf32": 32,
        "f64": 64,
        "s8": 8,
        "u8": 8,
        "s4": 4,
        "u4": 4,
        "b1": 1,
        "e4m3": 8,
        "e5m2": 8,
        "f32": 32,
        "s32": 32,
    }
    plans = [
        (shape, a, b, c, more)
        for shape, a, b, c in shapes
        for more in (
            (".and.popc", ".xor.popc")
            if a == "b1"
            else ("", ".satfinite")
            if (c == "s32" and (a, b) == ("s8", "s8"))
            else ("",)
        )
    ]
    for shape, a, b, c, more in plans:
        m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
        letter, word = ("d", 8) if a == "f64" else ("r", 4)
        counts = [x * y * w // 32 // (8 * word) for x, y, w in ((m, k, bits[a]), (n, k, bits[b]), (m, n, bits[c]))]
        if min(counts) < 1:
            continue
        na, nb, nc = counts
        ctype = "double" if letter == "d" else "u32"
        lists, at = [], 0
        for size in (nc, na, nb, nc):
            lists.append("{" + ", ".join(f"%{at + j}" for j in range(size)) + "}")
            at += size
        middle = more if a != "b1" else ""
        call = (
            f"mma.sync.aligned.{shape}.row.col{middle}.{c}.{a}.{b}.{c}{more if a == 'b1' else ''} "
            + ", ".join(lists)
            + ";"
        )
        outs = ", ".join(f'"={letter}"(d[{j}])' for j in range(nc))
        ins = ", ".join(f'"{letter}"({v}[{j}])' for v, size in (("x", na), ("y", nb), ("z", nc)) for j in range(size))
        text = f"""extern "C" __global__ void 
kernel(const {ctype}* a, const {ctype}* b, const {ctype}* c, {ctype}* o) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  {ctype} x[{na}], y[{nb}], z[{nc}], d[{nc}];
  for (int n = 0; n < {na}; n++) x[n] = a[i * {na} + n];
  for (int n = 0; n < {nb}; n++) y[n] = b[i * {nb} + n];
  for (int n = 0; n < {nc}; n++) z[n] = c[i * {nc} + n];
  asm volatile("{call}" : {outs} : {ins});
  for (int n = 0; n < {nc}; n++) o[i * {nc} + n] = d[n];
}}
"""
        integer = c == "s32"
        sets = ("normal", "special") if integer else SETS
        per = 4
        random = np.random.default_rng(abs(hash_of(call)))
        parts: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}
        for kind in sets:
            for of, format_, size in (("a", a, na), ("b", b, nb), ("c", c, nc)):
                parts[of].append(operand(kind, of, per * 32 * size * word, format_, random))
        buffers = [source_buffer(of, b"".join(x)) for of, x in parts.items()]
        total = len(buffers[2].data)
        kind_of = {"s32": "u32"}.get(c, c)
        buffers.append(Buffer("o", "out", bytes=total, regions=[(s, kind_of) for s in sets]))
        record(
            store,
            Probe(
                f"mma {shape} {c}.{a}.{b}{more}",
                text,
                buffers,
                ["a", "b", "c", "o"],
                (len(sets), 1, 1),
                (32 * per, 1, 1),
            ),
        )


def wgmma_text(n: int, k: int, a: str, b: str, c: str, from_registers: bool, trans: str, steps: int = 1) -> str:
    registers = n // 4 if c == "f16" else n // 2
    letter, ctype = ("f", "float") if c == "f32" else ("r", "u32")
    d = ", ".join(f"%{j}" for j in range(registers))
    at = registers
    first = "{" + ", ".join(f"%{at + j}" for j in range(4)) + "}" if from_registers else f"%{at}"
    at += 4 if from_registers else 1
    tail = "" if c == "s32" else ", 1, 1"
    call = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{c}.{a}.{b} {{{d}}}, {first}, %{at}, p{tail}{trans};"
    outs = ", ".join(f'"+{letter}"(d[{j}])' for j in range(registers))
    left = ", ".join(f'"r"(x[{j}])' for j in range(4)) if from_registers else '"l"(of_a + s * step_a)'
    return f"""extern "C" __global__ void __launch_bounds__(128)
kernel(const uint4* a, const uint4* b, const {ctype}* c, {ctype}* o, int bytes_a, int bytes_b, u64 like_a, u64 like_b,
       int accumulate, u64 step_a, u64 step_b) {{
  extern __shared__ __align__(1024) unsigned char shared[];
  const int block = blockIdx.x, t = threadIdx.x;
  for (int i = t; i < bytes_a / 16; i += 128) reinterpret_cast<uint4*>(shared)[i] = a[block * bytes_a / 16 + i];
  unsigned char* there = shared + (bytes_a + 1023) / 1024 * 1024;
  for (int i = t; i < bytes_b / 16; i += 128) reinterpret_cast<uint4*>(there)[i] = b[block * bytes_b / 16 + i];
  fence_async();
  __syncthreads();
  u32 x[4];
  for (int i = 0; i < 4; i++) x[i] = reinterpret_cast<const u32*>(shared)[t * 4 + i];
  {ctype} d[{registers}];
  for (int i = 0; i < {registers}; ++i) d[i] = c[(block * 128 + t) * {registers} + i];
  const u64 of_a = like_a + (at_shared(shared) >> 4), of_b = like_b + (at_shared(there) >> 4);
  for (int i = 0; i < {registers}; ++i) asm volatile("" : "+{letter}"(d[i]) :: "memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int s = 0; s < {steps}; s++)
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{at + 1}, 0; {call}}}" : {outs}
                 : {left}, "l"(of_b + s * step_b), "r"((int)(accumulate || s)));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < {registers}; ++i) asm volatile("" : "+{letter}"(d[i]) :: "memory");
  for (int i = 0; i < {registers}; ++i) o[(block * 128 + t) * {registers} + i] = d[i];
}}
"""


SWIZZLE_CODE = {16: 0, 128: 1, 64: 2, 32: 3}


def descriptor(width: int, leading: int, stride: int) -> int:
    """Return a descriptor's bits without the start address; strides in bytes."""
    return (leading >> 4) << 16 | (stride >> 4) << 32 | SWIZZLE_CODE[width] << 62


def wgmma_case(
    store: Store, name: str, n: int, types: str, like: tuple[int, int], size: tuple[int, int], sets: Sequence[str],
    *, registers: bool = False, trans: tuple[int, int] = (0, 0), accumulate: int = 1, steps: int = 1, step: int = 0,
) -> None:  # fmt: skip
    """Record a product of `n` columns; `types`, `like` and `size` are those of A, B (and C): descriptors and bytes."""
    a, b, c = types.split()
    k = {"f16": 16, "bf16": 16, "tf32": 8}.get(a, 32)
    transposed = "" if k != 16 else f", {trans[1]}" if registers else f", {trans[0]}, {trans[1]}"
    text = wgmma_text(n, k, a, b, c, registers, transposed, steps)
    random = np.random.default_rng(hash_of(name))
    sizes = (*size, 64 * n * (2 if c == "f16" else 4))
    drawn = [
        b"".join(operand(s, of, bytes_, kind, random) for s in sets)
        for of, bytes_, kind in zip("abc", sizes, (a, b, c), strict=True)
    ]
    regions = [(s, {"s32": "u32"}.get(c, c)) for s in sets]
    buffers = [source_buffer(of, data) for of, data in zip("abc", drawn, strict=True)]
    buffers.append(Buffer("o", "out", bytes=len(drawn[2]), regions=regions))
    scalars = [*map(np.int32, size), *map(np.uint64, like), np.int32(accumulate), *[np.uint64(step >> 4)] * 2]
    shared = -(-size[0] // 1024) * 1024 + size[1]
    record(
        store,
        Probe(f"wgmma {name}", text, buffers, ["a", "b", "c", "o", *scalars], (len(sets), 1, 1), (128, 1, 1), shared),
    )


def wgmma(store: Store) -> None:
    """Numbers first, in the layout without a swizzle, which is dense; then layouts with plain numbers."""
    dense = partial(wgmma_case, store)
    for types in (
        "f16 f16 f32", "f16 f16 f16", "bf16 bf16 f32", "tf32 tf32 f32", "e4m3 e4m3 f32", "e4m3 e5m2 f32",
        "e5m2 e4m3 f32", "e5m2 e5m2 f32", "e4m3 e4m3 f16", "e5m2 e5m2 f16", "s8 s8 s32", "u8 u8 s32", "s8 u8 s32",
    ):  # fmt: skip
        a, b, c = types.split()
        sets = ("normal", "special") if c == "s32" else SETS
        for registers in (False, True):
            for n in (8,) if a not in ("f16", "bf16", "tf32") else (8, 24) if registers or c != "f32" else (16, 32):
                name = f"{c}.{a}.{b} n{n}{' RS' if registers else ''}"
                like = descriptor(16, 1024, 128), descriptor(16, n * 16, 128)
                dense(name, n, types, like, (2048, 32 * n), sets, registers=registers)
    plain = descriptor(16, 1024, 128), descriptor(16, 128, 128)
    dense("no accumulation", 8, "f16 f16 f32", plain, (2048, 256), ("normal", "special"), accumulate=0)
    wide = descriptor(128, 16, 1024)
    sets = ("wide", "ladder")
    dense("four steps in one group", 16, "f16 f16 f32", (wide, wide), (8192, 2048), sets, steps=4, step=32)
    for width in (16, 32, 64, 128):
        for ta, tb in ((0, 0), (1, 0), (0, 1), (1, 1)):
            # K-major without a swizzle: leading along k, stride along rows; transposed the other way round
            ways = [
                ((1024, 128), (128, 1024))[turned] if width == 16 else (16 * width if turned else 16, 8 * width)
                for turned in (ta, tb)
            ]
            name = f"layout {width} bytes, transposed {ta} {tb}"
            like = descriptor(width, *ways[0]), descriptor(width, *ways[1])
            dense(name, 64, "f16 f16 f32", like, (8192, 8192), ("normal",), trans=(ta, tb))
    for width in (32, 64, 128):
        for kind in ("tf32", "e4m3"):
            like = (descriptor(width, 16, 8 * width),) * 2
            dense(f"layout {width} bytes of {kind}", 32, f"{kind} {kind} f32", like, (8192, 4096), ("normal",))
    for name, a, b in (("within the pattern", 64, 32), ("at the pattern's third row", 256, 128)):
        like = wide + (a >> 4), wide + (b >> 4)
        dense(f"a start {name}", 32, "f16 f16 f32", like, (9216, 5120), ("normal",))
    for n in (128, 176, 256):
        dense(f"{n} columns", n, "bf16 bf16 f32", (wide, wide), (8192, 128 * n), ("normal",))
