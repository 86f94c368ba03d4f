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
from evoengine.errors import UsageError
from evoengine.gpu import AUTO


@click.command()
@click.option(
    "--config", "text", metavar="WHAT",
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
    "--triton", metavar="FILE::KERNEL",
    help="In place of --config: gate every configuration of a Triton kernel, on a virtual GPU. FILE is executed: use "
    "only files that you trust.",
)  # fmt: skip
@click.option(
    "--call", metavar="FUNCTION",
    help="With --triton: function of FILE that launches the kernel on tensors of its own. Its integer parameters are "
    "sizes, with defaults.",
)  # fmt: skip
@click.option(
    "--reference", metavar="FUNCTION",
    help="With --triton: function of FILE that takes parameters of the kernel by their names and returns what the "
    "kernel writes.",
)  # fmt: skip
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Random seed. The same seed repeats a verdict.  [default: drawn and printed]",
)
@db_option
@json_option
@click.pass_context
def verify(
    context: click.Context, text: str | None, gpu: str, gpu_file: Path | None, problem: str | None, kernel: Path | None,
    device: str, space: Path | None, templates: Path | None, binary: bool, triton: str | None, call: str | None,
    reference: str | None, seed: int | None, db: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Gate one configuration, or all of a Triton kernel. The exit code is 0 if it is correct and 1 if it is not.

    On the CPU both judges judge a configuration to the end: the executor of machine code and the emulator of CUDA text.
    A Triton kernel is judged by the executor (docs/virtual-gpu.md).
    """
    if triton is not None:
        _require_none_given(context, "triton", "gpu", "call", "reference", "seed", "as_json")
        return _verify_triton(triton, call, reference, gpu, seed, as_json)
    if text is None:
        raise UsageError("verify takes --config WHAT, or --triton FILE::KERNEL with --call FUNCTION")
    if call or reference:
        raise UsageError(f"--{'call' if call else 'reference'} is for --triton FILE::KERNEL, which is not given")
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


def _require_none_given(context: click.Context, *allowed: str) -> None:
    """Raise UsageError for an option that says nothing about a Triton kernel."""
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is not ParameterSource.DEFAULT
        if given and parameter.name not in allowed:
            raise UsageError(f"{parameter.opts[0]} is not for --triton; leave one of them out")


def _verify_triton(
    target: str, call: str | None, reference: str | None, gpu: str, seed: int | None, as_json: bool
) -> int:
    import secrets

    from evoengine.cli.display import say, stdout
    from evoengine.cli.output import print_json
    from evoengine.cli.triton_verdicts import remarks, table
    from evoengine.tuning.boards import choose_gpu
    from evoengine.virtual import require_triton

    if call is None:
        raise UsageError("--triton needs --call FUNCTION, a function of the file that launches the kernel")
    require_triton()
    from evoengine.virtual.verify import as_answer, verify

    seed = secrets.randbelow(1 << 32) if seed is None else seed
    key = choose_gpu(gpu, None).gpu.key
    found = verify(target, call, reference, key, seed)
    correct = not any(verdict.wrong for verdict in found)
    if as_json:
        print_json(as_answer(target, key, seed, found))
        return 0 if correct else 1
    stdout.print(table(found, key))
    for line in remarks(found, reference is not None):
        say(line)
    say(f"{'correct' if correct else 'not correct'} · seed {seed}")
    return 0 if correct else 1
