"""Worker processes that leave nothing behind: each is started by a keeper (keeper.py), which ends with this process.

They are `multiprocessing`'s spawned processes in all else. What a pool needs of a context is here; what the keeper says
of the worker takes the place of waitpid(2).
"""

from __future__ import annotations

import io
import os
import secrets
import select
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing import reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from evoengine.search import keeper

KILLED = -9
"""the exit code of a worker whose keeper was killed: it dies with it"""


class KeptContext(SpawnContext):
    """Of one worker. Its pool starts other processes when the first has ended; it is the first that is asked about."""

    def __init__(self, most_processes: int, most_bytes: int) -> None:
        self._limits = most_processes, most_bytes
        self._kept: list[_Kept] = []

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # type: ignore[override] # a class there
        return _KeptProcess(self, *args, **kwargs)

    def start(self, command: list[str], fds: list[int]) -> _Kept:
        """Raises OSError where a process or its folder cannot be made."""
        kept = _Kept(command, fds, *self._limits)
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
    """A keeper and its worker."""

    def __init__(self, command: list[str], fds: list[int], most_processes: int, most_bytes: int) -> None:
        self.folder = Path(tempfile.gettempdir(), f"evoengine-worker-{secrets.token_hex(8)}")
        self.why = ""
        control, self._control = os.pipe()
        self.status, status = os.pipe()
        limits = (str(n) for n in (os.getpid(), control, status, most_processes, most_bytes))
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(self.folder), *limits, *command],
                pass_fds=[*fds, control, status], env={**os.environ, "TMPDIR": str(self.folder)},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(self._control)
            os.close(self.status)
            raise
        finally:
            os.close(control)
            os.close(status)
        self._lines = open(self.status, "rb", buffering=0)  # noqa: SIM115 - closed in `close`
        self._reading = threading.Lock()
        self._code: int | None = None
        what, _, said = self._line().partition(" ")
        if what != "started":
            self.close()
            raise OSError(said or "the keeper of a worker process ended before it had started it")
        self.pid = int(said)

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
        if self._keeper.returncode is None:
            os.close(self._control)
            self._keeper.wait()

    def close(self) -> None:
        """Nobody may ask for the exit code any more."""
        self.end()
        self._lines.close()


class _KeptProcess(SpawnProcess):
    def __init__(self, context: KeptContext, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._context = context

    def _Popen(self, process: BaseProcess) -> _KeptPopen:  # type: ignore[override] # it needs the context
        return _KeptPopen(process, self._context)

    def __getstate__(self) -> dict[str, Any]:
        """The worker's process, which is given this one pickled, has no need of the keepers."""
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
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=read)
            self._kept = self._context.start(command, [*self._fds, tracker, read])
        finally:
            os.close(read)
        self.pid, self.sentinel = self._kept.pid, self._kept.status
        with suppress(BrokenPipeError), open(write, "wb", closefd=False) as pipe:
            pipe.write(given.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._kept.exit_code(wait=flag != os.WNOHANG)
        return self.returncode
