"""Probes of special functions and conversions: every pair of types with roundings and saturation."""

from __future__ import annotations

import numpy as np

from benchmarks.probe_store import (
    Store,
)
from benchmarks.probe_values import (
    EVERY16,
    ROUNDINGS,
    doubles,
    elementwise,
    every_exponent,
    int_values,
    long_values,
    packed,
    typed,
)


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
