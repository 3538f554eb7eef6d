"""Integers that are codes, not numbers: arithmetic on them, as averages of models do it, is noticed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch

from ladder.runtime.snapshot import Snapshot
from tile_types.errors import ArtifactError

PARTS = 8
"""Parts of an array that are summed apart, so that errors of rounding do not cancel in all of them."""

WIDE = 8
"""Bytes of an int64."""

AVERAGED = (
    "the words of this quantized weight were written, and not with a weight's and its sums, as where EMA or"
    " SWA averages buffers: average parameters only (AveragedModel's default copies buffers), or give the"
    " layer another weight with set_weight"
)


class Words:
    """The arrays of integers of a weight.

    Their sums are held beside them as one more array: whoever sends or copies all arrays of another weight
    over these brings its sums, whoever averages does not.
    """

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        self.device = arrays[0].device
        self.arrays = [each for each in arrays if not each.is_floating_point()]
        self._seen = self._versions()
        _OF.update((id(each), self) for each in self.arrays)

    @cached_property
    def sums(self) -> torch.Tensor:
        """Int64 sums, which may wrap, of parts of every array, as they were when this was first asked for."""
        return self._sums()

    def check(self) -> None:
        """Raise ArtifactError if the arrays were written since and are not those of which there are sums."""
        found = self._versions()
        if found != self._seen:
            if not torch.equal(self._sums(), self.sums):
                raise ArtifactError(AVERAGED)
            self._seen = found

    def _versions(self) -> list[int]:
        return [*map(version_of, self.arrays)]

    @torch.inference_mode(False)
    def _sums(self) -> torch.Tensor:
        parts = [part for each in self.arrays for part in _wide(each.reshape(-1)).tensor_split(PARTS)]
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.cat([none, *(part.sum(0, True, dtype=torch.int64) for part in parts)])


_OF: WeakValueDictionary[int, Words] = WeakValueDictionary()
"""Identity of an array -> its words, which keep it alive."""


def check(arrays: Iterable[Any]) -> None:
    """Raise ArtifactError if tensors are words of weights, and were written with what is no weight."""
    for words in filter(None, map(_OF.get, map(id, arrays))):
        words.check()


class Watched:
    """Arguments of a plan that may be words of weights: `check` of them before each call.

    places: Their positions.
    """

    def __init__(self, places: Iterable[int]) -> None:
        self._places = sorted(set(places))
        self._snapshot = Snapshot(versions=True)
        self._seen: tuple[Any, ...] = ()
        """Identities and versions when they were last found to be right."""

    def check(self, values: Sequence[Any]) -> None:
        """Raise ArtifactError if a call's words were written with what is no weight."""
        if self._places:
            arrays = [values[at] for at in self._places]
            self._snapshot.confirm(arrays, lambda: self._are_right(arrays))

    def _are_right(self, arrays: list[torch.Tensor]) -> bool:
        found = (*map(id, arrays), *map(version_of, arrays))
        if found != self._seen:
            check(arrays)
            self._seen = found
        return True


def version_of(array: torch.Tensor) -> int:
    """Return how often an array was written, as far as torch counts it."""
    return 0 if array.is_inference() else array._version


def _wide(array: torch.Tensor) -> torch.Tensor:
    """Return the bytes of an array as int64, where they are whole ones: torch sums narrow integers slowly."""
    size = array.element_size()
    if array.numel() * size % WIDE:
        return array
    return (array.clone() if array.storage_offset() * size % WIDE else array).view(torch.int64)
