"""The objectives of a search: TFLOPS, alone or against the resources that a kernel uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from evoengine.errors import UsageError, did_you_mean
from evoengine.records import Measurement, Outcome

Direction = Literal["maximize", "minimize"]


@dataclass(frozen=True, slots=True)
class Objective:
    name: str
    title: str
    """the name for the user"""
    timed: bool
    """whether it is a timed figure, and not a property of the binary"""
    direction: Direction
    penalty: float
    """value of a rejected candidate for the sampler, worse than that of any correct one"""


class Compiled(Protocol):
    @property
    def registers(self) -> int: ...


class Aimed(Protocol):
    """The fields of a trial that objectives need: a Candidate, or a row of a ledger's list."""

    @property
    def outcome(self) -> Outcome | None: ...
    @property
    def measurement(self) -> Measurement | None: ...
    @property
    def binary(self) -> Compiled | None: ...
    @property
    def shared_bytes(self) -> int | None: ...


A = TypeVar("A", bound=Aimed)

OBJECTIVES = {
    "tflops": Objective("tflops", "TFLOPS", True, "maximize", 0.0),
    # runs per second: what a recorded file knows where nobody counted operations
    "speed": Objective("speed", "runs per second", True, "maximize", 0.0),
    # CUDA C++ Programming Guide: 255 registers per thread; 227 KB shared memory per block, compute capability 9.0
    "registers": Objective("registers", "registers", False, "minimize", 256.0),
    "shared_bytes": Objective("shared_bytes", "shared bytes", False, "minimize", 256.0 * 1024),
}
DEFAULT = "tflops"
USER_OBJECTIVES = (DEFAULT, "registers", "shared_bytes")
"""objectives that the user can choose"""

BY_FORMULA = 1e-6
"""factor on the speed, for the sampler, of a candidate that the model of the chip could not read"""


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Parse `tflops,registers`. Raises UsageError naming what is known."""
    names = [name.strip() for name in text.split(",")]
    known = ", ".join(USER_OBJECTIVES)
    for name in names:
        if name not in USER_OBJECTIVES:
            near = did_you_mean(name, USER_OBJECTIVES)
            raise UsageError(f"--objective {text!r} names {name!r}; known objectives are {known}{near}")
    if len(set(names)) < len(names):
        raise UsageError(f"--objective {text!r} names one twice; name each of {known} once")
    if DEFAULT not in names:
        raise UsageError(f"--objective {text!r} leaves out {DEFAULT}; without it, slow kernels would win")
    return tuple(OBJECTIVES[name] for name in names)


def known_objectives(objectives: Sequence[Objective], flops: float) -> tuple[Objective, ...]:
    """Return the objectives of a problem; runs per second in place of TFLOPS where its operations are not known."""
    return tuple(OBJECTIVES["speed"] if o.name == DEFAULT and not flops else o for o in objectives)


def asked_objectives(text: str) -> str:
    """Return the objectives of a run, as the ledger stores them, by the names that a user gives."""
    return ",".join(DEFAULT if name == "speed" else name for name in text.split(","))


def stored_objectives(text: str) -> tuple[Objective, ...]:
    """Return the objectives of a run as the ledger stores them."""
    return tuple(OBJECTIVES[name] for name in text.split(","))


def objective_values(candidate: Aimed, objectives: Sequence[Objective]) -> tuple[float, ...] | None:
    """Return the candidate's value for each objective; None if it has no figure or one of them is unknown."""
    figure = candidate.measurement
    if figure is None or not (candidate.outcome and candidate.outcome.has_figure):
        return None
    by_name = {
        "tflops": figure.tflops,
        "speed": 1e6 / figure.compared_us,
        "registers": candidate.binary.registers if candidate.binary else None,
        "shared_bytes": candidate.shared_bytes,
    }
    values = [by_name[o.name] for o in objectives]
    known = tuple(float(v) for v in values if v is not None)
    return known if len(known) == len(values) else None


def sampler_values(candidate: Aimed, objectives: Sequence[Objective]) -> tuple[float, ...] | None:
    """Return a candidate's values for the sampler.

    Estimates by formula rank below all predictions and keep their own order.
    """
    values, figure = objective_values(candidate, objectives), candidate.measurement
    if values is None or figure is None or not figure.by_formula:
        return values
    return tuple(v * BY_FORMULA if o.timed else v for v, o in zip(values, objectives, strict=True))


def front(candidates: Iterable[A], objectives: Sequence[Objective]) -> list[A]:
    """Return the Pareto front, fastest first.

    These are the candidates that no other beats in one objective without losing in another. Of candidates with equal
    values the first is kept.
    """
    first: dict[tuple[float, ...], A] = {}
    for candidate in candidates:
        values = objective_values(candidate, objectives)
        if values is not None:
            signs = (1 if o.direction == "maximize" else -1 for o in objectives)
            first.setdefault(tuple(s * v for s, v in zip(signs, values, strict=True)), candidate)
    best: list[tuple[float, ...]] = []
    # a dominating candidate precedes the dominated one in descending order, so only the front must be compared
    for values in sorted(first, reverse=True):
        if not any(_dominates(other, values) for other in best):
            best.append(values)
    kept = [first[values] for values in best]
    return sorted(kept, key=lambda c: c.measurement.compared_us if c.measurement else math.inf)


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))
