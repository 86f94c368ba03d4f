"""How many trials each sampler needs on recorded spaces: `python benchmarks/search_quality.py --spaces DIR`.

Every search runs through evoengine's own Proposer, which is what `evoengine search` runs. Counting is as the tuners'
papers count: each unique configuration costs one trial, those that failed on the GPU cost one too, and those outside
the restrictions, which are not in the file, are never tried. Samplers that do propose such a configuration, or one they
had, are told and asked again; how often is the column "asked". All but ms are counts, the same on any
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

# One search keeps one core busy: more threads under each only fight for it.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from evoengine.errors import UsageError  # noqa: E402
from evoengine.search.proposer import Proposer  # noqa: E402
from evoengine.search.recorded import RecordedSpace, read_recorded  # noqa: E402
from evoengine.search.samplers import NAMES  # noqa: E402

MARKS = (25, 50, 100, 200)
NEAR = 1.05
"""a run that ends within this of the optimum counts as having found it"""
SLOW = {"gp": 5}
"""samplers that take minutes a run, and the seeds they get unless --all-seeds is given"""


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


def search(space: RecordedSpace, sampler: str, seed: int, budget: int) -> Run:
    """One search of `budget` trials, or of the whole space where that is smaller."""
    begun = time.process_time()
    proposer = Proposer(space, sampler, seed)
    best, curve = np.inf, []
    while len(curve) < budget and (proposal := proposer.propose()) is not None:
        ms = space.time(proposal.config)
        # the optimum's speed is 1, so that the penalty for a failure, 0, is below any
        proposer.tell(proposal, None if ms is None else [space.optimum / ms])
        best = best if ms is None else min(best, ms)
        curve.append(best / space.optimum)
    proposals = len(curve) + proposer.invalid + proposer.repeated
    return Run(space.name, sampler, seed, curve, proposals, 1e3 * (time.process_time() - begun) / len(curve))


@cache
def recorded(path: Path) -> RecordedSpace:
    return read_recorded(path)


def _task(path: Path, sampler: str, seed: int, budget: int) -> Run:
    return search(recorded(path), sampler, seed, budget)


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


def best_at(runs: Sequence[Run], mark: int) -> float:
    """The median over seeds of best / optimum after `mark` trials; a search that exhausted its space keeps its last."""
    return float(np.median([run.curve[min(mark, len(run.curve)) - 1] for run in runs]))


def summary(runs: Sequence[Run], budget: int) -> dict[str, float | None]:
    """The figures of one sampler on one space; None at a mark that the budget did not reach."""
    marks = {str(mark): best_at(runs, mark) if mark <= budget else None for mark in MARKS}
    return marks | {
        "within5": float(np.mean([run.curve[-1] <= NEAR for run in runs])),
        "proposals": sum(r.proposals for r in runs) / sum(len(r.curve) for r in runs),
        "ms": float(np.median([run.ms for run in runs])),
        "seeds": len(runs),
    }


def summaries(runs: Sequence[Run], budget: int) -> dict[str, dict[str, dict[str, float | None]]]:
    """{space: {sampler: {"25": …, …, "within5": …, "proposals": …, "ms": …, "seeds": …}}}"""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for (space, sampler), group in groupby(runs, key=lambda run: (run.space, run.sampler)):
        found.setdefault(space, {})[sampler] = summary(list(group), budget)
    return found


def table(found: dict[str, dict[str, dict[str, float | None]]], budget: int) -> Table:
    title = f"median of best / optimum after N of {budget} trials; asked: proposals per trial; last: mean over spaces"
    out = Table(title=title)
    for name in ("space", "sampler", "seeds", *map(str, MARKS), f"≤{NEAR:g}", "asked", "ms"):
        out.add_column(name, no_wrap=True, justify="left" if name in ("space", "sampler") else "right")
    samplers = list(next(iter(found.values())))
    mean = {s: _mean([of[s] for of in found.values()]) for s in samplers}
    for space, of in [*found.items(), ("mean", mean)]:
        for sampler, figures in of.items():
            at = [figures[str(mark)] for mark in MARKS]
            marks = ["–" if best is None else f"{best:.3f}" for best in at]
            rest = (f"{figures['within5']:.0%}", f"{figures['proposals']:.2f}", f"{figures['ms']:.1f}")
            out.add_row(space, sampler, f"{figures['seeds']:.0f}", *marks, *rest)
        out.add_section()
    return out


def _mean(of_spaces: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    columns = {name: [figures[name] for figures in of_spaces] for name in of_spaces[0]}
    return {name: None if None in column else float(np.mean(column)) for name, column in columns.items()}


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
            axis.plot(trials, [100 * (best_at(some, t) - 1) for t in trials], label=sampler)
        axis.set(title=space, xlabel="trials", ylabel="above the optimum, %", yscale="symlog", ylim=(0, 200))
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150, format="png")


def run_all(paths: Sequence[Path], samplers: Sequence[str], seeds: dict[str, int], budget: int, jobs: int) -> list[Run]:
    tasks = [(p, s, seed, budget) for p in paths for s in samplers for seed in range(seeds[s])]
    if jobs == 1:
        return [_task(*task) for task in tasks]
    with ProcessPoolExecutor(jobs) as executor:
        return list(executor.map(_task, *zip(*tasks, strict=True)))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How many trials each sampler needs on recorded spaces.")
    parser.add_argument("--spaces", type=Path, required=True, metavar="DIR", help="folder of recorded spaces")
    parser.add_argument("--samplers", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=int, default=25, help="runs per space and sampler (default 25)")
    parser.add_argument("--all-seeds", action="store_true", help="as many for the slow ones: " + ", ".join(SLOW))
    parser.add_argument("--budget", type=int, default=200, help="unique configurations per run (default 200)")
    parser.add_argument("--jobs", type=int, default=1, help="searches at once (default 1)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw how the searches converge here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    seeds = {s: options.seeds if options.all_seeds else min(options.seeds, SLOW.get(s, options.seeds)) for s in NAMES}
    try:
        if min(options.seeds, options.budget, options.jobs) < 1:
            raise UsageError("--seeds, --budget and --jobs must be at least 1")
        spaces, samplers = find_spaces(options.spaces), list(dict.fromkeys(options.samplers))
        for path in spaces:
            recorded(path)  # a file at fault is told before hours of searches, not after
        for out in (options.json, options.plot):
            if out and not out.parent.is_dir():
                raise UsageError(f"cannot write {out}: there is no folder {out.parent}; name a file in one")
        runs = run_all(spaces, samplers, seeds, options.budget, options.jobs)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    found = summaries(runs, options.budget)
    Console(width=120).print(table(found, options.budget))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        plot(runs, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
