"""evoengine problems, gpus, doctor and cubins: what there is to search for, for which GPUs, and on this machine"""

from __future__ import annotations

from pathlib import Path

import click

from evoengine.cli.options import json_option
from evoengine.errors import NothingFound, UsageError


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


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--arch", type=click.IntRange(min=10), metavar="NUMBER", help="Only kernels for this one, such as 90.")
@click.option("--entry", metavar="NAME", help="Print the machine code of this kernel, of --arch or the newest.")
@json_option
def cubins(file: Path, arch: int | None, entry: str | None, as_json: bool) -> None:
    """List the kernels in a cubin, a fatbin, an object or a library, with what each needs at launch.

    The file is parsed and never loaded: nothing in it is executed. Sizes are in bytes, parameters in their order.
    """
    from evoengine.cli.output import print_json, stdout
    from evoengine.text import plain_lines
    from evoengine.views.foreign_kernels import cubins_json, cubins_table
    from evoengine.virtual.cubin_file import kernels_in, listing_of

    if entry is not None:
        if as_json:
            raise UsageError("--entry prints machine code; leave --json out")
        click.echo(plain_lines(listing_of(file, entry, arch)))
        return
    found = [kernel for kernel in kernels_in(file) if arch in (None, kernel.arch)]
    if not found:
        of = f" for sm_{arch}" if arch else ""
        raise NothingFound(f"{file} has no kernel{of} as machine code")
    if as_json:
        print_json(cubins_json(file, found))
    else:
        stdout.print(cubins_table(found))
