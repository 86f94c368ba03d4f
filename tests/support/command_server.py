"""Runs `evoengine ARGUMENTS…` for tests in processes that need not import it: a process that has imported all of it
forks for each call, with that call's arguments, folder, environment and streams.

The call's keeper, which starts its workers, is forked too: a program's own imports for two seconds of a core, and that
it does is shown by tests/sandbox/test_keeper.py and by all searches that do not come through here.

A request is one line of JSON on a socket; the answer is a line with the call's exit code.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.space.space import load_space
from evoengine.stages.toolchain import nvrtc
from evoengine.workloads import parse_problem

ROOT = Path(__file__).parents[2]
SECONDS = 600
"""a call is ended after these"""
LOOK_SECONDS = 0.2
"""how often the process that forks looks whether anybody is left who calls"""
SOCKET = "socket"
PARTS = ("evoengine.cli", "evoengine.search", "evoengine.stages", "evoengine.timing")
"""they import all that a command does"""
STARTING = (["search"], ["verify"], ["measure"], ["best"], ["new"])
"""commands whose keeper is forked; that of another is started as programs do"""


class CommandServer:
    """Calls of the command line, one after the other; `scratch` is a folder for what they print.

    The process that forks is one for all pytest's processes that name the same `shared` folder. The first starts it,
    in the environment `env` (this process's unless given) and with the expressions of the spaces of `problems`; it ends
    after the last.
    """

    def __init__(
        self, scratch: Path, shared: Path, problems: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        self.out, self.err = scratch / "stdout", scratch / "stderr"
        self._connection = _connected(shared, [sys.executable, "-m", __name__, str(shared), *problems], env)
        self._lines = self._connection.makefile("r")

    def call(self, arguments: list[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        files = {"out": str(self.out), "err": str(self.err)}
        request = {"arguments": arguments, "cwd": str(cwd), "env": dict(env), **files}
        self._connection.sendall(f"{json.dumps(request)}\n".encode())
        code = int(self._lines.readline())
        return subprocess.CompletedProcess(arguments, code, self.out.read_text(), self.err.read_text())

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


def _connected(shared: Path, command: list[str], env: Mapping[str, str] | None) -> socket.socket:
    """To the server in that folder, which is started where none answers."""
    connection = socket.socket(socket.AF_UNIX)
    with FileLock(shared / "lock"), socket_in(shared) as path:
        try:
            connection.connect(path)
        except OSError:
            (shared / SOCKET).unlink(missing_ok=True)
            server = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            assert server.stdout.readline(), "the command server did not start"
            server.stdout.close()
            connection.connect(path)
    return connection


@contextmanager
def socket_in(folder: Path) -> Iterator[str]:
    """A path of the socket in it that is short: at most 107 characters are allowed."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


def listen(shared: Path) -> socket.socket:
    """The connection of one of those who call, in a process of its own; the process that forks ends after the last."""
    listener = socket.socket(socket.AF_UNIX)
    with socket_in(shared) as path:
        listener.bind(path)
    listener.listen()
    listener.settimeout(LOOK_SECONDS)
    print("ready", flush=True)
    sessions, end = set(), time.monotonic() + SECONDS
    while sessions or time.monotonic() < end:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            session = os.fork()
            if session == 0:
                listener.close()
                connection.setblocking(True)
                return connection
            connection.close()
            sessions.add(session)
        if ended := {session for session in sessions if os.waitpid(session, os.WNOHANG)[0]}:
            sessions, end = sessions - ended, 0.0
    sys.exit()


def serve(connection: socket.socket) -> None:
    """Answers requests; returns in the process of each call, to run the command there."""
    for line in connection.makefile("r"):
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.close(connection.detach())
            become(request)
            if request["arguments"][:1] in STARTING:
                fork_keeper()
            return
        _, status = os.waitpid(child, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(request: dict) -> None:
    signal.alarm(SECONDS)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    files = (os.devnull, os.O_RDONLY), (request["out"], os.O_WRONLY), (request["err"], os.O_WRONLY)
    for stream, (path, mode) in enumerate(files):
        file = os.open(path, mode | os.O_CREAT | os.O_TRUNC if mode else mode)
        os.dup2(file, stream)
        os.close(file)
    sys.argv = ["evoengine", *request["arguments"]]
    # what workers that are not forked import first
    sys.modules["__main__"] = importlib.import_module("evoengine.__main__")


def fork_keeper() -> None:
    """The keeper of workers that begin with what is imported; before this process has threads, which no fork survives.

    It ends with this process, as every keeper does.
    """
    from evoengine.sandbox import keeper, kept_process

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(silence, stream)
        sys.argv = [keeper.__file__, str(theirs.detach()), kept_process.IMPORTS]
        try:
            keeper.main()
        finally:
            os._exit(0)
    theirs.close()
    forked = kept_process._KEEPERS[True]
    forked._requests, forked._process = ours, Forked(pid)


class Forked:
    """What is asked of the guard's process: whether it lives. Where it was killed, one is started as programs do."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        try:
            ended, status = os.waitpid(self.pid, flags)
        except ChildProcessError:
            return -signal.SIGKILL
        return os.waitstatus_to_exitcode(status) if ended else None

    def wait(self, timeout: float) -> int | None:
        return self.poll(0)


def run_and_leave() -> None:
    """Ends as a process of its own does, but for the taking apart of all modules: that takes longer than most calls."""
    from evoengine.__main__ import main

    code: object = 1
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def prepare(problems: list[str]) -> None:
    """Import all that a command does; read what most calls begin with: NVRTC, and the expressions of spaces."""
    for part in PARTS:
        folder = importlib.import_module(part).__path__
        for module in pkgutil.walk_packages(folder, f"{part}."):
            importlib.import_module(module.name)
    for problem in problems:
        workload, parsed = parse_problem(problem)
        load_space(asset("search_spaces") / f"{workload.name}.toml", parsed, find_gpu("h100"))
    if "FAKE_CUDA_SOURCES" not in os.environ:  # a driver that may be another one in each call
        nvrtc()
    drop_farewells()


def drop_farewells() -> None:
    """Of what imported modules do when a process ends, what takes longer than most calls: torch takes its operators
    back, and Ray imports more of itself, whether it was used or not."""
    for finalizer in tuple(weakref.finalize._registry):
        if finalizer.peek()[1].__module__ == "torch.library":
            finalizer.atexit = False
    if "ray" in sys.modules:
        atexit.unregister(sys.modules["ray"].shutdown)


if __name__ == "__main__":
    prepare(sys.argv[2:])
    gc.collect()
    gc.freeze()  # or each call would walk through, and so copy, all that was imported
    serve(listen(Path(sys.argv[1])))
    run_and_leave()
