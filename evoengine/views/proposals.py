"""The JSON of proposals: what a proposer is told of a candidate. It holds nothing of the gate's seeds."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict

from evoengine.records import Candidate, CaseResult, Config, Outcome
from evoengine.sandbox.jail import MARK
from evoengine.views.encoding import SCHEMA, AnswerView


class CounterexampleView(TypedDict):
    """The first case of the gate that a candidate failed; errors are absolute, null where there was no result."""

    case: str
    problem: str
    max_error: float | None
    allowed: float | None
    reason: str | None


class GivenLaunchView(TypedDict):
    """Blocks of the grid, threads of a block, and bytes of dynamic shared memory, which a proposal cannot change."""

    grid: Sequence[int]
    block: Sequence[int]
    shared_bytes: int


class JudgedTextView(TypedDict):
    """A text and how it was judged; what it did not reach is null."""

    trial: int
    parents: Sequence[int]
    text: str
    entry: str
    launch: GivenLaunchView
    problem: str
    gpu: str
    config: Config
    outcome: Outcome | None
    reason: str | None
    counterexample: CounterexampleView | None
    predicted_us: float | None
    registers: int | None
    spill_bytes: int | None


class ProposalView(JudgedTextView, AnswerView):
    """What `POST /v1/candidates` answers."""


def judged_json(candidate: Candidate) -> JudgedTextView:
    source, binary, figure = candidate.source, candidate.binary, candidate.measurement
    assert source is not None  # it was rendered
    launch = source.launch
    failed = next((c for v in candidate.verdicts for c in v.cases if not c.correct), None)
    return {
        "trial": candidate.trial,
        "parents": candidate.parents,
        "text": source.text.removeprefix(MARK),
        "entry": source.entry,
        "launch": {"grid": launch.grid, "block": launch.block, "shared_bytes": launch.shared_bytes},
        "problem": candidate.problem,
        "gpu": candidate.gpu,
        "config": dict(candidate.config),
        "outcome": candidate.outcome,
        "reason": candidate.reason,
        "counterexample": _counterexample(failed) if failed else None,
        "predicted_us": figure.compared_us if figure else None,
        "registers": binary.registers if binary else None,
        "spill_bytes": binary.spill_bytes if binary else None,
    }


def _counterexample(case: CaseResult) -> CounterexampleView:
    return {
        "case": case.name,
        "problem": case.problem,
        "max_error": case.max_error,
        "allowed": case.allowed,
        "reason": case.reason,
    }


def proposal_json(candidate: Candidate) -> ProposalView:
    return {"schema": SCHEMA, **judged_json(candidate)}
