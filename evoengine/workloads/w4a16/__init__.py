"""A matrix product of 16-bit activations and 4-bit weights, as GPTQ stores them.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from math import prod

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, Parameter, ScalarArgument, TensorMapArgument, TensorParameter
from evoengine.records import Config, Launch
from evoengine.workloads.base import Case, FullSize, Tensors, Workload
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.gemm import SWIZZLED, partial_sums
from evoengine.workloads.gemm import WORKLOAD as GEMM
from evoengine.workloads.gemm.problem import BEHIND_SUMS, HALVES, cluster_shape, tile_sizes
from evoengine.workloads.w4a16.cases import cells, full_plan, gate_cases, visited
from evoengine.workloads.w4a16.problem import EXAMPLE, PACKED, W4A16Problem, parse_problem


class W4A16(Workload[W4A16Problem]):
    name = "w4a16"
    grammar = f"m…,n…,k…,{'|'.join(HALVES)}[,g32|g64|g128][,zeros][,{'|'.join(BEHIND_SUMS)}]"
    example = EXAMPLE
    compile_time = (
        "dtype", "epilogue", "residual", "batched", "out_dtype", "scales", "byte_product", "promoted", "gated", "group",
        "zeros",
    )  # fmt: skip # a list
    baseline_label = "torch, weights in 16 bits"

    parse = staticmethod(parse_problem)
    cases = staticmethod(gate_cases)
    cells = staticmethod(cells)
    visited = staticmethod(visited)
    full_plan = staticmethod(full_plan)

    def flops(self, problem: W4A16Problem) -> float:
        """Return 2·m·n·k, the usual count, without the expansion of the weights."""
        return 2.0 * problem.m * problem.n * problem.k

    def min_dram_bytes(self, problem: W4A16Problem) -> float:
        """Return the bytes of A, the weights, their scales and zero points read once and of C written once."""
        return float(sum(DTYPE_BYTES[dtype] * prod(problem.shape(name)) for name, dtype in _tensors(problem)))

    def gate_launch(self, case: Case[W4A16Problem], launch: Launch) -> Launch:
        return GEMM.gate_launch(Case(case.name, case.problem.gemm, config=case.config), launch)

    def parameters(self, problem: W4A16Problem, config: Config) -> tuple[Parameter, ...]:
        p = problem
        tensors = (TensorParameter(name, p.shape(name), dtype, output=name == "c") for name, dtype in _tensors(p))
        scalars = (ScalarArgument(name, np.int32(getattr(p, name))) for name in ("m", "n", "k"))
        return (*tensors, *partial_sums(p.gemm, config), *scalars, *_tensor_maps(p, config))

    def tensors(self) -> Tensors[W4A16Problem]:
        from evoengine.workloads.w4a16.tensors import W4A16Tensors

        return W4A16Tensors()

    def full_size(self) -> FullSize[FullCase[W4A16Problem]]:
        from evoengine.workloads.w4a16.tensors import W4A16FullSize

        return W4A16FullSize(self)


def _tensors(problem: W4A16Problem) -> tuple[tuple[str, str], ...]:
    """Return names and dtypes in the order of the kernel's parameters."""
    dtype = problem.dtype
    zeros = (("qzeros", "int32"),) if problem.zeros else ()
    bias = (("bias", dtype),) if problem.has_bias else ()
    return ("a", dtype), ("qweight", "int32"), ("scales", dtype), *zeros, *bias, ("c", dtype)


def _tensor_maps(problem: W4A16Problem, config: Config) -> tuple[TensorMapArgument, ...]:
    """Return the tensor maps of A and the words for kernels that load by TMA, as the template defines them."""
    if config.get("family") != "wgmma":
        return ()
    p, (tile_m, tile_n, tile_k) = problem, tile_sizes(config)
    box = SWIZZLED // DTYPE_BYTES[p.dtype], tile_m // cluster_shape(config)[1]
    a = TensorMapArgument("map_a", "a", p.dtype, (p.k, p.m), (DTYPE_BYTES[p.dtype] * p.k,), box, swizzle=SWIZZLED)
    rows, columns = p.shape("qweight")
    box = tile_n, tile_k // PACKED
    return a, TensorMapArgument("map_words", "qweight", "int32", (columns, rows), (4 * columns,), box, swizzle=0)


WORKLOAD = W4A16()
