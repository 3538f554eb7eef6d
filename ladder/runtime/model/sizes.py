"""Symbolic sizes at run time: read off a call's arguments, and shapes that follow from them.

Extents are compiled to Python once; a call then costs a fraction of a microsecond per shape.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ladder.ir.extents import FUNCTIONS, show_shape
from tile_types.errors import ShapeError
from tile_types.tile import Extent

Sizes = tuple[int, ...]
Numbers = Callable[[], tuple[int, ...]]
"""Gives extents of the call at hand."""

NUMBER = -1
"""In place of an axis: the size is the argument itself."""
ELEMENT = -2
"""In place of an axis: the size is the one element of the argument, a tensor."""
_READ = {NUMBER: "v[{}]", ELEMENT: "v[{}].item()"}


class CallSizes:
    """The symbolic sizes of the call at hand, and all extents that steps ask for.

    names: Of the sizes, in the order in which `evaluated` takes them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.asked: dict[tuple[Extent, ...], int] = {}
        self.known: list[tuple[int, ...]] = []
        """Of the call at hand, in the order in which they were asked for."""
        self._all: Callable[[Sizes], list[tuple[int, ...]]] | None = None

    def evaluated(self, sizes: Sizes) -> list[tuple[int, ...]]:
        if self._all is None:
            self._all = together([*self.asked], self.names)
        return self._all(sizes)

    def numbers(self, extents: Sequence[Extent]) -> Numbers:
        """Return what gives extents as numbers.

        Raises ShapeError if one depends on a size that no argument shows.
        """
        if is_fixed(extents):
            fixed = tuple(int(extent) for extent in extents)
            return lambda: fixed
        _row(tuple(extents), self.names)  # raises where a size is not shown
        at, self._all = self.asked.setdefault(tuple(extents), len(self.asked)), None
        return lambda: self.known[at]

    def settled(self, sizes: Sizes) -> CallSizes:
        """Return what gives extents for these sizes alone."""
        return Settled(self.names, sizes)


class Settled(CallSizes):
    """The sizes of a workspace that serves no others."""

    def __init__(self, names: Sequence[str], sizes: Sizes) -> None:
        super().__init__(names)
        self.sizes = sizes

    def numbers(self, extents: Sequence[Extent]) -> Numbers:
        found = evaluator(tuple(extents), self.names)(self.sizes)
        return lambda: found


def is_fixed(extents: Sequence[Extent]) -> bool:
    """Tell whether extents are numbers."""
    return not any(isinstance(extent, str) for extent in extents)


@lru_cache(maxsize=4096)
def evaluator(extents: tuple[Extent, ...], names: tuple[str, ...]) -> Callable[[Sizes], tuple[int, ...]]:
    """Return the function from sizes to extents.

    Raises ShapeError if an extent has other names.
    """
    found: Callable[[Sizes], tuple[int, ...]] = eval(f"lambda s: {_row(extents, names)}", {**FUNCTIONS})
    return found


def together(
    shapes: Sequence[tuple[Extent, ...]], names: tuple[str, ...]
) -> Callable[[Sizes], list[tuple[int, ...]]]:
    """Return the function from sizes to the extents of all shapes; raises as `evaluator` does."""
    rows = ", ".join(_row(extents, names) for extents in shapes)
    found: Callable[[Sizes], list[tuple[int, ...]]] = eval(f"lambda s: [{rows}]", {**FUNCTIONS})
    return found


def _row(extents: tuple[Extent, ...], names: tuple[str, ...]) -> str:
    """Return the tuple of extents as Python text."""
    try:
        return f"({''.join(f'{_placed(extent, names)}, ' for extent in extents)})"
    except KeyError as error:
        raise ShapeError(f"{show_shape(extents)}: no argument shows the size {error.args[0]}") from None


@lru_cache(maxsize=4096)
def _placed(extent: Extent, names: tuple[str, ...]) -> str:
    """Return the text of an extent with places in ``s`` for names of sizes; raises KeyError for others."""
    places = {name: f"s[{at}]" for at, name in enumerate(names)}
    text = str(extent)
    if text in places:
        return places[text]
    return ast.unparse(_Places(places).visit(ast.parse(text, mode="eval")))


class _Places(ast.NodeTransformer):
    """Puts places in ``s`` for names of sizes."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = places

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in FUNCTIONS:
            return node
        return ast.parse(self.places[node.id], mode="eval").body


def reader(places: Sequence[tuple[int, int]]) -> Callable[[Sequence[Any]], Sizes]:
    """Return the function from arguments to sizes: (argument, axis) of each, or `NUMBER`, `ELEMENT`."""
    parts = [_READ.get(axis, f"v[{{}}].shape[{axis}]").format(at) for at, axis in places]
    found: Callable[[Sequence[Any]], Sizes] = eval(f"lambda v: ({''.join(f'{p}, ' for p in parts)})", {})
    return found


@lru_cache(maxsize=64)
def facts_of(count: int) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return the function from arguments to what `check` looks at, of the first so many."""
    facts = "v[{0}].__class__, v[{0}].shape, v[{0}].dtype, v[{0}].layout, v[{0}].is_neg(), "
    parts = (facts.format(at) for at in range(count))
    found: Callable[[Sequence[Any]], tuple[Any, ...]] = eval(f"lambda v: ({''.join(parts)})", {})
    return found
