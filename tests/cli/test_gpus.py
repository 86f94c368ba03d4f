"""evoengine gpus, and a search for a GPU that a file describes, by the real command line."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from evoengine.gpu import known_gpus
from evoengine.tuning.boards import fitting_families
from evoengine.views.boards import gpus_table
from tests.support.exhaustive import more
from tests.test_gpu_file import BOARD

PROBLEM = "rms_norm:rows8,hidden32,fp16"


def test_the_table_has_a_line_per_gpu_and_says_what_is_left_out_and_why(evoengine):
    done = evoengine("gpus")
    assert done.returncode == 0
    head, *rows = done.stdout.splitlines()
    names = ["GPU", "name", "arch", "SMs", "GHz", "GB/s", "KB per block", "KB per SM", "TFLOPS", "fit"]
    assert re.split(" {2,}", head) == names
    assert [row.split()[0] for row in rows] == list(known_gpus())
    assert next(row for row in rows if row.startswith("a10 ")).split() == [
        "a10", "A10", "sm_86", "72", "1.70", "600", "99", "100", "125", "not", "wgmma,", "cluster",
    ]  # fmt: skip
    assert "wgmma left out: wgmma is an instruction of Hopper (sm_90a) alone" in done.stderr


def test_the_json_has_every_limit_and_the_families_of_every_workload(evoengine):
    found = json.loads(evoengine("gpus", "--json").stdout)
    assert found["schema"] == 1
    by_key = {gpu["key"]: gpu for gpu in found["gpus"]}
    assert list(by_key) == list(known_gpus())
    b200 = by_key["b200"]
    limits = {name: b200[name] for name in ("arch", "sms", "shared_per_block", "shared_per_sm", "tensor_tflops")}
    assert limits == {
        "arch": "sm_100", "sms": 148, "shared_per_block": 232448, "shared_per_sm": 233472, "tensor_tflops": 2250.0,
    }  # fmt: skip
    assert b200["families"]["attention"] == ["scalar", "wmma", "mma"]
    assert b200["left_out"]["gemm"].keys() == {"wgmma"}
    assert (b200["compiles"], b200["predicted_by"], by_key["h100"]["predicted_by"]) == (True, "formula", "model")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_value_is_cut_in_a_narrow_terminal(width):
    known = list(known_gpus().values())
    console = Console(width=width, file=io.StringIO())
    console.print(gpus_table(known, fitting_families(known)))
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    words = text.split()
    for gpu in known:
        assert {gpu.key, gpu.arch, f"{gpu.memory_gbs:g}", f"{gpu.tensor_tflops:g}"} <= set(words)
    assert ("4090" in words) == (width == 200)


@pytest.fixture(scope="module")
def searched(evoengine, tmp_path_factory):
    """A folder with the ledger of a search for a file's GPU, and that search; the file is gone."""
    folder = tmp_path_factory.mktemp("board")
    (folder / "board.toml").write_text(BOARD.replace("shared_per_block = 101376", "shared_per_block = 16384"))
    done = evoengine(
        "search", "--gpu-file", "board.toml", "--problem", PROBLEM, "--family", "warp", "--trials", 1, "--seed", 1,
        "--jobs", 1, "--device", "emulator", "--db", "evo.db", cwd=folder,
    )  # fmt: skip
    (folder / "board.toml").unlink()
    return folder, done


def test_a_search_for_a_file_s_gpu_says_so_and_ranks_by_formula(searched):
    _, done = searched
    assert done.returncode == 0, done.stderr
    assert "--gpu board: NVIDIA A4500 as board.toml describes it" in done.stderr
    assert "no predictions: the rates of board's parts are not known" in done.stderr


@pytest.mark.parametrize("command", [["best"], ["report"], ["history"], ["show", 1]])
def test_later_commands_know_its_limits_without_the_file(evoengine, searched, command):
    folder, _ = searched
    gpu = [] if command[0] == "show" else ["--gpu", "board"]
    done = evoengine(*command, *gpu, "--db", "evo.db", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "est.*" in done.stdout


def test_its_best_kernel_is_exported_with_its_limits(evoengine, searched):
    folder, _ = searched
    done = evoengine("best", "--export", "out", "--db", "evo.db", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "`board`, `NVIDIA A4500`, `sm_86`, 56 SMs" in (folder / "out" / "README.md").read_text()


def test_its_exported_run_takes_the_board_along(evoengine, searched, tmp_path):
    folder, _ = searched
    assert evoengine("export", "run.json", "--db", "evo.db", cwd=folder).returncode == 0
    done = evoengine("import", folder / "run.json", "--db", "other.db", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = evoengine("best", "--gpu", "board", "--export", "out", "--db", "other.db", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "`board`, `NVIDIA A4500`, `sm_86`, 56 SMs" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sms": 57}, "board has sms 56 in the ledger and 57 in the file"),
        ({"name": ["A4500"]}, "gpu_definition must be"),
        ({"key": "other"}, "the run is on 'board', but describes the GPU 'other'"),
        *more(
            [
                ({"sms": 0}, "has sms 0; it must be a whole number from 1"),
                ({"note": 1}, "which is not a field of a GPU"),
            ]
        ),
    ],
)
def test_a_board_in_an_exported_run_is_checked_before_anything_is_written(evoengine, searched, tmp_path, change, said):
    folder, _ = searched
    evoengine("export", tmp_path / "run.json", "--db", "evo.db", cwd=folder)
    told = json.loads((tmp_path / "run.json").read_text())
    told["metadata"]["evoengine"]["gpu_definition"] |= change
    (tmp_path / "run.json").write_text(json.dumps(told))
    before = evoengine("runs", "--json", "--db", "evo.db", cwd=folder).stdout
    done = evoengine("import", tmp_path / "run.json", "--db", "evo.db", cwd=folder)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert evoengine("runs", "--json", "--db", "evo.db", cwd=folder).stdout == before


def test_measuring_asks_for_a_gpu_not_for_the_file(evoengine, searched):
    folder, _ = searched
    done = evoengine("measure", "--db", "evo.db", cwd=folder)
    assert done.returncode in (1, 3) and "unknown GPU" not in done.stderr


def test_the_ledger_keeps_the_board_as_it_was_read(searched):
    from evoengine.ledger.store import open_ledger
    from evoengine.search.targets import stored_gpu

    with open_ledger(str(searched[0] / "evo.db"), create=False) as ledger:
        gpu = stored_gpu(ledger, "board")
        assert (gpu.sms, gpu.shared_per_block, gpu.name) == (56, 16384, "NVIDIA A4500")
        assert ledger.targets.gpu_definition("board")["shared_per_block"] == 16384


def test_a_later_search_in_the_ledger_takes_the_board_by_its_name(evoengine, searched):
    folder, _ = searched
    done = evoengine(
        "search", "--gpu", "board", "--problem", PROBLEM, "--family", "warp", "--trials", 1, "--seed", 1, "--jobs", 1,
        "--device", "emulator", "--db", "evo.db", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "board (sm_86)" in done.stderr


def test_another_board_of_that_name_is_refused_before_anything_is_written(evoengine, searched, tmp_path):
    folder, _ = searched
    (tmp_path / "board.toml").write_text(BOARD)
    done = evoengine(
        "search", "--gpu-file", tmp_path / "board.toml", "--problem", PROBLEM, "--trials", 1, "--device", "emulator",
        "--db", folder / "evo.db",
    )  # fmt: skip
    assert done.returncode == 2
    assert "board has shared_per_block 16384 in the ledger and 101376 in the file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["best", "history", "report"])
def test_a_gpu_that_neither_the_ledger_nor_evoengine_knows_is_named(evoengine, searched, command):
    done = evoengine(command, "--gpu", "h10", "--db", searched[0] / "evo.db")
    assert done.returncode == 2
    assert "unknown GPU 'h10': known are" in done.stderr and "did you mean h100?" in done.stderr


@pytest.mark.parametrize("command", ["search", "verify"])
def test_a_file_at_fault_ends_with_2_and_a_sentence(evoengine, tmp_path, command):
    (tmp_path / "board.toml").write_text(BOARD.replace("sms = 56", "sms = 0"))
    config = ["--config", "{}"] if command == "verify" else ["--db", tmp_path / "evo.db"]
    done = evoengine(command, "--gpu-file", tmp_path / "board.toml", *config)
    assert done.returncode == 2 and "has sms 0; it must be a whole number" in done.stderr
    assert not (tmp_path / "evo.db").exists()


def test_a_board_that_nobody_can_compile_for_ends_with_3(evoengine, tmp_path):
    (tmp_path / "board.toml").write_text(BOARD.replace("sm_86", "sm_70").replace("101376", "65536"))
    done = evoengine(
        "search", "--gpu-file", tmp_path / "board.toml", "--problem", PROBLEM, "--device", "emulator", "--db",
        tmp_path / "evo.db",
    )  # fmt: skip
    assert done.returncode == 3 and "cannot compile for sm_70, which board needs, only for sm_" in done.stderr
