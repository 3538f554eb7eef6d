"""Writes that torch does not count: through ``.data``, and into tensors made in inference mode.

What a plan makes of weights (other orders, sums, matrices side by side) is made again when a weight was
changed. Torch's counters miss these writes. Reads of ``data`` of parameters are counted (`DataReads`), and a
few elements of each weight are compared, so that whatever goes over a whole weight is noticed on CPUs. Not
noticed are single elements of tensors that are no parameters, and, on GPUs, writes into inference tensors,
through ``data`` of buffers, and by other libraries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

import torch

from ladder.runtime.model.data_reads import DataReads
from ladder.runtime.snapshot import Snapshot, Tensors, identical

ELEMENTS = 8
"""Of each weight that are looked at."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> what it is compared as: NaN equals itself."""


class Probes:
    """Some elements of tensors, and what they were.

    tensors: Of which those in the memory of a CPU are looked at: a GPU would have to be waited for.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.views = [_some(tensor.detach()) for tensor in tensors if _is_seen(tensor)]
        self.known = torch.cat(self.views) if self.views else None

    def hold(self) -> bool:
        """Tell whether all are what they were."""
        return self.known is None or torch.equal(torch.cat(self.views), self.known)


class Noted:
    """Tensors, where they lay, and what they held: a later look tells whether that is still so.

    parts: The tensors.
    """

    def __init__(self, parts: Iterable[torch.Tensor]) -> None:
        self.parts = [*parts]
        self.addresses = [*map(torch.Tensor.data_ptr, self.parts)]
        self.counted = [part for part in self.parts if not part.is_inference()]
        """Those that count how often they were changed in place: inference tensors do not."""
        self.versions = [*map(_version, self.counted)]
        self.reads = DataReads(self.parts)
        self.probes = Probes(self.parts)
        self.snapshot = Snapshot(versions=True)

    def hold(self, parts: Tensors) -> bool:
        """Tell whether these are the tensors, and they are what they were."""
        return self.snapshot.confirm(parts, lambda: self._are(parts)) and self._hold_unseen()

    def unwritten(self) -> bool:
        """Tell whether the tensors are what they were, where they are known to lie where they lay."""
        return self.snapshot.confirm(self.parts, self._count_as_before) and self._hold_unseen()

    def _hold_unseen(self) -> bool:
        """Tell whether nothing is known of writes that torch does not count."""
        return self.reads.hold() and self.probes.hold()

    def _count_as_before(self) -> bool:
        return [*map(_version, self.counted)] == self.versions

    def _are(self, parts: Tensors) -> bool:
        same = identical(parts, self.parts) and [*map(torch.Tensor.data_ptr, parts)] == self.addresses
        return same and self._count_as_before()

    @classmethod
    def together(cls, noted: Sequence[Noted]) -> Noted:
        """Return what was noted of all parts, each when it was."""
        found = cls(())
        found.parts = [*chain.from_iterable(each.parts for each in noted)]
        found.addresses = [*chain.from_iterable(each.addresses for each in noted)]
        found.counted = [*chain.from_iterable(each.counted for each in noted)]
        found.versions = [*chain.from_iterable(each.versions for each in noted)]
        found.reads = DataReads.together([each.reads for each in noted])
        found.probes.views = [*chain.from_iterable(each.probes.views for each in noted)]
        known = [each.probes.known for each in noted if each.probes.known is not None]
        found.probes.known = torch.cat(known) if known else None
        return found


_version = attrgetter("_version")
"""The counter of a tensor's changes in place."""


def _is_seen(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() > 0 and tensor.element_size() in BITS


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of elements spread over a tensor's memory."""
    span = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(ELEMENTS, span + 1)
    step = span // (count - 1) if count > 1 else 1
    return tensor.as_strided((count,), (step,)).view(BITS[tensor.element_size()])
