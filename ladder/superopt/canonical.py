"""Canonical forms of programs: equal for programs that differ in names, numbers, sizes and order alone.

The inputs of a canonical program are ``X0``, ``X1``, ... and its dimensions ``D1``, ``D2``, ... in the order
in which its result needs them, operands of commutative operators sorted by what computes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ladder.superopt.generator.alphabet import COMMUTATIVE
from ladder.superopt.generator.program import Program
from ladder.superopt.tracer import Definition, Operation, OverSize

NUMBER, OVER_SIZE = "number", "over size"
"""Stand-ins for constants in a key: any number, and 1 / size of a dimension."""


@dataclass(frozen=True)
class Canonical:
    """A program in canonical form.

    key: Equal for programs that are one up to names, numbers, sizes and types.
    program: The program itself, in this form.
    inputs: For each of its inputs, which one of the original program it is.
    """

    key: str
    program: Program
    inputs: tuple[int, ...]


def canonical(program: Program) -> Canonical:
    """Return the canonical form of a traced program (`Tracer.program`)."""
    given = program.define
    assert isinstance(given, Definition)  # all others have no steps to order
    packed = [f"X{number}" in program.packed for number in range(len(given.shapes))]
    inputs, steps = _order(given, _digests(given, packed))
    names = _dimensions(given, inputs)
    numbers = {old: new for new, old in enumerate(inputs)}
    numbers |= {old: len(inputs) + new for new, (old, _) in enumerate(steps)}
    definition = Definition(
        "program",
        given.dtype,
        tuple(tuple(names.get(str(axis), axis) for axis in given.shapes[old]) for old in inputs),
        tuple(_renamed(given, old, operands, numbers, names) for old, operands in steps),
        numbers[given.output],
    )
    types = {
        f"X{new}": program.packed[f"X{old}"] for new, old in enumerate(inputs) if f"X{old}" in program.packed
    }
    sizes = {new: program.sizes[old] for old, new in names.items()}
    found = replace(program, name="program", define=definition, sizes=sizes, packed=types)
    return Canonical(_key(definition, [packed[old] for old in inputs]), found, tuple(inputs))


def _digests(given: Definition, packed: Sequence[bool]) -> list[str]:
    """Return a digest of the computation of each value: inputs differ by their axes and packing alone."""
    found = [_digest([shape.count(1), len(shape), is_packed])
             for shape, is_packed in zip(given.shapes, packed, strict=True)]  # fmt: skip
    for step in given.steps:
        operands = [found[number] for number in step.operands]
        operands = sorted(operands) if step.operator in COMMUTATIVE else operands
        found.append(_digest([step.operator, _attributes(step), operands]))
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _attributes(step: Operation) -> list[Any]:
    """Return attributes without numbers."""
    if step.operator == "constant":
        return [OVER_SIZE if isinstance(value, OverSize) else NUMBER for _, value in step.attributes]
    return [[name, value] for name, value in sorted(step.attributes)]


def _order(given: Definition, digests: Sequence[str]) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """Return the inputs and the steps with their operands, in the order in which the result needs them."""
    count = len(given.shapes)
    inputs: list[int] = []
    steps: dict[int, list[int]] = {}

    def visit(number: int) -> None:
        if number in steps or number in inputs:
            return
        if number < count:
            inputs.append(number)
            return
        step = given.steps[number - count]
        operands = list(step.operands)
        if step.operator in COMMUTATIVE:
            operands.sort(key=digests.__getitem__)
        for operand in operands:
            visit(operand)
        steps[number] = operands

    visit(given.output)
    return inputs, list(steps.items())


def _dimensions(given: Definition, inputs: Sequence[int]) -> dict[str, str]:
    axes = [axis for number in inputs for axis in given.shapes[number] if isinstance(axis, str)]
    return {old: f"D{new}" for new, old in enumerate(dict.fromkeys(axes), 1)}


def _renamed(
    given: Definition,
    number: int,
    operands: Sequence[int],
    numbers: Mapping[int, int],
    names: Mapping[str, str],
) -> Operation:
    step = given.steps[number - len(given.shapes)]
    attributes = tuple(
        (name, OverSize(names[str(value.dimension)]) if isinstance(value, OverSize) else value)
        for name, value in step.attributes
    )
    return Operation(step.operator, tuple(numbers[operand] for operand in operands), attributes)


def _key(definition: Definition, packed: Sequence[bool]) -> str:
    steps = [
        [step.operator, step.operands, [v.dimension for _, v in step.attributes if isinstance(v, OverSize)],
         _attributes(step)]
        for step in definition.steps
    ]  # fmt: skip
    return _digest([definition.shapes, list(packed), steps, definition.output])
