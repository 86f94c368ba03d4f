"""Rates of chips, each with its source; a chip file at fault says what is wrong with it and what would be right."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from evoengine.errors import UsageError
from evoengine.gpu import find_gpu, known_gpus
from evoengine.sass.chip import FILE, NEEDED, STATUSES, Clock, find_chip, why_unmodelled
from evoengine.sass.model import rate_names, rates

WHOLE = FILE.read_text()


@pytest.fixture
def edited(tmp_path):
    """chips.toml with one text replaced by another."""

    def write(old: str, new: str):
        assert old in WHOLE
        path = tmp_path / "chips.toml"
        path.write_text(WHOLE.replace(old, new))
        return path

    return write


def line(name: str, section: str) -> str:
    part = WHOLE[WHOLE.index(f"[{section}]\n") :]
    return next(text for text in part.splitlines() if text.startswith(f"{name} = "))


MODELLED = [gpu.key for gpu in known_gpus().values() if gpu.capability <= 90]


@pytest.mark.parametrize("key", MODELLED)
def test_every_gpu_of_a_modelled_architecture_has_every_rate_of_its_parts_with_a_source(key):
    chip = find_chip(key)
    for name, origin in NEEDED.items():
        if chip.gpu.capability < origin.since:
            assert chip.rates[name] == 0
        else:
            assert chip.rates[name] > 0
            assert any(f", {status}: " in chip.provenance(name) for status in STATUSES)


# gpus.toml has the clock of the tensor peak for H100 and H200, above which their FP32 peak is stated; the PCIe card's
# tensor peak is stated below its boost clock
SXM, PCIE = ("h100", "h200"), ("h100-pcie",)


@pytest.mark.parametrize("key", [key for key in MODELLED if key not in PCIE])
def test_tensor_clocks_give_the_peak_of_the_data_sheet(key):
    chip = find_chip(key)
    gpu = chip.gpu
    if gpu.capability == 90:  # m64nNk16: 2·64·N·16 operations in N/2 clocks of all four tensor cores
        per_clock = 2 * 64 * 16 / chip.rates["hgmma_clocks_per_column"]
    else:
        per_clock = 4 * 2 * 16 * 8 * 16 / chip.rates["hmma_interval"]
    assert per_clock * gpu.sms * gpu.clock_ghz / 1e3 == pytest.approx(gpu.tensor_tflops, rel=0.01)


@pytest.mark.parametrize("key", [key for key in MODELLED if key not in SXM])
def test_fma_clocks_give_the_peak_of_the_data_sheet(key):
    chip = find_chip(key)
    gpu = chip.gpu
    peak = 2 * 128 / chip.rates["fma_interval"] * gpu.sms * gpu.clock_ghz / 1e3
    assert peak == pytest.approx(gpu.fp32_tflops, rel=0.01)


def test_a_rate_of_the_gpu_goes_before_that_of_its_architecture_and_that_before_the_rest():
    assert find_chip("a100").rates["l2_bytes_per_clock"] == 30.5
    assert find_chip("rtx2080ti").rates["l2_bytes_per_clock"] == 32
    assert find_chip("rtx3090").rates["l2_bytes_per_clock"] == 17.1
    assert find_chip("h100").rates["l2_bytes_per_clock"] == 38.8
    of_h100 = find_chip("h100").provenance("l2_bytes_per_clock")
    assert of_h100.startswith("38.8 bytes/clock, SM, published: github.com/FlashGPU-Sim")
    assert find_chip("rtx3090").provenance("sms").startswith("82, published: NVIDIA's data sheet")


def test_a_missing_rate_is_named_with_its_gpu_and_where_it_would_come_from(edited):
    file = edited(line("l2_latency", "all"), "")
    with pytest.raises(UsageError, match=r"no l2_latency for a4000: add it to \[all\], .* from a pointer chase"):
        find_chip("a4000", file)


def test_a_missing_rate_of_hopper_alone_is_no_fault_of_another_chip(edited):
    file = edited(line("tma_latency", "arch.sm_90"), "")
    assert find_chip("a100", file).rates["tma_latency"] == 0
    with pytest.raises(UsageError, match="no tma_latency for h200.* a TMA load"):
        find_chip("h200", file)


@pytest.mark.parametrize("key", sorted(known_gpus().keys() - set(MODELLED)))
def test_a_gpu_of_another_architecture_is_said_to_have_no_model(key):
    assert re.fullmatch(
        rf"the model of machine code knows sm_75, sm_80, .*sm_90, and {key} is sm_1[02]0", why_unmodelled(find_gpu(key))
    )


def test_a_gpu_of_a_file_is_said_to_have_no_model_and_one_of_ours_is_not():
    assert "the rates of mine's parts are not known" in why_unmodelled(replace(find_gpu("a10"), key="mine"))
    assert why_unmodelled(find_gpu("a10")) is None


def test_an_architecture_without_an_entry_is_named(edited):
    with pytest.raises(UsageError, match=r"no \[arch.sm_89\], which l4 needs.*sm_75, sm_80"):
        find_chip("l4", edited("[arch.sm_89]", "[arch.sm_88]"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"inferred", "residuals"', '"guessed", "residuals"', "status 'guessed'; it is one of published"),
        ('"inferred", "residuals"', '"inferred", "rumour"', "source 'rumour', which"),
        ("l1_latency = [33", "l1_latency = [-33", "-33; it must be a number above 0"),
        ("l1_latency = [33", "l1_latency = [nan", "nan; it must be a number above 0"),
        ("l1_latency = [33", 'l1_latency = ["33"', "'33'; it must be a number"),
        ("l1_latency = [33,", "l1_latency = [", r'must be \[value, "unit", "status", "source"\]'),
        ("l1_latency = [33", "l1_latncy = [33", "l1_latncy in .all. is no rate .* did you mean l1_latency"),
        ("l1_latency = [33", "l1_latency = [true", "True; it must be a number above 0"),
        ("[sources]", "[origins]", r"no \[sources\]"),
        ("[sources]", "[sources", "not a TOML file"),
    ],
)
def test_a_malformed_chip_file_says_what_is_wrong(edited, old, new, said):
    with pytest.raises(UsageError, match=said):
        find_chip("rtx3090", edited(old, new))


def test_a_locked_clock_is_what_it_says_and_a_boosted_one_what_the_board_reaches():
    assert find_chip("h100").ghz(Clock.parse("locked:1500"), 0.9) == 1.5
    assert find_chip("rtx3090").ghz(Clock("boost"), 0.9) == find_gpu("rtx3090").clock_ghz


@pytest.mark.parametrize(
    ("use", "ghz"), [(0.0, 1.98), (0.74, 1.60), (0.90, 1.55), (0.93, 1.65)],
    ids=["idle", "CUTLASS", "cuBLAS fp16", "cuBLAS TF32"],
)  # fmt: skip
def test_the_sustained_clock_falls_with_the_use_of_tensor_cores_as_clock_logs_of_an_h100_have_it(use, ghz):
    assert find_chip("h100").ghz(Clock("sustained"), use) == pytest.approx(ghz, rel=0.06)


@pytest.mark.parametrize(("use", "ghz"), [(0.0, 1.98), (0.589, 1.756), (0.621, 1.763), (0.769, 1.727), (0.999, 1.70)])
def test_the_boost_clock_falls_with_the_use_of_tensor_cores_as_measured_before_power_was_short(use, ghz):
    """Of products on drawn data; Nsight Compute counted 1.83 GHz at a use of 0.15 and 1.63 at 0.9 in kernels."""
    assert find_chip("h100").ghz(Clock("boost"), use) == pytest.approx(ghz, rel=0.02)


@pytest.mark.parametrize(
    ("key", "of", "gbs"),
    [("a40", "a40", 2437), ("l40s", "l40s", 5715), ("rtx4070ti", "l40s", 5715), ("a4000", "a40", 2437)],
)
def test_an_l2_of_ga10x_and_ad10x_gives_as_much_for_each_megabyte_as_that_which_was_measured(key, of, gbs):
    """gpu-benches: an A40 reads 2437 GB/s at 1735 MHz, an L40, whose chip is the L40S's, 5715 GB/s at 2490 MHz."""
    chip, measured = find_chip(key), find_chip(of)
    per_clock = gbs / {"a40": 1.735, "l40s": 2.49}[of] / measured.rates["l2_mb"] * chip.rates["l2_mb"]
    assert chip.rates["l2_bytes_per_clock"] * chip.sms == pytest.approx(per_clock, rel=0.01)


def test_an_l2_with_a_clock_of_its_own_gives_more_to_a_clock_of_slower_sms():
    h100, rtx3090 = find_chip("h100"), find_chip("rtx3090")
    boost, slow = rates(h100, 0, 1.98), rates(h100, 0, 1.5)
    assert boost["l2_store_clocks"] == h100.rates["l2_store_clocks"]
    assert slow["l2_bytes_per_clock"] == pytest.approx(1.32 * boost["l2_bytes_per_clock"])
    assert slow["l2_latency"] == pytest.approx(boost["l2_latency"] / 1.32)
    assert rates(rtx3090, 0, 1.0)["l2_bytes_per_clock"] == rates(rtx3090, 0, 1.695)["l2_bytes_per_clock"]


@pytest.mark.parametrize(("use", "ghz"), [(0.75, 1.649), (1.0, 1.5)])
def test_the_sustained_clock_is_within_two_percent_of_what_was_measured(use, ghz):
    assert find_chip("h100").ghz(Clock("sustained"), use) == pytest.approx(ghz, rel=0.02)


def test_a_board_whose_clock_under_load_is_not_known_keeps_its_boost_clock():
    assert find_chip("rtx3090").ghz(Clock("sustained"), 0.9) == find_gpu("rtx3090").clock_ghz


def test_a_clock_is_written_as_it_is_read():
    assert [str(Clock.parse(text)) for text in ("boost", "sustained", "locked:1110")] == [
        "boost", "sustained", "locked:1110",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "Boost", "locked", "locked:", "locked:99", "locked:5001", "locked:1.5", "1500"])
def test_what_is_no_clock_is_refused_with_what_would_be(text):
    with pytest.raises(UsageError, match="boost, sustained, or locked:MHZ from 100 to 5000"):
        Clock.parse(text)


def test_the_share_of_an_sm_in_the_dram_follows_from_the_data_sheet_and_the_clock():
    # 0.98 of 936 GB/s over 82 SMs
    rtx3090 = find_chip("rtx3090")
    assert rates(rtx3090, 0, 1.695)["dram_bytes_per_clock"] == pytest.approx(0.98 * 936 / 82 / 1.695)
    assert rates(rtx3090, 0, 1.0)["dram_bytes_per_clock"] == pytest.approx(0.98 * 936 / 82)


def test_the_core_is_given_every_rate_it_asks_for():
    assert set(rate_names()) <= rates(find_chip("h100"), 0, 1.5).keys()
    assert set(rates(find_chip("h100"), 0, 1.5)) - set(rate_names()) <= NEEDED.keys()


def test_the_l1_is_what_shared_memory_leaves_of_it_in_sizes_that_a_driver_sets():
    h100 = find_chip("h100")
    assert rates(h100, 0, 1.5)["l1_bytes"] == 256 << 10
    assert rates(h100, 60_000, 1.5)["l1_bytes"] == (256 - 64) << 10
    assert rates(h100, 66_000, 1.5)["l1_bytes"] == (256 - 100) << 10


def test_a_chip_file_that_is_not_there_and_an_unknown_rate_are_named(tmp_path):
    with pytest.raises(UsageError, match="cannot read .*nowhere.toml"):
        find_chip("h100", tmp_path / "nowhere.toml")
    with pytest.raises(UsageError, match="no rate named l3_latency; known are"):
        find_chip("h100").provenance("l3_latency")
