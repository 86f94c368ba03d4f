"""The model of the evolutionary sampler keeps in memory what its knobs need, however many values they have."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from evoengine.search.samplers.surrogate import MAX_POSITIONS, Surrogate, find_powers
from evoengine.space.definition import Knob

MANY = 32_000


def fitted(knob: Knob, rows: np.ndarray, targets: np.ndarray, pool: np.ndarray) -> Surrogate:
    model = Surrogate([knob], np.random.default_rng(0))
    model.fit(rows, targets, pool)
    return model


@pytest.mark.parametrize("values", [tuple(range(MANY)), tuple(f"value {n}" for n in range(MANY))])
def test_a_knob_of_many_values_takes_no_table_of_all_pairs(values):
    rows = np.linspace(0, MANY - 1, 20).astype(np.int16)[:, None]
    tracemalloc.start()
    try:
        fitted(Knob("wide", values), rows, np.linspace(-1, 1, 20), rows)
        assert tracemalloc.get_traced_memory()[1] < 64 * MAX_POSITIONS**2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count", [8, MAX_POSITIONS, MANY])
def test_what_is_near_is_alike_and_inactive_is_like_none(count):
    knob = Knob("tile", tuple(range(count)))
    rows = np.array([[0], [count // 8], [count - 1], [-1]], np.int16)
    covariance = fitted(knob, rows, np.array([1.0, 0.5, -1.0, 0.0]), rows).covariance(rows)
    near, far, inactive = covariance[0, 1], covariance[0, 2], covariance[0, 3]
    assert near > far >= inactive > 0
    assert covariance[2, 3] == pytest.approx(inactive)


def test_up_to_so_many_values_each_has_a_position_of_its_own():
    knob = Knob("tile", tuple(range(MAX_POSITIONS)))
    rows = np.arange(MAX_POSITIONS, dtype=np.int16)[:, None]
    places = Surrogate([knob], np.random.default_rng(0))._places(rows)
    assert (places[:, 0] == np.arange(MAX_POSITIONS)).all()


def test_a_power_of_two_is_like_other_powers_of_two_where_the_model_knows_derived_values():
    knob = Knob("block", tuple(range(16, 272, 16)))
    at = [knob.values.index(value) for value in (16, 32, 48, 64, 80, 96, 112)]
    rows, targets = np.array(at, np.int16)[:, None], np.array([1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0])
    pool = np.array([[knob.values.index(value)] for value in (128, 144)], np.int16)
    means = []
    for derived in (False, True):
        model = Surrogate([knob], np.random.default_rng(0), derived=derived)
        model.fit(rows, targets, pool)
        means.append(model.predict(targets)[0])
    assert means[0][0] < means[0][1]  # 112 is nearer and slow
    assert means[1][0] > means[1][1] + 0.5


@pytest.mark.parametrize(
    "knob",
    [
        Knob("all", (1, 2, 4, 8)),
        Knob("one", (3, 4, 5, 6)),
        Knob("none", (3, 5, 6)),
        Knob("zero", (0, 1, 2, 3)),
        Knob("fractions", (0.5, 1.0, 1.5, 2.0)),
        Knob("switch", (False, True)),
        Knob("words", ("a", "b", "c")),
    ],
)
def test_no_knob_counts_which_values_are_powers_of_two_unless_some_are_and_some_are_not(knob):
    assert not [*find_powers([knob])]
