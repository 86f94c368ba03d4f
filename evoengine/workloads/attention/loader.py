"""Attention forward by the kernel beside this file (kernel.cubin, described in kernel.json). Needs torch or CuPy alone.

    from attention import attention         # with this folder on the path
    from attention_d64 import attention     # with its parent on the path: the folder, however named, is a package

    out = attention(q, k, v)                # softmax(q·kᵀ/√head_dim)·v

Ship the folder whole. Import two kernels in one process by their folders: Python keeps one module per name, so a second
`from attention import attention` would return the first kernel again.

q and out are [batch, heads, seq_q, head_dim], k and v [batch, kv_heads, seq_k, head_dim], on one GPU, in the dtype that
the kernel was compiled for. Any batch, heads and lengths will do; head_dim, dtype and mask are compiled in. Tensors are
contiguous. Those that the kernel moves by TMA (kernel.json has "load": "tma" for q, k and v, "o_store": "tma" for out)
may have strides too, if head_dim is innermost, rows and heads start multiples of 16 bytes apart, and one stride leads
through all heads of the batch: padded or sliced tensors, [1, seq, heads, head_dim].transpose(1, 2).

Inference only: tensors that need a gradient are refused. May be called from several threads, on several GPUs, and while
a CUDA graph is captured if it was called on that GPU before: loading the kernel cannot be captured.
"""

import ctypes
import functools
import json
import math
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
KERNEL = json.loads((FOLDER / "kernel.json").read_text())
CONFIG, PROBLEM = KERNEL["config"], KERNEL["problem"]
THREADS, SHARED_BYTES = KERNEL["launch"]["threads"], KERNEL["launch"]["shared_bytes"]
CLUSTER, SCHEDULE = CONFIG.get("cluster", 1), CONFIG.get("schedule", "none")
NAMES = ("q", "k", "v", "out")
MAPPED = () if CONFIG.get("load") != "tma" else NAMES if CONFIG["o_store"] == "tma" else NAMES[:3]
DTYPE, MAP_DTYPE = {"fp16": ("float16", 6), "bf16": ("bfloat16", 9)}[PROBLEM["dtype"]]  # CU_TENSOR_MAP_DATA_TYPE_*
ELEMENT_BYTES = 2
ALIGNMENT = 16  # bytes: the widest loads of all kernels, and TMA
MAP_BYTES = MAP_ALIGNMENT = 128  # the latter since CUDA 13.0, 64 before
MAX_GRID_YZ = 65535
CACHED = 1024  # layouts, sets of pointers and tensor maps, of each; the least recently used is dropped first


def attention(q, k, v, out=None):
    """Queues the kernel on the current stream of the tensors' library; returns out, a new contiguous tensor by default.

    Raises TypeError for what is no tensor of torch or CuPy, ValueError for tensors that the kernel was not made for,
    RuntimeError where a gradient is needed, and where the GPU or its driver cannot run the kernel.
    """
    library = _library(type(q))
    out = library.empty_like(q) if out is None else out
    tensors = (q, k, v, out)
    if not library is _library(type(k)) is _library(type(v)) is _library(type(out)):
        raise TypeError("q, k, v and out must all come from torch or all from CuPy")
    library.refuse_gradients(tensors)
    plan = _plan(library, *map(library.layout, tensors))
    if plan.launch is None:
        return out
    gpu, previous = plan.gpu, _switch_context(plan.gpu.context)
    try:
        # The memory has to outlive the launch, whatever the cache drops meanwhile.
        addresses, memory = _parameters(plan, *map(library.pointer, tensors))
        _call("cuLaunchKernel", *plan.launch, library.stream(gpu.index), addresses, None)
    finally:
        if previous != gpu.context:
            _call("cuCtxSetCurrent", previous)
    return out


class _Plan:
    """All of a call but its pointers, checked and computed once for tensors of the same layouts."""

    def __init__(self, library, *layouts):
        shapes, strides, dtypes, devices = zip(*map(library.describe, layouts))
        _check_shapes(dict(zip(NAMES, shapes)))
        for name, dtype, device in zip(NAMES, dtypes, devices):
            if dtype != DTYPE:
                raise ValueError(f"{name} is {dtype}; this kernel was compiled for {DTYPE}")
            if device != devices[0]:
                raise ValueError(f"{name} is on {device} and q on {devices[0]}")
        gpu_index = library.gpu_index(devices[0])
        if gpu_index is None:
            raise ValueError(f"q is on {devices[0]}; this kernel runs on a CUDA GPU")
        (batch, heads, seq_q, head_dim), (_, kv_heads, seq_k, _) = shapes[:2]
        self.launch = None
        if not batch * heads * seq_q:
            return  # nothing to compute
        merged = [_merge_strides(*tensor, library.remedy) for tensor in zip(NAMES, shapes, strides)]
        self.spans = [_span(*tensor) for tensor in zip(shapes, merged)]
        self.map_layouts = [(i, _MapLayout(*tensor)) for i, tensor in enumerate(zip(MAPPED, shapes, merged))]
        self.gpu = _gpu(gpu_index)
        self.launch = (self.gpu.function, *_grid(self.gpu, batch, heads, seq_q), THREADS, 1, 1, SHARED_BYTES)
        sizes = (batch,) * (SCHEDULE == "static") + (heads, kv_heads, seq_q, seq_k)
        self.scalars = [*map(ctypes.c_int, sizes), ctypes.c_float(1.0 / math.sqrt(head_dim))]

    def check_pointers(self, pointers):
        q, k, v, out = pointers
        if (q | k | v | out) % ALIGNMENT:
            name = next(name for name, pointer in zip(NAMES, pointers) if pointer % ALIGNMENT)
            raise ValueError(f"{name} does not start at a multiple of {ALIGNMENT} bytes")
        *spans, out_span = self.spans
        for name, pointer, span in zip(NAMES, pointers, spans):
            if out < pointer + span and pointer < out + out_span:
                raise ValueError(f"out and {name} overlap in memory; out must have memory of its own")


_plan = functools.lru_cache(maxsize=CACHED)(_Plan)


@functools.lru_cache(maxsize=CACHED)
def _parameters(plan, *pointers):
    """The address of the parameters' addresses, and the memory with all of them, which nobody writes to again.

    So calls from several threads can share them; the driver copies them while it queues a launch.
    """
    plan.check_pointers(pointers)
    maps = [_tensor_map(pointers[i], layout) for i, layout in plan.map_layouts]
    values = (ctypes.c_uint64 * len(pointers))(*pointers)
    first = ctypes.addressof(values)
    found = [*range(first, first + 8 * len(pointers), 8), *map(ctypes.addressof, plan.scalars), *(at for at, _ in maps)]
    addresses = (ctypes.c_void_p * len(found))(*found)
    return ctypes.addressof(addresses), (addresses, values, plan, maps)


def _check_shapes(shapes):
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ValueError(f"{name} has shape {shape}; [batch, heads, seq, head_dim] was expected")
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_k, _) = shapes["q"], shapes["k"]
    expected = {"k": (batch, kv_heads, seq_k, head_dim), "v": shapes["k"], "out": shapes["q"]}
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(f"{name} has shape {shapes[name]}; {shape} was expected")
    if head_dim != PROBLEM["head_dim"]:
        raise ValueError(f"head_dim is {head_dim}; this kernel was compiled for {PROBLEM['head_dim']}")
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"{heads} heads are no multiple of {kv_heads} kv heads")
    if not seq_k:
        raise ValueError("k has no keys to attend to")
    if PROBLEM["causal"] and seq_q > seq_k:
        raise ValueError(f"causal with {seq_q} queries and {seq_k} keys leaves rows that see no key")


def _merge_strides(name, shape, strides, remedy):
    """Bytes from row to row, and from head to head of the whole batch; raises ValueError where the kernel cannot."""
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
    remedy = "pass a contiguous out" if name == "out" else "pass " + remedy.format(name)
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
    """Bytes from a tensor's first element to the end of its last."""
    (batch, heads, seq, head_dim), (row, head) = shape, merged
    return (batch * heads - 1) * head + (seq - 1) * row + ELEMENT_BYTES * head_dim


def _grid(gpu, batch, heads, seq_q):
    """A block for each tile of rows; of a persistent kernel as many as run at once on this GPU. Whole clusters."""
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
class _MapLayout:
    """A tensor as TMA sees it, [batch·heads, seq, head_dim], in boxes of so many rows by the columns swizzled together.

    A box of out is a warpgroup's 64 rows; each block of a cluster loads its part of a tile of K or V for all of them.
    """

    def __init__(self, name, shape, merged):
        batch, heads, seq, head_dim = shape
        rows = {"q": CONFIG["tile_m"], "out": 64}.get(name, CONFIG["tile_n"] // CLUSTER)
        columns, swizzle = (64, 3) if head_dim % 64 == 0 else (32, 2)  # CU_TENSOR_MAP_SWIZZLE_128B, _64B
        dims, strides = (ctypes.c_uint64 * 3)(head_dim, seq, batch * heads), (ctypes.c_uint64 * 2)(*merged)
        box, steps = (ctypes.c_uint32 * 3)(columns, rows, 1), (ctypes.c_uint32 * 3)(1, 1, 1)
        self._arrays = dims, strides, box, steps
        # L2 promotion of 256 bytes, zeros beyond the tensor
        self.arguments = (*map(ctypes.addressof, self._arrays), 0, swizzle, 3, 0)


@functools.lru_cache(maxsize=CACHED)
def _tensor_map(pointer, layout):
    """The address of the encoded map, and the memory that it lies in."""
    memory = _MapMemory()
    start = ctypes.addressof(memory)
    start += -start % MAP_ALIGNMENT
    _call("cuTensorMapEncodeTiled", start, MAP_DTYPE, 3, pointer, *layout.arguments)
    return start, memory


_MapMemory = ctypes.c_char * (MAP_BYTES + MAP_ALIGNMENT)


class _Gpu:
    """The kernel on one GPU, in its primary context, which torch and CuPy share."""

    def __init__(self, index):
        self.index, self._device, context = index, ctypes.c_int(), ctypes.c_void_p()
        _call("cuDeviceGet", ctypes.byref(self._device), index)
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self.context = context.value
        previous = _switch_context(self.context)
        try:
            self.function = self._load()
            self.clusters_at_once = self._blocks_at_once() // CLUSTER if SCHEDULE == "static" else None
        finally:
            _call("cuCtxSetCurrent", previous)

    def _load(self):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            _call("cuModuleLoadData", ctypes.byref(module), (FOLDER / "kernel.cubin").read_bytes())
        except RuntimeError as error:
            raise RuntimeError(f"GPU {self.index} cannot run this kernel: {self._why_refused() or error}") from None
        _call("cuModuleGetFunction", ctypes.byref(function), module, KERNEL["entry"].encode())
        needed = SHARED_BYTES + KERNEL["resources"]["static_shared_bytes"]
        most = self._attribute(97)  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        if needed > most:
            why = f"a block needs {needed} bytes of shared memory and can have {most} there"
            raise RuntimeError(f"GPU {self.index} cannot run this kernel: {why}")
        _call("cuFuncSetAttribute", function, 8, SHARED_BYTES)  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        return function.value

    def _why_refused(self):
        """Another architecture or a driver older than the compiler, or None."""
        arch, compiler = KERNEL["provenance"]["arch"], KERNEL["provenance"]["compiler"]
        found = self._attribute(75), self._attribute(76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        needed = divmod(int("".join(filter(str.isdigit, arch))), 10)
        later_minor = arch[-1].isdigit() and found[0] == needed[0] and found > needed
        if found != needed and not later_minor:
            return f"it was compiled for {arch} and this is sm_{found[0]}{found[1]}; export one searched for this GPU"
        version = ctypes.c_int()
        _call("cuDriverGetVersion", ctypes.byref(version))
        major, minor = version.value // 1000, version.value % 1000 // 10
        if major < int(compiler.split()[-1].split(".")[0]):
            return f"it was compiled by {compiler} and the driver is for CUDA {major}.{minor}; update the driver"
        return None

    def _blocks_at_once(self):
        blocks = ctypes.c_int()
        _call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), self.function, THREADS, SHARED_BYTES)
        return blocks.value * self._attribute(16)  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

    def _attribute(self, number):
        value = ctypes.c_int()
        _call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value


_gpu = functools.cache(_Gpu)


def _switch_context(context):
    """Makes `context` the thread's current one and returns the one that was, None in a thread that is new to CUDA."""
    current = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(current))
    if current.value != context:
        _call("cuCtxSetCurrent", context)
    return current.value


ARGUMENTS = {
    "cuCtxGetCurrent": "p", "cuCtxSetCurrent": "p", "cuDeviceGet": "pi", "cuDeviceGetAttribute": "pii",
    "cuDevicePrimaryCtxRetain": "pi", "cuDriverGetVersion": "p", "cuFuncSetAttribute": "pii", "cuGetErrorString": "ip",
    "cuLaunchKernel": "puuuuuuuppp", "cuModuleGetFunction": "ppp", "cuModuleLoadData": "pp",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": "ppiz", "cuTensorMapEncodeTiled": "puupppppuuuu",
}  # fmt: skip
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "u": ctypes.c_uint, "z": ctypes.c_size_t}


@functools.cache
def _driver_function(name):
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"this kernel needs an NVIDIA driver for CUDA 12.0 or newer: {error}") from None
    function.argtypes = [TYPES[letter] for letter in ARGUMENTS[name]]
    return function


def _call(name, *arguments):
    code = _driver_function(name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver_function("cuGetErrorString")(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({code})")


class _Torch:
    remedy = "{}.contiguous()"
    layout = staticmethod(lambda tensor: (tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
    pointer = staticmethod(lambda tensor: tensor.data_ptr())
    gpu_index = staticmethod(lambda device: device.index if device.type == "cuda" else None)
    stream = staticmethod(lambda gpu_index: sys.modules["torch"].cuda.current_stream(gpu_index).cuda_stream)

    @staticmethod
    def describe(layout):
        """Shape, strides in bytes, name of the dtype, device."""
        shape, strides, dtype, device = layout
        return tuple(shape), tuple(ELEMENT_BYTES * s for s in strides), str(dtype).removeprefix("torch."), device

    @staticmethod
    def refuse_gradients(tensors):
        """Autograd does not see the kernel: it would take its output for a constant."""
        torch = sys.modules["torch"]
        backward, forward_ad = torch.is_grad_enabled(), torch.autograd.forward_ad
        forward = getattr(forward_ad, "_current_level", 0) >= 0  # private, only to skip what takes time: mostly unused
        for name, tensor in zip(NAMES, tensors):
            if backward and tensor.requires_grad:
                remedy = f"call it under torch.no_grad() or pass {name}.detach()"
                raise RuntimeError(f"{name} requires a gradient and this kernel has no backward pass: {remedy}")
            if forward and forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(f"{name} has a tangent and this kernel has no derivative: pass {name}.detach()")

    @staticmethod
    def empty_like(tensor):
        torch = sys.modules["torch"]
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)


class _Cupy:
    remedy = "cupy.ascontiguousarray({})"
    layout = staticmethod(lambda tensor: (tensor.shape, tensor.strides, tensor.dtype, tensor.data.device_id))
    pointer = staticmethod(lambda tensor: tensor.data.ptr)
    describe = staticmethod(lambda layout: (*layout[:2], str(layout[2]), f"GPU {layout[3]}"))
    gpu_index = staticmethod(lambda device: int(device.removeprefix("GPU ")))
    stream = staticmethod(lambda gpu_index: sys.modules["cupy"].cuda.get_current_stream(gpu_index).ptr)
    refuse_gradients = staticmethod(lambda tensors: None)

    @staticmethod
    def empty_like(tensor):
        with tensor.device:
            return sys.modules["cupy"].empty(tensor.shape, tensor.dtype)


@functools.cache
def _library(kind):
    for base in kind.__mro__:
        if library := {"torch": _Torch, "cupy": _Cupy}.get(base.__module__.split(".")[0]):
            return library
    raise TypeError(f"q, k, v and out must be torch's or CuPy's, not {kind.__module__}.{kind.__qualname__}")
