"""Imports go down the floors of the architecture and never in a circle."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "evoengine"
FLOORS = (
    ("errors", "records", "objectives", "lineage", "problem", "gpu", "paths", "terms", "host_compiler", "cuda_files"),
    ("workloads", "space", "devices", "ledger", "sass"),
    ("stages", "publish", "formats"),
    ("search",),
    ("cli", "__main__"),
)


def part_of(module: str) -> str:
    """evoengine.ledger.store → ledger; evoengine → '' (the package's own version)."""
    return ".".join(module.split(".")[1:2])


def floor_of(part: str) -> int:
    return next((n for n, parts in enumerate(FLOORS) if part in parts), 0)


@cache
def modules() -> dict[str, ast.Module]:
    files = PACKAGE.rglob("*.py")
    return {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): ast.parse(p.read_text()) for p in files}


def imports(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.startswith("evoengine.")}


def climbs(name: str, tree: ast.Module) -> list[str]:
    own = floor_of(part_of(name))
    return [f"{name} imports {other}" for other in sorted(imports(tree)) if floor_of(part_of(other)) > own]


def test_every_part_has_a_floor():
    parts = {part_of(name) for name in modules()} - {"", "__init__"}
    assert parts == {part for floor in FLOORS for part in floor}


@pytest.mark.parametrize("name", sorted(modules()))
def test_no_import_goes_up(name):
    assert climbs(name, modules()[name]) == []


def test_an_import_that_goes_up_is_seen():
    assert climbs("evoengine.gpu", ast.parse("from evoengine.ledger.store import Ledger")) != []


def test_no_two_modules_import_each_other_in_a_circle():
    graph = {name: imports(tree) & set(modules()) for name, tree in modules().items()}
    assert circle(graph) is None


def test_a_circle_is_seen():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None


def circle(graph: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        for other in sorted(graph[name]):
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return None

    return next((found for name in sorted(graph) if (found := visit(name, []))), None)


def test_modules_stay_short_enough_to_read():
    long = {str(p): n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert long == {}
