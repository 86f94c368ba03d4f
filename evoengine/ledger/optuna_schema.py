"""Optuna's tables in a ledger's database: which they are, and whether the Optuna installed can use them."""

from __future__ import annotations

from collections.abc import Set

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
