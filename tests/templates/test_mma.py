"""The mma family: what its binaries hold, that it is right on the emulator, and that no two lanes meet in a bank."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run
from evoengine.cuda_files import disassembler
from evoengine.devices.base import TensorArgument
from evoengine.records import Source
from evoengine.stages import compile as stage
from evoengine.stages.compile import compile_source
from evoengine.stages.verify import make_arguments
from evoengine.workloads.attention.problem import HEAD_DIMS, parse_problem
from evoengine.workloads.base import Case
from tests.support.exhaustive import more
from tests.support.kernel_gate import attention_space


def problem(head_dim, dtype="fp16", rest=""):
    return f"b2,h4,s256,d{head_dim},{dtype}{rest}"


def starts(gate):
    return [c for c in gate.space.starts if c["family"] == "mma"]


SPILLING = product(["sm_80", "sm_86", "sm_89", "sm_90a"], HEAD_DIMS, [("bf16", ",causal"), ("fp16", "")])


@pytest.mark.parametrize(
    ("arch", "head_dim", "of", "most"), [("sm_80", 64, ("bf16", ",causal"), 1), *more((*case, 99) for case in SPILLING)]
)
def test_no_start_spills(attention_gate, arch, head_dim, of, most):
    dtype, rest = of
    gate = attention_gate(problem(head_dim, dtype, rest))
    assert starts(gate)
    for config in starts(gate)[:most]:
        binary = compile_source(gate.source(config), arch)
        assert (binary.spill_bytes, binary.stack_bytes, binary.warnings) == (0, 0, ()), (config, arch)


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.parametrize("head_dim", [64, *more(d for d in HEAD_DIMS if d != 64)])
def test_the_instructions_are_those_of_the_family(attention_gate, monkeypatch, head_dim):
    monkeypatch.setattr(stage, "disassembler", disassembler)
    gate = attention_gate(problem(head_dim))
    config = starts(gate)[0]
    mix = compile_source(gate.source(config), "sm_90a").mix
    stripes = config["tile_m"] // 16 // config["warps"]
    # twice tile_n x head_dim per 16 rows, 16 x 8 x 16 at a time
    assert mix["HMMA"] == 2 * stripes * config["tile_n"] * head_dim // 128
    assert mix["LDSM"] >= config["tile_n"] * head_dim // 128 and mix["LDGSTS"] > 0
    assert not mix.keys() & {"LDL", "STL"}
    # one exponential per score, one per row and step
    assert mix["MUFU"] <= stripes * (config["tile_n"] // 2 + 2 + 2) + 2


def test_starts_are_the_tile_choices_known_to_be_good(attention_gate):
    known = {64: (128, 112, 4), 128: (128, 64, 4), 256: (128, 96, 8)}
    for head_dim, tiles in known.items():
        found = {(c["tile_m"], c["tile_n"], c["warps"]) for c in starts(attention_gate(problem(head_dim)))}
        assert tiles in found


@pytest.mark.parametrize(
    ("gpu", "known"),
    [
        ("a100", {64: (128, 64, 4), 96: (128, 64, 4), 128: (128, 32, 4), 256: (128, 64, 8)}),
        ("a10", {64: (128, 32, 4), 96: (64, 64, 4), 128: (64, 64, 4), 256: (128, 32, 8)}),
        ("l40s", {64: (128, 32, 4), 96: (64, 64, 4), 128: (64, 64, 4), 256: (128, 32, 8)}),
    ],
)
@pytest.mark.parametrize("mask", ["", *more([",causal"])])
def test_each_head_dim_has_a_start_that_fits_the_shared_memory(gpu, known, mask):
    for head_dim, tiles in known.items():
        space = attention_space(problem(head_dim, rest=mask), gpu, ("mma",))
        assert tiles in {(c["tile_m"], c["tile_n"], c["warps"]) for c in space.starts}


RIGHT = [(64, n, rest) for n, rest in enumerate(["", ",kv1", ",causal", ",causal,kv2", "", ",causal"])]
RIGHT += [(head_dim, n, ",causal,kv2") for head_dim in (32, 96, 128, 256) for n in (0, -1)]


@pytest.mark.parametrize(("head_dim", "number", "rest"), [RIGHT[8], *more([*RIGHT[:8], *RIGHT[9:]])])
def test_a_start_is_right(attention_gate, head_dim, number, rest):
    gate = attention_gate(problem(head_dim, "bf16" if number % 2 else "fp16", rest))
    verdict = gate.judge(starts(gate)[number])
    assert verdict.correct, verdict.reason


@pytest.mark.exhaustive  # tests/workloads/test_false_alarms.py shows that one drawn is right
@pytest.mark.parametrize("number", range(10))
def test_a_configuration_drawn_at_random_compiles_and_is_right(attention_gate, number):
    gate = attention_gate(problem((32, 64, 96, 128, 256)[number % 5], "bf16", ",causal,kv2" if number % 2 else ""))
    [config] = attention_space(str(gate.problem), families=("mma",)).sample(np.random.default_rng(number))
    assert compile_source(gate.source(config), "sm_90a").registers > 0
    verdict = gate.judge(config, seed=number)
    assert verdict.correct, f"{config}: {verdict.reason}"


# ---- banks: every shared address of a run is written down and looked at

WRITE_DOWN = """
__device__ unsigned* log_of_thread;
__device__ void write_down(unsigned kind, unsigned address) {
    unsigned* log = log_of_thread + threadIdx.x * EVENTS * 2;
    unsigned n = ++log[0];
    if (n < EVENTS) log[2 * n] = kind, log[2 * n + 1] = address;
}
template <class Pointer>
__device__ Pointer write_down(unsigned kind, Pointer p) {
    write_down(kind, static_cast<unsigned>(__cvta_generic_to_shared(p)));
    return p;
}
"""
EVENTS = 4096
COPY, MATRIX, STORE, LOAD = 1, 2, 3, 4
WATCHED = [
    ("copy_async<16>(to +", f"copy_async<16>(write_down({COPY}, to +", " * 8, from", " * 8), from"),
    ("unsigned address) {\n", f"unsigned address) {{ write_down({MATRIX}, address);\n", None, None),
    ("write_vector<2>(staged +", f"write_vector<2>(write_down({STORE}, staged +", "% 4 * 2, x", "% 4 * 2), x"),
    ("read_vector<8>(staged +", f"read_vector<8>(write_down({LOAD}, staged +", "chunk));", "chunk)));"),
]


def watched(source: Source) -> Source:
    text = source.text
    for old, new, after, then in WATCHED:
        assert old in text and (after is None or after in text), old
        text = text.replace(old, new)
        text = text.replace(after, then) if after else text
    place = text.index("// ---- ldmatrix")
    text = text[:place] + WRITE_DOWN.replace("EVENTS", str(EVENTS)) + text[place:]
    last = "float scale) {\n"
    head, tail = text.rsplit(last, 1)
    set_once = "    if (threadIdx.x == 0) log_of_thread = log;\n    __syncthreads();\n"
    text = f"{head}float scale, unsigned* log) {{\n{set_once}{tail}"
    return Source(text, source.entry, source.launch)


def accesses(gate, config, source: Source):
    """(kind, addresses of a warp's lanes [32]) of each shared access of one block over three tiles, the last ragged."""
    lengths = f"b1,h1,sq{config['tile_m']},sk{2 * config['tile_n'] + 9},d{gate.problem.head_dim},fp16"
    case = Case("banks", parse_problem(lengths))
    workload = gate.target.workload
    launch = gate.space.launch(config, case.problem)
    log = TensorArgument("log", np.zeros((launch.threads, EVENTS, 2), np.uint32), output=True)
    inputs = workload.tensors().draw(case, 3).inputs
    arguments = (*make_arguments(workload.parameters(case.problem, config), inputs), log)
    logged = run(build(watched(source), "sm_90a"), source.entry, launch, arguments, 1, 30.0)["log"].astype(np.int64)
    for warp in logged.reshape(-1, 32, EVENTS, 2):
        [count] = set(warp[:, 0, 0].tolist())  # all lanes did the same
        assert 0 < count < EVENTS
        for n in range(1, count + 1):
            [kind] = set(warp[:, n, 0].tolist())
            yield kind, warp[:, n, 1]


def conflicts(gate, config, source: Source) -> dict[int, int]:
    """Kind of access → how many of its wavefronts met a bank twice."""
    found: dict[int, int] = defaultdict(int)
    for kind, addresses in accesses(gate, config, source):
        if kind == STORE:  # 4 bytes of each lane
            found[kind] += len(set(addresses // 4 % 32)) < 32
        else:  # 16 bytes of each lane, eight lanes at a time
            found[kind] += sum(len(set(eight // 16 % 8)) < 8 for eight in addresses.reshape(4, 8))
    return found


@pytest.mark.parametrize("layout", ["swizzle", "pad"])
@pytest.mark.parametrize("head_dim", [64, *more(d for d in HEAD_DIMS if d != 64)])
def test_no_access_to_shared_memory_meets_a_bank_twice(attention_gate, head_dim, layout):
    gate = attention_gate(problem(head_dim))
    config = {**starts(gate)[-1], "layout": layout, "q_in": "shared"}
    assert gate.space.contains(config), gate.space.why_invalid(config)
    assert conflicts(gate, config, gate.source(config)) == {COPY: 0, MATRIX: 0, STORE: 0, LOAD: 0}


@pytest.mark.parametrize(
    ("layout", "old", "new"),
    [
        ("swizzle", "return PADDED ? 0 : row % 8 / (8 / SPAN);", "return 0;"),
        ("pad", "ROW_CHUNKS = CHUNKS + (PADDED ? 1 : 0);", "ROW_CHUNKS = CHUNKS;"),
    ],
)
def test_a_layout_that_conflicts_is_seen(attention_gate, layout, old, new):
    gate = attention_gate(problem(64))
    config = {**starts(gate)[-1], "layout": layout}
    source = gate.doctored(config, old, new)
    source = Source(source.text.replace(f"== {source.launch.shared_bytes}", "> 0"), source.entry, source.launch)
    assert conflicts(gate, config, source)[MATRIX] > 0
