"""evoengine compare"""

from __future__ import annotations

import click

from evoengine.cli.options import db_option, json_option


@click.command()
@click.argument("first", type=click.IntRange(min=1), metavar="RUN")
@click.argument("second", type=click.IntRange(min=1), metavar="RUN")
@db_option
@json_option
def compare(first: int, second: int, db: str | None, as_json: bool) -> None:
    """Compare two runs: settings, outcomes, the best figure of each kind, the number of trials to come within 5 % of
    it, and the configurations that both evaluated.

    Figures are compared only if problem, GPU, kind, device and measurement policy agree.
    """
    from evoengine.cli.display import say, stdout
    from evoengine.cli.ledger import reading
    from evoengine.cli.output import print_json
    from evoengine.views.comparison import comparison_json, comparison_page

    with reading(db) as ledger:
        found = ledger.lists.comparison(first, second)
    if as_json:
        print_json(comparison_json(found))
        return
    for run in found.runs:
        began = f"{run.started_at:%Y-%m-%d %H:%M}"
        say(f"run {run.id}: {run.problem} on {run.gpu}, {run.device.name}, {began}, {run.status}")
    for remark_or_table in comparison_page(found):
        if isinstance(remark_or_table, str):
            say(remark_or_table)
        else:
            stdout.print(remark_or_table)
