"""Link a cubin as a driver does: put addresses of device variables and functions into the code.

The executor's counterpart of a loader works on the listing: a relocated immediate `32@lo(name)` of a device variable
becomes its address, and functions in sections of their own are listed with the kernel that calls them.
"""

from __future__ import annotations

import re

from evoengine.sass import elf
from evoengine.sass.cubin import placed_segments
from evoengine.sass.listing import disassemble

_RELOCATED = re.compile(r"(32@(?:lo|hi))\(\(?([^\s()]+)(?: \+ (0x[0-9a-f]+|\d+))?\)?\)")
_CALLED = re.compile(r"\bCALL\.[\w.]+ `\(([^)]+)\)")


def linked_listing(cubin: bytes, entry: str) -> str:
    """Return the listing of a kernel, and of the functions that it calls, with the addresses of device variables.

    Raises as `disassemble` does.
    """
    listing = disassemble(cubin, entry)
    return with_addresses(disassemble(cubin) if calls_others(listing) else listing, cubin)


def calls_others(listing: str) -> bool:
    """Return whether functions are called that the listing does not have."""
    return any(f"\n{name}:\n" not in listing for name in _CALLED.findall(listing))


def with_addresses(listing: str, cubin: bytes) -> str:
    """Return a listing of the cubin with the addresses of device variables."""
    if "32@" not in listing:
        return listing
    addresses = _addresses(cubin)

    def resolved(found: re.Match[str]) -> str:
        if found[2] not in addresses:
            return found[0]
        return f"{found[1]}({addresses[found[2]] + int(found[3] or '0', 0):#x})"

    return _RELOCATED.sub(resolved, listing)


def _addresses(cubin: bytes) -> dict[str, int]:
    """Return the device variables' addresses by name."""
    sections = elf.sections(cubin)
    placed = {segment.name: segment.address for segment in placed_segments(sections)}
    found = {}
    for symbol in elf.symbols(sections):
        name = sections[symbol.section].name if symbol.section < len(sections) else ""
        if (base := placed.get(name)) is not None:
            found[symbol.name] = base + symbol.value
    return found
