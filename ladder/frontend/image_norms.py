"""Norms over space by groups of channels: group norm, and instance norm, whose groups are single channels.

As images are written a group is a row in memory, which one kernel keeps in registers if it is short enough
(`HELD_ROW`). Else, and with channels last, GPUs take statistics of parts of an image first: images times
groups are too few for all multiprocessors. A part's sums are of differences from its first element, in one
pass: so what is left of a large mean is of the size of the deviation. Parts are joined as Chan, Golub and
LeVeque do (1983), by their means and their sums of squares around them.
"""

from __future__ import annotations

from math import ceil, log2
from typing import Any

from ladder.frontend.importer import HALVES, Importer, wide_of
from ladder.ir.extents import floordiv, product
from ladder.movement.mapping import MOST_ROW_THREADS
from tile_types.tile import Extent

BLOCKS = 512
"""Blocks among which a GPU's kernel divides all parts: what fills the largest with four each."""

CHANNELS = 64
"""Neighbouring channels that a block sums, where channels are last."""

LEAST = 64
"""Positions of a part at least."""

MOST_BEFORE = 64
"""Values before an image among which a convolution is looked for."""

FEW = 1 << 16
"""Elements of all images below which launches cost more than what idles."""

HELD_ROW, FEW_ROWS = MOST_ROW_THREADS * 48, 16
"""Elements of a group that lies in order which the threads of a block hold in registers; and how many groups
of this size leave too much of a device idle."""

VECTOR = 8
"""Elements that a thread loads at once."""

PART_ROW, MOST_PARTS = 2048, 512
"""Elements of a part, and how many of a group are joined at most, where groups lie in order."""


def parts_of(images: Any, channels: Any, size: Any) -> int:
    """Return into how many parts of one size positions are divided; 0 if that is not known, or they are few.

    A divisor of `size`, near the number that gives every block one.
    """
    count = images if isinstance(images, int) else 1
    known = isinstance(channels, int) and isinstance(size, int)
    if not known or count * channels * size < FEW or size == 1:
        return 0
    beside = count * ceil(channels / CHANNELS)
    return _near(size, max(1, min(ceil(BLOCKS / max(1, beside)), size // LEAST)))


def row_parts_of(images: int, groups: int, size: int) -> int:
    """Return into how many parts of one size rows that lie in order are divided; 1: one block takes each.

    A divisor of `size` that leaves parts whole vectors, of what few warps hold, and enough for all blocks.
    """
    if size <= HELD_ROW and (size <= PART_ROW or images * groups >= FEW_ROWS):
        return 1
    return _near(size, max(1, min(size // PART_ROW, MOST_PARTS)), VECTOR)


def _near(size: int, wanted: int, vector: int = 1) -> int:
    """Return a divisor of a size that is near a number; parts of whole vectors rather than others."""
    divisors = [count for count in range(1, min(size, 4 * wanted) + 1) if size % count == 0]
    return min(divisors, key=lambda count: abs(log2(count / wanted)) + 2 * (size // count % vector > 0))


def normalised_groups(
    im: Importer, out: str, x: str, weight: Any, bias: Any, groups: Extent, epsilon: float
) -> str:
    """Return an image ``[n, c, ...]`` with mean 0 and variance 1 of groups of channels, in the type ``out``.

    weight, bias: Of each channel, or of each image's channels; None: there is none.
    """
    shape, wide = im.shape(x), wide_of(out)
    on_gpu = not im.on_cpu and wide == "float32"
    in_order = on_gpu and not _has_channels_last(im, x)
    x = im.cast(x, wide)
    if in_order and all(isinstance(extent, int) for extent in (groups, *shape[1:])):
        return im.cast(_in_order(im, x, weight, bias, int(groups), epsilon), out)
    parts = parts_of(shape[0], shape[1], product(shape[2:])) if on_gpu and not in_order else 0
    if parts:
        mean, inverse = _of_parts(im, x, shape[1], groups, parts, epsilon)
        return im.cast(_scaled(im, x, mean, inverse, weight, bias), out)
    value = _by_channels(im, x, groups, epsilon)
    for operator, vector in (("mul", weight), ("add", bias)):
        if vector is not None:
            value = im.g.add(operator, value, _spread(im, _grouped(im, vector, shape, groups, wide), shape))
    return im.cast(value, out)


def _has_channels_last(im: Importer, x: str) -> bool:
    """Tell whether an image is made of what a convolution in 16 bits gives; others lie as they are written.

    There the positions of a channel are neighbours, and one kernel reads each once.
    """
    found = [x]
    for value in found:
        node = im.g.node(value)
        if node.operator == "transpose" or (node.operator == "contract" and node.tile.ttype.name in HALVES):
            return True
        if node.operator != "contract" and len(found) < MOST_BEFORE:
            found += [each for each in node.inputs if each not in found and len(im.shape(each)) > 2]
    return False


def _grouped(im: Importer, vector: str, shape: Any, groups: Extent, wide: str) -> str:
    """Return a vector as ``[n or 1, groups, channels of a group]``."""
    channels = shape[1]
    images = 1 if im.shape(vector) == (channels,) else shape[0]
    return im.reshape(im.cast(vector, wide), [images, groups, floordiv(channels, groups)])


def _spread(im: Importer, value: str, shape: Any) -> str:
    """Return ``[n or 1, groups, 1 or channels of a group]`` with an element for each channel of an image."""
    images, groups, _ = im.shape(value)
    value = im.expand(value, [images, groups, floordiv(shape[1], groups)])
    return im.reshape(value, [images, shape[1], *(1 for _ in shape[2:])])


def _by_channels(im: Importer, x: str, groups: Extent, epsilon: float) -> str:
    """Return x with mean 0 and variance 1 of groups: sums of channels first serve any order of the axes."""
    shape, kind = im.shape(x), im.ttype(x)
    if shape[1] == groups:
        return im.normalised(x, range(2, len(shape)), epsilon)
    within = floordiv(shape[1], groups)
    grouped, count = [shape[0], groups, within], product([within, *shape[2:]])

    def mean(value: str) -> str:
        total = im.reshape(im.reduce("reduce_sum", value, range(2, len(shape)), True), grouped)
        return im.apply("div", [im.reduce("reduce_sum", total, [2], True), count], kind)

    centred = im.g.add("sub", x, _spread(im, mean(x), shape))
    spread = im.apply("add", [mean(im.g.add("square", centred)), epsilon], kind)
    return im.g.add("mul", centred, _spread(im, im.g.add("rsqrt", spread), shape))


def _in_order(im: Importer, x: str, weight: Any, bias: Any, groups: int, epsilon: float) -> str:
    """Return the norm of an image of known extents whose groups are rows in memory."""
    shape, kind = im.shape(x), im.ttype(x)
    images, channels, space = shape[0], int(shape[1]), shape[2:]
    size = int(product([channels // groups, *space]))
    parts = row_parts_of(images if isinstance(images, int) else 1, groups, size)
    if parts > 1:
        mean, inverse = _of_parts(im, x, groups, groups, parts, epsilon)
        return _scaled(im, x, mean, inverse, weight, bias)
    value = im.normalised(im.reshape(x, [images, groups, size]), [2], epsilon)
    for operator, vector in (("mul", weight), ("add", bias)):
        if vector is not None:
            spread = _grouped(im, vector, shape, groups, kind)
            apart = [im.shape(spread)[0], groups, channels // groups]
            whole = im.expand(im.reshape(spread, [*apart, 1]), [*apart, int(product(space))])
            value = im.g.add(operator, value, im.reshape(whole, [apart[0], groups, size]))
    return im.reshape(value, shape)


def _of_parts(
    im: Importer, x: str, rows_of_image: Extent, groups: Extent, parts: int, epsilon: float
) -> tuple[str, str]:
    """Return mean and inverse deviation, ``[n, groups, 1]``, by parts of an image.

    rows_of_image: Into how many rows an image is divided before each is divided into parts: channels, or
        groups where those lie in order.
    """
    images, channels = im.shape(x)[0], rows_of_image
    size, within = int(floordiv(product(im.shape(x)[1:]), channels)), floordiv(channels, groups)
    rows, kind = size // parts, im.ttype(x)

    def grouped(value: str) -> str:
        if within == 1:
            return im.reshape(value, [images, groups, parts])
        value = im.reshape(value, [images, groups, within, parts])
        return im.permute(value, (0, 1, 3, 2))

    image = im.reshape(x, [images, channels, parts, rows])
    first = im.take_axis(image, 3, 0, 1)
    apart = im.g.add("sub", image, first)
    total = im.reduce("reduce_sum", apart, [3], True)
    squares = im.reduce("reduce_sum", im.g.add("square", apart), [3], True)
    moved = im.apply("div", [total, rows], kind)
    own = im.g.add("sub", squares, im.g.add("mul", total, moved))
    means = im.g.add("add", first, moved)
    of_parts = grouped(means)
    axes = range(2, len(im.shape(of_parts)))
    mean = im.apply("div", [im.reduce("reduce_sum", of_parts, axes, True), within * parts], kind)
    between = im.apply("mul", [im.g.add("square", im.g.add("sub", of_parts, mean)), rows], kind)
    spread = im.reduce("reduce_sum", im.g.add("add", grouped(own), between), axes, True)
    spread = im.apply("add", [im.apply("div", [spread, within * size], kind), epsilon], kind)
    numbers = [images, groups, 1]
    return im.reshape(mean, numbers), im.reshape(im.g.add("rsqrt", spread), numbers)


def _scaled(im: Importer, x: str, mean: str, inverse: str, weight: Any, bias: Any) -> str:
    """Return the norm of x as one product and one sum of each element.

    What they take is computed for each channel first, in a kernel of its own.
    """
    shape, (_, groups, _), kind = im.shape(x), im.shape(mean), im.ttype(x)
    scale = inverse
    if weight is not None:
        scale = im.g.add("mul", inverse, _grouped(im, weight, shape, groups, kind))
    shift = im.g.add("neg", im.g.add("mul", mean, scale))
    if bias is not None:
        shift = im.g.add("add", shift, _grouped(im, bias, shape, groups, kind))
    scaled = im.g.add("mul", x, _spread(im, scale, shape))
    return im.g.add("add", scaled, _spread(im, shift, shape))
