"""evoengine report"""

from __future__ import annotations

from dataclasses import asdict

import click

from evoengine.cli.options import db_option, gpu_option, json_option, stored_problem_option
from evoengine.errors import NothingFound
from evoengine.hints import hint


@click.command()
@gpu_option(default=None)
@stored_problem_option
@db_option
@json_option
def report(gpu: str | None, problem: str | None, db: str | None, as_json: bool) -> None:
    """Say which changes of knobs paid, and the path that led to the best.

    Without --problem and --gpu the last run's are meant.
    """
    from evoengine.cli.candidate_tables import effects_table, lineage
    from evoengine.cli.display import say, stdout
    from evoengine.cli.json_output import print_json
    from evoengine.cli.ledger import reading
    from evoengine.lineage import effects, path, step_json

    with reading(db) as ledger:
        gpu_key, problem_text = ledger.last_target(gpu, problem)
        best = ledger.best(problem_text, gpu_key, top=1)
        if not best:
            raise NothingFound(
                f"the ledger holds no correct candidate for {problem_text} on {gpu_key}: "
                f"{hint('history', db=db, problem=problem_text, gpu=gpu_key)} shows how each ended"
            )
        steps = path(best[0].trial, ledger.ancestors(best[0].trial))
        found = effects(ledger.trials(problem=problem_text, gpu=gpu_key, ranked=True))
        trials = ledger.count(problem_text, gpu_key)
    if as_json:
        lists = {"lineage": [step_json(s) for s in steps], "effects": [asdict(e) for e in found]}
        print_json(problem=problem_text, gpu=gpu_key, **lists)
        return
    say(f"{problem_text} on {gpu_key}: {trials} trials, {best[0].ranked_by.kind} figures")
    stdout.print(lineage(steps))
    if found:
        stdout.print()
        stdout.print(effects_table(found))
    else:
        say("no trial was made from another yet: start points have no parents, and most samplers name none")
