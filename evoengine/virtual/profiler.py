"""Triton's profiler, Proton, on the virtual GPU: predicted times of launches, by the scopes around them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from typing import Any
from unittest import mock

import triton
import triton.profiler as proton
from triton.profiler.scope import scope

from evoengine.virtual.device import VirtualGpu


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
    """The sessions of a program, all of which see the same launches while they are active."""

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
        """Write what was seen to NAME.hatchet, as Proton does."""
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
        """Add a launch to its own frame, in the scopes that are open."""
        for number in self._active if math.isfinite(us) else ():
            frame = self._here(number) if self._in_launch else self._here(number).child(kernel)
            frame.add({"time (ns)": 1e3 * us, "count": 1})

    # Triton calls these around a launch, with what the kernel's `launch_metadata` says of it

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
    """Let Proton see predicted times."""
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
