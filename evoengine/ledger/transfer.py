"""Whole runs out of a ledger's tables and into another's: all that is known of each candidate, with its time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import insert, select, text
from sqlalchemy.orm import Session, selectinload

from evoengine.ledger import integrity, rows
from evoengine.ledger.integrity import row_checksum
from evoengine.ledger.ranking import rebuild
from evoengine.ledger.rows import batches
from evoengine.ledger.tables import Base, BaselineRow, CandidateRow, MeasurementRow, ProfileRow, RunRow, VerdictRow
from evoengine.records import (
    AnyBaseline,
    Binary,
    Candidate,
    Measurement,
    Outcome,
    Profile,
    Run,
    Verdict,
    config_key,
    named,
)

if TYPE_CHECKING:
    from evoengine.ledger.store import Ledger

IMPORTED = "imported: "
"""begins the compiler of a binary that another ledger had: what it said is kept, its machine code is not"""
NOT_TAKEN_OVER = ("id", "device", "trials", "seconds", "conditions")
"""of a run: no search goes on with one of another ledger"""
_WRITTEN = (CandidateRow, VerdictRow, ProfileRow, MeasurementRow)
"""tables in an order in which what a row refers to is there before it"""
Taken = TypeVar("Taken", Verdict, Measurement, Profile)
_TRIAL = re.compile(r"\btrial (\d+)\b")


@dataclass(frozen=True, slots=True)
class CandidateHistory:
    """A finished candidate with all its verdicts, figures and profiles, oldest first. Times may be missing."""

    candidate: Candidate
    verdicts: Sequence[Verdict] = ()
    figures: Sequence[Measurement] = ()
    profiles: Sequence[Profile] = ()


@dataclass(frozen=True, slots=True)
class RunHistory:
    """A run with its baselines and its finished candidates in their order."""

    run: Run
    baselines: Sequence[AnyBaseline]
    candidates: Iterable[CandidateHistory]


def read_run(ledger: Ledger, number: int) -> RunHistory:
    """Return a run with its finished candidates; cubins, which no other ledger would take, are empty."""
    of_run = select(BaselineRow).where(BaselineRow.run_id == number).order_by(BaselineRow.id)
    judged = CandidateRow.outcome.in_([str(o) for o in Outcome if o.reusable])
    finished = select(CandidateRow).where(CandidateRow.run_id == number, judged)
    whole = (*rows.load_options(with_cubin=False), selectinload(CandidateRow.profiles))
    with ledger.database.reading() as session:
        return RunHistory(
            rows.to_run(session.get_one(RunRow, number)),
            [rows.to_baseline(row) for row in session.scalars(of_run)],
            [_history(row) for row in session.scalars(finished.options(*whole).order_by(CandidateRow.id))],
        )


def _history(row: CandidateRow) -> CandidateHistory:
    return CandidateHistory(
        rows.to_candidate(row, with_cubin=False),
        _records(Verdict, row.verdicts),
        _records(Measurement, row.measurements),
        _records(Profile, row.profiles),
    )


def _records(kind: type[Taken], found: Iterable[Base]) -> list[Taken]:
    return [rows.to_record(kind, row) for row in found]


def import_run(
    ledger: Ledger, whole: RunHistory, on_done: Callable[[int], None] = lambda done: None
) -> tuple[int, list[int]]:
    """Insert a run of another ledger or tuner; return its number and its candidates' new trial numbers, in order.

    `on_done` is told how many trials are written.

    Whatever names another trial of the run is renumbered; parents and incumbents of other runs are not of this ledger
    and go. Finals get negative numbers in their order, by which `ranked` knows that they were not held here.
    """
    with ledger.database.writing() as session:
        return _insert_run(session, whole, datetime.now(UTC), on_done)


def _insert_run(
    session: Session, whole: RunHistory, now: datetime, on_done: Callable[[int], None]
) -> tuple[int, list[int]]:
    """Insert a run; `now` stands for times that nobody noted."""
    integrity.call_it(session.connection(), integrity.IMPORTED)
    plain = named(whole.run, (name for name in Run.__slots__ if name not in NOT_TAKEN_OVER))
    plain["imported_from"] = whole.run.imported_from or "another ledger"
    run = RunRow(device=rows.device_row(session, whole.run.device), **plain)
    session.add(run)
    session.flush()
    for baseline in whole.baselines:
        session.add(BaselineRow(run_id=run.id, taken_at=baseline.taken_at or now, **rows.record_values(baseline)))
    trials, late = _insert_candidates(session, whole.candidates, run.id, now, on_done)
    finals = _finals(figure for _, figure in late)
    # rows are ranked in the order of their numbers, and finals end what was timed alone
    late.sort(key=lambda f: (f[1].taken_at or now, "place" in f[1].terms))
    for some in batches(late):
        restated = [(trial, replace(f, terms=_renumbered(f.terms, trials, finals))) for trial, f in some]
        _insert(session, MeasurementRow, [_values(trial, f, now) for trial, f in restated])
    rebuild(session, run.id)
    return run.id, list(trials.values())


def _insert_candidates(
    session: Session, histories: Iterable[CandidateHistory], run: int, now: datetime, on_done: Callable[[int], None]
) -> tuple[dict[int, int], list[tuple[int, Measurement]]]:
    """Insert candidates; return old trial number → new, and the figures to insert after them, by new numbers."""
    numbers: dict[int, int] = {}
    late: list[tuple[int, Measurement]] = []
    renaming: dict[int, str] = {}
    for some in batches(histories):
        new = _next_trials(session, len(some))
        numbers |= {history.candidate.trial: number for history, number in zip(some, new, strict=True)}
        written: dict[type[Base], list[dict[str, object]]] = {row: [] for row in _WRITTEN}
        for history, trial in zip(some, new, strict=True):
            if history.candidate.reason and _TRIAL.search(history.candidate.reason):
                renaming[trial] = history.candidate.reason
            written[CandidateRow].append(
                {"id": trial} | _candidate_values(session, history.candidate, run, now, numbers)
            )
            written[VerdictRow] += [_values(trial, v, now) for v in history.verdicts]
            written[ProfileRow] += [_values(trial, p, now) for p in history.profiles]
            for figure in history.figures:
                if figure.taken_at or figure.terms:
                    late.append((trial, figure))
                else:  # a foreign file's, which may be 100,000
                    written[MeasurementRow].append(_values(trial, figure, now))
        for row, of_row in written.items():
            _insert(session, row, of_row)
        on_done(len(numbers))
    for trial, reason in renaming.items():
        candidate = session.get_one(CandidateRow, trial)
        candidate.reason = _TRIAL.sub(lambda m: f"trial {numbers.get(int(m[1]), m[1])}", reason)
    return numbers, late


def _insert(session: Session, row: type[Base], values: list[dict[str, object]]) -> None:
    """Insert rows past the mapper, with their checksums and the chain's notes."""
    if not values:
        return
    table, connection = row.__table__, session.connection()
    made = connection.scalars(
        insert(row).returning(table.c.id, sort_by_parameter_order=True),
        [v | {"checksum": row_checksum(row, v)} for v in values],
    )
    for number, of_row in zip(made, values, strict=True):
        integrity.note(connection, row, number, of_row)


def _next_trials(session: Session, count: int) -> Sequence[int]:
    """Return `count` trial numbers that were never given, in ascending order."""
    if session.get_bind().dialect.name == "sqlite":  # whose transaction has the write lock from its beginning
        last = session.scalar(text("SELECT seq FROM sqlite_sequence WHERE name = 'candidates'")) or 0
        return range(last + 1, last + 1 + count)
    drawn = text("SELECT nextval(pg_get_serial_sequence('candidates', 'id')) FROM generate_series(1, :count)")
    return sorted(session.scalars(drawn, {"count": count}))


def _candidate_values(
    session: Session, c: Candidate, run: int, now: datetime, numbers: Mapping[int, int]
) -> dict[str, object]:
    """Return all columns of a candidate's row. `numbers` maps the run's old trial numbers so far to new ones."""
    source = rows.get_or_create_source(session.connection(), c.source) if c.source else dict.fromkeys(rows.OF_SOURCE)
    binary = None
    if c.source and c.binary:
        binary = rows.get_or_create_binary(session.connection(), c.source, _stated(c.binary))
    return {
        "run_id": run,
        "config": dict(c.config),
        "config_key": config_key(c.config),
        "parents": [numbers[p] for p in c.parents if p in numbers],
        "created_at": c.created_at or now,
        "finished_at": c.finished_at or now,
        "outcome": str(c.outcome),
        "binary_id": binary,
        **named(c, ("problem", "gpu", "operator", "reason", "device", "occupancy", "gate_version")),
        **source,
    }


def is_elsewhere(binary: Binary) -> bool:
    """Return whether the machine code of a binary stayed in another ledger; `cubin` is empty then."""
    return binary.compiler.startswith(IMPORTED)


def _stated(binary: Binary) -> Binary:
    """Return what another ledger says of its binary.

    It is under a compiler of its own, so that nobody takes it for one made here, and without machine code, which would
    be run.
    """
    compiler = binary.compiler if is_elsewhere(binary) else IMPORTED + binary.compiler
    return replace(binary, cubin=b"", compiler=compiler)


def _values(trial: int, record: Verdict | Measurement | Profile, now: datetime) -> dict[str, object]:
    return {"candidate_id": trial, "taken_at": record.taken_at or now} | rows.record_values(record)


def _finals(figures: Iterable[Measurement]) -> dict[float, float]:
    """Return old `final_of_run` → new: -1 for the last finals, -2 for those before."""
    held = {figure.terms["final_of_run"] for figure in figures if "final_of_run" in figure.terms}
    return {old: -float(age) for age, old in enumerate(sorted(held, reverse=True), 1)}


def _renumbered(
    terms: Mapping[str, float], numbers: Mapping[int, int], finals: Mapping[float, float]
) -> dict[str, float]:
    terms = dict(terms)
    if "final_of_run" in terms:
        terms["final_of_run"] = finals[terms["final_of_run"]]
    if "incumbent" in terms and terms["incumbent"] not in numbers:
        del terms["incumbent"]
    elif "incumbent" in terms:
        terms["incumbent"] = float(numbers[int(terms["incumbent"])])
    return terms
