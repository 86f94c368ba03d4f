"""What a search says at its end, for people and for scripts, and its exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from evoengine.cli.output import print_json, say, stdout
from evoengine.cli.process import read_by_nobody, unwritten
from evoengine.cli.progress import status, time_spent
from evoengine.errors import MachineError
from evoengine.hints import hint
from evoengine.records import Candidate, Outcome
from evoengine.text import spans
from evoengine.tuning.search import SearchResult
from evoengine.views.candidate_tables import ranking
from evoengine.views.results import summaries_json, summary_json

INTERRUPTED = 130
SHOWN = 10
"""ranks in the table, besides the best of each family that is not among them"""


def print_summary(
    result: SearchResult, as_json: bool, db: str | None, following: Sequence[str], echo: Callable[[str], None] = say
) -> int:
    """Print the summary by `echo` and the ranking on stdout; return the exit code.

    `following` lists commands to run next.
    """
    if as_json:
        print_json(summary_json(result))
    return _print_summary(result, as_json, db, following, echo)


def print_summaries(
    results: Mapping[str, tuple[SearchResult, Sequence[str]]],
    as_json: bool,
    db: str | None,
    echo: Callable[[str], None] = say,
) -> list[int]:
    """Print the summaries of the searches of several GPUs as `print_summary` does; return the exit code of each."""
    if as_json:
        print_json(summaries_json({gpu: result for gpu, (result, _) in results.items()}))
    codes = []
    for gpu, (result, following) in results.items():
        echo(f"{gpu}:")
        codes.append(_print_summary(result, as_json, db, following, echo))
    return codes


def _print_summary(
    result: SearchResult, as_json: bool, db: str | None, following: Sequence[str], echo: Callable[[str], None]
) -> int:
    progress, found = result.progress, result.best
    known = f"{result.invalid_proposals} invalid and {result.repeated_proposals} repeated proposals"
    echo(f"{' · '.join(status(progress)[:-1])} · {progress.elapsed:.0f} s · {progress.compiled} compiled · {known}")
    if progress.taken_over:
        echo(f"{progress.taken_over} of {progress.done} taken over from earlier trials, which were the same kernels")
    echo(progress.ended)
    if progress.usage:
        echo(time_spent(progress.usage))
    for line in progress.notes:
        echo(line)
    say_missed(result.missed, echo)
    if not as_json:
        _print_ranking(result, db, following, echo)
    if progress.ended == "interrupted":
        return INTERRUPTED
    return result_code(0 if found or progress.outcomes[Outcome.UNRANKED] else 1, hint("best", db=db), echo)


def _print_ranking(result: SearchResult, db: str | None, following: Sequence[str], echo: Callable[[str], None]) -> None:
    """Print the ranking and the commands to run next, or why there is no ranking."""
    found, unranked = result.best, result.progress.outcomes[Outcome.UNRANKED]
    history = hint("history", run=result.run, db=db)
    if found:
        stdout.print(ranking(_shown(found)))
        estimated = found[0].outcome is Outcome.ESTIMATED
        remark = ["figures marked est. are estimates, not measurements"] if estimated else []
        echo(f"next: {'   ·   '.join([*following, *remark])}")
    elif unranked:
        why = "the model cannot read their binaries, and their families state no [cost] in the space"
        echo(f"{unranked} correct candidates and no figure to rank them by: {why}")
        echo(f"next: {hint('measure', db=db)} on a machine with the GPU   ·   {history}")
    else:
        echo(f"no correct candidate was found: {history} shows how each ended")


def result_code(code: int, best: str, echo: Callable[[str], None]) -> int:
    """Return the exit code of a command whose results are in the ledger.

    A result that nobody read is reported and is no success.
    """
    lost = unwritten().get("stdout")
    if code or lost is None or not read_by_nobody(lost):  # what else may fail is told of every command
        return code
    echo(f"nobody read the result, which is in the ledger: {best} shows it")
    return MachineError.exit_code


def say_missed(
    missed: Mapping[int, str], echo: Callable[[str], None] = say, remedy: str = "the next search adds them"
) -> None:
    if missed:
        why = next(iter(missed.values()))
        echo(f"in the ledger, but not in optuna-dashboard's study: {spans(missed)} ({why}); {remedy}")


def _shown(found: Sequence[Candidate]) -> dict[int, Candidate]:
    """Return candidates by rank: the first SHOWN, and the first of each family."""
    ranks = dict(enumerate(found, 1))
    firsts = {c.config.get("family"): rank for rank, c in reversed(ranks.items())}
    return {rank: ranks[rank] for rank in sorted({*list(ranks)[:SHOWN], *firsts.values()})}
