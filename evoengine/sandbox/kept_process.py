"""Processes that a keeper (keeper.py) starts, and ends with all their descendants when this process ends.

`KeptContext` makes such processes for a pool. In all else they are `multiprocessing`'s spawned processes; what the
keeper reports of a worker replaces waitpid(2).
"""

from __future__ import annotations

import io
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from evoengine.sandbox import keeper
from evoengine.sandbox.machine import how_ended

IMPORTS = "evoengine.search.worker_imports"
"""the module that forked workers have imported"""
KILLED = -signal.SIGKILL
"""the exit code of a process whose keeper was killed, with which it dies"""
TRIES = 5
"""keepers that may be killed in succession while one process is requested"""


class KeeperLost(OSError):
    """The keeper was killed; the request may be repeated, and starts another one."""

    def __init__(self) -> None:
        super().__init__("the process that starts the others was killed")


class _Keeper:
    """The keeper process, started at the first request and again after it was killed."""

    def __init__(self, *imports: str) -> None:
        self._imports = imports
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()

    def ask(self, request: dict[str, Any], fds: list[int]) -> subprocess.Popen[bytes]:
        """Send a request, and return the guard of the keeper that handles it.

        Raises OSError if the keeper cannot be started, KeeperLost if it was killed.
        """
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._requests is not None and self._process is not None
            try:
                socket.send_fds(self._requests, [json.dumps(request).encode()], fds)
            except ConnectionError as error:
                await_guard(self._process)
                raise KeeperLost from error
            return self._process

    def _start(self) -> None:
        if self._requests is not None:
            self._requests.close()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", keeper.__file__, str(theirs.fileno()), *self._imports],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )


def _two_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Open two pipes. Raises OSError, leaving nothing open."""
    first = os.pipe()
    try:
        return first, os.pipe()
    except OSError:
        for fd in first:
            os.close(fd)
        raise


def await_guard(guard: subprocess.Popen[bytes]) -> None:
    """Wait until the guard has ended the processes of its keeper; kill the guard if it does not finish."""
    try:
        guard.wait(2 * keeper.END_SECONDS)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


_KEEPERS = {True: _Keeper(IMPORTS), False: _Keeper()}
"""whether processes are forked with `IMPORTS` → the keeper"""


@dataclass(frozen=True, slots=True)
class Held:
    """Limits of a process together with all its descendants."""

    processes: int
    bytes: int


class KeptProcess:
    """A worker or another process under a keeper."""

    def __init__(
        self,
        held: Held,
        command: Sequence[str] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        handles: Mapping[str, int] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        """Execute the command in the environment; without a command, fork a worker with `handles`.

        `handles` are those of `multiprocessing`. The process inherits these `fds` and no others. Raises OSError if it
        or its folder cannot be created.
        """
        request = {
            "processes": held.processes,
            "bytes": held.bytes,
            "handles": handles,
            "fds": fds,
            "command": command,
            "environment": environment,
        }
        self.why = ""
        self._code: int | None = None
        self._gone = False
        """whether the process, its descendants and its folder are gone"""
        self._reading = threading.Lock()
        for left in reversed(range(TRIES)):
            try:
                self.pid = self._start(_KEEPERS[command is None], request, fds)
                return
            except KeeperLost:
                if not left:
                    raise

    def _start(self, asked: _Keeper, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Start the process and return its pid."""
        self.folder = Path(tempfile.gettempdir(), f"{keeper.FOLDER}{secrets.token_hex(8)}")
        (self.status, status), (life, self._life) = _two_pipes()
        self._lines = open(self.status, "rb", buffering=0)  # noqa: SIM115 - closed in `close`
        what, rest = "", ""
        try:
            try:
                self._guard = asked.ask({**request, "folder": str(self.folder)}, [status, life, *fds])
            finally:
                os.close(status)
                os.close(life)
            what, _, rest = self._line().partition(" ")
            if not what:
                await_guard(self._guard)
                raise KeeperLost
            if what != "started":
                number, _, file = rest.partition(" ")
                raise OSError(int(number), os.strerror(int(number)), file)
        except OSError:
            os.close(self._life)
            self._lines.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._living = True
        return int(rest)

    def _line(self) -> str:
        line = self._lines.readline().decode(errors="replace").rstrip("\n")
        self._gone |= line == keeper.CLOSED
        return line

    def exit_code(self, wait: bool) -> int | None:
        """Return the exit code, or None if it is still running; with `wait`, wait for it. Any thread may call this."""
        if wait:
            self.wait(None)
        with self._reading:
            if self._code is None and self._is_readable(0):
                what, _, rest = self._line().partition(" ")
                code, _, self.why = rest.partition(" ")
                self._code = int(code) if what == "ended" else KILLED
            return self._code

    def wait(self, seconds: float | None) -> None:
        """Wait until the process and its descendants have ended; without limit if `seconds` is None."""
        self._is_readable(seconds)

    def _is_readable(self, seconds: float | None) -> bool:
        """Return whether the keeper has sent something; retry where the machine briefly cannot tell."""
        for _ in range(keeper.TRIES):
            with suppress(OSError):
                return bool(select.select([self._lines], [], [], seconds)[0])
            time.sleep(keeper.DIE_SECONDS)
        return False

    @property
    def stopped(self) -> bool:
        """Return whether the process is stopped, as by SIGSTOP."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
        return False

    def output_tail(self, most: int) -> str:
        """Return the last bytes of its output; call it before `end`."""
        with suppress(OSError), Path(self.folder, keeper.OUTPUT).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read().decode(errors="replace")
        return ""

    def end(self) -> None:
        """End the process with its descendants, and wait for that."""
        if self._living:
            self._living = False
            os.close(self._life)
        self.exit_code(wait=True)
        while self._line():
            continue
        if not self._gone:  # its keeper was killed
            await_guard(self._guard)
            self._gone = True

    def close(self) -> None:
        """Release its resources. The exit code may not be asked for afterwards."""
        if not self._lines.closed:
            self.end()
            self._lines.close()
            shutil.rmtree(self.folder, ignore_errors=True)  # of a keeper that was killed itself


QUIET = "ignore:resource_tracker"
"""in the form that `python -W` takes"""


def start_tracker() -> None:
    """Start multiprocessing's resource tracker without output to the program's stderr.

    It removes the semaphores of a killed program.
    """
    sys.warnoptions.append(QUIET)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(QUIET)


class KeptContext(SpawnContext):
    """The context of one worker.

    Its pool starts other processes when the first has ended; methods are about the first.
    """

    def __init__(self, held: Held, forked: bool) -> None:
        self._held, self._forked = held, forked
        self._kept: list[KeptProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # type: ignore[override] # a class there
        return _KeptProcess(self, *args, **kwargs)

    def start(self, handles: dict[str, int], fds: list[int]) -> KeptProcess:
        """Start a process. Raises OSError if the process or its folder cannot be created."""
        if self._forked:
            kept = KeptProcess(self._held, handles=handles, fds=fds)
        else:
            command = [*map(os.fsdecode, spawn.get_command_line(**handles))]
            kept = KeptProcess(self._held, command, environment=dict(os.environ), handles=handles, fds=fds)
        self._kept.append(kept)
        return kept

    @property
    def ended(self) -> bool:
        """Return whether the first process has ended."""
        return bool(self._kept) and self._kept[0].exit_code(wait=False) is not None

    @property
    def stopped(self) -> bool:
        """Return whether the first process is stopped, as by SIGSTOP."""
        return bool(self._kept) and self._kept[0].stopped

    def how_ended(self) -> str:
        """Return the signal or exit code of the first process, which has ended."""
        code = self._kept[0].exit_code(wait=False)
        assert code is not None  # `ended` was asked before
        return how_ended(code)

    def why_ended(self) -> str:
        """Return the limit for which the first process was ended; empty if there was none."""
        return self._kept[0].why if self._kept else ""

    def output_tail(self, most: int) -> str:
        """Return the last bytes that the first process printed. Valid before `end` is called."""
        return self._kept[0].output_tail(most) if self._kept else ""

    def end(self) -> None:
        """End every process with all its descendants, and remove their folders."""
        for kept in self._kept:
            kept.end()

    def close(self) -> None:
        """Release the context after `end`, when no exit code is needed any more."""
        for kept in self._kept:
            kept.close()


class _KeptProcess(SpawnProcess):
    def __init__(self, context: KeptContext, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._context = context

    def _Popen(self, process: BaseProcess) -> _KeptPopen:  # type: ignore[override] # it needs the context
        return _KeptPopen(process, self._context)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the keeper, which the worker process does not need."""
        return {name: value for name, value in self.__dict__.items() if name != "_context"}


class _KeptPopen(Popen):
    """The object by which multiprocessing starts a process, waits for it and signals it."""

    _fds: list[int]
    """descriptors that the process inherits"""

    def __init__(self, process: BaseProcess, context: KeptContext) -> None:
        self._context = context
        super().__init__(process)

    def _launch(self, process: BaseProcess) -> None:
        given = io.BytesIO()
        tracker = resource_tracker.getfd()
        assert tracker is not None  # it starts the tracker where there is none
        set_spawning_popen(self)
        try:
            reduction.dump(_preparation(process.name), given)
            reduction.dump(process, given)
        finally:
            set_spawning_popen(None)
        read, write = os.pipe()
        self.finalizer = util.Finalize(self, os.close, [write])
        try:
            handles = {"tracker_fd": tracker, "pipe_handle": read}
            self._kept = self._context.start(handles, [*dict.fromkeys([*self._fds, tracker, read])])
        finally:
            os.close(read)
        self.pid, self.sentinel = self._kept.pid, self._kept.status
        with suppress(BrokenPipeError), open(write, "wb", closefd=False) as pipe:
            pipe.write(given.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._kept.exit_code(wait=flag != os.WNOHANG)
        return self.returncode


def _preparation(name: str) -> dict[str, object]:
    """Return what the process imports first, without a main module that is not a file (a program on standard input)."""
    data = dict(spawn.get_preparation_data(name))
    main = data.get("init_main_from_path")
    if main is not None and not os.path.exists(str(main)):
        del data["init_main_from_path"]
    return data
