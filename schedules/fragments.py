"""`FragmentLayout`: packed codes, scales and zero points in the order of tensor-core fragments.

The layout is a `map` of the canonical ``codes[N,K]``: each thread of a 128-thread
warpgroup finds the codes of its own tensor-core A fragment in consecutive words, so
that one shift and one mask (``word & 0x000f000f``) yield one 32-bit register of
codes. The register order is that of ``mma.m16n8k16`` / ``wgmma.m64nNk16`` for 16-bit
cores and ``m16n8k32`` / ``m64nNk32`` for 8-bit cores (PTX ISA, "Matrix fragments").

torch is imported only when a function runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedules.layouts import PACKABLE_BITS, THREADS, TILE, orders, padded, pieces, planes, taken
from tile_types.arrays import as_torch
from tile_types.errors import ShapeError, ValueRangeError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FragmentLayout:
    """Bijection between ``codes[N,K]`` and the packed words that GPU kernels stream.

    Tiles of 64 x 64 codes are ordered ``[n_pad/64][k_pad/64]``. Within a tile each
    plane is ``[ceil(p/4)][128 threads][min(p,4)]`` words of 32 bits; code ``(R, e)`` of
    a thread is in word ``R // (lane/p)`` at bit ``lane*e + p*(R % (lane/p))`` (order ``lanes``).

    bits: Width of a code: 1 to 8, or 16.
    lane: Bits of one operand element of the tensor core: 16 or 8.
    order: One of `ORDERS`.
    """

    bits: int
    lane: int
    order: str = "lanes"

    def __post_init__(self) -> None:
        if self.lane not in (8, 16):
            raise ShapeError(f"a lane is 16 or 8 bits wide, got {self.lane}")
        if self.bits not in PACKABLE_BITS or self.bits > self.lane:
            raise ShapeError(
                f"cannot pack {self.bits}-bit codes for {self.lane}-bit cores; packable widths are"
                f" {', '.join(map(str, PACKABLE_BITS))}, and no wider than the core's operand"
            )
        if self.order not in orders(self.bits, self.lane):
            raise ShapeError(
                f"no order {self.order!r} of {self.bits}-bit codes for {self.lane}-bit cores; orders are"
                f" {', '.join(orders(self.bits, self.lane))}"
            )

    @property
    def elements(self) -> int:
        """Codes that share one 32-bit register."""
        return 32 // self.lane

    @property
    def registers(self) -> int:
        """Operand registers that one thread owns in a tile."""
        return 32 // self.elements

    @property
    def words_per_tile(self) -> int:
        """32-bit words of one 64 x 64 tile."""
        return THREADS * self.bits

    def packed_shape(self, n: int, k: int) -> tuple[int, int, int]:
        """Return ``(n_tiles, k_tiles, words_per_tile)``: the shape under which kernels read the words."""
        return padded(n) // TILE, padded(k) // TILE, self.words_per_tile

    def pack(self, codes: Any, pad_code: int = 0) -> torch.Tensor:
        """Arrange codes for the tensor core.

        codes: ``[N, K]`` unsigned codes, torch (any device) or numpy, uint8 (any integer type for 16 bits).
        pad_code: Code that fills the padding of N and K to multiples of 64; the one whose value is nearest 0.
        Returns: uint32 ``[n_pad/64 * k_pad/64 * 128 * bits]`` on the device of ``codes``.
        Raises ShapeError if ``codes`` is not a matrix.
        Raises ValueRangeError if a code needs more than ``bits`` bits.
        """
        import torch

        matrix = _code_matrix(codes, self.bits)
        n, k = matrix.shape
        n_tiles, k_tiles, words = self.packed_shape(n, k)
        packed = torch.empty(n_tiles, k_tiles * words, dtype=torch.int32, device=matrix.device)
        lane_type = torch.int16 if self.lane == 16 else torch.uint8
        for first, last in _row_chunks(n_tiles, k_tiles):
            shape = ((last - first) * TILE, k_tiles * TILE)
            block = torch.full(shape, pad_code, dtype=torch.int32, device=matrix.device).to(lane_type)
            rows = matrix[first * TILE : min(last * TILE, n)]
            block[: rows.shape[0], :k] = rows.to(lane_type)
            packed[first:last] = self._pack_block(block, last - first)
        return packed.reshape(-1).view(torch.uint32)

    def unpack(self, words: torch.Tensor, n: int, k: int) -> torch.Tensor:
        """Invert `pack`.

        words: uint32 or int32 words as `pack` made them, of any shape.
        n, k: Extents of the matrix, without padding.
        Returns: ``[n, k]`` codes, uint8 (int32 for 16-bit codes).
        """
        import torch

        n_tiles, k_tiles, tile_words = self.packed_shape(n, k)
        if words.numel() != n_tiles * k_tiles * tile_words:
            raise ShapeError(
                f"{words.numel()} packed words do not hold {n} x {k} codes of {self.bits} bits:"
                f" expected {n_tiles * k_tiles * tile_words}"
            )
        code_type = torch.int32 if self.bits > 8 else torch.uint8
        packed = words.reshape(n_tiles, -1).view(torch.int32)
        codes = torch.empty(n, k, dtype=code_type, device=words.device)
        for first, last in _row_chunks(n_tiles, k_tiles):
            block = self._unpack_block(packed[first:last], last - first)
            rows = block[: n - first * TILE, :k].to(code_type)
            codes[first * TILE : first * TILE + rows.shape[0]] = rows & 0xFFFF if self.bits > 8 else rows
        return codes

    def _pack_block(self, block: torch.Tensor, n_tiles: int) -> torch.Tensor:
        """Pack whole tiles: the lanes of one register already lie side by side in memory."""
        import torch

        registers = block.view(torch.int32).reshape(n_tiles, 4, 2, 8, -1, self.registers // 4, 2, 4)
        # -> tile, k tile, (j, kh, h) = R, (w, g, c) = thread
        order = registers.permute(0, 4, 5, 6, 2, 1, 3, 7).reshape(n_tiles, -1, self.registers, THREADS)
        words = [torch.zeros_like(order[:, :, 0]) for _ in range(self.bits)]
        for register, parts in enumerate(pieces(self.bits, self.lane, self.order)):
            for word, mask, left in parts:
                words[word] ^= _shifted(order[:, :, register] & _signed(mask), left)
        return torch.cat([block.flatten(2) for block in self._vectors(words)], dim=2).reshape(n_tiles, -1)

    def _vectors(self, words: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield ``[..., thread, vector]`` for each load of a thread."""
        import torch

        first = 0
        for width, _ in planes(self.bits):
            vector = min(width, 4)
            for start in range(first, first + width, vector):
                yield torch.stack(words[start : start + vector], dim=-1)
            first += width

    def _unpack_block(self, packed: torch.Tensor, n_tiles: int) -> torch.Tensor:
        """Invert `_pack_block`."""
        import torch

        tiles = packed.reshape(n_tiles, -1, self.words_per_tile)
        words: list[torch.Tensor] = []
        start = 0
        for width, _ in planes(self.bits):
            vector = min(width, 4)
            for _ in range(width // vector):
                part = tiles[:, :, start : start + THREADS * vector]
                words += part.reshape(*part.shape[:2], THREADS, vector).unbind(-1)
                start += THREADS * vector
        registers = torch.zeros(
            *tiles.shape[:2], self.registers, THREADS, dtype=torch.int32, device=packed.device
        )
        for register, parts in enumerate(taken(self.bits, self.lane, self.order)):
            for word, mask, left in parts:
                registers[:, :, register] ^= _shifted(words[word], -left) & _signed(mask)
        split = registers.reshape(n_tiles, -1, self.registers // 4, 2, 2, 4, 8, 4)
        matrix = split.permute(0, 5, 4, 6, 1, 2, 3, 7).reshape(n_tiles * TILE, -1)
        return matrix.view(torch.int16 if self.lane == 16 else torch.uint8)


def _signed(mask: int) -> int:
    """Return the int32 with the bits of ``mask``."""
    return mask - (1 << 32) if mask >= 1 << 31 else mask


def _shifted(words: torch.Tensor, left: int) -> torch.Tensor:
    """Shift left, or right where negative; what an arithmetic shift fills in is masked, or was 0."""
    return words << left if left >= 0 else words >> -left


def _code_matrix(codes: Any, bits: int) -> torch.Tensor:
    """Return ``codes`` as a checked matrix of a torch type that supports arithmetic."""
    import torch

    matrix = as_torch(codes)
    if matrix.ndim != 2:
        raise ShapeError(f"codes must be a matrix [N, K], got shape {tuple(matrix.shape)}")
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32}
    if matrix.dtype in signed:
        matrix = matrix.contiguous().view(signed[matrix.dtype])
    if bits < 8 and matrix.numel() and int(matrix.max()) >= 1 << bits:
        raise ValueRangeError(f"code {int(matrix.max())} does not fit in {bits} bits")
    return matrix


def _row_chunks(n_tiles: int, k_tiles: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of row tiles of about 2**22 codes, so that temporaries stay in cache."""
    step = max(1, (1 << 22) // (k_tiles * TILE * TILE))
    for first in range(0, n_tiles, step):
        yield first, min(first + step, n_tiles)
