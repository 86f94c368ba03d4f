"""evoengine verify"""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from pathlib import Path

import click

from evoengine.cli.options import gpu_option, json_option, problem_option, space_option, templates_option
from evoengine.errors import UsageError
from evoengine.gpu import Gpu
from evoengine.problem import Problem


@click.command()
@click.option("--config", "text", required=True, metavar="JSON", help="One value for every active knob, as JSON.")
@gpu_option(default="h100")
@problem_option()
@click.option("--device", type=click.Choice(["auto", "emulator", "cuda"]), default="auto", show_default=True)
@space_option
@templates_option
@click.option("--binary", "execute", is_flag=True, help="Execute the machine code too, on the CPU, after the gate.")
@click.option("--seed", type=click.IntRange(min=0), help="Repeats a verdict.  [default: drawn, and printed]")
@json_option
def verify(
    text: str, gpu: Gpu, problem: Problem, device: str, space: Path | None, templates: Path | None, execute: bool,
    seed: int | None, as_json: bool,
) -> int:  # fmt: skip
    """Render, compile and gate one configuration; exit 0 when it is correct, 1 when not."""
    from evoengine.cli.display import cases, say, stdout
    from evoengine.cli.setup import choose_device, prepare_space, require_compilers, turn
    from evoengine.devices.driver import real_gpu
    from evoengine.publish.export import case_list
    from evoengine.search.binaries import check_binary
    from evoengine.search.judges import make_judge
    from evoengine.search.single import walk

    timing = choose_device(device, gpu)
    if timing:
        gpu = real_gpu(timing, gpu)
    bound, folder = prepare_space(space, templates, problem, gpu)
    config = _config(text, bound)
    require_compilers(emulated=timing is None)
    seed = secrets.randbelow(2**31) if seed is None else seed
    with turn(timing, say):
        judge = make_judge(bound.kernel, problem, gpu, timing, seed)
        try:
            candidate = walk(bound, config, problem, gpu, folder, judge, seed)
        finally:
            judge.close()
    check = None
    if execute and candidate.binary:
        check = check_binary(bound, problem, config, candidate.source, candidate.binary, seed)
        candidate = replace(candidate, binary_verdict=check.verdict)
    correct = candidate.verdict is not None and candidate.verdict.correct and not candidate.refuted
    if as_json:
        # no ledger is involved, so there is no trial to name
        extra = {"trial": None, "run": None, "correct": correct, "seed": seed, "cases": case_list(candidate.verdict)}
        if execute:
            extra |= {"binary_cases": case_list(candidate.binary_verdict), "binary_remark": str(check) if check else None}
        click.echo(json.dumps(candidate.to_json() | extra, indent=2))
        return 0 if correct else 1
    for verdict in (candidate.verdict, candidate.binary_verdict):
        if verdict:
            stdout.print(cases(verdict))
    if check:
        say(str(check))
    say(f"{'correct' if correct else _why_not(candidate)} · seed {seed}")
    return 0 if correct else 1


def _why_not(candidate) -> str:
    by_binary = candidate.outcome is None or candidate.outcome.correct
    found = candidate.binary_verdict if by_binary and candidate.refuted else candidate
    return f"{found.outcome}: {found.reason}"


def _config(text: str, space) -> dict:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--config is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"--config must be a JSON object of knobs and values, not {type(config).__name__}")
    if why := space.why_invalid(config):
        raise UsageError(f"the configuration is not in the space {space.name}: {why}")
    return config
