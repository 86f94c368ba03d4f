"""Write the results for a problem on a GPU as a self-contained HTML page."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from evoengine import __version__
from evoengine.errors import NothingFound, UsageError, hint
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.publish.report import knob_charts, trial_charts
from evoengine.publish.report.overview import MOST_TRIALS, Overview, read_overview
from evoengine.publish.report.page import Facts, page, require_writable, write_page
from evoengine.publish.report.style import Section
from evoengine.publish.report.trial_charts import Peaks
from evoengine.search.targets import stored_gpu, stored_target
from evoengine.terms import digits, range_us
from evoengine.text import rounded
from evoengine.tuning.setup import Echo, silent
from evoengine.workloads import stored_problem


def write_report(
    file: Path | str,
    problem: str | None = None,
    gpu: str | None = None,
    *,
    db: str | None = None,
    on_stage: Echo = silent,
) -> Overview:
    """Write the page to `file` atomically, by default for the problem and GPU of the last run.

    Raises NothingFound if the ledger holds no such trial, and UsageError if `file` is not an earlier report or cannot
    be written.
    """
    target = Path(file)
    require_writable(target)
    with open_ledger(db, create=False) as ledger:
        overview, text = draw_report(ledger, problem, gpu, on_stage)
    write_page(target, text)
    return overview


def draw_report(ledger: Ledger, problem: str | None, gpu: str | None, on_stage: Echo = silent) -> tuple[Overview, str]:
    """Return the data of the page and the page, from an open ledger."""
    on_stage("reading the ledger")
    gpu, problem = ledger.targets.last(gpu, None if problem is None else stored_problem(problem))
    overview = read_overview(ledger, problem, gpu)
    if not overview.total:
        raise NothingFound(
            f"the ledger holds no trial for {problem} on {gpu}: {hint('search', db=ledger.db)} adds some"
        )
    peaks, why_not = _peaks(ledger, overview)
    on_stage("drawing the charts")
    sections = _sections(overview, peaks, why_not)
    return overview, page(f"{problem} on {gpu}", _facts(overview), sections, _plotly())


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text


def _peaks(ledger: Ledger, overview: Overview) -> tuple[Peaks | None, str]:
    """Return the GPU's limits, or None with the reason."""
    try:
        target = stored_target(ledger, overview.problem, stored_gpu(ledger, overview.gpu))
        flops, least_bytes = target.flops, target.min_dram_bytes
    except UsageError as error:
        return None, f"the peaks are unknown: {error}"
    if not flops or not least_bytes:
        return None, "the numbers of operations and bytes of this problem are unknown"
    gpu = target.gpu
    return Peaks(gpu.name, flops, least_bytes, gpu.tensor_tflops, gpu.fp32_tflops, gpu.memory_gbs), ""


def _sections(overview: Overview, peaks: Peaks | None, why_not: str) -> list[Section]:
    return [
        trial_charts.convergence(overview, peaks),
        trial_charts.prediction(overview),
        trial_charts.roofline(overview, peaks, why_not),
        knob_charts.effects(overview),
        knob_charts.pairs(overview),
        trial_charts.outcomes(overview),
        knob_charts.lineage(overview),
        knob_charts.sources(overview),
        trial_charts.errors(overview),
        trial_charts.finals(overview),
    ]


def _facts(overview: Overview) -> Facts:
    best, runs = overview.best, overview.runs
    facts = [("best", "no correct trial has a figure" if best is None else f"trial {best.trial}")]
    if best is not None:
        m = best.ranked_by
        shown = digits(m.compared_us, range_us(m.terms))
        rate = f"{rounded(m.tflops, shown)} TFLOPS, " if m.tflops is not None else ""
        how = f", {m.policy}" if m.policy else ""
        facts.append((f"its {m.kind} figure", f"{rate}{rounded(m.compared_us, shown)} µs ({m.device}{how})"))
        if m.vs_baseline is not None:
            facts.append(("against the fastest baseline", f"{m.vs_baseline:.2f}×"))
    some = "" if overview.total <= MOST_TRIALS else f"; charts of trials show the last {MOST_TRIALS:,}"
    facts.append(("trials", f"{overview.total:,} in {len(runs)} run{'s' * (len(runs) != 1)}{some}"))
    facts.append(("judged on", ", ".join(dict.fromkeys(run.device.name for run in runs))))
    origins = dict.fromkeys(run.imported_from for run in runs if run.imported_from)
    if origins:
        facts.append(("imported from", ", ".join(origins)))
    facts.append(("created", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by evoengine {__version__}"))
    return facts
