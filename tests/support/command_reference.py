"""Print docs/commands.md: the reference of all commands, made from the commands themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from evoengine.cli.main import evoengine

_INTRODUCTION = """# Commands

Made by `python -m tests.support.command_reference` from the commands themselves. A test fails when the two differ.

Commands write data to stdout and progress to stderr. An option that takes one value may be given once. `--json` prints
the same fields in all commands; [ledger.md](ledger.md) lists them.

To enable shell completion of commands, options, and the values of `--gpu`, `--problem` and `--kernel`, add
`eval "$(_EVOENGINE_COMPLETE=bash_source evoengine)"` to `~/.bashrc`, the same with `zsh_source` to `~/.zshrc`, or
`_EVOENGINE_COMPLETE=fish_source evoengine | source` to `~/.config/fish/config.fish`.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | nothing valid was found; `verify`: the configuration is not correct |
| 2 | invalid usage or configuration |
| 3 | something on this machine is missing or failed, or the output could not be written |
| 130 | interrupted |
"""
_HELP_TYPES = {"path": "PATH", "filename": "FILE", "integer": "N", "integer range": "N", "float range": "N"}


def reference(group: click.Group = evoengine) -> str:
    """Return the reference of all commands as Markdown."""
    return "\n".join([_INTRODUCTION, *(_section(name, command) for name, command in commands(group))])


def commands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {own}", under) for own, under in sorted(command.commands.items()))


def undocumented(group: click.Group = evoengine) -> list[str]:
    """Return every command and option without help, as `COMMAND` or `COMMAND --OPTION`."""
    found = []
    for name, command in commands(group):
        if not (command.help or "").strip():
            found.append(name)
        found += [f"{name} {option.opts[0]}" for option in _options(command) if not (option.help or "").strip()]
    return found


def _section(name: str, command: click.Command) -> str:
    arguments = [p.human_readable_name for p in command.params if isinstance(p, click.Argument)]
    usage = " ".join(["evoengine", name, *arguments, *(["[OPTIONS]"] if _options(command) else [])])
    lines = [f"## {name}", "", f"    {usage}", "", inspect.cleandoc(command.help or ""), ""]
    if _options(command):
        lines += ["| option | what it does |", "|---|---|", *map(_row, _options(command)), ""]
    return "\n".join(lines)


def _options(command: click.Command) -> list[click.Option]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def _row(option: click.Option) -> str:
    value = "" if option.is_flag else f" {_value(option)}"
    said = option.help or ""
    if isinstance(option.type, click.Choice):
        said += f" One of {', '.join(map(str, option.type.choices))}."
    if option.show_default and option.default is not None:
        said += f"  [default: {option.default}]"
    if option.required:
        said += "  [required]"
    escaped = said.replace("|", r"\|")
    return f"| `{'`, `'.join(option.opts)}{value}` | {escaped} |"


def _value(option: click.Option) -> str:
    """Return the placeholder for the option's value."""
    if isinstance(option.type, click.Choice):
        return option.opts[0].lstrip("-").upper()
    return option.metavar or _HELP_TYPES.get(option.type.name, option.type.name.upper())


if __name__ == "__main__":
    print(reference(), end="")
