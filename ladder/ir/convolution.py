"""The normal form of a convolution: what ``contract`` over windows with a kernel is."""

from __future__ import annotations

from dataclasses import dataclass

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import parse_indexing
from tile_types.errors import ShapeError
from tile_types.tile import Extent


@dataclass(frozen=True)
class Convolution:
    """``y[n, g, f, h] = sum over c, r of x[n, g, c, stride*h + dilation*r - padding] * w[g, f, c, r]``.

    Parameters
    ----------
    rank
        Spatial axes.
    stride, padding, dilation
        One number per spatial axis.
    groups
        Number of groups; their axis is left out if there is one.
    shape
        Of the result, with the axis of groups if there are any.
    """

    rank: int
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    shape: tuple[Extent, ...]


def as_convolution(graph: Graph, node: Node) -> Convolution:
    """Recognise a convolution.

    Raises
    ------
    ShapeError
        If the contraction is none: its indexing is named.
    """
    attributes = node_attributes(node)
    indexing = parse_indexing(attributes["spec"])
    image, kernel = indexing.operands
    grouped = image[1].index == kernel[0].index
    lead = 3 if grouped else 2
    places = image[lead:]
    taps = [axis.index for axis in kernel[-len(places) :]]
    outer = indexing.result[-len(places) :]
    settings = []
    for axis, tap, at in zip(places, taps, outer, strict=True):
        terms = dict(axis.terms)
        if tap is None or set(terms) != {tap, at} or axis.offset > 0:
            raise ShapeError(f"the contraction {attributes['spec']!r} is no convolution")
        settings.append((terms[at], -axis.offset, terms[tap]))
    stride, padding, dilation = zip(*settings, strict=True)
    groups = graph.tile(node.inputs[0]).shape[1] if grouped else 1
    if not isinstance(groups, int):
        raise ShapeError(f"a convolution needs a known number of groups, got {groups}")
    return Convolution(len(places), stride, padding, dilation, groups, node.tile.shape)
