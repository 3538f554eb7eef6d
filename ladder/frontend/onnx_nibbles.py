"""Stored tables of 4 bits as bytes, in which torch computes.

onnxruntime's own tools store tables of `GatherBlockQuantized` as ``int4`` and ``uint4``; exporters pack them
in ``uint8``, with 8 for zero where no zero points are given. That form takes rows in blocks along their last
axis, of an even number of codes; other tables become one byte per number.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np
import onnx

from ladder.frontend.onnx_values import Known
from tile_types.packing import pack_codes

TAKEN = ("com.microsoft", "GatherBlockQuantized")
MIDDLE = {"int4": 8, "uint4": 0}
"""Type of a table -> what turns its numbers into codes, and is the code of zero where none is given."""


def in_bytes(node: Any, values: MutableMapping[str, Any]) -> Any:
    """Return a node that takes rows of a stored table of 4 bits as one that takes them of bytes.

    values: By name; tables of bytes, and their zero points, are added.
    """
    table = values.get(node.input[0]) if (node.domain, node.op_type) == TAKEN else None
    zeros = values.get(node.input[3]) if len(node.input) > 3 and node.input[3] else None
    if not isinstance(table, Known) or table.array.dtype.name not in MIDDLE:
        return node
    given = {one.name: one.i for one in node.attribute}
    taken, divided = given.get("gather_axis", 0), given.get("quantize_axis", 1)
    rank = len(table.shape)
    packs = taken in (0, -rank) and divided in (rank - 1, -1) and table.shape[-1] % 2 == 0
    scales = values.get(node.input[2])
    if zeros is None and packs:
        zeros = Known(np.zeros(scales.shape, np.int8)) if isinstance(scales, Known) else None
    if not isinstance(zeros, Known) and (packs or zeros is not None):
        return node
    middle, found = MIDDLE[table.array.dtype.name], type(node)()
    found.CopyFrom(node)
    del found.input[:], found.attribute[:]
    found.input.extend(node.input[:3])
    for at, name, known in ((0, "table", table), (3, "zeros", zeros)):
        if known is None:
            continue
        numbers = known.array.astype(np.int8)
        new = f"{node.output[0]}/{name}"
        values[new] = Known(pack_codes(numbers.astype(np.uint8) + np.uint8(middle), 4) if packs else numbers)
        found.input[at:] = [new, *found.input[at + 1 :]]
    found.attribute.extend(one for one in node.attribute if one.name != "bits")
    found.attribute.append(onnx.helper.make_attribute("bits", 4))
    return found
