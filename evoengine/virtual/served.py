"""Launch tuned kernels of vLLM and SGLang with the arguments that their own launchers pass.

This text follows a kernel's in the text of its candidates (evoengine.virtual.host).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 128
"""block sizes of the scales of fp8_w8a8_block"""
SMALLEST_TILE = 16
"""smallest tile dimension that tl.dot accepts"""
TILE = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
STARTS = (
    (16, 64, 128, 1, 4, 4), (16, 128, 128, 1, 4, 3), (32, 64, 128, 1, 4, 3), (64, 128, 128, 16, 4, 3),
    (64, 128, 64, 16, 8, 3), (128, 128, 64, 16, 8, 3),
)  # fmt: skip # a table
"""start points: the tile, num_warps, num_stages"""
OFF = (
    "use_int8_w8a8", "use_int8_w8a16", "per_channel_quant", "HAS_BIAS", "USE_TD", "c_sorted", "FUSE_ADD_TO_OUTPUT",
    "MASK_OUTPUT", "FUSE_SUM_ALL_REDUCE",
)  # fmt: skip # a table
"""values of the fused MoE kernel's parameters that are not tuned"""
NONE = ("a_desc", "b_desc", "b_bias_ptr", "bias_ptr", "add_mask_ptr")
ZERO = ("stride_bbe", "stride_bbn", "stride_bias_e", "stride_bias_n")
NO_STRIDES = dict.fromkeys(("stride_asm", "stride_ask", "stride_bse", "stride_bsk", "stride_bsn"), 0)

Placed = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]
"""rows in the order of their experts, the expert of each tile of rows, the number of rows with padding"""


class _Served:
    """A kernel with an autotuner's list."""

    def __init__(self, kernel: Any, framework: str, data: str, drawn: int) -> None:
        """Take the kernel of `framework`, "vllm" or "sglang", for "bf16", "fp8_w8a8" or "fp8_w8a8_block".

        A tensor of more than `drawn` elements is zeros that use no memory: launches with such are only predicted.
        """
        self._names, self._framework, self._drawn = kernel.arg_names, framework, drawn
        self._fp8, self._block = data != "bf16", BLOCK if data == "fp8_w8a8_block" else 0
        derived = {name: how for name, how in self._derived().items() if name in self._names}
        inner = triton.heuristics(derived)(kernel) if derived else kernel
        starts = dict.fromkeys((m, n, min(k, self._block or k), *rest) for m, n, k, *rest in STARTS)
        configs = [
            triton.Config(dict(zip(TILE, start, strict=False)), num_warps=start[4], num_stages=start[5])
            for start in starts
        ]
        self.tuned = triton.autotune(configs, key=[], prune_configs_by={"early_config_prune": self._valid})(inner)

    def _derived(self) -> Mapping[str, Callable[[Mapping[str, Any]], bool]]:
        """Return the parameters that a launcher computes from the tile."""
        return {}

    def _valid(self, configs: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return the configurations whose tiles tl.dot accepts and are no deeper than the blocks of scales."""
        tiles = [(config, [config.kwargs[name] for name in TILE[:3]]) for config in configs]
        deepest = self._block or max(k for _, (*_, k) in tiles)
        return [config for config, tile in tiles if min(tile) >= SMALLEST_TILE and tile[2] <= deepest]

    def _values(self, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        """Return a tensor of normal values."""
        dtype = torch.float8_e4m3fn if self._fp8 else torch.bfloat16
        count = torch.Size(shape).numel()
        if count > self._drawn:
            return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype).reshape(shape)
        # FP8 has few numbers near 0, which is why there are scales
        return (torch.randn(shape) * (1.0 if self._fp8 else scale)).to(dtype)

    def _launch(self, rows: int, columns: int, known: Mapping[str, Any]) -> None:
        """Launch the kernel on a grid over [rows, columns] with those of the arguments `known` that it takes."""
        passed = {name: value for name, value in known.items() if name in self._names}

        def grid(meta: Mapping[str, int]) -> tuple[int]:
            return (triton.cdiv(rows, meta["BLOCK_SIZE_M"]) * triton.cdiv(columns, meta["BLOCK_SIZE_N"]),)

        self.tuned[grid](**passed)


class FusedMoe(_Served):
    """The two products of an MoE layer, of which the first one is timed."""

    _chosen: torch.Tensor
    """the expert of each row of an output"""

    def call(self, M: int = 64, E: int = 8, N: int = 14336, K: int = 4096, topk: int = 2) -> None:
        """Launch both products for M tokens of K values, each routed to `topk` of E experts.

        Gate and up have N columns each, as in the names of the configuration files.
        """
        topk = min(topk, E)
        scores, experts = torch.rand(M, E, generator=torch.Generator().manual_seed(M)).topk(topk)
        self._chosen = experts.reshape(-1).to(torch.int32)
        tile = self.tuned.configs[0].kwargs["BLOCK_SIZE_M"]
        naive = "naive_block_assignment" in self._names and M * topk * 4 <= E
        placed = _one_by_one(self._chosen, tile) if naive else _aligned(self._chosen, E, tile)
        weights = scores.softmax(1)
        self._multiply(M, E, 2 * N, K, topk, placed, tile, {"topk_weights_ptr": weights, "MUL_ROUTED_WEIGHT": False})
        self._multiply(M * topk, E, K, N, 1, placed, tile, {"topk_weights_ptr": weights, "MUL_ROUTED_WEIGHT": True})

    def reference(
        self,
        a_ptr: torch.Tensor,
        b_ptr: torch.Tensor,
        a_scale_ptr: torch.Tensor,
        b_scale_ptr: torch.Tensor,
        topk_weights_ptr: torch.Tensor,
        top_k: int,
        MUL_ROUTED_WEIGHT: bool,
    ) -> torch.Tensor:
        """Return each row of `a_ptr` times its expert's matrix, with scales and the router's weight."""
        wide = _wide(a_ptr)
        a, rows = a_ptr.to(wide), torch.arange(self._chosen.numel())
        if self._block:
            a = a * _spread(a_scale_ptr, 1, a.shape[1]).to(wide)
        out = torch.empty(rows.numel(), b_ptr.shape[1], dtype=wide)
        for expert in self._chosen.unique().tolist():
            mine, b = rows[self._chosen == expert], b_ptr[expert].to(wide)
            if self._block:
                b = b * _spread(_spread(b_scale_ptr[expert], 0, b.shape[0]), 1, b.shape[1]).to(wide)
            elif self._fp8:
                b = b * (a_scale_ptr * b_scale_ptr[expert]).to(wide)
            out[mine] = a[mine // top_k] @ b.T
        if MUL_ROUTED_WEIGHT:
            out = out * topk_weights_ptr.reshape(-1, 1).to(wide)
        return out if wide == torch.float64 else out.to(torch.bfloat16)

    def _derived(self) -> Mapping[str, Callable[[Mapping[str, Any]], bool]]:
        return {"SWAP_AB": self._is_swapped, "swap_ab": self._is_swapped, "even_Ks": _is_even}

    def _is_swapped(self, args: Mapping[str, Any]) -> bool:
        hopper = triton.runtime.driver.active.get_current_target().arch == 90
        return self._fp8 and hopper and args["BLOCK_SIZE_M"] < 64 <= args["BLOCK_SIZE_N"]

    def _multiply(
        self, rows: int, experts: int, n: int, k: int, topk: int, placed: Placed, tile: int, more: Mapping[str, Any]
    ) -> None:
        """Launch the product of [rows, k] and [experts, n, k], each row for `topk` experts."""
        sorted_ids, of_tile, padded = placed
        out = torch.empty(rows * topk, n, dtype=torch.bfloat16)
        longest = self._chosen.numel() * tile if sorted_ids is None else sorted_ids.numel()
        if self._framework == "vllm" and rows < tile:
            longest = min(longest, rows * topk * tile)
        off = dict.fromkeys(OFF, False) | dict.fromkeys(NONE) | dict.fromkeys(ZERO, 0)
        known = off | self._scales(rows, experts, n, k) | {
            "a_ptr": self._values((rows, k)), "b_ptr": self._values((experts, n, k), k**-0.5), "c_ptr": out,
            "sorted_token_ids_ptr": sorted_ids, "expert_ids_ptr": of_tile, "num_tokens_post_padded_ptr": padded,
            "N": n, "K": k, "EM": longest, "num_valid_tokens": rows * topk, "stride_am": k, "stride_ak": 1,
            "stride_be": n * k, "stride_bk": 1, "stride_bn": k, "stride_cm": n, "stride_cn": 1, "SPLIT_K": 1,
            "group_n": self._block, "group_k": self._block, "naive_block_assignment": sorted_ids is None,
            "top_k": topk, "ROUTER_TOPK": 1, "compute_type": tl.bfloat16, "use_fp8_w8a8": self._fp8, **more,
        }  # fmt: skip # a table
        self._launch(longest, n, known)

    def _scales(self, rows: int, experts: int, n: int, k: int) -> dict[str, Any]:
        """Return the scales and their strides."""
        if not self._fp8:
            return {"a_scale_ptr": None, "b_scale_ptr": None} | NO_STRIDES
        if not self._block:
            return {"a_scale_ptr": _scale(1), "b_scale_ptr": _scale(experts), **NO_STRIDES, "stride_bse": 1}
        deep, wide = triton.cdiv(k, BLOCK), triton.cdiv(n, BLOCK)
        strides = {"stride_asm": deep, "stride_ask": 1, "stride_bse": wide * deep, "stride_bsk": 1, "stride_bsn": deep}
        return {"a_scale_ptr": _scale(rows, deep), "b_scale_ptr": _scale(experts, wide, deep), **strides}


class BlockFp8(_Served):
    """The product of a linear layer in FP8 with block-wise scales."""

    def call(self, M: int = 64, N: int = 2112, K: int = 7168) -> None:
        """Launch the product of [M, K] and [N, K]."""
        deep, wide = triton.cdiv(K, BLOCK), triton.cdiv(N, BLOCK)
        known = {
            "A": self._values((M, K)), "B": self._values((N, K)), "C": torch.empty(M, N, dtype=torch.bfloat16),
            "As": _scale(M, deep), "Bs": _scale(wide, deep), "M": M, "N": N, "K": K, "group_n": BLOCK,
            "group_k": BLOCK, "stride_am": K, "stride_ak": 1, "stride_bk": 1, "stride_bn": K, "stride_cm": N,
            "stride_cn": 1, "stride_As_m": deep, "stride_As_k": 1, "stride_Bs_k": 1, "stride_Bs_n": deep,
        }  # fmt: skip # a table
        self._launch(M, N, known)

    def reference(self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor) -> torch.Tensor:
        """Return the product of the scaled matrices."""
        wide = _wide(A)
        a = A.to(wide) * _spread(As, 1, A.shape[1]).to(wide)
        b = B.to(wide) * _spread(_spread(Bs, 0, B.shape[0]), 1, B.shape[1]).to(wide)
        out = a @ b.T
        return out if wide == torch.float64 else out.to(torch.bfloat16)

    def _derived(self) -> Mapping[str, Callable[[Mapping[str, Any]], bool]]:
        return {"needs_masking": lambda args: not _is_even(args)}


def _is_even(args: Mapping[str, Any]) -> bool:
    return bool(args["K"] % args["BLOCK_SIZE_K"] == 0)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _scale(*shape: int) -> torch.Tensor:
    return (torch.rand(shape) + 0.5) / 64


def _spread(scale: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Return the scale of each of `size` elements."""
    return scale.repeat_interleave(BLOCK, axis).narrow(axis, 0, size)


def _one_by_one(chosen: torch.Tensor, tile: int) -> Placed:
    """Return a tile for each row, as vLLM arranges few rows."""
    return None, chosen, torch.tensor([chosen.numel() * tile], dtype=torch.int32)


def _aligned(chosen: torch.Tensor, experts: int, tile: int) -> Placed:
    """Return the rows in the order of their experts, those of each expert padded to a multiple of `tile`."""
    rows = chosen.numel()
    longest = rows * tile if rows < experts else rows + experts * (tile - 1)
    counts = torch.bincount(chosen, minlength=experts)
    padded = (counts + tile - 1) // tile * tile
    order = chosen.argsort(stable=True)
    place = torch.arange(rows) + (padded - counts).cumsum(0)[chosen[order]] - (padded - counts)[chosen[order]]
    sorted_ids = torch.full((longest,), rows, dtype=torch.int32)
    sorted_ids[place] = order.to(torch.int32)
    of_tile = torch.zeros(triton.cdiv(longest, tile), dtype=torch.int32)
    used = torch.repeat_interleave(torch.arange(experts, dtype=torch.int32), padded // tile)
    of_tile[: used.numel()] = used
    return sorted_ids, of_tile, padded.sum(dtype=torch.int32).reshape(1)
