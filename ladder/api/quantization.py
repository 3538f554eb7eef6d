"""`quantize` for torch users."""

from __future__ import annotations

from typing import Any

from tile_types import QuantizedTensor, TType
from tile_types.quantize import quantize as quantize_values


def quantize(weight: Any, ttype: TType | str, **options: Any) -> QuantizedTensor:
    """Quantize a matrix; see `tile_types.quantize` for every option.

    Parameters
    ----------
    weight
        Real ``[N, K]``: a torch tensor or parameter on any device, or a numpy array.
    ttype
        Type or its name, e.g. ``"int4"``, ``"nf4"``, ``"mxfp4"``.
    **options
        ``group_size``, ``block``, ``scale_type``, ``zero``, ``scaling``, ``granularity``.

    Returns
    -------
    QuantizedTensor in canonical packing, where ``weight`` lives.

    Raises
    ------
    LadderError
        A subclass says what is wrong: an unknown type (the nearest name is suggested), a group
        size that cannot be, NaN or infinity (with its position).
    """
    return quantize_values(weight.detach() if hasattr(weight, "detach") else weight, ttype, **options)
