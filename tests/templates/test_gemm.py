"""The GEMM templates: their binaries, and that they are right on the emulator for every shape, dtype and epilogue."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache

import jinja2
import numpy as np
import pytest
import torch

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run
from evoengine.cuda_files import disassembler
from evoengine.devices.base import KernelFailure, TensorArgument, TensorParameter
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import Source
from evoengine.sass.listing import disassemble
from evoengine.sass.main_loop import main_loops
from evoengine.space.space import SearchSpace, load_space
from evoengine.stages import compile as stage
from evoengine.stages.compile import compile_source
from evoengine.workloads import find_workload, parse_problem
from evoengine.workloads.base import Case
from evoengine.workloads.gemm.problem import GemmProblem
from tests.support.exhaustive import more, representatives

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WORKLOAD = find_workload("gemm")
EPILOGUES = ("none", "bias", "bias_relu", "bias_gelu", "bias_silu", "silu")
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader([asset("templates"), asset("templates") / "include"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def Gemm(m, n, k, dtype="fp16", epilogue="bias", **more):
    return GemmProblem(m, n, k, dtype, epilogue, **more)


LARGE = Gemm(4096, 4096, 4096)


@cache
def space(problem: GemmProblem = LARGE, gpu: str = "h100") -> SearchSpace:
    return load_space(asset("search_spaces") / "gemm.toml", problem, find_gpu(gpu))


def starts(family: str, problem: GemmProblem = LARGE, gpu: str = "h100"):
    return [c for c in space(problem, gpu).starts if c["family"] == family]


def start(wanted):
    """The first start point with these values, whichever of them it takes from the second part on."""
    wanted, *changes = wanted if isinstance(wanted, tuple) else (wanted,)
    found = next(c for c in space().starts if wanted.items() <= c.items())
    return {**found, **(changes[0] if changes else {})}


def source(config, problem: GemmProblem) -> Source:
    launch = WORKLOAD.gate_launch(Case("one", problem, config=config), space().launch(config, problem))
    constants = {name: problem.variables()[name] for name in WORKLOAD.compile_time}
    context = {**constants, **config, "threads": launch.threads, "shared_bytes": launch.shared_bytes}
    return Source(TEMPLATES.get_template(f"gemm/{config['family']}.cu.j2").render(context), "gemm", launch)


def expected(problem: GemmProblem, x: dict[str, torch.Tensor]) -> torch.Tensor:
    """In float64."""
    c = x["a"].double() @ x["b"].double()
    if problem.epilogue.startswith("bias"):
        c = c + x["bias"].double()
    if problem.epilogue.endswith("relu"):
        c = c.clamp(min=0)
    if problem.epilogue.endswith("gelu"):
        c = torch.nn.functional.gelu(c)
    if problem.epilogue.endswith("silu"):
        c = c * torch.sigmoid(c)
    return c + x["residual"].double() if problem.residual else c


def drawn_inputs(problem: GemmProblem, seed: int) -> dict[str, torch.Tensor]:
    """A [batch, m, k], B [batch, k, n] and C's residual, whatever their layouts in memory."""
    p, drawn = problem, torch.Generator().manual_seed(seed)
    shapes = {"a": (p.m, p.k), "b": (p.k, p.n), "bias": (p.n,), "residual": (p.m, p.n)}
    entries = {name: shape if name == "bias" or p.batch == 1 else (p.batch, *shape) for name, shape in shapes.items()}
    return {name: torch.randn(shape, generator=drawn).to(DTYPES[p.dtype]) for name, shape in entries.items()}


def worst_error(config, problem: GemmProblem, text: Source | None = None, seed: int = 5) -> float:
    """The largest error of the kernel's C, in units of the dtype's rounding at the scale of the reference's largest
    elements; NaN where an element was never written."""
    inputs = drawn_inputs(problem, seed)
    transposed = {"a": problem.a_layout == "km", "b": problem.b_layout == "nk"}
    data = {
        name: (x.mT if transposed.get(name) else x).contiguous().view(torch.uint16).numpy()
        for name, x in inputs.items()
    }
    data["c"] = np.full(problem.shape("c"), 0x7FFF, np.uint16)
    arguments = [
        TensorArgument(p.name, data[p.name], p.output) if isinstance(p, TensorParameter) else p
        for p in WORKLOAD.parameters(problem, config)
    ]
    text = text or source(config, problem)
    found = run(build(text, "sm_90a"), "gemm", text.launch, arguments, seed, 60.0)["c"]
    c = torch.from_numpy(found).view(DTYPES[problem.dtype]).double()
    right = expected(problem, inputs)
    unit = torch.finfo(DTYPES[problem.dtype]).eps / 2 * right.abs().max().clamp(min=1)
    return ((c - right).abs().max() / unit).item()


def is_right(config, problem: GemmProblem, text: Source | None = None) -> bool:
    return worst_error(config, problem, text) <= 1.5


# ---- the binaries


COMPILED = [(f, arch, d) for f, arch in (("mma", "sm_80"), ("mma", "sm_90a"), ("wgmma", "sm_90a")) for d in DTYPES]
FAST_COMPILED = [("mma", "sm_80", "fp16")]


@pytest.mark.parametrize(
    ("family", "arch", "dtype", "most"), [*((*c, 1) for c in FAST_COMPILED), *more((*c, 99) for c in COMPILED)]
)
def test_the_starts_compile_without_spills_or_warnings(family, arch, dtype, most):
    problem = replace(LARGE, dtype=dtype, epilogue="bias_gelu")
    assert starts(family)
    for config in starts(family)[:most]:
        binary = compile_source(source(config, problem), arch)
        assert (binary.spill_bytes, binary.stack_bytes, binary.warnings) == (0, 0, ()), config


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.parametrize(("family", "most"), [("wgmma", 1), *more([("wgmma", 99), ("mma", 99)])])
def test_a_binary_holds_the_tensor_instructions_of_one_step(monkeypatch, family, most):
    monkeypatch.setattr(stage, "disassembler", disassembler)
    for config in starts(family)[:most]:
        mix = compile_source(source(config, LARGE), "sm_90a").mix
        assert mix.get("HMMA", 0) + mix.get("HGMMA", 0) == space().cost(config)["tensor_instructions"], config
        assert not mix.keys() & {"LDL", "STL"}


# ---- the space


@pytest.mark.parametrize("gpu", ["a100", "l4"])
def test_wgmma_is_left_out_where_there_is_none(gpu):
    assert "Hopper" in space(LARGE, gpu).empty_families["wgmma"]
    assert starts("mma", LARGE, gpu)


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.parametrize("cluster", ["1x2", *more(["1x1"])])
def test_sums_of_fp8_with_few_rows_are_added_beside_the_next_products(cluster):
    problem = parse_problem("gemm:m128,n4096,k7168,fp8_e4m3,b_nk,block_scales")[1]
    config = next(c for c in starts("wgmma", problem) if c["tile_n"] == 64 and c["cluster"] == cluster)
    binary = compile_source(source(config, problem), "sm_90a")
    assert binary.spill_bytes == 0
    listing = disassemble(binary.cubin)
    assert "MEMBAR.ALL.GPU" not in listing  # nor does a block wait for all its memory accesses before its first tile
    steps = max(main_loops(listing, "gemm"), key=lambda loop: loop.count("QGMMA"))
    assert (steps.count("QGMMA"), steps.count("R2UR"), steps.count("LDL")) == (32, 0, 0)
    waits = [i.text for i in steps.step if i.opcode.startswith("WARPGROUP.DEPBAR")]
    assert len(waits) == 8 and all("gsb0, 0x1" in wait for wait in waits)


def test_wgmma_is_left_out_where_rows_are_no_multiples_of_16_bytes():
    for problem in (replace(LARGE, k=4092), replace(LARGE, n=4095)):
        assert "16 bytes" in space(problem).empty_families["wgmma"]
        assert starts("mma", problem)


@pytest.mark.parametrize("family", ["mma", "wgmma"])
def test_every_knob_changes_the_text_or_the_launch(family):
    def rendered(config):
        return source(config, LARGE).text, space().launch(config)

    moved, live = set(), set()
    for config in starts(family):
        for other in (c for c in space().neighbours(config) if c["family"] == family):
            changed = {name for name in config.keys() | other.keys() if config.get(name) != other.get(name)}
            if len(changed) == 1:
                moved |= changed
                live |= changed if rendered(config) != rendered(other) else set()
    assert moved == live >= {"tile_m", "tile_n", "stages", "group_m"}
    if family == "wgmma":
        assert live >= {"cluster", "c_store", "producer_registers", "ping_pong", "swap"}


# ---- right on the emulator

SHAPES = [(1, 1, 1), (1, 8, 8), (129, 65, 33), (64, 128, 64), (130, 264, 200), (257, 72, 24), (70, 63, 129)]


def possible(family: str, shapes):
    return [s for s in shapes if family == "mma" or s[1] % 8 == s[2] % 8 == 0]


CASES = [
    (f, n, shape) for f, count in (("mma", 4), ("wgmma", 4)) for n in range(count) for shape in possible(f, SHAPES)
]
FAST_CASES = [(f, 0, s) for f, s in (("mma", (129, 65, 33)), ("wgmma", (130, 264, 200)))]


@pytest.mark.parametrize(("family", "number", "shape"), [*FAST_CASES, *more(c for c in CASES if c not in FAST_CASES)])
def test_a_start_is_right(family, number, shape):
    problem = Gemm(*shape, dtype=("fp16", "bf16")[sum(shape) % 2], epilogue=EPILOGUES[(number + shape[0]) % 4])
    assert is_right(starts(family)[number], problem)


@pytest.mark.parametrize("epilogue", ["bias_gelu", *more(e for e in EPILOGUES if e != "bias_gelu")])
@pytest.mark.parametrize("family", ["mma", *more(["wgmma"])])
def test_every_epilogue_is_right(family, epilogue):
    assert is_right(starts(family)[-1], Gemm(72, 88, 136, "fp16", epilogue))


@pytest.mark.parametrize("number", [0, *more(range(1, 12))])
@pytest.mark.parametrize("family", ["wgmma", *more(["mma"])])
def test_a_configuration_drawn_at_random_is_right(family, number):
    drawn = space().sample(np.random.default_rng(number), 60)
    config = next(c for c in drawn if c["family"] == family)
    steps = 2 * config["stages"] + 1  # the pipeline wraps around twice
    odd = 3 if family == "mma" and number % 3 == 0 else 8
    m, n = config["tile_m"] * 2 + 9, config["tile_n"] + 2 * odd
    problem = Gemm(m, n, (steps - 1) * config["tile_k"] + odd, ("fp16", "bf16")[number % 2], EPILOGUES[number % 4])
    assert is_right(config, problem), config


def test_long_sums_are_kept_in_single_precision():
    for family in ("mma", "wgmma"):
        assert is_right(starts(family)[-1], Gemm(16, 16, 8192, "bf16", "none"))


# ---- each way to schedule, store and lay out, on tiles that leave remainders

SMALL = {"tile_m": 128, "tile_n": 128, "stages": 2}
PERSISTENT = ({"schedule": "persistent"}, SMALL)
PING_PONG = ({"schedule": "persistent"}, {**SMALL, "ping_pong": True, "cluster": "1x1"})
FEW_ROWS = ({"family": "wgmma", "tile_m": 64, "consumers": 1}, {"tile_m": 16, "swap": True})
WAYS = {
    "pairs of blocks below one another": (PERSISTENT, {}),
    "pairs of blocks beside one another": ((PERSISTENT[0], {**SMALL, "cluster": "1x2"}), {}),
    "along a Hilbert curve": ((PERSISTENT[0], {**SMALL, "raster": "hilbert", "cluster": "1x1"}), {}),
    "ping-pong": (PING_PONG, {}),
    "ping-pong in pairs of blocks": ((PERSISTENT[0], {**SMALL, "ping_pong": True}), {}),
    "tiles of 192 columns": ((PERSISTENT[0], {**SMALL, "tile_n": 192}), {}),
    "a single producer warp": ((PERSISTENT[0], {**SMALL, "producer_registers": 0, "cluster": "1x1"}), {}),
    "B along k": (PERSISTENT, {"b_layout": "nk"}),
    "A along m": (PERSISTENT, {"a_layout": "km"}),
    "both the other way round": (({"family": "wgmma", "tile_m": 64}, {}), {"a_layout": "km", "b_layout": "nk"}),
    "a residual, stored by TMA": (PERSISTENT, {"residual": True, "epilogue": "bias_silu"}),
    "a residual, stored in words": (({"family": "wgmma", "tile_m": 64}, {}), {"residual": True}),
    "a residual, by mma": ({"family": "mma", "tile_m": 64}, {"residual": True}),
    "a batch": (PERSISTENT, {"batch": 3, "residual": True}),
    "a batch, by mma": ({"family": "mma", "tile_m": 64}, {"batch": 3, "residual": True}),
    "A along m, by mma": ({"family": "mma", "tile_m": 64}, {"a_layout": "km"}),
    "B along k, by mma": ({"family": "mma"}, {"b_layout": "nk"}),
    "both the other way round, by mma": (({"family": "mma"}, {"layout": "pad"}), {"a_layout": "km", "b_layout": "nk"}),
    "few rows as columns": (FEW_ROWS, {"residual": True}),
    "few rows as columns, B along k": (FEW_ROWS, {"b_layout": "nk"}),
    "few rows, two blocks that share the steps": (
        (FEW_ROWS[0], {**FEW_ROWS[1], "split_k": 2, "producer_registers": 24}),
        {"residual": True},
    ),
    "few rows, four blocks that share the steps": (
        (FEW_ROWS[0], {**FEW_ROWS[1], "split_k": 4, "producer_registers": 24}),
        {},
    ),
    "two blocks that share the steps": (
        (
            {"family": "wgmma", "tile_m": 128, "tile_n": 128, "schedule": "none"},
            {"split_k": 2, "producer_registers": 24},
        ),
        {},
    ),
}


@pytest.mark.parametrize(
    "name",
    representatives(
        [pytest.param(n, id=n) for n in WAYS], "pairs of blocks below", "ping-pong in", "few rows as columns, B"
    ),
)
def test_every_way_is_right(name):
    wanted, changes = WAYS[name]
    config = start(wanted)
    problem = Gemm(2 * config["tile_m"] + 40, 2 * config["tile_n"] + 24, 3 * config["tile_k"] + 8, **changes)
    assert is_right(config, problem)


# ---- what is wrong is seen by the comparison above

MMA, WGMMA = {"family": "mma"}, {"family": "wgmma", "tile_n": 128, "tile_m": 128}
FAULTS = [
    ("no bias", MMA, "return col < n ? to_float(bias[col]) : 0.0f;", "return 0.0f;"),
    ("bias of the next column", WGMMA, "to_float(bias[col])", "to_float(bias[min(col + 1, n - 1)])"),
    ("last row not written", MMA, "row < m &&", "row < m - 1 &&"),
    ("a row too many written", {**WGMMA, "c_store": "direct"}, "row < m &&", "row <= m &&"),
    ("the last step left out", MMA, "steps = ceil_div(k, TILE_K);", "steps = k / TILE_K;"),
    ("tiles waited for too laxly", MMA, "wait<STAGES - 2>", "wait<STAGES - 1>"),
    ("chunks read where they were not put", MMA, "exchange((chunk % Tile::SPAN ^ Tile::swizzle(row)) * 16)", "exchange(chunk % Tile::SPAN * 16)"),
    ("a column's chunk off by one", MMA, "first_col / 8}", "first_col / 8 + 2}"),
    ("B not transposed", MMA, "ldmatrix_x4_trans(b,", "ldmatrix_x4(b,"),
    ("B read as K-major", WGMMA, "TRANSPOSED = true", "TRANSPOSED = false"),
    ("wrong step along K in B", WGMMA, "step * 16 * CHUNKS", "step * 8 * CHUNKS"),
    ("all warpgroups multiply the first rows of A", {**WGMMA, "c_store": "direct"}, "(first_stripe + stripe) * 64, 1)", "stripe * 64, 1)"),
    ("buffer given back before it is read", WGMMA, "wgmma_wait<STRIPES>();", "wgmma_wait<2 * STRIPES>();"),
    ("buffer filled while it is read", WGMMA, "tiles.acquire(i);", ""),
    ("tiles read before they arrived", WGMMA, "tiles.wait(i);", ""),
    ("products not waited for", WGMMA, "wait_for<0>(acc[stripe]);", "warpgroup_fence_operand(acc[stripe].d);"),
    ("the grouped order leaves tiles out", MMA, "within % rows", "within % GROUP_M"),
    ("a square of the curve twice", WAYS["along a Hilbert curve"][0], "square % squares_m", "0"),
    ("the lower block takes the upper one's tile", PERSISTENT, "rank / SPLIT_K % CLUSTER_M", "rank / SPLIT_K / CLUSTER_M"),
    ("chunks of C in the wrong rows", PERSISTENT, "TileC::offset(lane() % 16", "TileC::offset(lane() % 16 ^ 1"),
]  # fmt: skip
FAST = ("the last step left out", "buffer filled while it is read")


@pytest.mark.parametrize(
    ("wanted", "old", "new"), representatives([pytest.param(*f[1:], id=f[0]) for f in FAULTS], *FAST)
)
def test_a_planted_fault_is_seen(wanted, old, new):
    config = start(wanted)
    rows = 4 if config.get("raster") == "hilbert" else 1  # several squares of tiles
    problem = Gemm(rows * config["tile_m"] + 40, config["tile_n"] + 24, 9 * config["tile_k"] + 8, "fp16", "bias")
    good = source(config, problem)
    assert old in good.text, f"the template has no {old!r} any more"
    assert is_right(config, problem, good)
    with suppress(KernelFailure):
        assert not is_right(config, problem, Source(good.text.replace(old, new), good.entry, good.launch))
