"""Several searches on one ledger: each kernel is evaluated by one of them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import closing

import pytest

from benchmarks import instant
from evoengine.ledger import runs
from evoengine.ledger.store import open_ledger
from evoengine.records import Kind, Measurement, Outcome
from evoengine.search import neighbours
from evoengine.search.coordinator import Coordinator
from evoengine.search.evaluators import make_plans
from evoengine.search.identity import Identity
from evoengine.stages.render import fill, render
from tests.ledger.test_processes import stand_still
from tests.support.ledger_examples import a_verdict
from tests.support.postgres import Missing, running_server

SIZE = 20


class Two:
    """A search of all numbers, and another one that has the first of them in flight."""

    def __init__(self, folder):
        self.log = folder / "log"
        self.log.touch()
        self.ledger = open_ledger(str(folder / "evo.db"), create=True)
        self.other = open_ledger(str(folder / "evo.db"), create=False)
        self.setting = instant.make_setting(folder, SIZE, SIZE, 1, "random", 2)
        self.identity = Identity(self.setting, {})
        s = self.setting
        self.config = next(s.space.enumerate())
        self.number = instant.number_of(self.config)
        source = render(s.target, s.space, self.config, s.templates, fill)
        key = self.identity.key(source, self.config, make_plans(s.space, s.target, self.config))
        self.run = instant.start(self.other, s, lambda line: None).run
        row = (self.run, instant.PROBLEM, instant.GPU, self.config, (), None, source, None)
        self.held, _ = self.other.add_claiming(row, key, False)

    def search(self, on_change):
        run = instant.start(self.ledger, self.setting, lambda line: None).run
        assert run != self.run
        judge = instant.InstantJudge(self.log, 0.0)
        with instant.compiling_nothing():
            searched = Coordinator(
                self.setting, self.ledger, run, judge, on_change, lambda trial: None, identity=self.identity
            )
            progress = searched.search()
        evaluated = sorted(map(int, self.log.read_text().split()))
        own = next(c for c in self.ledger.candidates(run=run) if c.config == self.config)
        return progress, evaluated, own


@pytest.fixture
def two(tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "POLL_SECONDS", 0.02)
    two = Two(tmp_path)
    with closing(two.ledger), closing(two.other):
        yield two


def test_what_another_has_under_way_is_awaited_while_the_rest_is_evaluated_and_then_taken_over(two):
    figure = Measurement(Kind.ESTIMATED, "of the other search", 1.0, 77.0)

    def end_the_other(progress):
        if progress.done == SIZE - 1 and two.other.candidate(two.held).outcome is None:
            two.other.finish(two.held, Outcome.ESTIMATED, None, 0.5, "emulator", (a_verdict(),), figure)

    progress, evaluated, own = two.search(end_the_other)
    assert evaluated == [n for n in range(SIZE) if n != two.number]
    assert (progress.done, progress.taken_over) == (SIZE, 1)
    assert (own.taken_from, own.measurement) == (two.held, figure)


def test_what_a_killed_search_had_under_way_is_evaluated_by_who_waited(two, monkeypatch):
    monkeypatch.setattr(runs, "LOOK_AGAIN_SECONDS", 0.0)

    def kill_the_other(progress):
        if progress.done == SIZE - 1:
            stand_still(two.ledger.place, two.run)

    progress, evaluated, own = two.search(kill_the_other)
    assert evaluated == list(range(SIZE)) and progress.taken_over == 0
    assert (own.outcome, own.taken_from) == (Outcome.ESTIMATED, None)
    assert two.ledger.candidate(two.held).outcome is Outcome.KILLED


# ── as processes ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def database(request, tmp_path):
    if request.param == "SQLite":
        yield str(tmp_path / "evo.db")
        return
    try:
        with running_server() as server:
            yield server.new_database("several")
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.mark.exhaustive
def test_four_processes_of_two_hundred_trials_evaluate_nothing_twice_and_lose_nothing(database, tmp_path):
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-m", "benchmarks.instant", database, "--trials", "200", "--size", "300"]
    command += ["--log", str(log), "--milliseconds", "1"]
    processes = [
        subprocess.Popen([*command, "--seed", str(seed)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for seed in range(1, 5)
    ]
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert all("all trials done: 200 trials" in words for words in said), said
    assert set(Counter(log.read_text().split()).values()) == {1}
    with open_ledger(database, create=False) as ledger:
        for run in ledger.runs():
            found = ledger.candidates(run=run.id)
            numbers = {instant.number_of(c.config) for c in found}
            assert len(found) == len(numbers) == 200
            for c in found:
                assert c.outcome is Outcome.ESTIMATED
                assert c.measurement.median_us == instant.microseconds(instant.number_of(c.config))
        evaluated = [c for c in ledger.candidates() if c.taken_from is None]
        assert len(evaluated) == len(log.read_text().split())
