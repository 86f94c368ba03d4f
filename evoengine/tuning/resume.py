"""Choose the run that a search resumes: the one that is named, or the last interrupted one of the same command.

Runs are the same if everything agrees that determines their proposals and the meaning of their figures: problem, GPU,
space, templates, families, sampler, objectives, device, driver, compiler, libraries, and evoengine's gate and model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evoengine.errors import UsageError, hint
from evoengine.ledger.store import Ledger, SpaceFile
from evoengine.records import KILLED, Device, Run
from evoengine.text import command_line
from evoengine.tuning.setup import Echo

INTERRUPTED = "interrupted"
STOPPED = "stopped: "
"""prefix of the status of a run that an error of the machine ended"""
ENVIRONMENT = ("device", "driver", "libraries", "compiler", "gate", "model", "predicted")
"""conditions on which a kernel's evaluation depends"""
CONDITION_REASONS = {
    "templates": "the templates have changed",
    "code": "evoengine's gate or model has changed",
    "gate": "the gate has another version",
    "model": "the model of predicted times has another version",
    "predicted": "only one of the two can predict times from machine code",
}
"""sentences for conditions whose values mean nothing to the user"""


@dataclass(frozen=True, slots=True)
class ActiveRun:
    """The run of this process, new or resumed."""

    run: int
    seed: int
    spent: float = 0.0
    """seconds that earlier processes of the run took"""


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The settings of a search that must agree with those of a resumed run."""

    problem: str
    gpu: str
    space_name: str
    space_sha256: str
    sampler: str
    objectives: str
    trials: int
    seconds: float | None
    seed: int | None
    """None for any seed"""
    conditions: Mapping[str, Any]

    def differences(self, run: Run) -> list[str]:
        """Return what differs from the run, each as a part of a sentence."""
        pairs = {
            "problem": (run.problem, self.problem),
            "GPU": (run.gpu, self.gpu),
            "sampler": (run.sampler, self.sampler),
            "objective": (run.objectives, self.objectives),
            "seed": (run.seed, run.seed if self.seed is None else self.seed),
        }
        found = [f"the {name} is {now} and was {was}" for name, (was, now) in pairs.items() if was != now]
        if run.space_sha256 != self.space_sha256:
            named = self.space_name if self.space_name == run.space_name else f"{self.space_name}, not {run.space_name}"
            found.append(f"the space has changed ({named})")
        return found + changes(run.conditions or {}, self.conditions)


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the conditions that have changed, each as a part of a sentence."""
    found = []
    for name in sorted(was.keys() | now.keys()):
        before, after = was.get(name), now.get(name)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            found += [
                _change(part, before.get(part), after.get(part))
                for part in sorted(before.keys() | after.keys())
                if before.get(part) != after.get(part)
            ]
        else:
            found.append(CONDITION_REASONS.get(name) or _change(name, before, after))
    return found


def _change(name: str, was: object, now: object) -> str:
    return f"{name} is {_shown(now)} and was {_shown(was)}"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(str(part) for part in value if part is not None) or "none"
    return "none" if value is None else str(value)


def named_run(ledger: Ledger, number: int) -> Run:
    """Return the run of that number. Raises UsageError if it is not a search that can continue."""
    runs = ledger.runs()
    searches = [run for run in runs if run.conditions is not None and run.imported_from is None]
    last = searches[-1] if searches else None
    found = next((run for run in runs if run.id == number), None) if number else last
    listed = f"{hint('runs', db=ledger.db)} lists them"
    if found is None and number:
        raise UsageError(f"the ledger has no run {number}: {listed}")
    if found is None:
        raise UsageError(f"the ledger holds no search that can be resumed: {listed}")
    if found.imported_from is not None:
        raise UsageError(f"run {found.id} was imported and cannot be resumed: {listed}")
    if found.conditions is None:
        why = "it is not a search, or was made by an older evoengine"
        raise UsageError(f"run {found.id} cannot be resumed ({why}); search without --resume starts a new one")
    return found


def require_same(run: Run, asked: SearchRequest) -> None:
    """Raise UsageError if a run that was named cannot continue with these options."""
    if found := asked.differences(run):
        begins = "search without --resume starts a new run, which reuses known results"
        raise UsageError(f"run {run.id} cannot be resumed: {'; '.join(found)}. {begins}")


def require_budget(ledger: Ledger, run: Run, asked: SearchRequest) -> None:
    """Raise UsageError if a completed run has no budget left."""
    if is_cut_short(run):
        return
    done, spent = ledger.done(run.id), ledger.seconds_spent(run.id)
    if done >= asked.trials:
        raise UsageError(f"run {run.id} has completed its {done} trials: --trials {2 * done} runs {done} more")
    if asked.seconds is not None and spent >= asked.seconds:
        more = f"--minutes {2 * spent / 60:.3g} doubles its time"
        raise UsageError(f"run {run.id} has used its {spent / 60:.3g} minutes: {more}")


def begin(
    ledger: Ledger,
    asked: SearchRequest,
    resume: int | None,
    echo: Echo,
    *,
    device: Device,
    space: SpaceFile,
    seed: int,
    definition: str | None = None,
    gpu_definition: dict[str, Any] | None = None,
    kernel: str | None = None,
) -> ActiveRun:
    """Continue the run named by `resume`, or the last interrupted one of the same command.

    Otherwise create a run with `seed`. Raises UsageError if the named run cannot continue.
    """
    here = {run.id for run in ledger.runs() if (run.problem, run.gpu) == (asked.problem, asked.gpu)}
    ledger.await_killed(here.__contains__, echo)
    found = _find_interrupted(ledger, asked) if resume is None else named_run(ledger, resume)
    if found is not None and resume is not None:
        require_same(found, asked)
        require_budget(ledger, found, asked)
    spent = ledger.resume_run(found.id, asked.trials, asked.seconds) if found else None
    if found is not None and spent is not None:
        done = ledger.done(found.id)
        echo(f"resuming run {found.id} ({found.status}): {done} of {asked.trials} trials are done")
        return ActiveRun(found.id, found.seed, spent)
    if found is not None and resume is not None:
        wait = "wait until it has ended, or for a minute if it was killed on another machine"
        raise UsageError(f"run {found.id} is in progress: {wait}")
    if changed := _changes_since_last(ledger, asked):
        echo(changed)
    run = ledger.start_run(
        gpu=asked.gpu,
        problem=asked.problem,
        device=device,
        space=space,
        sampler=asked.sampler,
        seed=seed,
        command=command_line(),
        objectives=asked.objectives,
        definition=definition,
        gpu_definition=gpu_definition,
        trials=asked.trials,
        seconds=asked.seconds,
        conditions=dict(asked.conditions),
        kernel=kernel,
    )
    return ActiveRun(run, seed)


def is_cut_short(run: Run) -> bool:
    return run.status in (INTERRUPTED, KILLED) or run.status.startswith(STOPPED)


def _find_interrupted(ledger: Ledger, asked: SearchRequest) -> Run | None:
    """Return the last run of the same command if it was interrupted."""
    of_target = [r for r in ledger.runs() if (r.problem, r.gpu) == (asked.problem, asked.gpu)]
    own = [r for r in of_target if r.conditions is not None and r.imported_from is None]
    same = [r for r in own if (r.trials, r.seconds) == (asked.trials, asked.seconds) and not asked.differences(r)]
    return same[-1] if same and is_cut_short(same[-1]) else None


def _changes_since_last(ledger: Ledger, asked: SearchRequest) -> str | None:
    """Return what has changed since the last search for the same target, and why its results cannot be reused."""
    own = [r for r in ledger.runs() if (r.problem, r.gpu) == (asked.problem, asked.gpu) and r.conditions]
    if not own or own[-1].imported_from is not None:
        return None
    last = own[-1].conditions or {}
    was, now = ({name: of[name] for name in ENVIRONMENT if name in of} for of in (last, asked.conditions))
    found = changes(was, now)
    return f"since run {own[-1].id}: {'; '.join(found)}; kernels are evaluated again" if found else None
