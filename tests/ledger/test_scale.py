"""Reading commands take of a trial what they show: memory that sources and samples would fill many times over."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import event, text

from benchmarks.ledger_scale import PROBLEM as BENCHMARK_PROBLEM
from benchmarks.ledger_scale import make_ledger
from evoengine.cli.main import evoengine
from evoengine.errors import MachineError
from evoengine.ledger import check
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.lineage import effects, path
from evoengine.objectives import front, objective_values, parse_objectives
from evoengine.publish.report.overview import read_effects
from evoengine.records import Outcome
from tests.support.exhaustive import more
from tests.support.ledger_examples import GPU, PROBLEM, a_figure, add_ranked, start_run
from tests.support.made_once import made_once

FEW, MANY = 100, 300
BYTES_PER_TRIAL = 6000
"""a source has 15,000, a binary 22,000"""
HEAVY = ("sources.packed", "machine_code", "verdicts.cases")
"""columns that no list shows, of rows that none has to check"""
LISTS = {
    "history": ("history",),
    "report": ("report",),
    "lineage": ("show", str(FEW), "--lineage"),
    "runs": ("runs",),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    def make(folder: Path) -> None:
        for trials in (FEW, MANY):
            make_ledger(folder / f"{trials}.db", trials)

    folder, _ = made_once(tmp_path_factory, "large-ledgers", make)
    return {trials: folder / f"{trials}.db" for trials in (FEW, MANY)}


@pytest.fixture(scope="module")
def ledger(files: dict[int, Path]) -> Iterator[Ledger]:
    with open_ledger(str(files[FEW]), create=False) as ledger:
        yield ledger


def peak(call: Callable[[], object]) -> int:
    """Bytes that Python had allocated at most."""
    call()  # what is imported and cached the first time is not of the trials
    gc.collect()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def bytes_per_trial(files: dict[int, Path], read: Callable[[Path], object]) -> float:
    few, many = (peak(lambda file=files[trials]: read(file)) for trials in (FEW, MANY))
    return (many - few) / (MANY - FEW)


def call(*arguments: str, db: Path) -> str:
    done = CliRunner().invoke(evoengine, [*arguments, "--db", str(db)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("name", ["history", "report", *more(["lineage", "runs"])])
def test_a_list_takes_little_memory_for_each_trial(files, name):
    assert bytes_per_trial(files, lambda db: call(*LISTS[name], db=db)) < BYTES_PER_TRIAL


def test_trials_are_read_a_batch_at_a_time(files, monkeypatch):
    monkeypatch.setattr("evoengine.ledger.read.BATCH", 50)
    monkeypatch.setattr(check, "CHECKED_TRIALS", 0)  # of a small ledger all is checked when it is opened
    monkeypatch.setattr("evoengine.ledger.rows.BATCH", 50)

    def read(db: Path) -> None:
        with open_ledger(str(db), create=False) as ledger:
            assert sum(1 for _ in ledger.trials(resources=True)) in (FEW, MANY)

    assert bytes_per_trial(files, read) < 400  # texts whose checksums are kept, of which there is a limit


def test_candidates_that_are_loaded_whole_are_seen(files):
    def read(db: Path) -> None:
        with open_ledger(str(db), create=False) as ledger:
            ledger.candidates()

    assert bytes_per_trial(files, read) > 2 * BYTES_PER_TRIAL


def heavy(ledger: Ledger, read: Callable[[], object]) -> list[str]:
    """Which columns that no list shows are selected."""
    asked: list[str] = []
    event.listen(
        ledger.database.engine, "before_cursor_execute", lambda c, cursor, statement, *_: asked.append(statement)
    )
    read()
    return [column for column in HEAVY if any(column in statement for statement in asked)]


def test_no_list_asks_for_what_it_does_not_show(files):
    with open_ledger(str(files[FEW]), create=False) as ledger:
        assert heavy(ledger, lambda: list(ledger.trials(resources=True))) == []
    with open_ledger(str(files[FEW]), create=False) as ledger:
        assert heavy(ledger, lambda: (ledger.ancestors(FEW), list(ledger.run_summaries()))) == []
    with open_ledger(str(files[FEW]), create=False) as ledger:
        assert "verdicts.cases" in heavy(ledger, ledger.candidates)


def test_a_listed_trial_says_what_its_candidate_says(ledger):
    listed, whole = list(ledger.trials(resources=True)), ledger.candidates()
    assert [shown(t) for t in listed] == [shown(c) for c in whole]
    assert {t.measurement is None for t in listed} == {True, False}


def shown(trial) -> tuple:
    m, binary = trial.measurement, trial.binary
    return (
        trial.trial, trial.run, trial.problem, trial.gpu, trial.config, trial.parents, trial.operator, trial.outcome,
        trial.reason, trial.shared_bytes, binary and (binary.registers, binary.spill_bytes),
        m and (m.kind, m.device, m.tflops, m.compared_us, m.vs_baseline, m.suspect, m.policy, m.by_formula),
    )  # fmt: skip


def test_batches_follow_each_other_without_a_gap(ledger, monkeypatch):
    monkeypatch.setattr("evoengine.ledger.read.BATCH", 7)
    assert [t.trial for t in ledger.trials()] == list(range(1, FEW + 1))
    second = [t.trial for t in ledger.trials(run=2)]
    assert second == [c.trial for c in ledger.candidates(run=2)] and len(second) % 7
    assert [t.trial for t in ledger.trials(ranked=True)] == [c.trial for c in ledger.candidates() if c.outcome.ranked]


def test_trials_are_picked_by_how_they_ended(new_file):
    with open_ledger(str(new_file("ended.db")), create=False) as ledger:
        run = start_run(ledger)
        ranked = add_ranked(ledger, run, a_figure(1.0))
        screened, unfinished = (ledger.add_candidate(run, PROBLEM, GPU, {}, (), None) for _ in range(2))
        ledger.finish(screened, Outcome.SCREENED, "too large", None, None)
        picked = {outcomes: [t.trial for t in ledger.trials(outcomes=outcomes)] for outcomes in
                  [(), (None,), (Outcome.SCREENED,), (Outcome.SCREENED, None), (Outcome.MEASURED,)]}  # fmt: skip
        assert list(picked.values()) == [
            [ranked, screened, unfinished], [unfinished], [screened], [screened, unfinished], []
        ]  # fmt: skip
        assert (ledger.count(), ledger.count(run=run), ledger.count(run=run + 1)) == (3, 3, 0)


def test_a_trial_that_was_given_another_ones_binary_is_damaged(new_file):
    with open_ledger(str(new_file("swapped.db")), create=False) as ledger:
        run = start_run(ledger)
        first, second = (add_ranked(ledger, run, a_figure(1.0), name=name) for name in ("one", "two"))
        with ledger.database.writing() as session:
            session.execute(text(f"UPDATE candidates SET binary_id = 1 WHERE id = {second}"))
        with pytest.raises(MachineError, match=f"row {second} of the table candidates"):
            list(ledger.trials(resources=True))


def test_a_lineage_from_the_parents_is_the_one_from_all_trials(ledger):
    known = {c.trial: c for c in ledger.candidates()}
    longest = 0
    for trial in range(FEW - 30, FEW + 1):
        steps = path(trial, ledger.ancestors(trial))
        assert [described(s) for s in steps] == [described(s) for s in path(trial, known)]
        longest = max(longest, len(steps))
    assert longest > 3


def described(step) -> tuple:
    return step.candidate.trial, step.parent and step.parent.trial, step.changes, step.gain


def test_effects_from_listed_trials_are_those_from_candidates(ledger):
    assert effects(ledger.trials(ranked=True)) == effects(ledger.candidates()) != []


def test_effects_of_a_part_are_those_of_its_steps_from_parents_before_it_too(ledger):
    candidates = [c for c in ledger.candidates() if c.outcome.ranked]
    last = candidates[-40:]
    found = read_effects(ledger, BENCHMARK_PROBLEM, GPU, most=40)
    assert (found.trials, found.ranked, str(found)) == (
        40, len(candidates), f"from the last 40 of {len(candidates)} ranked trials",
    )  # fmt: skip
    assert found.effects == effects(last, candidates) != effects(last)
    whole = read_effects(ledger, BENCHMARK_PROBLEM, GPU)
    assert whole.effects == effects(candidates) and str(whole) == f"from {len(candidates)} ranked trials"


def test_a_front_from_listed_trials_is_the_one_of_which_nothing_is_beaten(ledger):
    objectives = parse_objectives("tflops,shared_bytes")
    ranked = [c for c in ledger.candidates() if objective_values(c, objectives)]
    fastest = max(ranked, key=lambda c: c.measurement.tflops)
    assert [t.trial for t in front(ledger.trials(ranked=True, resources=True), objectives)] == [fastest.trial]


def test_ancestors_that_are_their_own_come_once(new_file):
    with open_ledger(str(new_file("circle.db")), create=False) as ledger:
        run = start_run(ledger)
        first = add_ranked(ledger, run, a_figure(1.0), parents=(2,))
        second = add_ranked(ledger, run, a_figure(2.0), parents=(first,))
        alone = add_ranked(ledger, run, a_figure(3.0), parents=(99,))
        assert sorted(ledger.ancestors(second)) == [first, second]
        assert sorted(ledger.ancestors(alone)) == [alone]


def test_ancestors_of_another_problem_are_left_out(new_file):
    with open_ledger(str(new_file("two.db")), create=False) as ledger:
        other = ledger.add_candidate(start_run(ledger), "attention:other", GPU, {}, (), None)
        child = add_ranked(ledger, start_run(ledger), a_figure(1.0), parents=(other,))
        assert ledger.candidate(child).problem == PROBLEM
        assert list(ledger.ancestors(child)) == [child]


def test_no_list_imports_what_it_does_not_need(files):
    program = f"""
import sys
from click.testing import CliRunner
from evoengine.cli.main import evoengine
for arguments in {[list(a) for a in LISTS.values()]}:
    assert CliRunner().invoke(evoengine, [*arguments, "--db", {str(files[FEW])!r}]).exit_code == 0
print(*{{"torch", "cupy", "optuna", "scipy", "plotly", "alembic", "sqlalchemy"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["sqlalchemy"], done.stderr
