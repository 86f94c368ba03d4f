"""`evoengine search --server`: a job that is watched as a search of this machine is."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evoengine.errors import MachineError
from evoengine.service.client import Client, JobEvent, JobInfo

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Watched:
    job: JobInfo
    outcomes: Counter[str]
    detached: bool
    """whether the person left before the job ended"""


def watch(client: Client, job: JobInfo, say: Say, stage: Say) -> Watched:
    """Print the job's events until it rests. Ctrl-C leaves the job running."""
    outcomes: Counter[str] = Counter()
    try:
        for event in client.events(job.id):
            _tell(event, job, outcomes, say, stage)
            if event.event == "state" and event.data["state"] == "waiting":
                break
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return Watched(client.job(job.id), outcomes, detached=True)
    return Watched(client.job(job.id), outcomes, detached=False)


def _tell(event: JobEvent, job: JobInfo, outcomes: Counter[str], say: Say, stage: Say) -> None:
    data: Any = event.data
    if event.event == "message":
        say(str(data.get("text")))
    elif event.event == "stage":
        stage(str(data.get("stage")))
    elif event.event == "trial":
        outcomes[str(data.get("outcome"))] += 1
        total = job.request["trials"] * len(job.parts)
        stage(f"{outcomes.total() - outcomes['duplicate']}/{total} trials")
    elif event.event == "state":
        why = f": {data['why']}" if data.get("why") else ""
        say(f"job {job.id} is {data.get('state')}{why}")
    elif event.event == "end":
        say(f"{data.get('problem')}: {data.get('ended')}")


def best_of(client: Client, job: JobInfo) -> list[dict[str, Any]]:
    """Return the best known kernel of each of the job's problems. Raises MachineError."""
    found = []
    for part in job.parts:
        best = job.progress.get("best") or {}
        problem = part["problem"] if not part["problem"].startswith("recorded:") else best.get("problem")
        if problem is None:
            continue
        gpu = job.gpu if job.gpu != "recorded" else best.get("gpu")
        ranking = client.ranking(gpu, problem, top=10)
        if not isinstance(ranking.get("trials"), list):
            raise MachineError(f"{client.url} answers with no list of trials")
        found += ranking["trials"]
    return found
