"""Values for the probes of hardware_probes.py, and the texts of kernels that compute them element by element."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.probe_store import (
    CTYPES,
    ENTRY,
    WIDTH,
    Buffer,
    Probe,
    Store,
    Unsupported,
    compile_text,
    execute,
    record,
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
