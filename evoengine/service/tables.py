"""The tables of the service: tokens, jobs, events, servers, and the caches of other tuners."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from evoengine.ledger.tables import Base


class TokenRow(Base):
    """A token's name and scope; the token itself is not stored."""

    __tablename__ = "tokens"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(primary_key=True)
    """never reused, because jobs name their submitter by it"""
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    name: Mapped[str] = mapped_column(unique=True)
    scope: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    used_at: Mapped[datetime | None]


class JobRow(Base):
    """A submitted search. A server that claims it raises the fence; only the holder of the current one may write."""

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("submitter", "idempotency_key"),
        Index(None, "state"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    why: Mapped[str | None]
    """what a waiting job waits for, or why a job failed"""
    request: Mapped[dict[str, Any]]
    gpu: Mapped[str]
    priority: Mapped[int]
    submitter: Mapped[int]
    """id of a token, which may be revoked since; 0 if none was needed"""
    idempotency_key: Mapped[str | None]
    body_sha256: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str | None]
    """the server that runs it"""
    fence: Mapped[int]
    beat_at: Mapped[datetime | None]
    """last heartbeat of its owner"""
    parts: Mapped[list[Any]]
    """for each problem its runs, the number of finished trials, and how it ended"""
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    events: Mapped[int]
    """number of events"""
    deaths: Mapped[int]
    """how often its process died while its server went on"""
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class JobEventRow(Base):
    """An event of a job, numbered from 1 without a gap."""

    __tablename__ = "job_events"

    job_id: Mapped[int] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    event: Mapped[str] = mapped_column(String(16))
    data: Mapped[dict[str, Any]]
    at: Mapped[datetime]


class ExecutorRow(Base):
    """A server that runs jobs."""

    __tablename__ = "executors"

    owner: Mapped[str] = mapped_column(primary_key=True)
    gpus: Mapped[list[Any]]
    """each with its name and the known GPUs for which it can time"""
    cpu_jobs: Mapped[int]
    """jobs without a GPU that it runs at the same time"""
    beat_at: Mapped[datetime]


class CacheRow(Base):
    """A cache entry of another tuner; evoengine does not read it."""

    __tablename__ = "tuner_cache"

    key: Mapped[str] = mapped_column(String(256), primary_key=True)
    data: Mapped[str]
    stored_at: Mapped[datetime]
