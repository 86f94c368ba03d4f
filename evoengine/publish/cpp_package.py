"""Pack an exported kernel as C++: a header that launches it by the CUDA driver API, an example, and a CMake project.

The header launches the kernel for the sizes that it was exported for.
"""

from __future__ import annotations

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
    "union unsigned using virtual void volatile while xor stream".split()
)
"""names that a parameter of the C++ function cannot have"""

_HEADER = """\
// Launches {module} by the CUDA driver API. README.md says what it computes, for which GPU, and how it was verified.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {space} {{

inline void check(CUresult code, const char* call) {{
    if (code == CUDA_SUCCESS) return;
    const char* text = nullptr;
    cuGetErrorString(code, &text);
    throw std::runtime_error(std::string(call) + ": " + (text ? text : "unknown error"));
}}

class Kernel {{
public:
    // Load kernel.cubin into the current context. Throws std::runtime_error, as all functions do.
    explicit Kernel(const std::string& cubin) {{
        std::ifstream file(cubin, std::ios::binary);
        const std::vector<char> image{{std::istreambuf_iterator<char>(file), {{}}}};
        if (image.empty()) throw std::runtime_error(cubin + " cannot be read");
        check(cuModuleLoadData(&module_, image.data()), "cuModuleLoadData");
{load}    }}

    ~Kernel() {{
{free}        cuModuleUnload(module_);
    }}

    Kernel(const Kernel&) = delete;
    Kernel& operator=(const Kernel&) = delete;

    // Queue the kernel on a stream. Tensors are contiguous, at addresses that are multiples of 16 bytes:
{tensors}
    void operator()({arguments}, CUstream stream = nullptr) {{
{values}{launches}    }}

private:
    CUmodule module_ = nullptr;
{members}}};

}}  // namespace {space}
"""

_MAIN = """\
// Runs the kernel on tensors of zeros and prints the time of a launch. A kernel that was verified needs no more here.
#include "{space}.hpp"

#include <cstdio>

using {space}::check;

int main(int, char** arguments) try {{
    CUdevice device;
    CUcontext context;
    check(cuInit(0), "cuInit");
    check(cuDeviceGet(&device, 0), "cuDeviceGet");
    check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    const std::string self = arguments[0];
    const auto slash = self.rfind('/');
    {space}::Kernel kernel(slash == std::string::npos ? "kernel.cubin" : self.substr(0, slash) + "/kernel.cubin");
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

find_package(CUDAToolkit REQUIRED)
add_executable(example main.cpp)
target_compile_features(example PRIVATE cxx_std_17)
target_link_libraries(example PRIVATE CUDA::cuda_driver)
configure_file(kernel.cubin kernel.cubin COPYONLY)
"""


def cpp_files(name: str, described: Described) -> dict[str, bytes]:
    """Return NAME.hpp, main.cpp and CMakeLists.txt for an export's kernel.json.

    Raises UsageError for a kernel with parameters that the header cannot pass.
    """
    space = name.replace("-", "_")
    tensors = [p for p in described["parameters"] if "output" in p]
    scratch = [p for p in described["parameters"] if "scratch" in p]
    if unknown := [p["dtype"] for p in tensors if p["dtype"] not in _BYTES]:
        raise UsageError(f"no C++ package is written for tensors of {', '.join(unknown)}")
    if any("constant" in p for p in described["parameters"]):
        raise UsageError("no C++ package is written for a kernel with __constant__ inputs; use --as wheel")
    if any(p.get("scalar") == "float64" for p in described["parameters"]):
        raise UsageError("no C++ package is written for a kernel that takes a double by value; use --as wheel")
    if any("struct" in p for p in described["parameters"]):
        raise UsageError("no C++ package is written for a kernel that takes a struct; use --as wheel")
    names = [_name(p) for p in tensors]
    launches = [described["launch"] | {"entry": described["entry"]}, *described["launch"].get("then", ())]
    header = _HEADER.format(
        module=described["module"],
        space=space,
        load="".join(_loading(launches, scratch)),
        free="".join(f"        cuMemFree({_name(p)}_);\n" for p in scratch),
        tensors="\n".join(f"    //   {_name(p)}: {_described(p)}" for p in tensors),
        arguments=", ".join(f"CUdeviceptr {name}" for name in names),
        values="".join(_values(described, scratch)),
        launches="".join(_launching(launches, described)),
        members="".join(
            [
                *(f"    CUfunction function{i}_ = nullptr;\n" for i in range(len(launches))),
                *(f"    CUdeviceptr {_name(p)}_ = 0;\n" for p in scratch),
            ]
        ),
    )
    allocated = "\n".join(f"    CUdeviceptr {_name(p)} = zeros({_size(p)});  // {_described(p)}" for p in tensors)
    main = _MAIN.format(space=space, allocated=allocated, names=", ".join(names))
    return {
        f"{space}.hpp": header.encode(),
        "main.cpp": main.encode(),
        "CMakeLists.txt": _CMAKE.format(space=space).encode(),
    }


def _name(parameter: Described) -> str:
    """Return a C++ name for a parameter, whose own may be anything that a file says."""
    name = re.sub(r"\W", "_", str(parameter["name"]), flags=re.ASCII)
    return f"{name}_of_kernel" if name in _WORDS or not name[:1].isalpha() else name


def _described(tensor: Described) -> str:
    return f"{tensor['dtype']} {list(tensor['shape'])}{', written' if tensor['output'] else ''}"


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
        raise UsageError(f"no C++ package is written for a kernel named {entry!a}")
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
    return f"{float(value).hex()}f" if scalar["scalar"] == "float32" else str(int(value))


def _viewed(tensor_map: Described, scratch: Sequence[Described]) -> str:
    """Return the address of what a tensor map views."""
    of, offset = tensor_map["tensor"], tensor_map.get("offset", 0)
    name = f"{_name({'name': of})}{'_' * (of in [s['name'] for s in scratch])}"
    return f"{name} + {offset}" if offset else name


def _tensor_map(p: Described, scratch: Sequence[Described]) -> Iterator[str]:
    name, rank = _name(p), len(p["dims"])
    if p["dtype"] not in _MAP_DTYPES:
        raise UsageError(f"no C++ package is written for a tensor map of {p['dtype']}")
    swizzle = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}[p["swizzle"]]
    fill = "NAN_REQUEST_ZERO_FMA" if p.get("nan") else "NONE"
    yield f"        alignas(128) CUtensorMap {name};\n"
    for kind, array in (("cuuint64_t", "dims"), ("cuuint64_t", "strides"), ("cuuint32_t", "box")):
        values = ", ".join(map(str, p["strides_bytes" if array == "strides" else array]))
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
        own = [f"{_name({'name': n})}{'_' * (n in scratch)}" for n in launch.get("parameters", passed)]
        yield f"        void* parameters{i}[] = {{{', '.join(f'&{name}' for name in own)}}};\n"
        sizes = ", ".join(map(str, (*launch["grid"], *launch["block"], launch["shared_bytes"])))
        yield f"        check(cuLaunchKernel(function{i}_, {sizes}, stream, parameters{i}, nullptr),\n"
        yield '              "cuLaunchKernel");\n'
