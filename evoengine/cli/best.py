"""evoengine best"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from evoengine.cli.options import db_option, gpu_option, json_option, problem_option
from evoengine.errors import NothingFound, UsageError
from evoengine.gpu import Gpu
from evoengine.problem import Problem


@click.command()
@gpu_option(default=None)
@problem_option(default=None)
@click.option("--top", type=click.IntRange(min=1), help="How many to show.  [default: 10, as JSON the best alone]")
@click.option("--export", "folder", type=click.Path(path_type=Path), help="Write the best one's kernel and loader there.")
@click.option("--pareto", is_flag=True, help="Show what nothing beats in all that the last run aimed at (search --objective).")
@db_option
@json_option
def best(
    gpu: Gpu | None, problem: Problem | str | None, top: int | None, folder: Path | None, pareto: bool, db: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Show the best kernels found, or export the best one.

    Measured figures go before recorded, and those before estimated; kinds are never mixed, nor are GPUs, nor the ways to
    measure (launch, L2, clocks): those of the last figure are ranked. Of estimates, predictions go before those by
    formula. Without --problem and --gpu the last run's are meant. What is exported is executed first, by its machine
    code; a wrong one is refused.
    """
    from evoengine.cli.display import ranking, say, stdout
    from evoengine.ledger.store import open_ledger
    from evoengine.publish.export import export
    from evoengine.records import Kind
    from evoengine.sass.validation import error_line

    with open_ledger(db, create=False) as ledger:
        gpu_key, problem_text = ledger.last_target(gpu.key if gpu else None, str(problem) if problem else None)
        found = ledger.best(problem_text, gpu_key, top=top or 10)
        if not found:
            raise NothingFound(
                f"the ledger holds no correct candidate for {problem_text} on {gpu_key}: evoengine search "
                f"--gpu {gpu_key} --problem {problem_text.removeprefix('attention:')} fills it"
            )
        if pareto:
            found = _front(ledger, problem_text, gpu_key, found[0].measurement)[:top]
        winner = ledger.candidate(found[0].trial, with_cubin=True) if folder else found[0]
        if folder and winner.source and winner.binary:
            winner = _executed(ledger, winner)
    if folder:
        for path in export(winner, folder):
            say(f"wrote {path}")
    if as_json:
        several = top or pareto
        click.echo(json.dumps([c.to_json() for c in found] if several else found[0].to_json(), indent=2))
        return
    figure = found[0].measurement
    policy = f", {figure.policy}" if figure.policy else ""
    say(f"{problem_text} on {gpu_key}: {figure.kind} figures, {figure.device}{policy}")
    if figure.kind is Kind.ESTIMATED and not figure.by_formula:
        say(error_line())
    stdout.print(ranking(dict(enumerate(found, 1))))


def _executed(ledger, winner):
    """The candidate with the verdict on its machine code; raises NothingFound where that is wrong."""
    from evoengine.cli.display import say
    from evoengine.search.binaries import check_export

    check = check_export(ledger, winner)
    if check.refuted:
        raise NothingFound(f"trial {winner.trial} is not exported: {check}")
    say(f"trial {winner.trial}: {check}")
    return replace(winner, binary_verdict=check.verdict)


def _front(ledger, problem: str, gpu: str, like) -> list:
    """The Pareto front over the objectives of the last run, by figures that may be compared with `like`."""
    from evoengine.objectives import front, stored_objectives

    aimed = next(r.objectives for r in reversed(ledger.runs()) if (r.problem, r.gpu) == (problem, gpu))
    objectives = stored_objectives(aimed)
    if len(objectives) == 1:
        raise UsageError(f"the last run aimed at {aimed} alone; search with --objective tflops,registers for a front")
    known = [c for c in ledger.candidates(problem=problem, gpu=gpu) if c.measurement]
    alike = [c for c in known if c.measurement.comparable(like)]
    return front(alike, objectives)
