"""The JSON of the service's own affairs: jobs, servers, tokens, and what it keeps for other tuners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from typing_extensions import TypedDict

from evoengine.views.boards import Boards
from evoengine.views.encoding import Answer

JobState = Literal["queued", "running", "waiting", "done", "cancelled", "failed"]


class JobPart(TypedDict):
    """A job's search for one problem: its runs in the ledger, and how many trials ended in how many seconds."""

    problem: str
    runs: Sequence[int]
    done: int
    seconds: float
    ended: str | None


class JobProgress(TypedDict):
    """How far a job came; `best` has some fields of its best trial so far."""

    stage: str | None
    done: int
    total: int
    best: Mapping[str, Any] | None


class Job(Answer):
    """A search that somebody asked the service for."""

    id: int
    state: JobState
    why: str | None
    request: Mapping[str, Any]
    gpu: str
    priority: int
    parts: Sequence[JobPart]
    progress: JobProgress
    events: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    links: Mapping[str, str]


class Jobs(Answer):
    """Jobs, newest first."""

    jobs: Sequence[Job]


class QueuedJob(TypedDict):
    """A job that was queued, with its problem."""

    id: int
    problem: str
    state: str


class QueuedJobs(Answer):
    """What `evoengine retune --json` prints."""

    jobs: Sequence[QueuedJob]


class WatchedJob(Answer):
    """What `evoengine search --server --json` prints. `best` has trials as the server sent them."""

    job: int
    state: str
    outcomes: Mapping[str, int]
    best: Sequence[Mapping[str, Any]]


class ServerGpu(TypedDict):
    """A GPU of a server, with the names of the GPUs that it can time for."""

    name: str
    gpus: Sequence[str]
    on_cluster: bool


class ServerInfo(TypedDict):
    """A server that runs jobs."""

    owner: str
    alive: bool
    gpus: Sequence[ServerGpu]
    cpu_jobs: int
    seen_at: datetime


class BoardsAndServers(Boards):
    """The supported GPUs, and the servers that run jobs."""

    executors: Sequence[ServerInfo]


class TokenInfo(TypedDict):
    """A token, which itself is kept nowhere."""

    name: str
    scope: str
    expired: bool
    created_at: datetime
    expires_at: datetime | None
    used_at: datetime | None


class TokenList(Answer):
    """What `evoengine token list --json` prints."""

    tokens: Sequence[TokenInfo]


class CacheEntry(TypedDict):
    """A line that another tuner keeps here, as it was stored."""

    key: str
    data: str


class CacheEntries(Answer):
    """The entries of other tuners, newest first."""

    entries: Sequence[CacheEntry]


class FusedMoeFiles(Answer):
    """Files of the fused MoE kernel of vLLM and SGLang by name, and a sentence for each gemm that was left out."""

    files: Mapping[str, Any]
    left_out: Sequence[str]


class Health(TypedDict):
    """The server is up."""

    status: Literal["ok"]
