"""Static screens of a candidate's launch and binary, before it runs anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from evoengine.gpu import Gpu
from evoengine.records import Binary, Launch, Source
from evoengine.sass.listing import section
from evoengine.sass.main_loop import GROUP_PRODUCTS, why_slow
from evoengine.space.family import MAX_BLOCK_Z, MAX_GRID_YZ, MAX_THREADS

TENSOR_OPCODES = ("HMMA", "IMMA", "QMMA", *GROUP_PRODUCTS)
SPILL_LIMIT = 0
"""bytes of spills above which a candidate is excluded from a ranking by estimates, which do not include their cost"""

_SERIALISED = re.compile(r"\(C751\d\)")
"""ptxas' remarks that it serialises wgmmas, or spills their accumulators"""


def screen_launch(launch: Launch, gpu: Gpu) -> str | None:
    """Return why the launch cannot succeed on the GPU, or None."""
    for behind in launch.then:
        if why := screen_launch(behind.launch, gpu):
            return f"kernel {behind.entry}: {why}"
    if not 1 <= launch.threads <= MAX_THREADS:
        return f"{launch.threads} threads per block; 1 to {MAX_THREADS} are possible"
    if launch.block[2] > MAX_BLOCK_Z:
        return f"a block of {launch.block[2]} threads along z; {MAX_BLOCK_Z} are possible"
    if launch.shared_bytes > gpu.shared_per_block:
        return f"{launch.shared_bytes} bytes of shared memory per block; {gpu.key} has {gpu.shared_per_block}"
    if max(launch.grid[1:]) > MAX_GRID_YZ:
        return f"grid {launch.grid}; y and z may be {MAX_GRID_YZ} at most"
    return None


def screen_binary(binary: Binary, source: Source, gpu: Gpu, cost: Mapping[str, float], timed: bool) -> str | None:
    """Return why the binary of that source is not worth running, or None.

    With `timed`, spills and slow main loops of wgmma are left to the measurement. `cost` is the space's: its
    `tensor_instructions` states how many products the binary must contain, and its `producer_warpgroups` how many
    warpgroups release registers for the others.
    """

    def first(why_not: Callable[[str, Launch], str | None]) -> str | None:
        """Return what is wrong with the first such kernel; one behind the first is named."""
        for entry, launch in source.launch.kernels(source.entry):
            if why := why_not(entry, launch):
                return why if entry == source.entry else f"kernel {entry}: {why}"
        return None

    if why := first(lambda entry, launch: _screen_resources(binary.of_kernel(entry), launch, gpu)):
        return why
    needed = int(cost.get("tensor_instructions", 0))
    held = sum(count for opcode, count in binary.mix.items() if opcode.partition(".")[0] in TENSOR_OPCODES)
    if binary.mix and held < needed:
        return (
            f"{held} tensor-core instructions where one tile takes {needed}: the compiler dropped products whose "
            'result it takes for unused; an accumulator that inline PTX adds to is "+f", not "=f"'
        )
    if serialised := next((w for w in binary.warnings if _SERIALISED.search(w)), None):
        return f"wgmma does not run beside other work: {serialised}"
    producers = int(cost.get("producer_warpgroups", 0))
    if producers and binary.listing:
        stuck = first(lambda entry, launch: why_stuck(binary.of_kernel(entry), entry, launch, producers))
        if stuck:
            return stuck
    if timed:
        return None
    spilled = binary.spill_bytes + sum(other.spill_bytes for other in binary.others)
    if spilled > SPILL_LIMIT:
        return f"{spilled} bytes of register spills; the limit without a GPU to time on is {SPILL_LIMIT}"
    if not binary.listing or binary.mix.keys().isdisjoint(GROUP_PRODUCTS):
        return None
    return first(lambda entry, _: why_slow(binary.listing, entry))


def _screen_resources(binary: Binary, launch: Launch, gpu: Gpu) -> str | None:
    shared = binary.shared_bytes + launch.shared_bytes
    if shared > gpu.shared_per_block:
        return f"{shared} bytes of shared memory per block, static and dynamic; {gpu.key} has {gpu.shared_per_block}"
    if shared + gpu.shared_reserved > gpu.shared_per_sm:
        taken = f"{shared} bytes of shared memory and {gpu.shared_reserved} reserved"
        return f"{taken}; an SM of {gpu.key} has {gpu.shared_per_sm}"
    if not gpu.blocks_resident(launch.threads, binary.registers, shared):
        total = binary.registers * launch.threads
        each = f"{binary.registers} × {launch.threads} threads"
        return f"{total} registers per block ({each}); {gpu.key} has {gpu.registers_per_sm}"
    return None


# Detect by the listing that warpgroups wait for ever for registers: setmaxnreg requests more than their block has.

WARPGROUP = 128
"""threads"""
_ASKED = re.compile(r"USETMAXREG\.(?P<way>DEALLOC|TRY_ALLOC)\.CTAPOOL (?:UP\w+, )?(?P<count>0x[0-9a-f]+)")


def why_stuck(binary: Binary, entry: str, launch: Launch, producers: int) -> str | None:
    """Return why a block of the kernel `entry`, whose resources the binary has, would wait for ever, or None."""
    asked = list(_ASKED.finditer(section(binary.listing, entry)))
    counts = {way: [int(m["count"], 16) for m in asked if m["way"] == way] for way in ("DEALLOC", "TRY_ALLOC")}
    warpgroups, launched = launch.threads // WARPGROUP, -(-binary.registers // 8) * 8
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
