"""Nodes of the domain ``ladder`` as nodes of a tile graph: the inverse of `onnx_export`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ladder.frontend.importer import identifier
from ladder.frontend.onnx_call import Value
from ladder.frontend.onnx_stages import Piece, Weight
from ladder.frontend.onnx_values import Known, as_tensor
from ladder.ir.extents import canonical
from ladder.ir.graph import Node
from ladder.ir.operator import Attribute
from ladder.ir.ops import get_operator
from ladder.ir.parser import parse_literal
from ladder.runtime.model.program import ImportRefused, Source
from ladder.runtime.packed import gemm_from_dict
from tile_types.library import get_type
from tile_types.quantized import QuantizedTensor
from tile_types.tile import Tile

Reader = Callable[[Piece, Any, Mapping[str, Any], Sequence[Any], tuple[Tile, ...]], tuple[str, ...]]


def _decoded(attribute: Attribute, value: Any) -> Any:
    if attribute.kind == "ints" and not isinstance(value, bytes):
        return tuple(value)
    plain = value.decode() if isinstance(value, bytes) else value
    if attribute.kind in ("name", "type"):
        return plain
    if attribute.kind == "flag":
        return bool(plain)
    return parse_literal(plain) if isinstance(plain, str) else plain


def add_native(
    piece: Piece, node: Any, given: Mapping[str, Any], inputs: Sequence[Value | None]
) -> tuple[Value, ...]:
    """Add a node of Ladder's domain to the graph.

    Raises ImportRefused if what the table infers is not what the node states.
    """
    tiles = _tiles(given)
    reader: Reader = _READERS.get(node.op_type, _operator)
    own = {name: value for name, value in given.items() if name not in ("ttype", "shape")}
    found = reader(piece, node, {name.rstrip("_"): value for name, value in own.items()}, inputs, tiles)
    for value, tile in zip(found, tiles, strict=True):
        here = piece.im.tile(value)
        if (here.ttype.name, here.shape) != (tile.ttype.name, tile.shape):
            raise ImportRefused(
                f"{node.op_type} {node.name!r} states {tile.ttype}{list(tile.shape)},"
                f" its row gives {here.ttype}{list(here.shape)}"
            )
    return found


def _tiles(given: Mapping[str, Any]) -> tuple[Tile, ...]:
    shapes: list[Any] = [parse_literal(text.decode()) for text in given["shape"]]
    return tuple(
        Tile(get_type(name.decode()), tuple(map(canonical, shape)))
        for name, shape in zip(given["ttype"], shapes, strict=True)
    )


def _operator(
    piece: Piece, node: Any, given: Mapping[str, Any], inputs: Sequence[Any], tiles: tuple[Tile, ...]
) -> tuple[str, ...]:
    row = get_operator(node.op_type)
    attributes = {name: _decoded(row.attributes[name], value) for name, value in given.items()}
    operands = [piece.tensor(value) for value in inputs]
    if row.role != "call":
        return (piece.im.g.add(node.op_type, *operands, name=node.name, **attributes),)
    added = Node(piece.im.g.fresh(node.name), "call", tuple(operands), row.stored(attributes), tiles)
    piece.im.g.insert(added)
    return added.values


def _stored(
    piece: Piece, node: Any, given: Mapping[str, Any], inputs: Sequence[Any], tiles: tuple[Tile, ...]
) -> tuple[str, ...]:
    """Return a tensor that the model keeps."""
    (value,) = inputs
    assert isinstance(value, Known)  # an initializer
    name = piece.im.g.input(identifier(node.name), tiles[0].ttype, tiles[0].shape)
    piece.hold(name, as_tensor(value.array))
    return (name,)


def _weight(
    piece: Piece, node: Any, given: Mapping[str, Any], inputs: Sequence[Any], tiles: tuple[Tile, ...]
) -> tuple[str, ...]:
    names = [name.decode() for name in given["arrays"]]
    arrays = {name: value.array for name, value in zip(names, inputs, strict=True)}
    value = QuantizedTensor.from_dict({"arrays": arrays, "metadata": json.loads(given["metadata"])})
    gemm = gemm_from_dict(json.loads(given["gemm"]))
    piece.weights.append(Weight(gemm, value.to("cpu")))
    return (_declared(piece, node, tiles, Source("weight", (len(piece.weights) - 1,), gemm)),)


def _part(
    piece: Piece, node: Any, given: Mapping[str, Any], inputs: Sequence[Any], tiles: tuple[Tile, ...]
) -> tuple[str, ...]:
    """Return what is packed with a weight and never passed on its own."""
    return (_declared(piece, node, tiles, Source("part", piece.sources[inputs[0]].at)),)


def _declared(piece: Piece, node: Any, tiles: tuple[Tile, ...], source: Source) -> str:
    name = piece.im.g.input(identifier(node.name), tiles[0].ttype, tiles[0].shape)
    piece.sources[name] = source
    return name


_READERS: Mapping[str, Reader] = {"stored": _stored, "weight": _weight, "part": _part}
"""Operators of the domain that are no rows of the table."""
