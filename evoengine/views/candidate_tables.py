"""Candidates as tables and lines: rankings, histories, lineages, and the effects of knob changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Group

from evoengine.lineage import Bred, Effect, Step, transition
from evoengine.records import Binary, Candidate, Config, Kind, Measurement, Outcome, Value
from evoengine.terms import SAME_WITHIN, digits, peak_percent, range_us
from evoengine.text import number, plain
from evoengine.views.tables import Cell, Column, Styled, Table, rows_table

if TYPE_CHECKING:
    from evoengine.ledger.read import Resources, RunSummary, Trial

MARK: Mapping[str, str] = {Kind.MEASURED: "", Kind.ESTIMATED: " est.", Kind.RECORDED: " rec."}
BY_FORMULA = (
    "est.* by formula, ranked behind predictions: the model could not read the binary (evoengine show says why)"
)
TIED = "= tied with the first: they differ by less than the model's error"
SIMPLEST = "#{} is not the fastest predicted: of those within {:.0%} of the fastest it uses the fewest registers"
FROM_FILES = "imp. imported with evoengine import: verdict and figure are those of its file"
NOTHING = "–"
FAMILY = "family"
KNOB_LEAVES = (2, 2, 5, 10)
"""Column.leaves of the first, second, third and all other knobs: a space declares its tiles first"""
FIGURES = (
    Column("µs", right=True, leaves=2),
    Column("TFLOPS", right=True),
    Column("% of peak", right=True, leaves=4),
    Column("vs baseline", right=True, leaves=3),
)


@lru_cache(maxsize=4096, typed=True)
def short(value: Value) -> str:
    return str(value).lower()


def digits_of(m: Measurement) -> int:
    """Return how many significant digits of a figure mean something."""
    return digits(m.compared_us, range_us(m.terms))


def figure(candidate: Candidate) -> str:
    """Return a figure with its unit and the mark of its kind, as in `412.5 TFLOPS est.`.

    It is the time if the number of operations is unknown.
    """
    m = candidate.measurement
    if m is None:
        return "–"
    mark = kind_mark(candidate)
    if m.tflops is not None:
        return f"{number(m.tflops, digits_of(m))} TFLOPS{mark}"
    return f"{number(m.compared_us, digits_of(m))} µs{mark}"


def kind_mark(candidate: Bred) -> str:
    """Return the mark that follows a figure: its kind, and whether it was imported. A measured figure has no mark."""
    m = candidate.measurement
    if m is None:
        return ""
    return MARK[m.kind] + "*" * m.by_formula + " imp." * (candidate.imported_from is not None)


def best_line(best: Candidate | None) -> str:
    if best is None:
        return "best so far: none yet"
    binary, shared = best.binary, best.shared_bytes
    found = f"best so far  #{best.trial}  {figure(best)}   "
    if binary and shared is not None:
        found += f"{binary.registers} reg  {binary.spill_bytes} spill  {shared / 1024:.0f} KB   "
    return found + config_line(best.config)


def ranking(ranked: Mapping[int, Candidate]) -> Group:
    """Return a table of candidates by rank, best first, with a mark on ties. Columns without any value are left out."""
    from evoengine.tuning.best import ties

    knobs = Knobs(c.config for c in ranked.values())
    first = next(iter(ranked.values())).trial if ranked else 0
    equals = ties(list(ranked.values())).get(first, [])
    tied = {first, *equals} if equals else set()
    columns = [
        Column("rank", right=True),
        Column("trial", right=True),
        *knobs.columns,
        *FIGURES,
        Column("reg", right=True, leaves=6),
        Column("spill", right=True, leaves=8),
        Column("shared", right=True, leaves=7),
        Column("occ.", right=True, leaves=9),
        Column("err ÷ allowed", right=True, leaves=30),
    ]
    rows = [
        [f"{rank}{'=' * (c.trial in tied)}", str(c.trial), *knobs.cells(c.config), *figure_cells(c), *_resources(c)]
        for rank, c in ranked.items()
    ]
    said = [*([TIED] if tied else []), *_why_first(list(ranked.values())), *_marks(ranked.values())]
    return Group(Table(columns, rows), *knobs.said_once(), *said)


def _why_first(ranked: Sequence[Candidate]) -> Iterator[str]:
    """Yield a sentence where the first of a ranking is predicted slower than the second."""
    for first, second in pairwise(ranked[:2]):
        predicted = all(range_us(c.ranked_by.terms) for c in (first, second))
        if predicted and first.ranked_by.compared_us > second.ranked_by.compared_us:
            yield SIMPLEST.format(first.trial, SAME_WITHIN)


def sent_ranking(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of candidates from the JSON that another machine sent."""
    columns = [Column("rank", right=True), Column("trial", right=True), Column("problem", folds=True, least=16)]
    columns += [Column("TFLOPS", right=True), Column("µs", right=True), Column("kind"), Column("registers", right=True)]
    columns += [Column("configuration", folds=True, least=20)]
    tied = {found[0].get("trial"), *(found[0].get("tied_with") or ())} if found and found[0].get("tied_with") else ()
    rows = [
        [
            f"{rank}{'=' * (known.get('trial') in tied)}",
            str(known.get("trial")),
            str(known.get("problem")),
            _sent_number(known, "tflops"),
            _sent_number(known, "median_us"),
            str(known.get("tflops_kind")),
            _sent_text(known.get("registers")),
            config_line(known.get("config") or {}),
        ]
        for rank, known in enumerate(found, 1)
    ]
    return Table(columns, rows)


def sent_figure(known: Mapping[str, Any] | None) -> str:
    """Return the figure of a trial's JSON: `412.5 TFLOPS est.`, or the time if the number of operations is unknown."""
    if not known or not isinstance(known.get("median_us"), int | float):
        return NOTHING
    mark = MARK.get(str(known["tflops_kind"]), "")
    if isinstance(known["tflops"], int | float):
        return f"{_sent_number(known, 'tflops')} TFLOPS{mark}"
    return f"{_sent_number(known, 'median_us')} µs{mark}"


def _sent_text(value: object) -> str:
    return NOTHING if value is None else str(value)


def _sent_number(known: Mapping[str, Any], name: str) -> str:
    """Return a number of a trial's JSON with as many digits as its prediction's range allows."""
    value, us, ends = known.get(name), known.get("median_us"), known.get("range_us")
    if not isinstance(value, int | float):
        return NOTHING
    if isinstance(us, int | float) and us > 0 and isinstance(ends, list) and len(ends) == 2:
        return number(value, digits(us, ends))
    return number(value)


def history_table(candidates: Sequence[Candidate | Trial]) -> Group:
    """Return a table of trials in the given order with their outcomes.

    Run, problem and GPU are columns only if they differ.
    """
    knobs = Knobs(c.config for c in candidates)
    places = {name: {_place(c, name) for c in candidates} for name in ("run", "problem", "GPU")}
    several = [name for name, found in places.items() if len(found) > 1]
    columns = [
        Column("trial", right=True),
        *(Column(name, leaves=5) for name in several),
        Column("outcome"),
        *knobs.columns,
        *FIGURES,
        Column("reg", right=True, leaves=6),
        Column("reason", least=16),
    ]
    rows = [
        [
            str(c.trial),
            *(_place(c, name) for name in several),
            _outcome(c.outcome),
            *knobs.cells(c.config),
            *figure_cells(c),
            str(_registers(c.binary)) if c.binary else "",
            c.reason or "",
        ]
        for c in candidates
    ]
    once = " · ".join(f"{name} {found.pop()}" for name, found in places.items() if name not in several)
    heading = [plain(once)] if once else []
    return Group(*heading, Table(columns, rows), *knobs.said_once(), *_marks(candidates))


def _marks(candidates: Iterable[Bred]) -> list[str]:
    """Return explanations of the marks beside figures, except for est. and rec., which summaries explain."""
    kinds = {(c.measurement is not None and c.measurement.by_formula, c.imported_from is not None) for c in candidates}
    by_formula, imported = (any(each) for each in zip(*kinds, strict=True))
    return [*([BY_FORMULA] if by_formula else []), *([FROM_FILES] if imported else [])]


def runs_table(found: Iterable[RunSummary]) -> Table:
    """Return a table of runs in the order they were started, each with the best figure of one kind."""
    columns = [
        Column("run", right=True),
        Column("started", leaves=6),
        Column("status", leaves=3),
        Column("problem"),
        Column("GPU"),
        Column("device", leaves=7),
        Column("sampler", leaves=8),
        Column("trials", right=True),
        Column("correct", right=True, leaves=2),
        Column("best", right=True, leaves=4),
        *FIGURES[:2],
        Column("kind", leaves=5),
        Column("imported from", least=12, leaves=4),
    ]
    rows = []
    for s in found:
        run, figure = s.run, s.best.measurement if s.best else None
        time_and_rate = figure_cells(s.best)[:2] if s.best else ["", ""]
        rows.append(
            [
                str(run.id),
                f"{run.started_at:%Y-%m-%d %H:%M}",
                run.status,
                run.problem,
                run.gpu,
                run.device.name,
                run.sampler,
                str(s.trials),
                str(s.correct),
                str(s.best.trial) if s.best else "",
                *time_and_rate,
                str(figure.kind) if figure else "",
                run.imported_from or "",
            ]
        )
    return Table(columns, rows)


def lineage(steps: Sequence[Step]) -> Table:
    """Return the path from a start point as a table, one step per row."""
    columns = [
        Column("trial", right=True),
        Column("made by", leaves=3),
        Column("changed", least=24, folds=True),
        *FIGURES[:2],
        Column("gain", right=True),
    ]
    rows = []
    for s in steps:
        changed = ", ".join(map(transition, s.changes)) or describe(s.candidate.config)
        operator = s.candidate.operator or NOTHING
        origin = f"{operator} of {s.parent.trial}" if s.parent else operator
        gain = f"{s.gain - 1:+.1%}" if s.gain is not None else NOTHING
        rows.append([str(s.candidate.trial), origin, changed, *figure_cells(s.candidate)[:2], gain])
    return Table(columns, rows)


def effects_table(effects: Iterable[Effect]) -> Table:
    """Return a table of knob changes with their gains, largest first."""
    columns = [Column("change", least=20, folds=True)]
    columns += [Column(name, right=True) for name in ("steps", "alone", "better", "median gain")]
    return Table(
        columns,
        [
            [transition(e.change), str(e.steps), str(e.alone), str(e.better), f"{e.median_gain - 1:+.1%}"]
            for e in effects
        ],
    )


class Knobs:
    """Configurations as table cells: a column for every knob in which they differ; the others are stated once.

    Families have knobs of their own, so a knob is compared among those that have it.
    """

    def __init__(self, configs: Iterable[Config]) -> None:
        families: dict[str, dict[str, set[str]]] = {}
        counts: Counter[str] = Counter()
        self._short: dict[tuple[type, Value], str] = {}
        """cache: a long list has few values, each in many rows"""
        different: dict[Value, set[tuple[str, Value, type]]] = {}
        for config in configs:
            counts.update(config.keys())
            of_family = different.setdefault(config.get(FAMILY, ""), set())
            # with its type: 1 and True are equal, and print differently
            of_family.update(zip(config.keys(), config.values(), map(type, config.values()), strict=True))
        place = {name: i for i, name in enumerate(counts)}
        for family, found in different.items():
            values = families.setdefault(short(family), {})
            for name, value, _ in sorted(found, key=lambda knob: place[knob[0]]):
                values.setdefault(name, set()).add(self._text(value))
        self._families = families
        # of several families the knobs that most rows have come first; a family's own keep the order of its space
        self._names = sorted((name for name in counts if self._differs(name)), key=lambda name: -counts[name])
        if FAMILY in self._names:
            self._names.insert(0, self._names.pop(self._names.index(FAMILY)))

    def _values(self, name: str) -> set[str]:
        return set().union(*(values.get(name, set()) for values in self._families.values()))

    def _differs(self, name: str) -> bool:
        return len(self._values(name)) > 1

    @property
    def columns(self) -> list[Column]:
        knobs = [name for name in self._names if name != FAMILY]
        family = [Column(FAMILY, leaves=1)] if FAMILY in self._names else []
        return [*family, *(Column(n, self._is_number(n), KNOB_LEAVES[min(i, 3)]) for i, n in enumerate(knobs))]

    def _is_number(self, name: str) -> bool:
        return all(value.replace(".", "").isdigit() for value in self._values(name))

    def cells(self, config: Config) -> list[Cell]:
        return [self._text(config[name]) if name in config else NOTHING for name in self._names]

    def _text(self, value: Value) -> str:
        key = type(value), value  # 1 and True are equal, and print differently
        text = self._short.get(key)
        if text is None:
            text = self._short[key] = short(value)
        return text

    def said_once(self) -> list[Table]:
        """Return a table of the values common to all rows, and of those common to each family.

        The list is empty if there are none.
        """
        names = dict.fromkeys(name for values in self._families.values() for name in values)
        alike = {name: next(iter(self._values(name))) for name in names if not self._differs(name)}
        everywhere = [name for name in alike if all(name in values for values in self._families.values())]
        lines = {"in every row": {name: alike[name] for name in everywhere}}
        for family, values in self._families.items():
            own = {name: alike[name] for name in values if name in alike and name not in everywhere}
            lines[f"in rows of {family}"] = own
        rows = [(who, describe(own)) for who, own in lines.items() if own]
        return [rows_table(rows)] if rows else []


def config_line(config: Mapping[str, Any]) -> str:
    """Return `wgmma tile_m=64 tile_n=64 …`."""
    return " ".join(short(v) if k == FAMILY else f"{k}={short(v)}" for k, v in config.items())


def describe(config: Config) -> str:
    """Return `tile_m=64 tile_n=64 …`."""
    return " ".join(f"{name}={short(value)}" for name, value in config.items())


def figure_cells(c: Bred) -> list[Cell]:
    """Return the cells for the columns FIGURES: the time that ranks the candidate, and the rates derived from it."""
    m, mark = c.measurement, kind_mark(c)
    if m is None:
        return [""] * len(FIGURES)
    peak, shown = peak_percent(m.terms, m.compared_us), digits_of(m)
    return [
        number(m.compared_us, shown) + mark,
        "" if m.tflops is None else number(m.tflops, shown) + mark,
        "" if peak is None else f"{peak:.0f}%",
        "" if m.vs_baseline is None else f"{m.vs_baseline:.2f}×",
    ]


def _resources(c: Candidate) -> list[Cell]:
    """Return the cells of what a candidate takes: of several kernels the most that one takes, and all spills."""
    error, binary = c.verdict.error_ratio if c.verdict else None, c.binary
    found = ["", "", ""]
    if binary and c.source:
        launches = c.source.launch.kernels(c.source.entry)
        shared = max(binary.of_kernel(entry).shared_bytes + own.shared_bytes for entry, own in launches)
        spilled = binary.spill_bytes + sum(other.spill_bytes for other in binary.others)
        found = [str(_registers(binary)), str(spilled), f"{shared / 1024:.0f} KB"]
    return [*found, "" if c.occupancy is None else f"{c.occupancy:.0%}", "" if error is None else f"{error:.2g}"]


def _registers(binary: Binary | Resources) -> int:
    """Return the registers of a thread of the kernel that has most."""
    return max(kernel.registers for kernel in (binary, *binary.others))


def _outcome(outcome: Outcome | None) -> Cell:
    if outcome is None:
        return Styled("pending", "dim")
    return Styled(str(outcome), "green" if outcome.ranked else "yellow")


def _place(c: Candidate | Trial, name: str) -> str:
    return {"run": str(c.run), "problem": c.problem, "GPU": c.gpu}[name]
