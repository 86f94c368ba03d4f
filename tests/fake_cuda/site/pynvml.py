"""Stands in for nvidia-ml-py on the stand-in driver: clocks, temperature, power, processes, and what holds clocks back.

FAKE_CUDA_THROTTLE makes the clocks low and names a thermal slowdown while it lasts in the driver's simulated time.
"""

import ctypes
import os
from types import SimpleNamespace

NVML_CLOCK_SM = 1
NVML_TEMPERATURE_GPU = 0
NVML_DEVICE_MIG_ENABLE = 1
THERMAL_SLOWDOWN = 0x20
HIGHEST_MHZ, POWER_MILLIWATTS, LIMIT_MILLIWATTS = 1980, 400_000, 700_000
READING_US = 1000.0
"""what a query takes"""


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


def _driver():
    library = ctypes.CDLL("libcuda.so.1")
    library.stand_in_throttle.restype = ctypes.c_double
    return library


def nvmlInit():
    _driver()


def nvmlDeviceGetHandleByUUID(uuid):
    return uuid


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle):
    return f"GPU of {handle}"


def _of_a_whole_gpu(handle):
    if handle.startswith("MIG-"):
        raise NVMLError_NotSupported("Not Supported")


def nvmlDeviceGetMaxClockInfo(handle, kind):
    _of_a_whole_gpu(handle)
    return HIGHEST_MHZ


def nvmlDeviceGetClockInfo(handle, kind):
    _of_a_whole_gpu(handle)
    _driver().stand_in_advance(ctypes.c_double(READING_US))
    return int(HIGHEST_MHZ / _driver().stand_in_throttle())


def nvmlDeviceGetTemperature(handle, kind):
    return 60


def nvmlDeviceGetCurrentClocksThrottleReasons(handle):
    return THERMAL_SLOWDOWN if _driver().stand_in_throttle() > 1 else 0


def nvmlDeviceGetPowerUsage(handle):
    _of_a_whole_gpu(handle)
    return POWER_MILLIWATTS


def nvmlDeviceGetPowerManagementLimit(handle):
    _of_a_whole_gpu(handle)
    return LIMIT_MILLIWATTS


def nvmlDeviceGetMigMode(handle):
    _of_a_whole_gpu(handle)
    mode = int(os.environ.get("FAKE_CUDA_MIG", "0"))
    return [mode, mode]


def nvmlDeviceGetComputeRunningProcesses(handle):
    others = int(os.environ.get("FAKE_CUDA_PROCESSES", "0"))
    return [SimpleNamespace(pid=4_000_000 + n, usedGpuMemory=1 << 30) for n in range(others)]
