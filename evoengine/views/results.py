"""The JSON of search results: rankings, runs, summaries, reports, measurements; and the tables of dispatch tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, NotRequired

from rich.console import Group
from typing_extensions import TypedDict

from evoengine.ledger.ranking import RankedApart
from evoengine.lineage import Effect, Step
from evoengine.records import Candidate, Config, Kind, Outcome
from evoengine.text import number
from evoengine.tuning.measure import Agreement, Pair
from evoengine.tuning.proposals import JudgedText, judged_json
from evoengine.views import SCHEMA, AnswerView
from evoengine.views.candidate_tables import Knobs, digits_of, kind_mark
from evoengine.views.tables import Column, Table
from evoengine.views.trials import (
    BaselineView,
    LineageStepView,
    OneTrialView,
    TrialView,
    baseline_json,
    lineage_steps,
    trial_json,
)

if TYPE_CHECKING:
    from evoengine.ledger.read import RunSummary
    from evoengine.publish.report.overview import Effects
    from evoengine.tuning import dispatch_table
    from evoengine.tuning.best import Best
    from evoengine.tuning.measure import MeasureResult
    from evoengine.tuning.propose import ProposeResult
    from evoengine.tuning.search import SearchResult

SHOWN = 10
"""best trials of a search's summary"""


class RankedTrialView(TrialView):
    """A trial with the numbers of those that the model's error cannot distinguish from it."""

    tied_with: Sequence[int]


class RankingView(AnswerView):
    """Describe what `evoengine best --top --json` prints, best first."""

    problem: str
    gpu: str
    trials: Sequence[RankedTrialView]
    ranked_apart: Sequence[RankedApart]


class BestTrialsView(AnswerView):
    """The best trials of a problem and GPU, best first."""

    problem: str
    gpu: str
    trials: Sequence[TrialView]


class AskedView(TypedDict):
    """The problem and GPU that were asked for."""

    problem: str
    gpu: str


class NearestTrialView(OneTrialView):
    """The best trial of the nearest problem and GPU that have one."""

    asked: AskedView
    exact: bool


class RunView(TypedDict):
    """A search, a measure session or an import, with its best trial."""

    run: int
    started: datetime
    ended: datetime | None
    status: str
    problem: str
    gpu: str
    device: str
    sampler: str
    objectives: Sequence[str]
    seed: int
    trials: int
    correct: int
    best: int | None
    tflops: float | None
    tflops_kind: Kind | None
    median_us: float | None
    imported_from: str | None


class RunsView(AnswerView):
    """Describe what `evoengine runs --json` prints."""

    runs: Sequence[RunView]


class GpuTimeView(TypedDict):
    """Seconds of GPU time by use; only of searches that timed on GPUs."""

    gpu_seconds: NotRequired[Mapping[str, float]]


class SummaryView(GpuTimeView):
    """How a search ended."""

    run: int
    ended: str
    seconds: float
    compiled: int
    taken_over: int
    outcomes: Mapping[Outcome, int]
    best: Sequence[TrialView]


class SearchSummaryView(SummaryView, AnswerView):
    """Describe what `evoengine search --json` prints."""


class SearchSummariesView(AnswerView):
    """Describe what `evoengine search --json` prints of several kinds of GPU, by GPU."""

    searches: Mapping[str, SummaryView]


class ReportView(AnswerView):
    """Describe `evoengine report --json`; the effects are those of the last `effects_of` of `ranked` trials."""

    problem: str
    gpu: str
    lineage: Sequence[LineageStepView]
    effects: Sequence[Effect]
    effects_of: int
    ranked: int
    ranked_apart: Sequence[RankedApart]


class MeasuredView(AnswerView):
    """Describe what `evoengine measure --json` prints."""

    run: int
    agreement: Agreement
    estimates: Sequence[Pair]
    baselines: Sequence[BaselineView]
    best: Sequence[TrialView]


class ProposedView(AnswerView):
    """Describe `evoengine propose --json`: how many proposals were judged, and the best trials of the run."""

    run: int
    ended: str
    judged: int
    best: Sequence[TrialView]


class ProposalView(JudgedText, AnswerView):
    """Describe what `POST /v1/candidates` answers."""


def ranking_json(found: Best) -> RankingView:
    from evoengine.tuning.best import ties

    tied = ties(found.candidates)
    return {
        "schema": SCHEMA,
        "problem": found.problem,
        "gpu": found.gpu,
        "trials": [{**trial_json(c), "tied_with": tied.get(c.trial, [])} for c in found.candidates],
        "ranked_apart": found.apart,
    }


def best_trials_json(found: Best) -> BestTrialsView:
    trials = [trial_json(c) for c in found.candidates]
    return {"schema": SCHEMA, "problem": found.problem, "gpu": found.gpu, "trials": trials}


def runs_json(summaries: Iterable[RunSummary]) -> RunsView:
    return {"schema": SCHEMA, "runs": [_run(summary) for summary in summaries]}


def _run(summary: RunSummary) -> RunView:
    run, best = summary.run, summary.best
    figure = best.measurement if best else None
    return {
        "run": run.id,
        "started": run.started_at,
        "ended": run.finished_at,
        "status": run.status,
        "problem": run.problem,
        "gpu": run.gpu,
        "device": run.device.name,
        "sampler": run.sampler,
        "objectives": run.objectives.split(","),
        "seed": run.seed,
        "trials": summary.trials,
        "correct": summary.correct,
        "best": best.trial if best else None,
        "tflops": figure.tflops if figure else None,
        "tflops_kind": figure.kind if figure else None,
        "median_us": figure.median_us if figure else None,
        "imported_from": run.imported_from,
    }


def summary_json(result: SearchResult) -> SearchSummaryView:
    return {"schema": SCHEMA, **_summary(result)}


def summaries_json(results: Mapping[str, SearchResult]) -> SearchSummariesView:
    return {"schema": SCHEMA, "searches": {gpu: _summary(result) for gpu, result in results.items()}}


def _summary(result: SearchResult) -> SummaryView:
    progress, time = result.progress, GpuTimeView()
    if progress.usage:
        time["gpu_seconds"] = {name: round(value, 1) for name, value in asdict(progress.usage).items()}
    return {
        "run": result.run,
        "ended": progress.ended,
        "seconds": round(progress.elapsed, 1),
        "compiled": progress.compiled,
        "taken_over": progress.taken_over,
        **time,
        "outcomes": dict(progress.outcomes),
        "best": [trial_json(c) for c in result.best[:SHOWN]],
    }


def report_json(best: Candidate, steps: Iterable[Step], found: Effects, apart: Sequence[RankedApart]) -> ReportView:
    """Return the report on a problem and GPU from their best candidate, its lineage, and the effects of changes."""
    return {
        "schema": SCHEMA,
        "problem": best.problem,
        "gpu": best.gpu,
        "lineage": lineage_steps(steps),
        "effects": found.effects,
        "effects_of": found.trials,
        "ranked": found.ranked,
        "ranked_apart": apart,
    }


def measured_json(measured: MeasureResult) -> MeasuredView:
    return {
        "schema": SCHEMA,
        "run": measured.run,
        "agreement": measured.agreement,
        "estimates": measured.pairs,
        "baselines": [baseline_json(b) for b in measured.baselines],
        "best": [trial_json(c) for c in measured.best],
    }


def proposed_json(found: ProposeResult) -> ProposedView:
    return {
        "schema": SCHEMA,
        "run": found.run,
        "ended": found.ended,
        "judged": found.judged,
        "best": [trial_json(c) for c in found.best],
    }


def proposal_json(candidate: Candidate) -> ProposalView:
    return {"schema": SCHEMA, **judged_json(candidate)}


class ServedView(TypedDict):
    """A problem, the number of the kernel that serves it (from 1), and the trial that evaluated that kernel on it."""

    problem: str
    kernel: int
    trial: int
    median_us: float
    best_us: float
    regret: float
    kind: Kind


class DispatchTableView(AnswerView):
    """Describe what `evoengine best` and `search` print with --json of several problems; regrets are 0.05 for 5 %."""

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
        f"known kernels (geometric mean), at worst {found.worst.regret:.1%} ({found.worst.problem})"
    )
