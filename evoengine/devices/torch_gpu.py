"""What the GPU stages need of torch on a GPU: memory, the stream, library kernels. All else goes through cuda_api.

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
"""what torch raises for a CUDA error, beside out of memory"""
if hasattr(torch, "AcceleratorError"):  # torch 2.8; a plain RuntimeError before
    ERRORS = (torch.AcceleratorError,)


class TorchGpu:
    """The process's one visible GPU, by torch."""

    device = "cuda"
    """where tensors are drawn"""

    def __init__(self) -> None:
        cuda_api.use_primary_context()  # says what is missing in plainer words than torch
        torch.cuda.init()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised and contiguous; raises torch.OutOfMemoryError."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def stream(self) -> int:
        """The handle of the stream that torch queues on."""
        return torch.cuda.current_stream().cuda_stream

    def queue(self, name: str, call: Call) -> None:
        """Queues a library's work on that stream; `name` says which."""
        call()

    def captured(self, name: str, calls: Sequence[Call]) -> Call:
        """The replay of a graph of a library's work, whose memory the graph keeps.

        It runs once more on the stream that is captured, as libraries set themselves up per stream, which a capture may
        not allow (PyTorch, CUDA semantics: CUDA graphs).
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
        """Seconds of the wall clock, from any start."""
        return time.perf_counter()

    def rest(self, seconds: float) -> None:
        """Leaves the GPU without work for so long."""
        time.sleep(seconds)

    def release_memory(self) -> None:
        """Gives memory that torch keeps for later back to the driver."""
        torch.cuda.empty_cache()


@cache
def gpu() -> TorchGpu:
    return TorchGpu()
