"""Scenarios in which a fault is met, each in a process of its own that this one forks; LD_PRELOAD has library.c.

Requests are lines of JSON on standard input: a scenario, the fault, in which process, and a folder. An answer is a
line, too: how the process ended, what it said, and what it left behind. Then the scenario's check runs, without any
fault: it goes on with what there is, and says what is wrong with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from benchmarks import instant, torture
from evoengine.errors import EvoengineError
from evoengine.ledger import runs
from evoengine.ledger.check import find_faults
from evoengine.ledger.optuna.study import optuna_storage
from evoengine.ledger.store import open_ledger
from evoengine.records import Outcome
from evoengine.sandbox import kept_process
from evoengine.sandbox.worker_process import WorkerLimits
from evoengine.sandbox.workers import WorkerPool
from evoengine.service import executors as dispatching
from evoengine.service.executors import Dispatcher, Slot
from evoengine.service.jobs import DONE, RUNNING, Jobs
from tests.faults import hook, tasks

SITE = Path(__file__).with_name("site")
SECONDS = 300
"""after which a scenario counts as one that hangs"""
NUMBERS = 6
FINISH = """#!{python} -ISE
import os, pathlib, sqlite3, sys, time
while sys.argv[3] == "{last}" and pathlib.Path({lasting!r}).exists():
    if os.getppid() != int(sys.argv[6]):
        sys.exit(1)
    time.sleep(0.01)
connection = sqlite3.connect({database!r}, timeout=60)
connection.execute("UPDATE jobs SET state = 'done', owner = NULL WHERE id = ? AND fence = ?", sys.argv[3:5])
connection.commit()
"""
"""stands for a job's process: it notes that the job is done, the last one when it is let"""
JOBS = 4
Said = list[str]


# ── workers: a pool in which one worker is killed and replaced ──────────────────────────────────────────────────────


def run_workers(folder: Path) -> Said:
    """Beside what keepers left that were killed, and before a process that is not a worker."""
    (left := folder / "tmp" / tasks.ORPHANED).mkdir()
    (left / "output").touch()
    kept_process._KEEPERS[True] = kept_process._Keeper(tasks.__name__)
    said: Said = []
    pool: WorkerPool | None = None
    try:
        pool = WorkerPool(2, WorkerLimits(seconds=SECONDS, memory_bytes=None))
        asked = {n: pool.submit(tasks.double, n, on_crash=Outcome.CRASHED, returns=int) for n in range(3)}
        asked[7] = pool.submit(tasks.die_at_first, folder, 7, on_crash=Outcome.CRASHED, returns=int)
        for number, future in asked.items():
            answer = future.result()
            said += [] if answer == 2 * number else [f"wrong: {number} gives {answer}"]
    except EvoengineError as error:
        said.append(f"ended: {error}")
    if pool:
        pool.close()
    try:
        other = kept_process.KeptProcess(kept_process.Held(10, 1 << 40), ["/bin/true"], environment={})
        if other.exit_code(wait=True) is None:
            said.append("wrong: a process that ended does not count as ended")
        other.close()
    except OSError as error:
        said.append(f"ended: {error.strerror}")
    return said


def check_workers(folder: Path) -> Said:
    return []


# ── coordinator: a search on a ledger ───────────────────────────────────────────────────────────────────────────────


def run_coordinator(folder: Path) -> Said:
    """Two of them: the second takes over what the first knows."""
    try:
        for seed in (1, 3):
            instant.search(
                str(folder / "evo.db"), trials=NUMBERS, size=NUMBERS, log=folder / "evaluated", seed=seed,
                echo=lambda line: None,
            )  # fmt: skip
    except EvoengineError as error:
        return [f"ended: {error}"]
    return []


def check_coordinator(folder: Path) -> Said:
    """The same search again comes to its end, and each number was judged once."""
    runs.LOOK_AGAIN_SECONDS = 0.0
    run_coordinator(folder)
    found, database = torture.Found(), str(folder / "evo.db")
    with open_ledger(database, create=False) as ledger:
        for run in ledger.runs():
            torture.check_run(ledger, run.id, NUMBERS, found)
        torture.check_evaluations(ledger, folder / "evaluated", found)
        torture.check_studies(ledger, found)
        found.wrong += [fault.what for fault in find_faults(ledger, lambda stage: None)]
    torture.check_file(Path(database), found)
    return found.wrong


# ── dispatcher: a server's jobs ─────────────────────────────────────────────────────────────────────────────────────


def run_dispatcher(folder: Path, check: bool = False) -> Said:
    dispatching.TICK_SECONDS, dispatching.REST_SECONDS, dispatching.GIVE_BACK_SECONDS = 0.01, 0.02, 5.0
    job = folder / "job"
    lasting = folder / "lasting"  # the last job does, so that the server that stops has one to stop
    lasting.unlink(missing_ok=True) if check else lasting.touch()
    text = FINISH.format(python=sys.executable, database=str(folder / "evo.db"), last=JOBS, lasting=str(lasting))
    job.write_text(text)
    job.chmod(0o700)
    sys.executable = str(job)
    with open_ledger(str(folder / "evo.db"), create=True) as database:
        jobs = Jobs(database)
        for number in range(JOBS):
            jobs.submit({**JOB, "seed": number}, 0, f"job {number}", 100)
        made = Dispatcher(database, [Slot(0), Slot(1)], 2.0, lambda line: None)
        made.start()
        end = time.monotonic() + (SECONDS if check else PATIENCE_SECONDS)
        while not _is_enough(jobs, check) and time.monotonic() < end and made.is_alive():
            time.sleep(0.01)
        said = [] if made.works else ["wrong: the dispatcher is dead"]
        made.stop()
        here = [each["owner"] for each in made.executors.known()]
        said += ["wrong: it is still said to run jobs"] if check and made.owner in here else []
    return said


def _is_enough(jobs: Jobs, check: bool) -> bool:
    counts = jobs.counts()
    return counts[DONE] == JOBS if check else counts[DONE] == JOBS - 1 and counts[RUNNING] == 1


JOB = {"problems": ["gemm:m64,n64,k64,fp16"], "gpu": "h100", "trials": 1, "device": "emulator", "priority": 0}
PATIENCE_SECONDS = 3.0
"""of a scenario whose fault lasts: no job may be done in it"""


def check_dispatcher(folder: Path) -> Said:
    """A server that meets no fault runs what is left; none is lost, none was failed for what the machine did."""
    said = run_dispatcher(folder, check=True)
    with open_ledger(str(folder / "evo.db"), create=False) as database:
        counts = Jobs(database).counts()
    return said + ([] if counts[DONE] == sum(counts.values()) == JOBS else [f"wrong: {counts}"])


SCENARIOS: dict[str, tuple[Callable[[Path], Said], Callable[[Path], Said]]] = {
    "workers": (run_workers, check_workers),
    "coordinator": (run_coordinator, check_coordinator),
    "dispatcher": (run_dispatcher, check_dispatcher),
}


# ── a process for each ──────────────────────────────────────────────────────────────────────────────────────────────


def answer(request: dict) -> dict:
    folder = Path(request["folder"])
    run, check = SCENARIOS[request["scenario"]]
    code, said = in_process(folder, run, request["fault"], request["in_keeper"])
    left = left_behind()
    again, wrong = in_process(folder, check, None, False)
    if again:
        wrong = [*wrong, f"the check ended with {again}"]
    return {"code": code, "said": said, "left": left + left_behind(), "wrong": wrong}


def in_process(folder: Path, function: Callable[[Path], Said], fault: str | None, in_keeper: bool) -> tuple[int, Said]:
    """The exit code, negative of a signal, and what was said."""
    told = folder / "told"
    told.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _be(folder, function, fault, in_keeper, told)
    end = time.monotonic() + SECONDS
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 124, ["it hangs"]
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(ended[1])
    return code, json.loads(told.read_text()) if told.exists() else []


def _be(folder: Path, function: Callable[[Path], Said], fault: str | None, in_keeper: bool, told: Path) -> None:
    code = 1
    try:
        (temporary := folder / "tmp").mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        silence = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(silence, 2)
        if fault and in_keeper:
            os.environ[hook.VARIABLE] = fault
            sys.path.insert(0, str(SITE))
        elif fault:
            hook.install(hook.read(fault))
        said = function(folder)
        sys.setprofile(None)
        told.write_text(json.dumps(said))
        code = 0
    except BaseException:
        sys.setprofile(None)
        told.write_text(json.dumps([traceback.format_exc()]))
    finally:
        os._exit(code)


def left_behind() -> list[str]:
    """Processes below this one; they are given some time to end, and ended then."""
    end = time.monotonic() + SECONDS
    while found := _children():
        if time.monotonic() > end:
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            return [f"process {pid}: {command}" for pid, command in found.items()]
        time.sleep(0.005)
    return []


def _children() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path(f"/proc/{name}/stat").read_text()
            if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                found[int(name)] = Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    for pid in list(found):
        if os.waitpid(pid, os.WNOHANG)[0]:
            del found[pid]
    return found


def prepare() -> Path:
    """Imports and makes what every scenario begins with; an empty ledger."""
    # or each worker would import this module as its own
    sys.modules["__main__"].__spec__ = None
    vars(sys.modules["__main__"]).pop("__file__", None)
    folder = Path(tempfile.mkdtemp(prefix="evoengine-faults-"))
    for module in ("evoengine.sandbox.worker_process", "pebble.pool.process"):
        import_module(module)
    with open_ledger(str(folder / "evo.db"), create=True) as database:
        optuna_storage(database.url).engine.dispose()
    shutil.copy(folder / "evo.db", folder / "empty.db")
    run_coordinator(folder)
    return folder


def main() -> None:
    prepared = prepare()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: it inherits what a scenario leaves behind
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        shutil.copy(prepared / "empty.db", Path(request["folder"], "evo.db"))
        print(json.dumps(answer(request)), flush=True)
    shutil.rmtree(prepared)


if __name__ == "__main__":
    main()
