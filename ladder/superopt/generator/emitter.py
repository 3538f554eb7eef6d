"""Steps as nodes of a tile graph: conversions, chains, and exponentials relative to a running maximum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ladder.ir.build import GraphBuilder
from ladder.superopt.generator.structure import CONSTANT, DECODE, GraphStep
from tile_types.errors import ScheduleError

ACCUMULATOR = "float32"


@dataclass(frozen=True)
class Shift:
    """A value v stands for ``v * exp(m)``.

    of: The value m, of extent 1 along ``axis``; of all steps if not ``looped``.
    axis: The axis over which the maximum was taken.
    looped: Whether v was accumulated, so that m is the maximum of ``of`` over the steps.
    """

    of: str
    axis: int
    looped: bool = False


class Emitter:
    """Adds steps to a graph.

    ttype: Type of the operands of matrix products.
    softmax_axis: If given, exponentials are taken of x - max x along this axis.
    """

    def __init__(self, builder: GraphBuilder, ttype: str, softmax_axis: int | None = None) -> None:
        self.builder, self.ttype, self.softmax_axis = builder, ttype, softmax_axis
        self.values: dict[int, str] = {}
        self.shifts: dict[int, Shift] = {}
        self._converted: dict[tuple[str, str], str] = {}
        self._tops: dict[Shift, str] = {}

    def cast(self, value: str, ttype: str) -> str:
        if self.builder.tile(value).ttype.name == ttype:
            return value
        key = (value, ttype)
        if key not in self._converted:
            self._converted[key] = self.builder.add("convert", value, type=ttype)
        return self._converted[key]

    def add(self, number: int, step: GraphStep) -> None:
        """Add a step as value ``number``.

        Raises ScheduleError if a running maximum cannot be carried through it.
        """
        names = [self.values[i] for i in step.operands]
        shifts = [self.shifts.get(i) for i in step.operands]
        for operator, attributes in step.links:
            name, shift = self._link(operator, dict(attributes), names, shifts)
            names, shifts = [name], [shift]
        self.values[number] = names[0]
        if shifts[0] is not None:
            self.shifts[number] = shifts[0]

    def _link(
        self, operator: str, attributes: dict[str, Any], names: list[str], shifts: list[Shift | None]
    ) -> tuple[str, Shift | None]:
        """Add one operator and return its result, relative to which maximum."""
        if operator == "exp" and self.softmax_axis is not None:
            return self._shifted_exponential(names[0], shifts[0])
        if operator == "accumulate":
            return self.accumulate(names[0], attributes, shifts[0])
        shift = self._carried(operator, attributes, names, shifts) if any(shifts) else None
        return self._apply(operator, attributes, names), shift

    def _apply(self, operator: str, attributes: dict[str, Any], names: Sequence[str]) -> str:
        if operator == "matmul":
            return self._matmul(*names, **attributes)
        if operator == DECODE:
            return self.cast(names[0], self.ttype)
        if operator == "concat_matmul":
            a, b, c, d = (self.cast(value, self.ttype) for value in names)
            rows = self.builder.add("concat", a, b, axis=1)
            return self._matmul(rows, self.builder.add("concat", c, d, axis=0))
        wide = [self.cast(value, ACCUMULATOR) for value in names]
        if operator in CONSTANT:
            constant = self.builder.add("constant", type=ACCUMULATOR, **attributes)
            return self.builder.add(CONSTANT[operator], *wide, constant)
        return self.builder.add(operator, *wide, **attributes)

    def _matmul(self, a: str, b: str, **attributes: Any) -> str:
        if self.builder.tile(a).shape[-1] == 1:  # of a column with a row: nothing is summed or rounded
            return self.builder.add("mul", *(self.cast(value, ACCUMULATOR) for value in (a, b)))
        a, b = self.cast(a, self.ttype), self.cast(b, self.ttype)
        return self.builder.add("matmul", a, b, type=ACCUMULATOR, **attributes)

    def _shifted_exponential(self, name: str, shift: Shift | None) -> tuple[str, Shift]:
        if shift is not None:
            raise ScheduleError("an exponential of a value that is relative to a maximum")
        assert self.softmax_axis is not None
        wide = self.cast(name, ACCUMULATOR)
        top = self.builder.add("reduce_max", wide, axis=self.softmax_axis)
        relative = self.builder.add("sub", wide, top)
        return self.builder.add("exp", relative), Shift(top, self.softmax_axis)

    def accumulate(
        self, name: str, attributes: dict[str, Any], shift: Shift | None
    ) -> tuple[str, Shift | None]:
        """Accumulate over the steps; a value relative to a maximum is rescaled."""
        if shift is None:
            return self.builder.add("accumulate", name, **attributes), None
        if attributes.get("kind", "sum") != "sum":
            raise ScheduleError("a value that is relative to a maximum is not summed over the steps")
        total = self.builder.add("accumulate", name, shift.of, kind="rescale")
        return total, Shift(shift.of, shift.axis, True)

    def top(self, shift: Shift) -> str:
        """Return the maximum that values are relative to."""
        if not shift.looped:
            return shift.of
        if shift not in self._tops:
            self._tops[shift] = self.builder.add("accumulate", shift.of, kind="max")
        return self._tops[shift]

    def _carried(
        self, operator: str, attributes: dict[str, Any], names: list[str], shifts: list[Shift | None]
    ) -> Shift | None:
        """Return which maximum the result is relative to; raises ScheduleError if there is no such."""
        first, second = [*shifts, None][:2]
        if operator in ("add", "sub") and first == second:
            return first
        if operator == "div" and (first == second or second is None):
            return None if first == second else first
        if operator == "mul" and not (first and second):
            return first or second
        if operator in ("scale", "neg"):
            return first
        rank = len(self.builder.tile(names[0]).shape)
        if operator == "reduce_sum" and first and attributes["axis"] % rank == first.axis:
            return first
        if operator == "matmul" and first and second is None and first.axis == rank - 1:
            return first
        raise ScheduleError(f"{operator} of a value that is relative to a maximum")
