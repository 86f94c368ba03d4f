"""evoengine search --device recorded:FILE"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace

from evoengine.cli.conclusion import conclude
from evoengine.cli.display import LiveProgress, say
from evoengine.cli.setup import stop_on_signal
from evoengine.ledger.runs import Device
from evoengine.ledger.store import open_ledger
from evoengine.ledger.study import Projection, optuna_storage
from evoengine.records import Kind
from evoengine.search.recorded import RecordedSpace, read_recorded
from evoengine.search.replay import AIM, Replay, device_of, problem_of


def replay(
    file: Path, sampler: str, seed: int, trials: int, minutes: float | None, db: str | None, as_json: bool
) -> int:  # fmt: skip
    """Searches a recorded space; ledger, dashboard and exit codes as in any other search."""
    space = read_recorded(file)
    gpu, problem, text = device_of(space), problem_of(space), f"recorded in {file.name}"
    origin = SimpleNamespace(name=file.name, text=text, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    with open_ledger(db, create=True) as ledger, LiveProgress() as live:
        run = ledger.start_run(
            gpu=gpu, problem=problem, device=Device(f"recorded {gpu}"), space=origin, sampler=sampler, seed=seed,
            command=" ".join(sys.argv), objectives=AIM.name,
        )  # fmt: skip
        say(f"{problem} on {gpu}: {len(space):,} configurations, {text} · sampler {sampler} · seed {seed}")
        say_left_out(space)
        say(f"ledger {ledger.place}, run {run}")
        domains = {knob.name: knob.values for knob in space.knobs}
        study = Projection(optuna_storage(ledger.url), ledger, run, Kind.RECORDED, domains)
        seconds = minutes * 60 if minutes else None
        search = Replay(space, sampler, seed, trials, seconds, ledger, run, live.update, study.add)
        stop_on_signal(search.stop)
        progress = search.search()
        ledger.finish_run(run, progress.ended)
        study.summarise()
        found = ledger.best(problem, gpu, top=trials, run=run)
    if found:
        excess = found[0].measurement.median_us / (space.optimum * 1e3)
        say(f"best found over the file's optimum: {excess:.3f}")
    return conclude(search, progress, study, run, found, as_json, db, ["report", "dashboard"])


def say_left_out(space: RecordedSpace) -> None:
    if space.estimated:
        say(f"{space.estimated:,} more have an estimated time alone, and were left out")
