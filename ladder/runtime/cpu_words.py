"""Codes of a matrix in the words that CPU kernels read, by kernels for this processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ladder.lower.cpu.pack import Recoding, by_torch, packed_words, padded_codes, recoded
from ladder.runtime import native
from ladder.runtime.allocate import empty
from ladder.runtime.threads import torch_together
from schedules.cpu_layout import LANES, ROWS, UNIT, WIDEST, CpuLayout, PackForm
from tile_types.arrays import as_torch
from tile_types.packing import storage_dtype, storage_extent, unpack_codes

if TYPE_CHECKING:
    import torch

    from tile_types import QuantizedTensor

LEAST_CODES = 1 << 20
"""Fewest codes for which a kernel is built; torch packs fewer in less time than building takes."""

CHUNK = 1 << 22
"""Codes that torch takes out of their storage at a time."""


def pack_words(layout: CpuLayout, weight: QuantizedTensor, change: Recoding) -> torch.Tensor:
    """Pack the codes of a matrix: uint32 words of shape ``layout.shape(N, K)``.

    layout: Where each code goes.
    weight: On the CPU, or elsewhere, where torch packs.
    change: What becomes of codes.
    """
    import torch

    storage, (n, k) = as_torch(weight.storage), weight.shape
    if not storage.is_cpu or n * k < LEAST_CODES or layout.bits > WIDEST:
        return packed_words(layout, weight, change)
    direct = change.flip is not None and layout.group in (0, layout.padded_group)
    kernel = words_kernel(layout, layout.bits if direct else WIDEST)
    if kernel is None:
        return packed_words(layout, weight, change)
    blocks, units, words = layout.shape(n, k)
    columns = k if direct else units * UNIT
    result = empty(blocks, units * layout.bits, words // layout.bits, dtype=torch.int32)
    told = torch.tensor([change.fill, change.flip if direct else 0], dtype=torch.uint8)
    step = max(1, (native.MOST_BYTES if direct else CHUNK) // (ROWS * units * UNIT))
    for first in range(0, blocks, step):
        part = storage[first * ROWS : (first + step) * ROWS].contiguous()
        if not direct:
            with torch_together():
                codes = recoded(unpack_codes(part, layout.bits, k), change)
                part = padded_codes(layout, codes, len(codes), columns, change.fill)
        kernel(told, torch.tensor([columns], dtype=torch.int32), part, result[first : first + step])
    return result.view(blocks, units, words).view(torch.uint32)


LEAST_NUMBERS = 1 << 16
"""Scales or zero points below which no kernel is built to transpose them."""


def transposed(numbers: torch.Tensor) -> torch.Tensor:
    """Transpose scales or zero points, in memory of their own; those of 4 bytes by a kernel."""
    import torch

    fits = numbers.is_cpu and numbers.dtype.itemsize == 4 and numbers.numel() >= LEAST_NUMBERS
    if not fits or not native.can_build("repack", "transposed_words"):
        return by_torch(numbers)
    words, flip = numbers.contiguous().view(torch.int32), torch.zeros(1, dtype=torch.int32)
    result = empty(words.shape[1], words.shape[0], dtype=torch.int32)
    native.entry("repack", "transposed_words")(flip, words, result)
    return result.view(numbers.dtype)


def words_kernel(layout: CpuLayout, stored: int, kind: str = "packed_codes") -> Any:
    """Return the kernel that packs codes of some bits or takes them out, or None where it cannot be built."""
    form = PackForm(stored, layout.bits, layout.lane)
    label = f"{stored}_{layout.bits}_{layout.lane}"
    return native.described_or_none(kind, label, form, "packed_codes")


def unpacked_words(layout: CpuLayout, words: torch.Tensor, n: int, k: int, flip: int) -> torch.Tensor:
    """Return the canonical storage of packed codes, the bits of ``flip`` inverted."""
    import torch

    storage = empty(n, storage_extent(k, layout.bits), dtype=getattr(torch, storage_dtype(layout.bits)))
    lines = words.view(torch.int32).reshape(words.shape[0], -1, LANES)
    kernel = words_kernel(layout, layout.bits, "unpacked_codes")
    told = torch.tensor([flip], dtype=torch.uint8), torch.tensor([k], dtype=torch.int32)
    step = max(1, native.MOST_BYTES // (ROWS * lines.shape[1] * LANES))
    for first in range(0, len(lines), step):
        target = storage[first * ROWS : (first + step) * ROWS]
        if len(target):
            kernel(*told, lines[first : first + step], target)
    return storage
