"""Run rounds on a device that launches one kernel at a time and keeps no record of stores, as a GPU does.

Memory is passed back in from launch to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from evoengine.devices.base import (
    Argument,
    Executed,
    KernelCall,
    Round,
    RunRounds,
    ScratchArgument,
    TensorArgument,
    Tensors,
)

LaunchOne = Callable[[KernelCall, int], Tensors]
"""runs one kernel; outputs initially have the contents of their arguments"""
POISONS = (0xFF, 0xA5)
"""an element that keeps both was not written"""


def rounds_by_launches(launch: LaunchOne) -> RunRounds:
    """Return a `RunRounds` that makes one launch for each kernel."""

    def run(rounds: Sequence[Round], seed: int) -> Executed:
        memory: dict[str, np.ndarray] = {}
        found = [dict(_run_round(launch, one, memory, seed)) for one in rounds]
        return Executed(found, _unwritten(launch, rounds[0], found[0], seed))

    return run


def _run_round(launch: LaunchOne, calls: Round, memory: dict[str, np.ndarray], seed: int) -> Tensors:
    found: dict[str, np.ndarray] = {}
    for call in calls:
        arguments = [_with_memory(argument, memory) for argument in call.arguments]
        after = launch(KernelCall(call.entry, call.launch, arguments), seed)
        outputs = {a.name for a in arguments if isinstance(a, TensorArgument) and a.output}
        memory.update({name: data for name, data in after.items() if name in outputs})
        found.update(after)
    return found


def _with_memory(argument: Argument, memory: dict[str, np.ndarray]) -> Argument:
    if isinstance(argument, ScratchArgument):
        fresh = np.full(argument.bytes, 0 if argument.zeroed else POISONS[0], np.uint8)
        return TensorArgument(argument.name, memory.get(argument.name, fresh), output=True)
    if isinstance(argument, TensorArgument) and argument.output and argument.name in memory:
        return replace(argument, data=memory[argument.name])
    return argument


def _unwritten(launch: LaunchOne, calls: Round, after: Tensors, seed: int) -> dict[str, int]:
    """Return how many elements of each output hold the poison that was there, whichever poison it was."""
    outputs = {a.name: a.data for call in calls for a in call.arguments if isinstance(a, TensorArgument) and a.output}
    kept = {name: _equal(after[name], data) for name, data in outputs.items()}
    if not any(mask.any() for mask in kept.values()):
        return {}
    other = {name: np.full(data.nbytes, POISONS[1], np.uint8).view(data.dtype) for name, data in outputs.items()}
    memory = {name: data.reshape(outputs[name].shape) for name, data in other.items()}
    poisoned = dict(memory)
    again = _run_round(launch, calls, memory, seed)
    counts = {name: int((mask & _equal(again[name], poisoned[name])).sum()) for name, mask in kept.items()}
    return {name: count for name, count in counts.items() if count}


def _equal(found: np.ndarray, poison: np.ndarray) -> np.ndarray:
    """Return which elements have the poison's bits."""
    bits = np.dtype(f"u{poison.dtype.itemsize}")
    equal: np.ndarray = found.view(bits) == poison.view(bits)
    return equal
