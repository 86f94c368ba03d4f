"""evoengine cubins"""

from __future__ import annotations

from pathlib import Path

import click

from evoengine.cli.options import json_option
from evoengine.errors import NothingFound, UsageError


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
