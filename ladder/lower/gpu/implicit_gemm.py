"""Where the window of an activation row lies in the image: convolutions as implicit GEMM."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from ladder.ir.windows import Windows
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.arguments import Arguments
from schedules.layouts import TILE


@dataclass(frozen=True)
class Corner:
    """First pixel of a window, which may lie in the padding: its image, row and column."""

    image: Expr
    row: Expr
    column: Expr


def output_extents(windows: Windows, args: Arguments) -> tuple[Expr, Expr]:
    """Emit the rows and columns of the convolution's result."""
    _, height, width, _ = args.image
    return b.keep(windows.extent(height, 0)), b.keep(windows.extent(width, 1))


def find_corner(windows: Windows, m: Expr, extents: tuple[Expr, Expr]) -> Corner:
    """Emit the first pixel of the window of activation row ``m``."""
    rows, columns = extents
    line = b.keep(T.truncdiv(m, columns))
    image = b.keep(T.truncdiv(line, rows))
    row = b.keep((line - image * rows) * windows.stride[0] - windows.padding[0])
    return Corner(image, row, b.keep((m - line * columns) * windows.stride[1] - windows.padding[1]))


def first_channel(windows: Windows, args: Arguments, row: Expr, channels: Expr) -> Expr:
    """Emit the first channel of the group that weight row ``row`` belongs to, of ``channels`` each."""
    if windows.groups == 1:
        return 0
    return b.keep(T.truncdiv(row, group_rows(windows, args)) * channels)


def group_rows(windows: Windows, args: Arguments) -> Expr:
    """Emit how many rows of the weight a group has, those that are no features among them."""
    rows = args.n_tiles * TILE if windows.features else args.n
    return b.keep(T.truncdiv(rows, windows.groups))


def feature_column(windows: Windows | None, args: Arguments, row: Expr) -> tuple[Expr, Expr]:
    """Emit (the column of the result that a row of the weight makes, whether it makes one)."""
    if windows is None or not windows.features:
        return row, row < args.n
    rows = group_rows(windows, args)
    group = b.bind(T.truncdiv(row, rows))
    feature = b.bind(row - group * rows)
    column = b.bind(group * windows.features + feature)
    return column, T.And(feature < windows.features, column < args.n)


def within(index: Expr, extent: Expr) -> Expr:
    """Whether ``0 <= index < extent``, by one comparison."""
    # Not casts: TVM would take the index for never negative.
    return T.reinterpret("uint32", index) < T.reinterpret("uint32", extent)
