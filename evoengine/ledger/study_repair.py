"""Whether the Optuna studies agree with the ledger, and studies made again: of a run, or of all that do not agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product

from optuna.storages import RDBStorage
from sqlalchemy import text

from evoengine.errors import NothingFound
from evoengine.ledger.checking import Fault
from evoengine.ledger.rows import most_trusted_kind
from evoengine.ledger.runs import RUNNING
from evoengine.ledger.store import Ledger
from evoengine.ledger.study import Projection, rebuild, study_name
from evoengine.records import Kind, Value

_TRIALS = text(
    "SELECT studies.study_name, attributes.value_json FROM studies "
    "JOIN trials ON trials.study_id = studies.study_id "
    "LEFT JOIN trial_user_attributes AS attributes ON attributes.trial_id = trials.trial_id "
    "AND attributes.key = 'trial'"
)
_NAMES = text("SELECT study_name FROM studies")


def study_faults(storage: RDBStorage, ledger: Ledger) -> list[Fault]:
    """Studies of ended runs that have not each finished trial once. Figures that were taken later, as in finals, are
    the ledger's alone."""
    return [
        Fault(f"the study of run {run} ({kind}) has {has:,} trials, {right:,} of the {finished:,} that ended", True)
        for run, kind, has, right, finished in _differing(storage, ledger)
    ]


def repair_studies(storage: RDBStorage, ledger: Ledger) -> None:
    for run, kind, *_ in _differing(storage, ledger):
        rebuild(storage, ledger, run, kind, run_domains(ledger, run))


def rebuild_studies(
    storage: RDBStorage, ledger: Ledger, run: int, on_done: Callable[[int], None]
) -> list[Projection]:  # fmt: skip
    """Those that the run has; where it has none, that of its most trusted figures.

    Raises NothingFound where no trial of it has ended.
    """
    if run not in ledger.finished_trials(run):
        raise NothingFound(f"no trial of run {run} has ended, so its study is empty")
    with storage.engine.connect() as connection:
        held = set(connection.scalars(_NAMES))
    kinds = [kind for kind in Kind if study_name(ledger, run, kind) in held]
    if not kinds:
        kinds = [most_trusted_kind(t.measurement for t in ledger.trials(run=run, ranked=True) if t.measurement)]
    domains = run_domains(ledger, run)
    return [rebuild(storage, ledger, run, kind, domains, on_done) for kind in kinds]


def _differing(storage: RDBStorage, ledger: Ledger) -> list[tuple[int, Kind, int, int, int]]:
    """Run, kind, trials of the study, those of them that are right, trials of the ledger that ended."""
    found: dict[str, Counter[str | None]] = {}
    with storage.engine.connect() as connection:
        for name in connection.scalars(_NAMES):
            found[name] = Counter()
        for name, trial in connection.execute(_TRIALS):
            found[name][trial] += 1
    finished = ledger.finished_trials()
    ended = [run.id for run in ledger.runs() if run.status != RUNNING]
    differing = []
    for run, kind in product(ended, Kind):
        has = found.get(study_name(ledger, run, kind))
        trials = {str(trial) for trial in finished.get(run, ())}
        if has is not None and (has.keys() != trials or has.total() != len(trials)):
            differing.append((run, kind, has.total(), len(has.keys() & trials), len(trials)))
    return differing


def run_domains(ledger: Ledger, run: int) -> dict[str, list[Value]]:
    """Return the values of each knob that occur in a run."""
    occurring: dict[str, dict[Value, None]] = {}
    for trial in ledger.trials(run=run):
        for knob, value in trial.config.items():
            occurring.setdefault(knob, {})[value] = None
    return {knob: list(values) for knob, values in occurring.items()}
