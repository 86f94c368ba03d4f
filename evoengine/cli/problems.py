"""evoengine problems"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from evoengine.cli.options import json_option

if TYPE_CHECKING:
    pass


@click.command()
@json_option
def problems(as_json: bool) -> None:
    """List the built-in workloads with the syntax of their problems and an example of each."""
    from evoengine.cli.display import stdout
    from evoengine.cli.output import print_json
    from evoengine.cli.tables import Column, Table
    from evoengine.views.json_shapes import example, problems_json
    from evoengine.workloads import workloads

    known = workloads().values()
    if as_json:
        print_json(workloads=problems_json())
        return
    columns = [Column("workload"), Column("problem", least=20, folds=True), Column("example", least=20, folds=True)]
    stdout.print(Table(columns, [[w.name, f"{w.name}:{w.grammar}", example(w)] for w in known]))
