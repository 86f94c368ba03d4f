"""What goes into a ledger comes out again, and `best` ranks honestly."""

from __future__ import annotations

import math
import random
import re
import sqlite3
import string
import zlib
from contextlib import closing
from dataclasses import replace

import pytest
from sqlalchemy import event, text

from evoengine.errors import MachineError, NothingFound, UsageError
from evoengine.ledger import runs
from evoengine.ledger.store import Ledger
from evoengine.records import (
    EXECUTOR,
    L2,
    RUNNING,
    UNKNOWN_POLICY,
    Baseline,
    Binary,
    Candidate,
    CaseResult,
    Clocks,
    Coverage,
    Device,
    Kind,
    Launch,
    LaunchMode,
    Measurement,
    Outcome,
    Policy,
    Source,
    Verdict,
)
from evoengine.views import jsonable
from evoengine.views.trials import trial_json
from tests.support.ledger_examples import (
    CONFIG,
    GPU,
    POLICY,
    PROBLEM,
    SPACE,
    SUSTAINED,
    a_binary,
    a_figure,
    a_source,
    a_verdict,
    add_ranked,
    start_run,
)


def write(ledger: Ledger, candidate: Candidate) -> int:
    """Everything a candidate holds, stage by stage."""
    c = candidate
    trial = ledger.add_candidate(c.run, c.problem, c.gpu, c.config, c.parents, c.operator, c.source)
    if c.source and c.binary:
        ledger.record_binary(trial, c.source, c.binary)
    if c.verdict:
        ledger.record_verdict(trial, c.verdict)
    if c.measurement:
        ledger.record_measurement(trial, c.measurement)
    if c.outcome:
        ledger.finish(trial, c.outcome, c.reason, c.occupancy, c.device)
    return trial


def random_candidate(rng: random.Random, trial: int, run: int) -> Candidate:
    """As far down the road as chance takes it, with awkward text and numbers on the way."""

    def text() -> str:
        return "".join(rng.choices(string.printable + "µ×→\U0001f600'\"\\", k=rng.randrange(1, 40)))

    def number() -> float:
        return rng.choice([0.0, 1e-300, 0.1, 2.4e-4, 1e300, rng.random()])

    def maybe(value: object) -> object:
        return value if rng.random() < 0.7 else None

    stages = rng.randrange(6)
    error = rng.choice([math.inf, -math.inf, 0.5, None])
    case = CaseResult(text(), text(), rng.getrandbits(80), rng.random() < 0.5, error, error, number(), maybe(text()))
    coverage = Coverage({text(): rng.randrange(9)}, {text(): rng.randrange(9)}, (text(),))
    of_gate = {"coverage": maybe(coverage), "gate_version": maybe(9), "whole": rng.random() < 0.5}
    rows = (rng.randrange(1, 4), rng.randrange(1, 4))
    threads = rng.randrange(1, 99) * rows[0] * rows[1]
    launch = Launch((rng.getrandbits(31), 1, 65535), threads, rng.getrandbits(18), rows)
    mix = {text(): rng.getrandbits(20) for _ in range(3)}
    warnings = tuple(text() for _ in range(rng.randrange(3)))
    binary = Binary(rng.randbytes(99), text(), text(), text(), 255, 1, 2, 3, warnings, mix, number())
    samples = tuple(rng.choice([number(), math.inf]) for _ in range(3))
    terms = {text(): rng.choice([number(), -math.inf])}
    policy = Policy(rng.choice(list(LaunchMode)), rng.choice(list(L2)), Clocks.BOOST, rng.randrange(99))
    timed = (samples, maybe(number()), terms, None, maybe(policy), maybe(number()))
    figure = Measurement(rng.choice(list(Kind)), text(), number(), number(), *timed)
    verdict = Verdict(text(), maybe(Outcome.HUNG), maybe(text()), (case, case), number(), **of_gate)
    return Candidate(
        trial=trial,
        run=run,
        problem=text(),
        gpu=text(),
        config={text(): value for value in (1, 2.5, "x", True, -(2**40))},
        outcome=rng.choice(list(Outcome)) if stages == 5 else None,
        reason=maybe(text()) if stages == 5 else None,
        device=maybe(text()) if stages == 5 else None,
        source=Source(text(), text(), launch) if stages >= 1 else None,
        binary=binary if stages >= 2 else None,
        verdict=verdict if stages >= 3 else None,
        measurement=figure if stages >= 4 else None,
        occupancy=maybe(number()) if stages == 5 else None,
        parents=tuple(rng.choices(range(1, 99), k=rng.randrange(3))),
        operator=maybe(text()),
    )


# ── round trips ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_candidate_read_back_equals_the_one_written_however_far_it_came(ledger):
    rng, run = random.Random(4), start_run(ledger)
    written = [random_candidate(rng, trial, run) for trial in range(1, 61)]
    assert [write(ledger, c) for c in written] == [c.trial for c in written]
    assert [ledger.candidate(c.trial, with_cubin=True) for c in written] == written
    assert ledger.candidates(run=run, with_cubin=True) == written


def test_knobs_keep_their_order(ledger):
    config = {"z": 1, "a": 2, "m": 3}
    trial = ledger.add_candidate(start_run(ledger), PROBLEM, GPU, config, (), None)
    assert list(ledger.candidate(trial).config) == ["z", "a", "m"]


def test_an_error_that_is_not_a_number_stays_one(ledger):
    trial = ledger.add_candidate(start_run(ledger), PROBLEM, GPU, CONFIG, (), None)
    ledger.record_verdict(trial, a_verdict(Outcome.INCORRECT, max_error=math.nan))
    assert math.isnan(ledger.candidate(trial).verdict.cases[0].max_error)


def test_without_being_asked_for_cubins_are_empty(ledger):
    trial = add_ranked(ledger, start_run(ledger), a_figure(10))
    assert ledger.candidate(trial).binary.cubin == ledger.candidates()[0].binary.cubin == b""
    assert ledger.candidate(trial, with_cubin=True).binary == a_binary()


def test_a_run_read_back_says_what_it_was_for_and_how_it_ended(ledger):
    device = Device("NVIDIA H200", "GPU-1f", "sm_90", "CUDA 13.0", {"torch": "2.13.0"})
    run = start_run(ledger, device=device, seed=2**40)
    [begun] = ledger.runs()
    assert (begun.id, begun.status, begun.finished_at, begun.device, begun.seed) == (run, RUNNING, None, device, 2**40)
    assert (begun.space_name, begun.space_sha256, begun.space_text) == (SPACE.name, SPACE.sha256, SPACE.text)
    assert begun.started_at.utcoffset().total_seconds() == 0
    ledger.finish_run(run, "time is up")
    [ended] = ledger.runs()
    assert ended.status == "time is up"
    assert ended.finished_at >= ended.started_at


def test_a_baseline_read_back_equals_the_one_written(ledger):
    run = start_run(ledger)
    baseline = Baseline("cudnn", "NVIDIA H200", 697.0, 395.0, (697.5, 697.0, 696.5), POLICY)
    ledger.record_baseline(run, baseline)
    assert ledger.baselines(run) == [baseline]
    assert ledger.baselines(run + 1) == []


def test_the_long_run_time_of_a_baseline_is_the_median_over_all_runs_like_this_one(ledger):
    def timed(us, policy=POLICY, name="cudnn", **run):
        number, baseline = start_run(ledger, **run), Baseline(name, "NVIDIA H200", us, 1.0, (us,), policy)
        assert ledger.long_run_us(number, replace(baseline, name="not timed yet")) == us
        ledger.record_baseline(number, baseline)
        return number, baseline

    timed(700.0), timed(710.0)
    timed(1.0, policy=UNKNOWN_POLICY)
    timed(2.0, name="flash")
    timed(3.0, problem="attention:b1,h1,s64,d32,fp16")
    timed(4.0, device=Device("emulator", driver="CUDA 13.0"))
    assert ledger.long_run_us(*timed(900.0)) == 710.0


def test_the_same_device_and_the_same_source_are_kept_once(ledger):
    for run in (start_run(ledger), start_run(ledger)):
        add_ranked(ledger, run, a_figure(10))
    with closing(sqlite3.connect(ledger.place)) as plain:
        for table in ("devices", "sources", "binaries"):
            assert plain.execute(f"SELECT count(*) FROM {table}").fetchone() == (1,)


# ── binaries ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_binary_is_found_by_source_options_arch_and_compiler_alone(ledger):
    add_ranked(ledger, start_run(ledger), a_figure(10))
    key = {n: getattr(a_binary(), n) for n in ("options", "arch", "compiler")} | {"source_sha256": a_source().sha256}
    assert ledger.find_binary(**key) == a_binary()
    for name in key:
        assert ledger.find_binary(**{**key, name: "another"}) is None


def test_a_second_compile_of_the_same_source_keeps_the_first_binary(ledger):
    run = start_run(ledger)
    first, second = (ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None, a_source()) for _ in range(2))
    for trial, took in ((first, 100.0), (second, 900.0)):
        ledger.record_binary(trial, a_source(), a_binary(compile_ms=took))
    assert ledger.candidate(second).binary.compile_ms == ledger.candidate(first).binary.compile_ms == 100.0


# ── best ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_best_ranks_by_tflops(ledger):
    run = start_run(ledger)
    _, fastest, second = (add_ranked(ledger, run, a_figure(v), name=f"at_{v:.0f}") for v in (10.0, 30.0, 20.0))
    assert [c.trial for c in ledger.best(PROBLEM, GPU, 2)] == [fastest, second]


def test_a_measured_figure_goes_before_a_higher_recorded_one_and_that_before_a_higher_estimate(ledger):
    run = start_run(ledger)
    for kind, tflops in ((Kind.ESTIMATED, 900.0), (Kind.RECORDED, 500.0), (Kind.MEASURED, 10.0)):
        trial = add_ranked(ledger, run, a_figure(tflops, kind))
        assert [c.trial for c in ledger.best(PROBLEM, GPU, 10)] == [trial]


def test_a_candidate_that_was_estimated_and_then_measured_counts_as_measured(ledger):
    run = start_run(ledger)
    trial = add_ranked(ledger, run, a_figure(90.0))
    add_ranked(ledger, run, a_figure(95.0))
    ledger.record_measurement(trial, a_figure(9.0, Kind.MEASURED))
    assert [(c.trial, c.measurement.tflops) for c in ledger.best(PROBLEM, GPU, 10)] == [(trial, 9.0)]
    assert [m.tflops for m in ledger.measurements(trial)] == [90.0, 9.0]


def test_the_last_figure_of_a_kind_holds(ledger):
    trial = add_ranked(ledger, start_run(ledger), a_figure(9.0, Kind.MEASURED))
    ledger.record_measurement(trial, a_figure(8.0, Kind.MEASURED))
    ledger.record_measurement(trial, a_figure(99.0))
    assert ledger.candidate(trial).measurement.tflops == 8.0
    assert ledger.best(PROBLEM, GPU, 1)[0].measurement.tflops == 8.0


@pytest.mark.parametrize("finished", [Outcome.SUSPECT, Outcome.MEASURED])
def test_a_suspect_figure_is_never_best(ledger, finished):
    run = start_run(ledger)
    trial = add_ranked(ledger, run, a_figure(9000.0, Kind.MEASURED, suspect="above the roofline"))
    ledger.finish(trial, finished, None, 0.25, None)
    honest = add_ranked(ledger, run, a_figure(5.0))
    assert [c.trial for c in ledger.best(PROBLEM, GPU, 10)] == [honest]


def test_a_candidate_refuted_by_a_later_verdict_is_never_best(ledger):
    run = start_run(ledger)
    refuted, other = (add_ranked(ledger, run, a_figure(tflops)) for tflops in (50.0, 5.0))
    ledger.record_verdict(refuted, a_verdict(Outcome.INCORRECT))
    assert [c.trial for c in ledger.best(PROBLEM, GPU, 10)] == [other]


def test_a_verdict_on_executed_machine_code_neither_hides_a_measured_kernel_nor_redeems_a_refuted_one(ledger):
    run = start_run(ledger)
    measured, refuted = (add_ranked(ledger, run, a_figure(50.0, Kind.MEASURED), name=name) for name in ("a", "b"))
    ledger.record_verdict(measured, replace(a_verdict(Outcome.INCORRECT), device=EXECUTOR))
    ledger.record_verdict(refuted, a_verdict(Outcome.INCORRECT))
    ledger.record_verdict(refuted, replace(a_verdict(), device=EXECUTOR))
    assert [c.trial for c in ledger.best(PROBLEM, GPU, 10)] == [measured]


@pytest.mark.parametrize("outcome", [o for o in Outcome if not o.ranked])
def test_a_rejected_candidate_is_never_best(ledger, outcome):
    trial = add_ranked(ledger, start_run(ledger), a_figure(50.0))
    ledger.finish(trial, outcome, "why", None, None)
    assert ledger.best(PROBLEM, GPU, 10) == []


def test_best_ranks_by_the_time_normalised_in_its_rounds_and_not_by_the_moment_of_timing(ledger):
    """The slower kernel was timed while the clocks were high, the faster one while they were low."""
    run = start_run(ledger)
    slower = replace(a_figure(10, Kind.MEASURED), median_us=98.0, normalised_us=101.0)
    faster = replace(a_figure(10, Kind.MEASURED), median_us=99.0, normalised_us=100.0)
    trials = [add_ranked(ledger, run, figure, name=f"k{n}") for n, figure in enumerate((slower, faster))]
    assert [c.trial for c in ledger.best(PROBLEM, GPU, top=9)] == trials[::-1]


def test_figures_of_another_policy_are_not_among_the_best_and_each_has_the_figure_it_is_ranked_by(ledger):
    run = start_run(ledger)
    old = replace(a_figure(99, Kind.MEASURED), policy=UNKNOWN_POLICY)
    add_ranked(ledger, run, old, name="old")
    both = add_ranked(ledger, run, old, name="both")
    ledger.record_measurement(both, a_figure(50, Kind.MEASURED))
    [found] = ledger.best(PROBLEM, GPU, top=9)
    assert (found.trial, found.measurement.policy, found.measurement.tflops) == (both, POLICY, 50)


def test_a_sustained_figure_stands_beside_the_one_that_a_candidate_is_ranked_by(ledger):
    trial = add_ranked(ledger, start_run(ledger), a_figure(50, Kind.MEASURED))
    sustained = replace(a_figure(40, Kind.MEASURED), policy=SUSTAINED, terms={"sm_mhz": 1410.0, "watts": 690.0})
    ledger.record_measurement(trial, sustained)
    [found] = ledger.best(PROBLEM, GPU, top=9)
    assert (found.measurement.tflops, found.sustained) == (50, sustained)
    public = jsonable(trial_json(found))
    assert public["policy"] == {"launch": "graph", "l2": "cold", "clocks": "boost", "batch": 16}
    assert public["sustained"]["policy"]["clocks"] == "sustained"
    assert [public["sustained"][name] for name in ("tflops", "sm_mhz", "watts")] == [40, 1410, 690]


def test_best_looks_at_one_problem_one_gpu_and_where_asked_one_run(ledger):
    first, second = start_run(ledger), start_run(ledger)
    in_first, in_second = (add_ranked(ledger, run, a_figure(9.0), name=f"of_{run}") for run in (first, second))
    assert [c.trial for c in ledger.best(PROBLEM, GPU, 10, run=second)] == [in_second]
    assert [c.trial for c in ledger.best(PROBLEM, GPU, 10)] == [in_first, in_second]
    assert ledger.best(PROBLEM, "a100", 10) == ledger.best("attention:other", GPU, 10) == []


def test_a_kernel_that_several_runs_found_is_ranked_once_by_its_best_figure(ledger):
    trials = [add_ranked(ledger, start_run(ledger), a_figure(tflops)) for tflops in (29.0, 31.0, 30.0)]
    other = add_ranked(ledger, start_run(ledger), a_figure(20.0), name="other")
    assert [c.trial for c in ledger.best(PROBLEM, GPU, 2)] == [trials[1], other]


def test_what_was_recorded_without_a_source_is_ranked_once_by_configuration(ledger):
    def recorded(run: int, tile_m: int) -> int:
        trial = ledger.add_candidate(run, PROBLEM, GPU, CONFIG | {"tile_m": tile_m}, (), None)
        ledger.record_measurement(trial, a_figure(10.0 + tile_m, Kind.RECORDED))
        ledger.finish(trial, Outcome.RECORDED, None, None, None)
        return trial

    first, second = ([recorded(start_run(ledger), tile_m) for tile_m in (32, 64)] for _ in range(2))
    found = [c.trial for c in ledger.best(PROBLEM, GPU, 10)]
    assert len(found) == 2 and set(found) <= {*first, *second}


# ── looking up ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_trial_is_refused_naming_those_there_are(ledger):
    with pytest.raises(NothingFound, match="no trial yet"):
        ledger.candidate(1)
    run = start_run(ledger)
    for _ in range(3):
        add_ranked(ledger, run, a_figure(1.0))
    with pytest.raises(UsageError, match="no trial 4: the ledger's are numbered 1 to 3"):
        ledger.candidate(4)


def test_candidates_are_narrowed_by_run_problem_and_gpu(ledger):
    runs = start_run(ledger), start_run(ledger)
    for run, problem, gpu in ((runs[0], "p", "h100"), (runs[1], "p", "a100"), (runs[1], "q", "h100")):
        ledger.add_candidate(run, problem, gpu, CONFIG, (), None)
    assert [c.trial for c in ledger.candidates()] == [1, 2, 3]
    assert [c.trial for c in ledger.candidates(run=runs[1])] == [2, 3]
    assert [c.trial for c in ledger.candidates(problem="p")] == [1, 2]
    assert [c.trial for c in ledger.candidates(run=runs[1], gpu="h100")] == [3]


def test_the_last_target_is_the_last_run_that_agrees_with_what_is_given(ledger):
    for gpu, problem in (("h100", "p"), ("a100", "q"), ("a100", "p")):
        start_run(ledger, gpu=gpu, problem=problem)
    assert ledger.targets.last(None, None) == ("a100", "p")
    assert ledger.targets.last("h100", None) == ("h100", "p")
    assert ledger.targets.last(None, "q") == ("a100", "q")
    with pytest.raises(NothingFound, match="no run for q on h100"):
        ledger.targets.last("h100", "q")


def test_reading_many_candidates_takes_no_more_queries_than_reading_few(ledger, monkeypatch):
    monkeypatch.setattr(runs, "BEAT_SECONDS", 600.0)  # whose queries are none of these
    queries = []
    event.listen(ledger.database.engine, "before_cursor_execute", lambda *args: queries.append(args[2]))
    counts = []
    for _ in range(2):
        for i in range(20):
            add_ranked(ledger, start_run(ledger) if i == 0 else 1, a_figure(1.0), name=f"kernel{random.random()}")
        queries.clear()
        ledger.candidates()
        counts.append(len(queries))
        assert not any(re.search(r"machine_code\.packed\b", query) for query in queries)
    assert counts[0] == counts[1]


def test_plain_sql_reads_the_ledger(ledger):
    add_ranked(ledger, start_run(ledger), a_figure(42.0))
    query = """
        SELECT c.id, json_extract(c.config, '$.tile_m'), c.outcome, b.registers, m.tflops, m.kind, s.packed,
               json_extract(v.cases, '$[0].max_error')
        FROM candidates c JOIN binaries b ON b.id = c.binary_id JOIN sources s ON s.sha256 = c.source_sha256
        JOIN measurements m ON m.candidate_id = c.id JOIN verdicts v ON v.candidate_id = c.id"""
    with closing(sqlite3.connect(ledger.place)) as plain:
        packed = zlib.compress(a_source().text.encode())
        assert plain.execute(query).fetchall() == [(1, 64, "estimated", 57, 42.0, "estimated", packed, 2.4e-4)]


def test_what_is_written_of_a_candidate_later_does_not_hide_damage(ledger):
    trial = ledger.add_candidate(start_run(ledger), PROBLEM, GPU, CONFIG, (), "sampler", a_source())
    with ledger.database.writing() as session:
        session.execute(text("UPDATE candidates SET threads = threads + 1"))
    for write in (
        lambda: ledger.record_binary(trial, a_source(), a_binary()),
        lambda: ledger.finish(trial, Outcome.CRASHED, "it crashed", 0.25, "emulator"),
        lambda: ledger.candidate(trial),
    ):
        with pytest.raises(MachineError, match=f"row {trial} of the table candidates is not what was written"):
            write()
