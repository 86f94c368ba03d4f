"""Launches that a program repeats, as in the loops of a profiler: what nobody can see any more is not computed.

A launch like one that was executed before waits until the program looks at a tensor or launches again. If what such a
launch writes is gone by then, it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

OWN_REFERENCES = 2
"""to a storage, by a launch that waits: its handle, and the tensor below its memory"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A launch that was put off."""

    written: Sequence[torch.UntypedStorage]
    execute: Callable[[], object]
    drop: Callable[[], object]

    @property
    def is_of_use(self) -> bool:
        """Return whether the program still has a tensor in what the launch writes."""
        return any(references(storage) > OWN_REFERENCES for storage in self.written)


class Repeats:
    """Keep what launches write, by what they are, and the one that waits."""

    def __init__(self) -> None:
        self._written: dict[object, frozenset[str]] = {}
        self._waiting: Waiting | None = None

    def note(self, key: object, written: frozenset[str]) -> None:
        """Remember the names of the storages that a launch has written."""
        self._written[key] = written

    def put_off(
        self,
        key: object,
        fresh: Mapping[str, torch.UntypedStorage],
        execute: Callable[[], None],
        drop: Callable[[], None],
    ) -> bool:
        """Let a launch wait, and return whether it may: one like it was executed, and wrote to fresh memory alone."""
        names = self._written.get(key)
        if not names or not names <= fresh.keys():
            return False
        self.wait(Waiting([fresh[name] for name in names], execute, drop))
        return True

    def wait(self, waiting: Waiting) -> None:
        """Put something off that writes to storages of PyTorch."""
        self.settle()
        self._waiting = waiting

    def settle(self) -> None:
        """Execute the launch that waits, or drop it where nobody can see what it writes."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            (waiting.execute if waiting.is_of_use else waiting.drop)()


def references(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and handles share a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))  # noqa: SLF001 # there is no public one
