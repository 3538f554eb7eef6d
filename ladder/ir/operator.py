"""The row type of the operator table. Everything the compiler knows of an operator is here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ladder.ir.extents import Shape, product
from ladder.ir.graph import LEVELS, Literal
from tile_types.errors import DTypeError, LadderError, ShapeError, unknown_name
from tile_types.library import get_type
from tile_types.tile import Extent, Tile
from tile_types.ttype import TType

Attributes = Mapping[str, Any]
Tiles = Sequence[Tile]
AbstractExpression = str | tuple[Any, ...]
"""A variable's name, or ``(function, argument, ...)`` as in Mirage §4."""

LAX_CLASSES = ("multilinear", "division", "exp", "root", "maximum", "other")
"""Mirage's LAX classes; ``root`` is decided by residues, ``maximum`` (as softmax subtracts it) by taking it
as unknown, as those of ``exp`` without finite-field semantics (gelu); ``other`` is outside LAX."""

ROLES = ("value", "input", "call", "load", "accumulate", "store", "graph")
"""Kinds of nodes for walkers: all but ``value`` are given context, see `CONTEXT`."""

ENGINES = ("chain", "view", "leaf", "product", "library")
"""``chain``: loops over memory, fused; ``view``: an address, no work of its own; ``leaf``: a number;
``product``: a matrix product; ``library``: a call of torch."""

REQUIRED: Any = object()

CONTEXT = {
    "begin": "load, store: offsets of the tile at this grid and loop index",
    "extent": "accumulate: number of loop iterations",
}
"""Attributes that are not written in the graph: walks of the graph add them."""


@dataclass(frozen=True)
class Attribute:
    """One attribute of an operator.

    kind: A row of `ATTRIBUTE_KINDS`.
    default: Value when left out; `REQUIRED` if it must be given.
    choices: Allowed values, if they are few.
    """

    kind: str
    default: Any = REQUIRED
    choices: tuple[Any, ...] = ()


def _is_extent(value: object) -> bool:
    return isinstance(value, str) or _is_int(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_pair_of_name_and_extent(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and _is_extent(value[1])


def _each(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(map(check, value))


ATTRIBUTE_KINDS: Mapping[str, Callable[[object], bool]] = {
    "int": _is_int,
    "number": lambda value: isinstance(value, float) or _is_int(value),
    "flag": lambda value: isinstance(value, bool),
    "name": lambda value: isinstance(value, str),
    "type": lambda value: isinstance(value, str),
    "extent": _is_extent,
    "extents": _each(_is_extent),
    "ints": _each(_is_int),
    "sizes": _each(_is_pair_of_name_and_extent),
    "literal": lambda value: True,
}
"""Kind -> whether a literal is of it. Extents may be symbolic and are rewritten by `bind`."""


def arithmetic_type(tiles: Tiles, attributes: Attributes) -> TType:
    """Take as result type the attribute ``type``, else the type that all operands share."""
    require_elements(tiles)
    if attributes.get("type"):
        return get_type(attributes["type"])
    names = dict.fromkeys(tile.ttype.name for tile in tiles)
    if len(names) > 1:
        raise DTypeError(f"operands have types {' and '.join(names)}; convert one or give type=")
    return tiles[0].ttype


def require_elements(tiles: Tiles) -> None:
    """Raise DTypeError if an operand is of a block type (codes with metadata)."""
    for position, tile in enumerate(tiles):
        if tile.ttype.is_block:
            raise DTypeError(
                f"operand {position} is quantized ({tile.ttype.name}); decode it with convert(type=...) first"
            )


def no_flops(tiles: Tiles, result: Tile, attributes: Attributes) -> Extent:
    """No arithmetic."""
    return 0


def flops_per_element(count: int) -> Callable[[Tiles, Tile, Attributes], Extent]:
    """Return ``count`` operations per element of the result."""
    return lambda tiles, result, attributes: product([count, *result.shape])


@dataclass(frozen=True)
class Operator:
    """One row of the operator table.

    name: How graphs spell it.
    arity: Fewest and most operands; None is unbounded.
    shape: ``(tiles, attributes) -> shape``; raises ShapeError.
    reference: ``(values, attributes) -> value`` in float64 numpy; real-number semantics.
    finite: ``(field, values, attributes) -> residues`` over Z_p x Z_q, or None (outside LAX).
    abstract: ``(expressions, tiles, attributes) -> AbstractExpression``.
    lax: One of `LAX_CLASSES`, or a function of the attributes that returns one.
    flops: ``(tiles, result, attributes) -> count``.
    lower: Element-wise operators: TIR scalars -> TIR scalar; None for the others.
    attributes: Its attributes by name.
    result_type: ``(tiles, attributes) -> TType``.
    role: One of `ROLES`.
    levels: Graph levels it may appear at.
    engine: What executes it in a model, one of `ENGINES`.
    doc: One line for tables.
    """

    name: str
    arity: tuple[int, int | None]
    shape: Callable[[Tiles, Attributes], Shape]
    reference: Callable[[Sequence[Any], Attributes], Any]
    finite: Callable[[Any, Sequence[Any], Attributes], Any] | None
    abstract: Callable[[Sequence[AbstractExpression], Tiles, Attributes], AbstractExpression]
    lax: str | Callable[[Attributes], str] = "multilinear"
    flops: Callable[[Tiles, Tile, Attributes], Extent] = no_flops
    lower: Callable[..., Any] | None = None
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    result_type: Callable[[Tiles, Attributes], TType] = arithmetic_type
    role: str = "value"
    levels: tuple[str, ...] = LEVELS
    engine: str = "chain"
    doc: str = ""

    @property
    def elementwise(self) -> bool:
        """Whether it acts on elements independently (and lowers to a scalar expression)."""
        return self.lower is not None

    @property
    def unary(self) -> bool:
        """Whether it is an element-wise function of one number, fit for an epilogue."""
        return self.elementwise and self.arity == (1, 1) and self.result_type is arithmetic_type

    def lax_class(self, attributes: Attributes) -> str:
        """Return the LAX class under these attributes."""
        return self.lax if isinstance(self.lax, str) else self.lax(attributes)

    def complete(self, given: Mapping[str, Literal]) -> dict[str, Any]:
        """Check attributes and fill in defaults.

        Raises UnknownNameError if there is no such attribute.
        Raises LadderError if one is missing, of the wrong kind or not among its choices.
        """
        for name in given:
            if name not in self.attributes:
                raise unknown_name(f"attribute of {self.name}", name, self.attributes or ["(none)"])
        return {name: self._attribute(name, given) for name in self.attributes}

    def _attribute(self, name: str, given: Mapping[str, Literal]) -> Any:
        attribute = self.attributes[name]
        value = given.get(name, attribute.default)
        if value is REQUIRED:
            raise LadderError(f"{self.name} needs the attribute {name}=<{attribute.kind}>")
        optional = attribute.default is None and value is None
        if not optional and not ATTRIBUTE_KINDS[attribute.kind](value):
            raise LadderError(f"attribute {name} of {self.name} must be {attribute.kind}, got {value!r}")
        if attribute.choices and value not in attribute.choices:
            raise unknown_name(f"{name} of {self.name}", str(value), map(str, attribute.choices))
        return value

    def stored(self, given: Mapping[str, Literal]) -> tuple[tuple[str, Literal], ...]:
        """Return the attributes as a node keeps them: sorted, without those at their default.

        Every NaN becomes one object, so that equal nodes compare equal.
        """
        complete = self.complete(given)
        return tuple(
            (name, math.nan if value != value else value)
            for name, value in sorted(complete.items())
            if value != self.attributes[name].default
        )

    def check_arity(self, count: int) -> None:
        """Raise ShapeError if the operator does not take ``count`` operands."""
        low, high = self.arity
        if count < low or (high is not None and count > high):
            wanted = str(low) if low == high else f"at least {low}" if high is None else f"{low} to {high}"
            raise ShapeError(f"{self.name} takes {wanted} operands, got {count}")

    def infer(self, tiles: Tiles, attributes: Attributes, level: str) -> Tile:
        """Return the result's tile for operands ``tiles``; raises ShapeError or DTypeError."""
        self.check_arity(len(tiles))
        return Tile(self.result_type(tiles, attributes), self.shape(tiles, attributes), level)
