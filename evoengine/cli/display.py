"""What a person sees: the live progress of a search and tables of candidates."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress as Bar
from rich.table import Table
from rich.text import Text

from evoengine.records import Candidate, Config, Kind, Outcome

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False, soft_wrap=True)

MARK = {Kind.MEASURED: "", Kind.ESTIMATED: " est.", Kind.RECORDED: " rec."}


def describe(config: Config) -> str:
    """A configuration in one line: `tile_m=64 tile_n=64 …`, without the family, which has a column of its own."""
    return " ".join(f"{name}={str(value).lower()}" for name, value in config.items() if name != "family")


def figure(candidate: Candidate) -> str:
    m = candidate.measurement
    return f"{m.tflops:,.4g}{MARK[m.kind]}" if m else "–"


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

    def update(self, progress) -> None:
        self._bar.update(self._task, total=progress.total, completed=progress.done)
        line = Table.grid(padding=(0, 1))
        line.add_row(self._bar, Text(" · ".join(status(progress))))
        self._live.update(Group(line, Text(best_line(progress.best), no_wrap=True, overflow="ellipsis")))


def status(progress) -> list[str]:
    """`43/60`, `31 correct`, each way of being rejected, and the time left."""
    parts = [f"{progress.done}/{progress.total}", f"{progress.correct} correct"]
    parts += [f"{n} {outcome}" for outcome, n in sorted(progress.outcomes.items()) if n and not outcome.ranked]
    if progress.done:
        left = progress.elapsed / progress.done * (progress.total - progress.done)
        parts.append(f"{clock(left)} left")
    return parts


def best_line(best: Candidate | None) -> str:
    if best is None:
        return "best so far: none yet"
    b = best.to_json()
    return (
        f"best so far  #{best.trial}  {best.config['family']} {describe(best.config)}   {b['registers']} reg  "
        f"{b['spill_bytes']} spill  {b['shared_bytes'] / 1024:.0f} KB   {figure(best)} TFLOPS"
    )


def ranking(candidates: Sequence[Candidate]) -> Table:
    """Ranked candidates; knobs that all of them share stand once, in the caption."""
    shared = shared_knobs([c.config for c in candidates])
    table = Table(box=None, pad_edge=False, caption=caption(shared), caption_justify="left")
    for name, justify in (
        ("rank", "right"), ("trial", "right"), ("family", "left"), ("config", "left"), ("reg", "right"), ("spill", "right"),
        ("shared", "right"), ("occ.", "right"), ("max err", "right"), ("TFLOPS", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")
    for rank, candidate in enumerate(candidates, 1):
        b = candidate.to_json()
        own = {k: v for k, v in candidate.config.items() if k not in shared}
        table.add_row(
            str(rank), str(candidate.trial), str(candidate.config["family"]), describe(own), str(b["registers"]),
            str(b["spill_bytes"]), f"{b['shared_bytes'] / 1024:.0f} KB", f"{b['occupancy']:.0%}",
            f"{b['max_abs_error']:.1e}", figure(candidate),
        )  # fmt: skip
    return table


def shared_knobs(configs: Sequence[Config]) -> dict[str, object]:
    if len(configs) < 2:
        return {}
    first = configs[0]
    return {k: v for k, v in first.items() if k != "family" and all(k in c and c[k] == v for c in configs)}


def caption(shared: dict[str, object]) -> str | None:
    return f"all with {describe(shared)}" if shared else None


def listing(candidates: Sequence[Candidate]) -> Table:
    """Trials in the order they were started, each with how it ended."""
    table = Table(box=None, pad_edge=False)
    for name in ("trial", "run", "outcome", "TFLOPS", "reg", "family", "config", "reason"):
        table.add_column(name, justify="right" if name in ("trial", "run", "TFLOPS", "reg") else "left", overflow="fold")
    for c in candidates:
        registers = str(c.binary.registers) if c.binary else "–"
        outcome = Text(str(c.outcome or "unfinished"), style=_style(c.outcome))
        family = str(c.config.get("family", ""))
        table.add_row(str(c.trial), str(c.run), outcome, figure(c), registers, family, describe(c.config), c.reason or "")
    return table


def _style(outcome: Outcome | None) -> str:
    if outcome is None:
        return "dim"
    return "green" if outcome.ranked else "yellow"


def sheet(candidate: Candidate) -> Group:
    """All that is known of one trial."""
    c, binary, m = candidate, candidate.binary, candidate.measurement
    rows = Table.grid(padding=(0, 2))
    rows.add_row("outcome", f"{c.outcome or 'unfinished'}{f': {c.reason}' if c.reason else ''}")
    rows.add_row("problem", f"{c.problem} on {c.gpu}, run {c.run}")
    rows.add_row("config", f"{c.config.get('family', '')} {describe(c.config)}")
    rows.add_row("origin", f"{c.operator or 'unknown'}{f' of {list(c.parents)}' if c.parents else ''}")
    if c.source:
        launch = c.source.launch
        rows.add_row("launch", f"grid {launch.grid}, {launch.threads} threads, {launch.shared_bytes} bytes dynamic shared")
        rows.add_row("source", f"sha256 {c.source.sha256}, {len(c.source.text.splitlines())} lines (--source prints it)")
    if binary:
        rows.add_row("binary", f"{binary.arch}, {binary.compiler}, {binary.compile_ms:.0f} ms")
        rows.add_row("resources", _resources(c))
        rows.add_row("instructions", " ".join(f"{n}×{op}" for op, n in _most(binary.mix)) or "unknown: no disassembler")
        for warning in binary.warnings:
            rows.add_row("warning", warning)
    if m:
        rows.add_row("figure", f"{m.tflops:,.4g} TFLOPS, {m.median_us:,.1f} µs, {m.kind} ({m.device})")
        if m.vs_sdpa:
            rows.add_row("vs SDPA", f"{m.vs_sdpa:.2f}× the fastest backend, {len(m.samples_us)} samples")
        rows.add_row("terms", " · ".join(f"{name} {value:,.4g}" for name, value in m.terms.items()))
    return Group(Text(f"trial {c.trial}", style="bold"), rows, *([cases(c.verdict)] if c.verdict else []))


def _resources(candidate: Candidate) -> str:
    b = candidate.to_json()
    occupancy = f", occupancy {b['occupancy']:.0%}" if b["occupancy"] is not None else ""
    return f"{b['registers']} registers, {b['spill_bytes']} bytes spilled, {b['shared_bytes']} bytes shared{occupancy}"


def _most(mix) -> list[tuple[str, int]]:
    return sorted(mix.items(), key=lambda item: -item[1])[:12]


def cases(verdict) -> Table:
    """The gate's cases with their errors and seeds."""
    table = Table(box=None, pad_edge=False, title=f"gate on {verdict.device}, {verdict.wall_ms:.0f} ms", title_justify="left")
    for name in ("case", "problem", "max err", "mean err", "allowed", "seed", ""):
        table.add_column(name, justify="left" if name in ("case", "problem", "") else "right", overflow="fold")
    for c in verdict.cases:
        errors = [f"{e:.1e}" if e is not None else "–" for e in (c.max_error, c.mean_error, c.allowed)]
        mark = Text("ok", style="green") if c.correct else Text(c.reason or "wrong", style="red")
        table.add_row(c.name, c.problem.removeprefix("attention:"), *errors, str(c.seed), mark)
    return table


def findings(found) -> Table:
    """The doctor's findings, each with its remedy where something lacks."""
    table = Table.grid(padding=(0, 2))
    for f in found:
        mark = Text("✓", style="green") if f.here else Text("✗", style="red" if f.needed else "yellow")
        remedy = "" if f.here else f"\n→ {f.remedy}"
        table.add_row(mark, f.name, f"{f.what}{remedy}")
    return table
