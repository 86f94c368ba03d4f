"""Bad input gets one clear sentence and exit code 2 (3 for the machine), no traceback, and nothing is written."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from pathlib import Path

import pytest

from evoengine.paths import asset
from tests.cli.conftest import TRIALS
from tests.support.exhaustive import more

SPACE = (asset("search_spaces") / "attention.toml").read_text()


@pytest.fixture
def refused(evoengine, tmp_path):
    """Calls evoengine in an empty folder and checks what every refusal has in common."""
    folder = tmp_path / "cwd"
    folder.mkdir()

    def call(*arguments: object, code: int = 2, env: dict[str, str] | None = None) -> str:
        before = snapshot(tmp_path)
        done = evoengine(*arguments, cwd=folder, env=env)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        beside = re.compile(
            r"Usage:|Try |evoengine 0\.|\d+:\d\d · "
        )  # the last of a machine so busy that it takes 10 s
        said = [line for line in done.stderr.splitlines() if line and not beside.match(line)]
        assert len(said) == 1, done.stderr
        assert snapshot(tmp_path) == before, "something was written"
        return said[0]

    return call


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def test_an_unknown_gpu_names_the_known_ones_and_the_nearest(refused, tmp_path):
    said = refused("search", "--gpu", "h1000", "--db", tmp_path / "x.db")
    assert "h100, h200" in said and "did you mean h100" in said


@pytest.mark.parametrize(
    ("problem", "names"),
    [
        ("b1,h1,s0,d64,fp16", "seq 0"),
        ("b1,h1,s8,d77,fp16", "32, 64, 96, 128, 192, 256"),
        ("b1,h1,s8,d64,fp32", "fp16 or bf16"),
        ("b1,h6,s8,d64,fp16,kv4", "multiple"),
    ],
)
def test_an_impossible_problem_says_what_would_be_possible(refused, tmp_path, problem, names):
    assert names in refused("search", "--problem", problem, "--db", tmp_path / "x.db")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("search", ("--family", "mma", "--family", "wgmma")), ("verify", ("--config", '{"family": "wgmma"}'))],
)
def test_a_family_that_the_gpu_cannot_run_is_refused_when_asked_for_by_name(refused, command, arguments):
    said = refused(command, "--gpu", "l4", *arguments)
    assert "wgmma is an instruction of Hopper (sm_90a) alone" in said


def test_an_unknown_family_names_the_known_ones(refused, tmp_path):
    said = refused("search", "--family", "mna", "--db", tmp_path / "x.db")
    assert "scalar, wmma, mma, wgmma" in said and "'mna'" in said


@pytest.mark.parametrize(
    "option",
    [("--trials", "0"), ("--minutes", "0"), ("--minutes", "nan"), ("--jobs", "-1"), ("--sampler", "magic")],
)
def test_an_option_out_of_range_is_refused(refused, tmp_path, option):
    assert option[0] in refused("search", *option, "--db", tmp_path / "x.db")


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("[knobs]", "[knobs", "line"),
        ("stages = [1, 2, 3, 4]", "stages = []", "stages"),
        ('expr = "stages <= 2"', 'expr = "stagse <= 2"', "stages"),
        ('kernel = "attention"', 'kernel = "conv"', "attention"),
        *more(
            [
                ('expr = "stages <= 2"', "expr = \"open('x') is None\"", "open"),
                ('expr = "stages <= 2"', 'expr = "stages > 9"', "leave"),
                ('why = "rows start', 'wyh = "rows start', "wyh"),
            ]
        ),
    ],
)
def test_a_faulty_space_file_is_named_with_its_fault(refused, tmp_path, old, new, names):
    file = tmp_path / "own.toml"
    text = SPACE.replace(old, new, 1)
    if "stages > 9" in new:
        text = SPACE + '\n[[constraint]]\nexpr = "stages > 9"\nwhy = "a contradiction"\n'
    assert text != SPACE
    file.write_text(text)
    said = refused("search", "--space", file, "--db", tmp_path / "x.db")
    assert names in said


def test_a_missing_space_file_is_named(refused, tmp_path):
    assert "gone.toml" in refused("search", "--space", tmp_path / "gone.toml", "--db", tmp_path / "x.db")


def test_a_missing_template_is_named(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    said = refused("search", "--templates", tmp_path / "empty", "--db", tmp_path / "x.db")
    assert "attention/" in said and ".cu.j2" in said


def test_a_missing_templates_folder_is_named(refused, tmp_path):
    assert "gone" in refused("search", "--templates", tmp_path / "gone", "--db", tmp_path / "x.db")


@pytest.mark.parametrize(("text", "names"), [("{% if %}", "wmma.cu.j2:1"), *more([("\n{{ tile_k }}", "wmma.cu.j2:2")])])
def test_a_template_error_names_file_and_line(refused, tmp_path, text, names):
    folder = tmp_path / "own" / "attention"
    folder.mkdir(parents=True)
    (folder / "wmma.cu.j2").write_text(text)
    (folder / "scalar.cu.j2").write_text("ok")
    assert names in refused("search", "--templates", tmp_path / "own", "--db", tmp_path / "x.db")


def test_a_file_that_is_no_database_is_left_alone(refused, tmp_path):
    (tmp_path / "x.db").write_text("not a database at all, but long enough to look like one" * 50)
    assert "x.db" in refused("search", "--db", tmp_path / "x.db")


def test_somebody_elses_database_is_left_alone(refused, tmp_path):
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("CREATE TABLE invoices (id INTEGER)")
    connection.close()
    assert "x.db" in refused("search", "--db", tmp_path / "x.db")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere, so no folder is read-only to it")
def test_a_read_only_folder_is_named(refused, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o500)
    try:
        assert "locked" in refused("search", "--db", folder / "x.db")
    finally:
        folder.chmod(0o700)


def test_no_cpp_compiler_is_exit_3_with_the_remedy(refused, tmp_path):
    said = refused("search", "--db", tmp_path / "x.db", code=3, env={"PATH": str(tmp_path), "CXX": ""})
    assert "C++ compiler" in said and "apt install g++" in said


def test_no_nvrtc_is_exit_3_with_the_remedy(refused, tmp_path):
    broken = tmp_path / "broken" / "cupy"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no NVRTC here')")
    path = os.pathsep.join(filter(None, [str(broken.parent), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    said = refused("search", "--db", tmp_path / "x.db", code=3, env=env)
    assert "NVRTC" in said and "pip install" in said


def test_cuda_without_a_gpu_is_exit_3(refused, tmp_path):
    from evoengine.devices.driver import find_driver

    if not isinstance(find_driver(), str):
        pytest.skip("this machine has a GPU")
    assert "--device emulator" in refused("search", "--device", "cuda", "--db", tmp_path / "x.db", code=3)


@pytest.mark.parametrize(
    ("config", "names"),
    [("{", "JSON"), ('{"family": "wmma"}', "missing"), *more([("[1]", "object"), ('{"family": "magic"}', "family")])],
)
def test_verify_names_what_is_wrong_with_a_configuration(refused, config, names):
    assert names in refused("verify", "--config", config)


def test_a_trial_that_is_not_there_names_those_that_are(evoengine, searched):
    done = evoengine("show", 99, "--db", searched[0] / "evo.db")
    assert done.returncode == 2
    assert f"1 to {TRIALS}" in done.stderr


def test_an_export_that_cannot_be_written_is_named(evoengine, searched, tmp_path):
    (tmp_path / "file").write_text("")
    done = evoengine("best", "--export", tmp_path / "file", "--db", searched[0] / "evo.db")
    assert done.returncode == 2
    assert "cannot write" in done.stderr and "Traceback" not in done.stderr


def test_errors_are_the_same_with_json(refused, tmp_path):
    said = refused("search", "--gpu", "nope", "--json", "--db", tmp_path / "x.db")
    with pytest.raises(json.JSONDecodeError):
        json.loads(said)


@pytest.mark.parametrize("other", ["--lineage", "--json"])
def test_a_source_is_shown_alone(refused, other):
    assert f"leave {other} out" in refused("show", 1, "--source", other)
