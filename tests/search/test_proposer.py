"""The proposer gives valid, new configurations with any sampler, and tells the sampler what became of each."""

from __future__ import annotations

import pytest

from evoengine.objectives import OBJECTIVES
from evoengine.records import config_key
from evoengine.search.proposer import PastTrial, Proposer
from evoengine.search.samplers import NAMES
from tests.support.exhaustive import more
from tests.support.spaces import launches

SPACE = """\
kernel = "attention"
[knobs]
family = ["left", "right"]
a = [1, 2, 4, 8]
b = { values = [0, 1, 2], when = "family == 'right'" }
[[constraint]]
expr = "a + b < 9"
why = "they must fit"
[[start]]
family = "right"
a = 4
b = 2
""" + launches("left", "right")


@pytest.fixture
def space(load):
    return load(SPACE)


def objective_values(config) -> float:
    return config["a"] + 10.0 * config.get("b", 0)


def run(proposer: Proposer, count: int) -> list:
    found = []
    for _ in range(count):
        proposal = proposer.propose()
        if proposal is None:
            break
        proposer.tell(proposal, (objective_values(proposal.config),))
        found.append(proposal)
    return found


@pytest.mark.parametrize("sampler", [*(n for n in NAMES if n != "gp"), *more(["gp"])])
def test_every_sampler_walks_the_whole_space_without_repeating_or_leaving_it(space, sampler):
    found = run(Proposer(space, sampler, seed=1), 99)
    keys = [p.key for p in found]
    assert len(keys) == len(set(keys)) == len(space)
    assert {config_key(c) for c in space.enumerate()} == set(keys)


def test_a_space_at_its_end_is_not_asked_once_more(space):
    proposer = Proposer(space, "evolution", seed=1)
    run(proposer, 99)
    assert (proposer.invalid, proposer.repeated) == (0, 0)


def test_start_points_come_first_and_say_so(space):
    first = Proposer(space, "tpe", seed=1).propose()
    assert (first.config, first.operator) == (space.starts[0], "start")


def test_what_an_interrupted_run_left_comes_before_the_starts(space):
    left = {"family": "left", "a": 8}
    first = Proposer(space, "tpe", seed=1, retry=[left]).propose()
    assert (first.config, first.operator) == (left, "retry")


def test_proposals_under_way_are_not_given_again(space):
    proposer = Proposer(space, "random", seed=1)
    given = [proposer.propose() for _ in range(len(space))]
    assert len({p.key for p in given}) == len(space)
    assert proposer.propose() is None


def test_a_rejected_candidate_is_told_as_worse_than_any_figure(space):
    proposer = Proposer(space, "tpe", seed=1)
    proposal = proposer.propose()
    proposer.tell(proposal, None)
    [trial] = proposer._sampler._study.trials
    assert trial.value == OBJECTIVES["tflops"].penalty < min(objective_values(c) for c in space.enumerate())


def test_the_same_seed_gives_the_same_search(space):
    once, again, other = ([p.key for p in run(Proposer(space, "tpe", seed=seed), 12)] for seed in (3, 3, 4))
    assert once == again != other


def test_what_was_best_elsewhere_comes_after_the_start_points(space):
    proposer = Proposer(space, "tpe", seed=1, known_good=[{"family": "right", "a": 2, "b": 1}])
    first, drawn, third = (proposer.propose() for _ in range(3))
    assert [first.operator, drawn.operator, third.operator] == ["start", "random", "ledger"]
    assert drawn.config["family"] == "left", "it has no start point"
    assert third.config == {"family": "right", "a": 2, "b": 1}


def test_parents_are_the_ledgers_trials(space):
    proposer = Proposer(space, "evolution", seed=1)
    named: set[int] = set()
    for trial in range(100, 100 + len(space)):
        proposal = proposer.propose()
        named |= set(proposal.parents)
        proposer.started(proposal, trial)
        proposer.tell(proposal, (objective_values(proposal.config),))
    assert named and named <= set(range(100, 100 + len(space)))


# ── a run that goes on ──────────────────────────────────────────────────────────────────────────────────────────────


def as_past(found, count) -> list[PastTrial]:
    return [
        PastTrial(100 + n, p.config, (objective_values(p.config),) if n else None, (100,) if n == 2 else (), p.operator)
        for n, p in enumerate(found[:count])
    ]


@pytest.mark.parametrize("sampler", [*(n for n in NAMES if n != "gp"), *more(["gp"])])
def test_a_run_that_goes_on_proposes_what_is_left_and_nothing_again(space, sampler):
    before = run(Proposer(space, sampler, seed=1), 5)
    after = run(Proposer(space, sampler, seed=1, past=as_past(before, 5)), 99)
    keys = [p.key for p in (*before, *after)]
    assert len(keys) == len(set(keys)) == len(space)


def test_the_sampler_of_a_run_that_goes_on_is_told_of_what_it_had(space):
    before = run(Proposer(space, "tpe", seed=1), 4)
    told = Proposer(space, "tpe", seed=1, past=as_past(before, 4))._sampler._study.trials[:4]
    assert [t.params for t in told] == [p.config for p in before]
    assert [t.values for t in told] == [[0.0], *([objective_values(p.config)] for p in before[1:])]


def test_its_start_points_come_only_where_they_were_not_tried(space):
    start = Proposer(space, "tpe", seed=1).propose()
    assert Proposer(space, "tpe", seed=1, past=as_past([start], 1)).propose().config != start.config


def test_a_later_trial_names_parents_from_before_by_their_numbers_in_the_ledger(space):
    before = run(Proposer(space, "evolution", seed=1), 8)
    proposer = Proposer(space, "evolution", seed=1, past=as_past(before, 8))
    named = {parent for proposal in run(proposer, 6) for parent in proposal.parents}
    assert named and named <= set(range(100, 108))


def test_a_run_that_goes_on_does_not_draw_as_at_its_beginning(space):
    """Or each process of it would propose alike."""
    before = run(Proposer(space, "random", seed=1), 3)
    goes_on = [Proposer(space, "random", seed=1, past=as_past(before, n))._rng.integers(2**40) for n in range(4)]
    assert len(set(goes_on)) == 4
