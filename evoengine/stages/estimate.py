"""A static estimate of a candidate's time, where the model of the chip (`predict`) cannot read its binary.

It is a prior, not a measurement, and ranked behind all predictions.

Each block spends clocks on five pipes (tensor, FP32, MUFU, shared memory, global memory), by the space's own count of
its work. Its phases follow one another across barriers, and those of blocks that share an SM hide behind one another: R
blocks take R times the longest phase, and the other phases of one of them. Where a block's own warps are in different
phases, the space states as `exposed` which part of those other phases is not hidden. What no warp waits for by itself
only bounds the whole: copies that overlap, and shared memory where wgmma reads its operands there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from evoengine.gpu import Gpu
from evoengine.records import Binary, Kind, Launch, Measurement

MUFU_PER_CLOCK = 16
"""exp2 results per SM and clock (CUDA C++ Programming Guide, arithmetic throughput, compute capability 8.x and 9.0)"""
SHARED_PER_CLOCK = 128
"""bytes per SM and clock: 32 banks of 4 bytes"""
GLOBAL_PER_CLOCK = 32
"""bytes per SM and clock out of the L2: a round prior, half of the nominal 64"""
BARRIER_CLOCKS = 40
"""a block-wide barrier with its re-fill of the pipelines: a round prior"""
MMA_SYNC_SHARE = 0.62
"""of Hopper's tensor peak that mma.sync (HMMA) reaches; the rest needs wgmma (Luo et al. 2024, arXiv:2402.13499)"""


def estimate(
    binary: Binary, launch: Launch, cost: Mapping[str, float], gpu: Gpu, flops: float, min_dram_bytes: float
) -> Measurement | None:
    """Return the estimated time in microseconds for the whole problem with its terms, or None.

    `cost` is per block, as stated by the space. None is returned if the space states no work of any pipe, since only
    memory would bound such a figure. The estimate is never below the roofline of `flops` and `min_dram_bytes`.
    """
    resident = gpu.blocks_resident(launch.threads, binary.registers, binary.shared_bytes + launch.shared_bytes)
    pipes = _pipes(binary, cost, gpu)
    if not any(pipes.values()):
        return None
    barriers = cost.get("barriers", 0.0) * BARRIER_CLOCKS
    copies = 0.0 if cost.get("overlap") else pipes["global"]
    apart = {"global", "shared"} if _has_wgmma(binary) else {"global"}
    phases = [clocks for name, clocks in pipes.items() if name not in apart]
    waited = cost.get("exposed", 1.0) * (sum(phases) - max(phases) + barriers + copies)

    def wave(blocks: int) -> float:
        return max(blocks * max(phases) + waited, blocks * max(pipes.values()))

    total = math.prod(launch.grid)
    slots = gpu.sms * resident
    full, rest = divmod(total, slots)
    clocks = full * wave(resident) + (wave(-(-rest // gpu.sms)) if rest else 0.0)
    to_us = 1e-3 / gpu.clock_ghz
    memory_us = min_dram_bytes / (gpu.memory_gbs * 1e3)
    time_us = max(clocks * to_us, memory_us, flops / gpu.tensor_tflops / 1e6)
    waves = total / slots
    terms = {f"{name}_us": clocks * waves * resident * to_us for name, clocks in pipes.items()}
    terms |= {
        "predicted": 0.0,
        "barriers_us": barriers * waves * to_us,
        "waited_us": waited * waves * to_us,
        "memory_us": memory_us,
        "waves": waves,
        "blocks_per_sm": float(resident),
    }
    return Measurement(Kind.ESTIMATED, f"estimate for {gpu.key}", flops / time_us / 1e6, time_us, terms=terms)


def _has_wgmma(binary: Binary) -> bool:
    return any("GMMA" in opcode for opcode in binary.mix)


def _pipes(binary: Binary, cost: Mapping[str, float], gpu: Gpu) -> dict[str, float]:
    """Return the clocks for which one block occupies each pipe of an SM."""
    per_clock = 1e3 / (gpu.sms * gpu.clock_ghz)
    share = MMA_SYNC_SHARE if gpu.arch.startswith("sm_90") and not _has_wgmma(binary) else 1.0
    return {
        "tensor": cost.get("tensor_flops", 0.0) / (gpu.tensor_tflops * per_clock * share),
        "fp32": cost.get("fp32_flops", 0.0) / (gpu.fp32_tflops * per_clock),
        "mufu": cost.get("mufu", 0.0) / MUFU_PER_CLOCK,
        "shared": cost.get("shared_bytes", 0.0) / SHARED_PER_CLOCK,
        "global": cost.get("global_bytes", 0.0) / GLOBAL_PER_CLOCK,
    }
