"""Sizes without values: what is computed from them is an expression that gives the same numbers."""

from __future__ import annotations

import pytest

from evoengine.errors import UsageError
from evoengine.space.expression import Expression, Scope
from evoengine.space.symbol import Symbol, Undecided, int32, symbol, texts

LETS = {"tiles": Expression.parse("ceil_div(n, TILE)", "lets"), "no": Expression.parse("missing * n", "lets")}
KNOWN = {"TILE": 32, "mode": "fast", "off": False}
EXPRESSIONS = {
    "tiles * ceil_div(m, 2)": "-(-n // 32) * -(-m // 2)",
    "min(n, 64, m) - n % 3": "min(n, 64, m) - n % 3",
    "round_up(m, TILE) // 4": "-(-m // 32) * 32 // 4",
    "n if mode == 'fast' else no": "n",
    "no if off and n > 2 else m + 1": "m + 1",
    "n if m > TILE * 2 else -n": "n if m > 64 else -n",
    "off or n <= 8 or m in [1, 2]": "n <= 8 or m in (1, 2)",
    "n < m < 100": "n < m < 100",
    "n * TILE ** 2 / 4 >= 7": "n * 1024 / 4 >= 7",
    "not (n == m)": "not n == m",
    "TILE // 3": 10,
    "mode != 'fast' and n > 1": False,
}


def scope(**sizes):
    return Scope({**KNOWN, **sizes}, LETS, {})


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_an_expression_of_symbols_has_the_values_that_it_has_of_numbers(text):
    expression = Expression.parse(text, "here")
    found = expression.evaluate(scope(n=symbol("n"), m=symbol("m")))
    assert texts(found) == EXPRESSIONS[text]
    for n, m in ((1, 1), (2, 2), (33, 64), (64, 65), (1000, 7)):
        expected = expression.evaluate(scope(n=n, m=m))
        again = Expression.parse(str(found), "again").evaluate({"n": n, "m": m}) if isinstance(found, Symbol) else found
        assert again == expected


def test_what_python_asks_the_value_of_has_none():
    n = symbol("n")
    for ask in (lambda: n > 1, lambda: bool(n), lambda: n == 4, lambda: range(n), lambda: int(n), lambda: n / 2):
        with pytest.raises(Undecided, match="n has no value"):
            ask()
    with pytest.raises(Undecided):
        Expression.parse("n ** 2", "here").evaluate({"n": n})
    with pytest.raises(UsageError, match="needs missing, which has no value"):
        Expression.parse("no if n > 1 else 0", "here").evaluate(scope(n=n))


def test_an_argument_keeps_its_type():
    argument = int32(3 * symbol("n"))
    assert (argument.dtype, argument.nbytes, texts({"value": [argument.item()]})) == ("int32", 4, {"value": ["3 * n"]})
    assert int32(7).nbytes == 4
