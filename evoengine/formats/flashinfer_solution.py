"""Export a candidate as FlashInfer-Trace's Solution and Trace (flashinfer-bench, `flashinfer_bench.data`).

The solution is one CUDA file: the kernel's text, and a host function `run` over TVM-FFI that takes inputs, then
outputs. Its launch is that of the problem it was tuned for, and `run` refuses tensors of other sizes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from evoengine import __version__
from evoengine.devices.base import (
    ConstantParameter,
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
_TYPES = {
    "fp64": "double", "fp32": "float", "fp16": "__half", "bf16": "__nv_bfloat16", "int64": "int64_t",
    "int32": "int32_t", "int16": "int16_t", "int8": "int8_t", "uint8": "uint8_t", "bool": "bool",
}  # fmt: skip # a table
_ON_DEVICE = "cudaMemcpyDeviceToDevice"
_HOST = """
// ── host side: written by evoengine for flashinfer-bench ──

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

namespace evoengine_solution {{

void run({parameters}) {{
{checks}
    cudaStream_t stream = static_cast<cudaStream_t>(
        TVMFFIEnvGetStream({first}.device().device_type, {first}.device().device_id));
{constants}{scratch}{launches}{freed}    TVM_FFI_ICHECK(cudaGetLastError() == cudaSuccess);
}}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);

}}  // namespace evoengine_solution
"""


def solution(candidate: Candidate, target: Target) -> dict[str, Any]:
    """Return the Solution as JSON. Raises UsageError if the kernel cannot be launched from a single CUDA file."""
    source = _source(candidate)
    return {
        "name": solution_name(candidate, target),
        "definition": target.workload.name,
        "author": "evoengine",
        "description": f"Found by evoengine {__version__} for {target.problem}; other sizes are refused.",
        "spec": {
            "language": "cuda",
            "target_hardware": [target.gpu.name],
            "entry_point": f"{FILE}::run",
            "dependencies": [],
            "destination_passing_style": True,
            "binding": "tvm-ffi",
        },
        "sources": [{"path": FILE, "content": source.text + _host(candidate, target)}],
    }


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

    If the kernel cannot be a Solution, `echo` says why.
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
            # the gate compares absolute errors; the schema has NaN for what is not known
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
    found: dict[str, dict[str, Any]] = {}
    for parameter in workload.parameters(problem, {}):
        if isinstance(parameter, TensorParameter) and not parameter.output:
            found[parameter.name] = {"type": "random"}
    if isinstance(workload, FolderWorkload) and isinstance(problem, FolderProblem):
        draws = workload.definition.draws_for(problem)
        scalars = {
            i.name: {"type": "scalar", "value": draws[i.name].value}
            for i in workload.definition.inputs
            if i.shape is None
        }
        return {i.name: scalars.get(i.name, {"type": "random"}) for i in workload.definition.inputs}
    return found


def _host(candidate: Candidate, target: Target) -> str:
    """Return the host code that launches the kernel for exactly the problem's sizes."""
    stated = target.workload.parameters(target.problem, candidate.config)
    if any(isinstance(parameter, TensorMapArgument | StructArgument) for parameter in stated):
        raise UsageError(
            f"trial {candidate.trial} takes tensor maps or structs, which no FlashInfer-Trace solution here makes"
        )
    if any(isinstance(parameter, TensorParameter) and parameter.inout for parameter in stated):
        raise UsageError(f"trial {candidate.trial} updates a tensor in place, for which FlashInfer-Trace has no word")
    tensors = {p.name: p for p in stated if isinstance(p, TensorParameter)}
    constants = {p.name: p for p in stated if isinstance(p, ConstantParameter)}
    passed, holds = _passed(target, tensors, constants)
    arguments = [p for p in stated if not isinstance(p, ConstantParameter)]
    scratch = [p for p in stated if isinstance(p, ScratchParameter)]
    source = _source(candidate)
    launches = source.launch.kernels(source.entry)
    views = [name for name, kind in passed.items() if kind == "tvm::ffi::TensorView"]
    shapes = {**{n: p.shape for n, p in tensors.items()}, **{holds[s]: p.shape for s, p in constants.items()}}
    return _HOST.format(
        parameters=", ".join(f"{kind} {name}" for name, kind in passed.items()),
        checks="\n".join(line for name in views for line in _checks(name, shapes[name])),
        first=views[0],
        constants="".join(
            f"    cudaMemcpyToSymbolAsync({symbol}, {holds[symbol]}.data_ptr(), {p.bytes}, 0, {_ON_DEVICE}, stream);\n"
            for symbol, p in constants.items()
        ),
        scratch="".join(map(_allocated, scratch)),
        launches="".join(
            _launched(entry, launch, [_argument(p, passed) for p in taken(target.workload, entry, arguments)])
            for entry, launch in launches
        ),
        freed="".join(f"    cudaFreeAsync({p.name}, stream);\n" for p in scratch),
    )


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
        kinds = {"fp32": "double", "int32": "int64_t", "int64": "int64_t"}
        taken = {i.name: kinds[i.dtype] if i.shape is None else "tvm::ffi::TensorView" for i in definition.inputs}
        return taken | {i.name: "tvm::ffi::TensorView" for i in definition.outputs}, dict(definition.constants)
    inputs = [*(name for name in tensors if name not in outputs), *constants]
    return dict.fromkeys([*inputs, *outputs], "tvm::ffi::TensorView"), {name: name for name in constants}


def _allocated(scratch: ScratchParameter) -> str:
    """Return statements that allocate scratch memory in stream order, and zero it if it must be."""
    kind, name, size = _TYPES[scratch.dtype], scratch.name, scratch.bytes
    allocated = f"    {kind}* {name};\n    cudaMallocAsync(reinterpret_cast<void**>(&{name}), {size}, stream);\n"
    return allocated + f"    cudaMemsetAsync({name}, 0, {size}, stream);\n" * scratch.zeroed


def _launched(entry: str, launch: Launch, arguments: list[str]) -> str:
    geometry = f"dim3({_sizes(launch.grid)}), dim3({_sizes(launch.block)}), {launch.shared_bytes}, stream"
    return f"{_attribute(entry, launch)}    {entry}<<<{geometry}>>>({', '.join(arguments)});\n"


def _argument(parameter: TensorParameter | ScalarArgument | Any, passed: Mapping[str, str]) -> str:
    if isinstance(parameter, TensorParameter):
        kind = _TYPES[parameter.dtype]
        return f"static_cast<{'' if parameter.output else 'const '}{kind}*>({parameter.name}.data_ptr())"
    if isinstance(parameter, ScratchParameter):
        return parameter.name
    kind = {"float32": "float", "int32": "int", "int64": "int64_t"}[str(parameter.value.dtype)]
    value = parameter.name if parameter.name in passed else repr(parameter.value.item())
    return f"static_cast<{kind}>({value})"


def _checks(name: str, shape: tuple[int, ...]) -> Iterator[str]:
    yield f"    TVM_FFI_ICHECK({name}.ndim() == {len(shape)});"
    for i, size in enumerate(shape):
        yield f"    TVM_FFI_ICHECK({name}.size({i}) == {size});"


def _sizes(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def _attribute(entry: str, launch: Launch) -> str:
    """Return the call that raises the limit of dynamic shared memory, by default 48 KB.

    See the CUDA C++ Programming Guide.
    """
    if launch.shared_bytes <= 48 << 10:
        return ""
    return f"    cudaFuncSetAttribute({entry}, cudaFuncAttributeMaxDynamicSharedMemorySize, {launch.shared_bytes});\n"
