"""The clock on a GPU: one repetition timed by events with a cold L2, and the rounds in which contenders take turns.

What is timed is a `Work`; which repetitions count and what follows from them is in `timing.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from evoengine.devices import cuda_api
from evoengine.devices.cuda import CudaKernel, await_gpu
from evoengine.devices.nvml import Sensors, open_sensors
from evoengine.devices.torch_gpu import Call, gpu
from evoengine.records import Launch
from evoengine.stages.timing import Rounds, beaten, run_rounds, settled

WARM_UP = 3
GRAPH_US = 100.0
"""kernels quicker than this are replayed from a CUDA graph: what the CPU takes to launch them would show"""
FLUSH_BYTES = 512 << 20
"""zeroed before each repetition, or twice the L2 where that is more. It also gives the CPU the time to run ahead: some
130 µs on the fastest memory, as SDPA's way through Python takes several times that of a launch and must not be timed"""
SDPA = "sdpa"
"""the baseline's name in a round"""
Repetition = Callable[[], float]
"""runs what is timed once and gives its microseconds"""


class Work(Protocol):
    """Something to be timed, under a name to speak of it."""

    name: str

    def __call__(self) -> None:
        """Queues it once on torch's stream."""

    def captured(self) -> Call:
        """The replay of a graph of it."""


class KernelWork:
    """One launch of a candidate with parameters that stay."""

    def __init__(self, kernel: CudaKernel, launch: Launch, parameters: cuda_api.Parameters, name: str) -> None:
        self.name = name
        self._kernel, self._launch, self._parameters = kernel, launch, parameters

    def __call__(self) -> None:
        self._kernel.launch(self._launch, self._parameters)

    def captured(self) -> Call:
        graph = cuda_api.Graph(lambda stream: self._kernel.launch(self._launch, self._parameters, stream))
        return lambda: graph.launch(gpu().stream())


class LibraryWork:
    """A call of torch's."""

    def __init__(self, name: str, call: Call) -> None:
        self.name, self._call = name, call

    def __call__(self) -> None:
        gpu().queue(self.name, self._call)

    def captured(self) -> Call:
        return gpu().captured(self.name, self._call)


def flush_bytes() -> int:
    return max(FLUSH_BYTES, 2 * cuda_api.device_attribute(cuda_api.L2_CACHE_BYTES))


class Clock:
    """Times work on the GPU that this process sees; `seconds` is what one repetition may take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._flush = gpu().empty((flush_bytes(),), torch.uint8)
        sensors = open_sensors(os.environ["CUDA_VISIBLE_DEVICES"])
        self._sensors = sensors if isinstance(sensors, Sensors) else None

    @property
    def sensed(self) -> bool:
        """Whether the GPU's sensors are read beside each round."""
        return self._sensors is not None

    def repetition(self, work: Work) -> Repetition:
        """Warms up; gives a call that runs `work` once with a cold L2 and tells its microseconds."""
        for _ in range(WARM_UP):
            first = self.once(work, work.name)
        timed = work.captured() if first < GRAPH_US else work
        return lambda: self.once(timed, work.name)

    def once(self, call: Call, name: str) -> float:
        """The microseconds of one call after a flush. Raises KernelHung."""
        start, end, stream = cuda_api.Event(), cuda_api.Event(), gpu().stream()
        cuda_api.reset_persisting_l2()
        cuda_api.memset(self._flush.data_ptr(), 0, self._flush.nbytes, stream)
        start.record(stream)
        call()
        end.record(stream)
        await_gpu(name, end, self._seconds)
        return start.elapsed_us(end)

    def rounds(self, contenders: Mapping[str, Repetition], seed: int, enough) -> Rounds:
        """Repetitions of each in turn until `enough`, as `run_rounds` has it."""
        sense = self._sensors.read if self._sensors else lambda: None
        return run_rounds(contenders, np.random.default_rng(seed), enough, sense)

    def race(self, candidate: Work, incumbent: Work | None, rivals: Mapping[str, Repetition], seed: int) -> Rounds:
        """The candidate until its median is settled, or until it is clearly slower than the incumbent."""
        contenders = {"candidate": self.repetition(candidate)}
        if incumbent:
            contenders["incumbent"] = self.repetition(incumbent)

        def enough(samples: Mapping[str, list[float]]) -> str | None:
            if incumbent and beaten(samples["candidate"], samples["incumbent"]):
                return "beaten"
            return settled(samples["candidate"])

        return self.rounds({**contenders, **rivals}, seed, enough)
