"""Time work on a GPU: repetitions timed by events with a cold L2, and kernels run back to back.

What is timed is a `Work`: the launches of one repetition on one set of inputs. Which repetitions count and what follows
from them is in `rounds.py`; how many launches a repetition has, and how they get onto the GPU, in `figures.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from evoengine.devices import cuda_api
from evoengine.devices.cuda import CudaKernel, Parameters, await_gpu
from evoengine.devices.nvml import Reading, Sensors, open_sensors
from evoengine.devices.torch_gpu import Call, gpu
from evoengine.records import Launch, LaunchMode, Policy
from evoengine.timing.rounds import Dropped, Repetition, Sustained

SETTLING_US = 5e5
"""warm-up, within which a power limit lowers the clocks (some hundred milliseconds)"""
COUNTED_US = 1e6
BLOCK_US = 5e4
"""duration of the launches between two events, which yield one sample"""


def run_sustained(
    start: Callable[[int], Callable[[], float]],
    estimate_us: float,
    sense: Callable[[], Reading | None] = lambda: None,
    now: Callable[[], float] = time.perf_counter,
) -> Sustained:
    """Run a kernel back to back for SETTLING_US and then for at least COUNTED_US, with a block always queued behind.

    `start` queues so many launches and returns a call that waits for the last one and returns the microseconds from the
    start of the first. `estimate_us` is the time of one launch; `now` is in seconds.
    """
    launches = max(1, round(BLOCK_US / estimate_us))
    running, waiting = start(launches), start(launches)
    elapsed = counted = began = 0.0
    samples: list[float] = []
    readings: list[Reading] = []
    while counted < COUNTED_US:
        reading = sense()
        block = running()
        running, waiting = waiting, start(launches)
        if elapsed < SETTLING_US:
            elapsed += block
            began = now()
            continue
        counted += block
        samples.append(block / launches)
        if reading:
            readings.append(reading)
    ended = now()
    running()
    waiting()
    return Sustained(tuple(samples), tuple(readings), launches, counted / 1e6 / (ended - began))


WARM_UP = 3
"""repetitions on each set of inputs that do not count"""
FLUSH_BYTES = 512 << 20
"""zeroed before each repetition, or twice the L2 if that is more. It also gives the CPU time to run ahead (130 µs on
the fastest memory), because a library's call from Python takes several times as long as a launch and must not
be timed"""
MOST_FLUSHES = 64
"""maximum number of flushes for a CPU that does not get ahead during one; with a single flush the baselines of an
attention problem lost all repetitions on an H100"""
POISON = 0xFF
"""bytes of NaN, in every floating-point type"""


class Work(Protocol):
    """The launches of one repetition, with a name for messages."""

    name: str

    def __call__(self) -> None:
        """Queue the launches on torch's stream."""

    def captured(self) -> Call:
        """Return the replay of a graph of the launches."""


class KernelWork:
    """Successive launches of a candidate, each with its own fixed parameters."""

    def __init__(self, kernel: CudaKernel, launch: Launch, parameters: Sequence[Parameters], name: str) -> None:
        self.name = name
        self._kernel, self._launch, self._parameters = kernel, launch, parameters

    def __call__(self) -> None:
        self._queue(gpu().stream())

    def captured(self) -> Call:
        graph = cuda_api.Graph(self._queue)
        return lambda: graph.launch(gpu().stream())

    def _queue(self, stream: int) -> None:
        for parameters in self._parameters:
            self._kernel.launch(self._launch, parameters, stream)


class LibraryWork:
    """Successive calls of torch."""

    def __init__(self, name: str, calls: Sequence[Call]) -> None:
        self.name, self._calls = name, calls

    def __call__(self) -> None:
        for call in self._calls:
            gpu().queue(self.name, call)

    def captured(self) -> Call:
        return gpu().captured(self.name, self._calls)


def flush_bytes() -> int:
    return max(FLUSH_BYTES, 2 * cuda_api.device_attribute(cuda_api.L2_CACHE_BYTES))


class Clock:
    """Time work on the GPU that this process sees; `seconds` is the time limit of one launch."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._flush = gpu().empty((flush_bytes(),), torch.uint8)
        sensors = open_sensors(os.environ["CUDA_VISIBLE_DEVICES"])
        self._sensors = sensors if isinstance(sensors, Sensors) else None
        self._reading: Reading | None = None
        self._flushes = 1

    def last_reading(self) -> Reading | None:
        """Return the sensors' reading during the last repetition; None if there are no sensors."""
        return self._reading

    def prepare(self, works: Sequence[Work], policy: Policy, outputs: Sequence[torch.Tensor] = ()) -> Prepared:
        """Warm up works, one for each set of inputs, and capture them if the policy requires it.

        `outputs` are the tensors that all of them write; they are overwritten with NaN before each repetition.
        """
        calls = [work.captured() if policy.launch is LaunchMode.GRAPH else work for work in works]
        prepared = Prepared(self, works[0].name, calls, policy.batch, outputs)
        for _ in range(WARM_UP):
            for number in range(len(calls)):
                prepared.repeat(number)
        return prepared

    def estimate(self, work: Work) -> float:
        """Return a rough time of a work's launches in microseconds, to choose a policy by. Raises KernelHung."""
        return min(self.once(work, work.name).microseconds for _ in range(WARM_UP + 1))

    def once(self, call: Call, name: str, batch: int = 1, outputs: Sequence[torch.Tensor] = ()) -> Repetition:
        """Return the microseconds of each of the `batch` launches that `call` queues, after a flush. Raises KernelHung.

        If the GPU reached the first launch before the CPU had queued the last, the figure includes host time and the
        repetition does not count; from then on the GPU is kept flushing for twice as long. The sensors are read
        meanwhile, because an idle GPU does not throttle.
        """
        start, end, stream = cuda_api.Event(), cuda_api.Event(), gpu().stream()
        cuda_api.reset_persisting_l2()
        for output in outputs:
            cuda_api.memset(output.data_ptr(), POISON, output.nbytes, stream)
        for _ in range(self._flushes):
            cuda_api.memset(self._flush.data_ptr(), 0, self._flush.nbytes, stream)
        start.record(stream)
        call()
        end.record(stream)
        dropped = Dropped.CPU_BEHIND if start.query() else None
        if dropped:
            self._flushes = min(2 * self._flushes, MOST_FLUSHES)
        self._reading = self.read_sensors()
        await_gpu(name, end, batch * self._seconds)
        if self._reading and self._reading.throttled:
            dropped = Dropped.THROTTLED
        return Repetition(start.elapsed_us(end) / batch, dropped)

    def queue_block(self, calls: Sequence[Call], count: int, name: str, batch: int) -> Callable[[], float]:
        """Queue `count` of the calls in turn; return a call that waits for the last and returns their microseconds."""
        start, end, stream = cuda_api.Event(), cuda_api.Event(), gpu().stream()
        start.record(stream)
        for i in range(count):
            calls[i % len(calls)]()
        end.record(stream)

        def wait() -> float:
            await_gpu(name, end, count * batch * self._seconds)
            return start.elapsed_us(end)

        return wait

    def read_sensors(self) -> Reading | None:
        return self._sensors.read() if self._sensors else None


class Prepared:
    """A contender that is ready to be timed: calls that queue its launches, one for each set of inputs."""

    def __init__(
        self, clock: Clock, name: str, calls: Sequence[Call], batch: int, outputs: Sequence[torch.Tensor]
    ) -> None:
        self._clock, self._name, self._calls, self._batch, self._outputs = clock, name, calls, batch, outputs

    def repeat(self, number: int) -> Repetition:
        """Run one repetition on that set of inputs. Raises KernelHung."""
        return self._clock.once(self._calls[number], self._name, self._batch, self._outputs)

    def sustained(self, estimate_us: float) -> Sustained:
        """Run launches back to back for over a second on all sets of inputs in turn. Raises KernelHung.

        `estimate_us` is the time of one launch.
        """
        found = run_sustained(
            lambda count: self._clock.queue_block(self._calls, count, self._name, self._batch),
            estimate_us * self._batch,
            self._clock.read_sensors,
            gpu().now,
        )
        return replace(found, samples_us=tuple(us / self._batch for us in found.samples_us))
