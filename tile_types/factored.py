"""Scales and offsets of groups as files of super-blocks hold them: two small factors of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tile_types.arrays import Array


@dataclass(frozen=True, eq=False)
class Factored:
    """Numbers of groups [N, G] as exact products of two factors.

    products: float32 [N, G]: the numbers themselves.
    number: float16 [N, G / count]: of so many neighbouring groups.
    integers: int8 [N, G]: of each group.
    """

    products: Array
    number: Array
    integers: Array

    @property
    def count(self) -> int:
        """Groups that share a number."""
        return int(self.integers.shape[1]) // max(1, int(self.number.shape[1]))

    @cached_property
    def vanishes(self) -> bool:
        """Whether some product is zero."""
        return any(bool((each == 0).any()) for each in (self.number, self.integers))
