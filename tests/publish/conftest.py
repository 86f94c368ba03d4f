"""An exported kernel, imported as its user would, on a driver that notes what it is asked."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evoengine.devices import cuda_api
from evoengine.publish.export import export
from evoengine.records import Binary, Candidate, Launch, Outcome, Source
from evoengine.sandbox.host_compiler import find_compiler
from tests.support import loader
from tests.support.exported import exported_module
from tests.support.kernel_gate import attention_target
from tests.support.loader import PROBLEM, Driver


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("driver") / "driver.so"
    text = Path(loader.__file__).with_name("loader_driver.c")
    subprocess.run([find_compiler(), "-shared", "-fPIC", "-xc", str(text), "-o", str(library)], check=True)
    return library


@pytest.fixture
def driver(built, tmp_path, monkeypatch) -> Iterator[Driver]:
    """A fresh one: a copy of the file is a library of its own."""
    library = ctypes.CDLL(shutil.copy(built, tmp_path / "driver.so"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    remembered = (cuda_api.library, cuda_api._function)
    for function in remembered:
        function.cache_clear()
    yield Driver(library)
    for function in remembered:  # or other tests would meet it
        function.cache_clear()


@pytest.fixture
def load(driver, tmp_path, monkeypatch):
    """Exports a candidate and imports the folder; the CPU is taken for GPU 0."""
    numbers = itertools.count()
    monkeypatch.syspath_prepend(tmp_path)

    def loaded(config, problem=PROBLEM, name=None, arch="sm_90a", cubin=b"\x7fELF", static_shared=0):
        name = name or f"exported_{next(numbers)}"
        source = Source("// text", "attention", Launch((1, 4, 2), 384, 100_000))
        binary = Binary(cubin, arch, f"-arch={arch}", "nvrtc 13.5", 168, 0, 0, static_shared, (), {}, 1.0)
        target = attention_target(problem)
        text = str(target.problem)
        found = Candidate(3, 1, text, "h100", config, Outcome.ESTIMATED, source=source, binary=binary)
        export(found, target, tmp_path / name)
        importlib.invalidate_caches()
        module = importlib.import_module(f"{name}.{exported_module(tmp_path / name)}")
        monkeypatch.setattr(module._cuda.Torch, "gpu_index", lambda device: 0)
        monkeypatch.setattr(module._cuda.Torch, "stream", lambda gpu_index: 0)
        monkeypatch.setattr(module._cuda.Cupy, "stream", lambda gpu_index: 1000 + gpu_index)
        driver.set("scalars", 6 if config.get("schedule") == "static" else 5)
        driver.set("maps", len(module.MAPPED))
        return module

    yield loaded
    for name in [name for name in sys.modules if name.startswith("exported_")]:
        del sys.modules[name]
