"""The executor's bits beside a GPU's: what is stored is launched again, and what differs is named with its inputs.

No GPU is needed: the executor stands for it here, once as it is and once with a bit turned.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import hardware_bits
from benchmarks.hardware_bits import compare, run_all, run_child
from benchmarks.move_probes import matrices
from benchmarks.probe_store import Store
from benchmarks.probe_values import elementwise
from evoengine.devices.base import ScalarArgument, TensorArgument
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import DrawnArgument, Geometry, prepare
from evoengine.sass.listing import disassemble
from tests.support.machine_code import require_tools


class ExecutorDriver:
    """The calls of hardware_bits.Driver on the executor; `turned` bits of the first byte of every output."""

    turned = 0

    def __init__(self) -> None:
        self._memory: dict[int, bytearray] = {}

    def call(self, name: str, *arguments: object) -> None:
        assert name in ("cuCtxSynchronize", "cuModuleUnload")

    def allocate(self, size: int) -> int:
        pointer = len(self._memory) + 1
        self._memory[pointer] = bytearray(size)
        return pointer

    def free(self, pointer: int) -> None:
        assert pointer in self._memory

    def upload(self, pointer: int, data: bytes) -> None:
        self._memory[pointer][:] = data

    def download(self, pointer: int, size: int) -> bytes:
        held = bytearray(self._memory[pointer])
        held[0] ^= self.turned
        return bytes(held[:size])

    def load(self, cubin: bytes) -> bytes:
        return cubin

    def launch(self, cubin: bytes, launch: dict, values: list[bytes]) -> None:
        arguments: list[TensorArgument | DrawnArgument | ScalarArgument] = []
        for number, value in enumerate(values):
            data = np.frombuffer(self._memory[int.from_bytes(value, "little")], np.uint8)
            arguments.append(DrawnArgument(str(number), data.nbytes, "uint8", True, data.copy()))
        made = prepare(
            read_kernel(cubin, launch["entry"]),
            Geometry(tuple(launch["grid"]), tuple(launch["block"]), launch["shared"]),
            arguments,
            9,
        )
        run(Program(disassemble(cubin), launch["entry"]), made)
        for allocation in made.allocations:
            pointer = int.from_bytes(values[int(allocation.name)], "little")
            self._memory[pointer][:] = allocation.held.tobytes()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    require_tools()
    folder = tmp_path_factory.mktemp("bits")
    store = Store(folder)
    numbers = np.random.default_rng(1).integers(0, 1 << 32, 256, dtype=np.uint32)
    lines = [("add.rn.f32 $o, $a, $b;", "f32"), ("shl.b32 $o, $a, 3;", "u32"), ("no.such $o, $a;", "u32")]
    elementwise(store, "sums", "r", [numbers, numbers[::-1].copy()], lines)
    matrices(store)
    store.close()
    return folder


def judged(stored, tmp_path, monkeypatch, turned):
    monkeypatch.setattr(hardware_bits, "Driver", ExecutorDriver)
    monkeypatch.setattr(ExecutorDriver, "turned", turned)
    cases = json.loads((stored / "manifest.json").read_text())["cases"]
    results = tmp_path / "results.jsonl"
    assert run_child(stored, cases, results) == 0
    return [json.loads(line) for line in results.read_text().splitlines()], cases


def test_the_executor_agrees_with_itself(stored, tmp_path, monkeypatch):
    found, cases = judged(stored, tmp_path, monkeypatch, turned=0)
    assert len(found) == len(cases) == 14
    assert all(one["equal"] for one in found)


def test_a_turned_bit_is_reported_with_its_inputs_and_stored(stored, tmp_path, monkeypatch):
    found, cases = judged(stored, tmp_path, monkeypatch, turned=1)
    assert not any(one["equal"] for one in found)
    assert all(one["differences"][0]["differ"] == 1 for one in found)
    (difference,) = found[0]["differences"]
    assert (difference["label"], difference["of"], difference["max_ulp"]) == ("add.rn.f32 $o, $a, $b;", 256, 1)
    sample = difference["samples"][0]
    a, b, gpu, executor = (int(sample[name], 16) for name in ("a", "b", "gpu", "executor"))
    numbers = np.random.default_rng(1).integers(0, 1 << 32, 256, dtype=np.uint32)
    assert (sample["index"], a, b, gpu ^ executor) == (0, numbers[0], numbers[-1], 1)
    kept = np.load(tmp_path / f"{cases[0]['number']}.npz")[f"{cases[0]['id']}|o"]
    assert int.from_bytes(kept[:4].tobytes(), "little") == gpu


def test_what_the_compiler_refuses_is_named(stored):
    (refused,) = json.loads((stored / "manifest.json").read_text())["refused_by_the_compiler"]
    assert refused["id"] == "sums: no.such $o, $a;"


def test_a_process_that_dies_costs_its_case_alone(stored, tmp_path, monkeypatch):
    """Without a driver every case fails, and each is reported."""
    out = tmp_path / "found.json"
    monkeypatch.setattr(hardware_bits, "TOTAL_SECONDS", 5.0)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    run_all(stored, out)
    found = json.loads(out.read_text())
    assert found["equal"] == 0
    assert found["gpu_errors"] + len(found["not_run"]) == found["cases"]


def bits(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def test_numbers_are_compared_by_their_distance_and_nans_apart():
    gpu = bits(1, -1, 0.0, 5, np.nan, 2)
    other = bits(1 + 2**-23, -1, -0.0, np.nan, np.nan, 2)
    found = compare(gpu, other, "f32")
    assert (found["of"], found["differ"], found["nan_mismatch"], found["max_ulp"]) == (6, 3, 1, 1)
    assert set(found["first"]) == {0, 2, 3}


def test_nans_of_other_bits_are_counted_apart():
    found = compare(b"\xff\x7f\x00\x3c", b"\x00\x7e\x00\x3c", "f16")
    assert (found["differ"], found["nan_only"], found["max_ulp"]) == (1, 1, 0)


def test_the_distance_goes_through_zero():
    assert compare(bits(1e-45), bits(-1e-45), "f32")["max_ulp"] == 2
