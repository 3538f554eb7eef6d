"""Semantics beyond the operator table: rounding conversions, integers, uninterpreted functions.

A conversion keeps the value where it can be shown to: the target holds all values of the source, or all
integers that the value can be. One between floating-point types keeps it, too, if the target is at least as
fine as the types of the program's operands and results: that is the precision in which the program computes,
which `stability` judges. Every other conversion is an unknown function of its operand. Integers are taken as
elements of Z: programs that are equal there are equal modulo 2**n. So sums and products of integers are
computed, and all else of integers is refused or unknown; a value that may have wrapped around is converted
by an unknown function. Roundings, comparisons, maxima and other functions without a row are unknown
functions, equal for equal operands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.interpret import Domain, finite_domain
from ladder.ir.operator import Operator
from ladder.ir.ops import get_operator
from ladder.superopt.verifier.coverage import signature
from tile_types.errors import VerificationError
from tile_types.library import FLOAT_FORMATS, get_type
from tile_types.ttype import TType

Range = tuple[int, int] | None
"""Least and greatest integer that elements can be; None if they need be none, or may have wrapped around."""

ENUMERABLE_BITS = 8
"""Element types of so many bits are compared value by value."""

MOST_EXACT_BITS = 64
"""Integers beyond are not followed."""


# ---- element types ---------------------------------------------------------------------------------------
def integers_of(name: str) -> Range:
    """Return the range of an integer type, or None."""
    if name == "bool":
        return 0, 1
    match = re.fullmatch(r"(u?)int(\d+)", name)
    if match is None:
        return None
    bits = int(match[2])
    return (0, (1 << bits) - 1) if match[1] else (-(1 << bits - 1), (1 << bits - 1) - 1)


def _significand(name: str) -> tuple[int, int, int] | None:
    """Return bits of the significand, and exponents of the largest and the smallest value."""
    if name == "float64":
        return 53, 1023, -1074
    form = FLOAT_FORMATS.get(name)
    if form is None:
        return None
    largest = math.frexp(float(get_type(name).maximum))[1] - 1
    return form.mantissa_bits + 1, largest, 1 - form.bias - form.mantissa_bits


@lru_cache(maxsize=256)
def holds(target: str, source: str) -> bool:
    """Whether a type has every finite value of another."""
    if target == source:
        return True
    known = integers_of(source)
    if known is not None:
        return holds_integers(target, known)
    wide, narrow = _significand(target), _significand(source)
    if wide is not None and narrow is not None:
        return wide[0] >= narrow[0] and wide[1] >= narrow[1] and wide[2] <= narrow[2]
    ttype = get_type(source)
    return not ttype.is_block and ttype.elem_bits <= ENUMERABLE_BITS and _keeps_all(get_type(target), ttype)


def _keeps_all(target: TType, source: TType) -> bool:
    values = source.values()
    values = values[np.isfinite(values)]
    return target.holds(values)


def holds_integers(target: str, values: tuple[int, int]) -> bool:
    """Whether a type has all integers of a range."""
    own, form = integers_of(target), _significand(target)
    if own is not None:
        return own[0] <= values[0] and values[1] <= own[1]
    most = max(-values[0], values[1])
    return form is not None and most.bit_length() <= form[0] and most.bit_length() <= form[1]


# ---- ranges ----------------------------------------------------------------------------------------------
def _sum(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def _negated(a: tuple[int, int]) -> tuple[int, int]:
    return -a[1], -a[0]


def _product(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    products = [x * y for x in a for y in b]
    return min(products), max(products)


def _magnitude(a: tuple[int, int]) -> tuple[int, int]:
    return 0 if a[0] <= 0 <= a[1] else min(map(abs, a)), max(map(abs, a))


RANGES: Mapping[str, Callable[..., tuple[int, int]]] = {
    "add": _sum, "sub": lambda a, b: _sum(a, _negated(b)), "mul": _product, "neg": _negated,
    "square": lambda a: _product(_magnitude(a), _magnitude(a)), "abs": _magnitude,
    "relu": lambda a: (max(a[0], 0), max(a[1], 0)),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
}  # fmt: skip
"""Element-wise operators of integers -> range of the result."""

TRUTHS = frozenset({"less", "less_equal", "equal", "both", "either", "negation"})

KEPT = frozenset(
    {"broadcast", "reshape", "transpose", "concat", "repeat", "slice", "map", "load", "store", "pad"}
)
"""Operators whose results' elements are elements of their operands, or 0, or what they fill with."""

OF_INTEGERS = frozenset(
    {*KEPT, "input", "constant", "convert", "encode", "add", "sub", "mul", "neg", "square", "matmul",
     "contract", "reduce_sum", "accumulate", "elements", "metadata"}
)  # fmt: skip
"""Operators that may give integers by their rows; others that do are unknown functions, or refused."""


def _union(ranges: Sequence[Range]) -> Range:
    known = [each for each in ranges if each is not None]
    if not known or len(known) < len(ranges):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


@dataclass
class Conversions:
    """Finds the nodes of a program that are unknown functions, by what their operands can be.

    precision: Floating-point types of operands and results of the program.
    unknown: Identity of a node -> name of the function of its operands that it is.
    rounded: Identity of a node -> name of the function that its exact result passes.
    """

    precision: tuple[str, ...]
    unknown: dict[int, str] = field(default_factory=dict)
    rounded: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph) -> Conversions:
        """Examine a program; raises VerificationError if it computes with integers what is not followed."""
        tiles = [tile for side in signature(graph) for tile in side]
        names = dict.fromkeys(tile.ttype.name for tile in tiles if _significand(tile.ttype.name))
        found = Conversions(tuple(names))
        found.walk(graph, [_given(node) for node in graph.inputs])
        return found

    def is_real(self, name: str) -> bool:
        """Whether a type is as fine as those of operands and results: it then stands for real numbers."""
        return bool(_significand(name)) and all(holds(name, own) for own in self.precision)

    def walk(self, graph: Graph, operands: Sequence[Range]) -> list[Range]:
        """Examine a graph; returns the ranges of its outputs."""
        values: dict[str, Range] = dict(zip((node.name for node in graph.inputs), operands, strict=True))
        for node in graph.nodes:
            arguments = [values[value] for value in node.inputs]
            if node.body is not None:
                values.update(zip(node.values, self.walk(node.body, arguments), strict=True))
            elif node.operator != "input":
                values.update(dict.fromkeys(node.values, self._result(graph, node, arguments)))
        return [values[output] for output in graph.outputs]

    def _result(self, graph: Graph, node: Node, arguments: Sequence[Range]) -> Range:
        if node.operator == "convert":
            return self._converted(graph, node, arguments[0])
        name = node.tile.ttype.name
        types = [graph.tile(value).ttype.name for value in node.inputs]
        if self._is_unknown(node, types, arguments):
            self.unknown[id(node)] = f"{node.operator} {' '.join(types)} to {name}"
        elif node.operator not in KEPT:
            _require_followed(node, types, arguments)
        found = self._computed(node, arguments)
        if found is not None and holds_integers(name, found):
            return found
        coarse = _significand(name) and not self.is_real(name)
        if coarse and node.operator not in (*KEPT, "constant", "elements", "metadata"):
            self.rounded[id(node)] = f"round to {name}"
        return None

    def _is_unknown(self, node: Node, types: Sequence[str], arguments: Sequence[Range]) -> bool:
        """Whether an operator on integers is not the operator on real numbers, and is taken as unknown."""
        if node.operator == "encode":
            return True
        row = get_operator(node.operator)
        whole = [integers_of(name) is not None for name in types]
        wrapped = any(each and known is None for each, known in zip(whole, arguments, strict=True))
        return row.finite is None and row.elementwise and wrapped

    def _computed(self, node: Node, arguments: Sequence[Range]) -> Range:
        attributes = node_attributes(node)
        if node.operator == "constant":
            value = float(attributes["value"])
            return (int(value), int(value)) if value.is_integer() else None
        if node.operator == "elements":
            return integers_of(node.tile.ttype.name)
        if node.operator in TRUTHS:
            return 0, 1
        if node.operator in KEPT:
            fills = [(0, 0)] if node.operator == "load" else []
            if node.operator == "pad":
                fills = [(int(attributes["value"]),) * 2] if float(attributes["value"]).is_integer() else []
            return _union([*arguments, *fills])
        rule = RANGES.get(node.operator)
        if rule is None or any(each is None for each in arguments):
            return None
        found = rule(*arguments)
        return found if max(map(abs, found)).bit_length() <= MOST_EXACT_BITS else None

    def _converted(self, graph: Graph, node: Node, given: Range) -> Range:
        source, target = graph.tile(node.inputs[0]).ttype, node.tile.ttype
        if source.is_block:
            return None
        if given is not None and holds_integers(target.name, given):
            return given
        if self._keeps(source.name, target.name):
            return None
        self.unknown[id(node)] = f"convert {source.name} to {target.name}"
        return integers_of(target.name)

    def _keeps(self, source: str, target: str) -> bool:
        """Whether every value of one type is unchanged in another."""
        if source == target:
            return True
        if integers_of(source) is not None:
            return False  # it may have wrapped around
        fine = bool(self.precision) and _significand(target) and _significand(source)
        return holds(target, source) or bool(fine and all(holds(target, name) for name in self.precision))


def _given(node: Node) -> Range:
    return None if node.tile.ttype.is_block else integers_of(node.tile.ttype.name)


def _require_followed(node: Node, types: Sequence[str], arguments: Sequence[Range]) -> None:
    """Refuse what is not computed in Z: other operators of integers, operands of other types."""
    own = node.tile.ttype.name
    if node.operator in ("bits", "of_bits"):
        raise VerificationError(
            f"{node.operator}, of how a type holds numbers, has no finite-field semantics"
        )
    if integers_of(own) is not None:
        row = get_operator(node.operator)
        if node.operator == "constant" and not float(node_attributes(node)["value"]).is_integer():
            raise VerificationError(f"the constant %{node.name} of type {own} is no integer")
        if node.operator not in OF_INTEGERS and not (row.finite is None and row.elementwise):
            raise VerificationError(f"{node.operator} of integers has no finite-field semantics")
    for name, known in zip(types, arguments, strict=True):
        kept = name == own or (known is not None and holds_integers(own, known))
        if integers_of(name) is not None and own != "bool" and not kept:
            raise VerificationError(f"{node.operator} of {name} gives {own}: convert the operand first")


# ---- functions -------------------------------------------------------------------------------------------
Functions = Callable[[Any, Sequence[Any]], Any]


def _relu(field: Any, values: Sequence[Any]) -> Any:
    return field.multiply(values[0], field.function("step", [values[0]]))


def _maximum(field: Any, values: Sequence[Any]) -> Any:
    return field.add(values[1], _relu(field, [field.subtract(*values)]))


def _minimum(field: Any, values: Sequence[Any]) -> Any:
    return field.subtract(values[0], _relu(field, [field.subtract(*values)]))


def _magnitude_of(field: Any, values: Sequence[Any]) -> Any:
    positive = _relu(field, values)
    return field.subtract(field.add(positive, positive), values[0])


def _gelu(field: Any, values: Sequence[Any]) -> Any:
    scaled = field.multiply(values[0], field.number(1 / math.sqrt(2)))
    half = field.multiply(values[0], field.number(0.5))
    return field.add(half, field.multiply(half, field.function("erf", [scaled])))


def _gelu_tanh(field: Any, values: Sequence[Any]) -> Any:
    x = values[0]
    cube = field.multiply(field.multiply(x, x), x)
    inner = field.add(x, field.multiply(field.number(0.044715), cube))
    twice = field.multiply(field.number(2 * math.sqrt(2 / math.pi)), inner)
    return field.multiply(x, field.function("sigmoid", [twice]))


COMPOSED: Mapping[str, Functions] = {
    "relu": _relu, "maximum": _maximum, "minimum": _minimum, "abs": _magnitude_of, "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}  # fmt: skip
"""Rows without finite-field semantics that are polynomials in their operands and an unknown function."""


def _unknown(operator: Operator, field: Any, values: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    given = ", ".join(f"{name}={value}" for name, value in sorted(attributes.items()))
    return field.function(f"{operator.name} {given}".strip(), values)


def domain_of(found: Conversions, field: Any) -> Domain:
    """Return the domain that evaluates a program with `Field` or other `Arithmetic`."""
    plain = finite_domain(field)

    def apply(operator: Operator, values: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        if operator.name in COMPOSED:
            return COMPOSED[operator.name](field, values)
        if operator.finite is None and operator.elementwise:
            return _unknown(operator, field, values, attributes)
        return plain.apply(operator, values, attributes)

    replaced = {number: partial(field.function, name) for number, name in found.unknown.items()}

    def keep(node: Node, value: Any) -> Any:
        name = found.rounded.get(id(node))
        return value if name is None else field.function(name, [value])

    return replace(plain, apply=apply, keep=keep, replaced=replaced)
