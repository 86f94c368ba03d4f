"""A summary of each large Optuna study, for optuna-dashboard.

Its page reads and draws all trials of a study at once, which takes many seconds and some 70 MB for 10,000.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from optuna.storages import RDBStorage

from evoengine.ledger.optuna.study import rebuild, run_domains, study_name, trial_counts
from evoengine.ledger.read import Trial
from evoengine.ledger.store import Ledger
from evoengine.records import Kind

MOST = 1000
"""trials of a study, of which the dashboard's page is there within a second or two"""
SUMMARY = " · summary"
"""behind the name of the study that is summarised"""


def summarise_large_studies(storage: RDBStorage, ledger: Ledger, most: int = MOST) -> list[str]:
    """Write a summary of each study of more than `most` trials, in place of an older one; return their names.

    A summary shows its study as it is when the summary is written.
    """
    counts, finished = trial_counts(storage), ledger.finished_trials()
    written = []
    for run in ledger.runs():
        for kind in Kind:
            name = study_name(ledger, run.id, kind)
            if counts.get(name, 0) > most:
                listed = ledger.trials(run=run.id, ranked=True)
                ranked = [t for t in listed if t.measurement and t.measurement.kind is kind]
                chosen, domains = choose(ranked, finished[run.id], most), run_domains(ledger, run.id)
                rebuild(storage, ledger, run.id, kind, domains, trials=chosen, suffix=SUMMARY)
                written.append(name + SUMMARY)
    return written


def choose(ranked: Sequence[Trial], finished: Sequence[int], most: int = MOST) -> list[int]:
    """Return at most `most` of the `finished` trials in their order.

    They are the fastest, those that were the fastest when they ended, the parents of both, and of the rest one in so
    many.
    """
    matter = {t.trial: t for t in [*sorted(ranked, key=_time)[: most // 2], *_leading(ranked)[-(most // 4) :]]}
    parents = {parent for t in matter.values() for parent in t.parents} & set(finished)
    kept = {*matter, *sorted(parents - matter.keys())[: most - len(matter)]}
    rest = [trial for trial in finished if trial not in kept]
    if rest and (room := most - len(kept)):
        kept.update(rest[:: math.ceil(len(rest) / room)])
    return [trial for trial in finished if trial in kept]


def _leading(ranked: Iterable[Trial]) -> list[Trial]:
    """Return the trials that were faster than all before them."""
    leading: list[Trial] = []
    for trial in ranked:
        if not leading or _time(trial) < _time(leading[-1]):
            leading.append(trial)
    return leading


def _time(trial: Trial) -> tuple[bool, float]:
    assert trial.measurement is not None
    return trial.measurement.rank_key
