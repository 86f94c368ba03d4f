"""The page of one trial, the table of the gate's cases, and the page of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group

from evoengine.gpu import known_gpus
from evoengine.records import (
    DEATHS,
    AnyBaseline,
    Binary,
    Candidate,
    Kind,
    Measurement,
    Profile,
    RefusedBaseline,
    Verdict,
)
from evoengine.sass.predict import error_of
from evoengine.terms import Terms, bound, clock, kernel_class, model_version, peak_percent, range_us, utilisation
from evoengine.text import number, plain
from evoengine.views.candidate_tables import BY_FORMULA, describe, digits_of
from evoengine.views.tables import Cell, Column, Styled, Table, rows_table
from evoengine.views.trials import memory_gbs

PIPES = {"mufu": "MUFU", "fma": "FMA", "alu": "ALU", "l2": "L2", "dram": "DRAM"}
"""display names of the pipes and memories that are abbreviations"""


def candidate_page(candidate: Candidate, baselines: Sequence[AnyBaseline] = ()) -> Group:
    """Return everything known about one trial as a page, with the baselines of its run."""
    c = candidate
    ended = [str(c.outcome or "pending"), *([c.reason] if c.reason else [])]
    rows = [*_named("outcome", ": ".join(ended)), *_evidence(c), ("problem", f"{c.problem} on {c.gpu}, run {c.run}")]
    if c.imported_from:
        rows.append(("imported", f"from {c.imported_from}: its verdicts and figures are those of that file"))
    if c.taken_from:
        rows.append(("reused", f"result of trial {c.taken_from}, the same kernel; it was not evaluated again"))
    if c.retry_of:
        rows.append(("retried", f"trial {c.retry_of}, which was in flight when its search was interrupted"))
    rows += [("config", describe(c.config)), ("origin", _origin(c)), *_compiled(c)]
    if c.measurement:
        rows += [*_figure(c, c.measurement), *_prediction(c.measurement), *_terms(c.measurement)]
    rows += [("" if n else "baselines", line) for n, line in enumerate(map(_baseline, baselines))]
    rows += [row for verdict in c.verdicts for row in _coverage(verdict)]
    return Group(rows_table(rows, title=f"trial {c.trial}"), *map(cases, c.verdicts))


def _named(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield one row per line of a text, such as a compiler's message."""
    for n, line in enumerate(text.rstrip().split("\n")):
        yield "" if n else name, line


def _evidence(c: Candidate) -> Iterator[tuple[str, str]]:
    """Yield a row such as `SIGKILL after 3.1 s, SIGKILL alone after 3 s` for processes that died.

    A limit that was exceeded is in the reason.
    """
    deaths = (c.evidence or {}).get(DEATHS, ())
    if deaths:
        yield "evidence", ", ".join(map(_death, deaths))


def _death(death: Mapping[str, Any]) -> str:
    alone = " alone" if death["alone"] else ""
    after = f" after {death['seconds']:g} s" if "seconds" in death else ""
    kills = death.get("oom_kills")
    return f"{death['how']}{alone}{after}" + (f" ({kills} out-of-memory kills)" if kills else "")


def _origin(c: Candidate) -> str:
    parents = f" of {', '.join(map(str, c.parents))}" if c.parents else ""
    return f"{c.operator or 'unknown'}{parents}"


def _compiled(c: Candidate) -> Iterator[tuple[str, str]]:
    """Yield rows for the launch, the source and the binary, as far as the candidate came."""
    source, binary = c.source, c.binary
    if source:
        launch = source.launch
        for n, (entry, own) in enumerate(launch.kernels(source.entry)):
            of = f"{entry}: " if launch.then else ""
            geometry = f"{of}grid {own.grid}, block {own.block}, {own.shared_bytes} bytes dynamic shared"
            yield "" if n else "launch", geometry
        yield "source", f"sha256 {source.sha256}, {len(source.text.splitlines())} lines (--source prints it)"
    if binary:
        yield "binary", f"{binary.arch}, {binary.compiler}, {binary.compile_ms:.0f} ms"
        yield "resources", _resources(c, binary)
        for other in binary.others:
            yield "", f"{other.entry}: {other.registers} registers, {other.spill_bytes} bytes spilled"
        yield (
            "instructions",
            " ".join(f"{n}×{op}" for op, n in Counter(binary.mix).most_common(12)) or "unknown: no disassembler",
        )
        for warning in binary.warnings:
            yield from _named("warning", warning)


def _figure(c: Candidate, m: Measurement) -> Iterator[tuple[str, str]]:
    """Yield rows for the figure and how it was taken."""
    peak = peak_percent(m.terms, m.compared_us)
    if range_us(m.terms):
        of_peak, found = "" if peak is None else f", {peak:.0f}% of peak", _predicted(m)
    else:
        of_peak, found = "" if peak is None else f", {peak:.1f}% of peak", f"{_tflops(m)}{m.median_us:,.1f} µs"
    yield "figure", f"{found}{of_peak}, {m.kind} ({m.device})"
    yield from _memory(c)
    if m.suspect:
        yield from _named("suspect", m.suspect)
    if m.normalised_us:
        yield "compared by", f"{m.normalised_us:,.1f} µs, its time relative to the baseline's of the same rounds"
    if m.policy:
        yield "measured by", str(m.policy)
    if m.vs_baseline:
        yield "vs baseline", f"{m.vs_baseline:.2f}× the fastest one, {len(m.samples_us)} samples"
    if c.sustained:
        yield "sustained", _sustained(c.sustained)


def _baseline(baseline: AnyBaseline) -> str:
    if isinstance(baseline, RefusedBaseline):
        return f"{baseline.name} was not timed: {baseline.reason}"
    return f"{baseline.name} {baseline.median_us:,.1f} µs"


def _memory(c: Candidate) -> Iterator[tuple[str, str]]:
    gbs, gpu = memory_gbs(c), known_gpus().get(c.gpu)
    if gbs is not None:
        share = f" of {gpu.memory_gbs:,.0f} ({gbs / gpu.memory_gbs:.0%})" if gpu else ""
        yield "memory", f"{gbs:,.0f} GB/s{share}, with each tensor read or written once"


def _terms(m: Measurement) -> Iterator[tuple[str, str]]:
    if m.terms:
        yield "terms", " · ".join(f"{name} {value:,.4g}" for name, value in m.terms.items())


def _prediction(m: Measurement) -> Iterator[tuple[str, str]]:
    """Yield rows for a prediction: its range, clock, bound, the use of each pipe, and the model's error."""
    if m.kind is not Kind.ESTIMATED:
        return
    if m.by_formula:
        yield "model", BY_FORMULA
        return
    ends, pipe_that_bounds, shares = range_us(m.terms), bound(m.terms), utilisation(m.terms)
    if ends:
        low, high = (number(end, digits_of(m)) for end in ends)
        yield "range", f"{low} to {high} µs"
    if at := clock(m.terms):
        yield "clock", f"{at}, {m.terms['clock_ghz']:.3f} GHz: {m.terms['clocks']:,.0f} clocks"
    if pipe_that_bounds:
        yield "bound by", "; ".join([pipe_name(pipe_that_bounds), *_occupies(m.terms)])
    if shares:
        yield "busy", " · ".join(f"{pipe_name(pipe)} {share:.0%}" for pipe, share in shares.items())
    named = kernel_class(m.terms)
    error = error_of(named) if named else "no kernel class is stored; evoengine accuracy --repredict adds it"
    yield "model", f"version {model_version(m.terms)}; {error}"


def _occupies(terms: Terms) -> Iterator[str]:
    if {"waves", "blocks_per_sm"} <= terms.keys():
        yield f"{terms['waves']:,.3g} waves of {terms['blocks_per_sm']:.0f} blocks per SM"
    if terms.get("roofline_us"):
        yield f"no kernel takes less than {terms['roofline_us']:,.1f} µs"


def pipe_name(pipe: str) -> str:
    return PIPES.get(pipe, pipe)


def _sustained(m: Measurement) -> str:
    """Return `498.1 TFLOPS, 310.2 µs at 1,410 MHz, 690 W, run back to back`."""
    at = [f"{m.terms[name]:,.0f} {unit}" for name, unit in (("sm_mhz", "MHz"), ("watts", "W")) if name in m.terms]
    return f"{_tflops(m)}{m.median_us:,.1f} µs{' at ' if at else ''}{', '.join(at)}, run back to back"


def _predicted(m: Measurement) -> str:
    """Return rate and time with as many digits as the prediction's error allows."""
    tflops = "" if m.tflops is None else f"{number(m.tflops, digits_of(m))} TFLOPS, "
    return f"{tflops}{number(m.compared_us, digits_of(m))} µs"


def _tflops(m: Measurement) -> str:
    return f"{m.tflops:,.4g} TFLOPS, " if m.tflops is not None else ""


def _coverage(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield rows for the coverage cells of the configuration that the gate's cases visited, and those they missed."""
    if verdict.coverage is None:
        return
    found = verdict.coverage
    counts = " · ".join(f"{kind} {found.visited[kind]} of {count}" for kind, count in found.cells.items())
    yield "coverage", f"on {verdict.device}: {counts}"
    if found.missing:
        more = f" and {len(found.missing) - 8} more" if len(found.missing) > 8 else ""
        yield "", f"not visited: {'; '.join(found.missing[:8])}{more}"


def _resources(c: Candidate, binary: Binary) -> str:
    least = "least " if binary.others else ""
    occupancy = f", {least}occupancy {c.occupancy:.0%}" if c.occupancy is not None else ""
    spilled = f"{binary.spill_bytes} bytes spilled"
    return f"{binary.registers} registers, {spilled}, {c.shared_bytes} bytes shared{occupancy}"


def cases(verdict: Verdict) -> Table:
    """Return the gate's cases with their errors and seeds as a table."""
    columns = [
        Column("case", least=12, folds=True),
        Column("problem", leaves=4),
        Column("err ÷ allowed", right=True),
        Column("mean err", right=True, leaves=3),
        Column("allowed", right=True, leaves=2),
        Column("seed", right=True, leaves=5),
        Column("verdict", least=12, folds=True),
    ]
    rows: list[list[Cell]] = []
    for c in verdict.cases:
        ratio = f"{c.error_ratio:.2g}" if c.error_ratio is not None else "–"
        errors = [ratio, *(f"{e:.1e}" if e is not None else "–" for e in (c.mean_error, c.allowed))]
        of = f": {c.part}" if c.part else ""
        mark = Styled(f"ok{of}", "green") if c.correct else Styled(f"{c.reason or 'wrong'}{of}", "red")
        rows.append([c.name, c.problem.partition(":")[2], *errors, str(c.seed), mark])
    part = "" if verdict.whole else ", short cases only"
    title = f"gate on {verdict.device}{part}, {verdict.wall_ms:.0f} ms"
    if verdict.abstained:
        title = f"gate on {verdict.device}: {verdict.reason}"
    return Table(columns, rows, title=title)


def profile_page(profile: Profile) -> Group:
    """Return a profile as a table with one figure per row.

    The title names the tool, which shows whether the profile is static.
    """
    columns = [Column("", least=20, folds=True), Column("", right=True)]
    rows = [(name, f"{value:,.4g}") for name, value in profile.figures.items()]
    return Group(Table(columns, rows, title=f"profile: {profile.tool}, {profile.device}"), *map(plain, profile.remarks))
