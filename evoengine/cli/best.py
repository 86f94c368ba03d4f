"""evoengine best and report: the best kernels, and what made them fast"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
from evoengine.errors import NothingFound, UsageError
from evoengine.hints import hint

if TYPE_CHECKING:
    from evoengine.tuning.best import Best


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
    "packaged",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write the best kernel as a package to this new folder; --as says which.",
)
@click.option(
    "--as",
    "form",
    type=click.Choice(["wheel", "hf-kernel", "cpp"]),
    help="With --package: a wheel for pip, a repository for the Hugging Face Hub's kernels library, or C++ with CMake.",
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
def best(
    gpu: str | None,
    problems: tuple[str, ...],
    kernels: int | None,
    kernel: Path | None,
    top: int | None,
    folder: Path | None,
    trial: int | None,
    sign: Path | None,
    packaged: Path | None,
    form: str | None,
    name: str | None,
    pareto: bool,
    fused_moe: Path | None,
    db: str | None,
    server: str | None,
    as_json: bool,
) -> None:
    """Show the best kernels found, or export the best one or a trial.

    Only comparable figures are ranked together: one GPU, one kind (measured takes precedence over recorded, and
    recorded over estimated), and one measurement policy (launch mode, L2, clocks), that of the latest figure. Among
    estimates, predictions from machine code take precedence over those by formula. Candidates of another version of
    your kernel's text, definition or reference, and those judged by another version of the gate, are ranked separately.

    --kernel selects the kernel as its folder is now. Without --problem and --gpu the last run decides. Before an export
    the kernel must pass both judges, the executor of machine code and the emulator; otherwise nothing is written.

    Of several problems the table shows which of at most --kernels kernels serves each, and how much slower that is than
    the best known one. --export then writes an export for each, and table.json, which evoengine.torch uses.
    """
    from evoengine.workloads.problem_sets import stands_for_several

    if len(problems) > 1 or any(map(stands_for_several, problems)):
        alone = {"top": top, "trial": trial, "package": packaged, "pareto": pareto, "server": server}
        _require_several(**alone, **{"fused-moe": fused_moe, "kernel": kernel, "sign": sign, "as": form})
        if folder:
            _export_table(folder, problems, gpu, kernels, db)
        _print_dispatch_table(problems, gpu, kernels, db, as_json)
        return
    if kernels is not None:
        raise UsageError("--kernels is for several problems: repeat --problem, or name a set or @FILE")
    problem = _stored(problems[0]) if problems else None
    if server:
        from evoengine.cli import remote

        refuse_beside(
            server, kernel=kernel, trial=trial, sign=sign, package=packaged, pareto=pareto, fused_moe=fused_moe, db=db
        )
        remote.best(server, gpu, problem, top, folder, as_json)
        return
    if fused_moe is not None:
        if gpu is None or problem or top or folder or trial or pareto or as_json:
            example = hint("best", gpu="h100", **{"fused-moe": "configs/"}, db=db)
            raise UsageError(f"--fused-moe goes with --gpu alone, as in {example}")
        _write_fused_moe(fused_moe, gpu, db)
        return
    if sign and (not folder or trial):
        raise UsageError(f"--sign goes with --export, as in {hint('best', export='out/', sign=sign, db=db)}")
    if packaged or form or name:
        if not packaged or not form or folder or trial or top or pareto or as_json:
            example = hint("best", package="out/", **{"as": form or "wheel"}, db=db)
            raise UsageError(f"--package, --as and --name go with --problem, --gpu and --kernel alone, as in {example}")
        _write_package(packaged, form, problem, gpu, name, kernel, db)
        return
    if trial is not None:
        if folder is None or gpu or problem or top or pareto or as_json:
            raise UsageError(
                f"--trial {trial} goes with --export alone, as in {hint('best', trial=trial, export='out/', db=db)}; "
                f"{hint('show', trial, db=db)} shows it"
            )
        if kernel:
            from evoengine.tuning.setup import register_kernel

            register_kernel(kernel)  # of a trial that was imported, whose run kept no definition
        _export_trial(trial, folder, db)
        return
    _best_of_one(problem, gpu, kernel, top, folder, sign, pareto, db, as_json)


def _require_several(**alone: object) -> None:
    """Raise UsageError if an option that is about one problem is given."""
    for option, value in alone.items():
        if value not in (None, False):
            raise UsageError(f"--{option} is about one problem, and --problem names several; leave it out")


def _best_of_one(
    problem: str | None,
    gpu: str | None,
    kernel: Path | None,
    top: int | None,
    folder: Path | None,
    sign: Path | None,
    pareto: bool,
    db: str | None,
    as_json: bool,
) -> None:
    """Show the ranking of one problem, exporting its best to `folder` where that is given."""
    from evoengine.tuning.best import best as find

    if folder:
        from evoengine.publish.folder import require_writable

        require_writable(folder)
    if sign:
        from evoengine.publish.record import require_key

        require_key(sign)
    found = find(problem, gpu, kernel=kernel, top=top or 10, pareto=pareto, db=db)
    say_which(db)
    if folder:
        _export_best(found, folder, pareto, kernel, sign, db)
    if as_json:
        _print_json(found, as_list=bool(top or pareto))
    else:
        _print_table(found)


def _stored(problem: str) -> str:
    from evoengine.workloads import stored_problem

    return stored_problem(problem)


def _export_table(
    folder: Path, problems: tuple[str, ...], gpu: str | None, kernels: int | None, db: str | None
) -> None:
    from evoengine.cli.output import say
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.exporting import export_table
    from evoengine.workloads.problem_sets import expand

    with LiveProgress() as live:
        written = export_table(
            folder, expand(problems), gpu, kernels=kernels, db=db, echo=live.say, on_stage=live.stage
        )
    say(f"wrote {written[0]} and {len(written) - 1} files of its exports")


def _print_dispatch_table(
    problems: tuple[str, ...], gpu: str | None, kernels: int | None, db: str | None, as_json: bool
) -> None:
    from evoengine.cli.output import print_json, say, stdout
    from evoengine.tuning.dispatch_table import find_table
    from evoengine.views.dispatch_table import kernels_table, problems_table, table_json, verdict
    from evoengine.workloads.problem_sets import expand

    asked = expand(problems)
    with reading(db) as ledger:
        on, _ = ledger.targets.last(gpu, asked[0])
        found = find_table(ledger, asked, on, kernels)
    if as_json:
        print_json(table_json(found))
        return
    stdout.print(problems_table(found))
    stdout.print(kernels_table(found))
    say(verdict(found))


def _export_best(
    found: Best, folder: Path, pareto: bool, kernel: Path | None, sign: Path | None, db: str | None
) -> None:
    from evoengine.cli.output import say
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.exporting import export

    with LiveProgress() as live:
        written = export(
            folder,
            found.problem,
            found.gpu,
            kernel=kernel,
            pareto=pareto,
            sign=sign,
            db=db,
            echo=live.say,
            on_stage=live.stage,
        )
    for path in written:
        say(f"wrote {path}")


def _write_package(
    folder: Path, form: str, problem: str | None, gpu: str | None, name: str | None, kernel: Path | None, db: str | None
) -> None:
    from evoengine.cli.output import say
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.exporting import package

    with LiveProgress() as live:
        written = package(
            folder, form, problem, gpu, name=name, kernel=kernel, db=db, echo=live.say, on_stage=live.stage
        )
    say_which(db)
    for path in written:
        say(f"wrote {path}")


def _print_json(found: Best, as_list: bool) -> None:
    from evoengine.cli.output import print_json
    from evoengine.views.results import ranking_json
    from evoengine.views.trials import one_trial_json

    print_json(ranking_json(found) if as_list else one_trial_json(found.candidates[0]))


def _print_table(found: Best) -> None:
    from evoengine.cli.output import say, stdout
    from evoengine.records import Kind
    from evoengine.views.candidate_tables import ranking
    from evoengine.workloads.triton_kernel import config_code, is_triton

    figure = found.candidates[0].ranked_by
    policy = f", {figure.policy}" if figure.policy else ""
    say(f"{found.problem} on {found.gpu}: {figure.kind} figures, {figure.device}{policy}")
    if figure.kind is Kind.ESTIMATED and not figure.by_formula:
        from evoengine.sass.validation import error_of
        from evoengine.terms import kernel_class

        for name in sorted({name for c in found.candidates if (name := kernel_class(c.ranked_by.terms))}):
            say(f"model, {error_of(name)}")
    stdout.print(ranking(dict(enumerate(found.candidates, 1))))
    first = found.candidates[0]
    if first.source is not None and is_triton(first.source.text):
        stdout.print(f"trial {first.trial}: {config_code(first.config)}")
    for apart in found.apart:
        say(str(apart))


def _export_trial(trial: int, folder: Path, db: str | None) -> None:
    from evoengine.cli.output import say
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.exporting import export_trial

    with LiveProgress() as live:
        written = export_trial(folder, trial, db=db, echo=live.say, on_stage=live.stage)
    say_which(db)
    for path in written:
        say(f"wrote {path}")


def _write_fused_moe(folder: Path, gpu: str, db: str | None) -> None:
    from evoengine.cli.output import say
    from evoengine.gpu import find_gpu
    from evoengine.tuning.fused_moe import write_fused_moe

    written, left_out = write_fused_moe(folder, find_gpu(gpu), db)
    say_which(db)
    for sentence in left_out:
        say(f"left out: {sentence}")
    for path in written:
        say(f"wrote {path}")


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
    from evoengine.cli.output import say
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.report import write_report

    with LiveProgress() as live:
        overview = write_report(page, problem, gpu, db=db, on_stage=live.stage)
    say_which(db)
    say(f"wrote {overview.problem} on {overview.gpu}, {overview.total:,} trials, to {page}")


def _print_report(gpu: str | None, problem: str | None, db: str | None, as_json: bool) -> None:
    from evoengine.cli.output import print_json, say, stdout
    from evoengine.lineage import path
    from evoengine.publish.report.overview import read_effects
    from evoengine.views.candidate_tables import effects_table, lineage
    from evoengine.views.results import report_json

    with reading(db) as ledger:
        gpu_key, problem_text = ledger.targets.last(gpu, problem)
        best = ledger.best(problem_text, gpu_key, top=1)
        if not best:
            raise NothingFound(
                f"the ledger holds no correct candidate for {problem_text} on {gpu_key}: "
                f"{hint('history', db=db, problem=problem_text, gpu=gpu_key)} shows how each ended"
            )
        steps = path(best[0].trial, ledger.ancestors(best[0].trial))
        found = read_effects(ledger, problem_text, gpu_key)
        trials = ledger.count(problem_text, gpu_key)
        apart = ledger.ranked_apart(best[0])
    if as_json:
        print_json(report_json(best[0], steps, found, apart))
        return
    say(f"{problem_text} on {gpu_key}: {trials} trials, {best[0].ranked_by.kind} figures")
    for other in apart:
        say(str(other))
    stdout.print(lineage(steps))
    if found.effects:
        stdout.print()
        say(f"changes of knobs, {found}")
        stdout.print(effects_table(found.effects))
    else:
        say("no trial was made from another yet: start points have no parents, and most samplers name none")
