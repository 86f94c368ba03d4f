"""In a search on a GPU the model's predictions lead the first picks; they are made by compile workers that are idle."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from dataclasses import replace

import pytest

from evoengine.errors import MachineError
from evoengine.records import Binary, Outcome, Rejection
from evoengine.search import compilers, lookahead
from evoengine.search.lookahead import MAX_FAILURES, Lookahead
from evoengine.search.samplers import evolution
from evoengine.search.samplers.prior import Mean, Prior
from evoengine.stages.predict import Estimated
from evoengine.tuning.measure import measured_pairs
from tests.search.evolution import SPACE
from tests.support import faulty_device
from tests.support.exhaustive import more

MIXED = [7 * n % 40 for n in range(40)]
"""in no order, so that a number tells nothing of the next and the sampler has the model alone to go by"""


@pytest.fixture
def all_first(monkeypatch):
    """Every configuration is predicted before the first pick, however slow this machine is."""
    monkeypatch.setattr(lookahead, "MIN_PREDICTED", 40)
    monkeypatch.setattr(lookahead, "MAX_WAIT_SECONDS", 120.0)


def tried(numbered) -> list[int]:
    """Numbers in the order in which they were proposed."""
    return [c.config["number"] for c in sorted(numbered.candidates(), key=lambda c: c.trial)]


# ── a search ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_candidates_on_the_gpu_are_those_predicted_to_be_fastest(numbered, all_first, monkeypatch):
    monkeypatch.setattr(evolution, "TIED", 0.0)
    coordinator = numbered.coordinator(MIXED, trials=8, sampler="evolution", predictor=faulty_device.right_model)
    progress = coordinator.search()
    assert tried(numbered)[:2] == [39, 38]
    assert progress.predicted == 40


@pytest.mark.parametrize("model, least, most", [("near_model", 1, 10), *more([("blind_model", 11, 40)])])
def test_predictions_save_trials(numbered, all_first, model, least, most):
    """The fastest is not first in the model's order; without predictions it takes a third of the space or more."""
    numbered.coordinator(MIXED, sampler="evolution", predictor=getattr(faulty_device, model)).search()
    assert least <= tried(numbered).index(39) + 1 <= most


@pytest.mark.parametrize("dropping", [True, *more([False])])
def test_a_model_that_is_wrong_is_dropped(numbered, all_first, monkeypatch, dropping):
    """It says the slowest are fastest; believed to the end it leads to none of the fast ones."""
    if not dropping:
        monkeypatch.setattr(
            evolution, "fit_mean", lambda scores, logs, tried, of, covariance: Mean(-9 * tried[0], -9 * of[0], 0.1)
        )
        monkeypatch.setattr(evolution.Evolution, "_follows_prior", lambda search, believed: True)
    numbered.coordinator(range(40), trials=24, sampler="evolution", predictor=faulty_device.wrong_model).search()
    assert tried(numbered)[:2] == [0, 1]
    assert (max(tried(numbered)) >= 35) == dropping


@pytest.mark.parametrize("kept", [128, *more([0])])
def test_no_source_is_compiled_twice(numbered, monkeypatch, kept):
    """Unless the binaries that looking ahead made are thrown away."""
    monkeypatch.setattr(compilers, "MAX_BINARIES", kept)
    log = numbered.folder / "compiled"
    coordinator = numbered.coordinator(
        MIXED, trials=20, sampler="evolution", predictor=faulty_device.right_model,
        compiler=functools.partial(faulty_device.noted_compile, str(log)),
    )  # fmt: skip
    progress = coordinator.search()
    compiled = [int(line) for line in log.read_text().split()]
    assert set(tried(numbered)) <= set(compiled)
    assert (len(compiled) == len(set(compiled))) == bool(kept)
    assert progress.compiled == 20 and len(compiled) >= progress.predicted > 4


@pytest.mark.parametrize("options", [{"sampler": "random"}, {"sampler": "evolution", "timed": False}])
def test_nothing_is_looked_at_where_no_sampler_is_led_or_no_gpu_times(numbered, options):
    log = numbered.folder / "compiled"
    coordinator = numbered.coordinator(
        MIXED, trials=6, predictor=faulty_device.right_model,
        compiler=functools.partial(faulty_device.noted_compile, str(log)), **options,
    )  # fmt: skip
    assert coordinator.search().predicted == 0
    assert sorted(map(int, log.read_text().split())) == sorted(tried(numbered))


def test_tasks_that_fail_cost_no_candidate(numbered):
    """Predictions kill their worker or give nonsense; one of the sources kills its compiler."""
    coordinator = numbered.coordinator(
        range(4), lambda n: ("compile", "segv") if n == 3 else None, sampler="evolution",
        predictor=faulty_device.dying_model,
    )  # fmt: skip
    progress = coordinator.search()
    assert progress.outcomes == {Outcome.MEASURED: 3, Outcome.CRASHED: 1}
    assert progress.ended == "all trials done" and progress.predicted == 0


def test_a_search_that_is_stopped_does_not_wait_for_predictions(numbered):
    coordinator = numbered.coordinator(
        MIXED, sampler="evolution", predictor=faulty_device.sleeping_model, on_change=lambda _: coordinator.stop()
    )
    progress = coordinator.search()
    assert (progress.ended, progress.predicted) == ("interrupted", 0)


def test_it_works_only_while_workers_are_idle(numbered, monkeypatch):
    busy, start = [], Lookahead.start

    def noted(self, best):
        running = {*coordinator._pending.compiling, *coordinator._pending.predicting, *self.in_flight}
        busy.append(sum(not future.done() for future in running))
        return start(self, best)

    monkeypatch.setattr(Lookahead, "start", noted)
    coordinator = numbered.coordinator(MIXED, sampler="evolution", predictor=faulty_device.right_model, jobs=3)
    coordinator.search()
    assert {0, 1, 2} >= set(busy) and len(busy) > 20


def test_a_prediction_is_made_once_and_stands_beside_the_measured_figure(numbered, all_first):
    log = numbered.folder / "predicted"
    model = functools.partial(faulty_device.noted_model, str(log))
    numbered.coordinator(MIXED, trials=6, sampler="evolution", predictor=model).search()
    assert sorted(map(int, log.read_text().split())) == [*range(40)]
    pairs = measured_pairs(numbered.ledger)
    assert len(pairs) == 6
    assert all(pair.estimated == pytest.approx(pair.measured) for pair in pairs)


# ── one by one ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Answers:
    """In the place of the workers: every task gives the same."""

    def __init__(self, binary, estimated=None) -> None:
        self.binary, self.estimated = binary, estimated

    def recorded(self, source):
        return None

    def compile(self, source):
        return ended(self.binary)

    def predict(self, contender):
        return ended(self.estimated)


def ended(answer) -> Future:
    future = Future()
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    return future


BINARY = Binary(b"cubin", "sm_90a", "", "faulty", 32, 0, 0, 0, (), {}, 1.0)
UNREAD = Estimated(faulty_device.figure(1), "the model cannot read the binary: BREV")


def looks(ahead: Lookahead) -> int:
    """Looks until none more is taken."""
    n = 0
    while ahead.start(None):
        n += 1
        while ahead.in_flight:
            for future in ahead.in_flight:
                ahead.advance(future)
    return n


@pytest.mark.parametrize(
    "answers",
    [
        Answers(MachineError("worker processes die as they start")),
        Answers(Rejection(Outcome.UNCOMPILABLE, "no end after 180 s")),
        Answers(BINARY, MachineError("worker processes die as they start")),
        Answers(BINARY, Rejection(Outcome.CRASHED, "the worker process died (SIGSEGV)")),
        Answers(BINARY, UNREAD),
    ],
)
def test_where_nothing_comes_of_it_no_more_is_looked_at(numbered, answers):
    setting, _ = numbered.begin(MIXED)
    prior = Prior(setting.space)
    ahead = Lookahead(setting, prior, answers)
    assert looks(ahead) == MAX_FAILURES
    assert not prior and not ahead.predicted and not ahead.must_wait()


def test_each_configuration_is_looked_at_once_and_none_that_was_proposed(numbered):
    setting, _ = numbered.begin(MIXED)
    prior = Prior(setting.space)
    ahead = Lookahead(setting, prior, Answers(BINARY, faulty_device.predicted(0, 1.0)))
    proposed = {"family": "numbered", "number": 5}
    ahead.discard(proposed)
    assert looks(ahead) == len(prior) == ahead.predicted == 39
    assert proposed not in prior


def test_of_a_small_space_none_is_left_out_because_it_was_not_drawn(numbered):
    setting, _ = numbered.begin(MIXED)
    answers = Answers(BINARY, faulty_device.predicted(0, 1.0))
    looked = [looks(Lookahead(replace(setting, seed=seed), Prior(setting.space), answers)) for seed in range(20)]
    assert looked == [40] * 20


def test_a_binary_that_the_screen_would_reject_is_not_predicted(numbered):
    setting, _ = numbered.begin(MIXED)
    prior = Prior(setting.space)
    answers = Answers(replace(BINARY, shared_bytes=10**6), faulty_device.predicted(0, 1.0))
    assert looks(Lookahead(setting, prior, answers)) > 2 * MAX_FAILURES, "such are not failures"
    assert not prior


def test_every_other_look_is_next_to_the_best(numbered, load):
    space, chosen = load(SPACE), []
    prior = Prior(space)
    best = {"family": "plain", "tile": 64, "warps": 4}
    prior.predict(best, 1.0)
    setting, _ = numbered.begin(MIXED)
    ahead = Lookahead(replace(setting, space=space), prior, Answers(BINARY))
    ahead.discard(best)
    near = space.neighbours(best)
    for _ in range(8):
        chosen.append(ahead._choose(None))
        ahead.discard(chosen[-1])
    assert all(config in near for config in chosen[::2])
    assert not all(config in near for config in chosen[1::2])


def test_the_first_pick_waits_for_a_tenth_of_the_searchs_time_at_most(numbered, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(lookahead.time, "monotonic", lambda: now[0])
    setting, _ = numbered.begin(MIXED)
    for seconds, wait in ((None, lookahead.MAX_WAIT_SECONDS), (30.0, 3.0)):
        ahead = Lookahead(replace(setting, seconds=seconds), Prior(setting.space), Answers(BINARY))
        now[0] = 100.0
        assert ahead.must_wait()
        now[0] = 100.0 + wait - 0.01
        assert ahead.must_wait()
        now[0] = 100.0 + wait
        assert not ahead.must_wait()


def test_the_first_pick_waits_for_predictions_made_ahead_unless_a_sibling_measured_as_many(numbered):
    setting, _ = numbered.begin(MIXED)
    prior, of_sibling = Prior(setting.space), Prior(setting.space)
    ahead = Lookahead(setting, prior, Answers(BINARY))
    for config in setting.space.enumerate():
        prior.predict(config, 1.0)  # candidates that a GPU timed, the start points
        of_sibling.measure(config, 1.0)
    assert ahead.must_wait()
    assert not Lookahead(setting, of_sibling, Answers(BINARY)).must_wait()
