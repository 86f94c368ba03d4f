"""Estimates are predicted from the machine code; what cannot be read falls back to the formula, with the reason."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from evoengine.errors import MachineError
from evoengine.paths import asset
from evoengine.records import Candidate, CompiledCandidate, Kind
from evoengine.sass import chip
from evoengine.sass.chip import Clock
from evoengine.sass.predict import MODEL_VERSION, Unpredictable, error_of
from evoengine.stages import predict
from evoengine.stages.compile import compile_source
from evoengine.stages.predict import predict_binary, predict_figure
from evoengine.stages.render import render
from evoengine.stages.tasks import predict_task
from evoengine.stages.verify import make_arguments
from evoengine.views.trials import trial_json
from evoengine.workloads.attention.problem import parse_problem
from evoengine.workloads.base import Case, Target
from tests.stages.predictions import ATTENTION, COST, H100, L4, PROBLEM, figure, made
from tests.support.kernel_gate import attention_space, attention_target


@pytest.mark.parametrize(("family", "gpu"), [("mma", L4), ("wgmma", H100)])
def test_a_figure_is_predicted_from_the_machine_code_and_says_so(family, gpu):
    found, unread = figure(made(family, gpu), gpu)
    assert unread is None
    assert (found.kind, found.device, found.by_formula) == (
        Kind.ESTIMATED,
        f"model {MODEL_VERSION} for {gpu.key}, boost clock",
        False,
    )
    terms = found.terms
    assert 0 < terms["roofline_us"] <= terms["low_us"] <= found.median_us <= terms["high_us"]
    assert found.tflops == pytest.approx(ATTENTION.flops(PROBLEM) / found.median_us / 1e6)
    assert terms["blocks_per_sm"] >= 1 and terms["waves"] > 0 and terms["clocks"] > 0
    assert all(isinstance(value, float) for value in terms.values())


def test_the_json_has_range_bound_and_utilisation():
    found, _ = figure(made("mma", L4), L4)
    public = trial_json(Candidate(1, 1, str(PROBLEM), "l4", {}, measurement=found))
    assert public["range_us"] == [found.terms["low_us"], found.terms["high_us"]]
    assert public["model"] == "machine code"
    assert {"tensor", "mufu", "fma", "alu", "issue", "shared", "l2", "dram"} <= public["utilisation"].keys()
    assert all(0 <= share <= 1 for share in public["utilisation"].values())
    assert public["utilisation"]["tensor"] > 0
    assert public["bound"] in {*public["utilisation"], "latency"}
    assert public["tflops_kind"] == "estimated"


def test_a_figure_names_the_version_of_the_model_the_clock_and_the_class_of_the_kernel():
    found = figure(made("wgmma")).figure
    public = trial_json(Candidate(1, 1, str(PROBLEM), "h100", {}, measurement=found))
    assert (public["model_version"], public["clock"]) == (MODEL_VERSION, "boost")
    assert public["kernel_class"] == "wgmma with softmax"
    assert found.terms["clocks"] / found.terms["clock_ghz"] / 1e3 <= found.median_us
    factor = error_of("wgmma with softmax").factor
    assert found.terms["high_us"] == pytest.approx(found.median_us * factor)
    assert not {"A_us", "B_us"} & found.terms.keys()


def test_the_same_clocks_take_longer_at_a_lower_clock_and_figures_of_unlike_clocks_name_unlike_devices():
    fast, slow = (
        predict_figure(Target(ATTENTION, PROBLEM, H100, Clock.parse(clock)), made("wgmma"), {}).figure
        for clock in ("boost", "locked:990")
    )
    assert slow.device == f"model {MODEL_VERSION} for h100, locked:990 clock" != fast.device
    assert slow.terms["clock_ghz"] == 0.99 and 1.69 < fast.terms["clock_ghz"] < 1.83  # less than where none multiply
    assert fast.median_us < slow.median_us < 2 * fast.median_us


def test_twice_the_batch_takes_about_twice_as_long():
    one, two = (parse_problem(f"b{batch},h16,s512,d32,fp16") for batch in (8, 16))
    contender = made("mma", L4)  # whose lengths are arguments
    of = [figure(with_grid(contender, batch), L4, p).figure.median_us for p, batch in ((one, 8), (two, 16))]
    assert of[1] / of[0] == pytest.approx(2, rel=0.1)


def with_grid(contender: CompiledCandidate, batch: int) -> CompiledCandidate:
    launch = contender.source.launch
    blocks = -(-512 // int(contender.config["tile_m"]))
    return replace(contender, source=replace(contender.source, launch=replace(launch, grid=(blocks, 16, batch))))


def test_a_binary_from_the_ledger_without_its_listing_has_the_same_figure():
    contender = made("mma", L4)
    assert contender.binary.listing
    bare = replace(contender, binary=replace(contender.binary, listing=""))
    assert figure(bare, L4) == figure(contender, L4)


def test_the_models_tensors_are_as_large_as_those_of_a_real_launch():
    config = made("wgmma").config
    small = parse_problem("b2,h4,kv2,sq40,sk72,d32,bf16")
    described = ATTENTION.parameters(small, config)
    real = make_arguments(described, ATTENTION.tensors().draw(Case("any", small), 1).inputs)
    assert [a.name for a in described] == [a.name for a in real]
    assert [(a.bytes, a.output) for a in described[:4]] == [(a.data.nbytes, a.output) for a in real[:4]]
    assert described[4:] == real[4:]


# ── never above the roofline ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["mma", "wgmma"])
def test_a_slow_memory_takes_at_least_the_time_of_the_tensors(family, monkeypatch):
    gpu = replace(H100, memory_gbs=1e-3)
    monkeypatch.setattr(predict, "find_chip", lambda key: replace(chip.find_chip(key), gpu=gpu))
    roofline_us = ATTENTION.min_dram_bytes(PROBLEM) / gpu.memory_gbs / 1e3
    found, _ = figure(made(family), gpu)
    assert found.terms["low_us"] >= roofline_us and found.median_us < 3 * roofline_us
    assert found.terms["bound_dram"]


@pytest.mark.parametrize("family", ["mma", "wgmma"])
def test_no_prediction_is_above_the_roofline_of_the_data_sheet(family, monkeypatch):
    gpu = replace(H100, tensor_tflops=1e-3)
    monkeypatch.setattr(predict, "find_chip", lambda key: replace(chip.find_chip(key), gpu=gpu))
    flops, min_dram_bytes = ATTENTION.flops(PROBLEM), ATTENTION.min_dram_bytes(PROBLEM)
    roofline_us = max(flops / gpu.tensor_tflops / 1e6, min_dram_bytes / gpu.memory_gbs / 1e3)
    found, _ = figure(made(family), gpu)
    assert found.median_us == pytest.approx(roofline_us)
    assert found.tflops == pytest.approx(flops / roofline_us / 1e6)
    times = {value for name, value in found.terms.items() if name.endswith("_us") and name != "high_us"}
    assert times == {found.median_us}
    assert found.terms["high_us"] >= found.median_us


def test_what_is_slower_than_the_roofline_stays_as_predicted(monkeypatch):
    monkeypatch.setattr(predict, "find_chip", lambda key: replace(chip.find_chip(key), gpu=fast))
    fast = replace(H100, tensor_tflops=1e9)
    with_roofline, without = (predict_binary(Target(ATTENTION, PROBLEM, gpu), made("mma")) for gpu in (fast, H100))
    assert with_roofline.time_us == without.time_us > with_roofline.roofline_us


# ── what cannot be read ─────────────────────────────────────────────────────────────────────────────────────────────


def by_formula(found, *said: str) -> None:
    figure, unread = found
    assert figure.by_formula and figure.device == "estimate for h100" and figure.terms["predicted"] == 0.0
    for text in said:
        assert text in unread
    public = trial_json(Candidate(1, 1, str(PROBLEM), "h100", {}, measurement=figure))
    assert (public["model"], public["range_us"], public["bound"], public["utilisation"]) == (
        "formula",
        None,
        None,
        None,
    )


def test_an_unknown_opcode_is_named_and_the_formula_gives_the_figure():
    contender = made("mma")
    strange = contender.binary.listing.replace("FMNMX ", "XYZZY ")
    assert "XYZZY" in strange
    by_formula(figure(replace(contender, binary=replace(contender.binary, listing=strange))), "XYZZY")


def test_without_a_disassembler_it_is_the_formulas_figure_and_the_tool_is_named(monkeypatch):
    monkeypatch.setattr(predict, "disassembler", lambda: None)
    by_formula(figure(made("mma")), "nvdisasm", "evoengine doctor")


def test_without_a_cpp_compiler_it_is_the_formulas_figure_and_the_remedy_is_told(monkeypatch):
    def missing():
        raise MachineError("no C++ compiler found: install one, e.g. apt install g++")

    monkeypatch.setattr(predict, "build", missing)
    by_formula(figure(made("mma")), "no C++ compiler found", "apt install g++")


def test_a_chip_file_without_a_rate_is_the_formulas_figure_and_the_rate_is_named(monkeypatch, tmp_path):
    text = chip.FILE.read_text()
    bad = tmp_path / "chips.toml"
    bad.write_text("".join(line for line in text.splitlines(True) if not line.startswith("mufu_latency")))
    monkeypatch.setattr(predict, "find_chip", partial(chip.find_chip, file=bad))
    by_formula(figure(made("mma")), "chips.toml has no mufu_latency for h100", "it would come from")


def test_a_binary_whose_launch_is_another_kernels_is_not_predicted():
    contender = made("wgmma")
    other = {k: v for k, v in contender.config.items() if k != "load"}
    with pytest.raises(Unpredictable, match="parameters"):
        predict_binary(Target(ATTENTION, PROBLEM, H100), replace(contender, config=other))
    renamed = replace(contender, source=replace(contender.source, entry="another"))
    with pytest.raises(Unpredictable, match="another"):
        predict_binary(Target(ATTENTION, PROBLEM, H100), renamed)


def test_what_neither_the_model_nor_the_formula_can_tell_has_no_figure_but_a_reason():
    contender = made("mma")
    unreadable = replace(contender, binary=replace(contender.binary, cubin=b"", listing=""))
    found, unread = figure(unreadable, cost={})
    assert found is None and "the model cannot read the binary" in unread


def test_a_family_without_a_cost_is_predicted_all_the_same():
    assert figure(made("mma"), cost={}).figure.device == f"model {MODEL_VERSION} for h100, boost clock"


def test_where_the_models_process_failed_the_formula_gives_the_figure():
    by_formula(
        predict_task(Target(ATTENTION, PROBLEM, H100), made("mma"), COST, "the process died"), "the process died"
    )


def test_estimates_by_formula_rank_behind_predictions_whatever_they_say():
    slow = figure(made("mma")).figure
    by_formula = figure(replace(made("mma"), binary=replace(made("mma").binary, cubin=b"", listing=""))).figure
    fast = replace(by_formula, median_us=slow.median_us / 100, tflops=slow.tflops * 100)
    assert min([fast, slow], key=lambda m: m.rank_key) is slow


def test_blocks_in_the_order_of_their_length_are_counted_along_the_grid():
    """Their length falls along y, of eight heads at a time: those in the middle are the shortest of their group."""
    problem = "b2,h16,s8192,d128,fp16,causal"
    target, space = attention_target(problem), attention_space(problem, families=("wgmma",))
    start = next(c for c in space.starts if c["schedule"] == "none" and c["tile_m"] == 128)
    time_us = {}
    for schedule in ("none", "longest_first"):
        config = {**start, "schedule": schedule}
        source = render(target, space, config, asset("templates"))
        contender = CompiledCandidate(0, source, compile_source(source, target.gpu.arch), config)
        time_us[schedule] = predict_binary(target, contender).time_us
    assert 0.8 < time_us["longest_first"] / time_us["none"] < 1.1
