"""Zeros behind the channels of an image, moved to where they cost nothing: into the weights that make it.

A product of points wants rows of whole pieces of 16 bytes. If what makes the image is a product with sums
over windows behind it, zeros among its weights make such rows, and every kernel on the way has whole vectors.
"""

from __future__ import annotations

from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Node
from ladder.ir.indexing import Indexing, parse_indexing
from ladder.rewrite.rules import Match, Rule, Rules, pattern

OF_ZERO = frozenset({"convert", "relu", "neg", "abs", "silu", "tanh", "gelu"})
"""Functions of one operand that are 0 at 0."""


def _move(match: Match) -> str | None:
    """``pad(x)`` of zeros behind the last axis -> x made of operands with zeros."""
    given, shape = node_attributes(match.root), match.tile("x").shape
    high, channels = given["high"], shape[-1]
    plain = not any(given["low"]) and not any(high[:-1]) and not given.get("value")
    if not plain or not isinstance(channels, int) or not isinstance(high[-1], int) or len(shape) < 3:
        return None
    wider = Wider(match, channels, high[-1])
    value = wider.of(match["x"], len(shape) - 1)
    return wider.cleared(value, len(shape)) if value is not None and wider.gathers else None


class Wider:
    """Makes values with zeros behind an axis: NaN where an image is infinite, until they are cleared.

    channels, more: What the axis has, and how many zeros are added.
    gathers: Whether there are windows on the way: a kernel of sums over windows, which clears for nothing.
    """

    def __init__(self, match: Match, channels: int, more: int) -> None:
        self.match, self.builder, self.channels, self.more = match, match.builder, channels, more
        self.gathers = False

    def of(self, value: str, axis: int) -> str | None:
        """Return a value with zeros behind ``axis``; None where others read it too, or it takes a copy."""
        node = self.builder.node(value)
        if value in self.match.shared:
            return None
        operator = node.operator
        if operator in OF_ZERO:
            return self._again(node, [self.of(node.inputs[0], axis)])
        if operator in ("add", "mul"):
            return self._again(node, [self._operand(node, operand, axis) for operand in node.inputs])
        if operator == "reduce_sum":
            given = node_attributes(node)
            below = given["axis"] % len(self.builder.tile(node.inputs[0]).shape)
            if given["keep"]:
                return self._again(node, [self.of(node.inputs[0], axis)]) if below != axis else None
            return self._again(node, [self.of(node.inputs[0], axis + (below <= axis))], axis=below)
        if operator == "transpose":
            return self._again(node, [self.of(node.inputs[0], node_attributes(node)["permutation"][axis])])
        if operator in ("map", "contract"):
            return self._indexed(node, axis)
        return None

    def cleared(self, value: str, rank: int) -> str:
        """Return a value, made by `of`, with zeros behind its last axis whatever the image holds."""
        add = self.builder.add
        place = add("iota", extent=self.channels + self.more, axis=rank - 1, rank=rank, type="int32")
        inside = add("less", place, add("constant", value=float(self.channels), type="int32"))
        ttype = self.builder.tile(value).ttype.name
        return add("select", inside, value, add("constant", value=0.0, type=ttype))

    def _again(self, node: Node, operands: list[str | None], **changed: Any) -> str | None:
        found = [operand for operand in operands if operand is not None]
        if len(found) < len(operands):
            return None
        attributes: dict[str, Any] = dict(node.attributes) | changed
        return self.builder.add(node.operator, *found, **attributes)

    def _operand(self, node: Node, value: str, axis: int) -> str | None:
        """Return an operand of a function by element: one of fewer elements is a parameter, and padded."""
        shape = self.builder.tile(value).shape
        at = axis - (len(node.tile.shape) - len(shape))
        if at < 0 or shape[at] != self.channels:
            return None
        count, whole = product(shape), product(node.tile.shape)
        fewer = isinstance(count, int) and isinstance(whole, int) and count < whole
        return self._padded(value, at) if fewer else self.of(value, at)

    def _padded(self, value: str, axis: int) -> str:
        none = (0,) * len(self.builder.tile(value).shape)
        high = (*none[:axis], self.more, *none[axis + 1 :])
        return self.builder.add("pad", value, low=none, high=high)

    def _indexed(self, node: Node, axis: int) -> str | None:
        """Return windows or a product whose index at ``axis`` reaches further."""
        given = node_attributes(node)
        indexing: Indexing = parse_indexing(given["spec"])
        name = indexing.result[axis]
        places = [
            (number, at)
            for number, axes in enumerate(indexing.operands)
            for at, index in enumerate(axes)
            if name in index.names
        ]
        if len(places) != 1:
            return None
        number, at = places[0]
        self.gathers |= node.operator == "map"
        if indexing.operands[number][at].index != name:
            return None
        operands: list[str | None] = [*node.inputs]
        source = node.inputs[number]
        operands[number] = self._padded(source, at) if number else self.of(source, at)
        sizes = tuple((index, extent) for index, extent in given["sizes"] if index != name)
        return self._again(node, operands, sizes=sizes)


CHANNELS_OF_ZEROS: Rules = (Rule("zeros of channels come from weights", pattern("pad", "x"), _move),)
"""For NVIDIA's GPUs, after convolutions of points have got them."""
