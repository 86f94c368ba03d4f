"""Profile a kernel by the model of its chip: how busy each pipe is, and where and why warps wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from evoengine.errors import EvoengineError
from evoengine.gpu import Gpu
from evoengine.records import Binary, CompiledCandidate, Profile
from evoengine.sass.core import Program
from evoengine.sass.listing import instructions, listing_of
from evoengine.sass.model import Timed, addresses, stall_names
from evoengine.sass.predict import Prediction, Unpredictable
from evoengine.stages.predict import model_name, predict_binary
from evoengine.workloads.base import Target

HOTTEST = 15
"""number of instructions on the page"""
LONGEST = 60
"""characters of an instruction's text"""
REASONS = 3
"""number of displayed reasons of an instruction's waiting"""
NOTABLE = 0.01
"""share of an instruction's waiting from which on a reason is displayed"""
READY = "not selected"
"""the reason of warps that could issue but were not selected"""
COUNTS = {
    "warp instructions": "instructions",
    "shared memory accesses": "shared_accesses",
    "shared memory wavefronts": "wavefronts",
    "sectors loaded": "sectors_loaded",
    "sectors stored": "sectors_stored",
    "local memory accesses": "local_accesses",
    "bytes loaded by TMA": "tensor_bytes_loaded",
    "bytes stored by TMA": "tensor_bytes_stored",
    "barriers": "barriers",
}
"""counts per block: name on the page → the core's name"""

REMARKS = (
    "by the model of the chip from the machine code, not observed on a GPU",
    "inputs are drawn: a kernel whose branches follow its data may do more or less on yours",
)


def model_profile(target: Target, contender: CompiledCandidate) -> Profile:
    """Return the model's profile.

    Raises Unpredictable if the model cannot read the binary, as `predict_binary` does.
    """
    listed = replace(contender, binary=_with_listing(contender.binary))
    prediction = predict_binary(target, listed)
    figures = dict(_of_launch(prediction, listed, target.gpu))
    figures |= figures_of(prediction, listed.binary.listing, listed.source.entry)
    return Profile("model", model_name(target.gpu, prediction.clock), figures, REMARKS)


def figures_of(prediction: Prediction, listing: str, entry: str) -> dict[str, float]:
    """Return how busy each pipe is, what a block does, and where and why warps wait, of a kernel in a listing."""
    figures = {f"{pipe}, % busy": 100 * share for pipe, share in prediction.shares.items()}
    figures |= {f"{name} per block": prediction.counts[own] for name, own in COUNTS.items() if prediction.counts[own]}
    assert prediction.timed is not None  # a new prediction has it
    figures |= dict(_waits(prediction.timed))
    return figures | dict(_hottest(prediction.timed, listing, entry))


def _with_listing(binary: Binary) -> Binary:
    """Return the binary with its listing, which the ledger does not store."""
    try:
        return replace(binary, listing=listing_of(binary))
    except EvoengineError as error:
        raise Unpredictable(str(error)) from error


def _of_launch(prediction: Prediction, contender: CompiledCandidate, gpu: Gpu) -> Iterator[tuple[str, float]]:
    binary, launch = contender.binary, contender.source.launch
    yield "predicted time, µs", prediction.time_us
    yield "shortest, µs", prediction.low_us
    yield "longest, µs", prediction.high_us
    yield "clocks", prediction.clocks
    yield "clock, GHz", prediction.ghz
    yield "waves", prediction.waves
    yield "blocks per SM", float(prediction.blocks_per_sm)
    yield (
        "possible occupancy %",
        100 * gpu.occupancy(launch.threads, binary.registers, binary.shared_bytes + launch.shared_bytes),
    )
    yield "registers per thread", float(binary.registers)
    yield "spilled bytes per thread", float(binary.spill_bytes)


def _waits(timed: Timed) -> Iterator[tuple[str, float]]:
    """Yield the percentage of all warps' stalls by reason, longest first."""
    of_reasons = timed.stalls.sum(axis=0)
    total = of_reasons.sum()
    for reason, clocks in sorted(zip(stall_names(), of_reasons, strict=True), key=lambda item: -item[1]):
        if clocks > 0:
            yield f"waiting: {reason}, % of warps' clocks", float(100 * clocks / total)


def _hottest(timed: Timed, listing: str, entry: str) -> Iterator[tuple[str, float]]:
    """Yield the instructions with the longest stalls: address, text, issues and reasons → percentage of all stalls."""
    texts = {i.address: " ".join(i.text.split())[:LONGEST] for i in instructions(listing, entry)}
    at = addresses(Program(listing, entry))
    names = stall_names()
    waits = np.where([name == READY for name in names], 0.0, timed.stalls)
    of_instructions = waits.sum(axis=1)
    total = of_instructions.sum()
    for n in np.argsort(-of_instructions, kind="stable")[:HOTTEST]:
        if of_instructions[n] > 0:
            place = f"{at[n]:#07x} {texts.get(at[n], '')} · issued {timed.issues[n]}"
            yield f"{place} · {_reasons(names, waits[n])}, % of waits", float(100 * of_instructions[n] / total)


def _reasons(names: Sequence[str], waits: np.ndarray) -> str:
    """Return `wgmma 81%, mbarrier 12%`."""
    longest = [n for n in np.argsort(-waits, kind="stable")[:REASONS] if waits[n] > NOTABLE * waits.sum()]
    return ", ".join(f"{names[n]} {waits[n] / waits.sum():.0%}" for n in longest)
