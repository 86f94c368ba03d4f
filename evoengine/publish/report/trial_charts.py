"""Charts of trials: times, outcomes, and the gate's errors by case."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evoengine.ledger.ranking import ComparisonKey, Timed
from evoengine.publish.report.overview import MOST_VERDICTS, CaseErrors, Overview
from evoengine.publish.report.style import (
    OUTCOME_COLOURS,
    PEAK_COLOUR,
    PLAIN,
    WRONG_COLOUR,
    Section,
    Style,
    category_axis,
    chart,
    device_and_policy,
    escape_text,
    kind_name,
    knobs,
    label,
    line,
    points,
    styles,
    titled_axis,
)
from evoengine.records import PENDING, Baseline, Kind

MAX_POINTS = 5_000
"""drawn points of one sort of figures; improvements are always drawn"""
FAR = 6
"""ratio of roofline to best from which the axis is logarithmic, since the rest would be flat"""
MANY = 500
"""number of points from which they are drawn small"""
WITHIN = 1.25
"""a prediction within this factor is counted as near"""
NO_FIGURE = "Nothing to draw: none of the trials shown here is correct and has a figure."


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks of the GPU, and the operations and bytes of the problem."""

    gpu: str
    flops: float
    min_dram_bytes: float
    tensor_tflops: float
    fp32_tflops: float
    memory_gbs: float

    @property
    def least_us(self) -> float:
        """Return the time in µs that no kernel can undercut."""
        return max(self.flops / self.tensor_tflops / 1e6, self.min_dram_bytes / self.memory_gbs / 1e3)


@dataclass(frozen=True, slots=True)
class Rate:
    """The quantity of the y axis: TFLOPS, or runs per second where the operations are unknown."""

    flops: float | None

    @property
    def title(self) -> str:
        return "runs per second" if self.flops is None else "TFLOPS"

    def of(self, us: float) -> float:
        return 1e6 / us if self.flops is None else self.flops / us / 1e6


def rate_of(times: Sequence[Timed]) -> Rate:
    """Return TFLOPS if all figures have them: the number of operations is the same, since all are of one problem."""
    first = times[0] if times else None
    if first is None or first.tflops is None or any(t.tflops is None for t in times):
        return Rate(None)
    return Rate(first.tflops * first.us * 1e6)


def sorted_times(overview: Overview) -> dict[ComparisonKey, list[Timed]]:
    """Return, for each sort, the last figure of every trial in the order of trials, without back-to-back runs."""
    last: dict[ComparisonKey, dict[int, Timed]] = {}
    for timed in overview.times:
        if not timed.key.is_sustained:
            last.setdefault(timed.key, {})[timed.trial] = timed
    in_order = sorted(last, key=lambda sort: sort.precedence)
    return {sort: [last[sort][n] for n in sorted(last[sort])] for sort in in_order}


# ── convergence ─────────────────────────────────────────────────────────────────────────────────────────────────────


def convergence(overview: Overview, peaks: Peaks | None) -> Section:
    name, title = "convergence", "Convergence"
    by_sort = sorted_times(overview)
    if not by_sort:
        return Section(name, title, NO_FIGURE)
    rate, first = rate_of(overview.times), overview.total - len(overview.trials)
    places = {t.trial: first + n for n, t in enumerate(overview.trials, 1)}
    data = [
        trace
        for sort, style in styles(by_sort).items()
        for trace in _converging(by_sort[sort], style, rate, places, overview)
    ]
    ends = [first + 1, overview.total]
    for n, baseline in enumerate(overview.baselines):
        dash = ("dash", "dashdot", "dot")[n % 3]
        data.append(line(ends, [rate.of(baseline.median_us)] * 2, _baseline(baseline), PLAIN, dash=dash))
    roof, best = None, max(rate.of(t.us) for times in by_sort.values() for t in times)
    if peaks:
        roof = Rate(peaks.flops if rate.flops else None).of(peaks.least_us)
        data.append(line(ends, [roof] * 2, "roofline", PEAK_COLOUR, dash="longdash"))
    far = roof is not None and roof > FAR * best
    upwards = titled_axis(rate.title, **({"type": "log"} if far else {"rangemode": "tozero"}))
    figures = "; ".join(f"{kind_name(sort)}: {device_and_policy(sort)}" for sort in by_sort)
    text = (
        f"Each point is a correct trial, each line the best so far of one kind of figure ({figures}). "
        "Different kinds are not comparable and never ranked together."
    )
    return Section(name, title, text, chart(data, titled_axis("trial, in the order they were started"), upwards, 460))


def _converging(
    times: Sequence[Timed], style: Style, rate: Rate, places: dict[int, int], overview: Overview
) -> Iterator[dict[str, object]]:
    best = _improvements(times)
    drawn = _thinned(times, best)
    configs = {t.trial: t.config for t in overview.trials}
    hover = [_hover(t, rate, style, knobs(configs[t.trial])) for t in drawn]
    yield points(
        [places[t.trial] for t in drawn], [rate.of(t.us) for t in drawn], style, hover, 6 if len(drawn) < MANY else 4
    )
    x = [*(places[t.trial] for t in best), max(places.values())]
    y = [*(rate.of(t.us) for t in best), rate.of(best[-1].us)]
    yield line(x, y, f"best {style.name}", style.colour, shape="hv", width=2)


def _baseline(baseline: Baseline) -> str:
    return label(f"baseline {baseline.name}, measured")


def _thinned(times: Sequence[Timed], best: Sequence[Timed]) -> list[Timed]:
    """Return at most MAX_POINTS figures, evenly spaced, with all improvements."""
    stride, kept = -(-len(times) // MAX_POINTS), {t.trial for t in best}
    return [t for n, t in enumerate(times) if n % stride == 0 or t.trial in kept]


def _improvements(times: Sequence[Timed]) -> list[Timed]:
    found: list[Timed] = []
    for timed in times:
        if not found or timed.us < found[-1].us:
            found.append(timed)
    return found


def _hover(timed: Timed, rate: Rate, style: Style, what: str) -> str:
    figures = f"{rate.of(timed.us):,.4g} {rate.title}, {timed.us:,.4g} µs"
    return f"#{timed.trial} {style.name}<br>{figures}<br>{escape_text(what)}"


# ── prediction and measurement ──────────────────────────────────────────────────────────────────────────────────────


def prediction(overview: Overview) -> Section:
    name, title = "prediction", "Prediction against measurement"
    by_sort = sorted_times(overview)
    style = styles(by_sort)
    data, told, ends = [], [], []
    for estimate in (s for s in by_sort if s.kind is Kind.ESTIMATED):
        predicted = {t.trial: t for t in by_sort[estimate]}
        for real in (s for s in by_sort if s.kind is not Kind.ESTIMATED):
            pairs = [(predicted[t.trial].us, t.us, t.trial) for t in by_sort[real] if t.trial in predicted]
            if not pairs:
                continue
            pair = f"{style[estimate].name} and {style[real].name}"
            hover = [
                f"#{n}<br>{style[estimate].name} {p:,.4g} µs<br>{style[real].name} {m:,.4g} µs" for p, m, n in pairs
            ]
            symbol = style[estimate].symbol + "-open" * (real.kind is Kind.RECORDED)
            both = Style(pair, style[estimate].colour, symbol)
            data.append(points([p for p, _, _ in pairs], [m for _, m, _ in pairs], both, hover, 7))
            ends += [us for p, m, _ in pairs for us in (p, m)]
            near = sum(1 / WITHIN <= p / m <= WITHIN for p, m, _ in pairs)
            which = f"{kind_name(estimate)} and {kind_name(real)} ({device_and_policy(real)})"
            told.append(f"{which}: {near} of {len(pairs)} within {WITHIN}×")
    if not data:
        why = "Nothing to compare: no trial has both an estimate and a time that was measured or recorded."
        return Section(name, title, f"{why} evoengine measure times candidates of a search without a GPU on one.")
    least, most = min(ends) / 1.1, max(ends) * 1.1
    data.append(line([least, most], [least, most], "equal", PLAIN))
    for factor in (WITHIN, 1 / WITHIN):
        data.append(line([least, most], [least * factor, most * factor], f"{factor:.3g}×", PLAIN, dash="dot", width=1))
    text = f"{'; '.join(told)}. On the line both are equal; between the dots they are within {WITHIN}× of each other."
    return Section(
        name,
        title,
        text,
        chart(data, titled_axis("predicted µs", type="log"), titled_axis("measured or recorded µs", type="log")),
    )


# ── roofline ────────────────────────────────────────────────────────────────────────────────────────────────────────


def roofline(overview: Overview, peaks: Peaks | None, why_not: str) -> Section:
    name, title = "roofline", "Roofline"
    by_sort = sorted_times(overview)
    if peaks is None:
        return Section(name, title, f"Nothing to draw: {why_not}.")
    if not by_sort:
        return Section(name, title, NO_FIGURE)
    intensity = peaks.flops / peaks.min_dram_bytes
    corner = peaks.tensor_tflops * 1e3 / peaks.memory_gbs
    x = [min(intensity, corner) / 8, corner, max(intensity, corner) * 8]
    roof = [min(peaks.tensor_tflops, i * peaks.memory_gbs / 1e3) for i in x]
    data = [line(x, roof, "tensor cores and memory", PEAK_COLOUR, width=2)]
    fp32 = [min(peaks.fp32_tflops, i * peaks.memory_gbs / 1e3) for i in x]
    data.append(line(x, fp32, "FP32 without tensor cores", PLAIN, dash="dash"))
    for sort, style in styles(by_sort).items():
        best, worst = min(by_sort[sort], key=lambda t: t.us), max(by_sort[sort], key=lambda t: t.us)
        reached = [peaks.flops / t.us / 1e6 for t in (worst, best)]
        hover = [
            f"{which} {style.name}: #{t.trial}<br>{r:,.4g} TFLOPS, {peaks.least_us / t.us:.0%} of the roof"
            for which, t, r in zip(("slowest", "fastest"), (worst, best), reached, strict=True)
        ]
        data.append(points([intensity] * 2, reached, style, hover, 10) | {"mode": "lines+markers"})
    for n, baseline in enumerate(overview.baselines):
        style = Style(_baseline(baseline), PLAIN, ("triangle-up", "triangle-down", "triangle-left")[n % 3])
        rate = peaks.flops / baseline.median_us / 1e6
        data.append(points([intensity], [rate], style, [f"{style.name}<br>{rate:,.4g} TFLOPS"], 10))
    bound = "arithmetic" if intensity > corner else "memory"
    text = (
        f"The problem does {intensity:,.4g} operations for each byte that every kernel must move; on {peaks.gpu} it is "
        f"bound by {bound}: no kernel takes less than {peaks.least_us:,.4g} µs. A line joins the slowest and the "
        "fastest trial of each kind of figure."
    )
    return Section(
        name,
        title,
        text,
        chart(data, titled_axis("operations per byte", type="log"), titled_axis("TFLOPS", type="log")),
    )


# ── finals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def finals(overview: Overview) -> Section:
    name, title = "finals", "Finalists"
    held = [f for f in overview.finalists if f.samples_us]
    if not held:
        why = "There were no finals, in which the best candidates of a search on a GPU are timed against each other."
        return Section(name, title, why)
    data = [
        {
            "type": "box",
            "y": list(f.samples_us),
            "x0": n,
            "name": f"{f.place}. #{f.trial}",
            "boxpoints": "all",
            "jitter": 0.5,
            "pointpos": 0,
            "marker": {"size": 3, "color": "#0072B2", "opacity": 0.5},
            "line": {"color": "#00446B"},
            "fillcolor": "rgba(0,114,178,0.15)",
            "showlegend": False,
        }
        for n, f in enumerate(held)
    ]
    text = "Measured times of the finalists in the same rounds, by rank. Each point is a repetition."
    return Section(
        name,
        title,
        text,
        chart(
            data,
            titled_axis("place and trial") | category_axis([f"{f.place}. #{f.trial}" for f in held]),
            titled_axis("µs"),
        ),
    )


# ── outcomes and errors ───────────────────────────────────────────────────────────────────────────────────────────────


MIN_SHARE = 1e-6
"""smallest drawn error over the allowed one, since 0 has no place on a logarithmic axis"""
MAX_CASES = 30
ENDINGS = (*OUTCOME_COLOURS, PENDING)


def outcomes(overview: Overview) -> Section:
    name, title = "outcomes", "Outcomes by family"
    if not overview.outcomes:
        return Section(name, title, "Nothing to draw: there are no trials.")
    families = sorted({family for family, _ in overview.outcomes})
    present = [ending for ending in ENDINGS if any(outcome == ending for _, outcome in overview.outcomes)]
    data = [
        {
            "type": "bar",
            "name": str(ending),
            "x": list(range(len(families))),
            "marker": {"color": OUTCOME_COLOURS.get(ending, PLAIN)},
            "y": [overview.outcomes.get((family, ending), 0) for family in families],
        }
        for ending in present
    ]
    made = chart(data, category_axis([family or "no family" for family in families]), titled_axis("trials"))
    made["layout"] |= {"barmode": "stack", "showlegend": True}
    text = f"Outcomes of all {overview.total:,} trials. Measured, recorded and estimated ones are correct and ranked."
    return Section(name, title, text, made)


def errors(overview: Overview) -> Section:
    name, title = "errors", "Errors by case of the gate"
    if not overview.cases:
        return Section(name, title, "Nothing to draw: the gate judged no trial.")
    with_numbers = {case: found for case, found in overview.cases.items() if found.shares}
    worst_first = sorted(with_numbers, key=lambda case: (-max(with_numbers[case].shares), case))
    drawn = worst_first[:MAX_CASES]
    text = _summary(overview, len(worst_first) - len(drawn))
    if not drawn:
        return Section(name, title, f"Nothing to draw: no case has a finite error and bound. {text}")
    box = [_quartiles(with_numbers[case]) for case in drawn]
    least, lower, median, upper, most = (list(column) for column in zip(*box, strict=True))
    boxes = {
        "type": "box",
        "orientation": "h",
        "name": "all verdicts",
        "y": list(range(len(drawn))),
        "lowerfence": least,
        "q1": lower,
        "median": median,
        "q3": upper,
        "upperfence": most,
        "fillcolor": "rgba(0,114,178,0.2)",
        "line": {"color": "#0072B2"},
    }
    failing = [(n, share) for n, case in enumerate(drawn) for share in sorted(with_numbers[case].failed)[-50:]]
    hover = [f"{escape_text(drawn[n])}<br>failed with {share:,.4g} times the allowed error" for n, share in failing]
    failed = points(
        [max(s, MIN_SHARE) for _, s in failing], [n for n, _ in failing], Style("failed", WRONG_COLOUR, "x"), hover
    )
    made = chart(
        [boxes, *([failed] if failing else [])],
        titled_axis("largest error over the allowed one", type="log", exponentformat="power"),
        category_axis(drawn, range=[len(drawn) - 0.5, -0.5]),
        140 + 26 * len(drawn),
    )
    made["layout"]["shapes"] = [
        {
            "type": "line",
            "x0": 1,
            "x1": 1,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"color": WRONG_COLOUR, "dash": "dash"},
        }
    ]
    return Section(name, title, text, made)


def _summary(overview: Overview, left_out: int) -> str:
    asked = max(found.asked for found in overview.cases.values())
    lost = sum(found.without_number for found in overview.cases.values())
    parts = [f"From the last verdict of each trial, at most {asked:,} per case; those right of the dashed line fail."]
    if asked >= MOST_VERDICTS:
        parts.append(f"They are the last {MOST_VERDICTS:,} verdicts.")
    if lost:
        parts.append(f"{lost:,} times a case failed without a finite error, such as by a NaN or a crash.")
    if left_out:
        parts.append(f"{left_out} cases with smaller errors are left out.")
    return " ".join(parts)


def _quartiles(found: CaseErrors) -> Sequence[float]:
    """Return the minimum, lower quartile, median, upper quartile and maximum."""
    shares = sorted(max(share, MIN_SHARE) for share in found.shares)
    if len(shares) == 1:
        return shares * 5
    return [shares[0], *statistics.quantiles(shares, n=4, method="inclusive"), shares[-1]]
