"""Headers that cannot be had are named before a search, each with what to do instead; all others pass."""

from __future__ import annotations

import pytest

from evoengine.cuda_emulator.preprocessing import HOST_HEADERS, INCLUDE, PROVIDED, STANDARD
from evoengine.stages import includes, toolchain
from evoengine.stages.includes import unsupported_includes

REFUSED = {
    "vector": "no such header among CUDA's; the kernel's text must stand alone",
    "type_traits": "include cuda/std/type_traits and write cuda::std",
    "cub/cub.cuh": "include the primitive's own header, such as cub/block/block_reduce.cuh",
    "cub/device/device_reduce.cuh": "it is for host code",
    "thrust/sort.h": "it is for host code",
    "cuda/barrier": "the emulator does not know it",
    "cub/block/block_radix_sort.cuh": "the emulator does not know it",
}


def complaints(name, emulated=True):
    return unsupported_includes(f"// a kernel\n  # include <{name}>\n__global__ void f() {{}}\n", emulated)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_included_is_named_with_its_line_and_the_remedy(name):
    [sentence] = complaints(name)
    assert sentence.startswith(f"line 2: {name}: ") and REFUSED[name] in sentence


def test_a_file_of_ones_own_is_named():
    assert "line 1: helpers.h: no such header" in unsupported_includes('#include "helpers.h"\n', True)[0]


def of_emulator():
    files = (path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*") if path.is_file())
    return {name for name in files if not name.startswith("evo_emu/")}


def test_all_that_the_emulator_has_nvrtc_has_too():
    names = of_emulator() | PROVIDED | HOST_HEADERS | {f"cuda/std/{name}" for name in STANDARD}
    assert len(names) > 40
    assert [sentence for name in sorted(names) for sentence in complaints(name)] == []


def test_with_a_gpu_the_emulator_need_not_know_a_header():
    assert complaints("cuda/barrier", emulated=False) == []


def test_comments_and_conditionals_are_left_alone_and_a_header_guard_is_none():
    text = """
// #include <vector>
/* #include <list> */
#ifndef __CUDACC_RTC__
#include <iostream>
#endif
#ifndef KERNEL_H
#define KERNEL_H
#include <map>
#endif
const char* text = "#include <set>";
#include <deque>
"""
    found = unsupported_includes(text, True)
    assert [sentence.split(": ")[:2] for sentence in found] == [["line 9", "map"], ["line 12", "deque"]]


@pytest.mark.parametrize("name", ["cooperative_groups.h", "cuda/std/array", "cub/block/block_scan.cuh"])
def test_without_cccl_what_needs_it_is_named_with_the_command_that_installs_it(monkeypatch, name):
    folders = tuple(f for f in toolchain.include_folders() if not (f / toolchain.CCCL_HEADER).is_file())
    monkeypatch.setattr(includes, "include_folders", lambda: folders)
    [sentence] = complaints(name)
    assert "it needs CCCL, which was not found: pip install 'evoengine[cuda13]'" in sentence
