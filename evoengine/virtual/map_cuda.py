"""PyTorch's CUDA on a CPU: device="cuda" creates tensors on the CPU, and torch.cuda reports the virtual GPU.

Triton's profiler, Proton, gets predicted times of launches, by the scopes around them.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
import triton.profiler as proton
from torch.overrides import TorchFunctionMode
from triton._C.libtriton import nvidia
from triton.profiler.scope import scope

from evoengine.virtual.device import OWN_REFERENCES, Instant, Repeats, VirtualGpu, Waiting, references

_CUDA = re.compile(r"cuda(:\d+)?")
WARP = 32
MULTIPLY = (
    torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.__matmul__,
    torch.nn.functional.linear, torch.addmm, torch.baddbmm,
)  # fmt: skip
OWN_NAMES = 3
"""references to a result by: an attribute, a variable, and the argument of the function that counts"""


@contextmanager
def cuda_on_cpu(device: VirtualGpu, *, drop_repeats: bool) -> Iterator[None]:
    """Make PyTorch create on the CPU what is requested on CUDA, and report the virtual GPU if asked.

    With `drop_repeats`, a launch or product that repeats an earlier one and whose result cannot be read is not
    computed.
    """
    mode = _OnCpu(device)
    device.repeats = Repeats() if drop_repeats else None
    with (
        mock.patch.multiple(
            torch.cuda, **_answers(device), CUDAGraph=lambda *_, **__: Graph(device), graph=mode.capture
        ),
        mock.patch.object(torch.cpu, "set_stream", lambda stream: None, create=True),
        mock.patch.object(nvidia.cublas, "CublasLt", lambda workspace: Blas(device)),
        profiled(device),
        mode,
    ):
        try:
            yield
        finally:
            device.settle()
            device.repeats = None


class _OnCpu(TorchFunctionMode):
    """Intercepts each of PyTorch's functions that a program calls."""

    def __init__(self, device: VirtualGpu) -> None:
        super().__init__()
        self._device = device
        self._graph: Graph | None = None
        self.products = Products(device)

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self._device.settle()
        if function is torch.Tensor.cuda:
            return args[0]
        if getattr(function, "__self__", None) is torch.Tensor.is_cuda:
            return True
        args, kwargs = [_on_cpu(value) for value in args], {n: _on_cpu(value) for n, value in (kwargs or {}).items()}
        multiplies = function in MULTIPLY and not kwargs
        result = self.products.of(function, args) if multiplies else function(*args, **kwargs)
        if self._graph is not None:
            self._graph.note(function, args, kwargs, result)
        return result

    @contextmanager
    def capture(self, graph: Graph, *_: object, **__: object) -> Iterator[None]:
        """Execute the calls that follow, and record them for the graph's replays."""
        before, self._graph = self._graph, graph
        with graph.launches():
            try:
                yield
            finally:
                self._graph = before


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and _CUDA.fullmatch(value) else value


def _answers(device: VirtualGpu) -> dict[str, Any]:
    """Return functions of torch.cuda by name: there is one GPU, whose work has ended when a launch returns."""
    gpu = device.gpu
    major, minor = divmod(gpu.capability, 10)
    properties = SimpleNamespace(
        name=gpu.name, major=major, minor=minor, multi_processor_count=gpu.sms, warp_size=WARP,
        max_threads_per_multi_processor=gpu.threads_per_sm, regs_per_multiprocessor=gpu.registers_per_sm,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=gpu.shared_per_block,
        shared_memory_per_multiprocessor=gpu.shared_per_sm,
    )  # fmt: skip
    # distinct functions, because torch.compile tells functions of torch apart by identity
    nothing = {name: lambda *_, **__: None for name in ("set_device", "synchronize", "empty_cache", "set_stream")}
    streams = {name: lambda *_, **__: Stream() for name in ("current_stream", "default_stream")}
    return {
        **nothing,
        **streams,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (major, minor),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: gpu.name,
        "graph_pool_handle": lambda: (0, 0),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "Stream": Stream,
        "stream": lambda stream: stream,
        "Event": lambda *_, **__: Event(device),
    }


class Graph:
    """Stands for torch.cuda.CUDAGraph: captured calls are executed at once, and again by each replay."""

    def __init__(self, device: VirtualGpu) -> None:
        self._device = device
        self._calls: list[Callable[[], object]] = []

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Record the launches of Triton kernels."""
        before, self._device.captured = self._device.captured, self._calls
        try:
            yield
        finally:
            self._device.captured = before

    def note(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Record a call of PyTorch; a replay copies its results into the tensors that it returned before."""
        before = _tensors(result)

        def again() -> None:
            for old, new in zip(before, _tensors(function(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)

        if before:
            self._calls.append(again)

    def replay(self) -> None:
        for call in self._calls:
            call()

    def reset(self) -> None:
        self._calls.clear()

    def pool(self) -> tuple[int, int]:
        return 0, 0


def _tensors(result: Any) -> list[torch.Tensor]:
    values = result if isinstance(result, tuple | list) else [result]
    return [value for value in values if isinstance(value, torch.Tensor)]


def multiply(function: Callable[..., torch.Tensor], factors: Sequence[Any]) -> torch.Tensor:
    """Return `function` of tensors, FP16 via FP32: PyTorch's own FP16 products on a CPU take minutes at 2048³.

    A GPU accumulates in FP32 too.
    """
    halves = [x.dtype == torch.float16 for x in factors if isinstance(x, torch.Tensor)]
    if not halves or not all(halves):
        return function(*factors)
    return function(*(x.float() if isinstance(x, torch.Tensor) else x for x in factors)).half()


class Products:
    """The last product of PyTorch's, returned again for the same factors unless the program holds or changed it."""

    def __init__(self, device: VirtualGpu) -> None:
        self._device = device
        self._key: object = None
        self._factors: Sequence[Any] = ()
        """held so that no other tensor reuses their memory"""
        self._result: torch.Tensor | None = None

    def of(self, function: Callable[..., torch.Tensor], factors: Sequence[Any]) -> torch.Tensor:
        """Return `function` of tensors."""
        kept = all(isinstance(x, torch.Tensor) and not x.requires_grad for x in factors)
        if self._device.repeats is None or not kept:
            return multiply(function, factors)
        seen = [(x.data_ptr(), x._version, x.shape, x.stride(), x.dtype) for x in factors]  # noqa: SLF001
        key = (function, seen, self._device.now.launches)
        if key != self._key or self._is_elsewhere():
            self._key, self._factors, self._result = key, factors, multiply(function, factors)
        assert self._result is not None  # it was computed with the key
        return self._result

    def _is_elsewhere(self) -> bool:
        """Return whether the program holds the last result or has changed it."""
        result = self._result
        assert result is not None  # there is a key
        mine = sys.getrefcount(result) <= OWN_NAMES and references(result.untyped_storage()) <= OWN_REFERENCES
        return not mine or result._version > 0  # noqa: SLF001


class Blas:
    """Products by PyTorch in place of the cuBLAS that Triton loads for comparisons."""

    def __init__(self, device: VirtualGpu) -> None:
        self._device = device

    def matmul(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        """Compute a [M, K] · b [N, K]ᵀ into c [M, N], unless nothing can read c."""
        out = c.detach()

        def multiply() -> None:
            out.copy_(a.float() @ b.float().T)

        if self._device.repeats is None:
            multiply()
        else:
            self._device.repeats.wait(Waiting([c.untyped_storage()], multiply, lambda: None))


class Stream:
    """A stream of the virtual GPU, on which launches run in program order."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        """Create a stream; all are alike."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the stream."""

    def synchronize(self) -> None:
        """Return at once, because launches have ended when they return."""

    def wait_stream(self, stream: object) -> None:
        """Return at once."""

    def wait_event(self, event: object) -> None:
        """Return at once."""


class Event:
    """A point in virtual time."""

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
        """Return at once, because an event is complete when it is recorded."""

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds."""
        return self._device.ms_between(self._at, end._at)


@dataclass(eq=False, slots=True)
class Frame:
    """A scope or a kernel."""

    name: str
    metrics: dict[str, float] = field(default_factory=dict)
    children: dict[str, Frame] = field(default_factory=dict)

    def child(self, name: str) -> Frame:
        return self.children.setdefault(name, Frame(name))

    def add(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0) + value

    def as_json(self) -> dict[str, Any]:
        named = {"count": 0, "device_id": "0", "device_type": "CUDA"} if "time (ns)" in self.metrics else {}
        return {
            "frame": {"name": self.name, "type": "function"},
            "metrics": {**named, **self.metrics},
            "children": [child.as_json() for child in self.children.values()],
        }


class Profiler:
    """The sessions of a program; all active ones record the same launches."""

    def __init__(self, device: VirtualGpu) -> None:
        self._device = device
        self._sessions: list[tuple[str, Frame]] = []
        self._active: set[int] = set()
        self._scopes: list[str] = []
        self._in_launch = False

    def start(self, name: str | None = None, *, hook: Any = None, **_: object) -> int:
        self._sessions.append((name or proton.DEFAULT_PROFILE_NAME, Frame("ROOT")))
        self._active.add(len(self._sessions) - 1)
        return len(self._sessions) - 1

    def activate(self, session: int | None = None) -> None:
        self._active |= self._named(session)

    def deactivate(self, session: int | None = None, flushing: bool = False) -> None:
        self._active -= self._named(session)

    def finalize(self, session: int | None = None, output_format: str = "") -> None:
        """Write the recorded frames to NAME.hatchet, as Proton does."""
        gpu = self._device.gpu
        here = {
            "arch": str(gpu.capability), "num_sms": gpu.sms, "clock_rate": round(gpu.clock_ghz * 1e6),
            "memory_clock_rate": round(gpu.memory_gbs * 1e6 / 2 / 128), "bus_width": 1024,
        }  # fmt: skip
        for number in self._named(session):
            name, root = self._sessions[number]
            Path(f"{name}.hatchet").write_text(json.dumps([root.as_json(), {"CUDA": {"0": here}}]), "utf-8")
        self.deactivate(session)

    def _named(self, session: int | None) -> set[int]:
        return set(range(len(self._sessions))) if session is None else {session}

    def enter(self, name: str, metrics: dict[str, Any] | None) -> None:
        numbers = {n: float(v) for n, v in (metrics or {}).items() if isinstance(v, Number)}  # type: ignore[arg-type]
        self._scopes.append(name)
        for number in self._active:
            self._here(number).add(numbers)

    def leave(self) -> None:
        self._scopes.pop()

    def _here(self, session: int) -> Frame:
        frame = self._sessions[session][1]
        for name in self._scopes:
            frame = frame.child(name)
        return frame

    def launched(self, kernel: str, us: float) -> None:
        """Add a launch to its own frame, within the open scopes."""
        for number in self._active if math.isfinite(us) else ():
            frame = self._here(number) if self._in_launch else self._here(number).child(kernel)
            frame.add({"time (ns)": 1e3 * us, "count": 1})

    # Triton calls these around a launch, with the result of the kernel's `launch_metadata`

    def enter_launch(self, metadata: Any) -> None:
        if self._active:
            said = metadata.get()
            self.enter(said["name"], {n: v for n, v in said.items() if n not in ("name", "function", "stream")})
            self._in_launch = True

    def leave_launch(self, metadata: Any) -> None:
        if self._in_launch:
            self.leave()
            self._in_launch = False


@contextmanager
def profiled(device: VirtualGpu) -> Iterator[None]:
    """Give Proton predicted times."""
    profiler = Profiler(device)
    names = ("start", "activate", "deactivate", "finalize")
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    enter.add(profiler.enter_launch)
    leave.add(profiler.leave_launch)
    device.launched = profiler.launched
    try:
        with (
            mock.patch.multiple(proton, **{name: getattr(profiler, name) for name in names}),
            mock.patch.object(scope, "_enter_scope", lambda own: profiler.enter(own.name, own.metrics)),
            mock.patch.object(scope, "_exit_scope", lambda own: profiler.leave()),
        ):
            yield
    finally:
        device.launched = None
        enter.remove(profiler.enter_launch)
        leave.remove(profiler.leave_launch)
