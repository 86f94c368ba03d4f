"""The measuring stage on the stand-in driver."""

from __future__ import annotations

import pytest

from tests.timing.measuring import US


@pytest.fixture
def stage(monkeypatch):
    """The stage with a bench of its own."""
    from evoengine.timing import measure
    from tests.fake_cuda import device

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f")
    monkeypatch.setattr(device, "times", dict(US))
    measure.forget()
    device.reset()
    yield measure
    measure.forget()
    device.reset()


@pytest.fixture
def clock(monkeypatch):
    """How long a repetition may take is cut short for kernels that never end."""
    from evoengine.devices import base
    from evoengine.timing import bench

    monkeypatch.setattr(bench, "launch_seconds", lambda flops: 0.2)
    monkeypatch.setattr(base, "LAUNCH_SECONDS", 0.2)
