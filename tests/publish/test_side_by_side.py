"""Exports in one process: however they are imported, each runs its own kernel, on a driver that notes which."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sys

import pytest

from evoengine.publish.export import export, module_name
from evoengine.records import Binary, Candidate, Launch, Outcome, Source
from tests.support.exported import exported_module
from tests.support.kernel_gate import attention_target
from tests.support.loader import WMMA, tensors

PROBLEMS = {"plain": "b2,h4,s100,d64,bf16,kv2", "masked": "b2,h4,s100,d64,bf16,kv2,causal"}
"""two kernels of one workload: taken for one another, a causal model would run without its mask"""


@pytest.fixture
def folders(tmp_path):
    """Both exported, each with a binary of its own name, in folders of one name."""
    found = {}
    for name, problem in PROBLEMS.items():
        target = attention_target(problem)
        source = Source("// text", "attention", Launch((1, 4, 2), 384, 100_000))
        binary = Binary(name.encode(), "sm_90a", "", "nvrtc 13.0", 168, 0, 0, 0, (), {}, 1.0)
        text = str(target.problem)
        made = Candidate(3, 1, text, "h100", WMMA, Outcome.ESTIMATED, source=source, binary=binary)
        export(made, target, tmp_path / name / "out")
        found[name] = tmp_path / name / "out"
    return found


def by_path(folder, name):
    spec = importlib.util.spec_from_file_location(name, folder / f"{exported_module(folder)}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def on_the_path(folders, copied, monkeypatch):
    for folder in folders.values():
        monkeypatch.syspath_prepend(folder)
    return [importlib.import_module(exported_module(folder)) for folder in folders.values()]


def as_packages_of_one_name(folders, copied, monkeypatch):
    for folder in folders.values():
        monkeypatch.syspath_prepend(folder.parent)
    return [importlib.import_module(f"out.{exported_module(folder)}") for folder in folders.values()]


def by_file_under_one_name(folders, copied, monkeypatch):
    return [by_path(folder, "attention") for folder in folders.values()]


def from_copies_on_the_path(folders, copied, monkeypatch):
    copies = {name: shutil.copytree(folder, copied / name) for name, folder in folders.items()}
    return on_the_path(copies, copied, monkeypatch)


@pytest.fixture
def only_new_modules():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("attention", "out")):
            del sys.modules[name]


MEANS = [on_the_path, as_packages_of_one_name, by_file_under_one_name, from_copies_on_the_path]


@pytest.mark.usefixtures("only_new_modules")
@pytest.mark.parametrize("means", MEANS)
def test_each_runs_its_own_kernel(driver, folders, tmp_path, monkeypatch, means):
    modules = means(folders, tmp_path / "copied", monkeypatch)
    for module in modules:
        monkeypatch.setattr(module._cuda.Torch, "gpu_index", lambda device: 0)
        monkeypatch.setattr(module._cuda.Torch, "stream", lambda gpu_index: 0)
    for module in (*modules, *reversed(modules)):
        module.attention(*tensors())
    assert [found.image for found in driver.launches()] == [b"plain", b"masked", b"masked", b"plain"]


def test_two_exports_in_one_folder_are_refused_not_mixed_up(folders, tmp_path, monkeypatch):
    both = tmp_path / "both"
    for folder in folders.values():
        shutil.copytree(folder, both, dirs_exist_ok=True)
    monkeypatch.syspath_prepend(both)
    with pytest.raises(ImportError, match=r"is not the loader of the kernel in .*both: keep each export in a folder"):
        importlib.import_module(exported_module(folders["plain"]))


def test_a_renamed_loader_is_refused_since_two_of_that_name_would_be_one(folders):
    (loader,) = folders["plain"].glob("attention_*.py")
    renamed = loader.rename(loader.with_name("attention.py"))
    done = subprocess.run(
        [sys.executable, "-c", "import attention"], cwd=renamed.parent, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"attention.py is not the loader of the kernel in {renamed.parent}: keep" in done.stderr


@pytest.mark.usefixtures("only_new_modules")
def test_a_binary_of_another_export_is_not_launched(driver, folders, monkeypatch):
    shutil.copy(folders["masked"] / "kernel.cubin", folders["plain"])
    module = by_path(folders["plain"], "attention")
    monkeypatch.setattr(module._cuda.Torch, "gpu_index", lambda device: 0)
    with pytest.raises(RuntimeError, match=r"kernel.cubin is not the binary that kernel.json describes"):
        module.attention(*tensors())
    assert driver.launches() == []


@pytest.mark.parametrize(
    "problem", ["attention:b1,h1,s1,d64,fp16", "demo:rows=4,cols=8", "3x:ä=1", "class:", "", "x" * 500, "a\n`<b>"]
)
def test_any_problem_gives_a_name_that_python_takes(problem):
    name = module_name(problem, {"cubin_sha256": "1"})
    assert name.isidentifier() and name.isascii() and name == name.lower() and len(name) < 80
    assert name != module_name(problem, {"cubin_sha256": "2"})
    assert name == module_name(problem, {"cubin_sha256": "1"})
