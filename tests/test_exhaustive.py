"""What `make test` leaves to `make test-all`: the rest of a table, never its representatives."""

from __future__ import annotations

import pytest

from tests.support.exhaustive import more, representatives

CASES = [pytest.param(n, id=name) for n, name in enumerate(["late-a", "late-b", "early-a", "lost-a"])]


def fast(cases) -> list[str]:
    return [case.id for case in cases if not case.marks]


def test_the_first_case_of_each_name_stays_and_the_rest_is_exhaustive():
    assert fast(representatives(CASES, "late", "lost")) == ["late-a", "lost-a"]


def test_no_case_gets_lost():
    assert [case.id for case in representatives(CASES, "late")] == [case.id for case in CASES]


def test_a_name_that_no_case_has_is_refused():
    with pytest.raises(ValueError, match="no case begins with 'gone'"):
        representatives(CASES, "late", "gone")


def test_more_of_the_same_keeps_its_values():
    assert [case.values for case in more([3, (4, "x"), CASES[1]])] == [(3,), (4, "x"), (1,)]
    assert fast(more([3, CASES[1]])) == []
