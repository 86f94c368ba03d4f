"""The driver is asked through its C interface; its absence is a sentence, not an error."""

from __future__ import annotations

import pytest

from evoengine.devices import cuda_api
from evoengine.devices.cuda_api import CudaError
from evoengine.devices.driver import find_driver


def test_a_machine_without_a_driver_says_so(monkeypatch):
    def missing():
        raise OSError("libcuda.so.1")

    monkeypatch.setattr(cuda_api, "library", missing)
    assert "libcuda.so.1 is missing" in find_driver()


def test_a_driver_that_does_not_start_gives_its_code(monkeypatch):
    def broken(name, *arguments):
        raise CudaError(name, 100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")

    monkeypatch.setattr(cuda_api, "library", lambda: None)
    monkeypatch.setattr(cuda_api, "call", broken)
    assert "cuInit returned 100: no CUDA-capable device is detected" in find_driver()


@pytest.mark.gpu
def test_a_gpu_is_described():
    version, [device, *_] = find_driver()
    assert float(version) >= 12
    assert device.capability >= 80 and device.memory_bytes > 2**30 and device.uuid.startswith("GPU-")
