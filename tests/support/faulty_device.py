"""A compiler and a GPU of real processes that go wrong in every way we know of; what is wrong stands in the source.

The tasks bear the names of those in `evoengine.stages.tasks`, in whose place they run.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from evoengine.errors import UsageError
from evoengine.records import (
    EMULATOR,
    EXECUTOR,
    GATE_VERSION,
    Baseline,
    Binary,
    CaseResult,
    Finals,
    Judged,
    Kind,
    Measurement,
    Outcome,
    RefusedBaseline,
    Rejection,
    Verdict,
)
from evoengine.stages.predict import Estimated
from evoengine.stages.tasks import Evaluation

DEVICE = "faulty device"
CPU = (EXECUTOR, EMULATOR)
WORK_SECONDS = 0.02
LATE_SECONDS = 30.0


class Unreadable:
    """Pickles well and cannot be unpickled, as an exception with arguments of its own may."""

    def __reduce__(self):
        return int, ("no number",)


def die_by(number: int) -> None:
    os.kill(os.getpid(), number)


def loop_for_ever() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def eat_memory() -> None:
    eaten = []
    while True:
        eaten.append(np.empty(1 << 26, np.uint8))


def flood() -> None:
    while True:
        os.write(1, b"warning: nothing is wrong\n" * 4096)


def print_last_words() -> None:
    os.write(2, b"free(): invalid pointer")
    os.abort()


FAULTS = {
    "segv": lambda: die_by(signal.SIGSEGV),
    "kill": lambda: die_by(signal.SIGKILL),
    "abort": print_last_words,
    "loop": loop_for_ever,
    "memory": eat_memory,
    "flood": flood,
    "late": lambda: time.sleep(LATE_SECONDS),
    "exit": lambda: os._exit(0),
    "garbage": lambda: ["this", "is", "no", "record"],
    "unreadable": Unreadable,
    "unpicklable": lambda: lambda: None,
    "sticky": lambda: Rejection(Outcome.CRASHED, "kernel attention: cudaErrorIllegalAddress"),
}
PLACES = {
    "compile": ("segv", "abort", "late", "memory", "garbage", "unreadable"),
    "judge": ("segv", "kill", "abort", "loop", "late", "flood", "exit", "garbage", "unpicklable", "sticky"),
}
HANG = ("loop", "late")
DIE = ("segv", "kill", "abort", "exit")
"""faults that end the process, by no limit"""
KINDS = [(place, fault) for place, faults in PLACES.items() for fault in faults]
QUICK = [(place, fault) for place, fault in KINDS if fault not in HANG]


def fault_of(number: int) -> tuple[str, str] | None:
    """Six of every twenty candidates misbehave, each kind in its turn; those that take a worker's whole time, once."""
    group, place = divmod(number, 20)
    turn = 6 * group + place
    if place >= 6:
        return None
    return KINDS[turn] if turn < len(KINDS) else QUICK[turn % len(QUICK)]


def end_of(fault: str) -> Outcome:
    """What a task ends as that does this whenever it runs, where a crash means `crashed`."""
    if fault == "kill":  # a signal that only others send
        return Outcome.KILLED
    return Outcome.HUNG if fault in HANG else Outcome.CRASHED


def expected(number: int) -> Outcome:
    match fault_of(number):
        case None:
            return Outcome.MEASURED
        case "compile", fault:
            return Outcome.CRASHED if fault in DIE else Outcome.UNCOMPILABLE
        case _, fault:
            return end_of(fault)


def number_in(source) -> int:
    return int(re.search(r"candidate (\d+)", source.text)[1])


def misbehave(source, place: str):
    """What the fault gives back, where it gives anything; None for one that behaves here."""
    wrong = re.search(r"fault (\w+) (\w+)", source.text)
    if wrong and wrong[1] == place:
        return FAULTS[wrong[2]]()
    work()
    return None


def work() -> None:
    if WORK_SECONDS:
        time.sleep(WORK_SECONDS)


def compile_task(source, arch):
    registers = 32 + number_in(source) % 7
    return misbehave(source, "compile") or Binary(b"cubin", arch, "", "faulty", registers, 0, 0, 0, (), {}, 1.0)


def load_cuda():
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        raise RuntimeError("the GPU was not chosen before the libraries were loaded")


def figure(number: int) -> Measurement:
    return Measurement(Kind.MEASURED, DEVICE, 1.0 + number, 1e3 / (1 + number), tuple([1e3 / (1 + number)] * 10))


def passed() -> Verdict:
    return Verdict(DEVICE, None, None, (CaseResult("one row", "b1", 1, True, 1e-4, 1e-5, 1e-3),), 1.0)


def finish_task(workload, contender, plans, seed, known, failed=None):
    """Both judges on the CPU pass what the device passed."""
    wrong = misbehave(contender.source, "finish")
    return wrong or Judged(tuple(replace(passed(), device=name, gate_version=GATE_VERSION) for name in CPU))


def measure_task(target, contender, plan, seed, incumbent, rival):
    assert rival.name == "FLASH_ATTENTION"
    wrong = misbehave(contender.source, "judge")
    return wrong or Evaluation((passed(),), figure(number_in(contender.source)))


def baselines_task(target, seed, failed):
    return [Baseline(n, DEVICE, us, 1.0, (us,) * 10) for n, us in (("MATH", 90.0), ("FLASH_ATTENTION", 10.0))]


def finals_task(target, contenders, seed, rival):
    """The slowest by single timing wins here, so that a test sees which timing counted."""
    order = sorted(contenders, key=lambda c: number_in(c.source))
    return Finals(tuple(c.trial for c in order), (), {c.trial: figure(number_in(c.source)) for c in contenders})


# ── other ways to behave, for one test each ──────────────────────────────────────────────────────────────────────────


def when_there(path, task, *arguments):
    """Does the task as soon as there is a file of that path."""
    while not Path(path).exists():
        time.sleep(WORK_SECONDS)
    return task(*arguments)


def slow_task(*arguments):
    time.sleep(0.15)
    return measure_task(*arguments)


def tied_finals(target, contenders, seed, rival):
    finals = finals_task(target, contenders, seed, rival)
    return replace(finals, tied=finals.order[:3])


def crashing_finals(*_):
    return Rejection(Outcome.CRASHED, "one of trials 1, 2: cudaErrorIllegalAddress")


def measure_when_the_lead_is_there(path, *arguments, ended=[0]):  # noqa: B006 - it counts over all calls
    awaited = min(12, ended[0] + 2 + 1 + 4)  # of 12 in all: one a worker, one that waits, the lead
    while int(Path(path).read_text() or 0) < awaited:
        time.sleep(WORK_SECONDS)
    ended[0] += 1
    return measure_task(*arguments)


def no_baseline(*_):
    return Rejection(Outcome.UNRANKED, "MATH: no kernel image")


def racing_task(target, contender, plan, seed, incumbent, rival):
    own = figure(number_in(contender.source))
    if incumbent is None:
        return Evaluation((passed(),), own)
    lost = {"dropped_after": 5.0, "incumbent": float(incumbent.trial), "times_incumbent": 1.7}
    return Evaluation((passed(),), replace(own, terms=lost))


def suspect_task(target, contender, plan, seed, incumbent, rival):
    number = number_in(contender.source)
    fast = replace(figure(number), tflops=5000.0, suspect="5000 TFLOPS is above the 989 that a GPU can do")
    return Evaluation((passed(),), fast if number == 0 else figure(number))


def hanging_baseline(target, seed, failed):
    """cuDNN's kernel never ends; without it the others are timed, in a process that it has not touched."""
    if "CUDNN_ATTENTION" not in failed:
        os.environ["HUNG"] = "yes"
        return Rejection(Outcome.HUNG, "SDPA CUDNN_ATTENTION: no end after 10 s", "CUDNN_ATTENTION")
    assert "HUNG" not in os.environ
    return baselines_task(target, seed, failed)


def crashing_baselines(*_):
    return Rejection(Outcome.CRASHED, "no context")


def crashing_packages(target, seed, failed):
    """A package's code ends the process; without packages the library's are timed."""
    if "packages" not in failed:
        os.environ["CRASHED"] = "yes"
        return Rejection(Outcome.CRASHED, "SIGSEGV")
    assert "CRASHED" not in os.environ
    return [*baselines_task(target, seed, failed), RefusedBaseline("flash_attn", DEVICE, failed["packages"])]


def visible(*_):
    return [Baseline(os.environ["CUDA_VISIBLE_DEVICES"], "d", 1.0, 1.0, ())]


def rank_of_process():
    return os.nice(0), os.environ["CUDA_VISIBLE_DEVICES"]


def run_fault(name):
    return FAULTS[name]()


def start_and_wait(path):
    started = subprocess.Popen(["sleep", "300"])
    written = Path(f"{path}.part")
    written.write_text(str(started.pid))
    written.rename(path)
    return started.wait()


def refuse():
    raise UsageError("no such space")


def no_library():
    raise ImportError("no libcuda")


def note_warm():
    os.environ["WARMED_UP"] = str(os.getpid())


def was_warm():
    return os.environ.get("WARMED_UP") == str(os.getpid())


def has_torch_compiler(workload):
    """In a worker that has loaded what draws the workload's inputs and computes what is right; None: of Triton's."""
    import torch

    from evoengine.workloads import find_workload

    if workload:
        find_workload(workload).tensors()
    else:
        from evoengine.virtual.verify import uninitialized_as_nan

        with uninitialized_as_nan():
            assert torch.empty(9).isnan().all()
    return "torch._dynamo" in sys.modules


# ── models of the chip ───────────────────────────────────────────────────────────────────────────────────────────────


def predicted(number: int, us: float) -> Estimated:
    work()
    return Estimated(Measurement(Kind.ESTIMATED, f"model of {number}", 1e3 / us, us, terms={"predicted": 1.0}))


def right_model(target, contender, *_):
    number = number_in(contender.source)
    return predicted(number, 1e3 / (1 + number))


def near_model(target, contender, *_):
    """Expects every fifth to take longer than it does."""
    number = number_in(contender.source)
    return predicted(number, (1.15e3 if number % 5 == 4 else 1e3) / (1 + number))


def wrong_model(target, contender, *_):
    number = number_in(contender.source)
    return predicted(number, 1.0 + number)


def blind_model(target, contender, *_):
    return Estimated(None, "the model cannot read the binary")


def dying_model(target, contender, *_):
    """Whatever the number of a configuration is, its prediction does not come off."""
    return FAULTS[("segv", "exit", "garbage", "unpicklable")[number_in(contender.source) % 4]]()


def sleeping_model(*_):
    """Longer than any test may take."""
    time.sleep(3600)


def noted_model(path, target, contender, *_):
    with open(path, "a") as file:
        file.write(f"{number_in(contender.source)}\n")
    return right_model(target, contender)


def noted_compile(path, source, arch):
    with open(path, "a") as file:
        file.write(f"{number_in(source)}\n")
    return compile_task(source, arch)


# ── processes that candidates start ──────────────────────────────────────────────────────────────────────────────────


def leave_behind(path, then="return"):
    """A process in a session of its own, without a parent and with nothing in its environment, before what comes
    `then`."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            written = Path(f"{path}.part")
            written.write_text(str(os.getpid()))
            written.rename(path)
            os.execve("/bin/sleep", ["sleep", "300"], {})
        os._exit(0)
    while not Path(path).exists():
        time.sleep(WORK_SECONDS)
    return 1 if then == "return" else FAULTS[then]()


def start_many(count):
    children = [subprocess.Popen(["sleep", "300"]) for _ in range(count)]
    time.sleep(LATE_SECONDS)
    return len(children)


def hold_together(bytes_each, count):
    """Processes of which each is within the limit."""
    children = [subprocess.Popen([sys.executable, "-c", HOLD.format(bytes_each)]) for _ in range(count)]
    time.sleep(LATE_SECONDS)
    return len(children)


HOLD = "import time; held = bytearray(b'1') * {}; time.sleep(60)"


def scratch_file():
    with tempfile.NamedTemporaryFile(delete=False) as file:
        return file.name


# ── machines that fail ───────────────────────────────────────────────────────────────────────────────────────────────


def machine_says(number):
    raise OSError(number, os.strerror(number), "/some/file")


def open_everything():
    files = []
    while True:
        files.append(open(os.devnull))  # noqa: SIM115


def no_more_memory():
    """As on a machine that has given all: the kernel refuses, whatever the worker's own limit."""
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, 1 << 20))
    return bytes(1 << 30)


def compile_on_full_disk(source, arch):
    if number_in(source) == 3:
        machine_says(errno.ENOSPC)
    return compile_task(source, arch)


def explain_at_length():
    return Rejection(Outcome.UNCOMPILABLE, "x" * 1_000_000)
