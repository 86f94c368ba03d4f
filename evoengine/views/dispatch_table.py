"""A table of kernels for several problems, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from typing_extensions import TypedDict

from evoengine.records import Config, Kind
from evoengine.text import number
from evoengine.views.candidate_tables import Knobs, digits_of, kind_mark
from evoengine.views.encoding import SCHEMA, AnswerView
from evoengine.views.tables import Column, Table

if TYPE_CHECKING:
    from evoengine.tuning import dispatch_table


class ServedView(TypedDict):
    """A problem with the number of the kernel that serves it, from 1 on, and the trial that evaluated that there."""

    problem: str
    kernel: int
    trial: int
    median_us: float
    best_us: float
    regret: float
    kind: Kind


class DispatchTableView(AnswerView):
    """What `evoengine best` and `search` print with --json of several problems; regrets are 0.05 for 5 %."""

    gpu: str
    kernels: Sequence[Config]
    problems: Sequence[ServedView]
    mean_regret: float
    worst_regret: float
    worst_problem: str


def table_json(found: dispatch_table.Table) -> DispatchTableView:
    served: list[ServedView] = [
        {
            "problem": s.problem,
            "kernel": s.kernel,
            "trial": s.candidate.trial,
            "median_us": s.us,
            "best_us": s.best_us,
            "regret": s.regret,
            "kind": s.candidate.ranked_by.kind,
        }
        for s in found.served
    ]
    return {
        "schema": SCHEMA,
        "gpu": found.gpu,
        "kernels": found.kernels,
        "problems": served,
        "mean_regret": found.mean_regret,
        "worst_regret": found.worst.regret,
        "worst_problem": found.worst.problem,
    }


def problems_table(found: dispatch_table.Table) -> Table:
    columns = [
        Column("problem", folds=True, least=16),
        Column("kernel", right=True),
        Column("trial", right=True),
        Column("µs", right=True),
        Column("best known, µs", right=True),
        Column("slower", right=True),
    ]
    rows = [
        [
            s.problem,
            str(s.kernel),
            str(s.candidate.trial),
            f"{number(s.us, digits_of(s.candidate.ranked_by))}{kind_mark(s.candidate)}",
            number(s.best_us, digits_of(s.candidate.ranked_by)),
            f"{s.regret:.1%}",
        ]
        for s in found.served
    ]
    return Table(columns, rows)


def kernels_table(found: dispatch_table.Table) -> Group:
    knobs = Knobs(found.kernels)
    rows = [[str(n), *knobs.cells(config)] for n, config in enumerate(found.kernels, 1)]
    return Group(Table([Column("kernel", right=True), *knobs.columns], rows), *knobs.said_once())


def verdict(found: dispatch_table.Table) -> str:
    """Return a sentence with the regret of a table."""
    kernels = "1 kernel" if len(found.kernels) == 1 else f"{len(found.kernels)} kernels"
    return (
        f"{kernels} for {len(found.served)} problems on {found.gpu}: {found.mean_regret:.1%} slower than the best "
        f"known ones in the geometric mean, at worst {found.worst.regret:.1%} ({found.worst.problem})"
    )
