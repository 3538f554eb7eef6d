"""Where the window of an activation row lies in the image: convolutions as implicit GEMM."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from ladder.ir.windows import Windows
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.arguments import Arguments


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
    group_rows = T.truncdiv(args.n, windows.groups)
    return b.keep(T.truncdiv(row, group_rows) * channels)


def within(index: Expr, extent: Expr) -> Expr:
    """Whether ``0 <= index < extent``, by one comparison."""
    # Not casts: TVM would take the index for never negative.
    return T.reinterpret("uint32", index) < T.reinterpret("uint32", extent)
