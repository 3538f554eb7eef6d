"""Conversions to codes of types that plans do not have, where conversions back alone read them.

A plan's tensors have no elements of 4 bits, nor unsigned ones of 16. Between a QuantizeLinear and what
converts its result back such codes are whole numbers in float32, which holds all of them: both conversions
become the arithmetic by which the standard defines them. onnxruntime's quantizer writes them, and those of
8 bits too, in a domain of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto
from onnx.helper import make_node, tensor_dtype_to_np_dtype
from onnx.numpy_helper import from_array, to_array

from ladder.frontend.onnx_stages import names_read

OLDEST = 13
"""Opset from which on the operators that are written here are those of today."""

DOMAINS = ("", "ai.onnx", "com.microsoft")

BYTES = frozenset({TensorProto.UINT8, TensorProto.INT8})
"""Codes that plans have: conversions of them are ONNX's own operators."""

WIDE = frozenset({TensorProto.UINT16, TensorProto.INT16, TensorProto.UINT4, TensorProto.INT4})
"""Codes that float32 holds and plans do not have."""

STEPS = ("wide", "ratio", "whole", "moved", "above", "most", "codes")
"""Values on the way to codes, by the ends of their names."""

Stored = Mapping[str, Any]
"""Name -> stored tensor."""


def with_float_codes(model: Any) -> Any:
    """Return a checked model whose pairs of such conversions are arithmetic."""
    versions = {entry.domain: entry.version for entry in model.opset_import}
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    if versions.get("", 0) < OLDEST or not any(_is_concerned(node, stored) for node in model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    pairs = dict(_pairs(graph, stored))
    back = {name for readers in pairs.values() for node in readers for name in node.output}
    nodes: list[Any] = []
    for node in graph.node:
        name = next(iter(node.output), "")
        if name in pairs:
            nodes += _to_codes(graph, node, stored)
        elif name in back:
            nodes += _from_codes(graph, node, stored)
        else:
            if _is_concerned(node, stored) and _code(node, stored) in BYTES:
                node.domain = ""
            nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    return copy


def _is_concerned(node: Any, stored: Stored) -> bool:
    """Tell whether a node is a conversion that has no kernel as it is."""
    conversion = node.op_type in ("QuantizeLinear", "DequantizeLinear") and node.domain in DOMAINS
    return conversion and (node.domain == DOMAINS[-1] or _code(node, stored) in WIDE)


def _pairs(graph: Any, stored: Stored) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield codes that only conversions back read, and these."""
    readers: dict[str, list[Any]] = defaultdict(list)
    for node in graph.node:
        for name in names_read(node):
            readers[name].append(node)
    results = {info.name for info in graph.output}
    for node in graph.node:
        if node.op_type != "QuantizeLinear" or not _is_plain(node, stored) or node.output[0] in results:
            continue
        found = readers[node.output[0]]
        if all(n.op_type == "DequantizeLinear" and _is_plain(n, stored) for n in found):
            yield node.output[0], found


def _is_plain(node: Any, stored: Stored) -> bool:
    """Tell whether a conversion has one stored scale, in float32, and a stored zero point of `WIDE`."""
    scale = stored.get(node.input[1])
    if node.domain not in DOMAINS or _code(node, stored) not in WIDE or scale is None:
        return False
    usual = all(a.name in ("axis", "saturate") or a.i == 0 for a in node.attribute)
    numbers = [stored[name] for name in node.input[1:3]]
    here = all(np.prod(x.dims, dtype=int) == 1 and x.data_location != x.EXTERNAL for x in numbers)
    return usual and here and scale.data_type == TensorProto.FLOAT


def _code(node: Any, stored: Stored) -> int:
    """Return the element type of a conversion's zero point, 0 if that is not stored."""
    zero = stored.get(node.input[2]) if len(node.input) > 2 else None
    return 0 if zero is None else int(zero.data_type)


def _number(graph: Any, node: Any, what: str, value: Any) -> str:
    """Store a float32 for a node; returns its name."""
    name = f"{node.output[0]}:{what}"
    graph.initializer.append(from_array(np.asarray(value, np.float32).reshape(()), name))
    return name


def _numbers(graph: Any, node: Any, stored: Stored) -> tuple[str, str]:
    """Store a conversion's scale and zero point as float32."""
    scale, zero = (to_array(stored[name]) for name in node.input[1:3])
    return _number(graph, node, "scale", scale), _number(graph, node, "zero", zero)


def _to_codes(graph: Any, node: Any, stored: Stored) -> list[Any]:
    """Return nodes that round, move by the zero point, and clamp; NaN becomes the smallest code."""
    scale, zero = _numbers(graph, node, stored)
    info = ml_dtypes.iinfo(tensor_dtype_to_np_dtype(_code(node, stored)))
    low, high = (_number(graph, node, what, end) for what, end in (("min", info.min), ("max", info.max)))
    wide, ratio, whole, moved, above, most, codes = (f"{node.output[0]}:{step}" for step in STEPS)
    return [
        make_node("Cast", [node.input[0]], [wide], to=TensorProto.FLOAT),
        make_node("Div", [wide, scale], [ratio], name=node.name),
        make_node("Round", [ratio], [whole]),
        make_node("Add", [whole, zero], [moved]),
        make_node("GreaterOrEqual", [moved, low], [above]),
        make_node("Min", [moved, high], [most]),
        make_node("Where", [above, most, low], [codes]),
    ]


def _from_codes(graph: Any, node: Any, stored: Stored) -> list[Any]:
    """Return nodes that take off the zero point and scale."""
    scale, zero = _numbers(graph, node, stored)
    moved = f"{node.output[0]}:moved"
    return [
        make_node("Sub", [f"{node.input[0]}:{STEPS[-1]}", zero], [moved], name=node.name),
        make_node("Mul", [moved, scale], [node.output[0]]),
    ]
