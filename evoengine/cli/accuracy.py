"""evoengine accuracy and measure: predicted times beside measured ones"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evoengine.cli.options import (
    db_option,
    gpu_option,
    json_option,
    kernel_option,
    log_json_option,
    reading,
    stored_problem_option,
)
from evoengine.cli.output import display, print_json, say
from evoengine.cli.process import INTERRUPTED, stop_on_signal
from evoengine.errors import NothingFound, UsageError, hint
from evoengine.records import RefusedBaseline

if TYPE_CHECKING:
    from evoengine.accuracy.page import Row
    from evoengine.records import AnyBaseline
    from evoengine.tuning.measure import Agreement


@click.command()
@click.option(
    "--kernels",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of kernels with measured times (docs/accuracy-data.md), used instead of the ledger's measurements.",
)
@click.option(
    "--nvrtc",
    multiple=True,
    metavar="VERSION=LIB",
    help="With --kernels: path of the NVRTC version that a kernel requires, as in 11.8=/path/libnvrtc.so.11.2.",
)
@click.option(
    "--samples", type=click.IntRange(min=1), help="With --kernels: number of rows sampled per GPU.  [default: all]"
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="With --kernels: number of processes.  [default: one per core]"
)
@click.option(
    "--repredict", is_flag=True, help="Predict again the candidates that an older version of the model predicted."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the page to this Markdown file.")
@db_option
@json_option
def accuracy(
    kernels: Path | None,
    nvrtc: tuple[str, ...],
    samples: int | None,
    jobs: int | None,
    repredict: bool,
    out: Path | None,
    db: str | None,
    as_json: bool,
) -> int:
    """Compare predicted with measured times: errors by class of kernel and by data set, and the worst rows.

    The measured times come from the ledger or from a folder. The exit code is 1 if a kernel with source or machine code
    could not be predicted; such kernels are named.
    """
    if repredict:
        if kernels or nvrtc or samples or jobs or out:
            raise UsageError("--repredict takes only --db and --json: it predicts candidates of the ledger again")
        return _repredict(db, as_json)
    if kernels is None and (nvrtc or samples or jobs):
        raise UsageError("--nvrtc, --samples and --jobs require --kernels DIR")
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no folder {out.parent}; name a file in one")

    if kernels is not None:
        from evoengine.accuracy.rows import recorded_rows

        rows, remarks, missed = recorded_rows(kernels, nvrtc, samples, jobs or os.cpu_count() or 1)
    else:
        rows, remarks, missed = _own(db)
    for sentence in (*remarks, *missed):
        say(sentence)
    if not rows:
        raise NothingFound("there is no measured time to compare predictions with")
    _show(rows, [*remarks, *missed], out, as_json)
    return 1 if missed else 0


def _own(db: str | None) -> tuple[list[Row], list[str], list[str]]:
    from evoengine.accuracy.page import Row
    from evoengine.accuracy.rows import measured_rows
    from evoengine.cli.progress import LiveProgress

    with LiveProgress() as live, reading(db) as ledger:
        found = list(measured_rows(ledger, lambda trial: live.stage(f"predicting trial {trial}")))
    return [one for one in found if isinstance(one, Row)], [], [str(one) for one in found if not isinstance(one, Row)]


def _repredict(db: str | None, as_json: bool) -> int:
    from evoengine.accuracy.rows import predict_again
    from evoengine.cli.progress import LiveProgress
    from evoengine.views.accuracy import again_json

    with LiveProgress() as live, reading(db) as ledger:
        found = list(predict_again(ledger, lambda trial: live.stage(f"predicting trial {trial}")))
    again, missed = [one for one in found if isinstance(one, int)], [str(o) for o in found if not isinstance(o, int)]
    for sentence in missed:
        say(sentence)
    if as_json:
        print_json(again_json(again, missed))
    else:
        say(f"{len(again)} candidate{'s' * (len(again) != 1)} predicted again")
    return 1 if missed else 0


def _show(rows: list[Row], remarks: list[str], out: Path | None, as_json: bool) -> None:
    from evoengine.accuracy.page import page
    from evoengine.views.accuracy import accuracy_json

    text = page(rows, remarks)
    if out is not None:
        out.write_text(f"# Predicted and measured times\n\n{text}", "utf-8")
        say(f"wrote {out}")
    if as_json:
        print_json(accuracy_json(rows))
    elif out is None:
        click.echo(text)


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
        display(ranking(dict(enumerate(measured.best, 1))))
    code = INTERRUPTED if measure_run.stopped else result_code(0, hint("best", db=db), live.say)
    live.end(measured.run, "interrupted" if measure_run.stopped else "all candidates done", code)
    return code


def _baseline(baseline: AnyBaseline) -> str:
    if isinstance(baseline, RefusedBaseline):
        return f"baseline {baseline.name} was not timed: {baseline.reason}"
    return f"baseline {baseline.name}: {baseline.tflops:,.4g} TFLOPS, {baseline.median_us:,.1f} µs"


def _agreed(agreed: Agreement) -> Iterator[str]:
    if agreed.spearman is not None:
        yield f"rank correlation of estimates and times, {agreed.candidates} candidates: ρ {agreed.spearman:.2f}"
    if agreed.regret is not None:
        yield f"the fastest of the 10 best estimates is {agreed.regret:.1%} slower than the fastest candidate"
