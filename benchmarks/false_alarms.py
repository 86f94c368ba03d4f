"""Right kernels that a judge calls wrong: drawn configurations of every family, and twenty own kernels.

    python -m benchmarks.false_alarms --count 27 --seed 1 [--short]

Executor and emulator judge each kernel on its whole plan of cases, or with `--short` on the short ones. Exit code 1
where one is rejected; it is named with the reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import CompiledCandidate, Config
from evoengine.search.evaluators import make_plans
from evoengine.space.space import SearchSpace, load_space
from evoengine.stages.compile import CompileFailed, compile_source
from evoengine.stages.gate import Judge, emulator, executor, judge_short, judge_whole
from evoengine.stages.render import render
from evoengine.stages.verify import CannotJudge
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Target
from evoengine.workloads.folder import load_folder
from tests.support.own_kernels import KERNELS
from tests.support.own_kernels_hidden import KERNELS as HIDDEN

PROBLEMS = (
    "attention:b1,h2,sq77,sk203,d64,fp16", "attention:b2,h4,s101,d64,bf16,causal,kv2",
    "attention:b1,h4,sq45,sk131,d96,fp16,causal,kv1", "attention:b2,h2,s83,d256,bf16,causal",
    "attention:b4,h16,s2048,d128,fp16,causal", "gemm:m1000,n776,k336,fp16,bias", "gemm:m257,n1304,k5000,bf16",
    "gemm:m4096,n4096,k4096,fp16,bias_gelu", "gemm:m64,n72,k40,fp16", "rms_norm:rows1000,hidden520,bf16",
    "rms_norm:rows77777,hidden96,fp32", "rms_norm:rows33,hidden4100,fp16", "convolution:w301,h77,fw5,fh7",
    "convolution:w4096,h4096,fw3,fh3", "convolution:w33,h999,fw17,fh1",
)  # fmt: skip


def drawn(count: int, seed: int) -> Iterator[tuple[Target, SearchSpace, Config]]:
    """Yield `count` configurations of every problem, families in turn."""
    gpu = find_gpu("h100")
    for problem in PROBLEMS:
        workload, parsed = parse_problem(problem)
        file = asset("search_spaces") / f"{workload.name}.toml"
        target, space = Target(workload, parsed, gpu), load_space(file, parsed, gpu)
        families = [family for family in space.families if family not in space.empty_families]
        for n in range(count):
            own = load_space(file, parsed, gpu, (families[n % len(families)],))
            yield target, own, own.sample(np.random.default_rng([seed, n]), 1)[0]


def own_kernels(folder: Path) -> Iterator[tuple[Target, SearchSpace, Config]]:
    for kernel in (*KERNELS, *HIDDEN):
        path = kernel.write(folder)
        workload = load_folder(path)
        target = Target(workload, workload.parse(workload.example), find_gpu("h100"))
        yield target, load_space(path / "space.toml", target.problem, target.gpu), kernel.config


def alarms(target: Target, space: SearchSpace, config: Config, seed: int, short: bool) -> Iterator[str]:
    """Yield what each judge says of a right kernel other than that it is correct."""
    source = render(target, space, config, asset("templates"))
    try:
        contender = CompiledCandidate(0, source, compile_source(source, target.gpu.arch))
    except CompileFailed as error:
        yield f"not compiled: {error}"
        return
    judge = judge_short if short else judge_whole
    for device in ("executor", "emulator"):
        try:
            prepared: Judge = executor(contender) if device == "executor" else emulator(source, target.gpu.arch)
            verdict = judge(prepared, target.workload, make_plans(space, target, config), seed)
        except CannotJudge as error:
            yield f"{device} cannot judge: {error}"
        else:
            if not verdict.correct:
                yield f"{device}: {verdict.reason}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="configurations of each problem")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="the short cases alone")
    args = parser.parse_args()
    found: Counter[str] = Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for target, space, config in [*drawn(args.count, args.seed), *own_kernels(Path(scratch))]:
            said = list(alarms(target, space, config, args.seed, args.short))
            found["kernels"] += 1
            found["alarms"] += bool(said)
            for line in said:
                print(f"{target.problem} {dict(config)}: {line}", flush=True)
    print(f"{found['kernels']} right kernels, {found['alarms']} alarms, {time.monotonic() - start:,.0f} s")
    sys.exit(found["alarms"] > 0)


if __name__ == "__main__":
    main()
