"""Read kernels with times measured elsewhere on GPUs: a folder per kernel.

A folder holds kernel.cu or kernel.cubin, kernel.json, and a GPU.json or GPU.json.gz for each GPU. docs/accuracy-data.md
has the format.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from evoengine.devices.base import ScalarArgument, StructArgument, TensorMapArgument
from evoengine.errors import UsageError
from evoengine.gpu import find_gpu, known_gpus
from evoengine.sass.chip import SUSTAINED, Clock
from evoengine.sass.launch import DrawnArgument, Geometry
from evoengine.space.expression import Expression

DTYPES = (
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("bool", "float16", "float32", "float64", "complex64", "complex128"),
)
PERIOD = 1 << 20
"""period in bytes of a large buffer's contents"""
LARGEST_BUFFER = 1 << 40
"""bytes; more than any GPU has"""
LARGEST_FORMULA = 1 << 24
"""elements of a buffer filled by a formula, which is stored whole"""
MAX_GRID = 2**31 - 1
RECORDED_ON = {"a100": "a100-40gb"}
"""names of the benchmark hub that mean another GPU here: its A100 has 40 GB, 1,555 GB/s"""
FILLS = "zero, one, normal, uniform, random, a number, or expr: NAME(i) = FORMULA[, last element NUMBER]"

MAPPED_DTYPES = ("fp16", "bf16", "fp32")
KINDS = ("buffer", "scalar", "struct", "tensor_map")
VECTORS = {"char": "int8", "short": "int16", "int": "int32", "float": "float32", "double": "float64"}
LARGEST_STRUCT = 32764
"""bytes of a kernel's parameters from CUDA 12.1 on (CUDA C++ Programming Guide, Function Parameters)"""
CONTRADICTS = 1.05
"""ratio from which on two times of a configuration contradict each other"""

_VECTOR = re.compile(rf"(?P<of>{'|'.join(VECTORS)})(?P<width>[234])\Z")
_FORMULA = re.compile(r"expr:\s*\w+\((?P<index>[A-Za-z_]\w*)\)\s*=(?P<formula>.+)", re.DOTALL)
_EXCEPTION = re.compile(r",\s*(?P<which>first|last) element (?P<value>[-+.\deE]+)\s*$")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z")


@dataclass(frozen=True)
class Buffer:
    name: str
    dtype: np.dtype
    elements: Expression
    fill: str
    output: bool
    width: int = 1
    """numbers per element, 2 for float2"""

    def contents(self, config: Mapping[str, Any], most: int | None = PERIOD) -> np.ndarray:
        """Return the elements [n]; with `most`, at most so many bytes of them, formulas excepted."""
        elements, where = self.width * _size(self.elements, config), f"buffer {self.name}"
        if self.fill.startswith("expr:"):
            return _by_formula(self.fill, elements, self.dtype, where)
        held = elements if most is None else min(elements, max(1, most // self.dtype.itemsize))
        return _filled(self.fill, held, self.dtype, self.name, where)

    def bytes(self, config: Mapping[str, Any]) -> int:
        size = self.width * _size(self.elements, config) * self.dtype.itemsize
        if size > LARGEST_BUFFER:
            raise UsageError(f"buffer {self.name} has {size} bytes, more than any GPU has")
        return size

    def argument(self, config: Mapping[str, Any]) -> DrawnArgument:
        return DrawnArgument(self.name, self.bytes(config), str(self.dtype), self.output, self.contents(config))


@dataclass(frozen=True)
class Scalar:
    name: str
    dtype: np.dtype
    value: Expression

    def argument(self, config: Mapping[str, Any]) -> ScalarArgument:
        return ScalarArgument(self.name, self.dtype.type(self.value.evaluate(config)))


@dataclass(frozen=True)
class TensorMap:
    """State how TMA cuts boxes out of a buffer: sizes innermost first, strides in bytes without the innermost."""

    name: str
    tensor: str
    dtype: str
    dims: tuple[Expression, ...]
    strides: tuple[Expression, ...]
    box: tuple[Expression, ...]
    swizzle: int

    def argument(self, config: Mapping[str, Any]) -> TensorMapArgument:
        dims, strides, box = (tuple(_size(e, config, 0) for e in of) for of in (self.dims, self.strides, self.box))
        return TensorMapArgument(self.name, self.tensor, self.dtype, dims, strides, box, self.swizzle)


Part = Buffer | Scalar | TensorMap


@dataclass(frozen=True)
class Struct:
    """A struct parameter; all bytes that are not named are zero."""

    name: str
    bytes: int
    parts: tuple[tuple[int, Part], ...]

    def argument(self, config: Mapping[str, Any]) -> StructArgument:
        return StructArgument(self.name, self.bytes, tuple((at, part.argument(config)) for at, part in self.parts))


@dataclass(frozen=True)
class RecordedKernel:
    name: str
    text: str
    cubin: bytes | None
    """machine code in place of the text"""
    entry: str
    knobs: tuple[str, ...]
    arguments: tuple[Part | Struct, ...]
    mapped: tuple[Buffer, ...]
    """buffers to which only tensor maps point"""
    constants: tuple[Buffer, ...]
    block: tuple[Expression, ...]
    grid: tuple[Expression, ...]
    shared: Expression
    compiler: str | None
    """the version of NVRTC to compile with, such as 11.8; None if the file names none"""
    options: tuple[str, ...]

    def source(self, config: Mapping[str, Any]) -> str:
        return "".join(f"#define {knob} {_as_text(config[knob])}\n" for knob in self.knobs) + self.text

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """Return the launch geometry of a configuration. Raises UsageError if a size is not a positive integer."""
        block, grid = (_three([_size(e, config) for e in of]) for of in (self.block, self.grid))
        if max(grid) > MAX_GRID or math.prod(block) > 1024:
            raise UsageError(f"{self.name}: a grid of {grid} blocks of {block} threads is more than a GPU takes")
        return Geometry(grid, block, _size(self.shared, config, least=0))

    def buffer_bytes(self, config: Mapping[str, Any]) -> int:
        """Return the bytes of all buffers together."""
        structs = [a for a in self.arguments if isinstance(a, Struct)]
        parts = [*self.arguments, *self.mapped, *(part for s in structs for _, part in s.parts)]
        return sum(part.bytes(config) for part in parts if isinstance(part, Buffer))


@dataclass(frozen=True)
class Row:
    config: Mapping[str, Any]
    time_us: float


@dataclass(frozen=True)
class Recording:
    """One GPU's times of a kernel. `unreadable` has the reason for each row that was left out."""

    gpu: str
    """evoengine's name of it"""
    name: str
    """the file's name"""
    stated_clock: Clock | None
    """the clock of the measurement"""
    optimum_us: float | None
    """the optimum of all valid configurations, where the file states it"""
    rows: tuple[Row, ...]
    unreadable: tuple[str, ...]

    @property
    def clock(self) -> Clock:
        """Return the clock that is stated, else the sustained one: who locks a GPU's clock says so."""
        return self.stated_clock or Clock(SUSTAINED)


def find_kernels(folder: Path) -> list[Path]:
    """Return the kernel folders in `folder`, or itself if it is one. Raises UsageError if there is none."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; give one that holds a folder with a kernel.json per kernel")
    found = sorted(p.parent for p in (*folder.glob("*/kernel.json"), *folder.glob("kernel.json")))
    if not found:
        raise UsageError(f"{folder} holds no recorded kernel: it takes a folder with a kernel.json for each")
    return found


def find_recordings(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.name.endswith((".json.gz", ".json")) and p.name != "kernel.json")


# ── kernel.json ─────────────────────────────────────────────────────────────────────────────────────────────────────


def read_kernel(folder: Path) -> RecordedKernel:
    """Read a kernel's folder. Raises UsageError naming the file and what in it is wrong."""
    path = folder / "kernel.json"
    table = _json(path)
    where = str(path)
    knobs = tuple(_list(table, "knobs", where))
    for knob in knobs:
        if not isinstance(knob, str) or not _IDENTIFIER.match(knob):
            raise UsageError(f"{where}: the knob {knob!r} is not a valid name of a macro")
    text, cubin = _code(folder)
    return RecordedKernel(
        name=folder.name,
        text=text,
        cubin=cubin,
        entry=_text(table, "entry", where),
        knobs=knobs,
        arguments=tuple(_argument(a, knobs, f"{where}: arguments") for a in _list(table, "arguments", where)),
        mapped=_buffers(table, "mapped", knobs, where),
        constants=_buffers(table, "constants", knobs, where),
        block=_sizes(table, "block", knobs, where),
        grid=_sizes(table, "grid", knobs, where),
        shared=_expression(table.get("shared", 0), knobs, f"{where}: shared"),
        compiler=version[1] if (version := re.search(r"NVRTC (\d+\.\d+)", str(table.get("compiler")))) else None,
        options=tuple(str(option) for option in _list(table, "options", where, ())),
    )


def _code(folder: Path) -> tuple[str, bytes | None]:
    """Return text and machine code; one of them is empty."""
    text, cubin = folder / "kernel.cu", folder / "kernel.cubin"
    try:
        return ("", cubin.read_bytes()) if cubin.is_file() and not text.is_file() else (text.read_text("utf-8"), None)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {text}: {reason}; a kernel has its text there or kernel.cubin") from None


def _buffers(table: Mapping[str, Any], name: str, knobs: Sequence[str], where: str) -> tuple[Buffer, ...]:
    stated = [_argument(a, knobs, f"{where}: {name}") for a in _list(table, name, where, ())]
    buffers = tuple(c for c in stated if isinstance(c, Buffer))
    if len(buffers) < len(stated):
        raise UsageError(f"{where}: {name} are buffers; give a scalar as a buffer of one element")
    return buffers


def _argument(table: object, knobs: Sequence[str], where: str) -> Part | Struct:
    if not isinstance(table, dict):
        raise UsageError(f"{where}: {table!r} is not an argument; it needs a name, a kind and a dtype")
    name = _text(table, "name", where)
    where = f"{where}: {name}"
    kind = table.get("kind", "buffer")
    if kind not in KINDS:
        raise UsageError(f"{where} is of the kind {kind!r}; known are {', '.join(KINDS)}")
    if kind == "struct":
        return _struct(table, name, knobs, where)
    if kind == "tensor_map":
        return _tensor_map(table, name, knobs, where)
    dtype, width = _dtype(_text(table, "dtype", where), where)
    if kind == "scalar":
        return Scalar(name, dtype, _expression(_field(table, "value", where), knobs, f"{where}: value"))
    elements = _expression(_field(table, "elements", where), knobs, f"{where}: elements")
    fill, output = str(table.get("fill", "zero")).strip(), bool(table.get("output"))
    buffer = Buffer(name, dtype, elements, fill, output, width)
    if not buffer.fill.startswith("expr:"):
        _filled(buffer.fill, 1, buffer.dtype, name, where)
    elif not _FORMULA.match(buffer.fill):
        raise UsageError(f"{where} has the fill {buffer.fill!r}; known are {FILLS}")
    return buffer


def _dtype(name: str, where: str) -> tuple[np.dtype, int]:
    """Return the dtype and how many numbers an element has."""
    if vector := _VECTOR.match(name):
        return np.dtype(VECTORS[vector["of"]]), int(vector["width"])
    if name not in DTYPES:
        vectors = ", ".join(f"{of}2" for of in VECTORS)
        raise UsageError(f"{where} has the dtype {name!r}; known are {', '.join(DTYPES)}, and vectors as {vectors}")
    return np.dtype(name), 1


def _tensor_map(table: Mapping[str, Any], name: str, knobs: Sequence[str], where: str) -> TensorMap:
    dtype, swizzle = _text(table, "dtype", where), table.get("swizzle", 0)
    if dtype not in MAPPED_DTYPES or swizzle not in (0, 32, 64, 128):
        raise UsageError(
            f"{where} has the dtype {dtype!r} and swizzle {swizzle!r}; a tensor map takes "
            f"{', '.join(MAPPED_DTYPES)}, and 0, 32, 64 or 128"
        )
    dims, strides, box = (
        tuple(_expression(size, knobs, f"{where}: {of}") for size in _list(table, of, where))
        for of in ("dims", "strides", "box")
    )
    return TensorMap(name, _text(table, "tensor", where), dtype, dims, strides, box, swizzle)


def _struct(table: Mapping[str, Any], name: str, knobs: Sequence[str], where: str) -> Struct:
    size, parts = _field(table, "bytes", where), []
    for part in _list(table, "parts", where):
        found = _argument(part, knobs, where)
        at = part.get("offset")
        if isinstance(found, Struct) or isinstance(at, bool) or not isinstance(at, int) or at < 0:
            raise UsageError(f"{where}: {found.name} needs an offset of at least 0 bytes, and cannot be a struct")
        parts.append((at, found))
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= LARGEST_STRUCT:
        raise UsageError(f"{where}: bytes is {size!r}; a struct has 1 to {LARGEST_STRUCT}")
    return Struct(name, size, tuple(parts))


def _sizes(table: Mapping[str, Any], name: str, knobs: Sequence[str], where: str) -> tuple[Expression, ...]:
    given = _list(table, name, where)
    if not 1 <= len(given) <= 3:
        raise UsageError(f"{where}: {name} has {len(given)} dimensions; a launch has one to three")
    return tuple(_expression(size, knobs, f"{where}: {name}") for size in given)


def _expression(given: object, knobs: Sequence[str], where: str) -> Expression:
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise UsageError(f"{where} is {given!r}; it must be a number or an expression over the knobs")
    expression = Expression.parse(str(given), where)
    if unknown := sorted(expression.names - set(knobs)):
        raise UsageError(
            f"{where}: `{given}` uses {', '.join(unknown)}, which is not one of the knobs {', '.join(knobs)}"
        )
    return expression


# ── contents of buffers ─────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=32)
def _filled(fill: str, elements: int, dtype: np.dtype, name: str, where: str) -> np.ndarray:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    if fill == "random" and dtype.kind in "iu":  # every bit pattern
        info = np.iinfo(dtype)
        return random.integers(info.min, info.max, elements, dtype=dtype, endpoint=True)
    if fill in ("zero", "zeros"):
        return np.zeros(elements, dtype)
    if fill in ("one", "ones"):
        return np.ones(elements, dtype)
    if fill == "normal":
        return random.standard_normal(elements).astype(dtype)
    if fill in ("random", "uniform"):
        return random.random(elements).astype(dtype)
    try:
        return np.full(elements, float(fill), np.float64).astype(dtype)
    except ValueError:
        raise UsageError(f"{where} has the fill {fill!r}; known are {FILLS}") from None


@lru_cache(maxsize=32)
def _by_formula(fill: str, elements: int, dtype: np.dtype, where: str) -> np.ndarray:
    if elements > LARGEST_FORMULA:
        raise UsageError(f"{where} has {elements} elements by a formula; the limit is {LARGEST_FORMULA}")
    match = _FORMULA.match(fill)
    assert match  # as read_kernel has checked
    formula, exception = match["formula"], _EXCEPTION.search(match["formula"])
    expression = Expression.parse(formula[: exception.start()] if exception else formula, where)
    if unknown := sorted(expression.names - {match["index"]}):
        raise UsageError(f"{where}: `{expression.text}` uses {', '.join(unknown)}; it may use only {match['index']}")
    values = np.array(expression.evaluate_arrays({match["index"]: np.arange(elements)}), np.float64)
    values = np.broadcast_to(values, elements).copy()
    if exception:
        values[0 if exception["which"] == "first" else -1] = float(exception["value"])
    return values.astype(dtype)


# ── GPU.json.gz ─────────────────────────────────────────────────────────────────────────────────────────────────────


def read_recording(path: Path, kernel: RecordedKernel) -> Recording:
    """Read the times of one GPU; an unusable row is left out, and the reason is recorded.

    Raises UsageError if nothing of the file can be used.
    """
    table = _json(path)
    if table.get("unit", "us") != "us":
        raise UsageError(f"{path}: the unit is {table['unit']!r}; times must be in us")
    name = path.name.partition(".json")[0]
    rows: list[Row] = []
    unreadable: list[str] = []
    for number, row in enumerate(_list(table, "rows", str(path)), 1):
        try:
            _add(rows, _row(row, kernel.knobs))
        except UsageError as error:
            unreadable.append(f"row {number}: {error}")
    optimum = table.get("optimum_us")
    return Recording(
        gpu=_gpu(name, table.get("gpu"), path),
        stated_clock=_clock(table, path),
        name=name,
        optimum_us=float(optimum) if optimum is not None and _is_time(optimum) else None,
        rows=tuple(rows),
        unreadable=tuple(unreadable),
    )


def _clock(table: Mapping[str, Any], path: Path) -> Clock | None:
    try:
        return Clock.parse(str(table["clock"])) if "clock" in table else None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _add(rows: list[Row], row: Row) -> None:
    """Raise UsageError if a row before it has the same configuration."""
    if before := next((r for r in rows if r.config == row.config), None):
        ratio = row.time_us / before.time_us
        agrees = "as" if abs(math.log(ratio)) < math.log(CONTRADICTS) else "which contradicts"
        raise UsageError(f"{row.time_us:g} µs, {agrees} {before.time_us:g} µs of an earlier row with its configuration")
    rows.append(row)


def _row(row: object, knobs: Sequence[str]) -> Row:
    config = row.get("config") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(config, dict):
        raise UsageError('it is no {"config": {…}, "time_us": …}')
    if missing := [knob for knob in knobs if not isinstance(config.get(knob), bool | int | float | str)]:
        raise UsageError(f"it has no value of {', '.join(missing)}")
    if not _is_time(row.get("time_us")):
        raise UsageError(f"its time_us is {row.get('time_us')!r}; it must be a number above 0")
    return Row({knob: config[knob] for knob in knobs}, float(row["time_us"]))


def _is_time(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf


def _gpu(name: str, stated: object, path: Path) -> str:
    """Find it by the file's name, else by the name in it; punctuation and case do not matter."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    keys = {plain(key): key for key in known_gpus()} | {plain(g.name): g.key for g in known_gpus().values()}
    keys |= RECORDED_ON
    for candidate in (name, str(stated)):
        if plain(candidate) in keys:
            return keys[plain(candidate)]
    try:
        return find_gpu(name).key
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _json(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        table = json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)
    except OSError as error:  # gzip's own faults are among them
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path} holds no JSON object")
    return table


def _field(table: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in table:
        raise UsageError(f"{where} has no `{name}`")
    return table[name]


def _text(table: Mapping[str, Any], name: str, where: str) -> str:
    text = _field(table, name, where)
    if not isinstance(text, str) or not _IDENTIFIER.match(text):
        raise UsageError(f"{where}: `{name}` is {text!r}; it must be a name")
    return text


def _list(table: Mapping[str, Any], name: str, where: str, otherwise: Sequence[Any] | None = None) -> Sequence[Any]:
    found = _field(table, name, where) if otherwise is None else table.get(name, otherwise)
    if not isinstance(found, list | tuple):
        raise UsageError(f"{where}: `{name}` is {found!r}; it must be a list")
    return found


def _size(expression: Expression, config: Mapping[str, Any], least: int = 1) -> int:
    value = expression.evaluate(config)
    if isinstance(value, str) or value != math.floor(value) or value < least:
        raise UsageError(
            f"{expression.where}: `{expression.text}` is {value!r}; it must be an integer of at least {least}"
        )
    return int(value)


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _as_text(value: object) -> str:
    """Return a macro's text: true and false are 1 and 0, which both C and its preprocessor understand."""
    return str(int(value)) if isinstance(value, bool) else str(value)
