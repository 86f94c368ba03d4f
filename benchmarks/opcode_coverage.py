"""Of how many kernels in binaries of others the executor knows every instruction.

pip download --no-deps bitsandbytes torchao xformers    # and unpack them
python -m benchmarks.opcode_coverage [--arch 90] [--every N] FILE…
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from evoengine.errors import UsageError
from evoengine.sass.core import Program
from evoengine.sass.cubin import read_kernels
from evoengine.sass.fatbin import Kind, images
from evoengine.sass.listing import calls_others, disassemble, with_addresses

SECTION = "\t.section\t.text."


@dataclass
class Coverage:
    """Of one file."""

    kernels: int = 0
    whole: int = 0
    instructions: Counter[str] = field(default_factory=Counter)
    """unknown opcode → how often it occurs"""
    lacking: Counter[str] = field(default_factory=Counter)
    """unknown opcode → kernels that have it"""


def cubins(file: Path, arch: int, every: int) -> Iterator[bytes]:
    """Each cubin of the architecture once, or each `every`-th."""
    seen = set()
    held = [i for i in images(memoryview(file.read_bytes())) if i.kind is Kind.CUBIN and i.arch == arch]
    for image in held[::every]:
        cubin = image.unpack()
        key = hashlib.sha256(cubin).digest()
        if key not in seen:
            seen.add(key)
            yield cubin


def by_kernel(listing: str) -> dict[str, str]:
    """The parts of a listing, each with the section of one kernel."""
    parts = listing.split(SECTION)[1:]
    return {re.split('[,"]', part, maxsplit=1)[0]: SECTION + part for part in parts}


def covered(file: Path, arch: int, every: int) -> Coverage:
    found = Coverage()
    for cubin in cubins(file, arch, every):
        kernels = read_kernels(cubin)
        if not kernels:
            continue
        try:
            whole = with_addresses(disassemble(cubin), cubin)
        except UsageError as error:
            print(f"{file.name}: {len(kernels)} kernels: {error}")
            continue
        parts = by_kernel(whole)
        for kernel in kernels:
            own = parts[kernel.entry]
            unknown = Program(whole if calls_others(own) else own, kernel.entry).unknown
            found.kernels += 1
            found.whole += not unknown
            found.instructions.update(unknown)
            found.lacking.update(unknown.keys())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--every", type=int, default=1, help="take each N-th cubin of a file")
    given = parser.parse_args()
    print("| file | kernels | every instruction known | unknown: kernels that have it |\n|---|---|---|---|")
    for file in given.files:
        c = covered(file, given.arch, given.every)
        if c.kernels:
            unknown = ", ".join(f"`{name}` {count}" for name, count in c.lacking.most_common())
            print(
                f"| {file.name} | {c.kernels} | {c.whole} ({100 * c.whole / c.kernels:.1f} %) | {unknown} |", flush=True
            )


if __name__ == "__main__":
    main()
