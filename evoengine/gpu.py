"""Limits and peak rates of GPUs by name, from gpus.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from evoengine.errors import UsageError, did_you_mean

AUTO = "auto"
"""stands for the GPU of this machine"""
DEFAULT = "h100"
"""the target where this machine has no GPU"""
WARP = 32
REGISTER_UNIT = 256
"""granularity of register allocation to a warp (CUDA occupancy calculator, sm_70 and later)"""
SUB_CORES = 4
"""partitions of an SM, each with a quarter of its registers (CUDA occupancy calculator: warp allocation granularity)"""
SHARED_RESERVED = 1024
"""shared memory the driver keeps for itself in each block (CUDA C++ Programming Guide, sm_80 and later)"""
PRODUCT_RATES: Mapping[str, float] = {"H": 1, "I": 2, "Q": 2, "O": 4, "B": 16}
"""first letter of a tensor-core opcode (HMMA, IGMMA, QMMA, …) → operations a clock over those of halves summed in
FP32: halves, bytes and FP8, FP4, bits (data sheets)"""
SCALAR_HALVES = "HFMA2", "HADD2", "HMUL2"
FASTER_THAN_FP32 = 4
"""most operations a clock of packed halves or bytes without tensor cores, over those of FP32 (A100 white paper)"""


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

    @property
    def capability(self) -> int:
        """Return the compute capability: 90 for sm_90a."""
        return int("".join(c for c in self.arch if c.isdigit()))

    @property
    def shared_reserved(self) -> int:
        return SHARED_RESERVED if self.capability >= 80 else 0

    @property
    def is_geforce(self) -> bool:
        """Return whether sums in FP32 halve the rate of the tensor cores (white papers of Turing, Ampere and Ada)."""
        return "GeForce" in self.name

    def peak_tflops(self, opcodes: Collection[str]) -> float:
        """Return the peak of the fastest kind of arithmetic among a kernel's opcodes, at the data sheet's boost clock.

        Opcodes may have modifiers; of those that are left out the fastest are assumed. Of a kernel whose opcodes are
        unknown it is the peak of bytes.
        """
        products = [op for op in opcodes if "MMA" in op.partition(".")[0]]
        if products or not opcodes:
            return self.tensor_tflops * max(map(self.product_rate, products), default=self.product_rate("IMMA"))
        packed = any(op.partition(".")[0] in (*SCALAR_HALVES, "IDP") for op in opcodes)
        return self.fp32_tflops * (FASTER_THAN_FP32 if packed else 1)

    def product_rate(self, opcode: str) -> float:
        """Return the dense rate of a tensor-core opcode over that of halves that are summed in FP32."""
        base, *modifiers = opcode.removeprefix("UTC").split(".")
        if base.startswith("D"):
            return self.fp32_tflops / self.tensor_tflops
        rate = PRODUCT_RATES.get(base[0], max(PRODUCT_RATES.values())) * (2 if "SP" in modifiers else 1)
        if "TF32" in modifiers:
            return rate / 2
        if base == "IMMA" and self.capability < 90 and not {"S8", "U8"} & set(modifiers):
            rate *= 2  # integers of 4 bits
        return rate * (2 if self.is_geforce and "F32" not in modifiers else 1)

    def variables(self) -> dict[str, int | float | str]:
        """Return the names that a space's expressions may use, as `gpu.NAME`, with their values."""
        return {f"gpu.{f.name}": getattr(self, f.name) for f in fields(self)} | {"gpu.capability": self.capability}

    def blocks_resident(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Return how many blocks fit on one SM at once, 0 where none does."""
        warps = -(-threads // WARP)
        per_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        limits = [self.blocks_per_sm, self.threads_per_sm // (warps * WARP)]
        if registers:
            limits.append(self.registers_per_sm // SUB_CORES // per_warp * SUB_CORES // warps)
        if shared_bytes + self.shared_reserved:
            fit = self.shared_per_sm // (shared_bytes + self.shared_reserved)
            limits.append(fit if shared_bytes <= self.shared_per_block else 0)
        return min(limits)

    def occupancy(self, threads: int, registers: int, shared_bytes: int) -> float:
        """Return the resident warps over the maximum of an SM, 0…1."""
        warps = -(-threads // WARP)
        return self.blocks_resident(threads, registers, shared_bytes) * warps / (self.threads_per_sm // WARP)


@cache
def known_gpus() -> dict[str, Gpu]:
    table = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text("utf-8"))
    return {key: Gpu(key=key, **row) for key, row in table.items()}


def find_gpu(key: str) -> Gpu:
    """Return the GPU of that name. Raises UsageError naming the known ones and the nearest."""
    gpus = known_gpus()
    if key.lower() in gpus:
        return gpus[key.lower()]
    raise UsageError(f"unknown GPU {key!r}: known are {', '.join(gpus)}{did_you_mean(key, gpus)}")
