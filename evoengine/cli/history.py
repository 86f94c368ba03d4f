"""evoengine history"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from evoengine.cli.options import db_option, gpu_option, json_option, stored_problem_option
from evoengine.errors import NothingFound
from evoengine.hints import hint
from evoengine.records import Outcome

if TYPE_CHECKING:
    from evoengine.ledger.listing import Trial

UNFINISHED = "unfinished"
ENDINGS = (*map(str, Outcome), UNFINISHED)


@click.command()
@gpu_option(default=None)
@stored_problem_option
@click.option("--run", type=click.IntRange(min=1), help="Only this run.")
@click.option(
    "--outcome", "outcomes", type=click.Choice(ENDINGS), multiple=True, metavar="NAME",
    help=f"Only trials that ended so ({', '.join(ENDINGS)}); may be given several times.",
)  # fmt: skip
@click.option("--family", "families", multiple=True, metavar="NAME", help="Only this one; may be given several times.")
@click.option(
    "--where", metavar="EXPRESSION",
    help="Only trials whose knobs make this true, in the language of space files: 'tile_m >= 64 and stages in [2, 3]'.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), help="Only the last so many of them.")
@db_option
@json_option
def history(
    gpu: str | None, problem: str | None, run: int | None, outcomes: Sequence[str], families: Sequence[str],
    where: str | None, limit: int | None, db: str | None, as_json: bool,
) -> None:  # fmt: skip
    """List every trial of the ledger, with how it ended."""
    from evoengine.cli.candidate_tables import history_table
    from evoengine.cli.display import stdout
    from evoengine.cli.json_output import print_json_list
    from evoengine.cli.ledger import reading
    from evoengine.space.where import Where

    condition = Where(where) if where else None
    with reading(db) as ledger:
        known = list(ledger.trials(run=run, problem=problem, gpu=ledger.known_gpu(gpu), resources=not as_json))
        if condition and known:
            condition.require_known(name for t in known for name in t.config)
        found = [t for t in known if _ended(t, outcomes) and _is_of(t, families)]
        found = [t for t in found if condition is None or condition.picks(t.config)]
        if not found:
            raise NothingFound(_nothing(known, ledger.is_empty(), db))
        shown = found[-limit:] if limit else found
        if as_json:
            print_json_list("trials", (c.to_json() for c in ledger.whole([t.trial for t in shown])))
    if not as_json:
        stdout.print(history_table(shown))


def _ended(t: Trial, outcomes: Sequence[str]) -> bool:
    return not outcomes or (t.outcome or UNFINISHED) in outcomes


def _is_of(t: Trial, families: Sequence[str]) -> bool:
    return not families or t.config.get("family") in families


def _nothing(known: Sequence[Trial], empty: bool, db: str | None) -> str:
    """Why there is no trial to list, with what there is."""
    if not known:
        then = f"{hint('search', db=db)} fills it" if empty else f"{hint('history', db=db)} lists all it has"
        return f"the ledger holds no such trial: {then}"
    outcomes = sorted({str(t.outcome or UNFINISHED) for t in known})
    families = sorted({str(t.config["family"]) for t in known if "family" in t.config})
    there_are = f"outcomes {', '.join(outcomes)}" + (f"; families {', '.join(families)}" if families else "")
    return f"none of {len(known)} trials is such a one; they have {there_are}"
