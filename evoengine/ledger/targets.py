"""The problems and GPUs that a ledger's runs are for, and how those that evoengine does not bring were described."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from evoengine.errors import NothingFound
from evoengine.gpu import find_gpu
from evoengine.hints import hint
from evoengine.ledger.tables import CandidateRow, RunRow
from evoengine.records import Outcome

if TYPE_CHECKING:
    from evoengine.ledger.store import Ledger


class Targets:
    """Problems and GPUs of a ledger. Raises as a Ledger does."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def known_gpu(self, name: str | None) -> str | None:
        """Return the name. Raises UsageError where neither a run here nor evoengine has a GPU of that name."""
        with self._ledger.database.reading() as session:
            held = name is None or session.scalar(select(RunRow.id).where(RunRow.gpu == name).limit(1)) is not None
        return name if held else find_gpu(str(name)).key

    def last(self, gpu: str | None, problem: str | None) -> tuple[str, str]:
        """Return GPU and problem of the last run that agrees with what is given.

        Raises NothingFound where there is none, and UsageError for an unknown GPU.
        """
        gpu = self.known_gpu(gpu)
        matching = select(RunRow.gpu, RunRow.problem).order_by(RunRow.id.desc()).limit(1)
        if gpu is not None:
            matching = matching.where(RunRow.gpu == gpu)
        if problem is not None:
            matching = matching.where(RunRow.problem == problem)
        with self._ledger.database.reading() as session:
            found = session.execute(matching).one_or_none()
        if found is None:
            wanted = " for " + " on ".join(w for w in (problem, gpu) if w) if gpu or problem else ""
            then = "search" if self._ledger.is_empty() else "history"
            what = "fills it" if self._ledger.is_empty() else "lists what it has"
            raise NothingFound(f"the ledger holds no run{wanted}: {hint(then, db=self._ledger.db)} {what}")
        return found[0], found[1]

    def problems_of(self, workload: str, gpu: str) -> list[str]:
        """Return the problems of a workload, by its name, that runs for a GPU had, the latest first."""
        of_both = RunRow.gpu == gpu, RunRow.problem.startswith(f"{workload}:", autoescape=True)
        latest_first = func.max(RunRow.id).desc()
        with self._ledger.database.reading() as session:
            return [
                *session.scalars(select(RunRow.problem).where(*of_both).group_by(RunRow.problem).order_by(latest_first))
            ]

    def last_of(self, workload: str, gpu: str | None) -> tuple[str, str]:
        """Return GPU and problem of a workload's last run, by its name; raises NothingFound where there is none."""
        found = select(RunRow.gpu, RunRow.problem).where(RunRow.problem.startswith(f"{workload}:", autoescape=True))
        if gpu is not None:
            found = found.where(RunRow.gpu == self.known_gpu(gpu))
        with self._ledger.database.reading() as session:
            last = session.execute(found.order_by(RunRow.id.desc()).limit(1)).one_or_none()
        if last is None:
            raise NothingFound(f"the ledger holds no run of {workload}{f' on {gpu}' if gpu else ''}")
        return last[0], last[1]

    def ranked(self) -> list[tuple[str, str]]:
        """Return every problem and GPU with a ranked candidate, latest first."""
        ranked = CandidateRow.outcome.in_([str(o) for o in Outcome if o.ranked])
        grouped = select(CandidateRow.problem, CandidateRow.gpu).where(ranked)
        grouped = grouped.group_by(CandidateRow.problem, CandidateRow.gpu).order_by(func.max(CandidateRow.id).desc())
        with self._ledger.database.reading() as session:
            return [(problem, gpu) for problem, gpu in session.execute(grouped)]

    def definition(self, run: int) -> str | None:
        """Return the problem.json that a run kept; None where it kept none."""
        with self._ledger.database.reading() as session:
            return session.scalar(select(RunRow.definition).where(RunRow.id == run))

    def last_definition(self, problem: str) -> str | None:
        """Return the problem.json that the last run for this problem kept; None where none kept one."""
        kept = select(RunRow.definition).where(RunRow.problem == problem, RunRow.definition.is_not(None))
        with self._ledger.database.reading() as session:
            return session.scalar(kept.order_by(RunRow.id.desc()).limit(1))

    def gpu_definition(self, gpu: str) -> dict[str, Any] | None:
        """Return the fields of the GPU that a file described to the last run on it; None where none did."""
        kept = select(RunRow.gpu_definition).where(RunRow.gpu == gpu, RunRow.gpu_definition.is_not(None))
        with self._ledger.database.reading() as session:
            return session.scalar(kept.order_by(RunRow.id.desc()).limit(1))
