"""Where intermediate results lie: lifetimes to offsets in one block of memory.

Results of open sizes have a block of their own. Its layout is made for a class of sizes, those that round up
to the same numbers, so that a size that was not seen before seldom costs a layout; the block grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ladder.runtime.model.sizes import Sizes, evaluator, is_fixed
from tile_types.tile import Extent

ALIGNMENT = 256
"""Bytes: what the allocators of GPUs give, and more than any vector needs."""

CLASSES = 3
"""Leading bits that sizes of different classes differ in."""

KEPT_LAYOUTS = 64
"""Classes of sizes whose layouts are kept."""


@dataclass(frozen=True)
class Lifetime:
    """A buffer that is written by step ``first`` and last read by step ``last``."""

    name: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Arena:
    """Offsets of buffers in a block of ``nbytes``."""

    offsets: Mapping[str, int]
    nbytes: int


@dataclass(frozen=True)
class Result:
    """What a step writes: where its memory is needed, and what for."""

    name: str
    shape: tuple[Extent, ...]
    dtype: torch.dtype
    first: int
    last: int

    def lifetime(self, shape: Sequence[int]) -> Lifetime:
        """Return its lifetime with a number of bytes."""
        return Lifetime(self.name, prod(shape) * self.dtype.itemsize, self.first, self.last)


class Block:
    """Memory of results whose lifetimes decide what overlaps.

    Parameters
    ----------
    results
        All of fixed, or all of open shapes.
    names
        Of the symbolic sizes.
    where
        The device.
    """

    def __init__(self, results: Sequence[Result], names: tuple[str, ...], where: torch.device) -> None:
        self.results, self.where = list(results), where
        self._shapes = [evaluator(result.shape, names) for result in results]
        self._layouts: dict[Sizes, Arena] = {}
        self.memory = torch.empty(0, dtype=torch.uint8, device=where)
        self.grown = 0
        """How often the memory was replaced."""

    def buffers(self, sizes: Sizes) -> list[torch.Tensor]:
        """Return the memory of every result, in order."""
        shapes = [shape(sizes) for shape in self._shapes]
        arena = self._arena(sizes, shapes)
        if arena.nbytes > self.memory.numel():
            self.memory = torch.empty(arena.nbytes, dtype=torch.uint8, device=self.where)
            self.grown += 1
        return [
            self._view(result, shape, arena.offsets[result.name])
            for result, shape in zip(self.results, shapes, strict=True)
        ]

    def total(self, sizes: Sizes) -> int:
        """Return the bytes of all results side by side."""
        pairs = zip(self.results, self._shapes, strict=True)
        return sum(result.lifetime(shape(sizes)).nbytes for result, shape in pairs)

    def _arena(self, sizes: Sizes, shapes: Sequence[Sequence[int]]) -> Arena:
        """Return a layout with room for shapes: that of their class if each fits there."""
        key = tuple(map(rounded_up, sizes))
        most: list[Sequence[int]] = [shape(key) for shape in self._shapes]
        fits = all(prod(a) <= prod(b) for a, b in zip(shapes, most, strict=True))
        key, most = (key, most) if fits else (sizes, list(shapes))
        if key not in self._layouts:
            if len(self._layouts) >= KEPT_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            pairs = zip(self.results, most, strict=True)
            self._layouts[key] = lay_out([result.lifetime(shape) for result, shape in pairs])
        return self._layouts[key]

    def _view(self, result: Result, shape: Sequence[int], offset: int) -> torch.Tensor:
        nbytes = prod(shape) * result.dtype.itemsize
        return self.memory[offset : offset + nbytes].view(result.dtype).view(shape)


def rounded_up(size: int) -> int:
    """Return the largest size of a size's class: at most a quarter more.

    >>> [rounded_up(size) for size in (1, 8, 9, 33)]
    [1, 8, 10, 40]
    """
    step = 1 << max(0, (size - 1).bit_length() - CLASSES)
    return -(-size // step) * step


def divided(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Return results of fixed shapes, and those of open ones."""
    fixed = [result for result in results if is_fixed(result.shape)]
    return fixed, [result for result in results if not is_fixed(result.shape)]


def lay_out(lifetimes: Sequence[Lifetime]) -> Arena:
    """Place buffers so that those alive at one time do not overlap, the largest first.

    Each takes the lowest offset at which it fits between those already placed whose lifetimes meet its own.
    """
    placed: list[tuple[Lifetime, int]] = []
    for buffer in sorted(lifetimes, key=lambda item: (-item.nbytes, item.first, item.name)):
        taken = sorted((at, at + _rounded(other.nbytes)) for other, at in placed if _meet(buffer, other))
        offset = 0
        for begin, end in taken:
            if offset + _rounded(buffer.nbytes) <= begin:
                break
            offset = max(offset, end)
        placed.append((buffer, offset))
    total = max((at + _rounded(buffer.nbytes) for buffer, at in placed), default=0)
    return Arena({buffer.name: at for buffer, at in placed}, total)


def _meet(a: Lifetime, b: Lifetime) -> bool:
    return a.first <= b.last and b.first <= a.last


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
