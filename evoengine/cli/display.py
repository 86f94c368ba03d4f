"""What a person sees: tables and pages of candidates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from evoengine.lineage import Effect, Step, transition
from evoengine.records import Candidate, Config, Kind, Measurement, Outcome, Profile, Value, Verdict
from evoengine.sass.validation import error_line
from evoengine.terms import bound, hypotheses, range_us, utilisation

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)
if not stdout.is_terminal:
    # into a pipe or a file a table goes unbroken, however wide
    stdout.width = 100_000

MARK = {Kind.MEASURED: "", Kind.ESTIMATED: " est.", Kind.RECORDED: " rec."}
BY_FORMULA = "est.* the model could not read the binary (evoengine show says why): by formula, behind all predictions"
PIPES = {"mufu": "MUFU", "fma": "FMA", "alu": "ALU", "l2": "L2", "dram": "DRAM"}
"""how a person writes the pipes and memories of a prediction; the others are words"""


def say(text: str, style: str | None = None) -> None:
    """A line for people, on stderr."""
    stderr.print(text, style=style, soft_wrap=True)


def describe(config: Config) -> str:
    """A configuration in full: `tile_m=64 tile_n=64 …`, without the family, which has a place of its own."""
    return " ".join(f"{name}={short(value)}" for name, value in config.items() if name != "family")


def values(config: Config) -> str:
    """A configuration's values alone, `64/64/8/…`, for tables that state the knobs' names once (`legend`)."""
    return "/".join(short(value) for name, value in config.items() if name != "family")


def legend(configs: Sequence[Config]) -> Text:
    """Per family, which knob each value of `values` belongs to; beneath a table, which may be narrower."""
    lines = {f"{c.get('family', 'all')}: {'/'.join(name for name in c if name != 'family')}": None for c in configs}
    return Text("\n".join(("config", *lines)), style="dim")


def short(value: Value) -> str:
    return str(value).lower()


def figure(candidate: Candidate) -> str:
    m = candidate.measurement
    if m is None:
        return "–"
    mark = MARK[m.kind] + "*" * m.by_formula
    return f"{m.tflops:,.4g}{mark}" if m.tflops is not None else f"{m.median_us:,.4g} µs{mark}"


def unit(candidates: Iterable[Candidate]) -> str:
    """What a column of their figures is called: of what was recorded nobody may have counted the operations."""
    figures = [c.measurement for c in candidates if c.measurement]
    return "time" if figures and all(m.tflops is None for m in figures) else "TFLOPS"


def best_line(best: Candidate | None) -> str:
    if best is None:
        return "best so far: none yet"
    m, binary, shared = best.measurement, best.binary, best.shared_bytes
    found = f"best so far  #{best.trial}  {figure(best)}{' TFLOPS' if m and m.tflops is not None else ''}   "
    if binary and shared is not None:
        found += f"{binary.registers} reg  {binary.spill_bytes} spill  {shared / 1024:.0f} KB   "
    return found + f"{best.config.get('family', '')} {values(best.config)}"


def ranking(ranked: Mapping[int, Candidate]) -> Group:
    """Candidates by rank, best first; what is known of none of them has no column."""
    rows = [(str(rank), *_ranked(candidate)) for rank, candidate in ranked.items()]
    names = ("rank", "trial", "family", "config", "reg", "spill", "shared", "occ.", "max err", unit(ranked.values()))
    table = Table(box=None, pad_edge=False)
    shown = [i for i in range(len(names)) if any(row[i] not in ("", "–") for row in rows)]
    for i in shown:
        table.add_column(
            names[i], justify="left" if names[i] in ("family", "config") else "right",
            no_wrap=names[i] != "config", overflow="fold",
        )  # fmt: skip
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    marked = any(c.measurement and c.measurement.by_formula for c in ranked.values())
    remark = [Text(BY_FORMULA, style="dim")] if marked else []
    return Group(table, legend([c.config for c in ranked.values()]), *remark)


def _ranked(candidate: Candidate) -> tuple[str, ...]:
    c, shared = candidate.to_json(), candidate.shared_bytes
    return (
        str(candidate.trial), str(candidate.config.get("family", "")), values(candidate.config),
        cell(c["registers"]), cell(c["spill_bytes"]), cell(shared and shared / 1024, "{:.0f} KB"),
        cell(c["occupancy"], "{:.0%}"), cell(c["max_abs_error"], "{:.1e}"), figure(candidate),
    )  # fmt: skip


def cell(value: object, form: str = "{}") -> str:
    return "–" if value is None else form.format(value)


def history_table(candidates: Sequence[Candidate]) -> Group:
    """Trials in the order they were started, each with how it ended."""
    table = Table(box=None, pad_edge=False)
    right = ("trial", "run", of_figure := unit(candidates), "reg")
    for name in ("trial", "run", "outcome", of_figure, "reg", "family", "config", "reason"):
        table.add_column(
            name, justify="right" if name in right else "left",
            no_wrap=name not in ("config", "reason"), overflow="fold",
        )  # fmt: skip
    for c in candidates:
        registers = str(c.binary.registers) if c.binary else "–"
        outcome = Text(str(c.outcome or "unfinished"), style=_style(c.outcome))
        family = str(c.config.get("family", ""))
        table.add_row(str(c.trial), str(c.run), outcome, figure(c), registers, family, values(c.config), c.reason or "")
    return Group(table, legend([c.config for c in candidates]))


def _style(outcome: Outcome | None) -> str:
    if outcome is None:
        return "dim"
    return "green" if outcome.ranked else "yellow"


def candidate_panel(candidate: Candidate) -> Group:
    """All that is known of one trial."""
    c, binary, m = candidate, candidate.binary, candidate.measurement
    rows = Table.grid(padding=(0, 2))
    rows.add_row("outcome", f"{c.outcome or 'unfinished'}{f': {c.reason}' if c.reason else ''}")
    rows.add_row("problem", f"{c.problem} on {c.gpu}, run {c.run}")
    rows.add_row("config", f"{c.config.get('family', '')} {describe(c.config)}")
    rows.add_row("origin", f"{c.operator or 'unknown'}{f' of {list(c.parents)}' if c.parents else ''}")
    if c.source:
        launch = c.source.launch
        rows.add_row("launch", f"grid {launch.grid}, block {launch.block}, {launch.shared_bytes} bytes dynamic shared")
        rows.add_row(
            "source", f"sha256 {c.source.sha256}, {len(c.source.text.splitlines())} lines (--source prints it)"
        )
    if binary:
        rows.add_row("binary", f"{binary.arch}, {binary.compiler}, {binary.compile_ms:.0f} ms")
        rows.add_row("resources", _resources(c))
        rows.add_row("instructions", " ".join(f"{n}×{op}" for op, n in _most(binary.mix)) or "unknown: no disassembler")
        for warning in binary.warnings:
            rows.add_row("warning", warning)
    if m:
        tflops = f"{m.tflops:,.4g} TFLOPS, " if m.tflops is not None else ""
        rows.add_row("figure", f"{tflops}{m.median_us:,.1f} µs, {m.kind} ({m.device})")
        if m.normalised_us:
            rows.add_row(
                "compared by", f"{m.normalised_us:,.1f} µs, its time relative to the baseline's of the same rounds"
            )
        if m.policy:
            rows.add_row("measured by", str(m.policy))
        if m.vs_baseline:
            rows.add_row("vs baseline", f"{m.vs_baseline:.2f}× the fastest one, {len(m.samples_us)} samples")
        if c.sustained:
            rows.add_row("sustained", _sustained(c.sustained))
        for name, text in _prediction(m):
            rows.add_row(name, text)
        if m.terms:
            rows.add_row("terms", " · ".join(f"{name} {value:,.4g}" for name, value in m.terms.items()))
    return Group(Text(f"trial {c.trial}", style="bold"), rows, *(cases(v) for v in (c.verdict, c.binary_verdict) if v))


def _prediction(m: Measurement) -> Iterator[tuple[str, str]]:
    """Rows on what was predicted: the range, what bounds the kernel, how busy each pipe and memory is."""
    if m.kind is not Kind.ESTIMATED:
        return
    if m.by_formula:
        yield "model", BY_FORMULA
        return
    ends, pipe_that_bounds, shares = range_us(m.terms), bound(m.terms), utilisation(m.terms)
    assert ends and pipe_that_bounds and shares  # every prediction has them
    low, high = ends
    by = ", ".join(f"hypothesis {name} {us:,.1f} µs" for name, us in hypotheses(m.terms).items())
    yield "range", f"{low:,.1f} to {high:,.1f} µs{f' ({by})' if by else ''}"
    waves = f"{m.terms['waves']:,.3g} waves of {m.terms['blocks_per_sm']:.0f} blocks per SM"
    yield (
        "bound by",
        f"{pipe_name(pipe_that_bounds)}; {waves}; no kernel takes less than {m.terms['roofline_us']:,.1f} µs",
    )
    yield "busy", " · ".join(f"{pipe_name(pipe)} {share:.0%}" for pipe, share in shares.items())
    yield "model", error_line()


def pipe_name(pipe: str) -> str:
    return PIPES.get(pipe, pipe)


def _sustained(m: Measurement) -> str:
    """`498.1 TFLOPS, 310.2 µs at 1,410 MHz, 690 W, run back to back`."""
    at = [f"{m.terms[name]:,.0f} {unit}" for name, unit in (("sm_mhz", "MHz"), ("watts", "W")) if name in m.terms]
    tflops = f"{m.tflops:,.4g} TFLOPS, " if m.tflops is not None else ""
    return f"{tflops}{m.median_us:,.1f} µs{' at ' if at else ''}{', '.join(at)}, run back to back"


def _resources(candidate: Candidate) -> str:
    b = candidate.to_json()
    occupancy = f", occupancy {b['occupancy']:.0%}" if b["occupancy"] is not None else ""
    return f"{b['registers']} registers, {b['spill_bytes']} bytes spilled, {b['shared_bytes']} bytes shared{occupancy}"


def _most(mix: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(mix.items(), key=lambda item: -item[1])[:12]


def cases(verdict: Verdict) -> Table:
    """The gate's cases with their errors and seeds."""
    table = Table(
        box=None, pad_edge=False, title=f"gate on {verdict.device}, {verdict.wall_ms:.0f} ms", title_justify="left"
    )
    for name in ("case", "problem", "max err", "mean err", "allowed", "seed", ""):
        table.add_column(name, justify="left" if name in ("case", "problem", "") else "right", overflow="fold")
    for c in verdict.cases:
        errors = [f"{e:.1e}" if e is not None else "–" for e in (c.max_error, c.mean_error, c.allowed)]
        mark = Text("ok", style="green") if c.correct else Text(c.reason or "wrong", style="red")
        table.add_row(c.name, c.problem.partition(":")[2], *errors, str(c.seed), mark)
    return table


def lineage(steps: Sequence[Step]) -> Table:
    """The path from a start point, a step a row."""
    table = Table(box=None, pad_edge=False)
    right = ("trial", of_figure := unit(s.candidate for s in steps), "gain")
    for name in ("trial", "made by", "changed", of_figure, "gain"):
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for s in steps:
        changed = ", ".join(transition(c) for c in s.changes) or values(s.candidate.config)
        operator = s.candidate.operator or "–"
        origin = f"{operator} of {s.parent.trial}" if s.parent else operator
        gain = f"{s.gain - 1:+.1%}" if s.gain is not None else "–"
        table.add_row(str(s.candidate.trial), origin, changed, figure(s.candidate), gain)
    return table


def effects_table(effects: Iterable[Effect]) -> Table:
    """Which changes of knobs paid, most rewarding first."""
    table = Table(box=None, pad_edge=False)
    for name in ("change", "steps", "alone", "better", "median gain"):
        table.add_column(name, justify="left" if name == "change" else "right")
    for e in effects:
        table.add_row(transition(e.change), str(e.steps), str(e.alone), str(e.better), f"{e.median_gain - 1:+.1%}")
    return table


def profile_page(profile: Profile) -> Group:
    """What limits a kernel, a figure a row; a static page says so in its title."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column()
    rows.add_column(justify="right")
    for name, value in profile.figures.items():
        rows.add_row(name, f"{value:,.4g}")
    title = Text(f"profile: {profile.tool}, {profile.device}", style="bold")
    return Group(title, rows, *(Text(remark, style="dim") for remark in profile.remarks))
