"""The gate of Triton kernels: right ones pass, and each planted fault is found by the case that shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.errors import UsageError
from evoengine.gpu import find_gpu
from evoengine.views import SCHEMA
from evoengine.views.foreign_kernels import triton_answer
from evoengine.workloads.triton_kernel import read_host
from tests.support.documents import blocks
from tests.support.exhaustive import more

triton = pytest.importorskip("triton", reason="Triton is not installed")

from evoengine.virtual.gate import AS_GIVEN, DRAWS, Wrong, _worst  # noqa: E402
from evoengine.virtual.verify import Session  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "virtual-gpu.md"
FILE = Path(__file__).parent / "triton_to_verify.py"


pytestmark = pytest.mark.usefixtures("tools", "compiled_anew")


def verify(target: str, call: str, reference: str | None, gpu: str, seed: int, exact: bool = False):
    session = Session(read_host(target, call, reference), find_gpu(gpu), seed)
    return [session.gate(number, exact) for number in range(len(session.configs))]


def gated(kernel: str, call: str = "", reference: str | None = None, gpu: str = "h100"):
    return verify(f"{FILE}::{kernel}", call or f"call_{kernel}", reference, gpu, seed=1)


@pytest.mark.parametrize("gpu", ["h100", *more(["a100"])])
def test_a_right_kernel_is_correct_for_every_configuration_and_size(gpu: str):
    verdicts = gated("softmax", reference="softmax_of", gpu=gpu)
    assert [v.config.split()[0] for v in verdicts] == ["BLOCK=64", "BLOCK=256"]
    assert [v.outcome for v in verdicts] == ["correct", "correct"]
    sizes = list(dict.fromkeys(a.sizes for a in verdicts[0].attempts))
    assert sizes[:3] == ["m=3 n=150", "m=1 n=1", "m=2 n=149"] and len(sizes) >= 5
    assert {a.draw for a in verdicts[0].attempts} == {AS_GIVEN, *DRAWS}
    assert 0 < verdicts[1].worst_share < 1 and verdicts[1].largest_difference < 1e-6
    assert all(v.prediction.time_us > 1 for v in verdicts)
    answer = triton_answer("softmax", gpu, 1, verdicts)
    assert answer["correct"] and answer["configs"][0]["time_us"] > 1 and answer["configs"][1]["refused"] == {}


@pytest.mark.parametrize(
    ("kernel", "call", "reference"),
    [("roots", "", "roots_of"), ("add_in_place", "", "sum_of"), *more([("sums", "", "total_of"), ("roots", "", None)])],
)
def test_values_are_drawn_as_the_function_needs_them(kernel, call, reference):
    """Roots take no negative ones, a sum into zeros begins with these, and what is changed in place is an input."""
    (verdict,) = gated(kernel, call, reference)
    assert verdict.outcome == "correct" and len(verdict.attempts) >= 6, verdict.wrong


def test_what_an_earlier_launch_has_computed_stays_with_what_it_was_computed_from():
    (verdict,) = gated("below_highest")
    assert verdict.outcome == "correct" and {a.draw for a in verdict.attempts} == {AS_GIVEN}
    (verdict,) = gated("below_highest", "call_below_anything")  # nothing says that the values belong together
    assert verdict.wrong and verdict.wrong.draw == "normal" and "NaN" in verdict.wrong.reason


def test_tensors_of_a_table_of_addresses_are_drawn_and_compared():
    (verdict,) = gated("twice_of_each", reference="each_twice")
    assert verdict.outcome == "correct" and {a.draw for a in verdict.attempts} >= {AS_GIVEN, "normal", "large"}
    (verdict,) = gated("twice_of_each", reference="each_thrice")
    assert re.search(r"error of outs\[\d\] .* where \S+ is allowed", verdict.wrong.reason), verdict.wrong.reason


def test_sizes_that_the_function_refuses_are_left_out_and_named():
    (verdict,) = gated("add_in_place", reference="sum_of")
    assert all(re.match(r"n=\d*[13579]$", sizes) for sizes in verdict.refused) and len(verdict.refused) >= 3
    assert all(why.endswith("is odd") and why.startswith("line ") for why in verdict.refused.values())


WANTS_CUDA = """
import torch, triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()
WARPS = 8 if torch.cuda.get_device_capability() == (9, 0) else 4


@triton.autotune([triton.Config({"BLOCK": n}, num_warps=WARPS) for n in (256, 512)], key=[])
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK <= 256)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def call(n=700):
    x = torch.randn(n, device="cuda")
    double[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, torch.empty_like(x), n)


def twice(x):
    return 2 * x
"""


def test_a_file_may_ask_for_cuda_and_a_configuration_that_the_kernel_refuses_is_left_out(tmp_path):
    (tmp_path / "wants_cuda.py").write_text(WANTS_CUDA, "utf-8")
    taken, refused = verify(f"{tmp_path}/wants_cuda.py::double", "call", "twice", "h100", seed=1)
    assert taken.outcome == "correct" and "num_warps=8" in taken.config
    assert refused.outcome == "refused" and refused.refused["n=700"] == "tl.static_assert(BLOCK <= 256) fails"


FAULTS = [
    ("naive_softmax", "", "softmax_of", "m=3", r"^large: \d+ of 120 outputs are NaN or were never written"),
    ("sums", "call_sums_into_anything", "total_of", "m=3", r"NaN or were never written"),
    ("shares_its_ends", "", "twice", "m=3", r"\(triton_to_verify.py:\d+\).* nothing orders the two"),
    ("softmax", "", "twice", "m=3 n=150", r"error \S+ where \S+ is allowed"),
    ("sums", "call_sums_into_anything", None, "m=3", r"1 elements of total are NaN"),
]


@pytest.mark.parametrize(("kernel", "call", "reference", "sizes", "reason"), [*FAULTS[:3], *more(FAULTS[3:])])
def test_a_planted_fault_is_found(kernel, call, reference, sizes, reason):
    wrong = gated(kernel, call, reference)[-1].wrong
    assert wrong is not None and re.search(reason, f"{wrong.draw}: {wrong.reason}"), wrong
    assert re.fullmatch(sizes, wrong.sizes)


@pytest.mark.exhaustive
def test_a_sum_that_nearly_cancels_is_right():
    """By the rounding that its own dtypes cost another computation it would be wrong here, by chance."""
    assert [v.outcome for v in gated("row_sums", reference="sums_of")] == ["correct", "correct"]


@pytest.mark.parametrize(
    ("target", "call", "reference", "complaint"),
    [
        ("none.py::kernel", "call", None, r"there is no file .*none.py'; --triton takes FILE::KERNEL"),
        (str(FILE), "call_softmax", None, r"--triton takes FILE::KERNEL, and '.*' names no kernel"),
        (f"{FILE}::softmx", "call_softmax", None, r"has no Triton kernel 'softmx': it has .*; did you mean softmax\?"),
        (f"{FILE}::softmax", "call_sofmax", None, r"has no function 'call_sofmax' for --call: it has .*call_softmax"),
        (f"{FILE}::softmax", "softmax", None, r"has no function 'softmax' for --call"),
        (f"{FILE}::softmax", "call_tensor", None, r"call_tensor has the parameter x without a default"),
        (f"{FILE}::softmax", "call_nothing", None, r"call_nothing\(\) launches no kernel softmax"),
        (
            f"{FILE}::softmax",
            "call_with_a_fault",
            None,
            r"call_with_a_fault\(\) raises line \d+: RuntimeError: no luck",
        ),
        (f"{FILE}::softmax", "call_softmax", "reference_of_another", r"the parameter z, which kernel softmax has not"),
        (f"{FILE}::roots", "call_roots", "twice_too_many", r"has no function 'twice_too_many' for --reference"),
    ],
)
def test_what_cannot_be_gated_is_refused_with_what_would_be_right(target, call, reference, complaint):
    with pytest.raises(UsageError, match=complaint):
        verify(target, call, reference, "h100", seed=1)


HAS_FPSAN = hasattr(triton.knobs.compilation, "fpsan_homomorphic_casts")
with_fpsan = pytest.mark.skipif(not HAS_FPSAN, reason="this Triton has no FpSan")


@with_fpsan
def test_exact_algebra_asks_about_what_no_tolerance_notices():
    first, second = verify(f"{FILE}::nearly_twice", "call_nearly_twice", "twice", "h100", seed=1, exact=True)
    assert (first.outcome, second.outcome) == ("correct", "correct") and not first.unbuilt | second.unbuilt
    assert not first.inexact and second.inexact == ["m=3", "m=1", "m=2"]
    assert triton.knobs.compilation.instrumentation_mode == ""


BY_TRITON = """
import torch
import triton
import triton.language as tl


@triton.jit
def doubled(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, FACTOR * tl.load(x + at, mask=at < n).to(tl.float32), mask=at < n)


@triton.autotune([triton.Config({"FACTOR": factor}) for factor in (2.0, 2.0001)], key=[])
@triton.jit
def twice(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n).to(tl.float32) * FACTOR, mask=at < n)


def call(n=50):
    x = torch.randn(n).half()
    twice[(1,)](x, torch.empty_like(x), n, BLOCK=64)


def reference(x):
    out = torch.empty_like(x)
    doubled[(1,)](x, out, x.numel(), FACTOR=2.0, BLOCK=triton.next_power_of_2(x.numel()))
    return out
"""


@with_fpsan
def test_exact_algebra_compares_with_a_reference_by_triton(tmp_path):
    (tmp_path / "by_triton.py").write_text(BY_TRITON)
    right, nearly = verify(f"{tmp_path / 'by_triton.py'}::twice", "call", "reference", "h100", seed=1, exact=True)
    assert (right.outcome, nearly.outcome) == ("correct", "correct")
    assert right.with_reference and right.inexact == []
    assert nearly.with_reference and "n=50" in nearly.inexact


@with_fpsan
@pytest.mark.exhaustive
def test_configurations_that_sum_in_other_orders_are_the_same_in_exact_algebra():
    verdicts = verify(f"{FILE}::row_sums", "call_row_sums", "sums_of", "h100", seed=1, exact=True)
    assert [(v.outcome, v.inexact, v.unbuilt) for v in verdicts] == [("correct", [], {})] * 2
    assert verdicts[1].largest_difference > 0


@pytest.mark.skipif(HAS_FPSAN, reason="this Triton has FpSan")
def test_exact_algebra_that_this_triton_has_not_is_refused():
    with pytest.raises(UsageError, match="--exact needs FpSan of Triton 3.9; this is Triton"):
        verify(f"{FILE}::softmax", "call_softmax", None, "h100", seed=1, exact=True)


DIES = """
import os, signal
import torch
import triton
import triton.language as tl


def kill_with_128(arguments):
    if arguments["BLOCK"] == 128:
        os.kill(os.getpid(), signal.SIGKILL)


@triton.autotune([triton.Config({"BLOCK": block}, pre_hook=kill_with_128) for block in (64, 128, 256)], key=[])
@triton.jit
def twice(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def call():
    x = torch.randn(100)
    twice[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, torch.empty_like(x), 100)


def reference(x):
    return 2 * x
"""


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def command(*arguments: str):
    return CliRunner().invoke(evoengine, ["verify", "--seed", "1", *arguments], standalone_mode=False)


def test_the_command_shows_a_row_for_each_configuration_of_which_one_is_wrong_and_why():
    done = command("--triton", f"{FILE}::drops_the_tail", "--call", "call_drops_the_tail", "--reference", "twice")
    assert done.return_value == 1
    assert re.search(r"^BLOCK=64 .* correct .* %", done.stdout, re.MULTILINE)
    assert re.search(r"^BLOCK=256 .* wrong ", done.stdout, re.MULTILINE)
    assert (
        "m=1 n=1, as given: it writes to none of its tensors" in done.stderr and "not correct · seed 1" in done.stderr
    )


@pytest.mark.exhaustive
def test_a_configuration_that_ends_its_process_is_wrong_and_the_others_are_gated(tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    done = command("--triton", f"{tmp_path / 'dies.py'}::twice", "--call", "call", "--reference", "reference")
    assert done.return_value == 1
    assert re.search(r"^BLOCK=64 .* correct ", done.stdout, re.MULTILINE)
    assert re.search(r"^BLOCK=128 .* wrong ", done.stdout, re.MULTILINE)
    assert re.search(r"^BLOCK=256 .* correct ", done.stdout, re.MULTILINE)
    assert re.search(r"BLOCK=128 .*: its process ended|BLOCK=128 .*SIGKILL", done.stderr), done.stderr


def test_the_kernel_of_the_documentation_is_correct(tmp_path):
    kernel, functions = (block.text for block in blocks(PAGE) if "add.py" in block.text and block.language == "python")
    (tmp_path / "add.py").write_text(kernel.replace("if __name__", f"{functions}\n\nif __name__"))
    done = command("--triton", f"{tmp_path / 'add.py'}::add_kernel", "--call", "call", "--reference", "reference")
    assert done.return_value == 0 and re.search(r"^as launched +correct +31 ", done.stdout, re.MULTILINE), done.output


def test_the_commands_json_has_every_attempt():
    done = command("--triton", f"{FILE}::roots", "--call", "call_roots", "--reference", "roots_of", "--json")
    found = json.loads(done.stdout)
    assert done.return_value == 0 and found["correct"] and found["schema"] == SCHEMA and found["seed"] == 1
    (config,) = found["configs"]
    assert config["outcome"] == "correct" and config["range_us"][0] < config["time_us"] < config["range_us"][1]
    assert {attempt["draw"] for attempt in config["attempts"]} >= {"as given", "normal", "large"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--triton", f"{FILE}::roots"), "--triton needs --call FUNCTION"),
        (("--triton", f"{FILE}::roots", "--call", "call_roots", "--db", "x.db"), "--db contradicts --triton"),
        (("--config", "{}", "--call", "call_roots"), "--call requires --triton FILE::KERNEL"),
        ((), "verify takes --config WHAT, --triton FILE::KERNEL with --call FUNCTION"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(arguments, complaint):
    with pytest.raises(UsageError, match=complaint):
        CliRunner().invoke(evoengine, ["verify", *arguments], standalone_mode=False, catch_exceptions=False)


def test_a_file_that_raises_is_refused_with_its_line(tmp_path):
    (tmp_path / "broken.py").write_text("import torch\ntorch.nothing\n")
    with pytest.raises(UsageError, match=r"broken.py cannot be imported: line 2: AttributeError"):
        verify(f"{tmp_path / 'broken.py'}::kernel", "call", None, "h100", seed=1)


# --- infinities of narrow outputs


def test_an_infinity_is_right_where_the_exact_value_is_beyond_the_outputs_type():
    exact = torch.tensor([1.0, 9e4, -9e4], dtype=torch.float64)
    found = _worst("out", torch.tensor([1.0, torch.inf, -torch.inf], dtype=torch.float16), exact, [exact.float()])
    assert found.error == 0
    for wrong in ([torch.inf, torch.inf, -torch.inf], [1.0, -torch.inf, -torch.inf], [1.0, 6e4, -torch.inf]):
        with pytest.raises(Wrong):
            _worst("out", torch.tensor(wrong, dtype=torch.float16), exact, [exact.float()])
