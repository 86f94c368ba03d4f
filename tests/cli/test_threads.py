"""How many threads the sampler's matrices take from what compiles."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, types
told = types.ModuleType("evoengine.cli.main")
told.main = lambda: print("numpy" in sys.modules, __import__("os").environ["OPENBLAS_NUM_THREADS"])
sys.modules[told.__name__] = told
from evoengine.__main__ import main
main()
"""


@pytest.mark.parametrize(("given", "threads"), [({}, "1"), ({"OPENBLAS_NUM_THREADS": "3"}, "3")])
def test_it_is_one_unless_the_environment_says_so_and_is_set_before_numpy_is_there(given, threads):
    env = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env | given, capture_output=True, text=True)
    assert done.stdout.split() == ["False", threads], done.stderr
