"""evoengine problems"""

from __future__ import annotations

import json

import click

from evoengine.cli.options import json_option


@click.command()
@json_option
def problems(as_json: bool) -> None:
    """List the workloads that come with evoengine: how their problems are written, and an example of each."""
    from rich.table import Table

    from evoengine.cli.display import stdout
    from evoengine.workloads import workloads

    known = workloads().values()
    if as_json:
        listed = [{"workload": w.name, "grammar": w.grammar, "example": f"{w.name}:{w.example}"} for w in known]
        click.echo(json.dumps(listed, indent=2))
        return
    table = Table("workload", "problem", "example", box=None, pad_edge=False)
    for workload in known:
        table.add_row(workload.name, f"{workload.name}:{workload.grammar}", f"{workload.name}:{workload.example}")
    stdout.print(table)
