"""Starts the worker processes of a program, and ends them with all that they leave behind.

Run as a file, `keeper.py REQUESTS [IMPORTS]`. REQUESTS is a socket: each message on it asks for a worker, which is
forked from this process with what the module IMPORTS has imported, or executes a command. As a subreaper (prctl(2),
PR_SET_CHILD_SUBREAPER) it inherits every process that a worker's children leave behind, in whatever session they are.

To each worker belong two pipes. On `status` it writes `started PID` or `failed REASON`, then `ended CODE REASON`, and
closes it when nothing of the worker is left. When `life` closes it ends the worker and removes its folder; when
REQUESTS closes, because the program has ended however it did, all of them.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from multiprocessing import spawn
from typing import Any, NoReturn

OUTPUT = "output"
"""what a worker prints, in its folder"""
WATCH_SECONDS = 1.0
"""how often it looks at what the workers hold"""
DIE_SECONDS = 0.002
"""for what was killed, before it looks whether it has ended"""
END_SECONDS = 10.0
"""for ending what resists; a process that waits for a dead disk cannot be ended"""
REQUEST_BYTES, REQUEST_FDS = 1 << 20, 200
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""prctl(2)"""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STAT_BYTES = 4096
"""more than the kernel writes: a name and fifty numbers"""


class Processes:
    """All of the machine's, as they stood."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and (parent := _parent(name)):
                self._children.setdefault(parent, []).append(int(name))

    def below(self, pid: int) -> list[int]:
        """Every process below that one, parents before children."""
        found = [pid]
        for parent in found:
            found += self._children.get(parent, ())
        return found[1:]


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            # the second field is the name, which may hold anything
            return int(file.read(_STAT_BYTES).rpartition(b")")[2].split(None, 2)[1])
    except OSError:  # it has ended
        return 0


def resident_bytes(pids: Iterable[int]) -> int:
    """What these processes hold in memory together; pages they share count once for each."""
    pages = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/statm", encoding="utf-8") as file:
            pages += int(file.read().split()[1])
    return pages * _PAGE


class Worker:
    def __init__(self, request: dict[str, Any], fds: list[int]) -> None:
        """The first two of `fds` are its pipes, the others the process is to have by the numbers in the request."""
        self.status, self.life, *self._fds = fds
        self._request = request
        self.pid = 0
        self.code: int | None = None
        self.why = ""

    def start(self) -> None:
        """Raises OSError where its folder cannot be made or the process not be started."""
        folder = self._request["folder"]
        os.mkdir(folder, 0o700)
        output = os.open(os.path.join(folder, OUTPUT), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        keeper = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(output, keeper)
        for fd in (output, *self._fds):
            os.close(fd)

    def _become(self, output: int, keeper: int) -> NoReturn:
        code = 127
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(code)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(output, 1)
            os.dup2(output, 2)
            _take(self._fds, self._request["fds"])
            os.environ["TMPDIR"] = self._request["folder"]
            if command := self._request["command"]:
                os.execve(command[0], command, {**self._request["environment"], "TMPDIR": self._request["folder"]})
            code = _work(**self._request["handles"])
        finally:
            os._exit(code)

    def say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # nobody is left to read it
            os.write(self.status, f"{line}\n".encode())

    def look(self, processes: Processes) -> None:
        """Ends it where it holds too much."""
        held = [self.pid, *processes.below(self.pid)]
        if len(held) > self._request["processes"]:
            self.why = f"it had started more than {self._request['processes']} processes"
        elif resident_bytes(held) > self._request["bytes"]:
            limit = self._request["bytes"] / 2**30
            self.why = f"with all that it had started it took more than {limit:g} GiB of memory"
        if self.why:
            _signal([self.pid], signal.SIGKILL)

    def close(self) -> None:
        shutil.rmtree(self._request["folder"], ignore_errors=True)
        os.close(self.life)
        os.close(self.status)


def _take(fds: list[int], numbers: list[int]) -> None:
    """Gives the process these under the numbers they had where they come from, and no others."""
    free = max([2, *numbers, *fds]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, free) for fd in fds]
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
    start = 3
    for number in sorted(numbers):
        os.closerange(start, number)
        start = number + 1
    os.closerange(start, max(moved, default=free) + 1)


def _work(**handles: int) -> int:
    sys.argv[1:] = ["--multiprocessing-fork"]
    try:
        spawn.spawn_main(**handles)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


class Keeper:
    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._program = os.getppid()
        self._workers: list[Worker] = []

    def serve(self) -> None:
        """Until the program has ended."""
        wake, write = os.pipe()
        for fd in (wake, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        looked = 0.0
        while os.getppid() == self._program:  # a process that it forked may keep the socket open
            lives = {worker.life: worker for worker in self._workers}
            awaited = [self._requests.fileno(), wake, *lives]
            until_look = max(0.0, looked + WATCH_SECONDS - time.monotonic())
            ready, _, _ = select.select(awaited, [], [], until_look if lives else None)
            if wake in ready:
                os.read(wake, 1 << 16)
            self._end([worker for life, worker in lives.items() if life in ready])
            if self._requests.fileno() in ready and not self._take_request():
                break
            if wake in ready or time.monotonic() - looked >= WATCH_SECONDS:
                self._look()
                looked = time.monotonic()
        self._end(list(self._workers))

    def _take_request(self) -> bool:
        """False where the program has ended."""
        message, fds, _, _ = socket.recv_fds(self._requests, REQUEST_BYTES, REQUEST_FDS)
        if not message:
            return False
        worker = Worker(json.loads(message), fds)
        try:
            worker.start()
        except OSError as error:
            worker.say(f"failed {error.strerror}: {error.filename or 'a process cannot be started'}")
            for fd in fds:
                os.close(fd)
            return True
        self._workers.append(worker)
        worker.say(f"started {worker.pid}")
        return True

    def _look(self) -> None:
        """Says which workers have ended, once nothing that they started is left; looks at what the others hold."""
        if not self._workers:
            return
        ended, processes = self._reap(), Processes()
        if self._left_behind(processes):
            ended += self._end_below()
        for worker in ended:
            worker.say(f"ended {worker.code} {worker.why}")
        for worker in self._workers:
            if worker.code is None:
                worker.look(processes)

    def _end(self, workers: list[Worker]) -> None:
        if not workers:
            return
        for worker in workers:
            self._workers.remove(worker)
        for worker in self._end_below():
            worker.say(f"ended {worker.code} {worker.why}")
        for worker in workers:
            worker.close()

    def _left_behind(self, processes: Processes) -> set[int]:
        """Every process below this one but workers and what is below them: nobody waits for those."""
        kept = [worker.pid for worker in self._workers if worker.code is None]
        own = {pid for worker in kept for pid in (worker, *processes.below(worker))}
        return set(processes.below(os.getpid())) - own

    def _end_below(self) -> list[Worker]:
        """Stops what nobody waits for before it kills: what is stopped starts nothing more. Gives workers that ended
        meanwhile."""
        end = time.monotonic() + END_SECONDS
        stopped: set[int] = set()
        ended: list[Worker] = []
        while (new := self._left_behind(Processes()) - stopped) and time.monotonic() < end:
            _signal(new, signal.SIGSTOP)
            stopped |= new
        while stopped and time.monotonic() < end:
            _signal(stopped, signal.SIGKILL)
            time.sleep(DIE_SECONDS)
            ended += self._reap()
            stopped = self._left_behind(Processes())
        return ended

    def _reap(self) -> list[Worker]:
        """Takes in every process that has ended; gives the workers among them."""
        found = []
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for worker in self._workers:
                    if worker.code is None and worker.pid == ended[0]:
                        worker.code = os.waitstatus_to_exitcode(ended[1])
                        found.append(worker)
        return found


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it has nothing to end yet, and imports for seconds
    for module in sys.argv[2:]:
        with suppress(Exception):  # a worker that needs it says what is wrong
            import_module(module)
    prctl(_PR_SET_PDEATHSIG, 0)
    Keeper(requests).serve()


if __name__ == "__main__":
    main()
