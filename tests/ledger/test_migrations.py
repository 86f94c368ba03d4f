"""The migrations make exactly the tables the models describe, and see nothing of Optuna's."""

from __future__ import annotations

from sqlalchemy import Column, Integer, MetaData, Table

from evoengine.ledger.models import Base
from evoengine.ledger.study import optuna_storage
from tests.ledger.examples import differences


def test_migrations_equal_models_and_optunas_tables_are_not_proposed_for_dropping(ledger):
    optuna_storage(ledger.url)
    assert differences(ledger, Base.metadata) == []


def test_a_model_without_its_migration_and_one_that_went_are_seen(ledger):
    changed = MetaData()
    for table in Base.metadata.sorted_tables:
        table.to_metadata(changed)
    changed.tables["runs"].append_column(Column("mood", Integer))
    Table("feelings", changed, Column("id", Integer, primary_key=True))
    changed.remove(changed.tables["baselines"])
    kinds = {found[0] for found in differences(ledger, changed)}
    assert kinds == {"add_column", "add_table", "remove_index", "remove_table"}
