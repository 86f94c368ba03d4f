"""A shell completes names of GPUs, problems and folders of kernels."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete

from evoengine.cli.main import evoengine


def completed(*arguments: str) -> list[str]:
    """Return what a shell offers for the last argument."""
    shell = ShellComplete(evoengine, {}, "evoengine", "_EVOENGINE_COMPLETE")
    return [found.value for found in shell.get_completions(list(arguments[:-1]), arguments[-1])]


@pytest.mark.parametrize("command", ["search", "best", "verify", "history", "measure"])
def test_gpus_are_completed(command):
    assert {"h100", "h200"} <= set(completed(command, "--gpu", "h"))
    assert completed(command, "--gpu", "zz") == []


@pytest.mark.parametrize("command", ["search", "best", "verify"])
def test_problems_are_completed(command):
    (gemm,) = completed(command, "--problem", "gem")
    assert gemm.startswith("gemm:")
    assert len(completed(command, "--problem", "")) >= 4


def test_kernels_folders_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "more", "deep/inner"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "mine" / "problem.json").touch()
    (tmp_path / "deep" / "inner" / "problem.json").touch()
    assert completed("search", "--kernel", "m") == ["mine", "more/"]
    assert completed("search", "--kernel", "deep/") == ["deep/inner"]
    assert completed("search", "--kernel", "") == ["deep/", "mine", "more/"]
    assert completed("search", "--kernel", "nowhere/x") == []


def test_commands_and_options_are_completed():
    assert "search" in completed("sea") and "--where" in completed("history", "--wh")
