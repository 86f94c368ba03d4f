"""What a search says at its end, for people and for scripts, and its exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from evoengine.cli.candidate_tables import ranking
from evoengine.cli.display import say, status, stdout, time_spent
from evoengine.cli.json_output import print_json
from evoengine.records import Candidate, Outcome
from evoengine.search.coordinator import Progress
from evoengine.tuning.search import SearchResult

INTERRUPTED = 130
SHOWN = 10
"""ranks in the table, besides the best of each family that is not among them"""


def print_summary(result: SearchResult, as_json: bool, db: str | None, following: Sequence[str]) -> int:
    """Summary on stderr, ranking on stdout; `following` are the commands to go on with."""
    progress, run, found = result.progress, result.run, result.best
    known = f"{result.invalid_proposals} invalid and {result.repeated_proposals} repeated proposals"
    say(f"{' · '.join(status(progress)[:-1])} · {progress.elapsed:.0f} s · {progress.compiled} compiled · {known}")
    say(progress.ended, style="dim")
    if progress.usage:
        say(time_spent(progress.usage))
    for line in progress.notes:
        say(line)
    say_missed(result.missed)
    ledger, unranked = f" --db {db}" if db else "", progress.outcomes[Outcome.UNRANKED]
    if as_json:
        print_json(**_summary(progress, run, found))
    elif found:
        stdout.print(ranking(_shown(found)))
        estimated = found[0].outcome is Outcome.ESTIMATED
        remark = ["figures marked est. are estimates, not measurements"] if estimated else []
        say(f"next: {'   ·   '.join([*(f'evoengine {command}{ledger}' for command in following), *remark])}")
    elif unranked:
        why = "the model cannot read their binaries, and their families state no [cost] in the space"
        say(f"{unranked} correct candidates and no figure to rank them by: {why}")
        say(f"next: evoengine measure{ledger} on a machine with the GPU   ·   evoengine history --run {run}{ledger}")
    else:
        say(f"no correct candidate was found: evoengine history --run {run}{ledger} shows how each ended")
    if progress.ended == "interrupted":
        return INTERRUPTED
    return 0 if found or unranked else 1


def say_missed(missed: Mapping[int, str]) -> None:
    for trial, why in missed.items():
        say(f"trial {trial} is in the ledger, but not in optuna-dashboard's study: {why}", style="yellow")


def _summary(progress: Progress, run: int, found: Sequence[Candidate]) -> dict[str, object]:
    summary = {
        "run": run,
        "ended": progress.ended,
        "seconds": round(progress.elapsed, 1),
        "compiled": progress.compiled,
    }
    if progress.usage:
        summary["gpu_seconds"] = {name: round(value, 1) for name, value in asdict(progress.usage).items()}
    outcomes = {str(outcome): count for outcome, count in progress.outcomes.items()}
    return summary | {"outcomes": outcomes, "best": [c.to_json() for c in found[:SHOWN]]}


def _shown(found: Sequence[Candidate]) -> dict[int, Candidate]:
    """By rank: the first SHOWN, and the first of each family."""
    ranks = dict(enumerate(found, 1))
    firsts = {c.config.get("family"): rank for rank, c in reversed(ranks.items())}
    return {rank: ranks[rank] for rank in sorted({*list(ranks)[:SHOWN], *firsts.values()})}
