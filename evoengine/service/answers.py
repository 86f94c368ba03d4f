"""The best kernel known, as bytes that are ready to be sent.

Many ask the same. An answer is read once and kept; at most once a second the database is asked, by a query that takes
no time, whether anything of it may have changed.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from sqlalchemy import func, select

from evoengine.errors import NothingFound
from evoengine.ledger.tables import CandidateRow, MeasurementRow, RunRow, VerdictRow
from evoengine.records import Outcome
from evoengine.search.nearness import nearest_first
from evoengine.search.targets import stored_gpu
from evoengine.service.database import Database
from evoengine.tuning.best import find_best
from evoengine.views.encoding import jsonable
from evoengine.views.results import Asked, BestTrials, NearestTrial, best_trials_json
from evoengine.views.trials import OneTrial, one_trial_json

FRESH_SECONDS = 1.0
"""an answer is at most so old, and what it takes to read it"""
READ_AGAIN_SECONDS = 60.0
"""after which it is read again though nothing seems to have changed"""
MOST = 1000
"""answers that are kept"""
Answered = OneTrial | BestTrials | NearestTrial


@dataclass(frozen=True, slots=True)
class Question:
    gpu: str | None
    problem: str | None
    """as the ledger has it"""
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
    """Any thread may use it."""

    def __init__(self, database: Database) -> None:
        self._db = database
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
            if now - answer.read_at < READ_AGAIN_SECONDS and ledger_state(self._db, question) == answer.version:
                answer.checked_at = now
                return answer
            return self._read(question)

    def _read(self, question: Question) -> Answer:
        version, now = (
            ledger_state(self._db, question),
            time.monotonic(),
        )  # before the answer: it may be newer, never older
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
        found = find_best(self._db, question.problem, question.gpu, question.top or 1)
        if question.top:
            return best_trials_json(found)
        return one_trial_json(found.candidates[0])

    def _nearest(self, question: Question) -> NearestTrial:
        """Return the best of the nearest problem and GPU that have one, with the problem that was asked for."""
        gpu, problem = question.gpu, question.problem
        if gpu is None or problem is None:
            gpu, problem = self._db.last_target(gpu, problem)
        asked: Asked = {"problem": problem, "gpu": gpu}
        for other, on in nearest_first(problem, stored_gpu(self._db, gpu), ranked_targets(self._db)):
            if found := self._db.best(other, on, top=1):
                exact = (other, on) == (problem, gpu)
                return {**one_trial_json(found[0]), "asked": asked, "exact": exact}
        raise NothingFound(f"the ledger holds no correct candidate of the workload of {problem}")


def ledger_state(database: Database, question: Question) -> object:
    """Return a value that changes whenever something changes that the answer may depend on."""
    finished = select(func.count(), func.max(CandidateRow.finished_at)).where(CandidateRow.outcome.is_not(None))
    if question.gpu and question.problem and not question.nearest:
        finished = finished.where(CandidateRow.gpu == question.gpu, CandidateRow.problem == question.problem)
    with database.reading() as session:
        runs = session.execute(select(func.max(RunRow.id), func.count(RunRow.id))).one()
        last = [session.scalar(select(func.max(row.id))) for row in (MeasurementRow, VerdictRow)]
        return tuple(runs), tuple(last), tuple(session.execute(finished).one())


def ranked_targets(database: Database) -> list[tuple[str, str]]:
    """Return every problem and GPU with a correct candidate, latest first."""
    ranked = [str(o) for o in Outcome if o.ranked]
    query = select(CandidateRow.problem, CandidateRow.gpu).where(CandidateRow.outcome.in_(ranked))
    grouped = query.group_by(CandidateRow.problem, CandidateRow.gpu).order_by(func.max(CandidateRow.id).desc())
    with database.reading() as session:
        return [(problem, gpu) for problem, gpu in session.execute(grouped)]
