"""evoengine verify"""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from evoengine.cli.options import (
    OneOf,
    db_option,
    gpu_file_option,
    gpu_option,
    json_option,
    kernel_option,
    problem_option,
    space_option,
    templates_option,
)  # fmt: skip
from evoengine.gpu import AUTO


@click.command()
@click.option(
    "--config", "text", required=True, metavar="WHAT",
    help="Configuration with a value for every active knob: JSON text, a JSON file, - for standard input, or the "
    "number of a trial, which also supplies problem and GPU unless they are given.",
)  # fmt: skip
@gpu_option(default=AUTO)
@gpu_file_option
@problem_option
@kernel_option
@click.option(
    "--device", type=OneOf(["auto", "emulator", "cuda"]), default="auto", show_default=True,
    help="Where the gate runs: cuda on the GPU, emulator on the CPU.",
)  # fmt: skip
@space_option
@templates_option
@click.option(
    "--binary", is_flag=True, help="On a GPU: run the executor and the emulator on the CPU too, after the gate."
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Random seed. The same seed repeats a verdict.  [default: drawn and printed]",
)
@db_option
@json_option
@click.pass_context
def verify(
    context: click.Context, text: str, gpu: str, gpu_file: Path | None, problem: str | None, kernel: Path | None,
    device: str, space: Path | None, templates: Path | None, binary: bool, seed: int | None, db: str | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Render, compile and gate one configuration. The exit code is 0 if it is correct and 1 if it is not.

    On the CPU both judges judge it to the end: the executor of machine code and the emulator of CUDA text.
    """
    from evoengine.cli.config_option import read_config
    from evoengine.cli.display import say, stdout
    from evoengine.cli.output import print_json
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.verify import verify as run
    from evoengine.views.candidate_page import cases
    from evoengine.views.trials import verified_json

    given = read_config(text, db)
    if given.gpu and gpu_file is None and context.get_parameter_source("gpu") is ParameterSource.DEFAULT:
        gpu = given.gpu
    with LiveProgress() as live:
        verified = run(
            given.config, problem or given.problem, gpu, gpu_file=gpu_file, kernel=kernel, device=device, space=space,
            templates=templates, binary=binary, seed=seed, echo=live.say, on_stage=live.stage,
        )  # fmt: skip
    candidate = verified.candidate
    if as_json:
        remark = str(verified.on_cpu) if verified.on_cpu else None
        print_json(verified_json(candidate, verified.seed, verified.correct, remark))
        return 0 if verified.correct else 1
    for verdict in candidate.verdicts:
        stdout.print(cases(verdict))
    if verified.on_cpu:
        say(str(verified.on_cpu))
    say(f"{'correct' if verified.correct else verified.why_not} · seed {verified.seed}")
    return 0 if verified.correct else 1
