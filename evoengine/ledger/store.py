"""The ledger: every run, candidate, verdict and figure, in one SQLite file or PostgreSQL database.

Each `record_…` is one transaction and is committed when it returns, or when the block of `together` ends that it is
called in: a kill loses at most the stage in progress.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, Required, Self, TypedDict, TypeVar, Unpack

from sqlalchemy import URL, Connection, Engine, Select, func, select
from sqlalchemy.orm import aliased, joinedload

from evoengine import __version__
from evoengine.errors import NothingFound, UsageError, hint
from evoengine.ledger import rows
from evoengine.ledger.check import delete_runs
from evoengine.ledger.claims import Claim, Claims, claim, claim_again, end_claims
from evoengine.ledger.database import db_of, display_url, make_engine, open_database, parse_url, schema_of
from evoengine.ledger.integrity import Damaged, insert_row, update_row
from evoengine.ledger.ranking import RankedApart, read_order, read_ranked_apart, update_standing
from evoengine.ledger.read import (
    RunSummary,
    Targets,
    Trial,
    TrialLists,
    Wanted,
    narrowed,
    read_ancestors,
    read_summaries,
    read_trials,
)
from evoengine.ledger.rows import batches
from evoengine.ledger.runs import (
    POLL_SECONDS,
    Watchman,
    begin_beating,
    end_unfinished,
    left_over,
    mark_killed,
    seconds_until_last_beat,
)
from evoengine.ledger.schema import REVISIONS
from evoengine.ledger.tables import BaselineRow, BinaryRow, CandidateRow, HeartbeatRow, RunRow, SourceRow
from evoengine.ledger.transactions import Database, patient
from evoengine.objectives import DEFAULT
from evoengine.paths import chosen_database
from evoengine.records import (
    KILLED,
    PENDING,
    RUNNING,
    AnyBaseline,
    Baseline,
    Binary,
    Candidate,
    Config,
    Device,
    Measurement,
    Outcome,
    Profile,
    Run,
    Source,
    Verdict,
    config_key,
)

Record = TypeVar("Record")
CANDIDATE_BATCH = 200
"""candidates that are read together, with their sources"""


NewCandidate = tuple[int, str, str, Config, Sequence[int], str | None, Source | None, int | None]
"""run, problem, GPU, configuration, parents, operator, source and the trial that is tried again"""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose kernel a trial has."""

    source_sha256: str | None
    """None before it was rendered"""
    taken_from: int | None
    """the earlier trial whose end it has; None of what was evaluated itself"""


class SpaceFile(Protocol):
    """A search space, as far as a ledger keeps it."""

    name: str
    sha256: str
    text: str


class RunSettings(TypedDict, total=False):
    """Fields of a Run that whoever starts it states, under its names."""

    gpu: Required[str]
    problem: Required[str]
    sampler: Required[str]
    seed: Required[int]
    command: Required[str]
    objectives: str
    definition: str | None
    gpu_definition: dict[str, Any] | None
    trials: int | None
    seconds: float | None
    conditions: dict[str, Any] | None
    kernel: str | None


def open_ledger(database: str | os.PathLike[str] | None, *, create: bool) -> Ledger:
    """Open the ledger in an SQLite file, given as path or URL, or in PostgreSQL; None is what `chosen_database` says.

    Raises NothingFound if there is none and `create` is false, UsageError on a database that cannot be used,
    MachineError if PostgreSQL's driver is missing. Nothing is written then.
    """
    url = parse_url(chosen_database(None if database is None else os.fspath(database)))
    return Ledger(url, open_database(url, create=create))


def open_unchecked(database: str | None) -> Ledger:
    """Open a ledger that may be damaged. Raises UsageError on one of another schema."""
    url = parse_url(chosen_database(database))
    revision = schema_of(url)
    if revision != REVISIONS[-1]:
        raise UsageError(
            f"{display_url(url)} has schema {revision}, and this evoengine checks {REVISIONS[-1]}: "
            f"{hint('db', 'upgrade', db=db_of(url))} brings it there"
        )
    return Ledger(url, make_engine(url))


class Ledger:
    """Open ledger, which takes and gives the records of `evoengine.records`.

    Close it, or use it as a context manager.

    Any method raises UsageError if the database has been locked by another writer for too long.
    """

    def __init__(self, url: URL, engine: Engine) -> None:
        self.database = Database(url, engine)
        self.lists, self.targets, self.claims = TrialLists(self), Targets(self), Claims(self.database)
        self._watchman = Watchman()

    @property
    def url(self) -> str:
        """Return the URL for SQLAlchemy and Optuna, with the password where there is one."""
        return self.database.url.render_as_string(hide_password=False)

    @property
    def place(self) -> str:
        """Return the file, or the URL without its password, for messages."""
        return display_url(self.database.url)

    @property
    def db(self) -> str | None:
        """Return the value of --db that leads here, without a password; None for the default ledger."""
        return db_of(self.database.url)

    def close(self) -> None:
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ── runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start_run(self, *, device: Device, space: SpaceFile, **settings: Unpack[RunSettings]) -> int:
        """Enter a run of this process; mark those that are known to have been killed. It beats until `finish_run`."""
        self.look_for_killed()
        with self.database.writing() as session:
            row = RunRow(
                started_at=utc_now(),
                status=RUNNING,
                device=rows.device_row(session, device),
                space_name=space.name,
                space_sha256=space.sha256,
                space_text=space.text,
                version=__version__,
                host=socket.gethostname(),
                pid=os.getpid(),
                **{"objectives": DEFAULT, **settings},
            )
            session.add(row)
            session.flush()
            fence = begin_beating(session, row.id)
            run = row.id
        self.database.keep_alive(run, fence)
        return run

    def resume_run(self, run: int, trials: int | None, seconds: float | None) -> float | None:
        """Have an ended run go on in this process, with that budget; return the seconds that it has taken so far.

        None if it is running, as where another process was quicker.
        """
        with self.database.writing() as session:
            row = session.get_one(RunRow, run, with_for_update=True)
            if row.status == RUNNING:
                return None
            end_unfinished(session, run, killed=row.status == KILLED)
            row.status, row.finished_at, row.host, row.pid = RUNNING, None, socket.gethostname(), os.getpid()
            row.trials, row.seconds, row.version = trials, seconds, __version__
            fence = begin_beating(session, run)
            spent = session.get_one(HeartbeatRow, run).spent
        self.database.keep_alive(run, fence)
        return spent

    def await_killed(self, wanted: Callable[[int], bool], echo: Callable[[str], None]) -> None:
        """Wait until it is clear whether those runs that look killed are; a minute at most, mostly seconds."""
        said = False
        while looked_at := [run for run in self.look_for_killed() if wanted(run)]:
            if not said:
                echo(f"run {looked_at[0]} has sent no heartbeat for a while: checking whether it is still running")
                said = True
            time.sleep(POLL_SECONDS)

    @patient
    def finish_run(self, run: int, status: str) -> None:
        """End a run; `status` says how its search ended. What is in flight in it ends too."""
        with self.database.writing() as session:
            row = session.get_one(RunRow, run)
            row.status, row.finished_at = status, utc_now()
            end_unfinished(session, run, killed=False)
        self.database.release(run)

    def done(self, run: int) -> int:
        """Return how many trials of a run count: judged, and no duplicates."""
        counting = [str(o) for o in Outcome if o.judged and o is not Outcome.DUPLICATE]
        of_run = select(func.count()).where(CandidateRow.run_id == run, CandidateRow.outcome.in_(counting))
        return int(self.database.scalar(of_run))

    def seconds_spent(self, run: int) -> float:
        """Return the seconds that the processes of a run have taken so far."""
        with self.database.reading() as session:
            row = session.get(HeartbeatRow, run)
            return 0.0 if row is None else seconds_until_last_beat(row)

    @patient
    def runs(self) -> list[Run]:
        """Return the runs, oldest first."""
        with self.database.reading() as session:
            found = session.scalars(select(RunRow).options(joinedload(RunRow.device)).order_by(RunRow.id))
            return list(map(rows.to_run, found))

    def run(self, number: int) -> Run:
        """Return the run of a candidate, or one that was named by `runs`."""
        with self.database.reading() as session:
            if (found := session.get(RunRow, number)) is None:
                raise Damaged(RunRow.__tablename__, number)
            return rows.to_run(found)

    def find_run(self, number: int | None) -> Run:
        """Return the run of that number, or the last one.

        Raises NothingFound if the ledger holds no run, UsageError if it holds no such run.
        """
        wanted = select(RunRow).options(joinedload(RunRow.device)).order_by(RunRow.id.desc()).limit(1)
        with self.database.reading() as session:
            row = session.scalar(wanted if number is None else wanted.where(RunRow.id == number))
            if row is not None:
                return rows.to_run(row)
            least, most = session.execute(select(func.min(RunRow.id), func.max(RunRow.id))).one()
        if least is None:
            raise NothingFound(f"the ledger holds no run: {hint('search', db=self.db)} starts one")
        raise UsageError(
            f"there is no run {number}; the ledger holds runs {least} to {most}, which evoengine runs lists"
        )

    def run_summaries(self) -> Iterator[RunSummary]:
        """Yield what a list of runs shows, oldest first."""
        with self.database.reading() as session:
            yield from read_summaries(session)

    def remove_runs(self, runs: Sequence[int]) -> None:
        """Take out runs with all that is theirs alone, their Optuna studies too; all of them or none.

        Their numbers and their trials' numbers are never given again. Raises UsageError if there is no such run, or
        one that is still going on may use it.
        """
        self.await_killed(lambda run: True, lambda line: None)
        with self.database.writing() as session:
            delete_runs(session, runs)

    def is_empty(self) -> bool:
        """Return whether the ledger holds no trial."""
        return self.database.scalar(select(CandidateRow.id).limit(1)) is None

    @patient
    def record_baseline(self, run: int, baseline: AnyBaseline) -> None:
        with self.database.writing() as session:
            session.add(BaselineRow(run_id=run, taken_at=utc_now(), **rows.record_values(baseline)))

    def baselines(self, run: int) -> list[AnyBaseline]:
        """Return the baselines of a run, oldest first."""
        with self.database.reading() as session:
            found = session.scalars(select(BaselineRow).filter_by(run_id=run).order_by(BaselineRow.id))
            return [rows.to_baseline(row) for row in found]

    @patient
    def long_run_us(self, run: int, baseline: Baseline) -> float:
        """Return the median of that baseline's times over all runs like this one.

        They share problem, GPU, device with its driver and libraries, and policy. Its own time where no run of this
        ledger's own has recorded it yet.
        """
        this = aliased(RunRow)
        like = (
            select(BaselineRow)
            .join(RunRow)
            .join(this, this.id == run)
            .where(
                RunRow.problem == this.problem,
                RunRow.gpu == this.gpu,
                RunRow.device_id == this.device_id,
                BaselineRow.name == baseline.name,
                BaselineRow.reason.is_(None),
                RunRow.imported_from.is_(None),
            )
        )
        with self.database.reading() as session:
            known = [rows.to_baseline(row) for row in session.scalars(like)]
        times = [b.median_us for b in known if isinstance(b, Baseline) and b.policy == baseline.policy]
        return statistics.median(times or [baseline.median_us])

    @patient
    def look_for_killed(self) -> list[int]:
        """Mark the runs that are known to have been killed; return those to look at again in a while."""
        with self.database.reading() as session:
            killed = self._watchman.look(session)
        if killed:
            with self.database.writing() as session:
                mark_killed(session, killed)
            self._watchman.forget(killed)
        return self._watchman.undecided

    # ── candidates, written ───────────────────────────────────────────────────────────────────────────────────────────

    @patient
    def add_candidate(
        self,
        run: int,
        problem: str,
        gpu: str,
        config: Config,
        parents: Sequence[int],
        operator: str | None,
        source: Source | None = None,
        retry_of: int | None = None,
    ) -> int:
        """Insert a candidate; return its trial number, unique across the ledger and never given twice."""
        with self.database.write_connection() as connection:
            return _insert_candidate(connection, (run, problem, gpu, config, parents, operator, source, retry_of))

    @patient
    def add_ended(self, c: Candidate) -> int:
        """Enter a candidate with its figure and its end, in one transaction; return its trial number."""
        assert c.outcome is not None  # it has ended
        end = {"outcome": str(c.outcome), "reason": c.reason, "occupancy": c.occupancy, "device": c.device}
        with self.database.write_connection() as connection:
            trial = _insert_candidate(
                connection, (c.run, c.problem, c.gpu, c.config, c.parents, c.operator, None, None)
            )
            self._end(connection, trial, end, (), c.measurement)
        return trial

    @patient
    def add_claiming(self, candidate: NewCandidate, key: str, again: bool) -> tuple[int, Claim]:
        """Enter a candidate and claim its evaluation, unless the key's is known or in flight elsewhere.

        With `again`, claim it in any case.
        """
        with self.database.write_connection() as connection:
            trial = _insert_candidate(connection, candidate)
            if again:
                claim_again(connection, key, trial)
                return trial, Claim(trial, False)
            return trial, claim(connection, key, trial)

    @patient
    def left_over(self, run: int) -> dict[int, int]:
        """Return the trials of a run that were in flight when it was killed or ended, and how often each was killed.

        Left out are those that were tried again.
        """
        with self.database.reading() as session:
            return left_over(session, run)

    @patient
    def find_binary(self, source_sha256: str, options: str, arch: str, compiler: str) -> Binary | None:
        """Return what that compiler made of that source, in whatever run; None if its machine code was pruned."""
        key = {"source_sha256": source_sha256, "options": options, "arch": arch, "compiler": compiler}
        with self.database.reading() as session:
            row = session.scalar(select(BinaryRow).filter_by(**key).options(joinedload(BinaryRow.machine_code)))
            return rows.to_binary(row, with_cubin=True) if row and row.machine_code else None

    @patient
    def record_binary(self, trial: int, source: Source, binary: Binary) -> None:
        """Store the binary of a candidate; one that is there already for the same source and compiler is kept.

        Where the binary states the launch, `source` has it, and the candidate's own is replaced.
        """
        with self.database.write_connection() as connection:
            values: dict[str, object] = {"binary_id": rows.get_or_create_binary(connection, source, binary)}
            if binary.launch is not None:
                values |= rows.get_or_create_source(connection, source)
            update_row(connection, CandidateRow, trial, values)

    @patient
    def record_verdict(self, trial: int, verdict: Verdict) -> None:
        with self.database.write_connection() as connection:
            _insert_taken(connection, trial, utc_now(), verdict)
            update_standing(connection, trial)

    @patient
    def record_measurement(self, trial: int, measurement: Measurement) -> None:
        with self.database.write_connection() as connection:
            _insert_taken(connection, trial, utc_now(), measurement)
            update_standing(connection, trial)

    @patient
    def record_profile(self, trial: int, profile: Profile) -> None:
        with self.database.write_connection() as connection:
            _insert_taken(connection, trial, utc_now(), profile)

    @patient
    def finish(
        self,
        trial: int,
        outcome: Outcome,
        reason: str | None,
        occupancy: float | None,
        device: str | None,
        verdicts: Sequence[Verdict] = (),
        figure: Measurement | None = None,
        evidence: Mapping[str, Any] | None = None,
    ) -> None:
        """Record how the candidate ended and the verdicts that it ended by; a later measurement may end it again."""
        end: dict[str, Any] = {"outcome": str(outcome), "reason": reason, "occupancy": occupancy, "device": device}
        with self.database.write_connection() as connection:
            self._end(connection, trial, end | {"evidence": evidence}, verdicts, figure)

    def _end(
        self,
        connection: Connection,
        trial: int,
        end: dict[str, Any],
        verdicts: Sequence[Verdict],
        figure: Measurement | None,
    ) -> None:
        now = utc_now()
        taken: list[Verdict | Measurement] = [*verdicts, *filter(None, [figure])]
        for record in taken:
            _insert_taken(connection, trial, now, record)
        self.database.finished.append(trial)
        if versions := [v.gate_version for v in verdicts if v.gate_version is not None]:
            end["gate_version"] = min(versions)
        update_row(connection, CandidateRow, trial, {"finished_at": now, **end})
        update_standing(connection, trial)
        end_claims(connection, trial, now)

    # ── candidates, read ──────────────────────────────────────────────────────────────────────────────────────────────

    @patient
    def candidate(self, trial: int, *, with_cubin: bool = False) -> Candidate:
        """Return a candidate.

        Raises UsageError naming the range where there is no such trial. Without `with_cubin` cubins are empty.
        """
        found = self._load(select(CandidateRow).where(CandidateRow.id == trial), with_cubin)
        if found:
            return found[0]
        [(first, last)] = self.database.rows(select(func.min(CandidateRow.id), func.max(CandidateRow.id)))
        if last is None:
            raise NothingFound(f"the ledger holds no trial yet: {hint('search', db=self.db)} fills it")
        raise UsageError(f"there is no trial {trial}: the ledger's are numbered {first} to {last}")

    def candidates(
        self, *, run: int | None = None, problem: str | None = None, gpu: str | None = None, with_cubin: bool = False
    ) -> list[Candidate]:
        """Return candidates in the order of their trial numbers. Without `with_cubin` cubins are empty."""
        return self._load(narrowed(select(CandidateRow), Wanted(run, problem, gpu)), with_cubin)

    def trials(
        self,
        *,
        run: int | None = None,
        problem: str | None = None,
        gpu: str | None = None,
        ranked: bool = False,
        outcomes: Collection[Outcome | None] = (),
        resources: bool = False,
    ) -> Iterator[Trial]:
        """Yield what a list shows of each trial, in the order of their numbers, reading a batch at a time.

        `ranked` selects ranked trials, else `outcomes` those that ended so (None: unfinished). `resources` adds
        registers and shared memory.
        """
        named = [str(o) if o else PENDING for o in outcomes]
        if ranked:
            named = [str(o) for o in Outcome if o.ranked]
        wanted = narrowed(select(CandidateRow.id), Wanted(run, problem, gpu, named))
        return read_trials(self.database.reading, wanted, resources=resources)

    def candidates_by_id(self, trials: Sequence[int]) -> Iterator[Candidate]:
        """Yield the candidates of these numbers, in their order and a batch at a time, without cubins."""
        for some in batches(trials, CANDIDATE_BATCH):
            yield from self._load(select(CandidateRow).where(CandidateRow.id.in_(some)))

    def count(self, problem: str | None = None, gpu: str | None = None, *, run: int | None = None) -> int:
        """Return how many trials there are, narrowed by what is given."""
        return int(self.database.scalar(narrowed(select(func.count(CandidateRow.id)), Wanted(run, problem, gpu))))

    def ancestors(self, trial: int) -> dict[int, Trial]:
        """Return a trial and all that it came from, of the same problem and GPU, by number."""
        return {t.trial: t for t in read_ancestors(self.database.reading, trial)}

    @patient
    def best(
        self, problem: str, gpu: str, top: int, *, run: int | None = None, kernel: str | None = None
    ) -> list[Candidate]:
        """Return the fastest first, as `evoengine.ledger.ranking` orders them.

        All have figures of one kind, device and policy, are of one kernel and were judged by one version of the gate:
        those of the last figure, or of `kernel`. Finals come before single timings. A source that several runs found is
        there once.
        """
        with self.database.reading() as session:
            best = read_order(session, problem, gpu, top, run, kernel)
        loaded = {c.trial: c for c in self._load(select(CandidateRow).where(CandidateRow.id.in_(best)))}
        return [loaded[trial] for trial in best]

    @patient
    def ranked_apart(self, like: Candidate) -> list[RankedApart]:
        """Return how many candidates of the same problem and GPU are not ranked with `like`, newest first.

        They are of another kernel or were judged by another version of the gate.
        """
        with self.database.reading() as session:
            return read_ranked_apart(session, like.problem, like.gpu, like.trial)

    @patient
    def origins(self, run: int) -> dict[int, Origin]:
        """Return whose kernel each trial of a run has, in their order."""
        columns = (CandidateRow.id, CandidateRow.source_sha256, CandidateRow.taken_from)
        of_run = select(*columns).where(CandidateRow.run_id == run).order_by(CandidateRow.id)
        return {trial: Origin(sha256, taken_from) for trial, sha256, taken_from in self.database.rows(of_run)}

    def source_text(self, sha256: str) -> str | None:
        """Return the text of a source; None if it was pruned."""
        with self.database.reading() as session:
            packed = session.scalar(select(SourceRow.packed).where(SourceRow.sha256 == sha256))
            return None if packed is None else rows.unpacked(packed, SourceRow, sha256).decode()

    def is_pruned(self, trial: int) -> bool:
        """Return whether the trial had a source that `evoengine db prune` deleted."""
        of_trial = select(SourceRow.sha256).join(CandidateRow, CandidateRow.source_sha256 == SourceRow.sha256)
        return self.database.scalar(of_trial.where(CandidateRow.id == trial, SourceRow.packed.is_(None))) is not None

    def finished_trials(self, run: int | None = None) -> dict[int, list[int]]:
        """Return by run its trials that have ended, in their order; of one run or of all."""
        ended = select(CandidateRow.run_id, CandidateRow.id).where(CandidateRow.outcome.is_not(None))
        if run is not None:
            ended = ended.where(CandidateRow.run_id == run)
        trials: dict[int, list[int]] = {}
        for run, trial in self.database.rows(ended.order_by(CandidateRow.id)):
            trials.setdefault(run, []).append(trial)
        return trials

    @patient
    def measurements(self, trial: int) -> list[Measurement]:
        """Return all figures of a candidate, of every kind, oldest first."""
        return self._records(Measurement, candidate_id=trial)

    @patient
    def verdicts(self, trial: int) -> list[Verdict]:
        """Return all verdicts on a candidate, oldest first."""
        return self._records(Verdict, candidate_id=trial)

    def profile(self, trial: int) -> Profile | None:
        """Return the last profile taken."""
        taken = self._records(Profile, candidate_id=trial)
        return taken[-1] if taken else None

    def _records(self, kind: type[Record], **of: int) -> list[Record]:
        """Return the records of a run's or a trial's rows, oldest first."""
        row = rows.ROW_OF[kind]
        with self.database.reading() as session:
            found = session.scalars(select(row).filter_by(**of).order_by(row.__table__.c.id))
            return [rows.to_record(kind, each) for each in found]

    def _load(self, wanted: Select[CandidateRow], with_cubin: bool = False) -> list[Candidate]:
        with self.database.reading() as session:
            found = session.scalars(wanted.options(*rows.load_options(with_cubin)).order_by(CandidateRow.id))
            return [rows.to_candidate(row, with_cubin) for row in found]


def _insert_candidate(connection: Connection, candidate: NewCandidate) -> int:
    run, problem, gpu, config, parents, operator, source, retry_of = candidate
    values = {
        "run_id": run,
        "problem": problem,
        "gpu": gpu,
        "config": dict(config),
        "config_key": config_key(config),
        "parents": list(parents),
        "operator": operator,
        "retry_of": retry_of,
        "created_at": utc_now(),
    }
    return insert_row(
        connection, CandidateRow, values | (rows.get_or_create_source(connection, source) if source else {})
    )


def _insert_taken(connection: Connection, trial: int, now: datetime, record: Verdict | Measurement | Profile) -> None:
    values = {"candidate_id": trial, "taken_at": now, **rows.record_values(record)}
    insert_row(connection, rows.ROW_OF[type(record)], values)


def utc_now() -> datetime:
    return datetime.now(UTC)
