"""In every process of the stand-in's environment: three modules of evoengine meet a GPU's torch that is not there.

`devices/torch_gpu.py` is replaced; what is compiled is noted for the emulator; torch passes for a build with CUDA.
"""

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def note_sources(compile_module):
    compiled = compile_module.compile_source

    def compile_source(source, arch):
        from tests.fake_cuda.device import note

        binary = compiled(source, arch)
        note(binary.cubin, source)
        return binary

    compile_module.compile_source = compile_source


def name_torch_build(toolchain_module):
    toolchain_module.torch_cuda = lambda: os.environ.get("FAKE_CUDA_TORCH", "13.0") or None


PATCHES = {"evoengine.stages.compile": note_sources, "evoengine.stages.toolchain": name_torch_build}
REPLACED = {"evoengine.devices.torch_gpu": HERE / "torch_gpu.py"}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in REPLACED:
            return importlib.util.spec_from_file_location(name, REPLACED[name])
        if name not in PATCHES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def executed(module):
            execute(module)
            PATCHES[name](module)

        spec.loader.exec_module = executed
        return spec


sys.meta_path.insert(0, Finder())
