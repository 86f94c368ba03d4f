"""Which GPU is tuned for where none is named, and which families of kernels fit each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from evoengine.devices.driver import GpuDevice
from evoengine.errors import MachineError, UsageError
from evoengine.gpu import find_gpu, known_gpus
from evoengine.tuning import boards, setup
from evoengine.tuning.boards import choose_gpu, fitting_families, require_same_board
from evoengine.tuning.setup import require_compilers
from tests.test_gpu_file import BOARD


def device(name: str, capability: int, sms: int) -> GpuDevice:
    return GpuDevice(0, name, "GPU-a", capability, 2**30, {"sms": sms})


@pytest.fixture
def chosen(monkeypatch):
    """The key that --gpu auto takes on a machine with these GPUs, and what is said of it."""

    def choose(found) -> tuple[str, str]:
        monkeypatch.setattr(boards, "find_driver", lambda: found)
        choice = choose_gpu("auto", None)
        return choice.gpu.key, choice.why

    return choose


def test_auto_is_the_gpu_of_this_machine(chosen):
    assert chosen(("13.0", [device("NVIDIA L4", 89, 58)])) == ("l4", "--gpu l4: this machine has NVIDIA L4")


def test_auto_is_the_first_gpu_that_is_known(chosen):
    key, line = chosen(("13.0", [device("NVIDIA T400", 75, 6), device("NVIDIA H200", 90, 132)]))
    assert (key, line) == ("h200", "--gpu h200: this machine has NVIDIA H200")


def test_auto_takes_the_nearest_board_of_its_architecture_for_an_unknown_gpu_and_says_so(chosen):
    key, line = chosen(("13.0", [device("NVIDIA H20", 90, 110)]))
    assert key == "h100-pcie"
    assert "NVIDIA H20 (sm_90) is not in gpus.toml; using the peaks of NVIDIA " in line
    assert line.endswith("describe it with --gpu-file")


def test_auto_is_the_h100_for_a_gpu_of_an_unknown_architecture(chosen):
    key, line = chosen(("13.0", [device("NVIDIA B300", 103, 148)]))
    assert (
        key == "h100"
        and "NVIDIA B300 (sm_103) is not in gpus.toml" in line
        and "nor is a GPU of its architecture" in line
    )


def test_auto_is_the_h100_where_there_is_no_gpu(chosen):
    key, line = chosen("the CUDA driver sees no GPU")
    assert key == "h100"
    assert line == "--gpu h100: the CUDA driver sees no GPU; evoengine gpus lists the others"


def test_a_named_gpu_is_taken_without_a_word(monkeypatch):
    monkeypatch.setattr(boards, "find_driver", lambda: pytest.fail("nobody asked for the GPU that is here"))
    choice = choose_gpu("A100", None)
    assert (choice.gpu.key, choice.why) == ("a100", None)
    with pytest.raises(UsageError, match="unknown GPU 'h10': .*did you mean h100"):
        choose_gpu("h10", None)


def test_a_file_s_gpu_goes_before_auto_and_not_beside_another(tmp_path):
    file = tmp_path / "board.toml"
    file.write_text(BOARD)
    for requested in ("auto", "board"):
        choice = choose_gpu(requested, file)
        assert (choice.gpu.sms, choice.why) == (56, f"--gpu board: NVIDIA A4500 as {file} describes it")
    with pytest.raises(
        UsageError, match="--gpu h100 contradicts --gpu-file .*, which describes board; give one of them"
    ):
        choose_gpu("h100", file)


class Kept:
    """A ledger with one description."""

    def __init__(self, fields):
        self.targets = SimpleNamespace(gpu_definition=lambda gpu: fields)


def test_another_board_under_a_name_of_the_ledger_is_refused():
    board = replace(find_gpu("a10"), key="board")
    require_same_board(Kept(boards.custom_definition(board)), board)
    require_same_board(Kept(None), board)
    require_same_board(Kept(None), find_gpu("a10"))
    with pytest.raises(UsageError, match="board has sms 72 in the ledger and 71 in the file; rename the changed board"):
        require_same_board(Kept(boards.custom_definition(board)), replace(board, sms=71))


@pytest.mark.parametrize("key", known_gpus())
def test_the_compiler_here_knows_every_board(key):
    require_compilers(find_gpu(key), emulated=False)


def test_a_board_that_the_compiler_does_not_know_is_said_before_any_candidate(monkeypatch):
    monkeypatch.setattr(setup, "compiled_capabilities", lambda: (75, 80, 90))
    with pytest.raises(
        MachineError, match=r"nvrtc .* cannot compile for sm_120, which rtx5090 needs, only for sm_75, sm_80"
    ):
        require_compilers(find_gpu("rtx5090"), emulated=False)


FIT = {
    75: {"attention": "scalar wmma", "gemm": ""},
    80: {"attention": "scalar wmma mma", "gemm": "mma"},
    86: {"attention": "scalar wmma mma", "gemm": "mma"},
    89: {"attention": "scalar wmma mma", "gemm": "mma"},
    90: {"attention": "scalar wmma mma wgmma", "gemm": "mma wgmma"},
    100: {"attention": "scalar wmma mma", "gemm": "mma"},
    120: {"attention": "scalar wmma mma", "gemm": "mma"},
}


def test_the_families_that_fit_are_those_whose_rules_about_the_gpu_hold():
    found = fitting_families(known_gpus().values())
    for gpu in known_gpus().values():
        families = {f.workload: " ".join(f.families) for f in found[gpu.key]}
        assert {w: families[w] for w in ("attention", "gemm")} == FIT[gpu.capability], gpu.key
        assert (families["rms_norm"], families["convolution"]) == ("warp block", "shared direct")


def test_a_family_that_is_left_out_has_its_reason():
    (attention, *_) = fitting_families([find_gpu("b200")])["b200"]
    assert attention.left_out == {"wgmma": "wgmma is an instruction of Hopper (sm_90a) alone"}
