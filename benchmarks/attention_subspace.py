"""How many trials each sampler needs to find the best estimate of a part of the attention space, from scratch.

    python benchmarks/attention_subspace.py --record estimates.json     compiles every point: some 40 CPU-minutes
    python benchmarks/attention_subspace.py estimates.json              searches it with every sampler

The part has some 3,000 configurations of all four families and none of the space's start points. What a configuration
is worth is the static estimate of its real binary, so it depends on the knobs through the compiler too; where the
compiler spills or a launch cannot fit, it is rejected. Everything here is estimated, nothing measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

from evoengine.errors import UsageError  # noqa: E402
from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.paths import asset  # noqa: E402
from evoengine.records import Config, config_key  # noqa: E402
from evoengine.search.proposer import Proposer  # noqa: E402
from evoengine.search.samplers import NAMES  # noqa: E402
from evoengine.space.space import SearchSpace, load_space  # noqa: E402
from evoengine.stages.compile import CompileFailed, compile_source  # noqa: E402
from evoengine.stages.predict import estimate  # noqa: E402
from evoengine.stages.render import render  # noqa: E402
from evoengine.stages.screen import screen_binary, screen_launch  # noqa: E402
from evoengine.workloads import parse_problem  # noqa: E402
from evoengine.workloads.base import Target  # noqa: E402

PROBLEM, GPU = "b16,h16,s2048,d64,fp16", "h100"
TARGET = Target(*parse_problem(PROBLEM), find_gpu(GPU))
PART = (
    "tile_m >= 64 and tile_n in [64, 80, 96, 128, 160, 176] and min_blocks == 1",
    "family != 'wgmma' or rescale_above == 8 and producer_registers == 24 and o_store == 'direct'",
    "family != 'wgmma' or schedule == 'none'",
    "family != 'wgmma' or cluster == 1",
    "schedule == 'none'",
    "cluster == 1",
    "max_by == 'floats'",
    "pv_wait == 'after_max'",
    "not v_ahead",
    "family not in ['scalar', 'wmma'] or reduction == 'shuffle'",
    "family != 'wmma' or pad == 8 and vector == 8 and lanes == 8 and warps <= 4",
    "family != 'scalar' or vector >= 4 and o_in == 'registers' and pad >= 4",
)
"""what a configuration must satisfy besides the space's own rules"""
NEAR = 1.01


def part_of_attention_space() -> SearchSpace:
    """The attention space with PART among its constraints and without its start points."""
    text = (asset("search_spaces") / "attention.toml").read_text()
    whole = re.sub(r"^start = \[\n.*?^\]\n", "", text, flags=re.MULTILINE | re.DOTALL)
    rules = "".join(f'\n[[constraint]]\nexpr = "{expr}"\nwhy = "not computed exhaustively"\n' for expr in PART)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "attention.toml"
        file.write_text(whole + rules)
        return load_space(file, TARGET.problem, TARGET.gpu)


@cache
def space() -> SearchSpace:
    return part_of_attention_space()


def estimated_us(config: Config) -> float | None:
    """The estimate of a configuration's binary, in microseconds; None where a screen rejects it."""
    gpu = TARGET.gpu
    source = render(TARGET, space(), config, asset("templates"))
    if screen_launch(source.launch, gpu):
        return None
    try:
        binary = compile_source(source, gpu.arch)
    except CompileFailed:
        return None
    if screen_binary(binary, source, gpu, space().cost(config), timed=False):
        return None
    cost = space().cost(config)
    return estimate(binary, source.launch, cost, gpu, TARGET.flops, TARGET.min_dram_bytes).median_us


def record(path: Path, jobs: int) -> None:
    configs = list(space().enumerate())
    with ProcessPoolExecutor(jobs) as executor:
        found = executor.map(estimated_us, configs, chunksize=8)
        times = list(track(found, "compiling", len(configs), console=Console(stderr=True)))
    estimates = {config_key(config): us for config, us in zip(configs, times, strict=True)}
    path.write_text(json.dumps({"problem": PROBLEM, "gpu": GPU, "part": PART, "estimated_us": estimates}, indent=0))
    print(f"{len(estimates)} configurations, {sum(us is None for us in times)} of them rejected: {path}")


def read(path: Path) -> Mapping[str, float | None]:
    try:
        estimates = json.loads(path.read_text())["estimated_us"]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; make it with --record {path}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a record of estimates; make one with --record {path}") from error
    missing = sum(config_key(config) not in estimates for config in space().enumerate())
    if missing:
        raise UsageError(
            f"{path} lacks {missing} configurations of the space as it is now; make it again with --record"
        )
    return estimates


def trials_needed(sampler: str, seed: int, estimates: Mapping[str, float | None], budget: int) -> float:
    """Trials until the best estimate so far is within NEAR of the best of all; infinite past the budget."""
    target = NEAR * min(us for us in estimates.values() if us is not None)
    proposer = Proposer(space(), sampler, seed)
    for trial in range(1, budget + 1):
        proposal = proposer.propose()
        if proposal is None:
            break
        us = estimates[proposal.key]
        if us is not None and us <= target:
            return trial
        proposer.tell(proposal, None if us is None else [1 / us])
    return np.inf


def table(needed: Mapping[str, Sequence[float]], budget: int) -> Table:
    out = Table(title=f"trials until within {NEAR - 1:.0%} of the best estimate of {len(space()):,} configurations")
    for name in ("sampler", "seeds", "lower quartile", "median", "upper quartile", f"not in {budget}"):
        out.add_column(name, justify="left" if name == "sampler" else "right")
    for sampler, trials in needed.items():
        # a run that never got there is worse than any that did: quantiles that are runs, not means of two
        quartiles = np.quantile(trials, (0.25, 0.5, 0.75), method="higher")
        shown = [f"{q:.0f}" if np.isfinite(q) else f"> {budget}" for q in quartiles]
        out.add_row(sampler, str(len(trials)), *shown, str(int(np.isinf(trials).sum())))
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="estimates of the part, written by --record")
    parser.add_argument("--record", action="store_true", help="compute the estimates and write the file")
    parser.add_argument("--samplers", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=int, default=15, help="searches per sampler (default 15)")
    parser.add_argument("--budget", type=int, default=500, help="trials after which a search gives up (default 500)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    options = parser.parse_args(arguments)
    try:
        if min(options.seeds, options.budget, options.jobs) < 1:
            raise UsageError("--seeds, --budget and --jobs must be at least 1")
        if options.record:
            record(options.file, options.jobs)
            return 0
        estimates = read(options.file)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    tasks = [
        (sampler, seed, estimates, options.budget) for sampler in options.samplers for seed in range(options.seeds)
    ]
    with ProcessPoolExecutor(options.jobs) as executor:
        found = iter(list(executor.map(trials_needed, *zip(*tasks, strict=True))))
    needed = {sampler: [next(found) for _ in range(options.seeds)] for sampler in options.samplers}
    Console(width=100).print(table(needed, options.budget))
    return 0


if __name__ == "__main__":
    sys.exit(main())
