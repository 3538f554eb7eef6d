"""ConvTranspose as a convolution of few taps whose channels are the places between pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ladder.frontend.aten_models import MODEL_ROWS
from ladder.frontend.onnx_call import Call, Row
from ladder.frontend.onnx_values import Known
from ladder.ir.extents import product, total
from tile_types.tile import Extent


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a transposed convolution.

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
    def count(self) -> Extent:
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

        Else elements would be multiplied by zeros, which makes infinite ones NaN.
        """
        return self.taps % self.step == 0 and min(self.low, self.high - self.extra) >= 0


def _transposed(call: Call) -> Any:
    """Convolve, then put the elements of each place side by side.

    ``y[s*q + r] = sum over t of x[q-t] w[s*t + r]``.

    None where the kernel is not stored, has gaps or groups, is no multiple of the stride, or where the pads
    follow from the shape of the result.
    """
    weight, axes = call.known(1), _axes(call)
    if weight is None or axes is None or call.out != "float32":
        return None
    im, rank = call.im, len(axes)
    features = weight.array.shape[1]
    taps, steps = [axis.reach for axis in axes], [axis.step for axis in axes]
    kernel = call.piece.tensor(Known(_kernel(weight.array, axes)))
    ones, spaces = [1] * rank, [reach - 1 for reach in taps]
    row = MODEL_ROWS["convolution.default"]
    places = row(im, call.out, call.tensor(0), kernel, _bias(call, steps), ones, spaces, ones, False, None, 1)
    counts = [axis.count for axis in axes]
    apart = im.reshape(places, [call.shape(0)[0], *steps, features, *counts])
    order = [0, 1 + rank, *(at for axis in range(rank) for at in (2 + rank + axis, 1 + axis))]
    whole = [product([axis.count, axis.step]) for axis in axes]
    joined = im.reshape(im.permute(apart, order), [call.shape(0)[0], features, *whole])
    shape = [call.shape(0)[0], features, *(axis.target for axis in axes)]
    return im.box(joined, [0, 0, *(axis.low for axis in axes)], shape, [1] * (2 + rank))


def _axes(call: Call) -> list[Axis] | None:
    given, extents = call.given, call.shape(0)[2:]
    rank = len(extents)
    if given.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID", b"") or "output_shape" in given:
        return None
    if given.get("group", 1) != 1 or any(gap != 1 for gap in given.get("dilations") or ()):
        return None
    steps, extra = given.get("strides") or [1] * rank, given.get("output_padding") or [0] * rank
    pads = given.get("pads") or [0] * 2 * rank
    if given.get("auto_pad") == b"VALID":
        pads = [0] * 2 * rank
    known = call.known(1)
    taps = () if known is None else known.array.shape[2:]
    rows = zip(extents, steps, taps, pads[:rank], pads[rank:], extra, strict=False)
    axes = [Axis(extent, *map(int, rest)) for extent, *rest in rows]
    return axes if len(axes) == rank and all(axis.fits for axis in axes) else None


def _kernel(weight: np.ndarray, axes: list[Axis]) -> np.ndarray:
    """Return ``w[c, f, k...]`` as ``[r... f, c, t...]``: a kernel for each place between pixels."""
    c, f = weight.shape[:2]
    rank = len(axes)
    split = weight.reshape(c, f, *(n for axis in axes for n in (axis.reach, axis.step)))
    taps, steps = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    turned = np.flip(split, tuple(taps)).transpose(*steps, 1, 0, *taps)
    shape = (int(np.prod([axis.step for axis in axes])) * f, c, *(axis.reach for axis in axes))
    return np.ascontiguousarray(turned).reshape(shape)


def _bias(call: Call, steps: list[int]) -> str | None:
    """Return the bias of every feature, once for each place between pixels."""
    if not call.has(2):
        return None
    im, features = call.im, call.shape(2)[0]
    count = int(np.prod(steps))
    return im.reshape(
        im.expand(im.reshape(call.tensor(2), [1, features]), [count, features]), [product([count, features])]
    )


TRANSPOSED: Mapping[str, Row] = {"ConvTranspose": _transposed}
"""Operators that scatter what a convolution gathers."""
