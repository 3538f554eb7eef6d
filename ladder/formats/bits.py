"""Codes packed by other tools, to canonical storage (`tile_types.packing`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ladder.formats.repack import changed
from ladder.runtime.threads import torch_together
from tile_types.packing import is_dense, pack_codes, unpack_codes

if TYPE_CHECKING:
    import torch

PLANES = {3: ((2, 0), (1, 2)), 5: ((4, 0), (1, 4)), 6: ((4, 0), (2, 4)), 7: ((4, 0), (2, 4), (1, 6))}
"""Bits of a code -> (width, first bit) of its planes in GPTQModel's planar layout, in the order of words."""

CHUNK_CODES = 1 << 22
"""Codes that are unpacked at a time where a whole matrix of them would take many times its storage."""


def by_rows(
    function: Callable[[torch.Tensor], torch.Tensor], array: torch.Tensor, count: int
) -> torch.Tensor:
    """Return what a function of rows gives, called for some rows of ``count`` codes at a time."""
    import torch

    step = max(1, CHUNK_CODES // count)
    if len(array) <= step:
        return function(array)
    with torch_together():
        return torch.cat([function(array[first : first + step]) for first in range(0, len(array), step)])


def repacked(
    stored: torch.Tensor, bits: int, count: int, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return canonical storage of ``change(codes)``."""
    return by_rows(lambda part: pack_codes(change(unpack_codes(part, bits, count)), bits), stored, count)


def words_to_codes(words: torch.Tensor, bits: int, count: int, *, dense: bool = True) -> torch.Tensor:
    """Unpack a stream of codes along the last axis, lowest bits first.

    words: int32 ``[..., W]``.
    bits: Width of a code, 1 to 8.
    count: Codes per row.
    dense: Whether codes cross words; else a word holds ``32 // bits``.
    Returns: uint8 ``[..., count]``.
    """
    import torch

    octets = octets_of(words)
    if dense and 8 % bits == 0:
        return _bytes_to_codes(octets, bits)[..., :count]
    if not dense:
        shifts = torch.arange(32 // bits, dtype=torch.int32) * bits
        return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)[..., :count]
    first = torch.arange(count) * bits
    padded = torch.nn.functional.pad(octets, (0, 1)).to(torch.int32)
    pairs = padded[..., first // 8] | padded[..., first // 8 + 1] << 8
    return ((pairs >> (first % 8).to(torch.int32)) & ((1 << bits) - 1)).to(torch.uint8)


def octets_of(words: torch.Tensor) -> torch.Tensor:
    """Return the bytes of an array, along the last axis."""
    import torch

    flat = words.contiguous().reshape(-1).view(torch.uint8)
    return flat.reshape(*words.shape[:-1], words.shape[-1] * words.element_size())


def _bytes_to_codes(octets: torch.Tensor, bits: int) -> torch.Tensor:
    """Split bytes into codes of 1, 2, 4 or 8 bits."""
    import torch

    if bits == 8:
        return octets
    codes = torch.empty((*octets.shape, 8 // bits), dtype=torch.uint8)
    for slot in range(8 // bits):
        codes[..., slot] = (octets >> (bits * slot)) & ((1 << bits) - 1)
    return codes.flatten(-2)


def planes_to_codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack the planar layout along the last axis: ``bits`` words hold 32 codes, plane by plane."""
    import torch

    blocks = words.reshape(*words.shape[:-1], -1, bits)
    codes = torch.zeros((*blocks.shape[:-1], 32), dtype=torch.uint8)
    word = 0
    for width, first in PLANES[bits]:
        part = words_to_codes(blocks[..., word : word + width], width, 32, dense=32 % width == 0)
        codes |= part << first
        word += width
    return codes.flatten(-2)


def storage_of_words(words: torch.Tensor, bits: int, count: int, *, dense: bool = True) -> torch.Tensor:
    """Return canonical storage of codes that lie along the last axis of int32 words, lowest bits first."""
    if is_dense(bits) and dense:
        stored = octets_of(words)
        units = -(-count * bits // 8)
        return stored if stored.shape[-1] == units else stored[..., :units].contiguous()
    return by_rows(
        lambda part: pack_codes(words_to_codes(part, bits, count, dense=dense), bits), words, count
    )


def sign_bits(bits: int, width: int) -> int:
    """Return a signed integer of ``width`` bits with the highest bit of each dense code set."""
    ones = sum(1 << (first + bits - 1) for first in range(0, width, bits))
    return ones - (1 << width)


def flipped(storage: torch.Tensor, bits: int) -> torch.Tensor:
    """Return dense storage with the highest bit of each code inverted: biased codes as two's complement.

    storage: uint8.
    bits: Width of a code: 1, 2, 4 or 8.
    """
    return changed(storage, sign_bits(bits, 8) & 0xFF)


def swapped_nibbles(octets: torch.Tensor) -> torch.Tensor:
    """Exchange the halves of bytes: first code high becomes first code low."""
    return changed(octets, 0, swaps=True)
