"""evoengine search"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from evoengine.cli.options import (
    RECORDED,
    OneOf,
    TextType,
    db_option,
    gpu_file_option,
    gpu_option,
    json_option,
    kernel_option,
    log_json_option,
    problem_option,
    space_option,
    templates_option,
)  # fmt: skip
from evoengine.gpu import AUTO
from evoengine.hints import did_you_mean, hint
from evoengine.search import samplers

if TYPE_CHECKING:
    from evoengine.tuning.search import SearchOptions, SearchResult


class DeviceType(TextType):
    name = "device"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in ("auto", "emulator", "cuda") and not value.startswith(RECORDED):
            near = did_you_mean(value, ("auto", "emulator", "cuda", RECORDED))
            self.fail(f"{value!r} is none of auto, emulator, cuda and {RECORDED}FILE{near}", param, ctx)
        return value


@click.command()
@gpu_option(default=AUTO)
@gpu_file_option
@problem_option
@kernel_option
@click.option("--family", "families", multiple=True, metavar="NAME", help="Only this one; may be given several times.")
@click.option("--trials", type=click.IntRange(min=1), default=60, show_default=True, help="Kernels to try.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Start no candidate after this long.")
@click.option(
    "--sampler", type=OneOf(samplers.NAMES), default=samplers.DEFAULT, show_default=True,
    help="What proposes configurations: evoengine's own evolution, or one of Optuna's.",
)  # fmt: skip
@click.option(
    "--device", type=DeviceType(), default="auto", show_default=True,
    help="What judges the candidates: cuda times them, emulator gates on the CPU and ranks by estimate, "
    "recorded:FILE replays a Kernel Tuner cache or T4 file (--gpu, --gpu-file, --problem, --kernel, --family, --space, "
    "--templates and --jobs then say nothing).",
)  # fmt: skip
@click.option(
    "--objective", default="tflops", show_default=True, metavar="NAMES",
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
@log_json_option
@json_option
def search(as_json: bool, log_json: bool, **options: Any) -> int:
    """Search for the fastest correct kernel of a problem on a GPU.

    With a GPU of that kind here, candidates are gated and timed on it, and times predicted from machine code lead the
    choice as long as what is measured bears them out. Without one they are compiled for it, gated in the CPU emulator
    and ranked by the predicted time, and the best one's machine code is executed on the CPU besides.
    """
    from evoengine.cli.progress import LiveProgress

    if log_json:
        from evoengine.cli.log import EventLog
    with EventLog() if log_json else LiveProgress() as live:
        from evoengine.cli.conclusion import print_summary
        from evoengine.cli.signals import stop_on_signal
        from evoengine.tuning.search import SearchOptions
        from evoengine.tuning.tune import prepare

        asked = SearchOptions(**options)
        prepared = prepare(asked, live.say, live.stage)
        stop_on_signal(prepared.stop)
        result = prepared.run(live.update, live.trial)
    code = print_summary(result, as_json, asked.db, _following(asked, result), live.say)
    live.end(result.run, result.progress.ended, code)
    return code


def _following(asked: SearchOptions, result: SearchResult) -> list[str]:
    """The commands to go on with."""
    front = [hint("best", "--pareto", db=asked.db)] if result.pareto else []
    if asked.device.startswith(RECORDED):
        return [*front, hint("report", db=asked.db), hint("dashboard", db=asked.db)]
    export = hint("best", "--export", "out/", kernel=asked.kernel, db=asked.db)
    return [*front, export, hint("dashboard", db=asked.db)]
