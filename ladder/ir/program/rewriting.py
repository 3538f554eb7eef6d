"""How transforms rewrite a tile program: at the innermost piece, or statement by statement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ladder.ir.program.model import Copy, Fill, Loop, Operand, Statement, Sum, TileProgram, made_by
from ladder.ir.program.verify import reads
from tile_types.tile import Extent

Body = tuple[Statement, ...]


def in_piece(body: Body, rewrite: Callable[[Body], Body]) -> Body:
    """Rewrite the body of the innermost loop."""
    for place, statement in enumerate(body):
        if isinstance(statement, Loop):
            inner = replace(statement, body=in_piece(statement.body, rewrite))
            return (*body[:place], inner, *body[place + 1 :])
    return rewrite(body)


def innermost(body: Body) -> Body:
    """Return the body of the innermost loop."""
    loop = next((statement for statement in body if isinstance(statement, Loop)), None)
    return body if loop is None else innermost(loop.body)


def rewritten(program: TileProgram, rewrite: Callable[[Statement], Statement]) -> TileProgram:
    """Rewrite every statement, the bodies of loops first."""

    def visit(body: Body) -> Body:
        return tuple(rewrite(replace(s, body=visit(s.body)) if isinstance(s, Loop) else s) for s in body)

    return replace(program, body=visit(program.body))


def replaced(program: TileProgram, operand: Operand) -> TileProgram:
    """Return the program with another tile in the place of the argument or made tile of its name."""
    arguments = tuple(operand if old.name == operand.name else old for old in program.arguments)

    def exchange(statement: Statement) -> Statement:
        made = made_by(statement)
        return made_anew(statement, operand) if made is not None and made.name == operand.name else statement

    return rewritten(replace(program, arguments=arguments), exchange)


def resized(operand: Operand, axis: str, extent: Extent) -> Operand:
    """Return a tile with another extent along an axis, if it has that."""
    if axis not in operand.axes:
        return operand
    place = operand.axes.index(axis)
    shape = (*operand.tile.shape[:place], extent, *operand.tile.shape[place + 1 :])
    return replace(operand, tile=replace(operand.tile, shape=shape))


def made_anew(statement: Statement, operand: Operand) -> Statement:
    """Return a statement that makes another tile."""
    return replace(statement, target=operand) if isinstance(statement, (Fill, Copy, Sum)) else statement


def narrowed(statement: Statement, axis: str, extent: Extent) -> Statement:
    """Return a statement that makes a tile of another extent along an axis."""
    made = made_by(statement)
    return statement if made is None else made_anew(statement, resized(made, axis, extent))


def renamed(statement: Statement, old: str, new: str) -> Statement:
    """Return a statement that reads, or adds to, another tile."""
    names = ("source", "left", "right", "total")
    changes: dict[str, Any] = {name: new for name in names if getattr(statement, name, None) == old}
    return replace(statement, **changes)


def axes_of(program: TileProgram, statement: Statement) -> frozenset[str]:
    """Return the axes that a statement goes through."""
    made = made_by(statement)
    names = [*reads(statement)] if not isinstance(statement, Copy) else []
    axes = {axis for name in names for axis in program.operand(name).axes}
    return frozenset(axes | set(made.axes if made else ()))


def at_level(statement: Sum, level: str) -> Sum:
    """Return a statement that makes its tile at another level."""
    tile = replace(statement.target.tile, level=level)
    return replace(statement, target=replace(statement.target, tile=tile))
