"""`evoengine run` runs a script as Python does, and the pytest plug-in a project's tests, on the virtual GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from evoengine.errors import MachineError
from evoengine.virtual import activate
from tests.support.documents import blocks
from tests.support.machine_code import require_tools

KERNELS = Path(__file__).parent / "triton_kernels.py"
PAGE = Path(__file__).parents[2] / "docs" / "virtual-gpu.md"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the page's script."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    require_tools()
    text = next(block.text for block in blocks(PAGE) if block.text.startswith("# add.py"))
    (tmp_path / "add.py").write_text(text)
    return tmp_path


def python(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # an installed package offers the plug-in to pytest, which would not take it twice
    env = {**os.environ, "TRITON_CACHE_DIR": str(project / "cache"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=project, env=env, capture_output=True, text=True)


def test_a_script_gets_its_arguments_and_gives_its_exit_code_and_the_summary_follows(project):
    (project / "script.py").write_text(
        "import sys, torch\nfrom add import add\nprint(__name__, sys.argv)\n"
        "x = torch.ones(3000, device='cuda')\nassert add(x, x.cuda()).eq(2).all()\nsys.exit(7)\n"
    )
    done = python(project, "-m", "evoengine", "run", "--map-cuda", "script.py", "--gpu", "x", "")
    assert done.returncode == 7, done.stderr
    assert done.stdout == "__main__ ['script.py', '--gpu', 'x', '']\n"
    assert re.search(r"virtual h100: predicted .*\nkernel .*\nadd_kernel +1 .* num_warps=4 num_stages=3\n", done.stderr)


def test_a_script_that_fails_shows_its_own_traceback_and_what_to_do_about_cuda(project):
    (project / "script.py").write_text("import torch\ntorch.ones(3, device='cuda')\n")
    done = python(project, "-m", "evoengine", "run", "script.py")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith('Traceback (most recent call last):\n  File "script.py", line 2')
    assert "or add --map-cuda" in done.stderr and "no Triton kernel was launched" in done.stderr


def test_the_plugin_runs_tests_and_a_race_fails_one(project):
    (project / "test_add.py").write_text(
        "import torch\nfrom add import add\n"
        "from triton_kernels import overlap\n"
        "def test_right():\n    x = torch.rand(3000)\n    assert torch.equal(add(x, x), 2 * x)\n"
        "def test_race():\n    overlap[(3,)](torch.zeros(190, dtype=torch.int32), 190, BLOCK=64)\n"
    )
    shutil.copy(KERNELS, project)
    done = python(project, "-m", "pytest", "-q", "-p", "evoengine.virtual.pytest_plugin", "--virtual-gpu", "a100")
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout
    assert "virtual a100" in done.stdout and "add_kernel  " in done.stdout
    assert "FAILED test_add.py::test_race - evoengine.virtual.device.RaceWarning" in done.stdout


def test_a_plugin_without_its_option_imports_nothing():
    code = "import evoengine.virtual.pytest_plugin, sys; print({'torch', 'numpy', 'triton'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_without_triton_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "evoengine.virtual.triton_driver", raising=False)
    with pytest.raises(MachineError, match=r"Triton is not installed: pip install 'evoengine\[triton\]'"):
        activate("h100")
