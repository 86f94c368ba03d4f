"""The style shared by a page's charts: markers of each kind of figure, axes, and escaped text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evoengine.ledger.ranking import ComparisonKey
from evoengine.records import Config, Kind, Outcome
from evoengine.terms import FORMULA
from evoengine.text import plain

LONGEST, LONGEST_LABEL = 160, 36
"""characters of a text from the ledger on hover, and on an axis or in a legend"""
# Okabe and Ito's colours for colour blindness; shapes distinguish the kinds in black and white too
_STYLES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "measured": (("#0072B2", "#56B4E9", "#00446B"), ("circle", "circle-open", "circle-dot")),
    "recorded": (("#009E73", "#5CC9AA", "#00563F"), ("square", "square-open", "square-dot")),
    "predicted": (("#D55E00", "#E69F00", "#803900"), ("diamond", "diamond-open", "diamond-dot")),
    "by formula": (("#777777", "#AAAAAA", "#444444"), ("x", "cross", "star")),
}
OUTCOME_COLOURS: Mapping[str, str] = {
    Outcome.MEASURED: "#0072B2", Outcome.RECORDED: "#009E73", Outcome.ESTIMATED: "#D55E00",
    Outcome.UNRANKED: "#56B4E9", Outcome.DUPLICATE: "#BBBBBB", Outcome.SCREENED: "#999999",
    Outcome.UNCOMPILABLE: "#CC79A7", Outcome.INCORRECT: "#CC3311", Outcome.CRASHED: "#661100",
    Outcome.HUNG: "#AA4499", Outcome.SUSPECT: "#DDCC77", Outcome.UNFINISHED: "#F0C9A8",
}  # fmt: skip # a table
PLAIN, PEAK_COLOUR, WRONG_COLOUR = "#777777", "#111111", "#CC3311"
Chart = dict[str, Any]
"""data and layout as Plotly takes them, and the height in pixels"""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page. If it has neither chart nor table, its text gives the reason."""

    name: str
    title: str
    text: str
    chart: Chart | None = None
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default=())


@dataclass(frozen=True, slots=True)
class Style:
    name: str
    colour: str
    symbol: str


def escape_text(text: object, longest: int = LONGEST) -> str:
    """Escape text from the ledger for a chart.

    Plotly interprets tags as formatting and links, and decodes `&lt;` and `&amp;`.
    """
    line = plain(text)
    return html.escape(line if len(line) <= longest else f"{line[: longest - 1]}…", quote=False)


def label(text: object) -> str:
    return escape_text(text, LONGEST_LABEL)


def category_axis(texts: Sequence[object], **more: Any) -> dict[str, Any]:
    """Return an axis with these texts at 0, 1, 2 …; texts that are equal when shortened stay separate."""
    places = {"tickmode": "array", "tickvals": list(range(len(texts))), "ticktext": list(map(label, texts))}
    return places | {"range": [-0.5, len(texts) - 0.5], "zeroline": False} | more


def kind_name(sort: ComparisonKey) -> str:
    """Return the name of a sort of figures: measured, recorded, predicted, by formula."""
    if sort.kind is Kind.ESTIMATED:
        return "by formula" if sort.model == FORMULA else "predicted"
    return str(sort.kind)


def first_style(sort: ComparisonKey) -> Style:
    """Return the colour and the shape of a kind of figures, where no two sorts of one kind are drawn."""
    kind = kind_name(sort)
    colours, symbols = _STYLES[kind]
    return Style(kind, colours[0], symbols[0])


def styles(sorts: Iterable[ComparisonKey]) -> dict[ComparisonKey, Style]:
    """Return a name, a colour and a shape for each sort; those of one kind are similar."""
    of_kind: dict[str, list[ComparisonKey]] = {}
    for sort in sorted(set(sorts), key=lambda sort: sort.precedence):
        of_kind.setdefault(kind_name(sort), []).append(sort)
    found = {}
    for kind, alike in of_kind.items():
        colours, symbols = _STYLES[kind]
        for n, sort in enumerate(alike):
            name = f"{kind} ({device_and_policy(sort)})" if len(alike) > 1 else kind
            found[sort] = Style(label(name), colours[n % len(colours)], symbols[n % len(symbols)])
    return found


def device_and_policy(sort: ComparisonKey) -> str:
    """Return the device and the policy."""
    return f"{sort.device}; {sort.policy}" if sort.policy else sort.device


def knobs(config: Config) -> str:
    return " ".join(f"{name}={str(value).lower()}" for name, value in config.items())


def chart(data: Sequence[Mapping[str, Any]], x: Mapping[str, Any], y: Mapping[str, Any], height: int = 420) -> Chart:
    """Return traces between two axes with the legend below them."""
    axis = {"automargin": True, "gridcolor": "#e6e6e6", "zerolinecolor": "#cccccc"}
    layout = {
        "xaxis": axis | dict(x),
        "yaxis": axis | dict(y),
        "margin": {"l": 50, "r": 12, "t": 12, "b": 44},
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.22, "x": 0},
        "hovermode": "closest",
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "font": {"size": 12, "color": "#222222"},
    }
    return {"data": list(data), "layout": layout, "height": height}


def titled_axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with its title."""
    return {"title": {"text": title}, **more}


def points(x: Sequence[Any], y: Sequence[Any], style: Style, hover: Sequence[str], size: int = 6) -> dict[str, Any]:
    """Return a scatter trace. Hover texts must be escaped by `escape_text`."""
    marker = {"color": style.colour, "symbol": style.symbol, "size": size, "opacity": size / 10}
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(x),
        "y": list(y),
        "name": style.name,
        "hoverinfo": "text",
        "hovertext": list(hover),
        "marker": marker,
    }


def line(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, **style: Any) -> dict[str, Any]:
    """Return a line trace. `name` must be escaped by `escape_text`."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": list(y),
        "name": name,
        "hoverinfo": "name+y",
        "line": {"color": colour, **style},
    }
