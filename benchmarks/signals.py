"""SIGKILL for workers, keepers, guards and coordinators of real searches: what is judged, lost or left behind?

    python -m benchmarks.signals [--signals 100] [--seed 1]

Searches compile, execute and emulate RMSNorm kernels, all of which are right, and evaluate each again (--remeasure). A
search whose coordinator was killed goes on by the same command; after its end the next begins. At the end no kernel may
have a verdict against it, no trial may be without an end or judged twice, and no process or folder may be left. The
exit code is 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from evoengine.ledger.runs import RETRIES

MARK = "EVOENGINE_SIGNALS_BENCHMARK"
PROBLEM = "rms_norm:rows64,hidden256,bf16"
TRIALS = 40
END_SECONDS = 60.0
"""for what a killed search leaves"""
AGAINST = ("crashed", "hung", "uncompilable", "incorrect")
JUDGED = ("estimated", "unfinished", "screened")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torment = Torment(Path(folder), random.Random(asked.seed))
        torment.run(asked.signals)
        wrong = [*torment.wrong, *torment.check()]
    sent = ", ".join(f"{count} {kind}s" for kind, count in sorted(torment.sent.items()))
    print(f"{sum(torment.sent.values())} signals ({sent}), {torment.runs} searches, {torment.trials} trials")
    print(f"outcomes: {dict(torment.outcomes)}, {torment.left} killed {RETRIES + 1} times and not tried again")
    print("\n".join(wrong) or "nothing is wrong")
    return int(bool(wrong))


class Torment:
    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._folder, self._draw = folder, draw
        self._db, self._tmp = folder / "evo.db", folder / "tmp"
        self._tmp.mkdir()
        self.sent: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.runs = self.trials = self.left = 0

    def run(self, signals: int) -> None:
        seed = 0
        while sum(self.sent.values()) < signals:
            seed += 1
            while (code := self._search(seed, signals)) == -signal.SIGKILL:
                continue
            self.runs += 1
            if code:
                self.wrong.append(f"the search with seed {seed} ended with {code}: {self._said()}")

    def _search(self, seed: int, signals: int) -> int:
        """Start a search, or go on with one, and kill what belongs to it now and then; returns its exit code."""
        command = [
            sys.executable, "-m", "evoengine", "search", "--gpu", "h100", "--device", "emulator", "--problem", PROBLEM,
            "--trials", str(TRIALS), "--seed", str(seed), "--jobs", "2", "--remeasure", "--db", str(self._db),
        ]  # fmt: skip
        environment = {**os.environ, MARK: str(os.getpid()), "TMPDIR": str(self._tmp)}
        with open(self._folder / "stderr", "wb") as said:
            search = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=said)
        while search.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                search.wait(self._draw.uniform(0.2, 4.0))
            if search.poll() is None and sum(self.sent.values()) < signals:
                self._send(search.pid)
        return search.returncode

    def _send(self, coordinator: int) -> None:
        of_kind: dict[str, list[int]] = {"coordinator": [coordinator]}
        for pid, kind in kinds(coordinator):
            of_kind.setdefault(kind, []).append(pid)
        if "worker" not in of_kind:  # nothing is evaluated yet
            return
        kind = self._draw.choice(sorted(of_kind))
        with suppress(ProcessLookupError):
            os.kill(self._draw.choice(of_kind[kind]), signal.SIGKILL)
            self.sent[kind] += 1

    def _said(self) -> str:
        return " | ".join((self._folder / "stderr").read_text(errors="replace").strip().splitlines()[-2:])

    def check(self) -> Iterator[str]:
        end = time.monotonic() + END_SECONDS
        while (left := marked()) and time.monotonic() < end:
            time.sleep(0.1)
        yield from (f"left behind: process {pid}" for pid in left)
        yield from (f"left behind: {path.name}" for path in self._tmp.glob("evoengine-worker-*"))
        with closing(sqlite3.connect(self._db)) as ledger:
            rows = ledger.execute("SELECT id, run_id, config_key, outcome, reason FROM candidates").fetchall()
        self.trials = len(rows)
        self.outcomes = Counter(str(outcome) for *_, outcome, _ in rows)
        self.left = sum(str(row[4]).endswith("it is not tried again") for row in rows)
        yield from (f"false verdict: trial {n}: {o}: {why}" for n, _, _, o, why in rows if o in AGAINST)
        yield from (f"lost: trial {row[0]} has no end" for row in rows if row[3] is None)
        judged = Counter((run, config) for _, run, config, outcome, _ in rows if outcome in JUDGED)
        yield from (
            f"judged {count} times: {config} in run {run}" for (run, config), count in judged.items() if count > 1
        )


def marked() -> list[int]:
    """The processes that searches of this benchmark have started."""
    mark = f"{MARK}={os.getpid()}".encode()
    found = []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def kinds(coordinator: int) -> Iterator[tuple[int, str]]:
    """Guards, keepers and workers below a coordinator: a guard is its child, a keeper the guard's, a worker the
    keeper's."""
    parents = {}
    for pid in marked():
        with suppress(OSError):
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    for pid, parent in parents.items():
        depth = 0
        while parent in parents and parent != coordinator:
            parent, depth = parents[parent], depth + 1
        if parent == coordinator and depth < 3 and (depth or b"keeper.py" in _command(pid)):
            yield pid, ("guard", "keeper", "worker")[depth]


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


if __name__ == "__main__":
    sys.exit(main())
