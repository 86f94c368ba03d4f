"""evoengine measure"""

from __future__ import annotations

import json
import secrets
import sys
from functools import partial
from contextlib import ExitStack
from dataclasses import asdict

import click

from evoengine.cli.options import db_option, gpu_option, json_option, problem_option
from evoengine.errors import NothingFound
from evoengine.gpu import Gpu
from evoengine.problem import Problem


@click.command()
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="How many, best estimate first.")
@click.option("--all", "everything", is_flag=True, help="All of them.")
@gpu_option(default=None)
@problem_option(default=None)
@db_option
@json_option
def measure(
    top: int, everything: bool, gpu: Gpu | None, problem: Problem | str | None, db: str | None, as_json: bool
) -> int:  # fmt: skip
    """Time on a GPU what a search without one left, best estimate first.

    The binaries are those of the ledger; no compiler is needed. Tells how the estimates had ranked what was measured.
    Without --problem and --gpu the last run's are meant.
    """
    from evoengine.cli.conclusion import INTERRUPTED
    from evoengine.cli.display import ranking, say, stdout
    from evoengine.cli.setup import ledger_device, require_gpus, stop_on_signal, target, turn
    from evoengine.devices.driver import real_gpu, require_arch, takes
    from evoengine.ledger.store import open_ledger
    from evoengine.search.agreement import agree, measured_pairs, of_one_model
    from evoengine.search.judges import GpuJudge
    from evoengine.search.remeasure import Remeasurer, left_to_measure, spaces_of

    require_gpus(compilers=())
    with ExitStack() as stack:
        ledger = stack.enter_context(open_ledger(db, create=False))
        named, wanted = target(ledger, gpu, problem)
        left = left_to_measure(ledger, str(wanted), named.key)
        if not left:
            raise NothingFound(_nothing_left(wanted, named))
        devices = require_gpus({c.binary.compiler for c in left})
        device = next((d for d in devices if takes(d, named.arch)), devices[0])
        for candidate in left:
            require_arch(device, candidate.binary.arch, f"trial {candidate.trial}")
        stack.enter_context(turn(device, say))
        here = real_gpu(device, named)
        if device.name != named.name:
            say(f"compiled for {named.name}, timed on {device.name}, of the same architecture")
        chosen = left if everything else left[:top]
        say(f"{len(chosen)} of {len(left)} candidates of {wanted}, on {device.name}")
        spaces = spaces_of(ledger, chosen, wanted, here)
        seed = secrets.randbelow(2**31)
        space = spaces[chosen[0].run]
        aim = next(r.objectives for r in ledger.runs() if r.id == chosen[0].run)
        run = ledger.start_run(
            gpu=named.key, problem=str(wanted), device=ledger_device(device), space=space, sampler="measure", seed=seed,
            command=" ".join(sys.argv), objectives=aim,
        )  # fmt: skip
        judge = GpuJudge(space.kernel, wanted, here, device, seed, long_run_us=partial(ledger.long_run_us, run))
        remeasurer = Remeasurer(ledger, run, judge, wanted, here, seed, lambda c: say(_line(c)))
        stopped = stop_on_signal(remeasurer.stop)
        notes = remeasurer.measure(chosen, spaces)
        ledger.finish_run(run, "interrupted" if stopped() else "all candidates done")
        found = ledger.best(str(wanted), named.key, top=10)
        like = {(m.device, str(m.policy)) for m in (c.measurement for c in found)}
        pairs = [p for p in measured_pairs(ledger, str(wanted), named.key) if (p.device, p.policy) in like]
        baselines = ledger.baselines(run)
    agreed = agree([p.figures for p in of_one_model(pairs)])
    for line in (*map(_sdpa, baselines), *notes, *_agreed(agreed)):
        say(line)
    if as_json:
        click.echo(_as_json(run, agreed, pairs, baselines, found))
    else:
        stdout.print(ranking(dict(enumerate(found, 1))))
    return INTERRUPTED if stopped() else 0


def _nothing_left(problem, gpu: Gpu) -> str:
    return (
        f"the ledger holds no correct candidate of {problem} on {gpu.key} that is still to be measured: evoengine search "
        "--device emulator leaves some, evoengine best shows what was measured"
    )


def _as_json(run: int, agreed, pairs, baselines, found) -> str:
    summary = {"run": run, "agreement": asdict(agreed), "estimates": [asdict(p) for p in pairs]}
    summary |= {"baselines": [asdict(b) for b in baselines], "best": [c.to_json() for c in found]}
    return json.dumps(summary, indent=2)


def _line(candidate) -> str:
    from evoengine.cli.display import figure

    why = f", {candidate.reason}" if candidate.reason else ""
    return f"#{candidate.trial}  {candidate.outcome}  {figure(candidate)} TFLOPS{why}"


def _sdpa(baseline) -> str:
    return f"SDPA {baseline.name}: {baseline.tflops:,.4g} TFLOPS, {baseline.median_us:,.1f} µs"


def _agreed(agreed) -> list[str]:
    lines = []
    if agreed.spearman is not None:
        both = f"estimated and measured order of {agreed.candidates} candidates"
        lines.append(f"{both}: Spearman's ρ {agreed.spearman:.2f}")
    if agreed.regret is not None:
        lines.append(f"had only the 10 best estimates been timed, {agreed.regret:.1%} of speed would have been missed")
    return lines
