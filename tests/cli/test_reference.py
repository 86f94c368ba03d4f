"""docs/commands.md is what the commands say of themselves, and all of them say something."""

from __future__ import annotations

from pathlib import Path

import click

from tests.support.command_reference import reference, undocumented

COMMANDS = Path(__file__).parents[2] / "docs" / "commands.md"


@click.group()
def group():
    pass


@group.command()
@click.argument("file")
@click.option("--level", type=click.IntRange(1, 9), default=3, show_default=True, help="How much.")
@click.option("--kind", type=click.Choice(["a", "b"]), help="Which.")
@click.option("--quiet", is_flag=True)
def pack(file, level, kind, quiet):
    """Pack a file."""


@group.command()
def silent():
    pass


def test_the_page_is_up_to_date():
    assert COMMANDS.read_text() == reference(), "python -m tests.support.command_reference > docs/commands.md"


def test_every_command_and_option_says_what_it_does():
    assert undocumented() == []


def test_what_says_nothing_is_found():
    assert undocumented(group) == ["pack --quiet", "silent"]


def test_a_command_has_its_usage_its_help_and_its_options_with_values_and_defaults():
    page = reference(group)
    assert "## pack\n\n    evoengine pack FILE [OPTIONS]\n\nPack a file.\n" in page
    assert "| `--level N` | How much.  [default: 3] |" in page
    assert "| `--kind KIND` | Which. One of a, b. |" in page
    assert "| `--quiet` |" in page
