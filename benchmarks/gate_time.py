"""Gate time of a search without a GPU, this checkout against another one.

Both make the same searches in turn, with one worker each and caches that are warm. The time of a verdict is what the
ledger says of it, without the emulator's compiler: run this on a machine that does nothing else. CPU seconds are those
of the whole search, start and compilers included.

    python benchmarks/gate_time.py --old ../evoengine-3b5a308 --seeds 3 --trials 60

`--old` is a checkout with a .venv of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

PR_SET_CHILD_SUBREAPER = 36
HERE = Path(__file__).parents[1]


@dataclass
class Search:
    """One search: CPU seconds in all, and the gate's seconds of each candidate by family."""

    cpu: float
    gate: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def gate_seconds(self) -> float:
        return sum(map(sum, self.gate.values()))

    @property
    def candidates(self) -> int:
        return sum(map(len, self.gate.values()))


def search(checkout: Path, cache: Path, seed: int, trials: int, gpu: str) -> Search:
    """Run one search of a checkout and read its ledger. Raises CalledProcessError where the search fails."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.db"
        command = [
            checkout / ".venv/bin/evoengine", "search", "--gpu", gpu, "--seed", seed, "--trials", trials, "--jobs", 1,
            "--db", ledger,
        ]  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [*map(str, command)], check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        )  # fmt: skip
        await_orphans()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = Search(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        rows = sqlite3.connect(ledger).execute(
            "SELECT c.config, sum(v.wall_ms) FROM candidates c JOIN verdicts v ON v.candidate_id = c.id GROUP BY c.id"
        )
        for config, wall_ms in rows:
            found.gate[json.loads(config)["family"]].append(wall_ms / 1e3)
        return found


def adopt_orphans() -> None:
    """Become the parent of processes whose own has ended, as workers' keepers do, so that their CPU time is counted."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this kernel has no child subreapers (Linux 3.4)")


def await_orphans() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def show(old: Sequence[Search], new: Sequence[Search]) -> None:
    families = sorted({family for one in (*old, *new) for family in one.gate})
    click.echo("gate seconds per candidate      old      new   ratio")
    for family in families:
        means = [_mean([s for one in project for s in one.gate.get(family, ())]) for project in (old, new)]
        click.echo(f"{family:<24}{means[0]:11.2f}{means[1]:9.2f}{means[1] / means[0]:8.2f}")
    _ratio("gate per candidate", [one.gate_seconds / one.candidates for one in old], [
        one.gate_seconds / one.candidates for one in new
    ])  # fmt: skip
    _ratio("CPU of the whole search", [one.cpu for one in old], [one.cpu for one in new])


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


def _ratio(name: str, old: Sequence[float], new: Sequence[float]) -> None:
    ratios = sorted(b / a for a, b in zip(old, new, strict=True))
    ends = f"{ratios[0]:.2f} to {ratios[-1]:.2f} over {len(ratios)} seeds"
    click.echo(f"{name:<24}{_mean(old):11.2f}{_mean(new):9.2f}{sum(new) / sum(old):8.2f}   {ends}")


@click.command()
@click.option("--old", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--seeds", type=click.IntRange(1), default=3)
@click.option("--trials", type=click.IntRange(1), default=60)
@click.option("--gpu", default="h100")
def main(old: Path, seeds: int, trials: int, gpu: str) -> None:
    """Time searches of both checkouts in turn."""
    adopt_orphans()
    projects = [old.resolve(), HERE]
    found: list[list[Search]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        caches = [Path(folder) / name for name in ("old", "new")]
        for project, cache in zip(projects, caches, strict=True):
            search(project, cache, 0, 4, gpu)  # builds executor and emulator
        for seed in range(1, seeds + 1):
            for n in (0, 1) if seed % 2 else (1, 0):
                found[n].append(search(projects[n], caches[n], seed, trials, gpu))
                one = found[n][-1]
                name = ("old", "new")[n]
                click.echo(f"seed {seed}, {name}: gate {one.gate_seconds:.0f} s, CPU {one.cpu:.0f} s", file=sys.stderr)
    show(*found)


if __name__ == "__main__":
    main()
