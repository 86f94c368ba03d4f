"""Jobs, GPUs and executors as JSON."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel

from evoengine.service.executors import Executor
from evoengine.service.jobs import Job
from evoengine.times import utc
from evoengine.views.encoding import SCHEMA


class PartView(BaseModel):
    """Of one problem of a job."""

    problem: str
    runs: list[int]
    """of the ledger"""
    done: int
    seconds: float
    ended: str | None


class ProgressView(BaseModel):
    stage: str | None = None
    done: int
    total: int
    best: dict[str, Any] | None
    """so far, some fields of the candidate"""


class JobView(BaseModel):
    """Times are ISO 8601 in UTC; `schema` is 1, the version of this shape."""

    id: int
    state: Literal["queued", "running", "waiting", "done", "cancelled", "failed"]
    why: str | None
    request: dict[str, Any]
    gpu: str
    priority: int
    parts: list[PartView]
    progress: ProgressView
    events: int
    created_at: str | None
    started_at: str | None
    finished_at: str | None
    links: dict[str, str]


def job_json(job: Job) -> dict[str, Any]:
    progress = job.progress or {"stage": None, "done": 0, "total": job.request["trials"] * len(job.parts), "best": None}
    return {
        "schema": SCHEMA, "id": job.id, "state": job.state, "why": job.why, "request": dict(job.request),
        "gpu": job.gpu, "priority": job.priority, "parts": job.parts, "progress": dict(progress),
        "events": job.events, "created_at": utc(job.created_at), "started_at": utc(job.started_at),
        "finished_at": utc(job.finished_at),
        "links": {"self": f"/v1/jobs/{job.id}", "events": f"/v1/jobs/{job.id}/events"},
    }  # fmt: skip


def executor_json(executor: Executor) -> dict[str, Any]:
    seen: datetime = executor.beat_at
    return {
        "owner": executor.owner, "alive": executor.alive, "gpus": list(executor.gpus), "cpu_jobs": executor.cpu_jobs,
        "seen_at": utc(seen),
    }  # fmt: skip
