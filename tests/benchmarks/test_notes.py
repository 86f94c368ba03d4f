"""benchmarks/NOTES.md lists every page of notes/, and the commands that reproduce a figure exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documents import NOTES, ROOT, links

INDEX, *PAGES = NOTES
_COMMAND = re.compile(r"python (?:-m benchmarks\.(\w+)|benchmarks/(\w+)\.py)((?:\\\n|[^`\n])*)")


def wrong_commands(page: Path) -> list[str]:
    """Return the benchmarks and options that a page's commands name and that do not exist."""
    found = []
    for module, script, arguments in _COMMAND.findall(page.read_text()):
        path = ROOT / "benchmarks" / f"{module or script}.py"
        text = path.read_text() if path.is_file() else ""
        for imported in re.findall(r"^from benchmarks\.(\w+) import", text, re.MULTILINE):
            text += (ROOT / "benchmarks" / f"{imported}.py").read_text()
        options = re.findall(r"--[a-z0-9-]+", arguments) if text else [""]
        found += [f"{path.name} {option}".strip() for option in options if f'"{option}"' not in text]
    return found


def test_the_index_lists_every_page():
    assert {*PAGES} - {target.resolve() for target in links(INDEX)} == set()


@pytest.mark.parametrize("page", NOTES, ids=lambda page: page.name)
def test_commands_that_reproduce_a_figure_exist(page):
    assert wrong_commands(page) == []


def test_a_command_that_does_not_exist_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "    python benchmarks/overlap.py --faults 0.3 --jobs \\\n        2 --gpus 8\n\n"
        "`python -m benchmarks.tortured --kills 3`"
    )
    assert wrong_commands(page) == ["overlap.py --gpus", "tortured.py"]
