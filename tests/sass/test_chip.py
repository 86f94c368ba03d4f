"""Rates of chips, each with its source; a chip file at fault says what is wrong with it and what would be right."""

from __future__ import annotations

import pytest

from evoengine.errors import UsageError
from evoengine.gpu import known_gpus
from evoengine.sass.chip import FILE, RATES, STATUSES, find_chip

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


@pytest.mark.parametrize("key", known_gpus())
def test_every_gpu_has_every_rate_of_its_parts_with_a_source(key):
    chip = find_chip(key)
    for name, of in RATES.items():
        if chip.gpu.capability < of["since"]:
            assert getattr(chip, name) == 0
        else:
            assert getattr(chip, name)
            assert any(f", {status}: " in chip.provenance(name) for status in STATUSES)


# gpus.toml has the clock of the tensor peak for H100 and H200, above which their FP32 peak is stated; the PCIe card's
# tensor peak is stated below its boost clock
SXM, PCIE = ("h100", "h200"), ("h100-pcie",)


@pytest.mark.parametrize("key", [key for key in known_gpus() if key not in PCIE])
def test_tensor_clocks_give_the_peak_of_the_data_sheet(key):
    chip = find_chip(key)
    gpu = chip.gpu
    if gpu.capability == 90:  # m64nNk16: 2·64·N·16 operations in N/2 clocks of all four tensor cores
        per_clock = 2 * 64 * 16 / chip.hgmma_clocks_per_column
    else:
        per_clock = 4 * 2 * 16 * 8 * 16 / chip.hmma_f32_clocks
    assert per_clock * gpu.sms * gpu.clock_ghz / 1e3 == pytest.approx(gpu.tensor_tflops, rel=0.01)


@pytest.mark.parametrize("key", [key for key in known_gpus() if key not in SXM])
def test_fma_clocks_give_the_peak_of_the_data_sheet(key):
    chip = find_chip(key)
    gpu = chip.gpu
    peak = 2 * 128 * chip.fma_per_clock * gpu.sms * gpu.clock_ghz / 1e3
    assert peak == pytest.approx(gpu.fp32_tflops, rel=0.01)


def test_a_rate_of_the_gpu_goes_before_that_of_its_architecture_and_that_before_the_rest():
    assert find_chip("a100").l2_bytes_per_clock == 44
    assert find_chip("rtx3090").l2_bytes_per_clock == 32
    assert find_chip("h100").l2_bytes_per_clock == 23.7
    assert find_chip("h100").provenance("l2_bytes_per_clock").startswith("23.7 bytes/clock, SM, inferred: FlashAttention")
    assert find_chip("rtx3090").provenance("sms").startswith("82, published: NVIDIA's data sheet")


def test_a_missing_rate_is_named_with_its_gpu_and_where_it_would_come_from(edited):
    file = edited(line("l2_latency", "all"), "")
    with pytest.raises(UsageError, match=r"no l2_latency for a4000: add it to \[all\], .* from a pointer chase"):
        find_chip("a4000", file)


def test_a_missing_rate_of_hopper_alone_is_no_fault_of_another_chip(edited):
    file = edited(line("tma_latency", "arch.sm_90"), "")
    assert find_chip("a100", file).tma_latency == 0
    with pytest.raises(UsageError, match="no tma_latency for h200.* a TMA load"):
        find_chip("h200", file)


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
        ("[0, 8, 16, 32, 64, 100]", "[0, 8, true]", "must be a list of sizes"),
        ("[sources]", "[origins]", r"no \[sources\]"),
        ("[sources]", "[sources", "not a TOML file"),
    ],
)
def test_a_malformed_chip_file_says_what_is_wrong(edited, old, new, said):
    with pytest.raises(UsageError, match=said):
        find_chip("rtx3090", edited(old, new))


def test_a_chip_file_that_is_not_there_and_an_unknown_rate_are_named(tmp_path):
    with pytest.raises(UsageError, match="cannot read .*nowhere.toml"):
        find_chip("h100", tmp_path / "nowhere.toml")
    with pytest.raises(UsageError, match="no rate named l3_latency; known are"):
        find_chip("h100").provenance("l3_latency")
