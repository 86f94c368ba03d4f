"""Builds the stand-in driver, and the environment in which a process finds it in libcuda.so.1's place."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from evoengine.sandbox.host_compiler import find_compiler

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
NAME = "stand-in driver without a GPU"
"""of the device, wherever a figure is printed or recorded: no figure of it is a measurement"""


@cache
def folder() -> Path:
    """The folder that holds the stand-in libcuda.so.1, compiled once for each of its texts."""
    text = (HERE / "driver.cpp").read_bytes()
    key = hashlib.sha256(text + find_compiler().encode()).hexdigest()[:16]
    built = user_cache_path("evoengine") / "fake_cuda" / key
    if not (built / "libcuda.so.1").exists():
        built.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
            library = Path(scratch, "libcuda.so.1")
            subprocess.run([find_compiler(), *FLAGS, HERE / "driver.cpp", "-o", library], check=True)
            os.replace(library, built / "libcuda.so.1")
    return built


def environment(sources: Path, **settings: object) -> dict[str, str]:
    """The environment of a process that runs on the stand-in; `sources` is a folder that its processes share.

    `settings` are those of device.py, by their names without FAKE_CUDA_ and in small letters.
    """
    paths = [str(HERE / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {f"FAKE_CUDA_{name.strip('_').upper()}": str(value) for name, value in settings.items()}
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder()), os.environ.get("LD_LIBRARY_PATH")])),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "FAKE_CUDA_SOURCES": str(sources),
        # pytest would import the modules of a package with a plugin, as ours, itself, past site/sitecustomize.py
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        **own,
    }
