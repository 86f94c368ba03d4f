"""Read a GPU that gpus.toml lacks from a file of the same form: one table with its limits and peaks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.gpu import AUTO, WARP, Gpu, known_gpus
from evoengine.sandbox.untrusted import parse_toml

MOST_BYTES = 65_536
"""size limit of the file; a board takes some 400"""
NUMBERS: Mapping[str, tuple[float, float]] = {
    "sms": (1, 4096),
    "clock_ghz": (0.01, 20),
    "tensor_tflops": (0.001, 1e6),
    "fp32_tflops": (0.001, 1e6),
    "memory_gbs": (0.1, 1e6),
    "shared_per_block": (1024, 2**20),
    "shared_per_sm": (1024, 2**20),
    "registers_per_sm": (1024, 2**20),
    "threads_per_sm": (WARP, 8192),
    "blocks_per_sm": (1, 128),
}
"""minimum and maximum of each field: within them lies every board, and outside most values in a wrong unit"""
LIMITS = ("shared_per_block", "shared_per_sm", "registers_per_sm", "threads_per_sm", "blocks_per_sm")
"""fields that depend only on the architecture"""
_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}\Z")
_ARCH = re.compile(r"sm_(?!90\Z)\d{2,3}[af]?\Z")


def read_gpu_file(path: Path) -> Gpu:
    """Return the GPU that the file describes.

    Raises UsageError naming what is wrong with it and what would be right.
    """
    table = _read(path)
    if len(table) != 1:
        found = f"it has {', '.join(map(repr, table))}" if 0 < len(table) <= 20 else f"it has {len(table)} entries"
        raise UsageError(f"{path} must describe one GPU, as a table [NAME] of evoengine/gpus.toml does; {found}")
    ((key, row),) = table.items()
    return checked_gpu(key, row, str(path))


def checked_gpu(key: object, row: object, where: str) -> Gpu:
    """Return the GPU of that name with the fields of `row`, those of `Gpu`; `where` names their origin.

    Raises UsageError for the first field that is missing, unknown or out of range.
    """
    if not isinstance(key, str) or not _KEY.match(key) or key == AUTO:
        raise UsageError(
            f"{where} names its GPU {_short(key)}; a name has up to 40 of a-z, 0-9, dot, dash and underscore, and "
            f"is not {AUTO}"
        )
    if not isinstance(row, dict):
        raise UsageError(f"{where} gives {key} as {_short(row)}; it must be a table [{key}] with the fields of a GPU")
    if key in known_gpus():
        raise UsageError(f"{where} describes {key}, which evoengine has already; give the board another name")
    names = [f.name for f in fields(Gpu) if f.name != "key"]
    for name in row:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"a GPU has {', '.join(names)}"
            raise UsageError(f"{where}: [{key}] has {_short(name)}, which is not a field of a GPU; {hint}")
    if missing := [name for name in names if name not in row]:
        raise UsageError(f"{where}: [{key}] does not give {', '.join(missing)}")
    _check_name(row["name"], f"{where}: [{key}]")
    _check_arch(row["arch"], f"{where}: [{key}]")
    for name, (least, most) in NUMBERS.items():
        _check_number(name, row[name], least, most, f"{where}: [{key}]")
    gpu = Gpu(key=key, **row)
    _check_limits(gpu, f"{where}: [{key}]")
    return gpu


def stored_fields(stored: object, where: str) -> Gpu:
    """Return the GPU with these fields, its name included. Raises UsageError where `stored` describes none."""
    if not isinstance(stored, dict):
        raise UsageError(f"{where} is {_short(stored)}, which describes no GPU")
    return checked_gpu(stored.get("key"), {name: value for name, value in stored.items() if name != "key"}, where)


def _read(path: Path) -> dict[str, Any]:
    if path.is_fifo() or path.is_socket():
        raise UsageError(f"{path} is not a file; --gpu-file takes a TOML file")
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; --gpu-file takes a TOML file") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} has more than {MOST_BYTES} bytes; a file with one GPU takes some 400")
    try:
        return parse_toml(data.decode())
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text; --gpu-file takes a TOML file") from None
    except ValueError as error:
        raise UsageError(f"{path} is not a TOML file: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return _short(str(error).partition("\n")[0]).strip("'\"")


def _check_name(name: object, where: str) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= 100 or not name.isprintable() or name != name.strip():
        raise UsageError(
            f"{where} has the name {_short(name)}; it must be up to 100 printable characters, as the driver has it"
        )


def _check_arch(arch: object, where: str) -> None:
    if not isinstance(arch, str) or not _ARCH.match(arch):
        raise UsageError(f"{where} has the arch {_short(arch)}; it must be like sm_86, and for Hopper sm_90a")


def _check_number(name: str, value: object, least: float, most: float, where: str) -> None:
    whole = isinstance(least, int) and isinstance(most, int)
    kind = "a whole number" if whole else "a number"
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if number is None or (whole and not isinstance(number, int)) or not least <= number <= most:
        raise UsageError(f"{where} has {name} {_short(value)}; it must be {kind} from {least:,} to {most:,}")


def _check_limits(gpu: Gpu, where: str) -> None:
    if gpu.threads_per_sm % WARP:
        raise UsageError(f"{where} has threads_per_sm {gpu.threads_per_sm}; it must be a multiple of {WARP}")
    needed = gpu.shared_per_block + gpu.shared_reserved
    if needed > gpu.shared_per_sm:
        raise UsageError(
            f"{where} has shared_per_block {gpu.shared_per_block}, with the driver's {gpu.shared_reserved} more than "
            f"shared_per_sm {gpu.shared_per_sm}"
        )
    same = next((known for known in known_gpus().values() if known.capability == gpu.capability), None)
    for name in LIMITS if same else ():
        if getattr(gpu, name) > getattr(same, name):
            raise UsageError(
                f"{where} has {name} {getattr(gpu, name)}; a GPU of {gpu.arch} has at most {getattr(same, name)}"
            )


def _short(value: object) -> str:
    text = ascii(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of more than 20 digits"
    return text if len(text) <= 80 else f"{text[:77]}…"
