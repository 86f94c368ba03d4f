"""evoengine verify"""

from __future__ import annotations

import json
from pathlib import Path

import click

from evoengine.cli.options import (
    OneOf,
    gpu_option,
    json_option,
    kernel_option,
    problem_option,
    space_option,
    templates_option,
)  # fmt: skip
from evoengine.errors import UsageError
from evoengine.records import Value
from evoengine.untrusted import parse_json


@click.command()
@click.option("--config", "text", required=True, metavar="JSON", help="One value for every active knob, as JSON.")
@gpu_option(default="h100")
@problem_option
@kernel_option
@click.option(
    "--device", type=OneOf(["auto", "emulator", "cuda"]), default="auto", show_default=True,
    help="Where the gate runs: cuda on a GPU, emulator on the CPU.",
)  # fmt: skip
@space_option
@templates_option
@click.option("--binary", is_flag=True, help="Execute the machine code too, on the CPU, after the gate.")
@click.option("--seed", type=click.IntRange(min=0), help="Repeats a verdict.  [default: drawn, and printed]")
@json_option
def verify(
    text: str, gpu: str, problem: str | None, kernel: Path | None, device: str, space: Path | None,
    templates: Path | None, binary: bool, seed: int | None, as_json: bool,
) -> int:  # fmt: skip
    """Render, compile and gate one configuration; exit 0 when it is correct, 1 when not."""
    from evoengine.cli.display import cases, say, stdout
    from evoengine.publish.export import case_list
    from evoengine.tuning.verify import verify as run

    verified = run(
        _config(text), problem, gpu, kernel=kernel, device=device, space=space, templates=templates, binary=binary,
        seed=seed, echo=say,
    )  # fmt: skip
    candidate, check = verified.candidate, verified.binary
    if as_json:
        # no ledger is involved, so there is no trial to name
        extra: dict[str, object] = {"trial": None, "run": None, "correct": verified.correct, "seed": verified.seed}
        extra |= {"cases": case_list(candidate.verdict)}
        if binary:
            extra |= {
                "binary_cases": case_list(candidate.binary_verdict),
                "binary_remark": str(check) if check else None,
            }
        click.echo(json.dumps(candidate.to_json() | extra, indent=2))
        return 0 if verified.correct else 1
    for verdict in (candidate.verdict, candidate.binary_verdict):
        if verdict:
            stdout.print(cases(verdict))
    if check:
        say(str(check))
    say(f"{'correct' if verified.correct else verified.why_not} · seed {verified.seed}")
    return 0 if verified.correct else 1


def _config(text: str) -> dict[str, Value]:
    try:
        config = parse_json(text)
    except ValueError as error:
        raise UsageError(f"--config is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"--config must be a JSON object of knobs and values, not {type(config).__name__}")
    return config
