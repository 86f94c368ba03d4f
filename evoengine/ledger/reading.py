"""What is read from a ledger: candidates whole or as lists show them, their figures and their profiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from sqlalchemy import Select, func, select

from evoengine.errors import NothingFound, UsageError
from evoengine.hints import hint
from evoengine.ledger.figures import read_order
from evoengine.ledger.listing import Trial, read_ancestors, read_trials
from evoengine.ledger.models import CandidateRow, MeasurementRow, ProfileRow
from evoengine.ledger.rows import load_options, to_candidate, to_measurement, to_profile
from evoengine.ledger.transactions import OpenDatabase
from evoengine.records import Candidate, Measurement, Outcome, Profile

WHOLE_BATCH = 200
"""candidates that are read together, with their sources"""


class Reader(OpenDatabase):
    """The part of a Ledger that gives candidates. Raises as a Ledger does."""

    def candidate(self, trial: int, *, with_cubin: bool = False) -> Candidate:
        """Raises UsageError naming the range where there is no such trial. Without `with_cubin` cubins are empty."""
        found = self._load(select(CandidateRow).where(CandidateRow.id == trial), with_cubin)
        if found:
            return found[0]
        with self._reading() as session:
            first, last = session.execute(select(func.min(CandidateRow.id), func.max(CandidateRow.id))).one()
        if last is None:
            raise NothingFound(f"the ledger holds no trial yet: {hint('search', db=self.db)} fills it")
        raise UsageError(f"there is no trial {trial}: the ledger's are numbered {first} to {last}")

    def candidates(
        self, *, run: int | None = None, problem: str | None = None, gpu: str | None = None, with_cubin: bool = False
    ) -> list[Candidate]:
        """In the order they were started, narrowed by what is given. Without `with_cubin` cubins are empty."""
        wanted = {"run_id": run, "problem": problem, "gpu": gpu}
        return self._load(
            select(CandidateRow).filter_by(**{k: v for k, v in wanted.items() if v is not None}), with_cubin
        )

    def trials(
        self, *, run: int | None = None, problem: str | None = None, gpu: str | None = None, ranked: bool = False,
        resources: bool = False,
    ) -> Iterator[Trial]:  # fmt: skip
        """In the order they were started, narrowed by what is given, a batch at a time: what a list shows of each.

        With `ranked` only those that are, with `resources` also what a trial's binary takes up.
        """
        wanted = {"run_id": run, "problem": problem, "gpu": gpu}
        narrowed = select(CandidateRow.id).filter_by(**{k: v for k, v in wanted.items() if v is not None})
        if ranked:
            narrowed = narrowed.where(CandidateRow.outcome.in_([str(o) for o in Outcome if o.ranked]))
        return read_trials(self._reading, narrowed, resources=resources)

    def whole(self, trials: Sequence[int]) -> Iterator[Candidate]:
        """The candidates of these numbers, in their order and a batch at a time, without cubins."""
        for start in range(0, len(trials), WHOLE_BATCH):
            of_batch = CandidateRow.id.in_(trials[start : start + WHOLE_BATCH])
            yield from self._load(select(CandidateRow).where(of_batch))

    def count(self, problem: str, gpu: str) -> int:
        """How many trials there are of a problem on a GPU."""
        counted = select(func.count()).where(CandidateRow.problem == problem, CandidateRow.gpu == gpu)
        with self._reading() as session:
            return session.scalars(counted).one()

    def ancestors(self, trial: int) -> dict[int, Trial]:
        """A trial and all that it came from, of the same problem and GPU, by number."""
        return {t.trial: t for t in read_ancestors(self._reading, trial)}

    def best(self, problem: str, gpu: str, top: int, *, run: int | None = None) -> list[Candidate]:
        """The fastest first, as `evoengine.ledger.ranking` has it.

        By figures of one kind, device and policy, which `measurement` of each then is; finals before single timings. A
        kernel that several runs found is there once.
        """
        with self._reading() as session:
            best = read_order(session, problem, gpu, run)[:top]
        loaded = {c.trial: c for c in self._load(select(CandidateRow).where(CandidateRow.id.in_(best)))}
        return [loaded[trial] for trial in best]

    def finished_trials(self) -> dict[int, list[int]]:
        """Run → its trials that have ended, in their order."""
        ended = select(CandidateRow.run_id, CandidateRow.id).where(CandidateRow.outcome.is_not(None))
        trials: dict[int, list[int]] = {}
        with self._reading() as session:
            for run, trial in session.execute(ended.order_by(CandidateRow.id)):
                trials.setdefault(run, []).append(trial)
        return trials

    def measurements(self, trial: int) -> list[Measurement]:
        """All of a candidate's figures, of every kind, oldest first."""
        of_trial = select(MeasurementRow).where(MeasurementRow.candidate_id == trial).order_by(MeasurementRow.id)
        with self._reading() as session:
            return [to_measurement(row) for row in session.scalars(of_trial)]

    def profile(self, trial: int) -> Profile | None:
        """The last one taken."""
        last = select(ProfileRow).where(ProfileRow.candidate_id == trial).order_by(ProfileRow.id.desc()).limit(1)
        with self._reading() as session:
            row = session.scalar(last)
            return None if row is None else to_profile(row)

    def span(self, trial: int) -> tuple[datetime, datetime | None]:
        """When the candidate was started and when it was finished."""
        with self._reading() as session:
            times = select(CandidateRow.created_at, CandidateRow.finished_at).where(CandidateRow.id == trial)
            created, finished = session.execute(times).one()
            return created, finished

    def _load(self, wanted: Select[CandidateRow], with_cubin: bool = False) -> list[Candidate]:
        with self._reading() as session:
            rows = session.scalars(wanted.options(*load_options(with_cubin)).order_by(CandidateRow.id))
            return [to_candidate(row, with_cubin) for row in rows]
