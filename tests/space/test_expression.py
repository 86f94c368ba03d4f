from __future__ import annotations

import random

import numpy as np
import pytest

from evoengine.errors import UsageError
from evoengine.space.arrays import Columns, EncodedColumn
from evoengine.space.expression import Expression

VALUES = {"tile_m": 64, "warps": 4, "pad": 8, "family": "wmma", "causal": True, "gpu.sms": 132, "ratio": 0.5}


def value(text: str) -> object:
    return Expression.parse(text, "space.toml:3").evaluate(VALUES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tile_m % (16 * warps) == 0", True),
        ("ceil_div(2047, tile_m)", 32),
        ("round_up(tile_m + 1, 16)", 80),
        ("min(tile_m, 3, warps)", 3),
        ("max(pad, gpu.sms)", 132),
        ("16 <= tile_m < 128", True),
        ("16 <= tile_m < 64", False),
        ("family in ['wmma', 'mma']", True),
        ("pad not in [0, 8]", False),
        ("2 * pad if family == 'wmma' else 0", 16),
        ("-7 // 2", -4),
        ("-7 % 3", 2),
        ("2 ** warps", 16),
        ("tile_m / 128", 0.5),
        ("causal and pad", True),
        ("not causal or warps == 8", False),
        ("warps == 0 or 8 // warps == 2", True),
        ("tile_m\n  * warps  # with a comment\n + 1", 257),
    ],
)
def test_an_expression_means_what_python_means_and_logic_gives_a_bool(text: str, expected: object) -> None:
    assert value(text) == expected
    assert type(value(text)) is type(expected)


def test_names_are_those_read_with_gpu_variables_in_full() -> None:
    assert Expression.parse("max(tile_m, gpu.sms) * warps", "").names == {"tile_m", "gpu.sms", "warps"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("open('x')", "calls open; only ceil_div, round_up, min, max may be called"),
        ("__import__('os').system('ls')", "calls __import__('os').system"),
        ("(lambda: 1)()", "calls"),
        ("tile_m.real", "reads the attribute tile_m.real"),
        ("gpu.sms.real", "reads the attribute gpu.sms.real"),
        ("gpu", "uses gpu alone"),
        ("min", "uses the function min without calling it"),
        ("[1, 2][0]", "holds a subscript"),
        ("lambda: 1", "holds a lambda"),
        ("[i for i in [1]]", "holds a comprehension"),
        ("f'{tile_m}'", "holds an f-string"),
        ("(x := 3)", "holds an assignment"),
        ("tile_m, warps", "holds a tuple"),
        ("~warps", "uses the operator Invert"),
        ("warps << 200", "uses the operator LShift"),
        ("1j", "holds the constant 1j"),
        ("None", "holds the constant None"),
        ("tile_m is warps", "compares with is"),
        ("tile_m in warps", "not a literal list"),
        ("tile_m in [warps]", "may hold numbers or text only"),
        ("'w' in 'wmma'", "not a literal list"),
        ("min(3)", "calls min with 1 arguments"),
        ("ceil_div(1, 2, 3)", "calls ceil_div with 3 arguments"),
        ("max(*[1, 2])", "other than plain arguments"),
        ("'a' * 1000000000", "calculates with 'a', which is text"),
        ("family == 3 or 'a' == 1", "compares 'a' (text) and 1 (number)"),
        ("1 if 'a' else 2", "takes for true or false 'a'"),
        ("99999999999999999999", "holds a number beyond 64 bits"),
        ("tile_m +", "is not an expression"),
        ("", "is not an expression"),
        ("(" * 500, "is not an expression"),
        ("-" * 3500 + "1", "nested too deeply"),
        ("1 + " * 2000 + "1", "at most 4000"),
    ],
)
def test_anything_outside_the_language_is_refused_and_named_with_its_place(text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as error:
        Expression.parse(text, "space.toml:3")
    assert complaint in str(error.value)
    assert str(error.value).startswith("space.toml:3: ")


def test_text_is_neither_calculated_with_nor_ordered_nor_compared_with_numbers() -> None:
    kinds = {"family": "text", "tile_m": "number"}
    for text in ("family * 3", "family < 'x'", "family == tile_m", "family and tile_m", "max(family, 1)"):
        with pytest.raises(UsageError, match="family"):
            Expression.parse(text, "space.toml:3").kind(kinds)
    assert Expression.parse("family == 'wmma'", "").kind(kinds) == "number"
    assert Expression.parse("family if tile_m else 'none'", "").kind(kinds) == "text"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tile_m // (pad - 8)", "divides by zero"),
        ("tile_m % (pad - 8)", "divides by zero"),
        ("tile_m / (pad - 8)", "divides by zero"),
        ("tile_m ** 65", "an integer from 0 to 64"),
        ("tile_m ** ratio", "an integer from 0 to 64"),
        ("tile_m ** 64", "too large"),
        ("9223372036854775807 * tile_m", "overflows 64 bits"),
        ("1e308 * tile_m", "overflows 64 bits"),
        ("stages + tile_m", "needs stages, which has no value"),
    ],
)
def test_an_expression_without_a_value_names_itself_and_the_configuration(text: str, complaint: str) -> None:
    expression = Expression.parse(text, "space.toml:3")
    with pytest.raises(UsageError) as scalar:
        expression.evaluate(VALUES)
    with pytest.raises(UsageError) as columns:
        expression.evaluate_arrays({**VALUES, "tile_m": np.array([64, 64])})
    for error in (scalar, columns):
        assert complaint in str(error.value)
        assert f"`{text}`" in str(error.value)
        assert "tile_m=64" in str(error.value)


def test_columns_go_on_past_what_numpy_would_wrap_or_round() -> None:
    tile = np.array([3, 2**40])
    assert Expression.parse("tile * tile // tile", "").evaluate_arrays({"tile": tile}).tolist() == tile.tolist()
    inexact = Expression.parse("tile * 8192 + 1 == tile * 8192 + 1.0", "")
    assert inexact.evaluate_arrays({"tile": tile}).tolist() == [True, False]


def test_narrow_columns_do_not_wrap() -> None:
    assert Expression.parse("a * a", "").evaluate_arrays({"a": np.array([100], np.int8)}).tolist() == [10000]


def test_columns_of_conditions_count_as_ones_and_zeros() -> None:
    a = np.array([0, 1, 2])
    for text, expected in (
        ("(a > 0) + (a > 1)", [0, 1, 2]),
        ("(a > 0) - (a > 1)", [0, 1, 0]),
        ("-(a > 0)", [0, -1, -1]),
        ("max(a > 0, a > 1) * 3", [0, 3, 3]),
    ):
        assert Expression.parse(text, "").evaluate_arrays({"a": a}).tolist() == expected


def test_a_branch_is_computed_on_its_own_rows_only() -> None:
    pad = EncodedColumn(np.array([-1, 0, 1], np.int8), np.array([8, 16]))
    columns = Columns({"pad": pad, "wmma": np.array([0, 1, 1])}, 3)
    assert Expression.parse("pad if wmma else 0", "").evaluate_arrays(columns).tolist() == [0, 8, 16]
    assert Expression.parse("wmma and pad > 8", "").evaluate_arrays(columns).tolist() == [False, False, True]
    with pytest.raises(UsageError, match="needs pad"):
        Expression.parse("pad + wmma", "").evaluate_arrays(columns)


def test_scalars_and_columns_agree_on_random_expressions_and_inputs() -> None:
    draw = random.Random(7)
    rng = np.random.default_rng(7)
    failures = 0
    for i in range(2000):
        expression = Expression.parse(_number(draw, 1 + i % 4), "random")
        columns = {
            "a": rng.integers(-4, 5, 12),
            "b": rng.choice([1, 16, 128, 2**31, -(2**45)], 12),
            "f": rng.choice([0.0, 0.5, -1.5, 3.0], 12),
            "p": rng.random(12) < 0.5,
            "s": rng.choice(["wmma", "mma"], 12),
        }
        rows = [{name: column[i].item() for name, column in columns.items()} for i in range(12)]
        try:
            expected = [expression.evaluate({**row, "n": 7}) for row in rows]
        except UsageError:
            failures += 1
            with pytest.raises(UsageError):
                expression.evaluate_arrays({**columns, "n": 7})
            continue
        assert expression.evaluate_arrays({**columns, "n": 7}).tolist() == expected, expression.text
    assert 100 < failures < 1200, "the inputs should hold both expressions with a value and without"


def _number(draw: random.Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.15:
        return draw.choice(["a", "b", "f", "p", "n", "2", "3", "0.5", "-1"])
    left, right = _number(draw, depth - 1), _number(draw, depth - 1)
    condition = _condition(draw, depth - 1)
    return draw.choice(
        [
            f"({left} + {right})",
            f"({left} - {right})",
            f"({left} * {right})",
            f"({left} // {right})",
            f"({left} % {right})",
            f"({left} / {right})",
            f"(-{left})",
            f"({left} ** {draw.choice(['2', '3', 'a'])})",
            f"ceil_div({left}, {right})",
            f"round_up({left}, {right})",
            f"min({left}, {right})",
            f"max({left}, {right}, 1)",
            f"({left} if {condition} else {right})",
            f"({left} // {right} if {right} != 0 else {left})",
            condition,
        ]
    )


def _condition(draw: random.Random, depth: int) -> str:
    if depth == 0:
        texts = ["(s == 'wmma')", "(s in ['mma', 'wgmma'])"]
        return draw.choice(["p", *texts, "(a in [1, 2, -1])", "(a not in [0, 1.0])"])
    left, right = _number(draw, depth - 1), _number(draw, depth - 1)
    first, second = _condition(draw, depth - 1), _condition(draw, depth - 1)
    return draw.choice(
        [
            f"({left} < {right})",
            f"({left} == {right})",
            f"(a <= {left} < {right})",
            f"({first} and {second})",
            f"({first} or {left})",
            f"(not {first})",
            f"({right} != 0 and {left} % {right} > 1)",
        ]
    )
