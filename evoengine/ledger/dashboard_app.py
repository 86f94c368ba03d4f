"""optuna-dashboard's web application, with its answer for a study of thousands of trials written quickly."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from threading import Lock
from typing import TYPE_CHECKING, Any
from wsgiref.util import setup_testing_defaults

import optuna_dashboard
from optuna.artifacts import FileSystemArtifactStore
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial
from optuna_dashboard import wsgi
from sqlalchemy.exc import SQLAlchemyError

from evoengine.ledger.dashboard_script import SCRIPT, with_fewer_bars

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

KNOWN = "0.21.0"
"""the version of optuna-dashboard whose private names are used here, and whose page was read for what it shows; any
other gives its own answers"""
UNREAD = "distribution", "param_external_pytyp"
"""of each value of a knob; most of the answer where knobs have many values, half where they have few"""
DAMAGE = LookupError, TypeError, ValueError, SQLAlchemyError
"""what reading damaged rows of a study raises"""
_ASKED = re.compile(r"/api/studies/(\d{1,18})(/param_importances)?/*")
_PAGE = re.compile(r"/dashboard/studies/(\d{1,18})(?:/.*)?")
_AFTER = re.compile(r"(?:after=(\d{1,18}))?")
FRESH = 10.0
"""seconds in which an answer that was begun before its page asked for it is still given: the page asks for what is new
as often"""
AT_START = 20_000
"""trials: the newest study is read when the program starts if it has no more, as somebody is about to look at it"""
_NO_TRIALS = f"after={10**9}"
_JSON = [("Content-Type", "application/json")]
_logger = logging.getLogger(optuna_dashboard.__name__)
_json = json.JSONEncoder(separators=(",", ":")).encode
_Answer = tuple[str, list[tuple[str, str]], bytes]
"""status, headers and body"""


def dashboard_app(storage: BaseStorage, store: FileSystemArtifactStore) -> WSGIApplication:
    """Answers what optuna-dashboard's own answers, but for what its page does not read of a trial's knobs (bundle.js of
    optuna-dashboard 0.21.0): it takes domains from the study's search space alone. And but for what its script draws.
    """
    own = wsgi(storage, artifact_store=store)
    return _App(own, storage) if optuna_dashboard.__version__ == KNOWN else own


class Complaints(logging.Handler):
    """Says in a line, and once, what optuna-dashboard logs with a traceback at every request of a page."""

    def __init__(self, say: Callable[[str], None], remedy: str) -> None:
        super().__init__(logging.WARNING)
        self._say, self._remedy = say, remedy
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        raised = record.exc_info[1] if record.exc_info else None
        line = str(raised or record.getMessage()).strip().partition("\n")[0]
        if record.levelno >= logging.ERROR:
            line = f"a study cannot be shown: {line.removeprefix('Exception: ')}; {self._remedy}"
        if line not in self._said:
            self._said.add(line)
            self._say(line)


class _App:
    def __init__(self, own: Any, storage: BaseStorage) -> None:
        self._own = own
        self._storage = storage
        self._writing = Lock()
        self._ahead = ThreadPoolExecutor(1)
        self._begun: tuple[int, float, Future[_Answer] | None] = -1, 0.0, None
        """the study whose answer is under way, or made, before its page asks for it, and since when"""
        self._ahead.submit(self._begin_newest)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        asked = _ASKED.fullmatch(path)
        after = _AFTER.fullmatch(environ.get("QUERY_STRING", ""))
        if environ["REQUEST_METHOD"] != "GET" or after is None:
            return self._theirs(environ, start_response)
        if path == SCRIPT:
            return self._script(environ, start_response)
        if page := _PAGE.fullmatch(path):
            self._begin(int(page[1]), environ)
        if asked is None:
            return self._theirs(environ, start_response)
        study = int(asked[1])
        if asked[2]:
            # the page asks for these just before the study, of which it shows nothing until it has it whole
            with suppress(*DAMAGE):  # theirs says so
                self._trials(study)
            with self._writing:
                pass  # it waits for the study's answer, which would share the interpreter with it
            return self._theirs(environ, start_response)
        try:
            status, headers, body = self._answer(study, int(after[1] or 0), environ)
        except DAMAGE:
            _logger.exception("Unexpected error:")
            status, headers, body = "500 Internal Server Error", _JSON, b'{"reason": "internal server error"}'
        start_response(status, headers)
        return [body]

    def _theirs(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        answer: Iterable[bytes] = self._own(environ, start_response)
        return answer

    def _script(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status, headers, body = _fetched(self._own, {**environ, "HTTP_ACCEPT_ENCODING": "identity"})
        body = with_fewer_bars(body)
        start_response(status, _of_length(headers, len(body)))
        return [body]

    def _begin_newest(self) -> None:
        newest = max(frozen._study_id for frozen in self._storage.get_all_studies())
        if self._storage.get_n_trials(newest) <= AT_START:
            environ: WSGIEnvironment = {}
            setup_testing_defaults(environ)
            self._begin(newest, environ)

    def _begin(self, study: int, environ: WSGIEnvironment) -> None:
        """The page asks for the study as soon as it has read its script, which takes it as long as the answer here."""
        if self._begun_for(study) is not None:
            return
        asked = {**environ, "PATH_INFO": f"/api/studies/{study}", "QUERY_STRING": ""}
        self._begun = study, time.monotonic(), self._ahead.submit(self._study, study, 0, asked)

    def _answer(self, study: int, after: int, environ: WSGIEnvironment) -> _Answer:
        """What was begun is given once: whoever asks again wants what is new."""
        future = self._begun_for(study)
        if future is None or after:
            return self._study(study, after, environ)
        self._begun = -1, 0.0, None
        return future.result()

    def _begun_for(self, study: int) -> Future[_Answer] | None:
        begun, since, future = self._begun
        return future if begun == study and time.monotonic() - since < FRESH else None

    def _study(self, study: int, after: int, environ: WSGIEnvironment) -> _Answer:
        with self._writing:
            return self._written(study, after, environ)

    def _written(self, study: int, after: int, environ: WSGIEnvironment) -> _Answer:
        self._own._inmemory_cache._cached_extra_study_property_cache.setdefault(study, _search_spaces())
        status, headers, body = _fetched(self._own, {**environ, "QUERY_STRING": _NO_TRIALS})
        if status != "200 OK":
            return status, headers, body
        rest = json.loads(body)
        del rest["trials"]
        texts = _texts(study, self._trials(study)[after:], self._storage.get_study_system_attrs(study))
        body = f'{_json(rest)[:-1]},"trials":[{",".join(texts)}]}}'.encode()
        return status, _of_length(headers, len(body)), body

    def _trials(self, study: int) -> list[FrozenTrial]:
        from optuna_dashboard._storage import get_trials

        trials: list[FrozenTrial] = get_trials(self._own._inmemory_cache, self._storage, study)
        return trials


def _fetched(app: WSGIApplication, environ: WSGIEnvironment) -> _Answer:
    told: list[Any] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> Callable[..., object]:
        told[:] = status, headers
        return told.append

    body = b"".join(app(environ, start_response))
    status, headers = told
    return status, headers, body


def _of_length(headers: list[tuple[str, str]], length: int) -> list[tuple[str, str]]:
    others = [(name, value) for name, value in headers if name.lower() != "content-length"]
    return [*others, ("Content-Length", str(length))]


def _texts(study: int, trials: Iterable[FrozenTrial], system_attrs: dict[str, Any]) -> Iterable[str]:
    """JSON of each trial: that of a knob's value is made once for all trials that have it."""
    from optuna_dashboard._serializer import serialize_frozen_trial

    known: dict[tuple[str, int, type, str], str] = {}

    def text(name: str, value: Any, distribution: BaseDistribution, trial: FrozenTrial) -> str:
        # by type and text: 1 and True are the same key, and 1 and '1' the same text
        key = name, id(distribution), type(value), str(value)
        if (found := known.get(key)) is None:
            lone = copy(trial)
            lone.params = {name: value}
            [param] = serialize_frozen_trial(study, lone, {})["params"]
            for unread in UNREAD:
                del param[unread]
            found = known[key] = _json(param)
        return found

    for trial in trials:
        bare = copy(trial)
        bare.params = {}
        told = serialize_frozen_trial(study, bare, system_attrs)
        del told["params"]
        of = trial.distributions
        params = ",".join([text(name, value, of[name], trial) for name, value in trial.params.items() if name in of])
        yield f'{_json(told)[:-1]},"params":[{params}]}}'


def _search_spaces() -> Any:
    """What optuna-dashboard gathers of all trials at every request, without the trials that would add nothing."""
    from optuna_dashboard._inmemory_cache import _CachedExtraStudyProperty

    class SearchSpaces(_CachedExtraStudyProperty):  # type: ignore[misc]
        def update(self, trials: list[FrozenTrial]) -> None:
            self._seen: set[int] = set()
            super().update(trials)

        def _update_search_space(self, trial: FrozenTrial) -> None:
            # trials share their distributions where they have the same (DashboardStorage)
            if id(trial.distributions) not in self._seen:
                self._seen.add(id(trial.distributions))
                super()._update_search_space(trial)

    return SearchSpaces()
