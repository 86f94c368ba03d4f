"""A ledger of drawn figures, and whether its views show what the commands show: for SQLite and PostgreSQL."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import text

from evoengine.ledger.ranking import rebuild
from evoengine.ledger.store import Ledger
from evoengine.ledger.tables import CandidateRow, MeasurementRow, VerdictRow
from evoengine.records import EXECUTOR, PENDING, Outcome
from evoengine.terms import model_of
from tests.support.documents import ROOT, blocks
from tests.support.ledger_examples import GPU, POLICY, PROBLEM, SUSTAINED, start_run

DOCUMENTED = [block.text for block in blocks(ROOT / "docs" / "ledger.md") if block.language == "sql"]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
KINDS = ("measured", "recorded", "estimated")


def fill(ledger: Ledger, seed: int, trials: int = 60) -> None:
    """Two runs of trials with none to three figures each: of any kind, device and policy, some of finals held here or
    elsewhere, some suspect, some of one kernel, some refuted by a later verdict."""
    draw = random.Random(seed)
    runs = [start_run(ledger), start_run(ledger)]
    kinds = draw.sample(KINDS, draw.choice((1, 1, 2)))
    with ledger.database.writing() as session:
        for number in range(1, trials + 1):
            run = draw.choice(runs)
            outcome = draw.choice([*kinds, *kinds, *kinds, "incorrect", "unranked", None])
            config = {"family": draw.choice(("mma", "wmma")), "vector": draw.choice((1, 2, 4)), "n": number}
            session.add(
                CandidateRow(
                    id=number, run_id=run, problem=PROBLEM, gpu=GPU, config=config, created_at=NOW, outcome=outcome,
                    config_key=f"kernel {draw.randrange(trials)}", parents=[], reason=None if outcome else "no word",
                )
            )  # fmt: skip
            for device in draw.choices(("emulator", EXECUTOR, "NVIDIA H200"), k=draw.choice((0, 1, 2))):
                wrong = "incorrect" if draw.random() < 0.2 else None
                session.add(
                    VerdictRow(
                        candidate_id=number, device=device, outcome=wrong, cases=[_case(draw)], wall_ms=1.0,
                        taken_at=NOW,
                    )
                )  # fmt: skip
        for trial in draw.choices(range(1, trials + 1), k=2 * trials):
            session.add(MeasurementRow(candidate_id=trial, **_figure(draw, draw.choice(kinds))))
        session.flush()
        rebuild(session)


def _case(draw: random.Random) -> dict[str, Any]:
    error = draw.choice((draw.random(), "nan", None))
    return {
        "name": "ragged", "problem": PROBLEM, "seed": 1, "correct": draw.random() < 0.5, "max_error": error,
        "mean_error": 0.0, "allowed": 0.5, "reason": None,
    }  # fmt: skip


def _figure(draw: random.Random, kind: str) -> dict[str, Any]:
    us, terms = draw.uniform(10.0, 20.0), {}
    if kind == "measured" and draw.random() < 0.4:
        terms = {"place": float(draw.randrange(1, 10**6)), "final_of_run": float(draw.choice((-2, -1, 1, 2)))}
    predicted = kind == "estimated" and draw.random() < 0.6
    device = {"measured": draw.choice(("H100", "H200")), "recorded": "A100", "estimated": f"model {predicted}"}[kind]
    return {
        "kind": kind, "device": device, "tflops": 400.0 / us, "median_us": us, "samples_us": [], "vs_baseline": None,
        "terms": terms | ({"predicted": 1.0} if predicted else {}),
        "suspect": "too fast" if draw.random() < 0.1 else None, "taken_at": NOW,
        "policy": asdict(draw.choice((POLICY, SUSTAINED))) if kind == "measured" else None,
        "normalised_us": draw.choice((None, us + 0.5)),
    }  # fmt: skip


def rows(ledger: Ledger, query: str) -> list[dict[str, Any]]:
    with ledger.database.reading() as session:
        return [dict(row._mapping) for row in session.execute(text(query.replace(":", r"\:")))]


def check_ranking(ledger: Ledger) -> None:
    """Of estimates by formula `best` shows a ranking of their own behind that of predictions."""
    best = ledger.best(PROBLEM, GPU, 1000)
    shown = rows(ledger, "SELECT * FROM best_trials WHERE preference = 1 ORDER BY place")
    of_view = {row["trial"]: row for row in shown}
    assert [row["trial"] for row in shown] == [c.trial for c in best][: len(shown)]
    assert [row["place"] for row in shown] == list(range(1, len(shown) + 1))
    behind = best[len(shown) :]
    assert all(c.measurement.by_formula for c in behind)
    for candidate in best[: len(shown)]:
        figure, row = candidate.measurement, of_view[candidate.trial]
        policy = figure.policy and (figure.policy.launch, figure.policy.l2, figure.policy.clocks)
        assert (row["kind"], row["device"], row["compared_us"]) == (figure.kind, figure.device, figure.compared_us)
        assert (row["launch"], row["l2"], row["clocks"]) == (policy or (None, None, None))


def check_list(ledger: Ledger) -> None:
    seen = rows(ledger, "SELECT * FROM trial_list ORDER BY trial")
    trials = list(ledger.trials(resources=True))
    assert len(seen) == len(trials)
    for row, trial in zip(seen, trials, strict=True):
        figure, binary = trial.measurement, trial.binary
        config = json.loads(row["config"]) if isinstance(row["config"], str) else row["config"]
        assert (row["trial"], row["run"], row["problem"], row["gpu"]) == (trial.trial, trial.run, PROBLEM, GPU)
        assert (row["outcome"], row["reason"], config) == (trial.outcome or PENDING, trial.reason, trial.config)
        assert row["family"] == trial.config["family"] and row["shared_bytes"] == trial.shared_bytes
        assert (row["registers"], row["spill_bytes"]) == (
            (binary.registers, binary.spill_bytes) if binary else (None,) * 2
        )
        assert (row["kind"], row["median_us"]) == ((figure.kind, figure.median_us) if figure else (None, None))
        if figure:
            model = model_of(figure.terms) if figure.kind == "estimated" else None
            assert (row["compared_us"], row["tflops"], row["model"]) == (figure.compared_us, figure.tflops, model)


def check_runs(ledger: Ledger) -> None:
    seen = rows(ledger, "SELECT * FROM run_summaries ORDER BY run")
    summaries = list(ledger.run_summaries())
    assert [(r["run"], r["trials"], r["correct"], r["status"], r["sampler"], r["device"]) for r in seen] == [
        (s.run.id, s.trials, s.correct, s.run.status, s.run.sampler, s.run.device.name) for s in summaries
    ]
    for row, run in zip(seen, (s.run.id for s in summaries), strict=True):
        trials = list(ledger.trials(run=run))
        assert (row["pending"], row["unfinished"]) == (
            sum(t.outcome is None for t in trials),
            sum(t.outcome is Outcome.UNFINISHED for t in trials),
        )
        for kind, column in (("measured", "measured_us"), ("recorded", "recorded_us")):
            times = [
                t.measurement.compared_us for t in trials if t.measurement and t.measurement.kind == t.outcome == kind
            ]
            assert row[column] == min(times, default=None)


def check_figures_and_cases(ledger: Ledger) -> None:
    figures = rows(ledger, "SELECT * FROM trial_figures ORDER BY figure")
    own = [m for t in ledger.trials() for m in ledger.measurements(t.trial)]
    assert sorted((f["kind"], f["device"], f["median_us"], f["suspect"] or "") for f in figures) == sorted(
        (m.kind, m.device, m.median_us, m.suspect or "") for m in own
    )
    with ledger.database.reading() as session:
        cases = [(v.candidate_id, case) for v in session.query(VerdictRow) for case in v.cases]
    seen = rows(ledger, "SELECT * FROM gate_cases ORDER BY verdict")
    assert [(r["trial"], bool(r["correct"])) for r in seen] == [(trial, case["correct"]) for trial, case in cases]
    assert [str(r["max_error"]).lower() for r in seen] == [str(case["max_error"]).lower() for _, case in cases]


def check_documented_queries(ledger: Ledger) -> None:
    answers = [rows(ledger, query) for query in DOCUMENTED]
    assert len(answers) >= 5 and sum(map(bool, answers)) >= 4
