"""What is read from a ledger: candidates whole or as lists show them, their figures and their profiles."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Select, func, select

from evoengine.errors import NothingFound, UsageError
from evoengine.hints import hint
from evoengine.ledger.listing import StudyTrial, Trial, read_ancestors, read_study_trials, read_trials
from evoengine.ledger.models import CandidateRow, MeasurementRow, ProfileRow, SourceRow, VerdictRow
from evoengine.ledger.ranking import RankedApart, read_order, read_ranked_apart
from evoengine.ledger.rows import load_options, to_candidate, to_measurement, to_profile, to_verdict, unpacked
from evoengine.ledger.transactions import OpenDatabase, patient
from evoengine.objectives import Objective
from evoengine.records import Candidate, Kind, Measurement, Outcome, Profile, Verdict

WHOLE_BATCH = 200
"""candidates that are read together, with their sources"""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose kernel a trial has."""

    source_sha256: str | None
    """None before it was rendered"""
    taken_from: int | None
    """the earlier trial whose end it has; None of what was evaluated itself"""


class Reader(OpenDatabase):
    """The part of a Ledger that gives candidates. Raises as a Ledger does."""

    @patient
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
        return self._load(_narrowed(select(CandidateRow), run, problem, gpu), with_cubin)

    def trials(
        self, *, run: int | None = None, problem: str | None = None, gpu: str | None = None, ranked: bool = False,
        outcomes: Collection[Outcome | None] = (), resources: bool = False, newest_first: bool = False,
    ) -> Iterator[Trial]:  # fmt: skip
        """In the order they were started, narrowed by what is given, a batch at a time: what a list shows of each.

        With `ranked` only those that are, with `outcomes` only those that ended so (None: unfinished), with `resources`
        also what a trial's binary takes up. `newest_first` begins with the last one: who wants the last few that agree
        in something stops when it has them.
        """
        narrowed = _narrowed(select(CandidateRow.id), run, problem, gpu)
        if ranked:
            narrowed = narrowed.where(CandidateRow.outcome.in_([str(o) for o in Outcome if o.ranked]))
        if outcomes:
            named = CandidateRow.outcome.in_([str(o) for o in outcomes if o])
            narrowed = narrowed.where(named | CandidateRow.outcome.is_(None) if None in outcomes else named)
        return read_trials(self._reading, narrowed, resources=resources, newest_first=newest_first)

    def whole(self, trials: Sequence[int]) -> Iterator[Candidate]:
        """The candidates of these numbers, in their order and a batch at a time, without cubins."""
        for start in range(0, len(trials), WHOLE_BATCH):
            of_batch = CandidateRow.id.in_(trials[start : start + WHOLE_BATCH])
            yield from self._load(select(CandidateRow).where(of_batch))

    def count(self, problem: str | None = None, gpu: str | None = None, *, run: int | None = None) -> int:
        """How many trials there are, narrowed by what is given."""
        with self._reading() as session:
            counted: int = session.scalars(_narrowed(select(func.count(CandidateRow.id)), run, problem, gpu)).one()
            return counted

    def ancestors(self, trial: int) -> dict[int, Trial]:
        """A trial and all that it came from, of the same problem and GPU, by number."""
        return {t.trial: t for t in read_ancestors(self._reading, trial)}

    @patient
    def best(
        self, problem: str, gpu: str, top: int, *, run: int | None = None, kernel: str | None = None
    ) -> list[Candidate]:
        """Return the fastest first, as `evoengine.ledger.ranking` orders them.

        All have figures of one kind, device and policy, are of one kernel and were judged by one version of the gate:
        those of the last figure, or of `kernel`. Finals come before single timings. A source that several runs found is
        there once.
        """
        with self._reading() as session:
            best = read_order(session, problem, gpu, top, run, kernel)
        loaded = {c.trial: c for c in self._load(select(CandidateRow).where(CandidateRow.id.in_(best)))}
        return [loaded[trial] for trial in best]

    @patient
    def ranked_apart(self, like: Candidate) -> list[RankedApart]:
        """Return how many candidates of the same problem and GPU are not ranked with `like`, as they are of another
        kernel or were judged by another version of the gate; newest first."""
        with self._reading() as session:
            return read_ranked_apart(session, like.problem, like.gpu, like.trial)

    @patient
    def origins(self, run: int) -> dict[int, Origin]:
        """Of the trials of a run, in their order, whose kernel each has."""
        columns = (CandidateRow.id, CandidateRow.source_sha256, CandidateRow.taken_from)
        of_run = select(*columns).where(CandidateRow.run_id == run).order_by(CandidateRow.id)
        with self._reading() as session:
            return {trial: Origin(sha256, taken_from) for trial, sha256, taken_from in session.execute(of_run)}

    def study_trials(
        self, trials: Sequence[int], kind: Kind, objectives: Sequence[Objective]
    ) -> Iterator[list[StudyTrial]]:  # fmt: skip
        """What a study of that kind of figure shows of these finished trials, in their order and in batches."""
        return read_study_trials(self._reading, trials, kind, objectives)

    def source_text(self, sha256: str) -> str | None:
        """None where it was pruned."""
        with self._reading() as session:
            packed = session.scalar(select(SourceRow.packed).where(SourceRow.sha256 == sha256))
            return None if packed is None else unpacked(packed, SourceRow, sha256).decode()

    def is_pruned(self, trial: int) -> bool:
        """Whether it had a source, which `evoengine db prune` took out."""
        of_trial = select(SourceRow.sha256).join(CandidateRow, CandidateRow.source_sha256 == SourceRow.sha256)
        with self._reading() as session:
            pruned = of_trial.where(CandidateRow.id == trial, SourceRow.packed.is_(None))
            return session.scalar(pruned) is not None

    def finished_trials(self, run: int | None = None) -> dict[int, list[int]]:
        """Run → its trials that have ended, in their order; of one run or of all."""
        ended = select(CandidateRow.run_id, CandidateRow.id).where(CandidateRow.outcome.is_not(None))
        if run is not None:
            ended = ended.where(CandidateRow.run_id == run)
        trials: dict[int, list[int]] = {}
        with self._reading() as session:
            for run, trial in session.execute(ended.order_by(CandidateRow.id)):
                trials.setdefault(run, []).append(trial)
        return trials

    @patient
    def measurements(self, trial: int) -> list[Measurement]:
        """All of a candidate's figures, of every kind, oldest first."""
        of_trial = select(MeasurementRow).where(MeasurementRow.candidate_id == trial).order_by(MeasurementRow.id)
        with self._reading() as session:
            return [to_measurement(row) for row in session.scalars(of_trial)]

    @patient
    def verdicts(self, trial: int) -> list[Verdict]:
        """Return all verdicts on a candidate, oldest first."""
        of_trial = select(VerdictRow).where(VerdictRow.candidate_id == trial).order_by(VerdictRow.id)
        with self._reading() as session:
            return [to_verdict(row) for row in session.scalars(of_trial)]

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


def _narrowed(wanted: Select[Any], run: int | None, problem: str | None, gpu: str | None) -> Select[Any]:
    given = {CandidateRow.run_id: run, CandidateRow.problem: problem, CandidateRow.gpu: gpu}
    return wanted.where(*(column == value for column, value in given.items() if value is not None))
