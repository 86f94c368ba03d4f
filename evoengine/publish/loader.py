"""Calls the kernel beside this file (kernel.cubin, described in kernel.json). Needs torch or CuPy alone.

README.md says how it is imported; the function has the name of the kernel (with _ for -), and help() of it lists
its tensors. Ship the folder whole, and keep the name of this file, which no other export has.

Inputs come in the order of the kernel's parameters, or by name; help() of the function lists them. Outputs are
returned, one tensor or a tuple in that order. They are new tensors unless given by name, or all of them as `out=`, a
tensor or a tuple (where no tensor is itself named out). A tensor that the kernel updates in place is an input, and is
returned too. All are contiguous, on one GPU, of the dtypes that the kernel was exported for; the values of its other
parameters are fixed. So are shapes, but for the axes that help() lists: these are found from the shapes of the tensors,
or given by name where no shape tells them, and sizes for which the kernel was not verified are refused. An input that
the kernel reads in a __constant__ variable is copied there before each launch: calls on several streams at once must
give the same values. Scratch memory comes from the library's allocator, and is zeroed before each call where the kernel
asks for zeros.

Inference only: tensors that need a gradient are refused. May be called from several threads, on several GPUs, and while
a CUDA graph is captured if it was called on that GPU before: loading the kernel cannot be captured.

Where the kernel finds elements by lengths or a block table, these are read and checked before each launch, which waits
for the GPU. With check_indices=False they are not, as in a CUDA graph; whoever made them answers for them.
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

NAME = _cuda.KERNEL["kernel"].replace("-", "_")
LAUNCH, RUN_TIME = _cuda.KERNEL["launch"], _cuda.KERNEL.get("run_time", {})
# Numbers of the latter may be expressions of the axes, which have their largest sizes here.
AXES, PARAMETERS = RUN_TIME.get("axes", {}), RUN_TIME.get("parameters", _cuda.KERNEL["parameters"])
PASSED_ON = [p.get("passed", True) for p in _cuda.KERNEL["parameters"]]
TENSORS, SCRATCH, CONSTANTS, SCALARS, MAPS, STRUCTS = (
    [p for p in PARAMETERS if mark in p] for mark in ("output", "scratch", "constant", "scalar", "box", "struct")
)
PASSED = [p["name"] for p, own in zip(PARAMETERS, PASSED_ON, strict=True) if "constant" not in p and own]
TENSORS += [
    {"name": c["constant"], "dtype": c["dtype"], "shape": c["shape"], "output": False}
    for c in CONSTANTS
    if c["constant"] not in [t["name"] for t in TENSORS]
]
NAMES = [t["name"] for t in TENSORS]
INPUTS = [t["name"] for t in TENSORS if not t["output"] or t.get("inout")]
OUTPUTS = [t["name"] for t in TENSORS if t["output"]]
PURE = [name for name in OUTPUTS if name not in INPUTS]
BOUNDS = _cuda.KERNEL.get("bounds", ())  # of inputs by which the kernel finds others' elements
OUTPUT_INDICES = [NAMES.index(name) for name in OUTPUTS]
DTYPES = {
    "fp64": ("float64", 8), "fp32": ("float32", 4), "fp16": ("float16", 2), "bf16": ("bfloat16", 2),
    "int64": ("int64", 8), "int32": ("int32", 4), "int16": ("int16", 2), "int8": ("int8", 1), "uint8": ("uint8", 1),
    "bool": ("bool", 1), "fp8_e4m3": ("float8_e4m3fn", 1), "fp8_e5m2": ("float8_e5m2", 1),
}  # fmt: skip # a table
LIBRARY_DTYPES, ELEMENT_BYTES = zip(*(DTYPES[t["dtype"]] for t in TENSORS), strict=True)
SCALAR_TYPES = {
    "int8": ctypes.c_int8, "uint8": ctypes.c_uint8, "int16": ctypes.c_int16, "uint16": ctypes.c_uint16,
    "int32": ctypes.c_int32, "uint32": ctypes.c_uint32, "int64": ctypes.c_int64, "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float, "float64": ctypes.c_double,
}  # fmt: skip # a table


def _listed(names):
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else "no tensor"


def _call(*given, check_indices=True, **named):
    sizes = tuple([(axis, named.pop(axis)) for axis in AXES if axis in named]) if named else ()
    tensors = _bind(given, named)
    first = next((t for t in tensors if t is not None), None)
    library = _library(type(first))
    if any(t is not None and _library(type(t)) is not library for t in tensors):
        raise TypeError(f"{_listed(NAMES)} must all come from torch or all from CuPy")
    plan = _plan(library, sizes, *[None if t is None else library.layout(t) for t in tensors])
    for i in OUTPUT_INDICES:
        if tensors[i] is None:
            tensors[i] = library.empty(first, plan.shapes[i], LIBRARY_DTYPES[i])
    library.refuse_gradients(NAMES, tensors)
    if check_indices:
        for bound in BOUNDS:
            _check_indices(bound, dict(zip(NAMES, tensors, strict=True)))
    plan.queue(library, tensors)
    written = tuple(tensors[i] for i in OUTPUT_INDICES)
    return written if len(written) > 1 else written[0]


def _bind(given, named):
    """Return the tensors in the order of NAMES, None for outputs that were not given."""
    usage = f"{NAME} takes {_listed(INPUTS)} and writes {_listed(OUTPUTS)}"
    if len(given) > len(INPUTS):
        raise TypeError(f"{usage}: outputs are given by name, and {len(given)} tensors came without one")
    pairs = [*zip(INPUTS, given, strict=False), *named.items()]
    if "out" in named and "out" not in NAMES:
        pairs = [pair for pair in pairs if pair[0] != "out"] + _outputs_of(named["out"])
    found = dict.fromkeys(NAMES)
    for name, tensor in pairs:
        if name not in found:
            raise TypeError(f"{usage}: it has no {name}")
        if found[name] is not None:
            raise TypeError(f"{usage}: {name} was given twice")
        found[name] = tensor
    for name in INPUTS:
        if found[name] is None:
            raise TypeError(f"{usage}: {name} is missing")
    return [*found.values()]


def _outputs_of(out):
    """Return pairs of name and tensor."""
    if out is None:
        return []
    out = out if isinstance(out, (tuple, list)) else [out]
    if len(out) != len(PURE):
        raise TypeError(f"{NAME} writes {_listed(PURE)}: out must be {len(PURE)} tensors, and was {len(out)}")
    return [*zip(PURE, out, strict=True)]


def _check_indices(bound, tensors):
    """Raise ValueError if an index leads out of what it numbers. Waits for the GPU."""
    name, most = bound["tensor"], bound["most"]
    rows = tensors[name].tolist()
    if "lengths" in bound:  # of a row what is behind the last page of its sequence may be anything
        lengths = tensors[bound["lengths"]].tolist()
        rows = [row[: -(-length // bound["page"])] for row, length in zip(rows, lengths, strict=True)]
    else:
        rows = [rows]
    for i, row in enumerate(rows):
        for j, index in enumerate(row):
            if not 0 <= index <= most:
                at = f"{i}, {j}" if "lengths" in bound else f"{j}"
                raise ValueError(f"{name}[{at}] is {index}; it must be from 0 to {most}")
            if bound.get("rising") and j and index < row[j - 1]:
                raise ValueError(f"{name}[{j}] is {index}, less than the {row[j - 1]} before it; it must not fall")


@functools.cache
def _library(kind):
    return _cuda.find_library(kind, _listed(NAMES))


def _order(names):
    """Return where each of a kernel's parameters is among tensors, scratch memory, scalars, tensor maps and structs."""
    all_of_them = [p["name"] for p in (*TENSORS, *SCRATCH, *SCALARS, *MAPS, *STRUCTS)]
    return tuple(map(all_of_them.index, names))


MEMORY = [*NAMES, *(s["name"] for s in SCRATCH)]


def _sizes_of(shapes, given):
    """Return the size of every axis: as given, from the shapes of tensors (None for one to be made), else the largest.

    Raises ValueError for sizes that the kernel was not verified for.
    """
    sizes = dict(given)
    pairs = [
        (rule, extent)
        for t, shape in zip(TENSORS, shapes, strict=True)
        if shape is not None and len(shape) == len(t["shape"])
        for rule, extent in zip(t["shape"], shape, strict=True)
    ]
    for rule, extent in pairs:
        if rule in AXES:
            sizes.setdefault(rule, extent)
    for rule, extent in pairs:
        unknown = _cuda.names_in(rule) - sizes.keys()
        if len(unknown) == 1:
            sizes |= _solved(rule, extent, *unknown, sizes)
    sizes = {axis: sizes.get(axis, most) for axis, most in AXES.items()}
    for axis, most in AXES.items():
        if not isinstance(sizes[axis], int) or not 1 <= sizes[axis] <= most:
            raise ValueError(f"{axis} is {sizes[axis]}; this kernel was verified for sizes from 1 to {most}")
    for rule in RUN_TIME.get("requires", ()):
        if not _cuda.evaluate(rule["expression"], sizes):
            raise ValueError(f"{_shown(sizes)} break {rule['expression']}, which this kernel needs: {rule['why']}")
    return sizes


def _solved(rule, extent, axis, sizes):
    """Return the size of the one unknown axis by which an expression has that value, where it grows with it evenly."""
    first, second = (_cuda.evaluate(rule, {**sizes, axis: at}) for at in (1, 2))
    if second == first:
        return {}
    found = 1 + (extent - first) // (second - first)
    return {axis: found} if _cuda.evaluate(rule, {**sizes, axis: found}) == extent else {}


def _shown(sizes):
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def _check_shape(name, shape, expected, sizes):
    if shape is not None and shape != expected:
        wanted = f"with {_shown(sizes)} it must be {expected}" if sizes else f"this kernel was compiled for {expected}"
        raise ValueError(f"{name} has shape {shape}; {wanted}")


class _Sized:
    """What the kernel is given for some sizes: the attributes of a plan that depend on nothing else."""

    def __init__(self, *sizes):
        self.sizes = dict(sizes)
        self.shapes = [tuple(self._all(t["shape"])) for t in TENSORS]
        self.spans = tuple(math.prod(shape) * size for shape, size in zip(self.shapes, ELEMENT_BYTES, strict=True))
        self.scalars = tuple(SCALAR_TYPES[s["scalar"]](self._at(s["value"])) for s in SCALARS)
        self.map_layouts = tuple((MEMORY.index(m["tensor"]), self._map_layout(m)) for m in MAPS)
        self.struct_layouts = tuple(map(self._struct_layout, STRUCTS))
        self.scratch = tuple((self._at(s["scratch"]), s["zeroed"]) for s in SCRATCH)
        held = [(c["name"], NAMES.index(c["constant"])) for c in CONSTANTS]
        self.constants = tuple((name, i, self.spans[i]) for name, i in held)

    def _at(self, value):
        return _cuda.evaluate(value, self.sizes)

    def _all(self, values):
        return [self._at(value) for value in values]

    def _map_layout(self, m):
        dims, strides, box = self._all(m["dims"]), self._all(m["strides_bytes"]), self._all(m["box"])
        if any(stride % _cuda.ALIGNMENT for stride in strides):
            rule = f"TMA needs multiples of {_cuda.ALIGNMENT} bytes"
            raise ValueError(
                f"the rows of {m['tensor']} are {strides[0]} bytes apart with {_shown(self.sizes)}; {rule}"
            )
        swizzle, offset = self._at(m["swizzle"]), self._at(m.get("offset", 0))
        return _cuda.MapLayout(m["dtype"], dims, strides, box, swizzle, offset, m.get("nan", False))

    def _struct_layout(self, struct):
        content = bytearray(struct["struct"])
        pointers, maps = [], []
        for part in struct["parts"]:
            at = part["at"]
            if "pointer" in part:
                pointers.append((at, MEMORY.index(part["pointer"]), self._at(part["offset"])))
            elif "map" in part:
                maps.append((at, MEMORY.index(part["map"]["tensor"]), self._map_layout(part["map"])))
            else:
                scalar = part.get("scalar")
                raw = bytes(SCALAR_TYPES[scalar](self._at(part["value"]))) if scalar else bytes.fromhex(part["hex"])
                content[at : at + len(raw)] = raw
        return _cuda.StructLayout(content, pointers, maps)


_sized = functools.lru_cache(maxsize=_cuda.CACHED)(_Sized)


class _Plan(_cuda.Plan):
    names, outputs = NAMES, OUTPUT_INDICES
    orders = tuple(_order(kernel.get("parameters", PASSED)) for kernel in (LAUNCH, *_cuda.THEN))

    def __init__(self, library, given, *layouts):
        described = [(None, None, dtype, None) for dtype in LIBRARY_DTYPES]  # of outputs to be made
        for i, layout in enumerate(layouts):
            described[i] = described[i] if layout is None else library.describe(layout)
        shapes, strides, dtypes, devices = zip(*described, strict=True)
        sized = _sized(*_sizes_of(shapes, given).items())
        for name, shape, expected in zip(NAMES, shapes, sized.shapes, strict=True):
            _check_shape(name, shape, expected, sized.sizes)
        home = next(device for device in devices if device is not None)
        devices = [home if device is None else device for device in devices]
        gpu_index = _cuda.find_gpu_index(library, NAMES, LIBRARY_DTYPES, dtypes, devices)
        for name, shape, found, size in zip(NAMES, shapes, strides, ELEMENT_BYTES, strict=True):
            if shape is not None and not _is_contiguous(shape, found, size):
                remedy = _cuda.contiguous_remedy(name, name in OUTPUTS, library)
                raise ValueError(f"{name} is not contiguous, as this kernel needs it: {remedy}")
        vars(self).update(vars(sized))
        self.gpu = _gpu(gpu_index)
        first, *then = _grids(self.gpu, self.sizes)
        self.launch = (self.gpu.function, *first, *LAUNCH["block"], LAUNCH["shared_bytes"])
        self.then = tuple(
            (function, *grid, *kernel["block"], kernel["shared_bytes"])
            for function, grid, kernel in zip(self.gpu.functions, then, _cuda.THEN, strict=True)
        )


def _grids(gpu, sizes):
    """Return the grid of each kernel: by the rule of the search for these sizes and the SMs of this GPU."""
    if RUN_TIME:
        known = {**sizes, "gpu.sms": gpu.sms}
        return [[_cuda.evaluate(value, known) for value in grid] for grid in RUN_TIME["grids"]]
    of_this = LAUNCH["grid_by_sms"].get(str(gpu.sms))
    first = map(int, of_this.split("x")) if of_this else LAUNCH["grid"]
    return [first, *(kernel["grid"] for kernel in _cuda.THEN)]


_plan = functools.lru_cache(maxsize=_cuda.CACHED)(_Plan)
_gpu = functools.cache(_cuda.Gpu)


def _is_contiguous(shape, strides, element_bytes):
    """Return whether strides, in bytes, are contiguous. The stride of a dimension of one element is ignored."""
    taken = [i for i, extent in enumerate(shape) if extent > 1]
    return all(strides[i] == element_bytes * math.prod(shape[i + 1 :]) for i in taken)


def _signature(names):
    found = [t for t in TENSORS if t["name"] in names]
    return ", ".join(f"{t['name']}: {t['dtype']} [{', '.join(map(str, t['shape']))}]" for t in found)


def _served():
    """Return the sizes that the kernel serves, as a sentence."""
    if not AXES:
        return "It is for these shapes alone."
    ranges = _listed([f"{axis} up to {most}" for axis, most in AXES.items()])
    rules = [rule["expression"] for rule in RUN_TIME["requires"]]
    return f"It serves {ranges}{f', where {_listed(rules)}' if rules else ''}."


_call.__name__ = _call.__qualname__ = NAME
_call.__doc__ = f"""{NAME}({_signature(INPUTS)}) → {_signature(OUTPUTS)}

{_served()}
Queues the kernel on the current stream of the tensors' library; returns what it writes. Raises TypeError for what is no
tensor of torch or CuPy, ValueError for tensors that the kernel was not exported for, RuntimeError if a gradient is
needed, and where the GPU or its driver cannot run the kernel.
"""
globals()[NAME] = _call
__all__ = [NAME]
