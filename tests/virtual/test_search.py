"""A search over a user's Triton kernel: its list becomes a space, and each configuration a candidate as any other."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner

import evoengine
from evoengine import workloads
from evoengine.cli.main import evoengine as cli
from evoengine.errors import UsageError
from evoengine.gpu import find_gpu
from evoengine.records import EXECUTOR, Outcome
from evoengine.sass.launch import Geometry
from evoengine.search.evaluators import make_plans
from evoengine.search.targets import spaces_of, target_of
from evoengine.space.space import load_space, space_from_text
from evoengine.stages.verify import CannotJudge
from evoengine.tuning.exporting import export_trial
from evoengine.workloads.triton_kernel import TritonProblem, is_triton, proposed_space, read_last_line

triton = pytest.importorskip("triton", reason="Triton is not installed")

FILE = Path(__file__).parent / "triton_to_verify.py"


pytestmark = pytest.mark.usefixtures("tools", "compiled_anew")


def searched(folder: Path, kernel: str, reference: str | None, file: Path = FILE, **options):
    space = options.pop("space", None)
    if isinstance(space, str):
        (folder / "space.toml").write_text(space)
        space = folder / "space.toml"
    said: list[str] = []
    options = {"call": f"call_{kernel}", "gpu": "h100", "seed": 1, "jobs": 1} | options
    found = evoengine.tune(
        triton=f"{file}::{kernel}", reference=reference, space=space, db=folder / "own.db", echo=said.append, **options
    )
    return found, said


def space_of(kernel: str, **knobs: list) -> str:
    text = proposed_space(kernel, [{name: values[0] for name, values in knobs.items()}])
    head, _, rest = text.partition("[knobs]")
    return (
        f"{head}[knobs]\n" + "".join(f"{n} = {json.dumps(v)}\n" for n, v in knobs.items()) + rest[rest.index("\n#") :]
    )


@pytest.fixture(scope="module")
def softmax(tmp_path_factory):
    folder = tmp_path_factory.mktemp("softmax")
    with patch.dict(workloads._registered):  # tests/conftest.py cleans up behind a test, not behind a module's fixture
        return folder, *searched(folder, "softmax", "softmax_of", trials=4)


def trials(folder: Path, **filters):
    with evoengine.open_ledger(folder / "own.db", create=False) as ledger:
        return [ledger.candidate(t.trial, with_cubin=True) for t in ledger.trials(**filters)]


def test_configurations_are_ranked_by_the_time_predicted_of_their_machine_code(softmax):
    folder, found, _ = softmax
    assert len(found.best) == 4 and found.progress.outcomes[Outcome.ESTIMATED] == 4
    times = [one.ranked_by.median_us for one in found.best]
    assert times == sorted(times) and times[0] > 1
    assert {(one.config["BLOCK"], one.config["num_warps"]) for one in found.best} >= {(64, 1), (256, 2)}
    assert all(one.ranked_by.tflops is None and one.ranked_by.terms["predicted"] for one in found.best)


def test_a_candidates_source_is_the_file_with_its_configuration_and_its_launch_the_functions(softmax):
    folder, _, _ = softmax
    for one in trials(folder):
        assert (
            one.source is not None and is_triton(one.source.text) and one.source.text.startswith(FILE.read_text()[:80])
        )
        stated = read_last_line(one.source.text)
        assert {**stated.config, "family": "softmax"} == one.config and stated.sizes == {"m": 3, "n": 150}
        assert one.source.launch.grid == (3, 1, 1) and one.source.launch.threads == 32 * one.config["num_warps"]
        assert one.binary.cubin and one.binary.registers > 8 and one.binary.compiler == f"triton {triton.__version__}"
        assert one.occupancy > 0


def test_a_candidate_is_judged_with_small_sizes_and_its_own(softmax):
    folder, _, _ = softmax
    for one in trials(folder):
        verdict = one.binary_verdict
        assert verdict.device == EXECUTOR and verdict.correct and verdict.whole
        problems = list(dict.fromkeys(case.problem for case in verdict.cases))
        assert problems[0] == "softmax:m=1,n=1" and problems[-1] == "softmax:m=3,n=150" and len(problems) >= 4
        assert {case.name for case in verdict.cases} >= {"as given", "normal", "large"}
        assert 0 < verdict.error_ratio < 1
        assert one.verdict.abstained and "Python" in one.verdict.reason


def test_a_trial_is_verified_again_as_it_is_stored(softmax):
    folder, found, _ = softmax
    best = found.best[0]
    again = evoengine.verify(best.trial, db=folder / "own.db", seed=5)
    assert again.correct and again.candidate.config == best.config
    assert {case.name for case in again.candidate.binary_verdict.cases} >= {"as given", "normal", "large"}


def test_a_wrong_configuration_is_recorded_with_its_case_and_never_ranked(tmp_path):
    """With BLOCK above 64 the kernel leaves the end of a row out, which the function's own sizes do not show."""
    found, _ = searched(
        tmp_path,
        "drops_the_tail",
        "twice",
        trials=2,
        space=space_of("drops_the_tail", BLOCK=[64, 128], num_warps=[1], num_stages=[3]),
    )
    assert [one.config["BLOCK"] for one in found.best] == [64]
    (wrong,) = trials(tmp_path, outcomes=(Outcome.INCORRECT,))
    case = next(case for case in wrong.binary_verdict.cases if not case.correct)
    assert case.problem == "drops_the_tail:m=1,n=1" and "writes to none of its tensors" in wrong.reason
    assert wrong.config["BLOCK"] == 128 and wrong.measurement is None


def test_what_triton_refuses_is_recorded_as_uncompilable(tmp_path):
    found, _ = searched(
        tmp_path,
        "softmax",
        "softmax_of",
        trials=2,
        space=space_of("softmax", BLOCK=[64, 96], num_warps=[1], num_stages=[3]),
    )
    assert [one.config["BLOCK"] for one in found.best] == [64]
    (refused,) = trials(tmp_path, outcomes=(Outcome.UNCOMPILABLE,))
    assert refused.config["BLOCK"] == 96 and "power of 2" in refused.reason


KILLS_AND_PRUNES = """
import os, signal
import torch
import triton
import triton.language as tl


def kill_with_128(arguments):
    if arguments["BLOCK"] == 128:
        os.kill(os.getpid(), signal.SIGSEGV)


def at_most_256(configs, arguments, **others):
    return [config for config in configs if config.kwargs["BLOCK"] <= 256]


@triton.autotune(
    [triton.Config({"BLOCK": 64}, pre_hook=kill_with_128)], key=[], prune_configs_by={"early_config_prune": at_most_256}
)
@triton.jit
def twice(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def call_twice():
    x = torch.randn(100)
    twice[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, torch.empty_like(x), 100)


def twice_of(x):
    return 2 * x
"""


def test_a_configuration_that_kills_its_process_and_one_that_is_pruned_cost_themselves_alone(tmp_path):
    (tmp_path / "kills.py").write_text(KILLS_AND_PRUNES)
    space = space_of("twice", BLOCK=[64, 128, 512], num_warps=[1], num_stages=[3])
    found, _ = searched(tmp_path, "twice", "twice_of", tmp_path / "kills.py", trials=3, space=space)
    assert [one.config["BLOCK"] for one in found.best] == [64]
    (killed,) = trials(tmp_path, outcomes=(Outcome.CRASHED,))
    assert killed.config["BLOCK"] == 128 and "SIGSEGV" in killed.reason and killed.evidence["deaths"]
    (pruned,) = trials(tmp_path, outcomes=(Outcome.UNCOMPILABLE,))
    assert pruned.config["BLOCK"] == 512 and "early_config_prune leaves it out" in pruned.reason


def test_a_file_that_ends_its_process_is_refused(tmp_path):
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(UsageError, match=r"ends.py cannot be executed: .*3"):
        searched(tmp_path, "twice", None, tmp_path / "ends.py", trials=1)


def test_sizes_that_would_take_too_long_are_halved_and_the_case_says_so(softmax, monkeypatch):
    from evoengine.virtual import device, host

    folder, _, _ = softmax
    best = next(one for one in trials(folder) if one.config["BLOCK"] == 64)
    with evoengine.open_ledger(folder / "own.db", create=False) as ledger:
        target = target_of(ledger, best)
        plans = make_plans(spaces_of(ledger, [best], target)[best.run], target, best.config)
    prediction = host.predict_launch(best.contender, target.clock, cold=True)
    seconds = device.seconds_to_execute(prediction, Geometry(best.source.launch.grid, (1, 1, 1)))
    judge = host.HostJudge(best.contender, plans._replace(short=()), 1)
    monkeypatch.setattr(host, "LONGEST_ATTEMPT", 0.99 * seconds)
    (verdict, _) = judge.judge_short().verdicts
    (part,) = {case.part for case in verdict.cases}
    assert verdict.correct and re.match(r"m=3 n=(75|37|18), as its own sizes would take about 0 s", part)
    monkeypatch.setattr(host, "LONGEST_ATTEMPT", 0.0)
    with pytest.raises(CannotJudge, match="its machine code was not executed: executing it would take about"):
        judge.judge_short()


def test_a_space_is_proposed_from_the_list_and_its_configurations_are_the_start_points():
    listed = [
        {"BLOCK": 64, "EVEN": True, "GROUP": 3, "DTYPE": "fp16", "num_warps": 4, "num_stages": 2, "maxnreg": 0},
        {"BLOCK": 256, "EVEN": True, "GROUP": 5, "DTYPE": "bf16", "num_warps": 32, "num_stages": 4, "maxnreg": 128},
    ]
    space = space_from_text(proposed_space("k", listed), "k.toml", TritonProblem("k", ()), find_gpu("h100"))
    assert {knob.name: list(knob.values) for knob in space.knobs} == {
        "family": ["k"], "BLOCK": [32, 64, 128, 256, 512], "EVEN": [False, True], "GROUP": [3, 5],
        "DTYPE": ["bf16", "fp16"], "num_warps": [2, 4, 8, 16, 32], "num_stages": [1, 2, 3, 4, 5], "maxnreg": [0, 128],
    }  # fmt: skip
    assert [{n: v for n, v in start.items() if n != "family"} for start in space.starts] == listed


def unlisted(folder: Path):
    listed = ({"BLOCK": 64, "num_warps": 1, "num_stages": 3}, {"BLOCK": 256, "num_warps": 2, "num_stages": 3})
    return next(one for one in trials(folder) if {n: v for n, v in one.config.items() if n != "family"} not in listed)


def test_an_export_is_what_tritons_autotuner_reads_from_its_cache(softmax, tmp_path):
    """An untouched file then runs with a configuration that its list does not have, and benchmarks nothing."""
    folder, _, _ = softmax
    chosen = unlisted(folder)
    export_trial(tmp_path / "out", chosen.trial, db=str(folder / "own.db"))
    described = json.loads((tmp_path / "out" / "kernel.json").read_text())
    names: dict[str, triton.Config] = {}
    exec((tmp_path / "out" / "config.py").read_text(), names)
    assert {**names["CONFIG"].all_kwargs(), "family": "softmax", "num_ctas": 1} == {**chosen.config, "num_ctas": 1}

    place = tmp_path / "cache" / described["triton"]["autotune_cache_key"]
    place.mkdir(parents=True)
    shutil.copy(tmp_path / "out" / "softmax.autotune.json", place)
    (tmp_path / "script.py").write_text(FILE.read_text() + "\ncall_softmax()\nprint(softmax.best_config)\n")
    environment = os.environ | {"TRITON_CACHE_AUTOTUNING": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    ran = subprocess.run(
        [sys.executable, "-m", "evoengine", "run", "script.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.stdout.strip() == str(names["CONFIG"]), ran.stderr


def command(*arguments: object):
    return CliRunner().invoke(cli, [str(each) for each in arguments], standalone_mode=False, catch_exceptions=False)


def test_the_ledgers_commands_read_it_as_any_other_search(softmax):
    folder, found, _ = softmax
    best, db = found.best[0], folder / "own.db"
    shown = command("best", "--db", db).stdout
    assert "BLOCK" in shown and f"trial {best.trial}: triton.Config({{'BLOCK': {best.config['BLOCK']}}}" in shown
    one = json.loads(command("best", "--db", db, "--json").stdout)
    assert one["trial"] == best.trial and one["config"] == best.config and one["tflops"] is None
    assert json.loads(command("report", "--db", db, "--json").stdout)["lineage"][-1]["trial"] == best.trial
    page = command("show", best.trial, "--db", db).stdout
    assert ("softmax:m=3,n=150" in page and "(3, 1, 1)" in page.replace("×", ", ")) or "3" in page


def test_a_search_is_resumed_by_the_same_command(softmax):
    folder, _, _ = softmax
    found, said = searched(folder, "softmax", "softmax_of", resume=0, trials=5)
    assert found.run == 1 and any(line.startswith("resuming run 1") for line in said)
    assert found.progress.done == 5
    with pytest.raises(UsageError, match="run 1 searched a kernel of your own: name its file with --triton and --call"):
        evoengine.tune(resume=1, db=folder / "own.db")


def test_a_proposed_space_is_written_edited_and_given_back(tmp_path):
    asked = ("--triton", f"{FILE}::softmax", "--call", "call_softmax", "--gpu", "h100")
    written = tmp_path / "softmax.toml"
    assert command("search", *asked, "--write-space", written).return_value == 0
    knobs = tomllib.loads(written.read_text())["knobs"]
    assert knobs == {"BLOCK": [32, 64, 128, 256, 512], "num_warps": [1, 2, 4], "num_stages": [2, 3, 4]}
    written.write_text(written.read_text().replace("[32, 64, 128, 256, 512]", "[64, 256, 1024]"))
    space = load_space(written, TritonProblem("softmax", (("m", 3), ("n", 150))), find_gpu("h100"))
    assert len(space) == 27 and len(space.starts) == 2
    with pytest.raises(UsageError, match="already exists; --write-space takes the name of a new file"):
        command("search", *asked, "--write-space", written)


@pytest.mark.parametrize(
    ("kernel", "options", "complaint"),
    [
        ("roots", {}, r"kernel roots has no @triton.autotune, so nothing of it can be varied: add one"),
        ("softmx", {}, r"has no Triton kernel 'softmx': it has .*; did you mean softmax\?"),
        ("softmax", {"call": "call_with_a_fault"}, r"call_with_a_fault\(\) raises line \d+: RuntimeError: no luck"),
        ("softmax", {"call": "call_nothing"}, r"call_nothing\(\) launches no kernel softmax"),
        ("softmax", {"call": None}, r"--triton needs --call FUNCTION"),
        (
            "softmax",
            {"problem": "softmax:k=3"},
            r"part 'k=3' that is not a size of call_softmax; write it like softmax:m=3",
        ),
        ("softmax", {"device": "cuda"}, r"--device cuda contradicts --triton"),
        ("softmax", {"reference": "raises_of"}, r"has no function 'raises_of' for --reference"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_written(tmp_path, kernel, options, complaint):
    options = {"reference": None} | options
    with pytest.raises(UsageError, match=complaint):
        searched(tmp_path, kernel, trials=1, **options)
    assert not list(tmp_path.iterdir())
