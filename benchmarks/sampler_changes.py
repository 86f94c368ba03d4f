"""Try changes of `evolution` in pairs of runs: `python benchmarks/sampler_changes.py --change NAME --spaces FILE...`.

A change is a subclass of the sampler, and every space and seed is searched with it and without it. Configurations are
rows of positions here, which no search has to translate: 100 trials take 0.1 to 0.8 CPU s, and find what
`search_quality.py` finds with the same seed. --derived adds the spaces that a file makes without the configurations
that share the optimum's value of one knob: other landscapes, on which a change may be chosen.

Of the sampler as it is, medians of best / optimum are printed by space, and the share of runs that end within 5 % of
the optimum. Of a change, means over spaces: by how many per cent the best time moves, and by how much the logarithm of
the trials until one is within 5 % (half as many again as the budget where none is), ± one standard error over seeds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# One search keeps one core busy: more threads under each only fight for it.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from scipy.linalg import solve_triangular  # noqa: E402

from benchmarks.search_quality import MARKS, NEAR  # noqa: E402
from evoengine.errors import UsageError  # noqa: E402
from evoengine.search.recorded import read_recorded  # noqa: E402
from evoengine.search.samplers.evolution import Evolution, _Model  # noqa: E402
from evoengine.search.samplers.surrogate import DRAWS, JITTER, ROW_GROWTH, Surrogate, find_derived  # noqa: E402
from evoengine.space.definition import Knob  # noqa: E402

LEAST_ROWS = 300
"""of a derived space"""


@dataclass
class Rows:
    """A recorded space whose configurations are rows of positions, int16 [n, knobs]; `times` are NaN of failures."""

    name: str
    knobs: tuple[Knob, ...]
    rows: np.ndarray
    times: np.ndarray

    def __post_init__(self) -> None:
        self.index = {row.tobytes(): i for i, row in enumerate(self.rows)}
        self.optimum = float(np.nanmin(self.times))

    def __len__(self) -> int:
        return len(self.rows)

    def enumerate(self) -> Iterator[np.ndarray]:
        return iter(self.rows)

    def encode(self, row: np.ndarray) -> np.ndarray:
        return row

    def decode(self, row: np.ndarray) -> np.ndarray:
        return row

    def part(self, name: str, kept: np.ndarray) -> Rows:
        """Return the space of the rows in a mask [n], whose domains are the values that occur."""
        rows, knobs = self.rows[kept].copy(), []
        for k, knob in enumerate(self.knobs):
            used = np.unique(rows[:, k][rows[:, k] >= 0])
            places = np.full(len(knob.values) + 1, -1)  # -1 selects the last
            places[used] = np.arange(len(used))
            rows[:, k] = places[rows[:, k]]
            knobs.append(Knob(knob.name, tuple(knob.values[i] for i in used)))
        return Rows(name, tuple(knobs), rows, self.times[kept])


def read(path: Path) -> Rows:
    space = read_recorded(path)
    return Rows(space.name, space.knobs, space.rows, space.times)


def derived(space: Rows) -> Iterator[Rows]:
    """Yield the spaces without the optimum's value of one knob, of LEAST_ROWS configurations or more."""
    best = space.rows[np.nanargmin(space.times)]
    for k, knob in enumerate(space.knobs):
        kept = space.rows[:, k] != best[k]
        if kept.sum() >= LEAST_ROWS and not np.isnan(space.times[kept]).all():
            yield space.part(f"{space.name} without {knob.name}", kept)


def search(space: Rows, sampler: type[Evolution], seed: int, budget: int) -> np.ndarray:
    """Return best time so far / optimum after each trial [budget]; a search ends at the optimum."""
    asked, best, curve = sampler(space, seed), np.inf, []  # type: ignore[arg-type]  # rows are configurations here
    while len(curve) < min(budget, len(space)) and best > space.optimum:
        trial = asked.ask()
        ms = float(space.times[space.index[trial.config.tobytes()]])  # type: ignore[attr-defined]
        asked.tell(trial.number, [0.0 if ms != ms else space.optimum / ms])
        best = best if ms != ms else min(best, ms)
        curve.append(best / space.optimum)
    return np.array(curve + [curve[-1]] * (budget - len(curve)))


# The changes. None of them was taken; benchmarks/notes/sampler.md has the figures.


class Spread(Evolution):
    """Take as first trials the draw that shares fewest values with the earlier ones, of N_DRAWN random ones."""

    N_DRAWN = 32

    def __init__(self, space: Rows, seed: int) -> None:
        super().__init__(space, seed)  # type: ignore[arg-type]
        draw = self._pool.draw

        def spread() -> np.ndarray | None:
            drawn = [row for _ in range(self.N_DRAWN) if (row := draw()) is not None]
            return drawn[int(self.shared(np.array(drawn)).argmin())] if drawn else None

        self._pool.draw = spread  # type: ignore[method-assign]

    def shared(self, rows: np.ndarray) -> np.ndarray:
        """Return the squared number of values that rows [n] share with the trials, summed over these."""
        live = [k for k, knob in enumerate(self._space.knobs) if len(knob.values) > 1]
        same: np.ndarray = (rows[:, None, live] == self._tried[None][:, :, live]).sum(2)
        return np.square(same).sum(1)


class SpreadPairs(Spread):
    """Count values and pairs of values of knobs with at most four, and nearness within a third of larger domains."""

    def shared(self, rows: np.ndarray) -> np.ndarray:
        tried, sizes = self._tried, [len(knob.values) for knob in self._space.knobs]
        few = [k for k, size in enumerate(sizes) if size <= 4]
        same = (rows[:, None, few] == tried[None][:, :, few]).sum(2).astype(float)
        near = np.zeros(same.shape)
        for k in (k for k, size in enumerate(sizes) if size > 4):
            distance = np.abs(rows[:, None, k].astype(int) - tried[None, :, k]) / (sizes[k] - 1)
            near += np.maximum(0, 1 - 3 * distance)
        return np.asarray((same + near + same * (same - 1) / 2 / max(1, len(few) - 1)).sum(1))


class Mixed(Surrogate):
    """Sum of the kernel and a second one of longer lengths without penalty, or of a constant: an unknown mean."""

    weights = 1.0, 1.0
    stretch = np.inf

    def fit(self, rows: np.ndarray, targets: np.ndarray, pool: np.ndarray) -> None:
        known, tried = ~np.isnan(targets), self._places(rows)
        self._draw(tried[known], targets[known])
        self._noise = np.exp(self._hyper[-1])
        self._kernels = [[log.astype(np.float32) for log in logs] for logs in self._both(self._hyper)]
        self._pool = self._one_hot(self._places(pool), np.float32)
        self._sides = [self._log_columns(tried, kernel) for kernel in self._kernels]
        self._factor = np.linalg.cholesky(self._covariance(tried, self._hyper))
        self._solve = np.empty((len(rows) + ROW_GROWTH, len(pool)), np.float32)
        against = self._mix(self._sides, self._pool.T).astype(np.float32)
        self._solve[: len(rows)] = solve_triangular(self._factor.astype(np.float32), against, lower=True)
        self._explained = np.square(self._solve[: len(rows)]).sum(0)

    def extend(self, row: np.ndarray) -> None:
        n, places = len(self._factor), self._places(row[None])
        one = [self._log_columns(places, kernel) for kernel in self._kernels]
        to_tried = self._mix(self._sides, self._one_hot(places, np.float32).T)[:, 0].astype(float)
        left = solve_triangular(self._factor, to_tried, lower=True)
        pivot = np.sqrt(max(sum(self.weights) + self._noise + JITTER - left @ left, JITTER))
        self._factor = np.pad(self._factor, (0, 1))
        self._factor[n, :n], self._factor[n, n] = left, pivot
        self._sides = [np.vstack(both) for both in zip(self._sides, one, strict=True)]
        if n == len(self._solve):
            self._solve = np.pad(self._solve, ((0, ROW_GROWTH), (0, 0)))
        self._solve[n] = self._mix(one, self._pool.T)[0] - left.astype(np.float32) @ self._solve[:n]
        self._solve[n] /= pivot
        self._explained += np.square(self._solve[n])

    def predict(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return super().predict(targets)[0], np.sqrt(np.maximum(sum(self.weights) - self._explained, 1e-9))

    def _covariance(self, tried: np.ndarray, hyper: np.ndarray) -> np.ndarray:
        sides = [self._log_columns(tried, logs) for logs in self._both(hyper)]
        covariance = self._mix(sides, self._one_hot(tried, np.float64).T)
        covariance[np.diag_indices(len(tried))] += np.exp(hyper[-1]) + JITTER
        return covariance

    def _both(self, hyper: np.ndarray) -> list[list[np.ndarray]]:
        far = hyper.copy()
        far[:-2] += np.log(self.stretch)
        far[-2] = -np.inf
        return [self._logs(hyper), self._logs(far)]

    def _mix(self, sides: Sequence[np.ndarray], hot: np.ndarray) -> np.ndarray:
        of: np.ndarray = sum(weight * np.exp(side @ hot) for weight, side in zip(self.weights, sides, strict=True))
        return of


class TwoScales(Mixed):
    weights = 0.7, 0.3
    stretch = 3.0


class Averaged(Surrogate):
    """Predict with the mean of the last DRAWS hyperparameters before this fit's and of its own."""

    _chain: np.ndarray | None = None
    _before: Sequence[np.ndarray] = ()

    def _draw(self, tried: np.ndarray, targets: np.ndarray) -> None:
        if self._chain is not None:
            self._hyper = self._chain
        seen = []
        for _ in range(self._draws):
            self._draws = 1
            super()._draw(tried, targets)
            seen.append(self._hyper.copy())
        self._chain = self._hyper
        used = [*seen[-DRAWS:], *self._before]
        self._before = used[:DRAWS]
        self._hyper = np.mean(used, axis=0)


def with_surrogate(surrogate: type[Surrogate]) -> type[Evolution]:
    """Return the sampler with another surrogate in place of both of its own."""

    class Changed(Evolution):
        def __init__(self, space: Rows, seed: int) -> None:
            super().__init__(space, seed)  # type: ignore[arg-type]
            kinds = [False, True] if any(find_derived(space.knobs)) else [False]
            self._models = [_Model(surrogate(space.knobs, self._rng, derived=kind)) for kind in kinds]

    return Changed


CHANGES: dict[str, type[Evolution]] = {
    "spread": Spread,
    "spread-pairs": SpreadPairs,
    "unknown-mean": with_surrogate(Mixed),
    "two-scales": with_surrogate(TwoScales),
    "averaged": with_surrogate(Averaged),
}


def figures(curve: np.ndarray) -> list[float]:
    """Return 100 times the logarithm of a curve [budget] at each mark, and that of the trials until NEAR."""
    near = np.flatnonzero(curve <= NEAR)
    trials = near[0] + 1 if len(near) else 1.5 * len(curve)
    return [*(100 * np.log(curve[mark - 1]) for mark in MARKS if mark <= len(curve)), float(np.log(trials))]


def gain(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard error of what a change adds to the figures, of curves [spaces, seeds, budget]."""
    of_before, of_after = (np.apply_along_axis(figures, -1, curves) for curves in (before, after))
    added = of_after - of_before
    error = np.sqrt((added.var(axis=1, ddof=1) / added.shape[1]).sum(0)) / len(added)
    return added.mean((0, 1)), error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--change", nargs="+", choices=CHANGES, default=[], help="none: the sampler as it is alone")
    parser.add_argument("--spaces", type=Path, nargs="+", default=[], metavar="FILE", help="recorded spaces")
    parser.add_argument("--derived", type=Path, nargs="+", default=[], metavar="FILE", help="those made of these")
    parser.add_argument("--seeds", type=int, default=6, help="runs a space (default 6)")
    parser.add_argument("--first-seed", type=int, default=0, help="(default 0)")
    parser.add_argument("--budget", type=int, default=100, help="trials of a run (default 100)")
    options = parser.parse_args(arguments)
    try:
        if options.seeds < 2 or options.budget < MARKS[0]:
            raise UsageError(f"--seeds must be at least 2, and --budget at least {MARKS[0]}")
        spaces = [read(path) for path in options.spaces]
        spaces += [part for path in options.derived for part in derived(read(path))]
        if not spaces:
            raise UsageError("there is no space to search; give files by --spaces or --derived")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    marks = [mark for mark in MARKS if mark <= options.budget]

    def curves(sampler: type[Evolution]) -> np.ndarray:
        return np.array([[search(space, sampler, seed, options.budget) for seed in seeds] for space in spaces])

    before = curves(Evolution)
    print(f"median after {', '.join(map(str, marks))} trials, and share within {NEAR - 1:.0%} after {options.budget}")
    medians = np.median(before[:, :, [mark - 1 for mark in marks]], axis=1)
    shares = (before[:, :, -1] <= NEAR).mean(1)
    for name, at, share in zip(
        [*(space.name for space in spaces), "mean"],
        [*medians, medians.mean(0)],
        [*shares, shares.mean()],
        strict=True,
    ):
        print(f"{name:44} {' '.join(f'{best:.3f}' for best in at)} {share:4.0%}")
    for name in options.change:
        cells = [f"{mean:+.2f} ± {error:.2f}" for mean, error in zip(*gain(before, curves(CHANGES[name])), strict=True)]
        print(f"{name:14} {'   '.join(cells)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
