"""Base of the importers: a graph builder with types, numbers, axes and reductions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ladder.ir.build import GraphBuilder
from ladder.ir.constant import EXACT
from ladder.ir.extents import Shape, canonical, product
from ladder.ir.graph import Literal, Node
from ladder.partition.elements import FLOATS8
from tile_types.arrays import torch_dtype
from tile_types.library import get_type
from tile_types.tile import Extent, Tile


def wide_of(ttype: str) -> str:
    """Return the type in which real functions are computed whose result has a type."""
    return ttype if ttype == "float64" else "float32"


WIDE = ("float32", "float64", "int64", "int32")
"""Types that arithmetic keeps; narrower floats are computed in float32 and rounded where they are stored."""

HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
"""Types of 16 bits -> those of numpy."""

VIEWS = ("broadcast", "reshape", "transpose", "restride", "slice")
"""Operators whose results have elements of one operand as they are in memory."""

CHOICES = (
    *("convert", "neg", "abs", "relu", "maximum", "minimum", "select", "reduce_max"),
    *("concat", "pad", "map", "repeat", "put"),
)
"""Other operators that round nothing: elements of results are those of operands, or these negated."""


LARGEST = float(np.finfo(np.float32).max)

E4M3, MOST_E4M3 = "fp8_e4m3", 448.0
"""A float of 8 bits without infinities, and its largest number."""


@cache
def saturates() -> bool:
    """Tell whether numbers beyond the largest of `E4M3` become that in this release of torch, not NaN."""
    return bool(torch.tensor(2 * MOST_E4M3).to(torch.float8_e4m3fn).float().isfinite())


def rounded(value: float, ttype: str) -> float:
    """Return a number as float32 or a type of `HALVES` holds it; beyond its largest, infinity."""
    with np.errstate(over="ignore"):
        return float(HALVES.get(ttype, np.float32)(value))


def held(value: float, ttype: str) -> float:
    """Return a number as torch converts it to a type: integers wrap around, `bool` is false of 0 alone."""
    if ttype in HALVES:
        return rounded(value, ttype)
    if ttype in FLOATS8:
        return float(torch.tensor(value).to(torch_dtype(ttype)))
    if ttype == "bool":
        return bool(value)
    if ttype == "float32" and abs(value) > LARGEST:
        return rounded(value, ttype)
    if not ttype.startswith(("int", "uint")):
        return value
    bits = get_type(ttype).elem_bits
    lowest = -(1 << (bits - 1)) if ttype.startswith("int") else 0
    return (int(value) - lowest) % (1 << bits) + lowest


def attribute(value: float, ttype: str) -> float:
    """Return a number, as its type holds it, as an attribute: a float64 where that holds it."""
    value = held(value, ttype)
    return value if isinstance(value, int) and abs(value) > EXACT else float(value)


class Importer:
    """A `GraphBuilder` with the vocabulary of tensor libraries.

    Values are names in the graph; numbers become ``constant`` rows. Element types are explicit: operands are
    converted to the type in which a library computes, results to the type that it returns.
    """

    def __init__(self, name: str) -> None:
        self.g = GraphBuilder(name)
        self.used: frozenset[int] = frozenset({0})
        """Which results of the operator at hand the program uses."""
        self.stated: Shape = ()
        """The shape that the operator's first result is known to have, where the program states it."""
        self.narrowed: set[str] = set()
        """Values that the program itself casts to 16 bits."""
        self.precise = False
        """Whether results of 16-bit operators are rounded where they arise."""
        self.few_launches = False
        """Whether a launch costs more than what a kernel of its own would do better."""
        self.on_cpu = False
        """Whether the operator at hand runs on a CPU."""

    def is_value(self, value: Any) -> bool:
        """Tell a value of the graph from a number or an extent."""
        return isinstance(value, str) and self.g.has(value)

    def tile(self, value: str) -> Tile:
        return self.g.tile(value)

    def shape(self, value: str) -> Shape:
        return self.g.tile(value).shape

    def ttype(self, value: str) -> str:
        """Return the type's name of a value."""
        return self.g.tile(value).ttype.name

    def number(self, value: float, ttype: str) -> str:
        """Return a number as a value of rank 0, as its type holds it.

        Equal attributes are taken for one: zeros of two signs are not.
        """
        value = held(value, ttype)
        if value == 0 and math.copysign(1, value) < 0:
            return self.g.add("neg", self.number(0, ttype))
        return self.g.add("constant", value=attribute(value, ttype), type=ttype, name="number")

    def cast(self, value: str, ttype: str) -> str:
        """Return a value in another type."""
        if self.ttype(value) == ttype:
            return value
        if ttype.startswith(("bool", "int", "uint")) or {ttype, self.ttype(value)} == {*HALVES}:
            value = self.stepped(value)
        if self.ttype(value) in FLOATS8 and ttype != "float32":
            value = self.cast(value, "float32")
        if ttype == E4M3 and saturates():
            value = self.cast(value, "float32")
            least, most = (self.number(bound, "float32") for bound in (-MOST_E4M3, MOST_E4M3))
            value = self.g.add("minimum", self.g.add("maximum", value, least), most)
        if ttype == "bool":
            zero = self.number(0, self.ttype(value))
            return self.g.add("negation", self.g.add("equal", value, zero))
        return self.g.add("convert", value, type=ttype, exact=self.precise and ttype in HALVES)

    def converted(self, value: str, ttype: str) -> str:
        """Return a value in another type as the program asks: to 16 bits and straight back it is rounded.

        A number is one: torch's tracer has numbers where ``torch.vmap`` converts a number's tensor.
        """
        if not self.is_value(value):
            return self.operand(value, ttype)
        made = self.cast(self.seen(value, ttype), ttype)
        if ttype in HALVES and self.ttype(value) != ttype:
            self.narrowed.add(made)
        return made

    def seen(self, value: Any, ttype: str) -> Any:
        """Return an argument as an operator that gives a type is to see it.

        Of results of 16 bits, steps see what their type holds; what gives wider floats sees it of those that
        the program itself casts.
        """
        if isinstance(value, list | tuple):
            return type(value)(self.seen(each, ttype) for each in value)
        if not self.is_value(value) or ttype in HALVES or self.ttype(value) not in HALVES:
            return value
        return self.stepped(value) if not ttype.startswith("float") or self._is_cast(value) else value

    def stepped(self, value: str) -> str:
        """Return a value for what makes a step of its last bit: as its type holds it, if that has 16 bits."""
        node, ttype = self.g.node(value), self.ttype(value)
        if ttype not in HALVES or self.precise:
            return value
        while node.operator in VIEWS:
            node = self.g.node(node.inputs[0])
        if node.operator in ("input", "constant", "call"):  # as it lies in memory
            return value
        return self.g.add("convert", self.cast(value, "float32"), type=ttype, exact=True)

    def _is_cast(self, value: str) -> bool:
        """Tell whether elements of a value are what the program casts to 16 bits, however moved."""
        left, known = [value], {value}
        while left:
            if (found := left.pop()) in self.narrowed:
                return True
            node = self.g.node(found)
            if node.operator in (*VIEWS, *CHOICES):
                left.extend(other for other in node.inputs if other not in known)
                known.update(node.inputs)
        return False

    def operand(self, value: Any, ttype: str) -> str:
        """Return a value or a Python number as a value of a type; numbers keep their own meaning."""
        if self.is_value(value):
            return self.cast(value, ttype)
        if isinstance(value, str):
            return self.g.add("size", extent=canonical(value), type=ttype)
        return self.number(value, ttype)

    def apply(self, operator: str, operands: Sequence[Any], ttype: str) -> str:
        """Apply an element-wise row to operands of one type."""
        return self.g.add(operator, *(self.operand(value, ttype) for value in operands))

    def floats(self, operator: str, operands: Sequence[Any], result: str) -> str:
        """Apply a row of real functions: in float32 unless the result is wider, then rounded."""
        taken = [self._taken(value, result) for value in operands]
        return self.cast(self.apply(operator, taken, wide_of(result)), result)

    def arithmetic(self, operator: str, operands: Sequence[Any], result: str) -> str:
        """Apply a row of arithmetic in the type that holds the result."""
        wide = result if result in WIDE else "int32" if get_type(result).is_integer else "float32"
        taken = [self._taken(value, result) for value in operands]
        return self.cast(self.apply(operator, taken, wide), result)

    def _taken(self, value: Any, result: str) -> Any:
        """Return an operand as torch takes it: beside 16 bits, integers are rounded to them first."""
        if not self.is_value(value) or result not in HALVES or not self.shape(value):
            return value
        rounded = self.ttype(value) in ("int16", "int32", "int64")
        return self.g.add("convert", value, type=result, exact=True) if rounded else value

    def reshape(self, value: str, shape: Sequence[Extent]) -> str:
        """Return the elements in another shape."""
        target = tuple(canonical(extent) for extent in shape)
        return value if self.shape(value) == target else self.g.add("reshape", value, shape=target)

    def permute(self, value: str, order: Sequence[int]) -> str:
        rank = len(self.shape(value))
        permutation = tuple(axis % rank for axis in order)
        if permutation == tuple(range(rank)):
            return value
        return self.g.add("transpose", value, permutation=permutation)

    def expand(self, value: str, shape: Sequence[Extent]) -> str:
        target = tuple(canonical(extent) for extent in shape)
        return value if self.shape(value) == target else self.g.add("broadcast", value, shape=target)

    def repeat_elements(self, value: str, factors: Sequence[Extent]) -> str:
        """Return every element as often along each axis as factors say."""
        pairs = [*zip(self.shape(value), factors, strict=True)]
        apart = self.reshape(value, [extent for size, _ in pairs for extent in (size, 1)])
        wide = self.expand(apart, [extent for pair in pairs for extent in pair])
        return self.reshape(wide, [product(pair) for pair in pairs])

    def box(self, value: str, begin: Sequence[Extent], shape: Sequence[Extent], step: Sequence[int]) -> str:
        """Return ``shape`` elements from ``begin`` on, every ``step``-th."""
        target = tuple(canonical(extent) for extent in shape)
        if target == self.shape(value):
            return value
        steps = tuple(step) if any(stride != 1 for stride in step) else ()
        return self.g.add("slice", value, begin=tuple(map(canonical, begin)), shape=target, step=steps)

    def take_axis(self, value: str, axis: int, begin: Extent, count: Extent, step: int = 1) -> str:
        """Return a box that is whole but for one axis."""
        shape = self.shape(value)
        axis %= len(shape)
        begins = [begin if at == axis else 0 for at in range(len(shape))]
        extents = [count if at == axis else extent for at, extent in enumerate(shape)]
        return self.box(value, begins, extents, [step if at == axis else 1 for at in range(len(shape))])

    def reduce(self, operator: str, value: str, axes: Sequence[int], keep: bool) -> str:
        """Reduce axes, the last first; a number that has none is added to 0, as torch sums: -0 becomes 0."""
        rank = len(self.shape(value))
        if not rank and operator == "reduce_sum" and "float" in self.ttype(value):
            return self.g.add("add", value, self.number(0.0, self.ttype(value)))
        chosen = {axis % rank for axis in axes} if rank else set()
        longer = {axis for axis in chosen if self.shape(value)[axis] != 1}
        if longer and keep:  # what has one element is its own sum
            chosen = longer
        for axis in sorted(chosen, reverse=True):
            value = self.g.add(operator, value, axis=axis, keep=keep)
        return value

    def count(self, value: str, axes: Sequence[int]) -> str:
        """Return the number of elements along axes, in the type of a value."""
        shape = self.shape(value)
        extent = product(shape[axis] for axis in axes)
        if isinstance(extent, int):
            return self.number(extent, self.ttype(value))
        return self.g.add("size", extent=extent, type=self.ttype(value))

    def mean(self, value: str, axes: Sequence[int], keep: bool = True) -> str:
        """Return the mean over axes of a value of reals."""
        total = self.reduce("reduce_sum", value, axes, keep)
        return self.g.add("div", total, self.count(value, axes))

    def variance(self, value: str, mean: str, axes: Sequence[int]) -> str:
        """Return the mean square of what differs from the mean, axes kept."""
        return self.mean(self.g.add("square", self.g.add("sub", value, mean)), axes)

    def normalised(self, value: str, axes: Sequence[int], epsilon: float) -> str:
        """Return a value of reals with mean 0 and variance 1 over axes."""
        mean = self.mean(value, axes)
        spread = self.g.add("add", self.variance(value, mean, axes), self.number(epsilon, self.ttype(value)))
        return self.g.add("mul", self.g.add("sub", value, mean), self.g.add("rsqrt", spread))

    def along(self, vector: str, axis: int, rank: int) -> str:
        """Return a vector shaped to broadcast along one axis of ``rank``."""
        shape = [self.shape(vector)[0] if at == axis else 1 for at in range(rank)]
        return self.reshape(vector, shape)

    def call(
        self,
        target: str,
        arguments: Any,
        keywords: Any,
        inputs: Sequence[str],
        tiles: Any,
        draws: bool = False,
    ) -> Node:
        """Add a call of a library, whose results' tiles are stated; `draws`: random numbers."""
        stored: dict[str, Literal] = {"arguments": arguments, "keywords": keywords, "target": target}
        if draws:
            stored["draws"] = True
        attributes = tuple((name, stored[name]) for name in sorted(stored) if stored[name] != ())
        node = Node(self.g.fresh(target.split(".")[1]), "call", tuple(inputs), attributes, tuple(tiles))
        self.g.insert(node)
        return node


def identifier(name: str) -> str:
    """Return a name that tile graphs can print, for any name."""
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return f"v{plain}" if plain[:1].isdigit() or not plain else plain


Row = Callable[..., Any]
"""``(importer, result type, *arguments, **keywords)`` -> a value, or a tuple of values."""
