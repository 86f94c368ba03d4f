"""The whole road through the real command line: search, ledger, best, export, show, history, and a second search."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import zlib

import optuna
import pytest

from evoengine.paths import asset
from evoengine.records import Launch, Source
from evoengine.stages.compile import compile_source
from tests.cli.conftest import SMALL, TRIALS
from tests.support.exported import exported_module
from tests.support.stand_in import on_stand_in
from tests.support.vouch import vouch_for_all

FIELDS = [
    "trial", "run", "problem", "gpu", "config", "outcome", "reason", "device", "created_at", "finished_at",
    "imported_from", "source_sha256", "registers", "spill_bytes", "shared_bytes", "occupancy", "compile_ms", "correct",
    "gate_version", "binary_correct", "max_abs_error", "tflops", "tflops_kind", "median_us", "normalised_us", "samples",
    "taken_at", "peak_percent", "vs_baseline", "vs_sdpa", "policy", "range_us", "bound", "utilisation", "model",
    "model_version", "clock", "kernel_class", "sustained", "parents", "operator", "retry_of", "taken_from",
]  # fmt: skip
NOTHING = 'extern "C" __global__ void attention(int* x) { *x = 1; }'
RANKED = {"estimated", "measured"}
FAMILIES = {"scalar", "wmma", "mma", "wgmma"}


@pytest.fixture(scope="module")
def db(searched):
    return searched[0] / "evo.db"


@pytest.fixture(scope="module")
def history(evoengine, db) -> list[dict]:
    return json.loads(evoengine("history", "--json", "--db", db).stdout)["trials"]


@pytest.fixture(scope="module")
def best(evoengine, db) -> dict:
    return json.loads(evoengine("best", "--json", "--db", db).stdout)


def test_a_search_ends_with_a_ranked_table_and_what_to_do_next(searched):
    _, done = searched
    assert done.returncode == 0, done.stderr
    assert "wmma" in done.stdout and "scalar" in done.stdout
    assert "est." in done.stdout
    assert "predicted, not measured" in done.stderr
    assert f"{TRIALS}/{TRIALS}" in done.stderr


def test_a_search_that_found_nothing_names_the_run_and_the_ledger_that_say_why(evoengine, tmp_path):
    templates, db = tmp_path / "templates", tmp_path / "evo.db"
    shutil.copytree(asset("templates"), templates)
    for file in (templates / "attention").glob("*.cu.j2"):
        file.write_text(file.read_text() + "\nno CUDA\n")
    arguments = ("--problem", SMALL, "--trials", 1, "--jobs", 1, "--device", "emulator", "--templates", templates)
    done = evoengine("search", *arguments, "--db", db)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"evoengine history --run 1 --db {db} shows the outcomes" in done.stderr
    assert "· 1 worker ·" in done.stderr


def test_a_family_that_states_no_cost_is_ranked_by_its_prediction_all_the_same(evoengine, tmp_path):
    space, db = tmp_path / "attention.toml", tmp_path / "evo.db"
    text = (asset("search_spaces") / "attention.toml").read_text()
    space.write_text(re.sub(r"\[cost\.scalar\].*?(?=\n\[cost)", "", text, flags=re.DOTALL))
    done = evoengine(
        "search", "--problem", SMALL, "--trials", 1, "--jobs", 1, "--device", "emulator", "--space", space,
        "--family", "scalar", "--db", db,
    )  # fmt: skip
    assert done.returncode == 0 and "est." in done.stdout, done.stderr
    found = json.loads(evoengine("history", "--json", "--db", db).stdout)["trials"]
    assert [(c["outcome"], c["correct"], c["model"]) for c in found] == [("estimated", True, "machine code")]
    assert [c["config"]["family"] for c in found] == ["scalar"]


def test_every_trial_is_in_the_ledger_for_plain_sql(db):
    with sqlite3.connect(db) as connection:
        rows = connection.execute(
            "SELECT c.outcome, b.registers, v.outcome, m.tflops, m.kind FROM candidates c "
            "LEFT JOIN binaries b ON b.id = c.binary_id "
            "LEFT JOIN verdicts v ON v.id = (SELECT max(id) FROM verdicts "  # an export that was judged has added one
            "WHERE candidate_id = c.id AND device = 'emulator') "
            "LEFT JOIN measurements m ON m.candidate_id = c.id"
        ).fetchall()
    assert len(rows) == TRIALS
    for outcome, registers, verdict, tflops, kind in rows:
        assert outcome in RANKED | {"screened", "duplicate"}
        if outcome == "estimated":
            assert registers > 0 and verdict is None and tflops > 0 and kind == "estimated"


def test_optuna_opens_the_same_file(db):
    [summary] = optuna.get_all_study_summaries(f"sqlite:///{db}")
    study = optuna.load_study(study_name=summary.study_name, storage=f"sqlite:///{db}")
    assert len(study.trials) == TRIALS
    best = study.best_trial
    assert best.params["family"] in FAMILIES
    assert {"outcome", "registers", "spill_bytes"} <= best.user_attrs.keys()


def test_history_lists_candidates_as_json_with_exactly_the_agreed_fields(history):
    assert [c["trial"] for c in history] == list(range(1, TRIALS + 1))
    assert all(list(c) == FIELDS for c in history)
    assert {c["config"]["family"] for c in history} == FAMILIES


def test_best_is_the_fastest_of_history(history, best):
    assert list(best) == ["schema", *FIELDS]
    assert best["tflops"] == max(c["tflops"] for c in history if c["correct"])


def test_top_gives_as_many_in_order(evoengine, db):
    found = json.loads(evoengine("best", "--json", "--top", 3, "--db", db).stdout)["trials"]
    assert len(found) == 3
    assert [c["tflops"] for c in found] == sorted((c["tflops"] for c in found), reverse=True)


def test_show_prints_the_same_candidate_and_its_source(evoengine, db, history):
    assert json.loads(evoengine("show", 1, "--json", "--db", db).stdout).items() >= history[0].items()
    assert "__global__" in evoengine("show", 1, "--source", "--db", db).stdout
    page = evoengine("show", 1, "--db", db).stdout
    assert "registers" in page and "late maximum" in page


@pytest.fixture(scope="module")
def exported(evoengine, db, tmp_path_factory):
    """The folder of the best kernel."""
    out = tmp_path_factory.mktemp("exported") / "out"
    done = evoengine("best", "--export", out, "--db", db)
    assert done.returncode == 0, done.stderr
    return out


def test_the_export_stands_alone(exported):
    out = exported
    described = json.loads((out / "kernel.json").read_text())
    loader = f"{described['module']}.py"
    files = {"kernel.cu", "kernel.cubin", "kernel.json", loader, "_cuda.py", "README.md", "record.json", "SHA256SUMS"}
    files |= {"solution.json", "trace.json"}
    assert {p.name for p in out.iterdir()} == files
    assert described["verdict"]["correct"] is True
    assert (described["binary_verdict"]["correct"], described["binary_verdict"]["device"]) == (True, "executor")
    config = described["config"]
    threads = 2 * config["tile_m"] + 128 if config["family"] == "wgmma" else 32 * config["warps"]
    assert described["launch"]["threads"] == threads
    assert described["figure"]["kind"] == "estimated"
    assert (out / "kernel.cubin").read_bytes()[:4] == b"\x7fELF"
    for name in (loader, "_cuda.py"):
        assert "evoengine" not in imported((out / name).read_text())


def test_the_loader_checks_its_tensors_before_it_touches_a_gpu(exported):
    """Without a GPU the loader can still be imported and must refuse what its kernel was not made for."""
    script = (
        f"import torch\nfrom {exported_module(exported)} import attention\n"
        "q = torch.zeros(1, 2, 8, 64, dtype=torch.float16)\nattention(q, q, q)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=exported, capture_output=True, text=True)
    assert "ValueError: head_dim is 64; this kernel was compiled for 32" in done.stderr


def imported(source: str) -> set[str]:
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    return names | {n.module for n in nodes if isinstance(n, ast.ImportFrom)}


def test_a_second_search_of_the_same_space_compiles_nothing(evoengine, db, tmp_path):
    copy = tmp_path / "again.db"
    shutil.copy(db, copy)
    arguments = ("--problem", SMALL, "--trials", 1, "--seed", 3, "--jobs", 1, "--device", "emulator")
    done = evoengine("search", *arguments, "--db", copy, "--json")
    summary = json.loads(done.stdout)
    assert (summary["run"], summary["compiled"]) == (2, 0)
    assert sum(summary["outcomes"].values()) == 1


def test_best_of_an_empty_ledger_says_how_to_fill_it(evoengine, tmp_path):
    done = evoengine("best", "--db", tmp_path / "none.db")
    assert done.returncode == 1
    assert "evoengine search" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def verified(evoengine, best):
    """The best configuration, source and machine code."""
    arguments = ("--config", json.dumps(best["config"]), "--problem", SMALL, "--device", "emulator", "--binary")
    return evoengine("verify", *arguments, "--json")


def test_verify_prints_every_case_and_exits_0_when_correct(verified):
    found = json.loads(verified.stdout)
    assert verified.returncode == 0
    assert found["correct"] is True
    assert {"one key", "constant columns"} <= {c["name"] for c in found["cases"]}


def test_verify_executes_the_machine_code_where_it_is_asked_to(verified):
    found = json.loads(verified.stdout)
    assert found["correct"] is found["binary_correct"] is True
    names, of_text = ([c["name"] for c in found[cases]] for cases in ("binary_cases", "cases"))
    assert of_text and of_text == names[: len(of_text)]  # blocks of the problem itself are run as machine code alone


def test_what_executing_it_refutes_is_not_exported(evoengine, db, best, tmp_path):
    """The ledger's binary is replaced by that of another kernel, as a compiler's fault would have it."""
    copy, out = tmp_path / "evo.db", tmp_path / "out"
    shutil.copy(db, copy)
    wrong = compile_source(Source(NOTHING, "attention", Launch((1, 1, 1), 32, 0)), "sm_90a")
    with sqlite3.connect(copy) as tables:
        sha256 = hashlib.sha256(wrong.cubin).hexdigest()
        tables.execute("UPDATE binaries SET cubin_sha256 = ?", (sha256,))
        tables.execute("INSERT INTO machine_code VALUES (?, ?)", (sha256, zlib.compress(wrong.cubin)))
    vouch_for_all(str(copy))
    done = evoengine("best", "--export", out, "--db", copy)
    assert done.returncode == 1
    assert f"trial {best['trial']} is not exported: its machine code is crashed" in done.stderr
    assert not out.exists()
    shown = json.loads(evoengine("show", best["trial"], "--json", "--db", copy).stdout)
    assert (shown["outcome"], shown["binary_correct"], shown["device"]) == ("crashed", False, "executor")


def test_verify_exits_1_on_a_broken_template_of_ones_own(evoengine, best, tmp_path):
    templates = tmp_path / "templates"
    shutil.copytree(asset("templates"), templates)
    for file in (templates / "attention").glob("*.j2"):
        file.write_text(file.read_text().replace("scale * LOG2_E", "scale"))
    arguments = ("--config", json.dumps(best["config"]), "--problem", SMALL, "--device", "emulator")
    done = evoengine("verify", *arguments, "--templates", templates, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert (found["correct"], found["outcome"]) == (False, "incorrect")


@pytest.mark.exhaustive
@pytest.mark.gpu
def test_a_search_on_a_gpu_measures(evoengine, tmp_path):
    from evoengine.devices.driver import find_driver
    from evoengine.gpu import known_gpus

    _, [device, *_] = find_driver()
    gpu = next(k for k, g in known_gpus().items() if g.arch.startswith(f"sm_{device.capability}"))
    problem = SMALL if on_stand_in() else "b2,h8,s512,d64,fp16"
    arguments = ("--gpu", gpu, "--problem", problem, "--trials", 6, "--db", tmp_path / "gpu.db")
    done = evoengine("search", *arguments, "--device", "cuda", "--json")
    best = json.loads(done.stdout)["best"][0]
    assert best["tflops_kind"] == "measured"
    assert best["samples"] >= 10 and best["vs_sdpa"] > 0
    if on_stand_in():  # whose torch has no tensors on a GPU to call the export with
        assert best["device"] == device.name
        return
    evoengine("best", "--export", tmp_path / "out", "--db", tmp_path / "gpu.db")
    script = (
        f"import torch\nfrom {exported_module(tmp_path / 'out')} import attention\n"
        "q, k, v = (torch.randn(2, 8, 300, 64, device='cuda', dtype=torch.float16) for _ in range(3))\n"
        "torch.testing.assert_close(attention(q, k, v),"
        " torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=2e-3, rtol=0)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path / "out", capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
