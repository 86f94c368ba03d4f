"""evoengine verify"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from evoengine.cli.options import (
    OneOf,
    call_option,
    db_option,
    gpu_file_option,
    gpu_option,
    json_option,
    kernel_option,
    problem_option,
    reading,
    reference_option,
    space_option,
    templates_option,
    triton_option,
)
from evoengine.cli.output import display, print_json, say
from evoengine.errors import UsageError
from evoengine.gpu import AUTO
from evoengine.records import GATE_VERSION, Config
from evoengine.sandbox.untrusted import parse_json, read_limited_text

if TYPE_CHECKING:
    from evoengine.tuning.verify import Verified


@click.command()
@click.option(
    "--config",
    "text",
    metavar="WHAT",
    help="Configuration with a value for every active knob that has no default: JSON text, a JSON file, - for "
    "standard input, or the number of a trial, which also supplies problem and GPU unless they are given.",
)
@gpu_option(default=AUTO)
@gpu_file_option
@problem_option
@kernel_option
@click.option(
    "--device",
    type=OneOf(["auto", "emulator", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the gate runs: cuda on the GPU, emulator on the CPU.",
)
@space_option
@templates_option
@click.option(
    "--binary", is_flag=True, help="On a GPU: run the executor and the emulator on the CPU too, after the gate."
)
@triton_option
@call_option
@reference_option
@click.option(
    "--exact",
    is_flag=True,
    help="With --triton: also compare the configurations bit by bit in Triton's exact algebra (FpSan, Triton 3.9).",
)
@click.option(
    "--cubin",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="In place of --config: execute a kernel of a cubin, a fatbin, an object, a library or PTX on a virtual GPU. "
    "FILE is parsed and not loaded.",
)
@click.option("--entry", metavar="NAME", help="With --cubin: the kernel, by the name that evoengine cubins lists.")
@click.option(
    "--launch",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --cubin: a JSON file with tensors, grid, block and arguments, as docs/virtual-gpu.md describes.",
)
@click.option(
    "--sample",
    is_flag=True,
    help="With --cubin: execute only a sample of blocks, for about ten seconds, of a launch that would take over a "
    "minute.",
)
@click.option(
    "--record",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="In place of --config: judge the kernel of an export's verification record again, with the record's cases.",
)
@click.option(
    "--key",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --record: the public key, in PEM, that must have signed it.",
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
    context: click.Context,
    /,
    text: str | None,
    triton: str | None,
    cubin: Path | None,
    record: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Gate one configuration, all of a Triton kernel, or a kernel of a binary.

    The exit code is 0 if it is correct and 1 if it is not.

    On the CPU a configuration is judged by both the executor of machine code and the emulator of CUDA text, other
    kernels by the executor (docs/virtual-gpu.md).
    """
    if cubin is not None:
        from evoengine.cli.verdicts import verify_cubin

        taken = _taken(context, "cubin", options, ("entry", "launch", "reference", "sample", "gpu", "seed"))
        return verify_cubin(cubin, **taken, as_json=as_json)
    _require_absent(options, ("entry", "launch", "sample"), "cubin FILE")
    if triton is not None:
        from evoengine.cli.verdicts import verify_triton

        taken = _taken(context, "triton", options, ("call", "reference", "exact", "gpu", "seed"))
        return verify_triton(triton, **taken, as_json=as_json)
    if record is not None:
        return _verify_record(record, **_taken(context, "record", options, ("key",)), as_json=as_json)
    _require_absent(options, ("key",), "record FILE")
    if text is None:
        raise UsageError(
            "verify takes --config WHAT, --triton FILE::KERNEL with --call FUNCTION, --cubin FILE with --entry NAME "
            "and --launch FILE.json, or --record FILE"
        )
    _require_absent(options, ("call", "reference", "exact"), "triton FILE::KERNEL")
    return _verify_configuration(context, text, options, as_json)


def _taken(context: click.Context, what: str, options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the options that --`what` takes. Raises UsageError if one that it does not take is given."""
    _require_none_given(context, what, *names, "as_json")
    return {name: options[name] for name in names}


def _require_absent(options: Mapping[str, Any], names: Sequence[str], what: str) -> None:
    for name in names:
        if options[name]:
            raise UsageError(f"--{name} requires --{what}")


def _verify_configuration(context: click.Context, text: str, options: Mapping[str, Any], as_json: bool) -> int:
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.verify import verify as run

    given = read_config(text, options["db"])
    names = ("gpu_file", "kernel", "device", "space", "templates", "binary", "seed", "db")
    asked = {name: options[name] for name in names}
    gpu = options["gpu"]
    if given.gpu and asked["gpu_file"] is None and context.get_parameter_source("gpu") is ParameterSource.DEFAULT:
        gpu = given.gpu
    problem = options["problem"] or given.problem
    with LiveProgress() as live:
        verified = run(given.config, problem, gpu, echo=live.say, on_stage=live.stage, **asked)
    _print_verdict(verified, as_json)
    return 0 if verified.correct else 1


def _verify_record(record: Path, key: Path | None, as_json: bool) -> int:
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.verify import verify_record

    with LiveProgress() as live:
        found = verify_record(record, key=key, echo=live.say, on_stage=live.stage)
    _print_verdict(found, as_json)
    for difference in found.differences:
        say(difference)
    if not found.differences:
        say(f"all cases ended as the record states, by version {GATE_VERSION} of the gate")
    return 0 if found.correct and not found.differences else 1


def _print_verdict(verified: Verified, as_json: bool) -> None:
    from evoengine.views.candidate_page import cases
    from evoengine.views.trials import verified_json

    candidate = verified.candidate
    if as_json:
        remark = str(verified.on_cpu) if verified.on_cpu else None
        print_json(verified_json(candidate, verified.seed, verified.correct, remark))
        return
    for verdict in candidate.verdicts:
        display(cases(verdict))
    if verified.on_cpu:
        say(str(verified.on_cpu))
    say(f"{'correct' if verified.correct else verified.why_not} · seed {verified.seed}")


def _require_none_given(context: click.Context, *allowed: str) -> None:
    """Raise UsageError if an option is given that is not allowed with the first of `allowed`."""
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is not ParameterSource.DEFAULT
        if given and parameter.name not in allowed:
            raise UsageError(f"{parameter.opts[0]} contradicts --{allowed[0]}; leave one of them out")


MOST_BYTES = 1 << 20


class Given(NamedTuple):
    """A configuration; if it is a trial's, with that trial's problem and GPU."""

    config: Config | int
    """the number of a trial whose text cannot be rendered from a configuration"""
    problem: str | None = None
    gpu: str | None = None


def read_config(text: str, db: str | None) -> Given:
    """Read a configuration from JSON text, a file, standard input, or a trial's number.

    Raises UsageError if `text` is none of these, or if the source holds no configuration.
    """
    if text.isdecimal():
        return _of_trial(int(text[:18]), db)
    if text.lstrip().startswith(("{", "[", '"')):
        return Given(_parsed(text, "--config"))
    if text == "-":
        return Given(_parsed(sys.stdin.read(MOST_BYTES + 1), "standard input"))
    return Given(_parsed(_file(Path(text)), text))


def _of_trial(trial: int, db: str | None) -> Given:
    from evoengine.tuning.verify import is_judged_as_stored

    with reading(db) as ledger:
        found = ledger.candidate(trial)
    return Given(trial if is_judged_as_stored(found) else found.config, found.problem, found.gpu)


def _file(path: Path) -> str:
    try:
        return read_limited_text(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--config {str(path)[:80]!r} is neither JSON nor a trial's number, and cannot be read as a file: {why}"
        ) from None


def _parsed(text: str, where: str) -> Config:
    """Parse a configuration.

    An object with a field `config`, as printed by show --json and stored in kernel.json, stands for that field.
    """
    if len(text) > MOST_BYTES:
        raise UsageError(f"{where} exceeds {MOST_BYTES} characters, the limit of a configuration")
    try:
        found = parse_json(text)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {str(error)[:200]}") from None
    if isinstance(found, dict) and isinstance(found.get("config"), dict):
        found = found["config"]
    if not isinstance(found, dict):
        raise UsageError(f"{where} must be a JSON object of knobs and values, not {type(found).__name__}")
    for knob, value in found.items():
        if not isinstance(value, int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
            shown = json.dumps(value)[:40]
            raise UsageError(f"{where} gives {knob} {shown}; a knob is a number, text, true or false")
    return found
