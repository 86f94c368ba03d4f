"""evoengine search"""

from __future__ import annotations

import math
import secrets
import sys
from functools import partial
from pathlib import Path

import click

from evoengine.cli.options import (
    RECORDED, db_option, gpu_option, json_option, problem_option, space_option, templates_option,
)  # fmt: skip
from evoengine.errors import UsageError
from evoengine.gpu import Gpu, find_gpu
from evoengine.problem import Problem
from evoengine.search import samplers


class DeviceType(click.ParamType):
    name = "device"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in ("auto", "emulator", "cuda") and not value.startswith(RECORDED):
            self.fail(f"{value!r} is none of auto, emulator, cuda and {RECORDED}FILE", param, ctx)
        return value


@click.command()
@gpu_option(default="h100")
@problem_option()
@click.option("--family", "families", multiple=True, metavar="NAME", help="Only this one; may be given several times.")
@click.option("--trials", type=click.IntRange(min=1), default=60, show_default=True, help="Kernels to try.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Start no candidate after this long.")
@click.option("--sampler", type=click.Choice(samplers.NAMES), default=samplers.DEFAULT, show_default=True)
@click.option(
    "--device", type=DeviceType(), default="auto", show_default=True,
    help="What judges the candidates: cuda times them, emulator gates on the CPU and ranks by estimate, "
    "recorded:FILE replays a Kernel Tuner cache or T4 file (--gpu, --problem, --family, --space, --templates and --jobs "
    "then say nothing).",
)  # fmt: skip
@click.option(
    "--objective", "aim", default="tflops", show_default=True, metavar="NAMES",
    help="tflops, or a trade against registers or shared_bytes: tflops,registers.",
)  # fmt: skip
@space_option
@templates_option
@db_option
@click.option(
    "--jobs", type=click.IntRange(min=1),
    help="Worker processes.  [default: one per core, two fewer where a GPU is timed on]",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Repeats a search.  [default: drawn, and recorded]")
@json_option
def search(
    gpu: Gpu, problem: Problem, families: tuple[str, ...], trials: int, minutes: float | None, sampler: str,
    device: str, aim: str, space: Path | None, templates: Path | None, db: str | None, jobs: int | None,
    seed: int | None, as_json: bool,
) -> int:  # fmt: skip
    """Search for the fastest correct kernel of a problem on a GPU.

    With a GPU of that kind here, candidates are gated and timed on it, and times predicted from machine code lead the
    choice as long as what is measured bears them out. Without one they are compiled for it, gated in the CPU emulator
    and ranked by the predicted time, and the best one's machine code is executed on the CPU besides.
    """
    from evoengine.cli.conclusion import conclude
    from evoengine.cli.display import LiveProgress, say
    from evoengine.cli.setup import (
        choose_device, default_jobs, ledger_device, prepare_model, prepare_space, require_compilers, stop_on_signal,
        turn,
    )  # fmt: skip
    from evoengine.devices.driver import real_gpu
    from evoengine.ledger.store import open_ledger
    from evoengine.ledger.study import Projection, optuna_storage
    from evoengine.records import Kind
    from evoengine.cli.replay import replay
    from evoengine.objectives import parse_objectives
    from evoengine.search.binaries import check_winner
    from evoengine.search.coordinator import Coordinator
    from evoengine.search.judges import make_judge
    from evoengine.search.setting import Setting

    if minutes is not None and math.isnan(minutes):
        raise UsageError("--minutes is nan; it must be a number above 0")
    objectives = parse_objectives(aim)
    if len(objectives) > 1:
        _require_several(aim, sampler, device)
    seed = secrets.randbelow(2**31) if seed is None else seed
    if device.startswith(RECORDED):
        return replay(Path(device.removeprefix(RECORDED)), sampler, seed, trials, minutes, db, as_json)
    timing = choose_device(device, gpu)
    if timing:
        gpu = real_gpu(timing, gpu)
    bound, folder = prepare_space(space, templates, problem, gpu, families)
    require_compilers(emulated=timing is None)
    setting = Setting(
        problem, gpu, bound, folder, sampler, seed, trials, minutes * 60 if minutes else None,
        jobs=jobs or default_jobs(timing is not None), timed=timing is not None, objectives=objectives,
    )  # fmt: skip
    with turn(timing, say), open_ledger(db, create=True) as ledger, LiveProgress() as live:
        run = ledger.start_run(
            gpu=gpu.key, problem=str(problem), device=ledger_device(timing), space=bound, sampler=sampler,
            seed=seed, command=" ".join(sys.argv), objectives=",".join(o.name for o in objectives),
        )  # fmt: skip
        _announce(setting, timing, prepare_model(gpu, say), ledger.place, run)
        kind = Kind.MEASURED if timing else Kind.ESTIMATED
        domains = {knob.name: knob.values for knob in bound.knobs}
        study = Projection(optuna_storage(ledger.url), ledger, run, kind, domains)
        judge = make_judge(bound.kernel, problem, gpu, timing, seed, partial(ledger.long_run_us, run))
        coordinator = Coordinator(setting, ledger, run, judge, live.update, study.add)
        stop_on_signal(coordinator.stop)
        progress = coordinator.search()
        if timing is None and progress.ended != "interrupted":
            progress.notes += check_winner(ledger, run, bound, problem, gpu.key, seed)
        ledger.finish_run(run, progress.ended)
        study.summarise()
        found = ledger.best(str(problem), gpu.key, top=trials, run=run)
    pareto = ["best --pareto"] if len(objectives) > 1 else []
    following = [*pareto, "best --export out/", "dashboard"]
    return conclude(coordinator, progress, study, run, found, as_json, db, following)


def _require_several(aim: str, sampler: str, device: str) -> None:
    """Raises UsageError where the sampler or the device knows one objective only."""
    if sampler in samplers.SINGLE:
        able = ", ".join(name for name in samplers.NAMES if name not in samplers.SINGLE)
        raise UsageError(f"the sampler {sampler} aims at one objective only; for several use one of {able}")
    if device.startswith(RECORDED):
        raise UsageError(f"--objective {aim}: a recorded file is searched by its times alone; leave --objective out")


def _announce(setting, timing, unpredictable: str | None, place: str, run: int) -> None:
    from evoengine import __version__
    from evoengine.cli.display import say
    from evoengine.stages.render import inert_knobs
    from evoengine.workloads import find_workload

    s, space = setting, setting.space
    work = find_workload(space.kernel).flops(s.problem) / 1e9
    say(f"evoengine {__version__} · {s.gpu.key} ({s.gpu.arch}) · {s.problem} · {work:,.4g} GFLOP")
    if timing:
        named = find_gpu(s.gpu.key)
        other = f", whose limits hold; --gpu named {named.name}, of the same {named.arch}"
        say(f"gated and timed on {timing.name}{other if timing.name != named.name else ''}")
    else:
        how = "by the formula of each family" if unpredictable else "by times predicted from the machine code"
        say(f"no {s.gpu.key} to time on: compiled for {s.gpu.arch}, gated in the CPU emulator, ranked {how}")
    if unpredictable:
        say(f"no predictions: {unpredictable}")
    families = [f for f in space.families if f not in space.empty_families]
    plural = "family" if len(families) == 1 else "families"
    say(
        f"space {space.name}: {len(families)} {plural}, {len(space):,} valid of {space.size:,} · sampler {s.sampler} · "
        f"seed {s.seed} · {s.jobs} {'worker' if s.jobs == 1 else 'workers'} · ledger {place}, run {run}"
    )
    for family, why in space.empty_families.items():
        say(f"left out: family {family}: {why}")
    for knob in inert_knobs(space, space.starts, s.problem, s.templates):
        say(f"inert: {knob} changes no kernel around the start points; a template should read it, or the space drop it")
