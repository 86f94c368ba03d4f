"""Of an imported run nothing is believed that can be found out, and it is told from one's own everywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from operator import getitem

import pytest
from sqlalchemy import text

from evoengine.errors import MachineError, NothingFound, UsageError
from evoengine.gpu import find_gpu
from evoengine.ledger.transfer import import_run, read_run
from evoengine.publish.imported import mark_suspect
from evoengine.publish.t4 import from_t4, to_t4
from evoengine.records import EMULATOR, EXECUTOR, Baseline, Binary, Device, Judged, Kind, Outcome, Rejection
from evoengine.search import compilers
from evoengine.search.compilers import with_machine_code
from evoengine.search.targets import spaces_of, stored_target
from evoengine.tuning import exporting
from evoengine.views.trials import trial_json
from tests.publish.test_t4 import BASELINES, DEVICE, whole
from tests.support.ledger_examples import GPU, POLICY, PROBLEM, a_binary, a_figure, a_source, add_ranked, start_run

FOREIGN = b"\x7fELF that somebody made"


def exported() -> dict:
    return json.loads(json.dumps(to_t4(whole()), allow_nan=False))


def rows(ledger, query: str) -> list:
    with ledger.database.engine.connect() as connection:
        return connection.execute(text(query)).fetchall()


# ── binaries ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_machine_code_in_a_file_never_comes_into_a_ledger(ledger, tmp_path):
    data = exported()
    for result in data["results"]:
        if result["evoengine"]["binary"]:
            result["evoengine"]["binary"]["cubin"] = "f0VMRiB0aGF0IHNvbWVib2R5IG1hZGU="
    import_run(ledger, from_t4(data))
    import_run(ledger, whole())  # nor out of another ledger
    assert rows(ledger, "SELECT * FROM machine_code") == [] != rows(ledger, "SELECT id FROM binaries")
    assert "cubin" not in json.dumps(exported())


def test_what_a_file_says_of_a_binary_is_not_found_in_place_of_ones_own(ledger):
    """Nor does it stand in the way of the one that is compiled here, under the same source and compiler."""
    import_run(ledger, from_t4(exported()))
    source, binary = a_source("kernel"), a_binary()
    key = (source.sha256, binary.options, binary.arch, binary.compiler)
    assert ledger.find_binary(*key) is None
    trial = add_ranked(ledger, start_run(ledger), a_figure(9.0))
    assert ledger.find_binary(*key).cubin == binary.cubin
    assert ledger.candidate(trial, with_cubin=True).binary == binary


class Compiler:
    """In the place of the pool that compiles."""

    made: Binary | Rejection = a_binary(cubin=b"made here")

    def __init__(self, *asked: object) -> None:
        self.asked: list[tuple] = []

    def submit(self, task, *arguments, **limits):
        type(self).asked = arguments
        return self

    def result(self):
        return self.made

    def close(self):
        pass


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(compilers, "WorkerPool", Compiler)
    monkeypatch.setattr(Compiler, "made", a_binary(cubin=b"made here"))
    return Compiler


def test_an_imported_candidate_is_compiled_from_its_source_for_its_gpu_and_once(ledger, compiler):
    """By the arch of the GPU it is for: that of the file would be an option of the compiler's."""
    data = exported()
    data["results"][0]["evoengine"]["binary"]["arch"] = "sm_35"
    _, trials = import_run(ledger, from_t4(data))
    found = with_machine_code(ledger, trials[0])
    assert found.binary.cubin == b"made here"
    assert compiler.asked == (a_source("kernel"), "sm_90a")
    compiler.asked = None
    assert with_machine_code(ledger, trials[0]).binary == found.binary
    assert compiler.asked is None


def test_a_source_that_does_not_compile_here_ends_with_its_reason(ledger, compiler, monkeypatch):
    monkeypatch.setattr(compiler, "made", Rejection(Outcome.UNCOMPILABLE, "line 1: no such thing"))
    _, trials = import_run(ledger, from_t4(exported()))
    assert with_machine_code(ledger, trials[0]).reason == "line 1: no such thing"
    with pytest.raises(NothingFound, match="does not compile here: line 1"):
        exporting.export("out", db=ledger.place)


def test_an_imported_kernel_is_exported_by_a_verdict_reached_here_alone(ledger, compiler, monkeypatch, tmp_path):
    _, trials = import_run(ledger, from_t4(exported()))

    def neither(*_):
        raise MachineError("trial 1 cannot be judged here: no disassembler")

    monkeypatch.setattr(exporting, "judge_export", neither)
    with pytest.raises(MachineError, match="cannot be judged here"):
        exporting.export(tmp_path / "out", db=ledger.place)
    assert not (tmp_path / "out").exists()
    said = whole().candidates[0].candidate.verdict
    own = tuple(replace(said, device=device, reason=None) for device in (EXECUTOR, EMULATOR))
    monkeypatch.setattr(exporting, "judge_export", lambda *_: Judged(own))
    monkeypatch.setattr(exporting, "trace_files", lambda *_: {})
    exporting.export(tmp_path / "out", db=ledger.place)
    described = json.loads((tmp_path / "out" / "kernel.json").read_text())
    assert (tmp_path / "out" / "kernel.cubin").read_bytes() == b"made here"
    assert described["verdict"]["device"] == EMULATOR
    assert described["provenance"]["imported_from"] == "another ledger"


def test_a_kernel_of_an_imported_space_that_cannot_be_read_is_the_files_fault(ledger, compiler, tmp_path):
    whole_run = whole()
    broken = replace(whole_run.run, space_text="[knobs]")
    import_run(ledger, replace(whole_run, run=broken))
    with pytest.raises(UsageError, match="trial 1 is not exported: attention.toml: the space must name its kernel"):
        exporting.export(tmp_path / "out", db=ledger.place)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("UPDATE sources SET packed = packed || ' '", "packed of row"),
        ("UPDATE machine_code SET packed = x'7f454c46'", "packed of row .* of the table machine_code"),
    ],
)
def test_what_was_changed_in_a_ledger_is_never_loaded(ledger, change, named):
    trial = add_ranked(ledger, start_run(ledger), a_figure(9.0))
    with ledger.database.engine.begin() as connection:
        connection.execute(text(change))
    with pytest.raises(MachineError, match=f"damaged: {named}"):
        ledger.candidate(trial, with_cubin=True)
    if "machine_code" in named:
        with pytest.raises(MachineError, match=f"damaged: {named}"):
            ledger.find_binary(a_source("kernel").sha256, a_binary().options, a_binary().arch, a_binary().compiler)


# ── names, figures, origins ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["../../../../escaped.toml", "/{}/escaped.toml", "..", "a/../../escaped", "\\..\\x"])
def test_a_spaces_name_is_no_path(ledger, tmp_path, monkeypatch, name):
    (tmp_path / "tmp" / "deep").mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp" / "deep"))
    before = set(tmp_path.rglob("*"))
    data = exported()
    data["metadata"]["evoengine"]["space"] |= {"name": name.format(tmp_path), "text": 'kernel = "attention"\n'}
    _, trials = import_run(ledger, from_t4(data))
    candidate = ledger.candidate(trials[0])
    target = stored_target(ledger, PROBLEM, find_gpu(GPU))
    with pytest.raises(UsageError):  # the text is not a space
        spaces_of(ledger, [candidate], target)
    assert set(tmp_path.rglob("*")) == before


def test_a_foreign_space_under_ones_own_checksum_does_not_take_its_place(ledger):
    """Spaces are kept apart by their text: a checksum in a file is a claim."""
    own = ledger.candidate(add_ranked(ledger, start_run(ledger), a_figure(9.0)))
    data = exported()
    data["metadata"]["evoengine"]["space"]["text"] = "stages = [ # another"
    _, trials = import_run(ledger, from_t4(data))
    target = stored_target(ledger, PROBLEM, find_gpu(GPU))
    with pytest.raises(UsageError, match="must name|lacks|families|knobs"):
        spaces_of(ledger, [own], target)
    with pytest.raises(UsageError, match="TOML"):
        spaces_of(ledger, [ledger.candidate(trials[0])], target)


def of_all_figures(data: dict) -> list[dict]:
    return [figure for result in data["results"] for figure in result["evoengine"]["measurements"]]


@pytest.mark.parametrize(
    "changes",
    [{"median_us": 1e-3}, {"normalised_us": 1e-3, "median_us": 1e6}, {"tflops": 5000.0}],
    ids=["the time", "the time that is compared", "the TFLOPS"],
)
def test_figures_above_the_roofline_are_suspect_whichever_of_them_claims_it(ledger, changes):
    data = exported()
    for figure in of_all_figures(data):
        figure |= changes
    marked = mark_suspect(from_t4(data), stored_target(ledger, PROBLEM, find_gpu(GPU)))
    assert all("is above the" in figure.suspect for d in marked.candidates for figure in d.figures)
    assert not any(d.candidate.outcome.ranked for d in marked.candidates)
    import_run(ledger, marked)
    assert ledger.best(PROBLEM, GPU, top=9) == []


def test_an_imported_figure_is_judged_by_what_its_kernel_multiplies_with(ledger):
    data = exported()
    for result in data["results"]:
        if result["evoengine"]["binary"]:
            result["evoengine"]["binary"]["mix"] = {"FFMA": 64}
    for figure in of_all_figures(data):
        figure["tflops"] = 300.0
    marked = mark_suspect(from_t4(data), stored_target(ledger, PROBLEM, find_gpu(GPU)))
    scalar = [d for d in marked.candidates if d.candidate.binary]
    assert scalar and all("without its tensor cores" in f.suspect for d in scalar for f in d.figures)


def test_figures_below_it_stay_as_they_are(ledger):
    marked = mark_suspect(from_t4(exported()), stored_target(ledger, PROBLEM, find_gpu(GPU)))
    assert repr(marked) == repr(from_t4(exported()))


def test_times_of_baselines_that_were_imported_normalise_nothing_here(ledger):
    data = exported()
    data["metadata"]["evoengine"]["baselines"][0]["median_us"] = 1e-6
    import_run(ledger, from_t4(data))
    run = start_run(ledger, device=Device(**vars_of(DEVICE)))
    here = Baseline("MATH", DEVICE.name, 900.0, 305.0, (900.0,), POLICY)
    assert BASELINES[0].name == here.name
    ledger.record_baseline(run, here)
    assert ledger.long_run_us(run, here) == 900.0


def vars_of(device: Device) -> dict:
    return {name: getattr(device, name) for name in Device.__slots__}


def test_an_imported_run_says_where_it_came_from_and_ones_own_that_it_did_not(ledger):
    run = from_t4(exported())
    number, trials = import_run(ledger, replace(run, run=replace(run.run, imported_from="run.json")))
    own = add_ranked(ledger, start_run(ledger), a_figure(99.0, Kind.MEASURED), name="another")
    assert [r.imported_from for r in ledger.runs()] == ["run.json", None]
    origins = {c.trial: trial_json(c)["imported_from"] for c in ledger.best(PROBLEM, GPU, top=9)}
    assert origins == {own: None, trials[0]: "run.json", trials[6]: "run.json"}
    assert read_run(ledger, number).run.imported_from == "run.json"


# ── what is at odds with itself ─────────────────────────────────────────────────────────────────────────────────────

RUN, OWN = ("metadata", "evoengine"), ("results", 0, "evoengine")
FIGURE = (*OWN, "measurements", 3)
AT_ODDS = {
    "a place without finals": ((*FIGURE, "terms"), {"place": 1.0}, "one of place and final_of_run"),
    "finals without a place": ((*FIGURE, "terms"), {"final_of_run": 1.0}, "one of place and final_of_run"),
    "a place that is none": ((*FIGURE, "terms", "place"), "nan", "place is nan"),
    "no time at all": ((*FIGURE, "median_us"), 0, "a finite time above 0"),
    "a time below 0": ((*FIGURE, "normalised_us"), -1.5, "a finite time above 0"),
    "a sample below 0": ((*FIGURE, "samples_us", 0), -1.0, "not below 0"),
    "an objective nobody knows": ((*RUN, "objectives"), "tflops,beauty", "a list of tflops"),
    "an objective twice": ((*RUN, "objectives"), "tflops,tflops", "each once"),
    "a seed beyond 64 bits": ((*RUN, "seed"), 2**63, "2^63 - 1"),
    "a seed of a case beyond 64 bits": ((*OWN, "verdicts", 0, "cases", 0, "seed"), 2**63, "2^63 - 1"),
    "a seed below 0": ((*RUN, "seed"), -1, "from 0"),
    "a grid beyond 32 bits": ((*OWN, "source", "launch", "grid"), [2**31, 1, 1], "2^31 - 1"),
    "no threads": ((*OWN, "source", "launch", "threads"), 0, "from 1"),
    "rows that do not divide the threads": ((*OWN, "source", "launch", "block_yz"), [7, 1], "do not divide"),
    "registers below 0": ((*OWN, "binary", "registers"), -1, "from 0"),
    "options of a compiler in an arch": ((*OWN, "binary", "arch"), "sm_90 -I/etc", "an architecture"),
    "an entry that is not a name": ((*OWN, "source", "entry"), "a; system(1)", "name of a function"),
    "a trial twice": (("results", 1, "evoengine", "trial"), 41, "occurs twice"),
    "a parent of itself": (("results", 1, "evoengine", "parents"), [42], "does not precede it"),
    "a parent that comes later": (("results", 1, "evoengine", "parents"), [48], "does not precede it"),
    "another problem than its run's": ((*OWN, "problem"), "gemm:m64,n64,k64,fp16", "unlike its run"),
    "a rank without a figure": ((*OWN, "measurements"), [], "no such figure"),
    "a failure that is none": ((*OWN, "verdicts", 0, "outcome"), "measured", "how a candidate fails"),
    "a binary of nothing": ((*OWN, "source"), None, "no source"),
    "a knob beyond 64 bits": ((*OWN, "config", "tile_m"), 2**63, "tile_m"),
    "a name beyond all measure": ((*RUN, "gpu"), "h" * 201, "1 to 200 characters"),
    "no name": ((*RUN, "problem"), "", "1 to 200 characters"),
    "a checksum that is none": ((*RUN, "space", "sha256"), "../../x", "hexadecimal"),
    "a time without its zone": ((*OWN, "created_at"), "2026-01-01T00:00:00", "with its zone"),
    "a time before there were any": ((*OWN, "created_at"), "0001-01-01T00:00:00+14:00", "from 1970"),
    "U+0000 in a text": ((*OWN, "reason"), "a\0b", "U+0000"),
    "a prediction that says nothing": (
        ("results", 7, "evoengine", "measurements", 0, "terms"), {"predicted": 1.0}, "must state its range"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_ODDS)
def test_what_is_at_odds_is_refused_in_a_sentence_that_names_it(name):
    place, value, says = AT_ODDS[name]
    data = exported()
    *way, last = place
    reduce(getitem, way, data)[last] = value
    with pytest.raises(ValueError, match=says.replace("^", r"\^").replace("+", r"\+")) as refused:
        from_t4(data)
    assert len(str(refused.value)) < 300
