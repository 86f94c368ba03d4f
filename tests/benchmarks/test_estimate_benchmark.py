"""The benchmark of the estimate, on ledgers whose figures are made up so that the rank correlation is known."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from scipy.stats import spearmanr

from benchmarks import estimate as benchmark
from evoengine.ledger.store import open_ledger
from evoengine.records import Kind, Outcome
from evoengine.tuning.measure import measured_pairs
from tests.support.exhaustive import more, representatives
from tests.support.kernel_gate import attention_space
from tests.support.ledger_examples import GPU, PROBLEM, a_figure, add_ranked, start_run

# (family, estimated, measured): in order among scalar, turned around among wmma, and every wmma faster than any scalar
FIGURES = [("scalar", 10.0 + n, 5.0 + n) for n in range(4)] + [("wmma", 100.0 + n, 90.0 - n) for n in range(12)]


@pytest.fixture
def ledger_file(tmp_path):
    path = tmp_path / "measured.db"
    with open_ledger(str(path), create=True) as ledger:
        run = start_run(ledger)
        for number, (family, estimated, measured) in enumerate(FIGURES):
            trial = add_ranked(ledger, run, a_figure(estimated), {"family": family, "n": number}, f"kernel{number}")
            ledger.record_measurement(trial, a_figure(measured, Kind.MEASURED))
            ledger.finish(trial, Outcome.MEASURED, None, 0.25, "NVIDIA H200")
    return path


def expected(family: str) -> float:
    return spearmanr([(e, m) for f, e, m in FIGURES if family in ("all", f)]).statistic


def test_the_correlation_is_told_for_all_candidates_and_for_each_family(ledger_file):
    found = list(benchmark.rows(benchmark.read(str(ledger_file))))
    assert [(r.problem, r.gpu, r.device) for r in found] == [(PROBLEM, GPU, "NVIDIA H200")] * 3
    by_family = {r.family: r.agreement for r in found}
    assert [a.candidates for a in by_family.values()] == [16, 4, 12]
    assert by_family["scalar"].spearman == pytest.approx(1.0) == expected("scalar")
    assert by_family["wmma"].spearman == pytest.approx(-1.0) == expected("wmma")
    assert by_family["all"].spearman == pytest.approx(expected("all"))
    assert 0 < by_family["all"].spearman < 1


def test_the_regret_is_what_timing_the_ten_best_estimates_would_have_missed(ledger_file):
    by_family = {r.family: r.agreement.regret for r in benchmark.rows(benchmark.read(str(ledger_file)))}
    # of twelve, the two that were left out are the fastest: 90 against 88
    assert by_family == {"all": pytest.approx(90 / 88 - 1), "wmma": pytest.approx(90 / 88 - 1), "scalar": None}


def test_the_table_shows_it_and_results_files_say_the_same_as_the_ledger(ledger_file, tmp_path, capsys):
    results = tmp_path / "results.json"
    with open_ledger(str(ledger_file), create=False) as ledger:
        estimates = {"problem": PROBLEM, "estimates": [asdict(p) for p in measured_pairs(ledger)]}
        results.write_text(json.dumps({"gpu": "NVIDIA H200", "problems": [estimates]}))
    shown = []
    for where in (ledger_file, results):
        assert benchmark.main([str(where)]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "-1.00" in shown[0] and "2.3%" in shown[0] and "NVIDIA H200" in shown[0]


def test_problems_are_never_put_in_one_order():
    pairs = [benchmark.Pair(n, f"p{n % 2}", GPU, "NVIDIA H200", "mma", 1.0 + n, 9.0 - n) for n in range(8)]
    whole = [row for row in benchmark.rows(pairs) if row.family == "all"]
    assert [(row.problem, row.agreement.candidates) for row in whole] == [("p0", 4), ("p1", 4)]


def test_without_measured_figures_it_says_so(tmp_path, capsys):
    path = tmp_path / "estimates.db"
    with open_ledger(str(path), create=True) as ledger:
        add_ranked(ledger, start_run(ledger), a_figure(300.0))
    empty = tmp_path / "empty.json"
    empty.write_text('{"estimates": []}')
    for where in (path, empty):
        assert benchmark.main([str(where)]) == 2
        assert f"no measured trials in {where}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "no JSON", "[]", '{"estimates": [{"trial": 1}]}'])
def test_a_file_of_something_else_is_refused(tmp_path, capsys, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert benchmark.main([str(path)]) == 2
    assert f"{path} has no list `estimates`" in capsys.readouterr().err


def test_something_to_read_must_be_named(capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main([])
    assert ended.value.code == 2
    assert "--published" in capsys.readouterr().err


@pytest.mark.parametrize("head_dim", more([64, 128, 256]))
def test_the_formula_puts_wgmma_about_as_far_ahead_of_mma_as_is_recorded_of_their_models(head_dim):
    def first(name: str):
        return next(k for k in benchmark.PUBLISHED if k.name == name and f"d{head_dim}," in next(iter(k.tflops)))

    two, three = first("FlashAttention-2"), first("FlashAttention-3")
    assert next(iter(two.tflops)) == next(iter(three.tflops))
    recorded = next(iter(three.tflops.values())) / next(iter(two.tflops.values()))
    by_formula = [next(benchmark.estimates(known))[1].tflops for known in (three, two)]
    assert by_formula[0] / by_formula[1] == pytest.approx(recorded, rel=0.15)


PUBLISHED = [pytest.param(known, id=f"{known.name} {next(iter(known.tflops))}") for known in benchmark.PUBLISHED]


@pytest.mark.parametrize("known", representatives(PUBLISHED, "FlashAttention-2", "FlashAttention-3"))
def test_every_known_kernel_has_a_start_point_of_its_design(known):
    starts = attention_space(next(iter(known.tflops))).starts
    assert any(known.start.items() <= start.items() for start in starts)
