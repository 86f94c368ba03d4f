"""A search of a recorded space, in which times are looked up."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

from evoengine.errors import UsageError
from evoengine.ledger.optuna.study import begin_study
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.ledger.transactions import Patience
from evoengine.objectives import parse_objectives
from evoengine.records import Device, Kind
from evoengine.sandbox.untrusted import read_limited
from evoengine.search import samplers
from evoengine.search.progress import OnChange, OnTrial, ignore
from evoengine.search.recorded import (
    LARGEST_FILE,
    RECORDED,
    REPLAY_OBJECTIVE,
    RecordedSpace,
    Replay,
    device_of,
    problem_of,
    read_recorded,
)
from evoengine.text import printable
from evoengine.tuning.resume import SearchRequest, begin
from evoengine.tuning.search import DEFAULT_TRIALS, SearchOptions, SearchResult, complete_from_run, finisher
from evoengine.tuning.setup import Echo, drawn_seed, recording_failure, silent


class RecordedSearch:
    """A search of the file that `options.device` names. Raises UsageError if it cannot be read."""

    def __init__(self, options: SearchOptions, echo: Echo = silent, on_stage: Echo = silent) -> None:
        if options.objective and len(parse_objectives(options.objective)) > 1:
            why = "a recorded file has only times; leave --objective out"
            raise UsageError(f"--objective {options.objective}: {why}")
        on_stage("reading the recorded file")
        if options.resume is not None:
            options = complete_from_run(options)
        self._file = Path(options.device.removeprefix(RECORDED))
        self._space = read_recorded(self._file)
        self._options, self._echo = options, echo
        self._seed = drawn_seed(options.seed)
        self._replay: Replay | None = None
        self._stopped = False
        self.number: int | None = None
        """of the run, once the ledger has it"""

    def stop(self) -> None:
        """Stop the search after the current trial."""
        self._stopped = True
        if self._replay:
            self._replay.stop()

    def run(self, on_change: OnChange = ignore, on_trial: OnTrial | None = None) -> SearchResult:
        with open_ledger(self._options.db, create=True) as ledger:
            return self._run(ledger, on_change, on_trial)

    def _run(self, ledger: Ledger, on_change: OnChange, on_trial: OnTrial | None) -> SearchResult:
        space, o, echo = self._space, self._options, self._echo
        gpu, problem, text = device_of(space), problem_of(space), f"recorded in {printable(self._file.name)}"
        digest = hashlib.sha256(read_limited(self._file, LARGEST_FILE)).hexdigest()
        named = SimpleNamespace(name=printable(self._file.name), text=text, sha256=digest)
        seconds = o.minutes * 60 if o.minutes else None
        sampler, trials = o.sampler or samplers.DEFAULT, o.trials or DEFAULT_TRIALS
        asked = SearchRequest(
            problem, gpu, named.name, digest, sampler, REPLAY_OBJECTIVE.name, trials, seconds, o.seed, conditions={}
        )
        ledger.database.patience = Patience(echo)
        begun = begin(ledger, asked, o.resume, echo, device=Device(f"recorded {gpu}"), space=named, seed=self._seed)
        run = self.number = begun.run
        echo(f"{problem} on {gpu}: {len(space):,} configurations, {text} · sampler {sampler} · seed {begun.seed}")
        echo_oddities(space, echo)
        echo(f"ledger {ledger.place}, run {run}")
        study = begin_study(ledger, run, Kind.RECORDED, {knob.name: knob.values for knob in space.knobs})
        finish = finisher(ledger, study, on_trial)
        replay = Replay(space, sampler, begun.seed, trials, seconds, ledger, run, on_change, finish, begun.spent)
        self._replay = replay
        if self._stopped:
            replay.stop()
        with recording_failure(ledger, run):
            progress = replay.search()
        study.end_run(progress.ended)
        best = tuple(ledger.best(problem, gpu, top=trials, run=run))
        if best:
            excess = best[0].ranked_by.median_us / (space.optimum * 1e3)
            progress.notes.append(f"best found over the file's optimum: {excess:.3f}")
        return SearchResult(run, progress, best, replay.proposer.invalid, replay.proposer.repeated, study.all_missed)


def echo_oddities(space: RecordedSpace, echo: Echo) -> None:
    """Say what of a recorded file does not count, and what it does not tell."""
    if space.estimated:
        echo(f"{space.estimated:,} configurations that have only an estimated time were left out")
    if space.contradicting:
        echo(f"configurations with contradicting figures in the file: {space.contradicting:,}; the last of each counts")
    if space.device is None:
        echo(f"the file names no GPU: its figures are kept as those of {device_of(space)}")
