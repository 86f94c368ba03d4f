"""What a kernel's text may include in the emulator, and the macros that it finds defined.

These are NVRTC's for the target's architecture, and none of the host's: a branch that the host's compiler takes and
NVRTC does not would be judged in place of the one that runs. Headers of the host's C++ library, which a few of a
kernel's includes lead to, need the host's macros: around these they are restored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from evoengine.cuda_emulator.inline_ptx import INCLUDE
from evoengine.sandbox.host_compiler import run_compiler

PROVIDED = frozenset(
    "assert.h cassert stdio.h cstdio stdlib.h cstdlib string.h cstring cuda_runtime.h cuda_runtime_api.h "
    "device_launch_parameters.h device_functions.h vector_types.h vector_functions.h sm_60_atomic_functions.h".split()
)
"""headers of which the emulator has what device code uses without any include"""
HOST_HEADERS = frozenset("float.h cfloat limits.h climits stdbool.h cstdbool stddef.h cstddef stdint.h cstdint".split())
"""headers that the host compiler brings"""

STANDARD = frozenset(
    "array bit cassert cfloat climits cmath concepts cstddef cstdint initializer_list limits numbers optional ratio "
    "span tuple type_traits utility version".split()
)
"""headers of cuda/std for which the host's C++ library serves: cuda::std is std in the emulator"""

LINE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|\"([^\"\n]+)\")[^\n]*", re.MULTILINE)


def knows_header(name: str) -> bool:
    """Return whether the emulator compiles a kernel that includes the header of that name."""
    standard = name.removeprefix("cuda/std/") if name.startswith("cuda/std/") else ""
    return name in PROVIDED or name in HOST_HEADERS or standard in STANDARD or (INCLUDE / name).is_file()


def for_host(text: str) -> str:
    """Return the text with includes for the host compiler.

    Headers that the emulator provides are removed; cuda/std becomes the host's.
    """
    return LINE.sub(_for_host, text)


_NUMBERS = {"limits": "c_limits.h", "float": "c_float.h", "stdint": "c_stdint.h"}
"""C header → what defines its limits again, in numbers"""


def in_host_environment(text: str, restore_host_macros: str, device_macros: str) -> str:
    """Return the text with directives around each include of a host header; line numbers are kept."""

    def wrap(line: re.Match[str]) -> str:
        name = line[1] or line[2]
        if not is_host_header(name):
            return line[0]
        numbers = _NUMBERS.get(name.removesuffix(".h").removeprefix("c"))
        more = f"#include <evo_emu/{numbers}>\n" if numbers else ""
        number = text.count("\n", 0, line.start()) + 1
        before = f'{restore_host_macros}#line {number} "kernel.cu"\n'
        return f'{before}{line[0]}\n{device_macros}{more}#line {number + 1} "kernel.cu"'

    return LINE.sub(wrap, text)


def host_headers(text: str) -> bool:
    """Return whether the text includes a host header, directly or through cuda/std."""
    return any(is_host_header(line[1] or line[2]) for line in LINE.finditer(text))


def is_host_header(name: str) -> bool:
    return name.startswith(("cub/", "cuda/")) or not (INCLUDE / name).is_file()


def _for_host(line: re.Match[str]) -> str:
    name = line[1] or line[2]
    standard = name.removeprefix("cuda/std/")
    if name in PROVIDED or (standard != name and standard in PROVIDED):
        return ""
    return f"#include <{standard}>" if standard != name and standard in STANDARD else line[0]


_DEFINED = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
_ARCH = re.compile(r"sm_(\d+)([af]?)\Z")

# What NVRTC 13.0 defines with --std=c++17, found by asking it for every name that g++, clang and EDG define; keywords
# that are macros there are those of evo_emu/cuda.h. A test asks the NVRTC that is installed.
_OF_NVRTC = {
    "CUDART_VERSION": "{major}0{minor}0", "NULL": "0", "_BOOL": "1", "_WCHAR_T": "1", "__ARRAY_OPERATORS": "1",
    "__CUDACC_DEVICE_ATOMIC_BUILTINS__": "1", "__CUDACC_RTC__": "1", "__CUDACC__": "1",
    "__CUDACC_VER_BUILD__": "{build}", "__CUDACC_VER_MAJOR__": "{major}", "__CUDACC_VER_MINOR__": "{minor}",
    "__CUDA_API_VER_MAJOR__": "{major}", "__CUDA_API_VER_MINOR__": "{minor}",
    "__CUDA_FTZ": "0", "__CUDA_PREC_DIV": "1", "__CUDA_PREC_SQRT": "1", "__CUDA_RUNTIME_H__": "",
    "__DEVICE_TYPES_H__": "", "__EDG_VERSION__": "606", "__EDG__": "1", "__EXCEPTIONS": "1", "__LP64__": "1",
    "__NVCC_DIAG_PRAGMA_SUPPORT__": "1", "__PLACEMENT_DELETE": "1", "__PRAGMA_REDEFINE_EXTNAME": "1", "__RTTI": "1",
    "__SIGNED_CHARS__": "1", "__STDCPP_DEFAULT_NEW_ALIGNMENT__": "16ul", "__STDC_HOSTED__": "1", "__STDC__": "1",
    "__THROW": "", "__VARIADIC_TEMPLATES": "1", "__VECTOR_TYPES_H__": "", "__cplusplus": "201703L",
    "__cpp_aggregate_bases": "201603L", "__cpp_aggregate_nsdmi": "201304L", "__cpp_alias_templates": "200704L",
    "__cpp_aligned_new": "201606L", "__cpp_attributes": "200809L", "__cpp_binary_literals": "201304L",
    "__cpp_capture_star_this": "201603L", "__cpp_constexpr": "201603L", "__cpp_decltype": "200707L",
    "__cpp_decltype_auto": "201304L", "__cpp_deduction_guides": "201703L", "__cpp_delegating_constructors": "200604L",
    "__cpp_enumerator_attributes": "201411L", "__cpp_exceptions": "199711L", "__cpp_fold_expressions": "201603L",
    "__cpp_generic_lambdas": "201304L", "__cpp_guaranteed_copy_elision": "201606L", "__cpp_hex_float": "201603L",
    "__cpp_if_constexpr": "201606L", "__cpp_inheriting_constructors": "201511L", "__cpp_init_captures": "201304L",
    "__cpp_initializer_lists": "200806L", "__cpp_inline_variables": "201606L", "__cpp_lambdas": "200907L",
    "__cpp_namespace_attributes": "201411L", "__cpp_nested_namespace_definitions": "201411L",
    "__cpp_noexcept_function_type": "201510L", "__cpp_nontype_template_args": "201411L",
    "__cpp_nontype_template_parameter_auto": "201606L", "__cpp_nsdmi": "200809L", "__cpp_range_based_for": "201603L",
    "__cpp_raw_strings": "200710L", "__cpp_ref_qualifiers": "200710L", "__cpp_return_type_deduction": "201304L",
    "__cpp_rtti": "199711L", "__cpp_rvalue_references": "200610L", "__cpp_sized_deallocation": "201309L",
    "__cpp_static_assert": "201411L", "__cpp_structured_bindings": "201606L", "__cpp_template_template_args": "201611L",
    "__cpp_threadsafe_static_init": "200806L", "__cpp_unicode_characters": "200704L",
    "__cpp_unicode_literals": "200710L", "__cpp_user_defined_literals": "200809L",
    "__cpp_variable_templates": "201304L", "__cpp_variadic_templates": "200704L", "__cpp_variadic_using": "201611L",
}  # fmt: skip # a table
_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
_VERSION = "13.0.88"
"""of a compiler that is not a package"""


def nvrtc_macros(arch: str) -> dict[str, str]:
    """Name → value of what NVRTC defines in a compilation for `arch` (sm_80, sm_90a, sm_100f)."""
    found = _ARCH.match(arch)
    if not found:
        raise ValueError(f"{arch!r} is not an architecture: write sm_90a")
    number = f"{found[1]}0"
    own = {"__CUDA_ARCH__": number, "__CUDA_ARCH_LIST__": number}
    if found[2]:
        own["__CUDA_ARCH_FAMILY_SPECIFIC__"] = number
    if found[2] == "a":
        own |= {"__CUDA_ARCH_SPECIFIC__": number, f"__CUDA_ARCH_FEAT_SM{found[1]}_ALL": "1"}
    major, minor, build = _nvrtc_version().split(".")[:3]
    return {n: v.format(major=major, minor=minor, build=build) for n, v in (_OF_NVRTC | own).items()}


@cache
def _nvrtc_version() -> str:
    for package in _PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return _VERSION


def host_macros(flags: Sequence[str], headers: Iterable[str] = ()) -> list[str]:
    """Return the macros that the host compiler defines with these flags, and those of `headers`.

    Those that the emulator's headers define are left out.
    """
    text = "".join(f"#include <{header}>\n" for header in sorted(headers))
    dump = run_compiler([*flags, "-dM", "-E", "-xc++", "-"], text).stdout
    own = {name for path in INCLUDE.rglob("*") if path.is_file() for name in _DEFINED.findall(path.read_text("utf-8"))}
    return sorted(set(_DEFINED.findall(dump)) - own)


def device_macros(host: Iterable[str], arch: str, keep: bool = False) -> str:
    """Return directives that replace the host's macros by NVRTC's.

    With `keep`, `restore_host_macros` can restore the host's.
    """
    nvrtc = nvrtc_macros(arch)
    lines = [f'#pragma push_macro("{name}")' for name in _all(host, nvrtc)] if keep else []
    lines += [f"#undef {name}" for name in _all(host, nvrtc)]
    lines += [f"#define {name} {value}" for name, value in nvrtc.items()]
    return "\n".join(lines) + "\n"


def restore_host_macros(host: Iterable[str], arch: str) -> str:
    """Return directives that undo those of `device_macros`."""
    return "\n".join(f'#pragma pop_macro("{name}")' for name in _all(host, nvrtc_macros(arch))) + "\n"


def _all(host: Iterable[str], nvrtc: Iterable[str]) -> list[str]:
    return sorted({*host, *nvrtc})
