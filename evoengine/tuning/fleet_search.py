"""Searches on a Ray cluster, one for each named kind of GPU, with one ledger."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from evoengine.errors import EvoengineError
from evoengine.records import Candidate
from evoengine.search.progress import Progress
from evoengine.tuning.fleet import Fleet, GpuFinder
from evoengine.tuning.ray_cluster import connected, require_fit, survey
from evoengine.tuning.search import Search, SearchOptions, SearchResult
from evoengine.tuning.setup import Echo, silent


class FleetSearch:
    """Searches ready to start on the cluster that the first of `options` names; they differ only in `gpu`.

    Raises UsageError, and MachineError where the cluster or a GPU cannot be had.
    """

    def __init__(
        self,
        options: Sequence[SearchOptions],
        echo: Echo = silent,
        on_stage: Echo = silent,
        finder: GpuFinder | None = None,
    ) -> None:
        self._echo, self._options = echo, options
        self._searches: list[Search] = []
        first = options[0]
        assert first.cluster is not None  # otherwise the search is local
        with ExitStack() as stack:
            on_stage("reaching the cluster")
            stack.enter_context(connected(first.cluster))
            nodes = survey()
            require_fit(nodes)
            echo(f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} with {sum(n.cpus for n in nodes)} CPUs")
            for asked in options:
                each = replace(asked, jobs=asked.jobs and max(1, asked.jobs // len(options)))
                place = Fleet(self._prefixed_echo(each), each.timeout, 1 / len(options), finder)
                self._searches.append(Search(each, self._prefixed_echo(each), on_stage, place))
            self._connection = stack.pop_all()

    def _prefixed_echo(self, options: SearchOptions) -> Echo:
        """Return an echo that prefixes messages with the GPU if there are several searches."""
        return self._echo if len(self._options) == 1 else lambda line: self._echo(f"{options.gpu}: {line}")

    @property
    def number(self) -> int | None:
        """Return the number of the first run, once the ledger has it."""
        return self._searches[0].number

    def stop(self) -> None:
        """Stop the searches after their current events; their results are kept."""
        for search in self._searches:
            search.stop()

    def run(
        self,
        on_change: Callable[[Progress], None] = lambda progress: None,
        on_trial: Callable[[Candidate], None] | None = None,
    ) -> SearchResult:
        """Run the search of a single kind of GPU."""
        (found,) = self.run_all(on_change, on_trial)
        if isinstance(found, EvoengineError):
            raise found
        return found

    def run_all(
        self,
        on_change: Callable[[Progress], None] = lambda progress: None,
        on_trial: Callable[[Candidate], None] | None = None,
    ) -> list[SearchResult | EvoengineError]:
        """Run all searches and return a result or an error for each. An error of one does not stop the others."""
        together = _CombinedProgress(len(self._searches), on_change)
        with self._connection:
            if len(self._searches) == 1:
                return [self._run(0, on_change, on_trial)]
            threads = ThreadPoolExecutor(len(self._searches), "search")
            try:
                running = [
                    threads.submit(self._run, n, partial(together.update, n), on_trial)
                    for n in range(len(self._searches))
                ]
                return [each.result() for each in running]
            finally:
                threads.shutdown(wait=False)  # so that a second Ctrl-C does not wait for them

    def _run(
        self, n: int, on_change: Callable[[Progress], None], on_trial: Callable[[Candidate], None] | None
    ) -> SearchResult | EvoengineError:
        try:
            return self._searches[n].run(on_change, on_trial)
        except EvoengineError as error:
            if len(self._searches) > 1:
                self._prefixed_echo(self._options[n])(str(error))
            return error


class _CombinedProgress:
    """The progress of several searches as one. It has no best: figures of different GPUs do not compare."""

    def __init__(self, count: int, on_change: Callable[[Progress], None]) -> None:
        self._each: list[Progress | None] = [None] * count
        self._on_change = on_change
        self._changing = threading.Lock()

    def update(self, n: int, progress: Progress) -> None:
        with self._changing:
            self._each[n] = progress
            known = [each for each in self._each if each]
            self._on_change(
                Progress(
                    sum(each.total for each in known),
                    min(each.started for each in known),
                    sum((each.outcomes for each in known), Counter()),
                    stage=next((each.stage for each in known if each.stage), ""),
                    compiled=sum(each.compiled for each in known),
                    predicted=sum(each.predicted for each in known),
                )
            )
