"""The tables of the service: tokens, jobs with their events, servers, and what other tuners keep here."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from evoengine.ledger.tables import Base


class TokenRow(Base):
    """Who may ask the service for what; the token itself is kept nowhere."""

    __tablename__ = "tokens"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(primary_key=True)
    """never given twice: jobs remember who asked by it"""
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    name: Mapped[str] = mapped_column(unique=True)
    scope: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    used_at: Mapped[datetime | None]


class JobRow(Base):
    """A search that somebody asked the service for.

    Who claims it raises the fence, and only the holder of the present one may write.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("submitter", "idempotency_key"),
        Index(None, "state"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    why: Mapped[str | None]
    """what a waiting or failed one waits for or failed of"""
    request: Mapped[dict[str, Any]]
    gpu: Mapped[str]
    priority: Mapped[int]
    submitter: Mapped[int]
    """id of a token, 0 where none was asked for; the token may be revoked since"""
    idempotency_key: Mapped[str | None]
    body_sha256: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str | None]
    """the server that runs it"""
    fence: Mapped[int]
    beat_at: Mapped[datetime | None]
    """when its owner last said that it lives"""
    parts: Mapped[list[Any]]
    """of each problem: its runs, how many trials they ended, and how it ended"""
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    events: Mapped[int]
    """how many it has"""
    deaths: Mapped[int]
    """how often its process ended in the middle while its server went on"""
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class JobEventRow(Base):
    """What happened in a job, numbered from 1 without a gap."""

    __tablename__ = "job_events"

    job_id: Mapped[int] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    event: Mapped[str] = mapped_column(String(16))
    data: Mapped[dict[str, Any]]
    at: Mapped[datetime]


class ExecutorRow(Base):
    """A server that runs jobs, as long as it beats."""

    __tablename__ = "executors"

    owner: Mapped[str] = mapped_column(primary_key=True)
    gpus: Mapped[list[Any]]
    """each with its name and the GPUs of evoengine that it can time for"""
    cpu_jobs: Mapped[int]
    """jobs without a GPU that it runs at once"""
    beat_at: Mapped[datetime]


class CacheRow(Base):
    """A line that another tuner keeps here by its own key; evoengine does not read it."""

    __tablename__ = "tuner_cache"

    key: Mapped[str] = mapped_column(String(256), primary_key=True)
    data: Mapped[str]
    stored_at: Mapped[datetime]
