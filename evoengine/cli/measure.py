"""evoengine measure"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from evoengine.cli.options import (
    db_option,
    gpu_option,
    json_option,
    kernel_option,
    log_json_option,
    stored_problem_option,
)
from evoengine.errors import hint

if TYPE_CHECKING:
    from evoengine.records import Baseline
    from evoengine.tuning.measure import Agreement


@click.command()
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Number of candidates, best estimate first.",
)
@click.option("--all", "everything", is_flag=True, help="Time all candidates.")
@gpu_option(default=None)
@stored_problem_option
@kernel_option
@db_option
@log_json_option
@json_option
def measure(
    top: int,
    everything: bool,
    gpu: str | None,
    problem: str | None,
    kernel: Path | None,
    db: str | None,
    log_json: bool,
    as_json: bool,
) -> int:
    """Time candidates of a search without a GPU on a GPU, best estimate first.

    The binaries come from the ledger; no compiler is needed. The rank correlation of estimates and measurements is
    printed at the end. Without --problem and --gpu those of the last run are used.
    """
    from evoengine.cli.output import print_json, stdout
    from evoengine.cli.process import INTERRUPTED, stop_on_signal
    from evoengine.cli.progress import EventLog, LiveProgress, result_code
    from evoengine.tuning.measure import MeasureRun
    from evoengine.tuning.setup import register_kernel
    from evoengine.views.candidate_tables import ranking
    from evoengine.views.results import measured_json

    with EventLog() if log_json else LiveProgress(trials=True) as live:
        if kernel:
            register_kernel(kernel)
        measure_run = MeasureRun(None if everything else top, gpu, problem, db, live.say, live.trial)
        stop_on_signal(measure_run.stop)
        live.stage("gating and timing")
        measured = measure_run.run()
    for line in (*map(_baseline, measured.baselines), *measured.notes, *_agreed(measured.agreement)):
        live.say(line)
    if as_json:
        print_json(measured_json(measured))
    else:
        stdout.print(ranking(dict(enumerate(measured.best, 1))))
    code = INTERRUPTED if measure_run.stopped else result_code(0, hint("best", db=db), live.say)
    live.end(measured.run, "interrupted" if measure_run.stopped else "all candidates done", code)
    return code


def _baseline(baseline: Baseline) -> str:
    return f"baseline {baseline.name}: {baseline.tflops:,.4g} TFLOPS, {baseline.median_us:,.1f} µs"


def _agreed(agreed: Agreement) -> list[str]:
    lines = []
    if agreed.spearman is not None:
        both = f"estimated and measured order of {agreed.candidates} candidates"
        lines.append(f"{both}: Spearman's ρ {agreed.spearman:.2f}")
    if agreed.regret is not None:
        lines.append(f"had only the 10 best estimates been timed, {agreed.regret:.1%} of speed would have been missed")
    return lines
