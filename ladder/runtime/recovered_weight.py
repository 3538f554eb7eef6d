"""Canonical weights computed from packed ones, so that memory holds their codes once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ladder.lower.cpu.pack import numbers_of, offset_of, recoding_of, unpacked_factors
from ladder.runtime import cpu_words
from ladder.runtime.packed import PackedWeight
from schedules.cpu_layout import WIDEST, CpuLayout, cpu_layout
from tile_types import QuantizedTensor
from tile_types.arrays import as_torch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Recovery:
    """How a canonical weight is computed from its packed one, so that memory holds its codes once.

    fields: Of the `QuantizedTensor`, without the codes and what else is found again.
    flip: Bits that packing inverted in every code.
    found: Name of the array that is found again, ``scale``, ``zero`` or ``offset`` -> its element type.
    """

    fields: Mapping[str, Any]
    flip: int
    found: Mapping[str, torch.dtype]

    def weight(self, packed: PackedWeight) -> QuantizedTensor:
        """Return the canonical weight."""
        (n, k), layout = self.fields["shape"], cpu_layout(packed.gemm)
        storage = cpu_words.unpacked_words(layout, packed.arrays["words"], n, k, self.flip)
        if packed.is_factored:
            stored = {"scale": packed.arrays["scales"], "offset": packed.arrays.get("zeros")}
            factors = {name: unpacked_factors(each, n) for name, each in stored.items() if each is not None}
            products = {name: each.products for name, each in factors.items()}
            return QuantizedTensor(storage=storage, factors=factors, **products, **self.fields)
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
    n, k = weight.shape
    if packed.family != "cpu" or packed.gemm.experts or n * k < cpu_words.LEAST_CODES:
        return None
    layout = cpu_layout(packed.gemm)
    change = recoding_of(layout, weight.ttype)
    if change.flip is None or layout.bits > WIDEST or layout.group not in (0, layout.padded_group):
        return None
    if _is_altered(weight) or cpu_words.words_kernel(layout, layout.bits, "unpacked_codes") is None:
        return None
    found = _found_again(packed, weight)
    kept = {field.name: getattr(weight, field.name) for field in fields(weight)}
    kept = {name: each for name, each in kept.items() if name not in ("storage", "factors", *found)}
    return Recovery(kept, change.flip, found)


def _is_altered(weight: QuantizedTensor) -> bool:
    """Tell whether values, by the sign of their zeros, change when codes whose scale is 0 become one."""
    signed = weight.offset is not None and weight.ttype.minimum < 0
    return signed and bool((as_torch(weight.scale) == 0).any())


def _found_again(packed: PackedWeight, weight: QuantizedTensor) -> dict[str, torch.dtype]:
    """Return which arrays are packed without loss, one number for each row of the weight."""
    import torch

    if packed.is_factored:
        names = [name for name in ("scale", "offset") if getattr(weight, name) is not None]
        return dict.fromkeys(names, torch.float32)
    plain = weight.block[0] == 1 and weight.tensor_scale is None and weight.offset is None
    wide = torch.float16, torch.bfloat16, torch.float32
    found = {}
    if plain and weight.scale is not None and as_torch(weight.scale).dtype in wide:
        found["scale"] = as_torch(weight.scale).dtype
    if weight.block[0] == 1 and weight.zero_kind == "integer":
        found["zero"] = as_torch(weight.zero).dtype
    return found
