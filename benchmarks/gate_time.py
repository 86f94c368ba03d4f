"""CPU seconds of the gate in a search without a GPU, this checkout against another one.

Both make the same searches in turn, with one worker and an empty cache each. The gate is what its judges and their
compilers take, with draws, references and comparisons (gate_probe.py); the cores of executor and emulator, which are
built once for a machine, count for the whole search alone.

    python benchmarks/gate_time.py --old ../evoengine-3b5a308 --seeds 1 --trials 60

`--old` is a checkout with a .venv of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
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
    """One search: CPU seconds in all, and the gate's of each kernel by family."""

    cpu: float
    gate: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def gate_seconds(self) -> float:
        return sum(map(sum, self.gate.values()))


def search(checkout: Path, seed: int, trials: int, gpu: str) -> Search:
    """Run one search of a checkout with an empty cache. Raises CalledProcessError where the search fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(HERE / "benchmarks/gate_probe.py", folder / "sitecustomize.py")
        command = [
            checkout / ".venv/bin/evoengine", "search", "--gpu", gpu, "--seed", seed, "--trials", trials, "--jobs", 1,
            "--db", folder / "ledger.db",
        ]  # fmt: skip
        own = {"XDG_CACHE_HOME": f"{folder}/cache", "PYTHONPATH": name, "GATE_PROBE": f"{folder}/probe"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [*map(str, command)], check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | own,
        )  # fmt: skip
        await_orphans()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds: dict[tuple[str, str], float] = defaultdict(float)
        for line in (folder / "probe").read_text("utf-8").splitlines():
            kernel, family, spent = json.loads(line)
            seconds[kernel, family] += spent
        found = Search(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        for (_, family), spent in seconds.items():
            found.gate[family].append(spent)
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
    click.echo("gate seconds per kernel         old      new   ratio")
    for family in families:
        means = [_mean([s for one in project for s in one.gate.get(family, ())]) for project in (old, new)]
        click.echo(f"{family:<24}{means[0]:11.2f}{means[1]:9.2f}{means[1] / means[0]:8.2f}")
    _ratio("gate of the whole search", [one.gate_seconds for one in old], [one.gate_seconds for one in new])
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
    for seed in range(1, seeds + 1):
        for n in (0, 1) if seed % 2 else (1, 0):
            found[n].append(search(projects[n], seed, trials, gpu))
            one = found[n][-1]
            name = ("old", "new")[n]
            click.echo(f"seed {seed}, {name}: gate {one.gate_seconds:.1f} s, CPU {one.cpu:.0f} s", file=sys.stderr)
    show(*found)


if __name__ == "__main__":
    main()
