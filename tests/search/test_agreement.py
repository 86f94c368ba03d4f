"""How well estimates rank what was measured: which figures stand side by side, and what is made of them."""

from __future__ import annotations

import pytest

from evoengine.records import Kind, Outcome
from evoengine.sass.build import build
from evoengine.tuning.measure import measured_pairs, rank_agreement
from tests.support.ledger_examples import GPU, PROBLEM, a_figure, add_ranked, start_run
from tests.support.numbered_search import GPU as SEARCHED_GPU
from tests.support.numbered_search import PROBLEM as SEARCHED


@pytest.mark.parametrize(
    ("pairs", "spearman", "regret"),
    [
        ([(n, 2.0 * n) for n in range(1, 13)], 1.0, 0.0),
        ([(n, -1.0 * n + 20) for n in range(1, 13)], -1.0, 19 / 17 - 1),
        ([(1.0, 1.0), (2.0, 2.0)], None, None),
        ([(1.0, 5.0), (1.0, 6.0), (1.0, 7.0)], None, None),
        ([], None, None),
    ],
)
def test_agreement_is_rank_correlation_and_what_a_short_list_would_have_missed(pairs, spearman, regret):
    found = rank_agreement(pairs)
    assert found.candidates == len(pairs)
    assert found.spearman == (None if spearman is None else pytest.approx(spearman))
    assert found.regret == (None if regret is None else pytest.approx(regret))


def test_a_pair_is_the_last_estimate_beside_the_last_measurement(ledger):
    trial = add_ranked(ledger, start_run(ledger), a_figure(300.0))
    for figure in (a_figure(310.0), a_figure(250.0, Kind.MEASURED), a_figure(260.0, Kind.MEASURED)):
        ledger.record_measurement(trial, figure)
    ledger.finish(trial, Outcome.MEASURED, None, 0.25, "NVIDIA H200")
    [pair] = measured_pairs(ledger)
    assert (pair.trial, pair.problem, pair.gpu, pair.family) == (trial, PROBLEM, GPU, "wmma")
    assert pair.device == "NVIDIA H200"
    assert pair.figures == (310.0, 260.0)


def test_what_lacks_one_of_the_two_or_is_not_believed_makes_no_pair(ledger):
    run = start_run(ledger)
    add_ranked(ledger, run, a_figure(300.0))
    add_ranked(ledger, run, a_figure(250.0, Kind.MEASURED), name="measured")
    suspect = add_ranked(ledger, run, a_figure(9000.0, Kind.MEASURED, "above the roofline"), name="suspect")
    ledger.record_measurement(suspect, a_figure(300.0))
    assert measured_pairs(ledger) == []


def test_a_search_on_a_gpu_leaves_its_estimates_beside_what_it_measured_and_ranks_by_the_latter(numbered):
    build()  # or a worker would have to, within the time of a task
    numbered.coordinator(range(12), lambda n: ("judge", "segv") if n == 3 else None).search()
    pairs = measured_pairs(numbered.ledger, str(SEARCHED), SEARCHED_GPU.key)
    assert len(pairs) == 11
    assert all(p.estimated > 0 for p in pairs)
    best = numbered.ledger.best(str(SEARCHED), SEARCHED_GPU.key, top=12)
    assert {c.measurement.kind for c in best} == {Kind.MEASURED}
    crashed = next(c for c in numbered.candidates() if c.config["number"] == 3)
    assert crashed.measurement is None
