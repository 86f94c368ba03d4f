"""How a search scales: `python benchmarks/fleet.py nodes`, `python benchmarks/fleet.py gpus`, `… clocks`.

The cluster is one of simulated nodes on this machine, on the loopback alone. `nodes` compiles and gates kernels, and
has tasks sleep, which needs no cores, on one node and on two. `gpus` has fake GPUs, actors that take 0.2 s for a
candidate and nothing else, first with tasks in a queue, then under a whole coordinator with its sampler, claims and
ledger: how much of the time they are busy, and so how many one coordinator can feed. Those actors take cores of this
machine too, a process each; the GPUs of `clocks` are a clock in the coordinator's process.
"""

from __future__ import annotations

import argparse
import heapq
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.instant import InstantWorkers
from evoengine.records import CompiledCandidate, Outcome, Plans
from evoengine.sandbox.worker_process import COMPILER_LIMITS, WorkerLimits
from evoengine.sandbox.workers import Deferred
from evoengine.search.evaluators import gate_plan
from evoengine.space.space import load_space
from evoengine.stages.gate import Judges
from evoengine.stages.render import render
from evoengine.stages.tasks import compile_task
from evoengine.tuning.ray_cluster import connected
from evoengine.tuning.setup import make_target, prepare_space
from tests.support import faulty_device, numbered_search
from tests.support.fleet import nodes
from tests.support.numbered_search import GPU, NumberedSearch

PROBLEM = "rms_norm:rows64,hidden256,bf16"
DIGITS = ("thousands", "hundreds", "tens", "ones")
TEN = "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"


def silent(line: str) -> None:
    pass


# ── nodes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def compile_and_gate(target: Any, source: Any, plan: Any) -> str:
    """What a candidate costs without a GPU, but for the prediction."""
    binary = compile_task(source, target.gpu.arch)
    judged = Judges(target.workload, CompiledCandidate(0, source, binary), Plans(plan), 1).judge_short()
    return str(judged.correct and binary.registers)


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def kernels(count: int) -> list[tuple[Any, ...]]:
    """Arguments for `compile_and_gate`, of as many kernels, no two of one source."""
    from evoengine.stages.render import fill

    target = make_target(PROBLEM, GPU)
    space, templates = prepare_space(None, None, target, True, fill)
    found: dict[str, tuple[Any, ...]] = {}
    for config in space.enumerate():
        source = render(target, space, config, templates, fill)
        found.setdefault(source.sha256, (target, source, gate_plan(space, target, config)))
        if len(found) == count:
            break
    return list(found.values())


def throughput(count: int, tasks: list[tuple[Callable[..., str], tuple[Any, ...]]]) -> float:
    """Tasks per second on `count` nodes of a CPU each, all of whose workers have done one before."""
    from evoengine.search.ray_workers import ActorOptions, RayWorkers

    with ExitStack() as stack:
        cluster, _ = stack.enter_context(nodes(*[1] * count))
        stack.enter_context(connected(cluster.address))
        workers = RayWorkers(count, COMPILER_LIMITS, silent, ActorOptions())
        stack.callback(workers.close)

        def submit(task: Callable[..., str], args: tuple[Any, ...]) -> Future[Any]:
            return workers.submit(task, *args, on_crash=Outcome.CRASHED, returns=str)

        for future in [submit(sleep, (3.0,)) for _ in range(count)] + [submit(*tasks[0]) for _ in range(2 * count)]:
            future.result()
        start = time.monotonic()
        answers = [future.result() for future in [submit(*each) for each in tasks[1:]]]
        assert all(isinstance(answer, str) for answer in answers), answers
        return len(answers) / (time.monotonic() - start)


def over_nodes(count: int, console: Console) -> None:
    table = Table("tasks", "1 node /s", "2 nodes /s", "ratio")
    made: list[tuple[Callable[..., str], tuple[Any, ...]]] = [(compile_and_gate, args) for args in kernels(count + 1)]
    asleep: list[tuple[Callable[..., str], tuple[Any, ...]]] = [(sleep, (0.5,))] * (count + 1)
    for name, tasks in (("compile and gate", made), ("sleep 0.5 s", asleep)):
        one, two = throughput(1, tasks), throughput(2, tasks)
        table.add_row(name, f"{one:.2f}", f"{two:.2f}", f"{two / one:.2f}")
    console.print(table)


# ── GPUs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class SleepingGpu:
    """In the place of an actor with a GPU: no process of its own, so that many fit on this machine."""

    def __init__(self, limits: WorkerLimits, *_: object) -> None:
        self._seconds = limits.seconds
        faulty_device.WORK_SECONDS = 0.0  # in this process: what a candidate takes is slept below

    def ready(self) -> Any:
        import ray

        from evoengine import __version__
        from evoengine.search.ray_workers import ActorInfo

        return ActorInfo(ray.get_runtime_context().get_node_id(), "here", __version__)

    def run(self, task: Callable[..., Any], on_crash: Outcome, returns: type, seconds: float, *args: Any) -> Any:
        from evoengine.search.ray_workers import TaskResult

        time.sleep(self._seconds)
        return TaskResult(task(*args), self._seconds, 0.0)


class ClockGpus:
    """GPUs that have a candidate's answer after `seconds`, one at a time each, and take no core."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size, self._seconds = size, seconds
        self.seconds_busy = self.seconds_starting = 0.0
        self._free = [0.0] * size
        """when each GPU has done all that it was given"""
        self._running: list[tuple[float, int, Callable[[], None]]] = []
        self._submitted = 0
        self._changed = threading.Condition()
        self._closed = False
        self._clock = threading.Thread(target=self._run, daemon=True)
        self._clock.start()

    def submit(self, task: Callable[..., Any], *args: Any, **_: Any) -> Future[Any]:
        answer: Future[Any] = Future()

        def end() -> None:
            answer.set_result(task(*(arg.ask() if isinstance(arg, Deferred) else arg for arg in args)))

        with self._changed:
            ends = max(time.monotonic(), heapq.heappop(self._free)) + self._seconds
            heapq.heappush(self._free, ends)
            self._submitted += 1
            heapq.heappush(self._running, (ends, self._submitted, end))
            self._changed.notify()
        return answer

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._running or self._running[0][0] > time.monotonic()):
                    self._changed.wait(self._running[0][0] - time.monotonic() if self._running else None)
                if self._closed:
                    return
                _, _, end = heapq.heappop(self._running)
            end()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


class DigitSearch(NumberedSearch):
    """Its space has knobs of ten values, as real ones have, and 10,000 configurations."""

    def space(self, numbers: Any) -> Any:
        knobs = "\n".join(f"{digit} = [{TEN}]" for digit in DIGITS)
        path = self.folder / "digits.toml"
        path.write_text(numbered_search.SPACE.replace("number = [{numbers}]", knobs))
        template = self.templates / "attention" / "numbered.cu.j2"
        template.write_text(f"// candidate {''.join(f'{{{{ {digit} }}}}' for digit in DIGITS)}\n")
        return load_space(path, numbered_search.PROBLEM, GPU)


def one() -> int:
    return 1


def queued(gpus: Any, count: int) -> float:
    """The share of the time that the GPUs are busy with `count` tasks each, all in a queue."""
    start, before = time.monotonic(), gpus.seconds_busy
    for future in [gpus.submit(one, on_crash=Outcome.CRASHED, returns=int) for _ in range(count * gpus.size)]:
        future.result()
    return (gpus.seconds_busy - before) / gpus.size / (time.monotonic() - start)


def coordinated(gpus: Any, count: int, seconds: float) -> tuple[float, float]:
    """That share in a search of `count` candidates a GPU, from the first that ended to the last that began; and the
    coordinator's own seconds of a core per candidate."""
    faulty_device.WORK_SECONDS = 0.0
    moments: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        search = DigitSearch(Path(folder))
        trials = count * gpus.size
        own = search.coordinator(
            (), trials=trials, timed=True, runners=lambda limits: gpus, workers=InstantWorkers(gpus.size),
            jobs=gpus.size, known=True, predictor=faulty_device.right_model,
            on_change=lambda progress: moments.append((time.monotonic(), progress.done)),
        )  # fmt: skip
        before = time.process_time()
        own.search()
        cpu = time.process_time() - before
        search.ledger.close()
    inner = [(moment, done) for moment, done in moments if gpus.size <= done <= trials - gpus.size]
    (first, few), (last, many) = inner[0], inner[-1]
    return (many - few) * seconds / gpus.size / (last - first), cpu / trials


class Unclosed:
    """The same GPUs for one search after another."""

    def __init__(self, gpus: Any) -> None:
        self.size, self.submit = gpus.size, gpus.submit
        self.seconds_busy = self.seconds_starting = 0.0

    def close(self) -> None:
        pass


def over_gpus(counts: list[int], each: int, seconds: float, console: Console) -> None:
    from evoengine.search import ray_workers

    vars(ray_workers)["NodeWorker"] = SleepingGpu
    table = Table(
        "GPUs", "busy, tasks in a queue", "busy, whole coordinator", "candidates /s", "its CPU ms a candidate"
    )
    for count in counts:
        with ExitStack() as stack:
            cluster, _ = stack.enter_context(nodes(1, h100=count))
            stack.enter_context(connected(cluster.address))
            options = ray_workers.ActorOptions(0.0, 1.0, {"gpu:h100": 1.0})
            gpus = ray_workers.RayWorkers(count, WorkerLimits(seconds), silent, options)
            stack.callback(gpus.close)
            while not all(worker.ready for worker in gpus._all):
                time.sleep(0.5)
            busy = queued(gpus, each)
            share, cpu = coordinated(Unclosed(gpus), each, seconds)
            rate = share * count / seconds
            console.print(f"{count} GPUs: done, load {os.getloadavg()[0]:.1f}")
            table.add_row(str(count), f"{busy:.0%}", f"{share:.0%}", f"{rate:.0f}", f"{1000 * cpu:.1f}")
    console.print(table)


def over_clocks(counts: list[int], each: int, seconds: float, console: Console) -> None:
    table = Table("GPUs", "busy", "candidates /s", "CPU ms of the coordinator's process a candidate")
    for count in counts:
        share, cpu = coordinated(ClockGpus(count, seconds), each, seconds)
        table.add_row(str(count), f"{share:.0%}", f"{share * count / seconds:.0f}", f"{1000 * cpu:.1f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("nodes", "gpus", "clocks"))
    parser.add_argument("--tasks", type=int, default=24, help="on nodes")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--each", type=int, default=30, help="candidates for each GPU")
    parser.add_argument("--seconds", type=float, default=0.2, help="that a GPU takes for a candidate")
    asked = parser.parse_args()
    console = Console()
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    if asked.what == "nodes":
        over_nodes(asked.tasks, console)
    elif asked.what == "gpus":
        over_gpus(asked.gpus, asked.each, asked.seconds, console)
    else:
        over_clocks(asked.gpus, asked.each, asked.seconds, console)


if __name__ == "__main__":
    import fleet  # by which name workers find what they are to run

    fleet.main()
