"""The JSON of jobs, servers, tokens, and the caches of other tuners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from typing_extensions import TypedDict

from evoengine.views import AnswerView
from evoengine.views.boards import BoardsView

JobState = Literal["queued", "running", "waiting", "done", "cancelled", "failed"]


class JobPartView(TypedDict):
    """A job's search for one problem: its runs in the ledger, and how many trials ended in how many seconds."""

    problem: str
    runs: Sequence[int]
    done: int
    seconds: float
    ended: str | None


class JobProgressView(TypedDict):
    """How far a job came; `best` has some fields of its best trial so far."""

    stage: str | None
    done: int
    total: int
    best: Mapping[str, Any] | None


class JobView(AnswerView):
    """A search that was submitted to the service."""

    id: int
    state: JobState
    why: str | None
    request: Mapping[str, Any]
    gpu: str
    priority: int
    parts: Sequence[JobPartView]
    progress: JobProgressView
    events: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    links: Mapping[str, str]


class JobsView(AnswerView):
    """Jobs, newest first."""

    jobs: Sequence[JobView]


class QueuedJobView(TypedDict):
    """A job that was queued, with its problem."""

    id: int
    problem: str
    state: str


class QueuedJobsView(AnswerView):
    """Describe what `evoengine retune --json` prints."""

    jobs: Sequence[QueuedJobView]


class WatchedJobView(AnswerView):
    """Describe what `evoengine search --server --json` prints. `best` has trials as the server sent them."""

    job: int
    state: str
    outcomes: Mapping[str, int]
    best: Sequence[Mapping[str, Any]]


class ServerGpuView(TypedDict):
    """A GPU of a server, with the names of the GPUs that it can time for."""

    name: str
    gpus: Sequence[str]
    on_cluster: bool


class ServerView(TypedDict):
    """A server that runs jobs."""

    owner: str
    alive: bool
    gpus: Sequence[ServerGpuView]
    cpu_jobs: int
    seen_at: datetime


class BoardsAndServersView(BoardsView):
    """The supported GPUs, and the servers that run jobs."""

    executors: Sequence[ServerView]


class TokenView(TypedDict):
    """A token without its secret, which is not stored."""

    name: str
    scope: str
    expired: bool
    created_at: datetime
    expires_at: datetime | None
    used_at: datetime | None


class TokenListView(AnswerView):
    """Describe what `evoengine token list --json` prints."""

    tokens: Sequence[TokenView]


class CacheEntryView(TypedDict):
    """A cache entry of another tuner, as it was stored."""

    key: str
    data: str


class CacheEntriesView(AnswerView):
    """The entries of other tuners, newest first."""

    entries: Sequence[CacheEntryView]


class FusedMoeFilesView(AnswerView):
    """Tuning files of vLLM's and SGLang's fused MoE kernel by name, and the reason for each gemm without one."""

    files: Mapping[str, Any]
    left_out: Sequence[str]


class HealthView(TypedDict):
    """The server is up."""

    status: Literal["ok"]
