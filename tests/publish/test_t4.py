"""A run goes out as a valid T4 file and comes back whole."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import getitem

import pytest

from evoengine.ledger.store import open_ledger
from evoengine.ledger.transfer import IMPORTED, CandidateHistory, RunHistory, import_run, read_run
from evoengine.publish.t4 import INVALIDITY, from_t4, to_t4
from evoengine.records import RUNNING, UNKNOWN_POLICY, Baseline, Candidate, Device, Kind, Outcome, Profile, Run
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

DEVICE = Device("NVIDIA H100 80GB HBM3", "GPU-1", "sm_90", "CUDA 13.0", {"torch": "2.9"})
BEGAN = datetime(2026, 11, 21, 9, 30, 15, 123456, tzinfo=UTC)


def at(minutes: float) -> datetime:
    return BEGAN + timedelta(minutes=minutes)


RUN = Run(
    7, BEGAN, at(9), "all trials done", GPU, PROBLEM, DEVICE, SPACE.name, SPACE.sha256, SPACE.text, "evolution",
    "tflops,registers", 3, "0.0.9", "elsewhere", 1, "evoengine search",
)  # fmt: skip
BASELINES = [Baseline("MATH", DEVICE.name, 900.0, 305.0, (900.0, float("inf")), POLICY, at(1))]
PROFILE = Profile("Nsight Compute", DEVICE.name, {"issue slots %": 61.5, "l2 hit %": float("nan")}, ("stalls",))


def whole() -> RunHistory:
    """One candidate of each stage it may end at; the first has been gated, timed and profiled again and again."""
    estimate, measured = a_figure(9.0), replace(a_figure(10.87, Kind.MEASURED), normalised_us=98_300.25)
    sustained = replace(measured, policy=SUSTAINED, normalised_us=None, terms={"sm_mhz": 1410.0, "watts": 690.0})
    final = replace(measured, terms={"interval_percent": float("inf"), "final_of_run": 7.0, "place": 1.0})
    dropped = replace(measured, terms={"dropped_after": 3.0, "incumbent": 41.0})
    static = replace(PROFILE, tool="static", figures={"HMMA": 64.0})
    made, single = ({"source": a_source(name), "binary": a_binary()} for name in ("kernel", "single"))
    finished = [
        Candidate(
            41,
            7,
            PROBLEM,
            GPU,
            CONFIG,
            Outcome.MEASURED,
            None,
            "NVIDIA H200",
            **made,
            verdict=a_verdict(),
            measurement=final,
            occupancy=0.25,
            operator="start",
            sustained=sustained,
        ),
        Candidate(
            42,
            7,
            PROBLEM,
            GPU,
            CONFIG,
            Outcome.INCORRECT,
            "wrong",
            "emulator",
            **made,
            verdict=a_verdict(Outcome.INCORRECT),
            parents=(41,),
            operator="mutation",
        ),
        Candidate(43, 7, PROBLEM, GPU, CONFIG, Outcome.UNCOMPILABLE, "line 3", source=a_source("other")),
        Candidate(44, 7, PROBLEM, GPU, CONFIG, Outcome.RECORDED, measurement=a_figure(1.0, Kind.RECORDED)),
        Candidate(
            45, 7, PROBLEM, GPU, CONFIG, Outcome.DUPLICATE, "renders the same source as trial 47", parents=(41, 44)
        ),
        Candidate(46, 7, PROBLEM, GPU, CONFIG, Outcome.SCREENED, "255 registers"),
        Candidate(
            47,
            7,
            PROBLEM,
            GPU,
            CONFIG,
            Outcome.MEASURED,
            "2 times the time of trial 41",
            "emulator",
            **single,
            verdict=a_verdict(),
            measurement=dropped,
        ),
        Candidate(
            48,
            7,
            PROBLEM,
            GPU,
            CONFIG,
            Outcome.ESTIMATED,
            None,
            "emulator",
            **made,
            verdict=a_verdict(),
            measurement=estimate,
        ),
    ]
    histories = [
        CandidateHistory(
            replace(c, created_at=at(n), finished_at=at(n + 0.5)),
            [replace(c.verdict, taken_at=at(n + 0.1))] if c.verdict else [],
            [replace(c.measurement, taken_at=at(n + 0.2))] if c.measurement else [],
            [],
        )
        for n, c in enumerate(finished)
    ]
    histories[0] = replace(
        histories[0],
        verdicts=[replace(a_verdict(Outcome.HUNG), taken_at=at(2)), replace(a_verdict(), taken_at=at(3))],
        figures=[
            replace(estimate, taken_at=at(3)),
            replace(final, terms={"final_of_run": 5.0, "place": 2.0}, taken_at=at(4)),
            replace(sustained, taken_at=at(4.5)),
            replace(final, taken_at=at(5)),
        ],
        profiles=[replace(static, taken_at=at(6)), replace(PROFILE, taken_at=at(7))],
    )
    return RunHistory(RUN, BASELINES, histories)


@pytest.fixture
def exported():
    return to_t4(whole())


def imported_again(path, data, runs_before: int = 0):
    """The file's run as a ledger gives it back that held other runs before; and what it ranks."""
    with open_ledger(str(path), create=True) as ledger:
        for _ in range(runs_before):
            import_run(ledger, replace(whole(), candidates=whole().candidates[3:5]))
        run, trials = import_run(ledger, from_t4(json.loads(json.dumps(data, allow_nan=False))))
        return read_run(ledger, run), trials, [c.trial for c in ledger.best(PROBLEM, GPU, top=9, run=run)]


def renumbered(data: dict) -> dict:
    """The run as 0, its trials from 0 on, and its finals as 0, -1, …, the last first, wherever they are named; and the
    compilers of its binaries without the mark of imported ones."""
    data = json.loads(json.dumps(data))
    of_results = [r["evoengine"] for r in data["results"]]
    numbers = {own["trial"]: new for new, own in enumerate(of_results)}
    terms = [m["terms"] for own in of_results for m in own["measurements"]]
    finals = sorted({t["final_of_run"] for t in terms if "final_of_run" in t}, reverse=True)
    for own in of_results:
        own["trial"], own["run"] = numbers[own["trial"]], 0
        if own["binary"]:
            own["binary"]["compiler"] = own["binary"]["compiler"].removeprefix(IMPORTED)
        own["parents"] = [numbers[parent] for parent in own["parents"]]
        own["reason"] = own["reason"] and re.sub(r"(?<=trial )\d+", lambda m: str(numbers[int(m[0])]), own["reason"])
    for found in terms:
        if "incumbent" in found:
            found["incumbent"] = numbers[found["incumbent"]]
        if "final_of_run" in found:
            found["final_of_run"] = -finals.index(found["final_of_run"])
    return data


def test_what_comes_out_of_a_ledger_is_what_went_in(exported, tmp_path):
    """All but the numbers: an export of an import equals the file, from a ledger that held other runs too."""
    first, trials, _ = imported_again(tmp_path / "first.db", exported)
    second, others, _ = imported_again(tmp_path / "second.db", to_t4(first), runs_before=3)
    assert (first.run.id, second.run.id, trials[0], others[0]) == (1, 4, 1, 7)
    assert renumbered(to_t4(second)) == renumbered(to_t4(first)) == renumbered(exported)


def test_a_round_trip_loses_nothing_but_the_machine_code(exported):
    back = from_t4(json.loads(json.dumps(exported, allow_nan=False)))
    there = repr(whole().candidates).replace(f"cubin={a_binary().cubin!r}", "cubin=b''")
    assert repr(back.candidates) == there  # by repr: nan is no nan's equal
    assert back.baselines == BASELINES
    assert to_t4(back)["results"] == exported["results"]
    assert back.run == replace(RUN, id=0, host=back.run.host, pid=back.run.pid)


def test_other_trials_of_the_run_are_named_by_their_new_numbers(exported, tmp_path):
    back, trials, _ = imported_again(tmp_path / "evo.db", exported, runs_before=2)
    candidates = [d.candidate for d in back.candidates]
    assert candidates[4].reason == f"renders the same source as trial {trials[6]}"
    assert candidates[4].parents == (trials[0], trials[3])
    assert candidates[6].measurement.terms == {"dropped_after": 3.0, "incumbent": trials[0]}


def test_what_comes_in_ranks_as_it_did_and_its_finals_are_numbered_below_0(exported, tmp_path):
    back, trials, ranked = imported_again(tmp_path / "evo.db", exported, runs_before=1)
    assert ranked == [trials[0], trials[6]]
    assert [f.terms.get("final_of_run") for f in back.candidates[0].figures] == [None, -2.0, None, -1.0]


@pytest.mark.parametrize("finals_here", [False, True])
def test_finals_of_an_imported_run_put_nothing_of_this_ledger_behind_their_finalists(exported, tmp_path, finals_here):
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        run = start_run(ledger)
        terms = {"final_of_run": float(run), "place": 1.0} if finals_here else {}
        known = add_ranked(ledger, run, replace(a_figure(99.0, Kind.MEASURED), terms=terms), name="another")
        _, trials = import_run(ledger, from_t4(exported))
        assert [c.trial for c in ledger.best(PROBLEM, GPU, top=9)] == [known, trials[0], trials[6]]


@pytest.mark.parametrize("timed", [True, False], ids=["now", "before times were kept"])
def test_a_candidate_timed_alone_stays_behind_the_finals_that_came_later(exported, tmp_path, timed):
    """Which figure was taken first decides, not which trial has the lower number."""
    final, single = exported["results"][0]["evoengine"], exported["results"][6]["evoengine"]
    final["measurements"] = final["measurements"][-1:]
    final["measurements"][0]["taken_at"] = at(99).isoformat()
    single["measurements"][0]["median_us"] /= 2
    for own in () if timed else (final, single):
        del own["measurements"][0]["taken_at"]
    _, trials, ranked = imported_again(tmp_path / "evo.db", exported)
    assert ranked == [trials[0], trials[6]]


def test_a_run_exported_while_it_ran_is_not_taken_for_one_that_runs_here(tmp_path):
    exported = to_t4(replace(whole(), run=replace(RUN, status=RUNNING, finished_at=None)))
    back, _, _ = imported_again(tmp_path / "evo.db", exported)
    assert (back.run.status, back.run.finished_at) == ("exported while it ran", None)


def test_a_file_of_before_times_profiles_and_all_verdicts_were_kept_is_read(exported, tmp_path):
    for name in ("status", "finished_at"):
        del exported["metadata"]["evoengine"][name]
    del exported["metadata"]["evoengine"]["baselines"][0]["taken_at"]
    for own in (r["evoengine"] for r in exported["results"]):
        own["verdict"] = own["verdicts"][-1] if own["verdicts"] else None
        for name in ("created_at", "finished_at", "verdicts", "profiles"):
            del own[name]
        for found in (*own["measurements"], *([own["verdict"]] if own["verdict"] else ())):
            found.pop("taken_at", None)
    begun = datetime.now(UTC)
    back, _, _ = imported_again(tmp_path / "evo.db", exported)
    assert (back.run.started_at, back.run.status) == (BEGAN, "imported")
    assert [d.candidate.verdict for d in back.candidates] == [d.candidate.verdict for d in whole().candidates]
    first = back.candidates[0]
    assert begun <= first.candidate.created_at == first.figures[0].taken_at == back.baselines[0].taken_at


def test_figures_of_a_file_of_before_policies_have_an_unknown_one_where_they_were_measured(exported, tmp_path):
    del exported["metadata"]["evoengine"]["baselines"][0]["policy"]
    figures = [m for result in exported["results"] for m in result["evoengine"]["measurements"]]
    for figure in figures:
        del figure["policy"], figure["normalised_us"]
    back, _, _ = imported_again(tmp_path / "evo.db", exported)
    read = [figure for each in back.candidates for figure in each.figures]
    assert {(f.kind, f.policy, f.normalised_us) for f in read} == {
        (Kind.MEASURED, UNKNOWN_POLICY, None), (Kind.ESTIMATED, None, None), (Kind.RECORDED, None, None),
    }  # fmt: skip
    assert back.baselines[0].policy == UNKNOWN_POLICY


T4_INVALIDITY = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}


def test_what_the_schema_requires_is_there(exported):
    """The required fields and enumerations of schema 1.1.0, stated here on their own."""
    assert exported["metadata"]["timeunit"] in ("nanoseconds", "microseconds", "milliseconds", "seconds")
    assert exported["metadata"]["compute_api"] == "CUDA"
    for result in exported["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= result.keys()
        assert result["invalidity"] in T4_INVALIDITY
        assert result["correctness"] == (result["invalidity"] == "correct")
        assert all({"name", "value", "unit"} == m.keys() for m in result["measurements"])
        assert all(isinstance(t, float | int | list) for t in result["times"].values())


def figures_in(data: dict) -> list[tuple[list[str], list[str]]]:
    names = [[m["name"] for m in r["measurements"] if m["name"] != "registers"] for r in data["results"]]
    return [(r["objectives"], found) for r, found in zip(data["results"], names, strict=True)]


def test_an_estimate_is_never_called_a_time(exported):
    timed, estimated = (["time"], ["time", "TFLOPS"]), (["estimated time"], ["estimated time", "estimated TFLOPS"])
    rejected = (["time"], [])
    assert figures_in(exported) == [timed, rejected, rejected, timed, rejected, rejected, timed, estimated]
    assert "runtimes" not in exported["results"][-1]["times"]


def test_what_an_estimated_run_rejected_was_aimed_at_the_same_as_what_it_ranked():
    run = to_t4(replace(whole(), candidates=[whole().candidates[2], whole().candidates[7]]))
    assert [objectives for objectives, _ in figures_in(run)] == [["estimated time"]] * 2


def test_every_outcome_that_says_something_of_a_kernel_has_its_place():
    assert INVALIDITY.keys() == {outcome for outcome in Outcome if outcome.reusable}
    assert set(INVALIDITY.values()) <= T4_INVALIDITY


def test_unfinished_candidates_are_left_out(tmp_path):
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        run, _ = import_run(ledger, whole())
        ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)
        for outcome in (Outcome.KILLED, Outcome.INTERRUPTED):
            ledger.finish(ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None), outcome, "why", None, None)
        assert len(to_t4(read_run(ledger, run))["results"]) == len(whole().candidates)


def test_another_tuners_file_is_told_apart(exported):
    del exported["metadata"]["evoengine"]
    assert from_t4(exported) is None


WRONG = {
    "null for a text": (("metadata", "evoengine", "gpu"), None),
    "a number for a text": (("results", 0, "evoengine", "device"), 7),
    "a text for a number": (("results", 0, "evoengine", "source", "launch", "threads"), "many"),
    "true for a number": (("results", 0, "evoengine", "binary", "registers"), True),
    "a list for a table": (("metadata", "evoengine", "device", "versions"), [["torch", "2.9"]]),
    "a grid of two": (("results", 0, "evoengine", "source", "launch", "grid"), [1, 2]),
    "a list for a knob's value": (("results", 0, "evoengine", "config", "family"), ["wmma"]),
    "no time": (("results", 0, "evoengine", "measurements", 0, "median_us"), float("nan")),
    "a number no register holds": (("metadata", "evoengine", "seed"), 2**70),
    "a term beyond a float": (("results", 0, "evoengine", "measurements", 0, "terms", "memory_us"), 10**400),
    "a policy nobody knows": (("results", 0, "evoengine", "measurements", 1, "policy", "l2"), "lukewarm"),
    "a text for a batch": (("results", 0, "evoengine", "measurements", 1, "policy", "batch"), "many"),
    "no Unicode": (("results", 1, "evoengine", "reason"), "\ud800"),
    "a case without name": (("results", 0, "evoengine", "verdicts", 0, "cases", 0, "name"), None),
}


@pytest.mark.parametrize(("place", "value"), WRONG.values(), ids=WRONG)
def test_a_part_of_the_wrong_type_is_refused_before_a_ledger_sees_it(exported, place, value):
    *way, last = place
    reduce(getitem, way, exported)[last] = value
    with pytest.raises((OverflowError, TypeError, ValueError)):
        from_t4(exported)
