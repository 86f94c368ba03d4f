"""Optuna's storage as the dashboard reads it: thousands of trials by plain rows, in place of mapped objects."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Container, Sequence
from datetime import UTC, datetime
from functools import cache
from threading import Lock
from typing import Any

from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection, CursorResult, select

from evoengine.ledger.optuna_schema import knows_schema

_distribution = cache(json_to_distribution)
"""of its JSON, of which a study has one for each knob; nobody changes one"""
_external = cache(lambda stated, place: _distribution(stated).to_external_repr(place))

KEPT = 5.0
"""so many times as long as a read took, what it gave is given again: to open a page the dashboard asks for a study's
trials five times, in several threads"""
_PARAM = ("param_name", "param_value", "distribution_json")
_ATTRIBUTE = ("key", "value_json")
_STEP = ("step", "intermediate_value", "intermediate_value_type")


class DashboardStorage(RDBStorage):
    """Gives what Optuna's own gives. Of tables that this evoengine does not know it is Optuna's own."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._one_reads = Lock()
        self._last: tuple[tuple[int, int], float, list[FrozenTrial]] = (-1, -1), 0.0, []
        """what was read last (study, after which trial), until when it is given again, and the trials"""

    def _get_trials(
        self, study_id: int, states: Container[TrialState] | None, included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:  # fmt: skip
        if states is not None or included_trial_ids or not knows_schema(self.get_current_version()):
            return super()._get_trials(study_id, states, included_trial_ids, trial_id_greater_than)
        wanted = study_id, trial_id_greater_than
        with self._one_reads:
            last, until, trials = self._last
            began = time.monotonic()
            if last != wanted or until < began:
                with self.engine.connect() as connection:
                    trials = _read(connection, *wanted)
                ended = time.monotonic()
                self._last = wanted, ended + KEPT * (ended - began), trials
            return trials


def _read(connection: Connection, study: int, after: int) -> list[FrozenTrial]:
    trials = models.TrialModel.__table__
    wanted = (trials.c.study_id == study, trials.c.trial_id > after)

    def rows(table: Any, *names: str) -> CursorResult[*tuple[Any, ...]]:
        """(trial, column, …) of another table, in its order."""
        columns = [table.c[name] for name in names]
        own = next(iter(table.primary_key))
        chosen = select(table.c.trial_id, *columns).join(trials, trials.c.trial_id == table.c.trial_id).where(*wanted)
        return connection.execute(chosen.order_by(own))

    params, distributions = _parameters(rows(models.TrialParamModel.__table__, *_PARAM))
    attributes = _parsed(rows(models.TrialUserAttributeModel.__table__, *_ATTRIBUTE))
    system = _parsed(rows(models.TrialSystemAttributeModel.__table__, *_ATTRIBUTE))
    values: dict[int, list[Any]] = defaultdict(list)
    for trial, *value in rows(models.TrialValueModel.__table__, "objective", "value", "value_type"):
        values[trial].append(value)
    steps: dict[int, dict[int, float]] = defaultdict(dict)
    to_step = models.TrialIntermediateValueModel.stored_repr_to_intermediate_value
    for trial, step, intermediate, kind in rows(models.TrialIntermediateValueModel.__table__, *_STEP):
        steps[trial][step] = to_step(intermediate, kind)
    whole = select(trials).where(*wanted).order_by(trials.c.trial_id)
    return [
        FrozenTrial(
            number=row.number, state=row.state, value=None, values=_values(values[row.trial_id]),
            datetime_start=_local(row.datetime_start), datetime_complete=_local(row.datetime_complete),
            params=params[row.trial_id], distributions=distributions[row.trial_id],
            user_attrs=attributes[row.trial_id], system_attrs=system[row.trial_id],
            intermediate_values=steps[row.trial_id], trial_id=row.trial_id,
        )
        for row in connection.execute(whole)
    ]  # fmt: skip


def _plain(result: CursorResult[*tuple[Any, ...]]) -> Sequence[Any]:
    """Rows of numbers and text as the driver gives them: SQLAlchemy's own row of each costs more than reading it."""
    with result:
        return result.cursor.fetchall()


def _parameters(
    found: CursorResult[*tuple[Any, ...]],
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, BaseDistribution]]]:
    """Trial → its parameters, and their distributions: one mapping for all trials that have the same."""
    params: dict[int, dict[str, Any]] = defaultdict(dict)
    distributions: dict[int, dict[str, BaseDistribution]] = defaultdict(dict)
    for trial, name, place, stated in _plain(found):
        params[trial][name] = _external(stated, place)
        distributions[trial][name] = _distribution(stated)
    shared: dict[Any, dict[str, BaseDistribution]] = {}
    for trial, own in distributions.items():
        distributions[trial] = shared.setdefault((*own, *map(id, own.values())), own)
    return params, distributions


def _parsed(found: CursorResult[*tuple[Any, ...]]) -> dict[int, dict[str, Any]]:
    """Trial → its attributes, from JSON that is parsed as one text: one call for each costs more than the parsing."""
    rows = _plain(found)
    attributes: dict[int, dict[str, Any]] = defaultdict(dict)
    parsed = json.loads(f"[{','.join([text for *_, text in rows])}]")
    for (trial, key, _), value in zip(rows, parsed, strict=True):
        attributes[trial][key] = value
    return attributes


def _values(rows: list[Any]) -> list[float] | None:
    stored = models.TrialValueModel.stored_repr_to_value
    return [stored(value, kind) for _, value, kind in sorted(rows, key=lambda row: row[0])] or None


def _local(moment: datetime | None) -> datetime | None:
    """As Optuna gives it: local time without a zone."""
    return moment and moment.replace(tzinfo=UTC).astimezone().replace(tzinfo=None)
