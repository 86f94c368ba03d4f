"""Charts of how trials ended, and of what the gate found case by case."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from evoengine.publish.report.overview import MOST_VERDICTS, CaseErrors, Overview
from evoengine.publish.report.style import (
    OUTCOME_COLOURS,
    PLAIN,
    WRONG_COLOUR,
    Section,
    Style,
    category_axis,
    chart,
    escape_text,
    points,
    titled_axis,
)
from evoengine.records import PENDING

MIN_SHARE = 1e-6
"""smallest drawn error over the allowed one, since 0 has no place on a logarithmic axis"""
MAX_CASES = 30
ENDINGS = (*OUTCOME_COLOURS, PENDING)


def outcomes(overview: Overview) -> Section:
    name, title = "outcomes", "Outcomes by family"
    if not overview.outcomes:
        return Section(name, title, "Nothing to draw: there is no trial yet.")
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
    text = f"How all {overview.total:,} trials ended. Measured, recorded and estimated ones are correct and ranked."
    return Section(name, title, text, made)


def errors(overview: Overview) -> Section:
    name, title = "errors", "Errors by case of the gate"
    if not overview.cases:
        return Section(name, title, "Nothing to draw: the gate was asked about no trial.")
    with_numbers = {case: found for case, found in overview.cases.items() if found.shares}
    worst_first = sorted(with_numbers, key=lambda case: (-max(with_numbers[case].shares), case))
    drawn = worst_first[:MAX_CASES]
    text = _summary(overview, len(worst_first) - len(drawn))
    if not drawn:
        return Section(name, title, f"Nothing to draw: no case has an error and a bound that are numbers. {text}")
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
    hover = [f"{escape_text(drawn[n])}<br>failed with {share:,.4g} times what is allowed" for n, share in failing]
    failed = points(
        [max(s, MIN_SHARE) for _, s in failing], [n for n, _ in failing], Style("failed", WRONG_COLOUR, "x"), hover
    )
    made = chart(
        [boxes, *([failed] if failing else [])],
        titled_axis("largest error over what is allowed", type="log", exponentformat="power"),
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
    parts = [f"Of the last verdict of each trial, {asked:,} at most a case; right of the dashed line is too much."]
    if asked >= MOST_VERDICTS:
        parts.append(f"They are the last {MOST_VERDICTS:,} verdicts.")
    if lost:
        parts.append(f"{lost:,} times a case failed without an error that is a number: a NaN, a crash.")
    if left_out:
        parts.append(f"{left_out} cases with smaller errors are left out.")
    return " ".join(parts)


def _quartiles(found: CaseErrors) -> Sequence[float]:
    """Return the minimum, lower quartile, median, upper quartile and maximum."""
    shares = sorted(max(share, MIN_SHARE) for share in found.shares)
    if len(shares) == 1:
        return shares * 5
    return [shares[0], *statistics.quantiles(shares, n=4, method="inclusive"), shares[-1]]
