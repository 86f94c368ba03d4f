"""evoengine run"""

from __future__ import annotations

from pathlib import Path

import click

from evoengine.cli.options import complete_gpu


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--gpu",
    metavar="NAME",
    default="h100",
    show_default=True,
    shell_complete=complete_gpu,
    help="The GPU that is virtual, as listed by evoengine gpus; sm_75 to sm_90 and sm_120 can be executed.",
)
@click.option(
    "--sample",
    is_flag=True,
    help="Of a launch that would take over a minute, execute blocks for some ten seconds only.",
)
@click.option("--map-cuda", is_flag=True, help="Make tensors on the CPU where the script asks for device='cuda'.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(gpu: str, sample: bool, map_cuda: bool, script: Path, arguments: tuple[str, ...]) -> int:
    """Run a Python script with Triton kernels on a virtual GPU.

    SCRIPT runs with your permissions, as python SCRIPT runs it. Launches on CPU tensors are executed from their machine
    code and checked for races and hazards; do_bench and autotuners get predicted times. The summary goes to stderr, and
    the exit code is the script's.
    """
    from evoengine.virtual.script import run_script

    return run_script(script, arguments, gpu, sample, map_cuda)
