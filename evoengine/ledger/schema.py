"""The schema of a ledger: its revisions, its views, and how an older database comes to the newest.

Most of an upgrade follows from the tables as `tables.py` declares them: Alembic compares the database with them, and
adds and drops what differs. Written here is what no comparison tells: what was renamed, and what new columns hold in
rows of before. A step names the revision that it came with, and is taken by ledgers of earlier ones.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import sqlalchemy as sa
from sqlalchemy import column, table
from sqlalchemy.orm import Session

import evoengine.service.tables  # noqa: F401  # which declares tables of the same schema
from evoengine.ledger import integrity
from evoengine.ledger.integrity import RowReader, checked_columns, row_checksum, table_of
from evoengine.ledger.optuna.schema import TABLES as OPTUNA_TABLES
from evoengine.ledger.optuna.schema import declared_tables
from evoengine.ledger.ranking import rebuild
from evoengine.ledger.rows import BATCH
from evoengine.ledger.tables import VERSION_TABLE, Base, MachineCodeRow
from evoengine.records import UNKNOWN_POLICY
from evoengine.text import hide_passwords

if TYPE_CHECKING:
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

LOCK_KEY = 0x65766F
"""of PostgreSQL's advisory locks: any number that other programs are unlikely to use"""


class Missing(NamedTuple):
    """Tables, columns and indexes that a database lacks; Optuna's are expected if it has any of them."""

    tables: list[str]
    columns: list[sa.Column[Any]]
    """of tables that are there"""
    indexes: list[sa.Index]
    """of tables that are there"""


def find_missing(connection: sa.Connection) -> Missing:
    """Return what the database lacks. Optuna makes its tables together, with the first study."""
    looked = sa.inspect(connection)
    held = set(looked.get_table_names())
    with_studies = bool(OPTUNA_TABLES & held)
    names = [*sorted(Base.metadata.tables), *(sorted(OPTUNA_TABLES) if with_studies else ())]
    missing = Missing([name for name in names if name not in held], [], [])
    for expected in (*Base.metadata.sorted_tables, *(declared_tables() if with_studies else ())):
        if expected.name in held:
            columns = {found["name"] for found in looked.get_columns(expected.name)}
            indexes = {found["name"] for found in looked.get_indexes(expected.name)}
            missing.columns.extend(column for column in expected.columns if column.name not in columns)
            in_order = sorted(expected.indexes, key=lambda index: str(index.name))
            missing.indexes.extend(index for index in in_order if index.name not in indexes)
    return missing


def upgrade(engine: sa.Engine) -> None:
    """Bring the schema to the newest revision and make again what follows from the rows, in one transaction.

    Of several processes that try at once, one does it.
    """
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            # SQLite's transaction has the write lock from its beginning
            connection.execute(sa.text(f"SELECT pg_advisory_xact_lock({LOCK_KEY})"))
        if not sa.inspect(connection).has_table(VERSION_TABLE):
            _create(connection)
            return
        drop_views(connection)
        migrate(connection)
        create_views(connection)
        with Session(connection) as session:
            rebuild(session)
            session.flush()


def _create(connection: sa.Connection) -> None:
    """Make all tables at once, as an upgrade would leave them; tests/ledger/test_migrations.py compares."""
    name = VERSION_TABLE
    revision = sa.Column("version_num", sa.String(32), nullable=False)
    versions = sa.Table(name, sa.MetaData(), revision, sa.PrimaryKeyConstraint("version_num", name=f"{name}_pkc"))
    versions.create(connection)
    connection.execute(versions.insert().values(version_num=REVISIONS[-1]))
    Base.metadata.create_all(connection, checkfirst=False)
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


def create_views(connection: sa.Connection) -> None:
    for name in VIEWS:
        connection.exec_driver_sql(_creation(name, connection.dialect.name))


def _creation(name: str, dialect: str) -> str:
    return f"CREATE VIEW {name} AS {_of_dialect(VIEWS[name], dialect)}".rstrip()  # as SQLite keeps it


def damaged_views(connection: sa.Connection) -> dict[str, str]:
    """Return the views that `create_views` has to make again → what is wrong with each.

    PostgreSQL does not keep the text of a view, so there only missing ones are found.
    """
    found = {name: "is missing" for name in VIEWS.keys() - sa.inspect(connection).get_view_names()}
    if connection.dialect.name == "sqlite":
        kept = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'view'")
        changed = [name for name, sql in kept if name in VIEWS and sql != _creation(name, "sqlite")]
        found |= dict.fromkeys(changed, "is not the one that this evoengine makes")
    return found


def drop_views(connection: sa.Connection) -> None:
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


REVISIONS = [f"{number:04}" for number in range(1, 14)]
"""of the schema, oldest first"""
UNKNOWN = json.dumps(asdict(UNKNOWN_POLICY))
"""of figures from before schema 0005"""
Step = str | Callable[["Operations"], None]
"""in SQL that both databases take, or a function"""


def migrate(connection: sa.Connection) -> None:
    """Bring the tables to the newest schema, with what follows from one schema to the next.

    Views and standings are left to the caller: they follow from the tables.
    """
    # slow to import
    from alembic.autogenerate import produce_migrations
    from alembic.operations import Operations

    held: str = connection.scalars(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).one()
    context = alembic_context(connection)
    op = Operations(context)
    _take(BEFORE, held, op)
    proposed = produce_migrations(context, Base.metadata).upgrade_ops
    for change in proposed.ops if proposed else ():
        for part in getattr(change, "ops", [change]):
            op.invoke(part)
    _take(AFTER, held, op)
    connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = :newest"), {"newest": REVISIONS[-1]})


def alembic_context(connection: sa.Connection) -> MigrationContext:
    """Return what Alembic compares a database by: the ledger's tables, and none of Optuna's beside them."""
    from alembic.migration import MigrationContext

    def is_ours(name: str | None, kind: str, parents: object) -> bool:
        return kind != "table" or name in Base.metadata.tables

    return MigrationContext.configure(connection, opts={"include_name": is_ours})


def _take(steps: Sequence[tuple[str, Step]], held: str, op: Operations) -> None:
    for came_with, step in steps:
        if held < came_with and isinstance(step, str):
            op.execute(step)
        elif held < came_with and not isinstance(step, str):
            step(op)


# ── before the tables are compared ──────────────────────────────────────────────────────────────────────────────────


def _allow_figures_without_tflops(op: Operations) -> None:
    with op.batch_alter_table("measurements") as measurements:
        measurements.alter_column("tflops", nullable=True)


def _allow_baselines_without_a_time(op: Operations) -> None:
    with op.batch_alter_table("baselines") as baselines:
        baselines.alter_column("median_us", nullable=True)
        baselines.alter_column("tflops", nullable=True)


def _name_policies_of_baselines(op: Operations) -> None:
    op.add_column("baselines", sa.Column("policy", sa.JSON()))
    op.execute(f"UPDATE baselines SET policy = '{UNKNOWN}'")
    with op.batch_alter_table("baselines") as baselines:
        baselines.alter_column("policy", existing_type=sa.JSON(), nullable=False)


def _hash_cubins(op: Operations) -> None:
    op.add_column("binaries", sa.Column("cubin_sha256", sa.String(64), nullable=False, server_default=""))
    _derive(op, "binaries.id", "cubin", "cubin_sha256", lambda cubin: hashlib.sha256(cubin).hexdigest())


def _compress_texts_and_cubins(op: Operations) -> None:
    connection = op.get_bind()
    op.add_column("sources", sa.Column("packed", sa.LargeBinary()))
    _derive(op, "sources.sha256", "text", "packed", lambda text: zlib.compress(text.encode()))
    table_of(MachineCodeRow).create(connection)
    binaries = table("binaries", column("id"), column("cubin_sha256"), column("cubin"))
    known: set[str] = set()
    for number, sha256 in connection.execute(sa.select(binaries.c.id, binaries.c.cubin_sha256)).all():
        cubin = connection.scalar(sa.select(binaries.c.cubin).where(binaries.c.id == number))
        if cubin and sha256 not in known:
            known.add(sha256)
            connection.execute(sa.insert(MachineCodeRow).values(sha256=sha256, packed=zlib.compress(cubin)))


def _derive(op: Operations, key: str, source: str, target: str, derived: Callable[[Any], object]) -> None:
    """Set a column of each row to what `derived` makes of another; `key` is the table and its primary key."""
    name, _, number = key.partition(".")
    rows, connection = table(name, *map(column, {number, source, target})), op.get_bind()
    for each in connection.scalars(sa.select(rows.c[number])).all():
        of_this = rows.c[number] == each
        value = connection.scalars(sa.select(rows.c[source]).where(of_this)).one()
        connection.execute(sa.update(rows).where(of_this).values({target: derived(value)}))


def _rename_checksums(op: Operations) -> None:
    if any(found["name"] == "checksums" for found in sa.inspect(op.get_bind()).get_columns("devices")):
        for name in SUMMED:
            op.execute(f"ALTER TABLE {name} RENAME COLUMN checksums TO checksum")


# ── after the tables were changed ───────────────────────────────────────────────────────────────────────────────────


def _hide_passwords(op: Operations) -> None:
    _derive(op, "runs.id", "command", "command", hide_passwords)


def _name_kernels(op: Operations) -> None:
    """Name the kernel of each run whose definition is kept by that alone: the text of its files is not known."""
    _derive(op, "runs.id", "definition", "kernel", _kernel_of)


def _kernel_of(definition: str | None) -> str | None:
    if definition is None:
        return None
    try:
        stated = json.loads(definition)
    except ValueError:
        stated = definition
    if isinstance(stated, dict):
        stated.pop("space", None)
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def _sum_rows_and_begin_chains(op: Operations) -> None:
    """Give each row one checksum in the place of one for each column, and note which rows there are.

    A row that is not what its checksums of before say stays damaged: it gets none. Rows of before schema 0008 had none,
    and are taken as they are.
    """
    rows: dict[str, type[Base]] = {mapper.class_.__tablename__: mapper.class_ for mapper in Base.registry.mappers}
    for name, columns in SUMMED.items():
        _restate(op.get_bind(), rows[name], columns.split())
    integrity.begin_all(op.get_bind(), integrity.UPGRADED)


def _restate(connection: sa.Connection, row: type[Base], before: list[str]) -> None:
    rows, names = table_of(row), tuple(checked_columns(row))
    selected = sa.select(*RowReader(row, ()).columns).order_by(rows.c.id).limit(BATCH)
    change = sa.update(rows).where(rows.c.id == sa.bindparam("number")).values(checksum=sa.bindparam("new"))
    last = 0
    while found := connection.execute(selected.where(rows.c.id > last)).all():
        changes: list[dict[str, Any]] = []
        for number, sums, *values in found:
            held = dict(zip(names, values, strict=True))
            changes.append({"number": number, "new": _restated(row, held, sums, before)})
        connection.execute(change, changes)
        last = found[-1][0]


def _restated(row: type[Base], held: dict[str, Any], sums: str | None, before: list[str]) -> str | None:
    expected = ((name, (sums or "")[n * WIDTH : (n + 1) * WIDTH]) for n, name in enumerate(before))
    if any(total and total != _sum_of_column(held[name], name) for name, total in expected):
        return None
    try:
        return row_checksum(row, held)
    except (TypeError, ValueError, AttributeError):  # of a value of another type
        return None


def _sum_of_column(value: object, name: str) -> str:
    if value is None or value != value:
        stored = b"\0"
    elif name.endswith("_at"):
        at = datetime.fromisoformat(value).replace(tzinfo=UTC) if isinstance(value, str) else value
        stored = at.astimezone(UTC).isoformat().encode() if isinstance(at, datetime) else b""
    elif isinstance(value, str):
        stored = value.encode(errors="surrogatepass")
    else:
        stored = repr(value).encode()
    return f"{crc32(stored):08x}"


WIDTH = 8
"""hexadecimal digits of the checksum of one column, of which a row of schemas 0008 to 0010 has one after the other"""
SUMMED = {
    "devices": "name uuid arch driver versions",
    "runs": "started_at finished_at status gpu problem device_id space_name space_sha256 space_text definition sampler "
    "objectives seed version host pid command gpu_definition imported_from trials seconds conditions",
    "binaries": "source_sha256 options arch compiler cubin_sha256 registers spill_bytes stack_bytes shared_bytes "
    "warnings mix compile_ms",
    "candidates": "run_id problem gpu config config_key parents operator created_at finished_at outcome reason device "
    "occupancy source_sha256 entry grid_x grid_y grid_z threads block_y block_z shared_bytes binary_id retry_of "
    "taken_from",
    "verdicts": "candidate_id device outcome reason cases wall_ms taken_at",
    "measurements": "candidate_id kind device tflops median_us samples_us vs_baseline terms suspect policy "
    "normalised_us taken_at",
    "baselines": "run_id name device median_us tflops samples_us policy taken_at",
    "profiles": "candidate_id tool device figures remarks taken_at",
}
"""table → the columns that those are of, in their order; what came later is taken as it is"""

BEFORE: list[tuple[str, Step]] = [
    ("0004", _allow_figures_without_tflops),
    ("0005", _name_policies_of_baselines),
    ("0006", "ALTER TABLE measurements RENAME COLUMN vs_sdpa TO vs_baseline"),
    ("0008", _hash_cubins),
    ("0009", _compress_texts_and_cubins),
    ("0011", _rename_checksums),
    ("0012", "DROP TABLE IF EXISTS standings"),
    ("0012", "DROP TABLE IF EXISTS rankings"),
    ("0013", _allow_baselines_without_a_time),
]
"""schema that a step came with, and the step"""
AFTER: list[tuple[str, Step]] = [
    ("0005", f"UPDATE measurements SET policy = '{UNKNOWN}' WHERE kind = 'measured'"),
    ("0007", "UPDATE candidates SET block_y = 1, block_z = 1 WHERE threads IS NOT NULL"),
    ("0008", _hide_passwords),
    ("0010", _name_kernels),
    ("0011", _sum_rows_and_begin_chains),
]
