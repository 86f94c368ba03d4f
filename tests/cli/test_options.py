"""What is given twice or mistyped is named, for every command and option: nothing is taken silently."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from evoengine.cli.main import COMMANDS, evoengine
from evoengine.cli.reference import commands

SINGLE = [
    (name, option.opts[0])
    for name, command in commands(evoengine)
    for option in command.params
    if isinstance(option, click.Option) and not option.is_flag and not option.multiple
]


def refused(*arguments: str) -> str:
    """The sentence of a call that is refused for its usage."""
    done = CliRunner().invoke(evoengine, list(arguments))
    assert done.exit_code == 2, done.output
    return done.output.strip().splitlines()[-1]


def test_every_command_that_uses_a_ledger_says_where_the_default_one_is():
    for _, command in commands(evoengine):
        for option in command.params:
            if option.name == "db":
                assert "db/evoengine.db in the current folder" in option.help


@pytest.mark.parametrize(("command", "option"), SINGLE)
def test_an_option_of_one_value_that_is_given_twice_is_refused_with_both(command, option):
    said = refused(command, option, "one", f"{option}=other")
    assert said == f"Error: {option} is given 2 times, one and other; it takes one value"


def test_an_option_of_several_values_and_a_flag_may_be_given_twice():
    ok = CliRunner().invoke(evoengine, ["search", "--family", "a", "--family", "b", "--json", "--json", "--help"])
    assert ok.exit_code == 0


def test_what_looks_like_an_option_after_two_dashes_is_none():
    assert "given 2 times" not in refused("show", "--db", "x", "--", "--db", "y")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistyped_command_is_told_which_was_meant(command):
    mistyped = command[:-2] + command[-1] + command[-2]
    assert f"there is no command '{mistyped}'; did you mean" in refused(mistyped)


def test_a_command_like_no_other_is_told_where_the_list_is():
    assert "there is no command 'zzzz'; evoengine --help lists them" in refused("zzzz")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("search", "--sampler", "Evolutoin"), "did you mean evolution?"),
        (("search", "--device", "emulatr"), "did you mean emulator?"),
        (("verify", "--config", "{}", "--device", "emulatr"), "did you mean emulator?"),
        (("export", "x", "--format", "t5"), "did you mean t4?"),
        (("search", "--trails", "3"), "--trials"),
    ],
)
def test_a_mistyped_value_or_option_is_told_which_was_meant(arguments, meant):
    assert meant in refused(*arguments)
