"""python tests/ledger/frozen/freeze.py LEDGER: keeps a ledger of the present schema for the tests of later ones.

LEDGER is what a search without a GPU wrote, of four trials or more. Added to it are a run on a GPU with its finals, a
baseline, a candidate that the gate rejected and one that a kill left unfinished, in the columns that the schema has.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from evoengine.ledger.ranking import rebuild
from tests.support.vouch import vouch_for_all

FOLDER = Path(__file__).parent
TIME = "2026-11-22 12:00:00.000000"
GPU = "NVIDIA H200"
MEASURED, SLOWER, INCORRECT, UNFINISHED = 101, 102, 103, 104
"""trials of the run on the GPU"""
POLICY = json.dumps({"launch": "graph", "l2": "cold", "clocks": "boost", "batch": 16})


def thaw(file: Path, path: Path) -> None:
    """Writes the frozen ledger to a new SQLite file."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(gzip.decompress(file.read_bytes()).decode())


def freeze(path: Path) -> Path:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy.db")
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as connection:
            source.backup(connection)
            (revision,) = connection.execute("SELECT version_num FROM evoengine_alembic_version").fetchone()
            connection.execute("UPDATE runs SET host = 'elsewhere', pid = 1, command = 'evoengine search --trials 4'")
            _add_run_on_gpu(connection)
            connection.commit()
        vouch_for_all(str(copy))
        with Session(create_engine(f"sqlite:///{copy}")) as session, session.begin():
            rebuild(session)
        with closing(sqlite3.connect(copy)) as connection:
            dump = "\n".join(connection.iterdump())
    frozen = FOLDER / f"{revision}.sql.gz"
    frozen.write_bytes(gzip.compress(dump.encode(), 9, mtime=0))
    return frozen


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def _insert(connection: sqlite3.Connection, table: str, **values: object) -> None:
    held = {name: value for name, value in values.items() if name in _columns(connection, table)}
    if held:
        marks = ", ".join("?" * len(held))
        connection.execute(f"INSERT INTO {table} ({', '.join(held)}) VALUES ({marks})", list(held.values()))


def _copy(connection: sqlite3.Connection, table: str, number: int, **changes: object) -> None:
    columns = _columns(connection, table)
    row = connection.execute(f"SELECT * FROM {table} WHERE id = ?", [number]).fetchone()
    _insert(connection, table, **(dict(zip(columns, row, strict=True)) | changes))


def _add_run_on_gpu(connection: sqlite3.Connection) -> None:
    _insert(connection, "devices", id=100, name=GPU, uuid="GPU-1", arch="sm_90", driver="CUDA 13.0", versions="{}")
    _copy(connection, "runs", 1, id=100, device_id=100, status="killed")
    _insert(
        connection, "baselines", id=1, run_id=100, name="MATH", device=GPU, median_us=900.0, tflops=305.0,
        samples_us='[900.0, "inf"]', policy=POLICY, taken_at=TIME,
    )  # fmt: skip
    ends = {MEASURED: "measured", SLOWER: "measured", INCORRECT: "incorrect", UNFINISHED: None}
    for model, (trial, outcome) in enumerate(ends.items(), 1):
        reason = "off by 1" if outcome == "incorrect" else None
        finished = TIME if outcome else None
        _copy(
            connection, "candidates", model, id=trial, run_id=100, outcome=outcome, reason=reason, device=GPU,
            parents=f"[{MEASURED}]" if trial == SLOWER else "[]", finished_at=finished,
        )  # fmt: skip
        case = {
            "name": "ragged", "problem": "b1,h2,s63,d32,fp16", "seed": 7, "correct": outcome != "incorrect",
            "max_error": 2.4e-4, "mean_error": 1.5e-5, "allowed": 1e-3, "reason": reason,
        }  # fmt: skip
        if outcome:
            _insert(
                connection, "verdicts", candidate_id=trial, device=GPU, reason=reason, cases=json.dumps([case]),
                outcome=outcome if reason else None, wall_ms=140.5, taken_at=TIME,
            )  # fmt: skip
    for place, (trial, us) in enumerate({MEASURED: 5.0, SLOWER: 6.0}.items(), 1):
        _insert(
            connection, "measurements", candidate_id=trial, kind="measured", device=GPU, tflops=4.2 / us, median_us=us,
            samples_us=json.dumps([us, us + 0.5]), vs_sdpa=1.5, vs_baseline=1.5, policy=POLICY, taken_at=TIME,
            terms=json.dumps({"place": float(place), "final_of_run": 100.0}),
        )  # fmt: skip
    _insert(
        connection, "profiles", candidate_id=MEASURED, tool="Nsight Compute", device=GPU, remarks='["stalls"]',
        figures='{"issue slots %": 61.5, "l2 hit %": "nan"}', taken_at=TIME,
    )  # fmt: skip


if __name__ == "__main__":
    print(freeze(Path(sys.argv[1])))
