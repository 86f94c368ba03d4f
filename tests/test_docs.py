"""README.md and docs/: every shell block runs, every command and link is there, and what the code knows is named."""

from __future__ import annotations

import ast
import html
import inspect
import re
import sqlite3
from pathlib import Path

import click
import pytest

import evoengine as face
from evoengine.cli.main import evoengine
from evoengine.cuda_emulator.inline_ptx import INCLUDE
from evoengine.cuda_emulator.preprocessing import PROVIDED, STANDARD
from evoengine.formats.importers import KINDS
from evoengine.gpu import find_gpu
from evoengine.ledger import tables
from evoengine.paths import asset
from evoengine.records import Candidate, Outcome
from evoengine.space.expression import CALLS
from evoengine.space.reader import read_definition
from evoengine.space.space import load_space
from evoengine.views.trials import trial_json
from evoengine.workloads import folder_reader, workloads
from tests.support.documented_command import adapted, called
from tests.support.documents import PAGES, ROOT, blocks, links, missing_anchors, named_commands, run_page, shell_blocks
from tests.support.exhaustive import more
from tests.support.folders import load
from tests.support.made_once import made_once

README, DOCS = ROOT / "README.md", ROOT / "docs"
OF_README = frozenset(block.text for block in shell_blocks(README))
IN_SHORT = ("own-kernel.md",)
"""pages whose blocks take seconds; those of the others call more, of what other tests call too"""
WITH_BLOCKS = [page.name for page in PAGES if page != README and shell_blocks(page)]
KEPT = tables.Base.metadata.tables
"""the tables of a ledger"""

# ── what runs ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def after_readme(tmp_path_factory) -> tuple[Path, list[str]]:
    """A folder in which README.md's blocks ran, and which of them failed."""
    return made_once(tmp_path_factory, "readme", lambda folder: run_page(README, folder))


def test_every_shell_block_of_the_readme_runs(after_readme):
    folder, failed = after_readme
    assert failed == []
    assert (folder / "out" / "kernel.cubin").is_file()
    with sqlite3.connect(folder / "ledger.db") as ledger:
        ranked = "SELECT DISTINCT problem FROM candidates c JOIN measurements m ON m.candidate_id = c.id"
        assert ledger.execute(ranked).fetchall() == [("demo:rows=4096,cols=1024",)]


@pytest.mark.parametrize(
    "name", [name for name in WITH_BLOCKS if name in IN_SHORT] + more(n for n in WITH_BLOCKS if n not in IN_SHORT)
)
def test_every_shell_block_of_the_docs_runs_in_the_folder_that_the_readme_leaves(after_readme, name):
    page = next(page for page in PAGES if page.name == name)
    assert run_page(page, after_readme[0], skip=OF_README) == []


BROKEN = {
    "an unknown command": "evoengine serach",
    "an unknown option": "evoengine problems --yaml",
    "a command that fails before another": "false\necho done",
    "a command that fails into a pipe": "false | cat",
    "a file that is not there": "ls out/kernel.ptx",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_block_is_seen(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n```sh\n{text}\n```\n")
    (failed,) = run_page(page, tmp_path)
    assert failed.startswith("page.md:3 ended with ")


def test_a_block_is_left_out_for_a_stated_reason_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: needs a GPU -->\n```sh\nfalse\n```\n\n"
        "<!-- not run: -->\n```sh\nfalse\n```\n\n"
        "```text\nfalse\n```\n"
    )
    assert len(blocks(page)) == 3
    assert [block.place for block in shell_blocks(page)] == ["page.md:7"]


def test_a_documented_search_is_cut_short_and_keeps_its_ledger_beside_it():
    searched = adapted(["search", "--kernel", "./demo", "--trials", "12"])
    assert searched == ["search", "--kernel", "./demo", "--trials", "2", "--db", "ledger.db"]
    assert adapted(["best", "--db", "my.db"]) == ["best", "--db", "my.db"]
    assert adapted(["problems"]) == ["problems"]


def test_every_query_of_the_ledgers_page_runs_on_the_readmes_ledger(after_readme):
    queries = [block.text for block in blocks(DOCS / "ledger.md") if block.language == "sql"]
    with sqlite3.connect(after_readme[0] / "ledger.db") as ledger:
        answers = [ledger.execute(query).fetchall() for query in queries]
    assert len(answers) >= 4 and sum(map(bool, answers)) >= 4


def test_the_examples_of_a_folder_are_a_folder(tmp_path):
    problem, space = (
        next(block.text for block in blocks(DOCS / "own-kernel.md") if block.language == language)
        for language in ("json", "toml")
    )
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "problem.json").write_text(problem)
    (folder / "reference.py").write_text("def run(x, alpha):\n    return alpha * x[:, ::2]\n")
    (folder / "space.toml").write_text(space)
    assert load(folder)[1].valid > 0


class _Rows:
    def variables(self):
        return {"rows": 4096, "cols": 1024}


def test_the_example_of_a_space_is_one(tmp_path):
    (example,) = (block.text for block in blocks(DOCS / "search-spaces.md") if block.language == "toml")
    path = tmp_path / "space.toml"
    path.write_text(example)
    space = load_space(path, _Rows(), find_gpu("h100"))
    assert set(space.families) == {"plain", "staged"} and len(space.starts) == 2


# ── what pages name is there ────────────────────────────────────────────────────────────────────────────────────────


def unknown_words(words: list[str]) -> list[str]:
    """What of a documented command line the command line does not have: the command, or options."""
    name, *rest = words
    command = evoengine if name.startswith("-") else called(words)
    if command is None:
        return [name]
    if isinstance(command, click.Group) and command is not evoengine and rest and rest[0][0] not in "-[":
        return [rest[0]]
    options = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h", "--version"}
    return [word for word in rest if word.startswith("--") and word.partition("=")[0] not in options]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_names_exist_run_or_not(page):
    assert [(words, found) for words in named_commands(page) if (found := unknown_words(words))] == []


def test_a_command_that_does_not_exist_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "`evoengine serach --trials 3`\n\n    evoengine best --expert out\n\n"
        "`evoengine cluster statsu`, `evoengine cluster status --jsno`\n\n"
        "<!-- not run: takes long -->\n```sh\nevoengine new demo && evoengine search --kernal demo  # --nothing\n```\n"
    )
    assert [found for words in named_commands(page) for found in unknown_words(words)] == [
        "--kernal", "serach", "statsu", "--jsno", "--expert",
    ]  # fmt: skip


def wrong_calls(code: str) -> list[str]:
    """Calls of `evoengine.NAME(…)` that the package does not have, or not with these arguments."""
    found = []
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="evoengine"), attr=name), args=args, keywords=keywords):
                try:
                    signature = inspect.signature(getattr(face, name))
                    signature.bind(*args, **{keyword.arg: keyword.value for keyword in keywords})
                except (AttributeError, TypeError) as error:
                    found.append(f"{name}: {error}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_call_what_the_package_has(page):
    assert [wrong_calls(block.text) for block in blocks(page) if block.language == "python"] == [
        [] for block in blocks(page) if block.language == "python"
    ]


def test_a_wrong_call_is_seen():
    assert wrong_calls('import evoengine\nevoengine.tune("gemm:m1", trials=3)\nevoengine.export("out")') == []
    assert len(wrong_calls("evoengine.tuned()\nevoengine.export()\nevoengine.best(best_of=3)")) == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    assert [str(target) for target in links(page) if not target.exists()] == []
    assert missing_anchors(page) == []


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n[a](page.md#a-b-c), [b](https://pytorch.org#a), [c](none.md#part), [d](#part)")
    assert [target.name for target in links(page) if not target.exists()] == ["none.md"]
    assert missing_anchors(page) == ["#part"]


def test_the_readme_is_one_screen_and_a_half_and_links_to_every_page():
    assert len(README.read_text().splitlines()) <= 80
    linked = {target.resolve() for target in links(README)}
    assert {page for page in DOCS.glob("*.md")} - linked == set()


# ── what the code knows is named ────────────────────────────────────────────────────────────────────────────────────


def unnamed(page: str, names) -> list[str]:
    """The names that stand nowhere in a page as words."""
    text = (DOCS / page).read_text()
    return sorted(name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text))


def headers() -> set[str]:
    """What a kernel may include in the emulator; C headers once, by their C name."""
    own = {p.relative_to(INCLUDE).as_posix() for p in INCLUDE.rglob("*") if p.is_file() and "evo_emu" not in p.parts}
    c_names = {name for name in PROVIDED | own if not (name.startswith("c") and f"{name[1:]}.h" in PROVIDED | own)}
    return c_names | STANDARD


def space_words() -> set[str]:
    known = {*CALLS, "knobs", "let", "constraint", "launch", "cost", "start", *find_gpu("h100").variables()}
    return known.union(*(w.parse(w.example).variables() for w in workloads().values()))


def families() -> set[str]:
    found = set(workloads())
    for workload in workloads().values():
        problem = workload.parse(workload.example)
        path = asset("search_spaces") / f"{workload.name}.toml"
        definition = read_definition(path, {**problem.variables(), **find_gpu("h100").variables()})
        found.update(definition.knobs[0].values)
    return found


def parts() -> set[str]:
    """Return the packages of evoengine, and its modules beside them."""
    own = {path.stem for path in (ROOT / "evoengine").iterdir() if path.is_dir() or path.suffix == ".py"}
    return own - {"__init__", "__main__", "__pycache__"}


CANDIDATE = Candidate(1, 1, "", "", {})
NAMED = {
    "emulator.md": headers,
    "search-spaces.md": space_words,
    "problems.md": families,
    "own-kernel.md": lambda: {*folder_reader._KEYS, *folder_reader._DRAWS, *folder_reader.DTYPES, *KINDS},
    "ledger.md": lambda: {*KEPT, *trial_json(CANDIDATE), *Outcome},
    "architecture.md": lambda: {*parts(), *face.__all__},
    "the-gate.md": lambda: {"rtol", "atol"},
}


@pytest.mark.parametrize("page", NAMED)
def test_a_page_names_all_that_the_code_knows(page):
    assert unnamed(page, NAMED[page]()) == []


def test_a_name_that_a_page_does_not_have_is_seen():
    assert unnamed("ledger.md", {"runs", "vs_baseline", "vs_cudnn"}) == ["vs_cudnn"]


def test_columns_that_the_ledgers_page_names_exist():
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", (DOCS / "ledger.md").read_text(), re.MULTILINE)
    tables = {name: columns for name, columns in rows if name in KEPT}
    assert tables.keys() == KEPT.keys()
    for name, columns in tables.items():
        assert set(re.findall(r"`(\w+)`", columns)) <= set(KEPT[name].columns.keys()), name


def test_the_vocabulary_explains_some_thirty_terms_each_once():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (DOCS / "vocabulary.md").read_text(), re.MULTILINE)
    terms = [term for row, meaning in rows if row != "term" for term in row.split(", ")]
    assert len(terms) >= 30 and len(set(terms)) == len(terms)


def labels(drawing: str) -> set[str]:
    """Return the lines of text of a drawing, either Graphviz' text or the SVG that it makes of it."""
    if drawing.lstrip().startswith("<?xml"):
        found = re.findall(r"<text[^>]*>([^<]*)</text>", drawing)
    else:
        found = [line for label in re.findall(r'label="([^"]*)"', drawing) for line in label.split("\\n")]
    return {html.unescape(line).replace("\u00a0", " ").strip() for line in found}


def test_the_architectures_drawing_is_what_its_text_says():
    text, drawing = ((DOCS / f"architecture.{kind}").read_text() for kind in ("dot", "svg"))
    assert labels(text) == labels(drawing) and len(labels(text)) >= 12
    assert labels(text.replace("sampler", "oracle")) != labels(drawing)


def test_the_drawing_of_the_rooms_has_every_package():
    drawn = labels((DOCS / "rooms.svg").read_text())
    packages = {path.name for path in (ROOT / "evoengine").iterdir() if path.is_dir()} - {"__pycache__"}
    assert labels((DOCS / "rooms.dot").read_text()) <= drawn and packages <= drawn
    assert not {*packages, "oracle"} <= drawn
