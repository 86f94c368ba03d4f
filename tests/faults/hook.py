"""Has one call of one call site meet a fault, by the library of library.c.

The interpreter tells of every call before it is made: at the site the library is armed for the thread, and disarmed
when the call returns. Whatever the call is made of, Python or C, what fails is a function of the C library.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

AROUND = ("call", "helper")
"""functions that decorators put around what is called: `ledger.transactions.patient`, `contextlib.contextmanager`"""
VARIABLE = "EVOENGINE_TEST_FAULT"
"""a Fault as JSON, for a process that this one starts"""


@dataclass(frozen=True, slots=True)
class Fault:
    file: str
    """the module's path"""
    lines: tuple[tuple[int, int], ...]
    """of the calls of the site, first and last"""
    name: str
    """of what is called, without what stands before its last dot"""
    function: str = ""
    """of the C library; empty where the process kills itself at the site"""
    error: int = 0
    always: bool = False
    """whether each call of the site fails, and not the first alone, in whatever process that is"""
    notes: str = ""
    """a file that is made when the fault has been met"""

    @property
    def is_met(self) -> bool:
        return not self.always and os.path.exists(self.notes)

    def text(self) -> str:
        return json.dumps(asdict(self))


def read(text: str) -> Fault:
    values = json.loads(text)
    return Fault(**{**values, "lines": tuple(map(tuple, values["lines"]))})


class _Hook:
    """Arms the library at the site. While no call of the site is made, an event costs two comparisons."""

    def __init__(self, fault: Fault) -> None:
        self._fault, self._file = fault, fault.file
        self._library = ctypes.CDLL(None)
        self._made: dict[int, tuple[FrameType, str]] = {}
        """thread → the call of the site that it makes: its frame, and the event that began it"""
        self._is_over = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            site = frame.f_back
        elif event == "c_call":
            site = frame
        else:
            if self._made:
                self._end(frame, event)
            return
        if site is not None and site.f_code.co_filename == self._file and not self._is_over:
            self._begin(site, frame, event, argument)

    def _begin(self, site: FrameType, frame: FrameType, event: str, called: Any) -> None:
        fault, thread = self._fault, threading.get_ident()
        if thread in self._made or not self._is_here(site, frame, called):
            return
        if fault.is_met:  # in another process
            self._is_over = True
            return
        self._note()
        if fault.function == "clock":
            self._library.fault_clock(fault.error)
            self._is_over = True
            return
        if not fault.function:
            os.kill(os.getpid(), signal.SIGKILL)
        self._made[thread] = frame, event
        self._library.fault_arm(fault.function.encode(), fault.error, int(fault.always))

    def _end(self, frame: FrameType, event: str) -> None:
        thread = threading.get_ident()
        began, how = self._made.get(thread, (None, ""))
        if frame is began and event in (("return",) if how == "call" else ("c_return", "c_exception")):
            del self._made[thread]
            met = self._library.fault_disarm()
            self._is_over = bool(met) and not self._fault.always

    def _is_here(self, site: FrameType, frame: FrameType, called: Any) -> bool:
        if not any(first <= site.f_lineno <= last for first, last in self._fault.lines):
            return False
        if frame is site:
            return bool(called.__name__ == self._fault.name)
        made = frame.f_locals.get("self")
        return frame.f_code.co_name in (self._fault.name, *AROUND) or (
            frame.f_code.co_name == "__init__" and type(made).__name__ == self._fault.name
        )

    def _note(self) -> None:
        if self._fault.notes:
            os.close(os.open(self._fault.notes, os.O_WRONLY | os.O_CREAT, 0o600))


def install(fault: Fault) -> None:
    """From now on, in this thread and those that begin later."""
    hook = _Hook(fault)
    threading.setprofile(hook)
    sys.setprofile(hook)


def install_from_environment() -> None:
    if text := os.environ.get(VARIABLE):
        install(read(text))
