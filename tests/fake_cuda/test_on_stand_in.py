"""The tests that need a GPU, on the stand-in driver: the same tests and the same host code, in processes of their own.

They show that the host does what it should, never how fast a kernel is or how a GPU behaves.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from evoengine.devices.driver import find_driver
from tests.fake_cuda.library import ROOT, environment
from tests.support.exhaustive import more

SUITES = {
    "kernels, faults, checking, timing and exported kernels": [
        *map(str, sorted(ROOT.glob("tests/devices/test_*.py"))),
        "tests/timing/test_measure.py",
        "tests/timing/test_measure_figures.py",
        "tests/fake_cuda/test_exported_loader.py",
        "tests/fake_cuda/test_cpp_package.py",
        "tests/fake_cuda/test_model_on_device.py",
        "tests/fake_cuda/test_installed_wheels.py",
    ],
    "a library for TVM-FFI": ["tests/fake_cuda/test_tvm_ffi_package.py"],
    "the command line": ["tests/cli/test_road.py"],
}
EXHAUSTIVE = ["the command line"]
"""test_first_contact.py calls it on the stand-in too"""


@pytest.mark.skipif(not isinstance(find_driver(), str), reason="this machine has a driver of its own")
@pytest.mark.parametrize("name", [*(n for n in SUITES if n not in EXHAUSTIVE), *more(EXHAUSTIVE)])
def test_what_needs_a_gpu_passes_on_the_stand_in(tmp_path, pytestconfig, name):
    if name == "a library for TVM-FFI":
        pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    fast = "not exhaustive" in pytestconfig.option.markexpr
    wanted = "(gpu or stand_in) and not exhaustive" if fast else "gpu or stand_in"
    options = ["-q", "-m", wanted, "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'own'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *SUITES[name]], cwd=ROOT, env=environment(tmp_path),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout.splitlines()[-1]


def test_the_stand_in_has_every_function_that_evoengine_calls(tmp_path):
    script = (
        "from evoengine.devices import cuda_api\n"
        "missing = [name for name in cuda_api._PROTOTYPES if not hasattr(cuda_api.library(), name)]\n"
        "assert not missing, missing\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_stand_in_is_found_only_where_it_is_asked_for():
    assert "FAKE_CUDA_SOURCES" not in os.environ
    assert isinstance(find_driver(), str) or not find_driver()[1][0].name.startswith("stand-in")
