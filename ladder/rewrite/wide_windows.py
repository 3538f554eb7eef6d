"""Reductions over wide windows that overlap, in steps: windows of sums, then sums of some of those.

A window of 301 elements is 15 neighbouring ones of 20, and one element; one of 31 by 31 is 31 rows of 31.
What each step gives is stored: neighbours share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from ladder.ir.build import GraphBuilder, node_attributes
from ladder.ir.indexing import Affine, Indexing, parse_indexing
from ladder.rewrite.rules import Match, Rule, Rules, pattern
from ladder.rewrite.short_reductions import COMBINING

WIDE = 64
"""Elements of a window up to which one step is taken: kernels have code for each."""

LEAST_SAVED = 1 << 23
"""Reads, fewer by as many, that are worth a kernel and what it stores."""


@dataclass(frozen=True)
class Windows:
    """What a reduction is over: places of an image, of which one index is reduced.

    places: Of each axis of the image, by the names of indices.
    names: Indices of the windows, in order.
    extents: Index -> extent.
    pad: Whether places beyond a border are zeros.
    tap: The index that is reduced.
    """

    image: str
    places: tuple[Affine, ...]
    names: tuple[str, ...]
    extents: Mapping[str, int]
    pad: bool
    tap: str
    operator: str

    def reduced(self, builder: GraphBuilder) -> str:
        """Add the windows, and their reduction, unless it is of one element."""
        if self.extents[self.tap] == 1:
            places = (Affine.of({**dict(p.terms), self.tap: 0}, p.offset) for p in self.places)
            names = tuple(name for name in self.names if name != self.tap)
            return replace(self, places=tuple(places), names=names).mapped(builder)
        return builder.add(self.operator, self.mapped(builder), axis=self.names.index(self.tap), keep=False)

    def mapped(self, builder: GraphBuilder) -> str:
        """Add the windows."""
        spec = str(Indexing((self.places,), self.names))
        sizes = tuple((name, self.extents[name]) for name in self.names)
        return builder.add("map", self.image, spec=spec, sizes=sizes, pad=self.pad)

    def along(self, tap: str) -> tuple[int, str] | None:
        """Return (axis of the image, index of results) along which an index slides; None if along no one."""
        found = [at for at, place in enumerate(self.places) if tap in place.names]
        if len(found) != 1 or len(self.places[found[0]].terms) != 2:
            return None
        (name,) = (name for name in self.places[found[0]].names if name != tap)
        return found[0], name

    def moved(self, axis: int, terms: Mapping[str, int], offset: int, **extents: int) -> Windows:
        """Return the windows with another place along an axis of the image."""
        places = [*self.places]
        places[axis] = Affine.of(terms, offset)
        return replace(self, places=tuple(places), extents={**self.extents, **extents})


def _windows(match: Match) -> Windows | None:
    """Return the windows of known extents that a reduction is over."""
    node, given, outer = match.node("windows"), node_attributes(match.node("windows")), match.root
    if match["windows"] in match.shared or node_attributes(outer)["keep"]:
        return None
    indexing, shape = parse_indexing(given["spec"]), node.tile.shape
    if not all(isinstance(extent, int) for extent in (*shape, *match.builder.tile(node.inputs[0]).shape)):
        return None
    extents = dict(zip(indexing.result, map(int, shape), strict=True))
    tap = indexing.result[node_attributes(outer)["axis"] % len(shape)]
    places = indexing.operands[0]
    return Windows(node.inputs[0], places, indexing.result, extents, given["pad"], tap, outer.operator)


def _in_parts(match: Match) -> str | None:
    """``sum of r in 0..n`` -> sums of every a-th of sums of a neighbours, and of those left over."""
    windows = _windows(match)
    sliding = None if windows is None else windows.along(windows.tap)
    if windows is None or sliding is None:
        return None
    axis, name = sliding
    place, count = windows.places[axis], windows.extents[windows.tap]
    terms = dict(place.terms)
    gap = terms[windows.tap]
    part = min(range(1, count), key=lambda a: a + sum(divmod(count, a)), default=1)
    several, left = divmod(count, part)
    results = prod(extent for index, extent in windows.extents.items() if index != windows.tap)
    saved = results * (count - part - several - left)
    if count <= WIDE or terms[name] != 1 or gap < 0 or saved < LEAST_SAVED:
        return None
    builder, long = match.builder, windows.extents[name] + gap * part * (several - 1)
    sums = windows.moved(axis, terms, place.offset, **{windows.tap: part, name: long}).reduced(builder)
    names = [index for index in windows.names if index != windows.tap]
    whole = replace(windows, image=sums, places=tuple(Affine.of({n: 1}) for n in names), pad=False)
    steps = {name: 1, windows.tap: gap * part}
    value = whole.moved(names.index(name), steps, 0, **{windows.tap: several}).reduced(builder)
    if not left:
        return value
    offset = place.offset + gap * part * several
    rest = windows.moved(axis, terms, offset, **{windows.tap: left}).reduced(builder)
    return builder.add(COMBINING[windows.operator], value, rest)


def _by_axes(match: Match) -> str | None:
    """``sum of s`` of windows along two axes -> windows along the other one of sums along its own."""
    windows = _windows(match)
    if windows is None or windows.along(windows.tap) is None:
        return None
    other = next((n for n in windows.names if n != windows.tap and _is_tap(windows, n)), None)
    if other is None:
        return None
    axis, name = windows.along(other) or (0, "")
    count, beside = windows.extents[windows.tap], windows.extents[other]
    rows = int(match.builder.tile(windows.image).shape[axis])
    results = prod(e for index, e in windows.extents.items() if index not in (windows.tap, other))
    saved = results * (count * beside - beside) - results // windows.extents[name] * rows * count
    if count * beside <= WIDE or saved < LEAST_SAVED:
        return None
    builder, given = match.builder, windows.places[axis]
    names = tuple(index for index in windows.names if index != other)
    inner = replace(windows.moved(axis, {name: 1}, 0, **{name: rows}), names=names)
    sums = inner.reduced(builder)
    own = [index for index in names if index != windows.tap]
    places = tuple(given if index == name else Affine.of({index: 1}) for index in own)
    result = tuple(index for index in windows.names if index != windows.tap)
    return replace(windows, image=sums, places=places, names=result).mapped(builder)


def _is_tap(windows: Windows, name: str) -> bool:
    """Tell whether an index of more than one element slides along an axis, behind that of its results."""
    sliding = windows.along(name)
    if sliding is None or windows.extents[name] == 1 or sliding[1] not in windows.names:
        return False
    return windows.names.index(name) > windows.names.index(sliding[1])


def _of_places(match: Match) -> str | None:
    """Leave out indices of one element that slide beside another: the last axis may then be of channels."""
    windows = _windows(match)
    if windows is None:
        return None
    alone = [n for n in windows.names if n != windows.tap and windows.extents[n] == 1 and windows.along(n)]
    if not alone:
        return None
    places = (Affine.of({**dict(p.terms), **dict.fromkeys(alone, 0)}, p.offset) for p in windows.places)
    names = tuple(name for name in windows.names if name not in alone)
    value = replace(windows, places=tuple(places), names=names).reduced(match.builder)
    return match.builder.add("reshape", value, shape=match.root.tile.shape)


def _of_one(match: Match) -> str | None:
    """``sum(sum(x))`` over an axis of one element -> the inner sum."""
    inner, given = match.node("inner"), node_attributes(match.root)
    if inner.operator != match.root.operator or match.tile("x").shape[given["axis"]] != 1:
        return None
    return match.builder.add("reshape", match["x"], shape=match.root.tile.shape)


WINDOW = pattern("map", "image", name="windows")

INNER = pattern("reduce_sum|reduce_max", name="inner")

WIDE_WINDOWS: Rules = (
    Rule("indices of one element", pattern("reduce_sum|reduce_max", WINDOW), _of_places),
    Rule(
        "axes of one element", pattern("reduce_sum|reduce_max", pattern("reshape", INNER, name="x")), _of_one
    ),
    Rule("windows along one axis after the other", pattern("reduce_sum|reduce_max", WINDOW), _by_axes),
    Rule("wide windows in parts", pattern("reduce_sum|reduce_max", WINDOW), _in_parts),
)
