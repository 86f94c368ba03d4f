"""What a person sees: the consoles, lines for people, and the live progress of a search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn
from rich.progress import Progress as Bar
from rich.style import Style
from rich.table import Table
from rich.text import Text

from evoengine.records import Candidate, Kind, Outcome, Value
from evoengine.text import plain, plain_lines

if TYPE_CHECKING:
    from evoengine.search.coordinator import Progress
    from evoengine.search.evaluators import Usage


class Output(Console):
    """A console that shows text as text: no markup, no emoji names, and control characters as `plain_lines` writes
    them."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, *, style: str | Style = "", **_: Any) -> Text:
        return Text(plain_lines(text), style=style)

    def on_broken_pipe(self) -> None:
        """Leaves it to the door, where rich would exit with 1."""
        raise


stderr = Output(stderr=True)
stdout = Output()
if not stdout.is_terminal:
    # into a pipe or a file a table goes unbroken, however wide
    stdout.width = 100_000

MARK = {Kind.MEASURED: "", Kind.ESTIMATED: " est.", Kind.RECORDED: " rec."}
BY_FORMULA = "est.* the model could not read the binary (evoengine show says why): by formula, behind all predictions"


def say(text: str, style: str | None = None) -> None:
    """A line for people, on stderr."""
    stderr.print(plain(text), style=style, soft_wrap=True)


def short(value: Value) -> str:
    return str(value).lower()


def number(value: float) -> str:
    """Four digits, or as many as there are before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def figure(candidate: Candidate) -> str:
    """With its unit and the mark of its kind: `412.5 TFLOPS est.`, of what nobody counted operations for the time."""
    m = candidate.measurement
    if m is None:
        return "–"
    mark = MARK[m.kind] + "*" * m.by_formula
    return f"{number(m.tflops)} TFLOPS{mark}" if m.tflops is not None else f"{number(m.compared_us)} µs{mark}"


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
        line.add_row(self._bar, Text(plain(" · ".join(status(progress)))))
        self._live.update(Group(line, Text(plain(best_line(progress.best)), no_wrap=True, overflow="ellipsis")))


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


def best_line(best: Candidate | None) -> str:
    if best is None:
        return "best so far: none yet"
    binary, shared = best.binary, best.shared_bytes
    found = f"best so far  #{best.trial}  {figure(best)}   "
    if binary and shared is not None:
        found += f"{binary.registers} reg  {binary.spill_bytes} spill  {shared / 1024:.0f} KB   "
    return found + " ".join(short(v) if k == "family" else f"{k}={short(v)}" for k, v in best.config.items())
