"""Attention forward by the kernel beside this file (kernel.cubin, described in kernel.json). Needs torch or CuPy alone.

    out = attention(q, k, v)                # softmax(q·kᵀ/√head_dim)·v; scale=… in place of 1/√head_dim
    out, lse = attention(q, k, v)           # of a kernel whose problem has lse

README.md says how it is imported. Ship the folder whole, and keep the name of this file, which no other export has.

q is [batch, heads, seq_q, head_dim], k [batch, kv_heads, seq_k, head_dim], v [batch, kv_heads, seq_k, head_dim_v], out
[batch, heads, seq_q, head_dim_v], on one GPU, in the dtype that the kernel was compiled for; lse [batch, heads, seq_q],
float32, is the natural logarithm of the sum of the exponentials of a row's scaled logits. Any batch, heads and
lengths will do; both head_dims (mostly one and the same), dtype and mask are compiled in. Tensors are contiguous. Those
that the kernel moves by TMA (kernel.json has "load": "tma" for q, k and v, "o_store": "tma" for out) may have strides
too, if head_dim is innermost, rows and heads start multiples of 16 bytes apart, and one stride leads through all heads
of the batch: padded or sliced tensors, [1, seq, heads, head_dim].transpose(1, 2).

Inference only: tensors that need a gradient are refused. May be called from several threads, on several GPUs, and while
a CUDA graph is captured if it was called on that GPU before: loading the kernel cannot be captured.
"""

import ctypes
import functools
import importlib.util
import math
from pathlib import Path

# By its path, so that it is this folder's whether the folder is a package or on the path.
_spec = importlib.util.spec_from_file_location(f"{__name__}._cuda", Path(__file__).resolve().with_name("_cuda.py"))
_cuda = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_cuda)
_cuda.check_loader(Path(__file__).stem)

CONFIG, PROBLEM = _cuda.KERNEL["config"], _cuda.KERNEL["problem"]
CLUSTER, SCHEDULE = CONFIG.get("cluster", 1), CONFIG.get("schedule", "none")
GIVEN = ("q", "k", "v", "out")
NAMES = (*GIVEN, "lse") if PROBLEM.get("lse") else GIVEN
MAPPED = () if CONFIG.get("load") != "tma" else GIVEN if CONFIG["o_store"] == "tma" else GIVEN[:3]
DTYPE = {"fp16": "float16", "bf16": "bfloat16"}[PROBLEM["dtype"]]
ELEMENT_BYTES = 2
ALIGNMENT, CACHED = _cuda.ALIGNMENT, _cuda.CACHED
MAX_GRID_YZ = 65535


def attention(q, k, v, out=None, *, scale=None):
    """Queue the kernel on the current stream of the tensors' library; return out, a new contiguous tensor by default.

    A kernel whose problem has lse returns out and lse, which is always new.

    `scale` multiplies q·kᵀ; it is 1/√head_dim by default.

    Raises TypeError for objects that are not tensors of torch or CuPy, ValueError for tensors that the kernel does not
    support, and RuntimeError if a gradient is required, or if the GPU or its driver cannot run the kernel.
    """
    library = _library(type(q))
    out = _empty_output(library, q) if out is None else out
    lse = tuple(library.empty(q, q.shape[:-1], "float32") for _ in NAMES[4:])
    tensors = (q, k, v, out, *lse)
    if not library is _library(type(k)) is _library(type(v)) is _library(type(out)):
        raise TypeError("q, k, v and out must all come from torch or all from CuPy")
    library.refuse_gradients(NAMES, tensors)
    plan = _plan(library, scale, *map(library.layout, tensors))
    if plan.launch is not None:
        plan.queue(library, tensors)
    return (out, *lse) if lse else out


def _empty_output(library, q):
    if PROBLEM["head_dim_v"] == PROBLEM["head_dim"]:
        return library.empty_like(q)
    return library.empty(q, (*q.shape[:-1], PROBLEM["head_dim_v"]), DTYPE)


@functools.cache
def _library(kind):
    return _cuda.find_library(kind, "q, k, v and out")


class _Plan(_cuda.Plan):
    names, outputs = NAMES, (3, 4)[: len(NAMES) - 3]

    def __init__(self, library, scale, *layouts):
        shapes, strides, dtypes, devices = zip(*map(library.describe, layouts), strict=True)
        _check_shapes(dict(zip(GIVEN, shapes, strict=False)))
        gpu_index = _cuda.find_gpu_index(library, NAMES, (*(DTYPE,) * 4, "float32")[: len(NAMES)], dtypes, devices)
        (batch, heads, seq_q, head_dim), (_, kv_heads, seq_k, _) = shapes[:2]
        if not batch * heads * seq_q:
            return  # nothing to compute
        merged = [_merge_strides(*tensor, library) for tensor in zip(GIVEN, shapes, strides, strict=False)]
        self.spans = [_span(*tensor) for tensor in zip(shapes, merged, strict=False)]
        self.spans += [4 * batch * heads * seq_q for _ in NAMES[4:]]
        mapped = enumerate(zip(MAPPED, shapes, merged, strict=False))
        self.map_layouts = [(i, _map_layout(*tensor)) for i, tensor in mapped]
        self.gpu = _gpu(gpu_index)
        grid = _grid(self.gpu, batch, heads, seq_q)
        self.launch = (self.gpu.function, *grid, _cuda.THREADS, 1, 1, _cuda.SHARED_BYTES)
        sizes = (batch,) * (SCHEDULE == "static") + (heads, kv_heads, seq_q, seq_k)
        scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        self.scalars = [*map(ctypes.c_int, sizes), ctypes.c_float(scale)]


_plan = functools.lru_cache(maxsize=CACHED)(_Plan)


def _check_shapes(shapes):
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ValueError(f"{name} has shape {shape}; [batch, heads, seq, head_dim] was expected")
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_k, _) = shapes["q"], shapes["k"]
    if head_dim != PROBLEM["head_dim"]:
        raise ValueError(f"head_dim is {head_dim}; this kernel was compiled for {PROBLEM['head_dim']}")
    keys, head_dim_v = (batch, kv_heads, seq_k), PROBLEM["head_dim_v"]
    expected = {"k": (*keys, head_dim), "v": (*keys, head_dim_v), "out": (batch, heads, seq_q, head_dim_v)}
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(f"{name} has shape {shapes[name]}; {shape} was expected")
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"{heads} heads are not a multiple of {kv_heads} kv heads")
    if not seq_k:
        raise ValueError("k has no keys to attend to")
    if PROBLEM["causal"] and seq_q > seq_k:
        raise ValueError(f"causal with {seq_q} queries and {seq_k} keys leaves rows that see no key")


def _merge_strides(name, shape, strides, library):
    """Return the bytes from row to row and from head to head of the whole batch.

    Raises ValueError if the kernel cannot use them.
    """
    (batch, heads, seq, head_dim), (entry, head, row, element) = shape, strides
    row_bytes = ELEMENT_BYTES * head_dim
    if seq == 1:
        row = row_bytes  # whatever it is, it is never taken
    if heads == 1:
        head = entry if batch > 1 else row * seq
    one_stride = batch == 1 or heads == 1 or entry == heads * head
    can_follow = one_stride and element == ELEMENT_BYTES
    if can_follow and (row, head) == (row_bytes, row_bytes * seq):
        return row, head
    remedy = _cuda.contiguous_remedy(name, name == "out", library)
    if name not in MAPPED:
        raise ValueError(f"{name} is not contiguous, as this kernel needs it: {remedy}")
    if not can_follow or min(row, head) <= 0 or row % ALIGNMENT or head % ALIGNMENT:
        wanted = f"head_dim innermost, rows and heads multiples of {ALIGNMENT} bytes, batch entries {heads} heads apart"
        raise ValueError(f"{name} has strides of {strides} bytes; this kernel can follow {wanted}: {remedy}")
    rows_apart = row >= row_bytes and head >= _span((1, 1, seq, head_dim), (row, 0))
    heads_apart = head >= row_bytes and row >= _span((batch, heads, 1, head_dim), (0, head))
    if name == "out" and not rows_apart and not heads_apart:
        raise ValueError(f"out has strides of {strides} bytes, by which it overlaps itself: {remedy}")
    return row, head


def _span(shape, merged):
    """Return the bytes from a tensor's first element to the end of its last."""
    (batch, heads, seq, head_dim), (row, head) = shape, merged
    return (batch * heads - 1) * head + (seq - 1) * row + ELEMENT_BYTES * head_dim


def _grid(gpu, batch, heads, seq_q):
    """Return a block for each tile of rows.

    For a persistent kernel it is as many as are resident on this GPU, in whole clusters.
    """
    row_tiles = -(-seq_q // CONFIG["tile_m"])
    if SCHEDULE == "static":
        return min(gpu.clusters_at_once, -(-row_tiles * heads * batch // CLUSTER)) * CLUSTER, 1, 1
    grid = -(-row_tiles // CLUSTER) * CLUSTER, heads, batch
    if SCHEDULE == "longest_first":
        grid = heads * batch, row_tiles, 1
    if max(grid[1:]) > MAX_GRID_YZ:
        raise ValueError(f"these shapes take a grid of {grid}; a GPU has at most {MAX_GRID_YZ} along y and z")
    return grid


@functools.lru_cache(maxsize=CACHED)
def _map_layout(name, shape, merged):
    """Return a tensor as TMA sees it, [batch·heads, seq, head_dim], in boxes of rows by the columns swizzled together.

    A box of out is a warpgroup's 64 rows; each block of a cluster loads its part of a tile of K or V for all of them.
    """
    batch, heads, seq, head_dim = shape
    rows = {"q": CONFIG["tile_m"], "out": 64}.get(name, CONFIG["tile_n"] // CLUSTER)
    columns = 64 if head_dim % 64 == 0 else 32
    dims, box = (head_dim, seq, batch * heads), (columns, rows, 1)
    return _cuda.MapLayout(PROBLEM["dtype"], dims, merged, box, swizzle=ELEMENT_BYTES * columns)


class _Gpu(_cuda.Gpu):
    clusters_at_once = None

    def load(self):
        super().load()
        if SCHEDULE == "static":
            self.clusters_at_once = self.blocks_at_once() // CLUSTER


_gpu = functools.cache(_Gpu)
