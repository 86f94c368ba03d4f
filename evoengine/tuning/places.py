"""The place where a search runs: this machine, or a Ray cluster (fleet.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from evoengine.devices.driver import GpuDevice
from evoengine.gpu import Gpu
from evoengine.ledger.runs import Device
from evoengine.sandbox.worker_process import WorkerLimits
from evoengine.sandbox.workers import Workers
from evoengine.search.evaluators import single_worker
from evoengine.search.first_build import FirstBuild
from evoengine.tuning.boards import Choice, choose_gpu
from evoengine.tuning.setup import Echo, begin_build, choose_device, default_jobs, ledger_device, lock_gpu


class Place(Protocol):
    def choose_gpu(self, requested: str, file: Path | None, find: Callable[[str], Gpu]) -> Choice:
        """Return the target GPU as boards.choose_gpu does."""

    def choose_device(self, requested: str, gpu: Gpu, echo: Echo) -> GpuDevice | None:
        """Return the GPU that times, as setup.choose_device does."""

    def begin_build(self, emulated: bool, echo: Echo) -> FirstBuild | None:
        """Begin to build the judges as setup.begin_build does; None if the workers do so themselves."""

    def default_jobs(self, timed: bool) -> int:
        """Return how many tasks run at once, not counting those on GPUs."""

    def lock_gpu(self, device: GpuDevice | None, echo: Echo) -> AbstractContextManager[None]:
        """Lock the GPU as setup.lock_gpu does."""

    def ledger_device(self, timing: GpuDevice | None) -> Device:
        """Return the device that judges the candidates, as setup.ledger_device does."""

    def runners(self, limits: WorkerLimits) -> Workers:
        """Return the workers that time on GPUs."""

    def compilers(self, jobs: int, limits: WorkerLimits) -> Workers | None:
        """Return the workers that compile and gate; None if these are processes of this machine."""


class ThisMachine:
    def __init__(self, begun: FirstBuild | None = None) -> None:
        """Create the place of a search whose build of the judges has `begun`, if it has."""
        self._begun = begun

    def choose_gpu(self, requested: str, file: Path | None, find: Callable[[str], Gpu]) -> Choice:
        return choose_gpu(requested, file, find)

    def choose_device(self, requested: str, gpu: Gpu, echo: Echo) -> GpuDevice | None:
        return choose_device(requested, gpu, echo)

    def begin_build(self, emulated: bool, echo: Echo) -> FirstBuild | None:
        return begin_build(emulated, echo, self._begun)

    def default_jobs(self, timed: bool) -> int:
        return default_jobs(timed)

    def lock_gpu(self, device: GpuDevice | None, echo: Echo) -> AbstractContextManager[None]:
        return lock_gpu(device, echo)

    def ledger_device(self, timing: GpuDevice | None) -> Device:
        return ledger_device(timing)

    def runners(self, limits: WorkerLimits) -> Workers:
        return single_worker(limits)

    def compilers(self, jobs: int, limits: WorkerLimits) -> Workers | None:
        return None
