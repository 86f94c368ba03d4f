"""Integers, floats, moves and memory in machine code: kernels that NVRTC compiles give what NumPy gives."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.exhaustive import more
from tests.support.machine_code import SOME_ARCHS, elementwise, execute

N = 256
EDGES_32 = np.array([0, 1, -1, 2, 7, 31, 32, 33, 255, 65535, 65536, 2**31 - 1, -(2**31), -(2**31) + 1], np.int64)


def integers(bits: int, seed: int) -> np.ndarray:
    """Drawn values of every length in bits, among them the ends of the range."""
    random = np.random.default_rng(seed)
    values = random.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), N, np.int64) >> random.integers(0, bits, N)
    edges = EDGES_32 if bits == 32 else np.concatenate([EDGES_32, [2**63 - 1, -(2**63), 2**32, -(2**32) - 1]])
    values[: edges.size] = edges
    random.shuffle(values)
    return values.astype(np.int32 if bits == 32 else np.int64)


def check_exact(expressions, arguments, result, arch, before=""):
    """`expressions`: C text → NumPy function of the arguments' arrays; `result`: C type and NumPy dtype."""
    text = elementwise({name: kind for name, (kind, _) in arguments.items()}, result[0], list(expressions), before)
    inputs = {name: data for name, (_, data) in arguments.items()}
    got = execute(text, arch, inputs, {"out": (result[1], (len(expressions), N))}, threads=128, grid=2)["out"]
    with np.errstate(all="ignore"):
        for row, (expression, function) in zip(got, expressions.items(), strict=True):
            expected = np.asarray(function(*inputs.values())).astype(result[1])
            np.testing.assert_array_equal(row, expected, err_msg=expression)


def per_element(function):
    return lambda *arrays: np.array([function(*(int(x) for x in row)) for row in zip(*arrays, strict=True)], object)


def quotient(a, b):
    """C's: towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def wrap(value, bits=32):
    low = value & (1 << bits) - 1
    return low - (1 << bits) if low >> (bits - 1) else low


def wrapped32(function):
    return per_element(lambda *values: wrap(function(*values)))


def wrapped64(function):
    return per_element(lambda *values: wrap(function(*values), 64))


M32, M64 = 2**32 - 1, 2**64 - 1


def byte_permute(a, b, by):
    both = (a & M32) | (b & M32) << 32
    return sum((both >> 8 * (by >> 4 * k & 7) & 0xFF) << 8 * k for k in range(4))


def signed_bytes(x):
    return [((x >> 8 * k & 0xFF) ^ 0x80) - 0x80 for k in range(4)]


def unsigned_bytes(x):
    return [x >> 8 * k & 0xFF for k in range(4)]


def from_parts(width, parts):
    return sum(part << width * k for k, part in enumerate(parts))


def distances(a, b):
    return [abs(p - q) for p, q in zip(a, b, strict=True)]


INTEGER_32 = {
    "a + b": wrapped32(lambda a, b, c: a + b),
    "a - b - c": wrapped32(lambda a, b, c: a - b - c),
    "a * b + c": wrapped32(lambda a, b, c: a * b + c),
    "c - a * b": wrapped32(lambda a, b, c: c - a * b),
    "b ? a / (b == -1 ? 3 : b) : 0": wrapped32(lambda a, b, c: quotient(a, 3 if b == -1 else b) if b else 0),
    "b ? (int)((unsigned)a % (unsigned)b) : 0": wrapped32(lambda a, b, c: (a & M32) % (b & M32) if b else 0),
    "a / 7": wrapped32(lambda a, b, c: quotient(a, 7)),
    "(int)((unsigned)a / 641u)": wrapped32(lambda a, b, c: (a & M32) // 641),
    "a % 10": wrapped32(lambda a, b, c: a - 10 * quotient(a, 10)),
    "__mulhi(a, b)": wrapped32(lambda a, b, c: a * b >> 32),
    "(int)__umulhi(a, b)": wrapped32(lambda a, b, c: (a & M32) * (b & M32) >> 32),
    "a << (c & 31)": wrapped32(lambda a, b, c: a << (c & 31)),
    "a >> (c & 31)": wrapped32(lambda a, b, c: a >> (c & 31)),
    "(int)((unsigned)a >> (c & 31))": wrapped32(lambda a, b, c: (a & M32) >> (c & 31)),
    "__clz(a)": wrapped32(lambda a, b, c: 32 - (a & M32).bit_length()),
    "__popc(a)": wrapped32(lambda a, b, c: (a & M32).bit_count()),
    "__ffs(a)": wrapped32(lambda a, b, c: (a & -a).bit_length()),
    "(int)__brev(a)": wrapped32(lambda a, b, c: int(f"{a & M32:032b}"[::-1], 2)),
    "(int)__byte_perm(a, b, c)": wrapped32(byte_permute),
    "(int)__byte_perm(a, b, 0x3715)": wrapped32(lambda a, b, c: byte_permute(a, b, 0x3715)),
    "(int)__funnelshift_l(a, b, c)": wrapped32(lambda a, b, c: (((b & M32) << 32 | a & M32) << (c & 31)) >> 32),
    "(int)__funnelshift_r(a, b, c)": wrapped32(lambda a, b, c: ((b & M32) << 32 | a & M32) >> (c & 31)),
    "(int)__funnelshift_lc(a, b, c)":
        wrapped32(lambda a, b, c: (((b & M32) << 32 | a & M32) << min(c & M32, 32)) >> 32),
    "(int)__funnelshift_rc(a, b, c)": wrapped32(lambda a, b, c: ((b & M32) << 32 | a & M32) >> min(c & M32, 32)),
    "min(a, b)": wrapped32(lambda a, b, c: min(a, b)),
    "(int)max((unsigned)a, (unsigned)b)": wrapped32(lambda a, b, c: max(a & M32, b & M32)),
    "max(min(a, b), c)": wrapped32(lambda a, b, c: max(min(a, b), c)),
    "max(a + b, c)": wrapped32(lambda a, b, c: max(wrap(a + b), c)),
    "max(a + 3, 0)": wrapped32(lambda a, b, c: max(wrap(a + 3), 0)),
    "abs(a)": wrapped32(lambda a, b, c: abs(a)),
    "(int)__sad(a, b, c)": wrapped32(lambda a, b, c: abs(a - b) + c),
    "(a & b) | (~a & c)": wrapped32(lambda a, b, c: a & b | ~a & c),
    "a ^ b ^ c": wrapped32(lambda a, b, c: a ^ b ^ c),
    "a > b": wrapped32(lambda a, b, c: a > b),
    "(unsigned)a <= (unsigned)b && b != c": wrapped32(lambda a, b, c: (a & M32) <= (b & M32) and b != c),
    "(a < b) != (b < c)": wrapped32(lambda a, b, c: (a < b) != (b < c)),
    "(a << 13) >> 13": wrapped32(lambda a, b, c: wrap(a << 13) >> 13),
    "(a >> 5) & ((1 << (b & 15)) - 1)": wrapped32(lambda a, b, c: a >> 5 & (1 << (b & 15)) - 1),
    "__dp4a(a, b, c)":
        wrapped32(lambda a, b, c: sum(p * q for p, q in zip(signed_bytes(a), signed_bytes(b), strict=True)) + c),
    "(int)__dp4a((unsigned)a, (unsigned)b, (unsigned)c)":
        wrapped32(lambda a, b, c: sum(p * q for p, q in zip(unsigned_bytes(a), unsigned_bytes(b), strict=True)) + c),
    "(signed char)a + (short)b + (unsigned char)c":
        wrapped32(lambda a, b, c: signed_bytes(a)[0] + (((b & 0xFFFF) ^ 0x8000) - 0x8000) + (c & 0xFF)),
    "(int)__vabsdiffu4(a, b)":
        wrapped32(lambda a, b, c: from_parts(8, distances(unsigned_bytes(a), unsigned_bytes(b)))),
    "(int)__vsadu4(a, b) + (int)__vsads4(b, c)":
        wrapped32(lambda a, b, c: sum(distances(unsigned_bytes(a), unsigned_bytes(b)))
                  + sum(distances(signed_bytes(b), signed_bytes(c)))),
    "(int)__vadd2(a, b)": wrapped32(lambda a, b, c: from_parts(16, [(a + b) & 0xFFFF, (a >> 16) + (b >> 16) & 0xFFFF])),
    "a == b ? c : a & 1 ? b : a": wrapped32(lambda a, b, c: c if a == b else b if a & 1 else a),
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_75", "sm_89", *more(["sm_80", "sm_90a"])])
def test_integers(arch):
    arguments = {name: ("int", integers(32, seed)) for seed, name in enumerate("abc")}
    check_exact(INTEGER_32, arguments, ("int", np.int32), arch)


INTEGER_64 = {
    "a + b": wrapped64(lambda a, b: a + b),
    "a - b": wrapped64(lambda a, b: a - b),
    "a * b": wrapped64(lambda a, b: a * b),
    "b ? a / (b == -1 ? 3 : b) : 0": wrapped64(lambda a, b: quotient(a, 3 if b == -1 else b) if b else 0),
    "b ? a % (b == -1 ? 3 : b) : 0":
        wrapped64(lambda a, b: a - b * quotient(a, b) if b not in (0, -1) else a - 3 * quotient(a, 3) if b else 0),
    "b ? (long long)((u64)a / (u64)b) : 0": wrapped64(lambda a, b: (a & M64) // (b & M64) if b else 0),
    "b ? (long long)((u64)a % (u64)b) : 0": wrapped64(lambda a, b: (a & M64) % (b & M64) if b else 0),
    "a / 1000003": wrapped64(lambda a, b: quotient(a, 1000003)),
    "__mul64hi(a, b)": wrapped64(lambda a, b: a * b >> 64),
    "(long long)__umul64hi(a, b)": wrapped64(lambda a, b: (a & M64) * (b & M64) >> 64),
    "a << (b & 63)": wrapped64(lambda a, b: a << (b & 63)),
    "a >> (b & 63)": wrapped64(lambda a, b: a >> (b & 63)),
    "(long long)((u64)a >> (b & 63))": wrapped64(lambda a, b: (a & M64) >> (b & 63)),
    "__clzll(a)": wrapped64(lambda a, b: 64 - (a & M64).bit_length()),
    "__popcll(a)": wrapped64(lambda a, b: (a & M64).bit_count()),
    "__ffsll(a)": wrapped64(lambda a, b: (a & -a).bit_length()),
    "(long long)__brevll(a)": wrapped64(lambda a, b: int(f"{a & M64:064b}"[::-1], 2)),
    "a < b": wrapped64(lambda a, b: a < b),
    "(u64)a >= (u64)b": wrapped64(lambda a, b: (a & M64) >= (b & M64)),
    "a == b || a > 0": wrapped64(lambda a, b: a == b or a > 0),
    "min(a, b)": wrapped64(lambda a, b: min(a, b)),
    "(long long)(int)a * (int)b + a": wrapped64(lambda a, b: wrap(a) * wrap(b) + a),
    "(long long)((u64)(unsigned)a * (unsigned)b)": wrapped64(lambda a, b: (a & M32) * (b & M32)),
    "llabs(a)": wrapped64(lambda a, b: abs(a)),
    "b - (a << 6)": wrapped64(lambda a, b: b - (a << 6)),
    "b - ((long long)(int)b << 6)": wrapped64(lambda a, b: b - (wrap(b) << 6)),
}  # fmt: skip


@pytest.mark.parametrize("arch", SOME_ARCHS)
def test_long_integers(arch):
    arguments = {name: ("long long", integers(64, seed)) for seed, name in enumerate("ab", 5)}
    check_exact(INTEGER_64, arguments, ("long long", np.int64), arch, "typedef unsigned long long u64;")
