"""Launches the kernel beside this file (kernel.cubin, described in kernel.json) on tensors of torch or CuPy.

A folder's loader says what its tensors must be and which values its parameters take. This file, shipped beside it as
_cuda.py, has the rest: the driver's functions, contexts, tensor maps, and what torch and CuPy call things. Each loader
has a copy of its own, so that folders of several releases work in one process.
"""

import ast
import ctypes
import functools
import hashlib
import json
import operator
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
KERNEL = json.loads((FOLDER / "kernel.json").read_text("utf-8"))
THREADS, SHARED_BYTES = KERNEL["launch"]["threads"], KERNEL["launch"]["shared_bytes"]
THEN = KERNEL["launch"].get("then", ())  # kernels behind the first, in order
ALIGNMENT = 16  # bytes: the widest loads of all kernels, and TMA
MAP_BYTES = MAP_ALIGNMENT = 128  # the latter since CUDA 13.0, 64 before
MAP_DTYPES = {  # CU_TENSOR_MAP_DATA_TYPE_*
    "uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "fp16": 6, "fp32": 7, "fp64": 8,
    "bf16": 9,
}  # fmt: skip # a table
MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes: CU_TENSOR_MAP_SWIZZLE_*
CACHED = 1024  # layouts, sets of pointers and tensor maps, of each; the least recently used is dropped first


def check_loader(name):
    """Raise ImportError if the loader of that name, beside this file, belongs to another kernel.

    So it does where the machine code is not that of the verification record, of a folder that has one.
    """
    record, binary = FOLDER / "record.json", FOLDER / "kernel.cubin"
    if record.exists():
        verified = json.loads(record.read_text("utf-8"))["machine_code"]["sha256"]
        if hashlib.sha256(binary.read_bytes()).hexdigest() != verified:
            raise ImportError(f"{binary} is not the machine code that record.json beside it says was verified")
    if name != KERNEL["module"]:
        own = KERNEL["module"]
        remedy = f"keep each export in a folder of its own, and its loader's name, here {own}.py"
        raise ImportError(f"{name}.py is not the loader of the kernel in {FOLDER}: {remedy}")


_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.USub: operator.neg,
    ast.UAdd: operator.pos, ast.Not: operator.not_, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip # a table
_CALLS = {"ceil_div": lambda a, b: -(-a // b), "round_up": lambda a, b: -(-a // b) * b, "min": min, "max": max}


def evaluate(value, sizes):
    """Return a number of kernel.json, which may be an expression of sizes: it is read node by node, never run."""
    return _value(_parsed(value), sizes) if isinstance(value, str) else value


@functools.cache
def _parsed(text):
    return ast.parse(text, mode="eval").body


def names_in(value):
    """Return the names of sizes in a number of kernel.json."""
    nodes = ast.walk(_parsed(value)) if isinstance(value, str) else ()
    return {node.id for node in nodes if isinstance(node, ast.Name)} - _CALLS.keys()


def _value(node, sizes):
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.Attribute(value=ast.Name(id="gpu"), attr=name):
            return sizes[f"gpu.{name}"]
        case ast.UnaryOp(op=op, operand=operand):
            return _OPERATORS[type(op)](_value(operand, sizes))
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.BoolOp(op=op, values=values):
            return (all if isinstance(op, ast.And) else any)(_value(part, sizes) for part in values)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, sizes) else orelse, sizes)
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_value(part, sizes) for part in (left, *others)]
            return all(_OPERATORS[type(op)](a, b) for op, a, b in zip(ops, values, values[1:], strict=False))
        case ast.Tuple(elts=parts):
            return tuple(_value(part, sizes) for part in parts)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _CALLS[name](*(_value(part, sizes) for part in arguments))
    raise ValueError(f"kernel.json holds {ast.unparse(node)}, which is not an expression of sizes")


class Plan:
    """All of a call but its pointers. A loader's subclass computes it once for tensors of the same layouts."""

    names, outputs = (), ()  # of the tensors; indices of those that the kernel writes
    spans = ()  # bytes from each tensor's first element to the end of its last
    scalars = ()  # ctypes values
    map_layouts = ()  # pairs: index of a tensor, MapLayout
    struct_layouts = ()  # StructLayout of each
    constants = ()  # of each __constant__ variable that an input fills: name, index of the tensor, bytes
    scratch = ()  # pairs: bytes of each scratch memory, and whether it is zeroed before each call
    orders = (
        None,
    )  # of each kernel: puts pointers, scalars and maps into the order of its parameters; None: as they are
    gpu = None
    launch = None  # arguments of cuLaunchKernel up to the shared memory; None if there is nothing to compute
    then = ()  # those of the kernels behind the first

    def queue(self, library, tensors):
        """Queue the kernels on the library's current stream."""
        gpu, previous = self.gpu, switch_context(self.gpu.context)
        try:
            # Each call has scratch memory of its own: the library's allocator reuses it in the order of the stream.
            held = [library.empty(tensors[0], (size,), "uint8") for size, _ in self.scratch]
            # The memory has to outlive the launch, whatever the cache drops meanwhile.
            addresses, memory = parameters(self, *map(library.pointer, [*tensors, *held]))
            for one, (size, zeroed) in zip(held, self.scratch, strict=True):
                if zeroed:
                    call("cuMemsetD8Async", library.pointer(one), 0, size, library.stream(gpu.index))
            for name, i, size in self.constants:
                to = gpu.constants[name]
                call("cuMemcpyDtoDAsync_v2", to, library.pointer(tensors[i]), size, library.stream(gpu.index))
            for launch, at in zip((self.launch, *self.then), addresses, strict=True):
                call("cuLaunchKernel", *launch, library.stream(gpu.index), at, None)
        finally:
            if previous != gpu.context:
                call("cuCtxSetCurrent", previous)

    def check_pointers(self, pointers):
        pointers = pointers[: len(self.names)]  # those behind them are of scratch memory
        for name, pointer in zip(self.names, pointers, strict=True):
            if pointer % ALIGNMENT:
                raise ValueError(f"{name} does not start at a multiple of {ALIGNMENT} bytes")
        for i in self.outputs:
            own, start, end = self.names[i], pointers[i], pointers[i] + self.spans[i]
            for name, pointer, span in zip(self.names, pointers, self.spans, strict=True):
                if start < pointer + span and pointer < end and name != own:
                    raise ValueError(f"{own} and {name} overlap in memory; {own} must have memory of its own")


@functools.lru_cache(maxsize=CACHED)
def parameters(plan, *pointers):
    """Return for each kernel the address of its parameters' addresses, and the memory with them, which nobody changes.

    So calls from several threads can share them; the driver copies them while it queues a launch.
    """
    plan.check_pointers(pointers)
    maps = [tensor_map(pointers[i], layout) for i, layout in plan.map_layouts]
    values = (ctypes.c_uint64 * len(pointers))(*pointers)
    first = ctypes.addressof(values)
    structs = [layout.filled(pointers) for layout in plan.struct_layouts]
    found = [*range(first, first + 8 * len(pointers), 8), *map(ctypes.addressof, plan.scalars), *(at for at, _ in maps)]
    found += map(ctypes.addressof, structs)
    ordered = [found if order is None else [found[i] for i in order] for order in plan.orders]
    arrays = [(ctypes.c_void_p * len(own))(*own) for own in ordered]
    return [*map(ctypes.addressof, arrays)], (arrays, values, plan, maps, structs)


def find_gpu_index(library, names, wanted, dtypes, devices):
    """Return the index of the GPU that all tensors are on.

    Raises ValueError if there is none, or for dtypes other than `wanted`.
    """
    for name, expected, dtype, device in zip(names, wanted, dtypes, devices, strict=True):
        if dtype != expected:
            raise ValueError(f"{name} is {dtype}; this kernel was compiled for {expected}")
        if device != devices[0]:
            raise ValueError(f"{name} is on {device} and {names[0]} on {devices[0]}")
    gpu_index = library.gpu_index(devices[0])
    if gpu_index is None:
        raise ValueError(f"{names[0]} is on {devices[0]}; this kernel runs on a CUDA GPU")
    return gpu_index


def contiguous_remedy(name, is_output, library):
    return f"pass a contiguous {name}" if is_output else f"pass {library.remedy.format(name)}"


class MapLayout:
    """How TMA sees a tensor.

    Dims and box are in elements, innermost first; strides of all dims but the innermost, and the swizzle, in bytes.
    """

    def __init__(self, dtype, dims, strides, box, swizzle, offset=0, nan=False):
        self.dtype, self.rank, self.offset = MAP_DTYPES[dtype], len(dims), offset
        self._arrays = _Longs(*dims), _Longs(*strides), _Words(*box), _STEPS
        # no interleaving, L2 promotion of 256 bytes, zeros or NaN beyond the tensor
        self.arguments = (*map(ctypes.addressof, self._arrays), 0, MAP_SWIZZLES[swizzle], 3, int(nan))


class StructLayout:
    """A struct passed by value: its bytes, with places for pointers and tensor maps.

    Each place is an offset in it and the index of a tensor, with the offset of a pointer or a MapLayout.
    """

    def __init__(self, content, pointers, maps):
        self.content, self.pointers, self.maps = content, pointers, maps

    def filled(self, pointers):
        """Return memory with the struct for tensors at these pointers."""
        held = ctypes.create_string_buffer(bytes(self.content), len(self.content))
        for at, i, offset in self.pointers:
            held[at : at + 8] = (pointers[i] + offset).to_bytes(8, "little")
        for at, i, layout in self.maps:
            held[at : at + MAP_BYTES] = ctypes.string_at(tensor_map(pointers[i], layout)[0], MAP_BYTES)
        return held


_Longs, _Words = ctypes.c_uint64 * 5, ctypes.c_uint32 * 5  # a map has at most 5 dims
_STEPS = _Words(1, 1, 1, 1, 1)


@functools.lru_cache(maxsize=CACHED)
def tensor_map(pointer, layout):
    """Encode a tensor map; return its address and the memory that holds it."""
    memory = _MapMemory()
    start = ctypes.addressof(memory)
    start += -start % MAP_ALIGNMENT
    call("cuTensorMapEncodeTiled", start, layout.dtype, layout.rank, pointer + layout.offset, *layout.arguments)
    return start, memory


_MapMemory = ctypes.c_char * (MAP_BYTES + MAP_ALIGNMENT)


class Gpu:
    """The kernel on one GPU, in its primary context, which torch and CuPy share."""

    def __init__(self, index):
        self.index, self._device, context = index, ctypes.c_int(), ctypes.c_void_p()
        call("cuDeviceGet", ctypes.byref(self._device), index)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self.context = context.value
        previous = switch_context(self.context)
        try:
            self.load()
        finally:
            call("cuCtxSetCurrent", previous)

    def load(self):
        """Load the module in the GPU's context."""
        module = ctypes.c_void_p()
        cubin = (FOLDER / "kernel.cubin").read_bytes()
        if hashlib.sha256(cubin).hexdigest() != KERNEL["cubin_sha256"]:
            raise RuntimeError(
                f"{FOLDER / 'kernel.cubin'} is not the binary that kernel.json describes: copy both again"
            )
        try:
            call("cuModuleLoadData", ctypes.byref(module), cubin)
        except RuntimeError as error:
            raise RuntimeError(f"GPU {self.index} cannot run this kernel: {self._why_refused() or error}") from None
        names = [p["name"] for p in KERNEL.get("parameters", ()) if "constant" in p]
        self.constants = {name: _constant_address(module, name) for name in names}
        self.function = self._function(
            module, KERNEL["entry"], SHARED_BYTES, KERNEL["resources"]["static_shared_bytes"]
        )
        self.functions = [self._function(module, k["entry"], k["shared_bytes"], k["static_shared_bytes"]) for k in THEN]
        self.sms = self._attribute(16)  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

    def _function(self, module, entry, shared_bytes, static_shared_bytes):
        needed, most = shared_bytes + static_shared_bytes, self._attribute(97)  # MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        if needed > most:
            why = f"a block needs {needed} bytes of shared memory and can have {most} there"
            raise RuntimeError(f"GPU {self.index} cannot run this kernel: {why}")
        function = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        call("cuFuncSetAttribute", function, 8, shared_bytes)  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        return function.value

    def _why_refused(self):
        """Return why the GPU cannot run the binary; None if it can.

        It may be of another architecture, or its driver older than the compiler.
        """
        arch, compiler = KERNEL["provenance"]["arch"], KERNEL["provenance"]["compiler"]
        found = self._attribute(75), self._attribute(76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        needed = divmod(int("".join(filter(str.isdigit, arch))), 10)
        later_minor = arch[-1].isdigit() and found[0] == needed[0] and found > needed
        if found != needed and not later_minor:
            return f"it was compiled for {arch} and this is sm_{found[0]}{found[1]}; export one searched for this GPU"
        version = ctypes.c_int()
        call("cuDriverGetVersion", ctypes.byref(version))
        major, minor = version.value // 1000, version.value % 1000 // 10
        if major < int(compiler.split()[-1].split(".")[0]):
            return f"it was compiled by {compiler} and the driver is for CUDA {major}.{minor}; update the driver"
        return None

    def blocks_at_once(self):
        """Return the number of blocks that are resident at once on the whole GPU. Requires its context."""
        blocks = ctypes.c_int()
        call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), self.function, THREADS, SHARED_BYTES)
        return blocks.value * self.sms

    def _attribute(self, number):
        value = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value


def _constant_address(module, name):
    address, size = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), module, name.encode())
    return address.value


def switch_context(context):
    """Make `context` current for the thread and return the previous one, None for a thread that is new to CUDA."""
    current = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(current))
    if current.value != context:
        call("cuCtxSetCurrent", context)
    return current.value


ARGUMENTS = {
    "cuCtxGetCurrent": "p", "cuCtxSetCurrent": "p", "cuDeviceGet": "pi", "cuDeviceGetAttribute": "pii",
    "cuDevicePrimaryCtxRetain": "pi", "cuDriverGetVersion": "p", "cuFuncSetAttribute": "pii", "cuGetErrorString": "ip",
    "cuLaunchKernel": "puuuuuuuppp", "cuMemcpyDtoDAsync_v2": "zzzp", "cuMemsetD8Async": "zczp",
    "cuModuleGetFunction": "ppp", "cuModuleGetGlobal_v2": "pppp", "cuModuleLoadData": "pp",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": "ppiz", "cuTensorMapEncodeTiled": "puupppppuuuu",
}  # fmt: skip # a table
TYPES = {"p": ctypes.c_void_p, "c": ctypes.c_ubyte, "i": ctypes.c_int, "u": ctypes.c_uint, "z": ctypes.c_size_t}


@functools.cache
def driver_function(name):
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"this kernel needs an NVIDIA driver for CUDA 12.0 or newer: {error}") from None
    function.argtypes = [TYPES[letter] for letter in ARGUMENTS[name]]
    return function


def call(name, *arguments):
    code = driver_function(name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver_function("cuGetErrorString")(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({code})")


def find_library(kind, names):
    """Return the adapter for tensors of that class.

    Raises TypeError, naming them by `names`, if no library is known.
    """
    for base in kind.__mro__:
        if library := {"torch": Torch, "cupy": Cupy}.get(base.__module__.split(".")[0]):
            return library
    raise TypeError(f"{names} must be torch's or CuPy's, not {kind.__module__}.{kind.__qualname__}")


class Torch:
    remedy = "{}.contiguous()"
    layout = staticmethod(lambda tensor: (tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
    pointer = staticmethod(lambda tensor: tensor.data_ptr())
    gpu_index = staticmethod(lambda device: device.index if device.type == "cuda" else None)
    stream = staticmethod(lambda gpu_index: sys.modules["torch"].cuda.current_stream(gpu_index).cuda_stream)

    @staticmethod
    def describe(layout):
        """Return the shape, strides in bytes, name of the dtype, and device."""
        shape, strides, dtype, device = layout
        size = _torch_bytes(dtype)
        return tuple(shape), tuple(size * s for s in strides), str(dtype).removeprefix("torch."), device

    @staticmethod
    def refuse_gradients(names, tensors):
        """Raise RuntimeError for tensors that require a gradient.

        Autograd would treat the kernel's output as a constant.
        """
        torch = sys.modules["torch"]
        backward, forward_ad = torch.is_grad_enabled(), torch.autograd.forward_ad
        forward = getattr(forward_ad, "_current_level", 0) >= 0  # private, only to skip what takes time: mostly unused
        for name, tensor in zip(names, tensors, strict=True):
            if backward and tensor.requires_grad:
                remedy = f"call it under torch.no_grad() or pass {name}.detach()"
                raise RuntimeError(f"{name} requires a gradient and this kernel has no backward pass: {remedy}")
            if forward and forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(f"{name} has a tangent and this kernel has no derivative: pass {name}.detach()")

    @staticmethod
    def empty_like(tensor):
        torch = sys.modules["torch"]
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    @staticmethod
    def empty(beside, shape, dtype):
        return beside.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))


@functools.cache
def _torch_bytes(dtype):
    return sys.modules["torch"].empty(0, dtype=dtype).element_size()


class Cupy:
    remedy = "cupy.ascontiguousarray({})"
    layout = staticmethod(lambda tensor: (tensor.shape, tensor.strides, tensor.dtype, tensor.data.device_id))
    pointer = staticmethod(lambda tensor: tensor.data.ptr)
    describe = staticmethod(lambda layout: (*layout[:2], str(layout[2]), f"GPU {layout[3]}"))
    gpu_index = staticmethod(lambda device: int(device.removeprefix("GPU ")))
    stream = staticmethod(lambda gpu_index: sys.modules["cupy"].cuda.get_current_stream(gpu_index).ptr)
    refuse_gradients = staticmethod(lambda names, tensors: None)

    @staticmethod
    def empty_like(tensor):
        with tensor.device:
            return sys.modules["cupy"].empty(tensor.shape, tensor.dtype)

    @staticmethod
    def empty(beside, shape, dtype):
        cupy = sys.modules["cupy"]
        try:
            wanted = cupy.dtype(dtype)
        except TypeError:
            reason = f"this kernel writes {dtype}, which this CuPy does not have: pass torch's tensors"
            raise ValueError(reason) from None
        with beside.device:
            return cupy.empty(shape, wanted)
