"""Export a candidate as FlashInfer-Trace's Solution and Trace (flashinfer-bench, `flashinfer_bench.data`).

The solution is one CUDA file: the kernel's text, and a host function `run` for TVM-FFI that takes inputs and then
outputs. It launches the kernel for the problem that was tuned and refuses tensors of other sizes.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from evoengine import __version__
from evoengine.devices.base import (
    ConstantParameter,
    PointerArgument,
    ScalarArgument,
    ScratchParameter,
    StructArgument,
    TensorMapArgument,
    TensorParameter,
)
from evoengine.errors import UsageError
from evoengine.records import Candidate, Kind, Launch, Source
from evoengine.workloads.base import Target, taken
from evoengine.workloads.folder import FolderWorkload
from evoengine.workloads.folder_definition import FolderProblem

FILE = "kernel.cu"
_ON_DEVICE = "cudaMemcpyDeviceToDevice"
_INCLUDES = """// ── for the host side below, before the kernel's macros ──
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <array>
#include <cstdlib>
#include <cstring>

"""
_HOST = """
// ── host side: written by evoengine for flashinfer-bench ──

namespace evoengine_solution {{

// An address for a parameter of any pointer type.
struct Pointer {{
    void* address;
    template <class Pointee>
    operator Pointee*() const {{
        return static_cast<Pointee*>(address);
    }}
}};
{values}
void run({parameters}) {{
{checks}
    cudaStream_t stream = static_cast<cudaStream_t>(
        TVMFFIEnvGetStream({first}.device().device_type, {first}.device().device_id));
{constants}{scratch}{maps}{launches}{freed}    TVM_FFI_ICHECK(cudaGetLastError() == cudaSuccess);
}}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);

}}  // namespace evoengine_solution
"""
_VALUES = """
// The bytes of a struct or a tensor map, for a parameter of any such type.
template <int BYTES>
struct Bytes {
    alignas(64) unsigned char bytes[BYTES] = {};
    template <class Part>
    void put(int at, Part part) {
        std::memcpy(bytes + at, &part, sizeof part);
    }
    template <class Parameter>
    operator Parameter() const {
        static_assert(sizeof(Parameter) == BYTES, "the kernel takes another struct");
        return *reinterpret_cast<const Parameter*>(bytes);
    }
};
"""
_ENCODE = """
// A tensor map by cuTensorMapEncodeTiled, which the runtime finds in the driver.
template <int RANK>
Bytes<128> tensor_map(CUtensorMapDataType dtype, void* address, const cuuint64_t (&dims)[RANK],
                      const cuuint64_t* strides, const cuuint32_t (&box)[RANK], CUtensorMapSwizzle swizzle,
                      CUtensorMapFloatOOBfill outside) {
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found;
    TVM_FFI_ICHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault,
                                                    &found) == cudaSuccess);
    CUtensorMap map;
    cuuint32_t steps[RANK];
    for (cuuint32_t& step : steps) step = 1;
    TVM_FFI_ICHECK(reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
                       &map, dtype, RANK, address, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, outside) == CUDA_SUCCESS);
    Bytes<128> all;
    all.put(0, map);
    return all;
}
"""
_MAP_DTYPES = {"fp16": "FLOAT16", "fp32": "FLOAT32", "fp64": "FLOAT64", "bf16": "BFLOAT16"}


def solution(candidate: Candidate, target: Target) -> dict[str, Any]:
    """Return the Solution as JSON. Raises UsageError if the kernel cannot be launched from a single CUDA file."""
    source = _source(candidate)
    return {
        "name": solution_name(candidate, target),
        "definition": target.workload.name,
        "author": "evoengine",
        "description": (
            f"Found by evoengine {__version__} for {target.problem}; other sizes are refused. Build it with "
            f"TVM_FFI_CUDA_ARCH_LIST={_capability(target.gpu.arch)}."
        ),
        "spec": {
            "language": "cuda",
            "target_hardware": [target.gpu.name],
            "entry_point": f"{FILE}::run",
            "dependencies": [],
            "destination_passing_style": True,
            "binding": "tvm-ffi",
        },
        "sources": [{"path": FILE, "content": _INCLUDES + source.text + _host(candidate, target)}],
    }


def _capability(arch: str) -> str:
    """Return an architecture as TVM-FFI names it, such as 9.0a: for 9.0 it would omit the `a` of sm_90a."""
    return re.sub(r"sm_(\d+)(\d)(\w?)", r"\1.\2\3", arch)


def solution_name(candidate: Candidate, target: Target) -> str:
    return f"evoengine_{target.workload.name}_{_source(candidate).sha256[:12]}"


def trace(candidate: Candidate, target: Target, exported: datetime) -> dict[str, Any]:
    """Return the Trace as JSON: the workload and its measurement on the GPU.

    Without a measurement there is no evaluation.
    """
    return {
        "definition": target.workload.name,
        "workload": {
            "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"evoengine:{target.problem}")),
            "axes": _axes(target),
            "inputs": _inputs(target),
        },
        "solution": solution_name(candidate, target),
        "evaluation": _evaluation(candidate, exported),
    }


def trace_files(candidate: Candidate, target: Target, echo: Callable[[str], None]) -> dict[str, bytes]:
    """Return solution.json and trace.json for an exported folder.

    If the kernel cannot be a Solution, the reason is passed to `echo`.
    """
    try:
        contents = {
            "solution.json": solution(candidate, target),
            "trace.json": trace(candidate, target, datetime.now(UTC)),
        }
    except UsageError as error:
        echo(f"no solution.json: {error}")
        return {}
    return {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in contents.items()}


def _evaluation(candidate: Candidate, exported: datetime) -> dict[str, Any] | None:
    figure, verdict = candidate.measurement, candidate.verdict
    if figure is None or figure.kind is not Kind.MEASURED or verdict is None or not verdict.correct:
        return None
    latency, faster = figure.compared_us / 1e3, figure.vs_baseline or 0.0
    policy = f"; {figure.policy}" if figure.policy else ""
    return {
        "status": "PASSED",
        "environment": {"hardware": figure.device, "libs": {"evoengine": __version__}},
        "timestamp": exported.isoformat(),
        "log": f"trial {candidate.trial} of run {candidate.run}, exported at this time{policy}",
        "correctness": {
            # the gate compares absolute errors; the schema requires NaN for unknown ones
            "max_relative_error": "NaN",
            "max_absolute_error": verdict.max_error or 0.0,
            "extra": {"cases": len(verdict.cases), "device": verdict.device},
        },
        "performance": {"latency_ms": latency, "reference_latency_ms": latency * faster, "speedup_factor": faster},
    }


def _source(candidate: Candidate) -> Source:
    if candidate.source is None:
        raise UsageError(f"trial {candidate.trial} has no kernel to export")
    return candidate.source


def _axes(target: Target) -> dict[str, int]:
    problem = target.problem
    if isinstance(problem, FolderProblem):
        return {axis: problem.axes[axis] for axis in problem.given}
    return {name: value for name, value in problem.variables().items() if type(value) is int}


def _inputs(target: Target) -> dict[str, dict[str, Any]]:
    workload, problem = target.workload, target.problem
    if isinstance(workload, FolderWorkload) and isinstance(problem, FolderProblem):
        draws = workload.definition.draws_for(problem)
        return {
            i.name: {"type": "scalar", "value": draws[i.name].value} if i.shape is None else {"type": "random"}
            for i in workload.definition.inputs
        }
    parameters = workload.parameters(problem, {})
    return {p.name: {"type": "random"} for p in parameters if isinstance(p, TensorParameter) and not p.output}


def _host(candidate: Candidate, target: Target) -> str:
    """Return the host code that launches the kernel for exactly the problem's sizes."""
    stated = target.workload.parameters(target.problem, candidate.config)
    if any(isinstance(parameter, TensorParameter) and parameter.inout for parameter in stated):
        raise UsageError(f"trial {candidate.trial} updates a tensor in place, for which FlashInfer-Trace has no word")
    tensors = {p.name: p for p in stated if isinstance(p, TensorParameter)}
    constants = {p.name: p for p in stated if isinstance(p, ConstantParameter)}
    passed, holds = _passed(target, tensors, constants)
    arguments = [p for p in stated if not isinstance(p, ConstantParameter)]
    scratch = {p.name: p for p in stated if isinstance(p, ScratchParameter)}
    built = [p for p in stated if isinstance(p, TensorMapArgument | StructArgument)]
    source = _source(candidate)
    if re.search(r"^// --std=c\+\+20$", source.text, re.MULTILINE):
        raise UsageError("the kernel's text asks for C++20, and flashinfer-bench compiles C++17")
    launches = [((e, _instance(source.text, e)), launch) for e, launch in source.launch.kernels(source.entry)]
    views = [name for name, kind in passed.items() if kind == "tvm::ffi::TensorView"]
    shapes = {**{n: p.shape for n, p in tensors.items()}, **{holds[s]: p.shape for s, p in constants.items()}}
    made = "".join(line for p in built for line in _built(p, scratch, passed))
    return _HOST.format(
        parameters=", ".join(f"{kind} {name}" for name, kind in passed.items()),
        values=_VALUES * bool(built) + _ENCODE * ("tensor_map<" in made),
        checks="\n".join(line for name in views for line in _checks(name, shapes[name])),
        first=views[0],
        constants="".join(
            f"    cudaMemcpyToSymbolAsync({symbol}, {holds[symbol]}.data_ptr(), {p.bytes}, 0, {_ON_DEVICE}, stream);\n"
            for symbol, p in constants.items()
        ),
        scratch="".join(map(_allocated, scratch.values())),
        maps=made,
        launches="".join(
            _launched(called, launch, [_argument(p, passed) for p in taken(target.workload, entry, arguments)])
            for (entry, called), launch in launches
        ),
        freed="".join(f"    cudaFreeAsync({name}, stream);\n" for name in scratch),
    )


def _built(
    parameter: TensorMapArgument | StructArgument, scratch: Mapping[str, Any], passed: Mapping[str, str]
) -> Iterator[str]:
    """Yield the statements that create a tensor map or a struct."""
    if isinstance(parameter, TensorMapArgument):
        yield f"    const Bytes<128> {parameter.name} = {_tensor_map(parameter, scratch)};\n"
        return
    yield f"    Bytes<{parameter.bytes}> {parameter.name};\n"
    for at, part in parameter.parts:
        if isinstance(part, PointerArgument):
            value = _address(part.memory, part.offset, scratch)
        elif isinstance(part, TensorMapArgument):
            value = _tensor_map(part, scratch)
        elif (raw := part.value.tobytes()) and part.value.dtype.kind == "V":
            yield from (f"    {parameter.name}.put<unsigned char>({at + i}, {byte});\n" for i, byte in enumerate(raw))
            continue
        else:
            value = _argument(part, passed)
        yield f"    {parameter.name}.put({at}, {value});\n"


def _tensor_map(parameter: TensorMapArgument, scratch: Mapping[str, Any]) -> str:
    dims, box = (f"{{{_sizes(sizes)}}}" for sizes in (parameter.dims, parameter.box))
    strides = f"{{{_sizes(parameter.strides_bytes) or '0'}}}"
    dtype = _MAP_DTYPES.get(parameter.dtype, parameter.dtype.upper())
    swizzle = f"{parameter.swizzle}B" if parameter.swizzle else "NONE"
    outside = "NAN_REQUEST_ZERO_FMA" if parameter.nan else "NONE"
    return (
        f"tensor_map<{len(parameter.dims)}>(CU_TENSOR_MAP_DATA_TYPE_{dtype}, "
        f"{_address(parameter.tensor, parameter.offset, scratch)}, {dims}, "
        f"std::array<cuuint64_t, {max(1, len(parameter.strides_bytes))}>{strides}.data(), {box}, "
        f"CU_TENSOR_MAP_SWIZZLE_{swizzle}, CU_TENSOR_MAP_FLOAT_OOB_FILL_{outside})"
    )


def _address(memory: str, offset: int, scratch: Mapping[str, Any]) -> str:
    address = memory if memory in scratch else f"{memory}.data_ptr()"
    return f"static_cast<void*>(static_cast<char*>({address}) + {offset})"


def _passed(
    target: Target, tensors: Mapping[str, TensorParameter], constants: Mapping[str, ConstantParameter]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the parameters of `run`, and the input that each constant holds.

    The parameters are the Definition's inputs in order and then its outputs.
    """
    workload = target.workload
    outputs = [name for name, parameter in tensors.items() if parameter.output]
    if isinstance(workload, FolderWorkload):
        definition = workload.definition
        kinds = {"fp64": "double", "fp32": "double", "int32": "int64_t", "int64": "int64_t"}
        taken = {i.name: kinds[i.dtype] if i.shape is None else "tvm::ffi::TensorView" for i in definition.inputs}
        return taken | {i.name: "tvm::ffi::TensorView" for i in definition.outputs}, dict(definition.constants)
    inputs = [*(name for name in tensors if name not in outputs), *constants]
    return dict.fromkeys([*inputs, *outputs], "tvm::ffi::TensorView"), {name: name for name in constants}


def _allocated(scratch: ScratchParameter) -> str:
    """Return statements that allocate scratch memory in stream order, and zero it if required."""
    name, size = scratch.name, scratch.bytes
    allocated = f"    void* {name};\n    TVM_FFI_ICHECK(cudaMallocAsync(&{name}, {size}, stream) == cudaSuccess);\n"
    return allocated + f"    cudaMemsetAsync({name}, 0, {size}, stream);\n" * scratch.zeroed


def _launched(entry: str, launch: Launch, arguments: list[str]) -> str:
    geometry = f"dim3({_sizes(launch.grid)}), dim3({_sizes(launch.block)}), {launch.shared_bytes}, stream"
    return f"{_attribute(entry, launch)}    {entry}<<<{geometry}>>>({', '.join(filter(None, arguments))});\n"


def _argument(parameter: Any, passed: Mapping[str, str]) -> str:
    """Return an argument of the kernel; an empty one for a tensor that only tensor maps and structs point to."""
    if isinstance(parameter, TensorParameter | ScratchParameter) and not parameter.passed:
        return ""
    if isinstance(parameter, TensorParameter):
        return f"Pointer{{{parameter.name}.data_ptr()}}"
    if isinstance(parameter, ScratchParameter):
        return f"Pointer{{{parameter.name}}}"
    if isinstance(parameter, ScalarArgument) and parameter.name not in passed:
        return _number(parameter)
    if isinstance(parameter, ScalarArgument):
        return f"static_cast<{_NUMBERS[str(parameter.value.dtype)]}>({parameter.name})"
    return str(parameter.name)


_NUMBERS = {
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float32": "float",
    "float64": "double",
}


def _number(scalar: ScalarArgument) -> str:
    value, kind = scalar.value.item(), str(scalar.value.dtype)
    text = f'std::strtod("{value.hex()}", nullptr)' if isinstance(value, float) else str(value)
    return f"static_cast<{_NUMBERS[kind]}>({text})"


def _checks(name: str, shape: tuple[int, ...]) -> Iterator[str]:
    yield f"    TVM_FFI_ICHECK({name}.ndim() == {len(shape)});"
    for i, size in enumerate(shape):
        yield f"    TVM_FFI_ICHECK({name}.size({i}) == {size});"


def _sizes(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def _instance(text: str, entry: str) -> str:
    """Return the name by which the host calls a kernel, with its arguments if it is a template."""
    found = re.search(rf"\btemplate\s+__global__\s[^;{{}}]*?\b({re.escape(entry)}\s*<[^;{{}}]*?>)\s*\(", text)
    return found[1] if found else entry


def _attribute(entry: str, launch: Launch) -> str:
    """Return the call that raises the limit of dynamic shared memory, by default 48 KB.

    See the CUDA C++ Programming Guide.
    """
    if launch.shared_bytes <= 48 << 10:
        return ""
    return f"    cudaFuncSetAttribute({entry}, cudaFuncAttributeMaxDynamicSharedMemorySize, {launch.shared_bytes});\n"
