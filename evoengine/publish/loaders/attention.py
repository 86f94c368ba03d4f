"""Attention forward by the kernel beside this file (kernel.cubin, described in kernel.json). Needs torch or CuPy alone.

    from attention import attention
    out = attention(q, k, v)     # softmax(q·kᵀ/√head_dim)·v

q and out are [batch, heads, seq_q, head_dim], k and v [batch, kv_heads, seq_k, head_dim]; all contiguous, on one GPU, in
the dtype the kernel was compiled for. Any batch, heads and lengths will do; head_dim, dtype and mask are compiled in.
"""

import ctypes
import functools
import json
import math
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
KERNEL = json.loads((FOLDER / "kernel.json").read_text())
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def attention(q, k, v, out=None):
    """Runs the kernel on the current stream of the tensors' library; raises ValueError for tensors it was not made for."""
    out = _empty_like(q) if out is None else out
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k = k.shape[1], k.shape[2]
    _check(q, k, v, out)
    with _device(q):
        _enter_context(_device_index(q))
        threads, shared = KERNEL["launch"]["threads"], KERNEL["launch"]["shared_bytes"]
        parameters = [ctypes.c_void_p(_pointer(t)) for t in (q, k, v, out)]
        lengths = (heads, kv_heads, seq_q, seq_k)
        parameters += [ctypes.c_int(n) for n in ((batch, *lengths) if _schedule() == "static" else lengths)]
        parameters.append(ctypes.c_float(1.0 / math.sqrt(head_dim)))
        parameters += _tensor_maps(q, k, v, out)
        addresses = (ctypes.c_void_p * len(parameters))(*(_address(p) for p in parameters))
        _call(
            "cuLaunchKernel", _function(_device_index(q)), *_grid(batch, heads, seq_q), threads, 1, 1, shared,
            ctypes.c_void_p(_stream(q)), addresses, None,
        )  # fmt: skip
    return out


def _schedule():
    return KERNEL["config"].get("schedule", "none")


def _grid(batch, heads, seq_q):
    """A block for each tile of rows, or as many as run at once on the GPU that the kernel was made for."""
    row_tiles, cluster = -(-seq_q // KERNEL["config"]["tile_m"]), KERNEL["config"].get("cluster", 1)
    if _schedule() == "static":
        return min(KERNEL["launch"]["grid"][0], row_tiles * heads * batch), 1, 1
    if _schedule() == "longest_first":
        return heads * batch, row_tiles, 1
    return -(-row_tiles // cluster) * cluster, heads, batch


def _check(q, k, v, out):
    problem = KERNEL["problem"]
    batch, heads, seq_q, head_dim = q.shape
    expected = {"k": (batch, k.shape[1], k.shape[2], head_dim), "v": tuple(k.shape), "out": tuple(q.shape)}
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        if tuple(tensor.shape) != expected.get(name, tuple(q.shape)):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {expected[name]} was expected")
        if DTYPES[problem["dtype"]] != str(tensor.dtype).removeprefix("torch."):
            raise ValueError(f"{name} is {tensor.dtype}; this kernel was compiled for {DTYPES[problem['dtype']]}")
        if not _contiguous(tensor):
            raise ValueError(f"{name} is not contiguous")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}")
        if _pointer(tensor) % 16:
            raise ValueError(f"{name} does not start at a multiple of 16 bytes")
    if head_dim != problem["head_dim"]:
        raise ValueError(f"head_dim is {head_dim}; this kernel was compiled for {problem['head_dim']}")
    if heads % k.shape[1]:
        raise ValueError(f"{heads} heads are no multiple of {k.shape[1]} kv heads")
    if problem["causal"] and seq_q > k.shape[2]:
        raise ValueError(f"causal with {seq_q} queries and {k.shape[2]} keys leaves rows that see no key")


def _tensor_maps(q, k, v, out):
    """Q, K and V as TMA sees them, [batch·heads, seq, head_dim], for kernels that load by it; O too where it is stored so.

    None for all others. A box of O is a warpgroup's 64 rows; K and V are brought by all blocks of a cluster, a part each.
    """
    config = KERNEL["config"]
    if config.get("load") != "tma":
        return []
    keys = config["tile_n"] // config.get("cluster", 1)
    maps = [_tensor_map(q, config["tile_m"]), _tensor_map(k, keys), _tensor_map(v, keys)]
    return [*maps, _tensor_map(out, 64)] if config["o_store"] == "tma" else maps


def _tensor_map(tensor, rows):
    """cuTensorMapEncodeTiled: 128 bytes at a multiple of 128, boxes of `rows` by the columns that are swizzled together."""
    batch, heads, seq, head_dim = tensor.shape
    columns = 64 if head_dim % 64 == 0 else 32
    memory = (ctypes.c_char * 256)()
    dtype = {"fp16": 6, "bf16": 9}[KERNEL["problem"]["dtype"]]
    swizzle = {32: 2, 64: 3}[columns]
    _call(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(_address(memory)), dtype, 3, ctypes.c_void_p(_pointer(tensor)),
        (ctypes.c_uint64 * 3)(head_dim, seq, batch * heads), (ctypes.c_uint64 * 2)(2 * head_dim, 2 * head_dim * seq),
        (ctypes.c_uint32 * 3)(columns, rows, 1), (ctypes.c_uint32 * 3)(1, 1, 1), 0, swizzle, 3, 0,
    )  # fmt: skip
    return memory


def _address(parameter):
    """Tensor maps lie at the next multiple of 128, where the driver takes its copy from."""
    address = ctypes.addressof(parameter)
    return address + -address % 128 if isinstance(parameter, ctypes.Array) else address


def _enter_context(device_index):
    """The device's primary context, which torch and CuPy share: a thread that has called neither yet is in none."""
    context, device = ctypes.c_void_p(), ctypes.c_int()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context:
        _call("cuDeviceGet", ctypes.byref(device), device_index)
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call("cuCtxSetCurrent", context)


@functools.cache
def _function(device_index):
    """The kernel in the current context of that device."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), (FOLDER / "kernel.cubin").read_bytes())
    _call("cuModuleGetFunction", ctypes.byref(function), module, KERNEL["entry"].encode())
    _call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, KERNEL["launch"]["shared_bytes"])
    return function


def _call(name, *arguments):
    driver = ctypes.CDLL("libcuda.so.1")
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({code})")


def _library(tensor):
    return type(tensor).__module__.split(".")[0]


def _empty_like(tensor):
    return sys.modules[_library(tensor)].empty_like(tensor)


def _pointer(tensor):
    return tensor.data_ptr() if _library(tensor) == "torch" else tensor.data.ptr


def _contiguous(tensor):
    return tensor.is_contiguous() if _library(tensor) == "torch" else tensor.flags.c_contiguous


def _device(tensor):
    return sys.modules["torch"].cuda.device(tensor.device) if _library(tensor) == "torch" else tensor.device


def _device_index(tensor):
    return tensor.device.index if _library(tensor) == "torch" else tensor.device.id


def _stream(tensor):
    if _library(tensor) == "torch":
        return sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream
    return sys.modules["cupy"].cuda.get_current_stream().ptr
