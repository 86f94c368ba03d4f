"""What is exported for flashinfer-bench: the schema's fields, a host function with the launch, no claim unmeasured."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from evoengine.errors import UsageError
from evoengine.formats.flashinfer_solution import solution, trace, trace_files
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.publish.folder import write_new
from evoengine.publish.packages import package_files
from evoengine.records import Candidate, CaseResult, Config, Kind, Measurement, Outcome, Verdict
from evoengine.stages.render import render
from evoengine.tuning.setup import read_space
from evoengine.workloads import find_workload
from evoengine.workloads.base import Target
from tests.support.exhaustive import more
from tests.support.folders import SAXPY_CONFIG, SAXPY_KERNEL, load, rendered, saxpy
from tests.support.own_kernels import TWO_KERNELS
from tests.workloads.test_folder_parameters import COPY, LOAD, PACKED, SPACE, STRUCT, folder

NOW = datetime(2026, 1, 2, tzinfo=UTC)
GOOD = Verdict("emulator", None, None, (CaseResult("n=1", "saxpy:n=1", 1, True, 1e-7, 1e-8, 1e-6),), 3.0)


def candidate(folder: Path, **changes) -> tuple[Candidate, Target]:
    target, space = load(folder)
    source = render(target, space, SAXPY_CONFIG, asset("templates"))
    made = Candidate(
        7, 1, str(target.problem), "h100", SAXPY_CONFIG, Outcome.ESTIMATED, source=source, verdict=GOOD,
        measurement=Measurement(Kind.ESTIMATED, "model of h100", 1.0, 5.0),
    )  # fmt: skip
    return replace(made, **changes), target


def test_a_solution_has_the_schemas_fields(tmp_path):
    found = solution(*candidate(saxpy(tmp_path)))
    assert found.keys() == {"name", "definition", "author", "description", "spec", "sources"}
    assert (found["definition"], found["spec"]["language"]) == ("saxpy", "cuda")
    assert found["spec"].keys() == {
        "language", "target_hardware", "entry_point", "dependencies", "destination_passing_style", "binding",
    }  # fmt: skip
    assert found["description"].endswith("Build it with TVM_FFI_CUDA_ARCH_LIST=9.0a.")
    file, _, function = found["spec"]["entry_point"].partition("::")
    assert file in {source["path"] for source in found["sources"]} and function == "run"


def test_its_host_function_takes_inputs_then_outputs_and_launches_as_tuned(tmp_path):
    (source,) = solution(*candidate(saxpy(tmp_path)))["sources"]
    text = source["content"]
    view = "tvm::ffi::TensorView"
    assert f"void run({view} x, {view} y, double a, {view} out)" in text
    assert "saxpy<<<dim3(32, 1, 1), dim3(64, 1, 1), 0, stream>>>" in text
    assert "static_cast<float>(a), Pointer{out.data_ptr()}, static_cast<int32_t>(4096))" in text
    assert "TVM_FFI_ICHECK(x.size(0) == 4096);" in text


def test_constant_memory_is_filled_on_the_same_stream(tmp_path):
    folder = saxpy(tmp_path, constants={"c_x": "x"}, parameters=["x", "y", "a", "out", "n"])
    (source,) = solution(*candidate(folder))["sources"]
    assert (
        "cudaMemcpyToSymbolAsync(c_x, x.data_ptr(), 16384, 0, cudaMemcpyDeviceToDevice, stream);" in source["content"]
    )


def test_an_estimate_is_no_evaluation(tmp_path):
    found = trace(*candidate(saxpy(tmp_path)), NOW)
    assert found.keys() == {"definition", "workload", "solution", "evaluation"}
    assert found["evaluation"] is None
    assert found["workload"]["axes"] == {"n": 4096}
    assert found["workload"]["inputs"] == {
        "x": {"type": "random"}, "y": {"type": "random"}, "a": {"type": "scalar", "value": 2.5},
    }  # fmt: skip


def test_a_measurement_is_one_with_its_times(tmp_path):
    measured = Measurement(Kind.MEASURED, "NVIDIA H100", 1.0, 5.0, vs_baseline=2.0)
    found = trace(*candidate(saxpy(tmp_path), measurement=measured), NOW)["evaluation"]
    assert found.keys() == {"status", "environment", "timestamp", "log", "correctness", "performance"}
    assert found["performance"] == {"latency_ms": 0.005, "reference_latency_ms": 0.01, "speedup_factor": 2.0}
    assert found["correctness"]["max_absolute_error"] == 1e-7


def test_a_measurement_of_a_wrong_kernel_is_none(tmp_path):
    measured = Measurement(Kind.MEASURED, "NVIDIA H100", 1.0, 5.0)
    wrong = replace(GOOD, outcome=Outcome.INCORRECT)
    assert trace(*candidate(saxpy(tmp_path), measurement=measured, verdict=wrong), NOW)["evaluation"] is None


def exported(folder: Path, measured: Measurement | None = None, **files: bytes) -> dict[str, bytes]:
    """What a package of saxpy reads of its export."""
    made, target = candidate(saxpy(folder), **({"measurement": measured} if measured else {}))
    described = {"kernel": "saxpy", "module": "saxpy_n4096_h100", "provenance": {"gpu": "h100"}}
    record = {"definition": target.workload.definition_text}
    return {
        "kernel.json": json.dumps(described).encode(), "record.json": json.dumps(record).encode(),
        "README.md": b"# saxpy", "kernel.cu": made.source.text.encode(), "kernel.cubin": b"\x7fELF",
        **trace_files(made, target, print),
    } | files  # fmt: skip


def test_a_dataset_is_read_by_flashinfer_bench(tmp_path):
    data = pytest.importorskip("flashinfer_bench.data", reason="flashinfer-bench is not installed")
    write_new(tmp_path / "dataset", package_files("flashinfer", exported(tmp_path)))
    found = data.TraceSet.from_path(str(tmp_path / "dataset"))
    assert list(found.definitions) == ["saxpy"] and list(found.definitions["saxpy"].inputs) == ["x", "y", "a"]
    [packed] = found.solutions["saxpy"]
    assert packed.spec.entry_point == "kernel.cu::run" and packed.name.startswith("evoengine_saxpy_")
    [workload] = found.workloads["saxpy"]
    assert workload.workload.axes == {"n": 4096} and workload.solution is None
    assert not found.traces.get("saxpy")  # nothing was measured


def test_apply_takes_the_solution_once_flashinfer_bench_has_compared_it(tmp_path, monkeypatch):
    """Our gate knows no relative error, without which `apply` takes no trace: its own benchmark adds that.

    The table is the one that `apply` looks a call up in; making it compiles nothing.
    """
    data = pytest.importorskip("flashinfer_bench.data", reason="flashinfer-bench is not installed")
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    table, config = (importlib.import_module(f"flashinfer_bench.apply.{name}") for name in ("table", "config"))
    measured = Measurement(Kind.MEASURED, "NVIDIA H100", 1.0, 5.0, vs_baseline=2.0)
    write_new(tmp_path / "dataset", package_files("flashinfer", exported(tmp_path, measured)))
    found = data.TraceSet.from_path(str(tmp_path / "dataset"))
    asked = config.ApplyConfigRegistry(default=config.ApplyConfig())
    assert not table.ApplyTable._build(found, asked).def_best
    found.traces["saxpy"][0].evaluation.correctness.max_relative_error = 1e-6
    assert table.ApplyTable._build(found, asked).def_best == {"saxpy": found.solutions["saxpy"][0].name}


def test_a_dataset_holds_the_definition_the_solution_and_their_sums(tmp_path):
    files = package_files("flashinfer", exported(tmp_path), "fast-saxpy")
    assert {"definitions/saxpy/saxpy.json", "workloads/saxpy/saxpy.jsonl", "record.json", "SHA256SUMS"} <= files.keys()
    assert "solutions/evoengine/saxpy/saxpy/fast-saxpy.json" in files
    assert json.loads(files["definitions/saxpy/saxpy.json"]).keys() == {
        "name", "op_type", "axes", "inputs", "outputs", "reference",
    }  # fmt: skip
    assert "traces/saxpy/saxpy.jsonl" not in files


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"record.json": b'{"definition": null}'}, "saxpy has no FlashInfer-Trace definition"),
        ({"solution.json": None}, "a FlashInfer-Trace solution cannot pass"),
    ],
)
def test_what_flashinfer_bench_cannot_take_is_refused(tmp_path, changed, why):
    files = {name: data for name, data in (exported(tmp_path) | changed).items() if data is not None}
    with pytest.raises(UsageError, match=why):
        package_files("flashinfer", files)


def of_start(problem: str, family: str) -> tuple[Candidate, Target]:
    """Return a family's first start point for a problem of a workload."""
    workload, gpu = find_workload(problem.partition(":")[0]), find_gpu("h100")
    target = Target(workload, workload.parse(problem.partition(":")[2]), gpu)
    config = next(start for start in read_space(None, target).starts if start["family"] == family)
    source = render(target, read_space(None, target), config, asset("templates"))
    return Candidate(7, 1, problem, "h100", config, Outcome.ESTIMATED, source=source), target


def of_folder(folder: Path, config: Config | None = None) -> tuple[Candidate, Target]:
    config = config or {"family": "own", "THREADS": 64}
    source = rendered(folder, config)
    target, _ = load(folder)
    return Candidate(7, 1, str(target.problem), "h100", config, Outcome.ESTIMATED, source=source), target


SOLUTIONS = {
    "tensor maps of a workload": lambda tmp_path: of_start("gemm:m512,n512,k512,fp16", "wgmma"),
    "scratch memory and two kernels": lambda tmp_path: of_folder(TWO_KERNELS.write(tmp_path), TWO_KERNELS.config),
    "a tensor map of a template's instance": lambda tmp_path: of_folder(folder(tmp_path, LOAD, **COPY)),
    "a struct": lambda tmp_path: of_folder(folder(tmp_path, PACKED, **STRUCT)),
    "pointers without const, of other types, and a macro that a header uses as a name": lambda tmp_path: of_folder(
        folder(tmp_path, PLAIN.replace("THREADS", "T"), space=SPACE.replace("THREADS", "T"), **UNSIGNED),
        {"family": "own", "T": 64},
    ),
}
PLAIN = """extern "C" __global__ void own(unsigned* x, unsigned* y, int n) {
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) y[i] = x[i];
}
"""
UNSIGNED = {
    "inputs": {"x": {"shape": ["n"], "dtype": "int32"}},
    "outputs": {"y": {"shape": ["n"], "dtype": "int32"}},
    "reference": "def run(x):\n    return x\n",
}


@pytest.mark.parametrize("named", ["saxpy", *more(SOLUTIONS)])
def test_the_solution_compiles(tmp_path, named):
    """It is compiled to PTX: the machine code is that of any export."""
    libinfo = pytest.importorskip("tvm_ffi.libinfo", reason="apache-tvm-ffi is not installed")
    nvcc = shutil.which("nvcc") or pytest.skip("nvcc is not installed")
    (source,) = solution(*SOLUTIONS.get(named, lambda path: candidate(saxpy(path)))(tmp_path))["sources"]
    (tmp_path / "kernel.cu").write_text(source["content"])
    where = [f"-I{path}" for path in (libinfo.find_include_path(), libinfo.find_dlpack_include_path())]
    flags = ["-std=c++17", "-gencode=arch=compute_90a,code=compute_90a", "-Xcompiler", "-fPIC"]
    command = [nvcc, *flags, "-c", "kernel.cu", "-o", "kernel.o", *where]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tensor_maps_are_made_of_what_the_kernel_takes(tmp_path):
    (source,) = solution(*of_folder(folder(tmp_path, LOAD, **COPY)))["sources"]
    text = source["content"]
    made = "tensor_map<1>(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, static_cast<void*>(static_cast<char*>(x.data_ptr()) + 0), "
    assert f"const Bytes<128> source = {made}{{1000}}" in text
    assert "{64}, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);" in text
    assert "own<THREADS><<<dim3(16, 1, 1), dim3(64, 1, 1), 0, stream>>>(source, Pointer{y.data_ptr()}, " in text


def test_structs_hold_what_the_kernel_takes_at_its_place(tmp_path):
    (source,) = solution(*of_folder(folder(tmp_path, PACKED, **STRUCT)))["sources"]
    put = dict(re.findall(r"p\.put(?:<unsigned char>)?\((\d+), (.*)\);", source["content"]))
    assert put["8"] == "static_cast<void*>(static_cast<char*>(y.data_ptr()) + 0)"
    assert (put["16"], put["24"], put["28"]) == ("static_cast<double>(scale)", "3", "static_cast<int32_t>(1000)")
    assert [put[str(at)] for at in range(32, 40)] == ["64", *["0"] * 7]


def test_scratch_memory_and_further_kernels_follow_on_the_stream(tmp_path):
    (source,) = solution(*of_folder(TWO_KERNELS.write(tmp_path), TWO_KERNELS.config))["sources"]
    text = source["content"]
    order = ["cudaMallocAsync(&partial,", "two_kernels<<<", "combine<<<", "cudaFreeAsync(partial, stream)"]
    assert sorted(order, key=text.index) == order


def test_a_kernel_that_no_solution_can_launch_is_left_out_with_the_reason(tmp_path):
    made, target = candidate(saxpy(tmp_path, f"// --std=c++20\n{SAXPY_KERNEL}"))
    with pytest.raises(UsageError, match=r"asks for C\+\+20, and flashinfer-bench compiles C\+\+17"):
        solution(made, target)
    said: list[str] = []
    assert trace_files(made, target, said.append) == {}
    assert "no solution.json" in said[0]
