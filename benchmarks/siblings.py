"""Count the trials that other boards' figures save: `python benchmarks/siblings.py --spaces DIR... --kernels DIR...`.

Every ordered pair of two files of one kernel is a search of the second with the figures of the first as its prior. It
is counted how many trials pass until one is within 5 % of the best, with the figures and without them; a failed
configuration counts as one. `KERNEL_BOARD.json.gz` are recorded spaces (--spaces), `KERNEL/BOARD.json.gz` samples of
them (--kernels); the board is also named by the file where the file itself names none. With --trap each space is
searched with a misleading source too: its own times with noise, in which all that is near the best ranks behind
1,180 others, as gemm's best on an RTX 2080 Ti do on an RTX 3090.

Without a GPU; the recordings are no part of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import permutations
from pathlib import Path

# One search keeps one core busy: more threads under each only fight for it.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from scipy.stats import spearmanr  # noqa: E402

from benchmarks.prior import pool_of  # noqa: E402
from benchmarks.search_quality import NEAR, bootstrap, find_spaces  # noqa: E402
from evoengine.accuracy.dataset import read_kernel, read_recording  # noqa: E402
from evoengine.errors import EvoengineError, UsageError  # noqa: E402
from evoengine.search.neighbours import Matched, match_figures  # noqa: E402
from evoengine.search.proposer import Proposer  # noqa: E402
from evoengine.search.recorded import RecordedSpace, read_recorded  # noqa: E402
from evoengine.search.samplers.prior import Prior  # noqa: E402

OTHER_VENDOR = re.compile(r"amd|radeon|instinct|\bmi\d|w[5-9]\d00|vega|gfx|intel", re.IGNORECASE)
LEAST_LOSS, LOSS = 3, 0.1
"""trials, and share of the trials without, that a misleading source may cost in the median"""
TRAP_RANK, TRAP_NOISE = 1180, 0.15
TRAP = "(misleading)"


@dataclass(frozen=True)
class Board:
    """A recording of a kernel on one board."""

    kernel: str
    name: str
    path: Path
    sampled: bool
    """whether the file is a sample of a space, with its kernel in the folder"""

    @property
    def nvidia(self) -> bool:
        device = None if self.sampled else space_of(self).device
        return not OTHER_VENDOR.search(device or self.name)


@cache
def space_of(board: Board) -> RecordedSpace:
    if not board.sampled:
        return read_recorded(board.path)
    recording = read_recording(board.path, read_kernel(board.path.parent))
    return pool_of(board.path.parent, recording, np.full(len(recording.rows), np.nan)).space


def find_boards(spaces: Sequence[Path], kernels: Sequence[Path]) -> list[Board]:
    found = []
    for folder in spaces:
        for path in find_spaces(folder):
            kernel, _, name = path.name.split(".json")[0].rpartition("_")
            if not kernel:
                raise UsageError(f"{path} names no kernel; name a file KERNEL_BOARD.json or KERNEL_BOARD.json.gz")
            found.append(Board(kernel, name, path, False))
    for folder in kernels:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}; give one of folders of recorded kernels")
        paths = sorted(folder.glob("*.json.gz")) or sorted(folder.glob("*/*.json.gz"))
        found += [Board(f"{path.parent.name} (sample)", path.name.split(".json")[0], path, True) for path in paths]
    return found


def figures_of(source: Board, target: Board) -> Matched:
    """Return what the source's file says of the target's configurations."""
    space = space_of(source)
    times = zip(space.enumerate(), space.times.tolist(), strict=True)
    return match_figures(space_of(target), [(config, 1e3 * ms) for config, ms in times if ms == ms])


def trap_of(space: RecordedSpace) -> np.ndarray:
    """Return misleading times in µs [n], NaN of what failed: right on the whole, and wrong of the best."""
    rng, noise = np.random.default_rng(1), np.zeros(len(space))
    for one in range(space.rows.shape[1]):
        for other in range(one):
            effects = rng.normal(size=(space.rows[:, one].max() + 2, space.rows[:, other].max() + 2))
            noise += effects[space.rows[:, one], space.rows[:, other]]
    noise = TRAP_NOISE * (noise / noise.std() + 0.5 * rng.normal(size=len(noise)))
    times = 1e3 * space.times * np.exp(noise)
    best = space.rows[np.nanargmin(space.times)]
    near = (space.times <= NEAR * space.optimum) | (
        ((space.rows != best).sum(1) <= 4) & (space.times <= 1.12 * space.optimum)
    )
    behind = np.sort(times[~np.isnan(times)])[min(TRAP_RANK, len(times) // 4)]
    times[near] = np.maximum(times[near], behind * np.exp(0.1 * rng.random(near.sum())))
    return times


@cache
def expected(source: Board | None, target: Board) -> tuple[tuple[bytes, float], ...]:
    """Return the source's times in µs by encoded configuration; of the trap where there is no source."""
    space = space_of(target)
    if source is None:
        return tuple(
            (row.tobytes(), us) for row, us in zip(space.rows, trap_of(space).tolist(), strict=True) if us == us
        )
    return tuple((space.encode(config).tobytes(), us) for config, us in figures_of(source, target).us.values())


def trials(target: Board, source: Board | str | None, seed: int, limit: int) -> int:
    """Return the trials until one is within NEAR of the best, limit + 1 where none is; None is no source."""
    space, prior = space_of(target), None
    if source is not None:
        prior = Prior(space)
        for key, us in expected(None if source == TRAP else source, target):  # type: ignore[arg-type]
            prior.measure(space.decode(np.frombuffer(key, np.int16)), us)
    proposer = Proposer(space, "evolution", seed, prior=prior)
    for trial in range(1, limit + 1):
        proposal = proposer.propose()
        if proposal is None:
            break
        ms = space.time(proposal.config)
        if ms is not None and ms <= NEAR * space.optimum:
            return trial
        proposer.tell(proposal, None if ms is None else [space.optimum / ms])
    return limit + 1


@dataclass(frozen=True)
class Pair:
    kernel: str
    source: str
    target: str
    nvidia: bool
    """whether both boards are"""
    rho: float
    first_good: int
    """rank by the source of the first configuration within NEAR of the target's best"""
    without: list[int]
    led: list[int]
    said: list[str]

    @property
    def misleads(self) -> bool:
        """Return whether it costs more than a misleading source may."""
        base = float(np.median(self.without))
        return float(np.median(self.led)) > base + max(LEAST_LOSS, LOSS * base)


def compare(boards: Sequence[Board], trap: bool, seeds: int, limit: int, jobs: int) -> Iterator[Pair]:
    pairs: list[tuple[Board | None, Board]] = [(a, b) for a, b in permutations(boards, 2) if a.kernel == b.kernel]
    pairs += [(None, b) for b in boards if trap and not b.sampled]
    bases: dict[Board, list[int]] = {}
    with ProcessPoolExecutor(jobs) as executor:
        for source, target in pairs:
            if source is not None and not figures_of(source, target).us:
                print(f"left out: {source.path} and {target.path} have no knobs in common", file=sys.stderr)
                continue
            if target not in bases:
                bases[target] = _counted(executor, target, None, seeds, limit)
            led = _counted(executor, target, source or TRAP, seeds, limit)
            yield _pair(source, target, bases[target], led)


def _counted(
    executor: ProcessPoolExecutor, target: Board, source: Board | str | None, seeds: int, limit: int
) -> list[int]:
    return list(executor.map(trials, *zip(*((target, source, seed, limit) for seed in range(seeds)), strict=True)))


def _pair(source: Board | None, target: Board, without: list[int], led: list[int]) -> Pair:
    space, us = space_of(target), dict(expected(source, target))
    theirs = np.array([us.get(row.tobytes(), np.nan) for row in space.rows])
    both = ~np.isnan(theirs) & ~np.isnan(space.times)
    order = space.times[both][np.argsort(theirs[both], kind="stable")]
    good = np.flatnonzero(order <= NEAR * space.optimum)
    said = [] if source is None else figures_of(source, target).said
    if source is not None and not source.sampled and space_of(source).device is None:
        said = [f"{source.path.name} names no board; its name stands for it", *said]
    return Pair(
        target.kernel,
        TRAP if source is None else source.name,
        target.name,
        target.nvidia and (source is None or source.nvidia),
        float(spearmanr(theirs[both], space.times[both]).statistic),
        int(good[0]) + 1 if len(good) else 0,
        without,
        led,
        said,
    )


def table(pairs: Sequence[Pair], limit: int) -> Table:
    out = Table(
        title=f"trials until one is within {NEAR - 1:.0%} of the best, at most {limit}; mean with 95 % interval"
    )
    for name in ("kernel", "figures of", "searched", "ρ", "first good", "without", "with", "mean without", "mean with"):
        out.add_column(name, no_wrap=True, justify="left" if name in ("kernel", "figures of", "searched") else "right")
    for pair in pairs:
        medians = [f"{np.median(of):g}" for of in (pair.without, pair.led)]
        medians[1] += " !" if pair.misleads else ""
        means = [f"{np.mean(of):.1f} ({low:.1f}–{high:.1f})" for of in (pair.without, pair.led)
                 for low, high in [bootstrap(np.array(of, float))]]  # fmt: skip
        first = f"{pair.first_good:,}" if pair.first_good else "–"
        out.add_row(pair.kernel, pair.source, pair.target, f"{pair.rho:.2f}", first, *medians, *means)
    out.add_section()
    real = [pair for pair in pairs if pair.source != TRAP]
    for name, some in (("NVIDIA pairs", [p for p in real if p.nvidia]), ("all pairs", real)):
        if some:
            counts = [p.without for p in some], [p.led for p in some]
            means = [f"{np.mean([np.mean(of) for of in runs]):.1f}" for runs in counts]
            out.add_row(f"{name}: {len(some)}", "", "", "", "", "", "", *means)
    out.caption = f"! more than max({LEAST_LOSS}, {LOSS:.0%}) above the median without"
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spaces", type=Path, nargs="+", default=[], metavar="DIR", help="KERNEL_BOARD.json.gz")
    parser.add_argument("--kernels", type=Path, nargs="+", default=[], metavar="DIR", help="KERNEL/BOARD.json.gz")
    parser.add_argument("--trap", action="store_true", help="search each space with a misleading source too")
    parser.add_argument("--seeds", type=int, default=60, help="searches of each kind (default 60)")
    parser.add_argument("--limit", type=int, default=250, help="trials at which a search ends (default 250)")
    parser.add_argument("--jobs", type=int, default=1, help="searches at once (default 1)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    options = parser.parse_args(arguments)
    try:
        if min(options.seeds, options.limit, options.jobs) < 1:
            raise UsageError("--seeds, --limit and --jobs must be at least 1")
        if options.json and not options.json.parent.is_dir():
            raise UsageError(
                f"cannot write {options.json}: there is no folder {options.json.parent}; name a file in one"
            )
        boards = find_boards(options.spaces, options.kernels)
        for board in boards:
            space_of(board)  # a faulty file is reported before hours of searches, not after
        kernels = [board.kernel for board in boards]
        if not options.trap and len(set(kernels)) == len(kernels):
            raise UsageError("no kernel has two boards; give folders with KERNEL_BOARD.json.gz of several")
        pairs = []
        for pair in compare(boards, options.trap, options.seeds, options.limit, options.jobs):
            pairs.append(pair)
            medians = f"{np.median(pair.without):g} without, {np.median(pair.led):g} with"
            print(f"{pair.kernel}: {pair.source} → {pair.target}: {medians}", file=sys.stderr)
            for sentence in pair.said:
                print(f"  {sentence}", file=sys.stderr)
    except EvoengineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    Console(width=140).print(table(pairs, options.limit))
    if options.json:
        options.json.write_text(json.dumps([asdict(pair) for pair in pairs], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
