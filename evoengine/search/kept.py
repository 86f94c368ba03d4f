"""Worker processes that leave nothing behind: a keeper (keeper.py) starts them, and ends with this process.

They are `multiprocessing`'s spawned processes in all else. What a pool needs of a context is here; what the keeper says
of a worker takes the place of waitpid(2).
"""

from __future__ import annotations

import io
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
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from evoengine.search import keeper

IMPORTS = "evoengine.search.worker_imports"
"""what forked workers begin with"""
KILLED = -9
"""the exit code of a worker whose keeper was killed: it dies with it"""


class _Keeper:
    """The process that starts workers, itself started when the first is asked for and again where it was killed."""

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
"""by whether workers are forked with what is imported"""


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker may hold with all that it has started."""

    processes: int
    bytes: int


class KeptContext(SpawnContext):
    """Of one worker. Its pool starts other processes when the first has ended; it is the first that is asked about."""

    def __init__(self, held: Held, forked: bool) -> None:
        self._held, self._forked = held, forked
        self._kept: list[_Kept] = []

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # type: ignore[override] # a class there
        return _KeptProcess(self, *args, **kwargs)

    def start(self, handles: dict[str, int], fds: list[int]) -> _Kept:
        """Raises OSError where a process or its folder cannot be made."""
        kept = _Kept(handles, fds, self._held, self._forked)
        self._kept.append(kept)
        return kept

    @property
    def ended(self) -> bool:
        """Whether the first process has."""
        return bool(self._kept) and self._kept[0].exit_code(wait=False) is not None

    def why_ended(self) -> str:
        """Which limit the first process was ended for; empty where for none."""
        return self._kept[0].why if self._kept else ""

    def output(self) -> Path | None:
        """What the first process printed; its folder is there until `end` is called."""
        return Path(self._kept[0].folder, keeper.OUTPUT) if self._kept else None

    def end(self) -> None:
        """Ends every process with all that it started, however they resist, and removes their folders."""
        for kept in self._kept:
            kept.end()

    def close(self) -> None:
        """After `end`, and when nothing asks for a process's exit code any more."""
        for kept in self._kept:
            kept.close()


class _Kept:
    """A worker process, as its keeper tells of it."""

    def __init__(self, handles: dict[str, int], fds: list[int], held: Held, forked: bool) -> None:
        self.folder = Path(tempfile.gettempdir(), f"evoengine-worker-{secrets.token_hex(8)}")
        self.why = ""
        self._code: int | None = None
        self._reading = threading.Lock()
        self.status, status = os.pipe()
        life, self._life = os.pipe()
        self._lines = open(self.status, "rb", buffering=0)  # noqa: SIM115 - closed in `close`
        self._living = True
        command = None if forked else [*map(os.fsdecode, spawn.get_command_line(**handles))]
        request = {
            "folder": str(self.folder), "processes": held.processes, "bytes": held.bytes, "handles": handles,
            "fds": fds, "command": command,
            "environment": None if forked else dict(os.environ),
        }  # fmt: skip
        said = ""
        try:
            _KEEPERS[forked].ask(request, [status, life, *fds])
        except OSError as error:
            said = str(error)
        finally:
            os.close(status)
            os.close(life)
        what, _, rest = self._line().partition(" ") if not said else ("", "", said)
        if what != "started":
            self.close()
            raise OSError(rest or "the process that starts the workers has ended")
        self.pid = int(rest)

    def _line(self) -> str:
        return self._lines.readline().decode(errors="replace").rstrip("\n")

    def exit_code(self, wait: bool) -> int | None:
        """None where the worker has not ended yet, and without `wait` is not waited for. Any thread may ask."""
        if wait:
            select.select([self._lines], [], [])
        with self._reading:
            if self._code is None and select.select([self._lines], [], [], 0)[0]:
                what, _, rest = self._line().partition(" ")
                code, _, self.why = rest.partition(" ")
                self._code = int(code) if what == "ended" else KILLED
            return self._code

    def end(self) -> None:
        """Waits until the keeper has closed its side: nothing of the worker is left then."""
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


class _KeptProcess(SpawnProcess):
    def __init__(self, context: KeptContext, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._context = context

    def _Popen(self, process: BaseProcess) -> _KeptPopen:  # type: ignore[override] # it needs the context
        return _KeptPopen(process, self._context)

    def __getstate__(self) -> dict[str, Any]:
        """The worker's process, which is given this one pickled, has no need of the keeper."""
        return {name: value for name, value in self.__dict__.items() if name != "_context"}


class _KeptPopen(Popen):
    """multiprocessing asks it to start the process, how it ended, and to send it signals."""

    _fds: list[int]
    """that the process is to have"""

    def __init__(self, process: BaseProcess, context: KeptContext) -> None:
        self._context = context
        super().__init__(process)

    def _launch(self, process: BaseProcess) -> None:
        given = io.BytesIO()
        tracker = resource_tracker.getfd()
        assert tracker is not None  # it starts the tracker where there is none
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), given)
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
