"""How threads of the mma pipeline copy a stage of x: rows of a matrix, or windows of an image.

A thread copies 16-byte chunks, zeros where there is nothing. Of windows (implicit GEMM), the place of a
chunk is a sum of what depends on the activation row (found once, by divisions) and of what depends on K
(stepped from stage to stage): a thread's chunks have one place along K, so it keeps one channel and one tap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tvm.script import tirx as T

from ladder.ir.windows import Windows
from ladder.lower import builder as b
from ladder.lower.cuda.activations import Copier
from ladder.lower.cuda.implicit_gemm import find_corner, first_channel, output_extents
from ladder.lower.cuda.mma_geometry import Spec
from ladder.lower.cuda.mma_place import Place
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, each_piece
from schedules.layouts import TILE
from schedules.schedule import check

Expr = Any


class ActivationSource(Protocol):
    """Emits copies of x."""

    def copy(self, stage: Expr, tile: Expr) -> None:
        """Copy this thread's chunks of the stage that begins at packed tile ``tile``; in order."""


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix.

    stages: The stages of x in shared memory.
    """

    spec: Spec
    place: Place
    copier: Copier
    stages: Any

    def copy(self, stage: Expr, tile: Expr) -> None:
        """Copy x; zeros beyond its extents."""
        args, geo = self.place.args, self.spec.geo
        layout, per_chunk = geo.x_tile, CHUNK_BYTES // self.spec.step.element_bytes

        def copy(piece: Expr) -> None:
            row, chunk = b.bind(piece // layout.chunks), b.bind(piece % layout.chunks)
            m = b.bind(self.place.first_m + row)
            column = b.bind(tile * TILE + chunk * per_chunk)
            valid = b.bind(T.And(m < args.m, column < args.k_x))
            at = [T.if_then_else(valid, m, 0), T.if_then_else(valid, column, 0)]
            target = self.stages.ptr_to([stage, layout.word(row, chunk)])
            self.copier.chunk(target, args.x.ptr_to(at), valid)

        each_piece(self.spec.schedule.tile_m * layout.chunks, geo.threads, self.place.thread, copy)


@dataclass(frozen=True)
class Pixel:
    """The window of one activation row: its row in the tile, row and column of its corner, and its offset."""

    place: Expr
    row: Expr
    column: Expr
    offset: Expr


class ImplicitGemm:
    """Windows of an image; the parameters are those of `Rows`, and the windows."""

    def __init__(self, spec: Spec, place: Place, copier: Copier, stages: Any, windows: Windows) -> None:
        self.spec, self.place, self.copier, self.stages, self.windows = spec, place, copier, stages, windows
        self.per_chunk = CHUNK_BYTES // spec.step.element_bytes
        self.chunks, threads, args = spec.geo.x_tile.chunks, spec.geo.threads, place.args
        check(
            spec.gemm.channels % self.per_chunk == 0,
            f"the {spec.gemm.channels} channels of a tap are no chunks of {self.per_chunk}; pad them",
        )
        check(threads % self.chunks == 0, f"{threads} threads for {self.chunks} chunks per activation row")
        self.chunk = b.keep(T.truncmod(place.thread, self.chunks))
        extents = output_extents(windows, args)
        self.group_channels = b.keep(T.truncdiv(args.image[3], windows.groups))
        channel = first_channel(windows, args, place.row_tile * TILE, self.group_channels)
        per_iteration, tile_m = threads // self.chunks, spec.schedule.tile_m
        self.even = tile_m % per_iteration == 0
        iterations = range(-(-tile_m // per_iteration))
        self.pixels = [self._pixel(iteration * per_iteration, extents, channel) for iteration in iterations]
        first = self.chunk * self.per_chunk
        tap = b.keep(T.truncdiv(first, self.group_channels))
        taps = windows.kernel[1]
        self.channel = b.Variable("int32", first - tap * self.group_channels)
        self.tap_row = b.Variable("int32", T.truncdiv(tap, taps) * windows.dilation[0])
        self.tap_column = b.Variable("int32", T.truncmod(tap, taps) * windows.dilation[1])

    def _pixel(self, first: int, extents: tuple[Expr, Expr], channel: Expr) -> Pixel:
        """Find the window of the thread's activation row ``first`` rows on."""
        at, args = self.windows, self.place.args
        _, height, width, channels = args.image
        place = b.keep(T.truncdiv(self.place.thread, self.chunks) + first)
        m = b.keep(self.place.first_m + place)
        corner = find_corner(at, m, extents)
        # A row that no tap reaches stands for activation rows beyond M.
        row = b.keep(T.if_then_else(m < args.m, corner.row, -(1 << 30)))
        offset = b.keep((corner.image * height + T.max(row, -at.padding[0])) * width + corner.column)
        return Pixel(place, row, corner.column, b.keep(offset * channels + channel))

    def copy(self, stage: Expr, tile: Expr) -> None:
        """Copy the chunks of the taps at hand, then step to those of the next stage."""
        at, args, layout = self.windows, self.place.args, self.spec.geo.x_tile
        _, height, width, channels = args.image
        down, right = self.tap_row.value, self.tap_column.value
        step = b.keep((down * width + right) * channels + self.channel.value)
        inside = b.bind(down < at.kernel[0] * at.dilation[0])
        for pixel in self.pixels:
            rows = _within(pixel.row + down, height)
            valid = b.bind(T.And(T.And(rows, _within(pixel.column + right, width)), inside))
            source = args.x.ptr_to([0, 0, 0, T.if_then_else(valid, pixel.offset + step, 0)])
            target = self.stages.ptr_to([stage, layout.word(pixel.place, self.chunk)])
            with b.when(True if self.even else pixel.place < self.spec.schedule.tile_m):
                self.copier.chunk(target, source, valid)
        self._advance()

    def _advance(self) -> None:
        at, step = self.windows, self.spec.schedule.tile_k
        self.channel.set(self.channel.value + step)
        with b.repeat_while(self.channel.value >= self.group_channels):
            self.channel.set(self.channel.value - self.group_channels)
            self.tap_column.set(self.tap_column.value + at.dilation[1])
            with b.when(self.tap_column.value == at.kernel[1] * at.dilation[1]):
                self.tap_column.set(0)
                self.tap_row.set(self.tap_row.value + at.dilation[0])


def _within(index: Expr, extent: Expr) -> Expr:
    """Whether ``0 <= index < extent``, by one comparison."""
    # Not casts: TVM would take the index for never negative.
    return T.reinterpret("uint32", index) < T.reinterpret("uint32", extent)


def activation_source(spec: Spec, place: Place, copier: Copier, stages: Any) -> ActivationSource:
    """Return what copies x of a kernel into its stages."""
    windows = spec.gemm.windows
    if windows is None:
        return Rows(spec, place, copier, stages)
    return ImplicitGemm(spec, place, copier, stages, windows)
