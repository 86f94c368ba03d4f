"""searches that go on, claims, which figure each candidate is ranked by, the service, compressed sources, views

Of what older ledgers hold nothing is claimed: what their trials were evaluated with is not known well enough.

What stands follows from the figures and is made after the upgrade.
"""

from __future__ import annotations

import zlib

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

BATCH = 100
"""of the rows that are compressed together"""

# Views for people with an SQL client. Queries in evoengine itself read the tables: a view does not check whether a row
# is as it was written. A later migration that rebuilds a table drops the views first, in the order of `VIEWS` reversed,
# and makes them again.

MODEL = """CASE WHEN m.kind = 'estimated'
    THEN CASE WHEN coalesce({number:m.terms:predicted}, 0) <> 0 THEN 'machine code' ELSE 'formula' END END"""

TRIAL_FIGURES = """
SELECT m.id AS figure, c.id AS trial, c.run_id AS run, c.problem, c.gpu, coalesce(c.outcome, 'unfinished') AS outcome,
  m.kind, {model} AS model, m.device, {text:m.policy:launch} AS launch, {text:m.policy:l2} AS l2,
  {text:m.policy:clocks} AS clocks, {number:m.policy:batch} AS batch, m.median_us, m.normalised_us,
  coalesce(m.normalised_us, m.median_us) AS compared_us, m.tflops, m.vs_baseline, m.suspect, m.taken_at
FROM measurements m JOIN candidates c ON c.id = m.candidate_id
"""

TRIAL_LIST = """
SELECT c.id AS trial, c.run_id AS run, c.problem, c.gpu, {text:c.config:family} AS family,
  coalesce(c.outcome, 'unfinished') AS outcome, c.reason, c.config, m.kind, {model} AS model, m.device,
  {text:m.policy:launch} AS launch, {text:m.policy:l2} AS l2, {text:m.policy:clocks} AS clocks,
  {number:m.policy:batch} AS batch, m.median_us, coalesce(m.normalised_us, m.median_us) AS compared_us, m.tflops,
  m.vs_baseline, b.registers, b.spill_bytes,
  c.shared_bytes + coalesce(b.shared_bytes, 0) AS shared_bytes, c.occupancy, c.parents, c.operator, c.created_at,
  c.finished_at, r.imported_from
FROM candidates c
JOIN runs r ON r.id = c.run_id
LEFT JOIN binaries b ON b.id = c.binary_id
LEFT JOIN measurements m ON m.id = (
  SELECT f.id FROM measurements f WHERE f.candidate_id = c.id
  ORDER BY CASE f.kind WHEN 'measured' THEN 0 WHEN 'recorded' THEN 1 ELSE 2 END,
    CASE WHEN f.kind = 'estimated' AND coalesce({number:f.terms:predicted}, 0) = 0 THEN 1 ELSE 0 END,
    CASE WHEN {text:f.policy:clocks} = 'sustained' THEN 1 ELSE 0 END, f.id DESC
  LIMIT 1)
"""

BEST_TRIALS = """
WITH held AS (
  SELECT s.candidate_id AS trial, s.run_id AS run, k.problem, k.gpu, coalesce(c.source_sha256, c.config_key) AS kernel,
    s.figure_id AS figure, 1e6 / s.us AS speed,
    CASE WHEN s.is_final = 1 THEN {number:m.terms:place} END AS final_place,
    CASE WHEN s.is_final = 1 THEN {number:m.terms:final_of_run} END AS final_of_run,
    CASE k.kind WHEN 'measured' THEN 0 WHEN 'recorded' THEN 1 ELSE 2 END AS by_kind, k.by_formula AS by_model,
    CASE WHEN {text:m.policy:clocks} = 'sustained' THEN 1 ELSE 0 END AS by_clocks, k.id AS figures
  FROM standings s JOIN rankings k ON k.id = s.ranking_id JOIN candidates c ON c.id = s.candidate_id
  JOIN measurements m ON m.id = s.figure_id
), last_finals AS (
  SELECT problem, gpu, figures, CASE WHEN final_of_run < 0 THEN run ELSE 0 END AS of_run,
    max(final_of_run) AS final_of_run
  FROM held WHERE final_place IS NOT NULL
  GROUP BY problem, gpu, figures, CASE WHEN final_of_run < 0 THEN run ELSE 0 END
), brought AS (
  SELECT h.trial, h.problem, h.gpu, h.figures, h.run, h.figure, h.speed,
    max(h.speed) OVER (PARTITION BY h.problem, h.gpu, h.figures, h.run ORDER BY h.final_place DESC) AS won,
    row_number() OVER (PARTITION BY h.problem, h.gpu, h.figures, h.run ORDER BY h.final_place DESC) AS from_last
  FROM held h JOIN last_finals l ON l.of_run = h.run AND l.final_of_run = h.final_of_run AND l.figures = h.figures
    AND l.problem = h.problem AND l.gpu = h.gpu
  WHERE h.final_place IS NOT NULL
), brought_finals AS (
  SELECT problem, gpu, figures, run, min(figure) AS began, max(CASE WHEN from_last = 1 THEN speed END) AS slowest
  FROM brought GROUP BY problem, gpu, figures, run
), after_brought AS (
  SELECT h.*, b.won AS brought_won, CASE WHEN b.won IS NOT NULL THEN b.won
      WHEN h.figure < f.began AND h.speed > f.slowest THEN f.slowest ELSE h.speed END AS counted_speed
  FROM held h LEFT JOIN brought b ON b.trial = h.trial
  LEFT JOIN brought_finals f ON f.problem = h.problem AND f.gpu = h.gpu AND f.figures = h.figures AND f.run = h.run
), own AS (
  SELECT h.trial, h.problem, h.gpu, h.figures, h.figure, h.counted_speed,
    max(h.counted_speed) OVER (PARTITION BY h.problem, h.gpu, h.figures ORDER BY h.final_place DESC) AS won,
    row_number() OVER (PARTITION BY h.problem, h.gpu, h.figures ORDER BY h.final_place DESC) AS from_last
  FROM after_brought h JOIN last_finals l ON l.of_run = 0 AND l.final_of_run = h.final_of_run
    AND l.figures = h.figures AND l.problem = h.problem AND l.gpu = h.gpu
  WHERE h.final_place IS NOT NULL
), own_finals AS (
  SELECT problem, gpu, figures, min(figure) AS began, max(CASE WHEN from_last = 1 THEN counted_speed END) AS slowest
  FROM own GROUP BY problem, gpu, figures
), placed AS (
  SELECT h.*, CASE WHEN o.won IS NOT NULL THEN o.won
      WHEN h.figure < f.began AND h.counted_speed > f.slowest THEN f.slowest ELSE h.counted_speed END AS last_speed,
    CASE WHEN o.won IS NOT NULL THEN h.final_place
      WHEN h.figure < f.began AND h.counted_speed > f.slowest THEN 1e9
      WHEN h.brought_won IS NOT NULL THEN h.final_place ELSE 1e9 END AS won_place
  FROM after_brought h LEFT JOIN own o ON o.trial = h.trial
  LEFT JOIN own_finals f ON f.problem = h.problem AND f.gpu = h.gpu AND f.figures = h.figures
), last_figures AS (
  SELECT problem, gpu, figures, by_kind, by_model, by_clocks, max(figure) AS last_figure
  FROM held GROUP BY problem, gpu, figures, by_kind, by_model, by_clocks
), preferences AS (
  SELECT problem, gpu, figures, row_number() OVER (
    PARTITION BY problem, gpu ORDER BY by_kind, by_model, by_clocks, last_figure DESC) AS preference
  FROM last_figures
), firsts AS (
  SELECT * FROM (
    SELECT placed.*, row_number() OVER (
      PARTITION BY problem, gpu, figures, kernel
      ORDER BY last_speed DESC, won_place, speed DESC, trial) AS of_kernel
    FROM placed) kernels
  WHERE of_kernel = 1
)
SELECT o.problem, o.gpu, p.preference,
  row_number() OVER (
    PARTITION BY o.problem, o.gpu, o.figures
    ORDER BY o.last_speed DESC, o.won_place, o.speed DESC, o.trial) AS place,
  o.trial, o.run, m.kind, {model} AS model, m.device, {text:m.policy:launch} AS launch, {text:m.policy:l2} AS l2,
  {text:m.policy:clocks} AS clocks, {number:m.policy:batch} AS batch,
  coalesce(m.normalised_us, m.median_us) AS compared_us, m.median_us, m.tflops, m.vs_baseline, o.figure
FROM firsts o JOIN preferences p ON p.problem = o.problem AND p.gpu = o.gpu AND p.figures = o.figures
JOIN measurements m ON m.id = o.figure
"""

RUN_SUMMARIES = """
SELECT r.id AS run, r.started_at, r.finished_at, r.status, r.problem, r.gpu, d.name AS device, r.sampler, r.objectives,
  r.seed, r.space_name, r.version, r.imported_from, coalesce(t.trials, 0) AS trials, coalesce(t.correct, 0) AS correct,
  coalesce(t.unfinished, 0) AS unfinished, t.measured_us, t.recorded_us, t.predicted_us, t.formula_us
FROM runs r JOIN devices d ON d.id = r.device_id
LEFT JOIN (
  SELECT run, count(*) AS trials,
    sum(CASE WHEN outcome IN ('measured', 'estimated', 'recorded', 'unranked') THEN 1 ELSE 0 END) AS correct,
    sum(CASE WHEN outcome = 'unfinished' THEN 1 ELSE 0 END) AS unfinished,
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


def upgrade() -> None:
    _add_resumption()
    _add_claims()
    _add_service()
    _pack_sources()
    _move_machine_code()
    _add_standings()
    op.drop_index("ix_candidates_run_id", "candidates")
    op.drop_index("ix_candidates_gpu_problem", "candidates")
    op.create_index("ix_candidates_run_id_outcome", "candidates", ["run_id", "outcome"])
    op.create_index("ix_candidates_gpu_problem_id", "candidates", ["gpu", "problem", "id"])
    _add_views()


def _add_resumption() -> None:
    op.add_column("runs", sa.Column("trials", sa.Integer(), nullable=True))
    op.add_column("runs", sa.Column("seconds", sa.Double(), nullable=True))
    op.add_column("runs", sa.Column("conditions", sa.JSON(), nullable=True))
    op.add_column("heartbeats", sa.Column("began_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("heartbeats", sa.Column("spent", sa.Double(), nullable=False, server_default="0"))
    op.add_column("heartbeats", sa.Column("process", sa.Text(), nullable=True))
    op.add_column("candidates", sa.Column("retry_of", sa.Integer(), nullable=True))
    op.add_column("candidates", sa.Column("taken_from", sa.Integer(), nullable=True))


def _add_claims() -> None:
    op.create_table(
        "claims",
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("candidate_id", sa.Integer(), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidates.id"], name="fk_claims_candidate_id"),
        sa.PrimaryKeyConstraint("key", name="pk_claims"),
    )
    op.create_index("ix_claims_candidate_id", "claims", ["candidate_id"])
    op.create_table(
        "commits",
        sa.Column("writer", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("writer", name="pk_commits"),
    )


def _add_service() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("name", name="uq_tokens_name"),
        sa.UniqueConstraint("sha256", name="uq_tokens_sha256"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("why", sa.Text(), nullable=True),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("submitter", sa.Integer(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("body_sha256", sa.String(64), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("beat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("parts", sa.JSON(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=True),
        sa.Column("events", sa.Integer(), nullable=False),
        sa.Column("deaths", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("submitter", "idempotency_key", name="uq_jobs_submitter_idempotency_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.create_table(
        "job_events",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("event", sa.String(16), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_events_job_id"),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_job_events"),
    )
    op.create_table(
        "executors",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("cpu_jobs", sa.Integer(), nullable=False),
        sa.Column("beat_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("owner", name="pk_executors"),
    )
    op.create_table(
        "tuner_cache",
        sa.Column("key", sa.String(256), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.Column("stored_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_tuner_cache"),
    )


def _pack_sources() -> None:
    connection = op.get_bind()
    op.add_column("sources", sa.Column("packed", sa.LargeBinary(), nullable=True))
    sources = sa.table("sources", sa.column("sha256"), sa.column("text"), sa.column("packed", sa.LargeBinary()))
    numbers = connection.scalars(sa.select(sources.c.sha256)).all()
    for begin in range(0, len(numbers), BATCH):
        of_batch = sources.c.sha256.in_(numbers[begin : begin + BATCH])
        for number, text in connection.execute(sa.select(sources.c.sha256, sources.c.text).where(of_batch)).all():
            packed = zlib.compress(text.encode())
            connection.execute(sources.update().where(sources.c.sha256 == number).values(packed=packed))
    op.drop_column("sources", "text")


def _move_machine_code() -> None:
    connection = op.get_bind()
    op.create_table(
        "machine_code",
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("packed", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_machine_code"),
    )
    code = sa.table("machine_code", sa.column("sha256"), sa.column("packed", sa.LargeBinary()))
    binaries = sa.table("binaries", sa.column("id"), sa.column("cubin_sha256"), sa.column("cubin", sa.LargeBinary()))
    known: set[str] = set()
    for number, sha256 in connection.execute(sa.select(binaries.c.id, binaries.c.cubin_sha256)).all():
        cubin = connection.scalar(sa.select(binaries.c.cubin).where(binaries.c.id == number))
        if cubin and sha256 not in known:
            known.add(sha256)
            connection.execute(code.insert().values(sha256=sha256, packed=zlib.compress(cubin)))
    op.drop_column("binaries", "cubin")
    op.create_index("ix_binaries_cubin_sha256", "binaries", ["cubin_sha256"])


def _add_standings() -> None:
    op.create_table(
        "rankings",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("by_formula", sa.Integer(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_rankings"),
        sa.UniqueConstraint(
            "problem", "gpu", "kind", "by_formula", "device", "policy",
            name="uq_rankings_problem_gpu_kind_by_formula_device_policy",
        ),
    )  # fmt: skip
    op.create_table(
        "standings",
        sa.Column("candidate_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ranking_id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("figure_id", sa.Integer(), nullable=False),
        sa.Column("us", sa.Double(), nullable=False),
        sa.Column("is_final", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidates.id"], name="fk_standings_candidate_id"),
        sa.ForeignKeyConstraint(["ranking_id"], ["rankings.id"], name="fk_standings_ranking_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_standings_run_id"),
        sa.PrimaryKeyConstraint("candidate_id", name="pk_standings"),
    )
    op.create_index(
        "ix_standings_ranking_id_us_figure_id_run_id", "standings", ["ranking_id", "us", "figure_id", "run_id"]
    )
    op.create_index(
        "ix_standings_run_id_ranking_id_us_figure_id", "standings", ["run_id", "ranking_id", "us", "figure_id"]
    )
    op.create_index("ix_standings_ranking_id_figure_id", "standings", ["ranking_id", "figure_id"])
    final = sa.text("is_final = 1")
    op.create_index(
        "ix_standings_finals", "standings", ["ranking_id", "run_id"], sqlite_where=final, postgresql_where=final
    )  # fmt: skip


def _add_views() -> None:
    for name, query in VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {_of_dialect(query, op.get_bind().dialect.name)}")


def _of_dialect(query: str, dialect: str) -> str:
    """The query with what it takes from JSON as that database says it: `{text:COLUMN:NAME}` and `{number:COLUMN:NAME}`
    of an object, `{each:COLUMN:NAME}` a row for each item of a list."""

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

    first, *parts = query.replace("{model}", MODEL).split("{")
    return first + "".join(f"{taken(inner)}{rest}" for inner, _, rest in (part.partition("}") for part in parts))
