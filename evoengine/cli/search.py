"""evoengine search"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from evoengine.cli.options import (
    RECORDED,
    OneOf,
    TextType,
    cluster_option,
    db_option,
    gpu_file_option,
    gpus_option,
    json_option,
    kernel_option,
    log_json_option,
    problem_option,
    space_option,
    templates_option,
)  # fmt: skip
from evoengine.cli.server_option import refuse_beside, server_option
from evoengine.errors import EvoengineError, UsageError
from evoengine.gpu import AUTO
from evoengine.hints import did_you_mean, hint
from evoengine.search import samplers

if TYPE_CHECKING:
    from evoengine.cli.log import EventLog
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.search import SearchOptions, SearchResult

    Live = EventLog | LiveProgress


class DeviceType(TextType):
    name = "device"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in ("auto", "emulator", "cuda") and not value.startswith(RECORDED):
            near = did_you_mean(value, ("auto", "emulator", "cuda", RECORDED))
            self.fail(f"{value!r} is none of auto, emulator, cuda and {RECORDED}FILE{near}", param, ctx)
        return value


@click.command()
@gpus_option
@gpu_file_option
@problem_option
@kernel_option
@click.option("--family", "families", multiple=True, metavar="NAME", help="Only this one; may be given several times.")
@click.option("--trials", type=click.IntRange(min=1), help="Kernels to try.  [default: 60]")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Start no candidate after this long.")
@click.option(
    "--sampler", type=OneOf(samplers.NAMES),
    help="What proposes configurations: evoengine's own evolution, or one of Optuna's.  "
    f"[default: {samplers.DEFAULT}]",
)  # fmt: skip
@click.option(
    "--device", type=DeviceType(), default="auto", show_default=True,
    help="What judges the candidates: cuda times them, emulator gates on the CPU and ranks by estimate, "
    "recorded:FILE replays a Kernel Tuner cache or T4 file (--gpu, --gpu-file, --problem, --kernel, --family, --space, "
    "--templates and --jobs then say nothing).",
)  # fmt: skip
@click.option(
    "--objective", metavar="NAMES",
    help="tflops, or a trade against registers or shared_bytes: tflops,registers.  [default: tflops]",
)  # fmt: skip
@space_option
@templates_option
@db_option
@click.option(
    "--jobs", type=click.IntRange(min=1),
    help="Worker processes.  [default: one per core, two fewer where a GPU is timed on]",
)  # fmt: skip
@cluster_option(default=None)
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS",
    help="With --cluster: how long to wait for a GPU of a kind that no node has.  [default: for ever]",
)  # fmt: skip
@click.option(
    "--detach", is_flag=True,
    help="With --cluster: the search goes on there without this command, on the ledger that EVOENGINE_DB names there.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Repeats a search.  [default: drawn, and recorded]")
@click.option(
    "--resume", type=click.IntRange(min=0), is_flag=False, flag_value=0, metavar="[RUN]",
    help="Goes on with this run, or with the last one; what is not given is as it was there.",
)  # fmt: skip
@click.option(
    "--clock", metavar="CLOCK",
    help="That times are predicted for: boost, what a rested GPU reaches and is timed at; sustained, what its power "
    "limit leaves back to back; locked:MHZ.  [default: boost]",
)  # fmt: skip
@click.option("--remeasure", is_flag=True, help="Evaluates again what the ledger knows.")
@server_option
@click.option(
    "--job", type=click.IntRange(min=1), help="With --server: come back to this one, in place of another search."
)
@log_json_option
@json_option
def search(
    as_json: bool, log_json: bool, detach: bool, gpus: tuple[str, ...], server: str | None, job: int | None,
    **options: Any,
) -> int:  # fmt: skip
    """Search for the fastest correct kernel of a problem on a GPU.

    With a GPU of that kind here, candidates are gated and timed on it, and times predicted from machine code lead the
    choice as long as what is measured bears them out. Without one they are compiled for it, gated in the CPU emulator
    and ranked by the predicted time, and the best one's machine code is executed on the CPU besides.

    A search that was killed or interrupted goes on where it was when the same command is given again. What the ledger
    knows of a kernel in the same environment is taken over, not paid for again.
    """
    if server or job:
        here_alone = {"log_json": log_json, "detach": detach, "resume": options.pop("resume") is not None}
        return _elsewhere(server, job, gpus, here_alone, as_json, options)
    from evoengine.cli.progress import LiveProgress

    if log_json:
        from evoengine.cli.log import EventLog
    with EventLog() if log_json else LiveProgress() as live:
        from evoengine.cli.conclusion import print_summary
        from evoengine.cli.signals import stop_on_signal
        from evoengine.tuning.search import SearchOptions
        from evoengine.tuning.tune import prepare, prepare_all

        asked = [SearchOptions(gpu=gpu, **options) for gpu in dict.fromkeys(gpus or (AUTO,))]
        if detach:
            return _detach(asked, live)
        if len(asked) > 1:
            several = prepare_all(asked, live.say, live.stage)
            stop_on_signal(several.stop)
            return _conclude_all(asked, several.run_all(live.update, live.trial), live, as_json)
        prepared = prepare(asked[0], live.say, live.stage)
        stop_on_signal(prepared.stop)
        result = prepared.run(live.update, live.trial)
    code = print_summary(result, as_json, asked[0].db, _following(asked[0], result), live.say)
    live.end(result.run, result.progress.ended, code)
    return code


def _detach(asked: Sequence[SearchOptions], live: Live) -> int:
    from evoengine.tuning.detached import detach

    name, address = detach(asked, live.stage), asked[0].cluster
    live.say(f"{name} goes on without this command")
    live.say(
        f"next: {hint('cluster', 'status', cluster=address)}   ·   {hint('cluster', 'stop', name, cluster=address)}"
    )
    return 0


def _conclude_all(
    asked: Sequence[SearchOptions], ended: Sequence[SearchResult | EvoengineError], live: Live, as_json: bool
) -> int:
    """The summary of every search that came to an end; the exit code is that of the first without a result, if any."""
    from evoengine.cli.conclusion import print_summaries
    from evoengine.tuning.search import SearchResult

    results = {o.gpu: (r, _following(o, r)) for o, r in zip(asked, ended, strict=True) if isinstance(r, SearchResult)}
    codes = print_summaries(results, as_json, asked[0].db, live.say)
    for (result, _), code in zip(results.values(), codes, strict=True):
        live.end(result.run, result.progress.ended, code)
    codes += [each.exit_code for each in ended if isinstance(each, EvoengineError)]
    return max(codes)


def _elsewhere(
    server: str | None, job: int | None, gpus: Sequence[str], here_alone: dict[str, bool], as_json: bool,
    options: dict[str, Any],
) -> int:  # fmt: skip
    from evoengine.cli import remote

    if server is None:
        raise UsageError(f"--job {job} is one of a service; --server names it")
    if len(gpus) > 1:
        raise UsageError(f"--gpu is given {len(gpus)} times; --server takes one value")
    own = ("gpu_file", "kernel", "space", "templates", "db", "jobs", "cluster", "timeout", "clock", "remeasure")
    refuse_beside(server, **here_alone, **{name: options[name] for name in own})
    if job is not None:
        return remote.come_back(server, job, as_json)
    return remote.search(server, options | {"gpu": gpus[0] if gpus else AUTO}, as_json)


def _following(asked: SearchOptions, result: SearchResult) -> list[str]:
    """The commands to go on with."""
    front = [hint("best", "--pareto", db=asked.db)] if result.pareto else []
    if asked.device.startswith(RECORDED):
        return [*front, hint("report", db=asked.db), hint("dashboard", db=asked.db)]
    export = hint("best", "--export", "out/", kernel=asked.kernel, db=asked.db)
    return [*front, export, hint("dashboard", db=asked.db)]
