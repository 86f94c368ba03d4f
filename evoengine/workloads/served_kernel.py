"""The Triton kernels of vLLM and SGLang that read tuned configurations from files, and the names of these files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from evoengine.gpu import Gpu
from evoengine.records import Config
from evoengine.workloads.base import Host

MOE, BLOCK_GEMM = "FusedMoe", "BlockFp8"
"""classes of evoengine.virtual.served"""
BF16, FP8, FP8_BLOCK = "bf16", "fp8_w8a8", "fp8_w8a8_block"
CLASSES = {
    "fused_moe_kernel": MOE,
    "_w8a8_triton_block_scaled_mm": BLOCK_GEMM,  # vLLM's
    "_w8a8_block_fp8_matmul": BLOCK_GEMM,  # SGLang's
}
DATA = {MOE: (BF16, FP8, FP8_BLOCK), BLOCK_GEMM: (FP8_BLOCK,)}
FIRST_LINE = "# evoengine: kernel of "
KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")


@dataclass(frozen=True, slots=True)
class Served:
    """The statement in the first line of a candidate's text."""

    framework: str
    """vllm or sglang"""
    kernel: str
    data: str


def is_served(host: Host) -> bool:
    """Return whether evoengine has the functions that launch the kernel and say what is right: --call names the data.

    A text that has them is none: its functions are found by their names.
    """
    return host.call in served_data(host.kernel) and not host.text.startswith(FIRST_LINE)


def served_data(kernel: str) -> tuple[str, ...]:
    """Return what --call may be for one of these kernels, the default first; nothing for another kernel."""
    return DATA.get(CLASSES.get(kernel, ""), ())


def with_text(host: Host, served: Served, text: str) -> Host:
    """Return the file with the kernel and its functions."""
    return replace(host, text=f"{FIRST_LINE}{json.dumps(asdict(served))}\n{text}", call="call", reference="reference")


def served_of(text: str) -> Served | None:
    """Return what the text of a candidate states; None where its kernel is none of these."""
    first, _, _ = text.partition("\n")
    try:
        return Served(**json.loads(first.removeprefix(FIRST_LINE))) if first.startswith(FIRST_LINE) else None
    except (ValueError, TypeError):
        return None


def file_name(served: Served, sizes: Mapping[str, int], gpu: Gpu, triton: str) -> str:
    """Return the path below the folder of the framework's configurations, as its release of today reads it.

    `triton` is the version of Triton that compiled the kernel.
    """
    device = "NVIDIA_H200" if served.framework == "vllm" and "H200" in gpu.name.split() else gpu.name.replace(" ", "_")
    space = "" if served.framework == "vllm" else " "
    data = {BF16: "", FP8: ",dtype=fp8_w8a8", FP8_BLOCK: f",dtype=fp8_w8a8,block_shape=[128,{space}128]"}[served.data]
    if CLASSES[served.kernel] == BLOCK_GEMM:
        return f"N={sizes['N']},K={sizes['K']},device_name={device}{data}.json"
    name = f"E={sizes['E']},N={sizes['N']},device_name={device}{data}.json"
    return name if served.framework == "vllm" else f"configs/triton_{triton.replace('.', '_')}/{name}"


def entry(config: Config) -> dict[str, int]:
    """Return a configuration as such a file has it."""
    return {key: int(str(config[key])) for key in KEYS}
