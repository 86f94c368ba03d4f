"""A search over a user's Triton kernel: its list becomes a space, and each configuration a candidate as any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import evoengine
from evoengine.errors import UsageError
from evoengine.gpu import find_gpu
from evoengine.records import EXECUTOR, Outcome
from evoengine.space.space import space_from_text
from evoengine.workloads.triton_kernel import TritonProblem, is_triton, read_last_line
from evoengine.workloads.triton_space import proposed_space
from tests.support.machine_code import require_tools

triton = pytest.importorskip("triton", reason="Triton is not installed")

FILE = Path(__file__).parents[1] / "support" / "triton_to_verify.py"


@pytest.fixture(scope="module", autouse=True)
def compiled_anew(tmp_path_factory):
    require_tools()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


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


def test_a_wrong_configuration_is_recorded_with_its_case_and_never_ranked(tmp_path):
    """With BLOCK above 64 the kernel leaves the end of a row out, which the function's own sizes do not show."""
    found, _ = searched(
        tmp_path,
        "drops_the_tail",
        "twice",
        trials=3,
        space=space_of("drops_the_tail", BLOCK=[64, 128, 256], num_warps=[1], num_stages=[3]),
    )
    assert [one.config["BLOCK"] for one in found.best] == [64]
    wrong = trials(tmp_path, outcomes=(Outcome.INCORRECT,))
    assert sorted(one.config["BLOCK"] for one in wrong) == [128, 256]
    for one in wrong:
        case = next(case for case in one.binary_verdict.cases if not case.correct)
        assert case.problem == "drops_the_tail:m=1,n=1" and "writes to none of its tensors" in one.reason
        assert one.measurement is None


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
            r"part 'k=3' that is no size of call_softmax; write it like softmax:m=3",
        ),
        ("softmax", {"device": "cuda"}, r"--device cuda is not for --triton"),
        ("softmax", {"reference": "raises_of"}, r"has no function 'raises_of' for --reference"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_written(tmp_path, kernel, options, complaint):
    options = {"reference": None} | options
    with pytest.raises(UsageError, match=complaint):
        searched(tmp_path, kernel, trials=1, **options)
    assert not list(tmp_path.iterdir())
