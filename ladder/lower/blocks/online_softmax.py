"""Check that a running maximum may replace the maximum of each step (online softmax)."""

from __future__ import annotations

from ladder.lower.blocks.analysis import BlockProgram
from tile_types.errors import ScheduleError

LINEAR = ("matmul", "reduce_sum", "convert", "mul", "div", "accumulate")
"""Operators that keep a factor per row of their first operand."""


def maxima(program: BlockProgram) -> tuple[str, ...]:
    """Return the maxima that accumulators are scaled by.

    Raises ScheduleError if a maximum is used otherwise than online softmax does, so that the running one
        cannot stand for it.
    """
    names = dict.fromkeys(node.inputs[1] for node in program.accumulators if len(node.inputs) == 2)
    for name in names:
        _require_softmax(program, name)
    return tuple(names)


def _require_softmax(program: BlockProgram, name: str) -> None:
    """Check that the maximum m occurs only as ``exp(... - m)`` before accumulators that take m."""
    for user in program.users[name]:
        if user.operator == "accumulate":
            # As the maximum that others are scaled to, or accumulated itself.
            if user.inputs[1:] == (name,) and user.inputs[0] == name:
                raise ScheduleError(f"%{user.name} rescales the maximum %{name} by itself")
            continue
        exponents = program.users[user.name]
        if user.operator != "sub" or user.inputs[1] != name or any(e.operator != "exp" for e in exponents):
            raise ScheduleError(f"%{user.name} takes the maximum %{name} otherwise than in exp(x - maximum)")
        for exponent in exponents:
            _require_linear(program, exponent.name, name)


def _require_linear(program: BlockProgram, value: str, maximum: str) -> None:
    for user in program.users[value]:
        linear = user.operator in LINEAR and user.inputs[0] == value and value not in user.inputs[1:]
        if not linear or (user.operator == "accumulate" and user.inputs[1:] != (maximum,)):
            raise ScheduleError(f"%{user.name} takes an exponential of %{maximum} that it may not rescale")
        if user.operator != "accumulate":
            _require_linear(program, user.name, maximum)


def depends_on(program: BlockProgram, maximum: str, value: str) -> bool:
    """Return whether a value of the loop depends on a maximum."""
    if value == maximum:
        return True
    node = program.block.producer(value)
    inner = node.operator not in ("accumulate", "load")
    return inner and any(depends_on(program, maximum, name) for name in node.inputs)
