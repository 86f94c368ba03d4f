"""The best known products as configuration files of the fused MoE kernel of vLLM and SGLang.

They are named `E=…,N=…,device_name=….json`. That kernel is written in Triton. Its gate and up projections are one
product of [M, hidden] by [hidden, 2 N] for each expert, so a product here of n = 2 N columns is that of one expert: E
is 1. A file holds for each M the tile, the warps and the stages; what Triton makes of them was not timed here. Layout:
the README of vLLM's fused_moe/configs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from evoengine.gpu import Gpu
from evoengine.records import Candidate, Config
from evoengine.workloads.gemm.problem import HALVES, NO_EPILOGUE, GemmProblem

WARPS_PER_CONSUMER = 4
_TRITONS = {
    "BLOCK_SIZE_M": "tile_m",
    "BLOCK_SIZE_N": "tile_n",
    "BLOCK_SIZE_K": "tile_k",
    "GROUP_SIZE_M": "group_m",
    "num_stages": "stages",
}
"""Triton's knob → evoengine's"""
Files = dict[str, dict[str, dict[str, int]]]
"""name → rows M → Triton's knobs"""


@dataclass(frozen=True, slots=True)
class FusedMoe:
    files: Files
    left_out: tuple[str, ...]
    """a sentence for each product that no file has"""


def fused_moe_files(best: Iterable[tuple[GemmProblem, Candidate]], gpu: Gpu) -> FusedMoe:
    """Return the files of the best candidate of each problem on one GPU.

    Of problems with the same M and N, the first with the largest k is taken.
    """
    files: Files = {}
    left_out = []
    for problem, candidate in sorted(best, key=lambda found: -found[0].k):
        if why := _why_not(problem, candidate.config):
            left_out.append(f"{problem}: {why}")
            continue
        rows = files.setdefault(_file_name(problem.n // 2, gpu), {})
        if str(problem.m) in rows:
            left_out.append(f"{problem}: the file has this M and N of another k or dtype")
        else:
            rows[str(problem.m)] = _triton_knobs(candidate.config)
    in_order = {name: dict(sorted(rows.items(), key=lambda row: int(row[0]))) for name, rows in sorted(files.items())}
    return FusedMoe(in_order, tuple(left_out))


def _file_name(n: int, gpu: Gpu) -> str:
    """Return the file's name without a dtype, which is omitted for weights in half precision."""
    return f"E=1,N={n},device_name={gpu.name.replace(' ', '_')}.json"


def _why_not(problem: GemmProblem, config: Config) -> str | None:
    missing = [name for name in _TRITONS.values() if name not in config]
    if missing or not {"warps", "consumers"} & config.keys():
        return "its knobs are not those of gemm.toml"
    if problem.epilogue != NO_EPILOGUE:
        return f"the fused kernel has no {problem.epilogue} of its own"
    if problem.residual or problem.batch > 1:
        return "the fused kernel has one product for an expert, without a residual"
    if problem.dtype not in HALVES or problem.out_dtype != problem.dtype:
        return "a file without a dtype in its name is of weights and sums in half precision"
    if problem.n % 2:
        return "gate and up projections have as many columns each, and n is odd"
    odd = [f"{name} {config[name]}" for name in ("tile_m", "tile_n", "tile_k") if not _is_power_of_two(config[name])]
    return f"Triton's tiles are powers of two, and here {', '.join(odd)}" if odd else None


def _is_power_of_two(value: object) -> bool:
    return isinstance(value, int) and value > 0 and value & (value - 1) == 0


def _triton_knobs(config: Mapping[str, object]) -> dict[str, int]:
    """Return Triton's parameters. The producer warp of a wgmma kernel is not counted, because Triton adds its own."""
    knobs = {theirs: int(str(config[ours])) for theirs, ours in _TRITONS.items()}
    warps = config["warps"] if "warps" in config else WARPS_PER_CONSUMER * int(str(config["consumers"]))
    return knobs | {"num_warps": int(str(warps))}
