"""What a job's process tells: the same events as `evoengine search --log-json`, in the database."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from evoengine.records import Candidate, Outcome
from evoengine.service.jobs import Job, Jobs
from evoengine.views.encoding import EVENT_SCHEMA, OF_A_TRIAL, jsonable
from evoengine.views.trials import trial_json

if TYPE_CHECKING:
    from evoengine.search.progress import Progress
    from evoengine.tuning.fleet_search import FleetSearch
    from evoengine.tuning.recorded import RecordedSearch
    from evoengine.tuning.search import Search

PROGRESS_SECONDS = 5.0
"""between two events that tell how far a search is, where no trial ends"""
OF_THE_BEST = (
    "trial",
    "problem",
    "gpu",
    "config",
    "tflops",
    "tflops_kind",
    "median_us",
    "vs_baseline",
    "source_sha256",
)


class JobLog:
    """Takes the place of the command line's display. Every write raises Fenced where the job is no longer ours."""

    def __init__(self, jobs: Jobs, job: Job) -> None:
        self._jobs, self._job = jobs, job
        self.parts = [dict(part) for part in job.parts]
        self._told = jobs.announced(job.id)
        self._part: dict[str, Any] | None = None
        self._searching: Search | RecordedSearch | FleetSearch | None = None
        self._stage = ""
        self._best: Candidate | None = None
        self._spent, self._since = 0.0, time.monotonic()
        self._last = 0.0

    def say(self, text: str) -> None:
        self._tell("message", text=text)

    def stage(self, text: str) -> None:
        if text and text != self._stage:
            self._tell("stage", stage=text)
        self._stage = text

    def begin(self, part: dict[str, Any], searching: Search | RecordedSearch | FleetSearch) -> None:
        self._part, self._searching, self._best = part, searching, None
        self._spent, self._since = part["seconds"], time.monotonic()

    def update(self, progress: Progress) -> None:
        """Report progress. Called about ten times a second."""
        self._note_run()
        self.stage(progress.stage)
        now = time.monotonic()
        if now - self._last >= PROGRESS_SECONDS:
            self._tell("progress", **self._progress())

    def trial(self, candidate: Candidate) -> None:
        """Report a trial once."""
        self._note_run()
        self._rank(candidate)
        if candidate.trial not in self._told:
            if self._part is not None and candidate.outcome is not Outcome.DUPLICATE:
                self._part["done"] += 1
            self._tell_trial(candidate)

    def timed(self, candidate: Candidate) -> None:
        """Report a new figure of a trial that was reported before."""
        self._rank(candidate)
        self._tell_trial(candidate)

    def tell_untold(self, part: dict[str, Any], finished: Iterable[Candidate], done: int) -> None:
        part["done"] = done
        for candidate in finished:
            self._rank(candidate)
            if candidate.trial not in self._told:
                self._tell_trial(candidate)

    def end_part(self, part: dict[str, Any], ended: str) -> None:
        part["ended"] = ended
        self._tell("end", problem=part["problem"], run=max(part["runs"], default=None), ended=ended)

    def _note_run(self) -> None:
        """Record the run's number once it exists, so that a server that takes over the job takes over the run."""
        run = self._searching.number if self._searching else None
        if run is not None and self._part is not None and run not in self._part["runs"]:
            self._part["runs"].append(run)
            self._jobs.note(self._job.id, self._job.fence, self.parts)

    def _rank(self, candidate: Candidate) -> None:
        """Update the best so far, by figures of one kind as they arrive. The final ranking is the ledger's."""
        figure, best = candidate.measurement, self._best.measurement if self._best else None
        if figure is None or candidate.outcome is None or not candidate.outcome.ranked or figure.suspect:
            return
        if best is None or not figure.comparable(best) or figure.rank_key < best.rank_key:
            self._best = candidate

    def _tell_trial(self, candidate: Candidate) -> None:
        known: Mapping[str, object] = trial_json(candidate)
        self._told.add(candidate.trial)
        self._tell("trial", problem=candidate.problem, **{name: known[name] for name in OF_A_TRIAL})

    def _progress(self) -> dict[str, Any]:
        if self._part is not None:
            self._part["seconds"] = round(self._spent + time.monotonic() - self._since, 1)
        total = self._job.request["trials"] * len(self.parts)
        known: Mapping[str, object] | None = trial_json(self._best) if self._best else None
        return {
            "stage": self._stage or None,
            "done": sum(part["done"] for part in self.parts),
            "total": total,
            "best": {name: known[name] for name in OF_THE_BEST} if known else None,
        }

    def _tell(self, event: str, **fields: object) -> None:
        self._last = time.monotonic()
        progress = jsonable(self._progress())
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        data = {"schema": EVENT_SCHEMA, "event": event, "time": moment, "job": self._job.id} | jsonable(fields)
        self._jobs.tell(self._job.id, self._job.fence, event, data, self.parts, progress)
