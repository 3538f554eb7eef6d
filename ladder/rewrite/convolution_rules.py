"""Rules that give convolutions channels last, and let channels be split and joined there.

Zeros behind the channels of an image move to where they cost nothing: into the weights that make it. A
product of points wants rows of whole pieces of 16 bytes. If what makes the image is a product with sums over
windows behind it, zeros among its weights make such rows, and every kernel on the way has whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.convolution import Convolution, convolution_of
from ladder.ir.extents import Shape, product
from ladder.ir.graph import Node
from ladder.ir.indexing import Affine, Indexing, parse_indexing
from ladder.rewrite.rules import Match, Rule, Rules, pattern
from ladder.rewrite.transpose_rules import (
    DEPTHWISE,
    DEPTHWISE_FIRST,
    axis_runs,
    channels_first,
    is_turned,
    sum_of_windows,
)
from schedules.row_panels import Registers, are_few, registers_of
from targets import TileDevice
from tile_types.errors import ShapeError


def channels_last(rank: int) -> tuple[int, ...]:
    """Return the permutation that brings axis 1 to the end."""
    return (0, *range(2, rank), 1)


def _convolution(match: Match) -> Convolution | None:
    """Return the convolution that a match's root is; None if it is none."""
    try:
        return convolution_of(match.root, [match.builder.tile(value).shape for value in match.root.inputs])
    except ShapeError:
        return None


def _turn(match: Match) -> str | None:
    """Turn a convolution with channels first into transposes around one with channels last."""
    form = _convolution(match)
    if form is None or form.last or _is_depthwise(form, match):
        return None
    return (_turned_groups if form.groups > 1 else _turned_whole)(match)


def _is_depthwise(form: Convolution, match: Match) -> bool:
    """Tell whether every channel is convolved by itself: those are sums over windows."""
    return form.groups > 1 and tuple(match.builder.tile(match.root.inputs[1]).shape[1:3]) == (1, 1)


def _turned_whole(match: Match) -> str:
    image, kernel, result = _operands(match)
    operands = []
    for value in match.root.inputs:
        order = channels_last(len(match.builder.tile(value).shape))
        operands.append(match.builder.add("transpose", value, permutation=order))
    value = _contract(match, operands, _last(image), _last(kernel), _last(result))
    return match.builder.add("transpose", value, permutation=channels_first(len(result)))


def _turned_groups(match: Match) -> str:
    """As `_turned_whole`, where ``x[n, g, c, s]`` is an opened ``[n, g c, s]``."""
    image, kernel, result = _operands(match)
    x, weight = match.root.inputs
    shape = match.builder.tile(x).shape
    closed = match.builder.add("reshape", x, shape=(shape[0], product(shape[1:3]), *shape[3:]))
    rows = match.builder.add("transpose", closed, permutation=channels_last(len(shape) - 1))
    opened = match.builder.add("reshape", rows, shape=(shape[0], *shape[3:], *shape[1:3]))
    rank = len(kernel)
    turned = match.builder.add("transpose", weight, permutation=(0, 1, *range(3, rank), 2))
    value = _contract(
        match,
        [opened, turned],
        (image[0], *image[3:], *image[1:3]),
        (*kernel[:2], *kernel[3:], kernel[2]),
        (result[0], *result[3:], *result[1:3]),
    )
    found = match.builder.tile(value).shape
    joined = match.builder.add("reshape", value, shape=(*found[:-2], product(found[-2:])))
    first = match.builder.add("transpose", joined, permutation=channels_first(len(found) - 1))
    return match.builder.add("reshape", first, shape=match.root.tile.shape)


def _operands(match: Match) -> tuple[tuple[Affine, ...], tuple[Affine, ...], tuple[str, ...]]:
    indexing = parse_indexing(node_attributes(match.root)["spec"])
    return indexing.operands[0], indexing.operands[1], indexing.result


def _last(axes: Sequence[Any]) -> tuple[Any, ...]:
    return (axes[0], *axes[2:], axes[1])


def _contract(
    match: Match,
    operands: Sequence[str],
    image: Sequence[Affine],
    kernel: Sequence[Affine],
    result: Sequence[str],
) -> str:
    given: dict[str, Any] = dict(match.root.attributes)
    given["spec"] = str(Indexing((tuple(image), tuple(kernel)), tuple(result)))
    return match.builder.add("contract", *operands, **given)


def _unless(left: Callable[[Match], bool], rules: Rules) -> Rules:
    """Return rules of convolutions without those that are left."""

    def of(rule: Rule) -> Rule:
        return replace(rule, function=lambda match: None if left(match) else rule.function(match))

    return tuple(map(of, rules))


def _is_first(match: Match) -> bool:
    """Tell whether the image of a convolution has channels first in memory."""
    node = match.builder.node(match.root.inputs[0])
    if node.operator != "transpose":
        return node.operator != "reshape" or not is_turned(match, node.inputs[0])
    return not _is_last(match.builder.tile(node.inputs[0]).shape, node_attributes(node)["permutation"])


def _is_last(shape: Shape, order: Sequence[int]) -> bool:
    """Tell whether an image of permuted axes of a shape has channels last in memory, or lies as if it had."""
    if len(order) < 3:
        return False
    kept = [axis for axis in _last(order) if shape[axis] != 1]
    return kept == sorted(kept)


def _stays(match: Match, registers: Registers | None) -> bool:
    """Tell whether a lone convolution stays as it is: turning its image is a copy, or no kernel is faster."""
    image, kernel = (match.builder.tile(value).shape for value in match.root.inputs)
    if registers is None or not _is_first(match) or not _is_last(image, range(len(image))):
        return _is_first(match)
    rows = product(_last(match.root.tile.shape)[:-1])
    return not are_few(rows, product(kernel), registers)


def _is_library(match: Match) -> bool:
    """Tell whether a convolution is of float32 and has channels first in memory."""
    return match.builder.tile(match.root.inputs[0]).ttype.name == "float32" and _is_first(match)


TURNED: Rules = (Rule("convolutions with channels last", pattern("contract"), _turn),)

CHANNELS_LAST: Rules = TURNED + _unless(_is_first, DEPTHWISE)
"""For CPUs: sums over windows of single channels are slow across memory."""


def lone(device: TileDevice | None) -> Rules:
    """Return the rules for programs of one convolution: no other gains by what turning its image costs."""
    return _unless(partial(_stays, registers=registers_of(device)), TURNED + DEPTHWISE)


OURS_LAST: Rules = _unless(_is_library, TURNED + DEPTHWISE) + DEPTHWISE_FIRST
"""For NVIDIA's GPUs: cuDNN convolves float32 images as they lie faster than anything after a copy."""


def _places(shape: Shape) -> list[int]:
    """Return the axes that have more than one element."""
    return [axis for axis, extent in enumerate(shape) if extent != 1]


def _move_nothing(match: Match) -> str | None:
    """``transpose(x)`` that only moves axes of one element -> ``reshape(x)``."""
    permutation = node_attributes(match.root)["permutation"]
    kept = _places(match.tile("x").shape)
    if [axis for axis in permutation if axis in kept] != kept:
        return None
    return match.builder.add("reshape", match["x"], shape=match.root.tile.shape)


def _split_channels(match: Match) -> str | None:
    """``reshape(turned x)`` that splits the channels -> transpose of x with its last axis split."""
    permutation = match.attributes("turned")["permutation"]
    rank, shape = len(permutation), match.root.tile.shape
    if rank < 3 or permutation != channels_first(rank):
        return None
    inner = match.tile("x").shape
    parts = len(shape) - rank + 1
    split = shape[1 : 1 + parts]
    if parts < 2 or 1 in split or shape != (inner[0], *split, *inner[1:-1]) or product(split) != inner[-1]:
        return None
    value = match.builder.add("reshape", match["x"], shape=(*inner[:-1], *split))
    order = (0, *range(rank - 1, rank - 1 + parts), *range(1, rank - 1))
    return match.builder.add("transpose", value, permutation=order)


def _join_channels(match: Match) -> str | None:
    """``reshape(transpose(x))`` that joins what x has last -> turned reshape of x, its channels in order.

    The result may have an axis of one element behind the channels: groups of one channel.
    """
    shape = match.root.tile.shape
    value = _joined_channels(match, shape)
    if value is None and len(shape) > 3 and shape[2] == 1:
        value = _joined_channels(match, (*shape[:2], *shape[3:]))
        return None if value is None else match.builder.add("reshape", value, shape=shape)
    return value


def _joined_channels(match: Match, shape: Shape) -> str | None:
    permutation, inner = match.attributes("moved")["permutation"], match.tile("x").shape
    rank = len(permutation)
    parts = rank - len(shape) + 1
    channels, first = permutation[1 : 1 + parts], rank - parts
    if parts < 2 or len(shape) < 3 or permutation[0] != 0 or sorted(channels) != list(range(first, rank)):
        return None
    if permutation[1 + parts :] != tuple(range(1, first)):
        return None
    if shape != (inner[0], product([inner[axis] for axis in channels]), *inner[1:first]):
        return None
    return _turned_reshape(match, [*range(first), *channels], shape)


def _turned_reshape(match: Match, order: list[int], shape: Shape) -> str:
    """Return x with its axes in an order, reshaped with channels last, then with channels first."""
    value = match["x"]
    if order != sorted(order):
        value = match.builder.add("transpose", value, permutation=tuple(order))
    value = match.builder.add("reshape", value, shape=(shape[0], *shape[2:], shape[1]))
    return match.builder.add("transpose", value, permutation=channels_first(len(shape)))


def _join_pixels(match: Match) -> str | None:
    """``reshape(transpose(x))`` whose channels are what x has last, or a part of it -> turned reshape of x.

    Elements of a place may go between those of its neighbours along the other axes, as in ``pixel_shuffle``.
    A sequence that has the last axis of x last already stays.
    """
    permutation, inner = match.attributes("moved")["permutation"], match.tile("x").shape
    shape = match.root.tile.shape
    runs = axis_runs([inner[axis] for axis in permutation], shape)
    if (
        runs is None
        or len(shape) < 3
        or permutation[0] != 0
        or runs[0] != [0]
        or 1 in (*shape[1:], *inner[1:])
    ):
        return None
    moved = [[permutation[at] for at in run] for run in runs]
    last = len(inner) - 1
    stays = len(shape) == 3 and last in moved[-1]
    if last not in moved[1] and (stays or min(moved[1]) < _split_from(match)):
        return None
    return _turned_reshape(match, [axis for run in (moved[0], *moved[2:], moved[1]) for axis in run], shape)


def _split_from(match: Match) -> int:
    """Return where axes of x begin that one last axis was split into; the end if there are none."""
    node, inner = match.builder.node(match["x"]), match.tile("x").shape
    if node.operator != "reshape":
        return len(inner)
    lead = match.builder.tile(node.inputs[0]).shape[:-1]
    return len(lead) if len(lead) > 1 and inner[: len(lead)] == lead else len(inner)


STILL: Rules = (Rule("axes of one element", pattern("transpose", "x"), _move_nothing),)
"""Transposes that change nothing but shapes. To be applied when the others have found their places."""

CHANNEL_GROUPS: Rules = (
    Rule("split channels", pattern("reshape", pattern("transpose", "x", name="turned")), _split_channels),
    Rule("join channels", pattern("reshape", pattern("transpose", "x", name="moved")), _join_channels),
    Rule("join pixels", pattern("reshape", pattern("transpose", "x", name="moved")), _join_pixels),
)
"""Channel shuffles and groups, where channels are last."""


FEW_TERMS = 32
"""Products of an element of the result up to which sums over windows keep up with matrix cores."""

VECTOR = 8
"""Channels of the result that one thread sums side by side."""


def _sum_windows(match: Match) -> str | None:
    """Turn a convolution of few elements, channels last, into sums over windows: they are bound by memory."""
    form = _convolution(match)
    x, weight = match.root.inputs
    shape = match.builder.tile(weight).shape
    depth = product(shape[1:])
    few = (
        isinstance(depth, int) and depth <= FEW_TERMS and isinstance(shape[0], int) and shape[0] % VECTOR == 0
    )
    if form is None or not form.last or form.groups > 1 or form.are_points or not few:
        return None
    image, kernel, result = _operands(match)
    rows = match.builder.tile(x).shape
    opened = match.builder.add("reshape", x, shape=(*rows[:-1], 1, rows[-1]))
    features, names = result[-1], [str(axis.index) for axis in kernel[1:]]
    given = node_attributes(match.root)
    axes = (*image[:-1], Affine.of({features: 1}), image[-1])
    spec = str(Indexing((axes,), (*result, *names)))
    sizes = tuple((name, extent) for name, extent in given["sizes"] if name != features)
    value = match.builder.add("map", opened, spec=spec, sizes=sizes, pad=given["pad"])
    return sum_of_windows(match, value, weight, len(names))


def _pad_channels(match: Match) -> str | None:
    """Give three channels a fourth, of zeros: libraries have kernels for four."""
    form = _convolution(match)
    if form is None or not form.last or match.builder.tile(match.root.inputs[0]).shape[-1] != 3:
        return None
    return _with_channels(match, 1)


def _with_channels(match: Match, more: int) -> str:
    """Return a convolution, channels last, of so many channels more, of zeros."""
    operands = []
    for value in match.root.inputs:
        none = (0,) * (len(match.builder.tile(value).shape) - 1)
        operands.append(match.builder.add("pad", value, low=(*none, 0), high=(*none, more)))
    given: dict[str, Any] = dict(match.root.attributes)
    return match.builder.add("contract", *operands, **given)


ROW_BYTES = 16
"""Kernels of ours read rows that begin at multiples of so many bytes."""

LEAST_PADDED_CHANNELS = 16
"""Fewest channels that are padded to a multiple of eight: of fewer, much of what is read would be padding."""


def _align_points(match: Match) -> str | None:
    """Give the rows of points whole pieces of 16 bytes: what makes them writes zeros; none is copied."""
    x = match.builder.tile(match.root.inputs[0])
    form = _convolution(match)
    channels, half = x.shape[-1], x.ttype.name in ("float16", "bfloat16")
    if form is None or not (form.last and form.are_points and form.groups == 1):
        return None
    if not (half and isinstance(channels, int)):
        return None
    more = -channels % (ROW_BYTES // 2)
    return _with_channels(match, more) if more and channels >= LEAST_PADDED_CHANNELS else None


FEW_CHANNELS: Rules = (
    Rule("few products are sums", pattern("contract"), _sum_windows),
    Rule("three channels are four", pattern("contract"), _pad_channels),
    Rule("points begin at multiples of 16 bytes", pattern("contract"), _align_points),
)
"""For GPUs: convolutions of images as cameras give them."""


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
