"""evoengine problems"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from evoengine.cli.options import json_option

if TYPE_CHECKING:
    from evoengine.workloads.base import AnyWorkload


@click.command()
@json_option
def problems(as_json: bool) -> None:
    """List the workloads that come with evoengine: how their problems are written, and an example of each."""
    from rich.table import Table

    from evoengine.cli.display import stdout
    from evoengine.workloads import workloads

    known = workloads().values()
    if as_json:
        listed = [{"workload": w.name, "grammar": w.grammar, "example": _example(w)} for w in known]
        click.echo(json.dumps(listed, indent=2))
        return
    table = Table("workload", "problem", "example", box=None, pad_edge=False)
    for workload in known:
        table.add_row(workload.name, f"{workload.name}:{workload.grammar}", _example(workload))
    stdout.print(table)


def _example(workload: AnyWorkload) -> str:
    return str(workload.parse(workload.example))
