"""How the producer of the wgmma pipeline brings x into shared memory: rows of a matrix, or windows.

Both are tensor copies of 128 swizzled bytes per activation row, zero outside. Windows of an image (implicit
GEMM) are copied in im2col mode (PTX ISA, "Tensor Im2col mode"): the copy itself walks over pixels, by
strides, over the ends of rows and images; the tap of the window is an offset. So a slab of K must lie
within one tap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.ir.windows import Windows
from ladder.lower import builder as b
from ladder.lower.cuda.implicit_gemm import find_corner, first_channel, output_extents
from ladder.lower.cuda.wgmma_grid import Piece, rows_per_copy
from ladder.lower.cuda.wgmma_spec import Spec
from ladder.lower.gpu.arguments import Arguments
from schedules.im2col import IM2COL
from schedules.layouts import TILE
from schedules.schedule import check

Expr = Any

SWIZZLE_128 = 3

TENSOR_COPY = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
WINDOW_COPY = "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
MULTICAST = ".multicast::cluster"


def encode_map(spec: Spec, args: Arguments) -> Expr:
    """Encode the tensor map of x on the host; return its handle."""
    windows, geo = spec.gemm.windows, spec.geo
    if windows is not None:
        channels = spec.gemm.channels
        check(
            channels % geo.slab == 0,
            f"tensor copies take {geo.slab} channels of a tap, of {channels} some are left; use 'mma'",
        )
    handle = I.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap").ty)
    dtype, element = (spec.gemm.activation if geo.lane == 16 else "uint8"), geo.lane // 8
    rows = rows_per_copy(spec, args)
    if windows is None:
        call = T.call_packed(
            "runtime.cuTensorMapEncodeTiled",
            *(handle, dtype, 2, args.x.data, args.k_x, args.m, args.k_x * element),
            *(geo.slab, rows, 1, 1, 0, SWIZZLE_128, 2, 0),
        )
    else:
        numbers = (*windows.kernel, *windows.stride, *windows.padding, *windows.dilation)
        call = T.call_packed(IM2COL, handle, args.x.data, dtype, *args.image, geo.slab, rows, *numbers)
    b.emit(call)
    return handle


class TileCopies(Protocol):
    """Copies of the slabs of one tile of x."""

    def copy(self, target: Expr, barrier: Expr, k_tile: Expr, mask: Expr | None) -> None:
        """Copy the slab at packed tile ``k_tile``; slabs come in order. ``mask``: to which blocks."""


@dataclass(frozen=True)
class RowCopies:
    """Copies of rows of a matrix: from activation row ``first_m`` on."""

    x_map: Expr
    first_m: Expr

    def copy(self, target: Expr, barrier: Expr, k_tile: Expr, mask: Expr | None) -> None:
        """Copy a box of rows."""
        place = (target, T.address_of(self.x_map), k_tile * TILE, self.first_m, barrier)
        if mask is None:
            b.ptx(TENSOR_COPY, *place)
        else:
            b.ptx(TENSOR_COPY + MULTICAST, *place, mask)


class WindowCopies:
    """Copies of windows of an image, one tap and some of its channels at a time.

    Divisions happen when an object is made, once per tile.

    spec, args, x_map: The kernel's spec, its tensors, and the tensor map.
    piece, first_m: The tile, and its first activation row that this block copies.
    """

    def __init__(
        self, spec: Spec, args: Arguments, x_map: Expr, windows: Windows, piece: Piece, first_m: Expr
    ) -> None:
        self.windows, self.x_map, self.slab = windows, x_map, spec.geo.slab
        self.channels = args.image[3]
        self.corner = find_corner(windows, first_m, output_extents(windows, args))
        self.width = b.keep(T.truncdiv(self.channels, windows.groups))
        self.first_channel = first_channel(windows, args, piece.row_tile * TILE, self.width)
        tap, first = self._first_tap(piece.first_tile)
        taps = windows.kernel[1]
        self.channel = b.Variable("int32", first)
        self.tap_row = b.Variable("int32", T.truncdiv(tap, taps))
        self.tap_column = b.Variable("int32", T.truncmod(tap, taps))

    def _first_tap(self, k_tile: Expr) -> tuple[Expr, Expr]:
        """Return the tap at a packed tile, and the first channel within it."""
        if isinstance(k_tile, int) and k_tile == 0:
            return 0, 0
        per_tap = b.keep(T.truncdiv(self.width, TILE))
        tap = b.keep(T.truncdiv(k_tile, per_tap))
        return tap, (k_tile - tap * per_tap) * TILE

    def copy(self, target: Expr, barrier: Expr, k_tile: Expr, mask: Expr | None) -> None:
        """Copy the pixels' channels of one tap; beyond the last tap, channels that there are not: zeros."""
        at, corner = self.windows, self.corner
        inside = self.tap_row.value < at.kernel[0]
        channel = T.Select(inside, self.first_channel + self.channel.value, self.channels)
        offsets = [
            T.Cast("uint16", variable.value * step)
            for variable, step in ((self.tap_column, at.dilation[1]), (self.tap_row, at.dilation[0]))
        ]
        pixel = (channel, corner.column, corner.row, corner.image)
        place = (target, T.address_of(self.x_map), *pixel, barrier)
        if mask is None:
            b.ptx(WINDOW_COPY, *place, *offsets)
        else:
            b.ptx(WINDOW_COPY + MULTICAST, *place, *offsets, mask)
        self._advance()

    def _advance(self) -> None:
        """Go on to the next slab: channels first, then taps of a row, then rows."""
        self.channel.set(self.channel.value + self.slab)
        with b.when(self.channel.value >= self.width):
            self.channel.set(0)
            self.tap_column.set(self.tap_column.value + 1)
            with b.when(self.tap_column.value == self.windows.kernel[1]):
                self.tap_column.set(0)
                self.tap_row.set(self.tap_row.value + 1)


def begin_copies(spec: Spec, args: Arguments, x_map: Expr, piece: Piece, first_m: Expr) -> TileCopies:
    """Return the copies of a tile, from activation row ``first_m`` on."""
    windows = spec.gemm.windows
    if windows is None:
        return RowCopies(x_map, first_m)
    return WindowCopies(spec, args, x_map, windows, piece, first_m)
