"""evoengine best and report: the best kernels, their lineage, and the effects of knob changes"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evoengine.cli.options import (
    db_option,
    gpu_option,
    json_option,
    kernel_option,
    kernels_option,
    reading,
    refuse_beside,
    say_which,
    server_option,
    stored_problem_option,
    stored_problems_option,
)
from evoengine.cli.output import display, print_json, say
from evoengine.errors import UsageError, hint
from evoengine.gpu import find_gpu
from evoengine.lineage import path
from evoengine.publish.folder import require_writable
from evoengine.records import Kind
from evoengine.terms import kernel_class

if TYPE_CHECKING:
    from evoengine.tuning.best import Best
    from evoengine.tuning.dispatch_table import Table as DispatchTable


@click.command()
@gpu_option(default=None)
@stored_problems_option
@kernels_option
@click.option("--top", type=click.IntRange(min=1), help="Number of candidates to show.  [default: 10; 1 with --json]")
@click.option(
    "--export", "folder", type=click.Path(path_type=Path), help="Write the best kernel and its loader to this folder."
)
@click.option(
    "--trial",
    type=click.IntRange(min=1),
    help="With --export: write this trial instead of the best one. It must be correct.",
)
@click.option(
    "--sign",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --export: sign the verification record with this private key in PEM (record.dsse.json).",
)
@click.option(
    "--package",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write the best kernel as a package to this new folder; --as gives the kind of package.",
)
@click.option(
    "--as",
    "form",
    type=click.Choice(["wheel", "hf-kernel", "flashinfer", "tvm-ffi", "cpp"]),
    help="With --package: a wheel for pip, a repository for the Hugging Face Hub's kernels library, a dataset for "
    "FlashInfer-Bench, a library for TVM-FFI, or C++ with CMake.",
)
@click.option("--name", help="With --package: its name.  [default: from problem and GPU]")
@click.option("--pareto", is_flag=True, help="Show the Pareto front of the last run's objectives (search --objective).")
@click.option(
    "--fused-moe",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write the best configurations of vLLM's and SGLang's fused MoE and block-FP8 kernels on --gpu, found by "
    "search --triton, as the files that they read (docs/virtual-gpu.md). Each passes the gate first.",
)
@kernel_option
@db_option
@server_option
@json_option
def best(**options: Any) -> None:
    """Show the best kernels found, or export the best one or a trial.

    Only comparable figures are ranked together: one GPU, one kind (measured takes precedence over recorded, and
    recorded over estimated), and one measurement policy (launch mode, L2, clocks), that of the latest figure. Among
    estimates, predictions from machine code take precedence over those by formula. Candidates of another version of
    your kernel's text, definition or reference, and those judged by another version of the gate, are ranked separately.

    --kernel selects the kernel in its folder's current version. Without --problem and --gpu those of the last run are
    used. Before an export the kernel must pass both judges, the executor of machine code and the emulator; otherwise
    nothing is written.

    For several problems, a table shows which of at most --kernels kernels serves each, and how much slower it is than
    the best known one. --export then writes an export for each, and table.json, which evoengine.torch uses; --package
    packs them as a wheel or hf-kernel.
    """
    from evoengine.workloads import stands_for_several

    asked = _Asked(**options)
    if len(asked.problems) > 1 or any(map(stands_for_several, asked.problems)):
        _show_dispatch_table(asked)
    elif asked.kernels is not None:
        raise UsageError("--kernels requires several problems: repeat --problem, or name a set or @FILE")
    elif asked.server:
        _ask_server(asked, asked.server)
    elif asked.fused_moe:
        _write_fused_moe(asked, asked.fused_moe)
    elif asked.sign and (not asked.folder or asked.trial):
        raise UsageError(f"--sign requires --export: {hint('best', export='out/', sign=asked.sign, db=asked.db)}")
    elif asked.package or asked.form or asked.name:
        _write_package(asked)
    elif asked.trial is not None:
        _export_trial(asked, asked.trial)
    else:
        _show_ranking(asked)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The command's options."""

    gpu: str | None
    problems: tuple[str, ...]
    kernels: int | None
    kernel: Path | None
    top: int | None
    folder: Path | None
    """of --export"""
    trial: int | None
    sign: Path | None
    package: Path | None
    form: str | None
    """of --as"""
    name: str | None
    pareto: bool
    fused_moe: Path | None
    db: str | None
    server: str | None
    as_json: bool

    @property
    def problem(self) -> str | None:
        """Return the only problem, as the ledger spells it. Raises UsageError if there is no such problem."""
        from evoengine.workloads import stored_problem

        return stored_problem(self.problems[0]) if self.problems else None


def _show_dispatch_table(asked: _Asked) -> None:
    """Show the dispatch table of several problems, after exporting it if requested."""
    from evoengine.tuning.dispatch_table import find_table
    from evoengine.views.results import kernels_table, problems_table, table_json, verdict
    from evoengine.workloads import expand

    _require_several(asked)
    problems = expand(asked.problems)
    if folder := asked.folder or asked.package:
        found = _export_table(asked, folder, problems)
    else:
        with reading(asked.db) as ledger:
            on, _ = ledger.targets.last(asked.gpu, problems[0])
            found = find_table(ledger, problems, on, asked.kernels)
    if asked.as_json:
        print_json(table_json(found))
        return
    display(problems_table(found))
    display(kernels_table(found))
    say(verdict(found))


def _require_several(asked: _Asked) -> None:
    """Raise UsageError for an option that applies to one problem, or for a wrong combination."""
    alone = ("top", "trial", "pareto", "server", "kernel", "sign")
    for option, value in ({name: getattr(asked, name) for name in alone} | {"fused-moe": asked.fused_moe}).items():
        if value not in (None, False):
            raise UsageError(f"--{option} applies to one problem, and --problem names several; leave it out")
    if bool(asked.package) != bool(asked.form) or (asked.package and asked.folder) or (asked.name and not asked.form):
        raise UsageError("for several problems give either --export, or --package and --as, optionally with --name")


def _export_table(asked: _Asked, folder: Path, problems: Sequence[str]) -> DispatchTable:
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.exporting import export_table

    with LiveProgress() as live:
        found, written = export_table(
            folder,
            problems,
            asked.gpu,
            kernels=asked.kernels,
            form=asked.form,
            name=asked.name,
            db=asked.db,
            echo=live.say,
            on_stage=live.stage,
        )
    say(f"wrote {written[0]}" + (f" and {len(written) - 1} more files" if written[1:] else ""))
    return found


def _ask_server(asked: _Asked, server: str) -> None:
    from evoengine.cli import remote

    refuse_beside(
        server,
        kernel=asked.kernel,
        trial=asked.trial,
        sign=asked.sign,
        package=asked.package,
        pareto=asked.pareto,
        fused_moe=asked.fused_moe,
        db=asked.db,
    )
    remote.best(server, asked.gpu, asked.problem, asked.top, asked.folder, asked.as_json)


def _show_ranking(asked: _Asked) -> None:
    """Show the ranking of one problem, after exporting its best kernel if requested."""
    from evoengine.tuning.best import best as find
    from evoengine.views.results import ranking_json
    from evoengine.views.trials import one_trial_json

    if asked.folder:
        require_writable(asked.folder)
    if asked.sign:
        from evoengine.publish.record import require_key

        require_key(asked.sign)
    found = find(asked.problem, asked.gpu, kernel=asked.kernel, top=asked.top or 10, pareto=asked.pareto, db=asked.db)
    say_which(asked.db)
    if asked.folder:
        _export_best(asked, asked.folder, found)
    if not asked.as_json:
        _print_table(found)
    elif asked.top or asked.pareto:
        print_json(ranking_json(found))
    else:
        print_json(one_trial_json(found.candidates[0]))


def _export_best(asked: _Asked, folder: Path, found: Best) -> None:
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.exporting import export

    with LiveProgress() as live:
        written = export(
            folder,
            found.problem,
            found.gpu,
            kernel=asked.kernel,
            pareto=asked.pareto,
            sign=asked.sign,
            db=asked.db,
            echo=live.say,
            on_stage=live.stage,
        )
    _say_written(written)


def _write_package(asked: _Asked) -> None:
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.exporting import package

    beside = asked.folder or asked.trial or asked.top or asked.pareto or asked.as_json
    if not asked.package or not asked.form or beside:
        example = hint("best", package="out/", **{"as": asked.form or "wheel"}, db=asked.db)
        raise UsageError(f"--package and --as take only --name, --problem, --gpu and --kernel, as in {example}")
    with LiveProgress() as live:
        written = package(
            asked.package,
            asked.form,
            asked.problem,
            asked.gpu,
            name=asked.name,
            kernel=asked.kernel,
            db=asked.db,
            echo=live.say,
            on_stage=live.stage,
        )
    say_which(asked.db)
    _say_written(written)


def _say_written(files: Iterable[Path]) -> None:
    for file in files:
        say(f"wrote {file}")


def _print_table(found: Best) -> None:
    from evoengine.views.candidate_tables import ranking
    from evoengine.workloads.triton_kernel import config_code, is_triton

    figure = found.candidates[0].ranked_by
    policy = f", {figure.policy}" if figure.policy else ""
    say(f"{found.problem} on {found.gpu}: {figure.kind} figures, {figure.device}{policy}")
    if figure.kind is Kind.ESTIMATED and not figure.by_formula:
        from evoengine.sass.predict import error_of

        for name in sorted({name for c in found.candidates if (name := kernel_class(c.ranked_by.terms))}):
            say(f"model, {error_of(name)}")
    display(ranking(dict(enumerate(found.candidates, 1))))
    first = found.candidates[0]
    if first.source is not None and is_triton(first.source.text):
        display(f"trial {first.trial}: {config_code(first.config)}")
    for apart in found.apart:
        say(str(apart))


def _export_trial(asked: _Asked, trial: int) -> None:
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.exporting import export_trial

    db = asked.db
    if asked.folder is None or asked.gpu or asked.problems or asked.top or asked.pareto or asked.as_json:
        raise UsageError(
            f"--trial {trial} takes only --export, as in {hint('best', trial=trial, export='out/', db=db)}; "
            f"{hint('show', trial, db=db)} shows the trial"
        )
    if asked.kernel:
        from evoengine.tuning.setup import register_kernel

        register_kernel(asked.kernel)  # the run of an imported trial holds no definition
    with LiveProgress() as live:
        written = export_trial(asked.folder, trial, db=db, echo=live.say, on_stage=live.stage)
    say_which(db)
    _say_written(written)


def _write_fused_moe(asked: _Asked, folder: Path) -> None:
    from evoengine.tuning.fused_moe import write_fused_moe

    db = asked.db
    beside = asked.problems or asked.top or asked.folder or asked.trial or asked.pareto or asked.as_json
    if asked.gpu is None or beside:
        example = hint("best", gpu="h100", **{"fused-moe": "configs/"}, db=db)
        raise UsageError(f"--fused-moe takes only --gpu, as in {example}")
    written, left_out = write_fused_moe(folder, find_gpu(asked.gpu), db)
    say_which(db)
    for sentence in left_out:
        say(f"left out: {sentence}")
    _say_written(written)


@click.command()
@gpu_option(default=None)
@stored_problem_option
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write all results with charts to a self-contained HTML file.",
)
@db_option
@json_option
def report(gpu: str | None, problem: str | None, page: Path | None, db: str | None, as_json: bool) -> None:
    """Show which knob changes improved the time, and the lineage of the best kernel; with --html, write charts.

    Without --problem and --gpu those of the last run are used.
    """
    if page is None:
        _print_report(gpu, problem, db, as_json)
    elif as_json:
        raise UsageError("--html and --json contradict each other; leave one out")
    else:
        _write_report(page, gpu, problem, db)


def _write_report(page: Path, gpu: str | None, problem: str | None, db: str | None) -> None:
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.report import write_report

    with LiveProgress() as live:
        overview = write_report(page, problem, gpu, db=db, on_stage=live.stage)
    say_which(db)
    say(f"wrote {overview.problem} on {overview.gpu}, {overview.total:,} trials, to {page}")


def _print_report(gpu: str | None, problem: str | None, db: str | None, as_json: bool) -> None:
    from evoengine.publish.report.overview import read_effects
    from evoengine.tuning.best import find_best
    from evoengine.views.candidate_tables import effects_table, lineage
    from evoengine.views.results import report_json

    with reading(db) as ledger:
        found = find_best(ledger, problem, gpu, top=1)
        first = found.candidates[0]
        steps = path(first.trial, ledger.ancestors(first.trial))
        effects = read_effects(ledger, found.problem, found.gpu)
        trials = ledger.count(found.problem, found.gpu)
    if as_json:
        print_json(report_json(first, steps, effects, found.apart))
        return
    say(f"{found.problem} on {found.gpu}: {trials} trials, {first.ranked_by.kind} figures")
    for other in found.apart:
        say(str(other))
    display(lineage(steps))
    if effects.effects:
        display()
        say(f"effects of knob changes, {effects}")
        display(effects_table(effects.effects))
    else:
        say("no trial was derived from another: start points have no parents, and most samplers name none")
