"""The ledger: every run, candidate, verdict and figure, in one SQLite file or PostgreSQL database.

Each `record_…` is one transaction and is committed when it returns, or when the block of `together` ends that it is
called in: a kill loses at most the stage under way.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, Protocol

from sqlalchemy import func, select
from sqlalchemy.orm import aliased, joinedload

from evoengine import __version__
from evoengine.errors import NothingFound, UsageError
from evoengine.gpu import find_gpu
from evoengine.hints import hint
from evoengine.ledger import chains
from evoengine.ledger.chains import broken
from evoengine.ledger.check import Fault, find_faults, violated
from evoengine.ledger.checksums import Broken
from evoengine.ledger.database import db_of, empty_log, make_engine, open_database, parse_url, schema_of
from evoengine.ledger.driver_errors import display_url, translate_errors
from evoengine.ledger.heartbeat import (
    POLL_SECONDS,
    begin_beating,
    end_unfinished,
    of_one_death,
    seconds_until_last_beat,
    take_back,
)
from evoengine.ledger.lists import RunSummary, TrialLists, read_summaries
from evoengine.ledger.models import (
    BaselineRow,
    CandidateRow,
    HeartbeatRow,
    RunRow,
)
from evoengine.ledger.ranking import rebuild
from evoengine.ledger.removal import Pruned, delete_runs, prune
from evoengine.ledger.rows import (
    baseline_values,
    device_row,
    to_baseline,
    to_run,
)
from evoengine.ledger.runs import KILLED, RUNNING, Device, Run, this_host
from evoengine.ledger.schema import create_views, damaged_views, drop_views, known_revisions, missing_indexes
from evoengine.ledger.transactions import patient
from evoengine.ledger.transfer import RunHistory, insert_run, read_run
from evoengine.ledger.trials import TrialWriter, utc_now
from evoengine.objectives import DEFAULT
from evoengine.paths import chosen_database
from evoengine.records import (
    Baseline,
    Outcome,
)


class SpaceFile(Protocol):
    """A search space, as far as a ledger keeps it."""

    name: str
    sha256: str
    text: str


def open_ledger(database: str | os.PathLike[str] | None, *, create: bool) -> Ledger:
    """Open the ledger in an SQLite file, given as path or URL, or in PostgreSQL; None is what `chosen_database` says.

    Raises NothingFound where there is none and `create` is false, UsageError on a database that cannot be used,
    MachineError where PostgreSQL's driver is missing. Nothing is written then.
    """
    url = parse_url(chosen_database(None if database is None else os.fspath(database)))
    return Ledger(url, open_database(url, create=create))


def open_unchecked(database: str | None) -> Ledger:
    """A ledger that may be damaged. Raises UsageError on one of another schema."""
    url = parse_url(chosen_database(database))
    revision = schema_of(url)
    if revision != known_revisions()[-1]:
        raise UsageError(
            f"{display_url(url)} has schema {revision}, and this evoengine checks {known_revisions()[-1]}: "
            f"{hint('db', 'upgrade', db=db_of(url))} brings it there"
        )
    return Ledger(url, make_engine(url))


class Ledger(TrialWriter, TrialLists):
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
        trials: int | None = None,
        seconds: float | None = None,
        conditions: dict[str, Any] | None = None,
        kernel: str | None = None,
    ) -> int:
        """Enter a run of this process; those that are known to have been killed are marked. It beats until
        `finish_run`. One with `conditions` may go on later, in another process, until `trials` or `seconds` are
        used up. `kernel` is the identity of a kernel that somebody brought."""
        self.look_for_killed()
        with self._writing() as session:
            row = RunRow(
                started_at=utc_now(), status=RUNNING, gpu=gpu, problem=problem, device=device_row(session, device),
                space_name=space.name, space_sha256=space.sha256, space_text=space.text, sampler=sampler, seed=seed,
                objectives=objectives, version=__version__, host=this_host(), pid=os.getpid(), command=command,
                definition=definition, gpu_definition=gpu_definition, trials=trials, seconds=seconds,
                conditions=conditions, kernel=kernel,
            )  # fmt: skip
            session.add(row)
            session.flush()
            fence = begin_beating(session, row.id)
            run = row.id
        self._fences[run] = fence
        self._heart.start()
        return run

    def resume_run(self, run: int, trials: int | None, seconds: float | None) -> float | None:
        """Has a run that has ended go on in this process, with that budget; the seconds that it has taken so far.

        None where it is running, as where another process was quicker.
        """
        with self._writing() as session:
            row = session.get_one(RunRow, run, with_for_update=True)
            if row.status == RUNNING:
                return None
            end_unfinished(session, run, killed=row.status == KILLED)
            row.status, row.finished_at, row.host, row.pid = RUNNING, None, this_host(), os.getpid()
            row.trials, row.seconds, row.version = trials, seconds, __version__
            fence = begin_beating(session, run)
            spent = session.get_one(HeartbeatRow, run).spent
        self._fences[run] = fence
        self._heart.start()
        return spent

    def await_killed(self, wanted: Callable[[int], bool], echo: Callable[[str], None]) -> None:
        """Waits until it is clear of those runs that look killed whether they are; a minute at most, mostly seconds."""
        said = False
        while looked_at := [run for run in self.look_for_killed() if wanted(run)]:
            if not said:
                echo(f"run {looked_at[0]} has not been heard of for a while: looking whether it still goes on")
                said = True
            time.sleep(POLL_SECONDS)

    @patient
    def finish_run(self, run: int, status: str) -> None:
        """`status` says how the search ended; what was under way in it ends too."""
        with self._writing() as session:
            row = session.get_one(RunRow, run)
            row.status, row.finished_at = status, utc_now()
            end_unfinished(session, run, killed=False)
        self._fences.pop(run, None)
        if not self._fences:
            self._heart.stop()

    def done(self, run: int) -> int:
        """Trials of a run that count: judged, and no duplicates."""
        counting = [str(o) for o in Outcome if o.judged and o is not Outcome.DUPLICATE]
        of_run = select(func.count()).where(CandidateRow.run_id == run, CandidateRow.outcome.in_(counting))
        with self._reading() as session:
            return session.scalars(of_run).one()

    def seconds_spent(self, run: int) -> float:
        """By the processes of a run so far."""
        with self._reading() as session:
            row = session.get(HeartbeatRow, run)
            return 0.0 if row is None else seconds_until_last_beat(row)

    @patient
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
        self.await_killed(lambda run: True, lambda line: None)
        with self._writing() as session:
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

    def last_target_of(self, workload: str, gpu: str | None) -> tuple[str, str]:
        """Return GPU and problem of a workload's last run, by its name; raises NothingFound where there is none."""
        found = select(RunRow.gpu, RunRow.problem).where(RunRow.problem.startswith(f"{workload}:", autoescape=True))
        if gpu is not None:
            found = found.where(RunRow.gpu == self.known_gpu(gpu))
        with self._reading() as session:
            last = session.execute(found.order_by(RunRow.id.desc()).limit(1)).one_or_none()
        if last is None:
            raise NothingFound(f"the ledger holds no run of {workload}{f' on {gpu}' if gpu else ''}")
        return last[0], last[1]

    def is_empty(self) -> bool:
        """Whether it holds no trial."""
        with self._reading() as session:
            return session.scalar(select(CandidateRow.id).limit(1)) is None

    def definition(self, run: int) -> str | None:
        """Return the problem.json that a run kept; None where it kept none."""
        with self._reading() as session:
            return session.scalar(select(RunRow.definition).where(RunRow.id == run))

    def last_definition(self, problem: str) -> str | None:
        """Return the problem.json that the last run for this problem kept; None where none kept one."""
        kept = select(RunRow.definition).where(RunRow.problem == problem, RunRow.definition.is_not(None))
        with self._reading() as session:
            return session.scalar(kept.order_by(RunRow.id.desc()).limit(1))

    def gpu_definition(self, gpu: str) -> dict[str, Any] | None:
        """The fields of the GPU that a file described to the last run on it; None where none did."""
        kept = select(RunRow.gpu_definition).where(RunRow.gpu == gpu, RunRow.gpu_definition.is_not(None))
        with self._reading() as session:
            return session.scalar(kept.order_by(RunRow.id.desc()).limit(1))

    @patient
    def record_baseline(self, run: int, baseline: Baseline) -> None:
        with self._writing() as session:
            session.add(BaselineRow(run_id=run, taken_at=utc_now(), **baseline_values(baseline)))

    def baselines(self, run: int) -> list[Baseline]:
        with self._reading() as session:
            rows = session.scalars(select(BaselineRow).where(BaselineRow.run_id == run).order_by(BaselineRow.id))
            return [to_baseline(row) for row in rows]

    @patient
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

    def import_run(
        self, whole: RunHistory, on_done: Callable[[int], None] = lambda done: None
    ) -> tuple[int, list[int]]:  # fmt: skip
        """Enters a run of another ledger or tuner, all or nothing; its number and the new trial numbers, in order.

        `on_done` is told how many trials are written.
        """
        with self._writing() as session:
            return insert_run(session, whole, utc_now(), on_done)

    # ── as a whole ──────────────────────────────────────────────────────────────────────────────────────────────────

    def faults(self, on_stage: Callable[[str], None]) -> list[Fault]:
        """What is damaged or does not follow from the rest; its studies are not looked at."""
        with self._reading() as session:
            return find_faults(session, on_stage)

    def require_proven(self, trial: int) -> None:
        """Raises MachineError where something of the trial does not hold, or a row of its run is not there."""
        with self._reading() as session:
            run = session.get_one(CandidateRow, trial).run_id
            for what in (*violated(session, trial), *broken(session, run)):
                raise Broken(what)

    def mend(self, echo: Callable[[str], None]) -> None:
        """Makes again what follows from the rest of the ledger, and takes killed runs from their processes."""
        self.await_killed(lambda run: True, echo)
        with self._writing() as session:
            for index in missing_indexes(session.connection()):
                index.create(session.connection())
            if damaged_views(session.connection()):
                drop_views(session.connection())
                create_views(session.connection())
            for row in of_one_death(session):
                take_back(row)
                rows = chains.spelt({CandidateRow.__tablename__: {row.id}})
                chains.sign(session.connection(), row.run_id, chains.REPAIRED, rows)
            rebuild(session)

    def prune(self, keep: int, before: datetime | None) -> Pruned:
        """Takes out sources and machine code of all but the best, as `evoengine.ledger.removal` says."""
        with self._writing() as session:
            return prune(session, keep, before)

    def give_back_space(self) -> bool:
        """Makes an SQLite file as small as it can be; whether nobody stood in the way."""
        if self._engine.dialect.name != "sqlite":
            return True
        with translate_errors(self._url), closing(self._engine.raw_connection()) as connection:
            try:
                connection.cursor().execute("VACUUM")
            except sqlite3.OperationalError as error:
                if "locked" in str(error):
                    return False
                raise
        empty_log(self._engine)
        return True
