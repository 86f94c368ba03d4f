"""Progress of a search on stderr: a bar in a terminal, else a line every ten seconds, or events; and its summary."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from evoengine.cli.console import stderr
from evoengine.cli.output import display, print_json, say
from evoengine.cli.process import INTERRUPTED, reader_exited, unwritten
from evoengine.errors import EvoengineError, MachineError, hint
from evoengine.records import Candidate, Outcome
from evoengine.text import plain, spans
from evoengine.views import EVENT_SCHEMA, OF_A_TRIAL, jsonable
from evoengine.views.candidate_tables import best_line, figure, ranking
from evoengine.views.trials import trial_json

if TYPE_CHECKING:
    from evoengine.search.evaluators import Usage
    from evoengine.search.progress import Progress
    from evoengine.tuning.search import SearchResult

LINE_SECONDS = 10.0
"""between two lines if stderr is not a terminal"""


class Ticker(threading.Thread):
    """Calls `tick` every LINE_SECONDS, however busy the main thread is, until it is stopped."""

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._tick, self._stopped = tick, threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(LINE_SECONDS):
            self._tick()

    def stop(self) -> None:
        self._stopped.set()
        self.join()


class LiveProgress:
    """Display of the current stage with its duration, and of the number of finished trials with the best one.

    A context manager.
    """

    def __init__(self, trials: bool = False) -> None:
        """Create a progress display. With `trials`, print a line for each trial that ends."""
        self._trials = trials
        self._started = self._since = time.monotonic()
        self._stage = "starting"
        self._progress: Progress | None = None
        self._counted: tuple[int, int] | None = None
        self._bar = Bar(BarColumn(bar_width=38), console=stderr)
        self._task = self._bar.add_task("", total=1)
        self._live = Live(console=stderr, refresh_per_second=8, get_renderable=self._picture)
        self._ticker = Ticker(lambda: say(self.line()))

    def __enter__(self) -> LiveProgress:
        (self._live if stderr.is_terminal else self._ticker).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.transient = self._progress is None  # erase the stage of a command without trials
        (self._live if stderr.is_terminal else self._ticker).stop()

    def say(self, text: str) -> None:
        say(text)

    def stage(self, text: str) -> None:
        """Set the text that describes the current stage; "" while trials are counted."""
        if text != self._stage:
            self._stage, self._since, self._counted = text, time.monotonic(), None

    def count(self, done: int, total: int) -> None:
        """Set the number of finished trials in the current stage, for commands without a search."""
        self._counted = done, total

    def update(self, progress: Progress) -> None:
        self._progress = progress
        self.stage(progress.stage)

    def trial(self, candidate: Candidate) -> None:
        if self._trials:
            why = f", {candidate.reason}" if candidate.reason else ""
            say(f"#{candidate.trial}  {candidate.outcome}  {figure(candidate)}{why}")

    def end(self, run: int, ended: str, code: int) -> None:
        """Do nothing: the summary reports the end."""

    def line(self) -> str:
        """Return `0:20 · compiling the first candidates` or `1:10 · 12/60 · 9 correct · 4:40 left`."""
        said = [self._stage] if self._stage else []
        if self._counted:
            said.append(_counted(*self._counted))
        if self._progress and self._progress.done:
            said += status(self._progress)
        return " · ".join([clock(time.monotonic() - self._started), *said])

    def _picture(self) -> RenderableType:
        stage = f"{self._stage} {clock(time.monotonic() - self._since)}" if self._stage else ""
        if self._counted:
            done, total = self._counted
            self._bar.update(self._task, total=total, completed=done)
            line = Table.grid(padding=(0, 1))
            line.add_row(self._bar, Text(plain(f"{stage} · {_counted(done, total)}")))
            return line
        if self._progress is None or not self._progress.done:
            return Text(plain(stage))
        self._bar.update(self._task, total=self._progress.total, completed=self._progress.done)
        line = Table.grid(padding=(0, 1))
        said = " · ".join([*([stage] if stage else []), *status(self._progress)])
        line.add_row(self._bar, Text(plain(said)))
        return Group(line, Text(plain(best_line(self._progress.best)), no_wrap=True, overflow="ellipsis"))


def _counted(done: int, total: int) -> str:
    return f"{done:,}/{total:,} trials"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def status(progress: Progress) -> list[str]:
    """Return `43/60`, `31 correct`, the number of each kind of rejection, and the time left.

    Recorded candidates were not gated here.
    """
    good = "recorded" if progress.outcomes[Outcome.RECORDED] else "correct"
    parts = [f"{progress.done}/{progress.total}", f"{progress.correct} {good}"]
    parts += [f"{n} {outcome}" for outcome, n in sorted(progress.outcomes.items()) if n and not outcome.ranked]
    if progress.predicted:
        parts.append(f"{progress.predicted} predicted ahead")
    if progress.done:
        left = (progress.spent + progress.elapsed) / progress.done * (progress.total - progress.done)
        parts.append(f"{clock(left)} left")
    return parts


def time_spent(usage: Usage) -> str:
    """Return `GPU 91 % busy verifying and timing · 6 % waiting for compilers · 3 % starting processes`."""
    total = max(usage.busy + usage.waiting + usage.starting, 1e-9)
    return (
        f"GPU {usage.busy / total:.0%} busy verifying and timing · {usage.waiting / total:.0%} waiting for compilers · "
        f"{usage.starting / total:.0%} starting processes"
    )


class EventLog(logging.Handler):
    """JSON events in place of `LiveProgress`. Library warnings are events too, so that every line is an object."""

    def __init__(self) -> None:
        super().__init__()
        self._started = time.monotonic()
        self._stage = ""
        self._progress: Progress | None = None
        self._writing = threading.Lock()
        self._ticker = Ticker(self._tick)

    def __enter__(self) -> EventLog:
        logging.captureWarnings(True)
        logging.getLogger().addHandler(self)
        self._ticker.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        """Log the error of a failed command as an event in place of a message."""
        self._ticker.stop()
        logging.getLogger().removeHandler(self)
        logging.captureWarnings(False)
        if isinstance(error, EvoengineError):
            self.event("error", text=str(error), exit_code=error.exit_code)
            raise click.exceptions.Exit(error.exit_code) from error

    def event(self, name: str, **fields: object) -> None:
        """Write one object with schema, event, time and the given fields."""
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"schema": EVENT_SCHEMA, "event": name, "time": moment} | jsonable(fields))
        with self._writing:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def say(self, text: str) -> None:
        self.event("message", text=text)

    def emit(self, record: logging.LogRecord) -> None:
        self.event("message", text=record.getMessage(), level=record.levelname.lower())

    def stage(self, text: str) -> None:
        if text and text != self._stage:
            self.event("stage", stage=text)
        self._stage = text

    def update(self, progress: Progress) -> None:
        self._progress = progress
        self.stage(progress.stage)

    def trial(self, candidate: Candidate) -> None:
        known: Mapping[str, object] = trial_json(candidate)
        self.event("trial", **{name: known[name] for name in OF_A_TRIAL})

    def end(self, run: int, ended: str, code: int) -> None:
        self.event("end", run=run, ended=ended, exit_code=code)

    def _tick(self) -> None:
        p = self._progress
        done = {"done": p.done, "total": p.total, "correct": p.correct} if p else {"done": 0}
        seconds = round(time.monotonic() - self._started, 1)
        self.event("progress", stage=self._stage or None, seconds=seconds, **done)


SHOWN = 10
"""ranks in the table, besides the best of each family that is not among them"""


def print_summary(
    result: SearchResult, as_json: bool, db: str | None, following: Sequence[str], echo: Callable[[str], None] = say
) -> int:
    """Print the summary by `echo` and the ranking on stdout; return the exit code.

    `following` lists commands to run next.
    """
    if as_json:
        from evoengine.views.results import summary_json

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
        from evoengine.views.results import summaries_json

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
        echo(f"{progress.taken_over} of {progress.done} reused from earlier trials of the same kernels")
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
        display(ranking(_shown(found)))
        estimated = found[0].outcome is Outcome.ESTIMATED
        remark = ["figures marked est. are predicted, not measured"] if estimated else []
        echo(f"next: {'   ·   '.join([*following, *remark])}")
    elif unranked:
        why = "the model cannot read their binaries, and the space has no [cost] for their families"
        echo(f"{unranked} correct candidates cannot be ranked: {why}")
        echo(f"next: {hint('measure', db=db)} on a machine with the GPU   ·   {history}")
    else:
        echo(f"no correct candidate was found: {history} shows the outcomes")


def result_code(code: int, best: str, echo: Callable[[str], None]) -> int:
    """Return the exit code of a command whose results are in the ledger.

    If the reader of stdout exited before it got the result, that is reported as a failure.
    """
    lost = unwritten().get("stdout")
    if code or lost is None or not reader_exited(lost):  # `main` reports other failures
        return code
    echo(f"the reader of stdout has exited; the result is in the ledger: {best} shows it")
    return MachineError.exit_code


def say_missed(
    missed: Mapping[int, str], echo: Callable[[str], None] = say, remedy: str = "the next search adds them"
) -> None:
    if missed:
        why = next(iter(missed.values()))
        echo(f"missing from the study of optuna-dashboard: {spans(missed)} ({why}); {remedy}")


def _shown(found: Sequence[Candidate]) -> dict[int, Candidate]:
    """Return candidates by rank: the first SHOWN, and the first of each family."""
    ranks = dict(enumerate(found, 1))
    firsts = {c.config.get("family"): rank for rank, c in reversed(ranks.items())}
    return {rank: ranks[rank] for rank in sorted({*list(ranks)[:SHOWN], *firsts.values()})}
