"""A dispatch table as files: an export for each problem, pinned, and refused where any file is another."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile

import pytest
from click.testing import CliRunner

import evoengine
from evoengine.cli.main import evoengine as commands
from evoengine.errors import NothingFound, UsageError
from evoengine.publish.folder import TABLE, read_table
from evoengine.tuning.exporting import export_table

PROBLEMS = ("rms_norm:rows9,hidden64,fp16", "rms_norm:rows40,hidden64,fp16")


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    place = tmp_path_factory.mktemp("table") / "t.db"
    for problem in PROBLEMS:
        evoengine.tune(problem, gpu="h100", trials=1, db=place, device="emulator")
    return place


@pytest.fixture
def table(searched, tmp_path):
    export_table(tmp_path / "out", PROBLEMS, "h100", db=searched)
    return tmp_path / "out"


def test_each_problem_has_an_export_that_the_table_pins(table):
    stated = json.loads((table / TABLE).read_text())
    assert [entry["problem"] for entry in stated["entries"]] == list(PROBLEMS)
    assert (stated["gpu"], stated["worst_regret"], stated["mean_regret"]) == ("h100", 0.0, 0.0)
    folders = read_table(table)
    assert [json.loads((folder / "kernel.json").read_text())["provenance"]["gpu"] for folder in folders] == ["h100"] * 2
    assert len(set(folders)) == 2 and all((folder / "record.json").is_file() for folder in folders)


def test_a_table_is_written_whole_or_not_at_all(searched, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        export_table(tmp_path / "full", PROBLEMS, "h100", db=searched)
    with pytest.raises(NothingFound):
        export_table(tmp_path / "out", (*PROBLEMS, "rms_norm:rows1,hidden8,fp16"), "h100", db=searched)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def wheel(searched, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    _, (path,) = export_table(folder / "out", PROBLEMS, "h100", form="wheel", db=searched)
    zipfile.ZipFile(path).extractall(folder / "site")
    return path, folder / "site"


def run(folder, script):
    """Run a script in a process that has Python alone and the folder."""
    text = f"import sys; sys.path.insert(0, {str(folder)!r}); {script}"
    return subprocess.run([sys.executable, "-I", "-S", "-B", "-c", text], capture_output=True, text=True)


def test_a_wheel_holds_the_kernels_of_all_problems(wheel):
    path, site = wheel
    assert path.name == "rms_norm_table_h100-1.0-py3-none-any.whl"
    done = run(site, "import rms_norm_table_h100 as m; print([*m.KERNELS], {f.__name__ for f in m.KERNELS.values()})")
    assert done.stdout == f"{list(PROBLEMS)} {{'rms_norm'}}\n", done.stderr
    assert len(read_table(site / "rms_norm_table_h100")) == 2
    read_me = (site / "rms_norm_table_h100" / "README.md").read_text()
    assert all(problem in read_me for problem in PROBLEMS)


def test_a_changed_file_of_any_kernel_is_refused_at_the_import(wheel, tmp_path):
    shutil.copytree(wheel[1], tmp_path / "site")
    (_, last) = read_table(tmp_path / "site" / "rms_norm_table_h100")
    change(last / "kernel.cubin", b"ELF", b"ELG")
    done = run(tmp_path / "site", "import rms_norm_table_h100")
    assert "kernel.cubin is not the file that was packaged" in done.stderr


def test_a_repository_of_kernels_holds_all_problems_too(searched, tmp_path):
    export_table(tmp_path / "out", PROBLEMS, "h100", form="hf-kernel", name="norms", db=searched)
    build = tmp_path / "out" / "build" / "torch-cuda"
    done = run(build.parent, "import importlib; print(len(importlib.import_module('torch-cuda').KERNELS))")
    assert done.stdout == "2\n", done.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--package", "out"], "give either --export, or --package and --as"),
        (["--as", "wheel"], "give either --export, or --package and --as"),
        (["--export", "a", "--name", "x"], "give either --export, or --package and --as"),
        (["--package", "out", "--as", "wheel", "--export", "a"], "give either --export"),
        (["--package", "out", "--as", "cpp"], "--as cpp holds one kernel; for several problems use --as wheel or"),
        (["--package", "out", "--as", "wheel", "--name", "../x"], "is not a valid package name"),
    ],
)
def test_options_for_a_package_that_do_not_fit_are_named_and_nothing_is_written(searched, tmp_path, options, sentence):
    given = ["best", "--db", str(searched), *(word for p in PROBLEMS for word in ("--problem", p))]
    where = [str(tmp_path / word) if word in ("out", "a") else word for word in options]
    done = CliRunner().invoke(commands, [*given, *where])
    assert isinstance(done.exception, UsageError) and sentence in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def change(path, old, new):
    text = path.read_bytes()
    assert old in text
    path.write_bytes(text.replace(old, new, 1))


CHANGES = {
    "a binary": (lambda t: change(read_table(t)[0] / "kernel.cubin", b"ELF", b"ELG"), "kernel.cubin is not the file"),
    "a loader": (lambda t: next(read_table(t)[0].glob("rms*.py")).write_text("x = 1\n"), "is not the file that"),
    "the checksums": (
        lambda t: change(read_table(t)[1] / "SHA256SUMS", b"a", b"b"),
        "is not the one that table.json pins",
    ),
    "a missing export": (lambda t: (read_table(t)[1] / "kernel.json").unlink(), "cannot be read"),
    "a folder above": (lambda t: change(t / TABLE, b'"folder": "', b'"folder": "../'), "directly beside"),
    "another version": (
        lambda t: change(t / TABLE, b'"evoengine_table": 1', b'"evoengine_table": 2'),
        "not a table of",
    ),
    "no JSON": (lambda t: (t / TABLE).write_text("{"), "cannot be read"),
    "no entries": (lambda t: (t / TABLE).write_text('{"evoengine_table": 1}'), "not a table of"),
    "an entry of another shape": (
        lambda t: (t / TABLE).write_text('{"evoengine_table": 1, "entries": [7]}'),
        "an entry",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_named(table, name):
    make, sentence = CHANGES[name]
    make(table)
    with pytest.raises(UsageError, match=sentence):
        read_table(table)
