"""`--log-json`: what a search does, one JSON object a line on stderr, for programs that watch it."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from evoengine.cli.progress import Ticker
from evoengine.errors import EvoengineError
from evoengine.views.encoding import EVENT_SCHEMA, OF_A_TRIAL, jsonable
from evoengine.views.trials import trial_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from evoengine.records import Candidate
    from evoengine.search.progress import Progress


class EventLog(logging.Handler):
    """Takes the place of `LiveProgress`. Warnings of libraries are events too, so that every line is an object."""

    def __init__(self) -> None:
        super().__init__()
        self._started = time.monotonic()
        self._stage = ""
        self._progress: Progress | None = None
        self._writing = threading.Lock()
        self._ticker = Ticker(self._tick)

    def __enter__(self) -> EventLog:
        logging.captureWarnings(True)
        logging.getLogger().addHandler(self)
        self._ticker.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        """Log the end of a failed command as an event, in place of the sentence for people."""
        self._ticker.stop()
        logging.getLogger().removeHandler(self)
        logging.captureWarnings(False)
        if isinstance(error, EvoengineError):
            self.event("error", text=str(error), exit_code=error.exit_code)
            raise click.exceptions.Exit(error.exit_code) from error

    def event(self, name: str, **fields: object) -> None:
        """Write one object with schema, event, time and the given fields."""
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"schema": EVENT_SCHEMA, "event": name, "time": moment} | jsonable(fields))
        with self._writing:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def say(self, text: str) -> None:
        self.event("message", text=text)

    def emit(self, record: logging.LogRecord) -> None:
        self.event("message", text=record.getMessage(), level=record.levelname.lower())

    def stage(self, text: str) -> None:
        if text and text != self._stage:
            self.event("stage", stage=text)
        self._stage = text

    def update(self, progress: Progress) -> None:
        self._progress = progress
        self.stage(progress.stage)

    def trial(self, candidate: Candidate) -> None:
        known: Mapping[str, object] = trial_json(candidate)
        self.event("trial", **{name: known[name] for name in OF_A_TRIAL})

    def end(self, run: int, ended: str, code: int) -> None:
        self.event("end", run=run, ended=ended, exit_code=code)

    def _tick(self) -> None:
        p = self._progress
        done = {"done": p.done, "total": p.total, "correct": p.correct} if p else {"done": 0}
        seconds = round(time.monotonic() - self._started, 1)
        self.event("progress", stage=self._stage or None, seconds=seconds, **done)
