"""The `--server` half of `search` and `best`."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evoengine.cli.options import RECORDED, connect
from evoengine.cli.output import display, print_json, say
from evoengine.cli.process import INTERRUPTED
from evoengine.cli.progress import LiveProgress
from evoengine.errors import MachineError, NothingFound, UsageError, hint
from evoengine.gpu import AUTO
from evoengine.publish.folder import require_writable, write_folder
from evoengine.views import SCHEMA
from evoengine.views.candidate_tables import sent_ranking

if TYPE_CHECKING:
    from evoengine.service.client import Client, JobEvent, JobInfo
    from evoengine.views import AnswerView
    from evoengine.views.service import WatchedJobView


def search(server: str, options: dict[str, Any], as_json: bool) -> int:
    """Submit a search, print its progress and the ranking of its problem, and return the exit code."""
    from evoengine.workloads import default_workload, parse_problem

    if options["gpu"] == AUTO and not str(options["device"]).startswith(RECORDED):
        raise UsageError("--gpu auto means the GPU of this machine, which --server does not use; name a GPU")
    names = ("trials", "minutes", "sampler", "device", "objective", "seed")
    request = {name: options[name] for name in names if options[name] is not None}
    request |= {"families": list(options["families"])} if options["families"] else {}
    if not str(options["device"]).startswith(RECORDED):
        problem = options["problem"] or str(parse_problem(default_workload().example)[1])
        request |= {"gpu": options["gpu"], "problems": [problem]}
    with connect(server) as client:
        job = client.submit(**request)
        back = hint("search", server=server, job=job.id)
        say(f"job {job.id} of {server}; Ctrl-C leaves it running: {back} follows it again")
        return _watched(client, job, back, as_json)


def follow(server: str, number: int, as_json: bool) -> int:
    """Follow a job that was submitted before, as `search` does."""
    with connect(server) as client:
        return _watched(client, client.job(number), hint("search", server=server, job=number), as_json)


def _watched(client: Client, job: JobInfo, back: str, as_json: bool) -> int:
    with LiveProgress() as live:
        seen = watch(client, job, live.say, live.stage)
    if seen.detached:
        say(f"job {job.id} continues: {back} follows it again")
        return INTERRUPTED
    if seen.job.state == "failed":
        raise MachineError(f"job {job.id} failed: {seen.job.why}")
    try:
        found = best_of(client, seen.job)
    except NothingFound as nothing:
        found = []
        say(str(nothing))
    told = " · ".join(f"{count} {outcome}" for outcome, count in sorted(seen.outcomes.items()))
    say(f"job {job.id} is {seen.job.state}{f': {seen.job.why}' if seen.job.why else ''}{f' · {told}' if told else ''}")
    if as_json:
        summary: WatchedJobView = {
            "schema": SCHEMA,
            "job": job.id,
            "state": seen.job.state,
            "outcomes": seen.outcomes,
            "best": found,
        }
        print_json(summary)
    elif found:
        display(sent_ranking(found))
    return 0 if found else 1


def best(
    server: str, gpu: str | None, problem: str | None, top: int | None, folder: Path | None, as_json: bool
) -> None:
    """Print the best kernels that the server knows. With `folder`, write the files of the best one there."""
    with connect(server) as client:
        ranking = client.ranking(gpu, problem, top or 10)
        found = ranking["trials"]
        if folder:
            require_writable(folder)
            first = found[0]
            if not first["source_sha256"]:
                raise NothingFound(f"trial {first['trial']} was recorded by another tuner, without its kernel")
            for path in write_folder(folder, client.bundle(first["source_sha256"], first["gpu"])):
                say(f"wrote {path}")
    if as_json:
        sent = {"problem": ranking["problem"], "gpu": ranking["gpu"], "trials": found} if top else found[0]
        print_json(cast("AnswerView", {"schema": SCHEMA, **sent}))
        return
    say(f"{ranking['problem']} on {ranking['gpu']}, of {server}")
    display(sent_ranking(found))


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Watched:
    job: JobInfo
    outcomes: Counter[str]
    detached: bool
    """whether Ctrl-C ended the command before the job ended"""


def watch(client: Client, job: JobInfo, say: Say, stage: Say) -> Watched:
    """Print the job's events until it ends or waits for a GPU. Ctrl-C leaves the job running."""
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
        problem = part["problem"] if not part["problem"].startswith(RECORDED) else best.get("problem")
        if problem is None:
            continue
        gpu = job.gpu if job.gpu != "recorded" else best.get("gpu")
        ranking = client.ranking(gpu, problem, top=10)
        if not isinstance(ranking.get("trials"), list):
            raise MachineError(f"{client.url} did not send a list of trials")
        found += ranking["trials"]
    return found
