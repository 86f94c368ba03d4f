"""Probes of arithmetic, conversions, warps' exchanges and atomics, an instruction or a few at a time."""

from __future__ import annotations

import numpy as np

from benchmarks.hardware_bits import TYPES, nan_of
from benchmarks.probe_store import (
    ENTRY,
    PRELUDE,
    Buffer,
    Probe,
    Store,
    argument_json,
    compile_text,
    record,
    result_buffer,
    source_buffer,
)
from benchmarks.probe_values import (
    ORDERS,
    ROUNDINGS,
    compared_by,
    doubles,
    elementwise,
    float_pairs,
    float_triples,
    half_words,
    int_values,
    long_values,
    typed,
)


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
