"""The tables of the ledger. They are the truth; the Optuna study beside them is a projection.

A change here needs a revision of its own in `schema.py`. Types are those that SQLite and PostgreSQL share. Times are
UTC. Numbers in JSON that JSON does not know are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, foreign, mapped_column, relationship

VERSION_TABLE = "evoengine_alembic_version"
"""ours beside Optuna's `alembic_version`"""


class UtcDateTime(sa.TypeDecorator[datetime]):
    """An aware datetime; SQLite, which has none, keeps the UTC wall clock."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        return value and value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        return value and (value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC))


class Base(DeclarativeBase):
    metadata = sa.MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {
        str: sa.Text(),
        float: sa.Double(),
        datetime: UtcDateTime(),
        dict[str, Any]: sa.JSON(),
        list[Any]: sa.JSON(),
    }


class Checked:
    """Give rows a checksum, which `integrity.py` computes and checks when they are read."""

    checksum: Mapped[str | None] = mapped_column(sort_order=100)
    """null where a row was damaged before schema 0011"""


class ChainRow(Base):
    """Hold how far the chain of a run's rows has come, which `integrity.py` extends."""

    __tablename__ = "chains"

    run_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """0 of the ledger's own"""
    links: Mapped[int]
    sum: Mapped[str] = mapped_column(sa.String(8))
    """of the last link"""


class LinkRow(Base):
    """What a transaction wrote of a run, or did to it."""

    __tablename__ = "links"

    run_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    what: Mapped[str] = mapped_column(sa.String(16))
    rows: Mapped[str]
    """as in `candidates 1-3,7; verdicts 2`"""
    at: Mapped[datetime]
    sum: Mapped[str] = mapped_column(sa.String(8))
    """over this link and the sum of the one before"""


class DeviceRow(Checked, Base):
    """A machine part that judged candidates, with the driver and libraries it then had."""

    __tablename__ = "devices"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    uuid: Mapped[str | None]
    arch: Mapped[str | None]
    driver: Mapped[str | None]
    versions: Mapped[dict[str, Any]]


class RunRow(Checked, Base):
    __tablename__ = "runs"
    __table_args__ = {"sqlite_autoincrement": True}

    id: Mapped[int] = mapped_column(primary_key=True)
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    status: Mapped[str]
    """running, killed, or how the search says it ended"""
    gpu: Mapped[str]
    problem: Mapped[str]
    device_id: Mapped[int] = mapped_column(sa.ForeignKey("devices.id"))
    space_name: Mapped[str]
    space_sha256: Mapped[str] = mapped_column(sa.String(64))
    space_text: Mapped[str]
    definition: Mapped[str | None]
    """of a kernel that somebody brought: its problem.json; null of workloads that come with evoengine"""
    sampler: Mapped[str]
    objectives: Mapped[str] = mapped_column(server_default="tflops")
    """comma-separated names of evoengine.objectives"""
    seed: Mapped[int] = mapped_column(sa.BigInteger)
    version: Mapped[str]
    host: Mapped[str]
    pid: Mapped[int]
    command: Mapped[str]
    gpu_definition: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON(none_as_null=True))
    """of a GPU that a file described: the fields of evoengine.gpu.Gpu; null of those in gpus.toml"""
    imported_from: Mapped[str | None]
    """null of runs of this ledger's own; else where the run came from, as text that can be shown"""
    trials: Mapped[int | None]
    """how many it was asked for; null of runs that are not searches"""
    seconds: Mapped[float | None]
    """how long it may take, over all its processes; null where that is open"""
    conditions: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON(none_as_null=True))
    """what has to be the same for the run to go on, beside the other columns; null of runs that cannot"""
    kernel: Mapped[str | None] = mapped_column(sa.String(64))
    """sha256 of the reference, definition and text of a kernel that somebody brought; null of workloads that come with
    evoengine"""

    device: Mapped[DeviceRow] = relationship()


class HeartbeatRow(Base):
    """That the process of a run lives: it writes the time every few seconds, by the database's clock."""

    __tablename__ = "heartbeats"

    run_id: Mapped[int] = mapped_column(sa.ForeignKey("runs.id"), primary_key=True)
    fence: Mapped[int]
    """only grows: who takes a run from its process raises it, and what that process writes later is refused"""
    beat_at: Mapped[datetime]
    began_at: Mapped[datetime | None]
    """when the present process began with the run"""
    spent: Mapped[float] = mapped_column(server_default="0")
    """seconds that earlier processes of the run took"""
    process: Mapped[str | None]
    """which process that is, as far as others on its machine can tell whether it still lives"""


class CommitRow(Base):
    """The last transaction that a writer committed to a server, for when the connection is lost then; a week long."""

    __tablename__ = "commits"

    writer: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    """drawn by each thread of a process"""
    number: Mapped[int]
    at: Mapped[datetime]


class SourceRow(Base):
    __tablename__ = "sources"

    sha256: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    packed: Mapped[bytes | None]
    """the text, by zlib; null where it was pruned"""


class MachineCodeRow(Base):
    """A cubin, once, apart from what is read of its binary again and again. Where it was pruned there is none."""

    __tablename__ = "machine_code"

    sha256: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    packed: Mapped[bytes]
    """by zlib"""


class BinaryRow(Checked, Base):
    __tablename__ = "binaries"
    __table_args__ = (
        sa.UniqueConstraint("source_sha256", "options", "arch", "compiler"),
        sa.Index(None, "cubin_sha256"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    source_sha256: Mapped[str] = mapped_column(sa.String(64), sa.ForeignKey("sources.sha256"))
    options: Mapped[str]
    arch: Mapped[str]
    compiler: Mapped[str]
    cubin_sha256: Mapped[str] = mapped_column(sa.String(64), server_default="")
    registers: Mapped[int]
    spill_bytes: Mapped[int]
    stack_bytes: Mapped[int]
    shared_bytes: Mapped[int]
    """static; the dynamic part is the candidate's"""
    warnings: Mapped[list[Any]]
    mix: Mapped[dict[str, Any]]
    compile_ms: Mapped[float]
    other_kernels: Mapped[list[Any] | None] = mapped_column(sa.JSON(none_as_null=True))
    """resources of the kernels behind the first; null where there is one kernel"""

    machine_code: Mapped[MachineCodeRow | None] = relationship(
        primaryjoin=lambda: foreign(BinaryRow.cubin_sha256) == MachineCodeRow.sha256, viewonly=True, lazy="raise"
    )


class CandidateRow(Checked, Base):
    __tablename__ = "candidates"
    __table_args__ = (
        sa.Index(None, "run_id", "outcome"),
        sa.Index(None, "gpu", "problem", "id"),
        sa.Index(None, "source_sha256"),
        sa.Index(None, "binary_id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    """the public trial number; never given twice"""
    run_id: Mapped[int] = mapped_column(sa.ForeignKey("runs.id"))
    problem: Mapped[str]
    gpu: Mapped[str]
    config: Mapped[dict[str, Any]]
    config_key: Mapped[str]
    parents: Mapped[list[Any]]
    operator: Mapped[str | None]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    outcome: Mapped[str | None] = mapped_column(sa.String(16))
    reason: Mapped[str | None]
    device: Mapped[str | None]
    occupancy: Mapped[float | None]
    source_sha256: Mapped[str | None] = mapped_column(sa.String(64), sa.ForeignKey("sources.sha256"))
    entry: Mapped[str | None]
    grid_x: Mapped[int | None]
    grid_y: Mapped[int | None]
    grid_z: Mapped[int | None]
    threads: Mapped[int | None]
    block_y: Mapped[int | None]
    block_z: Mapped[int | None]
    shared_bytes: Mapped[int | None]
    """dynamic; the static part is the binary's"""
    binary_id: Mapped[int | None] = mapped_column(sa.ForeignKey("binaries.id"))
    retry_of: Mapped[int | None]
    """the trial with this configuration that was in flight when the run was killed or ended"""
    taken_from: Mapped[int | None]
    """the trial that was evaluated in place of this one"""
    evidence: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON(none_as_null=True))
    """of an outcome that a dead process or a limit led to: the `deaths`, or the `limit`"""
    gate_version: Mapped[int | None]
    """of the gate that the outcome rests on; null of what was judged before schema 0010"""
    next_kernels: Mapped[list[Any] | None] = mapped_column(sa.JSON(none_as_null=True))
    """entries and launches of the kernels behind the first; null where there is one kernel"""

    run: Mapped[RunRow] = relationship()
    source: Mapped[SourceRow | None] = relationship()
    binary: Mapped[BinaryRow | None] = relationship()
    verdicts: Mapped[list[VerdictRow]] = relationship(order_by="VerdictRow.id")
    measurements: Mapped[list[MeasurementRow]] = relationship(order_by="MeasurementRow.id")
    profiles: Mapped[list[ProfileRow]] = relationship(order_by="ProfileRow.id")


class ClaimRow(Base):
    """That a trial is, or was, the one to evaluate what the key stands for; others wait for it, or take over its end.

    Who writes it is guarded by the fence of its run, as all that a search writes.
    """

    __tablename__ = "claims"

    key: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    """of source, compiler, device and all else that an evaluation depends on: `evoengine.search.identity`"""
    candidate_id: Mapped[int] = mapped_column(sa.ForeignKey("candidates.id"), index=True)
    ended_at: Mapped[datetime | None]
    """when that evaluation ended; what was written of the trial later is another one's"""


class VerdictRow(Checked, Base):
    """What the gate found; the last one of a candidate holds."""

    __tablename__ = "verdicts"

    id: Mapped[int] = mapped_column(primary_key=True)
    candidate_id: Mapped[int] = mapped_column(sa.ForeignKey("candidates.id"), index=True)
    device: Mapped[str]
    outcome: Mapped[str | None] = mapped_column(sa.String(16))
    """null where the candidate passed"""
    reason: Mapped[str | None]
    cases: Mapped[list[Any]]
    wall_ms: Mapped[float]
    taken_at: Mapped[datetime]
    coverage: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON(none_as_null=True))
    """null of a device that keeps no count of visits"""
    gate_version: Mapped[int | None]
    """null of verdicts from before schema 0010"""
    short_only: Mapped[int | None]
    """1 where only the short cases were run; null where all were that the gate has for the device"""


class MeasurementRow(Checked, Base):
    """A figure. Of a candidate's several, the last of the smallest precedence holds."""

    __tablename__ = "measurements"

    id: Mapped[int] = mapped_column(primary_key=True)
    candidate_id: Mapped[int] = mapped_column(sa.ForeignKey("candidates.id"), index=True)
    kind: Mapped[str] = mapped_column(sa.String(16))
    device: Mapped[str]
    tflops: Mapped[float | None]
    median_us: Mapped[float]
    samples_us: Mapped[list[Any]]
    vs_baseline: Mapped[float | None]
    terms: Mapped[dict[str, Any]]
    suspect: Mapped[str | None]
    policy: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON(none_as_null=True))
    """null where nothing ran here: of estimates, and of what another tuner recorded"""
    normalised_us: Mapped[float | None]
    taken_at: Mapped[datetime]


class RankingRow(Base):
    """Figures that are ranked together: of one kind, device, policy, kernel and gate, of a problem on a GPU."""

    __tablename__ = "rankings"
    __table_args__ = (
        sa.UniqueConstraint(
            "problem", "gpu", "kernel", "precedence", "device", "policy", "gate_version", name="uq_rankings"
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    problem: Mapped[str]
    gpu: Mapped[str]
    kernel: Mapped[str] = mapped_column(sa.String(64))
    """of the runs; empty of workloads that come with evoengine"""
    precedence: Mapped[int]
    """`evoengine.records.precedence`, smaller for more trusted"""
    kind: Mapped[str] = mapped_column(sa.String(16))
    device: Mapped[str]
    policy: Mapped[str]
    """as JSON with its names in their order; empty if nothing ran here"""
    gate_version: Mapped[int]
    """that the candidates were judged by; 0 of those from before versions were kept"""


UNPLACED = 2**31 - 1
"""the place of a trial that is ordered by its time alone, behind those of equal time that won a place"""
ADJUSTED = "final_of_run IS NOT NULL OR counted_us <> us OR run_counted_us <> us"
"""holds of standings that finals concern; of most rankings there are none"""
_ADJUSTED = sa.text(ADJUSTED)


class StandingRow(Base):
    """By which figure, time and place a candidate is ranked: `ranking.py` derives it from the other tables."""

    __tablename__ = "standings"
    __table_args__ = (
        sa.Index(None, "ranking_id", "counted_us", "place", "us"),
        sa.Index(None, "run_id", "ranking_id", "run_counted_us", "run_place", "us"),
        sa.Index(None, "ranking_id", "figure_id"),
        sa.Index("ix_standings_adjusted", "ranking_id", sqlite_where=_ADJUSTED, postgresql_where=_ADJUSTED),
    )

    candidate_id: Mapped[int] = mapped_column(sa.ForeignKey("candidates.id"), primary_key=True, autoincrement=False)
    ranking_id: Mapped[int] = mapped_column(sa.ForeignKey("rankings.id"))
    run_id: Mapped[int] = mapped_column(sa.ForeignKey("runs.id"))
    figure_id: Mapped[int]
    """of the measurement"""
    us: Mapped[float]
    """the figure's time"""
    final_of_run: Mapped[float | None]
    """of a figure of finals: the run that held them, below 0 in another ledger"""
    final_place: Mapped[float | None]
    """the place that the figure won there"""
    counted_us: Mapped[float]
    """the time by which the candidate counts, which the last finals may lower or raise"""
    place: Mapped[int]
    """of candidates with equal `counted_us`, or UNPLACED"""
    run_counted_us: Mapped[float]
    """as `counted_us`, among the candidates of its run alone"""
    run_place: Mapped[int]
    """as `place`, among the candidates of its run alone"""


class BaselineRow(Checked, Base):
    __tablename__ = "baselines"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(sa.ForeignKey("runs.id"), index=True)
    name: Mapped[str]
    device: Mapped[str]
    median_us: Mapped[float | None]
    tflops: Mapped[float | None]
    samples_us: Mapped[list[Any]]
    policy: Mapped[dict[str, Any]]
    reason: Mapped[str | None]
    """of one that was not timed, which has neither time nor TFLOPS"""
    taken_at: Mapped[datetime]


class ProfileRow(Checked, Base):
    """What a profiler, or the binary's text, says of what limits a candidate; the last one holds."""

    __tablename__ = "profiles"

    id: Mapped[int] = mapped_column(primary_key=True)
    candidate_id: Mapped[int] = mapped_column(sa.ForeignKey("candidates.id"), index=True)
    tool: Mapped[str]
    device: Mapped[str]
    figures: Mapped[dict[str, Any]]
    remarks: Mapped[list[Any]]
    taken_at: Mapped[datetime]
