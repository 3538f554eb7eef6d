"""Tile programs as text: one line per statement, loops by indentation; what is printed reads back equal."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ladder.ir.program.model import (
    AddGroup,
    Copy,
    Fill,
    Layout,
    Loop,
    Multiply,
    Operand,
    Statement,
    Store,
    Sum,
    TileProgram,
)
from tile_types import get_type
from tile_types.errors import ParseError
from tile_types.tile import Extent, Tile

INDENT = "  "


def print_program(program: TileProgram) -> str:
    """Return the text of a program."""
    axes = ", ".join(f"{name}: {extent}" for name, extent in program.axes)
    head = [f"tile program {program.name}", f"axes {axes}"]
    arguments = [f"argument {_operand(operand)}" for operand in program.arguments]
    return "\n".join([*head, *arguments, *_lines(program.body, "")])


def _operand(operand: Operand) -> str:
    tile = operand.tile
    shape = ", ".join(map(str, tile.shape))
    layout = "" if tile.layout is None else f" {tile.layout}"
    return f"{operand.name}[{', '.join(operand.axes)}]: {operand.ttype}[{shape}] {tile.level}{layout}"


def _lines(body: tuple[Statement, ...], indent: str) -> list[str]:
    lines = []
    for statement in body:
        lines.append(indent + _PRINT[type(statement)](statement))
        if isinstance(statement, Loop):
            lines += _lines(statement.body, indent + INDENT)
    return lines


def _copy(copy: Copy) -> str:
    by = f" by {copy.by}" if copy.by else ""
    recipe = f", convert by {copy.recipe}" if copy.recipe else ""
    return f"{_operand(copy.target)} <- {copy.source}{by}{recipe}"


def _add(add: AddGroup) -> str:
    sums = "".join(
        [
            f" - {add.zero} * {add.sums}" if add.zero else "",
            f" + {add.offset} * {add.sums}" if add.offset else "",
        ]
    )
    value = f"({add.value}{sums})" if sums else add.value
    return f"{add.total} += {value}" + (f" * {add.scale}" if add.scale else "")


def _multiply(product: Multiply) -> str:
    by = f" by {product.by}" if product.by else ""
    return f"{product.total} += {product.left} · {product.right}{by}"


def _store(store: Store) -> str:
    steps = "".join(f", {name} {operand}" if operand else f", {name}" for name, operand in store.operators)
    return f"store {store.target} <- {store.source}{steps}"


_PRINT: Mapping[type, Callable[[Any], str]] = {
    Fill: lambda fill: f"{_operand(fill.target)} <- 0",
    Copy: _copy,
    Sum: lambda total: f"{_operand(total.target)} <- sum of {total.source} over {total.axis}",
    Multiply: _multiply,
    AddGroup: _add,
    Store: _store,
    Loop: lambda loop: f"for {loop.axis} by {loop.step} over {loop.over}:",
}

_NAME = r"[a-z_0-9.]+"
_TILE = rf"({_NAME})\[([a-z, ]*)\]: (\w+)\[([^\]]*)\] (\w+)(?: (\w+)\((\d+(?:, \d+)*|)\))?"
_OPERAND = 7
"""Groups of `_TILE`."""


def _read_operand(parts: tuple[str | None, ...]) -> Operand:
    name, axes, ttype, shape, level, layout, parameters = (part or "" for part in parts)
    held = Layout(layout, tuple(map(int, _split(parameters)))) if layout else None
    extents = tuple(_extent(extent) for extent in _split(shape))
    return Operand(name, tuple(_split(axes)), Tile(get_type(ttype), extents, level, held))


def _split(text: str) -> list[str]:
    return text.split(", ") if text else []


def _extent(text: str) -> Extent:
    return int(text) if text.isdecimal() else text


def _read_fill(found: tuple[Any, ...]) -> Statement:
    return Fill(_read_operand(found))


def _read_sum(found: tuple[Any, ...]) -> Statement:
    return Sum(_read_operand(found[:_OPERAND]), *found[_OPERAND:])


def _read_copy(found: tuple[Any, ...]) -> Statement:
    source, by, recipe = found[_OPERAND:]
    return Copy(_read_operand(found[:_OPERAND]), source, by or "", recipe or "")


def _read_multiply(found: tuple[Any, ...]) -> Statement:
    total, left, right, by = found
    return Multiply(total, left, right, by or "")


def _read_store(found: tuple[Any, ...]) -> Statement:
    steps = tuple(
        (name, operand) for name, _, operand in (part.partition(" ") for part in found[2].split(", ")[1:])
    )
    return Store(found[0], found[1], steps)


def _read_add(found: tuple[Any, ...]) -> Statement:
    total, plain, value, zero, zero_sums, offset, offset_sums, scale = (part or "" for part in found)
    return AddGroup(total, plain or value, zero_sums or offset_sums, zero, scale, int(offset or 0))


_READ: tuple[tuple[str, Callable[[tuple[Any, ...]], Statement]], ...] = (
    (rf"{_TILE} <- 0", _read_fill),
    (rf"{_TILE} <- sum of ({_NAME}) over (\w+)", _read_sum),
    (rf"{_TILE} <- ({_NAME})(?: by ([\w ]+))?(?:, convert by (\w+))?", _read_copy),
    (rf"store ({_NAME}) <- ({_NAME})((?:, [\w. ]+)*)", _read_store),
    (rf"({_NAME}) \+= ({_NAME}) · ({_NAME})(?: by (\w+))?", _read_multiply),
    (
        rf"({_NAME}) \+= (?:({_NAME})|\(({_NAME})(?: - ({_NAME}) \* ({_NAME}))?"
        rf"(?: \+ (-?\d+) \* ({_NAME}))?\))(?: \* ({_NAME}))?",
        _read_add,
    ),
)
_LOOP = re.compile(r"for (\w+) by (\d+) over (\w+):")


def parse_program(text: str) -> TileProgram:
    """Read back what ``str(program)`` printed.

    Raises ParseError if a line is no statement; it is quoted.
    """
    lines = text.splitlines()
    head = re.fullmatch(r"tile program (\w+)", lines[0]) if len(lines) > 1 else None
    axes = re.fullmatch(r"axes (.*)", lines[1]) if head else None
    if head is None or axes is None:
        raise ParseError("a tile program begins with the lines 'tile program NAME' and 'axes ...'")
    extents = tuple(map(_read_axis, _split(axes[1])))
    arguments = [line.removeprefix("argument ") for line in lines[2:] if line.startswith("argument ")]
    operands = []
    for argument in arguments:
        found = re.fullmatch(_TILE, argument)
        if found is None:
            raise ParseError(f"not an argument of a tile program: {argument!r}")
        operands.append(_read_operand(found.groups()))
    body, rest = _read_body(lines[2 + len(arguments) :], 0)
    if rest:
        raise ParseError(f"wrong indentation: {rest[0]!r}")
    return TileProgram(head[1], extents, tuple(operands), body)


def _read_axis(text: str) -> tuple[str, Extent]:
    """Return the name and the extent of an axis."""
    found = re.fullmatch(r"(\w+): ([^:]+)", text)
    if found is None:
        raise ParseError(f"not an axis of a tile program: {text!r}; write NAME: EXTENT")
    return found[1], _extent(found[2])


def _read_body(lines: list[str], depth: int) -> tuple[tuple[Statement, ...], list[str]]:
    """Return the statements of one depth, and the lines that follow them."""
    body: list[Statement] = []
    while lines and _depth(lines[0]) == depth:
        line, lines = lines[0].strip(), lines[1:]
        loop = _LOOP.fullmatch(line)
        if loop:
            inner, lines = _read_body(lines, depth + 1)
            body.append(Loop(loop[1], int(loop[2]), loop[3], inner))
        else:
            body.append(_read_statement(line))
    return tuple(body), lines


def _depth(line: str) -> int:
    return (len(line) - len(line.lstrip(" "))) // len(INDENT)


def _read_statement(line: str) -> Statement:
    for pattern, read in _READ:
        found = re.fullmatch(pattern, line)
        if found:
            return read(found.groups())
    raise ParseError(f"not a statement of a tile program: {line!r}")
