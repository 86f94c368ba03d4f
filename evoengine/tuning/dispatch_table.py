"""Choose at most k kernels for several problems by their times in the ledger.

A kernel is a configuration. Each problem is served by the fastest chosen one; its regret is how much slower that is
than the best known kernel of the problem.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from evoengine.errors import NothingFound, UsageError, hint
from evoengine.ledger.store import Ledger
from evoengine.publish.folder import VERSION
from evoengine.records import PROPOSAL, Candidate, Config, config_key

MOST_CHOICES = 50_000
"""number of choices up to which all are compared; above it the search is greedy, then improved by exchanges"""
RANKS = 10_000
"""maximum number of ranked candidates considered per problem"""


class Timed(NamedTuple):
    """A candidate with the time in microseconds by which it is ranked."""

    trial: int
    config: Config
    us: float


@dataclass(frozen=True, slots=True)
class Served:
    """A problem with the kernel that serves it."""

    problem: str
    candidate: Candidate
    kernel: int
    """its number in the table, from 1"""
    best_us: float
    """time of the fastest known kernel of the problem, in microseconds"""

    @property
    def us(self) -> float:
        return self.candidate.ranked_by.compared_us

    @property
    def regret(self) -> float:
        """Return how much longer it takes than the best known one: 0.05 for 5 %."""
        return self.us / self.best_us - 1


@dataclass(frozen=True, slots=True)
class Table:
    gpu: str
    served: tuple[Served, ...]
    """in the order of the problems"""

    @property
    def kernels(self) -> tuple[Config, ...]:
        """Return the configurations in the order of their numbers."""
        return tuple({s.kernel: s.candidate.config for s in sorted(self.served, key=lambda s: s.kernel)}.values())

    @property
    def mean_regret(self) -> float:
        """Return the geometric mean of the times over the best known ones, less 1."""
        return math.exp(math.fsum(math.log1p(s.regret) for s in self.served) / len(self.served)) - 1

    @property
    def worst(self) -> Served:
        return max(self.served, key=lambda s: s.regret)


def find_table(ledger: Ledger, problems: Sequence[str], gpu: str, kernels: int | None = None) -> Table:
    """Return the table with the smallest mean regret, and among equal ones the smallest worst regret.

    Only ranked candidates count: those that have passed the whole gate. Raises NothingFound if a problem has none,
    UsageError if so few kernels cannot serve all problems.
    """
    # a proposal's text cannot be rendered from its configuration for other problems
    ranked = {p: [c for c in ledger.best(p, gpu, top=RANKS) if c.operator != PROPOSAL] for p in problems}
    missing = [problem for problem, found in ranked.items() if not found]
    if missing:
        raise NothingFound(
            f"the ledger holds no correct candidate for {missing[0]} on {gpu}: "
            f"{hint('search', problem=missing[0], gpu=gpu, db=ledger.db)} finds one"
        )
    kinds = {problem: found[0].ranked_by.kind for problem, found in ranked.items()}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{kind} of {problem}" for problem, kind in kinds.items())
        raise UsageError(f"a table needs figures of one kind: {listed}")
    by_trial = {c.trial: c for found in ranked.values() for c in found}
    timed = {p: [Timed(c.trial, c.config, c.ranked_by.compared_us) for c in found] for p, found in ranked.items()}
    chosen = choose(timed, kernels)
    numbers: dict[str, int] = {}
    served = []
    for problem, found in chosen.items():
        number = numbers.setdefault(config_key(found.config), len(numbers) + 1)
        served.append(Served(problem, by_trial[found.trial], number, min(t.us for t in timed[problem])))
    return Table(gpu, tuple(served))


def entry(served: Served, folder: str, sums: bytes) -> dict[str, Any]:
    """Return a problem's entry of table.json; `sums` are the checksums of the export in `folder`."""
    return {
        "problem": served.problem,
        "kernel": served.kernel,
        "folder": folder,
        "sha256": hashlib.sha256(sums).hexdigest(),
        "median_us": served.us,
        "regret": served.regret,
    }


def table_file(table: Table, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return table.json. Regrets are known only at the problems themselves, not at sizes in between."""
    return {
        "evoengine_table": VERSION,
        "gpu": table.gpu,
        "mean_regret": table.mean_regret,
        "worst_regret": table.worst.regret,
        "worst_problem": table.worst.problem,
        "entries": list(entries),
    }


def choose(timed: Mapping[str, Sequence[Timed]], kernels: int | None = None) -> dict[str, Timed]:
    """Return for each problem the candidate that serves it, of at most `kernels` configurations in all.

    Without `kernels`, it is the fastest of each. Raises UsageError if so few cannot serve all problems.
    """
    fastest = {p: min(found, key=lambda t: t.us) for p, found in timed.items()}
    if kernels is None or kernels >= len({config_key(t.config) for t in fastest.values()}):
        return fastest
    keys = list(dict.fromkeys(config_key(t.config) for found in timed.values() for t in found))
    place = {key: i for i, key in enumerate(keys)}
    regrets = np.full((len(keys), len(timed)), np.inf)
    of: dict[tuple[int, int], Timed] = {}
    for column, (problem, found) in enumerate(timed.items()):
        for one in sorted(found, key=lambda t: -t.us):  # the fastest of a configuration stays
            row = place[config_key(one.config)]
            regrets[row, column] = math.log(one.us / fastest[problem].us)
            of[row, column] = one
    rows = _best_rows(regrets, kernels)
    if rows is None:
        raise UsageError(
            f"no {kernels} of the known kernels serve all {len(timed)} problems: search them together, or allow "
            "more kernels"
        )
    own = regrets[rows].argmin(0)
    return {problem: of[rows[own[column]], column] for column, problem in enumerate(timed)}


def _best_rows(regrets: np.ndarray, count: int) -> list[int] | None:
    """Return the rows whose minimum per column has the least mean, then maximum; None if it is never finite.

    `regrets` is [kernels, problems].
    """
    useful = [row for row in range(len(regrets)) if np.isfinite(regrets[row]).any()]
    if math.comb(len(useful), count) <= MOST_CHOICES:
        best = min(combinations(useful, count), key=lambda rows: _cost(regrets, rows))
        return None if _cost(regrets, best)[0] else list(best)
    rows: list[int] = []
    for _ in range(count):
        rows.append(min(useful, key=lambda row: _cost(regrets, (*rows, row))))
    while True:
        swaps = [[*rows[:i], row, *rows[i + 1 :]] for i in range(count) for row in useful]
        other = min(swaps, key=lambda swap: _cost(regrets, swap))
        if not _cost(regrets, other) < _cost(regrets, rows):
            return None if _cost(regrets, rows)[0] else rows
        rows = other


def _cost(regrets: np.ndarray, rows: Sequence[int]) -> tuple[int, float, float]:
    """Return the number of problems that no row serves, the mean of the others and the worst."""
    own = regrets[list(rows)].min(0)
    served = own[np.isfinite(own)]
    mean = float(served.mean()) if served.size else 0.0
    return int((~np.isfinite(own)).sum()), round(mean, 12), float(served.max(initial=0.0))
