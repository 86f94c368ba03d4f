"""What is given twice or mistyped is named, for every command and option: nothing is taken silently."""

from __future__ import annotations

import gc
import re
import socket
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from evoengine.cli.main import COMMANDS, evoengine, main
from tests.support.command_reference import commands
from tests.support.recorded import cache

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
    said = refused(*command.split(), option, "one", f"{option}=other")
    assert said == f"Error: {option} is given 2 times, one and other; it takes one value"


def test_an_option_that_may_stand_alone_is_refused_with_the_values_it_has():
    assert refused("search", "--resume", "--resume") == "Error: --resume is given 2 times; it takes one value"
    assert refused("search", "--resume", "--resume=3") == "Error: --resume is given 2 times, 3; it takes one value"


@pytest.mark.parametrize(("command", "option"), [found for found in SINGLE if found != ("search", "--resume")])
@pytest.mark.parametrize("behind", ["{other}", "{other}=x"])
def test_an_option_whose_value_is_left_out_does_not_take_the_next_option_for_it(command, option, behind):
    other = behind.format(other=option)
    assert re.fullmatch(
        f"Error: {option} has no [A-Za-z0-9:]+: the option {other} follows it",
        refused(*command.split(), option, other),
    )


def test_history_says_that_the_csv_file_is_missing_and_not_that_an_argument_is_too_many():
    assert refused("history", "--csv", "--db", "X") == "Error: --csv has no FILE: the option --db follows it"
    assert "has no FILE" not in refused("history", "--csv", "-", "--db", "/nowhere/x", "--outcome", "x")


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


VALUES = [
    (name, param)
    for name, command in commands(evoengine)
    for param in command.params
    if isinstance(param, click.Argument) or not (param.is_flag or param.is_eager)
    if param.type is not click.UNPROCESSED  # the arguments of another program
]


@pytest.mark.parametrize(("command", "param"), VALUES, ids=[f"{name}-{param.name}" for name, param in VALUES])
@pytest.mark.parametrize("form", ["word", "equals"])
def test_an_empty_value_is_refused_and_no_default_takes_its_place(command, param, form):
    if isinstance(param, click.Argument):
        said = refused(*command.split(), "--", "")
    else:
        said = refused(*command.split(), *([param.opts[0], ""] if form == "word" else [f"{param.opts[0]}="]))
    assert said.endswith("the value is empty; give one, or leave it out")


def given(param: click.Parameter, value: str) -> list[str]:
    return ["--", value] if isinstance(param, click.Argument) else [param.opts[0], value]


@pytest.mark.parametrize(("command", "param"), [(name, p) for name, p in VALUES if isinstance(p.type, click.Path)])
def test_a_name_too_long_for_a_file_is_refused(command, param):
    assert refused(*command.split(), *given(param, "9" * 5000)).endswith("is too long for a file name")


@pytest.mark.parametrize(("command", "param"), [(name, p) for name, p in VALUES if not isinstance(p.type, click.Path)])
def test_bytes_that_are_no_text_are_refused_where_no_file_is_named(command, param):
    assert refused(*command.split(), *given(param, "a\udcff")).endswith(
        "'a\\udcff' holds bytes that are not text in this locale"
    )


def test_a_file_may_have_a_name_that_is_no_text():
    assert "cannot read a\\udcff: No such file" in str(CliRunner().invoke(evoengine, ["import", "a\udcff"]).exception)


@pytest.mark.parametrize("arguments", [("show", "9" * 5000), ("best", "--top", "x" * 100_000), ("x" * 100_000,),
                                       ("history", "--db", "9" * 5000)])  # fmt: skip
def test_a_message_quotes_a_long_value_in_part(monkeypatch, capfd, arguments):
    monkeypatch.setattr(sys, "argv", ["evoengine", *arguments])
    assert main() == 2
    assert len(capfd.readouterr().err) < 2500


def test_every_command_that_reads_the_default_ledger_says_which_one_it_is(monkeypatch, tmp_path, uncollected):
    monkeypatch.chdir(tmp_path)
    file, ledger = cache(tmp_path / "test.json"), tmp_path / "db" / "evoengine.db"
    assert f"into {ledger} as run 1" in said_by("import", str(file))
    takers = {name for name, command in commands(evoengine) if any(p.name == "db" for p in command.params)}
    calls = {
        "best": [], "history": [], "show": ["1"], "report": [], "profile": ["1"], "export": ["run.json"],
        "accuracy": [],
        "verify": ["--config", "1"], "dashboard": ["--port", "1"], "runs": [], "runs remove": ["99"],
        "compare": ["1", "2"], "db check": [], "db backup": ["copy.db"], "db prune": ["--yes"], "db upgrade": [],
        "db rebuild-study": ["1"], "token list": [], "token new": ["me"], "token revoke": ["nobody"],
        "retune": ["--gpu", "a100"], "claims revoke": ["1"],
    }  # fmt: skip
    saying_it_themselves = {"search", "import", "measure", "propose"}  # with their run
    assert takers - calls.keys() == saying_it_themselves | {"serve", "mcp"}
    monkeypatch.setattr(socket, "create_server", refuse)
    for command, arguments in calls.items():
        assert f"ledger {ledger}" in said_by(*command.split(), *arguments), command
        assert f"ledger {ledger}" not in said_by(*command.split(), *arguments, "--db", str(ledger)), command
        assert not open_here(ledger), command  # a connection that is left would keep what it wrote from the file
    other = tmp_path / "other.db"
    monkeypatch.setenv("EVOENGINE_DB", str(ledger.rename(other)))
    assert f"ledger {other}" in said_by("history")


@pytest.fixture
def uncollected():
    """Nothing is closed because nobody holds it any more."""
    gc.disable()
    yield
    gc.enable()


def open_here(file: Path) -> list[str]:
    """What this process has open of an SQLite file."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
    return [str(link.readlink()) for link in links if str(link.readlink()).startswith(str(file))]


def said_by(*arguments: str) -> str:
    return CliRunner().invoke(evoengine, list(arguments)).output


def refuse(*_: object) -> None:
    raise OSError(98, "taken")


@pytest.mark.parametrize("arguments", [["--tri", "3"], ["--trials", "3", "--trials", "4"], ["--db", ""]])
def test_what_is_said_of_a_wrong_option_names_the_whole_command_to_paste(arguments):
    said = CliRunner().invoke(evoengine, ["search", *arguments]).output
    assert "Try 'evoengine search -" in said
