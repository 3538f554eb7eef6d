"""Execute a tile program in numpy, piece by piece, as its loops say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.ir.ops import get_operator
from ladder.ir.program.model import (
    AddGroup,
    Copy,
    Fill,
    Loop,
    Multiply,
    Operand,
    Statement,
    Store,
    Sum,
    TileProgram,
    size_of,
)
from schedules.instructions import TERMS
from tile_types.errors import ConversionError

Array = npt.NDArray[Any]
Piece = Mapping[str, tuple[int, int]]
"""First element and end along each axis."""


def interpret_program(program: TileProgram, arrays: Mapping[str, npt.ArrayLike], n: int) -> Array:
    """Return the result ``[M, N]``.

    program: Scheduled or not: each transform leaves the result as it is, up to rounding.
    arrays: Values of every argument but the result, by name: ``x[M, K]``, codes ``w[N, K]`` of the type that
        the program states, ``scale[G, N]``, ``zero[G, N]``, ``row_scale[N]``, ``token_scale[M]``,
        ``bias[N]``.
    n: N.
    """
    x = np.asarray(arrays["x"], np.float64)
    sizes = program.sizes(len(x), n, x.shape[1])
    run = _Run(program, sizes)
    for operand in program.arguments:
        if operand.name != "y":
            run.tiles[operand.name] = run.argument(operand, np.asarray(arrays[operand.name]))
    run.tiles["y"] = np.zeros((len(x), n)), {"m": 0, "n": 0}
    run.body(program.body, {axis: (0, size_of(extent, sizes)) for axis, extent in program.axes})
    return run.tiles["y"][0]


def rounded(values: Array, operand: Operand, *, exactly: bool = False) -> Array:
    """Return values as a tile's type holds them; ``exactly`` refuses those that it does not hold."""
    ttype = operand.tile.ttype
    if ttype.name in ("int16", "int32"):
        return np.asarray(values, np.int64)
    result: Array = np.asarray(ttype.decode_codes(np.asarray(ttype.encode(values))), np.float64)
    if exactly and not np.array_equal(result, values):
        raise ConversionError(f"{operand.name}: a value is none of {ttype.name}")
    return result


@dataclass
class _Run:
    """One execution.

    program: What is executed.
    sizes: Size of each symbol.
    tiles: Name -> values, and the element at which they begin along each axis.
    """

    program: TileProgram
    sizes: Mapping[str, int]
    tiles: dict[str, tuple[Array, Mapping[str, int]]] = field(default_factory=dict)

    def argument(self, operand: Operand, values: Array) -> tuple[Array, Mapping[str, int]]:
        """Return an argument, split into groups and padded with zeros to the extents of the axes."""
        if operand.name == "w":
            values = operand.tile.ttype.decode_codes(values)
        values = np.asarray(values, np.float64)
        if operand.axes[-2:] == ("g", "k"):
            groups, width = self.sizes["G"], size_of(self.program.operand("x").extent("k"), self.sizes)
            values = np.pad(values, [(0, 0), (0, groups * width - values.shape[1])]).reshape(
                -1, groups, width
            )
        wanted = [size_of(self.program.extent(axis), self.sizes) for axis in operand.axes]
        missing = [(0, max(0, extent - have)) for extent, have in zip(wanted, values.shape, strict=True)]
        return np.pad(values, missing), dict.fromkeys(operand.axes, 0)

    def view(self, name: str, piece: Piece) -> Array:
        """Return the part of a tile that the pieces of all axes select."""
        values, begin = self.tiles[name]
        return values[
            tuple(slice(piece[axis][0] - begin[axis], piece[axis][1] - begin[axis]) for axis in begin)
        ]

    def body(self, body: tuple[Statement, ...], piece: Piece) -> None:
        """Execute statements in order."""
        for statement in body:
            getattr(self, f"_{type(statement).__name__.lower()}")(statement, piece)

    def _loop(self, loop: Loop, piece: Piece) -> None:
        first, end = piece[loop.axis]
        for start in range(first, end, loop.step):
            self.body(loop.body, {**piece, loop.axis: (start, min(start + loop.step, end))})

    def _make(self, operand: Operand, values: Array, piece: Piece) -> None:
        self.tiles[operand.name] = values, {axis: piece[axis][0] for axis in operand.axes}

    def _fill(self, fill: Fill, piece: Piece) -> None:
        self._make(fill.target, np.zeros([piece[a][1] - piece[a][0] for a in fill.target.axes]), piece)

    def _copy(self, copy: Copy, piece: Piece) -> None:
        values = self.view(copy.source, piece)
        if copy.source.startswith(f"{copy.target.name}."):  # written back
            self.view(copy.target.name, piece)[:] = values
        else:
            kept = values if copy.recipe == TERMS else rounded(values, copy.target, exactly=not copy.recipe)
            self._make(copy.target, kept.copy(), piece)

    def _sum(self, total: Sum, piece: Piece) -> None:
        axis = self.program.operand(total.source).axes.index(total.axis)
        self._make(total.target, self.view(total.source, piece).sum(axis), piece)

    def _multiply(self, product: Multiply, piece: Piece) -> None:
        left, right = self.view(product.left, piece), self.view(product.right, piece)
        self._add(product.total, np.einsum("mgk,ngk->gmn", left, right), piece)

    def _addgroup(self, add: AddGroup, piece: Piece) -> None:
        value = self.view(add.value, piece)
        if add.sums:
            sums = self.view(add.sums, piece).T[:, :, None]
            zero = self.view(add.zero, piece)[:, None, :] if add.zero else -add.offset
            value = value - zero * sums
        scale = self.view(add.scale, piece)[:, None, :] if add.scale else 1.0
        self._add(add.total, (value * scale).sum(0), piece)

    def _add(self, name: str, values: Array, piece: Piece) -> None:
        """Add to a tile in its own type."""
        target = self.view(name, piece)
        target[:] = rounded(target + values, self.program.operand(name))

    def _store(self, store: Store, piece: Piece) -> None:
        values = self.view(store.source, piece)
        for name, operand in store.operators:
            operands = [values]
            if operand:
                factor = self.view(operand, piece)
                operands.append(factor[:, None] if self.program.operand(operand).axes == ("m",) else factor)
            values = get_operator(name).reference(operands, {})
        here = self.view(store.target, piece)
        here[:] = rounded(values[: here.shape[0], : here.shape[1]], self.program.operand(store.target))
