"""Windows of an image for implicit GEMM: which elements a convolution multiplies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tile_types.errors import ShapeError

Pair = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """Rows of A[M, K] are windows of an image ``x[B, H, W, C]``, channels last, zero outside.

    Row ``m = (b * P + p) * Q + q``; of group g, element ``k = (r * S + s) * (C / groups) + c`` is
    ``x[b, stride*p + dilation*r - padding, stride*q + dilation*s - padding, g * (C / groups) + c]``.
    Two numbers each: along rows (H) and columns (W).

    kernel: Elements of a channel in a window: R, S.
    stride, padding, dilation: As torch has them; the padding of both sides is the same.
    groups: Parts of the channels, each multiplied by as many consecutive rows of the weight.
    features: Of each group, where its rows of the weight are filled up behind them; 0: all rows are.
    """

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    features: int = 0

    def __post_init__(self) -> None:
        least = {"kernel": 1, "stride": 1, "padding": 0, "dilation": 1}
        for name, low in least.items():
            pair = tuple(getattr(self, name))
            object.__setattr__(self, name, pair)
            if len(pair) != 2 or min(pair) < low:
                raise ShapeError(f"{name} must be two numbers of at least {low}, got {pair}")
        if self.groups < 1:
            raise ShapeError(f"a convolution has at least one group, got {self.groups}")
        if self.features < 0:
            raise ShapeError(f"a group has no fewer than 0 features, got {self.features}")

    @property
    def points(self) -> int:
        """Elements of a channel in a window."""
        return self.kernel[0] * self.kernel[1]

    @property
    def are_points(self) -> bool:
        """Whether windows are single elements, so that a row of A is a part of a row of x."""
        return self.points == 1 and self.padding == (0, 0)

    @property
    def are_rows(self) -> bool:
        """Whether A is x: a convolution that is a plain product."""
        return self.are_points and self.stride == (1, 1) and self.groups == 1

    def extent(self, size: Any, axis: int) -> Any:
        """Return how many windows there are along an axis of ``size`` elements (a number or expression)."""
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (size + (2 * self.padding[axis] - reach)) // self.stride[axis] + 1

    def extents(self, height: int, width: int) -> Pair:
        """Return P, Q: how many windows there are along rows and columns of an image.

        Raises ShapeError if a window is larger than the padded image.
        """
        found = self.extent(height, 0), self.extent(width, 1)
        if min(found) < 1:
            raise ShapeError(f"windows {self} are larger than an image of {height} x {width}")
        return found


def windows_from(value: Windows | Mapping[str, Any] | None) -> Windows | None:
    """Restore windows from ``dataclasses.asdict`` that went through JSON."""
    if value is None or isinstance(value, Windows):
        return value
    return Windows(**{f.name: _pair(value[f.name]) for f in fields(Windows) if f.name in value})


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value
