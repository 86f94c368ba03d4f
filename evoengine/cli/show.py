"""evoengine show and profile: one trial"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from evoengine.cli.options import RECORDED, db_option, json_option, kernel_option, reading

if TYPE_CHECKING:
    from evoengine.records import Candidate


@click.command()
@click.argument("trial", type=click.IntRange(min=1))
@click.option("--source", "with_source", is_flag=True, help="Print only the kernel's source.")
@click.option(
    "--lineage",
    "with_lineage",
    is_flag=True,
    help="Print the lineage from the start point, with the gain of each step.",
)
@db_option
@json_option
def show(trial: int, with_source: bool, with_lineage: bool, db: str | None, as_json: bool) -> None:
    """Show one trial: outcome, configuration, resources, figure, gate cases and coverage."""
    from evoengine.cli.output import print_json, stdout
    from evoengine.errors import NothingFound, UsageError
    from evoengine.lineage import path
    from evoengine.text import plain_lines
    from evoengine.views.candidate_page import candidate_page, profile_page
    from evoengine.views.candidate_tables import lineage
    from evoengine.views.trials import lineage_json, page_json

    if with_source and (with_lineage or as_json):
        raise UsageError(f"--source prints the source alone; leave {'--lineage' if with_lineage else '--json'} out")
    with reading(db) as ledger:
        candidate, profile = ledger.candidate(trial), ledger.profile(trial)
        pruned = ledger.is_pruned(trial)
        known = ledger.ancestors(trial) if with_lineage else {}
    if with_source:
        if candidate.source is None:
            why = "db prune took it out" if pruned else _why_no_source(candidate)
            raise NothingFound(f"trial {trial} has no source: {why}")
        # a pipe may lead to a compiler, which must get what the ledger has; without `color` escape sequences are cut
        text = candidate.source.text
        click.echo(plain_lines(text) if stdout.is_terminal else text, color=True)
    elif with_lineage:
        steps = path(trial, known)
        if as_json:
            print_json(lineage_json(steps))
        else:
            stdout.print(lineage(steps))
    elif as_json:
        print_json(page_json(candidate, profile))
    else:
        stdout.print(candidate_page(candidate), *([profile_page(profile)] if profile else []))


def _why_no_source(candidate: Candidate) -> str:
    if candidate.problem.startswith(RECORDED):
        return "another tuner recorded it, with its times and without its kernel"
    if candidate.outcome is None:
        return "it was not rendered before its search ended, or is not yet"
    return f"it could not be rendered{f': {candidate.reason}' if candidate.reason else ''}"


@click.command()
@click.argument("trial", type=click.IntRange(min=1))
@kernel_option
@db_option
@json_option
def profile(trial: int, kernel: Path | None, db: str | None, as_json: bool) -> None:
    """Show what limits one candidate, by Nsight Compute or by the performance model.

    On a GPU that can run the binary: use of the tensor and MUFU pipes, memory throughput, bank conflicts, occupancy,
    stall reasons and sanitizer output, as far as the tools are installed. Otherwise, from the model: use of each pipe,
    and the instructions with the longest stalls and their reasons. The profile is stored with the trial; evoengine show
    prints it.
    """
    from evoengine.cli.output import print_json, stdout
    from evoengine.cli.progress import LiveProgress
    from evoengine.devices.driver import find_driver, supports_arch
    from evoengine.errors import NothingFound
    from evoengine.records import Rejection
    from evoengine.search.compilers import with_machine_code
    from evoengine.search.targets import target_of
    from evoengine.stages.profile import profile as take
    from evoengine.tuning.setup import lock_gpu, register_kernel
    from evoengine.views.candidate_page import profile_page
    from evoengine.views.trials import profile_json

    if kernel:
        register_kernel(kernel)
    with LiveProgress() as live, reading(db) as ledger:
        live.stage("reading the ledger")
        candidate = with_machine_code(ledger, trial)
        if isinstance(candidate, Rejection):
            why = f"it was imported, and its source does not compile here: {candidate.reason}"
            raise NothingFound(f"trial {trial} has no binary to profile: {why}")
        if candidate.binary is None:
            ended = candidate.outcome or "pending"
            raise NothingFound(f"trial {trial} has no binary to profile: it ended as {ended}")
        found = find_driver()
        devices = [] if isinstance(found, str) else [d for d in found[1] if supports_arch(d, candidate.binary.arch)]
        device = devices[0] if devices else None
        if device is None:
            live.say(f"no GPU here can run a binary for {candidate.binary.arch}: the page is by the model of the chip")
        live.stage("profiling" if device else "running the model")
        with lock_gpu(device, live.say):
            name, uuid = (device.name, device.uuid) if device else ("", None)
            page = take(target_of(ledger, candidate), candidate.contender, name, uuid)
        ledger.record_profile(trial, page)
    if as_json:
        print_json(profile_json(trial, page))
    else:
        stdout.print(profile_page(page))
