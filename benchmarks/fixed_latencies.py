"""The least clocks that ptxas leaves between instructions of which one needs the other's result, read off its binaries.

    python benchmarks/fixed_latencies.py [--binaries 500] [--seed 1] [--gpu NAME …] [--cubins DIR …] [--write]

Draws configurations of all shipped spaces for sm_75 to sm_120, or for the named GPUs, and compiles them here; DIRs
hold cubins of others, such as FlashAttention-3's and Triton's. Where an instruction has a fixed latency, only the
stall counts behind it keep the next from reading too early, so that the least sum of stalls over many binaries is the
latency, or above it. A figure is kept where ptxas left as few clocks at least OFTEN times: otherwise none may be the
least. --write puts them into evoengine/sass/core/fixed_latencies.inc, in place of those of the architectures that
were looked at.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.drawn_binaries import GPUS, draw  # noqa: E402
from evoengine.sass.core import Program  # noqa: E402
from evoengine.sass.cubin import kernel_names, read_kernel  # noqa: E402
from evoengine.sass.listing import disassemble  # noqa: E402

FILE = ROOT / "evoengine/sass/core/fixed_latencies.inc"
OFTEN = 10
"""times that the least distance must have been left"""
OTHER = "Other"
"""any consumer that has no line of its own: one clock less than the least distance of all, however rare"""
SLOW = 8
"""clocks from which on a result may come after that of a later instruction, which then must wait to overwrite it"""
ENOUGH = 1000
"""pairs of a producer with any consumer, for its least distance to be told"""
RARE = "AtomicValue"
"""a consumer of which few pairs are found, and which needs less than others: OFTEN of them are enough"""

NEEDS = {"RAW": "Read", "WAW": "Write", "WAR": "AfterRead"}
FILES = {"R": "Register", "UR": "Uniform", "P": "Predicate", "UP": "UniformPredicate", "SB": "Scoreboard"}

Key = tuple[int, str, str, str, str]
"""architecture, need, producer's unit, file of registers, consumer's unit"""
Distances = defaultdict[Key, Counter[int]]


def measure(binaries: Iterable[tuple[Program, int]]) -> tuple[Distances, int]:
    """Return how often each distance in clocks was left, and how many binaries there were."""
    found: Distances = defaultdict(Counter)
    count = 0
    for program, arch in binaries:
        count += 1
        for line in program.latencies(arch).splitlines():
            need, producer, file, consumer, clocks, times = line.split()
            found[arch, need, producer, file, consumer][int(clocks)] += int(times)
    return found, count


def drawn(count: int, seed: int, gpus: Sequence[str]) -> Iterable[tuple[Program, int]]:
    for one in draw(count, seed, gpus):
        yield Program(one.binary.listing, one.source.entry), read_kernel(one.binary.cubin, one.source.entry).arch


def of_others(folders: Iterable[Path]) -> Iterable[tuple[Program, int]]:
    for path in sorted(path for folder in folders for path in folder.glob("*.cubin")):
        cubin = path.read_bytes()
        listing = disassemble(cubin)
        for entry in kernel_names(cubin):
            yield Program(listing, entry), read_kernel(cubin, entry).arch


def lines(found: Distances, binaries: int) -> list[str]:
    """Return the lines of the architectures, each with the distance, how often it was left, and of how many pairs."""
    out = [f"// {', '.join(f'sm_{arch}' for arch in sorted({key[0] for key in found}))}: {binaries} binaries"]
    for key in [key for key in found if key[1] == "RAW"]:
        found[*key[:4], OTHER] += found[key]
    often = {
        key: distances
        for key, distances in found.items()
        if (
            distances.total() >= (OFTEN if key[4] == RARE else ENOUGH)
            and (key[4] == OTHER or distances[min(distances)] >= OFTEN)
        )
    }
    for (arch, need, producer, file, consumer), distances in sorted(often.items()):
        least = min(distances)
        clocks = max(1, least - 1) if consumer == OTHER else least
        if need == "WAW":
            clocks = min(least, result_after(often, arch, producer, file))
            if clocks < SLOW:
                continue
        names = f"{arch}, {NEEDS[need]}, {producer}, {FILES[file]}, {consumer}"
        out.append(f"LATENCY({names}, {clocks}, {distances.total()})  // {distances[least]}")
    return out


def merged(held: str, measured: Sequence[str]) -> str:
    """Return the file's text with the measured lines in place of those of their architectures."""
    new = {line.split(",")[0] for line in measured if line.startswith("LATENCY")}
    kept = [line for line in held.splitlines() if line.split(",")[0] not in new]
    titles = [at for at, line in enumerate(kept) if line.startswith("// sm_")]
    empty = {at for at in titles if at + 1 == len(kept) or at + 1 in titles}
    return "\n".join([*(line for at, line in enumerate(kept) if at not in empty), *measured]) + "\n"


def result_after(found: Mapping[Key, Counter[int]], arch: int, producer: str, file: str) -> int:
    """Return the least clocks after which any unit reads the result: whoever overwrites it need wait no longer."""
    return min(found.get((arch, "RAW", producer, file, OTHER), [1]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--binaries", type=int, default=500, metavar="N", help="configurations to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpu", action="append", help="draw for this GPU alone; can be repeated")
    parser.add_argument("--cubins", type=Path, nargs="*", default=[], metavar="DIR", help="binaries of others")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.relative_to(ROOT)}")
    asked = parser.parse_args(arguments)

    def all_binaries() -> Iterable[tuple[Program, int]]:
        yield from drawn(asked.binaries, asked.seed, asked.gpu or GPUS)
        yield from of_others(asked.cubins)

    text = merged(FILE.read_text("utf-8"), lines(*measure(all_binaries())))
    if asked.write:
        FILE.write_text(text, "utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
