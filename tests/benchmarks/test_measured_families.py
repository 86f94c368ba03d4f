"""The second data set of timed kernels: what its launches are given, and which configurations a search hands out."""

from __future__ import annotations

import base64
import json
import zlib

import numpy as np
import pytest

from benchmarks import measured_families, measured_report
from benchmarks.measured_bench import SAMPLE_BYTES, SAMPLES
from benchmarks.measured_families import Search
from benchmarks.measured_kernels import Made, attempt, keep, make_folder, own, predict_again, row_of, space_of
from evoengine.records import Launch, Source
from evoengine.sass.core import Program
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import DrawnArgument, Geometry, prepare
from evoengine.stages.compile import compile_source
from tests.support.machine_code import require_tools

DECODE = "decode:b2,h4,kv2,s200,d64,bf16,page16"
NORM = "rms_norm:rows64,hidden512,bf16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("families")
    make_folder(found)
    return found


@pytest.fixture(scope="module")
def row(folder):
    """Of a kernel of two, with pages, lengths and partial results."""
    require_tools()
    _, space = space_of(DECODE)
    config = next(c for c in space.starts if c["family"] == "two_kernels" and c["splits"] == 2)
    found = own(DECODE, config, folder, ("cold",))
    assert isinstance(found, dict), found
    return found


def test_indices_are_in_the_row_and_partial_results_are_no_outputs(row):
    roles = {name: role for name, (_, _, role) in row["buffers"].items()}
    lengths, pages = (
        np.frombuffer(zlib.decompress(base64.b64decode(roles[n])), np.int32) for n in ("lengths", "block_table")
    )
    assert lengths.tolist() == [200, 200]
    assert sorted(pages) == list(range(26))
    assert {name for name, role in roles.items() if role == "scratch"} == {"partial", "states"}
    assert {name for name, role in roles.items() if role == "out"} == {"o"}
    assert [kernel["entry"] for kernel in row["kernels"]] == ["decode", "combine"]
    assert row["kernels"][1]["parameters"][:3] == ["partial", "states", "o"]


def test_a_row_is_predicted_again_as_before_from_what_it_holds(row, folder):
    again = predict_again(row, folder)
    assert again["predicted"] == row["predicted"]
    assert again["predicted"].keys() == {"cold"}


def test_a_row_that_was_not_predicted_is_predicted_later(row, folder):
    later = predict_again({**row, "predicted": {}}, folder)
    assert later["predicted"] == row["predicted"]


def test_memory_that_only_tensor_maps_point_to_is_no_parameter_of_a_row(folder):
    require_tools()
    text = 'extern "C" __global__ void fill(float* o) { o[threadIdx.x] = 1; }'
    binary = compile_source(Source(text, "fill", Launch((1, 1, 1), 32, 0)), "sm_90a")
    output, mapped, one_block = DrawnArgument("o", 128, "fp32", True), DrawnArgument("a", 128, "fp32"), (1, 1, 1)
    geometry = Geometry(one_block, (32, 1, 1), 0)
    launch = prepare(read_kernel(binary.cubin, "fill"), geometry, [output], 0, mapped=[mapped])
    made = Made("fill", Program(binary.listing, "fill"), launch, geometry)
    row = row_of(("mapped", "one block", "fill"), binary.cubin, [made], 0.0, 0.0)
    keep(folder, row, binary.cubin, None, "")
    assert row["kernels"][0]["parameters"] == ["o"]
    assert predict_again(row, folder)["predicted"] == row["predicted"]


def test_references_are_sampled_where_outputs_are(row):
    torch = pytest.importorskip("torch")
    from benchmarks.measured_torch import _expected_of, _inputs, sampled
    from evoengine.workloads import parse_problem

    workload, problem = parse_problem(row["problem"])
    inputs = _inputs(row, workload.parameters(problem, row["config"]), "cpu")
    assert inputs["lengths"].tolist() == [200, 200]
    assert inputs["k"].shape == (26, 16, 2, 64)
    how, samples = _expected_of(row, "cpu")
    assert how == "reference"
    size = row["buffers"]["o"][0]
    at = np.random.default_rng(size).integers(0, size // SAMPLE_BYTES, SAMPLES) * SAMPLE_BYTES // 2
    assert sampled(row["buffers"]["o"], torch.arange(size // 2)) == at.tolist()
    assert np.isfinite(samples["o"]).all()


def test_outputs_beside_references():
    rows = [{"id": n, "set": "s", "problem": "p", "kernel": n} for n in ("right", "wrong", "nan")]
    values = {"right": [1.001, -1.0], "wrong": [1.0, 1.0], "nan": [1.0, float("nan")]}
    results = {"rows": [{"id": n, "samples": {"c": v}} for n, v in values.items()]}
    lines = list(measured_report.beside_references(results, rows, [{"problem": "p", "samples": {"c": [1.0, -1.0]}}]))
    assert lines[-3] == "1 of 3 kernels agree in all samples of their outputs."
    assert [line.partition(":")[0] for line in lines[-2:]] == ["- p, s, wrong, c", "- p, s, nan, c"]


# ── searches ────────────────────────────────────────────────────────────────────────────────────────────────────────


def said(config, us):
    return {"config": config, "predicted": {"cold": {"us": us}}}


def test_a_search_goes_on_from_the_neighbours_of_the_predicted_fastest():
    search = Search(NORM)
    first = search.wanted()
    for n, config in enumerate(first):
        search.note(config, said(config, 100.0 + n) if n else "does not compile")
    near = search.wanted()
    _, space = space_of(NORM)
    parents = [n for config in first[1 : 1 + measured_families.PARENTS] for n in space.neighbours(config)]
    assert 0 < len(near) <= measured_families.CHILDREN
    assert all(config in parents and config not in first for config in near)


def test_a_search_hands_out_the_predicted_first_and_some_of_the_others():
    search = Search(NORM)
    for n, config in enumerate(search.wanted()):
        search.note(config, said(config, 200.0 - n))
    rows = list(search.chosen())
    origins = [row["origin"] for row in rows]
    assert origins == ["search first"] * measured_families.FIRST_ROWS + ["search other"] * measured_families.OTHER_ROWS
    assert [row["place"] for row in rows[:3]] == [0, 1, 2]
    assert min(row["place"] for row in rows[measured_families.FIRST_ROWS :]) >= measured_families.FIRST_ROWS
    assert rows[0]["predicted"]["cold"]["us"] == min(row["predicted"]["cold"]["us"] for row in search.ranked)


def test_configurations_that_a_folder_has_are_not_made_again(monkeypatch):
    monkeypatch.setattr(measured_families, "FAMILIES", ((NORM, {"warp": 2, "block": 2}),))
    groups = {name: tasks for name, _, tasks in measured_families.groups(measured_families.FAMILIES, [], ())}
    one = groups[f"{NORM} warp"][0].args[2]
    known = [{"problem": NORM, "config": json.loads(json.dumps(one))}]
    left = {name: tasks for name, _, tasks in measured_families.groups(measured_families.FAMILIES, known, ())}
    assert len(left[f"{NORM} warp"]) == len(groups[f"{NORM} warp"]) - 1
    assert len(left[f"{NORM} block"]) == len(groups[f"{NORM} block"])


def test_a_kernel_that_cannot_be_made_is_named_with_the_reason(folder):
    name, found = attempt("group", lambda of: own("rms_norm:rows1,hidden3,bf16,", {}, of), folder)
    assert name == "group"
    assert "UsageError" in found


def test_a_space_is_drawn_further_where_some_of_it_is_known(monkeypatch):
    monkeypatch.setattr(measured_families, "SPACES", ((NORM, 5),))
    ((name, count, tasks),) = measured_families.space_groups([], ())
    assert (name, count) == (f"space {NORM}", 5)
    known = [{"problem": NORM, "config": task.args[2]} for task in tasks[:2]]
    ((_, left, further),) = measured_families.space_groups(known, ())
    assert left == 3
    assert further[0].args[2] == tasks[2].args[2]
