"""A search as one function call, and a search of several problems.

The latter has a run for each problem: first each problem's own search, then the best kernels of the others on it. Then
the kernels that serve all problems are chosen, and their gates finished.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Never

from evoengine.errors import UsageError, did_you_mean
from evoengine.gpu import AUTO
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.records import PROPOSAL, Config, Outcome, Rejection, config_key
from evoengine.search.compilers import with_machine_code
from evoengine.search.evaluators import seed_for
from evoengine.search.finishing import judge_once, record_verdicts
from evoengine.search.first_build import FirstBuild
from evoengine.search.progress import OnChange, OnTrial, ignore
from evoengine.search.recorded import RECORDED
from evoengine.search.targets import spaces_of, target_of
from evoengine.tuning.dispatch_table import Table, Timed, choose, find_table
from evoengine.tuning.fleet import FleetSearch
from evoengine.tuning.recorded import RecordedSearch
from evoengine.tuning.search import Search, SearchOptions, SearchResult
from evoengine.tuning.setup import Echo, ThisMachine, checked, silent
from evoengine.workloads import expand


def tune(
    problem: str | None = None,
    gpu: str = AUTO,
    *,
    gpu_file: Path | str | None = None,
    kernel: Path | str | None = None,
    triton: str | None = None,
    call: str | None = None,
    reference: str | None = None,
    families: Sequence[str] = (),
    trials: int | None = None,
    minutes: float | None = None,
    sampler: str | None = None,
    device: str = "auto",
    objective: str | None = None,
    space: Path | str | None = None,
    templates: Path | str | None = None,
    db: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    seed: int | None = None,
    resume: int | None = None,
    remeasure: bool = False,
    cluster: str | None = None,
    timeout: float | None = None,
    clock: str | None = None,
    echo: Echo = silent,
    **unknown: Never,
) -> SearchResult:
    """Search for the fastest correct kernel of a problem on a GPU; SearchOptions describes the options.

    The calling program needs `if __name__ == "__main__":`, because worker processes import its main module (unless it
    is read from standard input). Raises UsageError, MachineError.
    """
    options = {name: value for name, value in locals().items() if name not in ("echo", "unknown")}
    if unknown:
        known, near = ", ".join(SearchOptions.__slots__), did_you_mean(min(unknown), SearchOptions.__slots__)
        raise UsageError(f"tune has no parameter {', '.join(sorted(unknown))}; it takes {known}{near}")
    return prepare(SearchOptions(**checked(SearchOptions, options)), echo).run()


def prepare(
    options: SearchOptions, echo: Echo, on_stage: Echo = silent, begun: FirstBuild | None = None
) -> Search | RecordedSearch | FleetSearch:
    """Return a search that is ready to start, of kernels or of a recorded file.

    `on_stage` receives the current stage. `begun` is a build of the judges that the caller has begun, and closes.
    Raises UsageError, MachineError.
    """
    if options.cluster is not None:
        return FleetSearch([options], echo, on_stage)
    if options.device.startswith(RECORDED):
        return RecordedSearch(options, echo, on_stage)
    return Search(options, echo, on_stage, ThisMachine(begun))


def prepare_all(options: Sequence[SearchOptions], echo: Echo, on_stage: Echo = silent) -> FleetSearch:
    """Return searches that are ready to run at once, each on GPUs of its own. Raises UsageError, MachineError."""
    if options[0].cluster is None:
        listed = " and ".join(each.gpu for each in options)
        raise UsageError(f"--gpu is given {len(options)} times ({listed}); without --cluster it takes one value")
    return FleetSearch(options, echo, on_stage)


RANKED = (Outcome.MEASURED, Outcome.ESTIMATED, Outcome.UNFINISHED)


@dataclass(frozen=True, slots=True)
class SetResult:
    runs: Mapping[str, SearchResult]
    """problem → result of the last search in its run"""
    table: Table | None
    """None if the search was interrupted"""


class SetSearch:
    """A search of several problems. Raises UsageError, MachineError, before anything is written."""

    def __init__(
        self,
        options: SearchOptions,
        problems: Sequence[str],
        kernels: int | None,
        echo: Echo = silent,
        on_stage: Echo = silent,
    ) -> None:
        if options.resume is not None:
            raise UsageError("--resume continues one run; repeat the command without it to continue several problems")
        if kernels is not None and kernels < 1:
            raise UsageError(f"--kernels is {kernels}; it must be at least 1")
        self._options, self._kernels = options, kernels
        self._echo, self._on_stage = echo, on_stage
        first = Search(replace(options, problem=problems[0]), echo, on_stage)
        try:
            self._problems = expand(problems)  # a Triton kernel's sizes are known now
        except UsageError:
            first.close()
            raise
        self._current: Search | None = first
        self._stopped = False

    def stop(self) -> None:
        """Stop after the current event; results are kept."""
        self._stopped = True
        if self._current is not None:
            self._current.stop()

    def run(self, on_change: OnChange = ignore, on_trial: OnTrial | None = None) -> SetResult:
        results: dict[str, SearchResult] = {}
        for problem in self._problems:
            if self._stopped:
                return SetResult(results, None)
            search = self._current or Search(replace(self._options, problem=problem), self._echo, self._on_stage)
            results[problem] = self._run(search, on_change, on_trial)
        with open_ledger(self._options.db, create=False) as ledger:
            gpu = ledger.run(results[self._problems[0]].run).gpu
            for problem, result in results.items():
                asked = self._unknown(ledger, problem, gpu)
                if not asked:
                    continue
                if self._stopped:
                    break
                self._echo(f"{problem}: {len(asked)} of the best kernels of other problems")
                options = replace(
                    self._options, problem=problem, resume=result.run, trials=ledger.done(result.run) + len(asked)
                )
                search = Search(options, self._echo, self._on_stage, first=asked)
                results[problem] = self._run(search, on_change, on_trial)
            if self._stopped:
                return SetResult(results, None)
            self._finish_gates(ledger, gpu)
            return SetResult(results, find_table(ledger, self._problems, gpu, self._kernels))

    def _run(self, search: Search, on_change: OnChange, on_trial: OnTrial | None) -> SearchResult:
        self._current = search
        if self._stopped:
            search.stop()
        try:
            result = search.run(on_change, on_trial)
        finally:
            self._current = None
        self._stopped |= result.progress.ended == "interrupted"
        return result

    def _unknown(self, ledger: Ledger, problem: str, gpu: str) -> list[Config]:
        """Return the best kernels of the other problems that were not tried on this one, at most half its trials."""
        own = {config_key(trial.config) for trial in ledger.trials(problem=problem, gpu=gpu)}
        ranked = [_timed(ledger, other, gpu) for other in self._problems if other != problem]
        leaders = [one.config for rank in zip_longest(*ranked) for one in rank if one is not None]
        found = {config_key(config): config for config in leaders if config_key(config) not in own}
        return list(found.values())[: max(len(self._problems), len(own) // 2)]

    def _finish_gates(self, ledger: Ledger, gpu: str) -> None:
        """Finish the gate of chosen kernels that passed only the short cases, until all have passed it."""
        while not self._stopped:
            chosen = choose({problem: _timed(ledger, problem, gpu) for problem in self._problems}, self._kernels)
            candidates = [ledger.candidate(one.trial) for one in chosen.values()]
            unfinished = next((c for c in candidates if c.outcome is Outcome.UNFINISHED), None)
            if unfinished is None:
                return
            self._on_stage(f"finishing the gate of trial {unfinished.trial}")
            found = with_machine_code(ledger, unfinished.trial)
            if isinstance(found, Rejection):
                record_verdicts(ledger, unfinished, found)
                continue
            target = target_of(ledger, found)
            space = spaces_of(ledger, [found], target)[found.run]
            seed = seed_for(0, found.run, found.trial)
            record_verdicts(ledger, found, judge_once(target, space, found.contender, seed))


def _timed(ledger: Ledger, problem: str, gpu: str) -> list[Timed]:
    """Return the problem's trials that no judge refuted, with the most trusted kind of figure, fastest first."""
    trials = ledger.trials(problem=problem, gpu=gpu, outcomes=RANKED)
    known = [t for t in trials if t.measurement is not None and t.operator != PROPOSAL]
    ordered = sorted(((t.measurement, t) for t in known if t.measurement), key=lambda pair: pair[0].rank_key)
    kind = ordered[0][0].kind if ordered else None
    return [Timed(t.trial, t.config, m.compared_us) for m, t in ordered if m.kind is kind]
