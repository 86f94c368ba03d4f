"""evoengine serve, token and retune: the service and its queue"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from evoengine.cli.options import (
    CheckedGroup,
    OneOf,
    connect,
    db_option,
    json_option,
    refuse_beside,
    say_which,
    server_option,
)
from evoengine.cli.output import display, print_json, say
from evoengine.errors import MachineError
from evoengine.search import samplers
from evoengine.views import SCHEMA, fields_of, utc

if TYPE_CHECKING:
    from evoengine.views.service import QueuedJobsView, QueuedJobView

SCOPES = ("read", "submit", "work", "propose", "admin")


@click.command()
@click.option("--host", metavar="ADDRESS", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on.  [default: 8765]")
@click.option(
    "--trusted-proxy",
    metavar="ADDRESSES",
    help="Proxies whose X-Forwarded-For header names the client, as in 127.0.0.1,10.0.0.0/8.",
)
@click.option(
    "--check", is_flag=True, help="Check whether the server can start and where it would run jobs, then exit."
)
@db_option
def serve(host: str | None, port: int | None, trusted_proxy: str | None, check: bool, db: str | None) -> None:
    """Serve the ledger over HTTP and run the searches that clients submit, until SIGTERM or Ctrl-C.

    On the loopback address no token is needed; on any other address every client needs one (evoengine token). Servers
    that share a PostgreSQL database share the jobs. docs/service.md describes the settings.
    """
    try:
        from evoengine.service.app import serve as run
        from evoengine.service.settings import load_settings
    except ModuleNotFoundError as error:
        raise MachineError(f"the service needs {error.name}: pip install evoengine[service]") from error

    settings = load_settings(host=host, port=port, trusted_proxy=trusted_proxy)
    if check:
        from evoengine.service.app import check as checked

        for line in checked(settings, db):
            say(line)
        return
    run(settings, db, say)


@click.group(cls=CheckedGroup)
def token() -> None:
    """Create, list and revoke tokens for the service.

    Each of read, submit, work and admin includes those before it. read: read results. submit: submit jobs and cancel
    one's own. work: write to the caches of other tuners. propose: read, and propose texts of kernels. admin: all of
    these, and cancel any job.
    """


@token.command()
@click.argument("name")
@click.option("--scope", type=OneOf(SCOPES), default="read", show_default=True, help="What the token permits.")
@click.option(
    "--days", type=click.FloatRange(min=0, min_open=True), help="Days until the token expires.  [default: never]"
)
@db_option
def new(name: str, scope: str, days: float | None, db: str | None) -> None:
    """Create a token and print it. It cannot be shown again: the ledger stores only its SHA-256."""
    from evoengine.ledger.store import open_ledger
    from evoengine.service.access import Tokens

    with open_ledger(db, create=True) as ledger:
        say_which(db)
        click.echo(Tokens(ledger).new(name, scope, days))


@token.command("list")
@db_option
@json_option
def list_(db: str | None, as_json: bool) -> None:
    """List the tokens with their scope, expiry and last use."""
    from evoengine.ledger.store import open_ledger
    from evoengine.service.access import Tokens
    from evoengine.views.service import TokenListView, TokenView
    from evoengine.views.tables import Column, Table

    with open_ledger(db, create=False) as ledger:
        say_which(db)
        known = Tokens(ledger).all()
    if as_json:
        listed: TokenListView = {"schema": SCHEMA, "tokens": [fields_of(token, TokenView) for token in known]}
        print_json(listed)
        return
    columns = [Column(name) for name in ("name", "scope", "created", "expires", "last used")]
    lines = [
        [
            t.name,
            t.scope,
            utc(t.created_at) or "",
            f"{utc(t.expires_at) or 'never'}{' (expired)' * t.expired}",
            utc(t.used_at) or "never",
        ]
        for t in known
    ]
    display(Table(columns, lines))


@token.command()
@click.argument("name")
@db_option
def revoke(name: str, db: str | None) -> None:
    """Revoke a token. Running servers refuse it within seconds."""
    from evoengine.ledger.store import open_ledger
    from evoengine.service.access import Tokens

    with open_ledger(db, create=False) as ledger:
        say_which(db)
        Tokens(ledger).revoke(name)
    say(f"revoked {name}")


@click.command()
@click.option("--gpu", required=True, metavar="NAME", help="Target GPU, as listed by evoengine gpus.")
@click.option("--workload", metavar="NAME", help="Queue only problems of this workload.")
@click.option(
    "--trials", type=click.IntRange(min=1), default=60, show_default=True, help="Number of trials per problem."
)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Time limit per problem.")
@click.option(
    "--sampler",
    type=OneOf(samplers.NAMES),
    default=samplers.DEFAULT,
    show_default=True,
    help="Sampler that proposes configurations.",
)
@click.option(
    "--device",
    type=OneOf(("auto", "cuda", "emulator")),
    default="auto",
    show_default=True,
    help="cuda: wait for a server that has the GPU. auto: predict until one has it, then time. emulator: predict.",
)
@db_option
@server_option
@json_option
def retune(
    gpu: str,
    workload: str | None,
    trials: int,
    minutes: float | None,
    sampler: str,
    device: str,
    db: str | None,
    server: str | None,
    as_json: bool,
) -> None:
    """Queue a job for another GPU for each problem in the ledger. Servers (evoengine serve) run the jobs.

    Problems with results on similar boards come first. Each search starts from the best configurations of the nearest
    problems and boards. Problems that already have a job are skipped.
    """
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
        listed: list[QueuedJobView] = [
            {"id": number, "problem": problem, "state": state} for number, problem, state in jobs
        ]
        queued: QueuedJobsView = {"schema": SCHEMA, "jobs": listed}
        print_json(queued)
        return
    say(f"queued {len(jobs)} jobs for {gpu}; evoengine serve runs them" if jobs else "there is nothing left to queue")
    if jobs:
        columns = [Column("job", right=True), Column("problem", folds=True, least=20), Column("state")]
        display(Table(columns, [[str(number), problem, state] for number, problem, state in jobs]))


def _queued(gpu: str, asked: dict[str, object], db: str | None) -> list[tuple[int, str, str]]:
    from evoengine.ledger.store import open_ledger
    from evoengine.service.jobs import Jobs
    from evoengine.service.requests import RetuneRequest, retune_requests
    from evoengine.service.settings import load_settings

    settings = load_settings()
    with open_ledger(db, create=False) as ledger:
        say_which(db)
        jobs = Jobs(ledger)
        requests = retune_requests(RetuneRequest.model_validate({"gpu": gpu, **asked}), settings, ledger, jobs)
        made = [jobs.submit(request, 0, None, settings.max_jobs) for request in requests]
    return [(job.id, job.parts[0]["problem"], job.state) for job in made]
