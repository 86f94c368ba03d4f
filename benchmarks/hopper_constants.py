"""Micro-benchmarks that measure what evoengine/sass/chips.toml says of an H100: latencies, intervals, rates, clocks.

    python benchmarks/hopper_constants.py --prepare DIR           on any machine: compiles, reads the listings, predicts
    python benchmarks/hopper_constants.py --from DIR --out FILE   on an H100: measures, in about a minute

The second needs the checkout and NumPy, but neither a compiler nor torch. Each group runs in a process of its own with
a time limit, so that a fault or a hang costs no more than its group; FILE is written after each. A value is a slope
between two lengths of a loop, in which all that happens once cancels, unless its unit says otherwise. FILE has beside
each value the constant of chips.toml that it tells of, and what the model predicts of the same machine code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hopper_arithmetic import arithmetic, barriers
from benchmarks.hopper_bench import SMS, Bench, kernel, prepare
from benchmarks.hopper_gpu import measure, measure_group
from benchmarks.hopper_memory import memory, shared_memory, tma
from benchmarks.hopper_tensor import TILES, TILES_BYTES, beside, many, mma, sums_of, wgmma

# ── launches and clocks ─────────────────────────────────────────────────────────────────────────────────────────────


def launches() -> Iterator[Bench]:
    empty = kernel("if (n == -1) out[0] = 1;")
    yield Bench("launches", "empty kernels", empty, kind="launches", unit="µs", constant="launch_us", predict=False)
    for threads in (32, 128, 256, 1024):
        yield Bench(
            "launches", f"blocks of {threads} threads that end at once, clocks of an SM each", empty, kind="blocks",
            threads=threads, constant="block_start", predict=False,
        )  # fmt: skip
    yield Bench(
        "launches", "blocks of 128 threads with 64 KB of shared memory that end at once", empty, kind="blocks",
        threads=128, shared=64 << 10, constant="block_start", predict=False,
    )  # fmt: skip
    spin = kernel("if (threadIdx.x == 0) { u64 t0 = now(), g0 = nanoseconds(); while (now() - t0 < 4000000) {} "
                  "out[0] = now() - t0; out[1] = nanoseconds() - g0; }")  # fmt: skip
    yield Bench("launches", "clock of an idle GPU", spin, kind="mhz", unit="MHz", constant="boost_ghz", predict=False)


def power() -> Iterator[Bench]:
    """Bursts of products on random halves, one every p clocks or without a pause: the clock that the board sustains."""
    n, count = 256, 8
    declared, stored = sums_of(n)
    random = (
        "for (u32 i = threadIdx.x; i < 24576; i += blockDim.x) { u32 h = (i + blockIdx.x * 77777) * 2654435761u;\n"
        "h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;\n"
        "((u32*)s)[i] = (h & 0x83ff83ffu) | 0x38003800u; }\n"
    )
    tiles = TILES.replace("for (int i = threadIdx.x; i < 24576; i += blockDim.x) ((u32*)s)[i] = 0;", random)
    text = kernel(f"""{declared}{tiles}
u64 g0 = nanoseconds(), t0 = now(), next = t0, done = 0;
#pragma unroll 1
while (!__syncthreads_or(threadIdx.x == 0 && nanoseconds() - g0 >= (u64)n * 1000)) {{
  #pragma unroll 1
  for (int i = 0; i < 8; ++i) {{
    next += p;
    if (q) {{
      #pragma unroll 1
      for (int j = 0; j < 4; ++j) {{
        fence();
        accumulate = j;
        {many(n, count)}
        commit();
        pending<0>();
      }}
      ++done;
    }}
    if (p) while ((long long)(next - now()) > 0) asm volatile("nanosleep.u32 200;" ::: "memory");
  }}
}}
u64 t1 = now(), g1 = nanoseconds();
if (threadIdx.x == 0) {{ u64* to = out + blockIdx.x * 4; to[0] = t1 - t0; to[1] = g1 - g0; to[2] = done; to[3] = 0; }}
{stored}""", threads=256)  # fmt: skip
    for duty in (100, 75, 50, 37, 25, 12, 0):
        clocks = 2 * 4 * count * n // 2
        yield Bench(
            "power", f"tensor cores busy for {duty} % of the time", text, kind="power", grid=SMS, threads=256,
            shared=TILES_BYTES, unit="MHz", constant="boost_ghz, power_knee, power_base", n=(20000, 20000),
            p=clocks * 100 // duty * (duty < 100) if duty else 65536, q=int(duty > 0), steps=(clocks,),
            predict=False, expect={"HGMMA": count},
        )  # fmt: skip


GROUPS: dict[str, Callable[[], Iterator[Bench]]] = {
    "launches": launches, "wgmma": wgmma, "beside": beside, "tma": tma, "memory": memory, "mma": mma,
    "arithmetic": arithmetic, "shared": shared_memory, "barriers": barriers, "power": power,
}  # fmt: skip
"""what measures, in the order of its worth; `memory` yields the group `rates` too"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=600, help="after which nothing more is predicted")
    parser.add_argument("--from", type=Path, dest="source", metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--groups", nargs="*", default=[], help="only these")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.prepare:
        return min(1, prepare(asked.prepare, asked.seconds, GROUPS))
    if asked.group:
        return measure_group(asked.source, asked.group, asked.first)
    if not asked.source or not asked.out:
        parser.error("give --prepare DIR, or --from DIR and --out FILE")
    return measure(asked.source, asked.out, asked.groups)


if __name__ == "__main__":
    sys.exit(main())
