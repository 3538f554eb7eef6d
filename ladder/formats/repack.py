"""Codes and numbers of stored arrays by kernels for this processor: built once, kept in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ladder.runtime import native
from ladder.runtime.allocate import empty
from tile_types.factored import Factored
from tile_types.packing import is_dense, storage_extent
from tile_types.stored_blocks import Factors, StoredBlocks

if TYPE_CHECKING:
    import torch

LINE = 64
"""Bytes that a kernel writes at once."""

LEAST_KERNEL_BYTES = 1 << 18
"""Fewest bytes for which building a kernel pays; fewer are rearranged by torch."""


def taken_apart(
    name: str,
    form: StoredBlocks,
    octets: torch.Tensor,
    tables: Sequence[Any],
    before: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor | Factored]]:
    """Take the blocks of a matrix apart.

    name: Of their type.
    octets: uint8 ``[N, blocks, bytes]``.
    tables: The rows of look-ups, numpy's uint64.
    before: Rewrites some rows first.
    Returns: The codes in canonical storage ``[N, ...]``, and each number: float32 ``[N, groups]``, alone or
        with its factors, or the bytes ``[N, blocks * count]``.
    """
    import torch

    rows, blocks, nbytes = octets.shape
    dense = is_dense(form.bits)
    units = storage_extent(blocks * form.elements, form.bits)
    codes = empty(rows, units, dtype=torch.uint8 if dense else torch.uint32)
    numbers = [_room(part, rows, blocks) for part in form.numbers]
    kernel = native.described("stored_blocks", name, form)
    given = [torch.from_numpy(table) for table in tables]
    step = max(1, native.MOST_BYTES // max(blocks * nbytes, codes.stride(0) * codes.element_size()))
    for first in range(0, rows, step):
        part = octets[first : first + step]
        targets = [array[first : first + step] for array in (codes, *(a for room in numbers for a in room))]
        kernel(before(part) if before is not None else part, *given, *targets)
    return codes, [Factored(*room) if len(room) > 1 else room[0] for room in numbers]


def _room(part: Any, rows: int, blocks: int) -> list[torch.Tensor]:
    import torch

    if not isinstance(part, Factors):
        return [empty(rows, blocks * part.count, dtype=torch.uint8)]
    groups = blocks * len(part.integers)
    kept = [(blocks, torch.float16), (groups, torch.int8)] if part.is_kept else []
    return [empty(rows, extent, dtype=dtype) for extent, dtype in [(groups, torch.float32), *kept]]


def transposed_words(words: torch.Tensor, flip: int = 0) -> torch.Tensor:
    """Transpose int32 ``[R, C]`` into memory of its own, and invert the bits of ``flip``, as int32."""
    import torch

    result = empty(words.shape[1], words.shape[0], dtype=torch.int32)
    native.entry("repack", "transposed_words")(_number(flip), words.contiguous(), result)
    return result


def transposed_nibbles(words: torch.Tensor, order: Sequence[int], flip: int = 0) -> torch.Tensor:
    """Transpose 4-bit codes that lie along the last axis: int32 ``[K, C]`` -> int32 ``[8 * C, K // 8]``.

    Code i of ``words[k, c]`` becomes code ``k % 8`` of word ``[8 * c + order[i], k // 8]``.

    words: K must be a multiple of 8.
    order: A permutation of 0 to 7.
    flip: Bits of the result's words that are inverted, as int32.
    """
    import torch

    rows, columns = words.shape
    result = empty(8 * columns, rows // 8, dtype=torch.int32)
    kernel = native.entry("repack", "transposed_nibbles")
    kernel(_number(flip), torch.tensor(order, dtype=torch.int32), words.contiguous(), result)
    return result


def changed(octets: torch.Tensor, flip: int, *, swaps: bool = False) -> torch.Tensor:
    """Invert bits of each byte, after its halves are exchanged if so told.

    octets: uint8 of any shape, on any device.
    flip: The bits, 0 to 255.
    """
    import torch

    if not (flip or swaps):
        return octets
    lies = octets.is_cpu and octets.is_contiguous()
    if not lies or octets.numel() < LEAST_KERNEL_BYTES or octets.numel() % LINE:
        turned = octets << 4 | octets >> 4 if swaps else octets
        return turned ^ flip if flip else turned
    lines = octets.reshape(-1, LINE)
    result = empty(len(lines), LINE // 4, dtype=torch.int32)
    kernel = native.entry("repack", "changed_words", swaps)
    told = _number(int.from_bytes(4 * bytes([flip]), "little", signed=True))
    step = native.MOST_BYTES // LINE
    for first in range(0, len(lines), step):
        kernel(told, lines[first : first + step], result[first : first + step])
    return result.view(torch.uint8).view(octets.shape)


def _number(value: int) -> torch.Tensor:
    import torch

    return torch.tensor([value], dtype=torch.int32)
