"""The tensors from outside that a segment has met, and which of them lie in given memory."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from operator import attrgetter

import torch

from ladder.capture.heap.nodes import Node
from ladder.capture.values.aliasing import storage_of

_MEMORY = torch._C.TensorBase.untyped_storage
_KEY = attrgetter("_cdata")


class TensorNodes(list[Node]):
    """Nodes of tensors, in the order in which they were met."""

    def __init__(self) -> None:
        super().__init__()
        self._lying: list[Node] = []
        self._plain: list[torch.Tensor] = []
        self._others = self._looked_at = 0

    def in_memory(self, storages: AbstractSet[int]) -> list[Node]:
        """Return the nodes whose tensors lie in one of `storages`, keys of `storage_of`.

        Most operators write none of them: native code finds that, and looks at all of them, for a tensor
        may be given other memory.
        """
        if not storages:
            return []
        self._look_at_new()
        if self._others:
            return [node for node in self if _is_strided(node.obj) and storage_of(node.obj) in storages]
        keys = [*map(_KEY, map(_MEMORY, self._plain))]
        if storages.isdisjoint(keys):
            return []
        return [node for node, key in zip(self._lying, keys, strict=True) if key in storages]

    def _look_at_new(self) -> None:
        for node in self[self._looked_at :]:
            if not _is_strided(node.obj):
                continue  # it lies in no memory, now or later
            if torch._C._functorch.is_batchedtensor(node.obj):
                self._others += 1  # what it holds lies in memory
            else:
                self._lying.append(node)
                self._plain.append(node.obj)
        self._looked_at = len(self)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
