"""Every text that is read or written is UTF-8, whatever the locale: no call leaves the encoding to it."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "evoengine"
PLACES = {"read_text": 0, "write_text": 1, "open": 1}
"""how many arguments stand before the encoding, or the mode"""


def without_encoding(tree: ast.AST) -> list[int]:
    """The lines of calls that read or write text and name no encoding."""
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_text(node)]


def _is_text(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given:
        return False
    if any(isinstance(given.get(key), ast.Constant) and given[key].value for key in ("text", "universal_newlines")):
        return True
    if name in ("read_text", "write_text") and isinstance(call.func, ast.Attribute):
        return len(call.args) <= PLACES[name]
    if name != "open" or (
        isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") in ("os", "gzip")
    ):
        return False
    modes = [given.get("mode"), *call.args]
    return not any(isinstance(m, ast.Constant) and isinstance(m.value, str) and "b" in m.value for m in modes)


def test_every_text_of_the_package_names_its_encoding():
    found = {str(path): without_encoding(ast.parse(path.read_text("utf-8"))) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_calls_that_leave_it_to_the_locale_are_seen():
    calls = "path.read_text()\npath.write_text(x)\nopen(p)\npath.open('w')\nsubprocess.run(c, text=True)"
    assert without_encoding(ast.parse(calls)) == [1, 2, 3, 4, 5]
    good = "path.read_text('utf-8')\npath.write_text(x, 'utf-8')\nopen(p, 'rb')\nrun(c, encoding='utf-8', text=True)"
    assert without_encoding(ast.parse(good)) == []
