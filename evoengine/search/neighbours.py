"""Read what earlier runs for other problems and GPUs give a search: start points, and figures that guide it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import product

from evoengine.errors import UsageError
from evoengine.gpu import Gpu, known_gpus
from evoengine.ledger.store import Ledger
from evoengine.records import PROPOSAL, Config, Kind, config_key
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


SOURCES = 4
"""number of problems and GPUs whose figures guide a search, nearest first"""
MOST = 20_000
"""number of figures taken from each, fastest first"""
MAX_COMPLETED = 64
"""configurations that one of a space with fewer knobs may stand for"""
CONTRADICTION = 1.1
"""ratio of two figures of one configuration above which they contradict each other"""


def known_figures(ledger: Ledger, setting: Setting) -> tuple[Prior, list[str]]:
    """Return what was measured of the kernel on other GPUs and for other problems, and what is to be said of it."""
    problem, gpu = str(setting.target.problem), setting.target.gpu
    others = dict.fromkeys(
        (run.problem, run.gpu) for run in ledger.runs() if (run.problem, run.gpu) != (problem, gpu.key)
    )
    return _read_sources(ledger, setting.space, nearest_first(problem, gpu, others), Kind.MEASURED, problem)


def recorded_figures(ledger: Ledger, space: Space, problem: str, gpu: str, prefix: str) -> tuple[Prior, list[str]]:
    """Return what other recorded files in the ledger, whose problems begin with `prefix`, tell of the same knobs."""
    others = dict.fromkeys((run.problem, run.gpu) for run in ledger.runs() if run.problem.startswith(prefix))
    others.pop((problem, gpu), None)
    return _read_sources(ledger, space, list(others), Kind.RECORDED, problem)


def _read_sources(
    ledger: Ledger, space: Space, others: Iterable[tuple[str, str]], kind: Kind, here: str
) -> tuple[Prior, list[str]]:
    prior, said = Prior(space), []
    for problem, gpu in others:
        if len(prior.sources) == SOURCES:
            break
        ranked = (c for c in ledger.best(problem, gpu, top=MOST) if c.ranked_by.kind is kind)
        best = [c for c in ranked if c.operator != PROPOSAL]  # whose text is not its configuration's
        if len(best) < MIN_MEASURED:
            continue
        figures = match_figures(space, [(c.config, c.ranked_by.compared_us) for c in best])
        if 0 < len(figures.us) < MIN_MEASURED:
            continue
        name = gpu if problem == here else f"{gpu} · {problem}"
        for config, us in figures.us.values():
            prior.measure(config, us, name)
        said += [f"figures of {name}: {sentence}" for sentence in figures.said]
    return prior, said


@dataclass(frozen=True, slots=True)
class Matched:
    """Figures of another space in terms of this one: by key the configuration and its time in microseconds."""

    us: dict[str, tuple[Config, float]]
    said: list[str]
    """where the spaces differ, or figures contradict each other"""


def match_figures(space: Space, figures: Sequence[tuple[Config, float]]) -> Matched:
    """Match figures to the configurations of a space by the names of their knobs.

    A knob that the space lacks is left out, and the fastest of its values counts; one that the figures lack may have
    any value. Of contradicting figures of one configuration the fastest counts too. Empty where neither has all the
    knobs of the other, as another kernel's may be; that is said where they share half of this space's.
    """
    ours = {knob.name for knob in space.knobs if len(knob.values) > 1}
    theirs = dict.fromkeys(name for config, _ in figures for name in config)
    lacking = [name for name in sorted(ours) if name not in theirs]
    more = [name for name in theirs if name not in {knob.name for knob in space.knobs}]
    if lacking and more:
        unlike = f"not used: they have no knob {', '.join(lacking)}, and this space has no knob {', '.join(more)}"
        return Matched({}, [unlike] if 2 * len(lacking) <= len(ours) else [])
    found: dict[str, tuple[Config, float]] = {}
    whole: dict[str, list[float]] = {}
    unmatched = 0
    for config, us in figures:
        whole.setdefault(config_key(config), []).append(us)
        alike = list(_alike(space, config))
        unmatched += not alike
        for of in alike:
            key = config_key(of)
            if key not in found or us < found[key][1]:
                found[key] = of, us
    contradicting = sum(max(of) > CONTRADICTION * min(of) for of in whole.values())
    said = [
        *_named("this space has no knob", more),
        *_named("they have no knob", lacking),
        *([f"{unmatched:,} of {len(figures):,} are not in this space"] if unmatched else []),
        *([f"{contradicting:,} configurations have contradicting ones; the fastest count"] if contradicting else []),
    ]
    return Matched(found, said)


def _named(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what} {', '.join(names)}"] if names else []


def _alike(space: Space, config: Config) -> Iterator[Config]:
    """Yield the space's configurations that agree with another in every knob that both have."""
    common = {knob.name: config[knob.name] for knob in space.knobs if knob.name in config}
    if space.contains(common):
        yield common
        return
    lacking = [knob for knob in space.knobs if knob.name not in config]
    if not lacking or math.prod(len(knob.values) for knob in lacking) > MAX_COMPLETED:
        return
    for values in product(*(knob.values for knob in lacking)):
        of = {**common, **dict(zip((knob.name for knob in lacking), values, strict=True))}
        if space.contains(of):
            yield of


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
