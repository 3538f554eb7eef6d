"""The normal form of a convolution: what ``contract`` over windows with a kernel is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ladder.ir.build import node_attributes
from ladder.ir.extents import Shape
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import parse_indexing
from tile_types.errors import ShapeError
from tile_types.tile import Extent


@dataclass(frozen=True)
class Convolution:
    """``y[n, g, f, h] = sum over c, r of x[n, g, c, stride*h + dilation*r - padding] * w[g, f, c, r]``.

    Parameters
    ----------
    stride, padding, dilation
        One number per spatial axis.
    taps
        Elements of a window along each spatial axis.
    groups
        Number of groups; their axis is left out if there is one.
    shape
        Of the result, with the axis of groups if there are any.
    last
        Whether channels are the last axes of all operands: ``x[n, s, g, c]``, ``w[g, f, r, c]``,
        ``y[n, h, g, f]``.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    taps: tuple[Extent, ...]
    groups: int
    shape: tuple[Extent, ...]
    last: bool = False

    @property
    def rank(self) -> int:
        """Spatial axes."""
        return len(self.stride)

    @property
    def are_points(self) -> bool:
        """Whether every element of the result is a product of one element's channels."""
        ones = (1,) * self.rank
        plain = self.taps == self.stride == ones and not any(self.padding)
        return plain and self.groups == 1


def as_convolution(graph: Graph, node: Node) -> Convolution:
    """Recognise a convolution.

    Raises
    ------
    ShapeError
        If the contraction is none: its indexing is named.
    """
    return convolution_of(node, [graph.tile(value).shape for value in node.inputs])


def convolution_of(node: Node, shapes: Sequence[Shape]) -> Convolution:
    """Recognise a convolution of operands of given shapes; raises as `as_convolution`."""
    spec = node_attributes(node)["spec"]
    indexing = parse_indexing(spec)
    if len(indexing.operands) != 2:
        raise ShapeError(f"the contraction {spec!r} is no convolution")
    image, kernel = indexing.operands
    shared = {axis.index for axis in image} & {axis.index for axis in kernel} - {None}
    grouped = [at for at, axis in enumerate(image) if axis.index in shared & set(indexing.result)]
    last = image[-1].index in shared and len(image) > 2
    lead = 2 + len(grouped)
    places = image[1 : len(image) - lead + 1] if last else image[lead:]
    kernel_places = kernel[len(kernel) - 1 - len(places) : -1] if last else kernel[len(kernel) - len(places) :]
    at = 1 if last else lead
    outer = indexing.result[at : at + len(places)]
    settings = []
    for axis, tap, name in zip(places, kernel_places, outer, strict=True):
        terms = dict(axis.terms)
        if tap.index is None or set(terms) != {tap.index, name} or axis.offset > 0:
            raise ShapeError(f"the contraction {spec!r} is no convolution")
        settings.append((terms[name], -axis.offset, terms[tap.index]))
    if not settings:
        raise ShapeError(f"the contraction {spec!r} has no windows")
    stride, padding, dilation = zip(*settings, strict=True)
    groups = shapes[0][grouped[0]] if grouped else 1
    if not isinstance(groups, int):
        raise ShapeError(f"a convolution needs a known number of groups, got {groups}")
    taps = tuple(shapes[1][kernel.index(axis)] for axis in kernel_places)
    return Convolution(stride, padding, dilation, taps, groups, node.tile.shape, last)
