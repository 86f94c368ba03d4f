"""What the reading commands cost in a large ledger: `python benchmarks/ledger_scale.py --trials 50000`.

Makes an SQLite ledger of trials as a search leaves them (sources, binaries, verdicts with cases, figures with samples,
parents, finals), then runs each command as a process of its own, with its output into a pipe that is read and dropped.
Seconds are wall clock, CPU seconds those of the process alone, and the memory is its largest resident set.

    python tests/support/postgres.py python benchmarks/ledger_scale.py --trials 50000 --server

copies the ledger into the empty database that EVOENGINE_DB names, and reads it there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from multiprocessing import Process
from pathlib import Path

from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection, create_engine, insert
from sqlalchemy.orm import Session

from benchmarks.server_ledger import copy_ledger
from evoengine.ledger import integrity
from evoengine.ledger.database import open_database, parse_url
from evoengine.ledger.integrity import checked_columns, row_checksum
from evoengine.ledger.ranking import rebuild
from evoengine.ledger.tables import (
    UNPLACED,
    Base,
    BaselineRow,
    BinaryRow,
    CandidateRow,
    Checked,
    DeviceRow,
    MachineCodeRow,
    MeasurementRow,
    RunRow,
    SourceRow,
    VerdictRow,
)
from evoengine.records import Config, Outcome, config_key

GPU = "h100"
PROBLEM = "attention:b4,h16,s4096,d128,bf16,causal"
POLICY = {"launch": "graph", "l2": "cold", "clocks": "boost", "batch": 1}
KNOBS: dict[str, tuple[int | str | bool, ...]] = {
    "family": ("mma", "wgmma"),
    "tile_m": (64, 128, 192, 256),
    "tile_n": tuple(range(16, 272, 16)),
    "warps": (4, 8, 12, 16),
    "stages": (1, 2, 3, 4),
    "q_in": ("registers", "shared"),
    "layout": ("swizzle", "padded"),
    "v_wait": ("after_softmax", "before_softmax"),
    "schedule": ("single_tile", "persistent", "lpt"),
    "registers": tuple(range(40, 256, 8)),
    "cluster": (1, 2),
    "overlap": (False, True),
    "unroll": (1, 2, 4, 8),
    "min_blocks": (1, 2),
}
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
BATCH = 1000
"""trials that are inserted together"""
WHOLE = 50_000
"""trials with all that they have"""
RUNS = 5
FINALISTS = 8
ELITES, RECENT = 20, 500
"""parents are of the fastest so many among the last so many"""
PACKED_SOURCE_BYTES, PACKED_CUBIN_BYTES, SAMPLES, CASES = 7_000, 9_500, 50, 12
"""as searches of the attention workload leave them, about, sources and machine code compressed"""
OUTCOMES = {
    Outcome.MEASURED: 70,
    Outcome.SCREENED: 12,
    Outcome.INCORRECT: 7,
    Outcome.DUPLICATE: 6,
    Outcome.UNCOMPILABLE: 5,
}
"""of a hundred trials"""
COMMANDS = {
    "history --limit 20": ("history", "--limit", "20"),
    "history": ("history",),
    "history, its first line": ("history", "|", "head", "-1"),
    "history --json": ("history", "--json"),
    "best": ("best",),
    "best --pareto": ("best", "--pareto"),
    "report": ("report",),
    "report --json": ("report", "--json"),
    "show --lineage of the last trial": ("show", "LAST", "--lineage"),
    "show of the last trial": ("show", "LAST"),
    "runs": ("runs",),
}


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu_seconds: float
    peak_mb: float
    lines: int
    code: int


# ── the ledger ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Evolution:
    """Trials that come from one another, as far as their rows show it."""

    def __init__(self, trials: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._trials = trials
        self._recent: deque[tuple[float, int, Config]] = deque(maxlen=RECENT)
        self._elites: list[tuple[float, int, Config]] = []
        self._by_run: dict[int, list[tuple[float, int]]] = {}
        self._last_source: dict[int, str] = {}
        self._optimum = {name: self._random.choice(values) for name, values in KNOBS.items()}

    def rows(self, trial: int) -> Iterator[tuple[type[Base], dict[str, object]]]:
        """The rows of a trial, each with its table."""
        run = 1 + (trial - 1) * RUNS // self._trials
        outcome = self._random.choices(list(OUTCOMES), list(OUTCOMES.values()))[0]
        if outcome is Outcome.DUPLICATE and run not in self._last_source:
            outcome = Outcome.UNCOMPILABLE
        config, parents = self._child()
        created = BEGAN + timedelta(seconds=trial)
        rejected = outcome is not Outcome.MEASURED
        row: dict[str, object] = {
            "id": trial, "run_id": run, "problem": PROBLEM, "gpu": GPU, "config": config,
            "config_key": config_key(config), "parents": parents, "operator": "mutation" if parents else "start",
            "created_at": created, "finished_at": created + timedelta(seconds=3), "outcome": str(outcome),
            "reason": f"{outcome}: " + "as the gate says of it, " * 6 if rejected else None,
            "device": "NVIDIA H100 SXM5", "occupancy": None if rejected else 0.25,
            "source_sha256": None, "binary_id": None, "entry": None, "grid_x": None, "grid_y": None, "grid_z": None,
            "threads": None, "block_y": None, "block_z": None, "shared_bytes": None,
        }  # fmt: skip
        if outcome is not Outcome.SCREENED:
            text = f"// trial {trial}\n{self._random.randbytes(PACKED_SOURCE_BYTES // 2).hex()}".encode()
            sha256 = hashlib.sha256(text).hexdigest()
            if outcome is Outcome.DUPLICATE:
                sha256 = self._last_source[run]
            else:
                yield SourceRow, {"sha256": sha256, "packed": zlib.compress(text, 0)}
                self._last_source[run] = sha256
            row |= {"source_sha256": sha256, "entry": "kernel", "grid_x": 132, "grid_y": 1, "grid_z": 1}
            row |= {"threads": 384, "block_y": 1, "block_z": 1, "shared_bytes": 196_608}
        if outcome in (Outcome.MEASURED, Outcome.INCORRECT):
            cubin_sha256, packed = self._machine_code()
            yield MachineCodeRow, {"sha256": cubin_sha256, "packed": packed}
            yield BinaryRow, self._binary(trial, str(row["source_sha256"]), cubin_sha256)
            row["binary_id"] = trial
        yield CandidateRow, row
        if outcome in (Outcome.MEASURED, Outcome.INCORRECT):
            yield VerdictRow, self._verdict(trial, outcome, created)
        if not rejected:
            us = self._time(config)
            self._recent.append((us, trial, config))
            self._by_run.setdefault(run, []).append((us, trial))
            yield MeasurementRow, self._figure(trial, us, created, {})

    def finals(self) -> Iterator[tuple[type[Base], dict[str, object]]]:
        """At the end of each run its fastest were timed against each other."""
        for run, timed in self._by_run.items():
            ended = BEGAN + timedelta(days=10 + run)
            for place, (us, trial) in enumerate(sorted(timed)[:FINALISTS], 1):
                terms = {"final_of_run": float(run), "place": float(place), "tied": float(place == 1)}
                yield MeasurementRow, self._figure(trial, us * 1.01, ended, terms)

    def _child(self) -> tuple[Config, list[int]]:
        if len(self._recent) < ELITES:
            return {name: self._random.choice(values) for name, values in KNOBS.items()}, []
        if not self._elites or self._random.random() < 0.05:
            self._elites = sorted(self._recent, key=lambda known: known[0])[:ELITES]
        (_, first, config), (_, second, other) = self._random.sample(self._elites, 2)
        crossed = self._random.random() < 0.3
        child = {n: (other if crossed and self._random.random() < 0.5 else config)[n] for n in KNOBS}
        for name in self._random.sample(list(KNOBS), self._random.choice((1, 1, 2, 3))):
            child[name] = self._random.choice(KNOBS[name])
        return child, [first, second] if crossed else [first]

    def _time(self, config: Config) -> float:
        away = sum(config[name] != value for name, value in self._optimum.items())
        return 700.0 * 1.07**away * self._random.uniform(1.0, 1.05)

    def _machine_code(self) -> tuple[str, bytes]:
        """Its hash, and as many bytes as that of searches is compressed to; not compressed, which would take longer
        than all the rest."""
        cubin = self._random.randbytes(PACKED_CUBIN_BYTES)
        return hashlib.sha256(cubin).hexdigest(), zlib.compress(cubin, 0)

    def _binary(self, trial: int, source: str, cubin_sha256: str) -> dict[str, object]:
        return {
            "id": trial, "source_sha256": source, "options": "-arch=sm_90a --std=c++17", "arch": "sm_90a",
            "compiler": "NVRTC 13.0", "cubin_sha256": cubin_sha256,
            "registers": 168, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 1024, "warnings": [],
            "compile_ms": 812.5,
            "mix": {f"OPCODE_{i}": 17 * i for i in range(40)},
        }  # fmt: skip

    def _verdict(self, trial: int, outcome: Outcome, taken: datetime) -> dict[str, object]:
        wrong = outcome is Outcome.INCORRECT
        cases = [
            {
                "name": f"case {i}", "problem": PROBLEM, "seed": self._random.getrandbits(63), "correct": not wrong,
                "max_error": self._random.random() * 1e-3, "mean_error": 1.5e-5, "allowed": 1e-3, "reason": None,
            }
            for i in range(CASES)
        ]  # fmt: skip
        ended = str(outcome) if wrong else None
        return {
            "candidate_id": trial, "device": "NVIDIA H100 SXM5", "outcome": ended, "reason": ended, "cases": cases,
            "wall_ms": 140.5, "taken_at": taken,
        }  # fmt: skip

    def _figure(self, trial: int, us: float, taken: datetime, terms: dict[str, float]) -> dict[str, object]:
        samples = [us * self._random.uniform(0.99, 1.01) for _ in range(SAMPLES)]
        seen = {"sm_mhz": 1755.0, "watts": 640.5, "celsius": 61.0, "lowest_mhz": 1740.0, "rounds": 50.0}
        return {
            "candidate_id": trial, "kind": "measured", "device": "NVIDIA H100 SXM5", "tflops": 550_000 / us,
            "median_us": us, "samples_us": samples, "vs_baseline": 800 / us, "terms": seen | terms, "suspect": None,
            "policy": POLICY, "normalised_us": us * 1.001, "taken_at": taken,
        }  # fmt: skip


def make_ledger(path: Path, trials: int, seed: int = 0) -> None:
    """Writes a new SQLite ledger of so many trials in `RUNS` runs of one problem.

    Of more than `WHOLE` trials the further ones are those again, as `db prune` leaves losers (without source and
    binary), each slower by a little.
    """
    whole = min(trials, WHOLE)
    _make_whole(path, whole, seed)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for row in (CandidateRow, MeasurementRow, VerdictRow):
            connection.create_function(f"checksum_of_{row.__tablename__}", -1, _checksum(row), deterministic=True)
        for copy in range(1, -(-trials // whole)):
            connection.execute("BEGIN")
            _repeat(connection, copy, copy * whole, min(whole, trials - copy * whole))
            connection.execute("COMMIT")
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as chained:
        integrity.begin_all(chained, integrity.WRITTEN)
    engine.dispose()


def _checksum(row: type[Base]) -> Callable[..., str]:
    """Of a row, from its columns in the order of their names."""
    names = tuple(checked_columns(row))
    return lambda *values: row_checksum(row, dict(zip(names, values, strict=True)))


def _repeat(connection: sqlite3.Connection, copy: int, offset: int, count: int) -> None:
    slower = 1 + copy * 1e-6
    changes: dict[type[Base], dict[str, str]] = {
        CandidateRow: {"config_key": f"config_key || '#{copy}'", "source_sha256": "NULL", "binary_id": "NULL"},
        MeasurementRow: {
            "candidate_id": f"candidate_id + {offset}", "median_us": f"median_us * {slower}",
            "normalised_us": f"normalised_us * {slower}",
        },
        VerdictRow: {"candidate_id": f"candidate_id + {offset}", "cases": "'[]'"},
    }  # fmt: skip
    for row, changed in changes.items():
        columns = {c.name: changed.get(c.name, c.name) for c in row.__table__.columns if c.name != "id"}
        values = ", ".join(columns[name] for name in checked_columns(row))
        columns["checksum"] = f"checksum_of_{row.__tablename__}({values})"
        trial = "candidate_id"
        if row is CandidateRow:
            trial, columns = "id", {"id": f"id + {offset}"} | columns
        once = " AND terms NOT LIKE '%final_of_run%'" if row is MeasurementRow else ""
        connection.execute(
            f"INSERT INTO {row.__tablename__} ({', '.join(columns)}) SELECT {', '.join(columns.values())} "
            f"FROM {row.__tablename__} WHERE {trial} <= {count}{once}"
        )
    connection.execute(
        "INSERT INTO standings (candidate_id, ranking_id, run_id, figure_id, us, counted_us, place, run_counted_us, "
        "run_place) SELECT m.candidate_id, s.ranking_id, s.run_id, m.id, "
        f"{', '.join(['coalesce(m.normalised_us, m.median_us)'] * 2)}, {UNPLACED}, "
        f"coalesce(m.normalised_us, m.median_us), {UNPLACED} "
        f"FROM measurements m JOIN standings s ON s.candidate_id = m.candidate_id - {offset} "
        f"WHERE m.candidate_id BETWEEN {offset + 1} AND {offset + count}"
    )


def _make_whole(path: Path, trials: int, seed: int) -> None:
    engine = open_database(parse_url(str(path)), create=True)
    evolution = Evolution(trials, seed)
    with engine.begin() as connection:
        device: dict[str, object] = {"id": 1, "name": "NVIDIA H100 SXM5", "versions": {}}
        runs = range(1, RUNS + 1)
        _insert(connection, [(DeviceRow, device), *((RunRow, _run(n)) for n in runs)])
        _insert(connection, [(BaselineRow, _baseline(n)) for n in runs])
    numbers = iter(range(1, trials + 1))
    while batch := list(islice(numbers, BATCH)):
        with engine.begin() as connection:
            _insert(connection, [row for trial in batch for row in evolution.rows(trial)])
    with engine.begin() as connection:
        _insert(connection, list(evolution.finals()))
    with Session(engine) as session, session.begin():
        rebuild(session)
    engine.dispose()


def _insert(connection: Connection, rows: Sequence[tuple[type[Base], dict[str, object]]]) -> None:
    """Table by table, in an order in which what a row refers to is there before it."""
    tables = (
        DeviceRow,
        RunRow,
        BaselineRow,
        SourceRow,
        MachineCodeRow,
        BinaryRow,
        CandidateRow,
        VerdictRow,
        MeasurementRow,
    )
    for table in tables:
        of_table = [values for of, values in rows if of is table]
        if issubclass(table, Checked):
            for values in of_table:
                values["checksum"] = row_checksum(table, values)
        if of_table:
            connection.execute(insert(table), of_table)


def _run(number: int) -> dict[str, object]:
    return {
        "id": number, "started_at": BEGAN, "finished_at": BEGAN + timedelta(days=20), "status": "budget reached",
        "gpu": GPU, "problem": PROBLEM, "device_id": 1, "space_name": "attention.toml", "space_sha256": "5" * 64,
        "space_text": "kernel = 'attention'\n", "sampler": "evolution", "objectives": "tflops,registers",
        "seed": number, "version": "0.1.0", "host": "benchmark", "pid": 1, "command": "evoengine search",
    }  # fmt: skip


def _baseline(number: int) -> dict[str, object]:
    return {
        "run_id": number, "name": "library", "device": "NVIDIA H100 SXM5", "median_us": 800.0, "tflops": 690.0,
        "samples_us": [800.0] * SAMPLES, "policy": POLICY, "taken_at": BEGAN,
    }  # fmt: skip


# ── the commands ────────────────────────────────────────────────────────────────────────────────────────────────────


def cost(arguments: Sequence[str], ledger: Sequence[str], trials: int) -> Cost:
    """Runs `evoengine ARGUMENTS… LEDGER…`; where `| head -1` follows, its output is closed after one line."""
    own, piped, _ = " ".join(arguments).partition(" | ")
    words = [str(trials) if word == "LAST" else word for word in own.split()]
    command = [sys.executable, "-m", "evoengine", *words, *ledger]
    begun, lines = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        for _ in process.stdout:
            lines += 1
            if piped:
                break
        process.stdout.close()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begun
    return Cost(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, lines, process.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50_000, help="how many the ledger holds (default: %(default)s)")
    parser.add_argument("--db", type=Path, help="the ledger; made where it is not there, and then kept")
    parser.add_argument("--server", action="store_true", help="read it in the database of EVOENGINE_DB, which is empty")
    parser.add_argument("--only", action="append", choices=COMMANDS, help="only this command; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.db or Path(folder) / "scale.db"
        if not path.exists():
            _beside(make_ledger, path, args.trials)
        if args.server:
            begun = time.perf_counter()
            _beside(copy_ledger, path, os.environ["EVOENGINE_DB"])
            print(f"copied to the server in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        ledger = () if args.server else ("--db", str(path))
        costs = {name: cost(COMMANDS[name], ledger, args.trials) for name in args.only or COMMANDS}
        size = path.stat().st_size
    if args.json:
        print(json.dumps({"trials": args.trials, "bytes": size, "commands": {n: vars(c) for n, c in costs.items()}}))
        return
    table = Table("command", "seconds", "CPU s", "peak MB", "lines", "exit code", box=None, pad_edge=False)
    for name, c in costs.items():
        table.add_row(name, f"{c.seconds:.2f}", f"{c.cpu_seconds:.2f}", f"{c.peak_mb:.0f}", str(c.lines), str(c.code))
    Console().print(f"{args.trials:,} trials, {size / 1e6:,.0f} MB ({size / args.trials:,.0f} bytes per trial)", table)


def _beside(make: Callable[..., None], *arguments: object) -> None:
    """In a process of its own: a child's largest resident set counts from before it became another program."""
    maker = Process(target=make, args=arguments)
    maker.start()
    maker.join()
    if maker.exitcode:
        sys.exit("no ledger was made: see above")


if __name__ == "__main__":
    main()
