"""`Tile`: what an edge of the tile graph carries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tile_types.errors import ShapeError, require_kind
from tile_types.library import get_type
from tile_types.packing import storage_bytes
from tile_types.ttype import TType

Extent = int | str
"""Elements along one axis: a number, or the name of a size that is known at run time."""


@dataclass(frozen=True)
class Tile:
    """A tensor of one type at one level of the memory hierarchy.

    Parameters
    ----------
    ttype
        Element or block type.
    shape
        Extents in elements; a string is a symbolic extent such as ``"M"``.
    level
        Memory level by its name in the device description, ``"dram"`` the outermost.
    layout
        How the elements lie there; None is canonical (row major, canonical packing).

    Raises
    ------
    ShapeError
        If an extent is negative.
    """

    ttype: TType
    shape: tuple[Extent, ...]
    level: str = "dram"
    layout: Any = None

    def __post_init__(self) -> None:
        require_kind(self.shape, (tuple, list), "the shape of a tile is a tuple of extents")
        if any(isinstance(extent, int) and extent < 0 for extent in self.shape):
            raise ShapeError(f"a tile needs extents >= 0, got {self.shape}")

    @property
    def rows(self) -> int:
        """Number of rows along the last axis."""
        return math.prod(self.known_shape[:-1])

    @property
    def known_shape(self) -> tuple[int, ...]:
        """The shape as numbers.

        Raises
        ------
        ShapeError
            If an extent is symbolic.
        """
        known = tuple(extent for extent in self.shape if isinstance(extent, int))
        if len(known) != len(self.shape):
            raise ShapeError(f"tile shape {self.shape} is symbolic; bind its sizes first")
        return known

    @property
    def nbytes(self) -> int:
        """Bytes of canonical storage: packed codes plus metadata."""
        last = self.known_shape[-1] if self.shape else 1
        blocks = -(-last // self.ttype.block_size)
        total = self.rows * storage_bytes(last, self.ttype.elem_bits)
        for metadata in self.ttype.metadata:
            width = -(-get_type(metadata.ttype).elem_bits // 8)
            total += width * (self.rows * blocks if metadata.scope == "block" else 1)
        return total
