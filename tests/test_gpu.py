"""GPUs by name, and how many blocks of a kernel they hold."""

from __future__ import annotations

import pytest

from evoengine.errors import UsageError
from evoengine.gpu import find_gpu, known_gpus


def test_an_unknown_gpu_names_the_known_ones_and_the_nearest():
    with pytest.raises(UsageError, match="h100, h200.*did you mean h100"):
        find_gpu("h10")


def test_an_unlike_name_gets_no_guess():
    with pytest.raises(UsageError) as error:
        find_gpu("zzzzzz")
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [
        (256, 57, 90112, 2),  # shared memory: 233472 // 91136
        (256, 128, 0, 2),  # registers: 65536 // 32768
        (1024, 32, 0, 2),  # threads: 2048 // 1024
        (32, 16, 0, 32),  # blocks: the SM's own limit
        (64, 88, 0, 10),  # registers of a quarter of the SM: 16384 // 2816 = 5 warps, not the whole SM's 23
        (1024, 65, 0, 0),  # 72 × 1024 after rounding up, more than there are
        (128, 32, 240000, 0),
    ],
)
def test_blocks_on_an_h100_are_limited_by_the_scarcest_resource(threads, registers, shared, blocks):
    assert find_gpu("h100").blocks_resident(threads, registers, shared) == blocks


def test_occupancy_is_resident_warps_over_the_most():
    assert find_gpu("h100").occupancy(256, 57, 90112) == 2 * 8 / 64


def test_every_gpu_has_whole_limits():
    for gpu in known_gpus().values():
        assert gpu.shared_per_block + gpu.shared_reserved <= gpu.shared_per_sm
        assert gpu.blocks_resident(128, 32, 16384) > 0
        assert gpu.variables()["gpu.capability"] in (75, 80, 86, 89, 90, 100, 120)


@pytest.mark.parametrize(
    ("gpu", "opcodes", "tflops"),
    [
        ("h100", ["HGMMA", "FFMA"], 989),
        ("h100", ["HGMMA.TF32"], 494),
        ("h100", ["QGMMA", "HGMMA"], 1979),
        ("h100", ["IGMMA"], 1979),
        ("h100", ["HGMMA.SP"], 1979),
        ("h100", ["DMMA"], 66.9),
        ("h100", ["FFMA", "LDG"], 66.9),
        ("h100", ["IMAD", "LDG"], 66.9),
        ("a100", ["HMMA.TF32"], 156),
        ("a100", ["IMMA.16832.S8.S8"], 624),
        ("a100", ["IMMA.16864.S4.S4"], 1248),
        ("a100", ["HFMA2"], 78),
        ("rtx4090", ["HMMA.16816.F32"], 165.2),
        ("rtx4090", ["HMMA.16816.F16"], 330.3),
        ("rtx4090", ["HMMA"], 330.3),
        ("rtx4090", ["QMMA.16832.F32.E4M3.E4M3"], 330.3),
        ("rtx4090", ["IMMA.16832.S8.S8"], 660.6),
        ("rtx4090", ["HMMA.1688.F32.TF32"], 82.6),
        ("a6000", ["HMMA.16816.F16"], 154.8),
        ("h100", [], 1979),
    ],
)
def test_a_kernels_peak_is_that_of_its_fastest_kind_of_arithmetic_on_the_data_sheet(gpu, opcodes, tflops):
    assert find_gpu(gpu).peak_tflops(opcodes) == pytest.approx(tflops, rel=0.005)
