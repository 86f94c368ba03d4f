"""2-D convolution of images with channels, y = g(x ∗ weight + bias) + residual, channels last, of 16-bit floats.

Nothing here needs a tensor library; the tensors themselves are drawn and judged in `tensors.py`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from evoengine.devices.base import DTYPE_BYTES, Parameter, ScalarArgument, TensorMapArgument, TensorParameter
from evoengine.records import Config, Launch
from evoengine.space.symbol import int32, symbol
from evoengine.workloads.base import Case, FullSize, Tensors, Workload
from evoengine.workloads.conv2d.cases import cells, full_plan, gate_cases, visited
from evoengine.workloads.conv2d.problem import EXAMPLE, Conv2dProblem, parse_problem
from evoengine.workloads.coverage import Cell
from evoengine.workloads.full_size import FullCase
from evoengine.workloads.gemm import STORED_ROWS, SWIZZLED, partial_sums
from evoengine.workloads.gemm.problem import BEHIND_SUMS, HALVES

SIZES = ("images", "height", "width", "channels", "filters")
"""names in the order of the kernel's parameters"""


class Conv2d(Workload[Conv2dProblem]):
    name = "conv2d"
    grammar = (
        f"n…,c…,h…,w…,k…,r…,s…,{'|'.join(HALVES)}[,stride…][,pad…][,dilation…][,{'|'.join(BEHIND_SUMS)}][,residual]"
    )
    example = EXAMPLE
    compile_time = (
        "dtype", "element_bytes", "epilogue", "a_layout", "b_layout", "residual", "batched", "out_dtype", "scales",
        "byte_product", "promoted", "gated", "filter_h", "filter_w", "stride", "pad", "dilation", "chunked",
    )  # fmt: skip # a list
    baseline_label = "torch"

    parse = staticmethod(parse_problem)
    cases = staticmethod(gate_cases)
    cells = staticmethod(cells)
    full_plan = staticmethod(full_plan)

    def flops(self, problem: Conv2dProblem) -> float:
        """Return the usual count: a product and a sum per weight and output, including those of the padding."""
        return 2.0 * problem.gemm.m * problem.gemm.n * problem.gemm.k

    def min_dram_bytes(self, problem: Conv2dProblem) -> float:
        """Return the bytes of pixels that a window sees, weights and the residual read once, and of y written once."""
        p = problem
        seen = (
            p.images
            * p.seen(p.height, p.out_height, p.filter_h)
            * p.seen(p.width, p.out_width, p.filter_w)
            * p.channels
        )
        return float(DTYPE_BYTES[p.dtype]) * (seen + sum(prod(p.shape(name)) for name in _tensors(p)[1:]))

    def visited(self, case: Case[Conv2dProblem], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
        return visited(case, visits)

    def parameters(self, problem: Conv2dProblem, config: Config) -> tuple[Parameter, ...]:
        p = problem
        return (
            *(TensorParameter(name, p.shape(name), p.dtype, output=name == "y") for name in _tensors(p)),
            *partial_sums(p.gemm, config),
            *(ScalarArgument(name, int32(getattr(p, name))) for name in SIZES),
            *_tensor_maps(p, config),
        )

    def at_run_time(self, problem: Conv2dProblem) -> Conv2dProblem:
        images, height, width, channels, filters = (symbol(name) for name in SIZES)
        return replace(problem, images=images, height=height, width=width, channels=channels, filters=filters)

    def tensors(self) -> Tensors[Conv2dProblem]:
        from evoengine.workloads.conv2d.tensors import Conv2dTensors

        return Conv2dTensors()

    def full_size(self) -> FullSize[FullCase[Conv2dProblem]]:
        from evoengine.workloads.conv2d.tensors import Conv2dFullSize

        return Conv2dFullSize(_Flat())


def _tensors(problem: Conv2dProblem) -> tuple[str, ...]:
    """Return their names in the order of the kernel's parameters."""
    return ("x", "weight", *(["bias"] if problem.has_bias else []), *(["residual"] if problem.residual else []), "y")


def _tensor_maps(problem: Conv2dProblem, config: Config) -> tuple[TensorMapArgument, ...]:
    """Return the tensor maps of a kernel by wgmma: of filters [filters, k], and of outputs if TMA stores them.

    Outputs are [m, filters].
    """
    if config.get("family") != "wgmma":
        return ()
    each = DTYPE_BYTES[problem.dtype]

    def over(name: str, tensor: str, rows: int, columns: int, box_rows: int) -> TensorMapArgument:
        box = SWIZZLED // each, box_rows
        return TensorMapArgument(name, tensor, problem.dtype, (columns, rows), (each * columns,), box, swizzle=SWIZZLED)

    product = problem.gemm
    filters = over("map_b", "weight", product.n, product.k, int(config["tile_n"]))
    return (
        (filters, over("map_c", "y", product.m, product.n, STORED_ROWS)) if config["c_store"] == "tma" else (filters,)
    )


class _Flat(Conv2d):
    """A Conv2d whose outputs of all images are consecutive, [outputs, filters]: a block writes a tile of them."""

    def parameters(self, problem: Conv2dProblem, config: Config) -> tuple[Parameter, ...]:
        flat = problem.gemm.m, problem.filters
        return tuple(
            replace(p, shape=flat) if isinstance(p, TensorParameter) and p.name in ("residual", "y") else p
            for p in super().parameters(problem, config)
        )


WORKLOAD = Conv2d()
