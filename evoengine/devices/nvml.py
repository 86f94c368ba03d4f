"""Read a GPU's clocks, temperature and reasons of slowdown through NVML. Optional: nvidia-ml-py may be missing."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

MIN_CLOCK_SHARE = 0.75
"""share of the maximum SM clock below which a repetition is dropped if NVML gives no reason (nvbench's default)"""
SLOWDOWN_REASONS = {
    "clocks set by the user": 0x02,
    "power cap": 0x04,
    "hardware slowdown": 0x08,
    "software thermal slowdown": 0x20,
    "hardware thermal slowdown": 0x40,
    "power brake": 0x80,
}
"""nvmlClocksEventReason… of nvml.h"""
HARMLESS_REASONS = ("power cap", "clocks set by the user")
"""states that any heavy kernel causes on a large GPU, or that its owner set; dropping such repetitions would
leave none"""


@dataclass(frozen=True, slots=True)
class Reading:
    """The sensors' values during a repetition."""

    sm_mhz: float
    temperature_c: float
    held_back: tuple[str, ...] = ()
    """what lowers the clocks, by the names of SLOWDOWN_REASONS"""
    throttled: bool = False
    """whether a repetition timed now must be dropped"""
    watts: float | None = None
    """None if the GPU does not report it"""


def classify_reading(
    sm_mhz: float, highest_mhz: float, temperature_c: float, reasons: int, watts: float | None = None
) -> Reading:
    """Classify NVML's figures; `reasons` is its bit mask of clock event reasons."""
    held_back = tuple(name for name, bit in SLOWDOWN_REASONS.items() if reasons & bit)
    asleep = sm_mhz < MIN_CLOCK_SHARE * highest_mhz and not held_back
    throttled = asleep or any(name not in HARMLESS_REASONS for name in held_back)
    return Reading(sm_mhz, temperature_c, held_back, throttled, watts)


def _library() -> ModuleType | None:
    try:
        return import_module("pynvml")
    except ImportError:
        return None


def _handle(nvml: ModuleType, uuid: str) -> object:
    """Return NVML's handle of the GPU with that UUID; for a MIG instance, that of its GPU, which alone has sensors."""
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if uuid.startswith("MIG-") else handle


class Sensors:
    """The sensors of the GPU with the driver's UUID. Raises NVML's own error if they cannot be read."""

    def __init__(self, nvml: ModuleType, uuid: str) -> None:
        self._nvml, self._handle = nvml, _handle(nvml, uuid)
        self._highest = float(nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_SM))
        self.read()

    def read(self) -> Reading:
        n, handle = self._nvml, self._handle
        return classify_reading(
            float(n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM)),
            self._highest,
            float(n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU)),
            int(n.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            self._watts(),
        )

    def _watts(self) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3
        except self._nvml.NVMLError:
            return None


def open_sensors(uuid: str) -> Sensors | str:
    """Return the sensors, or why there are none."""
    nvml = _library()
    if nvml is None:
        return "clocks are not logged: pip install nvidia-ml-py"
    try:
        return Sensors(nvml, uuid)
    except nvml.NVMLError as error:
        return f"clocks are not logged: {error}"


def settings(uuid: str) -> dict[str, str]:
    """Return the settings that a GPU's figures depend on, as far as NVML reports them.

    These are the power limit, in which cards of one name differ, and whether MIG is on.
    """
    found: dict[str, str] = {}
    nvml = _library()
    if nvml is None:
        return found
    with suppress(nvml.NVMLError):  # most GPUs do not support MIG, and some no power limit
        handle = _handle(nvml, uuid)
        found["power limit"] = f"{nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000:.0f} W"
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        found["MIG"] = "on" if current == nvml.NVML_DEVICE_MIG_ENABLE else "off"
    return found


def other_processes(uuid: str) -> list[int]:
    """Return the ids of other processes that compute on the GPU, as far as NVML reports them."""
    nvml = _library()
    if nvml is None:
        return []
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(_handle(nvml, uuid))
    except nvml.NVMLError:
        return []
    return sorted(p.pid for p in running if p.pid != os.getpid())
