"""Process pools for the stages. A worker may die, hang or be killed; its task then ends with a reason, the pool goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError

from pebble import ProcessExpired, ProcessPool

from evoengine.errors import EvoengineError
from evoengine.records import Outcome, Rejection

TASK_SECONDS = 180.0
"""longest a compile or a gate may take in all; past it the worker is killed"""


def _start_worker(environment: dict[str, str]) -> None:
    """Ctrl-C is the coordinator's to answer; libraries' own threads would only get into each other's way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment)


class WorkerPool:
    """`jobs` processes that run tasks of `evoengine.stages.pipeline`."""

    def __init__(self, jobs: int, environment: dict[str, str] | None = None) -> None:
        self._jobs = jobs
        self._environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | (environment or {})
        self._pool = self._start()

    def _start(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._jobs,
            initializer=_start_worker,
            initargs=(self._environment,),
            context=multiprocessing.get_context("spawn"),
        )

    def submit(self, task: Callable, *args: object) -> Future:
        return self._pool.schedule(task, args=args, timeout=TASK_SECONDS)

    def replace(self) -> None:
        """New processes for the old ones, whose state can no longer be trusted."""
        self.close()
        self._pool = self._start()

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()


def result_of(future: Future, died: Outcome) -> object:
    """A task's record; or a Rejection where it took too long, its process died (`died` says what that means), or it
    failed in a way nobody foresaw. What is wrong with the machine or the usage is raised: it would fail every candidate.
    """
    try:
        return future.result()
    except EvoengineError:
        raise
    except TimeoutError:
        return Rejection(Outcome.HUNG if died is Outcome.CRASHED else died, f"no end after {TASK_SECONDS:.0f} s")
    except ProcessExpired as error:
        return Rejection(died, f"the worker process died ({_cause(error.exitcode)})")
    except Exception as error:
        return Rejection(died, f"{type(error).__name__}: {error}")


def _cause(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"
