"""Probes of arithmetic, conversions, warps' exchanges and atomics, an instruction or a few at a time."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.hardware_bits import TYPES, nan_of
from benchmarks.probe_store import (
    CTYPES,
    ENTRY,
    PRELUDE,
    WIDTH,
    Buffer,
    Probe,
    Store,
    Unsupported,
    argument_json,
    compile_text,
    execute,
    record,
    result_buffer,
    source_buffer,
)
from evoengine.sass.core import Program
from evoengine.sass.listing import disassemble
from evoengine.stages.compile import CompileFailed


def elementwise_text(ins: str, out: str, lines: Sequence[str]) -> str:
    """A kernel that writes [line][element]: PTX with $o, $a, $b, $c, or a C expression behind `=`."""
    names = "abc"[: len(ins)]
    parameters = ", ".join(f"const {CTYPES[kind]}* {n}_" for n, kind in zip(names, ins, strict=True))
    reads = " ".join(f"const {CTYPES[kind]} {n} = {n}_[i];" for n, kind in zip(names, ins, strict=True))
    body = []
    for number, line in enumerate(lines):
        if line.startswith("="):
            body.append(f"o_[{number} * n + i] = {line[1:]};")
            continue
        text = line.replace("%", "%%").replace("$o", "%0").replace('"', "")
        used = []
        for n, kind in zip(names, ins, strict=True):
            if f"${n}" in text:
                used.append(f'"{kind}"({n})')
                text = text.replace(f"${n}", f"%{len(used)}")
        body.append(
            f'{{ {CTYPES[out]} o; asm volatile("{{{text}}}" : "={out}"(o) : {", ".join(used)});'
            f" o_[{number} * n + i] = o; }}"
        )
    return (
        f'extern "C" __global__ void kernel({parameters}, {CTYPES[out]}* o_) {{\n'
        "  const int n = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        f"  {reads}\n  " + "\n  ".join(body) + "\n}\n"
    )


def elementwise(
    store: Store, name: str, out: str, inputs: Sequence[np.ndarray], lines: Sequence[tuple[str, str]]
) -> None:
    """Record lines (text, element type of the result) over the inputs; those that fail are told from the others."""
    by_width = {1: "h", 2: "h", 4: "r", 8: "l"}
    ins = "".join(by_width[x.itemsize] for x in inputs)
    size = inputs[0].size
    assert size % 128 == 0 and all(x.size == size for x in inputs), name
    count = [0]

    def probe(some: Sequence[tuple[str, str]], label: str) -> Probe:
        buffers = [source_buffer("abc"[k], x) for k, x in enumerate(inputs)]
        buffers.append(
            Buffer("o", "out", bytes=len(some) * size * WIDTH[out], regions=list(some), element_bytes=WIDTH[out])
        )
        names = [b.name for b in buffers]
        text = elementwise_text(ins, out, [text for text, _ in some])
        return Probe(label, text, buffers, list(names), (size // 128, 1, 1), (128, 1, 1), inputs=names[:-1])

    unknown: list[tuple[str, str]] = []

    def good(some: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of the lines that compile and execute, by halving."""
        if not some:
            return []
        one = probe(some, name)
        try:
            cubin = compile_text(one.text)
        except CompileFailed as error:
            if len(some) == 1:
                store.refuse(f"{name}: {some[0][0]}", str(error))
                return []
        else:
            program = Program(disassemble(cubin), ENTRY)
            if not program.unknown:
                try:
                    execute(one, cubin)
                    return list(some)
                except Unsupported:
                    pass
            if len(some) == 1:
                unknown.append(some[0])
                return []
        middle = len(some) // 2
        return good(some[:middle]) + good(some[middle:])

    kept = good(lines)
    for start in range(0, len(kept), 40):
        count[0] += 1
        record(store, probe(kept[start : start + 40], f"{name}_{count[0]}"))
    for start in range(0, len(unknown), 8):
        for line in unknown[start : start + 8]:
            count[0] += 1
            record(store, probe([line], f"{name}_{count[0]}_unknown"))


def words(values: Sequence[int], dtype: type = np.uint32) -> np.ndarray:
    return np.array([v % (1 << 8 * np.dtype(dtype).itemsize) for v in values], dtype)


def numbers(text: str) -> list[Any]:
    """Return the numbers of a text, as Python writes them."""
    return [literal_eval(number) for number in text.split()]


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


MANTISSAS = words(
    numbers(
        "0 1 2 0x7FFFFF 0x7FFFFE 0x400000 0x400001 0x3FFFFF 0x555555 0x2AAAAA 0x1000 0x1001 0xFFF 0x3000 0x2000"
        " 0x8000 0x8001 0x7FFF 0x18000 0x10000 0x80000 0x80001 0x180000 0x100000 0x100001 0x300000 0x7FF000 0x7F8000"
        " 0x700000 0x780000"
    )
)


def every_exponent(count: int, seed: int = 1) -> np.ndarray:
    """[512 · count] uint32 floats: `count` mantissas for each sign and exponent, special ones first."""
    random = np.random.default_rng(seed)
    drawn = random.integers(0, 1 << 23, (512, count), dtype=np.uint32)
    special = MANTISSAS[: min(count, len(MANTISSAS))]
    drawn[:, : len(special)] = special
    return (drawn | (np.arange(512, dtype=np.uint32) << 23)[:, None]).ravel()


SPECIAL = np.concatenate(
    [
        floats(
            *numbers(
                "0 -0.0 1 -1 2 0.5 1.5 -1.5 3 1e30 -1e30 1e-30 65504 65519 65520 65536 448 464 465 57344 61440 1e10"
                " 2147483647 -2147483648 4294967295 2.5 3.5 -0.5"
            )
        ),
        words(
            numbers(
                "0x7F800000 0xFF800000 0x7FC00000 0xFFC00000 0x7F800001 0x7FFFFFFF 0xFFA5A5A5 1 0x80000001 0x7FFFFF"
                " 0x807FFFFF 0x800000 0x80800000 0x7F7FFFFF 0xFF7FFFFF 0x3F7FFFFF 0x3F800001 0x33800000 0x00400000"
                " 0x80400000"
            )
        ),
    ]
)


def float_pairs(count: int, seed: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of floats: special with special, any bits, close magnitudes, cancelling, products near the ends."""
    random = np.random.default_rng(seed)
    x, y = (v.ravel() for v in np.meshgrid(SPECIAL, SPECIAL))
    rest = count - x.size
    a = random.integers(0, 1 << 32, rest, dtype=np.uint32)
    b = random.integers(0, 1 << 32, rest, dtype=np.uint32)
    turn = np.arange(rest) % 4
    near = (a & 0x7F800000) + (random.integers(-2, 3, rest) << 23) & 0x7F800000 | b & 0x807FFFFF
    b = np.where(turn == 1, near, b)
    b = np.where(turn == 2, (a ^ 0x80000000) + random.integers(-3, 4, rest), b)
    opposite = (((random.integers(0, 300, rest) - 23 + 127) - (a >> 23 & 0xFF).astype(np.int64)) & 0xFF) << 23
    b = np.where(turn == 3, opposite | (b & 0x807FFFFF), b)
    return np.concatenate([x, a]), np.concatenate([y, b.astype(np.uint32)])


def float_triples(count: int, seed: int = 3) -> tuple[np.ndarray, ...]:
    a, b = float_pairs(count, seed)
    random = np.random.default_rng(seed + 1)
    with np.errstate(all="ignore"):
        product = -(a.view(np.float32).astype(np.float64) * b.view(np.float32)).astype(np.float32)
    near = product.view(np.uint32) + random.integers(-4, 5, count).astype(np.uint32)
    turn = np.arange(count) % 4
    drawn = random.integers(0, 1 << 32, count, dtype=np.uint32)
    shifted = near + (random.integers(-26, 27, count) << 23).astype(np.uint32)
    c = np.where(
        turn == 0, random.choice(SPECIAL, count), np.where(turn == 1, near, np.where(turn == 2, shifted, drawn))
    )
    return a, b, c.astype(np.uint32)


EVERY16 = np.arange(65536, dtype=np.uint16)
SPECIAL16 = words(
    numbers(
        "0 0x8000 1 0x8001 0x3FF 0x400 0x8400 0x3C00 0xBC00 0x3C01 0x7BFF 0xFBFF 0x7C00 0xFC00 0x7C01 0x7E00 0xFE00"
        " 0x7FFF 0x3800 0x5555 0x7F80 0xFF80 0x7F81 0x7FC0 0x7F7F 0x3F80 0xBF80 0x0080 0x007F 0x8080"
    ),
    np.uint16,
)


def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


def half_words(count: int, arity: int, seed: int) -> tuple[np.ndarray, ...]:
    """Registers of two 16-bit floats each, special with special in the low halves first."""
    random = np.random.default_rng(seed)
    low = [random.integers(0, 65536, count, dtype=np.uint16) for _ in range(arity)]
    pairs = np.meshgrid(*[SPECIAL16] * 2)
    for k in range(min(arity, 2)):
        low[k][: pairs[k].size] = pairs[k].ravel()
    if arity == 3:
        low[2][::3] = random.choice(SPECIAL16, low[2][::3].size)
    near = slice(count // 2, None, 2)  # magnitudes that meet
    for k in range(arity):
        low[k][near] = low[k][near] & 0x83FF | (random.integers(12, 18, low[k][near].size) << 10).astype(np.uint16)
    return tuple(packed(x, np.roll(x[::-1], k)) for k, x in enumerate(low))


ROUNDINGS = ("rn", "rz", "rm", "rp")
ORDERS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def typed(kind: str, lines: Iterator[str] | Sequence[str]) -> list[tuple[str, str]]:
    return [(line, kind) for line in lines]


def compared_by(kind: str, flags: str = "") -> list[str]:
    return [f".reg .pred p; setp.{o}{flags}.{kind} p, $a, $b; selp.u32 $o, 1, 0, p;" for o in ORDERS]


def special_functions(store: Store) -> None:
    names = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos")
    lines = [f"{n}.approx{ftz}.f32 $o, $a;" for n in names for ftz in ("", ".ftz")] + ["tanh.approx.f32 $o, $a;"]
    elementwise(store, "mufu", "r", [every_exponent(48)], typed("f32", lines))
    exact = [f"{n}.{r}{ftz}.f32 $o, $a;" for n in ("rcp", "sqrt") for r in ROUNDINGS for ftz in ("", ".ftz")]
    elementwise(store, "rcp_sqrt", "r", [every_exponent(16, 5)], typed("f32", exact))
    both = packed(EVERY16, (EVERY16.astype(np.uint32) * 40503 + 12345).astype(np.uint16))
    pairs = [
        ("ex2.approx.f16x2 $o, $a;", "f16"),
        ("ex2.approx.ftz.f16x2 $o, $a;", "f16"),
        ("tanh.approx.f16x2 $o, $a;", "f16"),
        ("ex2.approx.ftz.bf16x2 $o, $a;", "bf16"),
        ("tanh.approx.bf16x2 $o, $a;", "bf16"),
    ]
    elementwise(store, "mufu_pairs", "r", [both[::4]], pairs)
    singles = [
        ("ex2.approx.f16 $o, $a;", "f16"),
        ("tanh.approx.f16 $o, $a;", "f16"),
        ("ex2.approx.ftz.bf16 $o, $a;", "bf16"),
        ("tanh.approx.bf16 $o, $a;", "bf16"),
    ]
    elementwise(store, "mufu_halves", "h", [EVERY16], singles)
    random = np.random.default_rng(8)
    ranges = []
    for low, high in ((0.5, 2), (0.99, 1.01), (-1, 1), (-20, 20), (1, 4), (-130, -120), (100, 1e5), (-3.2, 3.2)):
        ranges.append(random.uniform(low, high, 1024).astype(np.float32).view(np.uint32))
    elementwise(store, "mufu_ranges", "r", [np.concatenate(ranges)], typed("f32", lines))


def conversions(store: Store) -> None:
    one = every_exponent(30)
    wholes = ("rni", "rzi", "rmi", "rpi")
    words_out = [
        (f"cvt.{w}{ftz}{sat}.{t}.f32 $o, $a;", "u32")
        for w in wholes
        for ftz in ("", ".ftz")
        for sat in ("",)
        for t in ("s32", "u32")
    ]
    words_out += typed("f32", [f"cvt.{w}{ftz}.f32.f32 $o, $a;" for w in wholes for ftz in ("", ".ftz")])
    words_out += typed(
        "f32",
        [
            "cvt.sat.f32.f32 $o, $a;",
            "cvt.ftz.f32.f32 $o, $a;",
            "abs.f32 $o, $a;",
            "abs.ftz.f32 $o, $a;",
            "neg.ftz.f32 $o, $a;",
            "neg.f32 $o, $a;",
            *[
                f"cvt.{r}.tf32.f32 $o, $a;"
                for r in ("rna", "rn", "rz", "rn.relu", "rz.relu", "rna.satfinite", "rn.satfinite")
            ],
        ],
    )
    words_out += [
        (f".reg .pred p; testp.{t}.f32 p, $a; selp.u32 $o, 1, 0, p;", "u32")
        for t in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    ]
    elementwise(store, "cvt_f32", "r", [one[::2]], words_out)
    halves = [
        (f"cvt.{r}{more}.{t}.f32 $o, $a;", t)
        for t in ("f16", "bf16")
        for r in ROUNDINGS
        for more in ("", ".relu", ".satfinite", ".sat", ".ftz")
    ]
    halves += [(f"cvt.rzi{s}.{t}.f32 $o, $a;", "u16") for t in ("s16", "u16", "s8", "u8") for s in ("", ".sat")]
    elementwise(store, "cvt_f32_narrow", "h", [one], halves)
    elementwise(
        store,
        "cvt_f32_wide",
        "l",
        [one[::2]],
        [
            *typed(
                "u64", [f"cvt.{w}{f}.{t}.f32 $o, $a;" for w in wholes for t in ("s64", "u64") for f in ("", ".ftz")]
            ),
            ("cvt.f64.f32 $o, $a;", "f64"),
        ],
    )
    other = np.random.default_rng(4).permutation(one)
    pairs = [
        (f"cvt.{r}{more}.{t}x2.f32 $o, $a, $b;", t)
        for t in ("f16", "bf16")
        for r in ("rn", "rz")
        for more in ("", ".relu", ".satfinite")
    ]
    elementwise(store, "cvt_pack", "r", [one[::2], other[::2]], pairs)
    elementwise(
        store,
        "cvt_fp8",
        "h",
        [one, other],
        typed("u8", [f"cvt.rn.satfinite{m}.{t}x2.f32 $o, $a, $b;" for t in ("e4m3", "e5m2") for m in ("", ".relu")]),
    )
    both = packed(EVERY16, EVERY16[::-1])
    elementwise(
        store,
        "cvt_half_fp8",
        "h",
        [both],
        typed("u8", [f"cvt.rn.satfinite{m}.{t}x2.f16x2 $o, $a;" for t in ("e4m3", "e5m2") for m in ("", ".relu")]),
    )
    from_half = [
        ("cvt.f32.f16 $o, $a;", "f32"),
        ("cvt.f32.bf16 $o, $a;", "f32"),
        ("cvt.ftz.f32.f16 $o, $a;", "f32"),
        ("cvt.rn.f16x2.e4m3x2 $o, $a;", "f16"),
        ("cvt.rn.f16x2.e5m2x2 $o, $a;", "f16"),
        ("cvt.rn.relu.f16x2.e4m3x2 $o, $a;", "f16"),
        ("cvt.rn.relu.f16x2.e5m2x2 $o, $a;", "f16"),
    ]
    from_half += typed(
        "u32", [f"cvt.{w}.{t}.{f} $o, $a;" for w in wholes for t in ("s32", "u32") for f in ("f16", "bf16")]
    )
    elementwise(store, "cvt_half", "r", [EVERY16], from_half)
    narrow = [(f"cvt.{w}.{f}.{f} $o, $a;", f) for w in wholes for f in ("f16", "bf16")]
    narrow += [(f"cvt.{r}.bf16.f16 $o, $a;", "bf16") for r in ROUNDINGS]
    narrow += [(f"cvt.{r}.f16.bf16 $o, $a;", "f16") for r in ROUNDINGS]
    narrow += [
        ("abs.f16 $o, $a;", "f16"),
        ("neg.f16 $o, $a;", "f16"),
        ("abs.bf16 $o, $a;", "bf16"),
        ("cvt.sat.f16.f16 $o, $a;", "f16"),
    ]
    narrow += [
        (f"cvt.{w}{s}.{t}.f16 $o, $a;", "u16")
        for w in ("rni", "rzi")
        for t in ("s16", "u16", "s8", "u8")
        for s in ("", ".sat")
    ]
    narrow += [(f"cvt.{r}.{f}.{t} $o, $a;", f) for r in ROUNDINGS for f in ("f16", "bf16") for t in ("s16", "u16")]
    elementwise(store, "cvt_half_narrow", "h", [EVERY16[::4] ^ (EVERY16[::4] >> 3 & 3)], narrow)
    elementwise(
        store,
        "cvt_half_wide",
        "l",
        [EVERY16[::8]],
        [
            ("cvt.f64.f16 $o, $a;", "f64"),
            ("cvt.f64.bf16 $o, $a;", "f64"),
            *typed("u64", [f"cvt.rzi.{t}.{f} $o, $a;" for t in ("s64", "u64") for f in ("f16", "bf16")]),
        ],
    )
    random = np.random.default_rng(6)
    whole = np.concatenate(
        [
            int_values(2048, 5),
            random.integers(0, 1 << 32, 2048, dtype=np.uint32) >> random.integers(0, 32, 2048, dtype=np.uint32),
        ]
    )
    from_int = typed("f32", [f"cvt.{r}.f32.{t} $o, $a;" for r in ROUNDINGS for t in ("s32", "u32")])
    from_int += typed("f32", [f"cvt.rn.f32.{t} $o, $a;" for t in ("s8", "u8", "s16", "u16")])
    from_int += typed(
        "u32",
        [
            f"cvt{s}.{t}.{f} $o, $a;"
            for s in ("", ".sat")
            for t, f in (
                ("s8", "s32"),
                ("u8", "s32"),
                ("s16", "s32"),
                ("u16", "s32"),
                ("u8", "u32"),
                ("s8", "u32"),
                ("u32", "s32"),
            )
        ],
    )
    elementwise(store, "cvt_int", "r", [whole], from_int)
    elementwise(
        store,
        "cvt_int_narrow",
        "h",
        [whole],
        [(f"cvt.{r}.{f}.{t} $o, $a;", f) for r in ROUNDINGS for f in ("f16", "bf16") for t in ("s32", "u32")],
    )
    elementwise(store, "cvt_int_wide", "l", [whole], typed("f64", ["cvt.rn.f64.s32 $o, $a;", "cvt.rn.f64.u32 $o, $a;"]))
    long = long_values(2048, 7)
    elementwise(
        store,
        "cvt_long",
        "l",
        [long],
        typed("f64", [f"cvt.{r}.f64.{t} $o, $a;" for r in ROUNDINGS for t in ("s64", "u64")]),
    )
    elementwise(
        store,
        "cvt_long_float",
        "r",
        [long],
        typed("f32", [f"cvt.{r}.f32.{t} $o, $a;" for r in ROUNDINGS for t in ("s64", "u64")]),
    )
    elementwise(
        store,
        "cvt_long_half",
        "h",
        [long],
        [(f"cvt.rn.{f}.{t} $o, $a;", f) for f in ("f16", "bf16") for t in ("s64", "u64")],
    )
    double = doubles(2048, 8)
    elementwise(
        store,
        "cvt_double",
        "r",
        [double],
        typed("f32", [f"cvt.{r}{f}.f32.f64 $o, $a;" for r in ROUNDINGS for f in ("", ".ftz", ".sat")])
        + typed("u32", [f"cvt.{w}.{t}.f64 $o, $a;" for w in wholes for t in ("s32", "u32")]),
    )
    elementwise(
        store,
        "cvt_double_wide",
        "l",
        [double],
        typed("u64", [f"cvt.{w}.{t}.f64 $o, $a;" for w in wholes for t in ("s64", "u64")])
        + typed("f64", [f"cvt.{w}.f64.f64 $o, $a;" for w in wholes]),
    )
    elementwise(
        store,
        "cvt_double_half",
        "h",
        [double],
        [(f"cvt.{r}.{f}.f64 $o, $a;", f) for r in ROUNDINGS for f in ("f16", "bf16")],
    )


def int_values(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    special = words(
        numbers(
            "0 1 2 3 7 8 15 16 31 32 33 63 64 127 128 255 256 32767 32768 65535 65536 0xFFFFFF 0x1000000 0x1000001"
            " 0x1000003 0x7FFFFFFF 0x80000000 0x80000001 -1 -2 -128 -129 -32768 -32769 0x7F7F7F7F 0x80808080"
            " 0x12345678"
        )
    )
    some = random.integers(0, 1 << 32, count, dtype=np.uint32)
    return np.where(random.random(count) < 0.4, random.choice(special, count), some).astype(np.uint32)


def long_values(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    some = random.integers(0, 1 << 64, count, dtype=np.uint64) >> random.integers(0, 64, count).astype(np.uint64)
    special = np.array(
        [0, 1, 2**31, 2**32 - 1, 2**53 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**24 + 1], np.uint64
    )
    return np.where(random.random(count) < 0.2, random.choice(special, count), some).astype(np.uint64)


def doubles(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    special = np.array(
        [
            0.0,
            -0.0,
            1,
            -1,
            1.5,
            np.inf,
            -np.inf,
            5e-324,
            2.3e-308,
            1.8e308,
            65520,
            3.4028236e38,
            1e-45,
            2147483647.5,
            4294967296,
            9.3e18,
            1.9e19,
            0.5,
            2.5,
        ],
        np.float64,
    ).view(np.uint64)
    special = np.concatenate(
        [special, np.array([0x7FF0000000000001, 0x7FF8000000000000, 0xFFF8123456789ABC], np.uint64)]
    )
    bits = random.integers(0, 1 << 64, count, dtype=np.uint64)
    near = (bits & np.uint64(0x800FFFFFFFFFFFFF)) | (
        random.integers(1023 - 160, 1023 + 140, count).astype(np.uint64) << np.uint64(52)
    )
    near = np.where(random.random(count) < 0.3, near & np.uint64(0xFFFFFFFFF0000000), near)
    out = np.where(random.random(count) < 0.7, near, bits)
    return np.where(random.random(count) < 0.2, random.choice(special, count), out).astype(np.uint64)


def float_arithmetic(store: Store) -> None:
    a, b = float_pairs(8192)
    f = [
        f"{op}.{r}{ftz}{sat}.f32 $o, $a, $b;"
        for op in ("add", "mul")
        for r in ROUNDINGS
        for ftz in ("", ".ftz")
        for sat in ("", ".sat")
        if r == "rn" or not sat
    ]
    f += ["sub.rn.f32 $o, $a, $b;", "sub.rn.ftz.f32 $o, $a, $b;"]
    f += [
        f"{m}{ftz}{nan}{x}.f32 $o, $a, $b;"
        for m in ("min", "max")
        for ftz in ("", ".ftz")
        for nan in ("", ".NaN")
        for x in ("", ".xorsign.abs")
    ]
    f += ["copysign.f32 $o, $a, $b;"]
    f += [f"div.{d}.f32 $o, $a, $b;" for d in ("rn", "rz", "rn.ftz", "approx", "approx.ftz", "full", "full.ftz")]
    lines = typed("f32", f) + typed("u32", compared_by("f32") + compared_by("f32", ".ftz"))
    lines += [(f"set.{o}.{t}.f32 $o, $a, $b;", "u32") for o in ("lt", "geu") for t in ("u32", "f32")]
    elementwise(store, "float", "r", [a, b], lines)
    triples = float_triples(8192)
    fma = [
        f"fma.{r}{ftz}{sat}.f32 $o, $a, $b, $c;"
        for r in ROUNDINGS
        for ftz in ("", ".ftz")
        for sat in ("", ".sat")
        if r == "rn" or not sat
    ]
    elementwise(store, "fma", "r", list(triples), typed("f32", fma))


def half_arithmetic(store: Store) -> None:
    for t in ("f16", "bf16"):
        x = half_words(8192, 3, 11)
        ftzs = ("", ".ftz") if t == "f16" else ("",)
        two = [f"{op}.rn{f}{s}.{t}x2 $o, $a, $b;" for op in ("add", "sub", "mul") for f in ftzs for s in ("", ".sat")]
        two += [f"{op}.{t}x2 $o, $a, $b;" for op in ("add", "mul")]
        two += [
            f"{m}{f}{n}{s}.{t}x2 $o, $a, $b;"
            for m in ("min", "max")
            for f in ftzs
            for n in ("", ".NaN")
            for s in ("", ".xorsign.abs")
        ]
        lines = typed(t, two)
        lines += [(f"set.{o}.{t}x2.{t}x2 $o, $a, $b;", t) for o in ORDERS]
        lines += [
            (
                f".reg .pred p, q; setp.{o}.{t}x2 p|q, $a, $b; .reg .u32 x, y; selp.u32 x, 1, 0, p; "
                "selp.u32 y, 2, 0, q; or.b32 $o, x, y;",
                "u32",
            )
            for o in ORDERS
        ]
        lines += [(f"abs.{t}x2 $o, $a;", t), (f"neg.{t}x2 $o, $a;", t)]
        elementwise(store, f"pairs_{t}", "r", list(x[:2]), lines)
        elementwise(
            store,
            f"fma_{t}",
            "r",
            list(x),
            typed(
                t,
                [
                    f"fma.rn{f}{m}.{t}x2 $o, $a, $b, $c;"
                    for f in ftzs
                    for m in ("", ".sat", ".relu", ".oob", ".oob.relu")
                ],
            ),
        )
        single = [v.astype(np.uint16) for v in x]
        elementwise(
            store,
            f"single_{t}",
            "h",
            single[:2],
            typed(
                t,
                [f"{op}.rn.{t} $o, $a, $b;" for op in ("add", "sub", "mul")]
                + [f"{m}.{t} $o, $a, $b;" for m in ("min", "max")],
            ),
        )
        elementwise(
            store,
            f"mixed_{t}",
            "r",
            [x[0]],
            [
                (
                    "=__float_as_uint("
                    + (
                        "__half2float(__hadd(__ushort_as_half((u16)a), __ushort_as_half((u16)(a >> 16))))"
                        if t == "f16"
                        else "__bfloat162float(__hadd(__ushort_as_bfloat16((u16)a), "
                        "__ushort_as_bfloat16((u16)(a >> 16))))"
                    )
                    + ")",
                    "f32",
                )
            ],
        )


def double_arithmetic(store: Store) -> None:
    a, b, c = doubles(2048, 21), doubles(2048, 22), doubles(2048, 23)
    b[::5] = a[::5] ^ np.uint64(1 << 63) ^ np.uint64(5)
    with np.errstate(all="ignore"):
        c[::3] = (-(a.view(np.float64) * b.view(np.float64))).view(np.uint64)[::3] + np.uint64(2)
    lines = [f"{op}.{r}.f64 $o, $a, $b;" for op in ("add", "mul") for r in ROUNDINGS]
    lines += [f"{m}.f64 $o, $a, $b;" for m in ("min", "max")]
    lines += [f"div.{r}.f64 $o, $a, $b;" for r in ("rn", "rz")]
    elementwise(store, "double", "l", [a, b], typed("f64", lines))
    elementwise(store, "double_fma", "l", [a, b, c], typed("f64", [f"fma.{r}.f64 $o, $a, $b, $c;" for r in ROUNDINGS]))
    unary = [
        "rcp.rn.f64 $o, $a;",
        "sqrt.rn.f64 $o, $a;",
        "rsqrt.approx.f64 $o, $a;",
        "rsqrt.approx.ftz.f64 $o, $a;",
        "rcp.approx.ftz.f64 $o, $a;",
        "abs.f64 $o, $a;",
        "neg.f64 $o, $a;",
    ]
    elementwise(store, "double_unary", "l", [a], typed("f64", unary))
    elementwise(store, "double_compare", "r", [a, b], typed("u32", compared_by("f64")))


def integers(store: Store) -> None:
    a, b, c = int_values(4096, 31), int_values(4096, 32), int_values(4096, 33)
    nonzero = np.where(b == 0, 3, b).astype(np.uint32)
    one = [
        "popc.b32 $o, $a;",
        "brev.b32 $o, $a;",
        "clz.b32 $o, $a;",
        "abs.s32 $o, $a;",
        "neg.s32 $o, $a;",
        "not.b32 $o, $a;",
        "cnot.b32 $o, $a;",
    ]
    one += [f"bfind{s}.{t} $o, $a;" for s in ("", ".shiftamt") for t in ("u32", "s32")]
    two = [
        f"{op}.{t} $o, $a, $b;"
        for op in ("mul.lo", "mul.hi", "min", "max", "mul24.lo", "mul24.hi")
        for t in ("s32", "u32")
    ]
    two += [
        "add.sat.s32 $o, $a, $b;",
        "sub.sat.s32 $o, $a, $b;",
        "shl.b32 $o, $a, $b;",
        "shr.s32 $o, $a, $b;",
        "shr.u32 $o, $a, $b;",
        "min.relu.s32 $o, $a, $b;",
        "max.relu.s32 $o, $a, $b;",
    ]
    two += [f"{m}.{k} $o, $a, $b;" for m in ("min", "max", "min.relu", "max.relu", "add") for k in ("s16x2", "u16x2")]
    two += [f"bmsk.{m}.b32 $o, $a, $b;" for m in ("clamp", "wrap")]
    two += [f"szext.{m}.{t} $o, $a, $b;" for m in ("clamp", "wrap") for t in ("s32", "u32")]
    two += [
        f".reg .pred p; setp.{o}.{t} p, $a, $b; selp.u32 $o, 1, 0, p;"
        for o in ("lt", "le", "gt", "ge")
        for t in ("s32", "u32")
    ]
    two += [
        f"={f}(a, b)"
        for f in (
            "__vadd4",
            "__vsub2",
            "__vaddss2",
            "__vaddus4",
            "__vabsdiffu4",
            "__vabsdiffs4",
            "__vsadu4",
            "__vsads2",
            "__vavgu4",
            "__vmaxs4",
            "__vminu2",
            "__vcmpgts4",
            "__vseteq2",
            "__vabsss4",
        )
        if f != "__vabsss4"
    ]
    three = [f"mad.{k}.{t} $o, $a, $b, $c;" for k in ("lo", "hi") for t in ("s32", "u32")] + [
        "mad.hi.sat.s32 $o, $a, $b, $c;"
    ]
    three += [f"shf.{d}.{m}.b32 $o, $a, $b, $c;" for d in ("l", "r") for m in ("wrap", "clamp")]
    three += [f"prmt.b32{m} $o, $a, $b, $c;" for m in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")]
    three += [f"lop3.b32 $o, $a, $b, $c, {lut};" for lut in (0x80, 0x96, 0xE8, 0xCA, 0x1B, 0x57, 0xD8)]
    three += [f"bfe.{t} $o, $a, $b, $c;" for t in ("s32", "u32")] + [f"sad.{t} $o, $a, $b, $c;" for t in ("s32", "u32")]
    three += [f"dp4a.{x}.{y} $o, $a, $b, $c;" for x in ("s32", "u32") for y in ("s32", "u32")]
    three += [f"dp2a.{h}.{x}.{y} $o, $a, $b, $c;" for h in ("lo", "hi") for x in ("s32", "u32") for y in ("s32", "u32")]
    three += [f"bfi.b32 $o, $a, $b, $c, {n};" for n in (0, 5, 32, 40)]
    three += [
        "add.cc.u32 $o, $a, $b; addc.u32 $o, $o, $c;",
        "sub.cc.u32 $o, $a, $b; subc.u32 $o, $o, $c;",
        "mad.lo.cc.u32 $o, $a, $b, $c; madc.hi.u32 $o, $a, $b, $o;",
    ]
    signed = {"s32": "(int)a, (int)b, (int)c", "u32": "a, b, c", "s16x2": "a, b, c", "u16x2": "a, b, c"}
    for kind, given in signed.items():
        three += [
            f"=(u32){f}_{kind}{relu}({given})"
            for f in ("__viaddmax", "__viaddmin", "__vimax3", "__vimin3")
            for relu in (("", "_relu") if kind[0] == "s" else ("",))
        ]
    elementwise(store, "int_one", "r", [a], typed("u32", one))
    elementwise(store, "int_two", "r", [a, b], typed("u32", two))
    elementwise(store, "int_three", "r", [a, b, c], typed("u32", three))
    small = np.where(np.arange(4096) % 2, c & 63, c).astype(np.uint32)
    elementwise(
        store,
        "int_small",
        "r",
        [a, b & np.uint32(63), small],
        typed("u32", [x for x in three if x.startswith(("shf", "bfe", "prmt"))]),
    )
    elementwise(
        store,
        "int_divide",
        "r",
        [a, nonzero],
        typed("u32", [f"{d}.{t} $o, $a, $b;" for d in ("div", "rem") for t in ("s32", "u32")]),
    )
    elementwise(store, "int_wide", "l", [a, b], typed("u64", [f"mul.wide.{t} $o, $a, $b;" for t in ("s32", "u32")]))
    x, y = long_values(2048, 34), long_values(2048, 35)
    many = [
        f"{op} $o, $a, $b;"
        for op in ("mul.lo.u64", "mul.hi.u64", "mul.hi.s64", "add.u64", "sub.u64", "min.s64", "max.u64", "xor.b64")
    ]
    elementwise(store, "long", "l", [x, y], typed("u64", many))
    elementwise(
        store,
        "long_one",
        "r",
        [x],
        typed("u32", ["popc.b64 $o, $a;", "clz.b64 $o, $a;", "bfind.u64 $o, $a;", "bfind.s64 $o, $a;"]),
    )
    elementwise(store, "long_reverse", "l", [x], typed("u64", ["brev.b64 $o, $a;", "abs.s64 $o, $a;"]))
    elementwise(
        store,
        "long_divide",
        "l",
        [x, np.where(y == 0, 7, y).astype(np.uint64)],
        typed("u64", [f"{d}.{t} $o, $a, $b;" for d in ("div", "rem") for t in ("s64", "u64")]),
    )
    shift = int_values(2048, 36) & np.uint32(127)
    elementwise(
        store,
        "long_shift",
        "l",
        [x, shift],
        typed("u64", [f"{s} $o, $a, $b;" for s in ("shl.b64", "shr.u64", "shr.s64")]),
    )


def warps(store: Store) -> None:
    a = int_values(4096, 41)
    lane = np.random.default_rng(42).integers(0, 40, 4096).astype(np.uint32)
    lines = []
    for mode, limits in (
        ("up", (0, 0x1800, 0x0810)),
        ("down", (31, 0x181F, 0x1007)),
        ("bfly", (31, 0x181F, 0x1C07)),
        ("idx", (31, 0x181F, 0x1C07, 0x0003)),
    ):
        for c in limits:
            lines += [
                f".reg .pred p; .reg .u32 x; shfl.sync.{mode}.b32 x|p, $a, {by}, {c}, 0xffffffff; "
                "selp.u32 $o, 1, 0, p; mad.lo.u32 $o, x, 2, $o;"
                for by in ("$b", "1", "5")
            ]
    elementwise(store, "shuffle", "r", [a, lane], typed("u32", lines))
    few = np.random.default_rng(43).integers(0, 3, 4096).astype(np.uint32)
    few[:1024] = np.repeat(few[:32], 32)
    votes = [
        f".reg .pred p, q; setp.gt.u32 p, $a, 0; vote.sync.{m}.pred q, p, 0xffffffff; selp.u32 $o, 1, 0, q;"
        for m in ("all", "any", "uni")
    ]
    votes += [
        ".reg .pred p; setp.gt.u32 p, $a, 0; vote.sync.ballot.b32 $o, p, 0xffffffff;",
        "match.any.sync.b32 $o, $a, 0xffffffff;",
        ".reg .pred p; .reg .u32 x; match.all.sync.b32 x|p, $a, 0xffffffff; selp.u32 $o, 1, 0, p; xor.b32 $o, $o, x;",
        ".reg .pred p; .reg .u32 x; elect.sync x|p, 0xffffffff; selp.u32 $o, $a, x, p;",
    ]
    elementwise(store, "vote", "r", [few], typed("u32", votes))
    elementwise(
        store,
        "match_long",
        "r",
        [few.astype(np.uint64) << np.uint64(33)],
        typed("u32", ["match.any.sync.b64 $o, $a, 0xffffffff;"]),
    )
    redux = [
        f"redux.sync.{op} $o, $a, 0xffffffff;"
        for op in ("add.s32", "add.u32", "min.s32", "min.u32", "max.s32", "max.u32", "and.b32", "or.b32", "xor.b32")
    ]
    redux += [
        "=(threadIdx.x % 3 ? __reduce_add_sync(__activemask(), a) : __ballot_sync(__activemask(), a & 1))",
        "=(a & 1 ? __match_any_sync(__activemask(), a >> 30) : __reduce_min_sync(__activemask(), a))",
        "=(a & 1 ? __shfl_sync(__activemask(), a, 7) * 0 + __activemask() : 7u)",
    ]
    elementwise(store, "redux", "r", [a], typed("u32", redux))


def sweeps(store: Store) -> None:
    """Special functions over whole ranges of mantissas, for the GPU alone: tables can be read off them."""
    one = 0x3F800000
    plans = [
        ("ex2", one, 1, 1 << 23),
        ("lg2", one, 2, 1 << 22),
        ("rcp", one, 2, 1 << 22),
        ("rsqrt", one, 8, 1 << 21),
        ("sqrt", one, 8, 1 << 21),
        ("sin", 0x3E000000, 16, 1 << 21),
        ("cos", 0x3E000000, 16, 1 << 21),
        ("tanh", 0x3E000000, 24, 1 << 21),
        ("ex2", 0x3C000000, 16, 1 << 21),
        ("lg2", 0x3F000000, 8, 1 << 20),
        ("ex2", 0xC1000000, 8, 1 << 20),
    ]
    for name, start, stride, count in plans:
        ftz = "" if name == "tanh" else ".ftz"
        text = f"""extern "C" __global__ void kernel(u32* o, u32 start, u32 stride) {{
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  asm volatile("{name}.approx{ftz}.f32 %0, %1;" : "=r"(o[i]) : "r"(start + i * stride));
}}
"""
        case = Probe(
            f"sweep {name} from {start:#x} by {stride}",
            text,
            [result_buffer("o", 4 * count, "f32")],
            ["o", np.uint32(start), np.uint32(stride)],
            (count // 256, 1, 1),
            (256, 1, 1),
        )
        store.add(
            {
                "id": case.name,
                "executor": "not executed",
                "cubin": store.put(compile_text(text)),
                "source": store.put((PRELUDE + text).encode()),
                "inputs": [],
                "sweep": {"function": name, "start": start, "stride": stride},
                "buffers": {
                    "o": {"bytes": 4 * count, "init": "zero", "role": "out", "regions": [["o", "f32"]], "expect": None}
                },
                "launches": [
                    {
                        "entry": ENTRY,
                        "grid": case.grid,
                        "block": case.block,
                        "shared": 0,
                        "arguments": [argument_json(a) for a in case.arguments],
                    }
                ],
            }
        )


# ── atomics ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def atomics(store: Store) -> None:
    """Each thread has a place of 16 bytes of its own, so that no order matters."""
    count = 2048
    f = float_pairs(count * 4, 51)
    h = half_words(count * 4, 2, 52)
    d = doubles(count * 2, 53), doubles(count * 2, 54)
    i = int_values(count * 4, 55), int_values(count * 4, 56)
    data = {"f32": f, "f16": h, "bf16": h, "f64": d, "u32": i}
    scalar = [
        ("atom.global.add.f32", "f32", "r", 1),
        ("red.global.add.f32", "f32", "r", 1),
        ("atom.global.add.noftz.f16x2", "f16", "r", 1),
        ("red.global.add.noftz.f16x2", "f16", "r", 1),
        ("atom.global.add.noftz.bf16x2", "bf16", "r", 1),
        ("red.global.add.noftz.bf16x2", "bf16", "r", 1),
        ("atom.global.add.f64", "f64", "l", 1),
        ("red.global.add.f64", "f64", "l", 1),
        ("atom.shared.add.f32", "f32", "r", 1),
        ("atom.shared.add.f64", "f64", "l", 1),
        ("atom.shared.add.noftz.f16x2", "f16", "r", 1),
        ("atom.shared.add.noftz.bf16x2", "bf16", "r", 1),
    ]
    scalar += [
        (f"{k}.{o}", "u32", "r", 1)
        for k in ("atom.global", "red.global", "atom.shared")
        for o in (
            "add.u32",
            "min.s32",
            "max.s32",
            "min.u32",
            "max.u32",
            "inc.u32",
            "dec.u32",
            "and.b32",
            "or.b32",
            "xor.b32",
        )
    ]
    scalar += [
        (f"{k}.{o}", "u32", "l", 1)
        for k in ("atom.global", "atom.shared")
        for o in ("add.u64", "min.s64", "max.u64", "xor.b64", "exch.b64")
    ]
    vectors = [
        ("red.global.v2.f32.add", "f32", "f", 2),
        ("red.global.v4.f32.add", "f32", "f", 4),
        ("atom.global.v4.f32.add", "f32", "f", 4),
        ("red.global.v2.f16x2.add.noftz", "f16", "r", 2),
        ("red.global.v4.f16x2.add.noftz", "f16", "r", 4),
        ("red.global.v4.bf16x2.add.noftz", "bf16", "r", 4),
        ("red.global.v2.f16x2.min.noftz", "f16", "r", 2),
        ("red.global.v4.bf16x2.max.noftz", "bf16", "r", 4),
    ]
    for name, kind, letter, wide in [*scalar, *vectors]:
        memory, value = data[kind]
        if kind == "f64":  # a loop around a compare-and-swap need not end on NaN
            memory, value = (np.where(nan_of(x, 52), 3, x).astype(np.uint64) for x in (memory, value))
        shared, reduces = ".shared" in name, name.startswith("red")
        stride = 16 // memory.itemsize if wide > 1 or letter != "l" else 2
        ctype = {"r": "u32", "f": "float", "l": "u64"}[letter]
        per = 16 // {"u32": 4, "float": 4, "u64": 8}[ctype]
        dst = [f"%{n}" for n in range(wide)]
        src = [f"%{n + (0 if reduces else wide) + 1}" for n in range(wide)]
        address = "%0" if reduces else f"%{wide}"
        braces = "{{{}}}".format if wide > 1 else str
        call = (
            f"{name} "
            + ("" if reduces else braces(", ".join(dst)) + ", ")
            + f"[{address}], "
            + braces(", ".join(src))
            + ";"
        )
        outs = "" if reduces else ", ".join(f'"={letter}"(y[{n}])' for n in range(wide))
        ins = ", ".join(f'"{letter}"(x[{n}])' for n in range(wide))
        place = '"r"(at_shared(s + threadIdx.x * PER))' if shared else '"l"(m + i * PER)'
        text = f"""extern "C" __global__ void kernel(const {ctype}* a, {ctype}* m, {ctype}* o) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  __shared__ {ctype} s[128 * PER];
  {ctype} x[PER], y[PER];
  for (int n = 0; n < PER; n++) x[n] = a[i * PER + n], y[n] = 0, s[threadIdx.x * PER + n] = m[i * PER + n];
  __syncthreads();
  asm volatile("{call}" : {outs} : {place}, {ins} : "memory");
  __syncthreads();
  for (int n = 0; n < PER; n++) o[i * PER + n] = {"s[threadIdx.x * PER + n]" if shared else "y[n]"};
}}
""".replace("PER", str(per))
        assert stride
        size = count * 16
        buffers = [
            source_buffer("a", value.tobytes()[:size]),
            Buffer("m", "inout", memory.tobytes()[:size], regions=[(name, kind if kind in TYPES else "u32")]),
            result_buffer(
                "o",
                size,
                kind,
                name + " (result)",
            ),
        ]
        record(
            store,
            Probe(
                f"atomic {name}", text, buffers, ["a", "m", "o"], (count // 128, 1, 1), (128, 1, 1), inputs=["a", "m"]
            ),
        )
