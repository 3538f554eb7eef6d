"""Memory that a graph writes: what lay there is kept, so that a failed run can be undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ladder.runtime.snapshot import Snapshot, identical


class Memory(NamedTuple):
    """What a graph writes, with copies of what lay there.

    joined: Tensors of one type, device and shape that are all of their storages, with one copy of all: one
        copy of many costs little more than one of each.
    storages: Other storages, each with its copy.
    """

    joined: list[tuple[list[torch.Tensor], torch.Tensor]]
    storages: list[tuple[torch.UntypedStorage, torch.UntypedStorage]]


class Written:
    """The tensors that a graph writes; how they can be copied is found out once for the same tensors."""

    def __init__(self) -> None:
        self._known: list[torch.Tensor] = []
        self._snapshot = Snapshot(())
        self._joined: list[list[torch.Tensor]] = []
        self._others: list[torch.Tensor] = []

    def arrange(self, written: Sequence[torch.Tensor]) -> None:
        """Look how tensors lie, where they are others or lie otherwise than in the call before."""
        found = [*written]
        if identical(found, self._known) and self._snapshot.holds():
            return
        if not identical(found, self._known):
            self._known, self._snapshot = found, Snapshot(found)
        self._snapshot.renew()
        joined = dict[Any, list[torch.Tensor]]()
        self._others = []
        for tensor in found:
            if tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes():
                joined.setdefault((tensor.dtype, tensor.device, tensor.shape), []).append(tensor)
            else:
                self._others.append(tensor)
        self._joined = [*joined.values()]

    def saved(self) -> Memory:
        """Return copies of what lies there now."""
        with torch.no_grad():
            copies = [(group, torch.stack(group)) for group in self._joined]
        storages = [tensor.untyped_storage() for tensor in self._others]
        return Memory(copies, [(each, each.clone()) for each in storages])  # type: ignore[no-untyped-call]


def saved_memory(tensors: Written, written: Sequence[torch.Tensor]) -> Memory:
    """Return what lies in the memory of tensors that a graph writes."""
    tensors.arrange(written)
    return tensors.saved()


def restore_memory(saved: Memory) -> None:
    """Put back what `saved_memory` gave."""
    for group, copy in saved.joined:
        for tensor, part in zip(group, copy.unbind(), strict=True):
            tensor.untyped_storage().copy_(part.clone().untyped_storage())
    for storage, before in saved.storages:
        storage.copy_(before)
