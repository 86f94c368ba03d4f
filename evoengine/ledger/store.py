"""The ledger: every run, candidate, verdict and figure, in one SQLite file or PostgreSQL database.

Each `record_…` is one transaction and is committed when it returns: a kill loses at most the stage under way.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from sqlalchemy import Select, select
from sqlalchemy.orm import Session, aliased, joinedload, undefer

from evoengine import __version__
from evoengine.errors import NothingFound
from evoengine.gpu import find_gpu
from evoengine.hints import hint
from evoengine.ledger.chosen import chosen_database
from evoengine.ledger.database import open_database, parse_url
from evoengine.ledger.heartbeat import begin_beating, mark_killed
from evoengine.ledger.models import (
    BaselineRow,
    BinaryRow,
    CandidateRow,
    MeasurementRow,
    ProfileRow,
    RunRow,
    VerdictRow,
)
from evoengine.ledger.reading import Reader
from evoengine.ledger.removal import delete_runs
from evoengine.ledger.rows import (
    baseline_values,
    device_row,
    get_or_create_binary,
    get_or_create_source,
    measurement_values,
    profile_values,
    to_baseline,
    to_binary,
    to_run,
    verdict_values,
)
from evoengine.ledger.runs import RUNNING, Device, Run, this_host
from evoengine.ledger.summaries import RunSummary, read_summaries
from evoengine.ledger.transfer import RunHistory, insert_run, read_run
from evoengine.objectives import DEFAULT
from evoengine.records import (
    Baseline,
    Binary,
    Candidate,
    Config,
    Measurement,
    Outcome,
    Profile,
    Source,
    Verdict,
    config_key,
)


class SpaceFile(Protocol):
    """A search space, as far as a ledger keeps it."""

    name: str
    sha256: str
    text: str


def open_ledger(database: str | None, *, create: bool) -> Ledger:
    """The ledger in an SQLite file, given as path or URL, or in PostgreSQL; None is what `chosen_database` says.

    Raises NothingFound where there is none and `create` is false, UsageError on a database that cannot be used,
    MachineError where PostgreSQL's driver is missing. Nothing is written then.
    """
    url = parse_url(chosen_database(database))
    return Ledger(url, open_database(url, create=create))


class Ledger(Reader):
    """Takes and gives the records of `evoengine.records`. Close it, or use it as a context manager.

    Any method raises UsageError where the database has been locked by another writer for too long.
    """

    # ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start_run(
        self,
        *,
        gpu: str,
        problem: str,
        device: Device,
        space: SpaceFile,
        sampler: str,
        seed: int,
        command: str,
        objectives: str = DEFAULT,
        definition: str | None = None,
        gpu_definition: dict[str, Any] | None = None,
    ) -> int:
        """Enters a run of this process; runs that no longer beat are marked as killed. It beats until `finish_run`."""
        with self._writing() as session:
            mark_killed(session)
            row = RunRow(
                started_at=_now(), status=RUNNING, gpu=gpu, problem=problem, device=device_row(session, device),
                space_name=space.name, space_sha256=space.sha256, space_text=space.text, sampler=sampler, seed=seed,
                objectives=objectives, version=__version__, host=this_host(), pid=os.getpid(), command=command,
                definition=definition, gpu_definition=gpu_definition,
            )  # fmt: skip
            session.add(row)
            session.flush()
            fence = begin_beating(session, row.id)
            run = row.id
        self._fences[run] = fence
        self._heart.start()
        return run

    def finish_run(self, run: int, status: str) -> None:
        """`status` says how the search ended. Candidates it leaves unfinished are the next run's to adopt."""
        with self._writing() as session:
            row = session.get_one(RunRow, run)
            row.status, row.finished_at = status, _now()
        self._fences.pop(run, None)
        if not self._fences:
            self._heart.stop()

    def runs(self) -> list[Run]:
        """Oldest first."""
        with self._reading() as session:
            rows = session.scalars(select(RunRow).options(joinedload(RunRow.device)).order_by(RunRow.id))
            return [to_run(row) for row in rows]

    def run_summaries(self) -> Iterator[RunSummary]:
        """What a list of runs shows, oldest first."""
        with self._reading() as session:
            yield from read_summaries(session)

    def remove_runs(self, runs: Sequence[int]) -> None:
        """Takes out runs with all that is theirs alone, their Optuna studies too; all of them or none.

        Their numbers and their trials' numbers are never given again. Raises UsageError where there is no such run, or
        one that is still going on may use it.
        """
        with self._writing() as session:
            mark_killed(session)
            delete_runs(session, runs)

    def known_gpu(self, name: str | None) -> str | None:
        """The name as it is. Raises UsageError where neither a run here nor evoengine has a GPU of that name."""
        with self._reading() as session:
            held = name is None or session.scalar(select(RunRow.id).where(RunRow.gpu == name).limit(1)) is not None
        return name if held else find_gpu(str(name)).key

    def last_target(self, gpu: str | None, problem: str | None) -> tuple[str, str]:
        """GPU and problem of the last run that agrees with what is given; raises NothingFound where there is none, and
        UsageError for a GPU that nobody knows."""
        gpu = self.known_gpu(gpu)
        matching = select(RunRow.gpu, RunRow.problem).order_by(RunRow.id.desc()).limit(1)
        if gpu is not None:
            matching = matching.where(RunRow.gpu == gpu)
        if problem is not None:
            matching = matching.where(RunRow.problem == problem)
        with self._reading() as session:
            found = session.execute(matching).one_or_none()
        if found is None:
            wanted = " for " + " on ".join(w for w in (problem, gpu) if w) if gpu or problem else ""
            then = "search" if self.is_empty() else "history"
            what = "fills it" if self.is_empty() else "lists what it has"
            raise NothingFound(f"the ledger holds no run{wanted}: {hint(then, db=self.db)} {what}")
        return found[0], found[1]

    def is_empty(self) -> bool:
        """Whether it holds no trial."""
        with self._reading() as session:
            return session.scalar(select(CandidateRow.id).limit(1)) is None

    def last_definition(self, problem: str) -> str | None:
        """The problem.json that the last run for this problem kept; None where it kept none."""
        kept = select(RunRow.definition).where(RunRow.problem == problem, RunRow.definition.is_not(None))
        with self._reading() as session:
            return session.scalar(kept.order_by(RunRow.id.desc()).limit(1))

    def gpu_definition(self, gpu: str) -> dict[str, Any] | None:
        """The fields of the GPU that a file described to the last run on it; None where none did."""
        kept = select(RunRow.gpu_definition).where(RunRow.gpu == gpu, RunRow.gpu_definition.is_not(None))
        with self._reading() as session:
            return session.scalar(kept.order_by(RunRow.id.desc()).limit(1))

    def record_baseline(self, run: int, baseline: Baseline) -> None:
        with self._writing() as session:
            session.add(BaselineRow(run_id=run, taken_at=_now(), **baseline_values(baseline)))

    def baselines(self, run: int) -> list[Baseline]:
        with self._reading() as session:
            rows = session.scalars(select(BaselineRow).where(BaselineRow.run_id == run).order_by(BaselineRow.id))
            return [to_baseline(row) for row in rows]

    def long_run_us(self, run: int, baseline: Baseline) -> float:
        """The median of that baseline's times over all runs like this one: same problem, GPU, device with its driver
        and libraries, and policy. Its own time where no run of this ledger's own has recorded it yet."""
        this = aliased(RunRow)
        like = select(BaselineRow).join(RunRow).join(this, this.id == run).where(
            RunRow.problem == this.problem, RunRow.gpu == this.gpu, RunRow.device_id == this.device_id,
            BaselineRow.name == baseline.name, RunRow.imported_from.is_(None),
        )  # fmt: skip
        with self._reading() as session:
            known = [to_baseline(row) for row in session.scalars(like)]
        times = [b.median_us for b in known if b.policy == baseline.policy]
        return statistics.median(times or [baseline.median_us])

    def whole_run(self, run: int) -> RunHistory:
        """All that is known of a run's finished candidates but their cubins, for another ledger to take in."""
        with self._reading() as session:
            return read_run(session, run)

    def import_run(self, whole: RunHistory) -> tuple[int, list[int]]:
        """Enters a run of another ledger or tuner, all or nothing; its number and the new trial numbers, in order."""
        with self._writing() as session:
            return insert_run(session, whole, _now())

    # ── a candidate on its way ──────────────────────────────────────────────────────────────────────────────────────

    def add_candidate(
        self, run: int, problem: str, gpu: str, config: Config, parents: Sequence[int], operator: str | None
    ) -> int:
        """Its trial number: unique across the ledger, never given twice."""
        with self._writing() as session:
            row = CandidateRow(
                run_id=run, problem=problem, gpu=gpu, config=dict(config), config_key=config_key(config),
                parents=list(parents), operator=operator, created_at=_now(),
            )  # fmt: skip
            session.add(row)
            session.flush()
            return row.id

    def record_source(self, trial: int, source: Source) -> None:
        with self._writing() as session:
            _update_candidate(session, trial, **get_or_create_source(session, source))

    def find_binary(self, source_sha256: str, options: str, arch: str, compiler: str) -> Binary | None:
        """What that compiler made of that source, in whatever run."""
        key = {"source_sha256": source_sha256, "options": options, "arch": arch, "compiler": compiler}
        with self._reading() as session:
            row = session.scalar(select(BinaryRow).filter_by(**key).options(undefer(BinaryRow.cubin)))
            return to_binary(row, with_cubin=True) if row else None

    def record_binary(self, trial: int, source: Source, binary: Binary) -> None:
        """Ties the candidate to the binary; one that is there already for the same source and compiler is kept."""
        with self._writing() as session:
            _update_candidate(session, trial, binary_id=get_or_create_binary(session, source, binary))

    def record_verdict(self, trial: int, verdict: Verdict) -> None:
        with self._writing() as session:
            session.add(VerdictRow(candidate_id=trial, taken_at=_now(), **verdict_values(verdict)))

    def record_measurement(self, trial: int, measurement: Measurement) -> None:
        with self._writing() as session:
            session.add(MeasurementRow(candidate_id=trial, taken_at=_now(), **measurement_values(measurement)))

    def record_profile(self, trial: int, profile: Profile) -> None:
        with self._writing() as session:
            session.add(ProfileRow(candidate_id=trial, taken_at=_now(), **profile_values(profile)))

    def finish(
        self, trial: int, outcome: Outcome, reason: str | None, occupancy: float | None, device: str | None
    ) -> None:
        """How the candidate ended; a later measurement may end it again."""
        end = {"outcome": str(outcome), "reason": reason, "occupancy": occupancy, "device": device}
        with self._writing() as session:
            self._finished.append(trial)
            _update_candidate(session, trial, finished_at=_now(), **end)

    # ── reclaiming ──────────────────────────────────────────────────────────────────────────────────────────────────

    def unfinished(self, gpu: str, problem: str) -> list[Candidate]:
        """Candidates without an outcome that no run works on any more, as far as their last committed stage."""
        return self._load(_abandoned().where(CandidateRow.gpu == gpu, CandidateRow.problem == problem))

    def adopt(self, trials: Sequence[int], run: int) -> list[int]:
        """Hands abandoned candidates to a run; the trials it got: another run may have been quicker."""
        with self._writing() as session:
            wanted = _abandoned().where(CandidateRow.id.in_(trials)).with_for_update(of=CandidateRow)
            rows = session.scalars(wanted).all()
            for row in rows:
                row.run_id = run
            return [row.id for row in rows]


def _abandoned() -> Select[CandidateRow]:
    return select(CandidateRow).join(RunRow).where(CandidateRow.outcome.is_(None), RunRow.status != RUNNING)


def _update_candidate(session: Session, trial: int, **values: object) -> None:
    row = session.get_one(CandidateRow, trial)
    for name, value in values.items():
        setattr(row, name, value)


def _now() -> datetime:
    return datetime.now(UTC)
