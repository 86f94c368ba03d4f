"""evoengine search and propose: judge and time configurations of a space, or texts that a program proposes"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evoengine.cli.options import (
    RECORDED,
    OneOf,
    TextType,
    call_option,
    cluster_option,
    db_option,
    gpu_file_option,
    gpu_option,
    gpus_option,
    json_option,
    kernel_option,
    kernels_option,
    log_json_option,
    problem_option,
    problems_option,
    reference_option,
    refuse_beside,
    server_option,
    space_option,
    templates_option,
    triton_option,
)
from evoengine.cli.output import display, print_json, say
from evoengine.cli.process import INTERRUPTED, stop_on_signal
from evoengine.errors import EvoengineError, UsageError, did_you_mean, hint
from evoengine.gpu import AUTO
from evoengine.search import samplers

if TYPE_CHECKING:
    from evoengine.cli.progress import EventLog, LiveProgress
    from evoengine.search.first_build import FirstBuild
    from evoengine.tuning.search import SearchOptions, SearchResult

    Live = EventLog | LiveProgress


class DeviceType(TextType):
    name = "device"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in ("auto", "emulator", "cuda") and not value.startswith(RECORDED):
            near = did_you_mean(value, ("auto", "emulator", "cuda", RECORDED))
            self.fail(f"{value!r} is not one of auto, emulator, cuda and {RECORDED}FILE{near}", param, ctx)
        return value


@click.command()
@gpus_option
@gpu_file_option
@problems_option
@kernels_option
@kernel_option
@triton_option
@call_option
@reference_option
@click.option("--family", "families", multiple=True, metavar="NAME", help="Search only this family. Can be repeated.")
@click.option("--trials", type=click.IntRange(min=1), help="Number of trials.  [default: 60]")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Time limit. It includes the final check of the winner.",
)
@click.option(
    "--sampler",
    type=OneOf(samplers.NAMES),
    help="Sampler that proposes configurations: evolution is evoengine's own, the others are Optuna's.  "
    f"[default: {samplers.DEFAULT}]",
)
@click.option(
    "--device",
    type=DeviceType(),
    default="auto",
    show_default=True,
    help="Where candidates are evaluated. cuda: gated and timed on the GPU. emulator: gated on the CPU and ranked by "
    "predicted time. recorded:FILE: replayed from a Kernel Tuner cache or T4 file; --gpu, --gpu-file, --problem, "
    "--kernel, --family, --space, --templates and --jobs are then ignored.",
)
@click.option(
    "--objective",
    metavar="NAMES",
    help="Objectives, separated by commas: tflops, registers, shared_bytes. With more than one the search finds a "
    "Pareto front.  [default: tflops]",
)
@space_option
@click.option(
    "--write-space",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the search space to FILE, to edit and pass to --space, without searching.",
)
@templates_option
@db_option
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Number of worker processes.  [default: one per core; two fewer when a GPU is timed]",
)
@cluster_option(default=None)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="With --cluster: how long to wait for a node with the requested GPU.  [default: no limit]",
)
@click.option(
    "--detach",
    is_flag=True,
    help="With --cluster: submit the search and return. It uses the ledger that EVOENGINE_DB names on the cluster.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    help="Random seed. The same seed repeats a search.  [default: drawn and recorded]",
)
@click.option(
    "--resume",
    type=click.IntRange(min=0),
    is_flag=False,
    flag_value=0,
    metavar="[RUN]",
    help="Continue this run, or the last one. Options that are not given keep the values they had in it.",
)
@click.option(
    "--clock",
    metavar="CLOCK",
    help="Clock that times are predicted at. boost: the maximum clock, which short timings reach. sustained: the clock "
    "that the power limit allows under continuous load. locked:MHZ: a fixed clock.  [default: boost]",
)
@click.option("--remeasure", is_flag=True, help="Evaluate candidates again instead of reusing results from the ledger.")
@server_option
@click.option(
    "--job", type=click.IntRange(min=1), help="With --server: follow this job instead of submitting a new one."
)
@log_json_option
@json_option
def search(
    as_json: bool,
    log_json: bool,
    detach: bool,
    gpus: tuple[str, ...],
    problems: tuple[str, ...],
    kernels: int | None,
    server: str | None,
    job: int | None,
    write_space: Path | None,
    **options: Any,
) -> int:
    """Search for the fastest correct kernel of a problem on a GPU.

    If this machine has the GPU, candidates are gated and timed on it. Times predicted from the machine code guide the
    sampler for as long as they agree with the measurements. Without the GPU, candidates are compiled for it, gated on
    the CPU by the executor of machine code and the emulator of CUDA text, and ranked by predicted time.

    A search that was killed or interrupted continues when the same command is run again. Results that the ledger holds
    for the same kernel in the same environment are reused.

    Several problems are searched one after the other, each with --trials; then the best kernels of each are evaluated
    on the others. The result is the set of at most --kernels kernels that is closest to the best known ones in the
    geometric mean, with the problem that it serves worst.
    """
    set_of = _several(problems, kernels, gpus, server, job, write_space, detach, options)
    options["problem"] = problems[0] if problems else None
    if server or job:
        resume = options.pop("resume") is not None
        here_alone = {"log_json": log_json, "write_space": write_space is not None, "detach": detach, "resume": resume}
        return _elsewhere(server, job, gpus, here_alone, as_json, options)
    from evoengine.cli.progress import EventLog, LiveProgress, print_summary

    here = not (options["cluster"] or write_space or options["device"].startswith(RECORDED))
    with EventLog() if log_json else LiveProgress() as live, _begun_build(here) as begun:
        from evoengine.tuning.search import SearchOptions
        from evoengine.tuning.tune import prepare, prepare_all

        asked = [SearchOptions(gpu=gpu, **options) for gpu in dict.fromkeys(gpus or (AUTO,))]
        if set_of:
            return _search_set(asked[0], set_of, kernels, live, as_json)
        if write_space:
            from evoengine.tuning.search import write_space as write

            live.say(f"wrote a space of {write(asked[0], write_space):,} configurations to {write_space}")
            return 0
        if detach:
            return _detach(asked, live)
        if len(asked) > 1:
            several = prepare_all(asked, live.say, live.stage)
            stop_on_signal(several.stop)
            return _conclude_all(asked, several.run_all(live.update, live.trial), live, as_json)
        prepared = prepare(asked[0], live.say, live.stage, begun)
        stop_on_signal(prepared.stop)
        result = prepared.run(live.update, live.trial)
    code = print_summary(result, as_json, asked[0].db, _following(asked[0], result), live.say)
    live.end(result.run, result.progress.ended, code)
    return code


def _several(
    problems: tuple[str, ...],
    kernels: int | None,
    gpus: tuple[str, ...],
    server: str | None,
    job: int | None,
    write_space: Path | None,
    detach: bool,
    options: dict[str, Any],
) -> tuple[str, ...]:
    """Return the problems if there are several, else an empty tuple. Raises UsageError."""
    if not problems and kernels is None:
        return ()  # early, because imports would delay the executor's build
    from evoengine.workloads import expand, expanded, stands_for_several

    if len(problems) < 2 and not any(map(stands_for_several, problems)):
        if kernels is not None:
            raise UsageError("--kernels requires several problems: repeat --problem, or name a set or @FILE")
        return ()
    others = {"server": server, "job": job, "write-space": write_space, "detach": detach}
    others |= {name: options[name] for name in ("kernel", "cluster", "resume", "minutes")}
    others |= {"device recorded:": options["device"].startswith(RECORDED), "objective": options["objective"]}
    others["gpu"] = len(gpus) > 1
    for name, value in others.items():
        if value is not None and value is not False:  # --resume alone is 0
            raise UsageError(f"--{name} applies to one problem; leave it out, or give one --problem")
    if options["triton"] is not None:  # its sizes are known only after its file was executed
        return tuple(expanded(problems))
    return expand(problems)


def _search_set(asked: SearchOptions, problems: tuple[str, ...], kernels: int | None, live: Live, as_json: bool) -> int:
    from evoengine.tuning.tune import SetSearch
    from evoengine.views.results import kernels_table, problems_table, table_json, verdict

    prepared = SetSearch(asked, problems, kernels, live.say, live.stage)
    stop_on_signal(prepared.stop)
    result = prepared.run(live.update, live.trial)
    if result.table is None:
        say(f"interrupted after {len(result.runs)} of {len(problems)} problems; the same command continues")
        return INTERRUPTED
    if as_json:
        print_json(table_json(result.table))
    else:
        display(problems_table(result.table))
        display(kernels_table(result.table))
    say(verdict(result.table))
    return 0


@contextmanager
def _begun_build(here: bool) -> Iterator[FirstBuild | None]:
    """Build the executor in the background during a search's slow imports; a machine's first search waits for it."""
    if not here:
        yield None
        return
    from evoengine.search.first_build import FirstBuild

    with closing(FirstBuild()) as begun:
        yield begun


def _detach(asked: Sequence[SearchOptions], live: Live) -> int:
    from evoengine.tuning.detached import detach

    name, address = detach(asked, live.stage), asked[0].cluster
    live.say(f"{name} continues on the cluster")
    live.say(
        f"next: {hint('cluster', 'status', cluster=address)}   ·   {hint('cluster', 'stop', name, cluster=address)}"
    )
    return 0


def _conclude_all(
    asked: Sequence[SearchOptions], ended: Sequence[SearchResult | EvoengineError], live: Live, as_json: bool
) -> int:
    """Print the summary of every completed search and return the exit code of the first failed one, or 0."""
    from evoengine.cli.progress import print_summaries
    from evoengine.tuning.search import SearchResult

    results = {o.gpu: (r, _following(o, r)) for o, r in zip(asked, ended, strict=True) if isinstance(r, SearchResult)}
    codes = print_summaries(results, as_json, asked[0].db, live.say)
    for (result, _), code in zip(results.values(), codes, strict=True):
        live.end(result.run, result.progress.ended, code)
    codes += [each.exit_code for each in ended if isinstance(each, EvoengineError)]
    return max(codes)


def _elsewhere(
    server: str | None,
    job: int | None,
    gpus: Sequence[str],
    here_alone: dict[str, bool],
    as_json: bool,
    options: dict[str, Any],
) -> int:
    from evoengine.cli import remote

    if server is None:
        raise UsageError(f"--job {job} requires --server, the service that runs it")
    if len(gpus) > 1:
        raise UsageError(f"--gpu is given {len(gpus)} times; --server takes one value")
    own = "gpu_file kernel triton call reference space templates db jobs cluster timeout clock remeasure".split()
    refuse_beside(server, **here_alone, **{name: options[name] for name in own})
    if job is not None:
        return remote.follow(server, job, as_json)
    return remote.search(server, options | {"gpu": gpus[0] if gpus else AUTO}, as_json)


def _following(asked: SearchOptions, result: SearchResult) -> list[str]:
    """Return the commands to run next."""
    front = [hint("best", "--pareto", db=asked.db)] if result.pareto else []
    if asked.device.startswith(RECORDED):
        return [*front, hint("report", db=asked.db), hint("dashboard", db=asked.db)]
    export = hint("best", "--export", "out/", kernel=asked.kernel, db=asked.db)
    return [*front, export, hint("dashboard", db=asked.db)]


@click.command()
@click.option(
    "--with",
    "command",
    metavar="COMMAND",
    required=True,
    help="Shell command that reads and prints one line of JSON per proposal (docs/proposing.md).",
)
@kernel_option
@problem_option
@gpu_option(default=AUTO)
@click.option(
    "--from",
    "start",
    metavar="TRIAL",
    type=click.IntRange(min=1),
    help="First parent, a trial of the ledger.  [default: the first start point of the kernel's space]",
)
@click.option(
    "--proposals", type=click.IntRange(min=1), default=20, show_default=True, help="Number of proposals to judge."
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Time limit of each answer.",
)
@db_option
@json_option
def propose(
    command: str,
    kernel: Path | None,
    problem: str | None,
    gpu: str,
    start: int | None,
    proposals: int,
    timeout: float,
    db: str | None,
    as_json: bool,
) -> int:
    """Judge texts that a program proposes for a kernel.

    Each text is compiled and run in a jail (bubblewrap), and gated and predicted as a search's candidates are. Grid,
    block, shapes and reference stay those of the kernel. The ledger keeps each proposal with its parent.
    """
    from evoengine.cli.progress import LiveProgress, result_code
    from evoengine.tuning.propose import propose as run
    from evoengine.views.candidate_tables import ranking
    from evoengine.views.results import proposed_json

    with LiveProgress(trials=True) as live:
        found = run(
            command,
            problem,
            gpu,
            kernel=kernel,
            start=start,
            proposals=proposals,
            timeout=timeout,
            db=db,
            echo=live.say,
            on_stage=live.stage,
            on_trial=live.trial,
        )
    live.say(f"{found.judged} proposals judged in run {found.run}: {found.ended}")
    if as_json:
        print_json(proposed_json(found))
    elif found.best:
        display(ranking(dict(enumerate(found.best, 1))))
    return result_code(0 if found.best else 1, hint("best", db=db), live.say)
