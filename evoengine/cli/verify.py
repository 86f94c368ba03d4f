"""evoengine verify"""

from __future__ import annotations

import json
import math
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
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
from evoengine.cli.output import print_json, say, stdout
from evoengine.errors import UsageError
from evoengine.gpu import AUTO
from evoengine.records import Config
from evoengine.sandbox.untrusted import parse_json, read_limited_text
from evoengine.sass.predict import Prediction
from evoengine.text import number
from evoengine.views.tables import Column, Table

if TYPE_CHECKING:
    from evoengine.tuning.verify import Verified
    from evoengine.virtual.gate import ConfigVerdict


@click.command()
@click.option(
    "--config",
    "text",
    metavar="WHAT",
    help="Configuration with a value for every active knob: JSON text, a JSON file, - for standard input, or the "
    "number of a trial, which also supplies problem and GPU unless they are given.",
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
    help="In place of --config: execute a kernel out of a cubin, a fatbin, an object, a library or PTX, on a virtual "
    "GPU. FILE is parsed and not loaded.",
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
    help="With --cubin: of a launch that would take over a minute, execute blocks for some ten seconds only.",
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

    On the CPU both judges judge a configuration to the end: the executor of machine code and the emulator of CUDA text.
    Other kernels are judged by the executor (docs/virtual-gpu.md).
    """
    if cubin is not None:
        from evoengine.cli.cubins import verify_cubin

        taken = _taken(context, "cubin", options, ("entry", "launch", "reference", "sample", "gpu", "seed"))
        return verify_cubin(cubin, **taken, as_json=as_json)
    _require_absent(options, ("entry", "launch", "sample"), "cubin FILE")
    if triton is not None:
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
            raise UsageError(f"--{name} is for --{what}, which is not given")


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
    from evoengine.records import GATE_VERSION
    from evoengine.tuning.verify import verify_record

    with LiveProgress() as live:
        found = verify_record(record, key=key, echo=live.say, on_stage=live.stage)
    _print_verdict(found, as_json)
    for difference in found.differences:
        say(difference)
    if not found.differences:
        say(f"all cases of the record ended as it states, by version {GATE_VERSION} of the gate")
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
        stdout.print(cases(verdict))
    if verified.on_cpu:
        say(str(verified.on_cpu))
    say(f"{'correct' if verified.correct else verified.why_not} · seed {verified.seed}")


def _require_none_given(context: click.Context, *allowed: str) -> None:
    """Raise UsageError for an option beside the first of those allowed that says nothing about its kernel."""
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is not ParameterSource.DEFAULT
        if given and parameter.name not in allowed:
            raise UsageError(f"{parameter.opts[0]} is not for --{allowed[0]}; leave one of them out")


MOST_BYTES = 1 << 20


class Given(NamedTuple):
    """A configuration, and where it is a trial's the problem and the GPU of that."""

    config: Config | int
    """the number itself of a trial whose text no configuration renders again"""
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
        raise UsageError(f"{where} holds more than {MOST_BYTES} characters, which no configuration takes")
    try:
        found = parse_json(text)
    except ValueError as error:
        raise UsageError(f"{where} is no JSON of a configuration: {str(error)[:200]}") from None
    if isinstance(found, dict) and isinstance(found.get("config"), dict):
        found = found["config"]
    if not isinstance(found, dict):
        raise UsageError(f"{where} must be a JSON object of knobs and values, not {type(found).__name__}")
    for knob, value in found.items():
        if not isinstance(value, int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
            shown = json.dumps(value)[:40]
            raise UsageError(f"{where} gives {knob} {shown}; a knob is a number, text, true or false")
    return found


def verify_triton(
    target: str, call: str | None, reference: str | None, exact: bool, gpu: str, seed: int | None, as_json: bool
) -> int:
    """Gate a Triton kernel, show the verdicts, and return the exit code. Raises UsageError without `call`."""
    from evoengine.cli.progress import LiveProgress
    from evoengine.tuning.boards import choose_gpu
    from evoengine.tuning.verify import verify_triton as gate
    from evoengine.views.foreign_kernels import triton_answer
    from evoengine.workloads.triton_kernel import is_served, read_host

    host = read_host(target, call, reference)
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    on = choose_gpu(gpu, None).gpu
    key = on.key
    with LiveProgress() as live:
        found = gate(host, on, seed, exact, live.stage)
    correct = not any(verdict.wrong for verdict in found)
    if as_json:
        print_json(triton_answer(target, key, seed, found))
        return 0 if correct else 1
    stdout.print(table(found, key))
    for line in remarks(found, is_served(host) or reference is not None):
        say(line)
    if exact:
        for line in algebra(found):
            say(line)
    say(f"{'correct' if correct else 'not correct'} · seed {seed}")
    return 0 if correct else 1


def table(verdicts: Sequence[ConfigVerdict], gpu: str) -> Table:
    """Return a row for each configuration."""
    columns = [
        Column("configuration", least=20), Column("verdict"), Column("attempts", right=True),
        Column("error of allowed", right=True), Column(f"est. µs on {gpu}", right=True), Column("bound by"),
    ]  # fmt: skip
    return Table(columns, map(_row, verdicts))


def _row(verdict: ConfigVerdict) -> tuple[str, ...]:
    worst, found = verdict.worst_share, verdict.prediction
    share = "" if worst is None else f"{100 * worst:.0f} %"
    time, bound = (number(found.time_us), found.bound) if isinstance(found, Prediction) else ("?", "")
    return verdict.config, verdict.outcome, str(len(verdict.attempts)), share, time, bound


def remarks(verdicts: Sequence[ConfigVerdict], compared: bool) -> Iterator[str]:
    """Yield a line for what is wrong, what was refused, and what was not compared."""
    for verdict in verdicts:
        if verdict.wrong:
            yield f"{verdict.config}: {verdict.wrong.sizes or 'no sizes'}, {verdict.wrong.draw}: {verdict.wrong.reason}"
        if isinstance(verdict.prediction, str):
            yield f"{verdict.config}: no time is predicted: {verdict.prediction}"
    refused = {(sizes, why): None for verdict in verdicts for sizes, why in verdict.refused.items()}
    for sizes, why in refused:
        yield f"{sizes or 'no sizes'}: not judged, since the launch was refused: {why}"
    if not compared:
        yield "without --reference nothing says what is right: hazards, races, bad accesses and NaN were looked for"
        largest = max((v.largest_difference for v in verdicts if v.largest_difference is not None), default=None)
        if largest is not None:
            yield f"outputs of the configurations differ by {largest:.2e} at most"


def algebra(verdicts: Sequence[ConfigVerdict]) -> Iterator[str]:
    """Yield what a comparison in exact algebra asks."""
    compared = [verdict for verdict in verdicts if not verdict.wrong]
    for verdict in compared:
        if verdict.inexact:
            other = "the reference" if verdict.with_reference else verdicts[0].config
            yield (
                f"{verdict.config}: in exact algebra it computes something else than {other} "
                f"({'; '.join(verdict.inexact)}): is that meant? Rounding alone makes no difference there"
            )
        for sizes, why in verdict.unbuilt.items():
            yield f"{verdict.config}: {sizes or 'no sizes'}: its build in exact algebra cannot be executed: {why}"
    if compared and not any(verdict.inexact or verdict.unbuilt for verdict in compared):
        too = ", and the reference too" if any(verdict.with_reference for verdict in compared) else ""
        yield f"in exact algebra all configurations that passed compute the same, bit by bit{too}"
