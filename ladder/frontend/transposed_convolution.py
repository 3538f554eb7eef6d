"""Transposed convolutions as convolutions of few taps, whose channels are the places between pixels.

``y[s*q + r] = sum over t of x[q-t] w[s*t + r]``: a convolution of stride 1 for each ``r``, features of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ladder.frontend.borders import mirrored
from ladder.frontend.importer import Importer
from ladder.frontend.windows import window_indexing
from ladder.ir.extents import product, total
from tile_types.tile import Extent

WASTE = 4
"""Products with zeros around an image, for one with a pixel, up to which a convolution is faster."""


@dataclass(frozen=True)
class Axis:
    """One spatial axis.

    extent: Of the operand.
    step, taps: Stride, and elements of the kernel.
    low, high: Elements that are cut off at the ends of the sum.
    extra: Elements that are added at the end, where no product lies.
    """

    extent: Extent
    step: int
    taps: int
    low: int
    high: int
    extra: int

    @property
    def reach(self) -> int:
        """Elements of the operand that one element of the result is a sum of."""
        return self.taps // self.step

    @property
    def places(self) -> Extent:
        """Places of the convolution, each of which gives ``step`` elements."""
        return total([self.extent, self.reach - 1])

    @property
    def target(self) -> Extent:
        """Extent of the result."""
        rest = self.taps - self.step - self.low - self.high + self.extra
        return total([product([self.extent, self.step]), rest])

    @property
    def fits(self) -> bool:
        """Whether the places give all elements of the result, each a sum of as many products.

        Else elements would be multiplied by zeros, which makes infinite ones NaN; convolutions for those of
        more and of fewer products were slower than the one call, on CPUs and GPUs.
        """
        return self.taps % self.step == 0 and min(self.low, self.high - self.extra) >= 0


def transposed_convolution(
    im: Importer, out: str, x: str, weight: str, bias: str | None, axes: Sequence[Axis]
) -> Any:
    """Convolve ``x[n, c, s...]`` by ``weight[c, f, k...]``, and put the elements of each place side by side.

    None where an axis does not fit, or the image is so small that most products are with zeros around it,
    but for one of a single pixel.
    """
    if all(axis.extent == 1 for axis in axes):
        return _of_one_pixel(im, out, x, weight, bias, axes)
    waste = prod(1 + (axis.reach - 1) / max(axis.extent, 1) for axis in axes if isinstance(axis.extent, int))
    if not all(axis.fits for axis in axes) or waste > WASTE:
        return None
    rank, steps = len(axes), [axis.step for axis in axes]
    batch, features = im.shape(x)[0], im.shape(weight)[1]
    value = _convolved(im, out, x, weight, bias, axes)
    apart = im.reshape(value, [batch, *steps, features, *(axis.places for axis in axes)])
    order = [0, 1 + rank, *(at for axis in range(rank) for at in (2 + rank + axis, 1 + axis))]
    whole = [product([axis.places, axis.step]) for axis in axes]
    joined = im.reshape(im.permute(apart, order), [batch, features, *whole])
    shape = [batch, features, *(axis.target for axis in axes)]
    return im.box(joined, [0, 0, *(axis.low for axis in axes)], shape, [1] * (2 + rank))


def _of_one_pixel(
    im: Importer, out: str, x: str, weight: str, bias: str | None, axes: Sequence[Axis]
) -> str | None:
    """Multiply matrices: each element of the result is a product of the pixel with one of the kernel."""
    if any(min(axis.low, axis.high - axis.extra) < 0 for axis in axes):
        return None
    (batch, c, *_), (_, features, *taps) = im.shape(x), im.shape(weight)
    matrix = im.reshape(weight, [c, product([features, *taps])])
    value = im.g.add("matmul", im.reshape(x, [batch, c]), matrix, type=out)
    shape = [batch, features, *(axis.target for axis in axes)]
    begin = [0, 0, *(axis.low for axis in axes)]
    value = im.box(im.reshape(value, [batch, features, *taps]), begin, shape, [1] * len(shape))
    if bias is None:
        return value
    return im.arithmetic("add", [value, im.along(bias, 1, len(shape))], out)


def _convolved(im: Importer, out: str, x: str, weight: str, bias: str | None, axes: Sequence[Axis]) -> str:
    """Return ``[n, r... f, places...]``."""
    rank, count = len(axes), prod(axis.step for axis in axes)
    extents, ones = [axis.extent for axis in axes], [1] * rank
    taps, spaces = [axis.reach for axis in axes], [axis.reach - 1 for axis in axes]
    places, sizes = window_indexing(extents, taps, ones, spaces, ones)
    inner, outer = (" ".join(f"{name}{at}" for at in range(rank)) for name in "rh")
    spec = f"n c {places}, f c {inner} -> n f {outer}"
    kernel = _kernel(im, weight, axes)
    value = im.g.add("contract", x, kernel, spec=spec, sizes=sizes, pad=any(spaces), type=out)
    if bias is None:
        return value
    features = im.shape(bias)[0]
    repeated = im.expand(im.reshape(bias, [1, features]), [count, features])
    vector = im.reshape(repeated, [product([count, features])])
    return im.arithmetic("add", [value, im.along(vector, 1, 2 + rank)], out)


def _kernel(im: Importer, weight: str, axes: Sequence[Axis]) -> str:
    """Return ``w[c, f, k...]`` as ``[r... f, c, t...]``: a kernel for each place between pixels."""
    (c, f, *_), rank = im.shape(weight), len(axes)
    value = im.reshape(weight, [c, f, *(n for axis in axes for n in (axis.reach, axis.step))])
    for at, axis in enumerate(axes):
        if axis.reach > 1:
            value = mirrored(im, value, 2 + 2 * at, axis.reach - 1, axis.reach)
    turned = im.permute(value, [*range(3, 3 + 2 * rank, 2), 1, 0, *range(2, 2 + 2 * rank, 2)])
    count = prod(axis.step for axis in axes)
    return im.reshape(turned, [product([count, f]), c, *(axis.reach for axis in axes)])
