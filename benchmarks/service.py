"""How many readers a service answers: /v1/best over a ledger of 10,000 candidates, beside Optuna's gRPC proxy.

    python benchmarks/service.py [--readers 200] [--candidates 10000] [--seconds 10]

Both servers run on the first core of this machine and the readers on the others, over loopback, one server after the
other. `paced`: the readers together ask 1,000 times a second, as a fleet that looks for news does. `closed`: each asks
again as soon as it has its answer. The peer answers best_trial of a study with the same number of trials, from memory;
it has fewer readers, for each first fetches every trial.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

PACE = 1000.0
"""requests a second, of all readers together"""
STUDY = "service"
PEER_READERS = 8
PEER = """
import sys
import optuna
from optuna.distributions import IntDistribution
from optuna.storages import InMemoryStorage, run_grpc_proxy_server
optuna.logging.set_verbosity(optuna.logging.WARNING)
name, trials, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
storage, space = InMemoryStorage(), {"tile": IntDistribution(1, 1 << 20)}
study = optuna.create_study(storage=storage, study_name=name, direction="maximize")
for n in range(1, trials + 1):
    study.add_trial(optuna.create_trial(params={"tile": n}, distributions=space, value=float(n % 997)))
run_grpc_proxy_server(storage, host="127.0.0.1", port=port)
"""


def main() -> None:
    from benchmarks.ledger_scale import make_ledger

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--candidates", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        ledger = Path(scratch, "evo.db")
        make_ledger(ledger, asked.candidates)
        os.sched_setaffinity(0, cores[1:] or cores)
        print(f"{asked.readers} readers, {asked.candidates} candidates, load {os.getloadavg()[0]:.1f}", flush=True)
        print(f"{'server':24}{'load':8}{'answers/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'worst ms':>10}{'errors':>8}")
        with served([sys.executable, "-m", "evoengine", "serve", "--db", str(ledger)], cores[0], ours=True) as port:
            for name, pace in (("paced", PACE), ("closed", None)):
                say(
                    "evoengine /v1/best",
                    name,
                    asyncio.run(read_http(port, asked.readers, asked.seconds, pace)),
                    asked.seconds,
                )
        with served([sys.executable, "-c", PEER, STUDY, str(asked.candidates)], cores[0], ours=False) as port:
            for name, pace in (("paced", PACE), ("closed", None)):
                own_pace = pace and pace * PEER_READERS / asked.readers  # each as often as a reader of ours
                told = read_grpc(port, PEER_READERS, asked.seconds, own_pace)
                say(f"Optuna gRPC, {PEER_READERS} readers", name, told, asked.seconds)


Told = tuple[list[float], int]
"""milliseconds of each answer, and how many errors there were"""


def say(server: str, load: str, told: Told, seconds: float) -> None:
    times, errors = sorted(told[0]), told[1]
    if not times:
        print(f"{server:24}{load:8}{0:10.0f}{'–':>9}{'–':>9}{'–':>10}{errors:8}", flush=True)
        return
    p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
    row = f"{len(times) / seconds:10.0f}{statistics.median(times):9.1f}{p99:9.1f}{times[-1]:10.1f}{errors:8}"
    print(f"{server:24}{load:8}{row}", flush=True)


class served:
    """A server on one core, on a free port, until the end of the block."""

    def __init__(self, command: list[str], core: int, *, ours: bool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._command = [*command, "--port", str(self.port)] if ours else [*command, str(self.port)]
        self._core = core
        self._env = os.environ | {"PYTHONPATH": str(ROOT), "EVOENGINE_CPU_JOBS": "0"}

    def __enter__(self) -> int:
        self._process = subprocess.Popen(
            ["taskset", "--cpu-list", str(self._core), *self._command], env=self._env, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return self.port
            except OSError:
                time.sleep(0.2)
        raise SystemExit("the server did not start")

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)


async def read_http(port: int, readers: int, seconds: float, pace: float | None) -> Told:
    """Each reader has a connection that it keeps, and reads answers whole."""
    request = b"GET /v1/best HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    times: list[float] = []
    errors = 0
    pause = readers / pace if pace else 0.0

    async def read(number: int) -> None:
        nonlocal errors
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        due = begin + pause * number / readers
        while due < begin + seconds and time.perf_counter() < begin + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asked = due if pace else time.perf_counter()  # a late start is part of what a paced reader waits
            try:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                errors += not head.startswith(b"HTTP/1.1 200")
            except (OSError, asyncio.IncompleteReadError, ValueError):
                errors += 1
                return
            times.append((time.perf_counter() - asked) * 1e3)
            due = due + pause if pace else time.perf_counter()
        writer.close()

    begin = time.perf_counter()
    await read(0)  # the first answer is read from the ledger
    times.clear()
    begin = time.perf_counter()
    await asyncio.gather(*(read(number) for number in range(readers)))
    return times, errors


def read_grpc(port: int, readers: int, seconds: float, pace: float | None) -> Told:
    """Threads of one process, as Optuna's client is synchronous; each has a storage of its own."""
    import optuna
    from optuna.storages import GrpcStorageProxy

    times: list[float] = []
    errors = [0]
    lock = threading.Lock()
    pause = readers / pace if pace else 0.0
    first = optuna.load_study(study_name=STUDY, storage=GrpcStorageProxy(host="127.0.0.1", port=port))
    assert first.best_trial.value is not None
    barrier = threading.Barrier(readers)

    def read(number: int) -> None:
        study = optuna.load_study(study_name=STUDY, storage=GrpcStorageProxy(host="127.0.0.1", port=port))
        barrier.wait()
        begin = time.perf_counter()
        due = begin + pause * number / readers
        while due < begin + seconds and time.perf_counter() < begin + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            asked = due if pace else time.perf_counter()
            failed = not _succeeds(lambda: study.best_trial)
            with lock:
                errors[0] += failed
                times.append((time.perf_counter() - asked) * 1e3)
            due = due + pause if pace else time.perf_counter()

    with ThreadPoolExecutor(readers) as pool:
        for done in [pool.submit(read, number) for number in range(readers)]:
            done.result()
    return times, errors[0]


def _succeeds(call: Callable[[], object]) -> bool:
    import grpc

    try:
        call()
    except grpc.RpcError:
        return False
    return True


if __name__ == "__main__":
    main()
