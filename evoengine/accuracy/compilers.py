"""Compile with a chosen NVRTC, such as an old one from a wheel, or with the installed one. Needs no GPU."""

from __future__ import annotations

import base64
import ctypes
import gzip
import hashlib
import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evoengine.errors import UsageError
from evoengine.sandbox.host_compiler import cache_folder, prune
from evoengine.sass.cubin import whole_image
from evoengine.sass.listing import disassemble
from evoengine.stages.compile import CompileFailed
from evoengine.stages.includes import C_HEADERS
from evoengine.stages.toolchain import compiler_version, include_folders, nvrtc

FLAGS = ("--std=c++17",)

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]([\w.]+)[>\"]", re.MULTILINE)

KEPT = 20_000
"""limit of cached binaries with their listings, about 50 KB each"""


@dataclass(frozen=True, slots=True)
class Compiled:
    cubin: bytes
    listing: str
    """the output of nvdisasm -c -hex"""
    seconds: float
    """of compiling and disassembling, when it was done"""


class OldNvrtc:
    """The NVRTC in a library, or in a wheel's folder that holds it."""

    def __init__(self, version: str, path: Path) -> None:
        """Load the NVRTC at `path`. Raises UsageError unless it is one of version `version` (such as 11.8)."""
        library = _library(path)
        try:
            # NVRTC opens its builtins by their bare name, which works only if they are already loaded
            for builtins in sorted(library.parent.glob("libnvrtc-builtins*")):
                ctypes.CDLL(str(builtins))
            self._api = ctypes.CDLL(str(library))
            self._api.nvrtcGetErrorString.restype = ctypes.c_char_p
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._check(self._api.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        except (OSError, AttributeError) as error:
            raise UsageError(f"{library} is not an NVRTC that can be loaded: {error}") from None
        if f"{major.value}.{minor.value}" != version:
            raise UsageError(f"{library} is NVRTC {major.value}.{minor.value}, not {version}; name it so")
        self.name = f"nvrtc {version}"

    def compile(self, text: str, arch: str, options: Sequence[str]) -> bytes:
        """Return the cubin. Raises CompileFailed with the compiler's first error."""
        given = [option.encode() for option in (f"--gpu-architecture={arch}", *FLAGS, *options, *_includes())]
        program = ctypes.c_void_p()
        headers = [
            (ctypes.c_char_p * len(C_HEADERS))(*(each.encode() for each in column))
            for column in (C_HEADERS.values(), C_HEADERS)
        ]
        of_text = text.encode(), b"kernel.cu", len(C_HEADERS), *headers
        self._check(self._api.nvrtcCreateProgram(ctypes.byref(program), *of_text))
        try:
            status = self._api.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
            if status:
                log = self._bytes(program, self._api.nvrtcGetProgramLogSize, self._api.nvrtcGetProgramLog)
                raise CompileFailed(first_error(log.rstrip(b"\0").decode(errors="replace")) or self._error(status))
            return self._bytes(program, self._api.nvrtcGetCUBINSize, self._api.nvrtcGetCUBIN)
        finally:
            self._api.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, size_of: Callable[..., int], get: Callable[..., int]) -> bytes:
        size = ctypes.c_size_t()
        self._check(size_of(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(get(program, text))
        return text.raw

    def _check(self, status: int) -> None:
        if status:
            raise CompileFailed(self._error(status))

    def _error(self, status: int) -> str:
        return str(self._api.nvrtcGetErrorString(status).decode())


class InstalledNvrtc:
    def __init__(self) -> None:
        self.name = compiler_version()

    def compile(self, text: str, arch: str, options: Sequence[str]) -> bytes:
        api = nvrtc()
        headers = (tuple(each.encode() for each in column) for column in (C_HEADERS.values(), C_HEADERS))
        program = api.createProgram(text, "kernel.cu", *headers)
        try:
            api.compileProgram(program, (f"--gpu-architecture={arch}", *FLAGS, *options, *_includes()))
            return whole_image(api.getCUBIN(program))
        except api.NVRTCError as error:
            raise CompileFailed(first_error(api.getProgramLog(program)) or str(error)) from None
        finally:
            api.destroyProgram(program)


def parse_option(text: str) -> tuple[str, Path]:
    """Parse the `11.8=PATH` of --nvrtc."""
    version, given, path = text.partition("=")
    if not given or not path or not re.fullmatch(r"\d+\.\d+", version):
        raise UsageError(f"--nvrtc takes VERSION=LIBRARY, as 11.8=/path/libnvrtc.so.11.2, not {text!r}")
    return version, Path(path)


@cache
def find_nvrtc(version: str | None, paths: tuple[tuple[str, Path], ...]) -> OldNvrtc | InstalledNvrtc:
    """Return the NVRTC of that version where `paths` has it, else the installed one."""
    path = dict(paths).get(version) if version else None
    return OldNvrtc(version, path) if version and path else InstalledNvrtc()


def first_error(log: str) -> str | None:
    return next((line.strip() for line in log.splitlines() if "error" in line.lower()), None)


def _library(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise UsageError(f"there is no {path}; --nvrtc takes an NVRTC library or a folder that holds one")
    found = sorted(p for p in path.rglob("libnvrtc.so*") if p.is_file())
    if not found:
        raise UsageError(f"{path} holds no libnvrtc.so; --nvrtc takes an NVRTC library or a folder that holds one")
    return found[0]


def _includes() -> list[str]:
    return [f"-I{folder}" for folder in include_folders()]


# ── kept between runs ───────────────────────────────────────────────────────────────────────────────────────────────


def compile_and_list(compiler: OldNvrtc | InstalledNvrtc, text: str, arch: str, options: Sequence[str]) -> Compiled:
    """Compile and disassemble, or take both from the user's cache. Raises CompileFailed."""
    # a cached result holds as long as the headers of the C library that the text includes stay as they are
    included = [C_HEADERS[name] for name in _INCLUDE.findall(text) if name in C_HEADERS]
    parts = (compiler.name, arch, *FLAGS, *options, text, *included)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    folder = cache_folder("recorded-kernels")
    kept = folder / f"{key}.json.gz"
    try:
        found = json.loads(gzip.decompress(kept.read_bytes()))
        os.utime(kept)
    except (OSError, ValueError, EOFError, zlib.error):
        found = _compiled(compiler, text, arch, options)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as scratch:
            scratch.write(gzip.compress(json.dumps(found).encode(), 3))
        os.replace(scratch.name, kept)
        prune(folder, "*.json.gz", KEPT)
    if "error" in found:
        raise CompileFailed(found["error"])
    return Compiled(base64.b64decode(found["cubin"]), found["listing"], found["seconds"])


def _compiled(
    compiler: OldNvrtc | InstalledNvrtc, text: str, arch: str, options: Sequence[str]
) -> dict[str, str | float]:
    start = time.perf_counter()
    try:
        cubin = compiler.compile(text, arch, options)
    except CompileFailed as error:
        return {"error": str(error)}
    listing = disassemble(cubin)
    seconds = time.perf_counter() - start
    return {"cubin": base64.b64encode(cubin).decode(), "listing": listing, "seconds": seconds}
