"""Types whose values are those of another one times a power of two.

A core may lack the values of a type only because their unit is another one: quarters are no integers, four
times quarters are. Values may also be so small that float16 holds too few bits of them times a scale, or so
large that they less a zero point are infinite there. A product then holds the multiple, and the factor of
the whole tensor gives the power of two back. Nothing is rounded by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from tile_types.arrays import arrays_of
from tile_types.identity import is_own
from tile_types.library import get_type, multiple_name
from tile_types.quantized import QuantizedTensor
from tile_types.representable import representable
from tile_types.ttype import EXHAUSTIBLE_BITS, TType

REACH = 24
"""Exponents that are tried on either side of that which brings a type's largest value to `TOP`."""

TOP = 3
"""Largest values of multiples lie in [2**(TOP - 1), 2**TOP) where the core holds them there."""

SMALL = 2.0**-2
"""Least largest value of a type that float16 holds as it is: kernels multiply it by scales below 2**-8."""

LARGE = 2.0**14
"""Largest value of a type with real zero points that float16 holds as it is: their difference is one, too."""


def held_multiple(ttype: TType, cores: Sequence[str], zero: str = "none") -> TType:
    """Return the element type as whose values a product holds those of a type that a program made.

    It is the type's own element where a core holds its values well, or where no multiple helps: the caller
    says what is wrong then. Integer zero points are codes, so types with them have no multiples; nor have
    types that ship, whose tables say what they fit.

    ttype: Weight type; of a block type the element counts.
    cores: Operand types of which one must hold the values.
    zero: Kind of zero points.
    """
    element = ttype.element_type
    if not is_own(element) or element.elem_bits > EXHAUSTIBLE_BITS or zero == "integer":
        return element
    rounds = "float16" in cores and (element.max_abs < SMALL or (zero == "float" and element.max_abs > LARGE))
    if any(representable(element, core, zero) for core in cores) and not rounds:
        return element
    exponent = _exponent(element, element.probe_values().tobytes(), tuple(cores), zero)
    return get_type(multiple_name(element.name, exponent)) if exponent else element


@lru_cache(maxsize=1024)
def _exponent(element: TType, values: bytes, cores: tuple[str, ...], zero: str) -> int:
    """Return the power of two, nearest that of `TOP`, that brings all values into a core; 0 if none does.

    Types are equal by name, so that the values are part of the key.
    """
    middle = TOP - int(np.frexp(element.max_abs)[1])
    for exponent in sorted(range(middle - REACH, middle + REACH + 1), key=lambda each: abs(each - middle)):
        made = get_type(multiple_name(element.name, exponent)) if exponent else element
        if any(representable(made, core, zero) for core in cores):
            return exponent
    return 0


def as_multiple(weight: QuantizedTensor, name: str) -> QuantizedTensor:
    """Return a matrix with its codes read as those of a multiple of its type, and the factor given back.

    weight: A quantized matrix.
    name: Name of the type that a product holds; a matrix of which that is no multiple is returned as it is.
    """
    held = get_type(name)
    if held.multiple_of is None or held.multiple_of[0] != weight.ttype.name:
        return weight
    unit = 2.0 ** held.multiple_of[1]
    factor = 1.0 if weight.tensor_scale is None else float(weight.tensor_scale)
    zero = weight.zero
    if zero is not None:
        zero = arrays_of(zero).cast(zero, "float32") * unit
    return replace(weight, ttype=held, tensor_scale=factor / unit, zero=zero)


def own_name(name: str) -> str:
    """Return the name of a type, of a multiple that of the type which a program made."""
    multiple = get_type(name).multiple_of
    return name if multiple is None else multiple[0]
