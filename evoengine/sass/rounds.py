"""Execute rounds of launches: kernels in stream order over the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from evoengine.devices.base import VISIT, Executed, KernelCall, KernelCrashed, Round, TensorArgument
from evoengine.devices.pool import BlockLaunch, BlockTrace, read_traces
from evoengine.errors import UsageError
from evoengine.sass import core
from evoengine.sass.cubin import Kernel
from evoengine.sass.launch import Memory, prepare

_ALL_BYTES = 0xF
"""of a word, in `Allocation.written`"""


class Executable(NamedTuple):
    """One kernel of a binary."""

    kernel: Kernel
    program: core.Program


def run_rounds(executables: Mapping[str, Executable], rounds: Sequence[Round], seed: int) -> Executed:
    """Run the rounds over the same memory, as `RunRounds` says; `executables` by entry, all of one binary.

    `seed` draws placement and schedules. Raises KernelCrashed and KernelHung with the reason and the place, which name
    race, hazard or access; KernelUnbuildable for a tensor map that cannot be.
    """
    try:
        memory = Memory(((executables[c.entry].kernel, c.arguments) for calls in rounds for c in calls), seed)
        written = memory.watch(_outputs(rounds[0]))
        tensors, visits = [], []
        for number, calls in enumerate(rounds):
            found: dict[str, np.ndarray] = {}
            memory.refill(a for call in calls for a in call.arguments)
            for place, call in enumerate(calls):
                visited, after = _run(executables[call.entry], call, memory, seed + 1000 * number + place)
                found.update(after)
                if number == 0:
                    visits.append(visited)
            outputs = _outputs(calls)
            tensors.append({name: data.copy() if name in outputs else data for name, data in found.items()})
            if number == 0:
                unwritten = _unwritten(calls, written)
                memory.watch(())
    except UsageError as error:
        raise KernelCrashed(str(error)) from error
    return Executed(tensors, unwritten, np.concatenate(visits) if visits else np.empty(0, VISIT))


def run_blocks(executable: Executable, asked: BlockLaunch, seed: int) -> list[BlockTrace]:
    """Return what each of the blocks touches, run by itself or as `together` says. Raises as `run_rounds` does."""
    try:
        memory = Memory([(executable.kernel, asked.arguments)], seed, asked.numbers)
        launch = prepare(executable.kernel, asked.launch, asked.arguments, seed, memory=memory)
        traces = core.run_blocks(executable.program, launch, asked.blocks, asked.pool.pages, asked.together, asked.held)
    except UsageError as error:
        raise KernelCrashed(str(error)) from error
    return read_traces(traces, asked)


def _run(
    executable: Executable, call: KernelCall, memory: Memory, seed: int
) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
    launch = prepare(executable.kernel, call.launch, call.arguments, seed, memory=memory)
    return core.run(executable.program, launch), launch.results()


def _outputs(calls: Round) -> dict[str, TensorArgument]:
    return {a.name: a for call in calls for a in call.arguments if isinstance(a, TensorArgument) and a.output}


def _unwritten(calls: Round, written: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return how many elements of each output have a byte that no launch has stored to."""
    counts = {}
    for name, argument in _outputs(calls).items():
        if (written[name] == _ALL_BYTES).all():
            continue
        size = argument.data.itemsize
        stored = np.unpackbits(written[name][:, None], axis=1, count=4, bitorder="little").reshape(-1)
        counts[name] = int((~stored[: argument.data.nbytes].reshape(-1, size).all(axis=1)).sum())
    return {name: count for name, count in counts.items() if count}
