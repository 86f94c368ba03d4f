"""Detect by the listing that warpgroups wait for ever for registers: setmaxnreg requests more than their block has."""

from __future__ import annotations

import re

from evoengine.records import Binary, Source
from evoengine.sass.listing import section

WARPGROUP = 128
"""threads"""
_ASKED = re.compile(r"USETMAXREG\.(?P<way>DEALLOC|TRY_ALLOC)\.CTAPOOL (?:UP\w+, )?(?P<count>0x[0-9a-f]+)")


def why_stuck(binary: Binary, source: Source, producers: int) -> str | None:
    """Return why a block would wait for registers for ever, or None."""
    asked = list(_ASKED.finditer(section(binary.listing, source.entry)))
    counts = {way: [int(m["count"], 16) for m in asked if m["way"] == way] for way in ("DEALLOC", "TRY_ALLOC")}
    warpgroups, launched = source.launch.threads // WARPGROUP, -(-binary.registers // 8) * 8
    if not counts["TRY_ALLOC"] or not 0 < producers < warpgroups:
        return None
    kept, taken = max(counts["DEALLOC"], default=launched), max(counts["TRY_ALLOC"])
    wanted, there = producers * kept + (warpgroups - producers) * taken, warpgroups * launched
    if wanted <= there:
        return None
    return (
        f"setmaxnreg asks for {wanted} registers in all, {kept} for each of {producers} and {taken} for each of "
        f"{warpgroups - producers} warpgroups, of {there} that {warpgroups} are launched with: the block waits for ever"
    )
