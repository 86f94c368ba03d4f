"""Kernels in cubins, fatbins, object files and libraries, which are parsed and not loaded, and in PTX."""

from __future__ import annotations

import mmap
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evoengine.cuda_files import assembler
from evoengine.errors import MachineError, UsageError, did_you_mean
from evoengine.gpu import Gpu
from evoengine.sandbox.machine import require_own_end
from evoengine.sass.cubin import Kernel, read_kernels
from evoengine.sass.fatbin import Kind, images
from evoengine.sass.listing import disassemble, section

PTX_SUFFIX = ".ptx"
ASSEMBLING_SECONDS = 120


def kernels_in(path: Path) -> Iterator[Kernel]:
    """Yield the kernels of a file for every architecture in it. Raises UsageError as `find` does."""
    with _named(path):
        for image in images(_mapped(path)):
            if image.kind is Kind.CUBIN:
                yield from read_kernels(image.unpack())


def find(path: Path, entry: str, gpu: Gpu) -> bytes:
    """Return the cubin with the kernel that the GPU would run; PTX is assembled for it.

    Raises UsageError for a file that is damaged, contains no kernel, or has the kernel only for other GPUs, and
    MachineError if PTX is given and ptxas is not installed.
    """
    with _named(path):
        if path.suffix == PTX_SUFFIX:
            return _require_entry(_assembled(path, gpu), entry)
        own = [image for image in images(_mapped(path)) if image.kind is Kind.CUBIN and runs_on(image.arch, gpu)]
        for image in sorted(own, key=lambda image: -image.arch):
            cubin = image.unpack()
            if any(kernel.entry == entry for kernel in read_kernels(cubin)):
                return cubin
        raise UsageError(_why_missing(path, entry, gpu))


def listing_of(path: Path, entry: str, arch: int | None) -> str:
    """Return the machine code of a kernel as text, for an architecture or the newest. Raises as `find` does."""
    with _named(path):
        held = [image for image in images(_mapped(path)) if image.kind is Kind.CUBIN and arch in (None, image.arch)]
        for image in sorted(held, key=lambda image: -image.arch):
            cubin = image.unpack()
            if any(kernel.entry == entry for kernel in read_kernels(cubin)):
                return section(disassemble(cubin, entry), entry)
        names = [kernel.entry for kernel in kernels_in(path)]
        raise UsageError(f"it has no kernel {entry}{f' for sm_{arch}' if arch else ''}{did_you_mean(entry, names)}")


def runs_on(arch: int, gpu: Gpu) -> bool:
    """Return whether the GPU runs machine code for that architecture: its own, or an earlier minor version."""
    return arch // 10 == gpu.capability // 10 and arch <= gpu.capability


def _why_missing(path: Path, entry: str, gpu: Gpu) -> str:
    found: dict[str, list[int]] = {}
    for kernel in kernels_in(path):
        found.setdefault(kernel.entry, []).append(kernel.arch)
    if entry in found:
        archs = " and ".join(f"sm_{arch}" for arch in sorted(set(found[entry])))
        return f"it has {entry} for {archs}, which {gpu.key} (sm_{gpu.capability}) does not run; name another --gpu"
    if not found:
        return "it has no kernel as machine code"
    return f"it has no kernel {entry}{did_you_mean(entry, found) or f'; it has {len(found)}'} (evoengine cubins {path})"


def _require_entry(cubin: bytes, entry: str) -> bytes:
    names = [kernel.entry for kernel in read_kernels(cubin)]
    if entry not in names:
        raise UsageError(f"it has no kernel {entry}: it has {', '.join(names) or 'none'}{did_you_mean(entry, names)}")
    return cubin


def _mapped(path: Path) -> memoryview:
    """Return the file's bytes, read on demand."""
    if not path.is_file():
        raise UsageError("there is no such file")
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError:
        raise UsageError("it is empty") from None
    except OSError as error:
        raise UsageError(f"it cannot be read: {error.strerror}") from None


def _assembled(path: Path, gpu: Gpu) -> bytes:
    tool = assembler()
    if tool is None:
        raise MachineError("PTX is assembled by ptxas, which was not found: pip install nvidia-cuda-nvcc, or Triton")
    with tempfile.TemporaryDirectory(prefix="evoengine-") as folder:
        made = Path(folder, "kernel.cubin")
        command = [tool, f"-arch={gpu.arch}", "-lineinfo", "-o", str(made), str(path)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=ASSEMBLING_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"ptxas took longer than {ASSEMBLING_SECONDS} s for it") from None
        require_own_end(tool, done.returncode)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise UsageError(f"ptxas refuses it: {said[0] if said else f'exit code {done.returncode}'}")
        return made.read_bytes()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Prefix error messages with the file's name."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
