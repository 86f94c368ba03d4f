"""Processes that leave nothing behind: a keeper (keeper.py) starts them, and ends with this process."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoengine import keeper

IMPORTS = "evoengine.search.worker_imports"
"""what forked workers begin with"""
KILLED = -9
"""the exit code of a process whose keeper was killed: it dies with it"""


class _Keeper:
    """The process that starts others, itself started when the first is asked for and again where it was killed."""

    def __init__(self, *imports: str) -> None:
        self._imports = imports
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()

    def ask(self, request: dict[str, Any], fds: list[int]) -> None:
        """Raises OSError where it cannot be started or reached."""
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._requests is not None
            socket.send_fds(self._requests, [json.dumps(request).encode()], fds)

    def _start(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", keeper.__file__, str(theirs.fileno()), *self._imports],
                pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip


_KEEPERS = {True: _Keeper(IMPORTS), False: _Keeper()}
"""by whether a process is forked with what is imported"""


@dataclass(frozen=True, slots=True)
class Held:
    """What a process may hold with all that it has started."""

    processes: int
    bytes: int


class KeptProcess:
    """A worker or another process, as its keeper tells of it."""

    def __init__(
        self, held: Held, command: Sequence[str] | None = None, *, environment: Mapping[str, str] | None = None,
        handles: Mapping[str, int] | None = None, fds: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Executes the command, with the environment; a worker with `handles`, as `multiprocessing` has them, is forked
        where there is none. It has these `fds` and no others. Raises OSError where it or its folder cannot be made."""
        self.folder = Path(tempfile.gettempdir(), f"evoengine-worker-{secrets.token_hex(8)}")
        self.why = ""
        self._code: int | None = None
        self._reading = threading.Lock()
        self.status, status = os.pipe()
        life, self._life = os.pipe()
        self._lines = open(self.status, "rb", buffering=0)  # noqa: SIM115 - closed in `close`
        self._living = True
        request = {
            "folder": str(self.folder), "processes": held.processes, "bytes": held.bytes, "handles": handles,
            "fds": fds, "command": command, "environment": environment,
        }  # fmt: skip
        said = ""
        try:
            _KEEPERS[command is None].ask(request, [status, life, *fds])
        except OSError as error:
            said = str(error)
        finally:
            os.close(status)
            os.close(life)
        what, _, rest = self._line().partition(" ") if not said else ("", "", said)
        if what != "started":
            self.close()
            raise OSError(rest or "the process that starts the others has ended")
        self.pid = int(rest)

    def _line(self) -> str:
        return self._lines.readline().decode(errors="replace").rstrip("\n")

    def exit_code(self, wait: bool) -> int | None:
        """None where it has not ended yet, and without `wait` is not waited for. Any thread may ask."""
        if wait:
            self.wait(None)
        with self._reading:
            if self._code is None and select.select([self._lines], [], [], 0)[0]:
                what, _, rest = self._line().partition(" ")
                code, _, self.why = rest.partition(" ")
                self._code = int(code) if what == "ended" else KILLED
            return self._code

    def wait(self, seconds: float | None) -> None:
        """Until it has ended, with whatever it has left behind; None is however long it takes."""
        select.select([self._lines], [], [], seconds)

    def output_tail(self, most: int) -> str:
        """The last bytes of what it printed, before `end` is called."""
        with suppress(OSError), Path(self.folder, keeper.OUTPUT).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read().decode(errors="replace")
        return ""

    def end(self) -> None:
        """Ends it, and waits until the keeper has closed its side: nothing of it is left then."""
        if self._living:
            self._living = False
            os.close(self._life)
        while self.exit_code(wait=True) is not None and self._lines.read(1):
            continue

    def close(self) -> None:
        """Nobody may ask for the exit code any more."""
        if not self._lines.closed:
            self.end()
            self._lines.close()
            shutil.rmtree(self.folder, ignore_errors=True)  # of a keeper that was killed itself
