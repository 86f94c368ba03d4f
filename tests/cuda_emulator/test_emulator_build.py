import os
import shutil

import numpy as np
import pytest

from evoengine.cuda_emulator import build as builder
from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run
from evoengine.devices.base import KernelUnbuildable, ScalarArgument, TensorArgument
from evoengine.errors import MachineError
from evoengine.records import Launch, Source
from evoengine.sandbox.host_compiler import find_compiler, identity, native_flags

ONE = Launch((1, 1, 1), 32, 0)
KERNEL = 'extern "C" __global__ void f(float* o, float v) {\n    o[threadIdx.x] = v * threadIdx.x;\n}\n'


def source(text=KERNEL, entry="f"):
    return Source(text, entry, ONE)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """In which no other process builds; with the runtime, which takes some seconds."""
    build(source(), "sm_90a")
    runtime = builder._runtime_file()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        shutil.copy(runtime, builder._runtime_file())
        yield


@pytest.fixture
def forgetful(monkeypatch):
    """What the module remembers of the machine, forgotten before and after."""

    def forget():
        for function in (find_compiler, native_flags, identity, builder._version):
            function.cache_clear()

    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def test_the_same_source_is_built_once():
    first = build(source(), "sm_90a")
    os.utime(first, (1, 1))
    inode = first.stat().st_ino
    assert build(source(), "sm_90a") == first
    assert first.stat().st_ino == inode
    assert first.stat().st_mtime > 1  # used, so not the next to be pruned
    assert build(source(KERNEL + "\n"), "sm_90a") != first


def test_nothing_half_built_stays_behind():
    folder = build(source(), "sm_90a").parent
    with pytest.raises(KernelUnbuildable):
        build(source("nonsense"), "sm_90a")
    assert not list(folder.glob("building-*"))


@pytest.mark.parametrize(
    ("text", "entry", "message"),
    [
        (KERNEL.replace("* v", "* w").replace("v *", "w *"), "f", r"line 2: .*declared.* \(entry point f\)"),
        (KERNEL, "g", r"declared.* \(entry point g\)"),
        ("#include <no_such_header.h>\n" + KERNEL, "f", r"line 1: .*no_such_header.h"),
        ("__device__ float h(float);\n" + KERNEL.replace("v *", "h(v) *"), "f", r"undefined reference to .h\(float\)"),
        (KERNEL.replace("v *", "v v *"), "f", "line 2: "),
    ],
)
def test_what_the_host_compiler_refuses_is_told_with_the_kernels_line(text, entry, message):
    with pytest.raises(KernelUnbuildable, match=message):
        build(source(text, entry), "sm_90a")


def test_only_so_many_executables_are_kept(monkeypatch, tmp_path):
    kept = build(source(), "sm_90a")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builder, "MAX_EXECUTABLES", 16)
    folder = tmp_path / "evoengine" / "emulator"
    folder.mkdir(parents=True)
    for i in range(20):
        (folder / f"kernel-{i:02}").touch()
        os.utime(folder / f"kernel-{i:02}", (1000 + i, 1000 + i))
    for runtime in kept.parent.glob("runtime-*"):
        os.link(runtime, folder / runtime.name)
    newest = build(source(), "sm_90a")
    oldest_gone = {f"kernel-{i:02}" for i in range(7, 20)}
    assert {p.name for p in folder.glob("kernel-*")} == oldest_gone | {newest.name}


def test_a_machine_without_a_compiler_is_told_the_remedy(forgetful, tmp_path):
    forgetful.delenv("CXX", raising=False)
    forgetful.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no C.. compiler found: install one, e.g. apt install g"):
        find_compiler()


def test_a_wrong_cxx_is_named(forgetful):
    forgetful.setenv("CXX", "no-such-compiler")
    with pytest.raises(MachineError, match=r"\$CXX names 'no-such-compiler', which does not exist"):
        find_compiler()


def test_a_compiler_that_cannot_build_the_emulator_is_named_with_what_is_needed(forgetful, tmp_path):
    old = tmp_path / "old-compiler"
    fails = 'echo "error: unrecognized command-line option -std=c++20" >&2; exit 1'
    old.write_text(f'#!/bin/sh\ncase "$*" in *-E*) exit 0;; esac\n{fails}\n')
    old.chmod(0o755)
    forgetful.setenv("CXX", str(old))
    with pytest.raises(MachineError, match=r"old-compiler cannot build the emulator: unrecognized .* needs g\+\+ 12"):
        build(source(), "sm_90a")


def test_a_cache_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(MachineError, match="cannot write the cache .*emulator: make it writable or set XDG_CACHE_HOME"):
        build(source(), "sm_90a")


@pytest.mark.exhaustive
def test_stacks_can_be_switched_without_assembly(forgetful, tmp_path):
    forgetful.setenv("XDG_CACHE_HOME", str(tmp_path))
    forgetful.setattr(builder, "_COMMON", (*builder._COMMON, "-DEVO_EMU_UCONTEXT"))
    text = KERNEL.replace("= v *", "= __shfl_xor_sync(~0u, v, 1) *")
    arguments = [TensorArgument("o", np.zeros(32, np.float32), output=True), ScalarArgument("v", np.float32(3))]
    o = run(build(source(text), "sm_90a"), "f", ONE, arguments, 0, 20)["o"]
    np.testing.assert_array_equal(o, 3 * np.arange(32))
