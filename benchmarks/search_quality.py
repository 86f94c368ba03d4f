"""Compare samplers by what they find on recorded spaces: `python benchmarks/search_quality.py --spaces DIR`.

Every search runs through evoengine's own Proposer, which is what `evoengine search` runs. Counting is as the tuners'
papers count: each unique configuration costs one trial, those that failed on the GPU cost one too, and those outside
the restrictions, which are not in the file, are never tried. Samplers that do propose such a configuration, or one they
had, are told and asked again; how often is the column "asked". All but ms are counts, the same on any
machine.

Medians jump where half of the runs stop at one basin and half at the next, so geometric means over seeds are given too,
with 95 % bootstrap intervals, and a signed-rank test (Wilcoxon) of the first sampler against each other one, whose runs
of one space and seed form a pair. With --runs FILE every run is kept in FILE as it ends and none is run twice: an
interrupted comparison goes on, and the peers that `benchmarks/search_peers.py` runs are compared in the same table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

# One search keeps one core busy: more threads under each only fight for it.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from scipy.stats import wilcoxon  # noqa: E402

from evoengine.errors import UsageError  # noqa: E402
from evoengine.search.proposer import Proposer  # noqa: E402
from evoengine.search.recorded import RecordedSpace, read_recorded  # noqa: E402
from evoengine.search.samplers import NAMES  # noqa: E402

MARKS = (25, 50, 100, 200)
NEAR = 1.05
"""a run that ends within this of the optimum counts as having found it"""
SLOW = {"gp": 20}
"""samplers that take minutes a run, and the seeds they get unless --all-seeds is given"""
RESAMPLES = 2000
"""bootstrap samples of an interval"""


@dataclass(frozen=True)
class Run:
    space: str
    sampler: str
    seed: int
    curve: list[float]
    """best time so far / optimum after each trial; infinite before one has run"""
    proposals: int
    ms: float
    """of one core per trial, asking and telling together"""


def search(space: RecordedSpace, sampler: str, seed: int, budget: int, batch: int = 1) -> Run:
    """One search of `budget` trials, or of the whole space where that is smaller."""
    begun = time.process_time()
    proposer = Proposer(space, sampler, seed)
    best, curve = np.inf, []
    while some := [p for _ in range(min(batch, budget - len(curve))) if (p := proposer.propose()) is not None]:
        for proposal in some:
            ms = space.time(proposal.config)
            # the optimum's speed is 1, so that the penalty for a failure, 0, is below any
            proposer.tell(proposal, None if ms is None else [space.optimum / ms])
            best = best if ms is None else min(best, ms)
            curve.append(best / space.optimum)
    proposals = len(curve) + proposer.invalid + proposer.repeated
    ms_each = 1e3 * (time.process_time() - begun) / len(curve)
    return Run(space.name, named(sampler, batch), seed, curve, proposals, ms_each)


def named(sampler: str, batch: int) -> str:
    return sampler if batch == 1 else f"{sampler} by {batch}"


@cache
def recorded(path: Path) -> RecordedSpace:
    return read_recorded(path)


def _task(path: Path, sampler: str, seed: int, budget: int, batch: int) -> Run:
    return search(recorded(path), sampler, seed, budget, batch)


def find_spaces(folder: Path) -> list[Path]:
    """The recorded spaces in a folder; T1 descriptions, and T4 files of a space that is there as a cache, are not."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; give one of .json or .json.gz files")
    files = sorted(p for p in folder.glob("*.json*") if p.name.endswith((".json", ".json.gz")))
    names = {p.name.split(".json")[0] for p in files}
    paths = [p for p in files if not _is_double(p.name.split(".json")[0], names)]
    if not paths:
        raise UsageError(f"{folder} holds no recorded space; give a folder of .json or .json.gz files")
    return paths


def _is_double(name: str, names: Iterable[str]) -> bool:
    return name.endswith("_T1") or (name.endswith("_T4") and name.removesuffix("_T4") in names)


def at(runs: Sequence[Run], mark: int) -> np.ndarray:
    """Return best / optimum after `mark` trials [runs]; a search that exhausted its space keeps its last."""
    return np.array([run.curve[min(mark, len(run.curve)) - 1] for run in runs])


def bootstrap(values: np.ndarray) -> list[float]:
    """Return the 95 % interval of the mean of values [n]."""
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    return np.percentile(drawn.mean(1), [2.5, 97.5]).tolist()


def summary(runs: Sequence[Run], budget: int) -> dict[str, Any]:
    """Return the figures of one sampler on one space.

    At each mark: the median, `geo` (the geometric mean with its interval) and `within` (the share within NEAR); None at
    a mark that the budget did not reach.
    """
    reached = {str(mark): at(runs, mark) if mark <= budget else None for mark in MARKS}
    geo, share = {}, {}
    for mark, of in reached.items():
        geo[mark] = None if of is None else np.exp([np.log(of).mean(), *bootstrap(np.log(of))]).tolist()
        share[mark] = None if of is None else float(np.mean(of <= NEAR))
    return {
        **{mark: None if of is None else float(np.median(of)) for mark, of in reached.items()},
        "geo": geo,
        "within": share,
        "within5": float(np.mean([run.curve[-1] <= NEAR for run in runs])),
        "proposals": sum(r.proposals for r in runs) / sum(len(r.curve) for r in runs),
        "ms": float(np.median([run.ms for run in runs])),
        "seeds": len(runs),
    }


def summaries(runs: Sequence[Run], budget: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return {space: {sampler: the figures of `summary`}}."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (space, sampler), group in groupby(runs, key=lambda run: (run.space, run.sampler)):
        found.setdefault(space, {})[sampler] = summary(list(group), budget)
    return found


def table(found: dict[str, dict[str, dict[str, Any]]], budget: int) -> Table:
    title = f"median of best / optimum after N of {budget} trials; asked: proposals per trial; last: mean over spaces"
    out = Table(title=title)
    for name in ("space", "sampler", "seeds", *map(str, MARKS), f"≤{NEAR:g}", "asked", "ms"):
        out.add_column(name, no_wrap=True, justify="left" if name in ("space", "sampler") else "right")
    for space, of in [*found.items(), ("mean", _means(found))]:
        for sampler, figures in of.items():
            reached = [figures[str(mark)] for mark in MARKS]
            marks = ["–" if best is None else f"{best:.3f}" for best in reached]
            rest = (f"{figures['within5']:.0%}", f"{figures['proposals']:.2f}", f"{figures['ms']:.1f}")
            out.add_row(space, sampler, f"{figures['seeds']:.0f}", *marks, *rest)
        out.add_section()
    return out


def _means(found: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the mean over spaces of the samplers that ran on all of them."""
    samplers = [s for s in next(iter(found.values())) if all(s in of for of in found.values())]
    names = (*map(str, MARKS), "within5", "proposals", "ms", "seeds")
    columns = {s: {name: [of[s][name] for of in found.values()] for name in names} for s in samplers}
    return {
        s: {name: None if None in column else float(np.mean(column)) for name, column in of.items()}
        for s, of in columns.items()
    }


def certainty(found: dict[str, dict[str, dict[str, Any]]], runs: Sequence[Run], budget: int) -> Table:
    """Return geometric means with intervals and shares within NEAR, per space and over all runs, and the tests."""
    first = runs[0].sampler
    title = f"geometric mean (95 % interval) · share within {NEAR - 1:.0%} · p: signed rank against {first}, all spaces"
    out = Table(title=title)
    for name in ("space", "sampler", *map(str, MARKS)):
        out.add_column(name, no_wrap=True, justify="left" if name in ("space", "sampler") else "right")
    for space, of in found.items():
        for sampler, figures in of.items():
            cells = [_cell(figures["geo"][str(m)], figures["within"][str(m)]) for m in MARKS]
            out.add_row(space, sampler, *cells)
        out.add_section()
    for sampler in _means(found):
        values = [
            p_value(runs, first, sampler, mark) if mark <= budget and sampler != first else None for mark in MARKS
        ]
        out.add_row("p", sampler, *("–" if p is None else f"{p:.2g}" for p in values))
    return out


def _cell(geo: Sequence[float] | None, share: float | None) -> str:
    return "–" if geo is None or share is None else f"{geo[0]:.3f} ({geo[1]:.3f}–{geo[2]:.3f}) {share:.0%}"


def p_value(runs: Sequence[Run], one: str, other: str, mark: int) -> float | None:
    """Return the two-sided p of a signed-rank test over the spaces and seeds that both ran; None without any."""
    reached = {(r.sampler, r.space, r.seed): float(np.log(at([r], mark)[0])) for r in runs}
    pairs = [
        (reached[key], reached[one, *key[1:]]) for key in reached if key[0] == other and (one, *key[1:]) in reached
    ]
    different = [theirs - ours for theirs, ours in pairs if theirs != ours]
    if not pairs:
        return None
    return float(wilcoxon(different).pvalue) if different else 1.0


def plot(runs: Sequence[Run], path: Path) -> None:
    """Median best / optimum − 1 by trial, one panel a space."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    spaces = list(dict.fromkeys(run.space for run in runs))
    figure, axes = pyplot.subplots(1, len(spaces), figsize=(4.2 * len(spaces), 3.6), squeeze=False)
    for axis, space in zip(axes[0], spaces, strict=True):
        for sampler, group in groupby((r for r in runs if r.space == space), key=lambda run: run.sampler):
            some = list(group)
            trials = range(1, max(len(run.curve) for run in some) + 1)
            axis.plot(trials, [100 * (np.median(at(some, t)) - 1) for t in trials], label=sampler)
        axis.set(title=space, xlabel="trials", ylabel="above the optimum, %", yscale="symlog", ylim=(0, 200))
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150, format="png")


def read_runs(path: Path) -> list[Run]:
    """Return the runs in a file; one that was cut short by the end of the process is left out."""
    runs = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            runs.append(Run(**json.loads(line)))
        except (TypeError, ValueError):
            continue
    return runs


def run_all(
    paths: Sequence[Path],
    samplers: Sequence[str],
    seeds: dict[str, int],
    budget: int,
    jobs: int,
    kept: Path | None,
    batch: int = 1,
) -> list[Run]:
    """Return all runs, those in `kept` first read and the others added there; by space, then sampler, then seed."""
    spaces = [recorded(path).name for path in paths]
    done = [run for run in (read_runs(kept) if kept else ()) if run.space in spaces]
    ran = {(run.space, run.sampler, run.seed) for run in done}
    tasks = [(p, s, seed, budget, batch) for p in paths for s in samplers for seed in range(seeds[s])]
    tasks = [task for task in tasks if (recorded(task[0]).name, named(task[1], batch), task[2]) not in ran]
    for run in _in_parallel(tasks, jobs):
        done.append(run)
        if kept:
            with kept.open("a") as file:
                file.write(json.dumps(asdict(run)) + "\n")
    first = [named(sampler, batch) for sampler in samplers]
    order = [*first, *sorted({run.sampler for run in done} - {*first})]
    return sorted(done, key=lambda run: (spaces.index(run.space), order.index(run.sampler), run.seed))


def _in_parallel(tasks: Sequence[tuple[Path, str, int, int, int]], jobs: int) -> Iterator[Run]:
    if jobs == 1:
        yield from (_task(*task) for task in tasks)
    elif tasks:
        with ProcessPoolExecutor(jobs) as executor:
            yield from executor.map(_task, *zip(*tasks, strict=True))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How many trials each sampler needs on recorded spaces.")
    parser.add_argument("--spaces", type=Path, required=True, metavar="DIR", help="folder of recorded spaces")
    parser.add_argument("--samplers", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=int, default=60, help="runs per space and sampler (default 60)")
    parser.add_argument("--all-seeds", action="store_true", help="as many for the slow ones: " + ", ".join(SLOW))
    parser.add_argument("--budget", type=int, default=200, help="unique configurations per run (default 200)")
    parser.add_argument("--batch", type=int, default=1, help="proposals whose results are told together (default 1)")
    parser.add_argument("--jobs", type=int, default=1, help="searches at once (default 1)")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="keep every run here, and run none twice")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw how the searches converge here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    seeds = {s: options.seeds if options.all_seeds else min(options.seeds, SLOW.get(s, options.seeds)) for s in NAMES}
    try:
        if min(options.seeds, options.budget, options.batch, options.jobs) < 1:
            raise UsageError("--seeds, --budget, --batch and --jobs must be at least 1")
        spaces, samplers = find_spaces(options.spaces), list(dict.fromkeys(options.samplers))
        for path in spaces:
            recorded(path)  # a faulty file is reported before hours of searches, not after
        for out in (options.json, options.plot, options.runs):
            if out and not out.parent.is_dir():
                raise UsageError(f"cannot write {out}: there is no folder {out.parent}; name a file in one")
        runs = run_all(spaces, samplers, seeds, options.budget, options.jobs, options.runs, options.batch)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    found = summaries(runs, options.budget)
    console = Console(width=160)
    console.print(table(found, options.budget))
    console.print(certainty(found, runs, options.budget))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        plot(runs, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
