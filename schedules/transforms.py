"""slice, map, pad and convert: the four functions from tile to tile.

A `TileValue` is a tile with its codes; every transform returns a new one and leaves the
old alone. Semantics are exactly numpy's, so lowering is tested against these functions.
Source: Ladder (OSDI 2024), section 4.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tile_types import Tile, TType, get_type
from tile_types.errors import ConversionError, ParseError, ShapeError

Codes = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class TileValue:
    """A tile and the codes of its elements.

    Parameters
    ----------
    tile
        Type, shape, level and layout.
    codes
        Unsigned codes of ``tile.shape``.
    """

    tile: Tile
    codes: Codes

    def __post_init__(self) -> None:
        if self.tile.known_shape != self.codes.shape:
            raise ShapeError(f"codes of shape {self.codes.shape} are no tile of shape {self.tile.shape}")

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """The elements' values, scales not applied."""
        return self.tile.ttype.element_type.decode_codes(self.codes)


@dataclass(frozen=True)
class Step:
    """Reshape to ``split``, permute by ``order``, reshape to ``merge``.

    Prints as ``4x16x8 -> 1,0,2 -> 16x32``.
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    merge: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.split))):
            raise ShapeError(f"order {self.order} is no permutation of {len(self.split)} axes")
        if prod(self.split) != prod(self.merge):
            raise ShapeError(
                f"{self.split} has {prod(self.split)} elements, {self.merge} has {prod(self.merge)}"
            )

    def __str__(self) -> str:
        return f"{_extents(self.split)} -> {','.join(map(str, self.order))} -> {_extents(self.merge)}"

    def apply(self, array: Codes) -> Codes:
        """Return the rearranged array."""
        return array.reshape(self.split).transpose(self.order).reshape(self.merge)

    def inverse(self, shape: tuple[int, ...]) -> Step:
        """Return the step that restores an array of ``shape``."""
        permuted = tuple(self.split[axis] for axis in self.order)
        back = tuple(self.order.index(axis) for axis in range(len(self.order)))
        return Step(permuted, back, shape)


@dataclass(frozen=True)
class Layout:
    """A bijection of positions: steps from ``shape`` (logical) outwards to memory order.

    Composes with `then`; prints and parses (`parse_layout`).
    """

    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if any(prod(step.split) != prod(self.shape) for step in self.steps):
            raise ShapeError(
                f"a step of layout {self} does not hold the {prod(self.shape)} elements of {self.shape}"
            )

    def __str__(self) -> str:
        return " ; ".join([_extents(self.shape), *map(str, self.steps)])

    @property
    def mapped_shape(self) -> tuple[int, ...]:
        """Shape after all steps."""
        return self.steps[-1].merge if self.steps else self.shape

    def apply(self, array: Codes) -> Codes:
        """Return ``array`` of `shape` rearranged to `mapped_shape`."""
        if array.shape != self.shape:
            raise ShapeError(f"layout maps arrays of shape {self.shape}, got {array.shape}")
        for step in self.steps:
            array = step.apply(array)
        return array

    def then(self, other: Layout) -> Layout:
        """Return this layout followed by ``other``."""
        if other.shape != self.mapped_shape:
            raise ShapeError(f"cannot follow a layout to {self.mapped_shape} by one from {other.shape}")
        return Layout(self.shape, self.steps + other.steps)

    def inverse(self) -> Layout:
        """Return the layout that undoes this one."""
        shapes = [self.shape, *(step.merge for step in self.steps)]
        steps = [step.inverse(shape) for step, shape in zip(self.steps, shapes, strict=False)]
        return Layout(self.mapped_shape, tuple(reversed(steps)))


def _extents(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _numbers(text: str, separator: str) -> tuple[int, ...]:
    return () if text in ("", "scalar") else tuple(map(int, text.split(separator)))


def parse_layout(text: str) -> Layout:
    """Read back what ``str(layout)`` printed.

    Raises
    ------
    ParseError
        If the text is no layout.
    """
    shape, *steps = (part.strip() for part in text.split(";"))
    pattern = re.compile(r"(scalar|[\dx]+) -> ([\d,]*) -> (scalar|[\dx]+)")
    matches = [pattern.fullmatch(step) for step in steps]
    if None in matches:
        raise ParseError(f"not a layout: {text!r}; expected 'AxB ; CxDxE -> 1,0,2 -> FxG'")
    try:
        parsed = tuple(
            Step(_numbers(found[1], "x"), _numbers(found[2], ","), _numbers(found[3], "x"))
            for found in matches
            if found is not None
        )
        return Layout(_numbers(shape, "x"), parsed)
    except (ValueError, ShapeError) as error:
        raise ParseError(f"not a layout: {text!r}: {error}") from error


def slice_tile(value: TileValue, start: tuple[int, ...], shape: tuple[int, ...]) -> TileValue:
    """Cut a box out of a tile.

    args
        ``start``, ``shape``: first element and extents along each axis.
    rewrite
        ``T[n0, n1] -> T[start0 : start0 + shape0, start1 : start1 + shape1]``
    checks
        the box lies inside the tile. No inverse; `write_slice` puts a box back.

    Raises
    ------
    ShapeError
        If the box does not lie inside.
    """
    box = _box(value, start, shape)
    return TileValue(replace(value.tile, shape=shape, layout=None), value.codes[box].copy())


def write_slice(value: TileValue, start: tuple[int, ...], part: TileValue) -> TileValue:
    """Put a box back: ``slice_tile(write_slice(v, s, p), s, p.shape)`` is ``p``.

    args
        ``start``: where; ``part``: what, of the same type.
    rewrite
        ``T, P -> T with T[start : start + P.shape] = P``
    checks
        the types agree and the box lies inside.

    Raises
    ------
    ShapeError
        If the box does not lie inside.
    ConversionError
        If the types differ.
    """
    if part.tile.ttype != value.tile.ttype:
        raise ConversionError(
            f"cannot write {part.tile.ttype} into a tile of {value.tile.ttype}; convert it first"
        )
    codes = value.codes.copy()
    codes[_box(value, start, part.tile.known_shape)] = part.codes
    return TileValue(value.tile, codes)


def _box(value: TileValue, start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    extents = value.tile.known_shape
    inside = len(start) == len(shape) == len(extents) and all(
        min(first, size) >= 0 and first + size <= extent
        for first, size, extent in zip(start, shape, extents, strict=False)
    )
    if not inside:
        raise ShapeError(f"box {shape} at {start} does not lie inside a tile of shape {extents}")
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))


def map_tile(value: TileValue, layout: Layout) -> TileValue:
    """Rearrange a tile; inverse: the same with ``layout.inverse()``.

    args
        ``layout``: a bijection from the tile's shape.
    rewrite
        ``T[i] -> T'[layout(i)]``
    checks
        the layout maps arrays of the tile's shape.

    Raises
    ------
    ShapeError
        If it maps another shape.
    """
    codes = np.ascontiguousarray(layout.apply(value.codes))
    return TileValue(
        replace(value.tile, shape=codes.shape, layout=_followed(value.tile.layout, layout)), codes
    )


def _followed(before: Layout | None, layout: Layout) -> Layout | None:
    """Return the layout since canonical order; None once it is the identity again."""
    whole = layout if before is None else before.then(layout)
    positions = np.arange(prod(whole.shape)).reshape(whole.shape)
    mapped = whole.apply(positions)
    return None if mapped.shape == positions.shape and np.array_equal(mapped, positions) else whole


def pad_tile(value: TileValue, shape: tuple[int, ...], code: int | None = None) -> TileValue:
    """Extend a tile at the end of each axis; inverse: `slice_tile` at 0 of the old shape.

    args
        ``shape``: new extents; ``code``: what fills, by default the code whose value is nearest 0.
    rewrite
        ``T[n0, n1] -> T'[shape0, shape1]``, ``T'[i] = T[i]`` inside and ``code`` outside
    checks
        no extent shrinks; the code is one of the type.

    Raises
    ------
    ShapeError
        If an extent shrinks.
    ConversionError
        If the type has no such code.
    """
    old = value.tile.known_shape
    if len(shape) != len(old) or any(new < extent for new, extent in zip(shape, old, strict=False)):
        raise ShapeError(f"cannot pad a tile of shape {old} to {shape}")
    element = value.tile.ttype.element_type
    fill = zero_code(element) if code is None else code
    if not 0 <= fill < 1 << element.elem_bits or (
        element.elem_bits <= 8 and fill not in element.valid_codes()
    ):
        raise ConversionError(f"{fill} is no code of {element}")
    codes = np.full(shape, fill, dtype=value.codes.dtype)
    codes[tuple(slice(0, extent) for extent in old)] = value.codes
    return TileValue(replace(value.tile, shape=shape, layout=None), codes)


def zero_code(ttype: TType | str) -> int:
    """Return the code whose value is nearest 0, the smallest among equals."""
    element = get_type(ttype).element_type
    codes = element.valid_codes()
    return int(codes[np.argmin(np.abs(element.decode_codes(codes)))])


def convert_tile(value: TileValue, ttype: TType | str, *, lossy: bool = False) -> TileValue:
    """Re-encode every element in another element type.

    args
        ``ttype``: element type of the result; ``lossy``: allow rounding.
    rewrite
        ``T[i] : A -> encode_B(decode_A(T[i])) : B``; inverse: convert back to ``A`` (exact
        where the conversion is lossless and codes of ``A`` have distinct values)
    checks
        every element that occurs keeps its value, unless ``lossy``.

    Raises
    ------
    ConversionError
        If a value would change; names the first.
    """
    target = get_type(ttype).element_type
    values = value.values
    codes = np.asarray(target.encode(values))
    changed = np.argwhere(target.decode_codes(codes) != values)
    if len(changed) and not lossy:
        where = tuple(int(index) for index in changed[0])
        raise ConversionError(
            f"{value.tile.ttype} value {values[where]} at {where} is no value of {target};"
            " choose a wider type"
        )
    return TileValue(replace(value.tile, ttype=target), codes)


TRANSFORMS: Mapping[str, Callable[..., TileValue]] = {
    "slice": slice_tile,
    "map": map_tile,
    "pad": pad_tile,
    "convert": convert_tile,
}
"""The four transforms by the names that schedules use."""
