"""Optuna's storage as the dashboard reads it: thousands of trials by plain rows, in place of mapped objects."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container
from datetime import UTC, datetime
from functools import cache
from typing import Any

from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection, select

from evoengine.ledger.optuna_schema import knows_schema

_distribution = cache(json_to_distribution)
"""of its JSON, of which a study has one for each knob; nobody changes one"""
_external = cache(lambda stated, place: _distribution(stated).to_external_repr(place))


class DashboardStorage(RDBStorage):
    """Gives what Optuna's own gives. Of tables that this evoengine does not know it is Optuna's own."""

    def _get_trials(
        self, study_id: int, states: Container[TrialState] | None, included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:  # fmt: skip
        if states is not None or included_trial_ids or not knows_schema(self.get_current_version()):
            return super()._get_trials(study_id, states, included_trial_ids, trial_id_greater_than)
        with self.engine.connect() as connection:
            return _read(connection, study_id, trial_id_greater_than)


def _read(connection: Connection, study: int, after: int) -> list[FrozenTrial]:
    trials = models.TrialModel.__table__
    wanted = (trials.c.study_id == study, trials.c.trial_id > after)

    def parts(table: Any, *names: str) -> dict[int, list[Any]]:
        """Trial → its rows of another table, in their order."""
        columns = [table.c[name] for name in names]
        own = next(iter(table.primary_key))
        rows = select(table.c.trial_id, *columns).join(trials, trials.c.trial_id == table.c.trial_id).where(*wanted)
        found = defaultdict(list)
        for trial, *values in connection.execute(rows.order_by(own)):
            found[trial].append(values)
        return found

    params = parts(models.TrialParamModel.__table__, "param_name", "param_value", "distribution_json")
    values = parts(models.TrialValueModel.__table__, "objective", "value", "value_type")
    attributes = parts(models.TrialUserAttributeModel.__table__, "key", "value_json")
    system = parts(models.TrialSystemAttributeModel.__table__, "key", "value_json")
    steps = parts(models.TrialIntermediateValueModel.__table__, "step", "intermediate_value", "intermediate_value_type")
    to_step = models.TrialIntermediateValueModel.stored_repr_to_intermediate_value
    whole = select(trials).where(*wanted).order_by(trials.c.trial_id)
    return [
        FrozenTrial(
            number=row.number, state=row.state, value=None, values=_values(values[row.trial_id]),
            datetime_start=_local(row.datetime_start), datetime_complete=_local(row.datetime_complete),
            params={name: _external(stated, place) for name, place, stated in params[row.trial_id]},
            distributions=_distributions(params[row.trial_id]),
            user_attrs={key: json.loads(value) for key, value in attributes[row.trial_id]},
            system_attrs={key: json.loads(value) for key, value in system[row.trial_id]},
            intermediate_values={step: to_step(value, kind) for step, value, kind in steps[row.trial_id]},
            trial_id=row.trial_id,
        )
        for row in connection.execute(whole)
    ]  # fmt: skip


def _values(rows: list[Any]) -> list[float] | None:
    stored = models.TrialValueModel.stored_repr_to_value
    return [stored(value, kind) for _, value, kind in sorted(rows, key=lambda row: row[0])] or None


def _distributions(rows: list[Any]) -> dict[str, BaseDistribution]:
    return {name: _distribution(stated) for name, _, stated in rows}


def _local(moment: datetime | None) -> datetime | None:
    """As Optuna gives it: local time without a zone."""
    return moment and moment.replace(tzinfo=UTC).astimezone().replace(tzinfo=None)
