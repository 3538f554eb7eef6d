"""The normal form of a convolution: what ``contract`` over windows with a kernel is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ladder.ir.build import node_attributes
from ladder.ir.extents import Shape, product
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import parse_indexing
from ladder.ir.ops import get_operator
from ladder.ir.windows import Windows
from tile_types.errors import ShapeError
from tile_types.tile import Extent


@dataclass(frozen=True)
class Convolution:
    """``y[n, g, f, h] = sum over c, r of x[n, g, c, stride*h + dilation*r - padding] * w[g, f, c, r]``.

    stride, padding, dilation: One number per spatial axis.
    taps: Elements of a window along each spatial axis.
    groups: Number of groups; their axis is left out if there is one.
    shape: Of the result, with the axis of groups if there are any.
    last: Whether channels are the last axes of all operands: ``x[n, s, g, c]``, ``w[g, f, r, c]``, ``y[n, h,
        g, f]``.
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
        return self.have_points and self.groups == 1

    @property
    def have_points(self) -> bool:
        """Whether every window is one element, in groups or not."""
        return self.taps == self.stride == (1,) * self.rank and not any(self.padding)


def as_convolution(graph: Graph, node: Node) -> Convolution:
    """Recognise a convolution.

    Raises ShapeError if the contraction is none: its indexing is named.
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
    behind = len(kernel) - last
    kernel_places = kernel[behind - len(places) : behind]
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


@dataclass(frozen=True)
class FusedConvolution:
    """``functions(convolution(x, weight) + bias + residual)``: channels last.

    form: The convolution.
    x, weight, bias, residual: Inputs of the graph, the last two empty where there are none.
    functions: Names of unary operators, in order.
    features: Channels of the result.
    depth: Products per element of the result.
    """

    form: Convolution
    x: str
    weight: str
    features: int
    depth: int
    bias: str = ""
    residual: str = ""
    functions: tuple[str, ...] = ()

    @property
    def places(self) -> Extent:
        """How many windows it multiplies."""
        return product(self.form.shape[: -2 if self.form.groups > 1 else -1])

    @property
    def windows(self) -> Windows | None:
        """The windows that it multiplies, as kernels take them; None for rows."""
        return None if self.form.are_points else windows_of(self.form)


def windows_of(form: Convolution) -> Windows:
    """Return the windows of a convolution of known taps along one or two axes."""
    kernel = tuple(int(str(extent)) for extent in form.taps)
    settings = (kernel, form.stride, form.padding, form.dilation)
    given = zip(settings, _NEUTRAL, strict=True)
    window, stride, padding, dilation = (
        (value[0] if len(value) > 1 else one, value[-1]) for value, one in given
    )
    return Windows(window, stride, padding, dilation, form.groups)


_NEUTRAL = (1, 1, 0, 1)
"""Window, stride, padding and dilation along an axis that is not there."""


def as_fused_convolution(graph: Graph) -> FusedConvolution:
    """Recognise a convolution, channels last, with what follows it.

    Raises ShapeError if the graph computes anything else; the operator that does not fit is named.
    """
    if len(graph.outputs) != 1:
        raise ShapeError(f"a convolution has one result, graph {graph.name!r} has {len(graph.outputs)}")
    functions: list[str] = []
    added: dict[str, str] = {}
    node = _below_converts(graph, graph.outputs[0])
    while get_operator(node.operator).unary:
        functions.insert(0, node.operator)
        node = _below_converts(graph, node.inputs[0])
    while node.operator == "add":
        node = _peel(graph, node, added)
    if node.operator == "reshape" and joins_groups(graph, node):
        node = graph.producer(node.inputs[0])
    if node.operator != "contract":
        raise ShapeError(f"%{node.name} = {node.operator}(...) is not part of a convolution")
    form = as_convolution(graph, node)
    x, weight = (_source(graph, value) for value in node.inputs)
    shape = graph.tile(node.inputs[1]).shape
    behind = form.rank + 1
    features, depth = product(shape[:-behind]), product(shape[-behind:])
    if not form.last or not isinstance(features, int) or not isinstance(depth, int):
        raise ShapeError("a convolution needs channels last, and known numbers of them")
    if "bias" in added and graph.tile(added["bias"]).shape != (features,):
        raise ShapeError("what is added to each group alike is no bias")
    return FusedConvolution(form, x, weight, features, depth, functions=tuple(functions), **added)


def joins_groups(graph: Graph, node: Node) -> bool:
    """Tell whether a reshape makes one axis of the channels that a convolution has by groups."""
    source = graph.producer(node.inputs[0])
    shape = source.tile.shape
    if source.operator != "contract" or node.tile.shape != (*shape[:-2], product(shape[-2:])):
        return False
    try:
        return as_convolution(graph, source).groups > 1
    except ShapeError:
        return False


def _below_converts(graph: Graph, value: str) -> Node:
    return graph.producer(graph.unconverted(value))


def _source(graph: Graph, value: str) -> str:
    node = graph.producer(value)
    if node.operator != "input":
        raise ShapeError(f"%{node.name} = {node.operator}(...) is computed on the way to a convolution")
    return node.name


def _peel(graph: Graph, node: Node, added: dict[str, str]) -> Node:
    """Note what a node adds to the rest, which is returned."""
    for value, rest in (node.inputs, node.inputs[::-1]):
        other = _below_converts(graph, value)
        if other.operator != "input":
            continue
        if other.tile.ttype != graph.tile(graph.outputs[0]).ttype:
            break
        role = "bias" if other.tile.shape == node.tile.shape[-1:] else "residual"
        if role == "residual" and other.tile.shape != node.tile.shape:
            break
        if role in added or (role == "residual" and "bias" in added):
            break
        added[role] = other.name
        return _below_converts(graph, rest)
    raise ShapeError(f"%{node.name} adds neither a vector of channels nor a tensor like the result")
