"""Operators that raise only where an index is out of range: which of them cannot, because others did not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ASSERTED = ("index", "gather", "scatter", "embedding", "take", "put")
"""Beginnings of the names of operators that a GPU runs without telling the program of a bad index."""


@dataclass(frozen=True)
class Use:
    """An index tensor and the extent that its numbers must be below.

    ``strict``: numbers below 0, which count from the end elsewhere, are refused as well.
    """

    index: torch.Tensor
    extent: int
    strict: bool


def _of_one(args: Sequence[Any]) -> list[Use]:
    """``index_copy(x, axis, index, ...)`` and its relatives."""
    x, axis, index = args[:3]
    return [Use(index, x.shape[axis] if x.ndim else 1, True)]


def _of_several(args: Sequence[Any]) -> list[Use] | None:
    """``index_put(x, [index of axis 0, None, ...], ...)``; masks say nothing of numbers."""
    x, indices = args[:2]
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        return None
    return [Use(index, x.shape[axis], False) for axis, index in given]


_USES: Mapping[str, Callable[[Sequence[Any]], list[Use] | None]] = {
    **dict.fromkeys(("index_copy", "index_copy_", "index_add", "index_add_", "index_select"), _of_one),
    **dict.fromkeys(("index", "index_put", "index_put_", "_index_put_impl_"), _of_several),
    "embedding": lambda args: [Use(args[1], args[0].shape[0], True)],
}
"""Operator -> the indices that it uses."""


def uses(name: str, args: Sequence[Any]) -> list[Use] | None:
    """Return the indices by which an operator may fail, none if it cannot; None: it may fail otherwise."""
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
    if on_gpu and name.lstrip("_").startswith(ASSERTED):
        return []
    describe = _USES.get(name)
    return None if describe is None else describe(args)


class Proven:
    """The indices that went through an operator of this segment: what fails by them, failed there."""

    def __init__(self) -> None:
        self.known: dict[int, list[tuple[int, Use]]] = {}

    def covers(self, use: Use) -> bool:
        """Tell whether an index, unchanged since, was within no larger an extent."""
        return any(
            version == _version(use.index) and known.extent <= use.extent and (known.strict or not use.strict)
            for version, known in self.known.get(id(use.index), ())
        )

    def copy(self) -> Proven:
        """Return the same indices, to which others may be added."""
        made = Proven()
        made.known = {key: list(uses) for key, uses in self.known.items()}
        return made

    def add(self, use: Use) -> None:
        """Remember an index that was in range; the tensor stays alive, so that its identity does."""
        self.known.setdefault(id(use.index), []).append((_version(use.index), use))


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
