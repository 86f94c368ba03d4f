"""Caches of the best kernels and of reports.

An answer is read once and cached; at most once a second a cheap query tells whether the ledger has changed. A report is
rendered once per state of the ledger, in a process of its own: rendering takes a core for seconds, half of them with
the interpreter's lock held. Few are rendered at once; further requests are answered 503 with Retry-After.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import func, select

from evoengine.errors import EvoengineError, MachineError, NothingFound, UsageError
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.ledger.tables import CandidateRow, MeasurementRow, RunRow, VerdictRow
from evoengine.paths import environment_with_ledger
from evoengine.sandbox.kept_process import Held, KeptProcess
from evoengine.sandbox.machine import how_ended
from evoengine.search.neighbours import nearest_first
from evoengine.search.targets import stored_gpu
from evoengine.service.limits import Lane, Threads, busy
from evoengine.tuning.best import find_best
from evoengine.views import jsonable
from evoengine.views.results import AskedView, BestTrialsView, NearestTrialView, best_trials_json
from evoengine.views.trials import OneTrialView, one_trial_json

FRESH_SECONDS = 1.0
"""maximum age of an answer that is sent without asking the database"""
READ_AGAIN_SECONDS = 60.0
"""after which an answer is read again even if nothing seems to have changed"""
MOST = 1000
"""number of cached answers"""
Answered = OneTrialView | BestTrialsView | NearestTrialView


@dataclass(frozen=True, slots=True)
class Question:
    gpu: str | None
    problem: str | None
    """in the ledger's form"""
    top: int | None = None
    nearest: bool = False


@dataclass(slots=True)
class Answer:
    body: bytes
    etag: str
    version: object
    checked_at: float
    read_at: float
    checking: threading.Lock = field(default_factory=threading.Lock)


class Answers:
    """Cached answers of /v1/best. Thread-safe."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kept: OrderedDict[Question, Answer] = OrderedDict()
        self._changing = threading.Lock()

    def kept(self, question: Question) -> Answer | None:
        """Return the cached answer if it is valid without asking the database.

        While one request validates the answer, others get the previous one.
        """
        answer = self._kept.get(question)
        if answer is None:
            return None
        is_fresh = time.monotonic() - answer.checked_at < FRESH_SECONDS
        return answer if is_fresh or answer.checking.locked() else None

    def find(self, question: Question) -> Answer:
        """Return the answer. Raises NothingFound, and UsageError for an unknown GPU."""
        answer = self._kept.get(question)
        if answer is None:
            return self._read(question)
        with answer.checking:
            now = time.monotonic()
            if now - answer.checked_at < FRESH_SECONDS:
                return self._kept.get(question, answer)
            if now - answer.read_at < READ_AGAIN_SECONDS and ledger_state(self._ledger, question) == answer.version:
                answer.checked_at = now
                return answer
            return self._read(question)

    def _read(self, question: Question) -> Answer:
        # before the answer, which may be newer, never older
        version, now = ledger_state(self._ledger, question), time.monotonic()
        try:
            body = json.dumps(jsonable(self._answer(question)), indent=2).encode() + b"\n"
        except NothingFound:
            with self._changing:
                self._kept.pop(question, None)
            raise
        answer = Answer(body, f'"{hashlib.sha256(body).hexdigest()}"', version, now, now)
        with self._changing:
            self._kept[question] = answer
            if len(self._kept) > MOST:
                self._kept.popitem(last=False)
        return answer

    def _answer(self, question: Question) -> Answered:
        if question.nearest:
            return self._nearest(question)
        found = find_best(self._ledger, question.problem, question.gpu, question.top or 1)
        if question.top:
            return best_trials_json(found)
        return one_trial_json(found.candidates[0])

    def _nearest(self, question: Question) -> NearestTrialView:
        """Return the best kernel of the nearest problem and GPU that have one."""
        gpu, problem = question.gpu, question.problem
        if gpu is None or problem is None:
            gpu, problem = self._ledger.targets.last(gpu, problem)
        asked: AskedView = {"problem": problem, "gpu": gpu}
        for other, on in nearest_first(problem, stored_gpu(self._ledger, gpu), self._ledger.targets.ranked()):
            if found := self._ledger.best(other, on, top=1):
                exact = (other, on) == (problem, gpu)
                return {**one_trial_json(found[0]), "asked": asked, "exact": exact}
        raise NothingFound(f"the ledger holds no correct candidate of the workload of {problem}")


def ledger_state(ledger: Ledger, question: Question) -> object:
    """Return a value that changes whenever data changes on which the answer may depend."""
    finished = select(func.count(), func.max(CandidateRow.finished_at)).where(CandidateRow.outcome.is_not(None))
    if question.gpu and question.problem and not question.nearest:
        finished = finished.where(CandidateRow.gpu == question.gpu, CandidateRow.problem == question.problem)
    with ledger.database.reading() as session:
        runs = session.execute(select(func.max(RunRow.id), func.count(RunRow.id))).one()
        last = [session.scalar(select(func.max(row.id))) for row in (MeasurementRow, VerdictRow)]
        return tuple(runs), tuple(last), tuple(session.execute(finished).one())


AT_ONCE, WAITING = 2, 4
"""reports that are rendered at once, and that may wait"""
LOOKING = 1
"""threads that check whether the ledger has changed since a report was rendered"""
MOST_IN_FLIGHT = 20
"""reports that are being checked, rendered or waited for"""
KEPT = 8
"""number of cached reports, of 1.4 MB each (most of it plotly)"""
DRAW_SECONDS = 120.0
HELD = Held(processes=64, bytes=4 << 30)
PAGE = "page"
"""file that the rendering process writes into its folder"""
SAID_BYTES = 1000
ERRORS: dict[int, type[EvoengineError]] = {error.exit_code: error for error in (NothingFound, UsageError, MachineError)}
Target = tuple[str | None, str | None]
"""problem and GPU"""


@dataclass(frozen=True, slots=True)
class Report:
    packed: bytes
    """the page, compressed with gzip"""
    etag: str
    state: object
    """of the ledger, read before the report was rendered"""


class Reports:
    """Cached reports. Used only in the server's event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._looks, self._drawing = Threads(LOOKING), Lane(AT_ONCE, WAITING)
        self._starts = Threads(AT_ONCE)
        self._kept: OrderedDict[Target, Report] = OrderedDict()
        self._in_flight: dict[Target, asyncio.Task[Report]] = {}

    async def find(self, problem: str | None, gpu: str | None) -> Report:
        """Return a report. Raises as `draw_report`, and HTTPException, 503, if too many others are requested."""
        target = problem, gpu
        finding = self._in_flight.get(target)
        if finding is None:
            if len(self._in_flight) >= MOST_IN_FLIGHT:
                raise busy("too many reports are being rendered")
            finding = self._in_flight[target] = asyncio.create_task(self._find(target))
            finding.add_done_callback(lambda done: self._in_flight.pop(target, None))
        return await asyncio.shield(finding)  # the client that asked first may disconnect

    async def _find(self, target: Target) -> Report:
        problem, gpu = target
        state = await self._looks.run(ledger_state, self._ledger, Question(gpu, problem))
        kept = self._kept.get(target)
        if kept is not None and kept.state == state:
            return kept
        async with self._drawing.turn():
            packed = await _drawn(self._starts, self._ledger.url, problem, gpu)
        report = self._kept[target] = Report(packed, f'"{hashlib.sha256(packed).hexdigest()}"', state)
        self._kept.move_to_end(target)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return report


async def _drawn(starting: Threads, url: str, problem: str | None, gpu: str | None) -> bytes:
    """Return the page, compressed with gzip. The keeper starts the process: a fork of this one would block requests."""
    named = [f"{name}={value}" for name, value in (("problem", problem), ("gpu", gpu)) if value is not None]
    environment = environment_with_ledger(url) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        process = await starting.run(
            KeptProcess, HELD, [sys.executable, "-m", __name__, *named], environment=environment
        )
    except OSError as error:
        raise MachineError(f"the process that renders the report cannot be started: {error.strerror}") from error
    try:
        # a cancelled request leaves the thread, and closes the process
        await asyncio.to_thread(process.wait, DRAW_SECONDS)
        code = process.exit_code(wait=False)
        if code is None:
            raise MachineError(f"the report was not rendered within {DRAW_SECONDS:g} s")
        if code == 0:
            return Path(process.folder, PAGE).read_bytes()
        said = process.output_tail(SAID_BYTES).strip().splitlines()
        why = said[-1] if said else f"the report cannot be rendered: {process.why or how_ended(code)}"
        raise ERRORS.get(code, MachineError)(why)
    finally:
        await starting.run(process.close)


def main() -> int:
    """Write one report of the ledger that the environment names to a file in the process's own folder."""
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
