"""What a search writes of a candidate on its way: from the proposal to the end, each step one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.orm import joinedload

from evoengine.ledger.chains import insert_row, update_row
from evoengine.ledger.claims import Claim, claim, claim_again, decided, end_claims, revoke, take_over
from evoengine.ledger.heartbeat import left_over
from evoengine.ledger.models import Base, BinaryRow, CandidateRow, MeasurementRow, ProfileRow, VerdictRow
from evoengine.ledger.ranking import update_standing
from evoengine.ledger.reading import Reader
from evoengine.ledger.rows import (
    find_binary_row,
    get_or_create_binary,
    get_or_create_source,
    measurement_values,
    profile_values,
    to_binary,
    verdict_values,
)
from evoengine.ledger.transactions import patient
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
        with self._writing_plainly() as connection:
            return _insert_candidate(connection, run, problem, gpu, config, parents, operator, source, retry_of)

    @patient
    def add_ended(self, c: Candidate) -> int:
        """A candidate with its figure and its end, in one transaction; its trial number."""
        assert c.outcome is not None  # it has ended
        with self._writing_plainly() as connection:
            trial = _insert_candidate(connection, c.run, c.problem, c.gpu, c.config, c.parents, c.operator, None, None)
            end = (str(c.outcome), c.reason, c.occupancy, c.device, (), c.measurement)
            self._end(connection, trial, *end)
        return trial

    @patient
    def add_claiming(
        self, run: int, problem: str, gpu: str, config: Config, parents: Sequence[int], operator: str | None,
        source: Source, retry_of: int | None, key: str, again: bool,
    ) -> tuple[int, Claim]:  # fmt: skip
        """As `add_candidate`, of a candidate that is to be evaluated unless the key's evaluation is known or under way
        elsewhere; with `again` in any case."""
        with self._writing_plainly() as connection:
            trial = _insert_candidate(connection, run, problem, gpu, config, parents, operator, source, retry_of)
            if again:
                claim_again(connection, key, trial)
                return trial, Claim(trial, False)
            return trial, claim(connection, key, trial)

    @patient
    def claim(self, key: str, trial: int) -> Claim:
        """Asks once more for a key whose holder is not under way any more."""
        with self._writing_plainly() as connection:
            return claim(connection, key, trial)

    def revoke_claim(self, trial: int) -> bool:
        """Has the next search that comes to the trial's kernel evaluate it; whether any would have taken its end over.
        Raises UsageError where there is no such trial, or it is under way."""
        with self._writing() as session:
            return revoke(session, trial)

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
        with self._writing_plainly() as connection:
            update_row(connection, CandidateRow, trial, get_or_create_source(connection, source))

    @patient
    def find_binary(self, source_sha256: str, options: str, arch: str, compiler: str) -> Binary | None:
        """What that compiler made of that source, in whatever run; None where its machine code was pruned."""
        key = {"source_sha256": source_sha256, "options": options, "arch": arch, "compiler": compiler}
        with self._reading_plainly() as connection:
            if find_binary_row(connection, key) is None:
                return None
        with self._reading() as session:
            row = session.scalar(select(BinaryRow).filter_by(**key).options(joinedload(BinaryRow.machine_code)))
            return to_binary(row, with_cubin=True) if row and row.machine_code else None

    @patient
    def record_binary(self, trial: int, source: Source, binary: Binary) -> None:
        """Ties the candidate to the binary; one that is there already for the same source and compiler is kept."""
        with self._writing_plainly() as connection:
            made = get_or_create_binary(connection, source, binary)
            update_row(connection, CandidateRow, trial, {"binary_id": made})

    @patient
    def record_verdict(self, trial: int, verdict: Verdict) -> None:
        with self._writing_plainly() as connection:
            _insert_taken(connection, VerdictRow, trial, utc_now(), verdict_values(verdict))
            update_standing(connection, trial)

    @patient
    def record_measurement(self, trial: int, measurement: Measurement) -> None:
        with self._writing_plainly() as connection:
            _insert_taken(connection, MeasurementRow, trial, utc_now(), measurement_values(measurement))
            update_standing(connection, trial)

    @patient
    def record_profile(self, trial: int, profile: Profile) -> None:
        with self._writing_plainly() as connection:
            _insert_taken(connection, ProfileRow, trial, utc_now(), profile_values(profile))

    @patient
    def finish(
        self, trial: int, outcome: Outcome, reason: str | None, occupancy: float | None, device: str | None,
        verdicts: Sequence[Verdict] = (), figure: Measurement | None = None,
        evidence: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Record how the candidate ended and the verdicts that it ended by; a later measurement may end it again."""
        with self._writing_plainly() as connection:
            self._end(connection, trial, str(outcome), reason, occupancy, device, verdicts, figure, evidence)

    def _end(
        self, connection: Connection, trial: int, outcome: str, reason: str | None, occupancy: float | None,
        device: str | None, verdicts: Sequence[Verdict], figure: Measurement | None,
        evidence: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        now = utc_now()
        for verdict in verdicts:
            _insert_taken(connection, VerdictRow, trial, now, verdict_values(verdict))
        if figure:
            _insert_taken(connection, MeasurementRow, trial, now, measurement_values(figure))
        self._finished.append(trial)
        end: dict[str, object] = {"outcome": outcome, "reason": reason, "occupancy": occupancy, "device": device}
        end["evidence"] = evidence
        if versions := [v.gate_version for v in verdicts if v.gate_version is not None]:
            end["gate_version"] = min(versions)
        update_row(connection, CandidateRow, trial, {"finished_at": now, **end})
        update_standing(connection, trial)
        end_claims(connection, trial, now)


def _insert_candidate(
    connection: Connection, run: int, problem: str, gpu: str, config: Config, parents: Sequence[int],
    operator: str | None, source: Source | None, retry_of: int | None,
) -> int:  # fmt: skip
    rendered = get_or_create_source(connection, source) if source else {}
    return insert_row(connection, CandidateRow, {
        "run_id": run, "problem": problem, "gpu": gpu, "config": dict(config), "config_key": config_key(config),
        "parents": list(parents), "operator": operator, "retry_of": retry_of, "created_at": utc_now(), **rendered,
    })  # fmt: skip


def _insert_taken(
    connection: Connection, row: type[Base], trial: int, now: datetime, values: Mapping[str, object]
) -> None:
    insert_row(connection, row, {"candidate_id": trial, "taken_at": now, **values})


def utc_now() -> datetime:
    return datetime.now(UTC)
