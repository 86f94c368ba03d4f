"""Everything the ledger knows, queued for another GPU."""

from __future__ import annotations

import math
from typing import Any

from evoengine.errors import NothingFound, UsageError
from evoengine.gpu import Gpu
from evoengine.search.targets import stored_gpu
from evoengine.service.answers import ranked_targets
from evoengine.service.database import Database
from evoengine.service.jobs import Jobs
from evoengine.service.requests import JobRequest, RetuneRequest, checked
from evoengine.service.settings import Settings
from evoengine.tuning.boards import find_stored_gpu
from evoengine.workloads import find_workload, workloads


def retune_requests(asked: RetuneRequest, settings: Settings, database: Database, jobs: Jobs) -> list[dict[str, Any]]:
    """Return a job request per problem with a correct candidate, without problems of unfinished jobs.

    Problems with the nearest results come first, because their searches start from those. Raises NothingFound if the
    ledger has none, UsageError for invalid values.
    """
    gpu = find_stored_gpu(database.url, asked.gpu)
    if asked.workload is not None:
        find_workload(asked.workload)
    targets = ranked_targets(database)
    problems = dict.fromkeys(p for p, _ in targets if _can_be_searched(p, asked.workload))
    if not problems:
        of = f" of {asked.workload}" if asked.workload else ""
        raise NothingFound(f"the ledger holds no correct candidate{of} of a workload that is known here")
    about = jobs.unfinished_problems(gpu.key)
    left = sorted((p for p in problems if p not in about), key=lambda p: _nearest_board(database, p, gpu, targets))
    return [checked(_request(asked, problem), settings, database.url) for problem in left]


def _request(asked: RetuneRequest, problem: str) -> JobRequest:
    return JobRequest(
        problems=[problem], gpu=asked.gpu, trials=asked.trials, minutes=asked.minutes, sampler=asked.sampler,
        device=asked.device, priority=asked.priority,
    )  # fmt: skip


def _can_be_searched(problem: str, workload: str | None) -> bool:
    name = problem.partition(":")[0]
    return name in workloads() and workload in (None, name)


def _nearest_board(database: Database, problem: str, gpu: Gpu, targets: list[tuple[str, str]]) -> float:
    """Return the distance of the nearest board with results for the problem: the same board, one of the same
    architecture, or one of another compute capability."""
    found = math.inf
    for key in {on for other, on in targets if other == problem}:
        try:
            board = stored_gpu(database, key)
        except UsageError:
            continue
        if board.key == gpu.key:
            return 0
        found = min(found, 1 if board.arch == gpu.arch else 2 + abs(board.capability - gpu.capability))
    return found
