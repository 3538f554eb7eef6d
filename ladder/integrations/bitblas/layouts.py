"""Where BitBLAS keeps the codes of a weight: interleaved in words, and in tiles of tensor cores.

Every layout is a permutation, so each function takes both directions from one list of indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from tile_types.errors import ShapeError
from tile_types.packing import pack_codes, unpack_codes

WORD = 32
"""Bits of the words that codes are interleaved in."""

MOVED = {
    (2, "float16"): (8, (0, 2, 1, 3)),
    (1, "float16"): (4, (0, 2, 4, 6, 1, 3, 5, 7)),
    (1, "int8"): (4, (0, 4, 2, 6, 1, 5, 3, 7)),
}
"""(bits of a code, type of activations) -> bits of the parts of a word that move, and where each goes."""


@lru_cache
def interleaving(bits: int, activation: str, width: int) -> tuple[int, ...]:
    """Return where each code of a word goes, so that a mask and a shift give two or four codes at once.

    bits: Width of a code.
    activation: BitBLAS's name of the activations' type.
    """
    lanes, per_lane = WORD // width, width // bits
    slots = [(code % lanes) * per_lane + code // lanes for code in range(WORD // bits)]
    part, places = MOVED.get((bits, activation), (WORD, (0,)))
    codes = part // bits
    return tuple(places[slot // codes] * codes + slot % codes for slot in slots)


@lru_cache
def tile_order(columns: int, kind: int, transposed: bool = True, scaled: int = 1) -> torch.Tensor:
    """Return which element of a tile of 16 rows each stored place holds, int64 ``[16 * columns / scaled]``.

    columns: Elements in a row of the tile: 16 of 16 bits or 32 of 8 bits.
    kind: A `TransformKind`: 1 leaves a tile by rows, 2 orders it for ldmatrix, 3 for the registers of mma.
    transposed: Whether it is the operand that ldmatrix takes transposed.
    scaled: Elements that share a unit of storage and move together.
    """
    half = columns // 2
    place = torch.arange(16 * columns)
    lane, local = place // half, place % half
    if kind < 2:
        source = place
    elif transposed:
        source = (8 * (lane // 16) + lane % 8) * columns + half * (lane % 16 // 8) + local
    else:
        source = (lane % 16) * columns + half * (lane // 16) + local
    if kind >= 3:
        pair = half // 4
        register = (lane % 8 * 4 + local // pair) * half + lane // 8 * pair + local % pair
        source = torch.empty_like(source).scatter_(0, register, source)
    return _of_units(source, scaled)


def _of_units(source: torch.Tensor, scaled: int) -> torch.Tensor:
    units = source.view(-1, scaled)
    if not torch.equal(units, units[:, :1] + torch.arange(scaled)):
        raise ShapeError(f"this order of a tile tears units of {scaled} elements apart")
    return units[:, 0] // scaled


def into_tiles(values: torch.Tensor, columns: int, order: torch.Tensor) -> torch.Tensor:
    """Return a matrix in tiles, ``[N, K]`` -> ``[N / 16, K / columns, 16, columns]``, each in an order."""
    rows, width = values.shape
    tiles = values.view(rows // 16, 16, width // columns, columns).transpose(1, 2)
    return tiles.reshape(-1, 16 * columns)[:, order].view(rows // 16, width // columns, 16, columns)


def out_of_tiles(tiles: torch.Tensor, columns: int, order: torch.Tensor) -> torch.Tensor:
    """Undo `into_tiles`."""
    rows, width = tiles.shape[0] * 16, tiles.shape[1] * columns
    plain = torch.empty_like(tiles.reshape(-1, 16 * columns))
    plain[:, order] = tiles.reshape(-1, 16 * columns)
    return plain.view(rows // 16, width // columns, 16, columns).transpose(1, 2).reshape(rows, width)


@dataclass(frozen=True)
class Layout:
    """How a weight is stored.

    n, k: Extents of the weight matrix.
    bits: Width of a code or value.
    interleaved: Type of activations that the codes are interleaved for, and its bits; None: in their order.
    kind, columns, unit: See `tile_order`; ``columns`` in units, each of ``unit`` codes.
    """

    n: int
    k: int
    bits: int
    interleaved: tuple[str, int] | None = None
    kind: int = 0
    columns: int = 0
    unit: int = 1

    def __post_init__(self) -> None:
        if self.bits < 8 and self.k * self.bits % (WORD if self.interleaved else 8):
            unit = "32-bit words" if self.interleaved else "bytes"
            raise ShapeError(f"{self.k} codes of {self.bits} bits do not fill {unit}: pad K")

    @property
    def shape(self) -> list[int]:
        """Shape of the stored weight."""
        octets = max(self.bits, 8)
        if not self.kind:
            return [self.n, self.k * self.bits // octets]
        columns = self.columns * self.unit
        return [self.n // 16, self.k // columns, 16, columns * self.bits // octets]

    def store(self, codes: torch.Tensor) -> torch.Tensor:
        """Return codes ``[N, K]``, uint8 (or values of 8 bits and more), as stored: int8, or values."""
        if self.kind:
            units = codes.reshape(self.n, self.k // self.unit, self.unit)
            parts = [into_tiles(units[..., i], self.columns, self._order(codes)) for i in range(self.unit)]
            codes = torch.stack(parts, -1).reshape(-1, self.k)
        if self.bits >= 8:
            return codes.reshape(self.shape).contiguous()
        if self.interleaved is not None:
            codes = self._words(codes)[..., self._inverse()].reshape(-1, self.k)
        packed: torch.Tensor = pack_codes(codes, self.bits)
        return packed.view(torch.int8)

    def codes(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the codes ``[N, K]`` of a stored weight of any shape with as many bytes.

        Raises ShapeError if it has more or fewer.
        """
        wanted = self.n * self.k * self.bits // max(self.bits, 8)
        if stored.numel() != wanted:
            raise ShapeError(f"a stored weight of shape {self.shape} is expected, got {list(stored.shape)}")
        codes = stored.reshape(self.n, -1)
        if self.bits < 8:
            codes = unpack_codes(codes.contiguous().view(torch.uint8), self.bits, self.k)
        if self.interleaved is not None:
            codes = self._words(codes)[..., list(self._slots())].reshape(self.n, self.k)
        if not self.kind:
            return codes
        tiles = codes.reshape(self.n // 16, self.k // (self.columns * self.unit), 16, self.columns, self.unit)
        order = self._order(codes)
        parts = [out_of_tiles(tiles[..., i], self.columns, order) for i in range(self.unit)]
        return torch.stack(parts, -1).reshape(self.n, self.k)

    def _order(self, like: torch.Tensor) -> torch.Tensor:
        return tile_order(self.columns, self.kind).to(like.device)

    def _words(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.reshape(-1, self.k * self.bits // WORD, WORD // self.bits)

    def _slots(self) -> tuple[int, ...]:
        assert self.interleaved is not None
        return interleaving(self.bits, *self.interleaved)

    def _inverse(self) -> list[int]:
        slots = self._slots()
        return sorted(range(len(slots)), key=slots.__getitem__)
