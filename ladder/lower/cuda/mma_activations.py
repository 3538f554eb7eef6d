"""How threads of the mma pipeline copy a stage of tokens: rows of a matrix, or windows of an image.

A thread copies 16-byte chunks, zeros where there is nothing. Of windows, the place of a chunk is a sum
of what depends on the token (found once, by divisions) and of what depends on K (stepped from stage to
stage): a thread's chunks have one place along K, so it keeps one channel and one tap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from tvm.script import tirx as T

from ladder.ir.windows import Windows
from ladder.lower import builder as b
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, each_piece
from schedules.layouts import TILE
from schedules.schedule import check

if TYPE_CHECKING:
    from ladder.lower.cuda.mma import Mma

Expr = Any


class TokenSource(Protocol):
    """Emits copies of tokens."""

    def copy(self, stage: Expr, tile: Expr) -> None:
        """Copy this thread's chunks of the stage that begins at packed tile ``tile``; in order."""


class Rows:
    """Rows of a matrix."""

    def __init__(self, kernel: Mma) -> None:
        self.kernel = kernel

    def copy(self, stage: Expr, tile: Expr) -> None:
        """Copy x; zeros beyond its extents."""
        kernel, args = self.kernel, self.kernel.args
        layout, per_chunk = kernel.geo.tokens, CHUNK_BYTES // kernel.step.element_bytes

        def copy(piece: Expr) -> None:
            row, chunk = b.bind(piece // layout.chunks), b.bind(piece % layout.chunks)
            token = b.bind(kernel.first_token + row)
            column = b.bind(tile * TILE + chunk * per_chunk)
            valid = b.bind(T.And(token < args.m, column < args.k_x))
            at = [T.if_then_else(valid, token, 0), T.if_then_else(valid, column, 0)]
            target = kernel.tokens.ptr_to([stage, layout.word(row, chunk)])
            kernel.copier.chunk(target, args.x.ptr_to(at), valid)

        each_piece(kernel.schedule.tile_m * layout.chunks, kernel.geo.threads, kernel.thread, copy)


class Pixels:
    """Windows of an image."""

    def __init__(self, kernel: Mma, windows: Windows) -> None:
        self.kernel, self.windows, self.args = kernel, windows, kernel.args
        self.per_chunk = CHUNK_BYTES // kernel.step.element_bytes
        chunks = kernel.geo.tokens.chunks
        check(
            kernel.gemm.channels % self.per_chunk == 0,
            f"the {kernel.gemm.channels} channels of a tap are no chunks of {self.per_chunk}; pad them",
        )
        check(kernel.geo.threads % chunks == 0, f"{kernel.geo.threads} threads for {chunks} chunks per token")
        self.chunks = chunks
        self.chunk = b.keep(T.truncmod(kernel.thread, chunks))
        self._find_pixels()
        self._find_tap()

    def _find_pixels(self) -> None:
        """Find the pixel of each token of this thread: row, column, and offset of its window's corner."""
        kernel, at = self.kernel, self.windows
        _, height, width, channels = self.args.image
        rows, columns = b.keep(at.extent(height, 0)), b.keep(at.extent(width, 1))
        self.group_channels = b.keep(T.truncdiv(channels, at.groups))
        group: Expr = 0
        if at.groups > 1:
            group_rows = T.truncdiv(self.args.n, at.groups)
            group = b.keep(T.truncdiv(kernel.row_tile * TILE, group_rows) * self.group_channels)
        self.pixels: list[tuple[Expr, Expr, Expr, Expr]] = []
        per_turn = kernel.geo.threads // self.chunks
        self.even = kernel.schedule.tile_m % per_turn == 0
        for turn in range(-(-kernel.schedule.tile_m // per_turn)):
            place = b.keep(T.truncdiv(kernel.thread, self.chunks) + turn * per_turn)
            token = b.keep(kernel.first_token + place)
            line = b.keep(T.truncdiv(token, columns))
            image = b.keep(T.truncdiv(line, rows))
            row = b.keep((line - image * rows) * at.stride[0] - at.padding[0])
            column = b.keep((token - line * columns) * at.stride[1] - at.padding[1])
            # A row that no tap reaches stands for tokens beyond M.
            row = b.keep(T.if_then_else(token < self.args.m, row, -(1 << 30)))
            corner = b.keep((image * height + T.max(row, -at.padding[0])) * width + column)
            self.pixels.append((place, row, column, b.keep(corner * channels + group)))

    def _find_tap(self) -> None:
        """Find channel and tap of this thread's first chunk."""
        first = self.chunk * self.per_chunk
        tap = b.keep(T.truncdiv(first, self.group_channels))
        taps = self.windows.kernel[1]
        self.channel = b.Variable("int32", first - tap * self.group_channels)
        self.tap_row = b.Variable("int32", T.truncdiv(tap, taps) * self.windows.dilation[0])
        self.tap_column = b.Variable("int32", T.truncmod(tap, taps) * self.windows.dilation[1])

    def copy(self, stage: Expr, tile: Expr) -> None:
        """Copy the chunks of the taps at hand, then step to those of the next stage."""
        kernel, at = self.kernel, self.windows
        _, height, width, channels = self.args.image
        layout = kernel.geo.tokens
        down, right = self.tap_row.value, self.tap_column.value
        step = b.keep((down * width + right) * channels + self.channel.value)
        inside = b.bind(down < at.kernel[0] * at.dilation[0])
        for place, row, column, corner in self.pixels:
            rows = self._within(row + down, height)
            valid = b.bind(T.And(T.And(rows, self._within(column + right, width)), inside))
            source = self.args.x.ptr_to([0, 0, 0, T.if_then_else(valid, corner + step, 0)])
            target = kernel.tokens.ptr_to([stage, layout.word(place, self.chunk)])
            with b.when(True if self.even else place < kernel.schedule.tile_m):
                kernel.copier.chunk(target, source, valid)
        self._advance()

    @staticmethod
    def _within(index: Expr, extent: Expr) -> Expr:
        """Whether ``0 <= index < extent``, by one comparison."""
        # Not casts: TVM would take the index for never negative.
        return T.reinterpret("uint32", index) < T.reinterpret("uint32", extent)

    def _advance(self) -> None:
        at, step = self.windows, self.kernel.schedule.tile_k
        self.channel.set(self.channel.value + step)
        with b.repeat_while(self.channel.value >= self.group_channels):
            self.channel.set(self.channel.value - self.group_channels)
            self.tap_column.set(self.tap_column.value + at.dilation[1])
            with b.when(self.tap_column.value == at.kernel[1] * at.dilation[1]):
                self.tap_column.set(0)
                self.tap_row.set(self.tap_row.value + at.dilation[0])


def token_source(kernel: Mma) -> TokenSource:
    """Return where a kernel's tokens come from."""
    windows = kernel.gemm.windows
    return Rows(kernel) if windows is None else Pixels(kernel, windows)
