"""what a verdict belongs to: the kernel that a folder brings and the gate's version; several kernels; unfinished ones

Figures of other kernels of one name, and of candidates that another gate judged, are ranked apart. What stands follows
from the figures and is made after the upgrade.
"""

from __future__ import annotations

import hashlib
import json

import sqlalchemy as sa
from alembic import context, op

revision = "0010"
down_revision = "0009"

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


def upgrade() -> None:
    earlier = context.script.get_revision("0009").module
    for view in reversed(earlier.VIEWS):
        op.execute(f"DROP VIEW {view}")
    op.add_column("runs", sa.Column("kernel", sa.String(64), nullable=True))
    op.add_column("candidates", sa.Column("gate_version", sa.Integer(), nullable=True))
    op.add_column("candidates", sa.Column("next_kernels", sa.JSON(), nullable=True))
    op.add_column("binaries", sa.Column("other_kernels", sa.JSON(), nullable=True))
    op.add_column("verdicts", sa.Column("coverage", sa.JSON(), nullable=True))
    op.add_column("verdicts", sa.Column("gate_version", sa.Integer(), nullable=True))
    op.add_column("verdicts", sa.Column("short_only", sa.Integer(), nullable=True))
    _name_kernels()
    op.execute("DELETE FROM standings")
    op.execute("DELETE FROM rankings")
    with op.batch_alter_table("rankings") as rankings:
        rankings.add_column(sa.Column("kernel", sa.String(64), nullable=False, server_default=""))
        rankings.add_column(sa.Column("gate_version", sa.Integer(), nullable=False, server_default="0"))
        rankings.drop_constraint("uq_rankings_problem_gpu_kind_by_formula_device_policy", type_="unique")
        rankings.create_unique_constraint(
            "uq_rankings",
            ["problem", "gpu", "kind", "by_formula", "device", "policy", "kernel", "gate_version"],
        )
    changed = {"trial_figures": TRIAL_FIGURES, "trial_list": TRIAL_LIST, "run_summaries": RUN_SUMMARIES}
    for view, query in (earlier.VIEWS | changed).items():
        op.execute(f"CREATE VIEW {view} AS {earlier._of_dialect(query, op.get_bind().dialect.name)}")


def _name_kernels() -> None:
    """Name the kernel of each run whose definition is kept by that alone: the text of its files is not known."""
    connection = op.get_bind()
    runs = sa.table("runs", sa.column("id"), sa.column("definition"), sa.column("kernel"), sa.column("checksums"))
    for run, definition in connection.execute(sa.select(runs.c.id, runs.c.definition)).all():
        if definition is not None:
            kernel = hashlib.sha256(json.dumps(_stated(definition), sort_keys=True).encode()).hexdigest()
            connection.execute(runs.update().where(runs.c.id == run).values(kernel=kernel))


def _stated(definition: str) -> object:
    try:
        stated = json.loads(definition)
    except ValueError:
        return definition
    return {k: v for k, v in stated.items() if k != "space"} if isinstance(stated, dict) else stated
