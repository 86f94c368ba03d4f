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
"""functions that decorators put around what is called: evoengine.ledger.patience.patient, contextlib.contextmanager"""
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
    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._library = ctypes.CDLL(None)
        self._of_thread = threading.local()
        self._is_over = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        fault, thread = self._fault, self._of_thread
        if self._is_over:
            return
        if event in ("call", "c_call"):
            site = frame if event == "c_call" else frame.f_back
            if getattr(thread, "depth", None) is None and site is not None and self._is_here(site, frame, argument):
                if fault.is_met:  # in another process
                    self._is_over = True
                    return
                thread.depth = frame, event
                self._note()
                if fault.function == "clock":
                    self._library.fault_clock(fault.error)
                    self._is_over = True
                    return
                if not fault.function:
                    os.kill(os.getpid(), signal.SIGKILL)
                self._library.fault_arm(fault.function.encode(), fault.error, int(fault.always))
        elif getattr(thread, "depth", None) is not None:
            began, of = thread.depth
            ends = ("return",) if of == "call" else ("c_return", "c_exception")
            if frame is began and event in ends:
                thread.depth = None
                met = self._library.fault_disarm()
                self._is_over = bool(met) and not fault.always

    def _is_here(self, site: FrameType, frame: FrameType, called: Any) -> bool:
        if site.f_code.co_filename != self._fault.file:
            return False
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
