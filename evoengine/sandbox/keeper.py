"""Start the worker processes of a program, and end them with all their descendants.

Run as a file, `keeper.py REQUESTS [IMPORTS]`. REQUESTS is a socket: each message on it asks for a worker, which is
forked from this process with what the module IMPORTS has imported, or executes a command. As a subreaper (prctl(2),
PR_SET_CHILD_SUBREAPER) it inherits every process that a worker's children leave behind, in whatever session they are.

To each worker belong two pipes. On `status` it writes `started PID` or `failed ERRNO FILE`, then `ended CODE REASON`,
and `closed` when nothing of the worker is left. When `life` closes it ends the worker and removes its folder; when
REQUESTS closes, because the program has ended however it did, all of them.

It is two processes. The program starts the guard, which waits for the other, the keeper. If the keeper is killed, the
guard inherits its processes and ends them; if the guard is killed, the keeper ends all processes and itself. Both
ignore the signals that ask a program to end: they live as long as their program.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from multiprocessing import spawn
from typing import Any, NoReturn

FOLDER = "evoengine-worker-"
"""prefix of workers' folders, each of which its keeper holds locked"""
CLOSED = "closed"
OUTPUT = "output"
"""file in a worker's folder with its output"""
ASKING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""signals that request a program to end"""
WATCH_SECONDS = 1.0
"""interval of checking the workers' processes and memory"""
DIE_SECONDS = 0.002
"""pause after killing processes, before checking that they have ended"""
TRIES = 100
"""attempts at calls that may fail briefly"""
END_SECONDS = 10.0
"""time limit of ending processes; one that waits for a dead disk cannot be ended"""
REQUEST_BYTES, REQUEST_FDS = 1 << 20, 200
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""prctl(2)"""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STAT_BYTES = 4096
"""more than the size of /proc/PID/stat: a name and fifty numbers"""


class Processes:
    """A snapshot of all processes of the machine."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] = {}
        for name in _listed("/proc"):
            if name.isdigit() and (parent := _parent(name)):
                self._children.setdefault(parent, []).append(int(name))

    def below(self, pid: int) -> list[int]:
        """Return every descendant of that process, parents before children."""
        found = [pid]
        for parent in found:
            found += self._children.get(parent, ())
        return found[1:]


def _listed(folder: str) -> list[str]:
    """List a folder as os.listdir does, retrying where the machine is briefly out of memory or files."""
    for _ in range(TRIES):
        with suppress(OSError):
            return os.listdir(folder)
        time.sleep(DIE_SECONDS)
    return os.listdir(folder)


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            # the second field is the name, which may contain anything
            return int(file.read(_STAT_BYTES).rpartition(b")")[2].split(None, 2)[1])
    except OSError:  # it has ended
        return 0


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of these processes in bytes; shared pages count once for each."""
    pages = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/statm", encoding="utf-8") as file:
            pages += int(file.read().split()[1])
    return pages * _PAGE


class Worker:
    def __init__(self, request: dict[str, Any], fds: list[int]) -> None:
        """Take a request and its descriptors.

        The first two of `fds` are the worker's pipes; the others are passed on under the numbers in the request.
        """
        self.status, self.life, *self._fds = fds
        self._request = request
        self.pid = 0
        self.code: int | None = None
        self.why = ""

    def start(self) -> None:
        """Start the process. Raises OSError if its folder cannot be created or the process cannot be started."""
        folder = self._request["folder"]
        self._lock = locked_folder(folder)
        try:
            output = os.open(os.path.join(folder, OUTPUT), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                keeper = os.getpid()
                self.pid = os.fork()
                if self.pid == 0:
                    self._become(output, keeper)
            finally:
                os.close(output)
        except OSError:
            self._remove_folder()
            raise
        for fd in self._fds:
            os.close(fd)

    def _become(self, output: int, keeper: int) -> NoReturn:
        code = 127
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(code)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGUSR1, *ASKING):
                signal.signal(number, signal.SIG_DFL)
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
        with suppress(BrokenPipeError):  # the reader has exited
            os.write(self.status, f"{line}\n".encode())

    def look(self, processes: Processes) -> None:
        """Kill the process if it exceeds its limit of processes or memory."""
        held = [self.pid, *processes.below(self.pid)]
        if len(held) > self._request["processes"]:
            self.why = f"it started more than {self._request['processes']} processes"
        elif resident_bytes(held) > self._request["bytes"]:
            limit = self._request["bytes"] / 2**30
            self.why = f"it and its descendants took more than {limit:g} GiB of memory"
        if self.why:
            _signal([self.pid], signal.SIGKILL)

    def close(self) -> None:
        self._remove_folder()
        self.say(CLOSED)
        os.close(self.life)
        os.close(self.status)

    def _remove_folder(self) -> None:
        shutil.rmtree(self._request["folder"], ignore_errors=True)
        os.close(self._lock)


def locked_folder(path: str) -> int:
    """Create the folder and return its lock, which shows others that its owner lives. Raises OSError."""
    while True:
        os.mkdir(path, 0o700)
        try:
            lock = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # another process has swept it as ownerless
            continue
        with suppress(OSError):  # this file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(path):
            return lock
        os.close(lock)


def sweep(parent: str) -> None:
    """Remove the folders of workers whose keeper and program were both killed."""
    for name in os.listdir(parent):
        if not name.startswith(FOLDER):
            continue
        path = os.path.join(parent, name)
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _prints_into(path):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _prints_into(folder: str) -> bool:
    """Return whether a process has the folder's output open; evoengine up to 0.1.0 locked no folder."""
    output = os.path.join(folder, OUTPUT)
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and os.readlink(f"/proc/{name}/fd/1") == output:
                return True
    return False


def _take(fds: list[int], numbers: list[int]) -> None:
    """Move these descriptors to the numbers they had in the sender, and close all others."""
    free = max([2, *numbers, *fds]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, free) for fd in fds]
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *numbers}:
        with suppress(OSError):  # the descriptor of the listing itself
            os.close(fd)


def _work(**handles: int) -> int:
    sys.argv[1:] = ["--multiprocessing-fork"]
    try:
        spawn.spawn_main(**handles)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


class Keeper:
    def __init__(self, requests: socket.socket, guard: int, program: int) -> None:
        self._requests = requests
        self._guard, self._program = guard, program
        self._workers: list[Worker] = []

    def _is_needed(self) -> bool:
        """Return whether guard and program are alive. A process that the program forked may keep the socket open."""
        return os.getppid() == self._guard and _parent(str(self._guard)) == self._program

    def serve(self) -> None:
        """Serve requests until the program or the guard has ended."""
        wake, write = os.pipe()
        for fd in (wake, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: None)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
        looked = 0.0
        while self._is_needed():
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
        """Handle the next request. Return False if the program has ended."""
        message, fds, _, _ = socket.recv_fds(self._requests, REQUEST_BYTES, REQUEST_FDS)
        if not message:
            return False
        worker = Worker(json.loads(message), fds)
        try:
            worker.start()
        except OSError as error:
            worker.say(f"failed {error.errno} {error.filename or 'a process cannot be started'}")
            for fd in fds:
                os.close(fd)
            return True
        self._workers.append(worker)
        worker.say(f"started {worker.pid}")
        return True

    def _look(self) -> None:
        """Report workers that have ended with all they started, and check the limits of the others."""
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
        """Return every descendant other than workers and their descendants: the orphans."""
        kept = [worker.pid for worker in self._workers if worker.code is None]
        own = {pid for worker in kept for pid in (worker, *processes.below(worker))}
        return set(processes.below(os.getpid())) - own

    def _end_below(self) -> list[Worker]:
        """End the orphans; return workers that ended meanwhile."""
        ended: list[Worker] = []
        _end_all(lambda: self._left_behind(Processes()), lambda: ended.extend(self._reap()))
        return ended

    def _reap(self) -> list[Worker]:
        """Reap every process that has ended; return the workers among them."""
        found = []
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for worker in self._workers:
                    if worker.code is None and worker.pid == ended[0]:
                        worker.code = os.waitstatus_to_exitcode(ended[1])
                        found.append(worker)
        return found


def _end_all(find: Callable[[], set[int]], reap: Callable[[], object]) -> None:
    """End all processes that `find` returns, however they resist.

    They are stopped before they are killed, since a stopped process starts no others.
    """
    end = time.monotonic() + END_SECONDS
    stopped: set[int] = set()
    while (new := find() - stopped) and time.monotonic() < end:
        _signal(new, signal.SIGSTOP)
        stopped |= new
    while stopped and time.monotonic() < end:
        _signal(stopped, signal.SIGKILL)
        time.sleep(DIE_SECONDS)
        reap()
        stopped = find()


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def guard(keeper: int) -> None:
    """Wait until the keeper has ended, then end the processes it has left."""

    def reap() -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue

    os.waitpid(keeper, 0)
    _end_all(lambda: set(Processes().below(os.getpid())), reap)


def keep(requests: socket.socket, guard: int, program: int, modules: Iterable[str]) -> None:
    """Start workers and end them, with `modules` imported in advance for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # safe while it has no workers, during seconds of imports
    gc.disable()  # imports leave hardly any garbage, and searching for it takes a sixth of their time
    for module in modules:
        with suppress(Exception):  # a worker that needs it will report the error
            import_module(module)
    gc.enable()
    gc.freeze()
    sweep(tempfile.gettempdir())
    Keeper(requests, guard, program).serve()


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    own, program = os.getpid(), os.getppid()
    keeper = os.fork()
    if keeper == 0:
        try:
            keep(requests, own, program, sys.argv[2:])
        finally:
            os._exit(0)
    requests.close()
    guard(keeper)


if __name__ == "__main__":
    main()
