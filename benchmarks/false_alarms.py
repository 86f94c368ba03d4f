"""Right kernels that a judge calls wrong: drawn configurations of every family, and twenty own kernels.

    python -m benchmarks.false_alarms --count 27 --seed 1 [--short] [--only TEXT] [--processes N] [--minutes M]

Executor and emulator judge each kernel on its whole plan of cases, or with `--short` on the short ones. Exit code 1
where one is rejected; it is named with the reason. Problems and kernels take turns, so that what `--minutes` allows is
of all of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
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
    "decode:b3,h8,kv2,s777,d128,bf16,page16", "decode:b2,h16,s513,d576,bf16,page64",
    "decode:b1,h8,kv8,s300,d64,fp16,sq4,window100", "decode:b4,h32,kv4,s1000,d256,fp16,cache_fp8_e4m3,softcap30",
    "decode:b64,h128,s4096,d576,bf16", "varlen:h4,kv2,d128,bf16,causal,lens=112+37+0+300",
    "varlen:h3,d64,fp16,lens=1+257+65",
    "varlen:h4,kv1,d128,fp16,causal,lens=5+40+1,kvlens=205+40+133,page16", "attention-backward:b1,h2,s203,d64,fp16",
    "attention-backward:b2,h4,sq77,sk131,d128,bf16,causal,kv2", "grouped-gemm:rows=51+0+200+3,n264,k320,bf16,b_nk",
    "grouped-gemm:rows=64+130+7,n256,k384,fp8_e4m3,b_nk,block_scales", "gemm:m300,n520,k640,fp8_e4m3,b_nk,row_scales",
    "gemm:m130,n256,k512,int8,b_nk", "w4a16:m33,n256,k512,fp16,zeros", "w4a16:m200,n384,k640,bf16,g64,bias",
    "conv2d:n2,c24,h19,w21,k40,r3,s3,pad1,fp16,bias_relu", "conv2d:n1,c64,h30,w30,k64,r3,s3,stride2,dilation2,bf16",
    "rowwise:softmax,rows77,hidden5000,bf16", "rowwise:layer_norm,rows33,hidden2056,fp16",
    "rowwise:cross_entropy,rows19,hidden32000,bf16", "rowwise:silu_mul,rows50,hidden1408,fp32",
    "rowwise:layer_norm,rows40,hidden520,fp32",
    "rowwise:rope,rows300,hidden512,d128,positions4096,fp16", "rowwise:rms_norm,rows2,hidden16384,bf16",
)  # fmt: skip


Candidate = tuple[Target, SearchSpace, Config]


def drawn(problem: str, number: int, seed: int) -> Candidate:
    """Draw a configuration of the problem, families in turn."""
    workload, parsed = parse_problem(problem)
    file, gpu = asset("search_spaces") / f"{workload.name}.toml", find_gpu("h100")
    whole = load_space(file, parsed, gpu)
    families = [family for family in whole.families if family not in whole.empty_families]
    space = load_space(file, parsed, gpu, (families[number % len(families)],))
    return Target(workload, parsed, gpu), space, space.sample(np.random.default_rng([seed, number]), 1)[0]


def own_kernel(number: int, folder: Path) -> Candidate:
    kernel = (*KERNELS, *HIDDEN)[number]
    path = kernel.write(folder)
    workload = load_folder(path)
    target = Target(workload, workload.parse(workload.example), find_gpu("h100"))
    return target, load_space(path / "space.toml", target.problem, target.gpu), kernel.config


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


def judged(make: Callable[..., Candidate], arguments: tuple[object, ...], seed: int, short: bool) -> list[str]:
    """Return the alarms of a candidate, each with its problem and configuration."""
    target, space, config = make(*arguments)
    return [f"{target.problem} {dict(config)}: {said}" for said in alarms(target, space, config, seed, short)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="configurations of each problem")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="the short cases alone")
    parser.add_argument("--only", default="", help="problems that contain this, without the own kernels")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no candidate after these")
    args = parser.parse_args()
    found, start = Counter[str](), time.monotonic()
    problems = [problem for problem in PROBLEMS if args.only in problem]
    wanted: list[tuple[Callable[..., Candidate], tuple[object, ...]]]
    wanted = [(drawn, (problem, n, args.seed)) for n in range(args.count) for problem in problems]
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(args.processes, max_tasks_per_child=8) as pool:
        if not args.only:
            wanted[len(problems) : len(problems)] = [
                (own_kernel, (n, Path(scratch))) for n in range(len(KERNELS) + len(HIDDEN))
            ]
        running: dict[Future[list[str]], object] = {}
        while wanted or running:
            while wanted and len(running) < args.processes and time.monotonic() - start < 60 * args.minutes:
                make, arguments = wanted.pop(0)
                running[pool.submit(judged, make, arguments, args.seed, args.short)] = arguments
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                del running[done]
                said = done.result()
                found["kernels"] += 1
                found["alarms"] += bool(said)
                print(*said, sep="\n", end="\n" * bool(said), flush=True)
    print(f"{found['kernels']} right kernels, {found['alarms']} alarms, {time.monotonic() - start:,.0f} s")
    sys.exit(found["alarms"] > 0)


if __name__ == "__main__":
    main()
