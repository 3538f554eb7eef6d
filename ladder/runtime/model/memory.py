"""Memory planning of intermediate results: lifetimes to offsets in one block.

Results of open sizes have a block of their own. Its layout is made for a class of sizes, those that round up
to the same numbers, and serves all smaller ones, so that a size that was not seen before seldom costs a
layout; the block grows. Where results are small, classes are wide: a token of a small model takes no
longer than a few layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import floordiv, le

import torch

from ladder.runtime.allocate import viewer
from ladder.runtime.model.sizes import Sizes, is_fixed, together
from tile_types.errors import DeviceError
from tile_types.tile import Extent

ALIGNMENT = 256
"""Bytes: what the allocators of GPUs give, and more than any vector needs."""

CLASSES = 3
"""Leading bits that sizes of different classes differ in."""

COARSE_CLASSES = 1
"""The same where all results of a class take at most `MOST_SPARE_BYTES` side by side."""

MOST_SPARE_BYTES = 1 << 22
"""Bytes that may lie in vain, rather than that every few tokens cost a layout."""

KEPT_LAYOUTS = 64
"""Layouts that are kept."""


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
    """A buffer that a step writes: where its memory is needed, and what for."""

    name: str
    shape: tuple[Extent, ...]
    dtype: torch.dtype
    first: int
    last: int


class Block:
    """Memory of results whose lifetimes decide what overlaps.

    results: All of fixed, or all of open shapes.
    names: Of the symbolic sizes.
    where: The device.
    """

    def __init__(self, results: Sequence[Result], names: tuple[str, ...], where: torch.device) -> None:
        self.results, self.where = list(results), where
        shapes = dict.fromkeys(result.shape for result in self.results)
        self._shapes = together([*shapes], names)
        self._which = [list(shapes).index(result.shape) for result in self.results]
        self._itemsizes = [result.dtype.itemsize for result in self.results]
        self._layouts: dict[Sizes, tuple[Arena, list[int]]] = {}
        self.memory = torch.empty(0, dtype=torch.uint8, device=where)
        self.grown = 0
        """How often the memory was replaced."""

    def buffers(self, sizes: Sizes) -> list[torch.Tensor]:
        """Return the memory of every result, in order."""
        shapes = self._shapes(sizes)
        arena = self._arena(sizes, [*map(prod, shapes)])
        if arena.nbytes > self.memory.numel():
            self.memory = self._allocated(arena.nbytes)
            self.grown += 1
        strides = [contiguous(shape) for shape in shapes]
        typed = {dtype: self.memory.view(dtype) for dtype in {result.dtype for result in self.results}}
        bases, view = [typed[result.dtype] for result in self.results], viewer()
        begins = [*map(floordiv, arena.offsets.values(), self._itemsizes)]
        return [
            view(base, shapes[at], strides[at], begin)
            for base, at, begin in zip(bases, self._which, begins, strict=True)
        ]

    def _allocated(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.where)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of torch's CPU allocator
            raise DeviceError(f"results take {nbytes} bytes, more than {self.where} has") from error

    def total(self, sizes: Sizes) -> int:
        """Return the bytes of all results side by side."""
        return self._bytes([*map(prod, self._shapes(sizes))])

    def _bytes(self, counts: Sequence[int]) -> int:
        return sum(counts[at] * size for at, size in zip(self._which, self._itemsizes, strict=True))

    def _arena(self, sizes: Sizes, counts: list[int]) -> Arena:
        """Return a layout with room for numbers of elements: the least known one, else one of a class."""
        known = [arena for arena, most in self._layouts.values() if all(map(le, counts, most))]
        if known:
            return min(known, key=lambda arena: arena.nbytes)
        wide = tuple(rounded_up(size, COARSE_CLASSES) for size in sizes)
        room = [*map(prod, self._shapes(wide))]
        if all(map(le, counts, room)) and self._bytes(room) <= MOST_SPARE_BYTES:
            return self._keep(wide, room)
        key = tuple(map(rounded_up, sizes))
        most = [*map(prod, self._shapes(key))]
        return self._keep(key, most) if all(map(le, counts, most)) else self._keep(sizes, counts)

    def _keep(self, key: Sizes, counts: list[int]) -> Arena:
        """Return the layout for numbers of elements, those of sizes `key`, and keep it."""
        if len(self._layouts) >= KEPT_LAYOUTS:
            self._layouts.pop(next(iter(self._layouts)))
        found = lay_out(self._lifetimes(counts))
        arena = Arena({result.name: found.offsets[result.name] for result in self.results}, found.nbytes)
        self._layouts[key] = arena, counts
        return arena

    def _lifetimes(self, counts: Sequence[int]) -> list[Lifetime]:
        return [
            Lifetime(result.name, counts[at] * result.dtype.itemsize, result.first, result.last)
            for result, at in zip(self.results, self._which, strict=True)
        ]


@lru_cache(maxsize=4096)
def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of elements that lie one after the other."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def rounded_up(size: int, bits: int = CLASSES) -> int:
    """Return the largest size of a size's class: with three leading bits at most a quarter more.

    >>> [rounded_up(size) for size in (1, 8, 9, 33)]
    [1, 8, 10, 40]
    >>> [rounded_up(size, 1) for size in (1, 8, 9, 33)]
    [1, 8, 16, 64]
    """
    step = 1 << max(0, (size - 1).bit_length() - bits)
    return -(-size // step) * step


def divided(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Return results of fixed shapes, and those of open ones."""
    fixed = [result for result in results if is_fixed(result.shape)]
    return fixed, [result for result in results if not is_fixed(result.shape)]


def lay_out(lifetimes: Sequence[Lifetime]) -> Arena:
    """Place buffers so that those alive at one time do not overlap, the largest first.

    Each takes the lowest offset at which it fits between those already placed whose lifetimes meet its own.
    """
    meeting = _meeting(tuple((buffer.first, buffer.last) for buffer in lifetimes))
    keys = [(-buffer.nbytes, buffer.first, buffer.name) for buffer in lifetimes]
    placed: dict[int, tuple[int, int]] = {}
    for at in sorted(range(len(lifetimes)), key=keys.__getitem__):
        size, offset = _rounded(lifetimes[at].nbytes), 0
        for begin, end in sorted([placed[other] for other in meeting[at] if other in placed]):
            if offset + size <= begin:
                break
            offset = max(offset, end)
        placed[at] = offset, offset + size
    total = max((end for _, end in placed.values()), default=0)
    return Arena({lifetimes[at].name: begin for at, (begin, _) in placed.items()}, total)


@lru_cache(maxsize=64)
def _meeting(steps: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Return for each lifetime, as (first step, last step), the numbers of those that it meets."""
    return tuple(tuple(at for at, other in enumerate(steps) if _meet(one, other)) for one in steps)


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
