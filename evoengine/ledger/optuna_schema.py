"""Optuna's tables in a ledger's database: which they are, and whether the Optuna installed can use them."""

from __future__ import annotations

from collections.abc import Set

from sqlalchemy import Connection, column, delete, inspect, select, table

from evoengine.errors import UsageError

TABLES = frozenset(
    {
        "alembic_version",
        "studies",
        "study_directions",
        "study_system_attributes",
        "study_user_attributes",
        "trial_heartbeats",
        "trial_intermediate_values",
        "trial_params",
        "trial_system_attributes",
        "trial_user_attributes",
        "trial_values",
        "trials",
        "version_info",
    }
)
VERSION_TABLE = "alembic_version"
_STUDIES = table("studies", column("study_id"), column("study_name"))
_TRIALS = table("trials", column("trial_id"), column("study_id"))
_OF_TRIAL = tuple(sorted(name for name in TABLES if name.startswith("trial_")))
"""tables whose rows name a trial"""
_OF_STUDY = ("trials", *sorted(name for name in TABLES if name.startswith("study_")), "studies")
"""tables whose rows name a study, in an order in which they may be deleted"""


def holds_studies(tables: Set[str]) -> bool:
    return {"studies", "trials", "version_info"} <= tables


def require_schema(tables: Set[str], revision: str | None, url: str) -> None:
    """Raises UsageError where Optuna's tables are there, and are those of an older or newer Optuna than the installed.

    `revision` is what `VERSION_TABLE` says; `url` names the database, without its password.
    """
    if not holds_studies(tables):
        return
    # slow to import, and a database without studies does without
    import optuna

    installed = optuna.storages.RDBStorage("sqlite://")
    if revision == installed.get_head_version():
        return
    if revision in (None, *installed.get_all_versions()):
        made, remedy = "an older Optuna", f"optuna storage upgrade --storage {url}"
    else:
        made, remedy = "a newer Optuna", "pip install --upgrade optuna"
    raise UsageError(f"the studies in {url} are of {made} than the {optuna.__version__} here: run {remedy}")


def study_prefix(run: int) -> str:
    """How the names of a run's studies begin."""
    return f"run {run} · "


def delete_studies(connection: Connection, run: int) -> None:
    """Takes the studies of a run and their trials out of Optuna's tables, in the transaction that is under way."""
    if "studies" not in inspect(connection).get_table_names():
        return
    of_run = select(_STUDIES.c.study_id).where(_STUDIES.c.study_name.startswith(study_prefix(run), autoescape=True))
    studies = connection.scalars(of_run).all()
    if not studies:
        return
    trials = select(_TRIALS.c.trial_id).where(_TRIALS.c.study_id.in_(studies))
    for name in _OF_TRIAL:
        of_trial = table(name, column("trial_id"))
        connection.execute(delete(of_trial).where(of_trial.c.trial_id.in_(trials)))
    for name in _OF_STUDY:
        of_study = table(name, column("study_id"))
        connection.execute(delete(of_study).where(of_study.c.study_id.in_(studies)))
