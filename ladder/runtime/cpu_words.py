"""Codes of a matrix in the words that CPU kernels read, by kernels for this processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ladder.lower.cpu.pack import (
    Recoding,
    numbers_of,
    offset_of,
    packed_words,
    padded_codes,
    recoded,
    recoding_of,
)
from ladder.runtime import native
from ladder.runtime.allocate import empty
from ladder.runtime.threads import torch_together
from schedules.cpu_layout import LANES, ROWS, UNIT, WIDEST, CpuLayout, PackForm, cpu_layout
from tile_types.arrays import as_torch
from tile_types.packing import storage_dtype, storage_extent, unpack_codes

if TYPE_CHECKING:
    import torch

    from ladder.runtime.packed import PackedWeight
    from tile_types import QuantizedTensor

LEAST_CODES = 1 << 20
"""Codes below which no kernel is built to pack them: calls of torch take less time than that."""

CHUNK = 1 << 22
"""Codes that are taken out of their storage at a time, where calls of torch do so."""


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
    kernel = _kernel(layout, layout.bits if direct else WIDEST)
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


def _kernel(layout: CpuLayout, stored: int, kind: str = "packed_codes") -> Any:
    """Return the kernel that packs codes of some bits or takes them out, or None where it cannot be built."""
    form = PackForm(stored, layout.bits, layout.lane)
    label = f"{stored}_{layout.bits}_{layout.lane}"
    return native.described_or_none(kind, label, form, "packed_codes")


@dataclass(frozen=True, eq=False)
class Recovery:
    """What gives a canonical weight back from its packed one, so that memory holds its codes once.

    fields: Of the `QuantizedTensor`, without the codes and what else is found again.
    flip: Bits that packing inverted in every code.
    found: Name of the array that is found again, ``scale`` or ``zero`` -> its element type.
    """

    fields: Mapping[str, Any]
    flip: int
    found: Mapping[str, torch.dtype]

    def weight(self, packed: PackedWeight) -> QuantizedTensor:
        """Return the canonical weight."""
        from tile_types import QuantizedTensor

        (n, k), layout = self.fields["shape"], cpu_layout(packed.gemm)
        storage = unpacked_words(layout, packed.arrays["words"], n, k, self.flip)
        arrays: dict[str, Any] = {name: self._array(layout, packed, name) for name in self.found}
        return QuantizedTensor(storage=storage, **arrays, **self.fields)

    def with_own(self, is_foreign: Callable[[torch.Tensor], bool]) -> Recovery:
        """Return this with copies of arrays that lie in memory of others."""
        import torch

        kept = {
            name: each.clone() if isinstance(each, torch.Tensor) and is_foreign(each) else each
            for name, each in self.fields.items()
        }
        return replace(self, fields=kept)

    def _array(self, layout: CpuLayout, packed: PackedWeight, name: str) -> torch.Tensor:
        n, k = self.fields["shape"]
        groups = -(-k // layout.group) if layout.group else 1
        if name == "scale" and "scales" not in packed.arrays:
            found = packed.arrays["row_scale"][:n, None]
        else:
            numbers = numbers_of(packed.gemm, name, packed.arrays[f"{name}s"])
            found = numbers[:groups, :n].t()
        if name == "zero" and layout.lane == 8:
            found = found.int() + offset_of(packed.gemm.weight)
        return found.to(self.found[name]).contiguous()


def recovery(packed: PackedWeight, weight: QuantizedTensor) -> Recovery | None:
    """Tell how a canonical weight is found again from what `ladder.runtime.packed.pack` made of it.

    Returns: None if it is not: codes of several groups apart, few, or in an order of their own.
    """
    if packed.family != "cpu" or packed.gemm.experts or weight.shape[0] * weight.shape[1] < LEAST_CODES:
        return None
    layout = cpu_layout(packed.gemm)
    change = recoding_of(layout, weight.ttype)
    if change.flip is None or layout.bits > WIDEST or layout.group not in (0, layout.padded_group):
        return None
    if _is_altered(weight) or _kernel(layout, layout.bits, "unpacked_codes") is None:
        return None
    found = _found_again(packed, weight)
    kept = {field.name: getattr(weight, field.name) for field in fields(weight)}
    kept = {name: each for name, each in kept.items() if name != "storage" and name not in found}
    return Recovery(kept, change.flip, found)


def _is_altered(weight: QuantizedTensor) -> bool:
    """Tell whether values, by the sign of their zeros, change when codes whose scale is 0 become one."""
    signed = weight.offset is not None and weight.ttype.minimum < 0
    return signed and bool((as_torch(weight.scale) == 0).any())


def _found_again(packed: PackedWeight, weight: QuantizedTensor) -> dict[str, torch.dtype]:
    """Return which arrays are packed without loss, one number for each row of the weight."""
    import torch

    plain = weight.block[0] == 1 and weight.tensor_scale is None and weight.offset is None
    wide = torch.float16, torch.bfloat16, torch.float32
    found = {}
    if plain and weight.scale is not None and as_torch(weight.scale).dtype in wide:
        found["scale"] = as_torch(weight.scale).dtype
    if weight.block[0] == 1 and weight.zero_kind == "integer":
        found["zero"] = as_torch(weight.zero).dtype
    return found


def unpacked_words(layout: CpuLayout, words: torch.Tensor, n: int, k: int, flip: int) -> torch.Tensor:
    """Return the canonical storage of packed codes, the bits of ``flip`` inverted."""
    import torch

    storage = empty(n, storage_extent(k, layout.bits), dtype=getattr(torch, storage_dtype(layout.bits)))
    lines = words.view(torch.int32).reshape(words.shape[0], -1, LANES)
    kernel = _kernel(layout, layout.bits, "unpacked_codes")
    told = torch.tensor([flip], dtype=torch.uint8), torch.tensor([k], dtype=torch.int32)
    step = max(1, native.MOST_BYTES // (ROWS * lines.shape[1] * LANES))
    for first in range(0, len(lines), step):
        target = storage[first * ROWS : (first + step) * ROWS]
        if len(target):
            kernel(*told, lines[first : first + step], target)
    return storage
