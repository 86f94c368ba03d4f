"""Process of one job: `python -m evoengine.service.work JOB FENCE DEVICE SERVER`, started by a server.

It dies with its server. SIGTERM ends the search, and the server returns the job to the queue; the process that takes it
over resumes the interrupted run. Events are those of `evoengine search --log-json`, written to the database.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from evoengine.errors import EvoengineError, MachineError, NothingFound
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.records import Candidate, Outcome
from evoengine.search.recorded import RECORDED
from evoengine.service.executors import CPU, Executors
from evoengine.service.jobs import DONE, FAILED, Fenced, Job, Jobs
from evoengine.service.settings import Settings, load_settings
from evoengine.tuning.fleet import FleetSearch
from evoengine.tuning.measure import MeasureRun
from evoengine.tuning.recorded import RecordedSearch
from evoengine.tuning.search import Search, SearchOptions
from evoengine.tuning.setup import register_kernel
from evoengine.tuning.tune import prepare
from evoengine.views import EVENT_SCHEMA, OF_A_TRIAL, jsonable
from evoengine.views.trials import trial_json
from evoengine.workloads.base import Host
from evoengine.workloads.triton_kernel import TRITON_FILE, read_folder

if TYPE_CHECKING:
    from evoengine.search.progress import Progress

PROGRESS_SECONDS = 5.0
"""between two progress events while no trial ends"""
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
    """Record a search's progress in the database. Every write raises Fenced once the job is no longer ours."""

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


STOPPED, OVER = 10, 0
"""exit codes: stopped before the job's end; the job has ended, or another server has it"""
MEASURED_AT_MOST = 20
"""predicted candidates, best first, that are timed when a GPU appears"""
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Work:
    """Run a job. Raises Fenced once the job is no longer this process's."""

    def __init__(self, jobs: Jobs, job: Job, device: str, settings: Settings) -> None:
        self._jobs, self._job, self._settings = jobs, job, settings
        on_cluster = settings.cluster is not None and job.gpu in settings.cluster_gpus
        self._has_gpu = device != CPU or on_cluster
        self._log = JobLog(jobs, job)
        self._running: Search | RecordedSearch | FleetSearch | MeasureRun | None = None
        self.stopped = False

    def stop(self) -> None:
        """Stop after the current event."""
        self.stopped = True
        if self._running:
            self._running.stop()

    def run(self) -> None:
        for part in self._log.parts:
            if part["ended"] is None and not self.stopped:
                self._search(part)
        if self.stopped:
            return
        is_timed = any(self._triton_of(part["problem"]) is None for part in self._log.parts)
        if self._job.request["device"] == "auto" and is_timed:
            if not self._has_gpu:
                why = f"searched and predicted; it is timed when a server has a GPU for {self._job.gpu}"
                self._jobs.wait(self._job.id, self._job.fence, why)
                return
            for part in self._log.parts if self._job.predicted else ():
                if self._triton_of(part["problem"]) is None:
                    self._time(part)
        if not self.stopped:
            self._jobs.finish(self._job.id, self._job.fence, DONE)

    def _search(self, part: dict[str, Any]) -> None:
        """Search for the remaining trials and minutes of the part."""
        with open_ledger(None, create=True) as ledger:
            catch_up(ledger, self._log, part)
        request = self._job.request
        trials, minutes = request["trials"] - part["done"], request["minutes"]
        left = None if minutes is None else minutes - part["seconds"] / 60
        if trials < 1 or (left is not None and left <= 0):
            self._log.end_part(part, "all trials done" if trials < 1 else "time is up")
            return
        searching = prepare(self._options(part["problem"]), self._log.say, self._log.stage)
        self._running = searching
        if self.stopped:
            searching.stop()
        self._log.begin(part, searching)
        result = searching.run(self._log.update, self._log.trial)
        if not self.stopped:
            self._log.end_part(part, result.progress.ended)

    def _options(self, problem: str) -> SearchOptions:
        """Return the options with the whole budget, so that an interrupted search is recognised."""
        request = self._job.request
        trials, minutes = request["trials"], request["minutes"]
        device: str = request["device"]
        if device.startswith(RECORDED):
            device = f"{RECORDED}{self._settings.recorded_files[device.removeprefix(RECORDED)]}"
            return SearchOptions(trials=trials, minutes=minutes, sampler=request["sampler"], device=device)
        folder = self._settings.kernel_folders.get(problem.partition(":")[0])
        host = self._triton_of(problem)
        return SearchOptions(
            problem=problem,
            triton=f"{host.file}::{host.kernel}" if host else None,
            call=host.call if host else None,
            reference=host.reference if host else None,
            gpu=self._job.gpu,
            families=tuple(request["families"]),
            trials=trials,
            minutes=minutes,
            sampler=request["sampler"],
            objective=request["objective"],
            device="cuda" if self._has_gpu and device != "emulator" and not host else "emulator",
            cluster=self._settings.cluster,
            kernel=None if host else folder,
            seed=request["seed"],
        )

    def _triton_of(self, problem: str) -> Host | None:
        """Return the operator's Triton kernel that the problem names; None if it names another kind of kernel."""
        folder = self._settings.kernel_folders.get(problem.partition(":")[0])
        return read_folder(folder) if folder and (folder / TRITON_FILE).is_file() else None

    def _time(self, part: dict[str, Any]) -> None:
        """Time candidates that were predicted before a GPU was available."""
        measure_run = MeasureRun(
            MEASURED_AT_MOST, self._job.gpu, part["problem"], echo=self._log.say, on_finish=self._log.timed
        )
        self._running = measure_run
        try:
            measure_run.run()
        except NothingFound:  # it was searched on a GPU from the beginning
            return


def catch_up(ledger: Ledger, log: JobLog, part: dict[str, Any]) -> None:
    """Report trials of the part's runs that a killed process did not report, and count all of them."""
    finished = [c for run in part["runs"] for c in ledger.candidates(run=run) if c.outcome is not None]
    counting = [c for c in finished if c.outcome and c.outcome.judged and c.outcome is not Outcome.DUPLICATE]
    log.tell_untold(part, finished, len(counting))


def main() -> int:
    number, fence, device, server = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # the server was killed while this process imported modules
        return OVER
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server too, which stops this process
    settings = load_settings()
    with open_ledger(None, create=False) as ledger:
        try:
            return run_job(ledger, number, fence, device, settings)
        except Fenced as lost:
            print(f"evoengine: {lost}", file=sys.stderr)
            return OVER
        except EvoengineError as error:  # the database is unavailable
            print(f"evoengine: job {number}: {error}", file=sys.stderr)
            return error.exit_code


def run_job(ledger: Ledger, number: int, fence: int, device: str, settings: Settings) -> int:
    """Run a job and return the exit code. A fault of the machine causes a retry; an invalid request fails the job."""
    jobs = Jobs(ledger)
    job = jobs.find(number)
    if job.fence != fence:
        return OVER
    try:
        own = {problem.partition(":")[0] for problem in job.request["problems"]}
        for name in own & settings.kernel_folders.keys():
            register_kernel(settings.kernel_folders[name])
        work = Work(jobs, job, device, settings)
        signal.signal(signal.SIGTERM, lambda *_: work.stop())
        work.run()
    except Fenced:
        raise
    except MachineError as error:
        print(f"evoengine: job {number}: {error}", file=sys.stderr)
        Executors(ledger, "", [], settings.takeover_seconds).died(number, fence, str(error))
        return OVER
    except EvoengineError as error:
        jobs.finish(number, fence, FAILED, str(error))
        return OVER
    return STOPPED if work.stopped else OVER


if __name__ == "__main__":
    sys.exit(main())
