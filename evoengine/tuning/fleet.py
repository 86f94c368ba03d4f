"""Searches on a Ray cluster: all CPUs compile and gate, all GPUs of a kind time."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from evoengine.devices.driver import GpuDevice
from evoengine.errors import EvoengineError, MachineError, UsageError
from evoengine.gpu import AUTO, DEFAULT, Gpu, find_gpu
from evoengine.records import Device
from evoengine.sandbox.worker_process import WorkerLimits
from evoengine.sandbox.workers import Workers
from evoengine.search.first_build import FirstBuild
from evoengine.search.progress import OnChange, OnTrial, Progress, ignore
from evoengine.tuning.boards import Choice, choose_gpu
from evoengine.tuning.ray_cluster import GPU, GPU_ACTOR, connected, import_ray, living_nodes, require_fit, survey
from evoengine.tuning.search import Search, SearchOptions, SearchResult
from evoengine.tuning.setup import Echo, choose_device, ledger_device, silent

if TYPE_CHECKING:
    from evoengine.search.ray_workers import SentBinaries

POLL_SECONDS = 1.0
NOTICE_SECONDS = 5.0
"""time after which a search reports that it waits for a GPU"""


def gpu_of_node(gpu: Gpu) -> GpuDevice:
    """Return, on a node, the GPU that Ray assigned to this process. Raises MachineError if it is of another kind."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # by which Ray numbers GPUs
    device = choose_device("cuda", gpu, silent)
    assert device is not None  # choose_device raises if there is none
    return device


def describe_gpu(find: Callable[[], GpuDevice]) -> tuple[GpuDevice, Device] | EvoengineError:
    """Return, on a node, its GPU as the driver reports it and as the ledger stores it."""
    try:
        device = find()
        return device, ledger_device(device)
    except EvoengineError as error:
        return error


@dataclass(frozen=True, slots=True)
class GpuFinder:
    """The functions that find and describe a node's GPU. Tests replace them."""

    find: Callable[[Gpu], GpuDevice] = gpu_of_node
    describe: Callable[[Callable[[], GpuDevice]], tuple[GpuDevice, Device] | EvoengineError] = describe_gpu


class Fleet:
    """The place of one search on a cluster to which this process is connected.

    `share` is its part of the CPUs; `timeout` is how long it waits for a GPU of a kind that no node has.
    """

    def __init__(self, echo: Echo, timeout: float | None = None, share: float = 1.0, finder: GpuFinder | None = None):
        self._echo, self._timeout, self._share = echo, timeout, share
        self._finder = finder or GpuFinder()
        self._gpu: Gpu | None = None
        self._found: tuple[GpuDevice, Device] | None = None
        self._sent: SentBinaries | None = None

    def choose_gpu(self, requested: str, file: Path | None, find: Callable[[str], Gpu]) -> Choice:
        if requested != AUTO or file is not None:
            return choose_gpu(requested, file, find)
        kinds = sorted({kind for node in living_nodes() for kind in node.gpus})
        if len(kinds) > 1:
            listed = " ".join(f"--gpu {kind}" for kind in kinds)
            raise UsageError(f"the cluster has GPUs of several kinds; choose among {listed}")
        if kinds:
            return Choice(find_gpu(kinds[0]), f"--gpu {kinds[0]}: the cluster has it")
        return Choice(find_gpu(DEFAULT), f"--gpu {DEFAULT}: no node of the cluster has a GPU")

    def choose_device(self, requested: str, gpu: Gpu, echo: Echo) -> GpuDevice | None:
        """Return the GPU of a node, for its limits. With `cuda`, wait for a node that has one.

        Raises MachineError if none arrives within the timeout, or if it cannot run the binaries.
        """
        if requested == "emulator" or (requested == "auto" and not _count(gpu.key)):
            return None
        self._gpu = gpu
        self._found = self._await_gpu(gpu)
        return self._found[0]

    def _await_gpu(self, gpu: Gpu) -> tuple[GpuDevice, Device]:
        ray = import_ray()
        find = partial(self._finder.find, gpu)
        given = dict(num_cpus=0, num_gpus=1, resources={f"{GPU}{gpu.key}": 1}, max_calls=1, max_retries=3)
        asked = ray.remote(**given)(self._finder.describe).remote(find)
        start, said = time.monotonic(), False
        while not ray.wait([asked], timeout=POLL_SECONDS)[0]:
            waited = time.monotonic() - start
            if self._timeout is not None and waited > self._timeout:
                ray.cancel(asked, force=True)
                raise MachineError(f"{_why_no_gpu(gpu.key)} after {waited:.0f} s; --device emulator needs no GPU")
            if not said and waited > NOTICE_SECONDS:
                limit = "Ctrl-C stops" if self._timeout is None else f"--timeout {self._timeout:g}"
                self._echo(f"{_why_no_gpu(gpu.key)}; waiting ({limit})")
                said = True
        try:
            found = ray.get(asked)
        except ray.exceptions.RayError as error:
            raise MachineError(
                f"a GPU of the cluster does not answer: {str(error).strip().splitlines()[-1]}"
            ) from error
        if isinstance(found, EvoengineError):
            raise found
        device, described = found
        return device, described

    def begin_build(self, emulated: bool, echo: Echo) -> FirstBuild | None:
        """Return None: the workers of each node build their judges as they start."""
        return None

    def default_jobs(self, timed: bool) -> int:
        """Return one job per CPU, less one for each GPU that times."""
        cpus = sum(node.cpus for node in living_nodes())
        gpus = _count(self._gpu.key) if timed and self._gpu else 0
        return max(1, int((cpus - gpus) * self._share))

    def lock_gpu(self, device: GpuDevice | None, echo: Echo) -> AbstractContextManager[None]:
        """Do nothing: each actor locks its own GPU on its node."""
        return nullcontext()

    def ledger_device(self, timing: GpuDevice | None) -> Device:
        return self._found[1] if timing and self._found else Device("emulator")

    def runners(self, limits: WorkerLimits) -> Workers:
        from evoengine.search.ray_workers import ActorOptions, RayWorkers

        assert self._gpu is not None and self._found is not None  # a GPU was chosen
        kind = self._gpu.key
        count = max(1, _count(kind))
        self._echo(f"{count} {'GPU' if count == 1 else 'GPUs'} of kind {kind} on the cluster")
        options = ActorOptions(
            cpus=0.0,
            gpus=1.0,
            resources={f"{GPU}{kind}": 1.0},
            find_gpu=partial(self._finder.find, self._gpu),
            board=self._found[0].name,
            name=f"{GPU_ACTOR}:{kind}:{secrets.token_hex(4)}",
        )
        return RayWorkers(count, limits, self._echo, options, f"search on {kind}", self._binaries())

    def compilers(self, jobs: int, limits: WorkerLimits) -> Workers | None:
        from evoengine.search.ray_workers import ActorOptions, RayWorkers

        return RayWorkers(jobs, limits, self._echo, ActorOptions(), binaries=self._binaries())

    def _binaries(self) -> SentBinaries:
        from evoengine.search.ray_workers import SentBinaries

        self._sent = self._sent or SentBinaries()
        return self._sent


def _count(kind: str) -> int:
    return sum(node.gpus.get(kind, 0) for node in living_nodes())


def _why_no_gpu(kind: str) -> str:
    nodes = living_nodes()
    if any(node.gpus.get(kind) for node in nodes):
        return f"all GPUs of kind {kind} of the cluster are in use"
    others = sorted({other for node in nodes for other in node.gpus})
    listed = f"; it has {', '.join(others)}" if others else ""
    return f"no node of the cluster has a GPU of kind {kind} (Ray's resources GPU and {GPU}{kind}){listed}"


# ── searches, one per kind of GPU, with one ledger ──────────────────────────────────────────────────────────────────


class FleetSearch:
    """Searches ready to start on the cluster that the first of `options` names; they differ only in `gpu`.

    Raises UsageError, and MachineError if the cluster or a GPU is unavailable.
    """

    def __init__(
        self,
        options: Sequence[SearchOptions],
        echo: Echo = silent,
        on_stage: Echo = silent,
        finder: GpuFinder | None = None,
    ) -> None:
        self._echo, self._options = echo, options
        self._searches: list[Search] = []
        first = options[0]
        assert first.cluster is not None  # otherwise the search is local
        with ExitStack() as stack:
            on_stage("reaching the cluster")
            stack.enter_context(connected(first.cluster))
            nodes = survey()
            require_fit(nodes)
            echo(f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} with {sum(n.cpus for n in nodes)} CPUs")
            for asked in options:
                each = replace(asked, jobs=asked.jobs and max(1, asked.jobs // len(options)))
                place = Fleet(self._prefixed_echo(each), each.timeout, 1 / len(options), finder)
                self._searches.append(Search(each, self._prefixed_echo(each), on_stage, place))
            self._connection = stack.pop_all()

    def _prefixed_echo(self, options: SearchOptions) -> Echo:
        """Return an echo that prefixes messages with the GPU if there are several searches."""
        return self._echo if len(self._options) == 1 else lambda line: self._echo(f"{options.gpu}: {line}")

    @property
    def number(self) -> int | None:
        """Return the number of the first run, once the ledger has it."""
        return self._searches[0].number

    def stop(self) -> None:
        """Stop the searches after their current events; their results are kept."""
        for search in self._searches:
            search.stop()

    def run(self, on_change: OnChange = ignore, on_trial: OnTrial | None = None) -> SearchResult:
        """Run the search of a single kind of GPU."""
        (found,) = self.run_all(on_change, on_trial)
        if isinstance(found, EvoengineError):
            raise found
        return found

    def run_all(
        self, on_change: OnChange = ignore, on_trial: OnTrial | None = None
    ) -> list[SearchResult | EvoengineError]:
        """Run all searches and return a result or an error for each. An error of one does not stop the others."""
        together = _CombinedProgress(len(self._searches), on_change)
        with self._connection:
            if len(self._searches) == 1:
                return [self._run(0, on_change, on_trial)]
            threads = ThreadPoolExecutor(len(self._searches), "search")
            try:
                running = [
                    threads.submit(self._run, n, partial(together.update, n), on_trial)
                    for n in range(len(self._searches))
                ]
                return [each.result() for each in running]
            finally:
                threads.shutdown(wait=False)  # so that a second Ctrl-C does not wait for them

    def _run(self, n: int, on_change: OnChange, on_trial: OnTrial | None) -> SearchResult | EvoengineError:
        try:
            return self._searches[n].run(on_change, on_trial)
        except EvoengineError as error:
            if len(self._searches) > 1:
                self._prefixed_echo(self._options[n])(str(error))
            return error


class _CombinedProgress:
    """The progress of several searches as one. It has no best: figures of different GPUs are not comparable."""

    def __init__(self, count: int, on_change: OnChange) -> None:
        self._each: list[Progress | None] = [None] * count
        self._on_change = on_change
        self._changing = threading.Lock()

    def update(self, n: int, progress: Progress) -> None:
        with self._changing:
            self._each[n] = progress
            known = [each for each in self._each if each]
            self._on_change(
                Progress(
                    sum(each.total for each in known),
                    min(each.started for each in known),
                    sum((each.outcomes for each in known), Counter()),
                    stage=next((each.stage for each in known if each.stage), ""),
                    compiled=sum(each.compiled for each in known),
                    predicted=sum(each.predicted for each in known),
                )
            )
