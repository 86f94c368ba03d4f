"""Read untrusted files, JSON and TOML within limits, and reject content that would fail later.

Python's parsers accept duplicate keys, unpaired surrogates and thousands of nested brackets, which databases, other
programs or the stack cannot handle.
"""

from __future__ import annotations

import io
import json
import stat
import tomllib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LARGEST_TEXT = 4 << 20
"""bytes of a hand-written text: a kernel, a space, a description"""
DEEPEST = 64
"""nesting depth of lists and objects; evoengine's own formats have 9"""
MOST_VALUES = 20_000_000
"""values of one JSON text; a recorded space of 100,000 configurations with 32 samples each has 5,000,000"""
_CHUNK = 1 << 20


def read_limited(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """Return the bytes of a regular file.

    Raises OSError if it cannot be read, ValueError if it has more than `most` bytes, or is a pipe or a device.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a pipe would wait for somebody to write into it
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise ValueError(f"it has more than {most >> 20} MiB")
    return raw


def read_limited_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """Return text as `read_limited` does. Raises UnicodeDecodeError, a ValueError, if it is not UTF-8."""
    return read_limited(path, most).decode()


def unpack_limited(packed: bytes, most: int) -> bytes:
    """Return the contents of a gzip file, or as much as there is of a truncated one.

    Raises ValueError if they have more than `most` bytes, or are damaged.
    """
    for _ in _unpacked(packed, most):
        pass  # count first, so that a decompression bomb is refused before it fills the memory
    return b"".join(_unpacked(packed, most))


def _unpacked(raw: bytes, most: int) -> Iterator[bytes]:
    size, packed = 0, io.BytesIO(raw)
    unpacker, rest = zlib.decompressobj(wbits=31), b""
    while rest or (rest := packed.read(_CHUNK)):
        try:
            part = unpacker.decompress(rest, _CHUNK)
        except zlib.error as error:
            raise ValueError("it is gzipped and damaged within") from error
        size += len(part)
        if size > most:
            raise ValueError(f"it has more than {most >> 20} MiB unpacked")
        yield part
        rest = unpacker.unconsumed_tail
        if unpacker.eof:  # the next member of the file, or zeros that fill it up
            rest, unpacker = unpacker.unused_data.lstrip(b"\0"), zlib.decompressobj(wbits=31)


def parse_json(text: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse a JSON text. `parse_constant` is called for NaN and infinities, which are numbers without it.

    Raises JSONDecodeError for invalid JSON, else ValueError with the reason: a duplicate key in an object, half of a
    surrogate pair, the character U+0000, too many values, too deep a nesting, a number too long.
    """
    if text.count(",") >= MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")
    try:
        value = json.loads(text, parse_constant=parse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise _in_plain_words(error) from None
    _require_shallow(value)
    lowered = text.lower() if "\\u" in text else ""
    if "\\ud" in lowered or "\\u0000" in lowered:
        _require_characters(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text. Raises ValueError if it is invalid, nests too deeply or has a number too long."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise _in_plain_words(error) from None


def _in_plain_words(error: ValueError) -> ValueError:
    """Return a clearer message than Python's for a number with too many digits."""
    return ValueError("it has a number of thousands of digits") if "set_int_max_str_digits" in str(error) else error


_TOO_DEEP = f"its lists and objects are nested more than {DEEPEST} deep"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in made if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice[:60]!r} twice")
    return made


def _containers(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list)]


def _require_shallow(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        if not level:
            return
        level = [child for each in level for child in _containers(each)]
    raise ValueError(_TOO_DEEP)


def _require_characters(value: Any) -> None:
    level = [[value]]
    while level:
        for each in level:
            children = [*each, *each.values()] if isinstance(each, dict) else each
            for text in children:
                if isinstance(text, str):
                    require_text(text)
        level = [child for each in level for child in _containers(each)]


def require_text(text: str) -> None:
    """Raise ValueError if a text contains characters that databases reject."""
    if "\0" in text:
        raise ValueError(f"{text[:60]!r} holds the character U+0000, which is not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[:60]!r} holds half of a surrogate pair, U+{ord(text[error.start]):04X}") from None
