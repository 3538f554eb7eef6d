"""Whether a core's operand type can hold every value of a weight type unchanged.

Computed from the values themselves, so a new type needs no entry anywhere.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tile_types.errors import ConversionError, require_name, unknown_name
from tile_types.library import get_type
from tile_types.ttype import NOT_CONSECUTIVE, TType

CORES = ("float16", "bfloat16", "tfloat32", "float32", "int8", "fp8_e4m3", "fp8_e5m2")
"""Operand types of matrix cores, in the order in which they are suggested."""

CODEBOOK_SIGNIFICANT_BITS = 8
"""Rounded reals (codebooks, float zero points) need a core that keeps at least bfloat16's precision."""

ZERO_KINDS = ("none", "integer", "float")


def core_values(ttype: TType | str, core: str) -> npt.NDArray[np.float64]:
    """Return ``ttype.values()`` rounded to ``core``: what a kernel that decodes to ``core`` holds.

    NaN and infinity stay as they are.
    """
    values = get_type(ttype).values()
    finite = np.isfinite(values)
    rounded = values.copy()
    rounded[finite] = _survivors(values[finite], _core(core))
    return rounded


def representable(ttype: TType | str, core: str, zero: str = "none") -> bool:
    """Tell whether a conversion of ``ttype`` to ``core`` keeps every value.

    ttype: Weight type; of a block type the element counts (scales are applied separately).
    core: One of `CORES`.
    zero: ``"integer"``: every difference of two values must survive, since a zero point may be any of the
        type's integers. ``"float"``: the zero point is subtracted in the core's own rounding, so the core
        must keep at least bfloat16's precision and hold the codes' values.
    Raises UnknownNameError if the type, the core or the kind of zero point does not exist.
    """
    require_name("kind of zero point", zero, ZERO_KINDS)
    return _representable(get_type(ttype).element_type, _core(core), zero)


def representable_cores(ttype: TType | str, zero: str = "none") -> tuple[str, ...]:
    """Return the cores that hold every value of ``ttype``, in order of preference."""
    return tuple(core for core in CORES if representable(ttype, core, zero))


def require_representable(ttype: TType | str, core: str, zero: str = "none") -> None:
    """Raise unless `representable`.

    Raises ConversionError: Names a core that can hold the type, or says that its values fit no integer zero
        points.
    """
    if representable(ttype, core, zero):
        return
    found = get_type(ttype)
    able = [each for each in representable_cores(ttype, zero) if each != "tfloat32"]  # no product takes it
    if zero == "integer" and not found.element_type.is_integer:
        raise ConversionError(f"{found.name} {NOT_CONSECUTIVE}; use zero='float' or no zero point")
    what = f"{found.name} with {zero} zero points" if zero != "none" else found.name
    advice = f"use {' or '.join(able[:2])}" if able else "no core can"
    if found.element_type.exact and not {"float16", "bfloat16"} & set(able):
        advice += ", or TType(..., exact=False) if its values may be rounded"
    raise ConversionError(f"{what} does not fit in {core} without loss; {advice}")


@lru_cache(maxsize=4096)
def unheld_codes(ttype: TType | str, core: str) -> npt.NDArray[np.bool_]:
    """Tell of each code of a type, up to 16 bits, whether ``core`` lacks its value.

    Of a type that is `representable` there, these are codes that `TType.encode` does not produce: NaN,
    infinity, and those left out of ``finite_codes``.
    """
    element, form = get_type(ttype).element_type, _core(core)
    values, held = element.values(), form.decode_codes(form.probe_codes())
    special = ~np.isfinite(values)
    lost = special & ~np.isin(values, held) & ~(np.isnan(values) & np.isnan(held).any())
    if element.exact:
        lost[~special] = ~_equal(values[~special], form)
    return lost


def significant_bits(core: str) -> int:
    """Return p such that the core holds every integer up to 2**p (its precision)."""
    form = _core(core)
    bits = 1
    while bits < 53 and _keeps(np.array([2.0 ** (bits + 1) - 1]), form):
        bits += 1
    return bits


def _core(core: str) -> TType:
    if core not in CORES:
        raise unknown_name("core type", core, CORES)
    return get_type(core)


@lru_cache(maxsize=4096)
def _representable(element: TType, core: TType, zero: str) -> bool:
    values = element.probe_values()
    if zero == "integer" and not element.is_integer:
        return False
    if zero == "float" and significant_bits(core.name) < CODEBOOK_SIGNIFICANT_BITS:
        return False
    if not element.exact:
        rounded = _survivors(values, core)
        distinct = len(np.unique(rounded)) == len(np.unique(values))
        return distinct and not core.is_integer and significant_bits(core.name) >= CODEBOOK_SIGNIFICANT_BITS
    if zero == "integer":
        span = element.maximum - element.minimum
        values = np.arange(-span, span + 1)
    return _keeps(values, core)


def _keeps(values: npt.NDArray[np.float64], core: TType) -> bool:
    return bool(_equal(values, core).all())


def _equal(values: npt.NDArray[np.float64], core: TType) -> npt.NDArray[np.bool_]:
    return np.equal(_survivors(values, core), values)


def _survivors(values: npt.NDArray[np.float64], core: TType) -> npt.NDArray[np.float64]:
    return core.decode_codes(core.encode_finite(values))
