"""The schema of a ledger: its revisions, and how a database comes to the newest."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from sqlalchemy import Column, Connection, Engine, Index, MetaData, PrimaryKeyConstraint, String, Table, inspect, text
from sqlalchemy.orm import Session

from evoengine.ledger import service_tables, tables
from evoengine.ledger.optuna.schema import TABLES as OPTUNA_TABLES
from evoengine.ledger.optuna.schema import declared_tables
from evoengine.ledger.ranking import rebuild
from evoengine.ledger.upgrade import REVISIONS, migrate

TABLES = (tables, service_tables)
"""the modules whose tables make up the schema"""
LOCK_KEY = 0x65766F
"""of PostgreSQL's advisory locks: any number that other programs are unlikely to use"""


def expected_tables(held: Set[str]) -> list[Table]:
    """Return the ledger's tables and, if the database holds any of Optuna's, the installed Optuna's."""
    expected = tables.Base.metadata.sorted_tables
    return [*expected, *declared_tables()] if OPTUNA_TABLES & held else expected


def missing_columns(connection: Connection) -> list[Column[Any]]:
    """Return the columns that expected tables of the database do not have."""
    looked = inspect(connection)
    held = set(looked.get_table_names())
    return [
        column
        for table in expected_tables(held)
        if table.name in held
        for column in table.columns
        if column.name not in {found["name"] for found in looked.get_columns(table.name)}
    ]


def missing_indexes(connection: Connection) -> list[Index]:
    """Return the indexes that expected tables, all of which are there, do not have, in the order of their names."""
    looked = inspect(connection)
    return [
        index
        for table in expected_tables(set(looked.get_table_names()))
        for index in sorted(table.indexes, key=lambda index: str(index.name))
        if index.name not in {found["name"] for found in looked.get_indexes(table.name)}
    ]


def upgrade(engine: Engine) -> None:
    """Bring the schema to the newest revision and make again what follows from the rows, in one transaction.

    Of several processes that try at once, one does it.
    """
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            # SQLite's transaction has the write lock from its beginning
            connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK_KEY})"))
        if not inspect(connection).has_table(tables.VERSION_TABLE):
            _create(connection)
            return
        drop_views(connection)
        migrate(connection)
        create_views(connection)
        with Session(connection) as session:
            rebuild(session)
            session.flush()


def _create(connection: Connection) -> None:
    """Make all tables at once, as the migrations would have left them; tests/ledger/test_migrations.py compares."""
    name = tables.VERSION_TABLE
    revision = Column("version_num", String(32), nullable=False)
    versions = Table(name, MetaData(), revision, PrimaryKeyConstraint("version_num", name=f"{name}_pkc"))
    versions.create(connection)
    connection.execute(versions.insert().values(version_num=REVISIONS[-1]))
    tables.Base.metadata.create_all(connection, checkfirst=False)
    create_views(connection)


# ── views ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


MODEL = """CASE WHEN m.kind = 'estimated'
    THEN CASE WHEN coalesce({number:m.terms:predicted}, 0) <> 0 THEN 'machine code' ELSE 'formula' END END"""

PRECEDENCE = """
    CASE f.kind WHEN 'measured' THEN CASE WHEN {text:f.policy:clocks} = 'sustained' THEN 1 ELSE 0 END
      WHEN 'recorded' THEN 4 ELSE CASE WHEN coalesce({number:f.terms:predicted}, 0) <> 0 THEN 8 ELSE 10 END END"""
"""as `evoengine.records.precedence`"""

TRIAL_FIGURES = """
SELECT m.id AS figure, c.id AS trial, c.run_id AS run, c.problem, c.gpu, coalesce(c.outcome, 'pending') AS outcome,
  m.kind, {model} AS model, m.device, {text:m.policy:launch} AS launch, {text:m.policy:l2} AS l2,
  {text:m.policy:clocks} AS clocks, {number:m.policy:batch} AS batch, m.median_us, m.normalised_us,
  coalesce(m.normalised_us, m.median_us) AS compared_us, m.tflops, m.vs_baseline, m.suspect, m.taken_at
FROM measurements m JOIN candidates c ON c.id = m.candidate_id
"""

TRIAL_LIST = """
SELECT c.id AS trial, c.run_id AS run, c.problem, c.gpu, {text:c.config:family} AS family,
  coalesce(c.outcome, 'pending') AS outcome, c.reason, c.config, m.kind, {model} AS model, m.device,
  {text:m.policy:launch} AS launch, {text:m.policy:l2} AS l2, {text:m.policy:clocks} AS clocks,
  {number:m.policy:batch} AS batch, m.median_us, coalesce(m.normalised_us, m.median_us) AS compared_us, m.tflops,
  m.vs_baseline, b.registers, b.spill_bytes,
  c.shared_bytes + coalesce(b.shared_bytes, 0) AS shared_bytes, c.occupancy, c.parents, c.operator, c.created_at,
  c.finished_at, r.imported_from, r.kernel, c.gate_version
FROM candidates c
JOIN runs r ON r.id = c.run_id
LEFT JOIN binaries b ON b.id = c.binary_id
LEFT JOIN measurements m ON m.id = (
  SELECT f.id FROM measurements f WHERE f.candidate_id = c.id
  ORDER BY {precedence}, f.id DESC
  LIMIT 1)
"""

BEST_TRIALS = """
WITH ranked AS (
  SELECT s.*, k.problem, k.gpu, k.precedence, max(s.figure_id) OVER (PARTITION BY s.ranking_id) AS last_figure,
    row_number() OVER (
      PARTITION BY s.ranking_id, coalesce(c.source_sha256, c.config_key)
      ORDER BY s.counted_us, s.place, s.us, s.candidate_id) AS of_kernel
  FROM standings s JOIN rankings k ON k.id = s.ranking_id JOIN candidates c ON c.id = s.candidate_id
)
SELECT r.problem, r.gpu,
  dense_rank() OVER (PARTITION BY r.problem, r.gpu ORDER BY r.precedence, r.last_figure DESC) AS preference,
  row_number() OVER (
    PARTITION BY r.ranking_id ORDER BY r.counted_us, r.place, r.us, r.candidate_id) AS place,
  r.candidate_id AS trial, r.run_id AS run, m.kind, {model} AS model, m.device, {text:m.policy:launch} AS launch,
  {text:m.policy:l2} AS l2, {text:m.policy:clocks} AS clocks, {number:m.policy:batch} AS batch,
  r.us AS compared_us, m.median_us, m.tflops, m.vs_baseline, r.figure_id AS figure
FROM ranked r JOIN measurements m ON m.id = r.figure_id
WHERE r.of_kernel = 1
"""

RUN_SUMMARIES = """
SELECT r.id AS run, r.started_at, r.finished_at, r.status, r.problem, r.gpu, d.name AS device, r.sampler, r.objectives,
  r.seed, r.space_name, r.version, r.imported_from, coalesce(t.trials, 0) AS trials, coalesce(t.correct, 0) AS correct,
  coalesce(t.unfinished, 0) AS unfinished, coalesce(t.pending, 0) AS pending,
  t.measured_us, t.recorded_us, t.predicted_us, t.formula_us
FROM runs r JOIN devices d ON d.id = r.device_id
LEFT JOIN (
  SELECT run, count(*) AS trials,
    sum(CASE WHEN outcome IN ('measured', 'estimated', 'recorded', 'unranked') THEN 1 ELSE 0 END) AS correct,
    sum(CASE WHEN outcome = 'unfinished' THEN 1 ELSE 0 END) AS unfinished,
    sum(CASE WHEN outcome = 'pending' THEN 1 ELSE 0 END) AS pending,
    min(CASE WHEN kind = 'measured' AND outcome = 'measured' THEN compared_us END) AS measured_us,
    min(CASE WHEN kind = 'recorded' AND outcome = 'recorded' THEN compared_us END) AS recorded_us,
    min(CASE WHEN model = 'machine code' AND outcome = 'estimated' THEN compared_us END) AS predicted_us,
    min(CASE WHEN model = 'formula' AND outcome = 'estimated' THEN compared_us END) AS formula_us
  FROM trial_list GROUP BY run) t ON t.run = r.id
"""

GATE_CASES = """
SELECT c.id AS trial, c.run_id AS run, c.problem, c.gpu, v.id AS verdict, v.device, {text:e.value:name} AS name,
  CASE WHEN CAST({text:e.value:correct} AS text) IN ('true', '1') THEN 1 ELSE 0 END AS correct,
  {number:e.value:max_error} AS max_error, {number:e.value:mean_error} AS mean_error,
  {number:e.value:allowed} AS allowed, {text:e.value:reason} AS reason
FROM verdicts v JOIN candidates c ON c.id = v.candidate_id CROSS JOIN {each:v.cases:e}
"""

VIEWS = {
    "trial_figures": TRIAL_FIGURES,
    "trial_list": TRIAL_LIST,
    "best_trials": BEST_TRIALS,
    "run_summaries": RUN_SUMMARIES,
    "gate_cases": GATE_CASES,
}
"""in an order in which they can be made: a view may read those before it"""


def create_views(connection: Connection) -> None:
    for name in VIEWS:
        connection.exec_driver_sql(_creation(name, connection.dialect.name))


def _creation(name: str, dialect: str) -> str:
    return f"CREATE VIEW {name} AS {_of_dialect(VIEWS[name], dialect)}".rstrip()  # as SQLite keeps it


def damaged_views(connection: Connection) -> dict[str, str]:
    """Return the views that `create_views` has to make again → what is wrong with each.

    PostgreSQL does not keep the text of a view, so there only missing ones are found.
    """
    found = {name: "is not there" for name in VIEWS.keys() - inspect(connection).get_view_names()}
    if connection.dialect.name == "sqlite":
        kept = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'view'")
        changed = [name for name, sql in kept if name in VIEWS and sql != _creation(name, "sqlite")]
        found |= dict.fromkeys(changed, "is not the one that this evoengine makes")
    return found


def drop_views(connection: Connection) -> None:
    """Drop those that are there; a table that a view reads cannot be changed."""
    for name in reversed(VIEWS):
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")


def _of_dialect(query: str, dialect: str) -> str:
    """Translate the JSON accesses of a query to a dialect.

    `{text:COLUMN:NAME}` and `{number:COLUMN:NAME}` read a field of an object, `{each:COLUMN:NAME}` yields a row for
    each item of a list.
    """

    def taken(part: str) -> str:
        kind, column, name = part.split(":")
        if kind == "each":
            return (
                f"json_each({column}) {name}" if dialect == "sqlite" else f"json_array_elements({column}) {name}(value)"
            )
        if dialect == "sqlite":
            return f"json_extract({column}, '$.{name}')"
        value = f"({column} ->> '{name}')"
        return value if kind == "text" else f"CAST({value} AS double precision)"

    first, *parts = query.replace("{model}", MODEL).replace("{precedence}", PRECEDENCE).split("{")
    return first + "".join(f"{taken(inner)}{rest}" for inner, _, rest in (part.partition("}") for part in parts))
