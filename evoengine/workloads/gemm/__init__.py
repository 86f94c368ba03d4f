"""Matrix product of halves, FP8 or int8 with an epilogue, C = f(A·B + bias) + residual.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from evoengine.devices.base import (
    DTYPE_BYTES,
    Parameter,
    ScalarArgument,
    ScratchParameter,
    TensorMapArgument,
    TensorParameter,
)
from evoengine.records import Config, Launch
from evoengine.space.symbol import int32, symbol
from evoengine.workloads.base import Case, FullSize, Tensors, Workload
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.gemm.cases import full_plan, gate_cases, persistent_clusters
from evoengine.workloads.gemm.coverage import cells, visited
from evoengine.workloads.gemm.problem import (
    BYTES,
    DTYPES,
    EPILOGUES,
    EXAMPLE,
    NO_SCALES,
    OUT_DTYPES,
    SCALES,
    GemmProblem,
    blocks_of_cluster,
    cluster_shape,
    cluster_tiles,
    most_sharers,
    parse_problem,
    sums_in_memory,
    tile_sizes,
)

SWIZZLED = 128
"""bytes that TMA swizzles together"""
STORED_ROWS = 16
"""rows of C that a warp stores together by TMA"""


class Gemm(Workload[GemmProblem]):
    name = "gemm"
    grammar = (
        f"[b…,]m…,n…,k…,{'|'.join(DTYPES)}[,a_km][,b_nk][,{'|'.join(EPILOGUES)}][,residual]"
        f"[,{'|'.join(OUT_DTYPES)}][,{'|'.join(SCALES)}]"
    )
    example = EXAMPLE
    compile_time = (
        "dtype", "element_bytes", "epilogue", "a_layout", "b_layout", "residual", "batched", "out_dtype", "scales",
        "byte_product", "promoted", "gated",
    )  # fmt: skip # a list
    baseline_label = "torch"

    parse = staticmethod(parse_problem)
    cases = staticmethod(gate_cases)
    cells = staticmethod(cells)
    visited = staticmethod(visited)
    full_plan = staticmethod(full_plan)

    def problem_sets(self) -> Mapping[str, tuple[str, ...]]:
        """Return the products of models' linear layers, which are tuned together."""
        return {name: tuple(_layers(*sizes)) for name, sizes in _MODELS.items()}

    def flops(self, problem: GemmProblem) -> float:
        """Return 2·m·n·k for each entry of the batch and each B, the usual count; the epilogue is left out."""
        return 2.0 * problem.batch * problem.m * problem.n * problem.k * (len(problem.operands) - 1)

    def min_dram_bytes(self, problem: GemmProblem) -> float:
        """Return the bytes of A, B, scales and the residual read once and C written once; the bias is too small."""
        p = problem
        operands = float(DTYPE_BYTES[p.dtype]) * sum(prod(p.shape(name)) for name in p.operands)
        scales = 4.0 * sum(prod(p.scale_shape(name)) for name in _scaled(p))
        return operands + scales + float(DTYPE_BYTES[p.out_dtype]) * sum(prod(p.shape(name)) for name in _like_c(p))

    def gate_launch(self, case: Case[GemmProblem], launch: Launch) -> Launch:
        """Return the launch of a case: the space's, except for the number of blocks of a persistent kernel."""
        if case.config.get("schedule") != "persistent":
            return launch
        clusters = persistent_clusters(case.problem, case.config)
        return replace(launch, grid=(clusters * blocks_of_cluster(case.config), 1, 1))

    def parameters(self, problem: GemmProblem, config: Config) -> tuple[Parameter, ...]:
        p = problem
        return (
            *(TensorParameter(name, p.shape(name), p.dtype) for name in p.operands),
            TensorParameter("bias", (p.n,), p.out_dtype),
            *(TensorParameter(name, p.shape(name), p.out_dtype) for name in _like_c(p)[:-1]),
            *(TensorParameter(f"scale_{name}", p.scale_shape(name), "fp32") for name in _scaled(p)),
            TensorParameter("c", p.shape("c"), p.out_dtype, output=True),
            *partial_sums(p, config),
            *(ScalarArgument(name, int32(getattr(p, name))) for name in ("batch", "m", "n", "k")[not p.batched :]),
            *_tensor_maps(p, config),
        )

    def at_run_time(self, problem: GemmProblem) -> GemmProblem:
        return replace(problem, m=symbol("m"), n=symbol("n"), k=symbol("k"))

    def tensors(self) -> Tensors[GemmProblem]:
        from evoengine.workloads.gemm.tensors import GemmTensors

        return GemmTensors()

    def full_size(self) -> FullSize[FullCase[GemmProblem]]:
        from evoengine.workloads.gemm.tensors import GemmFullSize

        return GemmFullSize(self)


def _scaled(problem: GemmProblem) -> tuple[str, ...]:
    return () if problem.scales == NO_SCALES else ("a", "b")


def _like_c(problem: GemmProblem) -> tuple[str, ...]:
    return ("residual", "c") if problem.residual else ("c",)


def partial_sums(problem: GemmProblem, config: Config) -> tuple[ScratchParameter, ...]:
    """Return what blocks that share a tile leave in global memory: their sums, and how many warps have done so."""
    if not sums_in_memory(config):
        return ()
    (tile_m, tile_n, _), tiles = tile_sizes(config), cluster_tiles(problem, config) * prod(cluster_shape(config))
    columns = tile_n * (len(problem.operands) - 1)
    warps = int(config["warps"]) if config["family"] == "mma" else 4 * int(config["consumers"])
    return (
        ScratchParameter("partial", (tiles, most_sharers(problem, config), tile_m, columns), "fp32"),
        ScratchParameter("arrived", (tiles, warps), "int32", zeroed=True),
    )


def _tensor_maps(problem: GemmProblem, config: Config) -> tuple[TensorMapArgument, ...]:
    entries = problem.batch if problem.batched else 0
    return tensor_maps(problem, config, dict.fromkeys((*problem.operands, "c"), entries))


def tensor_maps(problem: GemmProblem, config: Config, entries: Mapping[str, int]) -> tuple[TensorMapArgument, ...]:
    """Return the tensor maps of A and B for kernels that load by TMA, and of C if it is stored by TMA.

    `entries` counts those of a tensor's third dimension; with 0 it has two. A box is the columns that are swizzled
    together, 64 or, where they do not divide a tile, 32, by a tile's rows; of a tile that a cluster's blocks share each
    brings an equal part. A kernel moves bytes in pairs.
    """
    if config.get("family") != "wgmma":
        return ()
    p, (down, across) = problem, cluster_shape(config)
    tile = {axis: int(config[f"tile_{axis}"]) for axis in "mnk"}

    def over(name: str, box_rows: int) -> TensorMapArgument:
        dims: tuple[int, ...]
        strides: tuple[int, ...]
        box: tuple[int, ...]
        rows, columns = p.shape(name)[-2:]
        dtype = p.out_dtype if name == "c" else p.dtype
        row = DTYPE_BYTES[dtype] * columns
        swizzled = SWIZZLED if tile[p.axes(name)[1]] * DTYPE_BYTES[dtype] % SWIZZLED == 0 else SWIZZLED // 2
        if dtype in BYTES:
            dtype, columns = "uint16", columns // 2
        dims, strides, box = (columns, rows), (row,), (swizzled // DTYPE_BYTES["fp16"], box_rows)
        if entries[name]:
            dims, strides, box = (*dims, entries[name]), (*strides, row * rows), (*box, 1)
        return TensorMapArgument(f"map_{name}", name, dtype, dims, strides, box, swizzle=swizzled)

    def rows_of(name: str) -> int:
        return tile[p.axes(name)[0]]

    maps = (over("a", rows_of("a") // across), *(over(b, rows_of(b) // down) for b in p.operands[1:]))
    return (*maps, over("c", STORED_ROWS)) if config.get("c_store") == "tma" else maps


TOKENS = (16, 512, 8192)
"""rows of the products: decoding, a chunk of a prompt, a whole one"""
_MODELS = {"llama3-8b": (4096, 14336, 32, 8), "llama3-70b": (8192, 28672, 64, 8)}
"""name → hidden, intermediate, heads, heads of keys and values, as the models' configuration files have them"""


def _layers(hidden: int, intermediate: int, heads: int, kv_heads: int) -> list[str]:
    """Return the problems of a model's linear layers, with heads of 128.

    Queries, keys and values are one product, gate and up another, as inference engines have them.
    """
    layers = (
        (128 * (heads + 2 * kv_heads), hidden),
        (hidden, 128 * heads),
        (2 * intermediate, hidden),
        (hidden, intermediate),
    )
    return [f"gemm:m{m},n{n},k{k},bf16,b_nk" for m in TOKENS for n, k in layers]


WORKLOAD = Gemm()
