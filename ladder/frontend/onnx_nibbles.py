"""Stored tables of 4 bits as bytes of two codes, in which torch computes.

onnxruntime's own tools store tables of `GatherBlockQuantized` as ``int4`` and ``uint4``; exporters pack them
in ``uint8``, with 8 for zero where no zero points are given.
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
    if not isinstance(table, Known) or table.array.dtype.name not in MIDDLE or table.shape[-1] % 2:
        return node
    if zeros is None:
        scales = values.get(node.input[2])
        zeros = Known(np.zeros(scales.shape, np.int8)) if isinstance(scales, Known) else None
    if not isinstance(zeros, Known):
        return node
    middle, found = MIDDLE[table.array.dtype.name], type(node)()
    found.CopyFrom(node)
    del found.input[:]
    names = [f"{node.output[0]}/{name}" for name in ("table", "zeros")]
    for name, known in zip(names, (table, zeros), strict=True):
        values[name] = Known(pack_codes(known.array.astype(np.uint8) + np.uint8(middle), 4))
    found.input.extend([names[0], node.input[1], node.input[2], names[1]])
    kept = [one for one in node.attribute if one.name != "bits"]
    del found.attribute[:]
    found.attribute.extend([*kept, onnx.helper.make_attribute("bits", 4)])
    return found
