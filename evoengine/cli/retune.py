"""evoengine retune"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from evoengine.cli.options import OneOf, connect, db_option, json_option, refuse_beside, server_option
from evoengine.search import samplers

if TYPE_CHECKING:
    from evoengine.views.service import QueuedJob, QueuedJobs


@click.command()
@click.option("--gpu", required=True, metavar="NAME", help="Target GPU, as listed by evoengine gpus.")
@click.option("--workload", metavar="NAME", help="Queue only problems of this workload.")
@click.option(
    "--trials", type=click.IntRange(min=1), default=60, show_default=True, help="Number of trials per problem."
)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Time limit per problem.")
@click.option(
    "--sampler", type=OneOf(samplers.NAMES), default=samplers.DEFAULT, show_default=True,
    help="Sampler that proposes configurations.",
)  # fmt: skip
@click.option(
    "--device", type=OneOf(("auto", "cuda", "emulator")), default="auto", show_default=True,
    help="cuda: wait for a server that has the GPU. auto: predict until one has it, then time. emulator: predict.",
)  # fmt: skip
@db_option
@server_option
@json_option
def retune(
    gpu: str, workload: str | None, trials: int, minutes: float | None, sampler: str, device: str, db: str | None,
    server: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Queue a job for another GPU for each problem in the ledger. Servers (evoengine serve) run the jobs.

    Problems with results on similar boards come first. Each search starts from the best configurations of the nearest
    problems and boards. Problems that already have a job are skipped.
    """
    from evoengine.cli.display import say, stdout
    from evoengine.cli.output import print_json
    from evoengine.views.encoding import SCHEMA
    from evoengine.views.tables import Column, Table

    asked: dict[str, object] = {
        "workload": workload,
        "trials": trials,
        "minutes": minutes,
        "sampler": sampler,
        "device": device,
    }
    if server:
        refuse_beside(server, db=db)
        with connect(server) as client:
            jobs = [(job.id, job.parts[0]["problem"], job.state) for job in client.retune(gpu, **asked)]
    else:
        jobs = _queued(gpu, asked, db)
    if as_json:
        listed: list[QueuedJob] = [
            {"id": number, "problem": problem, "state": state} for number, problem, state in jobs
        ]
        queued: QueuedJobs = {"schema": SCHEMA, "jobs": listed}
        print_json(queued)
        return
    say(f"{len(jobs)} jobs for {gpu} are queued; evoengine serve runs them" if jobs else "nothing is left to queue")
    if jobs:
        columns = [Column("job", right=True), Column("problem", folds=True, least=20), Column("state")]
        stdout.print(Table(columns, [[str(number), problem, state] for number, problem, state in jobs]))


def _queued(gpu: str, asked: dict[str, object], db: str | None) -> list[tuple[int, str, str]]:
    from evoengine.cli.ledger import say_which
    from evoengine.service.database import open_service
    from evoengine.service.jobs import Jobs
    from evoengine.service.requests import RetuneRequest
    from evoengine.service.retune import retune_requests
    from evoengine.service.settings import load_settings

    settings = load_settings()
    with open_service(db, create=False) as database:
        say_which(db)
        jobs = Jobs(database)
        requests = retune_requests(RetuneRequest.model_validate({"gpu": gpu, **asked}), settings, database, jobs)
        made = [jobs.submit(request, 0, None, settings.max_jobs) for request in requests]
    return [(job.id, job.parts[0]["problem"], job.state) for job in made]
