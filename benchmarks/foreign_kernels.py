"""Kernels of others as folders of somebody's own, their device code unchanged: gate, prediction and planted faults.

    python -m benchmarks.foreign_kernels NAME CHECKOUT [--write FOLDER] [--faults]

thunderkittens   kernels/gemm/bf16_h100 of github.com/HazyResearch/ThunderKittens at 0b55588 (MIT)
flashinfer       attention/decode.cuh of github.com/flashinfer-ai/flashinfer at fb28d72 (Apache 2.0): paged decode

What the host runs is left out, and headers of the checkout are put in the place of their includes, as a kernel's text
stands alone. --write keeps the folder. --faults plants each fault in the text and says what the gate finds.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import CompiledCandidate, Verdict
from evoengine.search.evaluators import make_plans
from evoengine.space.space import load_space
from evoengine.stages.compile import compile_source
from evoengine.stages.gate import executor, judge_whole
from evoengine.stages.predict import predict_binary
from evoengine.stages.render import render
from evoengine.workloads.base import Target
from evoengine.workloads.folder import load_folder

_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_STANDARD = re.compile(r"#include <(bit|concepts|cstddef|cstdint|type_traits|cassert|limits|utility|tuple)>")


def standing_alone(text: str, beside: Path, roots: Sequence[Path], read: set[Path] | None = None) -> str:
    """Return a text with the headers of a checkout in the place of their includes, each with `#pragma once` once."""
    read = set() if read is None else read
    lines = []
    for line in text.splitlines():
        named = _INCLUDE.match(line)
        found = named and next((r / named[1] for r in (beside, *roots) if (r / named[1]).is_file()), None)
        if not found:
            lines.append("" if line.strip() == "#pragma once" else line)
        elif (file := found.resolve()) not in read:
            header = file.read_text()
            if "#pragma once" in header or re.search(r"^#ifndef (\w+)\s+#define \1", header, re.MULTILINE):
                read.add(file)
            lines.append(standing_alone(header, file.parent, roots, read))
    return "\n".join(lines)


def _short(text: str) -> str:
    """Return a text without comments, indentation and empty lines."""
    code = _COMMENT.sub(lambda found: found[1] or " ", text)
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())


@dataclass(frozen=True)
class Foreign:
    """A kernel: its text from a checkout, what problem.json and space.toml say, and faults as (what, old, new)."""

    text: Callable[[Path], str]
    problem: Mapping[str, Any]
    space: str
    faults: Sequence[tuple[str, str, str]]


# ── ThunderKittens: C = A · B by wgmma, a persistent producer and two consumers ─────────────────────────────────────


def _thunderkittens(checkout: Path) -> str:
    file = checkout / "kernels/gemm/bf16_h100/bf16_h100_gemm.cu"
    text = file.read_text()
    text = text[: text.index("#include <iostream>")].replace('#include "../common.cuh"', "")
    # of the four prototypes the one in use; the others have functions of the host
    text = text.replace('"prototype.cuh"', '"lcf/lcf.cuh"')
    text = standing_alone(text, file.parent, [checkout / "include", checkout / "prototype"])
    text = _STANDARD.sub(r"#include <cuda/std/\1>", _short(text))
    return f"// --std=c++20\n#define KITTENS_HOPPER\n#define KITTENS_NO_HOST\n#define __host__ __device__\n{text}\n" + (
        "template __global__ void kittens::prototype::lcf::kernel<matmul_template<2, 4, ORDER>>(\n"
        "    const __grid_constant__ matmul_layout<2, 4>::globals);\n"
    )


def _tile_map(tensor: str, rows: str, columns: str) -> dict[str, Any]:
    whole = f"2 * {rows} * {columns}"
    dims, strides = [64, rows, f"{columns} // 64", 1, 1], [f"2 * {columns}", 128, whole, whole]
    return {"tensor": tensor, "dims": dims, "strides": strides, "box": [64, 64, 1, 1, 1], "swizzle": 128}


def _global_layouts(tensors: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Return the struct of `gl`s: a pointer, rows and columns, and from byte 64 the tensor map, 256 bytes each."""
    at: dict[str, Any] = {}
    for i, (name, (rows, columns)) in enumerate(tensors.items()):
        at |= {f"{256 * i}": name, f"{256 * i + 16}": {"uint64": rows}, f"{256 * i + 24}": {"uint64": columns}}
        at[f"{256 * i + 64}"] = f"map_{name}"
    return {"bytes": 256 * len(tensors), "at": at}


_PRODUCT_DONE, _GIVEN_BACK = "warpgroup::mma_async_wait();", "if (warp::laneid() == 0) arrive(args.inputs_finished);"
_MATRICES = {"a": ("m", "k"), "b": ("k", "n"), "c": ("m", "n")}
THUNDERKITTENS = Foreign(
    _thunderkittens,
    {
        "name": "tk_gemm",
        "entry": "kernel",
        "axes": {axis: {"type": "var"} for axis in "mnk"},
        "inputs": {name: {"shape": [*_MATRICES[name]], "dtype": "bfloat16"} for name in "ab"},
        "outputs": {"c": {"shape": ["m", "n"], "dtype": "bfloat16"}},
        "tensor_maps": {f"map_{name}": _tile_map(name, *sizes) for name, sizes in _MATRICES.items()},
        "structs": {"globals": _global_layouts(_MATRICES)},
        "parameters": ["globals"],
        "reference": "def run(a, b):\n    return a @ b\n",
        "constraints": ["m % 128 == 0", "n % 256 == 0", "k % 64 == 0"],
        "flops": "2 * m * n * k",
        "workloads": [{"axes": dict.fromkeys("mnk", 4096)}],
    },
    'kernel = "tk_gemm"\n[knobs]\nORDER = [4, 8, 12]\n[launch]\nthreads = 384\ngrid = [132, 1, 1]\nshared = 231424\n'
    "[[start]]\nORDER = 8\n",
    (
        ("a stage given back early", f"{_PRODUCT_DONE}\n{_GIVEN_BACK}", f"{_GIVEN_BACK}\n{_PRODUCT_DONE}"),
        ("tiles of B in another order", "{args.iter, args.common.coord.y+i}", "{args.iter, args.common.coord.y+(i^1)}"),
        ("a tile of C not stored", "for(int i = 0; i < N_BLOCK; i++) {", "for(int i = 1; i < N_BLOCK; i++) {"),
        ("a step less of k", "args.globals.A.cols()/64;", "args.globals.A.cols()/64 - 1;"),
        ("no stage is given back", _GIVEN_BACK, ""),
    ),
)  # fmt: skip # each fault a line


# ── FlashInfer: decode over pages of 16 keys, four heads a key's head, a block for each request and key's head ──────

_HOST = re.compile(
    r"(?:template\s*<[^{};()]*>\s*)?(?:inline |constexpr )*(?:cudaError_t \w+\(|std::string \w+\(|"
    r"std::pair<int, int> \w+\(|void write_to_stream\(|void DebugPrint\w+\(|int (?:Get\w+|UpPowerOfTwo)\(|"
    r"uint32_t (?:get_heuristic_num_threads|FA2Determine\w+)\(|__host__ __forceinline__ auto \w+\(|"
    r"class (?:Error|Warning) )"
)
"""where a function or a class of the host begins"""
_HOST_HEADERS = re.compile(
    r"#include <(?:atomic|exception|iostream|sstream|string|vector|cuda_runtime\.h|driver_types\.h|cuda_device_\w+\.h)>"
)


def without_host(text: str) -> str:
    """Return a text without functions and classes that only the host has."""
    kept, at = [], 0
    while found := _HOST.search(text, at):
        kept.append(text[at : found.start()])
        end, depth = text.index("{", found.end()), 0
        while True:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
            if not depth:
                break
        at = end + (text[end] == ";")
    return "".join(kept) + text[at:]


def _flashinfer(checkout: Path) -> str:
    include = checkout / "include"
    names = ("decode", "default_decode_params", "variants")
    text = "".join(f'#include "flashinfer/attention/{name}.cuh"\n' for name in names)
    text = _HOST_HEADERS.sub("", without_host(_short(standing_alone(text, include, [include]))))
    text = re.sub(
        r"#include <(cmath|tuple)>", r"#include <cuda/std/\1>", _STANDARD.sub(r"#include <cuda/std/\1>", text)
    )
    return (
        "// --std=c++20\n#include <cuda/std/type_traits>\n#include <cuda/std/utility>\n"
        f"namespace std {{ using namespace cuda::std; }}\ntypedef unsigned short ushort;\n{_DIVISION}"
        f"#undef __host__\n#define __host__ __device__\n{text}\n"
        "using Paged = flashinfer::BatchDecodeParams<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, int32_t>;\n"
        "using Plain = flashinfer::DefaultAttention<false, false, false, false>;\n"
        "template __global__ void flashinfer::BatchDecodeWithPagedKVCacheKernel<\n"
        "    flashinfer::PosEncodingMode::kNone, STAGES_IN_USE, ROWS_A_THREAD, 8, 16, 4, 2, Plain, Paged>(\n"
        "    const __grid_constant__ Paged);\n"
    )


_DIVISION = """namespace cuda {
template <class T> struct fast_mod_div {
    T divisor;
    __device__ explicit fast_mod_div(T divisor) : divisor(divisor) {}
    __device__ friend T operator/(T n, fast_mod_div by) { return n / by.divisor; }
};
}
"""
"""CCCL 3.3 has this class, which the CCCL of CUDA 13.0 lacks, with a multiplication in place of the division"""
_DECODE = """import torch

def run(q, k_cache, v_cache, kv_indptr, kv_indices, last_page_len, request, tile, chunk):
    o, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
    for b in range(q.shape[0]):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        keys = (len(pages) - 1) * 16 + int(last_page_len[b])
        k, v = (cache[pages].flatten(0, 1)[:keys].repeat_interleave(4, 1).float() for cache in (k_cache, v_cache))
        s = torch.einsum("hd,khd->hk", q[b].float(), k) * 128**-0.5
        lse[b] = torch.logsumexp(s, -1) / 0.6931471805599453
        o[b] = torch.einsum("hk,khd->hd", torch.softmax(s, -1), v).to(q.dtype)
    return o, lse
"""
_CACHE = ["pages", 16, "kv_heads", 128]
_INDICES = {
    "kv_indptr": ["batch + 1"], "kv_indices": ["pages"], "last_page_len": ["batch"], "request": ["batch"],
    "tile": ["batch"], "chunk": [1],
}  # fmt: skip # a table


def _numbers(at: int, kind: str, *values: str | int) -> dict[str, Any]:
    return {f"{at + 4 * i}": {kind: value} for i, value in enumerate(values)}


def _pointers(at: int, *names: str) -> dict[str, Any]:
    return {f"{at + 8 * i}": name for i, name in enumerate(names)}


_SCORED = "iter * tile_size_per_bdx * bdy * bdz, chunk_size, qo_head_idx, kv_head_idx, s, st, tx, ty,\ntz);"
_WAITED = "j < chunk_size);\n}\ncp_async::commit_group();\ncp_async::wait_group<2 * num_stages_smem - 1>();"
_FIRST = "packed_page_iter_base = paged_kv.indptr"
FLASHINFER = Foreign(
    _flashinfer,
    {
        "name": "fi_decode",
        "entry": "BatchDecodeWithPagedKVCacheKernel",
        "axes": {axis: {"type": "var"} for axis in ("batch", "pages", "kv_heads")},
        "inputs": {
            "q": {"shape": ["batch", "4 * kv_heads", 128], "dtype": "bfloat16"},
            **{name: {"shape": _CACHE, "dtype": "bfloat16"} for name in ("k_cache", "v_cache")},
            **{name: {"shape": shape, "dtype": "int32"} for name, shape in _INDICES.items()},
        },
        "outputs": {
            "o": {"shape": ["batch", "4 * kv_heads", 128], "dtype": "bfloat16"},
            "lse": {"shape": ["batch", "4 * kv_heads"], "dtype": "float32"},
        },
        "structs": {
            "params": {
                "bytes": 224,
                "at": {
                    "0": "q",
                    **_numbers(16, "uint32", 16, 16, "kv_heads", 128, "batch"),
                    **_numbers(36, "uint32", *["2048 * kv_heads", "128 * kv_heads", 128] * 2),
                    **_pointers(64, "k_cache", "v_cache", "kv_indices", "kv_indptr", "last_page_len"),
                    **_pointers(112, "o", "lse"),
                    **_numbers(136, "int32", "batch", "4 * kv_heads", "512 * kv_heads", 128, -1),
                    "160": {"float32": 128**-0.5},
                    **_pointers(176, "request", "tile"),
                    "200": "chunk",
                },
            }
        },
        "parameters": ["params"],
        "reference": _DECODE,
        "constraints": ["pages >= batch"],
        "flops": "4 * 16 * pages * 4 * kv_heads * 128",
        "workloads": [
            {
                "axes": {"batch": 32, "pages": 2048, "kv_heads": 8},
                "inputs": {
                    "kv_indptr": {"type": "indptr", "total": "pages", "least": 1},
                    "kv_indices": {"type": "permutation"},
                    "last_page_len": {"type": "integers", "low": 1, "high": 17},
                    "request": {"type": "arange"},
                    "tile": {"type": "zeros"},
                    "chunk": {"type": "zeros"},
                },
            }
        ],
    },
    'kernel = "fi_decode"\n[knobs]\nSTAGES_IN_USE = [1, 2, 4]\nROWS_A_THREAD = [1, 2, 4]\n[launch]\n'
    'threads = [16, 4, 2]\ngrid = ["batch", "kv_heads", 1]\n'
    'shared = "4096 * STAGES_IN_USE * ROWS_A_THREAD + 1024 * ROWS_A_THREAD"\n'
    "[[start]]\nSTAGES_IN_USE = 2\nROWS_A_THREAD = 1\n",
    (
        (
            "5e4 in place of infinity, as until #4401",
            "inf = cuda::std::numeric_limits<float>::infinity()",
            "inf = 5e4f",
        ),
        ("a barrier less before keys are loaded", f"{_SCORED}\nblock.sync();", _SCORED),
        ("copies waited for a step late", _WAITED, _WAITED.replace(" - 1>", ">")),
        ("pages of the first request", f"{_FIRST}[batch_idx]", f"{_FIRST}[0]"),
        ("a page read whole", "- 1) * page_size + last_page_len[batch_idx]", ") * page_size"),
    ),
)
FOREIGN = {"thunderkittens": THUNDERKITTENS, "flashinfer": FLASHINFER}


def write(foreign: Foreign, folder: Path, text: str) -> Path:
    """Write the kernel's folder."""
    own = folder / foreign.problem["name"]
    own.mkdir(parents=True)
    files = {f"{own.name}.cu": text, "space.toml": foreign.space, "problem.json": json.dumps(foreign.problem, indent=1)}
    for name, contents in files.items():
        (own / name).write_text(contents)
    return own


def judged(own: Path) -> tuple[Verdict, Target, CompiledCandidate]:
    """Return the executor's verdict on the start point."""
    workload = load_folder(own)
    target = Target(workload, workload.parse(workload.example), find_gpu("h100"))
    space = load_space(own / "space.toml", target.problem, target.gpu)
    config = space.starts[0]
    source = render(target, space, config, asset("templates"))
    contender = CompiledCandidate(0, source, compile_source(source, target.gpu.arch), config)
    verdict = judge_whole(executor(contender), workload, make_plans(space, target, config), seed=7)
    return verdict, target, contender


def said(verdict: Verdict) -> str:
    """Return the verdict in a line."""
    return (
        f"{'correct' if verdict.correct else 'refused'}, {len(verdict.cases)} cases: {verdict.reason or 'all passed'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=FOREIGN)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--faults", action="store_true")
    asked = parser.parse_args()
    foreign = FOREIGN[asked.name]
    text = foreign.text(asked.checkout)
    if asked.write:
        write(foreign, asked.write, text)
        return
    with tempfile.TemporaryDirectory() as scratch:
        verdict, target, contender = judged(write(foreign, Path(scratch) / "right", text))
        time_us = predict_binary(target, contender).time_us
        print(f"as it stands: {said(verdict)}; predicted {time_us:.1f} us", flush=True)
        for number, (what, old, new) in enumerate(foreign.faults if asked.faults else ()):
            assert old in text, what
            verdict, *_ = judged(write(foreign, Path(scratch) / f"{number}", text.replace(old, new)))
            print(f"{what}: {said(verdict)}", flush=True)


if __name__ == "__main__":
    main()
