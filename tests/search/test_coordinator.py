"""What the coordinator makes of a device that times: it keeps it fed, holds finals, says what came of all."""

from __future__ import annotations

import functools
import threading
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.instant import InstantWorkers
from evoengine.errors import MachineError
from evoengine.ledger.store import open_ledger
from evoengine.records import CompiledCandidate, Outcome, Plans, RefusedBaseline, Rejection, Source
from evoengine.sandbox.workers import Deferred
from evoengine.search import evaluators
from evoengine.search.evaluators import (
    QUEUE_DEPTH,
    CpuEvaluator,
    GpuEvaluator,
    Job,
    found_baselines,
    make_evaluator,
)
from evoengine.search.neighbours import neighbouring_bests
from evoengine.search.proposer import Proposer
from evoengine.workloads.attention.problem import parse_problem
from tests.support import faulty_device
from tests.support.numbered_search import DEVICE, GPU, PROBLEM, TARGET


def tasks(**changed):
    own = {n: f for n, f in vars(faulty_device).items() if n.endswith("_task") or n == "load_cuda"}
    return SimpleNamespace(**own | changed)


def test_compilers_run_ahead_of_the_device_by_a_bounded_lead(numbered, monkeypatch, tmp_path):
    """The device does not begin until the lead is reached, and is slow from then on."""
    at_once, lock, seen, gate = 0, threading.Lock(), [], tmp_path / "gate"
    most = QUEUE_DEPTH + 2 + 1  # the lead, and one a worker and one that waits
    submit = GpuEvaluator.submit

    def counted(self, job, workers, whole):
        nonlocal at_once
        with lock:
            at_once += 1
            seen.append(at_once)
            if at_once == most:
                gate.touch()
        future = submit(self, job, workers, whole)
        future.add_done_callback(lambda _: left())
        return future

    def left():
        nonlocal at_once
        with lock:
            at_once -= 1

    monkeypatch.setattr(GpuEvaluator, "submit", counted)
    slow = functools.partial(faulty_device.when_there, str(gate), faulty_device.slow_task)
    numbered.coordinator(range(12), tasks=tasks(measure_task=slow), seconds=10.0).search()
    assert max(seen) == most
    assert len(numbered.ledger.best(str(PROBLEM), GPU.key, top=12)) == 12


def test_the_first_candidates_are_compiled_while_the_baselines_are_timed(numbered):
    """The device is not done with them until there are binaries enough."""
    enough = numbered.folder / "enough"
    patient = functools.partial(faulty_device.when_there, str(enough), faulty_device.baselines_task)
    coordinator = numbered.coordinator(
        range(12), tasks=tasks(baselines_task=patient),
        on_change=lambda progress: enough.touch() if progress.compiled >= QUEUE_DEPTH else None,
    )  # fmt: skip
    assert coordinator.search().outcomes == {Outcome.MEASURED: 12}
    assert len(numbered.ledger.baselines(coordinator.run)) == 2


def test_each_candidate_that_ends_lets_another_be_compiled_however_many_wait_for_the_device(numbered):
    """The device holds each back until what may be in flight has been compiled beside all that ended."""
    compiled = numbered.folder / "compiled"
    compiled.write_text("0")
    held_back = functools.partial(faulty_device.measure_when_the_lead_is_there, str(compiled))
    coordinator = numbered.coordinator(
        range(12), tasks=tasks(measure_task=held_back),
        on_change=lambda progress: compiled.write_text(str(progress.compiled)),
    )  # fmt: skip
    assert coordinator.search().outcomes == {Outcome.MEASURED: 12}


def test_where_the_devices_time_went_is_accounted_for(numbered):
    progress = numbered.coordinator(range(12), lambda n: ("judge", "segv") if n == 3 else None).search()
    usage = progress.usage
    assert usage.busy > 11 * faulty_device.WORK_SECONDS
    assert usage.starting > 0 and usage.waiting > 0
    assert usage.busy + usage.starting + usage.waiting < progress.elapsed


def test_without_a_device_there_is_no_usage_and_no_final(quick):
    judge = make_evaluator(TARGET, None, 1)
    assert isinstance(judge, CpuEvaluator)
    assert (judge.usage(1.0), judge.finals([]), judge.baselines(), judge.queue_depth) == (None, None, None, 0)


def test_a_candidate_whose_judging_process_dies_is_judged_once_more_without_the_model():
    """The emulator runs kernels in processes of their own: what dies in the judge's is not a fault of the kernel's."""
    asked = []

    class Workers:
        def submit(self, task, *arguments, retry, **_):
            asked.append((arguments, retry))

    job = Job(contender := CompiledCandidate(1, None, None), Plans([]), {}, 7)
    CpuEvaluator(TARGET).submit(job, Workers())
    [(arguments, retry)] = asked
    assert retry(Rejection(Outcome.UNCOMPILABLE, "emulator: no")) is None
    asked_again = (*arguments[:-1], True, "died of signal 11")  # judged whole, as was asked
    assert retry(Rejection(Outcome.CRASHED, "died of signal 11")) == asked_again
    assert retry(Rejection(Outcome.CRASHED, "died of signal 11")) is None
    assert arguments[1] is contender


def test_finals_decide_who_is_best(quick):
    """The device's finals turn the order around, so what is first shows whose word counted."""
    progress = quick.coordinator(range(12)).search()
    best = quick.ledger.best(str(PROBLEM), GPU.key, top=12)
    numbers = [c.config["number"] for c in best]
    assert numbers == [4, 5, 6, 7, 8, 9, 10, 11, 3, 2, 1, 0]
    assert progress.best.config["number"] == 4
    assert [c.measurement.terms.get("place") for c in best] == [*range(1, 9), None, None, None, None]


def test_a_tie_is_said(quick):
    progress = quick.coordinator(range(4), tasks=tasks(finals_task=faulty_device.tied_finals)).search()
    first, second, third = (c.trial for c in quick.ledger.best(str(PROBLEM), GPU.key, top=3))
    assert progress.notes[1:] == [
        f"#{first} is the same as #{second}, #{third} within 0.25 %; of these it has the fewest registers"
    ]


def test_finals_that_crash_leave_the_single_timings_standing(quick):
    progress = quick.coordinator(range(4), tasks=tasks(finals_task=faulty_device.crashing_finals)).search()
    assert "cudaErrorIllegalAddress" in progress.notes[-1]
    assert [c.config["number"] for c in quick.ledger.best(str(PROBLEM), GPU.key, top=4)] == [3, 2, 1, 0]


def test_baselines_are_stored_with_the_run_and_the_fastest_is_the_rival(quick):
    coordinator = quick.coordinator(range(2))
    coordinator.search()  # the device asserts that FLASH_ATTENTION is the rival
    assert [b.name for b in quick.ledger.baselines(coordinator.run)] == ["MATH", "FLASH_ATTENTION"]
    assert all(c.outcome is Outcome.MEASURED for c in quick.candidates())


def test_a_baseline_that_hangs_is_left_out_and_the_search_goes_on_in_another_process(quick):
    coordinator = quick.coordinator(range(2), tasks=tasks(baselines_task=faulty_device.hanging_baseline))
    coordinator.search()
    assert [b.name for b in quick.ledger.baselines(coordinator.run)] == ["MATH", "FLASH_ATTENTION"]
    assert all(c.outcome is Outcome.MEASURED for c in quick.candidates())


def test_packages_that_end_the_process_are_left_out_and_the_search_goes_on_in_another(quick, monkeypatch):
    monkeypatch.setattr(evaluators, "any_installed", lambda: True)
    coordinator = quick.coordinator(range(2), tasks=tasks(baselines_task=faulty_device.crashing_packages))
    notes = coordinator.search().notes
    assert {b.name: b.reason for b in quick.ledger.baselines(coordinator.run) if isinstance(b, RefusedBaseline)} == {
        "flash_attn": "SIGSEGV"
    }
    assert "baselines: FLASH_ATTENTION 10.0 µs, MATH 90.0 µs; not timed: flash_attn (show says why)" in notes
    assert all(c.outcome is Outcome.MEASURED for c in quick.candidates())


def test_baselines_that_fail_for_no_ones_fault_end_the_search(quick):
    with pytest.raises(MachineError, match="no context"):
        quick.coordinator(range(2), tasks=tasks(baselines_task=faulty_device.crashing_baselines)).search()


def test_a_device_on_which_no_baseline_can_be_timed_ends_the_search(quick):
    with pytest.raises(MachineError, match="so neither can candidates: MATH: no kernel image"):
        quick.coordinator(range(2), tasks=tasks(baselines_task=faulty_device.no_baseline)).search()


def test_a_candidate_is_timed_beside_the_best_so_far_and_its_row_says_when_it_was_dropped(quick):
    quick.coordinator(range(12), tasks=tasks(measure_task=faulty_device.racing_task)).search()
    reasons = [c.reason for c in quick.candidates() if c.reason]
    trials = {c.trial for c in quick.candidates()}
    assert len(reasons) == 11  # all but the first, which had none to be timed beside
    for reason in reasons:
        said, _, trial = reason.rpartition(" trial ")
        assert said == "dropped after 5 repetitions: 1.70 times the time of"
        assert int(trial) in trials


def test_a_figure_that_cannot_be_believed_is_never_best(quick):
    progress = quick.coordinator(range(3), tasks=tasks(measure_task=faulty_device.suspect_task)).search()
    assert progress.outcomes[Outcome.SUSPECT] == 1
    assert 0 not in [c.config["number"] for c in quick.ledger.best(str(PROBLEM), GPU.key, top=3)]


def test_a_source_that_another_trial_rendered_is_not_judged_again_and_shares_its_twins_value(quick, monkeypatch):
    told, tell = {}, Proposer.tell

    def noted(self, proposal, values):
        told[proposal.config["number"]] = values
        tell(self, proposal, values)

    monkeypatch.setattr(Proposer, "tell", noted)
    coordinator = quick.coordinator(range(8))
    (quick.templates / "attention" / "numbered.cu.j2").write_text("// candidate {{ number // 2 }}\n")
    progress = coordinator.search()
    assert progress.compiled == 4
    assert progress.outcomes == {Outcome.MEASURED: 4, Outcome.DUPLICATE: 4}
    found = quick.candidates()
    first = {c.source.sha256: c.trial for c in reversed(found)}
    reasons = {c.trial: c.reason for c in found if c.outcome is Outcome.DUPLICATE}
    twins = {c.trial: first[c.source.sha256] for c in found if c.trial in reasons}
    assert reasons == {trial: f"renders the same source as trial {twin}" for trial, twin in twins.items()}
    assert all(told[n] == told[n + 1] != told[(n + 2) % 8] for n in range(0, 8, 2))


def test_a_source_that_another_trial_rendered_costs_no_trial(quick):
    coordinator = quick.coordinator(range(40), trials=6)
    (quick.templates / "attention" / "numbered.cu.j2").write_text("// candidate {{ number // 10 }}{{ number % 2 }}\n")
    progress = coordinator.search()
    assert (progress.outcomes[Outcome.MEASURED], progress.done) == (6, 6)
    assert progress.outcomes[Outcome.DUPLICATE] == len(quick.candidates()) - 6 > 0


def test_a_search_stopped_midway_goes_on_with_what_was_under_way_first_and_judges_each_once(quick):
    coordinator = quick.coordinator(range(20), on_change=lambda p: coordinator.stop() if p.done >= 5 else None)
    assert coordinator.search().ended == "interrupted"
    quick.ledger.finish_run(coordinator.run, "interrupted")
    before = {c.trial: c for c in quick.candidates()}
    left = {t: c.config for t, c in before.items() if c.outcome is Outcome.INTERRUPTED}
    progress = quick.coordinator(range(20), run=coordinator.run).search()
    assert (progress.done, progress.ended) == (20, "all trials done")
    found = quick.candidates()
    retries = {c.retry_of: (c.config, c.parents) for c in found if c.retry_of}
    assert left and retries == {t: (config, before[t].parents) for t, config in left.items()}
    assert min(c.retry_of is None for c in found[len(before) : len(before) + len(left)]) is False
    measured = [c.config["number"] for c in found if c.outcome is Outcome.MEASURED]
    assert sorted(measured) == list(range(20)) and {c.run for c in found} == {coordinator.run}


def test_a_second_search_takes_over_what_the_first_knows_and_evaluates_the_rest(quick, tmp_path):
    calls = tmp_path / "compiled"
    compiler = functools.partial(faulty_device.noted_compile, str(calls))
    quick.coordinator(range(6), known=True, compiler=compiler).search()
    before = {c.config["number"]: c for c in quick.candidates()}
    progress = quick.coordinator(range(8), known=True, compiler=compiler).search()
    assert (progress.done, progress.taken_over) == (8, 6)
    assert sorted(map(int, calls.read_text().split())) == list(range(8))
    after = {c.config["number"]: c for c in quick.candidates() if c.trial not in {b.trial for b in before.values()}}
    for number, first in before.items():
        again = after[number]
        assert again.taken_from == first.trial and again.binary == first.binary
        assert (again.outcome, again.reason, again.occupancy) == (first.outcome, first.reason, first.occupancy)
        timed, copied = (quick.ledger.measurements(trial)[0] for trial in (first.trial, again.trial))
        assert (copied, copied.taken_at) == (timed, timed.taken_at)
        assert again.verdict == first.verdict and again.verdict.taken_at == first.verdict.taken_at


def test_remeasure_evaluates_what_is_known_again_and_later_searches_take_over_from_that(quick):
    quick.coordinator(range(3), known=True).search()
    assert quick.coordinator(range(3), known=True, remeasure=True).search().taken_over == 0
    quick.coordinator(range(3), known=True).search()
    taken = [c.taken_from for c in quick.candidates()[6:]]
    assert sorted(taken) == [c.trial for c in quick.candidates()[3:6]]


def test_the_device_is_chosen_by_uuid_before_libraries_are_loaded(monkeypatch):
    """`load_cuda` of the faulty device fails where CUDA_VISIBLE_DEVICES is not set."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    judge = GpuEvaluator(TARGET, DEVICE, 1, tasks(baselines_task=faulty_device.visible), 20.0)
    try:
        assert found_baselines(judge.baselines())[0].name == DEVICE.uuid
    finally:
        judge.close()


def test_a_search_starts_from_the_best_of_another_problem_that_is_valid_here(quick):
    coordinator = quick.coordinator(range(5))
    coordinator.search()
    numbers = [c.config["number"] for c in quick.ledger.best(str(PROBLEM), GPU.key, top=5)]
    other = replace(coordinator.setting, target=replace(TARGET, problem=parse_problem("b1,h1,s128,d32,fp16")))
    for valid in (numbers, numbers[1:], numbers[3:]):
        here = replace(other, space=quick.space(sorted(valid)))
        assert [c["number"] for c in neighbouring_bests(quick.ledger, here)] == [valid[0]]
    assert neighbouring_bests(quick.ledger, coordinator.setting) == []  # its own best is no other problem's


def test_who_is_told_of_a_trial_finds_its_end_in_the_ledger(quick):
    found = {}
    with closing(open_ledger(quick.ledger.place, create=False)) as other:
        quick.finished = SimpleNamespace(append=lambda trial: found.update({trial: other.candidate(trial).outcome}))
        quick.coordinator(range(6)).search()
    assert found == {trial: Outcome.MEASURED for trial in range(1, 7)}


def test_nothing_is_under_way_before_its_row_is_committed(quick):
    """Or who is killed leaves no trace of what may have killed it."""
    kept = set()

    class Looking(InstantWorkers):
        def submit(self, task, *args, **named):
            for source in [
                a if isinstance(a, Source) else a.source for a in args if isinstance(a, Source | CompiledCandidate)
            ]:
                looked_for.append(source.sha256)
                kept.update(c.source.sha256 for c in other.candidates() if c.source)
                assert source.sha256 in kept
            return super().submit(task, *(arg.ask() if isinstance(arg, Deferred) else arg for arg in args), **named)

    looked_for = []
    with closing(open_ledger(quick.ledger.place, create=False)) as other:
        own = quick.coordinator(range(12), workers=Looking(4), runners=lambda limits: Looking(4), jobs=4, known=True)
        progress = own.search()
    assert progress.outcomes == {Outcome.MEASURED: 12} and len(set(looked_for)) == 12
