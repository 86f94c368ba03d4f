"""A package of an exported kernel installs by its own tools, and checks itself as it is imported."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine as commands
from evoengine.errors import UsageError
from evoengine.publish.export import export_files
from evoengine.publish.folder import write_new
from evoengine.publish.packages import FORMS, package_files
from evoengine.records import Binary, Candidate, Launch, Outcome, Source
from tests.support.exhaustive import more
from tests.support.kernel_gate import attention_target

TARGET = attention_target("b2,h4,s100,d64,fp16,kv2")
NAME = "attention-b2-h4-s100-d64-fp16-kv2-h100"
MODULE = NAME.replace("-", "_")


@pytest.fixture(scope="module")
def exported() -> dict[str, bytes]:
    source = Source("// text", "attention", Launch((2, 4, 2), 128, 1024))
    binary = Binary(b"\x7fELF", "sm_90a", "-arch=sm_90a", "nvrtc 13.5", 64, 0, 0, 16, (), {"HMMA": 8}, 300.0)
    config = {"family": "wmma", "tile_m": 64}
    found = Candidate(3, 1, str(TARGET.problem), "h100", config, Outcome.ESTIMATED, source=source, binary=binary)
    return export_files(found, TARGET)


@pytest.fixture
def wheel(exported, tmp_path) -> Path:
    (path,) = write_new(tmp_path / "new" / "wheel", package_files("wheel", exported))
    return path


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that has nothing but Python and the folder."""
    text = f"import sys; sys.path.insert(0, {str(folder)!r}); {script}"
    return subprocess.run([sys.executable, "-I", "-S", "-c", text], capture_output=True, text=True)


def installed(wheel: Path, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, str(wheel)], check=True)
    return folder


def test_a_wheel_installs_and_brings_the_kernel_with_its_record(wheel, tmp_path):
    assert wheel.name == f"{MODULE}-1.0-py3-none-any.whl"
    site = installed(wheel, tmp_path / "site")
    done = run(site, f"import {MODULE} as m; print(m.attention.__name__, m.KERNEL['provenance']['gpu'], m.__all__)")
    assert done.stdout == "attention h100 ['KERNEL', 'attention']\n", done.stderr
    metadata = (site / f"{MODULE}-1.0.dist-info" / "METADATA").read_text()
    assert "License-Expression: Apache-2.0" in metadata and "A CUDA kernel for" in metadata
    licence = site / f"{MODULE}-1.0.dist-info" / "licenses" / "LICENSE"
    assert "License-File: LICENSE" in metadata and "Apache License" in licence.read_text()


def test_a_wheel_lists_its_files_with_their_sums_and_is_the_same_when_made_again(wheel, exported):
    with zipfile.ZipFile(wheel) as packed:
        contents = {name: packed.read(name) for name in packed.namelist()}
    listed = {row[0]: row[1:] for row in csv.reader(io.StringIO(contents[f"{MODULE}-1.0.dist-info/RECORD"].decode()))}
    assert listed.keys() == contents.keys()
    for name, (digest, size) in listed.items():
        if digest:
            assert digest == "sha256=" + sum_of(contents[name]) and int(size) == len(contents[name])
    assert package_files("wheel", exported)[wheel.name] == wheel.read_bytes()


def sum_of(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.mark.parametrize("name", ["kernel.cubin", *more(["kernel.json", "_cuda.py"])])
def test_a_file_that_was_changed_in_an_installed_package_is_refused_at_the_import(wheel, tmp_path, name):
    site = installed(wheel, tmp_path / "site")
    changed = site / MODULE / name
    changed.write_bytes(changed.read_bytes() + b" ")
    done = run(site, f"import {MODULE}")
    assert done.returncode == 1
    assert f"ImportError: {changed} is not the file that was packaged; install the package again" in done.stderr


def test_a_repository_of_kernels_has_one_build_with_what_its_library_reads(exported, tmp_path):
    write_new(tmp_path / "repository", package_files("hf-kernel", exported, "flash-h100"))
    build = tmp_path / "repository" / "build" / "torch-cuda"
    found = json.loads((build / "metadata.json").read_text())
    assert found["name"] == "flash-h100" and found["id"].startswith("_flash_h100_")
    assert found["backend"] == {"type": "cuda", "archs": ["9.0a"]} and found["license"] == "Apache-2.0"
    assert (tmp_path / "repository" / "README.md").read_text().startswith("---\nlibrary_name: kernels\n")
    assert "Apache License" in (tmp_path / "repository" / "LICENSE").read_text()
    done = run(build.parent, "import importlib; print(importlib.import_module('torch-cuda').attention.__name__)")
    assert done.stdout == "attention\n", done.stderr


def test_the_kernels_library_loads_the_repository(exported, tmp_path):
    kernels = pytest.importorskip("kernels", reason="the kernels library is not installed")
    write_new(tmp_path / "repository", package_files("hf-kernel", exported))
    module = kernels.get_local_kernel(tmp_path / "repository" / "build" / "torch-cuda")
    assert module.attention.__name__ == "attention"


def test_attention_is_no_definition_of_flashinfer_bench(exported):
    with pytest.raises(UsageError, match="attention has no FlashInfer-Trace definition"):
        package_files("flashinfer", exported)


@pytest.mark.parametrize(
    ("form", "name", "message"),
    [
        ("egg", None, "unknown kind of package 'egg'; kinds are wheel, hf-kernel, flashinfer, tvm-ffi, cpp"),
        ("wheel", "../evil", "'../evil' is not a valid package name: use up to 96 lower-case"),
        ("wheel", "", "'' is not a valid package name"),
        ("hf-kernel", "a" * 97, "is not a valid package name"),
    ],
)
def test_a_form_or_name_that_is_none_is_refused(exported, form, name, message):
    with pytest.raises(UsageError, match=message.replace("'", ".")):
        package_files(form, exported, name)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "flashinfer"])  # of other kernels
def test_a_folder_that_is_not_empty_is_left_as_it_is(exported, tmp_path, form):
    (tmp_path / "own.txt").write_text("mine")
    with pytest.raises(UsageError, match="it is not empty; --package takes a folder that is new or empty"):
        write_new(tmp_path, package_files(form, exported))
    assert [path.name for path in tmp_path.iterdir()] == ["own.txt"]


@pytest.mark.parametrize(
    "options", [["--package", "out"], ["--as", "wheel"], ["--package", "out", "--as", "wheel", "--top", "3"]]
)
def test_options_that_do_not_go_together_are_named(options):
    done = CliRunner().invoke(commands, ["best", *options])
    assert isinstance(done.exception, UsageError)
    assert "--package and --as take only --name, --problem" in str(done.exception)
