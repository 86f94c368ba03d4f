"""The branch that is judged is the branch that is compiled: a kernel finds the macros that NVRTC defines for its
target, with their values, and none of the host's."""

import re

import numpy as np
import pytest

from evoengine.cuda_emulator import build as builder
from evoengine.cuda_emulator.inline_ptx import INCLUDE
from evoengine.cuda_emulator.preprocessing import HOST_HEADERS, STANDARD, host_macros, nvrtc_macros
from evoengine.records import Launch, Source
from evoengine.sandbox.host_compiler import native_flags, run_compiler
from evoengine.stages.compile import options
from evoengine.stages.includes import C_HEADERS
from evoengine.stages.toolchain import include_folders, nvrtc
from tests.support.exhaustive import more

ARCHS = ["sm_90a", *more(["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_100a", "sm_100f", "sm_120", "sm_120a"])]
OF_THE_EMULATOR = {
    name
    for path in INCLUDE.rglob("*")
    if path.is_file()
    for name in re.findall(r"^\s*#\s*define\s+(\w+)", path.read_text("utf-8"), re.MULTILINE)
}
CHANGING = {"__COUNTER__", "__BASE_FILE__", "__INCLUDE_LEVEL__", "__DATE__", "__TIME__", "__FILE__", "__LINE__"}
# a remark that another macro is to be used, and keywords of NVRTC's that no kernel of a tuned family needs
NOT_THERE = {"__CUDACC_VER__", "__tile__", "__location__"}


def names(arch, *headers):
    flags = [*builder._COMMON, *native_flags(), *builder._CANDIDATE_FLAGS, *builder._checked_flags()]
    found = {*host_macros(flags, headers), *nvrtc_macros(arch), *nvrtc_macros("sm_90a"), *OF_THE_EMULATOR}
    return sorted(n for n in found if n not in CHANGING and not n.startswith(("EVO_", "__has_")))


def seen_by_nvrtc(text, asked, arch):
    """Name → value of what is defined behind the text."""
    text += "#define TEXT_(...) #__VA_ARGS__\n#define TEXT(...) TEXT_(__VA_ARGS__)\n"
    for i, name in enumerate(asked):
        text += f'#ifdef {name}\n__device__ extern const char v{i}[] = "={name}=" TEXT({name});\n#endif\n'
    pointers = "".join(f"#ifdef {name}\no[{i}] = v{i};\n#endif\n" for i, name in enumerate(asked))
    text += f'extern "C" __global__ void f(const char** o) {{\n{pointers}}}\n'
    headers = (tuple(each.encode() for each in column) for column in (C_HEADERS.values(), C_HEADERS))
    program = nvrtc().createProgram(text, "f.cu", *headers)
    nvrtc().compileProgram(program, (*options(arch).split(), *(f"-I{folder}" for folder in include_folders())))
    ptx = nvrtc().getPTX(program)
    found = {}
    for data in re.findall(r"\.b8 v\d+\[\d+\] = \{([\d, ]*)\}", ptx if isinstance(ptx, str) else ptx.decode()):
        name, value = bytes(map(int, data.split(","))).rstrip(b"\0").decode()[1:].split("=", 1)
        found[name] = value
    return found


def seen_by_the_emulator(text, asked, arch):
    text += "".join(f"#ifdef {name}\n@ {name} = {name}\n#endif\n".replace(f"@ {name}", f'@ "{name}"') for name in asked)
    unit = builder._unit(Source(text, "f", Launch((1, 1, 1), 32, 0)), arch, checked=False)
    done = run_compiler([*builder._COMMON, *native_flags(), *builder._CANDIDATE_FLAGS, "-E", "-P", "-xc++", "-"], unit)
    return dict(re.findall(r'^@ "(\w+)" = ?(.*)$', done.stdout, re.MULTILINE))


def differences(text, asked, arch):
    real, own = seen_by_nvrtc(text, asked, arch), seen_by_the_emulator(text, asked, arch)
    missing = real.keys() - own.keys() - NOT_THERE
    values = {n: (own[n], real[n]) for n in own.keys() & real.keys() - OF_THE_EMULATOR if own[n] != real[n]}
    return own.keys() - real.keys() - OF_THE_EMULATOR, missing, values


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_finds_the_macros_of_nvrtc_and_none_of_the_hosts(arch):
    asked = names(arch)
    assert {"__OPTIMIZE__", "__GNUC__", "__linux__", "_GNU_SOURCE", "__x86_64__", "__SANITIZE_THREAD__"} & {*asked}
    assert len(seen_by_nvrtc("", asked, arch)) > 90
    assert differences("", asked, arch) == (set(), set(), {})


@pytest.mark.parametrize("header", ["climits", *more(["cfloat", "cstdint", "cuda/std/limits", "cuda/std/type_traits"])])
def test_headers_of_the_host_bring_none_of_its_macros(header):
    """What NVRTC's own headers define besides is not asked for."""
    asked = names("sm_90a", *STANDARD, *HOST_HEADERS)
    own = seen_by_the_emulator(f"#include <{header}>\n", asked, "sm_90a")
    real = seen_by_nvrtc(f"#include <{header}>\n", asked, "sm_90a")
    assert not own.keys() - real.keys() - OF_THE_EMULATOR


BRANCHES = """
#include <climits>
extern "C" __global__ void f(int* o) {
#if __CUDA_ARCH__ == 800
    o[0] = 80;
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
    o[0] = 91;
#elif __CUDA_ARCH__ >= 900
    o[0] = 90;
#endif
#if defined(__OPTIMIZE__) || defined(__GNUC__) || defined(__clang__) || defined(__linux__) || __cplusplus > 201703L
    o[0] = -1;
#endif
    o[1] = INT_MAX;
    o[2] = __LINE__;
}
"""


@pytest.mark.parametrize(("arch", "branch"), [("sm_80", 80), *more([("sm_90", 90), ("sm_90a", 91), ("sm_120a", 90)])])
def test_the_branch_of_the_target_runs(emulate_rounds, arch, branch):
    done = emulate_rounds(BRANCHES, [[("f", np.zeros(3, np.int32))]], threads=1, arch=arch)
    assert done.tensors[0]["o"].tolist() == [branch, 2**31 - 1, 15]
