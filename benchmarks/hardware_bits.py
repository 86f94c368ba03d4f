"""Hold the results of the machine-code executor against those of a GPU, bit by bit.

    python benchmarks/hardware_bits.py --prepare DIR              here; no GPU is needed
    python benchmarks/hardware_bits.py --from DIR --out FILE.json on a machine with an H100
    python benchmarks/hardware_bits.py --from DIR --against FILE.npz --out AGAIN.json   here, once more

The first command compiles the cases of hardware_probes.py for sm_90a, executes them on the executor and stores
binaries, inputs and results in DIR. The second launches the same binaries on the GPU and compares. It needs NumPy and
the CUDA driver, nothing of this project. The GPU's bits of every case that differs, and of those that the executor
cannot run, are stored beside FILE.json as FILE.npz, so that the executor can be corrected without a GPU: the third
command executes the cases again and compares with those bits, or with the executor's stored ones where the GPU's were
the same.

DIR holds manifest.json and arrays.zip, whose members are raw bytes named by their hash. A case has `buffers`, by name:
`bytes`, `init` (a member, "ff" or "zero"), `role` (in, out, inout, scratch), `regions` (labels and element types of
equal parts, of outputs), `expect` (the member with the executor's bytes, or null); and `launches`, in order, over them.
A case with `sweep` has a special function at many equally spaced inputs: of it the GPU's distance from the correctly
rounded result is stored, in FILE.sweeps.npz, int8 per input.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

Case = dict[str, Any]
SAMPLES = 20
CASE_SECONDS, SUSPECT_SECONDS = 15.0, 4.0
"""without a result after which a process is ended; its start counts too"""
TOTAL_SECONDS = 60.0
STORED_BYTES = 8 << 20
SWEEP_BYTES = 15 << 20
ALIGNED = 128
"""of a tensor map"""
TYPES: dict[str, tuple[str, int]] = {
    "u8": ("<u1", 0), "u16": ("<u2", 0), "u32": ("<u4", 0), "u64": ("<u8", 0),
    "f16": ("<u2", 10), "bf16": ("<u2", 7), "f32": ("<u4", 23), "f64": ("<u8", 52),
}  # fmt: skip
"""element type → NumPy type of its bits, and the bits of its mantissa; 0 for an integer"""

# ── comparison ──────────────────────────────────────────────────────────────────────────────────────────────────────


def nan_of(bits: np.ndarray, mantissa: int) -> np.ndarray:
    """Return which elements are NaN."""
    width = 8 * bits.itemsize
    magnitude = bits & np.array((1 << (width - 1)) - 1, bits.dtype)
    return magnitude > np.array(((1 << (width - 1 - mantissa)) - 1) << mantissa, bits.dtype)


def ordered(bits: np.ndarray) -> np.ndarray:
    """Return integers whose difference is the distance of floats in units in the last place, as float64.

    Distances beyond 2^53 of 64-bit floats are inexact.
    """
    width = 8 * bits.itemsize
    magnitude = (bits & np.array((1 << (width - 1)) - 1, bits.dtype)).astype(np.int64)
    return np.where(bits >> np.array(width - 1, bits.dtype), -magnitude, magnitude)


def compare(gpu: bytes, executor: bytes, kind: str) -> dict[str, Any]:
    """Compare the bits of two arrays of an element type.

    `differ` counts elements with other bits, `nan_only` those of them where both are NaN, `nan_mismatch` those where
    one is; `max_ulp` is the largest distance of two numbers. `first` are indices of elements that differ, numbers
    that are furthest apart first.
    """
    dtype, mantissa = TYPES[kind]
    a, b = np.frombuffer(gpu, dtype), np.frombuffer(executor, dtype)
    unequal = a != b
    found: dict[str, Any] = {"of": int(a.size), "differ": int(unequal.sum())}
    if not found["differ"]:
        return found
    places = np.flatnonzero(unequal)
    found["share"] = found["differ"] / found["of"]
    distance = np.zeros(len(places))
    if mantissa:
        a_nan, b_nan = nan_of(a[places], mantissa), nan_of(b[places], mantissa)
        numbers = ~(a_nan | b_nan)
        distance = np.abs(ordered(a[places]) - ordered(b[places])).astype(np.float64) * numbers
        found |= {
            "nan_only": int((a_nan & b_nan).sum()),
            "nan_mismatch": int((a_nan ^ b_nan).sum()),
            "max_ulp": float(distance.max()),
            "median_ulp": float(np.median(distance[numbers])) if numbers.any() else 0.0,
        }
        distance[a_nan ^ b_nan] = np.inf
        distance[a_nan & b_nan] = -1
    else:
        distance = np.abs(a[places].astype(np.float64) - b[places].astype(np.float64))
        found["max_difference"] = float(distance.max())
    worst = np.argsort(-distance, kind="stable")[: SAMPLES // 2]
    spread = np.linspace(0, len(places) - 1, SAMPLES - len(worst)).astype(int)
    found["first"] = [int(places[n]) for n in dict.fromkeys([*worst, *spread])]
    return found


def compare_buffer(name: str, buffer: dict[str, Any], gpu: bytes, executor: bytes, inputs: dict[str, bytes]) -> list:
    """Return the regions of a buffer that differ, with samples: inputs of the element's place, both results, in hex.

    `inputs` have an element for each element of a region; others are left out.
    """
    found = []
    regions = buffer["regions"]
    size = buffer["bytes"] // len(regions)
    for number, (label, kind) in enumerate(regions):
        part = slice(number * size, (number + 1) * size)
        one = compare(gpu[part], executor[part], kind)
        if not one["differ"]:
            continue
        width = np.dtype(TYPES[kind][0]).itemsize
        samples = []
        for index in one.pop("first"):
            at = index * width
            given = {}
            for other, data in inputs.items():
                wide = len(data) * buffer.get("element_bytes", width) // size
                place = at // buffer.get("element_bytes", width) * wide
                given[other] = data[place : place + wide][::-1].hex()
            bits = [x[part][at : at + width][::-1].hex() for x in (gpu, executor)]
            samples.append({"index": index, **given, "gpu": bits[0], "executor": bits[1]})
        found.append({"buffer": name, "label": label, "type": kind, **one, "samples": samples})
    return found


def sweep_distance(sweep: dict[str, Any], gpu: bytes) -> np.ndarray:
    """Return the GPU's result minus the correctly rounded one, in units in the last place, int8 for each input."""
    results = np.frombuffer(gpu, "<u4")
    bits = np.uint32(sweep["start"]) + np.arange(len(results), dtype=np.uint32) * np.uint32(sweep["stride"])
    x = bits.view(np.float32).astype(np.float64)
    functions = {"ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos,
                 "tanh": np.tanh, "rsqrt": lambda v: 1 / np.sqrt(v)}  # fmt: skip
    right = functions[sweep["function"]](x).astype(np.float32).view(np.uint32)
    return np.clip(ordered(results) - ordered(right), -128, 127).astype(np.int8)


# ── the driver ──────────────────────────────────────────────────────────────────────────────────────────────────────


class DriverError(Exception):
    """A call of the driver failed."""


class Driver:
    """As much of the CUDA driver API as launching takes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", ctypes.c_uint(0))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.device = device

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()} ({code})")

    def describe(self) -> dict[str, object]:
        name, version = ctypes.create_string_buffer(256), ctypes.c_int()
        self.call("cuDeviceGetName", name, 256, self.device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return {"device": name.value.decode(), "driver": version.value}

    def allocate(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size, 16)))
        return pointer.value

    def free(self, pointer: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def upload(self, pointer: int, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), data, ctypes.c_size_t(len(data)))

    def download(self, pointer: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(pointer), ctypes.c_size_t(size))
        return data.raw

    def load(self, cubin: bytes) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin)
        return module

    def set_constant(self, module: ctypes.c_void_p, name: str, data: bytes) -> None:
        pointer, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuModuleGetGlobal_v2", ctypes.byref(pointer), ctypes.byref(size), module, name.encode())
        self.upload(pointer.value, data[: size.value])

    def launch(self, module: ctypes.c_void_p, launch: dict[str, Any], values: list[bytes]) -> None:
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, launch["entry"].encode())
        if launch["shared"] > 48 << 10:
            self.call("cuFuncSetAttribute", function, 8, launch["shared"])
        held = []
        for value in values:
            memory = ctypes.create_string_buffer(len(value) + ALIGNED)
            start = ctypes.addressof(memory) + -ctypes.addressof(memory) % ALIGNED
            ctypes.memmove(start, value, len(value))
            held.append((memory, start))
        pointers = (ctypes.c_void_p * max(len(held), 1))(*(start for _, start in held))
        sizes = map(ctypes.c_uint, (*launch["grid"], *launch["block"], launch["shared"]))
        self.call("cuLaunchKernel", function, *sizes, None, pointers, None)

    def encode(self, tensor_map: dict[str, Any], pointer: int) -> bytes:
        rank = len(tensor_map["dims"])
        memory = ctypes.create_string_buffer(2 * ALIGNED)
        start = ctypes.addressof(memory) + -ctypes.addressof(memory) % ALIGNED
        self.call(
            "cuTensorMapEncodeTiled", ctypes.c_void_p(start), {"fp16": 6, "bf16": 9, "fp32": 7}[tensor_map["dtype"]],
            ctypes.c_uint(rank), ctypes.c_uint64(pointer), (ctypes.c_uint64 * rank)(*tensor_map["dims"]),
            (ctypes.c_uint64 * max(rank - 1, 1))(*tensor_map["strides"]), (ctypes.c_uint32 * rank)(*tensor_map["box"]),
            (ctypes.c_uint32 * rank)(*[1] * rank), 0, {0: 0, 32: 1, 64: 2, 128: 3}[tensor_map["swizzle"]], 3, 0,
        )  # fmt: skip
        return ctypes.string_at(start, ALIGNED)


def compile_here(source: str) -> bytes:
    """Compile for sm_90a with the NVRTC that CuPy finds, where the stored binary does not load."""
    import os
    import site

    from cupy_backends.cuda.libs import nvrtc

    folders = [f"{place}/{name}" for place in site.getsitepackages() for name in ("nvidia/cu13/include",
               "nvidia/cuda_runtime/include", "cupy/_core/include")] + ["/usr/local/cuda/include"]  # fmt: skip
    program = nvrtc.createProgram(source, "case.cu", (), ())
    includes = tuple(f"-I{folder}" for folder in folders if os.path.isdir(folder))
    nvrtc.compileProgram(program, ("-arch=sm_90a", "--std=c++17", *includes))
    return bytes(nvrtc.getCUBIN(program))


# ── cases on the GPU ────────────────────────────────────────────────────────────────────────────────────────────────


class Arrays:
    """The members of arrays.zip."""

    def __init__(self, folder: Path) -> None:
        self._file = zipfile.ZipFile(folder / "arrays.zip")

    def __getitem__(self, key: str) -> bytes:
        return self._file.read(key)

    def initial(self, buffer: dict[str, Any]) -> bytes:
        if buffer["init"] in ("ff", "zero"):
            return (b"\xff" if buffer["init"] == "ff" else b"\0") * int(buffer["bytes"])
        return self[buffer["init"]]


def launch_case(driver: Driver, case: Case, arrays: Arrays, notes: list[str]) -> dict[str, bytes]:
    """Run a case's launches; returns what its outputs hold then, by name. Raises DriverError."""
    try:
        module = driver.load(arrays[case["cubin"]])
    except DriverError as error:
        if not case["source"]:
            raise
        notes.append(f"compiled on this machine, as {error}")
        module = driver.load(compile_here(arrays[case["source"]].decode()))
    pointers = {}
    for name, buffer in case["buffers"].items():
        pointers[name] = driver.allocate(buffer["bytes"])
        driver.upload(pointers[name], arrays.initial(buffer))
    for launch in case["launches"]:
        values = []
        for argument in launch["arguments"]:
            if "buffer" in argument:
                values.append(pointers[argument["buffer"]].to_bytes(8, "little"))
            elif "scalar" in argument:
                values.append(bytes.fromhex(argument["scalar"]))
            elif "map" in argument:
                values.append(driver.encode(argument["map"], pointers[argument["map"]["tensor"]]))
            else:
                driver.set_constant(module, argument["constant"], arrays[argument["data"]])
        driver.launch(module, launch, values)
        driver.call("cuCtxSynchronize")
    outputs = {
        name: driver.download(pointers[name], buffer["bytes"])
        for name, buffer in case["buffers"].items()
        if buffer["role"] in ("out", "inout")
    }
    for pointer in pointers.values():
        driver.free(pointer)
    driver.call("cuModuleUnload", module)
    return outputs


def judge(case: Case, outputs: dict[str, bytes], arrays: Arrays) -> list:
    """Return the regions of a case's outputs that differ from the executor's."""
    inputs = {name: arrays[case["buffers"][name]["init"]] for name in case.get("inputs", ())}
    found = []
    for name, data in outputs.items():
        buffer = case["buffers"][name]
        if buffer["expect"]:
            found += compare_buffer(name, buffer, data, arrays[buffer["expect"]], inputs)
    return found


def run_child(folder: Path, cases: list[Case], results: Path) -> int:
    """Run cases in this process; appends a line of JSON for each to `results`. Stops at an error of the driver."""
    arrays = Arrays(folder)
    driver = Driver()
    with results.open("a") as lines:
        for case in cases:
            notes: list[str] = []
            begun = time.monotonic()
            found: dict[str, Any] = {"id": case["id"], "executor": case["executor"]}
            failed = False
            try:
                outputs = launch_case(driver, case, arrays, notes)
            except Exception as error:
                failed = True
                found["gpu_error"] = str(error) or repr(error)
            else:
                if "sweep" in case:
                    distance = sweep_distance(case["sweep"], outputs.pop("o"))
                    counts = np.bincount(distance.astype(np.int16) + 128)
                    found["sweep"] = {str(d - 128): int(n) for d, n in enumerate(counts) if n}
                    np.savez_compressed(results.parent / f"{case['number']}.sweep.npz", **{case["id"]: distance})
                found["differences"] = judge(case, outputs, arrays)
                found["equal"] = case["executor"] == "executed" and not found["differences"]
                if outputs and not found["equal"]:
                    np.savez_compressed(
                        results.parent / f"{case['number']}.npz",
                        **{f"{case['id']}|{name}": np.frombuffer(data, np.uint8) for name, data in outputs.items()},
                    )
            found["seconds"] = round(time.monotonic() - begun, 3)
            if notes:
                found["notes"] = notes
            lines.write(json.dumps(found) + "\n")
            lines.flush()
            if failed:
                return 3
    return 0


def run_all(folder: Path, out: Path) -> int:
    """Run every case in child processes; one that faults or hangs costs its own result alone."""
    deadline = time.monotonic() + TOTAL_SECONDS
    cases = json.loads((folder / "manifest.json").read_text())["cases"]
    cases.sort(key=lambda c: c["group"].startswith("suspect"))
    work = Path(tempfile.mkdtemp(prefix="bits-"))
    results, wanted = work / "results.jsonl", work / "wanted.json"
    results.touch()
    done: list[dict[str, Any]] = []
    about: dict[str, object] = {}
    try:
        about = json.loads(subprocess.run([sys.executable, __file__, "--about"], capture_output=True, text=True,
                                          timeout=20).stdout)  # fmt: skip
    except (ValueError, subprocess.SubprocessError) as error:
        about = {"error": str(error)}
    print(about, flush=True)
    left = list(cases)
    while left and time.monotonic() < deadline:
        group = [c for c in left if c["group"] == left[0]["group"]]
        wanted.write_text(json.dumps(group))
        child = [sys.executable, __file__, "--child", str(wanted), "--from", str(folder), "--out", str(results)]
        suspect = group[0]["group"].startswith("suspect")
        why = watch(child, results, SUSPECT_SECONDS if suspect else CASE_SECONDS, deadline)
        done = read_results(results)
        finished = {one["id"] for one in done}
        remaining = [c for c in group if c["id"] not in finished]
        if remaining and not (done and "gpu_error" in done[-1] and why.startswith("the process ended with 3")):
            lost = {"id": remaining[0]["id"], "executor": remaining[0]["executor"], "gpu_error": why}
            with results.open("a") as lines:
                lines.write("\n" + json.dumps(lost) + "\n")
            done.append(lost)
            finished.add(lost["id"])
        left = [c for c in left if c["id"] not in finished]
        report(out, about, cases, done, left)
    stored_all = store(out.with_suffix(".npz"), work, cases, done, "", STORED_BYTES)
    store(out.with_suffix(".sweeps.npz"), work, cases, done, ".sweep", SWEEP_BYTES)
    report(out, {**about, "all_bits_stored": stored_all}, cases, done, left)
    print_summary(done, left)
    return 0


def read_results(results: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of results; a process that was ended may leave a part of one."""
    found = []
    for line in results.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def watch(command: list[str], results: Path, seconds: float, deadline: float) -> str:
    """Run a process that appends to `results`, and end it where that stays as it is; returns how it ended."""
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(command, stderr=errors) as child:
        last, size = time.monotonic(), results.stat().st_size
        while child.poll() is None:
            time.sleep(0.02)
            if results.stat().st_size != size:
                last, size = time.monotonic(), results.stat().st_size
            if time.monotonic() > min(last + seconds, deadline):
                child.kill()
                return f"no result for {seconds:g} seconds, or none before the end of the time for all"
        errors.seek(0)
        return f"the process ended with {child.returncode}: {errors.read()[-800:]}"


def report(out: Path, about: dict, cases: list[Case], done: list[dict], left: list[Case]) -> None:
    summary = {
        "cases": len(cases),
        "equal": sum(one.get("equal", False) for one in done),
        "different": sum(bool(one.get("differences")) for one in done),
        "executor_cannot": sum(one["executor"].startswith(("unsupported", "failed")) for one in done),
        "gpu_errors": sum("gpu_error" in one for one in done),
        "not_run": [c["id"] for c in left],
    }
    out.write_text(json.dumps({**about, **summary, "results": done}, indent=1) + "\n")


def store(to: Path, work: Path, cases: list[Case], done: list[dict], what: str, most: int) -> bool:
    """Put what the children stored of cases into one file of `most` bytes, smallest first; False if not all fit."""
    finished = {one["id"] for one in done}
    parts = [work / f"{c['number']}{what}.npz" for c in cases if c["id"] in finished]
    parts = sorted((p for p in parts if p.exists()), key=lambda p: p.stat().st_size)
    total = 0
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as whole:
        for part in parts:
            total += part.stat().st_size
            if total > most:
                return False
            with zipfile.ZipFile(part) as one:
                for member in one.namelist():
                    whole.writestr(member, one.read(member))
    return True


def print_summary(done: list[dict], left: list[Case]) -> None:
    for one in done:
        if "gpu_error" in one:
            print(f"{one['id']}: GPU ERROR {one['gpu_error'][:200]}")
        if one["executor"].startswith(("unsupported", "failed")):
            print(f"{one['id']}: {one['executor'][:200]}")
        for d in one.get("differences", ()):
            ulp = d.get("max_ulp", d.get("max_difference"))
            print(f"{one['id']} {d['buffer']} {d['label']}: {d['differ']} of {d['of']} differ, at most {ulp:g} "
                  f"(NaN bits alone {d.get('nan_only', 0)}, NaN or not {d.get('nan_mismatch', 0)})")  # fmt: skip
        if "sweep" in one:
            print(f"{one['id']}: distances from the correctly rounded result {one['sweep']}")
    equal = sum(one.get("equal", False) for one in done)
    print(f"{equal} of {len(done)} cases equal; {len(left)} not run")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="build the cases and execute them on the executor")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="those alone: with --prepare what builds them, with --against how their names begin",
    )
    parser.add_argument("--from", type=Path, dest="folder", metavar="DIR", help="what --prepare stored")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the comparison here")
    parser.add_argument("--against", type=Path, metavar="FILE.npz", help="with --from: execute again, no GPU is needed")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--about", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.about:
        print(json.dumps(Driver().describe()))
        return 0
    if asked.prepare:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from benchmarks.hardware_probes import prepare_all

        prepare_all(asked.prepare, asked.only)
        return 0
    if not asked.folder or not asked.out:
        parser.error("give --prepare DIR, or --from DIR and --out FILE.json")
    if asked.against:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from benchmarks.hardware_probes import repeat

        return repeat(asked.folder, asked.against, asked.out, asked.only)
    if asked.child:
        return run_child(asked.folder, json.loads(asked.child.read_text()), asked.out)
    return run_all(asked.folder, asked.out)


if __name__ == "__main__":
    sys.exit(main())
