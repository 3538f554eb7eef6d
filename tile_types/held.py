"""Types as kernels of GPUs hold them: codes of evenly spaced values become numbers that arithmetic decodes.

Gray codes, sign and magnitude, one's complement, base -2, a table of whole numbers in any order: their values
are those of integers, but a kernel would have to look each code up. So packing replaces a code by the number
of steps from zero to its value, in two's complement where that fits, or from the type's least value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tile_types.arrays import Array, arrays_of
from tile_types.forms import MOST_BITS, affine_forms
from tile_types.ttype import TType


@dataclass(frozen=True, eq=False)
class Held:
    """How kernels hold a type.

    ttype: The type as whose codes they hold its values; the type itself where packing changes no code.
    table: Code -> code of ``ttype``, uint8; None where packing changes none.
    """

    ttype: TType
    table: npt.NDArray[np.uint8] | None

    def renumbered(self, codes: Array) -> Array:
        """Return the codes by which kernels hold a matrix of codes, on numpy or torch."""
        if self.table is None:
            return codes
        xp = arrays_of(codes)
        return xp.cast(xp.take(xp.array(self.table, "uint8", codes), xp.cast(codes, "int32")), "uint8")


def held(ttype: TType) -> Held:
    """Return how kernels hold an element type.

    Codes change where all of them have values, exact and whole numbers of steps apart, that fit in as many
    bits, and where no code is affine in its value already. Codes of equal values become one code.
    """
    if ttype.elem_bits > MOST_BITS or not ttype.exact or ttype.is_block:
        return Held(ttype, None)
    return _held(ttype, ttype.values().tobytes(), ttype.valid_codes().tobytes())


@lru_cache(maxsize=1024)
def _held(ttype: TType, values: bytes, codes: bytes) -> Held:
    """Types are equal by name, so that the values are part of the key."""
    found = ttype.values()
    if not np.isfinite(found).all() or any(form.factor > 0 for form in affine_forms(ttype)):
        return Held(ttype, None)
    steps = _steps(found, ttype.elem_bits)
    return Held(ttype, None) if steps is None else _renumbered(ttype, steps)


def _steps(values: npt.NDArray[np.float64], bits: int) -> npt.NDArray[np.int64] | None:
    """Return the code that each value gets, or None where values lie unevenly or too far apart."""
    distinct = np.unique(values)
    if len(distinct) < 2:
        return None
    step = float(np.diff(distinct).min())
    for origin in (0.0, float(distinct[0])):
        count = np.rint((values - origin) / step)
        low, high = count.min(), count.max()
        signed = low >= -(1 << (bits - 1)) and high < 1 << (bits - 1)
        if np.array_equal(count * step + origin, values) and (signed or (low >= 0 and high < 1 << bits)):
            return count.astype(np.int64) & ((1 << bits) - 1)
    return None


def _renumbered(ttype: TType, steps: npt.NDArray[np.int64]) -> Held:
    """Return the type whose codes are ``steps``; codes that no value has are none of its own."""
    used, first = np.unique(steps, return_index=True)
    values = np.zeros(1 << ttype.elem_bits)
    values[used] = ttype.values()[first] + 0.0  # of two zeros the positive one
    listed = tuple(values.tolist())
    made = TType(
        f"{ttype.name}_in_steps",
        ttype.elem_bits,
        lambda code, ops: ops.lookup(listed, code),
        finite_codes=tuple(used.tolist()),
        doc=f"values of {ttype.name}, codes in steps",
    )
    return Held(made, steps.astype(np.uint8))
