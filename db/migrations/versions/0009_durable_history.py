"""searches that go on, claims, the service, compressed sources

Of what older ledgers hold nothing is claimed: what their trials were evaluated with is not known well enough.
"""

from __future__ import annotations

import zlib

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

BATCH = 100
"""of the rows that are compressed together"""


def upgrade() -> None:
    _add_resumption()
    _add_claims()
    _add_service()
    _pack_sources()
    _move_machine_code()
    op.drop_index("ix_candidates_run_id", "candidates")
    op.drop_index("ix_candidates_gpu_problem", "candidates")
    op.create_index("ix_candidates_run_id_outcome", "candidates", ["run_id", "outcome"])
    op.create_index("ix_candidates_gpu_problem_id", "candidates", ["gpu", "problem", "id"])


def _add_resumption() -> None:
    op.add_column("runs", sa.Column("trials", sa.Integer(), nullable=True))
    op.add_column("runs", sa.Column("seconds", sa.Double(), nullable=True))
    op.add_column("runs", sa.Column("conditions", sa.JSON(), nullable=True))
    op.add_column("heartbeats", sa.Column("began_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("heartbeats", sa.Column("spent", sa.Double(), nullable=False, server_default="0"))
    op.add_column("heartbeats", sa.Column("process", sa.Text(), nullable=True))
    op.add_column("candidates", sa.Column("retry_of", sa.Integer(), nullable=True))
    op.add_column("candidates", sa.Column("taken_from", sa.Integer(), nullable=True))


def _add_claims() -> None:
    op.create_table(
        "claims",
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("candidate_id", sa.Integer(), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidates.id"], name="fk_claims_candidate_id"),
        sa.PrimaryKeyConstraint("key", name="pk_claims"),
    )
    op.create_index("ix_claims_candidate_id", "claims", ["candidate_id"])
    op.create_table(
        "commits",
        sa.Column("writer", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("writer", name="pk_commits"),
    )


def _add_service() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("name", name="uq_tokens_name"),
        sa.UniqueConstraint("sha256", name="uq_tokens_sha256"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("why", sa.Text(), nullable=True),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("submitter", sa.Integer(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("body_sha256", sa.String(64), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("beat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("parts", sa.JSON(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=True),
        sa.Column("events", sa.Integer(), nullable=False),
        sa.Column("deaths", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("submitter", "idempotency_key", name="uq_jobs_submitter_idempotency_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.create_table(
        "job_events",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("event", sa.String(16), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_events_job_id"),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_job_events"),
    )
    op.create_table(
        "executors",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("cpu_jobs", sa.Integer(), nullable=False),
        sa.Column("beat_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("owner", name="pk_executors"),
    )
    op.create_table(
        "tuner_cache",
        sa.Column("key", sa.String(256), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("stored_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_tuner_cache"),
    )


def _pack_sources() -> None:
    connection = op.get_bind()
    op.add_column("sources", sa.Column("packed", sa.LargeBinary(), nullable=True))
    sources = sa.table("sources", sa.column("sha256"), sa.column("text"), sa.column("packed", sa.LargeBinary()))
    numbers = connection.scalars(sa.select(sources.c.sha256)).all()
    for begin in range(0, len(numbers), BATCH):
        of_batch = sources.c.sha256.in_(numbers[begin : begin + BATCH])
        for number, text in connection.execute(sa.select(sources.c.sha256, sources.c.text).where(of_batch)).all():
            packed = zlib.compress(text.encode())
            connection.execute(sources.update().where(sources.c.sha256 == number).values(packed=packed))
    op.drop_column("sources", "text")


def _move_machine_code() -> None:
    connection = op.get_bind()
    op.create_table(
        "machine_code",
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("packed", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_machine_code"),
    )
    code = sa.table("machine_code", sa.column("sha256"), sa.column("packed", sa.LargeBinary()))
    binaries = sa.table("binaries", sa.column("id"), sa.column("cubin_sha256"), sa.column("cubin", sa.LargeBinary()))
    known: set[str] = set()
    for number, sha256 in connection.execute(sa.select(binaries.c.id, binaries.c.cubin_sha256)).all():
        cubin = connection.scalar(sa.select(binaries.c.cubin).where(binaries.c.id == number))
        if cubin and sha256 not in known:
            known.add(sha256)
            connection.execute(code.insert().values(sha256=sha256, packed=zlib.compress(cubin)))
    op.drop_column("binaries", "cubin")
    op.create_index("ix_binaries_cubin_sha256", "binaries", ["cubin_sha256"])
