"""The reports of /report: each is drawn once for what the ledger then held, by a process of its own.

Drawing takes a core for seconds, and plotly's half holds the interpreter for all of them: in this process everybody
would wait. Few are drawn at once; who asks for another one meanwhile is told when to come again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass

from evoengine.errors import EvoengineError, MachineError, NothingFound, UsageError
from evoengine.ledger.chosen import FILE_VARIABLE, URL_VARIABLE
from evoengine.service.answers import Question, ledger_state
from evoengine.service.database import Database
from evoengine.service.lanes import Lane, Threads

AT_ONCE, WAITING = 2, 4
"""reports that are drawn, and that wait for that"""
KEPT = 8
"""of 5 MB each, most of it plotly"""
DRAW_SECONDS = 120.0
ERRORS: dict[int, type[EvoengineError]] = {error.exit_code: error for error in (NothingFound, UsageError, MachineError)}
Target = tuple[str | None, str | None]
"""problem and GPU"""


@dataclass(frozen=True, slots=True)
class Report:
    page: bytes
    etag: str
    state: object
    """of the ledger when it was drawn, or before"""


class Reports:
    """Used in the server's event loop alone; `quick` are threads in which the ledger's state is asked for."""

    def __init__(self, database: Database, quick: Threads) -> None:
        self._db, self._quick = database, quick
        self._lane = Lane(AT_ONCE, WAITING)
        self._kept: OrderedDict[Target, Report] = OrderedDict()
        self._drawing: dict[Target, asyncio.Task[Report]] = {}

    async def find(self, problem: str | None, gpu: str | None) -> Report:
        """Raises as `draw_report`, and HTTPException, 503, where too many others are asked for."""
        target = problem, gpu
        state = await self._quick.run(ledger_state, self._db, Question(gpu, problem))
        kept = self._kept.get(target)
        if kept is not None and kept.state == state:
            return kept
        drawing = self._drawing.get(target)
        if drawing is None:
            drawing = self._drawing[target] = asyncio.create_task(self._draw(target, state))
            drawing.add_done_callback(lambda done: self._drawing.pop(target, None))
        return await asyncio.shield(drawing)  # who asked first may be gone before it is drawn

    async def _draw(self, target: Target, state: object) -> Report:
        async with self._lane.turn():
            page = await _drawn(self._db.url, *target)
        report = Report(page, f'"{hashlib.sha256(page).hexdigest()}"', state)
        self._kept[target] = report
        self._kept.move_to_end(target)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return report


async def _drawn(url: str, problem: str | None, gpu: str | None) -> bytes:
    environment = {name: value for name, value in os.environ.items() if name != FILE_VARIABLE}
    named = [f"{name}={value}" for name, value in (("problem", problem), ("gpu", gpu)) if value is not None]
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, *named, env={**environment, URL_VARIABLE: url},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise MachineError(f"no process can be started to draw the report: {error.strerror}") from error
    try:
        page, said = await asyncio.wait_for(process.communicate(), DRAW_SECONDS)
    except TimeoutError as error:
        raise MachineError(f"the report was not drawn in {DRAW_SECONDS:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        why = said.decode(errors="replace").strip().splitlines()
        raise ERRORS.get(process.returncode, MachineError)(why[-1] if why else "the report cannot be drawn")
    return page


def main() -> int:
    """Draws one, of the ledger that the environment names, onto standard output."""
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
    sys.stdout.buffer.write(text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
