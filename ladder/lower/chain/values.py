"""The value of a chain's tile at an index, as a TIR expression.

Halves are computed in float32 and rounded where they are stored, and by conversions that are exact;
reductions are looked up in `cells`, where the loop nest has put them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from ladder.ir import scalars
from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import Affine, parse_indexing
from ladder.ir.ops import get_operator
from ladder.ir.scalars import opaque
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain import gathers, joins
from ladder.lower.chain.clamping import every_axis, is_read_under, is_within, spread_values
from ladder.lower.chain.conversions import converted, decoded, encoded, round_through
from ladder.lower.chain.element_types import computed_type
from ladder.lower.chain.indices import Index, Indices, is_long
from ladder.partition.rows import REDUCTIONS, SCANS, reshape_groups
from schedules.schedule import check
from tile_types.errors import DTypeError
from tile_types.tile import Extent


@dataclass
class Values(Indices):
    """Expressions of a chain's values.

    load: ``(input name, index)`` -> its element, in the computed type.
    cells: Results of reductions: (node, index key) -> expression.
    breaks: Where joins and borders lie along a loop variable: variable -> positions.
    """

    graph: Graph
    load: Callable[[str, Index], Expr]
    cells: dict[tuple[str, Any], Expr] = field(default_factory=dict)
    breaks: dict[Any, set[int]] = field(default_factory=dict)
    rows: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Values whose row lies in memory: value -> (key of the row's index, its columns)."""
    lowerings: Mapping[str, Callable[..., Expr]] = field(default_factory=dict)
    """Operators, and nodes by ``%name``, that are computed otherwise than the operator table says."""
    rounded: Callable[[Expr, str], Expr] = field(default=lambda value, kind: round_through(value, kind))
    """Rounds a float32 to a 16-bit type, and returns it as one."""
    encoded: Callable[..., Expr] = field(default=encoded)
    """Returns the code of a float32 in a float of 8 bits."""
    decoded: Callable[[Expr, str], Expr] = field(default=decoded)
    row_number: Callable[[Expr, Expr, bool], Expr] = field(default=gathers.no_row_number)
    """Returns what data says is a row of so many; negative numbers may count from the end."""

    def __post_init__(self) -> None:
        self.memory: dict[Any, Expr] = {}
        self.stand_ins: dict[Any, Any] = {}  # for numbers of gathers
        self.scanned: set[Any] = set()  # scans whose row is in cells
        self.loops: list[Any] = []
        self.open: list[tuple[Expr, Expr]] = []
        """Comparisons that the values made so far leave to run time."""
        self.guards: list[Expr] = []
        """Those on which it depends whether the value being made may be read."""
        self.zeroed: set[str] = set()
        """Values of which loads under conditions give zeros where those fail."""
        self.joined_by_position: set[str] = set()
        """Joins of which an element's position is chosen, rather than its value, if all are parts of one."""
        self.narrow = self.looking = False
        """Whether positions of 64 bits are worked out in 32; only loads count: reductions need no cells."""
        self.keep: Callable[[Expr], Expr] | None = None
        """Puts what several nodes read into a register; None where nothing may be emitted."""
        self.clamped = every_axis(self.graph)
        """Axes along which a value's positions are brought inside; fewer where loads are under conditions."""
        readers = [value for node in self.graph.nodes for value in node.inputs]
        self.shared = {value for value in readers if readers.count(value) > 1}
        self.spread = spread_values(self.graph)

    def at(self, value: str, index: Index) -> Expr:
        index = tuple(self.simplified(i) for i in index)
        key = self.key(value, index)
        found = self.cells.get(key, self.memory.get(key))
        if found is None and value in self.rows:
            row, columns = self.rows[value]
            found = columns[index[-1]] if self.key(value, index[:-1]) == row else None
        if found is None and self.guards and self.is_anyway(value, index):
            with self.unguarded():
                return self.at(value, index)
        if found is None and self.guards:  # what is loaded under a condition is nothing where it fails
            key = (*key, *(tvm_ffi.structural_hash(self.simplified(guard)) for guard in self.guards))
            found = self.memory.get(key)
        if found is None:
            found = self.memory[key] = self._made(self.graph.producer(value), index)
        return found

    def is_anyway(self, value: str, index: Index) -> bool:
        """Tell whether something that several elements read is the same whatever the conditions on them."""
        return self.keep is not None and value in self.spread and not is_read_under(index, self.guards)

    def forget(self) -> None:
        """Drop expressions of loops that have ended."""
        self.memory.clear()

    def _made(self, node: Node, index: Index) -> Expr:
        row = get_operator(node.operator)
        if row.role == "input":
            return self.load(node.name, index)
        if row.elementwise:
            operands = [self.at(v, i) for v, i in zip(node.inputs, self.operands(node, index), strict=True)]
            return self._computed(node, operands)
        if node.operator in (*REDUCTIONS, *SCANS) and (self.looking or 0 in node.tile.shape):
            return tirx.const(1, computed_type(node.tile.ttype.name))
        check(node.operator not in SCANS, "a scan is read at another column than it is computed for")
        return _MAKERS[node.operator](self, node, index, node_attributes(node))

    def named(self, value: Expr) -> Expr:
        """Return a value in a register, where something may be emitted and nothing guards it."""
        return value if self.keep is None or self.guards else self.keep(value)

    def lowering(self, operator: str, name: str = "") -> Callable[..., Expr]:
        """Return what computes an element-wise operator of elements, in the node ``name``."""
        lower = self.lowerings.get(f"%{name}", self.lowerings.get(operator, get_operator(operator).lower))
        assert lower is not None  # that is what element-wise means
        return lower

    def _computed(self, node: Node, operands: Sequence[Expr]) -> Expr:
        """Return an element-wise operator's result; in a register if several read it, or if it is long."""
        if self.looking:
            return tirx.const(1, computed_type(node.tile.ttype.name))
        with scalars.using({} if self.keep is None or self.guards else {"keep": self.keep}):
            found = self.lowering(node.operator, node.name)(*operands)
        if self.keep is None:
            return found
        several = (node.name in self.shared or node.name in self.spread) and not self.guards
        return self.keep(found) if several or is_long(found) else found

    def operands(self, node: Node, index: Index) -> list[Index]:
        """Return the index of each operand of an element-wise node: aligned at the right."""
        found = []
        for value in node.inputs:
            shape = self.graph.tile(value).shape
            own = index[len(index) - len(shape) :]
            found.append(tuple(0 if extent == 1 else i for i, extent in zip(own, shape, strict=True)))
        return found

    def needed(self, value: str, index: Index) -> list[tuple[Node, Index]]:
        """Return the reductions that a value needs first and that are in no cell yet, in order."""
        found: dict[Any, tuple[Node, Index]] = {}
        seen: set[Any] = set()

        def visit(value: str, index: Index) -> None:
            if 0 in self.graph.tile(value).shape:  # nothing is read of it, and no index is in range
                return
            index = tuple(self.simplified(i) for i in index)
            key = self.key(value, index)
            if key in seen or key in self.cells:
                return
            seen.add(key)
            if value in self.rows and self.key(value, index[:-1]) == self.rows[value][0]:
                return
            node = self.graph.producer(value)
            if node.operator in (*REDUCTIONS, *SCANS):
                if self.key(node.name, index[:-1]) not in self.scanned:
                    found[key] = (node, index)
                return
            for operand, place in zip(node.inputs, self.places(node, index), strict=True):
                if place is not None:
                    visit(operand, place)

        visit(value, index)
        return list(found.values())

    def places(self, node: Node, index: Index) -> list[Index | None]:
        """Return where a node reads its operands; None where it does not read one."""
        if not node.inputs:
            return []
        if node.operator in _PLACES:
            return _PLACES[node.operator](self, node, index, node_attributes(node))
        return list(self.operands(node, index))

    def between(self, value: str, axis: int, position: Expr, begin: Expr, end: Expr) -> Expr:
        """Return the position of a read, brought to where begin <= position < end unless it is there."""
        if axis not in self.clamped[value]:
            return position
        if self.simplified(end - begin) == 1:  # as it is named outside the branches of a join
            return begin
        if self.is_below(position, end) is not True:
            position = tirx.min(position, end - 1)
        return position if self.is_below(position, begin) is False else tirx.max(position, begin)

    @contextmanager
    def only_loads(self) -> Iterator[None]:
        """Make values for what they load, and forget them."""
        before = self.memory, self.open, self.keep, self.looking
        self.memory, self.open, self.keep, self.looking = {}, [], None, True
        try:
            yield
        finally:
            self.memory, self.open, self.keep, self.looking = before

    @contextmanager
    def keeping(self, keep: Callable[[Expr], Expr]) -> Iterator[None]:
        """Let what several nodes read be computed once, where it is made."""
        before, self.keep = self.keep, keep
        try:
            yield
        finally:
            self.keep = before

    @contextmanager
    def assuming(self, comparison: tuple[Expr, Expr], holds: bool) -> Iterator[None]:
        """Take ``position < boundary`` as decided; what is computed in that branch ends with it."""
        before = self.cells, self.rows
        self.cells, self.rows = dict(self.cells), dict(self.rows)
        with self.decided(comparison, holds):
            self.forget()
            yield
        self.cells, self.rows = before
        self.forget()

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """Make what may be read whatever the conditions."""
        before, self.guards = self.guards, []
        try:
            yield
        finally:
            self.guards = before

    def under(self, conditions: Sequence[Expr], make: Callable[[], Expr]) -> Expr:
        """Return a value that is read only where conditions hold."""
        before, self.guards = self.guards, [*self.guards, *conditions]
        try:
            return make()
        finally:
            self.guards = before

    def note_break(self, position: Expr, boundary: Expr) -> None:
        """Remember where a loop is cut so that a join or border is decided on both sides."""
        for loop in self.loops:
            distance = self.simplified(position - loop)
            at = self.simplified(boundary - distance)
            if isinstance(at, int):
                self.breaks.setdefault(loop, set()).add(at)


def _convert(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> Expr:
    read, kind = (values.graph.tile(value).ttype.name for value in (node.inputs[0], node.name))
    rounded = values.rounded if attributes["exact"] else None
    found = _moved(values, node, index, attributes)
    if values.looking:
        return tirx.const(1, computed_type(kind))
    encode = partial(values.encoded, within=True) if is_within(values.graph, node) else values.encoded
    return converted(found, read, kind, values.named, rounded, encode, values.decoded)


def _encoded(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> Expr:
    """Round to the nearest whole number of 8 bits, ties to even; NaN becomes the least."""
    kind = node.tile.ttype.name
    if kind != "int8":
        raise DTypeError(f"chains of memory-bound operators do not round to {kind}")
    source = _moved(values, node, index, attributes)
    least, most = (tirx.const(bound, str(source.ty.dtype)) for bound in (-128.0, 127.0))
    return T.Cast("int32", values.lowering("round")(tirx.min(tirx.max(source, least), most)))


def _constant(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> Expr:
    dtype = computed_type(node.tile.ttype.name)
    number = attributes["value"]
    return opaque(tirx.const(number if dtype.startswith("float") else int(number), dtype))


def _size(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> Expr:
    size = values.extent(attributes["extent"])
    dtype = computed_type(node.tile.ttype.name)
    return tirx.const(size, dtype) if isinstance(size, int) else T.Cast(dtype, size)


def _iota(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> Expr:
    position = index[attributes["axis"]] * attributes["step"] + values.extent(attributes["begin"])
    dtype = computed_type(node.tile.ttype.name)
    if isinstance(position, int):
        return tirx.const(position, dtype)
    return T.Cast(dtype, opaque(position) if values.narrow and dtype == "int64" else position)


def _moved(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> Expr:
    place = _PLACES[node.operator](values, node, index, attributes)[0]
    assert place is not None
    return values.at(node.inputs[0], place)


def _reshaped(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> list[Index | None]:
    """Take runs of axes together and apart again; of an operand without elements nothing is read."""
    old = values.graph.tile(node.inputs[0]).shape
    place: list[Expr] = [0] * len(old)
    if 0 in old:
        return [tuple(place)]
    for left, right in reshape_groups(old, node.tile.shape):
        flat: Expr = 0
        for axis in right:
            flat = flat * values.extent(node.tile.shape[axis]) + index[axis]
        for axis in reversed(left):
            extent = values.extent(old[axis])
            place[axis] = values.simplified(tirx.floormod(flat, extent) if axis != left[0] else flat)
            flat = values.simplified(tirx.floordiv(flat, extent)) if axis != left[0] else 0
        for axis in left:
            if old[axis] == 1:
                place[axis] = 0
    return [tuple(place)]


def _transposed(
    values: Values, node: Node, index: Index, attributes: Mapping[str, Any]
) -> list[Index | None]:
    permutation = attributes["permutation"]
    return [tuple(index[permutation.index(axis)] for axis in range(len(index)))]


def _sliced(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> list[Index | None]:
    step = attributes["step"] or (1,) * len(index)
    begin = [values.extent(extent) for extent in attributes["begin"]]
    return [tuple(b + i * s for b, i, s in zip(begin, index, step, strict=True))]


def _repeated(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> list[Index | None]:
    axis = attributes["axis"] % len(index)
    place = list(index)
    place[axis] = tirx.floordiv(index[axis], attributes["times"])
    return [tuple(place)]


def _borders(values: Values, place: Sequence[Expr], shape: Sequence[Extent]) -> list[tuple[Expr, Expr, bool]]:
    """Return (position, boundary, whether it must be below), what holds anyway left out."""
    found = []
    for position, extent in zip(place, shape, strict=True):
        for boundary, below in ((0, False), (values.extent(extent), True)):
            if values.is_below(position, boundary) is not below:
                values.note_break(position, boundary)
                found.append((values.simplified(position), values.simplified(boundary), below))
    return found


def _guarded(values: Values, node: Node, place: Index, otherwise: float) -> Expr:
    """Return the operand's element where there is one, else a number."""
    shape = values.graph.tile(node.inputs[0]).shape
    borders = _borders(values, place, shape)
    dtype = computed_type(node.tile.ttype.name)
    border = tirx.const(otherwise if dtype.startswith("float") else int(otherwise), dtype)
    outside = (values.is_below(position, boundary) is (not below) for position, boundary, below in borders)
    if 0 in shape or any(outside):
        return border
    if not borders:
        return values.at(node.inputs[0], _brought_inside(values, node, place))
    values.open += [values.compared(position, boundary) for position, boundary, _ in borders]
    conditions = [p < e if below else p >= e for p, e, below in borders]
    make = partial(values.at, node.inputs[0], _brought_inside(values, node, place))
    if otherwise == 0 and values.keep is not None and node.inputs[0] in values.zeroed:
        return values.under(conditions, make)
    return T.if_then_else(b.every(*conditions), values.under(conditions, make), border)


def _brought_inside(values: Values, node: Node, place: Index) -> Index:
    """Return where an operand is read, also if it turns out not to be."""
    operand = node.inputs[0]
    places = zip(place, map(values.extent, values.graph.tile(operand).shape), strict=True)
    return tuple(values.between(operand, axis, at, 0, end) for axis, (at, end) in enumerate(places))


def _pad_place(values: Values, index: Index, attributes: Mapping[str, Any]) -> Index:
    low = [values.extent(extent) for extent in attributes["low"]]
    return tuple(at - before for at, before in zip(index, low, strict=True))


def _pad_places(
    values: Values, node: Node, index: Index, attributes: Mapping[str, Any]
) -> list[Index | None]:
    return [_brought_inside(values, node, _pad_place(values, index, attributes))]


def _padded(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> Expr:
    place = _pad_place(values, index, attributes)
    return _guarded(values, node, place, attributes["value"])


def _window_place(values: Values, index: Index, attributes: Mapping[str, Any]) -> Index:
    indexing = parse_indexing(attributes["spec"])
    by_name = dict(zip(indexing.result, index, strict=True))
    return tuple(values.simplified(_affine(axis, by_name)) for axis in indexing.operands[0])


def _window_places(
    values: Values, node: Node, index: Index, attributes: Mapping[str, Any]
) -> list[Index | None]:
    place = _window_place(values, index, attributes)
    return [_brought_inside(values, node, place) if attributes["pad"] else place]


def _affine(axis: Affine, by_name: Mapping[str, Expr]) -> Expr:
    total: Expr = axis.offset
    for name, factor in axis.terms:
        total = total + by_name[name] * factor
    return total


def _windowed(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> Expr:
    place = _window_place(values, index, attributes)
    return _guarded(values, node, place, 0.0) if attributes["pad"] else values.at(node.inputs[0], place)


def _stretched(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> list[Index | None]:
    return list(values.operands(node, index))


_PLACES: dict[str, Callable[[Values, Node, Index, Mapping[str, Any]], list[Index | None]]] = {
    "broadcast": _stretched,
    "convert": _stretched,
    "encode": _stretched,
    "reshape": _reshaped,
    "transpose": _transposed,
    "slice": _sliced,
    "repeat": _repeated,
    "concat": joins.places,
    "pad": _pad_places,
    "map": _window_places,
    "gather": lambda *given: [*gathers.places(*given)],
}
"""Operator -> where it reads its operands."""

_MAKERS: dict[str, Callable[[Values, Node, Index, Mapping[str, Any]], Expr]] = {
    "encode": _encoded,
    "constant": _constant,
    "size": _size,
    "iota": _iota,
    "convert": _convert,
    **dict.fromkeys(("broadcast", "reshape", "transpose", "slice", "repeat"), _moved),
    "concat": joins.element,
    "pad": _padded,
    "map": _windowed,
    "gather": gathers.element,
}
"""Operator that is not element-wise -> its element."""
