"""Imports go down the floors of the architecture and never in a circle, and only attention's own folders know of it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "evoengine"
FLOORS = (
    (
        "errors",
        "records",
        "objectives",
        "lineage",
        "gpu",
        "gpu_file",
        "paths",
        "passwords",
        "terms",
        "text",
        "times",
        "untrusted",
        "host_compiler",
        "cuda_files",
        "hints",
        "machine",
        "keeper",
        "kept_process",
    ),
    ("space", "devices", "ledger", "sass", "workloads"),
    ("stages", "publish", "formats"),
    ("search",),
    ("accuracy",),
    ("tuning",),
    ("cli", "service", "__main__", "__init__"),
)


def part_of(module: str) -> str:
    """evoengine.ledger.store → ledger; evoengine → '' (the package's own version)."""
    return ".".join(module.split(".")[1:2])


def floor_of(part: str) -> int:
    return next((n for n, parts in enumerate(FLOORS) if part in parts), 0)


def files() -> dict[str, Path]:
    return {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}


@cache
def modules() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in files().items()}


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
    parts = {part_of(name) for name in modules()} - {""}
    assert parts == {part for floor in FLOORS for part in floor}


@pytest.mark.parametrize("name", sorted(files()))
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
    long = {str(p): n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 600}
    assert long == {}


# ── the engine knows workloads, not attention ───────────────────────────────────────────────────────────────────────

NAMES = {"attention", "sdpa", "qkv", "kv", "head", "heads"}
LETTERS = re.compile(r"(?<![\w<='])[QV](?![\w'])")
"""Q and V as words, no format of `struct` and no character; K is left out, as a matrix product has one too"""
IN_ANOTHER_SENSE = {
    "sdpa": {"evoengine/records.py", "evoengine/publish/export.py", "evoengine/publish/t4.py"},
    "head": {
        "evoengine/cli/main.py", "evoengine/ledger/database.py", "evoengine/ledger/optuna_schema.py",
        "evoengine/ledger/schema.py", "evoengine/sass/main_loop.py",
        "evoengine/sass/elf.py", "evoengine/sass/cubin.py", "evoengine/sass/core/decode.cpp",
        "evoengine/devices/emulator/declarations.py", "evoengine/devices/emulator/translate.py",
        "evoengine/publish/report/page.py", "evoengine/service/app.py", "evoengine/service/connections.py",
        *(f"evoengine/tuning/cluster_files/{name}.j2" for name in ("search.sh", "pods.yaml", "access.yaml")),
    },
    "V": {"evoengine/devices/emulator/runtime/fibers.cpp"},
}  # fmt: skip
"""vs_sdpa is an old name in files and JSON that people read; a head may be a file's, a line's, a listing's, a loop's,
a page's, a schema's, a cluster's or HTTP's; System V is an ABI"""


def words(text: str) -> set[str]:
    """What it says of attention, as whole words or in names such as head_dim. FlashAttention is a source that is
    cited."""
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text.replace("FlashAttention", ""))
    return {part.lower() for part in parts if part.lower() in NAMES} | set(LETTERS.findall(text))


def own_to_attention(path: Path) -> bool:
    return "attention" in path.parts or path == ROOT / "search_spaces" / "attention.toml"


@cache
def engine() -> dict[str, str]:
    """The text of every module, template and space but attention's own, by its path in the repository."""
    files = [path for folder in ("evoengine", "templates", "search_spaces") for path in (ROOT / folder).rglob("*")]
    own = [path for path in files if path.is_file() and path.suffix != ".pyc" and not own_to_attention(path)]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in own}


def leftovers(texts: dict[str, str]) -> list[str]:
    return [
        f"{name}:{number}: {word}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        for word in sorted(words(line))
        if name not in IN_ANOTHER_SENSE.get(word, ())
    ]


def test_only_attentions_own_folders_say_anything_of_attention():
    assert {
        "evoengine/ledger/models.py",
        "evoengine/stages/verify.py",
        "templates/include/evo/mma.cuh.j2",
    } <= engine().keys()
    assert leftovers(engine()) == []


@pytest.mark.parametrize(
    "line",
    [
        "# the scores of one head", "# rows of Q", "K and V are read once", 'kernel = "attention"', "# as SDPA has it",
        "head_dim = 64", "def rows_of(kv_heads: int)", 'if problem.startswith("attention:"):', "class AttentionCase:",
        "vs_sdpa: Mapped[float]", "seqKv", "extern void attention(T* q)",
    ],
)  # fmt: skip
def test_a_word_of_attention_is_seen(line):
    assert leftovers({"evoengine/stages/verify.py": f"import math\n{line}"})


@pytest.mark.parametrize(
    "line",
    [
        "what lies ahead of the header", "overhead", 'struct.pack("<Q", x)', '_LAUNCH = struct.Struct("=Qq3I4xQ")',
        "x == 'Q'",
        "q, k, v = values", "C is A times B, over all of K", "FlashAttention's rule", "BF16_V2", "V100",
        "with attentive care",
    ],
)  # fmt: skip
def test_other_words_are_not(line):
    assert leftovers({"evoengine/stages/verify.py": line}) == []


def test_a_word_in_another_sense_is_let_through_in_its_own_file_alone():
    assert leftovers({"evoengine/ledger/database.py": "head = file.read(20)"}) == []
    assert leftovers({"evoengine/ledger/database.py": "head_dim and heads"}) == [
        "evoengine/ledger/database.py:1: heads"
    ]
    assert leftovers({"evoengine/ledger/store.py": "head = file.read(20)"}) == ["evoengine/ledger/store.py:1: head"]
