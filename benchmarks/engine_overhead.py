"""What the engine itself takes for a trial, beside plain Optuna on the same storage.

    python -m benchmarks.engine_overhead [--trials 100 5000] [--database URL]

Both try numbers at once, and nothing is compiled or measured (`benchmarks/instant.py`): what remains is proposing,
rendering, the ledger with its claims, and the study for the dashboard. Optuna's random sampler proposes in both; the
engine's own sampler stands beside it, whose model takes time that a search spends while kernels compile. Each figure is
the mean over the last tenth of the trials, which is what a trial costs when so many are there, in milliseconds of wall
time and of this process' CPU time: on a busy machine only the latter says something.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command line does, before NumPy is imported

import optuna
from optuna.exceptions import ExperimentalWarning
from rich.console import Console
from rich.table import Table

from benchmarks import instant
from evoengine.ledger.database import parse_url

Marks = list[tuple[float, float]]
"""wall time and CPU time after each trial"""


def engine(database: str, trials: int, sampler: str, study: bool) -> Marks:
    marks: Marks = []

    def note(progress) -> None:
        if progress.done > len(marks):
            marks.append((time.monotonic(), time.process_time()))

    instant.search(database, trials=trials, size=4 * trials, sampler=sampler, study=study, on_change=note,
                   echo=lambda line: None)  # fmt: skip
    return marks


def plain(database: str, trials: int) -> Marks:
    marks: Marks = []

    def objective(trial: optuna.Trial) -> float:
        digits = instant.digits_of(4 * trials)
        config = {name: trial.suggest_categorical(name, tuple(values)) for name, values in digits.items()}
        return 1e4 / instant.microseconds(instant.number_of(config))

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = parse_url(database).render_as_string(hide_password=False)
    study = optuna.create_study(storage=url, direction="maximize", sampler=optuna.samplers.RandomSampler(1))
    study.optimize(objective, trials, callbacks=[lambda *_: marks.append((time.monotonic(), time.process_time()))])
    return marks


def milliseconds(marks: Marks) -> tuple[float, float]:
    """Wall and CPU time of a trial, at the end."""
    last = max(1, len(marks) // 10)
    (wall, cpu), (wall_before, cpu_before) = marks[-1], marks[-1 - last]
    return 1e3 * (wall - wall_before) / last, 1e3 * (cpu - cpu_before) / last


def main() -> None:
    warnings.simplefilter("ignore", ExperimentalWarning)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 5000])
    parser.add_argument("--database", action="append", help="an empty one of a server for each search, in turn")
    options = parser.parse_args()
    given = list(options.database or [])
    searches: dict[str, Callable[[str, int], Marks]] = {
        "plain Optuna": plain,
        "engine, ledger alone": lambda database, trials: engine(database, trials, "random", False),
        "engine, with the study": lambda database, trials: engine(database, trials, "random", True),
        "engine, with the study, evolution": lambda database, trials: engine(database, trials, "evolution", True),
    }
    table = Table("search", *(f"ms per trial at {n:,} (CPU)" for n in options.trials))
    for name, search in searches.items():
        cells = []
        for trials in options.trials:
            with tempfile.TemporaryDirectory() as folder:
                database = given.pop(0) if given else str(Path(folder) / "evo.db")
                wall, cpu = milliseconds(search(database, trials))
                cells.append(f"{wall:.1f} ({cpu:.1f})")
        table.add_row(name, *cells)
        Console().print(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
