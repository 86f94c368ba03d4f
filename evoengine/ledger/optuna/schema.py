"""Optuna's tables in a ledger's database: the only place that knows Optuna's private schema.

It tells which tables they are and whether the Optuna installed can use them, and writes many trials at once, for which
Optuna has no call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from evoengine.errors import UsageError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from evoengine.ledger.optuna.study import StudyTrial

WRITTEN_REVISION = "v3.2.0.a"
"""of the schema that `insert_trials` writes; a test holds that it is the installed Optuna's"""

TABLES = frozenset(
    "alembic_version version_info studies study_directions study_system_attributes study_user_attributes trials"
    " trial_heartbeats trial_intermediate_values trial_params trial_system_attributes trial_user_attributes"
    " trial_values".split()
)
VERSION_TABLE = "alembic_version"
_STUDIES = sa.table("studies", sa.column("study_id"), sa.column("study_name"))
_TRIALS = sa.table("trials", sa.column("trial_id"), sa.column("study_id"))
_OF_TRIAL = tuple(sorted(name for name in TABLES if name.startswith("trial_")))
"""tables whose rows name a trial"""
_OF_STUDY = ("trials", *sorted(name for name in TABLES if name.startswith("study_")), "studies")
"""tables whose rows name a study, in an order in which they may be deleted"""


def holds_studies(tables: Set[str]) -> bool:
    return {"studies", "trials", "version_info"} <= tables


def require_schema(tables: Set[str], revision: str | None, url: str) -> None:
    """Raise UsageError if Optuna's tables are there, and are those of another Optuna than the installed.

    `revision` is what `VERSION_TABLE` says; `url` names the database, without its password.
    """
    if not holds_studies(tables):
        return
    newest, *older = _installed_revisions()
    if revision == newest:
        return
    # slow to import, and a database without studies does without
    import optuna

    if revision in (None, *older):
        made, remedy = "an older Optuna", f"optuna storage upgrade --storage {url}"
    else:
        made, remedy = "a newer Optuna", "pip install --upgrade optuna"
    raise UsageError(f"the studies in {url} are of {made} than the {optuna.__version__} here: run {remedy}")


@cache
def _installed_revisions() -> list[str]:
    """Return the revisions that the installed Optuna knows, the newest first: it reads them from files each time."""
    import optuna

    storage = optuna.storages.RDBStorage("sqlite://")
    newest = storage.get_head_version()
    return [newest, *(revision for revision in storage.get_all_versions() if revision != newest)]


def declared_tables() -> list[sa.Table]:
    """Return the tables that a new storage of the installed Optuna has, without `VERSION_TABLE`."""
    # slow to import, and a database without studies does without
    from optuna.storages._rdb import models

    declared: sa.MetaData = models.BaseModel.metadata
    return declared.sorted_tables


def study_prefix(run: int) -> str:
    """Return how the names of a run's studies begin."""
    return f"run {run} · "


def delete_studies(connection: sa.Connection, run: int) -> None:
    """Delete the studies of a run with their trials, in the present transaction."""
    _delete(connection, _STUDIES.c.study_name.startswith(study_prefix(run), autoescape=True))


def delete_study(connection: sa.Connection, name: str) -> None:
    """Delete one study by its name, as `delete_studies` does."""
    _delete(connection, _STUDIES.c.study_name == name)


def _delete(connection: sa.Connection, named: sa.ColumnElement[bool]) -> None:
    if "studies" not in sa.inspect(connection).get_table_names():
        return
    studies = connection.scalars(sa.select(_STUDIES.c.study_id).where(named)).all()
    if not studies:
        return
    trials = sa.select(_TRIALS.c.trial_id).where(_TRIALS.c.study_id.in_(studies))
    for name in _OF_TRIAL:
        of_trial = sa.table(name, sa.column("trial_id"))
        connection.execute(sa.delete(of_trial).where(of_trial.c.trial_id.in_(trials)))
    for name in _OF_STUDY:
        of_study = sa.table(name, sa.column("study_id"))
        connection.execute(sa.delete(of_study).where(of_study.c.study_id.in_(studies)))


def insert_trials(
    connection: sa.Connection,
    study: int,
    trials: Sequence[tuple[StudyTrial, Mapping[str, float], Mapping[str, str]]],
    distributions: Mapping[str, BaseDistribution],
) -> None:
    """Insert finished trials, with the index of each value in its knob's domain and system attributes.

    They are numbered in their order, after those of the study. `distributions` are those of all knobs, the same for
    every trial of the study.
    """
    # slow to import
    from optuna.distributions import distribution_to_json
    from optuna.storages._rdb import models
    from optuna.trial import TrialState

    whole = models.TrialModel.__table__
    # locks the study until the end of the transaction: no other process takes the same numbers
    connection.execute(sa.update(_STUDIES).where(_STUDIES.c.study_id == study).values(study_name=_STUDIES.c.study_name))
    held = connection.scalar(sa.select(sa.func.count()).select_from(whole).where(whole.c.study_id == study)) or 0
    numbers = range(held, held + len(trials))
    rows = [
        {
            "number": number,
            "study_id": study,
            "datetime_start": _naive(t.started),
            "datetime_complete": _naive(t.finished),
            "state": TrialState.COMPLETE if t.values else TrialState.PRUNED,
        }
        for number, (t, *_) in zip(numbers, trials, strict=True)
    ]
    _insert(connection, whole, rows)
    written = sa.select(whole.c.trial_id).where(whole.c.study_id == study, whole.c.number.in_(numbers))
    ids = connection.scalars(written.order_by(whole.c.number)).all()
    stated = {knob: distribution_to_json(distribution) for knob, distribution in distributions.items()}
    values, params, attributes, system = [], [], [], []
    for trial_id, (t, places, of_system) in zip(ids, trials, strict=True):
        for objective, value in enumerate(t.values or ()):
            stored, value_type = models.TrialValueModel.value_to_stored_repr(value)
            values.append({"trial_id": trial_id, "objective": objective, "value": stored, "value_type": value_type})
        for knob, place in places.items():
            params.append(
                {"trial_id": trial_id, "param_name": knob, "param_value": place, "distribution_json": stated[knob]}
            )
        attributes += [{"trial_id": trial_id, "key": k, "value_json": json.dumps(v)} for k, v in t.attributes.items()]
        system += [{"trial_id": trial_id, "key": k, "value_json": json.dumps(v)} for k, v in of_system.items()]
    _insert(connection, models.TrialValueModel.__table__, values)
    _insert(connection, models.TrialParamModel.__table__, params)
    _insert(connection, models.TrialUserAttributeModel.__table__, attributes)
    _insert(connection, models.TrialSystemAttributeModel.__table__, system)


def _insert(connection: sa.Connection, into: sa.Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(sa.insert(into), rows)


def _naive(moment: datetime | None) -> datetime | None:
    """Return the time in UTC without a zone, as Optuna's tables hold it."""
    return moment and moment.astimezone(UTC).replace(tzinfo=None)
