"""Views: chains of nodes that only change indices, and whether they need a copy."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from ladder.ir.build import node_attributes
from ladder.ir.extents import Shape, bind_shape, size_names
from ladder.ir.graph import Graph, Node
from ladder.partition.subgraphs import engine
from tile_types.errors import ShapeError


def view_chain(graph: Graph, value: str, stored: Container[str] = ()) -> tuple[list[str], str | None]:
    """Return the view nodes that lead to a value, first to last, and what they view.

    stored: Views that have been copied: they are viewed.
    The source is None where the chain begins with numbers (which then are part of it).
    """
    return _chain(graph, value, lambda node: engine(node) in ("view", "leaf"), stored)


def is_inlined(graph: Graph, node: Node) -> bool:
    """Tell whether every reader computes a node for itself.

    Views, numbers, counts, and conversions to wider types, of counts, of what the model is given, or of what
    had their type before it was widened: storing would cost more.
    """
    if engine(node) in ("view", "leaf") or node.operator == "iota":
        return True
    if node.operator != "convert":
        return False
    before, after = graph.tile(node.inputs[0]).ttype, node.tile.ttype
    source = graph.producer(node.inputs[0])
    given = engine(source) == "input" or source.operator == "iota"
    given = given or (source.operator == "convert" and graph.tile(source.inputs[0]).ttype == after)
    return not before.is_block and (given or after.elem_bits >= before.elem_bits)


def inlined_chain(graph: Graph, value: str, stored: Container[str] = ()) -> tuple[list[str], str | None]:
    """Return the inlined nodes that lead to a value, first to last, and what they read; None for numbers."""
    return _chain(graph, value, partial(is_inlined, graph), stored)


def _chain(
    graph: Graph, value: str, goes_on: Callable[[Node], bool], stored: Container[str]
) -> tuple[list[str], str | None]:
    """Return the nodes that lead to a value as long as each goes on, and what they read; None for numbers."""
    members: list[str] = []
    while value not in stored and goes_on(node := graph.producer(value)):
        members.insert(0, node.name)
        if not node.inputs:
            return members, None
        value = node.inputs[0]
    return members, value


_PROBES = (61, 2003, 65537, 2097169)
"""Stand-ins for symbolic sizes where only the arrangement matters: prime, larger if extents need it."""


def is_free(graph: Graph, members: Sequence[str], in_order: bool = False) -> bool:
    """Tell whether views of a contiguous value need no copy, also where the last is to lie in order."""
    if not members:
        return True
    first = graph.producer(members[0])
    sizes = _probe_sizes([graph.tile(first.inputs[0]).shape, *(graph.tile(m).shape for m in members)])
    if sizes is None:
        return False
    shape = [int(extent) for extent in bind_shape(graph.tile(first.inputs[0]).shape, sizes)]
    strides = [int(np.prod(shape[at + 1 :], dtype=np.int64)) * 4 for at in range(len(shape))]
    array = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), shape, strides)
    try:
        for name in members:
            array = _apply(array, graph.producer(name), sizes)
    except ValueError:
        return False
    return not in_order or bool(array.flags.c_contiguous)


def _probe_sizes(shapes: Sequence[Shape]) -> dict[str, int] | None:
    """Return sizes for which no extent is negative, and none divides by 0; None if no probe is one."""
    names = sorted(size_names(extent for shape in shapes for extent in shape))
    for probe in _PROBES:
        sizes = {name: probe + 12 * at for at, name in enumerate(names)}
        with suppress(ShapeError):  # of a quotient's divisor, as in `64 // (n // 1920)`
            if all(int(extent) >= 0 for shape in shapes for extent in bind_shape(shape, sizes)):
                return sizes
    return None


def _apply(array: np.ndarray, node: Node, sizes: dict[str, int]) -> np.ndarray:
    """Apply a view without reading; raises ValueError where numpy would have to copy."""
    attributes = node_attributes(node)
    shape = [int(extent) for extent in bind_shape(node.tile.shape, sizes)]
    if node.operator == "reshape":
        return array.reshape(shape, copy=False)
    if node.operator == "transpose":
        return array.transpose(attributes["permutation"])
    if node.operator == "broadcast":
        return np.broadcast_to(array, shape)
    begin = [int(extent) for extent in bind_shape(attributes["begin"], sizes)]
    step = attributes["step"] or (1,) * len(shape)
    return array[tuple(slice(b, b + n * s, s) for b, n, s in zip(begin, shape, step, strict=True))]
