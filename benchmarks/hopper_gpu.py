"""Measure on an H100 what `hopper_bench.py` prepared. It needs NumPy, but neither a compiler nor torch.

Each group runs in a process of its own with a time limit, so that a fault or a hang costs no more than its group.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.hopper_bench import ARCHIVE, MANIFEST, MB, SMS, Bench, value_of

GROUP_SECONDS = 20.0
BENCH_SECONDS = 5.0
POWER_SECONDS = 1.2
"""of sustained work at each duty"""
ALL_SECONDS = 74.0
REPEATS = 7
FLUSHED = 256 * MB
KEPT = ("group", "name", "unit", "constant", "predicted", "timed", "n", "ops", "p", "q", "grid", "threads")


class Gpu:
    """The device through the driver: memory, launches, and what they leave in `out`."""

    def __init__(self, folder: Path) -> None:
        from evoengine.devices import cuda_api

        self.api = cuda_api
        cuda_api._PROTOTYPES |= {
            "cuMemAlloc_v2": (ctypes.c_void_p, ctypes.c_size_t),
            "cuMemFree_v2": (ctypes.c_uint64,),
            "cuMemcpyDtoH_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t),
            "cuCtxSynchronize": (),
        }
        cuda_api.use_primary_context()
        self.archive = zipfile.ZipFile(folder / ARCHIVE)
        self.functions: dict[tuple[str, int], Any] = {}
        self.out, self.sink = self.allocate(1 << 20), self.allocate(1 << 22)
        self.data, self.data_bytes, self.held = 0, 0, (0, 0)

    def allocate(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        self.api.call("cuMemAlloc_v2", ctypes.byref(pointer), size)
        self.api.memset(pointer.value, 0, size)
        return pointer.value

    def function(self, bench: Bench, key: str) -> Any:
        """Return the kernel; where the driver refuses the cubin, from the source by this machine's own compiler."""
        wanted = (key, bench.shared)
        if wanted not in self.functions:
            try:
                module = self.api.Module(self.archive.read(f"{key}.cubin"))
            except self.api.CudaError as error:
                print(f"{bench.name}: {error}; compiling it here", flush=True)
                module = self.api.Module(compiled_here(self.archive.read(f"{key}.cu").decode()))
            function = module.function("k")
            function.allow_shared(bench.shared)
            self.functions[wanted] = function
        return self.functions[wanted]

    def buffer(self, bench: Bench) -> None:
        """Let `data` be what the bench reads: zeros, or a chain of pointers in random order."""
        wanted = (bench.data, bench.chase)
        if self.held == wanted or (not bench.chase and not self.held[1] and bench.data <= self.data_bytes):
            return
        if bench.data > self.data_bytes:
            if self.data:
                self.api.call("cuMemFree_v2", self.data)
            self.data, self.data_bytes = self.allocate(bench.data), bench.data
        self.api.memset(self.data, 0, self.data_bytes)
        if bench.chase:
            count = bench.data // bench.chase
            order = np.concatenate([[0], 1 + np.random.default_rng(1).permutation(count - 1)])
            words = np.zeros(bench.data // 8, np.uint64)
            words[order * (bench.chase // 8)] = self.data + np.roll(order, -1) * bench.chase
            self.api.call("cuMemcpyHtoD_v2", self.data, words.tobytes(), bench.data)
        self.held = wanted

    def launch(self, bench: Bench, key: str, n: int, p: int, q: int, grid: int | None = None, stream: int = 0) -> None:
        values: list[Any] = [np.uint64(self.out), np.uint64(self.sink), np.uint64(self.data)]
        values += [np.int32(n), np.int32(p), np.int32(q)]
        if bench.box:
            values.append(self.tensor_map(bench))
        parameters = self.api.Parameters(values)
        size = (grid or bench.grid, 1, 1)
        self.function(bench, key).launch(size, (bench.threads, 1, 1), bench.shared, parameters, stream)

    def tensor_map(self, bench: Bench) -> bytes:
        """Return the map of `data` as rows of 64 halves, swizzled by 128 bytes."""
        memory = ctypes.create_string_buffer(256)
        start = -ctypes.addressof(memory) % 128
        dims, box = (ctypes.c_uint64 * 2)(64, bench.data // 128), (ctypes.c_uint32 * 2)(64, bench.box)
        strides, ones = (ctypes.c_uint64 * 2)(128, 128), (ctypes.c_uint32 * 2)(1, 1)
        self.api.call(
            "cuTensorMapEncodeTiled", ctypes.addressof(memory) + start, 6, 2, self.data, dims, strides, box, ones,
            0, 3, 3, 0,
        )  # fmt: skip
        return memory.raw[start : start + 128]

    def wait(self) -> None:
        self.api.call("cuCtxSynchronize")

    def read(self, words: int) -> np.ndarray:
        """Return the first words of `out` [words] uint64, when all launches have ended."""
        self.wait()
        found = np.empty(words, np.uint64)
        self.api.call("cuMemcpyDtoH_v2", found.ctypes.data, self.out, found.nbytes)
        return found

    def sum_of_sink(self) -> int:
        found = np.empty(1 << 12, np.uint32)
        self.api.call("cuMemcpyDtoH_v2", found.ctypes.data, self.sink, found.nbytes)
        return int(found.sum(dtype=np.uint64))

    def spans(self, bench: Bench) -> np.ndarray:
        """Return from the first warp's start to the last one's end, [blocks] clocks."""
        warps = bench.threads // 32
        pairs = self.read(2 * bench.grid * warps).reshape(bench.grid, warps, 2).astype(np.int64)
        return (pairs[:, :, 1].max(1) - pairs[:, :, 0].min(1)).astype(float)

    def timed(self, call: Callable[[], None]) -> float:
        """Return the microseconds of what `call` queues."""
        start, end = self.api.Event(), self.api.Event()
        start.record()
        call()
        end.record()
        self.wait()
        return float(start.elapsed_us(end))


def compiled_here(text: str) -> bytes:
    """Return the cubin by this machine's own NVRTC, which CuPy finds."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    nvrtc.compileProgram(program, ("--gpu-architecture=sm_90a", "--std=c++17"))
    return bytes(nvrtc.getCUBIN(program)) + b"\0"  # CuPy omits the last byte, a zero


def of(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"value": statistics.median(values), "min": min(values), "max": max(values)}


def slope(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    """Take the slope of two lengths; for kind `cold` with other lines in the L2 before each launch."""
    flush = gpu.allocate(FLUSHED) if bench.kind == "cold" else 0
    gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
    found, spans = [], []
    for _ in range(REPEATS):
        clocks = []
        for n in bench.n:
            if flush:
                gpu.api.memset(flush, 0, FLUSHED)
            gpu.launch(bench, key, n, bench.p, bench.q)
            clocks.append(float(np.median(gpu.spans(bench))))
        spans.append(clocks)
        found.append(value_of(bench, clocks))
    if flush:
        gpu.api.call("cuMemFree_v2", flush)
    return {**of(found), "spans": spans[-1]}


def ladder_times(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    n = bench.n[0]
    for _ in range(2):
        gpu.launch(bench, key, n, bench.p, bench.q)
    times = gpu.read(n * len(bench.steps)).reshape(-1, n)
    return {"ladder": {k: of([float(x) for x in row]) for k, row in zip(bench.steps, times, strict=True)}}


def samples(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    for _ in range(2):
        gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
    times = gpu.read(bench.n[0] * bench.grid).astype(float)
    histogram = Counter(int(x) // 8 * 8 for x in times)
    return {**of(list(times)), "histogram of 8 clocks": dict(sorted(histogram.items()))}


def side_by_side(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    """Time the side work alone and beside products, and the products between its start and its end."""
    alone, both, turn = [], [], []
    for beside_products in (0, 1):
        turns = 64
        for _ in range(REPEATS):
            clocks = []
            for n in bench.n:
                while True:
                    gpu.launch(bench, key, n, beside_products, turns)
                    words = gpu.read(64 + turns).astype(np.int64)
                    pairs = words[: 2 * bench.threads // 32].reshape(-1, 2)
                    side = (int(pairs[4:, 0].min()), int(pairs[4:, 1].max()))
                    if not beside_products or words[63 + turns] > side[1] or turns > 1500:
                        break
                    turns *= 2
                clocks.append(float(side[1] - side[0]))
                if beside_products and n == bench.n[1]:
                    stamps = words[64 : 64 + turns]
                    stamps = stamps[(stamps > side[0]) & (stamps < side[1])]
                    turn.append(float(stamps[-1] - stamps[0]) / max(1, len(stamps) - 1))
            (both if beside_products else alone).append(value_of(bench, clocks))
    loss = 1 - statistics.median(alone) / statistics.median(both)
    return {
        **of(both), "alone": of(alone), "loss of rate": loss, "clocks of eight products": of(turn),
        "their clocks by the data sheet": bench.steps[0], "turns": turns,
    }  # fmt: skip


def by_events(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
    times = [gpu.timed(lambda: gpu.launch(bench, key, bench.n[0], bench.p, bench.q)) for _ in range(REPEATS)]
    return of([bench.bytes / us / 1e3 for us in times])


def launch_times(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    function = gpu.function(bench, key)
    values = [np.uint64(gpu.out), np.uint64(gpu.sink), np.uint64(gpu.data), np.int32(0), np.int32(0), np.int32(0)]
    parameters = gpu.api.Parameters(values)

    def run(count: int, grid: int = 1, on: int = 0) -> None:
        for _ in range(count):
            function.launch((grid, 1, 1), (32, 1, 1), 0, parameters, on)

    run(10)
    graph = gpu.api.Graph(lambda on: run(200, on=on))
    wide = gpu.api.Graph(lambda on: run(200, grid=SMS, on=on))
    graph.launch()
    wide.launch()
    between = [gpu.timed(lambda: None) for _ in range(30)]
    single = [gpu.timed(lambda: run(1)) for _ in range(30)]
    return {
        **of([gpu.timed(graph.launch) / 200 for _ in range(REPEATS)]),
        "in a graph, 132 blocks": of([gpu.timed(wide.launch) / 200 for _ in range(REPEATS)]),
        "back to back in a stream": of([gpu.timed(lambda: run(1000)) / 1000 for _ in range(REPEATS)]),
        "two events with nothing between them": of(between),
        "one launch between two events": of(single),
    }


def block_starts(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    few, many_blocks = SMS * 100, SMS * 1000
    gpu.launch(bench, key, 0, 0, 0, grid=many_blocks)
    found = []
    for _ in range(REPEATS):
        times = [gpu.timed(lambda g=g: gpu.launch(bench, key, 0, 0, 0, grid=g)) for g in (few, many_blocks)]
        found.append((times[1] - times[0]) / 900 * 1980)
    return {**of(found), "at MHz": 1980}


def places_of(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
    return {"value": float(bench.grid), "min": 0.0, "max": 0.0, "places": [int(x) for x in gpu.read(bench.grid)]}


def idle_clock(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    found = []
    for _ in range(REPEATS):
        gpu.launch(bench, key, 0, 0, 0)
        clocks, nanoseconds = gpu.read(2).astype(float)
        found.append(clocks / nanoseconds * 1e3)
    return of(found)


def sustained(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    """Repeat launches for POWER_SECONDS, and report the last half: MHz, use of the tensor cores, watts."""
    board, rows = Board(), []
    start = time.monotonic()
    while time.monotonic() - start < POWER_SECONDS:
        gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
        gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
        time.sleep(0.025)
        reading = board.read()
        words = gpu.read(4 * SMS).reshape(SMS, 4).astype(float)
        clocks, nanoseconds, bursts = (float(np.median(words[:, i])) for i in range(3))
        use = bursts * bench.steps[0] / clocks
        rows.append({"MHz": clocks / nanoseconds * 1e3, "use": use, **reading})
    late = rows[len(rows) // 2 :]
    result: dict[str, Any] = of([row["MHz"] for row in late])
    result["use of the tensor cores"] = statistics.median(row["use"] for row in late)
    result["course"] = rows[:: max(1, len(rows) // 8)]
    for name in ("W", "NVML MHz", "°C"):
        if name in rows[-1]:
            result[name] = statistics.median(row[name] for row in late)
    return result


def clock_of(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    """Return the clock and the use of the tensor cores of launches of which each finds the GPU rested."""
    rows, board = [], Board()
    for _ in range(REPEATS):
        time.sleep(0.02)
        gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
        words = gpu.read(5 * bench.grid).astype(float)
        clocks, nanoseconds, turns, _ = np.median(words[: 4 * bench.grid].reshape(-1, 4), axis=0)
        rows.append((clocks / nanoseconds * 1e3, turns * bench.steps[0] / clocks, clocks / turns))
        side = float(np.median(words[4 * bench.grid :])) / clocks * 1e3
    mhz, use, turn = (statistics.median(row[i] for row in rows) for i in range(3))
    found = of([row[0] for row in rows]) if bench.kind == "clock" else of([row[2] for row in rows])
    more = {"MHz": mhz, "use of the tensor cores": use, "clocks of a turn": turn, "turns beside, in 1000 clocks": side}
    return {**found, **more, **board.read()}


def loaded_latency(gpu: Gpu, bench: Bench, key: str) -> dict[str, Any]:
    """Return block 0's latency, and the bytes a clock and SM that the other blocks loaded meanwhile."""
    found, rates = [], []
    for _ in range(REPEATS):
        gpu.launch(bench, key, bench.n[0], bench.p, bench.q)
        words = gpu.read(2 * bench.grid).astype(float)
        found.append(words[0] / bench.ops)
        turns, clocks = words[2::2], words[3::2]
        rates.append(float(np.median(turns * bench.bytes / clocks)) if bench.p >= 0 else 0.0)
    return {**of(found), "bytes/clock of each of the other SMs": statistics.median(rates)}


class Board:
    """What NVML's sensors say; nothing where there is no NVML. It only reads."""

    def __init__(self) -> None:
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
            self.device = ctypes.c_void_p()
            self.works = not self.nvml.nvmlInit_v2() and not self.nvml.nvmlDeviceGetHandleByIndex_v2(
                0, ctypes.byref(self.device)
            )
        except (OSError, AttributeError):
            self.works = False

    def read(self) -> dict[str, float]:
        if not self.works:
            return {}
        value, reasons, found = ctypes.c_uint(), ctypes.c_ulonglong(), {}
        for name, call, argument, scale in (
            ("W", "nvmlDeviceGetPowerUsage", None, 1e-3), ("NVML MHz", "nvmlDeviceGetClockInfo", 1, 1.0),
            ("°C", "nvmlDeviceGetTemperature", 0, 1.0),
        ):  # fmt: skip
            arguments = () if argument is None else (argument,)
            if not self.nvml[call](self.device, *arguments, ctypes.byref(value)):
                found[name] = value.value * scale
        with suppress(AttributeError):
            if not self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.device, ctypes.byref(reasons)):
                found["reasons"] = float(reasons.value)
        return found


KINDS: dict[str, Callable[[Gpu, Bench, str], dict[str, Any]]] = {
    "slope": slope, "chase": slope, "cold": slope, "ladder": ladder_times, "samples": samples, "chase_samples": samples,
    "beside": side_by_side, "events": by_events, "launches": launch_times, "blocks": block_starts,
    "mhz": idle_clock, "power": sustained, "clock": clock_of, "clock_turns": clock_of, "loaded": loaded_latency,
    "places": places_of,
}  # fmt: skip


def bench_of(entry: dict[str, Any]) -> Bench:
    own = {name: value for name, value in entry.items() if name in Bench.__dataclass_fields__}
    return Bench(**{**own, "text": "", "n": tuple(own["n"]), "steps": tuple(own["steps"])})


def measure_group(folder: Path, group: str, first: int) -> int:
    """Measure a group's benches from number `first` on, a line of JSON for each; the process of its own."""
    entries = [e for e in json.loads((folder / MANIFEST).read_text())["benches"] if e["group"] == group]
    gpu = Gpu(folder)
    for number, entry in enumerate(entries[first:], first):
        print(json.dumps({"begins": number}), flush=True)
        bench, start = bench_of(entry), time.monotonic()
        # A hung kernel blocks this thread in the driver; the parent goes on behind the bench in a new process.
        watchdog = threading.Timer(BENCH_SECONDS, os._exit, (3,))
        watchdog.start()
        try:
            gpu.buffer(bench)
            gpu.wait()
            result = KINDS[bench.kind](gpu, bench, entry["key"])
            result["sum"] = gpu.sum_of_sink()
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:300]}
        watchdog.cancel()
        result["seconds"] = round(time.monotonic() - start, 4)
        print(json.dumps({"number": number, "result": result}), flush=True)
        if "CUDA_ERROR" in result.get("error", ""):
            return 1
    return 0


def measure(folder: Path, out: Path, groups: Sequence[str]) -> int:
    """Measure all groups, each in processes of its own, and write FILE after each."""
    manifest = json.loads((folder / MANIFEST).read_text())
    results: dict[str, Any] = {"constants": manifest["constants"], "benches": [], "log": []}
    names = list(dict.fromkeys(entry["group"] for entry in manifest["benches"]))
    start = time.monotonic()
    with suppress(Exception):  # the groups' processes say what is wrong
        from evoengine.devices import cuda_api

        cuda_api.use_primary_context()  # keeps the driver initialised from one group's process to the next
    for group in [name for name in names if not groups or name in groups]:
        entries = [entry for entry in manifest["benches"] if entry["group"] == group]
        first, tries = 0, 0
        began = time.monotonic()
        while first < len(entries) and tries < 4:
            left = min(began + GROUP_SECONDS, start + ALL_SECONDS) - time.monotonic()
            if left < 1:
                results["log"].append(f"{group}: no time left for {len(entries) - first} benches")
                break
            done, reached, said = run_group(folder, group, first, left)
            results["log"] += [f"{group}: {line}" for line in said]
            for number, result in sorted(done.items()):
                entry = entries[number]
                results["benches"].append({**{name: entry[name] for name in KEPT}, **result})
                show(entry, result)
            first, tries = reached + 1, tries + 1
        results["seconds"] = time.monotonic() - start
        out.write_text(json.dumps(results, indent=1))
        print(f"-- {group}: {time.monotonic() - began:.1f} s, {results['seconds']:.1f} s in all", flush=True)
    return 0


def run_group(folder: Path, group: str, first: int, seconds: float) -> tuple[dict[int, dict[str, Any]], int, list[str]]:
    """Return the results by number, the last bench that was begun, and what the process said besides."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("hopper_constants.py")),
        "--from",
        str(folder),
        "--group",
        group,
        "--first",
        str(first),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        text = process.communicate(timeout=seconds)[0]
        said = []
    except subprocess.TimeoutExpired:
        process.kill()
        text = process.communicate()[0]
        said = [f"killed after {seconds:.0f} s"]
    done, reached = {}, first - 1
    for line in text.splitlines():
        try:
            about = json.loads(line)
            if "begins" in about:
                reached = about["begins"]
            else:
                done[about["number"]] = about["result"]
        except (ValueError, TypeError, KeyError):
            said.append(line)
    return done, max(reached, first), said[-30:]


def show(entry: dict[str, Any], result: dict[str, Any]) -> None:
    text = f"{entry['group']:10} {entry['name'][:74]:74}"
    if "value" in result:
        text += f" {result['min']:9.2f} {result['value']:9.2f} {result['max']:9.2f} {entry['unit']}"
        text += f"; predicted {entry['predicted']:.2f}" if isinstance(entry["predicted"], float) else ""
        text += f"; loss {result['loss of rate']:.3f}" if "loss of rate" in result else ""
    elif "ladder" in result:
        text += " " + ", ".join(f"{k}: {row['value']:.0f}" for k, row in result["ladder"].items())
    else:
        text += " " + result["error"]
    print(text, flush=True)
