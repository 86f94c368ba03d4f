"""Worker processes that leave nothing behind (kept_process.py).

In all else they are `multiprocessing`'s spawned processes. What a pool needs of a context is here; what the keeper
reports of a worker replaces waitpid(2).
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from multiprocessing import reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import BaseProcess
from typing import Any

from evoengine.sandbox.kept_process import Held, KeptProcess
from evoengine.sandbox.machine import how_ended

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
    """Return what the process imports first; a program on standard input has no file that it could import."""
    data = dict(spawn.get_preparation_data(name))
    main = data.get("init_main_from_path")
    if main is not None and not os.path.exists(str(main)):
        del data["init_main_from_path"]
    return data
