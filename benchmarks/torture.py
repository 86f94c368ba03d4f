"""Searches that are killed at random moments, again and again, and go on: is each kernel judged once, and by the same
figure as if nothing had happened?

    python -m benchmarks.torture [--kills 1000] [--size 400] [--database URL] [--seed 1]

Each search is a process (`benchmarks/instant.py`) that SIGKILL ends up to `--longest` seconds after it began, or every
other time after it evaluated its first kernel; the same command then goes on with its run. When a run comes to its end
the next one begins, with another seed. Every other one takes over what is known, the rest evaluate all again. At
the end everything is held against what it must be; the exit code is 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import optuna

from benchmarks import instant
from evoengine.ledger.check import find_damage
from evoengine.ledger.runs import RETRIES
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.records import Candidate, Outcome


@dataclass
class Found:
    """What was wrong, and what was gone through."""

    wrong: list[str] = field(default_factory=list)
    kills: int = 0
    runs: int = 0
    retried: int = 0
    left: int = 0
    """trials without a verdict, which were killed too often to be tried again"""


def torture(database: str, folder: Path, *, kills: int, size: int, longest: float, seed: int, echo=print) -> Found:
    """Goes on until so many processes were killed, and the run in progress has come to its end."""
    drawn, found, log = random.Random(seed), Found(), folder / "evaluated"
    log.touch()
    while found.kills < kills or not found.runs:
        number = seed + found.runs
        while True:
            seconds = drawn.uniform(0, longest) if found.kills < kills else None
            end = one_process(database, size, number, log, seconds, at_work=found.kills % 2 == 1)
            if end is not None:
                break
            found.kills += 1
        if end:
            found.wrong.append(f"a search with seed {number} ended with exit code {end}")
            return found
        found.runs += 1
        echo(f"run with seed {number} has come to its end after {found.kills} kills")
    with open_ledger(database, create=False) as ledger:
        for run in ledger.runs():
            check_run(ledger, run.id, size, found)
        check_evaluations(ledger, log, found)
        check_studies(ledger, found)
    if "://" not in database:
        check_file(Path(database), found)
    return found


def one_process(database: str, size: int, seed: int, log: Path, seconds: float | None, at_work: bool) -> int | None:
    """The exit code of a search; None where it was killed, after so many seconds, counted from its first evaluation
    where it is `at_work`. Forked, as importing takes longer than searching."""
    before = log.stat().st_size
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            progress = instant.search(
                database, trials=size, size=size, seed=seed, log=log, milliseconds=2.0, remeasure=seed % 2 == 0,
                echo=lambda line: None,
            )  # fmt: skip
            code = 0 if progress.ended == "all trials done" else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if seconds is not None:
        while at_work and log.stat().st_size == before and not has_ended(pid):
            time.sleep(0.005)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def has_ended(pid: int) -> bool:
    """Without asking for its exit code."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


# ── what must be ────────────────────────────────────────────────────────────────────────────────────────────────────


def check_run(ledger: Ledger, run: int, size: int, found: Found) -> None:
    """Every configuration is judged once, with the figure that follows from its number, or was killed too often to be
    tried again."""
    trials = {c.trial: c for c in ledger.candidates(run=run)}

    def wrong(what: str, of: object) -> None:
        found.wrong.append(f"run {run}: {what}: {of}")

    if unfinished := [t for t, c in trials.items() if c.outcome is None]:
        wrong("trials that never ended", unfinished)
        return
    judged = [c for c in trials.values() if c.outcome and c.outcome.judged]
    left = [c for c in trials.values() if c.outcome is Outcome.KILLED and kills_before(trials, c) == RETRIES]
    found.left += len(left)
    times = Counter(instant.number_of(c.config) for c in [*judged, *left])
    if any(n != 1 for n in times.values()) or len(times) != size:
        wrong("configurations that were not judged once", {n: times[n] for n in range(size) if times[n] != 1})
    for c in judged:
        figures = ledger.measurements(c.trial)
        if c.outcome is not Outcome.ESTIMATED or len(figures) != 1 or c.verdict is None:
            wrong("a trial without just one figure", (c.trial, c.outcome, len(figures)))
        elif figures[0].median_us != instant.microseconds(instant.number_of(c.config)):
            wrong("a figure that is another one's", (c.trial, figures[0].median_us))
    retried = Counter(c.retry_of for c in trials.values() if c.retry_of)
    found.retried += len(retried)
    for c in trials.values():
        again = retried[c.trial]
        if c.outcome and again != (0 if c.outcome.judged or c in left else 1):
            wrong(f"a trial that ended as {c.outcome} and was tried again {again} times", c.trial)
        if c.retry_of and trials[c.retry_of].config != c.config:
            wrong("a retry of another configuration", c.trial)
        if kills_before(trials, c) > RETRIES:
            wrong("a trial that was tried too often", c.trial)
        if c.outcome is Outcome.KILLED and ledger.measurements(c.trial):
            wrong("a figure of a trial that was killed", c.trial)


def kills_before(trials: dict[int, Candidate], c: Candidate) -> int:
    found = 0
    while c.retry_of:
        c = trials[c.retry_of]
        found += c.outcome is Outcome.KILLED
    return found


def check_evaluations(ledger: Ledger, log: Path, found: Found) -> None:
    """A configuration was evaluated once more than it was killed, at most, whatever runs it is in; and what a trial
    took over, from one that was evaluated."""
    known = ledger.candidates()
    killed = Counter(instant.number_of(c.config) for c in known if c.outcome is Outcome.KILLED)
    again = sum(run.seed % 2 == 0 for run in ledger.runs())
    for number, times in Counter(map(int, log.read_text().split())).items():
        if times > 1 + again + killed[number]:
            found.wrong.append(f"{number} was evaluated {times} times and killed {killed[number]} times")
    ends = {c.trial: c for c in known}
    for c in known:
        if c.taken_from and (ends[c.taken_from].taken_from or ends[c.taken_from].config != c.config):
            found.wrong.append(f"trial {c.trial} took over from {c.taken_from}, which is none of its kind")


def check_studies(ledger: Ledger, found: Found) -> None:
    """Study and tables agree."""
    for summary in optuna.get_all_study_summaries(ledger.url):
        study = optuna.load_study(study_name=summary.study_name, storage=ledger.url)
        told = sorted(t.user_attrs["trial"] for t in study.get_trials(deepcopy=False))
        own = sorted(c.trial for c in ledger.candidates(run=ledger.candidate(told[0]).run))
        if told != own:
            found.wrong.append(f"the study {summary.study_name} has {len(told)} trials of {len(own)}")


def check_file(path: Path, found: Found) -> None:
    if damage := find_damage(path):
        found.wrong.append(str(damage))
    with closing(sqlite3.connect(path)) as connection:
        if broken := connection.execute("PRAGMA foreign_key_check").fetchall():
            found.wrong.append(f"rows that name one that is not there: {broken[:3]}")
        open_claims = connection.execute("SELECT count(*) FROM claims WHERE ended_at IS NULL").fetchone()[0]
        if open_claims:
            found.wrong.append(f"{open_claims} claims of nobody")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--size", type=int, default=400, help="configurations of the space")
    parser.add_argument("--longest", type=float, default=1.0, help="seconds after which a process is killed, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", help="of a server; a file in a temporary folder where it is not given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = options.database or str(Path(folder) / "evo.db")
        found = torture(
            database, Path(folder), kills=options.kills, size=options.size, longest=options.longest, seed=options.seed
        )
    print(
        f"{found.kills} kills, {found.runs} runs, {found.retried} trials tried again, {found.left} left after "
        f"{RETRIES + 1} kills, {len(found.wrong)} faults"
    )
    print(*found.wrong, sep="\n")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
