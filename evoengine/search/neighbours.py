"""Read what earlier runs for near problems and GPUs give a search: start points, and a prior from a sibling GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from concurrent.futures import Future

from evoengine.errors import UsageError
from evoengine.gpu import Gpu, known_gpus
from evoengine.ledger.store import Ledger
from evoengine.records import Candidate, Config, Kind, config_key
from evoengine.search.identity import Setting
from evoengine.search.samplers.prior import MIN_MEASURED, Prior, Space
from evoengine.workloads import parse_problem

OTHER_WORD = 8.0
"""for a data type or a flag that differs; sizes count by their binary logarithm"""
OTHER_BOARD, OTHER_ARCHITECTURE = 1.0, 32.0
"""for another GPU of the same architecture, and one of another"""


def nearest_first(problem: str, gpu: Gpu, others: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return those of `others` (problem, key of the GPU) with the same workload, nearest first.

    Ties keep their order. One that cannot be compared comes last.
    """
    kernel = problem.partition(":")[0]
    alike = [other for other in others if other[0].partition(":")[0] == kernel]
    return sorted(alike, key=lambda other: distance(problem, other[0]) + _gpu_distance(gpu, other[1]))


def distance(problem: str, other: str) -> float:
    """Return a distance between problems: 0 for the same problem, infinite if one of them cannot be parsed here."""
    if problem == other:
        return 0.0
    try:
        (_, one), (_, two) = parse_problem(problem), parse_problem(other)
    except UsageError:
        return math.inf
    ours, theirs = one.variables(), two.variables()
    if ours.keys() != theirs.keys():
        return math.inf
    return sum(_size_distance(ours[name], theirs[name]) for name in ours)


def _size_distance(one: object, two: object) -> float:
    if one == two:
        return 0.0
    ours, theirs = _size(one), _size(two)
    return OTHER_WORD if ours is None or theirs is None else abs(math.log2(ours / theirs))


def _size(value: object) -> float | None:
    """Return a positive number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if value > 0 else None


def _gpu_distance(gpu: Gpu, other: str) -> float:
    if other == gpu.key:
        return 0.0
    known = known_gpus().get(other)
    return OTHER_BOARD if known is not None and known.arch == gpu.arch else OTHER_ARCHITECTURE


NEIGHBOURS = 4
"""number of problems and GPUs of earlier runs whose best kernels are tried"""
RANKS = 100
"""ranks of each that are searched for a configuration that is valid here"""


def neighbouring_bests(ledger: Ledger, setting: Setting) -> list[Config]:
    """Return the best valid configurations of the nearest other problems and GPUs, without start points.

    Among equally near ones the latest comes first.
    """
    here = (str(setting.target.problem), setting.target.gpu.key)
    others = dict.fromkeys((r.problem, r.gpu) for r in reversed(ledger.runs()) if (r.problem, r.gpu) != here)
    found: dict[str, Config] = {}
    for problem, gpu in nearest_first(here[0], setting.target.gpu, others)[:NEIGHBOURS]:
        ranked = (c.config for c in ledger.best(problem, gpu, top=RANKS))
        config = next((c for c in ranked if setting.space.contains(c)), None)
        if config is not None and config not in setting.space.starts:
            found[config_key(config)] = config
    return list(found.values())


MOST = 20_000
"""number of figures taken from a sibling, fastest first"""


def sibling_prior(ledger: Ledger, space: Space, problem: str, gpu: Gpu) -> Prior:
    """Return the prior from the sibling GPU that measured most configurations of the space.

    It is empty if none measured enough.
    """
    others = {run.gpu for run in ledger.runs() if run.problem == problem and run.gpu != gpu.key}
    siblings = sorted(key for key in others & known_gpus().keys() if known_gpus()[key].arch == gpu.arch)
    found = max((_measured(ledger, space, problem, key) for key in siblings), key=len, default=[])
    prior = Prior(space)
    for candidate in found if len(found) >= MIN_MEASURED else ():
        prior.measure(candidate.config, candidate.ranked_by.compared_us)
    return prior


def _measured(ledger: Ledger, space: Space, problem: str, gpu: str) -> list[Candidate]:
    best = ledger.best(problem, gpu, top=MOST)
    return [c for c in best if c.ranked_by.kind is Kind.MEASURED and space.contains(c.config)]


# Wait for candidates that another search on this ledger evaluates, as for one's own of the same source.

POLL_SECONDS = 0.5
"""interval at which the ledger is polled for them"""


class OtherSearches:
    """Futures for trials of other searches.

    A future completes when its trial is no longer in flight, because it ended or its search was killed.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._awaited: list[tuple[int, Future[None]]] = []
        self._polled = 0.0

    def wait_for(self, trial: int) -> Future[None]:
        future: Future[None] = Future()
        self._awaited.append((trial, future))
        return future

    def poll(self) -> None:
        """Poll the ledger from time to time for claims that other searches hold."""
        if not self._awaited or time.monotonic() - self._polled < POLL_SECONDS:
            return
        self._polled = time.monotonic()
        self._ledger.look_for_killed()
        decided = self._ledger.claims.decided([trial for trial, _ in self._awaited])
        waiting, self._awaited = self._awaited, []
        for trial, future in waiting:
            if trial in decided:
                future.set_result(None)
            else:
                self._awaited.append((trial, future))
