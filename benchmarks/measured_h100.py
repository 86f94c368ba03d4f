"""Kernels timed on an H100, each beside the time that the model predicted for it before.

    python benchmarks/measured_h100.py --prepare DIR --data SHARED   anywhere: kernels, launches, frozen predictions
    python benchmarks/measured_h100.py --prepare DIR --set families  likewise, of measured_families.py
    python benchmarks/measured_h100.py --from DIR --out FILE.json    on the GPU: times them; needs NumPy alone
    python benchmarks/measured_h100.py --counters DIR --out FILE     on the GPU: what ncu counts of some of them, cold
    python benchmarks/measured_h100.py --report FILE.json DIR        anywhere: errors by class and set, ranks, picks
    python benchmarks/measured_h100.py --again DIR ROWS.jsonl        anywhere: the rows as the model predicts them now
    python benchmarks/measured_h100.py --compare FILE.json DIR ROWS.jsonl      anywhere: errors of both
    python benchmarks/measured_h100.py --page FILE.json ROWS.jsonl OUT.json    anywhere: rows for accuracy_page.py

The time of a launch is that between two events around it, of ten or more, once with what the launches before left in
the L2 and once behind a read of 256 MB; a one-thread kernel before each (behind each, cold) reads the SM's clock
against the GPU's timer. Short kernels are timed back to back as well. The heaviest kernels of the tensor cores then run
for 0.6 s without a pause, and torch's own kernels are timed at the same problems, where torch is installed. In what
time is left all is timed again, in the other order: `again`, by which the report says how far times repeat.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import gzip
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "evoengine" / "__init__.py").is_file())
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from evoengine.devices import cuda_api  # noqa: E402
from evoengine.devices.base import TensorMapArgument  # noqa: E402
from evoengine.devices.cuda import encode_tensor_map  # noqa: E402
from evoengine.devices.cuda_api import CudaError, Event, Function, Module, Parameters  # noqa: E402

Row = dict[str, Any]
ROLES = ("in", "out", "scratch", "zero")
"""of buffers without contents of their own; kernels write all but the first"""
STEP = 1 << 20
"""bytes of a drawn tensor's period, at a multiple of which each buffer begins"""
FLUSH_BYTES = 256 << 20
POLICY_SECONDS = 0.12
"""of launches timed with one state of the L2"""
ROW_LIMIT_SECONDS, START_LIMIT_SECONDS = 8.0, 60.0
SUSTAINED_SECONDS, SUSTAINED_ROWS = 0.6, 30
TENSOR_CLASSES = ("wgmma with softmax", "wgmma", "mma.sync")
TORCH_SECONDS = 45.0
PARTS = ("rows", "sustained", "torch", "again")
TORCH = ROOT / "benchmarks" / "measured_torch.py"
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


def held_by(folder: Path, row: Row) -> tuple[int, int]:
    """Return the registers of a thread and the bytes of shared memory of a block of the row's first kernel."""
    from evoengine.sass.cubin import read_kernel

    image = gzip.decompress((folder / "cubins" / f"{row['cubin']}.gz").read_bytes())
    kernel = read_kernel(image, row["kernels"][0]["entry"])
    return kernel.registers, kernel.shared_bytes + int(row["kernels"][0]["shared"])


def in_turns(rows: Sequence[Row]) -> list[Row]:
    """Return the rows so that every problem of every set comes once before one comes again."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["set"], "" if row["config"] is None else row["problem"]].append(row)
    turns = max(map(len, groups.values()))
    return [of[turn] for turn in range(turns) for of in groups.values() if turn < len(of)]


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


class Launches:
    """The kernels of a row, ready to be queued."""

    def __init__(self, row: Row, module: Module, places: Mapping[str, int]) -> None:
        self.reset = [(places[name], b[0]) for name, b in row["buffers"].items() if b[2] == "zero"]
        self._all: list[tuple[Function, tuple[Any, ...]]] = []
        for kernel in row["kernels"]:
            function = module.function(kernel["entry"])
            if kernel["shared"] > 48 << 10:
                function.allow_shared(kernel["shared"])
            parameters = Parameters([value(p, places) for p in kernel["parameters"]])
            geometry = tuple(kernel["grid"]), tuple(kernel["block"]), kernel["shared"], parameters
            self._all.append((function, geometry))

    def prepare(self) -> None:
        for at, size in self.reset:
            cuda_api.memset(at, 0, size)

    def queue(self) -> None:
        for function, geometry in self._all:
            function.launch(*geometry)


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


# ── a process that times, and one that keeps it going ───────────────────────────────────────────────────────────────


def work(folder: Path) -> int:
    """Time the rows whose ids come on the input, a JSON line each; end where the context does not survive a failure."""
    rows = {row["id"]: row for row in read_rows(folder)}
    bench = Bench(folder, list(rows.values()))
    print(json.dumps({"ready": about_gpu()}), flush=True)
    for line in sys.stdin:
        what, name = line.split()
        try:
            found = bench.sustain(rows[name]) if what == "sustain" else bench.measure(rows[name])
            print(json.dumps(found), flush=True)
        except Exception as error:
            gone = not is_alive()
            print(json.dumps({"id": name, "error": f"{type(error).__name__}: {error}", "gone": gone}), flush=True)
            if gone:
                return 3
    return 0


def is_alive() -> bool:
    """Return whether the context has survived."""
    try:
        call("cuCtxSynchronize")
    except CudaError:
        return False
    return True


class Worker:
    """A process that answers lines with lines, each within a time limit."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def say(self, line: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def hear(self, seconds: float) -> Row:
        """Return the next answer; {"error": …} where the process has ended or does not answer, which ends it."""
        try:
            line = self._lines.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            self.end()
            return {"error": f"no answer within {seconds:.0f} s", "gone": True}
        if not line:
            self.end()
            return {"error": f"the process ended with {self._process.returncode}", "gone": True}
        try:
            return dict(json.loads(line))
        except ValueError:
            return self.hear(seconds)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # the driver holds it in a call
            print("a process does not end", file=sys.stderr)


class Session:
    """One sitting at the GPU: every result is in FILE.jsonl once it is there, and all of them in FILE at the end."""

    def __init__(self, folder: Path, out: Path, seconds: float) -> None:
        self.folder, self.out, self.begun, self.seconds = folder, out, time.monotonic(), seconds
        out.parent.mkdir(parents=True, exist_ok=True)
        self._stream = out.with_suffix(".jsonl").open("w")
        self.results: dict[str, list[Row]] = {"gpu": [], "rows": [], "sustained": [], "torch": [], "again": []}
        self._worker: Worker | None = None

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    def note(self, kind: str, found: Row) -> None:
        self.results[kind].append(found)
        self._stream.write(json.dumps({"kind": kind, **found}) + "\n")
        self._stream.flush()

    def ask(self, what: str, name: str) -> Row:
        if self._worker is None or not self._worker.is_running:
            self._worker = Worker(Path(__file__).resolve(), "--worker", self.folder)
            ready = self._worker.hear(min(START_LIMIT_SECONDS, self.left))
            self.note("gpu", ready)
            if "ready" not in ready:
                return {"id": name, "error": f"the process did not start: {ready.get('error')}", "start": True}
        self._worker.say(f"{what} {name}")
        answer = self._worker.hear(min(ROW_LIMIT_SECONDS, self.left + 1))
        if answer.get("gone"):
            self._worker.end()
        return {"id": name, **answer}

    def run(self, rows: Sequence[Row], parts: Sequence[str]) -> None:
        baselines = Worker(TORCH, self.folder) if "torch" in parts else None
        for_torch = TORCH_SECONDS if baselines else 0.0
        reserve = min(for_torch + 1.3 * SUSTAINED_ROWS * ("sustained" in parts), self.seconds / 3)
        try:
            if "rows" in parts:
                self._rows("rows", in_turns(rows), reserve)
            if "sustained" in parts:
                self._sustained(rows, for_torch)
            if baselines:
                self._torch(baselines)
            if "again" in parts:
                self._rows("again", in_turns(rows)[::-1], 2)
        finally:
            for worker in (self._worker, baselines):
                if worker:
                    worker.end()
            self.results["gpu"].append({"seconds": round(time.monotonic() - self.begun, 1)})
            self.out.write_text(json.dumps(self.results) + "\n")

    def _rows(self, kind: str, rows: Sequence[Row], reserve: float) -> None:
        failed_starts = 0
        for n, row in enumerate(rows):
            if self.left < reserve or failed_starts > 2:
                print(f"stopped before row {n} of {len(rows)}", file=sys.stderr)
                return
            found = self.ask("measure", row["id"])
            failed_starts += "start" in found
            self.note(kind, found)
            if n % 25 == 0 or "error" in found:
                us, guess = found.get("cold_us", [0]), row["predicted"].get("cold", {"us": "nothing"})["us"]
                said = found.get("error") or f"{statistics.median(us):.1f} µs, predicted {guess}"
                print(f"{self.seconds - self.left:.0f} s, {n + 1}/{len(rows)} {row['set']}: {said}", file=sys.stderr)

    def _sustained(self, rows: Sequence[Row], reserve: float) -> None:
        for row in heaviest(rows, self.results["rows"]):
            if self.left < reserve + 2:
                return
            self.note("sustained", self.ask("sustain", row["id"]))

    def _torch(self, baselines: Worker) -> None:
        baselines.say(str(max(5.0, min(TORCH_SECONDS, self.left - 3))))
        while self.left > 0:
            found = baselines.hear(self.left)
            if "end" in found or "gone" in found:
                self.note("torch", found)
                return
            self.note("torch", found)


def heaviest(rows: Sequence[Row], measured: Sequence[Row]) -> list[Row]:
    """Return the fastest kernels of the tensor cores, three at most of a set and problem."""
    times = {m["id"]: statistics.median(m["warm_us"]) for m in measured if m.get("warm_us")}
    known = [r for r in rows if r["id"] in times and "warm" in r["predicted"]]
    heavy = [r for r in known if r["predicted"]["warm"]["class"] in TENSOR_CLASSES]
    speeds = {r["id"]: r["flops"] / times[r["id"]] for r in heavy}
    chosen: list[Row] = []
    taken: dict[tuple[str, str], int] = defaultdict(int)
    for row in sorted((r for r in rows if r["id"] in speeds), key=lambda r: -speeds[r["id"]]):
        group = row["set"], row["problem"]
        if times[row["id"]] > 40 and taken[group] < 3 and len(chosen) < SUSTAINED_ROWS:
            taken[group] += 1
            chosen.append(row)
    return chosen


# ── counters ────────────────────────────────────────────────────────────────────────────────────────────────────────

COUNTERS = (
    "gpu__time_duration.sum", "sm__cycles_elapsed.max", "sm__cycles_active.avg", "dram__bytes_read.sum",
    "dram__bytes_write.sum", "lts__t_sectors.sum", "lts__t_sectors_op_read.sum", "lts__t_sectors_op_write.sum",
    "lts__t_sectors_lookup_hit.sum", "lts__t_sectors_lookup_miss.sum", "smsp__inst_executed.sum",
    "smsp__issue_active.sum", "sm__inst_executed_pipe_xu.sum", "sm__pipe_tensor_cycles_active.avg",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)  # fmt: skip
COUNTED_AT_ONCE, COUNTED_OF_A_GROUP, COUNT_SECONDS = 12, 3, 60.0


def count(folder: Path, out: Path, seconds: float) -> int:
    """Write what ncu counts of some rows of every set, `COUNTED_AT_ONCE` in a process, a JSON line a process.

    ncu flushes the caches before each kernel, and is told to leave the clocks alone.
    """
    begun = time.monotonic()
    known = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True).stdout
    stems = {line.split()[0] for line in known.splitlines() if "__" in line.partition(" ")[0]}
    metrics = [name for name in COUNTERS if name in stems or name.partition(".")[0] in stems]
    options = ("--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw")
    taken: dict[tuple[str, str], int] = defaultdict(int)
    rows = []
    for row in in_turns(read_rows(folder)):
        group = row["set"], row["problem"] if row["config"] else ""
        taken[group] += 1
        if taken[group] <= COUNTED_OF_A_GROUP and row["predicted"]["cold"]["us"] < 3000:
            rows.append(row)
    with out.open("w") as file:
        for first in range(0, len(rows), COUNTED_AT_ONCE):
            left = seconds - (time.monotonic() - begun)
            if left < 15:
                print(f"stopped before row {first} of {len(rows)}", file=sys.stderr)
                break
            ids = [row["id"] for row in rows[first : first + COUNTED_AT_ONCE]]
            command = ["ncu", *options, "--metrics", ",".join(metrics), sys.executable, str(Path(__file__).resolve())]
            try:
                done = subprocess.run(
                    [*command, "--once", str(folder), *ids], capture_output=True, text=True,
                    timeout=min(left, COUNT_SECONDS),
                )  # fmt: skip
                said = {"ids": ids, "code": done.returncode, "csv": done.stdout, "stderr": done.stderr[-2000:]}
            except subprocess.TimeoutExpired:
                said = {"ids": ids, "error": "time was up"}
            file.write(json.dumps(said) + "\n")
            file.flush()
            print(f"{time.monotonic() - begun:.0f} s, {first + len(ids)}/{len(rows)}", file=sys.stderr)
    return 0


def once(folder: Path, ids: Sequence[str]) -> int:
    """Launch each row twice, the second time for a profiler."""
    by_id = {row["id"]: row for row in read_rows(folder)}
    rows = [by_id[name] for name in ids]
    cuda_api.use_primary_context()
    memory = Memory(rows)
    for row in rows:
        module, _ = load(folder, row)
        launches = Launches(row, module, memory.place(row))
        launches.prepare()
        launches.queue()
        call("cuCtxSynchronize")
        launches.prepare()
        call("cuCtxSynchronize")
        call("cuProfilerStart")
        launches.queue()
        call("cuCtxSynchronize")
        call("cuProfilerStop")
        print(f"launched {row['id']} {len(row['kernels'])}", flush=True)
    return 0


# ── the command line ────────────────────────────────────────────────────────────────────────────────────────────────


def prepare_set(options: argparse.Namespace) -> None:
    """Write the data set that --set names into the folder of --prepare."""
    from benchmarks import measured_families, measured_kernels

    folder, of_time = options.prepare, (options.processes, options.seconds, options.only)
    known = read_rows(options.known) if options.known else []
    measured_kernels.write_tools(folder, TOOLS)
    if options.set == "first":
        measured_kernels.prepare_folder(folder, measured_kernels.groups(options.data), *of_time)
    elif options.set == "searches":
        measured_families.search_folder(folder, *of_time, known)
    elif options.set == "families":
        measured_kernels.prepare_folder(folder, measured_families.groups(known, ("cold",)), *of_time)
    else:
        later = (*measured_families.groups(known, ()), *measured_families.space_groups(known, ()))
        measured_kernels.prepare_folder(folder, later, *of_time)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="write kernels and predictions here")
    parser.add_argument("--data", type=Path, metavar="SHARED", help="folder of measured_kernels and fa3_machine_code")
    parser.add_argument(
        "--set", choices=("first", "families", "unpredicted", "searches"), default="first",
        help="families and searches of measured_families.py; unpredicted: families that --again predicts later",
    )  # fmt: skip
    parser.add_argument(
        "--known", type=Path, metavar="DIR", help="leave out what this folder has; searches go on from it"
    )
    parser.add_argument("--processes", type=int, default=2, help="that compile and predict (default: 2)")
    parser.add_argument("--from", type=Path, dest="source", metavar="DIR", help="time what --prepare wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results of --from")
    parser.add_argument("--seconds", type=float, default=240, help="for all of --from (default: 240)")
    parser.add_argument("--only", default="", help="rows of sets that contain this")
    parser.add_argument("--parts", default=",".join(PARTS), help="of --from, separated by commas (default: all)")
    parser.add_argument("--report", type=Path, nargs=2, metavar=("FILE", "DIR"), help="tables of the results")
    parser.add_argument(
        "--expected", type=Path, metavar="FILE", help="of --report: what measured_torch.py --expected wrote"
    )
    parser.add_argument(
        "--again", type=Path, nargs=2, metavar=("DIR", "ROWS"), help="predict what --prepare wrote again"
    )
    parser.add_argument(
        "--compare", type=Path, nargs=3, metavar=("FILE", "DIR", "ROWS"), help="errors then, and as predicted --again"
    )
    parser.add_argument(
        "--page", type=Path, nargs=3, metavar=("FILE", "ROWS", "OUT"), help="both for benchmarks/accuracy_page.py"
    )
    parser.add_argument("--freeze", type=Path, nargs=2, metavar=("DIR", "FILE"), help="write the predictions alone")
    parser.add_argument("--counters", type=Path, metavar="DIR", help="have ncu count some of what --prepare wrote")
    parser.add_argument("--once", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return work(options.worker)
    if options.once:
        return once(Path(options.once[0]), options.once[1:])
    if options.counters:
        if not options.out:
            parser.error("--counters takes --out FILE")
        return count(options.counters, options.out, options.seconds)
    if options.source:
        if not options.out:
            parser.error("--from takes --out FILE")
        rows = [row for row in read_rows(options.source) if options.only in row["set"]]
        Session(options.source, options.out, options.seconds).run(rows, options.parts.split(","))
        return 0
    from benchmarks import measured_report

    if options.report:
        results, known = read_results(options.report[0]), read_rows(options.report[1])
        print(measured_report.report(results, known))
        if options.expected:
            found = json.loads(options.expected.read_text())
            print("\n".join(measured_report.beside_references(results, known, found)))
    elif options.compare:
        file, folder, again = options.compare
        rows = [json.loads(line) for line in again.read_text().splitlines()]
        results = read_results(file)
        print(measured_report.comparison(results, read_rows(folder), rows))
        holds = {row["id"]: held_by(folder, row) for row in rows}
        print("\n".join(measured_report.simplest(measured_report.pairs_of(results, rows), holds)))
    elif options.page:
        file, again, out = options.page
        rows = [json.loads(line) for line in again.read_text().splitlines()]
        out.write_text(json.dumps(measured_report.page_rows(read_results(file), rows)))
    elif options.again:
        from benchmarks.measured_kernels import predict_folder_again

        predict_folder_again(*options.again, options.processes, options.only)
    elif options.freeze:
        options.freeze[1].write_text(measured_report.frozen(read_rows(options.freeze[0])))
    elif options.prepare:
        if options.set == "first" and not options.data:
            parser.error("--prepare takes --data SHARED, or another --set")
        prepare_set(options)
    else:
        parser.error("say --prepare, --from, --report, --again or --compare")
    return 0


if __name__ == "__main__":
    sys.exit(main())
