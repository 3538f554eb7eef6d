"""How the producer of the wgmma pipeline brings tokens into shared memory: rows of a matrix, or windows.

Both are tensor copies of 128 swizzled bytes per token, zero outside. Windows of an image are copied in
im2col mode (PTX ISA, "Tensor Im2col mode"): the copy itself walks over pixels, by strides, over the ends
of rows and images; the tap of the window is an offset. So a slab of K must lie within one tap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.ir.windows import Windows
from ladder.lower import builder as b
from schedules.layouts import TILE
from schedules.schedule import check
from schedules.windows import IM2COL

if TYPE_CHECKING:
    from ladder.lower.cuda.wgmma import Kernel

Expr = Any

SWIZZLE_128 = 3

TENSOR_COPY = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
WINDOW_COPY = "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
MULTICAST = ".multicast::cluster"


class TokenSource(ABC):
    """Tokens of one kernel, as a tensor map shows them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.geo, self.args = kernel, kernel.geo, kernel.args

    def encode(self) -> Expr:
        """Encode the tensor map on the host; return its handle."""
        self.map = I.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap").ty)
        dtype = self.kernel.gemm.activation if self.geo.lane == 16 else "uint8"
        b.emit(self._encoding(dtype, self.geo.lane // 8))
        return self.map

    @abstractmethod
    def _encoding(self, dtype: str, element: int) -> Expr:
        """Return the call that encodes the map of elements of ``element`` bytes."""

    @abstractmethod
    def begin(self, row_tile: Expr, token: Expr, k_tile: Expr) -> None:
        """Go to the first token that this block copies of a tile, and to its first packed tile along K."""

    @abstractmethod
    def copy(self, target: Expr, barrier: Expr, k_tile: Expr, mask: Expr | None) -> None:
        """Copy the slab at packed tile ``k_tile``; slabs come in order. ``mask``: to which blocks."""


class Rows(TokenSource):
    """Rows of a matrix."""

    def _encoding(self, dtype: str, element: int) -> Expr:
        args = self.args
        return T.call_packed(
            "runtime.cuTensorMapEncodeTiled",
            *(self.map, dtype, 2, args.x.data, args.k_x, args.m, args.k_x * element),
            *(self.geo.slab, self.kernel.tokens_per_copy(), 1, 1, 0, SWIZZLE_128, 2, 0),
        )

    def begin(self, row_tile: Expr, token: Expr, k_tile: Expr) -> None:
        """Keep the first token."""
        self.token = token

    def copy(self, target: Expr, barrier: Expr, k_tile: Expr, mask: Expr | None) -> None:
        """Copy a box of rows."""
        place = (target, T.address_of(self.map), k_tile * TILE, self.token, barrier)
        if mask is None:
            b.ptx(TENSOR_COPY, *place)
        else:
            b.ptx(TENSOR_COPY + MULTICAST, *place, mask)


class Pixels(TokenSource):
    """Windows of an image, one tap and some of its channels at a time."""

    def __init__(self, kernel: Kernel, windows: Windows) -> None:
        super().__init__(kernel)
        self.windows = windows
        channels = kernel.gemm.channels
        check(
            channels % self.geo.slab == 0,
            f"tensor copies take {self.geo.slab} channels of a tap, of {channels} some are left; use 'mma'",
        )

    def _encoding(self, dtype: str, element: int) -> Expr:
        at = self.windows
        numbers = (*at.kernel, *at.stride, *at.padding, *at.dilation)
        pixels = self.kernel.tokens_per_copy()
        return T.call_packed(
            IM2COL, self.map, self.args.x.data, dtype, *self.args.image, self.geo.slab, pixels, *numbers
        )

    def begin(self, row_tile: Expr, token: Expr, k_tile: Expr) -> None:
        """Find the first pixel and tap; divisions happen here, once per tile."""
        at = self.windows
        _, height, width, channels = self.args.image
        rows, columns = b.keep(at.extent(height, 0)), b.keep(at.extent(width, 1))
        line = b.keep(T.truncdiv(token, columns))
        self.image = b.keep(T.truncdiv(line, rows))
        self.row = b.keep((line - self.image * rows) * at.stride[0] - at.padding[0])
        self.column = b.keep((token - line * columns) * at.stride[1] - at.padding[1])
        self.width = b.keep(T.truncdiv(channels, at.groups))
        self.first_channel: Expr = 0
        if at.groups > 1:
            group_rows = T.truncdiv(self.args.n, at.groups)
            self.first_channel = b.keep(T.truncdiv(row_tile * TILE, group_rows) * self.width)
        self._find_tap(k_tile)

    def _find_tap(self, k_tile: Expr) -> None:
        if isinstance(k_tile, int) and k_tile == 0:
            tap = first = 0
        else:
            per_tap = b.keep(T.truncdiv(self.width, TILE))
            tap = b.keep(T.truncdiv(k_tile, per_tap))
            first = (k_tile - tap * per_tap) * TILE
        taps = self.windows.kernel[1]
        self.channel = b.Variable("int32", first)
        self.tap_row = b.Variable("int32", T.truncdiv(tap, taps))
        self.tap_column = b.Variable("int32", T.truncmod(tap, taps))

    def copy(self, target: Expr, barrier: Expr, k_tile: Expr, mask: Expr | None) -> None:
        """Copy the pixels' channels of one tap; beyond the last tap, channels that there are not: zeros."""
        at, channels = self.windows, self.args.image[3]
        inside = self.tap_row.value < at.kernel[0]
        channel = T.Select(inside, self.first_channel + self.channel.value, channels)
        offsets = [
            T.Cast("uint16", variable.value * step)
            for variable, step in ((self.tap_column, at.dilation[1]), (self.tap_row, at.dilation[0]))
        ]
        place = (target, T.address_of(self.map), channel, self.column, self.row, self.image, barrier)
        if mask is None:
            b.ptx(WINDOW_COPY, *place, *offsets)
        else:
            b.ptx(WINDOW_COPY + MULTICAST, *place, *offsets, mask)
        self._advance()

    def _advance(self) -> None:
        """Go on to the next slab: channels first, then taps of a row, then rows."""
        self.channel.set(self.channel.value + self.geo.slab)
        with b.when(self.channel.value >= self.width):
            self.channel.set(0)
            self.tap_column.set(self.tap_column.value + 1)
            with b.when(self.tap_column.value == self.windows.kernel[1]):
                self.tap_column.set(0)
                self.tap_row.set(self.tap_row.value + 1)


def token_source(kernel: Kernel) -> TokenSource:
    """Return where a kernel's tokens come from."""
    windows = kernel.gemm.windows
    return Rows(kernel) if windows is None else Pixels(kernel, windows)
