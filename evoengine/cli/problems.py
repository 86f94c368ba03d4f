"""evoengine problems"""

from __future__ import annotations

import click

from evoengine.cli.options import json_option


@click.command()
@json_option
def problems(as_json: bool) -> None:
    """List the built-in workloads with the syntax of their problems and an example of each."""
    from evoengine.cli.display import stdout
    from evoengine.cli.output import print_json
    from evoengine.views.boards import workloads_json, workloads_table

    if as_json:
        print_json(workloads_json())
    else:
        stdout.print(workloads_table())
