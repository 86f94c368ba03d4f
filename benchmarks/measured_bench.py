"""Rows of a data set of kernels on a GPU: their buffers and launches, and the timing for measured_h100.py."""

from __future__ import annotations

import base64
import ctypes
import gzip
import json
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evoengine.devices import cuda_api
from evoengine.devices.base import TensorMapArgument
from evoengine.devices.cuda import encode_tensor_map
from evoengine.devices.cuda_api import CudaError, Event, Module, Parameters

Row = dict[str, Any]
ROLES = ("in", "out", "scratch", "zero")
"""of buffers without contents of their own; kernels write all but the first"""
STEP = 1 << 20
"""bytes of a drawn tensor's period, at a multiple of which each buffer begins"""
FLUSH_BYTES = 256 << 20
POLICY_SECONDS = 0.12
"""of launches timed with one state of the L2"""
SUSTAINED_SECONDS = 0.6
SHORT_US = 200.0
"""below this a kernel is timed back to back as well"""
PROBE_NS = 60_000
WAKE_NS = 300_000_000
"""in which an idle GPU raises its clocks"""
SAMPLES, SAMPLE_BYTES = 64, 16
TOOLS = {
    "probe": """
extern "C" __global__ void probe(unsigned long long* o, int at, int ns) {
  unsigned long long first, from, to;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(first));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(from)); while (from == first);
  long long begin = clock64();
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(to)); while (to - from < ns);
  o[2 * at] = clock64() - begin;
  o[2 * at + 1] = to - from;
}
""",
    "flush": """
extern "C" __global__ void flush(const float4* a, float* o, int n) {
  float sum = 0;
  for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += 256 * gridDim.x) sum += a[i].x + a[i].w;
  if (sum == 12345.678f) *o = sum;
}
""",
}
"""kernels that read the clock, and that fill the L2 with something else"""
_MORE = {
    "cuMemAlloc_v2": (ctypes.c_void_p, ctypes.c_size_t),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t),
    "cuMemcpyDtoD_v2": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t),
    "cuCtxSynchronize": (),
    "cuLaunchKernelEx": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    "cuProfilerStart": (),
    "cuProfilerStop": (),
}


def call(name: str, *arguments: object) -> None:
    """Call a driver function that evoengine itself has no use for; raises CudaError."""
    function = cuda_api.library()[name]
    function.argtypes, function.restype = _MORE[name], ctypes.c_int
    if code := function(*arguments):
        raise cuda_api.error_of(name, code)


def read_rows(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def read_results(path: Path) -> dict[str, list[Row]]:
    """Return what `--from` wrote, also where it is gzipped."""
    data = path.read_bytes()
    return dict(json.loads(gzip.decompress(data) if path.suffix == ".gz" else data))


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def allocate(size: int) -> int:
    at = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(at), size)
    return at.value


def room(size: int) -> int:
    return -(-size // STEP) * STEP


class Memory:
    """One region of drawn contents for the inputs of each dtype, and one for everything that kernels write.

    Launches of all rows share them; they are as large as the largest row takes.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        sizes: dict[str, int] = defaultdict(int)
        for row in rows:
            own: dict[str, int] = defaultdict(int)
            for size, dtype, role in row["buffers"].values():
                own[dtype if role == "in" else "written"] += room(size)
            for region, size in own.items():
                sizes[region] = max(sizes[region], size)
        self.regions = {region: allocate(size) for region, size in sizes.items()}
        for region, size in sizes.items():
            if region != "written":
                self._draw(region, size)

    def _draw(self, dtype: str, size: int) -> None:
        from evoengine.sass.launch import drawn_bytes

        at, held = self.regions[dtype], STEP
        cuda_api.call("cuMemcpyHtoD_v2", at, drawn_bytes(dtype, STEP).tobytes(), STEP)
        while held < size:
            more = min(held, size - held)
            call("cuMemcpyDtoD_v2", at + held, at, more)
            held += more

    def place(self, row: Row) -> dict[str, int]:
        """Return each buffer's address, with its first contents; all that is written begins as zeros."""
        ends, found = dict(self.regions), {}
        for name, (size, dtype, role) in row["buffers"].items():
            region = dtype if role == "in" else "written"
            found[name] = ends[region]
            ends[region] += room(size)
        if "written" in ends and ends["written"] > self.regions["written"]:
            cuda_api.memset(self.regions["written"], 0, ends["written"] - self.regions["written"])
        for name, (size, _, role) in row["buffers"].items():
            if role not in ROLES:
                cuda_api.call("cuMemcpyHtoD_v2", found[name], zlib.decompress(base64.b64decode(role)), size)
        return found


def value(given: Any, places: Mapping[str, int]) -> np.generic | bytes:
    """Return a parameter as the driver takes it."""
    if isinstance(given, str):
        return np.uint64(places[given])
    if "s" in given:
        return bytes.fromhex(given["s"])
    if "map" in given:
        name, tensor, dtype, dims, strides, box, swizzle = given["map"]
        argument = TensorMapArgument(name, tensor, dtype, tuple(dims), tuple(strides), tuple(box), swizzle)
        return encode_tensor_map(argument, places[tensor])
    whole = bytearray(given["struct"])
    for offset, part in given["parts"]:
        data = value(part, places)
        data = data if isinstance(data, bytes) else data.tobytes()
        whole[offset : offset + len(data)] = data
    return bytes(whole)


# ── timing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(folder: Path, row: Row) -> tuple[Module, str]:
    """Load the row's binary, or what this machine's NVRTC makes of its source where the driver refuses it."""
    image = gzip.decompress((folder / "cubins" / f"{row['cubin']}.gz").read_bytes())
    try:
        return Module(image), "stored"
    except CudaError:
        source = folder / "sources" / f"{row['cubin']}.gz"
        if not source.exists():
            raise
        return Module(compiled_here(gzip.decompress(source.read_bytes()).decode())), "compiled here"


def compiled_here(text: str) -> bytes:
    from evoengine.stages.includes import C_HEADERS
    from evoengine.stages.toolchain import include_folders, nvrtc

    options, _, text = text.partition("\n")
    headers = (tuple(each.encode() for each in column) for column in (C_HEADERS.values(), C_HEADERS))
    api = nvrtc()
    program = api.createProgram(text, "kernel.cu", *headers)
    includes = tuple(f"-I{folder}" for folder in include_folders())
    api.compileProgram(program, (*options.removeprefix("// ").split(), *includes))
    return bytes(api.getCUBIN(program)) + b"\0"


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, with the value of a cluster's dimensions."""

    _fields_ = (("id", ctypes.c_uint64), ("cluster", ctypes.c_uint32 * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h: the grid, the block and the bytes of shared memory, the stream, the attributes."""

    _fields_ = (
        ("sizes", ctypes.c_uint32 * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )  # fmt: skip # a table


CLUSTER_DIMENSION = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"""


def launch_clusters(
    module: Module, entry: str, cluster: Sequence[int], grid: Sequence[int], block: Sequence[int], shared: int,
    parameters: Parameters,
) -> None:  # fmt: skip
    """Queue a kernel whose clusters its binary does not state. Raises CudaError."""
    handle = ctypes.c_void_p()
    cuda_api.call("cuModuleGetFunction", ctypes.byref(handle), module.handle, entry.encode())
    attribute = Attribute(CLUSTER_DIMENSION, (ctypes.c_uint32 * 16)(*cluster))
    sizes = (ctypes.c_uint32 * 7)(*grid, *block, shared)
    config = Config(sizes, None, ctypes.addressof(attribute), 1)
    call("cuLaunchKernelEx", ctypes.byref(config), handle, parameters.pointers, None)


class Launches:
    """The kernels of a row, ready to be queued."""

    def __init__(self, row: Row, module: Module, places: Mapping[str, int]) -> None:
        self.reset = [(places[name], b[0]) for name, b in row["buffers"].items() if b[2] == "zero"]
        self._all: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        for kernel in row["kernels"]:
            function = module.function(kernel["entry"])
            if kernel["shared"] > 48 << 10:
                function.allow_shared(kernel["shared"])
            parameters = Parameters([value(p, places) for p in kernel["parameters"]])
            geometry = tuple(kernel["grid"]), tuple(kernel["block"]), kernel["shared"], parameters
            of_cluster = kernel.get("cluster")
            launch = partial(launch_clusters, module, kernel["entry"], of_cluster) if of_cluster else function.launch
            self._all.append((launch, geometry))

    def prepare(self) -> None:
        for at, size in self.reset:
            cuda_api.memset(at, 0, size)

    def queue(self) -> None:
        for launch, geometry in self._all:
            launch(*geometry)


class Bench:
    def __init__(self, folder: Path, rows: Sequence[Row]) -> None:
        cuda_api.use_primary_context()
        self.folder, self.memory = folder, Memory(rows)
        self._probe, self._flush = (
            Module(gzip.decompress((folder / f"{name}.gz").read_bytes())).function(name) for name in TOOLS
        )
        self._clocks = allocate(16 * 256)
        self._big = allocate(FLUSH_BYTES)
        cuda_api.memset(self._big, 0, FLUSH_BYTES)
        self._flush_parameters = Parameters(
            [np.uint64(self._big), np.uint64(self._clocks), np.int32(FLUSH_BYTES // 16)]
        )
        self._probes = [self._of_probe(n, PROBE_NS) for n in range(64)]
        self._events = [Event() for _ in range(128)]
        self.sensors = open_sensors()
        self.probe(0, WAKE_NS)
        call("cuCtxSynchronize")

    def probe(self, at: int, ns: int = PROBE_NS) -> None:
        """Queue a read of the clock into place `at`; it takes `ns`, in which the host queues what follows."""
        given = self._probes[at] if ns == PROBE_NS else self._of_probe(at, ns)
        self._probe.launch((1, 1, 1), (1, 1, 1), 0, given)

    def _of_probe(self, at: int, ns: int) -> Parameters:
        return Parameters([np.uint64(self._clocks), np.int32(at), np.int32(ns)])

    def flush(self) -> None:
        self._flush.launch((132 * 8, 1, 1), (256, 1, 1), 0, self._flush_parameters)

    def ghz(self, count: int) -> list[float]:
        read = np.zeros(2 * count, np.uint64)
        call("cuMemcpyDtoH_v2", read.ctypes.data, self._clocks, read.nbytes)
        return [round(float(c) / float(t), 4) if t else 0.0 for c, t in read.reshape(-1, 2)]

    def once(self, launches: Launches) -> float:
        begin, end = self._events[:2]
        launches.prepare()
        begin.record()
        launches.queue()
        end.record()
        call("cuCtxSynchronize")
        return begin.elapsed_us(end)

    def timed(self, launches: Launches, count: int, cold: bool) -> tuple[list[float], list[float]]:
        """Return µs of `count` launches and the clock in GHz around each."""
        for n in range(count):
            launches.prepare()
            if cold:
                self.flush()
            else:
                self.probe(n)
            self._events[2 * n].record()
            launches.queue()
            self._events[2 * n + 1].record()
            if cold:
                self.probe(n)
        call("cuCtxSynchronize")
        pairs = zip(self._events[0 : 2 * count : 2], self._events[1 : 2 * count : 2], strict=True)
        return [round(begin.elapsed_us(end), 3) for begin, end in pairs], self.ghz(count)

    def back_to_back(self, launches: Launches, count: int) -> float:
        begin, end = self._events[:2]
        self.probe(0, 40_000 + 15_000 * count)
        begin.record()
        for _ in range(count):
            launches.queue()
        end.record()
        call("cuCtxSynchronize")
        return round(begin.elapsed_us(end) / count, 3)

    def measure(self, row: Row) -> Row:
        module, how = load(self.folder, row)
        places = self.memory.place(row)
        launches = Launches(row, module, places)
        first = self.once(launches)
        found: Row = {"id": row["id"], "loaded": how, "first_us": round(first, 2), "samples": self.samples(row, places)}
        expected = min(self.once(launches), self.once(launches)) if first < 5e5 else first
        for name, cold in (("warm", False), ("cold", True)):
            each = expected * 1e-6 + (160e-6 if cold else 80e-6)
            count = int(min(20, max(3, POLICY_SECONDS / each)))
            found[f"{name}_us"], found[f"{name}_ghz"] = self.timed(launches, count, cold)
        if expected < SHORT_US and not launches.reset:
            count = int(min(50, max(10, 2000 / max(expected, 1.0))))
            found["together"], found["together_us"] = count, self.back_to_back(launches, count)
        found["nvml"] = self.sensors()
        return found

    def samples(self, row: Row, places: Mapping[str, int]) -> dict[str, list[float]]:
        """Return some elements of each output, at places that the buffer's size draws."""
        kinds = {"fp16": np.float16, "fp32": np.float32, "int32": np.int32, "bf16": np.uint16}
        found = {}
        for name, (size, dtype, role) in row["buffers"].items():
            if role != "out" or dtype not in kinds:
                continue
            some = np.random.default_rng(size).integers(0, max(1, size // SAMPLE_BYTES), SAMPLES)
            data = np.zeros(SAMPLES * SAMPLE_BYTES, np.uint8)
            for n, at in enumerate(some):
                length = min(SAMPLE_BYTES, size - int(at) * SAMPLE_BYTES)
                call(
                    "cuMemcpyDtoH_v2",
                    data.ctypes.data + n * SAMPLE_BYTES,
                    places[name] + int(at) * SAMPLE_BYTES,
                    length,
                )
            values = data.view(kinds[dtype])
            if dtype == "bf16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            per = SAMPLE_BYTES // kinds[dtype]().itemsize
            found[name] = [float(f"{float(v):.5g}") for v in values[::per]]
        return found

    def sustain(self, row: Row) -> Row:
        """Time the row's launches without a pause, in stretches of about 25 ms."""
        module, _ = load(self.folder, row)
        launches = Launches(row, module, self.memory.place(row))
        self.once(launches)
        each = min(self.once(launches), self.once(launches))
        stretch = int(max(1, 25_000 / each))
        stretches = int(min(60, max(3, SUSTAINED_SECONDS * 1e6 / (stretch * each))))
        readings = []
        self._events[0].record()
        for n in range(stretches):
            for _ in range(stretch):
                launches.prepare()
                launches.queue()
            self._events[n + 1].record()
            while n >= 2 and not self._events[n - 1].query():
                time.sleep(0.002)
            readings.append(self.sensors())
        self.probe(0)
        call("cuCtxSynchronize")
        us = [
            round(a.elapsed_us(b) / stretch, 3)
            for a, b in zip(self._events, self._events[1 : stretches + 1], strict=False)
        ]
        return {
            "id": row["id"],
            "sustained_us": us,
            "sustained_ghz": self.ghz(1),
            "stretch": stretch,
            "nvml": readings[-8:],
        }


def open_sensors() -> Callable[[], dict[str, Any]]:
    """Return what reads clocks, power, temperature and reasons of slowdown through NVML, as far as it gives them."""
    try:
        import pynvml as n

        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # whatever is missing, times are worth having without it
        return dict
    readings: dict[str, Callable[[], Any]] = {
        "sm_mhz": lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM),
        "mem_mhz": lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM),
        "watts": lambda: n.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "celsius": lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU),
        "reasons": lambda: n.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }

    def read() -> dict[str, Any]:
        found = {}
        for name, reading in list(readings.items()):
            try:
                found[name] = reading()
            except Exception:  # this GPU or this NVML does not give it
                del readings[name]
        return found

    return read


def about_gpu() -> dict[str, Any]:
    from evoengine.devices.driver import find_driver
    from evoengine.devices.nvml import settings

    found = find_driver()
    if isinstance(found, str):
        return {"error": found}
    device = found[1][0]
    about: dict[str, Any] = {"driver": found[0], "gpu": device.name, "limits": device.limits, **settings(device.uuid)}
    try:
        import pynvml as n

        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)
        about["driver_version"] = n.nvmlSystemGetDriverVersion()
        for name, kind in (("sm", n.NVML_CLOCK_SM), ("mem", n.NVML_CLOCK_MEM)):
            about[f"max_{name}_mhz"] = n.nvmlDeviceGetMaxClockInfo(handle, kind)
            about[f"application_{name}_mhz"] = n.nvmlDeviceGetApplicationsClock(handle, kind)
    except Exception as error:
        about["nvml_error"] = str(error)
    return about
