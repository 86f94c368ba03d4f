"""What a search writes of a candidate on its way: from the proposal to the end, each step one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.orm import Session, joinedload

from evoengine.ledger.claims import Claim, claim, claim_anew, decided, end_claims, take_over
from evoengine.ledger.models import BinaryRow, CandidateRow, MeasurementRow, ProfileRow, VerdictRow
from evoengine.ledger.patience import patient
from evoengine.ledger.reading import Reader
from evoengine.ledger.reclaim import left_over
from evoengine.ledger.rows import (
    get_or_create_binary,
    get_or_create_source,
    measurement_values,
    profile_values,
    to_binary,
    verdict_values,
)
from evoengine.ledger.standings import update_standing
from evoengine.records import (
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


class TrialWriter(Reader):
    """The part of a Ledger that takes candidates. Raises as a Ledger does."""

    @patient
    def add_candidate(
        self, run: int, problem: str, gpu: str, config: Config, parents: Sequence[int], operator: str | None,
        source: Source | None = None, retry_of: int | None = None,
    ) -> int:  # fmt: skip
        """Its trial number: unique across the ledger, never given twice."""
        with self._writing() as session:
            return _insert_candidate(session, run, problem, gpu, config, parents, operator, source, retry_of)

    @patient
    def add_ended(self, c: Candidate) -> int:
        """A candidate with its figure and its end, in one transaction; its trial number."""
        assert c.outcome is not None  # it has ended
        with self._writing() as session:
            trial = _insert_candidate(session, c.run, c.problem, c.gpu, c.config, c.parents, c.operator, None, None)
            end = (str(c.outcome), c.reason, c.occupancy, c.device, None, c.measurement)
            self._end(session, trial, *end)
        return trial

    @patient
    def add_claiming(
        self, run: int, problem: str, gpu: str, config: Config, parents: Sequence[int], operator: str | None,
        source: Source, retry_of: int | None, key: str, anew: bool,
    ) -> tuple[int, Claim]:  # fmt: skip
        """As `add_candidate`, of a candidate that is to be evaluated unless the key's evaluation is known or under way
        elsewhere; with `anew` in any case."""
        with self._writing() as session:
            trial = _insert_candidate(session, run, problem, gpu, config, parents, operator, source, retry_of)
            if anew:
                claim_anew(session, key, trial)
                return trial, Claim(trial, False)
            return trial, claim(session, key, trial)

    @patient
    def claim(self, key: str, trial: int) -> Claim:
        """Asks once more for a key whose holder is not under way any more."""
        with self._writing() as session:
            return claim(session, key, trial)

    @patient
    def decided(self, trials: Sequence[int]) -> set[int]:
        """Of trials that other searches evaluate, those that are not under way any more."""
        with self._reading() as session:
            return decided(session, trials)

    @patient
    def take_over(self, key: str, original: int, trial: int, *, timed: bool) -> Outcome:
        """Ends a trial as the one ended that was evaluated for the same key; with its verdicts and figures."""
        with self._writing() as session:
            self._finished.append(trial)
            return take_over(session, key, original, trial, timed=timed, now=utc_now())

    @patient
    def left_over(self, run: int) -> dict[int, int]:
        """Trials of a run that were under way when it was killed or ended, and that were not tried again → how often
        each was killed."""
        with self._reading() as session:
            return left_over(session, run)

    @patient
    def record_source(self, trial: int, source: Source) -> None:
        with self._writing() as session:
            _update_candidate(session, trial, **get_or_create_source(session, source))

    @patient
    def find_binary(self, source_sha256: str, options: str, arch: str, compiler: str) -> Binary | None:
        """What that compiler made of that source, in whatever run; None where its machine code was pruned."""
        key = {"source_sha256": source_sha256, "options": options, "arch": arch, "compiler": compiler}
        with self._reading() as session:
            row = session.scalar(select(BinaryRow).filter_by(**key).options(joinedload(BinaryRow.machine_code)))
            return to_binary(row, with_cubin=True) if row and row.machine_code else None

    @patient
    def record_binary(self, trial: int, source: Source, binary: Binary) -> None:
        """Ties the candidate to the binary; one that is there already for the same source and compiler is kept."""
        with self._writing() as session:
            _update_candidate(session, trial, binary_id=get_or_create_binary(session, source, binary))

    @patient
    def record_verdict(self, trial: int, verdict: Verdict) -> None:
        with self._writing() as session:
            session.add(VerdictRow(candidate_id=trial, taken_at=utc_now(), **verdict_values(verdict)))
            session.flush()
            update_standing(session, trial)

    @patient
    def record_measurement(self, trial: int, measurement: Measurement) -> None:
        with self._writing() as session:
            session.add(MeasurementRow(candidate_id=trial, taken_at=utc_now(), **measurement_values(measurement)))
            session.flush()
            update_standing(session, trial)

    @patient
    def record_profile(self, trial: int, profile: Profile) -> None:
        with self._writing() as session:
            session.add(ProfileRow(candidate_id=trial, taken_at=utc_now(), **profile_values(profile)))

    @patient
    def finish(
        self, trial: int, outcome: Outcome, reason: str | None, occupancy: float | None, device: str | None,
        verdict: Verdict | None = None, figure: Measurement | None = None,
    ) -> None:  # fmt: skip
        """How the candidate ended, with what it was judged by; a later measurement may end it again."""
        with self._writing() as session:
            self._end(session, trial, str(outcome), reason, occupancy, device, verdict, figure)

    def _end(
        self, session: Session, trial: int, outcome: str, reason: str | None, occupancy: float | None,
        device: str | None, verdict: Verdict | None, figure: Measurement | None,
    ) -> None:  # fmt: skip
        now = utc_now()
        if verdict:
            session.add(VerdictRow(candidate_id=trial, taken_at=now, **verdict_values(verdict)))
        if figure:
            session.add(MeasurementRow(candidate_id=trial, taken_at=now, **measurement_values(figure)))
        self._finished.append(trial)
        end = {"outcome": outcome, "reason": reason, "occupancy": occupancy, "device": device}
        _update_candidate(session, trial, finished_at=now, **end)
        session.flush()
        update_standing(session, trial)
        end_claims(session, trial, now)


def _insert_candidate(
    session: Session, run: int, problem: str, gpu: str, config: Config, parents: Sequence[int], operator: str | None,
    source: Source | None, retry_of: int | None,
) -> int:  # fmt: skip
    rendered = get_or_create_source(session, source) if source else {}
    row = CandidateRow(
        run_id=run, problem=problem, gpu=gpu, config=dict(config), config_key=config_key(config),
        parents=list(parents), operator=operator, retry_of=retry_of, created_at=utc_now(), **rendered,
    )  # fmt: skip
    session.add(row)
    session.flush()
    return row.id


def _update_candidate(session: Session, trial: int, **values: object) -> None:
    row = session.get_one(CandidateRow, trial)
    for name, value in values.items():
        setattr(row, name, value)


def utc_now() -> datetime:
    return datetime.now(UTC)
