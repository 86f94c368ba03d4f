"""A build that fails is the candidate's fault only where the compiler names its text, or builds an empty kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from evoengine.cuda_emulator import build as building
from evoengine.cuda_emulator.build import build
from evoengine.devices.base import KernelUnbuildable
from evoengine.errors import MachineError
from evoengine.records import Launch, Source
from evoengine.sandbox import host_compiler
from tests.support.exhaustive import representatives
from tests.support.waiting import wait_for

REAL = host_compiler.find_compiler()
FAKE = """#!/bin/sh
case "$*" in *-E*) exec {real} "$@";; esac
input={folder}/input; cat > $input
candidate() {{ grep -q doomed $input; }}
compiling() {{ case "$*" in *-xc++*) true;; *) false;; esac; }}
say() {{ echo "$1" >&2; exit 1; }}
{fault}
exec {real} "$@" < $input
"""
MACHINE = {
    "disk full": ("say 'fatal error: error writing to cc.s: No space left on device'", "No space left on device"),
    "killed": ("kill -9 $$", "SIGKILL"),
    "no cc1plus": ("say \"g++: fatal error: cannot execute 'cc1plus': execvp\"", "cannot execute 'cc1plus'"),
    "no linker": ("compiling \"$@\" || say \"collect2: fatal error: cannot find 'ld'\"", "cannot find 'ld'"),
    "no library": ("compiling \"$@\" || say '/usr/bin/ld: cannot find -lm: No such file'", "cannot find -lm"),
    "no word": ("exit 3", "exit code 3"),
    "no memory": ("say 'cc1plus: out of memory allocating 65536 bytes'", "out of memory"),
    "disk full for what is larger": ("candidate && say 'fatal error: cc.s: No space left on device'", "No space left"),
    "killed for what is larger": ("candidate && say 'g++: fatal error: Killed signal terminated program'", "Killed"),
}  # fmt: skip
CANDIDATE = {
    "memory": ("candidate && say 'cc1plus: out of memory allocating 8 bytes'", r"out of memory .*\(2 GiB is the limit"),
    "compiler's fault": ("candidate && say 'internal compiler error: Segmentation fault'", "Segmentation fault"),
    "text": ("compiling \"$@\" && say 'kernel.cu:3:1: error: no such type'", "line 3: no such type"),
}  # fmt: skip
FAULTS = [
    pytest.param(error, *fault, id=f"{error.__name__}-{name}")
    for error, faults in ((MachineError, MACHINE), (KernelUnbuildable, CANDIDATE))
    for name, fault in faults.items()
]


def kernel(body: str = "") -> Source:
    """Unlike any built before."""
    text = f'extern "C" __global__ void doomed() {{ {body} }}  // {os.getpid()} {time.monotonic_ns()}\n'
    return Source(text, "doomed", Launch((1, 1, 1), 32, 0))


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Makes the compiler one with that fault."""
    build(kernel(), "sm_90a")  # the runtime, by the real one

    def install(fault: str) -> None:
        fake = tmp_path / "g++"
        fake.write_text(FAKE.format(real=REAL, folder=tmp_path, fault=fault))
        fake.chmod(0o755)
        monkeypatch.setattr(host_compiler, "find_compiler", lambda: str(fake))

    return install


FAST = (
    "MachineError-disk full",
    "MachineError-no library",
    "MachineError-killed for",
    "KernelUnbuildable-memory",
    "KernelUnbuildable-text",
)
"""one of each class: no empty kernel, nor one that is linked; the machine at its end for a larger one; the text"""


@pytest.mark.parametrize(("error", "script", "said"), representatives(FAULTS, *FAST))
def test_what_fails_an_empty_kernel_too_or_is_a_full_disk_is_the_machine_and_else_the_candidate(
    broken, error, script, said
):
    broken(script)
    with pytest.raises(error, match=said):
        build(kernel(), "sm_90a")


def test_what_fails_once_costs_nothing(broken, tmp_path):
    broken(f"[ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; say 'No space left on device'; }}")
    assert build(kernel(), "sm_90a").exists()


def test_a_compiler_that_hangs_is_ended_with_what_it_started(broken, tmp_path, monkeypatch):
    monkeypatch.setattr(building, "BUILD_SECONDS", 0.5)
    broken(f"sleep 300 & echo $! > {tmp_path}/pid; wait")
    with pytest.raises(KernelUnbuildable, match=r"the host compiler did not end in 0.5 s"):
        build(kernel(), "sm_90a")
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: subprocess.run(["ps", "-o", "stat=", str(pid)], capture_output=True).stdout[:1] in (b"", b"Z"))


def test_a_macro_that_expands_without_end_is_refused_by_the_limit_of_memory(monkeypatch):
    monkeypatch.setattr(building, "BUILD_BYTES", 256 << 20)
    lines = ["#define A0 x,x,x,x,x,x,x,x,x,x", *(f"#define A{i} " + ",".join([f"A{i - 1}"] * 10) for i in range(1, 9))]
    bomb = Source("\n".join([*lines, f"int a[] = {{A8}}; // {time.monotonic_ns()}\n"]), "a", Launch((1, 1, 1), 32, 0))
    with pytest.raises(KernelUnbuildable, match=r"memory.*\(0.25 GiB is the limit\)"):
        build(bomb, "sm_90a")


def test_a_cache_that_cannot_be_written_is_the_machine(monkeypatch, tmp_path):
    (tmp_path / "evoengine").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MachineError, match="cannot write the cache"):
        build(kernel(), "sm_90a")


def test_a_build_that_was_killed_leaves_nothing_for_long(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from evoengine.sandbox.host_compiler import building\n"
        "with building(Path(sys.argv[1])): print('built', flush=True); time.sleep(300)"
    )
    killed, lives = (
        subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE) for _ in range(2)
    )
    assert killed.stdout.readline() == lives.stdout.readline() == b"built\n"
    before = set(tmp_path.iterdir())
    killed.kill()
    killed.communicate()
    assert set(tmp_path.iterdir()) == before and len(before) == 2
    with host_compiler.building(tmp_path) as own:
        [other] = set(tmp_path.iterdir()) - {own}
        assert other in before
    lives.kill()
    lives.communicate()
    host_compiler.remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []
