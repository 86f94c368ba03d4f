"""Processes that leave nothing behind: a keeper (keeper.py) starts them and ends them with this process."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from evoengine.sandbox import keeper

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

        Raises OSError where the keeper cannot be started, KeeperLost where it was killed.
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
    """Wait until the guard has ended what its keeper left; kill it where it does not finish."""
    try:
        guard.wait(2 * keeper.END_SECONDS)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


_KEEPERS = {True: _Keeper(IMPORTS), False: _Keeper()}
"""by whether processes are forked with `IMPORTS`"""


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

        `handles` are as `multiprocessing` has them. The process inherits these `fds` and no others. Raises OSError
        where it or its folder cannot be created.
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
        """whether nothing of it is left"""
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
        """Wait until the process and all it left behind have ended; without a limit if `seconds` is None."""
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
        """End the process, and wait until nothing of it is left."""
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
