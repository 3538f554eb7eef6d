"""Tile graphs as ONNX models: one node of the domain ``ladder`` per node of the graph.

Every node carries the tTypes and shapes of its results as attributes (``ttype``, ``shape``). A quantized
weight is a node ``weight`` over initializers in canonical packing; tensors that the model keeps are
initializers under a node ``stored``. What `onnx_native` reads back is the same graph with the same numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
import onnx
import torch

from ladder.frontend.onnx_file import DOMAIN, LIMITS, OPSETS, VALUES
from ladder.frontend.onnx_stages import Imported
from ladder.ir.graph import Node
from ladder.ir.operator import Attribute
from ladder.ir.ops import get_operator
from ladder.ir.printer import print_literal
from ladder.runtime.model.program import Source
from tile_types.arrays import numpy_dtype
from tile_types.errors import ShapeError
from tile_types.files import replacing
from tile_types.identity import own_values
from tile_types.tile import Tile
from tile_types.ttype import TType

LARGEST = 2_000_000_000
"""Bytes of initializers in one protocol buffer; more go into a file beside it."""

ALIGNMENT = 4096
"""Of tensors in that file, so that it can be mapped."""

IR_VERSION = 10


def export_onnx(imported: Imported, path: str | os.PathLike[str], *, external: bool | None = None) -> Path:
    """Write a tile graph as an ONNX model.

    imported: The graph, its weights in canonical storage, and the tensors that it keeps.
    path: The file.
    external: Whether tensors go into ``<path>.data``; by default where they take more than 2 GB.
    Returns: The path.
    Raises ShapeError if an input takes no part in the graph.
    Raises ArtifactError if a file cannot be written; older files there stay as they were.
    """
    target = Path(os.fspath(path))
    model, arrays = _Writer(imported).model()
    total = sum(array.nbytes for array in arrays.values())
    apart = total > LARGEST if external is None else external
    data = Path(f"{target}.data")
    with contextlib.ExitStack() as files:
        part = files.enter_context(replacing(target, lasting=True))
        if apart:
            stream = files.enter_context(files.enter_context(replacing(data, lasting=True)).open("wb"))
            tensors = (_apart(name, array, stream, data.name) for name, array in arrays.items())
        else:
            tensors = (onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
        model.graph.initializer.extend(tensors)
        part.write_bytes(model.SerializeToString())
    return target


def _apart(name: str, array: np.ndarray, data: IO[bytes], location: str) -> Any:
    """Write a tensor's data to a file that will be at ``location``, and return the tensor that says where."""
    data.write(b"\0" * (-data.tell() % ALIGNMENT))
    begin = data.tell()
    data.write(np.ascontiguousarray(array).tobytes())
    tensor = onnx.TensorProto(
        name=name,
        dims=array.shape,
        data_type=onnx.helper.np_dtype_to_tensor_dtype(array.dtype),
        data_location=onnx.TensorProto.EXTERNAL,
    )
    for key, value in (("location", location), ("offset", begin), ("length", array.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


class _Writer:
    """Makes the protocol buffer of a program."""

    def __init__(self, imported: Imported) -> None:
        self.imported = imported
        self.program = imported.program
        self.arrays: dict[str, np.ndarray] = {}
        self.nodes: list[Any] = []
        self.named: dict[str, str] = {}

    def model(self) -> tuple[Any, dict[str, np.ndarray]]:
        """Return the model without its initializers, and those by name."""
        graph = self.program.graph
        inputs = [self.input(at, name) for at, name in enumerate(self.imported.inputs)]
        for node in graph.nodes:
            (self.operand if node.operator == "input" else self.operator)(node)
        outputs = [self.output(name, at) for at, name in enumerate(self.imported.outputs)]
        body = onnx.helper.make_graph(self.nodes, graph.name, inputs, outputs)
        versions = [onnx.helper.make_opsetid("", OPSETS[-1]), onnx.helper.make_opsetid(DOMAIN, 1)]
        model = onnx.helper.make_model(
            body, opset_imports=versions, producer_name="ladder", ir_version=IR_VERSION
        )
        told = {LIMITS: self.imported.limits, VALUES: own_values(*self._types())}
        onnx.helper.set_model_props(model, {name: json.dumps(value) for name, value in told.items() if value})
        return model, self.arrays

    def _types(self) -> list[TType]:
        return [tile.ttype for node in self.program.graph.nodes for tile in node.tiles]

    def input(self, at: int, name: str) -> Any:
        """Declare an input; the graph's own name of it is what importing makes of this one."""
        found = [n for n, source in self.program.sources.items() if source == Source("argument", (at,))]
        if not found:
            raise ShapeError(f"input {name!r} takes no part in the model")
        self.named[found[0]] = name
        return _info(name, self.program.graph.tile(found[0]))

    def output(self, name: str, at: int) -> Any:
        result = self.program.results[at]
        if isinstance(result, int):
            value = self.program.graph.outputs[result]
            self.nodes.append(onnx.helper.make_node("Identity", [self.named.get(value, value)], [name]))
            return _info(name, self.program.graph.tile(value))
        array = _array(result[0])
        self.arrays[f"{name}.value"] = array
        self.nodes.append(onnx.helper.make_node("Identity", [f"{name}.value"], [name]))
        code = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return onnx.helper.make_tensor_value_info(name, code, array.shape)

    def operand(self, node: Node) -> None:
        """Write what the model keeps; inputs are declared already."""
        source = self.program.sources[node.name]
        if source.kind == "held":
            self.arrays[f"{node.name}.value"] = _array(self.program.held[source.at[0]])
            self.add("stored", [f"{node.name}.value"], node, {})
        elif source.kind == "weight":
            weight = self.imported.weights[source.at[0]]
            stored = weight.value.numpy().to_dict()
            names = {key: f"{node.name}.{key}" for key in stored["arrays"]}
            self.arrays |= {names[key]: np.asarray(array) for key, array in stored["arrays"].items()}
            facts = {
                "arrays": list(names),
                "metadata": json.dumps(stored["metadata"]),
                "gemm": json.dumps(asdict(weight.gemm)),
            }
            self.add("weight", list(names.values()), node, facts)
        elif source.kind == "part":
            whole = next(
                name
                for name, other in self.program.sources.items()
                if other.kind == "weight" and other.at == source.at
            )
            self.add("part", [whole], node, {})

    def operator(self, node: Node) -> None:
        """Write an operator with its attributes."""
        kinds = get_operator(node.operator).attributes
        given = {name: _encoded(kinds[name], value) for name, value in node.attributes}
        self.add(node.operator, [self.named.get(value, value) for value in node.inputs], node, given)

    def add(self, operator: str, inputs: Sequence[str], node: Node, given: Mapping[str, Any]) -> None:
        """Write a node with the tTypes and shapes of its results."""
        types = {
            "ttype": [tile.ttype.name for tile in node.tiles],
            "shape": [print_literal(tile.shape) for tile in node.tiles],
        }
        attributes = {f"{name}_" if name in types else name: value for name, value in given.items()}
        self.nodes.append(
            onnx.helper.make_node(
                operator, inputs, node.values, name=node.name, domain=DOMAIN, **attributes, **types
            )
        )


def _info(name: str, tile: Tile) -> Any:
    code = onnx.helper.np_dtype_to_tensor_dtype(numpy_dtype(tile.ttype.name))
    return onnx.helper.make_tensor_value_info(name, code, tile.shape)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array; types that numpy lacks keep their bits."""
    plain = tensor.detach().cpu().contiguous()
    name = str(plain.dtype).removeprefix("torch.")
    if hasattr(ml_dtypes, name):
        bits: np.ndarray = plain.reshape(-1).view(torch.uint8).numpy()
        return np.asarray(bits.view(getattr(ml_dtypes, name)).reshape(tuple(plain.shape)))
    found: np.ndarray = plain.numpy()
    return found


_PLAIN = ("int", "flag", "name", "type")
"""Kinds of attributes that ONNX holds as they are; the others travel as text of tile graphs."""


def _encoded(attribute: Attribute, value: Any) -> Any:
    if attribute.kind == "ints" and value:
        return list(value)
    if value is None or attribute.kind not in _PLAIN:
        return print_literal(value)
    return int(value) if attribute.kind == "flag" else value
