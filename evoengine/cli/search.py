"""evoengine search"""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import asdict
from pathlib import Path

import click

from evoengine.cli.options import db_option, gpu_option, json_option, problem_option, space_option, templates_option
from evoengine.gpu import Gpu, find_gpu
from evoengine.problem import Problem
from evoengine.search import samplers

INTERRUPTED = 130
SHOWN = 10
"""ranks in the table at the end, besides the best of each family that is not among them"""


@click.command()
@gpu_option(default="h100")
@problem_option()
@click.option("--trials", type=click.IntRange(min=1), default=60, show_default=True, help="Candidates to try.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Start no candidate after this long.")
@click.option("--sampler", type=click.Choice(samplers.NAMES), default=samplers.DEFAULT, show_default=True)
@click.option(
    "--device", type=click.Choice(["auto", "emulator", "cuda"]), default="auto", show_default=True,
    help="What judges the candidates: a GPU that times them, or the CPU emulator, which ranks by estimate.",
)  # fmt: skip
@space_option
@templates_option
@db_option
@click.option("--jobs", type=click.IntRange(min=1), help="Worker processes.  [default: one per core]")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Repeats a search.  [default: drawn, and recorded]")
@json_option
def search(
    gpu: Gpu, problem: Problem, trials: int, minutes: float | None, sampler: str, device: str, space: Path | None,
    templates: Path | None, db: str | None, jobs: int | None, seed: int | None, as_json: bool,
) -> int:  # fmt: skip
    """Search for the fastest correct kernel of a problem on a GPU.

    With a GPU of that kind here, candidates are gated and timed on it. Without one they are compiled for it, gated in
    the CPU emulator and ranked by a static estimate.
    """
    from evoengine.cli.display import LiveProgress, say, status, time_spent
    from evoengine.cli.setup import (
        choose_device, default_jobs, ledger_device, prepare_space, require_compilers, stop_on_signal, turn,
    )  # fmt: skip
    from evoengine.devices.driver import real_gpu
    from evoengine.ledger.store import open_ledger
    from evoengine.ledger.study import Projection, optuna_storage
    from evoengine.records import Kind
    from evoengine.search.coordinator import Coordinator, Setting
    from evoengine.search.judges import make_judge

    timing = choose_device(device, gpu)
    if timing:
        gpu = real_gpu(timing, gpu)
    bound, folder = prepare_space(space, templates, problem, gpu)
    require_compilers(emulated=timing is None)
    seed = secrets.randbelow(2**31) if seed is None else seed
    setting = Setting(
        problem, gpu, bound, folder, sampler, seed, trials, minutes * 60 if minutes else None, jobs or default_jobs(),
        timed=timing is not None,
    )  # fmt: skip
    with turn(timing, say), open_ledger(db, create=True) as ledger, LiveProgress() as live:
        run = ledger.start_run(
            gpu=gpu.key, problem=str(problem), device=ledger_device(timing), space=bound, sampler=sampler,
            seed=seed, command=" ".join(sys.argv),
        )  # fmt: skip
        _announce(setting, timing, ledger.place, run)
        kind = Kind.MEASURED if timing else Kind.ESTIMATED
        domains = {knob.name: knob.values for knob in bound.knobs}
        study = Projection(optuna_storage(ledger.url), ledger, run, kind, domains)
        judge = make_judge(bound.kernel, problem, gpu, timing, seed)
        coordinator = Coordinator(setting, ledger, run, judge, live.update, study.add)
        stop_on_signal(coordinator.stop)
        progress = coordinator.search()
        ledger.finish_run(run, progress.ended)
        found = ledger.best(str(problem), gpu.key, top=trials, run=run)
    known = f"{coordinator.invalid_proposals} invalid and {coordinator.repeated_proposals} repeated proposals"
    say(f"{' · '.join(status(progress)[:-1])} · {progress.elapsed:.0f} s · {progress.compiled} compiled · {known}")
    say(f"{progress.ended}", style="dim")
    if progress.usage:
        say(time_spent(progress.usage))
    for line in progress.notes:
        say(line)
    for trial, why in study.missed.items():
        say(f"trial {trial} is in the ledger, but not in optuna-dashboard's study: {why}", style="yellow")
    if as_json:
        summary = {"run": run, "ended": progress.ended, "seconds": round(progress.elapsed, 1), "compiled": progress.compiled}
        if progress.usage:
            summary["gpu_seconds"] = {name: round(value, 1) for name, value in asdict(progress.usage).items()}
        summary["outcomes"] = {str(k): v for k, v in progress.outcomes.items()}
        click.echo(json.dumps(summary | {"best": [c.to_json() for c in found[:SHOWN]]}, indent=2))
    else:
        _conclude(found, gpu, timing is not None)
    if progress.ended == "interrupted":
        return INTERRUPTED
    return 0 if found else 1


def _announce(setting, timing, place: str, run: int) -> None:
    from evoengine import __version__
    from evoengine.cli.display import say
    from evoengine.stages.render import inert_knobs
    from evoengine.workloads import find_workload

    s, space = setting, setting.space
    work = find_workload(space.kernel).flops(s.problem) / 1e9
    say(f"evoengine {__version__} · {s.gpu.key} ({s.gpu.arch}) · {s.problem} · {work:,.4g} GFLOP")
    if timing:
        named = find_gpu(s.gpu.key)
        other = f", whose limits hold; --gpu named {named.name}, of the same {named.arch}" if timing.name != named.name else ""
        say(f"gated and timed on {timing.name}{other}")
    else:
        say(f"no {s.gpu.key} to time on: compiled for {s.gpu.arch}, gated in the CPU emulator, ranked by static estimate")
    families = [f for f in space.families if f not in space.empty_families]
    say(
        f"space {space.name}: {len(families)} families, {len(space):,} valid of {space.size:,} · sampler {s.sampler} · "
        f"seed {s.seed} · {s.jobs} workers · ledger {place}, run {run}"
    )
    for family, why in space.empty_families.items():
        say(f"left out: {family}, {why}")
    for knob in inert_knobs(space, space.starts, s.problem, s.templates):
        say(f"inert: {knob} changes no kernel around the start points; a template should read it, or the space drop it")


def _conclude(found, gpu: Gpu, timed: bool) -> None:
    from evoengine.cli.display import ranking, say, stdout

    if not found:
        say("no correct candidate was found: evoengine history shows what became of each")
        return
    ranks = dict(enumerate(found, 1))
    firsts = {c.config["family"]: rank for rank, c in reversed(ranks.items())}
    shown = sorted({*list(ranks)[:SHOWN], *firsts.values()})
    stdout.print(ranking({rank: ranks[rank] for rank in shown}))
    later = "" if timed else f"   ·   figures marked est. are static estimates, not measurements: none was timed on a {gpu.key}"
    say(f"next: evoengine best --export out/   ·   evoengine dashboard{later}")
