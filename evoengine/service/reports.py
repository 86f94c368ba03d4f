"""The reports of /report: each is drawn once for what the ledger then held, by a process of its own.

Drawing takes a core for seconds, and plotly's half holds the interpreter for all of them: in this process everybody
would wait. Few are drawn at once; who asks for another one meanwhile is told when to come again.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import sys
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from evoengine.errors import EvoengineError, MachineError, NothingFound, UsageError
from evoengine.kept_process import Held, KeptProcess
from evoengine.machine import how_ended
from evoengine.paths import FILE_VARIABLE, URL_VARIABLE
from evoengine.service.answers import Question, ledger_state
from evoengine.service.database import Database
from evoengine.service.lanes import Lane, Threads, busy

AT_ONCE, WAITING = 2, 4
"""reports that are drawn, and that wait for that"""
LOOKING = 1
"""reports of which it is asked whether the ledger has changed since they were drawn"""
MOST_UNDER_WAY = 20
"""reports that are looked after in any way"""
KEPT = 8
"""of 1.4 MB each, most of it plotly"""
DRAW_SECONDS = 120.0
HELD = Held(processes=64, bytes=4 << 30)
PAGE = "page"
"""file that a drawing process leaves in its folder"""
SAID_BYTES = 1000
ERRORS: dict[int, type[EvoengineError]] = {error.exit_code: error for error in (NothingFound, UsageError, MachineError)}
Target = tuple[str | None, str | None]
"""problem and GPU"""


@dataclass(frozen=True, slots=True)
class Report:
    packed: bytes
    """the page, by gzip: sent so, for 45 readers of 5 MB each would be heard by nobody else"""
    etag: str
    state: object
    """of the ledger when it was drawn, or before"""


class Reports:
    """Used in the server's event loop alone."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._looks, self._drawing = Threads(LOOKING), Lane(AT_ONCE, WAITING)
        self._starts = Threads(AT_ONCE)
        self._kept: OrderedDict[Target, Report] = OrderedDict()
        self._under_way: dict[Target, asyncio.Task[Report]] = {}

    async def find(self, problem: str | None, gpu: str | None) -> Report:
        """Return a report. Raises as `draw_report`, and HTTPException, 503, if too many others are requested."""
        target = problem, gpu
        finding = self._under_way.get(target)
        if finding is None:
            if len(self._under_way) >= MOST_UNDER_WAY:
                raise busy("too many reports are asked for")
            finding = self._under_way[target] = asyncio.create_task(self._find(target))
            finding.add_done_callback(lambda done: self._under_way.pop(target, None))
        return await asyncio.shield(finding)  # who asked first may be gone before it is drawn

    async def _find(self, target: Target) -> Report:
        problem, gpu = target
        state = await self._looks.run(ledger_state, self._db, Question(gpu, problem))
        kept = self._kept.get(target)
        if kept is not None and kept.state == state:
            return kept
        async with self._drawing.turn():
            packed = await _drawn(self._starts, self._db.url, problem, gpu)
        report = self._kept[target] = Report(packed, f'"{hashlib.sha256(packed).hexdigest()}"', state)
        self._kept.move_to_end(target)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return report


async def _drawn(starting: Threads, url: str, problem: str | None, gpu: str | None) -> bytes:
    """Return the page, by gzip. The keeper starts the process: a fork of this one would hold up everybody."""
    named = [f"{name}={value}" for name, value in (("problem", problem), ("gpu", gpu)) if value is not None]
    environment = {name: value for name, value in os.environ.items() if name != FILE_VARIABLE}
    environment |= {URL_VARIABLE: url, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        process = await starting.run(
            KeptProcess, HELD, [sys.executable, "-m", __name__, *named], environment=environment
        )
    except OSError as error:
        raise MachineError(f"no process can be started to draw the report: {error.strerror}") from error
    try:
        code = await _exit_code(process)
        if code == 0:
            return Path(process.folder, PAGE).read_bytes()
        said = process.output_tail(SAID_BYTES).strip().splitlines()
        why = said[-1] if said else f"the report cannot be drawn: {process.why or how_ended(code)}"
        raise ERRORS.get(code, MachineError)(why)
    finally:
        await starting.run(process.close)


async def _exit_code(process: KeptProcess) -> int:
    """Wait for the process to end. Raises MachineError if it takes too long."""
    await asyncio.to_thread(process.wait, DRAW_SECONDS)  # a cancelled request leaves the thread, and closes the process
    code = process.exit_code(wait=False)
    if code is None:
        raise MachineError(f"the report was not drawn in {DRAW_SECONDS:g} s")
    return code


def main() -> int:
    """Write one report, of the ledger that the environment names, to a file in the process's own folder."""
    from evoengine.ledger.store import open_ledger
    from evoengine.tuning.report import draw_report

    os.nice(10)
    asked = dict(argument.split("=", 1) for argument in sys.argv[1:])
    try:
        with open_ledger(None, create=False) as ledger:
            _overview, text = draw_report(ledger, asked.get("problem"), asked.get("gpu"))
    except EvoengineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    Path(tempfile.gettempdir(), PAGE).write_bytes(gzip.compress(text.encode(), 6, mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
