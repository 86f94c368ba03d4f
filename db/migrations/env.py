"""Alembic's entry: brings the tables of the ledger, and only those, to the revision asked for.

`evoengine.ledger.database` runs it with an open connection; Optuna's tables in the same database are not ours to see.
"""

from __future__ import annotations

from alembic import context

from evoengine.ledger.tables import VERSION_TABLE, Base


def ours(name: str | None, kind: str, parents: object) -> bool:
    return kind != "table" or name in Base.metadata.tables


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    include_name=ours,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
