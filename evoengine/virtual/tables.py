"""Tables of pointers: tensors of which a program took the address, and where these addresses stand.

A kernel may be given addresses as integers, as those of the tutorial of grouped products are. Tensors whose address was
asked for are remembered; a launch that gets such an address, in a tensor of 64-bit integers or as a number, has that
tensor in its memory, at the address that it has on the CPU. The gate takes the tensors of such a table for arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef


class KnownAddresses:
    """Storages and tensors whose address a program has asked for, as long as they live."""

    def __init__(self) -> None:
        self._refs: dict[int, StorageWeakRef] = {}
        self._tensors: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember each tensor whose `data_ptr` is called."""
        own = torch.Tensor.data_ptr

        def data_ptr(tensor: torch.Tensor) -> int:
            if tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._refs[storage.data_ptr()] = StorageWeakRef(storage)
                self._tensors[own(tensor)] = tensor
            return own(tensor)

        with mock.patch.object(torch.Tensor, "data_ptr", data_ptr):
            yield

    def tensors_at(self, addresses: np.ndarray) -> list[torch.Tensor]:
        """Return the tensors that begin at these addresses, [n] int64; none unless all are known."""
        known = [tensor for address in addresses.tolist() if (tensor := self._tensors.get(address)) is not None]
        return known if len(known) == addresses.size else []

    def storages_at(self, addresses: np.ndarray) -> list[torch.UntypedStorage]:
        """Return the storages that hold one of these addresses, [n] int64."""
        live = self._live()
        if not live or not addresses.size:
            return []
        starts = np.array(sorted(live), np.int64)
        at = np.searchsorted(starts, np.unique(addresses), side="right") - 1
        found = {int(starts[n]) for n in set(at.tolist()) if n >= 0}
        unique = np.unique(addresses)
        return [
            live[start]
            for start in sorted(found)
            if ((unique >= start) & (unique < start + live[start].nbytes())).any()
        ]

    def _live(self) -> dict[int, torch.UntypedStorage]:
        self._refs = {start: ref for start, ref in self._refs.items() if not ref.expired()}
        found: dict[int, torch.UntypedStorage] = {}
        for start, ref in self._refs.items():
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)  # noqa: SLF001 # torch's own way
            if storage is not None and storage.nbytes():
                found[start] = storage
        return found
