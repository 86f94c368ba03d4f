"""Executor and emulator are built beside the first search of a machine, which waits for them where it needs them."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from evoengine.cuda_emulator import build as emulator
from evoengine.errors import MachineError
from evoengine.records import Judged, Outcome
from evoengine.sandbox.host_compiler import find_compiler, identity, native_flags
from evoengine.sandbox.worker_process import WorkerLimits
from evoengine.sandbox.workers import Task
from evoengine.sass import build as executor
from evoengine.search.evaluators import CpuEvaluator
from evoengine.search.first_build import FirstBuild
from evoengine.stages.tasks import finish_task
from tests.support.machine_code import require_compiler
from tests.support.waiting import wait_for


@pytest.fixture(autouse=True)
def known_compiler():
    require_compiler()
    yield
    forget()


def forget():
    for function in (executor.build, emulator._version, find_compiler, native_flags, identity):
        function.cache_clear()


def compiler(folder: Path, command: str) -> str:
    """A compiler that runs the command in place of compiling a file."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*|*-nostdlib*) {command};; esac\nexec {find_compiler()} "$@"\n')
    script.chmod(0o755)
    return str(script)


def use(monkeypatch, tmp_path, command):
    monkeypatch.setenv("CXX", compiler(tmp_path, command))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()


def trials(db: Path) -> list[str | None]:
    """The outcome of each trial in the ledger; None of one that has not ended."""
    if not db.exists():
        return []
    with closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as ledger:
        if not ledger.execute("SELECT 1 FROM sqlite_master WHERE name = 'candidates'").fetchone():
            return []
        return [outcome for (outcome,) in ledger.execute("SELECT outcome FROM candidates")]


def start(tmp_path: Path, db: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "evoengine", "search", "--gpu", "h100", "--problem", "b1,h2,s64,d32,fp16",
         "--device", "emulator", "--family", "scalar", "--trials", "1", "--db", str(db)],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}, cwd=tmp_path, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_the_first_trial_is_under_way_before_the_executor_is_built(tmp_path):
    core, runtime = executor.build(), emulator.build_runtime()
    cache, db = tmp_path / "cache" / "evoengine", tmp_path / "evo.db"
    for made in (core, runtime):
        (cache / made.parent.name).mkdir(parents=True)
    shutil.copy(runtime, cache / "emulator")
    with FileLock(cache / "sass.lock"):  # as where another process builds
        search = start(tmp_path, db)
        wait_for(lambda: trials(db) == [None] or search.poll() is not None)
        shutil.copy(core, cache / "sass")
    assert "building executor and emulator" in search.communicate()[1]
    assert (search.returncode, trials(db)) == (0, ["estimated"])


@pytest.mark.exhaustive
def test_a_search_that_is_stopped_meanwhile_ends_at_once_and_leaves_no_compiler(monkeypatch, tmp_path):
    use(monkeypatch, tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    db = tmp_path / "evo.db"
    search = start(tmp_path, db)
    wait_for(lambda: trials(db) == [None] or search.poll() is not None)
    wait_for((tmp_path / "pid").exists)
    search.send_signal(signal.SIGTERM)
    said = search.communicate()[1]
    assert search.returncode in (1, 130), said
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_a_build_that_fails_is_the_machines_fault(monkeypatch, tmp_path):
    use(monkeypatch, tmp_path, "echo 'core.cpp:1: error: no such language' >&2; exit 1")
    db = tmp_path / "evo.db"
    search = start(tmp_path, db)
    said = search.communicate()[1]
    assert search.returncode == 3
    assert "no such language" in said and "it needs g++ 12 or clang++ 15" in said and "Traceback" not in said
    assert "incorrect" not in trials(db) and "uncompilable" not in trials(db)


def test_where_a_gpu_times_a_missing_compiler_is_told_to_who_waits(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    forget()
    build = FirstBuild()
    assert not build.is_running
    with pytest.raises(MachineError, match="no C.. compiler found"):
        build.wait(both=False)
    build.close()


def test_a_worker_of_a_node_builds_as_it_starts_and_its_time_limits_begin_afterwards(monkeypatch, tmp_path):
    """The actor of a Ray cluster, in this process: what needs no judge runs beside the build."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'evoengine[ray]'")
    from evoengine.search.ray_workers import NodeWorker

    core, runtime = executor.build(), emulator.build_runtime()
    cache = tmp_path / "cache" / "evoengine"
    (cache / "sass").mkdir(parents=True)
    shutil.copytree(runtime.parent, cache / "emulator", ignore=lambda _, names: set(names) - {runtime.name})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    executor.build.cache_clear()
    node, given = NodeWorker(WorkerLimits(forked=False), None, ""), (None, None, None, 0, ())
    with ThreadPoolExecutor(1) as beside:
        with FileLock(cache / "sass.lock"):  # as where another process builds
            assert node.ready().node == "node"
            assert node._build.is_running
            assert isinstance(node.run(Task(os.getpid, Outcome.CRASHED, int, 60.0)).answer, int)
            judged = beside.submit(node.run, Task(finish_task, Outcome.CRASHED, Judged, 60.0), *given)
            wait_for(lambda: node.activity().task == "finish_task")
            attempts = []
            monkeypatch.setattr(node._pool, "attempt", lambda *args: attempts.append(node._build.is_running))
            shutil.copy(core, cache / "sass")
        judged.result()
    assert attempts == [False]
    node._pool.close()
    node._build.close()


def test_a_node_that_cannot_build_runs_what_needs_no_judge(monkeypatch, tmp_path):
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'evoengine[ray]'")
    from evoengine.search.ray_workers import NodeWorker

    use(monkeypatch, tmp_path, "echo 'core.cpp:1: error: no such language' >&2; exit 1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    node = NodeWorker(WorkerLimits(forked=False), None, "")
    assert isinstance(node.run(Task(os.getpid, Outcome.CRASHED, int, 60.0)).answer, int)
    failed = node.run(Task(finish_task, Outcome.CRASHED, Judged, 60.0), None, None, None, 0, ()).answer
    assert isinstance(failed, MachineError) and "no such language" in str(failed)
    node._pool.close()
    node._build.close()


def test_nothing_is_started_where_both_are_built():
    executor.build(), emulator.build_runtime()
    build = FirstBuild()
    build.add_emulator()
    assert not build.is_running and build._workers is None
    build.wait(both=True)
    build.close()


def test_the_build_begins_before_the_slow_imports_of_a_search():
    script = """
import sys
from evoengine.cli.main import main
from evoengine.search import first_build

class Begun:
    def __init__(self):
        slow = {"sqlalchemy", "optuna", "torch", "evoengine.stages.tasks"}
        sys.exit(1 if slow & set(sys.modules) else 7)

first_build.FirstBuild = Begun
sys.argv = ["evoengine", "search"]
main()
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7


def test_the_emulator_is_built_behind_the_executor_and_keeps_nobody_who_needs_that_alone(monkeypatch, tmp_path):
    core, runtime = executor.build(), emulator.build_runtime()
    cache = tmp_path / "cache" / "evoengine"
    for made in (core, runtime):
        (cache / made.parent.name).mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    executor.build.cache_clear()
    with FileLock(cache / "emulator.lock"), FileLock(cache / "sass.lock") as executors:  # as where others build
        build = FirstBuild()
        build.add_emulator()
        shutil.copy(core, cache / "sass")
        executors.release()
        build.wait(both=False)
        assert build.is_running
        shutil.copy(runtime, cache / "emulator")
    build.wait(both=True)
    assert not build.is_running
    build.close()


def test_a_build_that_is_closed_leaves_nothing_half_built(monkeypatch, tmp_path):
    use(monkeypatch, tmp_path, f"touch {tmp_path}/compiling; exec sleep 1000")
    build = FirstBuild()
    wait_for((tmp_path / "compiling").exists)
    build.close()
    assert list((tmp_path / "cache" / "evoengine" / "sass").iterdir()) == []


@pytest.mark.parametrize(
    "capability, whole, both",
    [(90, False, False), (90, True, True), (100, False, True)],
    ids=["short", "whole", "text"],
)
def test_a_candidate_waits_for_the_judges_that_it_needs(capability, whole, both):
    """The executor judges short cases; the emulator the whole gate, and all of what the executor cannot read."""
    asked, job = [], SimpleNamespace(contender=None, plans=None, seed=0, cost={})
    build = SimpleNamespace(wait=asked.append)
    workers = SimpleNamespace(submit=lambda task, *arguments, **how: arguments[-1].ask())
    evaluator = CpuEvaluator(SimpleNamespace(gpu=SimpleNamespace(capability=capability)), build)
    assert evaluator.submit(job, workers, whole) is whole
    assert asked == [both]


def test_what_is_judged_to_the_end_waits_for_both_judges():
    asked, job = [], SimpleNamespace(contender=None, plans=None, seed=0)
    workers = SimpleNamespace(submit=lambda task, *arguments, **how: arguments[-1].ask())
    target = SimpleNamespace(gpu=SimpleNamespace(capability=90), workload=None)
    evaluator = CpuEvaluator(target, SimpleNamespace(wait=asked.append))
    assert evaluator.finish(target, job, ("known",), workers) == ("known",)
    assert asked == [True]
