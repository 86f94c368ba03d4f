"""evoengine new: a folder whose kernels pass the gate; bad names and sources are refused.

tests/test_docs.py searches the folder and exports the best kernel, as README.md says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.errors import UsageError
from evoengine.formats.folder import write_folder
from evoengine.formats.importers import starter
from tests.support.folders import gate, load


def run(*arguments: str):
    return CliRunner().invoke(evoengine, list(arguments))


def test_the_folder_it_writes_has_a_space_worth_searching_and_correct_kernels(tmp_path):
    folder = tmp_path / "demo"
    assert run("new", str(folder)).exit_code == 0
    _, space = load(folder)
    assert 30 <= space.valid <= 1000 and len(space.starts) == 1
    configs = list(space.enumerate())
    for config in (space.starts[0], configs[0], configs[-1], configs[len(configs) // 2]):
        verdict = gate(folder, config)
        assert verdict.correct, verdict.reason


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("col < cols", "col < cols - VECTOR"),
        ("min(first_row", "max(first_row"),
        ("+ add.at[i]", ""),
        ("out + begin", "out"),
    ],
)
def test_faults_in_it_are_seen(tmp_path, right, wrong):
    made = starter("demo")
    assert right in made.kernel
    folder = tmp_path / "demo"
    write_folder(made, folder)
    (folder / "demo.cu.j2").write_text(made.kernel.replace(right, wrong))
    _, space = load(folder)
    assert not getattr(gate(folder, space.starts[0]), "correct", False)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["1demo"], "cannot name a kernel"),
        (["a-b"], "cannot name a kernel"),
        (
            ["demo", "--from", "nothing"],
            "it must be KIND:FILE, where KIND is one of trace, t1, kernel-tuner, kernelbench",
        ),
        (["demo", "--from", "yaml:x"], "it must be KIND:FILE"),
        (["demo", "--from", "t1:"], "it must be KIND:FILE"),
        (["demo", "--from", "t1:none.json"], "cannot be read: No such file"),
        (["demo", "--from", "trace:none.json"], "cannot be read: No such file"),
        (["demo", "--from", "kernel-tuner:none.py"], "there is no script none.py"),
        (["demo", "--entry", "x"], "name one with --from"),
        (["demo", "--from", "t1:x.json", "--entry", "x"], "--entry chooses among the kernels of a kernel-tuner script"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_is_written(tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        evoengine.main(["new", *arguments], standalone_mode=False)
    assert complaint in str(error.value)
    assert list(Path.cwd().iterdir()) == []


def test_a_folder_that_is_there_already_stays_as_it_is(tmp_path):
    (tmp_path / "demo").mkdir()
    with pytest.raises(UsageError, match="is there already"):
        evoengine.main(["new", str(tmp_path / "demo")], standalone_mode=False)
    assert list((tmp_path / "demo").iterdir()) == []
