"""evoengine problems, gpus and doctor: what there is to search for, for which GPUs, and what this machine has"""

from __future__ import annotations

import click

from evoengine.cli.options import json_option


@click.command()
@json_option
def problems(as_json: bool) -> None:
    """List the built-in workloads with the syntax of their problems and an example of each."""
    from evoengine.cli.output import print_json, stdout
    from evoengine.views.boards import workloads_json, workloads_table

    if as_json:
        print_json(workloads_json())
    else:
        stdout.print(workloads_table())


@click.command()
@json_option
def gpus(as_json: bool) -> None:
    """List the supported GPUs with their limits and peaks, and the kernel families that fit them.

    Peaks are from data sheets: dense fp16 tensor operations with FP32 accumulation. For other boards, pass --gpu-file
    to search or verify: a TOML file with one table as in evoengine/gpus.toml.
    """
    from evoengine.cli.output import print_json, say, stdout
    from evoengine.views.boards import boards_json, gpus_remarks, gpus_table, known_boards

    known = known_boards()
    if as_json:
        print_json(boards_json(known))
        return
    stdout.print(gpus_table(known.gpus, known.fitting))
    for line in gpus_remarks(known):
        say(line)


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check what this machine has and what is missing, with remedies. The exit code is 3 if a search cannot run."""
    from evoengine.cli.output import print_json, say, stdout
    from evoengine.errors import MachineError
    from evoengine.tuning.doctor import check_machine
    from evoengine.views.boards import findings_json, findings_table

    found = check_machine()
    able = all(f.here for f in found if f.needed)
    if as_json:
        print_json(findings_json(able, found))
    else:
        stdout.print(findings_table(found))
        times = all(f.here for f in found if f.name in ("GPU", "CUDA versions"))
        how = "times candidates on the GPU" if times else "gates on the CPU and ranks by estimate"
        say(f"a search here {how}" if able else "a search cannot run here until the marked items are fixed")
    return 0 if able else MachineError.exit_code
