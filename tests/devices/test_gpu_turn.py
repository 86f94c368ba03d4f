"""One GPU, one search at a time; what the driver and the sensors say, turned into decisions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from evoengine.devices.driver import GpuDevice, require_arch, resolve_gpu, supports_arch
from evoengine.devices.nvml import Sensors, classify_reading, open_sensors
from evoengine.errors import MachineError
from evoengine.gpu import find_gpu

HOLDER = """
import sys, time
from evoengine.devices.driver import GpuDevice, lock_device
device = GpuDevice(0, "NVIDIA H200", sys.argv[1], 90, 1)
with lock_device(device, lambda text: print(text, flush=True)):
    print("timing", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    started = []

    def start(uuid):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, uuid], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_search_waits_says_so_and_goes_on_when_the_first_ends(holder):
    first = holder("GPU-a")
    assert first.stdout.readline() == "timing\n"
    second = holder("GPU-a")
    said = second.stdout.readline()
    assert "another evoengine is timing on NVIDIA H200" in said and "Ctrl-C" in said
    first.stdin.write("\n")
    first.stdin.flush()
    assert second.stdout.readline() == "timing\n"


def test_a_killed_search_frees_its_gpu(holder):
    first = holder("GPU-a")
    assert first.stdout.readline() == "timing\n"
    first.kill()
    first.wait()
    assert holder("GPU-a").stdout.readline() == "timing\n"


def test_two_gpus_do_not_wait_for_each_other(holder):
    first, second = holder("GPU-a"), holder("GPU-b")
    assert (first.stdout.readline(), second.stdout.readline()) == ("timing\n", "timing\n")


def test_ctrl_c_works_while_waiting(holder):
    first = holder("GPU-a")
    assert first.stdout.readline() == "timing\n"
    second = holder("GPU-a")
    assert "waiting" in second.stdout.readline()
    time.sleep(0.1)
    second.send_signal(signal.SIGINT)
    _, error = second.communicate(timeout=120)
    assert "KeyboardInterrupt" in error
    assert first.poll() is None


def device(name="NVIDIA H200", capability=90, **limits):
    return GpuDevice(0, name, "GPU-a", capability, 2**37, limits)


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_90a", 90, True), ("sm_90a", 100, False), ("sm_90", 90, True), ("sm_80", 80, True), ("sm_80", 86, False),
        ("sm_86", 80, False), ("sm_80", 90, False), ("sm_100a", 103, False),
    ],
)  # fmt: skip
def test_which_binaries_a_gpu_takes(arch, capability, runs):
    assert supports_arch(device(capability=capability), arch) is runs


def test_a_binary_for_another_architecture_is_refused_in_a_sentence():
    require_arch(device(), "sm_90a", "trial 7")
    with pytest.raises(
        MachineError, match=r"trial 7 is compiled for sm_90a, which this machine's NVIDIA L4 \(sm_89\) cannot run"
    ):
        require_arch(device("NVIDIA L4", 89), "sm_90a", "trial 7")


def test_a_gpu_of_the_same_architecture_keeps_the_name_it_was_asked_by_and_has_its_own_limits():
    found = resolve_gpu(device(sms=140), find_gpu("h100"))
    assert (found.key, found.name, found.arch) == ("h100", "NVIDIA H200", "sm_90a")
    assert (found.sms, found.memory_gbs) == (140, find_gpu("h200").memory_gbs)


def test_a_gpu_that_is_not_in_the_table_has_the_peaks_of_the_one_named():
    found = resolve_gpu(device("NVIDIA H800", sms=132), find_gpu("h100"))
    assert (found.name, found.tensor_tflops) == ("NVIDIA H800", find_gpu("h100").tensor_tflops)


class NoDriver(Exception):
    pass


def nvml(**changed):
    calls = {
        "NVML_CLOCK_SM": 1, "NVML_TEMPERATURE_GPU": 0, "NVMLError": NoDriver, "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid, "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980,
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1755, "nvmlDeviceGetTemperature": lambda handle, kind: 61,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x4,
        "nvmlDeviceGetPowerUsage": lambda handle: 699_500,
    }  # fmt: skip
    return SimpleNamespace(**(calls | changed))


def test_sensors_read_clock_temperature_and_what_holds_it_back():
    reading = Sensors(nvml(), "GPU-a").read()
    assert (reading.sm_mhz, reading.temperature_c, reading.held_back) == (1755.0, 61.0, ("power cap",))
    assert reading.watts == 699.5
    assert not reading.throttled


@pytest.mark.parametrize(
    ("mhz", "reasons", "throttled"),
    [
        (1980, 0x0, False), (345, 0x1, True), (1300, 0x4, False), (1200, 0x2, False), (1900, 0x20, True),
        (1300, 0x44, True),
    ],
)  # fmt: skip
def test_a_low_clock_disqualifies_unless_the_power_cap_or_the_user_set_it_and_heat_always_does(mhz, reasons, throttled):
    assert classify_reading(mhz, 1980, 60, reasons).throttled is throttled


def test_without_sensors_there_is_a_reason_and_no_error(monkeypatch):
    def broken():
        raise NoDriver("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=broken))
    assert "NVML Shared Library Not Found" in open_sensors("GPU-a")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in open_sensors("GPU-a")


@pytest.mark.parametrize("name", [n for n in vars(nvml()) if n.startswith(("nvml", "NVML"))])
def test_the_names_are_those_of_nvidia_ml_py(name):
    assert hasattr(pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed"), name)
