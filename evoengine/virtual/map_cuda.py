"""PyTorch's CUDA on a CPU: device="cuda" makes tensors on the CPU, and torch.cuda answers for the virtual GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from triton._C.libtriton import nvidia

from evoengine.virtual.device import Instant, VirtualGpu

_CUDA = re.compile(r"cuda(:\d+)?")
WARP = 32


@contextmanager
def cuda_on_cpu(device: VirtualGpu) -> Iterator[None]:
    """Make PyTorch put on the CPU what is asked for on CUDA, and describe the virtual GPU where it is asked."""
    with (
        mock.patch.multiple(torch.cuda, **_answers(device)),
        mock.patch.object(torch.cpu, "set_stream", lambda stream: None, create=True),
        mock.patch.object(nvidia.cublas, "CublasLt", Blas),
        _OnCpu(),
    ):
        yield


class _OnCpu(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        if getattr(function, "__self__", None) is torch.Tensor.is_cuda:
            return True
        return function(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and _CUDA.fullmatch(value) else value


def _answers(device: VirtualGpu) -> dict[str, Any]:
    """Return functions of torch.cuda by their names: about one GPU, whose work has ended when a launch returns."""
    gpu = device.gpu
    major, minor = divmod(gpu.capability, 10)
    properties = SimpleNamespace(
        name=gpu.name, major=major, minor=minor, multi_processor_count=gpu.sms, warp_size=WARP,
        max_threads_per_multi_processor=gpu.threads_per_sm, regs_per_multiprocessor=gpu.registers_per_sm,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=gpu.shared_per_block,
        shared_memory_per_multiprocessor=gpu.shared_per_sm,
    )  # fmt: skip
    nothing = lambda *_, **__: None  # noqa: E731 # one for many
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "get_device_capability": lambda *_: (major, minor),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: gpu.name,
        "Stream": Stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "set_stream": nothing,
        "stream": lambda stream: stream,
        "Event": lambda *_, **__: Event(device),
    }


class Blas:
    """Products by PyTorch in place of those by the cuBLAS that Triton loads to compare with."""

    def __init__(self, workspace: torch.Tensor) -> None:
        """Create one; it needs no workspace."""

    def matmul(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        """Put a [M, K] · b [N, K]ᵀ into c [M, N]."""
        c.copy_(a.float() @ b.float().T)


class Stream:
    """A stream of the virtual GPU, on which launches run in the order of the program."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        """Create one; all are alike."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it."""

    def synchronize(self) -> None:
        """Return at once: launches have ended when they return."""

    def wait_stream(self, stream: object) -> None:
        """Return at once."""

    def wait_event(self, event: object) -> None:
        """Return at once."""


class Event:
    """A moment of the virtual clock."""

    def __init__(self, device: VirtualGpu) -> None:
        self._device = device
        self._at = Instant(0.0, 0, 0)

    def record(self, stream: object = None) -> None:
        self._at = self._device.now

    def wait(self, stream: object = None) -> None:
        """Return at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once: it has happened when it is recorded."""

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds."""
        return self._device.ms_between(self._at, end._at)
