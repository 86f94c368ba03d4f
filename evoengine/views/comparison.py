"""Two runs beside each other, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from typing_extensions import TypedDict

from evoengine.ledger.ranking import ComparisonKey
from evoengine.records import Config, Kind, Policy
from evoengine.text import number
from evoengine.tuning.comparison import Comparison, Shared, Standing
from evoengine.views import SCHEMA, AnswerView, fields_of
from evoengine.views.candidate_tables import Knobs
from evoengine.views.tables import Column, Table

SHOWN = 20
"""configurations tried in both runs, in a table"""


class ComparedView(TypedDict):
    """Describe what comparable figures have in common; null if there are none."""

    kind: Kind | None
    model: str | None
    device: str | None
    policy: Policy | None


class ComparedFiguresView(ComparedView):
    """The figures of each run with one comparison key."""

    runs: Sequence[Standing | None]


class TriedConfigView(TypedDict):
    """A configuration that both runs tried. `ratio` is the first run's time over the second's."""

    config: Config
    trials: tuple[int, int]
    outcomes: tuple[str, str]
    us: tuple[float, float] | None
    ratio: float | None


class SharedConfigView(TriedConfigView, ComparedView):
    """A configuration that both runs tried, with what its figures have in common."""


class RunComparisonView(AnswerView):
    """Describe what `evoengine compare --json` prints. In a pair the first element belongs to the first run."""

    runs: tuple[int, int]
    comparable: bool
    differences: Mapping[str, tuple[str | None, str | None]]
    trials: tuple[int, int]
    outcomes: Mapping[str, tuple[int, int]]
    figures: Sequence[ComparedFiguresView]
    shared: Sequence[SharedConfigView]
    median_ratio: float | None


def comparison_json(found: Comparison) -> RunComparisonView:
    return {
        "schema": SCHEMA,
        "runs": (found.runs[0].id, found.runs[1].id),
        "comparable": found.comparable,
        "differences": found.differences,
        "trials": found.trials,
        "outcomes": found.outcomes,
        "figures": [{**_compared(key), "runs": standings} for key, standings in found.standings.items()],
        "shared": [{**fields_of(shared, TriedConfigView), **_compared(shared.key)} for shared in found.shared],
        "median_ratio": found.median_ratio,
    }


def _compared(key: ComparisonKey | None) -> ComparedView:
    return fields_of(key, ComparedView) if key else {"kind": None, "model": None, "device": None, "policy": None}


def comparison_page(found: Comparison) -> Iterator[str | Table]:
    """Yield tables, or a sentence in place of a table that would be empty."""
    yield _differences(found) if found.differences else "the runs have the same settings"
    yield _outcomes(found)
    yield _figures(found) if found.standings else "neither run has a figure"
    if not found.comparable:
        yield "the runs differ in problem, GPU or kernel: their figures are not comparable"
    if not found.shared:
        yield "no configuration was tried in both runs"
        return
    compared = sum(s.ratio is not None for s in found.shared)
    tried = "1 configuration was" if len(found.shared) == 1 else f"{len(found.shared):,} configurations were"
    yield f"{tried} tried in both runs; {_ratios(found, compared)}"
    yield _shared(found)
    if len(found.shared) > SHOWN:
        yield f"the {SHOWN} with the largest differences; --json lists all"


def _ratios(found: Comparison, compared: int) -> str:
    if found.median_ratio is None:
        return "none has comparable figures"
    have = "1 has" if compared == 1 else f"{compared:,} have"
    return f"{have} comparable figures, median ratio {found.median_ratio:.3f}"


def _names(found: Comparison) -> list[str]:
    return [f"run {run.id}" for run in found.runs]


def _differences(found: Comparison) -> Table:
    columns = [Column("differs"), *(Column(name, least=16, folds=True) for name in _names(found))]
    rows = [[name, *("–" if value is None else value for value in pair)] for name, pair in found.differences.items()]
    return Table(columns, rows)


def _outcomes(found: Comparison) -> Table:
    columns = [Column("outcome"), *(Column(name, right=True) for name in _names(found))]
    rows = [[name, *map(str, counts)] for name, counts in found.outcomes.items()]
    return Table(columns, [*rows, ["trials", *map(str, found.trials)]])


def _figures(found: Comparison) -> Table:
    columns = [
        Column("run", right=True),
        Column("kind"),
        Column("device", least=12, leaves=3),
        Column("policy", least=12, leaves=4),
        Column("figures", right=True, leaves=2),
        Column("best", right=True),
        Column("µs", right=True),
        Column("TFLOPS", right=True, leaves=1),
        Column("trials to within 5% of its best", right=True),
        Column("of the better best", right=True),
    ]
    rows = [
        [str(run.id), *_key_cells(key), *_standing_cells(standing)]
        for key, standings in found.standings.items()
        for run, standing in zip(found.runs, standings, strict=True)
        if standing
    ]
    return Table(columns, rows)


def _key_cells(key: ComparisonKey) -> list[str]:
    kind = str(key.kind) + (f" by {key.model}" if key.model else "")
    return [kind, key.device, str(key.policy) if key.policy else ""]


def _standing_cells(standing: Standing) -> list[str]:
    best, near = standing.best, standing.near_both
    tflops = "" if best.tflops is None else number(best.tflops)
    return [
        str(standing.figures),
        f"#{best.trial}",
        number(best.us),
        tflops,
        str(standing.near_own),
        "" if near is None else str(near),
    ]


def _shared(found: Comparison) -> Table:
    shown = found.shared[:SHOWN]
    knobs = Knobs(s.config for s in shown)
    names = _names(found)
    columns = [
        *(Column(f"trial of {name}", right=True) for name in names),
        *knobs.columns,
        *(Column(f"outcome in {name}", leaves=3) for name in names),
        Column("kind", leaves=4),
        *(Column(f"µs in {name}", right=True) for name in names),
        Column("ratio", right=True),
    ]
    return Table(columns, [[*map(str, s.trials), *knobs.cells(s.config), *s.outcomes, *_times(s)] for s in shown])


def _times(shared: Shared) -> list[str]:
    if shared.key is None or shared.us is None or shared.ratio is None:
        return ["", "", "", ""]
    return [_key_cells(shared.key)[0], *map(number, shared.us), f"{shared.ratio:.3f}"]
