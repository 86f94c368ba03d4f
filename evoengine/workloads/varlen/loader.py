"""Attention over sequences of unlike lengths by the kernel beside this file (kernel.cubin, described in kernel.json).

    batch = Batch(cu_q, cu_kv)              # once for a batch of sequences, for all layers; Batch(cu_q, cu_kv, table)
    out = varlen(q, k, v, batch)            # softmax(q·kᵀ/√head_dim)·v of each sequence by itself

Needs torch or CuPy alone. README.md says how it is imported. Ship the folder whole, and keep the name of this file,
which no other export has.

q and out are [rows, heads, head_dim], those of sequence s from cu_q[s] to cu_q[s + 1]. k and v are [rows, kv_heads,
head_dim], those of a sequence by cu_kv; or, for a kernel of pages, [pages, page, kv_heads, head_dim], and key i of
sequence s is row i % page of page table[s, i // page]. Under a mask a sequence's queries are its last rows. A query
that sees no key has zeros for output. cu_q, cu_kv and table are int32 on the GPU, and like all tensors contiguous. Any
lengths, heads and number of pages will do; head_dim, dtype, mask and the size of a page are compiled in.

`Batch` copies lengths and table to the host and checks them there, which waits for the GPU: the kernel itself would
read outside of its tensors. It keeps the tensors; make another where their contents change.

Inference only: tensors that need a gradient are refused. May be called from several threads, on several GPUs, and while
a CUDA graph is captured if it was called on that GPU before, and `batch` made: both cannot be captured.
"""

import ctypes
import functools
import importlib.util
import itertools
import math
import sys
from pathlib import Path

# By its path, so that it is this folder's whether the folder is a package or on the path.
_spec = importlib.util.spec_from_file_location(f"{__name__}._cuda", Path(__file__).resolve().with_name("_cuda.py"))
_cuda = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_cuda)
_cuda.check_loader(Path(__file__).stem)

CONFIG, PROBLEM = _cuda.KERNEL["config"], _cuda.KERNEL["problem"]
SCHEDULE, PAGE, HEAD_DIM = CONFIG["schedule"], PROBLEM["page"], PROBLEM["head_dim"]
NAMES = ("q", "k", "v", "cu_q", "cu_kv", "order", *(("table",) if PAGE else ()), "out")
TENSORS = ("q", "k", "v", "out")
MAPPED = () if CONFIG.get("load") != "tma" else TENSORS if CONFIG["o_store"] == "tma" else TENSORS[:3]
FAR = 1 << 30  # rows of a tensor map
DTYPE = {"fp16": "float16", "bf16": "bfloat16"}[PROBLEM["dtype"]]
DTYPES = [DTYPE if name in TENSORS else "int32" for name in NAMES]
MAX_GRID_YZ = 65535


class Batch:
    """Sequences of one batch: their lengths, checked, and the order in which their rows are computed.

    Raises ValueError for lengths that do not begin at 0 or are negative, and for a table that is missing, too small, or
    names a page below 0.
    """

    def __init__(self, cu_q, cu_kv, table=None):
        lens, kv_lens = _lengths("cu_q", cu_q), _lengths("cu_kv", cu_kv)
        if len(lens) != len(kv_lens):
            raise ValueError(f"cu_q is of {len(lens)} sequences and cu_kv of {len(kv_lens)}; they must be of as many")
        if bool(PAGE) != (table is not None):
            wanted = f"has pages of {PAGE} rows and needs a table" if PAGE else "has no pages and takes no table"
            raise ValueError(f"this kernel {wanted}")
        self.rows, self.keys = sum(lens), sum(kv_lens)
        self.pages = 0 if table is None else _pages(table, kv_lens)
        self.row_tiles = sum(-(-length // CONFIG["tile_m"]) for length in lens)
        order = sorted(range(len(lens)), key=lambda s: (-lens[s], -kv_lens[s]))
        given = {"cu_q": cu_q, "cu_kv": cu_kv, "order": _like(cu_q, order), "table": table}
        self.tensors = [given[name] for name in NAMES if name not in TENSORS]


def _lengths(name, cumulative):
    if len(cumulative.shape) != 1 or cumulative.shape[0] < 2:
        raise ValueError(f"{name} has shape {tuple(cumulative.shape)}; [sequences + 1] was expected")
    ends = cumulative.tolist()
    if ends[0] != 0:
        raise ValueError(f"{name} begins with {ends[0]}; cumulative lengths begin with 0")
    lens = [end - begin for begin, end in itertools.pairwise(ends)]
    wrong = next((s for s, length in enumerate(lens) if length < 0), None)
    if wrong is not None:
        raise ValueError(
            f"{name} falls from {ends[wrong]} to {ends[wrong + 1]} at sequence {wrong}; lengths are 0 or more"
        )
    return lens


def _pages(table, kv_lens):
    """Return how many pages the pool must have."""
    if len(table.shape) != 2 or table.shape[0] != len(kv_lens):
        raise ValueError(f"table has shape {tuple(table.shape)}; [{len(kv_lens)}, pages of the longest] was expected")
    most = 0
    for s, (pages, length) in enumerate(zip(table.tolist(), kv_lens, strict=True)):
        needed = -(-length // PAGE)
        if len(pages) < needed:
            raise ValueError(f"table has {len(pages)} pages of sequence {s}, whose {length} keys need {needed}")
        own = pages[:needed]
        if min(own, default=0) < 0:
            raise ValueError(f"table names page {min(own)} for sequence {s}; pages are counted from 0")
        most = max(most, max(own, default=-1) + 1)
    return most


def _like(tensor, values):
    """Return an int32 tensor of the same library and GPU."""
    if hasattr(tensor, "new_tensor"):
        return tensor.new_tensor(values)
    with tensor.device:
        return sys.modules["cupy"].asarray(values, dtype="int32")


def varlen(q, k, v, batch, out=None, *, scale=None):
    """Queue the kernel on the current stream of the tensors' library; return out, a new contiguous tensor by default.

    `scale` multiplies q·kᵀ; it is 1/√head_dim by default.

    Raises TypeError for objects that are not tensors of torch or CuPy, ValueError for tensors that the kernel does not
    support or that are too small for the batch, and RuntimeError if a gradient is required, or if the GPU or its driver
    cannot run the kernel.
    """
    library = _library(type(q))
    out = library.empty_like(q) if out is None else out
    tensors = (q, k, v, *batch.tensors, out)
    if any(_library(type(one)) is not library for one in tensors):
        raise TypeError("all tensors must come from torch, or all from CuPy")
    library.refuse_gradients(NAMES, tensors)
    if q.shape[0] != batch.rows:
        raise ValueError(f"q has {q.shape[0]} rows, and the lengths of cu_q add up to {batch.rows}")
    held, needed, unit = k.shape[0], batch.pages if PAGE else batch.keys, "pages" if PAGE else "rows"
    if held < needed:
        raise ValueError(f"k has {held} {unit}, and the batch has keys in {needed}")
    plan = _plan(library, scale, batch.row_tiles, *map(library.layout, tensors))
    if plan.launch is not None:
        plan.queue(library, tensors)
    return out


@functools.cache
def _library(kind):
    return _cuda.find_library(kind, "q, k, v, out and the batch's tensors")


class _Plan(_cuda.Plan):
    names, outputs = NAMES, (len(NAMES) - 1,)

    def __init__(self, library, scale, row_tiles, *layouts):
        shapes, strides, dtypes, devices = zip(*map(library.describe, layouts), strict=True)
        shape_of = dict(zip(NAMES, shapes, strict=True))
        _check_shapes(shape_of)
        gpu_index = _cuda.find_gpu_index(library, NAMES, DTYPES, dtypes, devices)
        self.spans = [_span(*one, library) for one in zip(NAMES, shapes, strides, strict=True)]
        rows, heads, _ = shape_of["q"]
        if not rows * heads:
            return  # nothing to compute
        self.map_layouts = [(NAMES.index(name), _map_layout(name, shape_of[name])) for name in MAPPED]
        self.gpu = _gpu(gpu_index)
        self.launch = (self.gpu.function, *_grid(self.gpu, row_tiles, heads), _cuda.THREADS, 1, 1, _cuda.SHARED_BYTES)
        sizes = [shape_of["order"][0], heads, shape_of["k"][-2]]
        sizes += [shape_of["table"][1]] if PAGE else []
        scale = 1.0 / math.sqrt(HEAD_DIM) if scale is None else scale
        self.scalars = [*map(ctypes.c_int, sizes), ctypes.c_float(scale)]


_plan = functools.lru_cache(maxsize=_cuda.CACHED)(_Plan)


def _check_shapes(shapes):
    (*_, heads, head_dim), keys = shapes["q"], shapes["k"]
    if len(shapes["q"]) != 3 or head_dim != HEAD_DIM:
        raise ValueError(f"q has shape {shapes['q']}; [rows, heads, {HEAD_DIM}] was expected")
    pool = f"pages, {PAGE}" if PAGE else "rows"
    if len(keys) != (4 if PAGE else 3) or keys[-1] != HEAD_DIM or (PAGE and keys[1] != PAGE):
        raise ValueError(f"k has shape {keys}; [{pool}, kv_heads, {HEAD_DIM}] was expected")
    for name, expected in (("v", keys), ("out", shapes["q"])):
        if shapes[name] != expected:
            raise ValueError(f"{name} has shape {shapes[name]}; {expected} was expected")
    kv_heads = keys[-2]
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"{heads} heads are not a multiple of {kv_heads} kv heads")


def _span(name, shape, strides, library):
    """Return the bytes of a tensor. Raises ValueError where it is not contiguous."""
    size = 2 if name in TENSORS else 4
    span = size * math.prod(shape)
    step = size
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != step:
            remedy = _cuda.contiguous_remedy(name, name == "out", library)
            raise ValueError(f"{name} is not contiguous, as this kernel needs it: {remedy}")
        step *= length
    return span


def _map_layout(name, shape):
    """Return a tensor's rows, of all heads, as a map of FAR rows that ends wherever the kernel says a sequence does.

    Row r of n that end before row e of the tensor is at the coordinates (FAR, e, FAR - n + r), outermost first:
    addresses have 64 bits, in which what FAR adds up to along two dims is 0.
    """
    rows, width = math.prod(shape[:-2]), math.prod(shape[-2:])
    if not 0 < rows < FAR:
        raise ValueError(f"{name} has {rows} rows; this kernel, which loads by TMA, takes 1 to {FAR - 1}")
    box_rows = {"q": CONFIG["tile_m"], "out": 64}.get(name, min(CONFIG["tile_n"], PAGE or CONFIG["tile_n"]))
    columns, row_bytes = 64 if HEAD_DIM % 64 == 0 else 32, 2 * width
    dims, strides = (width, FAR, 2**31 - 1, 2**31 - 1), (row_bytes, row_bytes, 2**35 - row_bytes)
    return _cuda.MapLayout(PROBLEM["dtype"], dims, strides, (columns, box_rows, 1, 1), swizzle=2 * columns)


def _grid(gpu, row_tiles, heads):
    """Return a block for each tile of rows; for a persistent kernel as many as are resident on this GPU."""
    if SCHEDULE == "static":
        return max(1, min(gpu.at_once, row_tiles * heads)), 1, 1
    grid = (heads, row_tiles, 1) if SCHEDULE == "longest_first" else (row_tiles, heads, 1)
    if grid[1] > MAX_GRID_YZ:
        raise ValueError(f"these lengths take a grid of {grid}; a GPU has at most {MAX_GRID_YZ} along y")
    return grid


class _Gpu(_cuda.Gpu):
    at_once = None

    def load(self):
        super().load()
        if SCHEDULE == "static":
            self.at_once = self.blocks_at_once()


_gpu = functools.cache(_Gpu)
