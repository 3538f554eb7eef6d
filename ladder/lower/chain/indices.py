"""Index arithmetic of a loop nest: normal forms, and comparisons decided by loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.sym import Analyzer
from tvm.tirx.analysis import undefined_vars

from ladder.lower import Expr
from tile_types.tile import Extent

Index = tuple[Expr, ...]

MOST_INLINED_PARTS = 64
"""Nodes of an expression tree beyond which it is computed into a register; trees share no subexpressions."""


@dataclass
class Indices:
    """Indices as expressions of loops and sizes.

    sizes: Symbolic size -> TIR variable.
    analyzer: Knows the ranges of the loops around.
    assumed: Comparisons that a branch around has decided, by key.
    assumptions: The same as expressions: a decision on one boundary says something of others.
    """

    sizes: Mapping[str, Expr]
    analyzer: Any = field(default_factory=Analyzer, kw_only=True)
    assumed: dict[Any, bool] = field(default_factory=dict, kw_only=True)
    assumptions: list[tuple[tuple[Expr, Expr], bool]] = field(default_factory=list, kw_only=True)
    numbers: dict[Any, Expr] = field(default_factory=dict, kw_only=True)
    """Variables that count elements over several axes -> what they are, see `resolved`."""

    def extent(self, extent: Extent) -> Expr:
        if isinstance(extent, int):
            return extent
        return eval(extent, {"__builtins__": {}}, {**_EXTENTS, **self.sizes})  # canonical text of an extent

    def simplified(self, expression: Expr) -> Expr:
        """Return an index in normal form: a known number is an int."""
        if isinstance(expression, int):
            return expression
        found = self.analyzer.simplify(expression)
        return found.value if isinstance(found, tirx.IntImm) and str(found.ty.dtype) != "bool" else found

    def resolved(self, expression: Expr) -> Expr:
        """Return an index in normal form, of loops: first of `numbers`, whose parts then make one again.

        ``n // 3 * 3 + n % 3`` is n, where that of ``4 * i + 1`` in normal form has other terms.
        """
        expression = self.simplified(expression)
        if not any(variable in self.numbers for variable in variables_of(expression) if self.numbers):
            return expression
        known = (tirx.Var, lambda variable: self.numbers.get(variable, variable))
        return self.simplified(tvm_ffi.structural_map(expression, known))

    def key(self, name: str, index: Index) -> tuple[str, Any]:
        return name, tuple(i if isinstance(i, int) else tvm_ffi.structural_hash(i) for i in index)

    def is_below(self, position: Expr, boundary: Expr) -> bool | None:
        """Return whether ``position < boundary`` here, None if that depends on the loop."""
        position, boundary = self.compared(position, boundary)
        if isinstance(position, int) and isinstance(boundary, int):
            return position < boundary
        known = self.assumed.get(self.key("below", (position, boundary)))
        if known is None:
            known = self.follows(position, boundary)
        if known is not None:
            return known
        if self.analyzer.can_prove(position < boundary):
            return True
        if self.analyzer.can_prove(position >= boundary):
            return False
        return self._is_below_either_way(position, boundary)

    def _is_below_either_way(self, position: Expr, boundary: Expr) -> bool | None:
        """Return whether both positions of a choice are below a boundary; None if they differ."""
        if not isinstance(position, tirx.Select):
            return None
        condition, found = position.condition, set[bool | None]()
        for holds, chosen in ((condition, position.true_value), (tirx.Not(condition), position.false_value)):
            with self.analyzer.constraint_scope(self.analyzer.simplify(holds)):
                below = self.analyzer.can_prove(chosen < boundary)
                found.add(True if below else False if self.analyzer.can_prove(chosen >= boundary) else None)
        return found.pop() if len(found) == 1 else None

    def compared(self, position: Expr, boundary: Expr) -> tuple[Expr, Expr]:
        """Return the sides of ``position < boundary``, without numbers added and limits that decide nothing.

        So comparisons of what one loop variable is brought inside of are all of that variable.
        """
        position, boundary = self.simplified(position), self.simplified(boundary)
        while (step := self._compared_within(position, boundary)) is not None:
            position, boundary = step[0], self.simplified(step[1])
        return position, boundary

    def _compared_within(self, position: Expr, boundary: Expr) -> tuple[Expr, Expr] | None:
        """Return a comparison of an operand of the position that says the same, None if there is none."""
        if isinstance(position, tirx.Add | tirx.Sub) and isinstance(position.b, tirx.IntImm):
            moved = -position.b if isinstance(position, tirx.Add) else position.b
            return position.a, boundary + moved
        if isinstance(position, tirx.Max) and self.analyzer.can_prove(position.b < boundary):
            return position.a, boundary
        if isinstance(position, tirx.Min) and self.analyzer.can_prove(position.b >= boundary):
            return position.a, boundary
        return None

    def follows(self, position: Expr, boundary: Expr) -> bool | None:
        """Return what assumptions on other boundaries say of ``position < boundary``; None if nothing."""
        for (other, limit), holds in self.assumptions:
            if not is_same(other, position):
                continue
            if holds and self.analyzer.can_prove(limit <= boundary):
                return True
            if not holds and self.analyzer.can_prove(boundary <= limit):
                return False
        return None

    @contextmanager
    def decided(self, comparison: tuple[Expr, Expr], holds: bool) -> Iterator[None]:
        """Take ``position < boundary`` as decided."""
        key = self.key("below", comparison)
        self.assumed[key] = holds
        self.assumptions.append((comparison, holds))
        try:
            yield
        finally:
            del self.assumed[key]
            self.assumptions.pop()


def is_same(a: Expr, b: Expr) -> bool:
    """Tell whether two extents are equal for all sizes, both in normal form."""
    plain = isinstance(a, int | tirx.IntImm) and isinstance(b, int | tirx.IntImm)
    return int(a) == int(b) if plain else tvm_ffi.structural_equal(a, b)


_EXTENTS: Mapping[str, Callable[[Any, Any], Any]] = {
    "floordiv": tirx.floordiv,
    "ceildiv": lambda a, b: tirx.floordiv(a + b - 1, b),
    "max": tirx.max,
    "min": tirx.min,
}
"""Functions in extents, as expressions."""


def variables_of(expression: Expr) -> Sequence[Any]:
    """Return the variables that an expression depends on."""
    return [] if isinstance(expression, int) else undefined_vars(tirx.Evaluate(expression), [])


def is_long(expression: Expr) -> bool:
    """Tell whether an expression, written out as a tree, has more than `MOST_INLINED_PARTS` nodes."""
    left = MOST_INLINED_PARTS

    def count(part: Any) -> Any:
        nonlocal left
        left -= 1
        return tvm_ffi.VisitInterrupt(None) if left < 0 else None

    tvm_ffi.structural_walk(expression, (ir.Expr, count), order="pre")
    return left < 0
