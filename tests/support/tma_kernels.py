"""Kernels that load and store one box by TMA, and what should arrive."""

from __future__ import annotations

import jinja2
import numpy as np

from evoengine.devices.base import TensorMapArgument
from evoengine.paths import asset

EVO = asset("templates") / "include" / "evo"
VOCABULARY = "".join(
    jinja2.Template((EVO / name).read_text()).render() for name in ("address.cuh", "barrier.cuh", "tma.cuh")
)


def view(shape, box, swizzle=0, dims=None, tensor="a"):
    """The map of a contiguous fp16 tensor; shape and box as NumPy counts, outermost first."""
    strides = [2 * int(np.prod(shape[i:])) for i in range(1, len(shape))]
    return TensorMapArgument("map", tensor, "fp16", dims or shape[::-1], tuple(strides[::-1]), box[::-1], swizzle)


def tile(tensor, at, box):
    """The box at `at` (outermost first), zeros where there is no tensor."""
    found = np.zeros(box, tensor.dtype)
    for index in np.ndindex(*box):
        place = np.add(at, index)
        if (place >= 0).all() and (place < tensor.shape).all():
            found[index] = tensor[tuple(place)]
    return found


def swizzled(rows, width):
    """Chunk c of row r at c ^ r's turn; rows of `width` bytes as uint16."""
    if not width:
        return rows.ravel()
    per_row = width // 16
    chunks = rows.reshape(-1, per_row, 8)
    row = np.arange(len(chunks)) // (8 // per_row) % per_row
    out = np.empty_like(chunks)
    for c in range(per_row):
        out[np.arange(len(chunks)), c ^ row] = chunks[:, c]
    return out.ravel()


LOAD = """
extern "C" __global__ void
f(const unsigned short* a, const __grid_constant__ TensorMap map, unsigned short* o, int count) {
    extern __shared__ __align__(1024) unsigned short tile[];
    __shared__ unsigned long long barriers[1];
    unsigned full = shared_address(barriers);
    if (threadIdx.x == 0) {
        tma_prefetch(map);
        barrier_init(full, 1);
        INIT_FENCE
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        arrive_expect_tx(full, 2 * count EXTRA);
        tma_load(shared_address(tile), map, full, AT);
    }
    WAIT
    for (int i = threadIdx.x; i < count; i += 64) o[i] = tile[i];
}
"""
RIGHT = {"AT": "0, 0", "INIT_FENCE": "barrier_init_fence();", "WAIT": "barrier_wait(full, 0);", "EXTRA": ""}


def load_text(**changes):
    text = LOAD
    for name, right in RIGHT.items():
        text = text.replace(name, changes.get(name, right))
    return VOCABULARY + text


def load(emulate, tensor, tensor_map, seed=0, **changes):
    count = int(np.prod(tensor_map.box))
    arguments = (tensor, tensor_map, np.zeros(count, np.uint16), np.int32(count))
    return emulate(load_text(**changes), *arguments, threads=64, shared=2 * count, seed=seed)["o"]


def tensor(*shape):
    return np.random.default_rng(1).integers(0, 1 << 15, shape, dtype=np.uint16)


STORE = """
extern "C" __global__ void
f(const unsigned short* a, unsigned short* o, const __grid_constant__ TensorMap map, int count) {
    extern __shared__ __align__(1024) unsigned short tile[];
    for (int i = threadIdx.x; i < count; i += 64) tile[i] = a[i];
    PROXY
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_store(map, shared_address(tile), AT);
        COMMIT
        EARLY
        WAIT
    }
}
"""
STORED = {
    "PROXY": "async_proxy_fence();",
    "COMMIT": "tma_store_commit();",
    "WAIT": "tma_store_wait<0>();",
    "EARLY": "",
    "AT": "64, 8",
}


def store_text(**changes):
    text = STORE
    for name, right in STORED.items():
        text = text.replace(name, changes.get(name, right))
    return VOCABULARY + text


def store(emulate, image, shape, tensor_map, seed=0, **changes):
    arguments = (image, np.zeros(shape, np.uint16), tensor_map, np.int32(image.size))
    return emulate(store_text(**changes), *arguments, threads=64, shared=image.nbytes, seed=seed)["o"]
