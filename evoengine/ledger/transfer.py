"""Whole runs out of a ledger's tables and into another's: all that is known of each candidate, with its time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session, selectinload

from evoengine.ledger.models import (
    BaselineRow,
    CandidateRow,
    MeasurementRow,
    ProfileRow,
    RunRow,
    VerdictRow,
)
from evoengine.ledger.rows import (
    baseline_values,
    device_row,
    get_or_create_binary,
    get_or_create_source,
    load_options,
    measurement_values,
    profile_values,
    to_baseline,
    to_candidate,
    to_measurement,
    to_profile,
    to_run,
    to_verdict,
    verdict_values,
)
from evoengine.ledger.runs import Run
from evoengine.records import Baseline, Binary, Candidate, Measurement, Profile, Verdict, config_key

IMPORTED = "imported: "
"""begins the compiler of a binary that another ledger had: what it said is kept, its machine code is not"""
_TRIAL = re.compile(r"\btrial (\d+)\b")


@dataclass(frozen=True, slots=True)
class CandidateHistory:
    """A finished candidate with all its verdicts, figures and profiles, oldest first, each with when it was taken.

    A time is None where nobody noted it.
    """

    candidate: Candidate
    created_at: datetime | None = None
    finished_at: datetime | None = None
    verdicts: Sequence[tuple[datetime | None, Verdict]] = ()
    figures: Sequence[tuple[datetime | None, Measurement]] = ()
    profiles: Sequence[tuple[datetime | None, Profile]] = ()


@dataclass(frozen=True, slots=True)
class RunHistory:
    """A run with its baselines, each with when it was taken, and its finished candidates in their order."""

    run: Run
    baselines: Sequence[tuple[datetime | None, Baseline]]
    dossiers: Iterable[CandidateHistory]


def read_run(session: Session, number: int) -> RunHistory:
    """The run of that number; cubins, which no other ledger would take, are empty."""
    of_run = select(BaselineRow).where(BaselineRow.run_id == number).order_by(BaselineRow.id)
    finished = select(CandidateRow).where(CandidateRow.run_id == number, CandidateRow.outcome.is_not(None))
    rows = session.scalars(
        finished.options(*load_options(with_cubin=False), selectinload(CandidateRow.profiles)).order_by(CandidateRow.id)
    )
    return RunHistory(
        to_run(session.get_one(RunRow, number)),
        [(b.taken_at, to_baseline(b)) for b in session.scalars(of_run)],
        [_dossier(row) for row in rows],
    )


def _dossier(row: CandidateRow) -> CandidateHistory:
    return CandidateHistory(
        to_candidate(row, with_cubin=False),
        row.created_at,
        row.finished_at,
        [(v.taken_at, to_verdict(v)) for v in row.verdicts],
        [(m.taken_at, to_measurement(m)) for m in row.measurements],
        [(p.taken_at, to_profile(p)) for p in row.profiles],
    )


def insert_run(session: Session, whole: RunHistory, now: datetime) -> tuple[int, list[int]]:
    """The number it gets, and its candidates' new trial numbers, in order. `now` stands for times that nobody noted.

    Whatever names another trial of the run is renumbered; parents and incumbents of other runs are not of this ledger
    and go. Finals get negative numbers in their order, by which `ranked` knows that they were not held here.
    """
    plain = {name: getattr(whole.run, name) for name in Run.__slots__ if name not in ("id", "device")}
    plain["imported_from"] = whole.run.imported_from or "another ledger"
    run = RunRow(device=device_row(session, whole.run.device), **plain)
    session.add(run)
    session.flush()
    for taken, baseline in whole.baselines:
        session.add(BaselineRow(run_id=run.id, taken_at=taken or now, **baseline_values(baseline)))
    numbers: dict[int, int] = {}
    naming: list[CandidateRow] = []
    late: list[tuple[datetime, int, Measurement]] = []
    for dossier in whole.dossiers:
        row = _candidate_row(session, dossier, run.id, now)
        numbers[dossier.candidate.trial] = row.id
        if row.parents or row.reason:
            naming.append(row)
        for taken, figure in dossier.figures:
            if taken or figure.terms:
                late.append((taken or now, row.id, figure))
            else:  # a foreign file's, which may be 100,000
                session.add(_figure_row(now, row.id, figure))
    for row in naming:
        row.parents = [numbers[p] for p in row.parents if p in numbers]
        row.reason = row.reason and _TRIAL.sub(lambda m: f"trial {numbers.get(int(m[1]), m[1])}", row.reason)
    finals = _finals(figure for _, _, figure in late)
    # rows are ranked in the order of their numbers, and finals end what was timed alone
    for taken, trial, figure in sorted(late, key=lambda f: (f[0], "place" in f[2].terms)):
        terms = _renumbered(figure.terms, numbers, finals)
        session.add(_figure_row(taken, trial, replace(figure, terms=terms)))
    return run.id, list(numbers.values())


def _candidate_row(session: Session, dossier: CandidateHistory, run: int, now: datetime) -> CandidateRow:
    c = dossier.candidate
    row = CandidateRow(
        run_id=run, problem=c.problem, gpu=c.gpu, config=dict(c.config), config_key=config_key(c.config),
        parents=list(c.parents), operator=c.operator, created_at=dossier.created_at or now,
        finished_at=dossier.finished_at or now, outcome=str(c.outcome), reason=c.reason, device=c.device,
        occupancy=c.occupancy, **(get_or_create_source(session, c.source) if c.source else {}),
    )  # fmt: skip
    if c.source and c.binary:
        row.binary_id = get_or_create_binary(session, c.source, _stated(c.binary))
    session.add(row)
    session.flush()
    for taken, verdict in dossier.verdicts:
        session.add(VerdictRow(candidate_id=row.id, taken_at=taken or now, **verdict_values(verdict)))
    for taken, profile in dossier.profiles:
        session.add(ProfileRow(candidate_id=row.id, taken_at=taken or now, **profile_values(profile)))
    return row


def is_elsewhere(binary: Binary) -> bool:
    """Whether it is what a file says of a binary that is in another ledger; its `cubin` is empty."""
    return binary.compiler.startswith(IMPORTED)


def _stated(binary: Binary) -> Binary:
    """What another ledger says of its binary. Under a compiler of its own, so that nobody takes it for one made here,
    and without machine code, which would be run."""
    if is_elsewhere(binary):
        return replace(binary, cubin=b"")
    return replace(binary, cubin=b"", compiler=IMPORTED + binary.compiler)


def _figure_row(taken: datetime, trial: int, figure: Measurement) -> MeasurementRow:
    return MeasurementRow(candidate_id=trial, taken_at=taken, **measurement_values(figure))


def _finals(figures: Iterable[Measurement]) -> dict[float, float]:
    """Old `final_of_run` → new: -1 for the last."""
    held = {figure.terms["final_of_run"] for figure in figures if "final_of_run" in figure.terms}
    return {old: -float(age) for age, old in enumerate(sorted(held, reverse=True), 1)}


def _renumbered(
    terms: Mapping[str, float], numbers: Mapping[int, int], finals: Mapping[float, float]
) -> dict[str, float]:  # fmt: skip
    terms = dict(terms)
    if "final_of_run" in terms:
        terms["final_of_run"] = finals[terms["final_of_run"]]
    if "incumbent" in terms and terms["incumbent"] not in numbers:
        del terms["incumbent"]
    elif "incumbent" in terms:
        terms["incumbent"] = float(numbers[int(terms["incumbent"])])
    return terms
