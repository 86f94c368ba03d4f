"""Which figures of a GPU cannot be."""

from __future__ import annotations

import pytest

from evoengine.gpu import find_gpu
from evoengine.timing.figures import above_roofline

H100 = find_gpu("h100")


@pytest.mark.parametrize(
    ("mix", "tflops", "sm_mhz", "suspect"),
    [
        ({"FFMA": 64}, 60.0, 0.0, None),
        (
            {"FFMA": 64},
            70.0,
            0.0,
            "70 TFLOPS is above the 67 that NVIDIA H100 80GB HBM3 can do without its tensor cores",
        ),
        ({"FFMA": 64}, 70.0, 1980.0, None),
        ({"HGMMA": 64}, 1000.0, 0.0, "1000 TFLOPS is above the 989 that NVIDIA H100 80GB HBM3 can do"),
        ({"HGMMA": 64}, 9000.0, 1e6, "9000 TFLOPS is above the 1237 that NVIDIA H100 80GB HBM3 can do"),
        ({"HGMMA.TF32": 64}, 600.0, 0.0, "600 TFLOPS is above the 495 that NVIDIA H100 80GB HBM3 can do"),
        ({"QGMMA": 64}, 1500.0, 0.0, None),
        ({}, 1500.0, 0.0, None),
    ],
)
def test_a_figure_is_judged_by_the_peak_of_its_kernels_kind_of_product(mix, tflops, sm_mhz, suspect):
    assert above_roofline(tflops, 0.0, H100, mix, {"sm_mhz": sm_mhz} if sm_mhz else {}) == suspect
