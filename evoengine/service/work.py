"""One job in a process of its own: `python -m evoengine.service.work JOB FENCE DEVICE`, started by a server.

It ends with its server, however that ends. SIGTERM ends the search with what there is; the server then gives the job
back. Who takes it over asks for the same search, which goes on with the run that was cut short.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

from evoengine.errors import EvoengineError, MachineError, NothingFound
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.records import Outcome
from evoengine.search.replay import RECORDED
from evoengine.service.database import Database, open_service
from evoengine.service.executors import Executors
from evoengine.service.job_log import JobLog
from evoengine.service.jobs import DONE, FAILED, Fenced, Job, Jobs
from evoengine.service.settings import Settings, load_settings
from evoengine.tuning.fleet_search import FleetSearch
from evoengine.tuning.measure import MeasureRun
from evoengine.tuning.recorded import RecordedSearch
from evoengine.tuning.search import Search, SearchOptions
from evoengine.tuning.setup import register_kernel
from evoengine.tuning.tune import prepare

STOPPED, OVER = 10, 0
"""exit codes: it was told to stop and the job is not over; the job is over, or another server's"""
CPU = "cpu"
"""the device of a job without a GPU"""
MEASURED_AT_MOST = 20
"""predicted candidates, best first, that are timed when a GPU appears"""
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Work:
    """Raises Fenced where the job is no longer this process's."""

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
        if self._job.request["device"] == "auto":
            if not self._has_gpu:
                why = f"searched and predicted; it is timed when a server has a GPU for {self._job.gpu}"
                self._jobs.wait(self._job.id, self._job.fence, why)
                return
            for part in self._log.parts if self._job.predicted else ():
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
        return SearchOptions(
            problem=problem, gpu=self._job.gpu, families=tuple(request["families"]), trials=trials, minutes=minutes,
            sampler=request["sampler"], objective=request["objective"],
            device="cuda" if self._has_gpu and device != "emulator" else "emulator", cluster=self._settings.cluster,
            kernel=self._settings.kernel_folders.get(problem.partition(":")[0]), seed=request["seed"],
        )  # fmt: skip

    def _time(self, part: dict[str, Any]) -> None:
        """Time what was predicted before there was a GPU."""
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
    if os.getppid() != server:  # it was killed while this process imported what it needs
        return OVER
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the server too, which says what to do
    settings = load_settings()
    with open_service(None, create=False) as database:
        try:
            return run_job(database, number, fence, device, settings)
        except Fenced as lost:
            print(f"evoengine: {lost}", file=sys.stderr)
            return OVER
        except EvoengineError as error:  # the database itself is away
            print(f"evoengine: job {number}: {error}", file=sys.stderr)
            return error.exit_code


def run_job(database: Database, number: int, fence: int, device: str, settings: Settings) -> int:
    """Run a job and return the exit code. A fault of the machine causes a retry; an invalid request fails the job."""
    jobs = Jobs(database)
    job = jobs.find(number)
    if job.fence != fence:
        return OVER
    try:
        for folder in settings.kernel_folders.values():
            register_kernel(folder)
        work = Work(jobs, job, device, settings)
        signal.signal(signal.SIGTERM, lambda *_: work.stop())
        work.run()
    except Fenced:
        raise
    except MachineError as error:
        print(f"evoengine: job {number}: {error}", file=sys.stderr)
        Executors(database, "", [], settings.takeover_seconds).died(number, fence, str(error))
        return OVER
    except EvoengineError as error:
        jobs.finish(number, fence, FAILED, str(error))
        return OVER
    return STOPPED if work.stopped else OVER


if __name__ == "__main__":
    sys.exit(main())
