"""Values and conditions of other tuners' files: read by a grammar, and nothing in them is ever run."""

from __future__ import annotations

import pytest

from evoengine.formats.tuned_kernel import NotLiteral, expression_of, values_of

READ = {
    "[16, 32, 64]": [16, 32, 64],
    "[32 * i for i in range(1, 32)]": [32 * i for i in range(1, 32)],
    "[2**i for i in range(0, 5)]": [1, 2, 4, 8, 16],
    "[i for i in range(1, 9) if i % 2 == 0 and i != 4]": [2, 6, 8],
    "list(range(4, 0, -1))": [4, 3, 2, 1],
    "range(3)": [0, 1, 2],
    "(1, 2)": [1, 2],
    "[1] + [2 * k for k in [4, 8]]": [1, 8, 16],
    "[-1, 0.5]": [-1, 0.5],
    "['a', \"b\"]": ["a", "b"],
    "[True, False]": [True, False],
    "1024": [1024],
}


@pytest.mark.parametrize("text, values", READ.items())
def test_values_are_read(text, values):
    assert values_of(text) == values


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "open('f')",
        "[x for x in open('f')]",
        "(lambda: 1)()",
        "x",
        "[].append(1)",
        "[().__class__]",
        "range(10**9)",
        "[0] * 10**9",
        "'a' * 10**9",
        "2**99999",
        "9**9**9",
        "1/0",
        "[",
        "",
        "[" * 5000,
        "[[i for i in range(4096)] for j in range(4096)]",
        "1e400",
        "range('a')",
        "[i for i in range(3) if open('f')]",
        "f'{1}'",
    ],
)
def test_whatever_else_is_refused(text):
    with pytest.raises(NotLiteral):
        values_of(text)


SPELLED = {
    "a*b <= 1024": "a*b <= 1024",
    "a * b <= 1024 && c != 0": "a * b <= 1024 and c != 0",
    "!(a == 1) || b % 2 == 0": "not (a == 1) or b % 2 == 0",
    "32 <= a <= 1024 and not c == 3": "32 <= a <= 1024 and not c == 3",
    "a // 32 in [1, 2]": "a // 32 in [1, 2]",
}


@pytest.mark.parametrize("text, expression", SPELLED.items())
def test_conditions_become_expressions_of_a_space(text, expression):
    assert expression_of(text, "abc") == expression


@pytest.mark.parametrize(
    "text, complaint",
    {
        "a < d": "names d, which is not a knob or axis",
        "os.getpid() > 0": "calls os.getpid",
        "a[0] > 1": "holds a subscript",
        "lambda p: p['a'] > 1": "which is not allowed",
        "a >": "is not an expression",
    }.items(),
)
def test_a_condition_that_cannot_be_taken_says_why(text, complaint):
    with pytest.raises(NotLiteral, match=None) as error:
        expression_of(text, "abc")
    assert complaint in str(error.value)
