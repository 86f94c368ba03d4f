"""Runs `evoengine ARGUMENTS…` for tests in processes that need not import it: a process that has imported all of it
forks for each call, with that call's arguments, folder, environment and streams.

The call's keeper, which starts its workers, is forked too: a program's own imports for two seconds of a core, and that
it does is shown by tests/search/test_keeper.py and by all searches that do not come through here.

A request is one line of JSON on standard input; the answer is a line with the call's exit code.
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
import traceback
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 600
"""a call is ended after these"""
PARTS = ("evoengine.cli", "evoengine.search", "evoengine.stages")
"""they import all that a command does"""
STARTING = (["search"], ["verify"], ["measure"], ["best"], ["new"])
"""commands whose keeper is forked; that of another is started as programs do"""


class CommandServer:
    """Calls of the command line, one after the other; `scratch` is a folder for what they print.

    `env` is the environment in which the modules are imported; this process's unless given.
    """

    def __init__(self, scratch: Path, env: Mapping[str, str] | None = None) -> None:
        self.out, self.err = scratch / "stdout", scratch / "stderr"
        command = [sys.executable, "-m", __name__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)

    def call(self, arguments: list[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        files = {"out": str(self.out), "err": str(self.err)}
        request = {"arguments": arguments, "cwd": str(cwd), "env": dict(env), **files}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, self.out.read_text(), self.err.read_text())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    """Answers requests; returns in the process of each call, to run the command there."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            become(request)
            if request["arguments"][:1] in STARTING:
                fork_keeper()
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


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


def fork_keeper() -> None:
    """The keeper of workers that begin with what is imported; before this process has threads, which no fork survives.

    It ends with this process, as every keeper does.
    """
    from evoengine import keeper, kept_process

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
    """What is asked of the keeper's process: whether it lives. Where it was killed, one is started as programs do."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        try:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return -signal.SIGKILL
        return os.waitstatus_to_exitcode(status) if ended else None


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


if __name__ == "__main__":
    for part in PARTS:
        folder = importlib.import_module(part).__path__
        for module in pkgutil.walk_packages(folder, f"{part}."):
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # or each call would walk through, and so copy, all that was imported
    serve()
    run_and_leave()
