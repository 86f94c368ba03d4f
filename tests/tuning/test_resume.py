"""Which run a search goes on with, and what is said where it cannot."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.errors import NothingFound, UsageError
from evoengine.ledger.store import open_ledger
from evoengine.ledger.tables import RunRow
from evoengine.records import Device, Outcome
from evoengine.tuning.resume import SearchRequest, begin
from tests.support.ledger_examples import CONFIG, GPU, PROBLEM, SPACE, a_figure, add_ranked, start_run

CONDITIONS = {"compiler": "nvrtc 13.0", "driver": None, "libraries": {"torch": "2.8"}, "templates": "t", "families": []}
ASKED = SearchRequest(PROBLEM, GPU, SPACE.name, SPACE.sha256, "tpe", "tflops", 60, None, None, CONDITIONS)


def go(ledger, asked=ASKED, resume=None, said=None, seed=7):
    said = [] if said is None else said
    return begin(ledger, asked, resume, said.append, device=Device("emulator"), space=SPACE, seed=seed)


def ended(ledger, status="interrupted", asked=ASKED, trials=0) -> int:
    run = go(ledger, asked).run
    for n in range(trials):
        add_ranked(ledger, run, a_figure(n), config={**CONFIG, "tile_m": n}, name=f"kernel {n}")
    ledger.finish_run(run, status)
    return run


@pytest.mark.parametrize("status", ["interrupted", "killed", "stopped: this machine failed: no space left"])
def test_the_same_command_goes_on_with_a_run_that_was_cut_short_and_with_its_seed(ledger, status):
    run, said = ended(ledger, status, trials=2), []
    begun = go(ledger, said=said, seed=8)
    assert (begun.run, begun.seed) == (run, 7)
    assert said == [f"resuming run {run} ({status}): 2 of 60 trials are done"]


@pytest.mark.parametrize("status", ["all trials done", "time is up", "every valid configuration was tried"])
def test_after_a_run_that_came_to_its_end_the_same_command_begins_a_new_one(ledger, status):
    run = ended(ledger, status)
    begun = go(ledger, seed=8)
    assert (begun.run, begun.seed) == (run + 1, 8)


OTHER = {
    "trials": {"trials": 61},
    "minutes": {"seconds": 60.0},
    "seed": {"seed": 8},
    "sampler": {"sampler": "gp"},
    "space": {"space_sha256": "6" * 64},
    "templates": {"conditions": CONDITIONS | {"templates": "u"}},
    "a library": {"conditions": CONDITIONS | {"libraries": {"torch": "2.9"}}},
}


@pytest.mark.parametrize("change", OTHER)
def test_another_command_begins_a_new_run(ledger, change):
    run = ended(ledger)
    assert go(ledger, replace(ASKED, **OTHER[change])).run == run + 1


def test_while_another_process_goes_on_with_a_run_the_same_command_begins_a_new_one(ledger):
    run = go(ledger).run
    assert go(ledger).run == run + 1


DIFFERENT = [
    ({"sampler": "gp"}, "the sampler is gp and was tpe"),
    ({"problem": "attention:other"}, "the problem is attention:other and was attention:b1,h2,s64,d32,fp16"),
    ({"gpu": "a100"}, "the GPU is a100 and was h100"),
    ({"objectives": "tflops,registers"}, "the objective is tflops,registers and was tflops"),
    ({"seed": 9}, "the seed is 9 and was 7"),
    ({"space_sha256": "6" * 64}, "the space has changed (attention.toml)"),
    ({"space_name": "b.toml", "space_sha256": "6" * 64}, "the space has changed (b.toml, not attention.toml"),
    ({"conditions": CONDITIONS | {"templates": "u"}}, "the templates have changed"),
    ({"conditions": CONDITIONS | {"compiler": "nvrtc 13.1"}}, "compiler is nvrtc 13.1 and was nvrtc 13.0"),
    ({"conditions": CONDITIONS | {"libraries": {"torch": "2.9"}}}, "torch is 2.9 and was 2.8"),
    ({"conditions": CONDITIONS | {"families": ["mma"]}}, "families is mma and was none"),
]


@pytest.mark.parametrize(("change", "said"), DIFFERENT)
def test_a_run_that_is_named_and_is_another_one_is_refused_by_what_differs(ledger, change, said):
    run = ended(ledger)
    with pytest.raises(UsageError) as refused:
        go(ledger, replace(ASKED, **change), resume=run)
    assert str(refused.value).startswith(f"run {run} cannot be resumed: ") and said in str(refused.value)
    assert ledger.runs()[-1].status == "interrupted"


def test_a_run_that_is_named_goes_on_whatever_came_after_it_and_with_another_budget(ledger):
    first, second = ended(ledger), ended(ledger, "all trials done", replace(ASKED, sampler="gp"))
    assert go(ledger, replace(ASKED, trials=90), resume=first).run == first
    assert (ledger.runs()[0].trials, ledger.runs()[1].id) == (90, second)


def test_a_budget_that_is_used_up_is_said_with_how_to_ask_for_more(ledger):
    asked = replace(ASKED, trials=2)
    run = ended(ledger, "all trials done", asked, trials=2)
    with pytest.raises(UsageError, match="has completed its 2 trials: --trials 4 runs 2 more"):
        go(ledger, asked, resume=run)
    assert go(ledger, replace(ASKED, trials=4), resume=run).run == run


def test_a_run_that_was_cut_short_before_its_end_was_written_comes_to_it(ledger):
    asked = replace(ASKED, trials=2)
    run = ended(ledger, "killed", asked, trials=2)
    assert go(ledger, asked).run == run


def test_a_run_that_goes_on_elsewhere_cannot_be_named(ledger):
    run = go(ledger).run
    with pytest.raises(UsageError, match=f"run {run} is in progress: wait until it has ended"):
        go(ledger, resume=run)


def test_a_run_of_an_older_evoengine_or_of_another_ledger_cannot_go_on(ledger):
    old = start_run(ledger)
    ledger.finish_run(old, "interrupted")
    with pytest.raises(
        UsageError, match=f"run {old} cannot be resumed .it is not a search, or was made by an older evoengine"
    ):
        go(ledger, resume=old)
    imported = ended(ledger)
    with ledger.database.writing() as session:
        session.get_one(RunRow, imported).imported_from = "run.json"
    with pytest.raises(UsageError, match=f"run {imported} was imported"):
        go(ledger, resume=imported)
    with pytest.raises(UsageError, match="has no run 9"):
        go(ledger, resume=9)


def test_a_change_of_the_compiler_is_said_where_a_new_run_begins(ledger):
    run, said = ended(ledger, "all trials done"), []
    go(ledger, replace(ASKED, conditions=CONDITIONS | {"compiler": "nvrtc 13.1"}), said=said)
    assert said == [f"since run {run}: compiler is nvrtc 13.1 and was nvrtc 13.0; kernels are evaluated again"]


# ── as commands ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def recorded(tmp_path):
    entries = {f"{n}": {"a": n, "time": 1.0 + n % 7} for n in range(40)}
    content = {
        "device_name": "Some GPU", "kernel_name": "k", "problem_size": "1", "tune_params_keys": ["a"],
        "tune_params": {"a": list(range(40))}, "objective": "time", "cache": entries,
    }  # fmt: skip
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def call(tmp_path):
    db = tmp_path / "evo.db"

    def run(*arguments):
        return CliRunner().invoke(evoengine, ["search", *map(str, arguments), "--db", str(db)])

    return run


def refused(result) -> str:
    """The sentence of a command that ends with exit code 2, by click or by `main`."""
    assert isinstance(result.exception, UsageError) or result.exit_code == 2
    return str(result.exception) if isinstance(result.exception, UsageError) else " ".join(result.output.split())


def test_a_replay_goes_on_with_the_trials_that_are_left(recorded, call, tmp_path):
    device = f"recorded:{recorded}"
    assert call("--device", device, "--trials", 12).exit_code == 0
    assert "--trials 24 runs 12 more" in refused(call("--device", device, "--resume"))
    done = call("--device", device, "--resume", 1, "--trials", 20)
    assert done.exit_code == 0, (done.output, done.exception)
    with open_ledger(str(tmp_path / "evo.db"), create=False) as ledger:
        assert [(r.id, r.trials, r.status) for r in ledger.runs()] == [(1, 20, "all trials done")]
        found = ledger.candidates()
        assert len({c.config["a"] for c in found}) == len(found) == 20
        assert {c.outcome for c in found} == {Outcome.RECORDED}


def test_what_cannot_go_on_is_one_sentence_and_nothing_is_written(recorded, call, tmp_path):
    assert isinstance(call("--resume").exception, NothingFound) and not (tmp_path / "evo.db").exists()
    device = f"recorded:{recorded}"
    call("--device", device, "--trials", 3)
    for arguments, said in [
        (("--resume", 7), "the ledger has no run 7"),
        (("--resume", "x"), "'x' is not a valid integer"),
        (("--resume",), "run 1 replayed a recorded file: name it with --device recorded:FILE"),
        (("--resume", "--device", device, "--sampler", "tpe"), "the sampler is tpe and was evolution"),
    ]:
        assert said in refused(call(*arguments))
    with open_ledger(str(tmp_path / "evo.db"), create=False) as ledger:
        assert [(r.status, len(ledger.candidates())) for r in ledger.runs()] == [("all trials done", 3)]
