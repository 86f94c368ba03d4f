"""The core is built once for a machine, whoever asks first, and a compiler that cannot build it is named.

Most tests build a core of two lines, which takes a second, in a cache of their own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from evoengine.errors import MachineError
from evoengine.sandbox.host_compiler import find_compiler, identity, native_flags, run_compiler
from evoengine.sass import build as builder
from evoengine.sass.core import library
from tests.support.machine_code import require_compiler

FIRST = '#include "both.h"\nextern "C" int answer() { return helper() + 2; }\n'
SECOND = '#include "both.h"\nint helper() { return 40; }\n'


@pytest.fixture
def core(monkeypatch, tmp_path):
    """A small core in place of the real one, and an empty cache."""
    require_compiler()
    folder = tmp_path / "core"
    folder.mkdir()
    (folder / "both.h").write_text("int helper();\n")
    (folder / "first.cpp").write_text(FIRST)
    (folder / "second.cpp").write_text(SECOND)
    monkeypatch.setattr(builder, "CORE", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield folder
    monkeypatch.undo()
    forget()


def forget():
    for function in (builder.build, find_compiler, native_flags, identity):
        function.cache_clear()


def test_all_sources_become_one_library(core):
    assert ctypes.CDLL(str(builder.build())).answer() == 42


def test_it_is_built_once(core):
    first = builder.build()
    os.utime(first, (1, 1))
    inode = first.stat().st_ino
    forget()
    assert builder.build() == first
    assert first.stat().st_ino == inode
    assert first.stat().st_mtime > 1  # used, so not the next to be pruned


@pytest.mark.parametrize("name", ["first.cpp", "both.h"])
def test_a_changed_file_is_built_again(core, name):
    first = builder.build()
    (core / name).write_text((core / name).read_text() + "\n")
    forget()
    assert builder.build() != first


def test_of_several_processes_at_once_one_builds(core, tmp_path):
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {find_compiler()} "$@"\n')
    compiler.chmod(0o755)
    program = (
        "import ctypes, pathlib, sys\nfrom evoengine.sass import build\nbuild.CORE = pathlib.Path(sys.argv[1])\n"
        "print(ctypes.CDLL(str(build.build())).answer())"
    )
    command = [sys.executable, "-c", program, str(core)]
    environment = {**os.environ, "CXX": str(compiler)}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in running] == ["42"] * 3
    assert [path.suffix for path in (tmp_path / "cache" / "evoengine" / "sass").iterdir()] == [".so"]
    assert sum("-shared" in call for call in calls.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("first.cpp", 'extern "C" int answer() { return nothing; }\n', "nothing.* was not declared|undeclared"),
        ("second.cpp", "", r"undefined reference to .helper\(\)|undefined symbol"),
    ],
)
def test_what_the_compiler_refuses_is_said_and_leaves_nothing_behind(core, tmp_path, name, text, message):
    (core / name).write_text(text)
    match = rf"cannot build the executor of machine code: .*({message}).*; it needs g\+\+ 12"
    with pytest.raises(MachineError, match=match):
        builder.build()
    assert list((tmp_path / "cache" / "evoengine" / "sass").iterdir()) == []


def test_a_machine_without_a_compiler_is_told_the_remedy(core, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no C.. compiler found: install one, e.g. apt install g"):
        builder.build()


def test_a_cache_that_cannot_be_made_is_named(core, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(MachineError, match="cannot write the cache .*sass: make it writable or set XDG_CACHE_HOME"):
        builder.build()


def test_only_so_many_libraries_are_kept(core, monkeypatch, tmp_path):
    folder = tmp_path / "cache" / "evoengine" / "sass"
    folder.mkdir(parents=True)
    for i in range(20):
        (folder / f"core-{i:02}.so").touch()
        os.utime(folder / f"core-{i:02}.so", (1000 + i, 1000 + i))
    newest = builder.build()
    assert {p.name for p in folder.iterdir()} == {f"core-{i:02}.so" for i in range(7, 20)} | {newest.name}


def test_the_sources_named_as_run_often_are_there():
    assert {path.stem for path in builder.CORE.glob("*.cpp")} > builder.RUN_OFTEN


@pytest.mark.exhaustive
@pytest.mark.parametrize("backwards", [False, True])
def test_the_sources_go_into_any_unit(tmp_path, backwards):
    """A name that two of them give unlike meanings is no fault of today's units, and would be one of tomorrow's."""
    require_compiler()
    sources = sorted(builder.CORE.glob("*.cpp"), reverse=backwards)
    unit = tmp_path / "unit.cpp"
    unit.write_text("".join(f'#include "{source}"\n' for source in sources))
    done = run_compiler([*builder.FLAGS, "-fsyntax-only", str(unit)])
    assert done.returncode == 0, done.stderr


def test_the_real_core_has_every_function_that_is_called():
    require_compiler()
    for name in ("sass_decode", "sass_free", "sass_unknown", "sass_run"):
        assert getattr(library(), name)
