"""Memory that a graph writes: what lay there is kept, so that a failed run can be undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Memory(NamedTuple):
    """What a graph writes, with copies of what lay there.

    joined: Tensors of one type, device and shape that are all of their storages, with one copy of all: one
        copy of many costs little more than one of each.
    storages: Other storages, each with its copy.
    counted, versions: The tensors that lie there, and how often each was written.
    """

    joined: list[tuple[list[torch.Tensor], torch.Tensor]]
    storages: list[tuple[torch.UntypedStorage, torch.UntypedStorage]]
    counted: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]


def saved_memory(written: Sequence[torch.Tensor], counted: tuple[torch.Tensor, ...]) -> Memory:
    """Return what lies in the memory of tensors that a graph writes, and how often `counted` were written."""
    joined, others = dict[Any, list[torch.Tensor]](), list[torch.UntypedStorage]()
    for tensor in written:
        storage = tensor.untyped_storage()
        if tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
            joined.setdefault((tensor.dtype, tensor.device, tensor.shape), []).append(tensor)
        else:
            others.append(storage)
    with torch.no_grad():
        copies = [(group, torch.stack(group)) for group in joined.values()]
    copied = [(each, each.clone()) for each in others]  # type: ignore[no-untyped-call]
    return Memory(copies, copied, counted, tuple(tensor._version for tensor in counted))


def restore_memory(saved: Memory) -> None:
    """Put back what `saved_memory` gave."""
    for group, copy in saved.joined:
        for tensor, part in zip(group, copy.unbind(), strict=True):
            tensor.untyped_storage().copy_(part.clone().untyped_storage())
    for storage, before in saved.storages:
        storage.copy_(before)
    torch._C._autograd._unsafe_set_version_counter(saved.counted, saved.versions)
