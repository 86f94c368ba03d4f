"""The driver is asked through its C interface; its absence is a sentence, not an error."""

from __future__ import annotations

import ctypes

import pytest

from evoengine.devices import driver
from evoengine.devices.driver import find_driver


def test_a_machine_without_a_driver_says_so(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert "libcuda.so.1 is not on this machine" in find_driver()


def test_a_driver_that_does_not_start_gives_its_code(monkeypatch):
    class Broken:
        def cuInit(self, flags):
            return 100

    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: Broken())
    assert "cuInit gives 100" in find_driver()


@pytest.mark.gpu
def test_a_gpu_is_described():
    version, [device, *_] = find_driver()
    assert float(version) >= 12
    assert device.capability >= 80 and device.memory_bytes > 2**30 and device.uuid.startswith("GPU-")
