"""ConvTranspose as a tile graph row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ladder.frontend.onnx_call import Call, Row
from ladder.frontend.transposed_convolution import Axis, transposed_convolution


def _transposed(call: Call) -> Any:
    """None where the kernel is not stored, has gaps or groups, or where pads follow from a given shape."""
    axes = None if call.known(1) is None else _axes(call)
    if axes is None or call.out != "float32":
        return None
    return transposed_convolution(call.im, call.out, call.tensor(0), call.tensor(1), call.optional(2), axes)


def _axes(call: Call) -> list[Axis] | None:
    given, extents = call.given, call.shape(0)[2:]
    rank = len(extents)
    if given.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID", b"") or "output_shape" in given:
        return None
    if given.get("group", 1) != 1 or any(gap != 1 for gap in given.get("dilations") or ()):
        return None
    steps, extra = given.get("strides") or [1] * rank, given.get("output_padding") or [0] * rank
    pads = given.get("pads") or [0] * 2 * rank
    if given.get("auto_pad") == b"VALID":
        pads = [0] * 2 * rank
    rows = zip(extents, steps, call.shape(1)[2:], pads[:rank], pads[rank:], extra, strict=False)
    axes = [Axis(extent, *map(int, rest)) for extent, *rest in rows]
    return axes if len(axes) == rank else None


TRANSPOSED: Mapping[str, Row] = {"ConvTranspose": _transposed}
"""Operators that scatter what a convolution gathers."""
