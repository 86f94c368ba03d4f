"""Stands between a search and one worker process, so that whatever the worker starts ends with the worker.

Run as a file, `keeper.py FOLDER PARENT CONTROL STATUS PROCESSES BYTES COMMAND…`, with nothing of evoengine imported. It
makes FOLDER, which is the worker's temporary folder and takes its output, and starts COMMAND. As a subreaper (prctl(2),
PR_SET_CHILD_SUBREAPER) it inherits every process that the worker's children leave behind, in whatever session they are.

It writes lines to the pipe STATUS: `started PID` or `failed REASON`, then `ended CODE REASON`. When CONTROL closes or
PARENT, which started it, is gone, it ends everything below it, removes FOLDER and exits.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NoReturn

OUTPUT = "output"
"""what the worker prints, in FOLDER"""
WATCH_SECONDS = 1.0
"""how often it looks at what the worker holds"""
END_SECONDS = 10.0
"""for ending what resists; a process that waits for a dead disk cannot be ended"""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""prctl(2)"""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def below(pid: int) -> list[int]:
    """Every process below that one, parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent(name)):
            children.setdefault(parent, []).append(int(name))
    found = [pid]
    for parent in found:
        found += children.get(parent, ())
    return found[1:]


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the second field is the name, which may hold anything
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:  # it has ended
        return 0


def resident_bytes(pids: Iterable[int]) -> int:
    """What these processes hold in memory together; pages they share count once for each."""
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                pages += int(file.read().split()[1])
        except OSError:
            continue
    return pages * _PAGE


class Keeper:
    def __init__(self, status: int, most_processes: int, most_bytes: int) -> None:
        self._status, self._most_processes, self._most_bytes = status, most_processes, most_bytes
        self._worker = 0
        self._code: int | None = None
        self._why = ""

    def start(self, folder: str, command: list[str]) -> None:
        """Raises OSError where the folder cannot be made or the process not be started."""
        os.mkdir(folder, 0o700)
        output = os.open(os.path.join(folder, OUTPUT), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        keeper = os.getpid()
        self._worker = os.fork()
        if self._worker == 0:
            _become(command, output, keeper)
        os.close(output)
        self.say(f"started {self._worker}")

    def say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # nobody is left to read it
            os.write(self._status, f"{line}\n".encode())

    def look(self) -> None:
        """Says how the worker ended, once nothing that it started is left; ends it where it holds too much."""
        if self._code is not None:
            return
        self._reap()
        if self._code is not None:
            self.end_all()
            self.say(f"ended {self._code} {self._why}")
            return
        every = below(os.getpid())
        own = [self._worker, *below(self._worker)]
        _signal(set(every) - set(own), signal.SIGKILL)  # left behind by what has ended
        if len(own) > self._most_processes:
            self._why = f"it had started more than {self._most_processes} processes"
        elif resident_bytes(own) > self._most_bytes:
            self._why = f"with all that it had started it took more than {self._most_bytes / 2**30:g} GiB of memory"
        if self._why:
            _signal([self._worker], signal.SIGKILL)

    def end_all(self) -> None:
        """Stops everything below before it kills: what is stopped starts nothing more."""
        end = time.monotonic() + END_SECONDS
        stopped: set[int] = set()
        while (new := set(below(os.getpid())) - stopped) and time.monotonic() < end:
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(stopped, signal.SIGKILL)
        while self._reap() and time.monotonic() < end:
            time.sleep(0.005)
            _signal(below(os.getpid()), signal.SIGKILL)

    def _reap(self) -> bool:
        """Takes in every process that has ended; whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._worker:
                self._code = os.waitstatus_to_exitcode(status)


def _become(command: list[str], output: int, keeper: int) -> NoReturn:
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.execv(command[0], command)
    finally:
        os._exit(127)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def main() -> None:
    folder, (parent, control, status, most_processes, most_bytes) = sys.argv[1], map(int, sys.argv[2:7])
    os.set_inheritable(control, False)
    os.set_inheritable(status, False)
    ended, wake = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    keeper = Keeper(status, most_processes, most_bytes)
    try:
        keeper.start(folder, sys.argv[7:])
    except OSError as error:
        keeper.say(f"failed {error.strerror}: {error.filename or 'a process cannot be started'}")
        return
    try:
        while os.getppid() == parent:
            ready, _, _ = select.select([control, ended], [], [], WATCH_SECONDS)
            if control in ready:
                break
            if ended in ready:
                os.read(ended, 4096)
            keeper.look()
    finally:
        keeper.end_all()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
