"""Time from the start of the first search on a machine to its first trial, this checkout against another one.

Each search begins with an empty cache, as executor and emulator are built once for a machine. Seconds are counted from
the start of the process until the ledger has the first trial, and until it has the first figure of one, by which a
trial ends; the end that a trial's row states is the last one, which moves when the gate of the best is finished. CPU
seconds are those of the whole search, compilers included. The searches take turns, so that both meet the same machine.

    python -m benchmarks.first_search --old ../evoengine-3b5a308 --times 2

`--old` is a checkout with a .venv of its own.
"""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import click

from benchmarks.gate_time import adopt_orphans, await_orphans

HERE = Path(__file__).parents[1]


def search(checkout: Path, trials: int) -> tuple[float, float, float]:
    """Return the seconds until the first trial began and ended, and the CPU seconds of the search."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.db"
        command = [
            checkout / ".venv/bin/evoengine", "search", "--gpu", "h100", "--seed", 1, "--trials", trials,
            "--db", ledger,
        ]  # fmt: skip
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), datetime.now(UTC).replace(tzinfo=None)
        subprocess.run(
            [*map(str, command)], check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"},
        )  # fmt: skip
        await_orphans()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        moments = [
            sqlite3.connect(ledger).execute(f"SELECT min({column}) FROM {table}").fetchone()[0]
            for table, column in (("candidates", "created_at"), ("measurements", "taken_at"))
        ]
        begun, ended = ((datetime.fromisoformat(at) - start).total_seconds() for at in moments)
        return begun, ended, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@click.command()
@click.option("--old", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--times", default=2, show_default=True)
@click.option("--trials", default=2, show_default=True)
def main(old: Path, times: int, trials: int) -> None:
    """Search in turns, and print a line for each search."""
    adopt_orphans()
    for _ in range(times):
        for checkout in (old.resolve(), HERE):
            begun, ended, cpu = search(checkout, trials)
            click.echo(
                f"{'old' if checkout != HERE else 'new'}: first trial began after {begun:.1f} s and ended after "
                f"{ended:.1f} s; {cpu:.1f} CPU s for {trials} trials"
            )


if __name__ == "__main__":
    main()
