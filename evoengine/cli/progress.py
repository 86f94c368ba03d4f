"""The progress of a search, on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from evoengine.cli.display import best_line, stderr
from evoengine.records import Outcome

if TYPE_CHECKING:
    from evoengine.search.coordinator import Progress
    from evoengine.search.evaluators import Usage


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class LiveProgress:
    """The bar and the best so far, on stderr; silent where stderr is no terminal. Use as a context manager."""

    def __init__(self) -> None:
        self._bar = Bar(BarColumn(bar_width=38), console=stderr)
        self._task = self._bar.add_task("", total=1)
        self._live = Live(console=stderr, refresh_per_second=8, transient=False)

    def __enter__(self) -> LiveProgress:
        if stderr.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if stderr.is_terminal:
            self._live.stop()

    def update(self, progress: Progress) -> None:
        self._bar.update(self._task, total=progress.total, completed=progress.done)
        line = Table.grid(padding=(0, 1))
        line.add_row(self._bar, Text(" · ".join(status(progress))))
        self._live.update(Group(line, Text(best_line(progress.best), no_wrap=True, overflow="ellipsis")))


def status(progress: Progress) -> list[str]:
    """`43/60`, `31 correct`, each way of being rejected, and the time left; nobody here gated what was recorded."""
    good = "recorded" if progress.outcomes[Outcome.RECORDED] else "correct"
    parts = [f"{progress.done}/{progress.total}", f"{progress.correct} {good}"]
    parts += [f"{n} {outcome}" for outcome, n in sorted(progress.outcomes.items()) if n and not outcome.ranked]
    if progress.predicted:
        parts.append(f"{progress.predicted} predicted ahead")
    if progress.done:
        left = progress.elapsed / progress.done * (progress.total - progress.done)
        parts.append(f"{clock(left)} left")
    return parts


def time_spent(usage: Usage) -> str:
    """`GPU 91 % busy verifying and timing · 6 % waiting for compilers · 3 % starting processes`."""
    total = max(usage.busy + usage.waiting + usage.starting, 1e-9)
    return (
        f"GPU {usage.busy / total:.0%} busy verifying and timing · {usage.waiting / total:.0%} waiting for compilers · "
        f"{usage.starting / total:.0%} starting processes"
    )
