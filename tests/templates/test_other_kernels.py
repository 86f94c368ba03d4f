"""The templates beside attention and gemm: NVRTC takes them for every GPU, and nothing spills at the starts."""

from __future__ import annotations

from itertools import chain

import pytest

from evoengine.gpu import known_gpus
from evoengine.paths import asset
from evoengine.records import Source
from evoengine.space.space import load_space
from evoengine.stages.compile import CompileFailed, compile_source
from evoengine.workloads import parse_problem
from tests.support.exhaustive import more

PROBLEMS = [
    "rms_norm:rows4096,hidden4096,bf16",
    "rms_norm:rows4096,hidden5120,fp16",
    "rms_norm:rows4096,hidden4096,fp32",
    "rowwise:rope,rows8192,hidden4096,d128,bf16",
    "rowwise:silu_mul,rows8192,hidden14336,bf16",
    "convolution:w4096,h4096,fw17,fh17",
]
SEQUENCES = ["varlen:h32,kv8,d128,bf16,causal,lens=512+37+2048", "varlen:h32,kv8,d64,fp16,lens=512+37+2048,page16"]
GROUPS = ["grouped-gemm:rows=512+37+0+2048,n4096,k2048,bf16,b_nk", "grouped-gemm:rows=8x40,n1000,k200,fp16"]
WINDOWS = [
    "conv2d:n32,c128,h28,w28,k128,r3,s3,pad1,fp16",
    "conv2d:n32,c3,h224,w224,k64,r7,s7,stride2,pad3,bf16,bias_relu",
]
PACKED = ["w4a16:m16,n4096,k4096,fp16,zeros", "w4a16:m4096,n4096,k4096,bf16,g32,zeros,bias_silu"]


ALL = 99
CASES = [(problem, "sm_80", 1) for problem in (PROBLEMS[0], PROBLEMS[3])] + [(SEQUENCES[0], "sm_90a", 1)]
CASES += more((problem, arch, ALL) for problem in (*PROBLEMS, *PACKED, *WINDOWS) for arch in ("sm_80", "sm_90a"))
CASES += more((problem, "sm_90a", ALL) for problem in (*SEQUENCES, *GROUPS))
"""problem, architecture, and how many starts of each family are compiled at most"""


@pytest.mark.parametrize(("problem", "arch", "most"), CASES)
def test_the_starts_compile_without_spills_or_warnings(kernel_gate, problem, arch, most):
    gate = kernel_gate(problem)
    families = set(gate.space.families) - gate.space.empty_families.keys()
    families -= {"wgmma"} if arch != "sm_90a" else set()
    by_family = {f: [c for c in gate.space.starts if c["family"] == f][:most] for f in families}
    assert all(by_family.values())
    for config in chain(*by_family.values()):
        binary = compile_source(gate.source(config), arch)
        assert (binary.spill_bytes, binary.stack_bytes, binary.warnings) == (0, 0, ()), config


@pytest.mark.parametrize("problem", [*PROBLEMS, *SEQUENCES, *GROUPS, *PACKED, *WINDOWS])
def test_every_family_has_a_start_on_every_gpu(problem):
    workload, own = parse_problem(problem)
    least = 80 if problem in (*SEQUENCES, *GROUPS, *PACKED) else 75
    for gpu in (gpu for gpu in known_gpus().values() if gpu.capability >= least):
        space = load_space(asset("search_spaces") / f"{workload.name}.toml", own, gpu)
        assert {c["family"] for c in space.starts} == set(space.families) - space.empty_families.keys(), gpu.key


def test_a_launch_that_disagrees_with_the_template_about_shared_memory_does_not_compile(kernel_gate):
    gate = kernel_gate(PROBLEMS[3])
    for config in gate.space.starts:
        good = gate.source(config)
        stated = f"== {good.launch.shared_bytes}"
        assert stated in good.text
        short = Source(good.text.replace(stated, f"== {good.launch.shared_bytes + 4}"), good.entry, good.launch)
        with pytest.raises(CompileFailed, match="static assertion failed"):
            compile_source(short, "sm_90a")
