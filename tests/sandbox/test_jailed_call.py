"""A function in a jail reaches nothing, and its answer is read as what it is declared to return, or not at all."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import replace

import pytest

from evoengine.errors import ToolDied, UsageError
from evoengine.records import CaseResult, Coverage, Outcome, Verdict
from evoengine.sandbox import jail, jailed_call
from evoengine.sandbox.jailed_call import call, from_json, to_json

needs_jail = pytest.mark.skipif(jail.why_no_jail() is not None, reason=str(jail.why_no_jail()))

REACHES = {
    "a file of the user's": "__import__('os').path.exists({secret!r})",
    "the home folder": "__import__('os').path.exists({home!r})",
    "the environment": "'EVOENGINE_TEST_KEY' in __import__('os').environ",
    "a process outside": "__import__('os').path.exists('/proc/{pid}/environ') and {pid} > 50",
    "the network": "len(__import__('socket').if_nameindex()) > 1 or open('/proc/net/route').read().count('\\n') > 1",
}
"""what a function may try, as an expression that is True where it succeeds"""


@needs_jail
@pytest.mark.parametrize("what", REACHES)
def test_a_function_in_the_jail_reaches_nothing(what, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("x")
    monkeypatch.setenv("EVOENGINE_TEST_KEY", "secret")
    home = tmp_path / "home"
    home.mkdir()
    expression = REACHES[what].format(secret=str(tmp_path / "secret"), home=str(home), pid=os.getpid())
    assert call(eval, expression, returns=bool) is False
    if what != "the network":  # the machine of the tests may have none
        assert eval(expression) is True


RAISES = "(_ for _ in ()).throw(__import__('evoengine.errors', fromlist=['x']).UsageError('it is wrong'))"


@needs_jail
def test_its_errors_are_raised_here_and_its_death_is_told():
    with pytest.raises(UsageError, match="it is wrong"):
        call(eval, RAISES, returns=bool)
    with pytest.raises(ToolDied, match="SIGSEGV") as died:
        call(eval, "__import__('os').kill(__import__('os').getpid(), 11)", returns=bool)
    assert died.value.how == "SIGSEGV"
    with pytest.raises(ToolDied, match="no answer"):
        call(eval, "__import__('os')._exit(0)", returns=bool)


@needs_jail
def test_an_answer_of_another_kind_or_size_is_none(monkeypatch):
    for expression in ("'True'", "1", "[]", "None"):
        with pytest.raises(ToolDied, match="no answer"):
            call(eval, expression, returns=bool)
    monkeypatch.setattr(jailed_call, "ANSWER_BYTES", 1000)
    with pytest.raises(ToolDied, match="no answer"):
        call(eval, "'x' * 2000", returns=str)


@needs_jail
def test_its_processes_and_files_are_limited():
    limits = "[list(__import__('resource').getrlimit(n)) for n in (1, 6)]"  # of a file's bytes, of processes
    files, processes = call(eval, limits, returns=tuple[tuple[int, int], ...])
    assert max(files) <= jailed_call.ANSWER_BYTES and files[0] == files[1] > 0
    assert processes == (256, 256) or not counts_processes()


def counts_processes() -> bool:
    major, minor = platform.release().split(".")[:2]
    return (int(major), int(minor)) >= jailed_call.COUNTS_BY_NAMESPACE


VERDICT = Verdict(
    "executor", Outcome.INCORRECT, "small: wrong", (CaseResult("small", "p:n1", 7, False, math.inf, 0.5, None, "why"),),
    1.5, coverage=Coverage({"extents": 3}, {"extents": 2}, ("n=1",)), gate_version=6,
)  # fmt: skip


def test_a_record_comes_back_as_it_was():
    assert from_json(to_json(VERDICT), Verdict) == VERDICT
    nan = replace(VERDICT, wall_ms=math.nan)
    assert math.isnan(from_json(to_json(nan), Verdict).wall_ms)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"incorrect"', '"fast"'),
        ('"incorrect"', '{"ranked": true}'),
        ('"seed": 7', '"seed": "7"'),
        ('"correct": false', '"correct": 0'),
        ('"cases": [', '"cases": [7, '),
        ('{"extents": 3}', '[["extents", 3]]'),
        ('"device": ', '"gadget": '),
    ],
)
def test_a_record_of_other_values_is_refused(old, new):
    text = to_json(VERDICT).decode()
    assert old in text
    with pytest.raises(ValueError):
        from_json(text.replace(old, new).encode(), Verdict)
