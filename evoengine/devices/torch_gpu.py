"""The GPU stages' uses of torch: memory, the stream, library kernels. All else goes through cuda_api.

The tests' stand-in driver replaces this module by one whose tensors lie on the CPU, in memory that the driver gave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

import torch

from evoengine.devices import cuda_api

Call = Callable[[], object]

ERRORS: tuple[type[Exception], ...] = ()
"""torch's exceptions for a CUDA error, other than out of memory"""
if hasattr(torch, "AcceleratorError"):  # torch 2.8; a plain RuntimeError before
    ERRORS = (torch.AcceleratorError,)


class TorchGpu:
    """The process's only visible GPU, through torch."""

    device = "cuda"
    """where tensors are drawn"""

    def __init__(self) -> None:
        cuda_api.use_primary_context()  # its errors are clearer than torch's
        torch.cuda.init()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised contiguous tensor. Raises torch.OutOfMemoryError."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def stream(self) -> int:
        """Return the handle of torch's current stream."""
        return torch.cuda.current_stream().cuda_stream

    def queue(self, name: str, call: Call) -> None:
        """Queue a library's work on that stream; `name` names the library."""
        call()

    def captured(self, name: str, calls: Sequence[Call]) -> Call:
        """Capture a library's work in a graph, which owns the memory, and return its replay.

        The work runs once on the capture stream first, because libraries initialise themselves per stream, which a
        capture may not permit (PyTorch, CUDA semantics: CUDA graphs).
        """
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        return graph.replay

    def now(self) -> float:
        """Return the wall clock in seconds from an arbitrary start."""
        return time.perf_counter()

    def rest(self, seconds: float) -> None:
        """Leave the GPU idle for `seconds`."""
        time.sleep(seconds)

    def release_memory(self) -> None:
        """Return torch's cached memory to the driver."""
        torch.cuda.empty_cache()


@cache
def gpu() -> TorchGpu:
    return TorchGpu()
