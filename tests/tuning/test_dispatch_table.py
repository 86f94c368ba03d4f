"""Tables of kernels for several problems: the fewest regrets, stated, and refused where kernels are too few."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from evoengine.errors import UsageError
from evoengine.records import Kind
from evoengine.tuning import dispatch_table
from evoengine.tuning.dispatch_table import Timed, choose


def timed(times):
    """times[problem][kernel] in microseconds; a kernel is a configuration of one knob."""
    trials = itertools.count(1)
    return {p: [Timed(next(trials), {"tile": k}, us) for k, us in of.items()] for p, of in times.items()}


def chosen(times, kernels=None):
    return {problem: one.config["tile"] for problem, one in choose(timed(times), kernels).items()}


TIMES = {
    "small": {1: 10.0, 2: 12.0, 3: 40.0},
    "large": {1: 90.0, 2: 66.0, 3: 60.0},
    "wide": {1: 30.0, 2: 22.0, 3: 20.0},
}


def test_without_a_limit_each_problem_has_its_fastest():
    assert chosen(TIMES) == {"small": 1, "large": 3, "wide": 3}


def test_one_kernel_for_all_is_the_least_slow_in_the_geometric_mean():
    assert chosen(TIMES, 1) == {"small": 2, "large": 2, "wide": 2}


def test_two_kernels_serve_each_problem_by_the_faster_of_both():
    assert chosen(TIMES, 2) == {"small": 1, "large": 3, "wide": 3}


def test_of_equal_means_the_smaller_worst_regret_wins():
    equal = {"a": {1: 1.0, 2: 2.0, 3: 4.0}, "b": {1: 4.0, 2: 2.0, 3: 1.0}}
    assert chosen(equal, 1) == {"a": 2, "b": 2}


def test_a_kernel_that_was_not_evaluated_on_a_problem_does_not_serve_it():
    assert chosen({"a": {1: 1.0, 2: 3.0}, "b": {2: 5.0, 3: 1.0}}, 1) == {"a": 2, "b": 2}


def test_kernels_that_cannot_serve_all_problems_are_refused():
    with pytest.raises(UsageError, match="no 1 of the known kernels serve all 2 problems"):
        choose(timed({"a": {1: 1.0}, "b": {2: 1.0}}), 1)


def test_the_fastest_trial_of_a_configuration_counts():
    problems = {"a": [Timed(1, {"tile": 1}, 2.0), Timed(2, {"tile": 1}, 1.0)], "b": [Timed(3, {"tile": 1}, 1.0)]}
    assert choose(problems, 1)["a"].trial == 2


def test_exchange_finds_what_comparing_all_choices_finds(monkeypatch):
    """Where there are too many choices to compare them all, kernels are exchanged while that helps."""
    times = np.random.default_rng(1).uniform(1.0, 3.0, (6, 12))
    of = {f"p{i}": dict(enumerate(row)) for i, row in enumerate(times.tolist())}
    exact = mean(choose(timed(of), 3), times)
    monkeypatch.setattr(dispatch_table, "MOST_CHOICES", 1)
    assert mean(choose(timed(of), 3), times) == pytest.approx(exact)


def mean(found, times):
    return math.fsum(math.log(one.us / best) for one, best in zip(found.values(), times.min(1), strict=True))


def test_a_proposed_text_stands_for_no_configuration():
    ranked = [SimpleNamespace(trial=n, operator=operator, config={"tile": 1}, ranked_by=FIGURE) for n, operator in OF]
    ledger = SimpleNamespace(best=lambda problem, gpu, top: ranked, db=None)
    assert dispatch_table.find_table(ledger, ["a"], "h100").served[0].candidate.trial == 2


OF = ((1, "proposal"), (2, "sampler"))
FIGURE = SimpleNamespace(kind=Kind.ESTIMATED, compared_us=3.0)
