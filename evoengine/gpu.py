"""On what a kernel runs: limits and peak rates of a GPU, by name, from gpus.toml."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from evoengine.errors import UsageError

WARP = 32
REGISTER_UNIT = 256
"""registers are handed to a warp in units of this many (CUDA occupancy calculator, sm_70 and later)"""
SHARED_RESERVED = 1024
"""shared memory the driver keeps for itself in each block (CUDA C++ Programming Guide, sm_80 and later)"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Sizes in bytes, clock in GHz, peaks dense in TFLOPS and GB/s; per SM or per block as named."""

    key: str
    name: str
    arch: str
    sms: int
    clock_ghz: float
    tensor_tflops: float
    fp32_tflops: float
    memory_gbs: float
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int

    def variables(self) -> dict[str, int | float | str]:
        """The names that a space's expressions may use, as `gpu.NAME`."""
        return {f"gpu.{f.name}": getattr(self, f.name) for f in fields(self)} | {
            "gpu.capability": int("".join(c for c in self.arch if c.isdigit()))
        }

    def blocks_resident(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Blocks that fit on one SM at once, 0 where none does.

        `registers` are per thread, `shared_bytes` static plus dynamic per block. Allocation rules: CUDA occupancy
        calculator.
        """
        warps = -(-threads // WARP)
        per_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        return min(
            self.blocks_per_sm,
            self.threads_per_sm // (warps * WARP),
            self.registers_per_sm // (per_warp * warps) if registers else self.blocks_per_sm,
            self.shared_per_sm // (shared_bytes + SHARED_RESERVED) if shared_bytes <= self.shared_per_block else 0,
        )

    def occupancy(self, threads: int, registers: int, shared_bytes: int) -> float:
        """Resident warps over the most an SM holds, 0…1."""
        warps = -(-threads // WARP)
        return self.blocks_resident(threads, registers, shared_bytes) * warps / (self.threads_per_sm // WARP)


@cache
def known_gpus() -> dict[str, Gpu]:
    table = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text())
    return {key: Gpu(key=key, **row) for key, row in table.items()}


def find_gpu(key: str) -> Gpu:
    """The GPU of that name; raises UsageError naming the known ones and the nearest."""
    gpus = known_gpus()
    if key.lower() in gpus:
        return gpus[key.lower()]
    near = difflib.get_close_matches(key.lower(), gpus, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"unknown GPU {key!r}: known are {', '.join(gpus)}{hint}")
