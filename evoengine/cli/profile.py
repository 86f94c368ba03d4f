"""evoengine profile"""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from evoengine.cli.options import db_option, json_option


@click.command()
@click.argument("trial", type=click.IntRange(min=1))
@db_option
@json_option
def profile(trial: int, db: str | None, as_json: bool) -> None:
    """Say what limits one candidate, by Nsight Compute or by the model of its chip.

    On a GPU that takes the binary: tensor and MUFU pipes, memory throughput, bank conflicts, occupancy, stall reasons,
    and the sanitizers' word, each where its tool is installed. Elsewhere the model's page: how busy each pipe is,
    and the instructions before which warps wait longest, with the reasons. It is kept beside the candidate, where
    evoengine show finds it.
    """
    from evoengine.cli.display import profile_page, say, stdout
    from evoengine.cli.setup import turn
    from evoengine.devices.driver import find_driver, takes
    from evoengine.errors import NothingFound
    from evoengine.gpu import find_gpu
    from evoengine.ledger.store import open_ledger
    from evoengine.problem import parse_problem
    from evoengine.records import Contender
    from evoengine.stages.profile import profile as take

    with open_ledger(db, create=False) as ledger:
        candidate = ledger.candidate(trial, with_cubin=True)
        if candidate.binary is None:
            ended = candidate.outcome or "unfinished"
            raise NothingFound(f"trial {trial} has no binary to profile: it ended as {ended}")
        found = find_driver()
        devices = [] if isinstance(found, str) else [d for d in found[1] if takes(d, candidate.binary.arch)]
        device = devices[0] if devices else None
        if device is None:
            say(f"no GPU here takes a binary for {candidate.binary.arch}: the page is by the model of the chip")
        contender = Contender(trial, candidate.source, candidate.binary, candidate.config)
        kernel = candidate.problem.split(":")[0]
        with turn(device, say):
            page = take(
                kernel, contender, parse_problem(candidate.problem), find_gpu(candidate.gpu),
                device.name if device else "", device.uuid if device else None,
            )  # fmt: skip
        ledger.record_profile(trial, page)
    if as_json:
        click.echo(json.dumps({"trial": trial} | asdict(page), indent=2))
    else:
        stdout.print(profile_page(page))
