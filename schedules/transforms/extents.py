"""Transforms of extents: slice cuts an axis into pieces, pad rounds one up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ladder.ir.program import Loop, Sum, TileProgram
from ladder.ir.program.model import OVER, granule
from ladder.ir.program.rewriting import Body, axes_of, in_piece, narrowed, resized
from schedules.cpu_layout import UNIT, stored_layout
from schedules.transforms.base import Transform
from targets import TileDevice
from tile_types.tile import Extent


@dataclass(frozen=True)
class Slice(Transform):
    """Cut an axis of the innermost piece.

    args
        ``axis``: m, n, g or k; ``step``: elements of a piece; ``over``: loop, threads or unrolled.
    rewrite
        ``S  ->  for axis by step over ...: S(piece)``, where S are the statements that go through the axis
    checks
        pieces of n divide it; others are whole granules, or parts of one; threads share columns, not sums;
        what is unrolled has a number of pieces that is known.
    """

    form = "slice {axis} by {step} over {over}"
    axis: str
    step: int
    over: str

    def apply(self, program: TileProgram, device: TileDevice) -> TileProgram:
        """Wrap a loop around the statements of the innermost piece that go through the axis."""
        self.check(self.axis in dict(program.axes), f"axes are {', '.join(dict(program.axes))}")
        self.check(self.over in OVER, f"pieces lie over {', '.join(OVER)}")
        loops = program.product[1]
        extent: Extent = program.pieces(loops)[self.axis]
        self._check_pieces(extent)
        self.check(self.over != "unrolled" or isinstance(extent, int), f"{self.axis} has {extent} elements")
        if self.over == "threads":
            self.check(self.axis == "n", "threads share the columns of the result")
            self.check(all(loop.over != "threads" for loop in loops), "threads are started once")
        return replace(program, body=in_piece(program.body, lambda body: self._wrap(program, body)))

    def _check_pieces(self, extent: Extent) -> None:
        whole = granule(extent)
        self.check(self.step >= 1, "a piece has at least one element")
        divides = whole % self.step == 0
        if self.axis == "n":
            self.check(divides, f"n is {extent}; pad w.n to a multiple of {self.step}")
        elif self.axis == "k":
            units = self.step % UNIT == whole % UNIT == 0
            self.check(
                divides or units or self.step % whole == 0, f"k is {extent}: pieces are no whole units"
            )
        else:
            self.check(divides or isinstance(extent, str), f"{self.axis} is {extent}")

    def _wrap(self, program: TileProgram, body: Body) -> Body:
        places = [index for index, statement in enumerate(body) if self.axis in axes_of(program, statement)]
        first, end = places[0], places[-1] + 1
        inside = tuple(narrowed(statement, self.axis, self.step) for statement in body[first:end])
        self.check(
            not any(isinstance(statement, Sum) and statement.axis == self.axis for statement in inside),
            f"sums of x go through all of {self.axis}: place x in cache and slice n before",
        )
        return (*body[:first], Loop(self.axis, self.step, self.over, inside), *body[end:])


@dataclass(frozen=True)
class Pad(Transform):
    """Round an axis of the weight up; what is added holds the code of 0, and scales of 0.

    args
        ``axis``: of the weight; ``multiple``: of which the extent becomes a multiple.
    rewrite
        ``w[N, ..]  ->  w[N^128, ..]``, and every loop goes through the padded axis
    checks
        nothing is sliced yet; the multiple is that of the packed form, which all schedules of a product
        share.
    """

    form = "pad w.{axis} to {multiple} with 0"
    axis: str
    multiple: int

    def apply(self, program: TileProgram, device: TileDevice) -> TileProgram:
        """Round the extent of the axis up in the weight and what belongs to it."""
        packed = stored_layout(program).padding
        wanted = packed.get(self.axis)
        self.check(wanted == self.multiple, f"weights are packed with {padding_text(packed)}")
        self.check(not program.product[1], "pad before anything is sliced")
        extent = program.extent(self.axis)
        self.check("^" not in str(extent), "it is padded already")
        rounded: Extent = (
            -(-extent // self.multiple) * self.multiple
            if isinstance(extent, int)
            else f"{extent}^{self.multiple}"
        )
        axes = tuple((name, rounded if name == self.axis else old) for name, old in program.axes)
        arguments = tuple(
            resized(operand, self.axis, rounded) if operand.name in PACKED else operand
            for operand in program.arguments
        )
        body = tuple(narrowed(statement, self.axis, rounded) for statement in program.body)
        return replace(program, axes=axes, arguments=arguments, body=body)


PACKED = ("w", "scale", "zero", "row_scale")
"""Arguments that packing makes."""


def padding_text(packed: Mapping[str, int]) -> str:
    """Return the transforms that pad so, for messages."""
    return ", ".join(f"pad w.{axis} to {multiple}" for axis, multiple in packed.items())
