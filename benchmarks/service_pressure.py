"""What `/readyz` takes while others press: 45 reports at once, and 300 connections that say half a request.

    python benchmarks/service_pressure.py [--reports 45] [--half-open 300] [--candidates 2000]

A server on loopback, with a ledger of so many candidates, is asked `/readyz` twenty times a second: alone, beside so
many requests for one report, beside as many for reports of as many problems, and beside connections that send the
beginning of a request and no more. Another process makes those. Each row says how long an answer took, and how the
others were answered. The exit code is 1 where an answer took 100 ms or longer, or `/readyz` was not answered.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MOST_MS = 100.0
EVERY_SECONDS = 0.05
ALONE_SECONDS = 3.0
HALF = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def main() -> int:
    from benchmarks.ledger_scale import make_ledger

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=45)
    parser.add_argument("--half-open", type=int, default=300)
    parser.add_argument("--candidates", type=int, default=2000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        ledger = Path(scratch, "evo.db")
        make_ledger(ledger, asked.candidates)
        print(f"{asked.candidates} candidates, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print(f"{'beside':26}{'answers':>9}{'p50 ms':>9}{'worst ms':>10}  the others")
        with served(ledger) as port:
            same = ["/report"] * asked.reports
            unlike = [f"/report?problem=gemm:m{64 + n},n64,k64,fp16" for n in range(asked.reports)]
            worst = [
                told("nothing", *beside(port, lambda: time.sleep(ALONE_SECONDS))),
                told(f"{asked.reports} times one report", *beside(port, lambda: ask_all(port, same))),
                told(f"{asked.reports} unlike reports", *beside(port, lambda: ask_all(port, unlike))),
                told(f"{asked.half_open} half-open", *beside(port, lambda: half_open(port, asked.half_open))),
            ]
    return int(max(worst) >= MOST_MS)


@contextmanager
def served(ledger: Path) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "EVOENGINE_CPU_JOBS": "0"}
    command = [sys.executable, "-m", "evoengine", "serve", "--db", str(ledger), "--port", str(port)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            with suppress(OSError):
                ask(port, "/readyz")
                break
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=60)


def ask(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def beside(port: int, press: Callable[[], Counter[str] | None]) -> tuple[list[float], Counter[str]]:
    """Milliseconds of each `/readyz` while `press` runs, and what that was answered."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    pressing = context.Process(target=lambda: theirs.send(press()))  # in this one its threads would hold up the clock
    pressing.start()
    times = []
    while pressing.is_alive():
        begin = time.perf_counter()
        status = ask(port, "/readyz")
        times.append((time.perf_counter() - begin) * 1e3 if status == 200 else float("inf"))
        time.sleep(EVERY_SECONDS)
    return times, ours.recv() or Counter()


def ask_all(port: int, paths: list[str]) -> Counter[str]:
    with ThreadPoolExecutor(len(paths)) as threads:
        return Counter(map(str, threads.map(lambda path: ask(port, path), paths)))


def half_open(port: int, count: int) -> Counter[str]:
    """Until the server has closed all of them."""
    connections = []
    for _ in range(count):
        connections.append(socket.create_connection(("127.0.0.1", port), timeout=300))
        with suppress(OSError):
            connections[-1].sendall(HALF)
    ended: Counter[str] = Counter()
    for connection in connections:
        with connection:
            try:
                ended["timed out" if connection.recv(1 << 12) else "closed"] += 1
            except OSError:
                ended["closed"] += 1
    return ended


def told(name: str, times: list[float], others: Counter[str]) -> float:
    """The worst, in milliseconds."""
    shown = ", ".join(f"{count} {what}" for what, count in sorted(others.items()))
    print(f"{name:26}{len(times):9}{statistics.median(times):9.1f}{max(times):10.1f}  {shown}", flush=True)
    return max(times)


if __name__ == "__main__":
    sys.exit(main())
