"""Robust standard streams, and the signals that end a command.

Streams may be closed, full, without a reader, or unable to encode a character. Writing never raises; failures are
reported at the end and decide the exit code. The first signal ends a command with its results so far.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

INTERRUPTED = 130
"""exit code after a signal"""
LETTERS = {
    "µ": "u",
    "·": "-",
    "–": "-",
    "—": "-",
    "…": "...",
    "→": "->",
    "×": "x",
    "≥": ">=",
    "≤": "<=",
    "±": "+-",
    "²": "^2",
    "ᵀ": "^T",
    "√": "sqrt ",
    "Σ": "sum ",
    "ρ": "rho",
    "✓": "ok",
    "✗": "no",
    "’": "'",
}
"""replacements for evoengine's own characters in encodings without them"""
_ERRORS = "evoengine.readable"
_NAMES = {1: "stdout", 2: "stderr"}


class Stream(io.FileIO):
    """A file descriptor that accepts all writes, and keeps the error of the first one that failed."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data)
        while self.failure is None:
            try:
                written = super().write(view)
            except OSError as error:
                self.failure = error
            else:
                if written is not None:
                    return written
                select.select([], [self], [])  # it is non-blocking, and its reader is slow
        return view.nbytes


_streams: dict[int, tuple[TextIO, Stream]] = {}


def prepare_streams() -> None:
    """Wrap sys.stdout and sys.stderr in a `Stream`, unless the calling program has replaced them.

    A closed standard stream is opened on /dev/null, so that no file that is opened later gets its number. A program
    that closes stderr gets no messages; one that closes stdout loses the result, which is reported.
    """
    codecs.register_error(_ERRORS, readable)
    for fd, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, mode)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _wrapped(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _wrapped(2, sys.stderr)


def _wrapped(fd: int, old: TextIO | None) -> TextIO:
    raw = Stream(fd, "w", closefd=False)
    text = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=old.encoding if old else "utf-8",
        errors=_ERRORS,
        line_buffering=fd == 2 or os.isatty(fd),
        write_through=fd == 2,
    )
    if old is not None:
        old.flush()
    _streams[fd] = text, raw
    return text


def readable(error: UnicodeError) -> tuple[str, int]:
    r"""Return a replacement for text that an encoding cannot represent.

    It is that of LETTERS for evoengine's own characters, `\xff` for a byte of a file name, and `\u1234` otherwise.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_readable, error.object[error.start : error.end])), error.end


def _readable(letter: str) -> str:
    if letter in LETTERS:
        return LETTERS[letter]
    code = ord(letter)
    if 0xDC80 <= code <= 0xDCFF:  # os.fsdecode: a byte that is not text
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def unwritten() -> dict[str, OSError]:
    """Return the streams among stdout and stderr that could not be written, each with the error."""
    for text, _ in _streams.values():
        text.flush()
    return {_NAMES[fd]: raw.failure for fd, (_, raw) in _streams.items() if raw.failure is not None}


def reader_exited(failure: OSError) -> bool:
    """Return whether the reader has exited, as in `evoengine history | less`."""
    return failure.errno == errno.EPIPE


def stop_on_signal(stop: Callable[[], None]) -> Callable[[], bool]:
    """Call `stop` on the first Ctrl-C, SIGTERM or SIGHUP; a second Ctrl-C ends the command at once.

    The function returned tells whether a signal arrived. SIGHUP and SIGINT stay ignored if the parent ignores them, as
    nohup and scripts do for background jobs.
    """
    seen: list[int] = []
    heeded = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]

    def handle(number: int, frame: object) -> None:
        seen.append(number)
        stop()
        if signal.SIGINT in heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for each in (signal.SIGTERM, *heeded):
        signal.signal(each, handle)
    return lambda: bool(seen)
