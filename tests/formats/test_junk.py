"""Descriptions in which anything is replaced by anything: each is taken, or refused in one sentence."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evoengine.errors import UsageError
from evoengine.formats.importers import make_folder
from evoengine.workloads.folder import FolderWorkload
from tests.formats.test_flashinfer_trace import DECODE, GEMM, RMS_NORM
from tests.formats.test_tuned_kernels import ADD, T1
from tests.support.folders import SAXPY, SAXPY_SPACE
from tests.support.mutations import places, replaced

JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 3, 2**70, 10**400, 1.5, 1e308, "", "x", "n", "1+", "n//0", "n" * 5000, "a b", "../x", "é",
    "lambda: 1", [], [1], ["n"], [[]], [None], {}, {"a": 1}, {"type": "const"}, {"type": "var"}, "float16", "int32",
    {"type": "scalar", "value": None}, {"shape": ["n"], "dtype": "float32"},
)  # fmt: skip
FULL = SAXPY | {
    "space": SAXPY_SPACE,
    "cases": [{"name": "a", "axes": {"n": 3}, "draw": "zeros"}],
    "tolerance": {"rtol": 0.1, "atol": 1, "required_matched_ratio": 0.9},
    "flops": "2 * n",
    "bytes": "n",
    "constants": {"c_x": "x"},
    "compile_time": [],
    "constraints": ["n % 1 == 0"],
    "parameters": ["x", "y", "a", "out", "n"],
    "entry": "saxpy",
}


def use(folder: Path, problem: Any) -> None:
    found = FolderWorkload("saxpy", json.dumps(problem))
    example = found.parse(found.example)
    found.flops(example), found.min_dram_bytes(example)
    for case in found.cases(example, {"block_size_x": 64, "per_thread": 2}):
        found.parameters(case.problem, {})


def import_definition(folder: Path, definition: Any) -> None:
    (folder / "definition.json").write_text(json.dumps(definition))
    make_folder("own", f"trace:{folder / 'definition.json'}")


def import_t1(folder: Path, description: Any) -> None:
    (folder / "add.cu").write_text(ADD)
    (folder / "add.json").write_text(json.dumps(description))
    make_folder("add", f"t1:{folder / 'add.json'}")


@pytest.mark.parametrize(
    "given, read",
    [
        (FULL, use),
        (GEMM, import_definition),
        (RMS_NORM, import_definition),
        (DECODE, import_definition),
        (T1, import_t1),
    ],
    ids=["problem.json", "gemm", "rmsnorm", "decode", "t1"],
)
def test_junk_anywhere_is_refused_in_one_sentence(tmp_path, given: Any, read: Callable[[Path, Any], None]):
    rng = random.Random(1)
    all_places = list(places(given))
    refused = 0
    for _ in range(200):
        at, junk = rng.choice(all_places), rng.choice(JUNK)
        try:
            read(tmp_path, replaced(given, at, junk))
        except UsageError as error:
            refused += 1
            assert "\n" not in str(error), (at, junk)
    assert 50 < refused < 200
