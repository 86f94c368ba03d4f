"""evoengine profile"""

from __future__ import annotations

from pathlib import Path

import click

from evoengine.cli.options import db_option, json_option, kernel_option


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
    from evoengine.cli.display import stdout
    from evoengine.cli.ledger import reading
    from evoengine.cli.output import print_json
    from evoengine.cli.progress import LiveProgress
    from evoengine.devices.driver import find_driver, supports_arch
    from evoengine.errors import NothingFound
    from evoengine.records import Rejection
    from evoengine.search.recompile import with_machine_code
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
