"""Views for people with an SQL client (docs/ledger.md). They follow from the tables: an upgrade drops them, changes the
tables, and makes them again. Queries in evoengine itself read the tables: a view does not check whether a row is as it
was written."""

from __future__ import annotations

from sqlalchemy import Connection, inspect

MODEL = """CASE WHEN m.kind = 'estimated'
    THEN CASE WHEN coalesce({number:m.terms:predicted}, 0) <> 0 THEN 'machine code' ELSE 'formula' END END"""

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
    """Translate the JSON accesses of a query to a dialect: `{text:COLUMN:NAME}` and `{number:COLUMN:NAME}` read a
    field of an object, `{each:COLUMN:NAME}` yields a row for each item of a list."""

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
