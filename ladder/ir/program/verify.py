"""The verifier of tile programs: each rule is one function that yields complaints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ladder.ir.program.model import (
    LOCAL,
    MEMORY,
    OVER,
    AddGroup,
    Copy,
    Fill,
    Loop,
    Multiply,
    Statement,
    Store,
    Sum,
    TileProgram,
    made_by,
    walk,
)
from tile_types.errors import VerificationError


def verify_program(program: TileProgram) -> None:
    """Check a scheduled program.

    Raises VerificationError: Names everything that is wrong with it.
    """
    found = [*_axes(program)] or [complaint for rule in RULES for complaint in rule(program)]
    if found:
        raise VerificationError(f"tile program {program.name}: {'; '.join(found)}")


def reads(statement: Statement) -> tuple[str, ...]:
    """Return the names of the tiles that a statement reads or adds to."""
    if isinstance(statement, (Copy, Sum)):
        return (statement.source,)
    if isinstance(statement, Multiply):
        return (statement.total, statement.left, statement.right)
    if isinstance(statement, AddGroup):
        names = (statement.total, statement.value, statement.sums, statement.zero, statement.scale)
        return tuple(name for name in names if name)
    if isinstance(statement, Store):
        return (statement.target, statement.source, *(name for _, name in statement.operators if name))
    return ()


def _defined(program: TileProgram) -> Iterator[str]:
    """Every tile is an argument, or made by an earlier statement of the same or an outer loop."""

    def visit(body: tuple[Statement, ...], known: set[str]) -> Iterator[str]:
        known = set(known)
        for statement in body:
            yield from (f"{name} is read before it is made" for name in reads(statement) if name not in known)
            made = made_by(statement)
            known |= {made.name} if made else set()
            if isinstance(statement, Loop):
                yield from visit(statement.body, known)

    yield from visit(program.body, {operand.name for operand in program.arguments})


def _axes(program: TileProgram) -> Iterator[str]:
    """Axes have a name each, and every tile, sum and loop is of some of them."""
    names = [name for name, _ in program.axes]
    yield from (f"there are two axes {name}" for name in sorted({n for n in names if names.count(n) > 1}))
    for operand in (*program.arguments, *(made_by(statement) for statement, _ in walk(program.body))):
        if operand is not None:
            yield from (f"{operand.name} has no axis {axis!r}" for axis in operand.axes if axis not in names)


def _shapes(program: TileProgram) -> Iterator[str]:
    """Every tile that is made is as large as the pieces of the loops around it."""
    for statement, loops in walk(program.body):
        made = made_by(statement)
        if made is None or (isinstance(statement, Copy) and statement.source.startswith(f"{made.name}.")):
            continue  # what is written back is as large as it was made
        pieces = program.pieces(loops)
        wanted = tuple(pieces[axis] for axis in made.axes)
        if made.tile.shape != wanted:
            yield f"{made.name} is {list(made.tile.shape)} where pieces are {list(wanted)}"


def _loops(program: TileProgram) -> Iterator[str]:
    axes = dict(program.axes)
    for statement, loops in walk(program.body):
        if isinstance(statement, Loop):
            if statement.axis not in axes or statement.over not in OVER:
                yield f"there is no axis {statement.axis} over {statement.over}"
            if statement.over == "threads" and any(loop.over == "threads" for loop in loops):
                yield "threads start threads"


def _placed(program: TileProgram) -> Iterator[str]:
    """Every tile that is made has a place in the kernel."""
    for statement, _ in walk(program.body):
        made = made_by(statement)
        if made is not None and made.tile.level not in LOCAL and not program_argument(program, made.name):
            yield f"place {made.name}: it lies in {MEMORY}"


def program_argument(program: TileProgram, name: str) -> bool:
    """Whether a name is that of an argument."""
    return any(operand.name == name for operand in program.arguments)


def _product(program: TileProgram) -> Iterator[str]:
    products = [statement for statement, _ in program.find(Multiply) if isinstance(statement, Multiply)]
    if len(products) != 1:
        yield f"there are {len(products)} products, one is emitted"
    elif not products[0].by:
        yield "no instruction multiplies: use one for matmul"
    elif program.operand(products[0].total).tile.level != "register":
        yield f"instructions add to registers: place {products[0].total} in register"


def _accumulators(program: TileProgram) -> Iterator[str]:
    """Everything that is added to begins as zero."""
    filled = {fill.target.name for fill, _ in program.find(Fill) if isinstance(fill, Fill)}
    for statement, _ in program.find(AddGroup):
        assert isinstance(statement, AddGroup)
        yield from (
            f"{name} is not filled" for name in (statement.total, statement.value) if name not in filled
        )


RULES: tuple[Callable[[TileProgram], Iterator[str]], ...] = (
    _defined,
    _shapes,
    _loops,
    _placed,
    _product,
    _accumulators,
)
"""The rules that `verify_program` checks."""
