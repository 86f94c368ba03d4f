"""Package an exported kernel as C++: a header that calls the CUDA driver API, an example, and CMake files.

The header launches the kernel for its own size and for others for which it was verified. The machine code is compiled
in, so that it cannot change afterwards. A second form has a TVM-FFI function over the header instead of the example.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evoengine.errors import UsageError

Described = Mapping[str, Any]

_SCALARS = {"int32": "std::int32_t", "int64": "std::int64_t", "float32": "float"}
_BYTES = {
    "fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip # a table
_MAP_DTYPES = {"fp16": "FLOAT16", "fp32": "FLOAT32", "bf16": "BFLOAT16"}
_WORDS = frozenset(
    "and asm auto bool break case catch char class const continue default delete do double else enum explicit export "
    "extern false float for friend goto if inline int long mutable namespace new not operator or private protected "
    "public register return short signed sizeof static struct switch template this throw true try typedef typename "
    "sizes sms_ floor_div "
    "union unsigned using virtual void volatile while xor stream address check context cubin device gpu require".split()
)
"""C++ keywords and names of the header, which a parameter cannot have"""

_HEADER = """\
// Launches {module} by the CUDA driver API. README.md says what it computes, for which GPU, and how it was verified.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace {space} {{
{sizes}
alignas(8) static const unsigned char cubin[] = {{
#include "kernel_cubin.inc"
}};

inline void check(CUresult code, const char* call) {{
    if (code == CUDA_SUCCESS) return;
    const char* text = nullptr;
    cuGetErrorString(code, &text);
    throw std::runtime_error(std::string(call) + ": " + (text ? text : "unknown error"));
}}

class Kernel {{
public:
    // Load the machine code into the current context. Throws std::runtime_error, as all functions do.
    Kernel() {{
        check(cuModuleLoadData(&module_, cubin), "cuModuleLoadData");
{load}    }}

    ~Kernel() {{
{free}        cuModuleUnload(module_);
    }}

    Kernel(const Kernel&) = delete;
    Kernel& operator=(const Kernel&) = delete;

    // Queue the kernel on a stream. Tensors are contiguous, at addresses that are multiples of 16 bytes:
{tensors}
    void operator()({arguments}, CUstream stream = nullptr{of_size}) {{
{values}{launches}    }}

private:
    CUmodule module_ = nullptr;
{members}}};

}}  // namespace {space}
"""

_SMS = """\
        CUdevice device;
        check(cuCtxGetDevice(&device), "cuCtxGetDevice");
        check(cuDeviceGetAttribute(&sms_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device), "cuDeviceGetAttribute");
"""
_MAIN = """\
// Runs the kernel on tensors of zeros and prints the time of a launch. A kernel that was verified needs no more here.
#include "{space}.hpp"

#include <cstdio>

using {space}::check;

int main() try {{
    CUdevice device;
    CUcontext context;
    check(cuInit(0), "cuInit");
    check(cuDeviceGet(&device, 0), "cuDeviceGet");
    check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    {space}::Kernel kernel;
    auto zeros = [](std::size_t bytes) {{
        CUdeviceptr found;
        check(cuMemAlloc(&found, bytes), "cuMemAlloc");
        check(cuMemsetD8(found, 0, bytes), "cuMemsetD8");
        return found;
    }};
{allocated}
    CUevent begin, end;
    check(cuEventCreate(&begin, CU_EVENT_DEFAULT), "cuEventCreate");
    check(cuEventCreate(&end, CU_EVENT_DEFAULT), "cuEventCreate");
    kernel({names});
    check(cuEventRecord(begin, nullptr), "cuEventRecord");
    const int launches = 20;
    for (int i = 0; i < launches; ++i) kernel({names});
    check(cuEventRecord(end, nullptr), "cuEventRecord");
    check(cuEventSynchronize(end), "cuEventSynchronize");
    float ms = 0;
    check(cuEventElapsedTime(&ms, begin, end), "cuEventElapsedTime");
    std::printf("%.1f us a launch, one after another with a warm L2\\n", 1000 * ms / launches);
}} catch (const std::exception& error) {{
    std::fprintf(stderr, "%s\\n", error.what());
    return 1;
}}
"""

_CMAKE = """\
cmake_minimum_required(VERSION 3.20)
project({space} LANGUAGES CXX)

file(SHA256 ${{CMAKE_CURRENT_SOURCE_DIR}}/kernel_cubin.inc found)
if(NOT found STREQUAL "{sha256}")
    message(FATAL_ERROR "kernel_cubin.inc is not the file that was packaged")
endif()
find_package(CUDAToolkit REQUIRED)
{target}"""
_EXAMPLE = """\
add_executable(example main.cpp)
target_compile_features(example PRIVATE cxx_std_17)
target_link_libraries(example PRIVATE CUDA::cuda_driver)
"""
_LIBRARY = """\
find_package(Python COMPONENTS Interpreter REQUIRED)
execute_process(COMMAND ${Python_EXECUTABLE} -m tvm_ffi.config --cmakedir
    OUTPUT_VARIABLE tvm_ffi_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
find_package(tvm_ffi CONFIG REQUIRED)
add_library(kernel SHARED module.cpp)
set_target_properties(kernel PROPERTIES PREFIX "")
target_compile_features(kernel PRIVATE cxx_std_17)
target_link_libraries(kernel PRIVATE CUDA::cuda_driver tvm_ffi::shared)
"""
_MODULE = """\
// A function of TVM-FFI, run({names}), which launches the kernel on the stream that TVM-FFI's environment has.
// Tensors are contiguous, on one GPU; others than the kernel's are refused.
#include "{space}.hpp"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <initializer_list>
#include <map>
#include <mutex>

namespace {space} {{

static void require(tvm::ffi::TensorView tensor, const char* name, int device, DLDataType dtype,
                    std::initializer_list<std::int64_t> shape) {{
    if (tensor.device().device_type != kDLCUDA || tensor.device().device_id != device)
        TVM_FFI_THROW(ValueError) << name << " is not on the GPU of the other tensors";
    const DLDataType own = tensor.dtype();
    if (own.code != dtype.code || own.bits != dtype.bits || own.lanes != 1)
        TVM_FFI_THROW(TypeError) << name << " has another dtype than the kernel's";
    bool same = tensor.ndim() == static_cast<int>(shape.size()) && tensor.IsContiguous();
    for (int i = 0; same && i < tensor.ndim(); ++i) same = tensor.size(i) == shape.begin()[i];
    if (!same) TVM_FFI_THROW(ValueError) << name << " is not contiguous in the shape that the kernel is for";
    if (reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 16)
        TVM_FFI_THROW(ValueError) << name << " is not at an address that is a multiple of 16 bytes";
}}

static Kernel& kernel_on(int device) {{
    static std::mutex mutex;
    static auto& kernels = *new std::map<int, Kernel>;  // the driver ends before static objects do
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = kernels.find(device);
    return found != kernels.end() ? found->second : kernels[device];
}}

static CUdeviceptr address(tvm::ffi::TensorView tensor) {{
    return reinterpret_cast<CUdeviceptr>(tensor.data_ptr());
}}

static void run({parameters}) {{
    const int device = {first}.device().device_id;
{found}{checks}
    CUdevice gpu;
    CUcontext context, before;
    check(cuInit(0), "cuInit");
    check(cuDeviceGet(&gpu, device), "cuDeviceGet");
    check(cuDevicePrimaryCtxRetain(&context, gpu), "cuDevicePrimaryCtxRetain");
    check(cuCtxGetCurrent(&before), "cuCtxGetCurrent");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    const auto stream = static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, device));
    try {{
        kernel_on(device)({addresses}, stream{sizes});
    }} catch (...) {{
        cuCtxSetCurrent(before);
        throw;
    }}
    check(cuCtxSetCurrent(before), "cuCtxSetCurrent");
}}

}}  // namespace {space}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, {space}::run);
"""
_DLPACK = {
    "fp64": ("kDLFloat", 64), "fp32": ("kDLFloat", 32), "fp16": ("kDLFloat", 16), "bf16": ("kDLBfloat", 16),
    "fp8_e4m3": ("kDLFloat8_e4m3fn", 8), "fp8_e5m2": ("kDLFloat8_e5m2", 8), "int64": ("kDLInt", 64),
    "int32": ("kDLInt", 32), "int16": ("kDLInt", 16), "int8": ("kDLInt", 8), "uint8": ("kDLUInt", 8),
    "bool": ("kDLBool", 8),
}  # fmt: skip # a table
"""dtype → DLPack's code and bits"""


def cpp_files(name: str, described: Described, cubin: bytes) -> dict[str, bytes]:
    """Return NAME.hpp with its machine code, main.cpp and CMakeLists.txt for an export's kernel.json.

    Raises UsageError for a kernel with parameters that the header cannot pass.
    """
    space, tensors = name.replace("-", "_"), _tensors(described)
    project = _project(space, described, cubin, _EXAMPLE)
    allocated = "\n".join(f"    CUdeviceptr {_name(p)} = zeros({_size(p)});  // {_described(p)}" for p in tensors)
    main = _MAIN.format(space=space, allocated=allocated, names=", ".join(map(_name, tensors)))
    return {**project, "main.cpp": main.encode()}


def tvm_ffi_files(name: str, described: Described, cubin: bytes) -> dict[str, bytes]:
    """Return NAME.hpp with its machine code, module.cpp and CMakeLists.txt. Raises UsageError as `cpp_files`."""
    space, sizes = name.replace("-", "_"), sizes_of(described)
    project = _project(space, described, cubin, _LIBRARY)
    tensors = _tensors(_sized(described))
    names = [_name(p) for p in tensors]
    module = _MODULE.format(
        space=space,
        names=", ".join(names),
        parameters=", ".join(f"tvm::ffi::TensorView {name}" for name in names),
        first=names[0],
        found=_sizes_of_tensors(sizes, tensors),
        sizes=", sizes" if sizes else "",
        checks="\n".join(f"    require({_name(p)}, {_required(p)});" for p in tensors),
        addresses=", ".join(f"address({name})" for name in names),
    )
    return {**project, "module.cpp": module.encode()}


def _required(tensor: Described) -> str:
    code, bits = _DLPACK[tensor["dtype"]]
    shape = ", ".join(map(in_cpp, tensor["shape"]))
    return f'"{_name(tensor)}", device, DLDataType{{{code}, {bits}, 1}}, {{{shape}}}'


def _sizes_of_tensors(sizes: Described | None, tensors: Sequence[Described]) -> str:
    """Return the lines that find each axis in the shapes of tensors, the first that has it."""
    if not sizes:
        return ""
    lines = ["    Sizes sizes;"]
    for axis in sizes["axes"]:
        places = ((p, p["shape"].index(axis)) for p in tensors if axis in p["shape"])
        if place := next(places, None):
            tensor, i = place
            name, rank = _name(tensor), len(tensor["shape"])
            lines.append(f"    if ({name}.ndim() == {rank}) sizes.{axis} = {name}.size({i});")
    lines += ["    try {", "        check(sizes);", "    } catch (const std::runtime_error& error) {"]
    lines += ["        TVM_FFI_THROW(ValueError) << error.what();", "    }"]
    return "".join(f"{line}\n" for line in lines)


def _sized(described: Described) -> Described:
    """Return a description whose parameters and grids are expressions of the sizes of a call, where it has such."""
    sizes = sizes_of(described)
    if sizes is None:
        return described
    own = described["parameters"]
    parameters = [{**by, "passed": p.get("passed", True)} for by, p in zip(sizes["parameters"], own, strict=True)]
    first, *then = sizes["grids"]
    launch = {**described["launch"], "grid": first}
    if then:
        behind = zip(described["launch"]["then"], then, strict=True)
        launch["then"] = [{**kernel, "grid": grid} for kernel, grid in behind]
    return {**described, "parameters": parameters, "launch": launch}


def _tensors(described: Described) -> list[Described]:
    return [p for p in described["parameters"] if "output" in p]


def _project(space: str, described: Described, cubin: bytes, target: str) -> dict[str, bytes]:
    """Return the header, the machine code and CMakeLists.txt."""
    tensors = _tensors(described)
    scratch = [p for p in described["parameters"] if "scratch" in p]
    if unknown := [p["dtype"] for p in tensors if p["dtype"] not in _BYTES]:
        raise UsageError(f"C++ packages do not support tensors of {', '.join(unknown)}")
    if any("constant" in p for p in described["parameters"]):
        raise UsageError("C++ packages do not support __constant__ inputs; use --as wheel")
    if any(p.get("scalar") == "float64" for p in described["parameters"]):
        raise UsageError("C++ packages do not support double parameters; use --as wheel")
    if any("struct" in p for p in described["parameters"]):
        raise UsageError("C++ packages do not support struct parameters; use --as wheel")
    names = [_name(p) for p in tensors]
    sizes, by_size = sizes_of(described), _sized(described)
    launches = [by_size["launch"] | {"entry": described["entry"]}, *by_size["launch"].get("then", ())]
    uses_sms = any("sms_" in in_cpp(value) for launch in launches for value in launch["grid"])
    header = _HEADER.format(
        module=described["module"],
        space=space,
        sizes=helpers(described),
        of_size=", const Sizes& sizes = {}" if sizes else "",
        load="".join(_loading(launches, scratch)) + _SMS * uses_sms,
        free="".join(f"        cuMemFree({_name(p)}_);\n" for p in scratch),
        tensors="\n".join(f"    //   {_name(p)}: {_described(p)}" for p in _tensors(by_size)),
        arguments=", ".join(f"CUdeviceptr {name}" for name in names),
        values="        check(sizes);\n" * bool(sizes) + "".join(_values(by_size, scratch)),
        launches="".join(_launching(launches, described)),
        members="".join(
            [
                *(f"    CUfunction function{i}_ = nullptr;\n" for i in range(len(launches))),
                *(f"    CUdeviceptr {_name(p)}_ = 0;\n" for p in scratch),
                *(["    int sms_ = 0;\n"] * uses_sms),
            ]
        ),
    )
    included = "".join(",".join(map(str, cubin[i : i + 32])) + ",\n" for i in range(0, len(cubin), 32)).encode()
    sha256 = hashlib.sha256(included).hexdigest()
    return {
        f"{space}.hpp": header.encode(),
        "kernel_cubin.inc": included,
        "CMakeLists.txt": _CMAKE.format(space=space, sha256=sha256, target=target).encode(),
    }


def _name(parameter: Described) -> str:
    """Return a C++ name for a parameter, whose own name may be any text."""
    name = re.sub(r"\W", "_", str(parameter["name"]), flags=re.ASCII)
    return f"{name}_of_kernel" if name in _WORDS or not name[:1].isalpha() else name


def _described(tensor: Described) -> str:
    return f"{tensor['dtype']} [{', '.join(map(str, tensor['shape']))}]{', written' if tensor['output'] else ''}"


def _size(tensor: Described) -> str:
    return " * ".join(["std::size_t{1}", *map(str, tensor["shape"]), str(_BYTES[tensor["dtype"]])])


def _loading(launches: Sequence[Described], scratch: Sequence[Described]) -> Iterator[str]:
    for i, launch in enumerate(launches):
        yield f'        check(cuModuleGetFunction(&function{i}_, module_, "{_entry(launch)}"),\n'
        yield '              "cuModuleGetFunction");\n'
        attribute = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        yield f"        check(cuFuncSetAttribute(function{i}_, {attribute}, {launch['shared_bytes']}),\n"
        yield '              "cuFuncSetAttribute");\n'
    for p in scratch:
        yield f'        check(cuMemAlloc(&{_name(p)}_, {p["scratch"]}), "cuMemAlloc");\n'


def _entry(launch: Described) -> str:
    entry = str(launch["entry"])
    if not re.fullmatch(r"[A-Za-z_]\w*", entry, re.ASCII):
        raise UsageError(f"C++ packages do not support a kernel named {entry!a}")
    return entry


def _values(described: Described, scratch: Sequence[Described]) -> Iterator[str]:
    """Yield the variables whose addresses are the kernel's parameters, those of tensors apart."""
    for p in described["parameters"]:
        if "scalar" in p:
            yield f"        {_SCALARS[p['scalar']]} {_name(p)} = {_literal(p)};\n"
        elif "box" in p:
            yield from _tensor_map(p, scratch)
    for p in scratch:
        if p["zeroed"]:
            yield f'        check(cuMemsetD8Async({_name(p)}_, 0, {p["scratch"]}, stream), "cuMemsetD8Async");\n'


def _literal(scalar: Described) -> str:
    value = scalar["value"]
    if isinstance(value, str):
        return f"static_cast<{_SCALARS[scalar['scalar']]}>({in_cpp(value)})"
    return f"{float(value).hex()}f" if scalar["scalar"] == "float32" else str(int(value))


def _viewed(tensor_map: Described, scratch: Sequence[Described]) -> str:
    """Return the address of what a tensor map views."""
    of, offset = tensor_map["tensor"], tensor_map.get("offset", 0)
    name = f"{_name({'name': of})}{'_' * (of in [s['name'] for s in scratch])}"
    return f"{name} + {in_cpp(offset)}" if offset else name


def _tensor_map(p: Described, scratch: Sequence[Described]) -> Iterator[str]:
    name, rank = _name(p), len(p["dims"])
    if p["dtype"] not in _MAP_DTYPES:
        raise UsageError(f"C++ packages do not support tensor maps of {p['dtype']}")
    swizzle = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}[p["swizzle"]]
    fill = "NAN_REQUEST_ZERO_FMA" if p.get("nan") else "NONE"
    yield f"        alignas(128) CUtensorMap {name};\n"
    for kind, array in (("cuuint64_t", "dims"), ("cuuint64_t", "strides"), ("cuuint32_t", "box")):
        given = p["strides_bytes" if array == "strides" else array]
        values = ", ".join(f"static_cast<{kind}>({in_cpp(v)})" if isinstance(v, str) else str(v) for v in given)
        yield f"        const {kind} {name}_{array}[] = {{{values}}};\n"
    yield f"        const cuuint32_t {name}_steps[] = {{{', '.join(['1'] * rank)}}};\n"
    yield (
        f"        check(cuTensorMapEncodeTiled(&{name}, CU_TENSOR_MAP_DATA_TYPE_{_MAP_DTYPES[p['dtype']]}, {rank},\n"
        f"                                     reinterpret_cast<void*>({_viewed(p, scratch)}), {name}_dims,\n"
        f"                                     {name}_strides, {name}_box, {name}_steps,\n"
        f"                                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_{swizzle},\n"
        "                                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B,\n"
        f"                                     CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}),\n"
        '              "cuTensorMapEncodeTiled");\n'
    )


def _launching(launches: Sequence[Described], described: Described) -> Iterator[str]:
    passed = [p["name"] for p in described["parameters"] if p.get("passed", True)]
    scratch = {p["name"] for p in described["parameters"] if "scratch" in p}
    for i, launch in enumerate(launches):
        taken = launch.get("parameters")
        own = [f"{_name({'name': n})}{'_' * (n in scratch)}" for n in (passed if taken is None else taken)]
        yield f"        void* parameters{i}[] = {{{', '.join(f'&{name}' for name in own)}}};\n"
        grid = [f"static_cast<unsigned>({in_cpp(v)})" if isinstance(v, str) else str(v) for v in launch["grid"]]
        sizes = ", ".join((*grid, *map(str, (*launch["block"], launch["shared_bytes"]))))
        yield f"        check(cuLaunchKernel(function{i}_, {sizes}, stream, parameters{i}, nullptr),\n"
        yield '              "cuLaunchKernel");\n'


# ── sizes of a call ───────────────────────────────────────────────────────────────────────────────────────────────────


HELPERS = """
struct Sizes {{  // of a call; each has its largest here
    std::int64_t {members};
}};

inline std::int64_t floor_div(std::int64_t a, std::int64_t b) {{ return a / b - (a % b != 0 && (a < 0) != (b < 0)); }}

inline void check(const Sizes& sizes) {{
{checks}}}
"""
_OPERATORS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
    ast.GtE: ">=", ast.USub: "-", ast.UAdd: "+", ast.Not: "!", ast.And: " && ", ast.Or: " || ",
}  # fmt: skip # a table


class NoCpp(Exception):
    """An expression that integers of C++ cannot compute, such as a true division."""


def sizes_of(described: Described) -> Described | None:
    """Return the entry of kernel.json on the sizes of a call.

    None for a kernel of one size, and if integers of C++ cannot compute an expression.
    """
    found: Described | None = described.get("run_time")
    if not found:
        return None
    try:
        for value in (*_numbers(found), *(rule["expression"] for rule in found["requires"])):
            in_cpp(value)
    except NoCpp:
        return None
    return found


def _numbers(found: Described) -> Iterator[str | int]:
    """Yield all numbers that depend on sizes."""
    for grid in found["grids"]:
        yield from grid
    for p in found["parameters"]:
        for name in ("shape", "dims", "strides_bytes", "box"):
            yield from p.get(name, ())
        yield from (p[name] for name in ("offset", "scratch") if name in p)
        if isinstance(p.get("value"), str):
            yield p["value"]
        if isinstance(p.get("swizzle"), str):
            raise NoCpp(p["swizzle"])


def helpers(described: Described) -> str:
    """Return the C++ text of the struct of sizes and of what checks them; empty for a kernel of one size."""
    sizes = sizes_of(described)
    if sizes is None:
        return ""
    members = ", ".join(f"{axis} = {most}" for axis, most in sizes["axes"].items())
    return HELPERS.format(members=members, checks="".join(_checks(sizes, described)))


def _checks(sizes: Described, described: Described) -> Iterator[str]:
    for axis, most in sizes["axes"].items():
        says = f"{axis} must be from 1 to {most}, the sizes that this kernel was verified for"
        yield f"    if (sizes.{axis} < 1 || sizes.{axis} > {most}) throw std::runtime_error({json.dumps(says)});\n"
    for p, largest in zip(sizes["parameters"], described["parameters"], strict=True):
        if isinstance(p.get("scratch"), str):
            says = f"{p['name']} needs more than the {largest['scratch']} bytes that are allocated"
            yield f"    if ({in_cpp(p['scratch'])} > {largest['scratch']})\n"
            yield f"        throw std::runtime_error({json.dumps(says)});\n"
    for rule in sizes["requires"]:
        says = f"this kernel needs {rule['expression']}: {rule['why']}"
        yield f"    if (!({in_cpp(rule['expression'])}))\n        throw std::runtime_error({json.dumps(says)});\n"


def in_cpp(value: int | str) -> str:
    """Return a number of kernel.json as C++, of the struct `sizes`; the SMs of the GPU are `sms_`. Raises NoCpp."""
    return _cpp(ast.parse(value, mode="eval").body) if isinstance(value, str) else str(value)


def _cpp(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=bool() | int() as value):
            return str(int(value))
        case ast.Name(id=name):
            return f"sizes.{name}"
        case ast.Attribute(value=ast.Name(id="gpu"), attr="sms"):
            return "sms_"
        case ast.UnaryOp(op=op, operand=operand):
            return f"{_OPERATORS[type(op)]}({_cpp(operand)})"
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return f"floor_div({_cpp(left)}, {_cpp(right)})"
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            a, b = _cpp(left), _cpp(right)
            return f"({a} - {b} * floor_div({a}, {b}))"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return f"({_cpp(left)} {_OPERATORS[type(op)]} {_cpp(right)})"
        case ast.BoolOp(op=op, values=values):
            return f"({_OPERATORS[type(op)].join(map(_cpp, values))})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({_cpp(test)} ? {_cpp(body)} : {_cpp(orelse)})"
        case ast.Compare(left=left, ops=ops, comparators=others):
            pairs = zip([left, *others], ops, others, strict=False)
            return f"({' && '.join(_compared(a, op, b) for a, op, b in pairs)})"
        case ast.Call(func=ast.Name(id="ceil_div"), args=[a, b]):
            return f"-floor_div(-({_cpp(a)}), {_cpp(b)})"
        case ast.Call(func=ast.Name(id="round_up"), args=[a, b]):
            return f"(-floor_div(-({_cpp(a)}), {_cpp(b)}) * {_cpp(b)})"
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=arguments):
            return f"std::{name}<std::int64_t>({{{', '.join(map(_cpp, arguments))}}})"
    raise NoCpp(ast.unparse(node))


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> str:
    if isinstance(right, ast.Tuple):
        listed = " || ".join(f"{_cpp(left)} == {_cpp(item)}" for item in right.elts)
        return f"({listed})" if isinstance(operator, ast.In) else f"!({listed})"
    return f"{_cpp(left)} {_OPERATORS[type(operator)]} {_cpp(right)}"
