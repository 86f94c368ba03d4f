"""Charts of knobs: effects of changes, pairs of knobs, the lineage of the best trial, and the sources of proposals."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from evoengine.ledger.ranking import ComparisonKey, key_of
from evoengine.lineage import Step, path, transition
from evoengine.publish.report.overview import Overview
from evoengine.publish.report.style import (
    Section,
    category_axis,
    chart,
    device_and_policy,
    escape_text,
    first_style,
    kind_name,
    knobs,
    label,
    titled_axis,
)
from evoengine.publish.report.trial_charts import NO_FIGURE, sorted_times
from evoengine.records import Config, Value, trusted_sources
from evoengine.text import plain, ranges

MAX_CHANGES = 15
"""number of drawn changes that paid, and of those that cost"""
MAX_KNOBS, MAX_VALUES = 4, 20
"""for pairs: number of the most influential knobs, and the largest number of values of such a knob"""
SHORT = 16
"""characters of a knob's name in the menu of pairs"""
MAX_LABELS = 12
"""steps of a lineage up to which gains are labelled; in longer ones a gain shows on hover"""
GAINED, LOST = "#009E73", "#CC3311"


def effects(overview: Overview) -> Section:
    name, title = "effects", "Effects of knob changes"
    found = overview.effects
    if not found.effects:
        why = "No trial was derived from another: start points have no parents, and most samplers name none."
        return Section(name, title, f"Nothing to draw. {why}")
    best_first = found.effects
    drawn = (
        best_first if len(best_first) <= 2 * MAX_CHANGES else [*best_first[:MAX_CHANGES], *best_first[-MAX_CHANGES:]]
    )
    gains = [100 * (e.median_gain - 1) for e in drawn]
    hover = [
        f"{escape_text(transition(e.change))}<br>{gain:+.1f}% in the median of {e.steps} steps<br>"
        f"{e.better} were faster, {e.alone} changed nothing else"
        for e, gain in zip(drawn, gains, strict=True)
    ]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "x": gains,
            "y": list(range(len(drawn))),
            "hoverinfo": "text",
            "hovertext": hover,
            "text": [f"{e.steps}" for e in drawn],
            "textposition": "auto",
            "textangle": 0,
            "marker": {"color": [GAINED if gain > 0 else LOST for gain in gains]},
            "showlegend": False,
        }
    ]
    left_out = len(best_first) - len(drawn)
    text = (
        f"The median gain in speed from parent to child for each change of a knob, {found}, with the number of steps "
        "that made the change. Only figures of one kind, device and policy are compared."
        + (f" {left_out} changes between the best and the worst are left out." if left_out else "")
    )
    y = category_axis([transition(e.change) for e in drawn], range=[len(drawn) - 0.5, -0.5])
    return Section(name, title, text, chart(data, titled_axis("median gain in speed, %"), y, 120 + 22 * len(drawn)))


# ── pairs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def pairs(overview: Overview) -> Section:
    name, title = "pairs", "Pairs of knobs"
    times = sorted_times(overview)
    key = _ranking_key(overview, times)
    if key is None:
        return Section(name, title, NO_FIGURE)
    configs = {t.trial: t.config for t in overview.trials}
    tried = [(configs[t.trial], t.us) for t in times[key]]
    several = [pair for pair in combinations(_most_influential(tried), 2) if _differ_together(*pair, tried)]
    if not several:
        return Section(name, title, "Nothing to draw: no two knobs were tried together at several values each.")
    maps = [_map(one, other, tried) for one, other in several]
    for n, trace in enumerate(maps):
        trace["visible"] = n == 0
    axes = [[titled_axis(label(knob)) | category_axis(_values(knob, pair, tried)) for knob in pair] for pair in several]
    buttons = [
        {
            "label": " and ".join(escape_text(knob, SHORT) for knob in pair),
            "method": "update",
            "args": [{"visible": [m == n for m in range(len(maps))]}, _changes_of_axes(axes[n])],
        }
        for n, pair in enumerate(several)
    ]
    made = chart(maps, axes[0][0], axes[0][1], 460)
    made["layout"]["updatemenus"] = [{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.16, "yanchor": "top"}]
    made["layout"]["margin"]["t"] = 70
    text = (
        f"How much slower than the best the best trial with both values is, in %, by {kind_name(key)} figures "
        f"({device_and_policy(key)}). White cells were not tried. The knobs shown are those that affect the time most."
    )
    return Section(name, title, text, made)


def _ranking_key(overview: Overview, times: Mapping[ComparisonKey, object]) -> ComparisonKey | None:
    """Return the comparison key by which the best candidate is ranked."""
    figure = overview.best.measurement if overview.best else None
    own = key_of(figure) if figure else None
    return own if own in times else next(iter(times), None)


def _most_influential(tried: Sequence[tuple[Config, float]]) -> list[str]:
    """Return the knobs with the largest effect on the logarithm of the time.

    The effect is the share of its variance between their values, times the share of trials that have the knob.
    """
    logs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for config, us in tried:
        for knob, value in config.items():
            logs[knob][_value(value)].append(math.log(us))
    shares = {
        knob: _explained_variance(values) * sum(map(len, values.values())) / len(tried)
        for knob, values in logs.items()
        if 2 <= len(values) <= MAX_VALUES
    }
    return sorted(shares, key=lambda knob: (-shares[knob], knob))[:MAX_KNOBS]


def _explained_variance(groups: Mapping[str, Sequence[float]]) -> float:
    everything = [value for group in groups.values() for value in group]
    mean = statistics.fmean(everything)
    total = sum((value - mean) ** 2 for value in everything)
    between = sum(len(group) * (statistics.fmean(group) - mean) ** 2 for group in groups.values())
    return between / total if total else 0.0


def _differ_together(one: str, other: str, tried: Sequence[tuple[Config, float]]) -> bool:
    """Return whether both knobs have several values in trials that have both."""
    cells = {(_value(c[one]), _value(c[other])) for c, _ in tried if one in c and other in c}
    return all(len({cell[side] for cell in cells}) > 1 for side in (0, 1))


def _values(knob: str, pair: Sequence[str], tried: Sequence[tuple[Config, float]]) -> list[str]:
    """Return the knob's values in trials that have both knobs."""
    return sorted({_value(c[knob]) for c, _ in tried if all(name in c for name in pair)}, key=_by_number)


def _changes_of_axes(axes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that Plotly changes when another pair is selected."""
    changes: dict[str, Any] = {}
    for name, axis in zip(("xaxis", "yaxis"), axes, strict=True):
        changes |= {f"{name}.title.text": axis["title"]["text"]}
        changes |= {f"{name}.{key}": axis[key] for key in ("tickvals", "ticktext", "range")}
    return changes


def _map(one: str, other: str, tried: Sequence[tuple[Config, float]]) -> dict[str, object]:
    best: dict[tuple[str, str], float] = {}
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for config, us in tried:
        if one in config and other in config:
            cell = _value(config[one]), _value(config[other])
            best[cell] = min(us, best.get(cell, math.inf))
            counts[cell] += 1
    x, y = (_values(knob, (one, other), tried) for knob in (one, other))
    least = min(us for _, us in tried)
    z = [[100 * (best[a, b] / least - 1) if (a, b) in best else None for a in x] for b in y]
    hover = [
        [
            f"{escape_text(one)}={escape_text(a)}, {escape_text(other)}={escape_text(b)}<br>"
            + (f"{best[a, b]:,.4g} µs, {counts[a, b]} trials" if (a, b) in best else "not tried")
            for a in x
        ]
        for b in y
    ]
    return {
        "type": "heatmap",
        "x": list(range(len(x))),
        "y": list(range(len(y))),
        "z": z,
        "hoverinfo": "text",
        "hovertext": hover,
        "colorscale": "Viridis",
        "reversescale": True,
        "xgap": 1,
        "ygap": 1,
        "colorbar": {"title": {"text": "% slower"}, "thickness": 12},
    }


def _value(value: Value) -> str:
    return str(value).lower()


def _by_number(text: str) -> tuple[bool, float, str]:
    try:
        number = float(text)
    except ValueError:
        return True, 0.0, text
    return (False, number, text) if math.isfinite(number) else (True, 0.0, text)


# ── lineage ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def lineage(overview: Overview) -> Section:
    name, title = "lineage", "Lineage of the best"
    if overview.best is None:
        return Section(name, title, "Nothing to show: no correct trial has a figure.")
    steps = path(overview.best.trial, overview.lineage)
    rows = [_row(step) for step in steps]
    headings = ("trial", "made by", "changed", "kind", "µs", "gain")
    if len(steps) == 1:
        text = f"Trial {overview.best.trial} is a start point, or was proposed without a parent."
        return Section(name, title, text, None, headings, rows)
    text = f"From a start point to trial {overview.best.trial}: of two parents the faster is followed."
    drawn = [(s, s.candidate.measurement) for s in steps]
    known = [(s, m) for s, m in drawn if m is not None]
    markers = [first_style(key_of(m)) for _, m in known]
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers" + "+text" * (len(known) <= MAX_LABELS),
            "x": [f"#{s.candidate.trial}" for s, _ in known],
            "y": [m.compared_us for _, m in known],
            "hoverinfo": "text",
            "showlegend": False,
            "text": [_gain_text(s).strip() for s, _ in known],
            "textposition": "top center",
            "line": {"color": "#999999"},
            "hovertext": [
                f"#{s.candidate.trial}, {m.kind}, {m.compared_us:,.4g} µs{_gain_text(s)}<br>{escape_text(_changed(s))}"
                for s, m in known
            ],
            "marker": {"size": 9, "color": [m.colour for m in markers], "symbol": [m.symbol for m in markers]},
        }
    ]
    return Section(name, title, text, chart(data, {"type": "category"}, titled_axis("µs")), headings, rows)


def _row(step: Step) -> list[str]:
    candidate, figure = step.candidate, step.candidate.measurement
    origin = f"{candidate.operator or '–'} of {step.parent.trial}" if step.parent else candidate.operator or "–"
    return [
        str(candidate.trial),
        plain(origin),
        plain(_changed(step)),
        str(figure.kind) if figure else "",
        f"{figure.compared_us:,.4g}" if figure else "",
        _gain_text(step).strip() or "–",
    ]


def _gain_text(step: Step) -> str:
    return "" if step.gain is None else f" {step.gain - 1:+.1%}"


def _changed(step: Step) -> str:
    if step.parent is not None and not step.changes:
        return "no knob"
    return ", ".join(map(transition, step.changes)) or knobs(step.candidate.config)


# ── sources ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def sources(overview: Overview) -> Section:
    """Return which figures of other GPUs, other problems and the model the proposals of each run followed."""
    title = "Sources of proposals"
    followed: dict[tuple[int, str], list[int]] = {}
    for trial in overview.trials:
        for source in trusted_sources(trial.operator):
            followed.setdefault((trial.run, source), []).append(trial.trial)
    if not followed:
        return Section(
            "sources", title, "Nothing to list: no trial followed figures of another GPU, another problem or the model."
        )
    total = Counter(trial.run for trial in overview.trials)
    rows = [
        (str(run), source, f"{len(trials):,} of {total[run]:,}", ranges(trials, "–", ", "))
        for (run, source), trials in sorted(followed.items())
    ]
    text = "The trials whose proposal followed a source. A source is followed as far as earlier trials confirmed it."
    return Section("sources", title, text, None, ("run", "source", "trials", "which"), rows)
