"""Shape rules: the ``shape`` column of the operator table."""

from __future__ import annotations

from itertools import zip_longest

from ladder.ir.extents import Shape, canonical, ceildiv, product, show_shape, total
from ladder.ir.indexing import Indexing, check_inside, parse_indexing, solve_extents
from ladder.ir.operator import Attributes, Tiles
from tile_types.errors import DTypeError, ShapeError
from tile_types.library import get_type
from tile_types.tile import Extent
from tile_types.ttype import TType


def same(tiles: Tiles, attributes: Attributes) -> Shape:
    """Keep the first operand's shape."""
    return tiles[0].shape


def given(tiles: Tiles, attributes: Attributes) -> Shape:
    """Take the attribute ``shape``."""
    return tuple(canonical(extent) for extent in attributes["shape"])


def elementwise(tiles: Tiles, attributes: Attributes) -> Shape:
    """Broadcast as numpy does: axes align at the right, extent 1 stretches."""
    return broadcast_shapes([tile.shape for tile in tiles])


def broadcast_shapes(shapes: list[Shape]) -> Shape:
    """Return the common shape; raises ShapeError."""
    result: list[Extent] = []
    for extents in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        wide = list(dict.fromkeys(extent for extent in extents if extent != 1))
        if len(wide) > 1:
            raise ShapeError(f"shapes {' and '.join(map(show_shape, shapes))} do not broadcast")
        result.append(wide[0] if wide else 1)
    return tuple(reversed(result))


def matmul(tiles: Tiles, attributes: Attributes) -> Shape:
    """``[..., M, K] @ [..., K, N]`` (``[..., N, K]`` with transpose_b)."""
    a, b = tiles[0].shape, tiles[1].shape
    if len(a) < 2 or len(b) < 2:
        raise ShapeError(f"matmul needs matrices, got {show_shape(a)} and {show_shape(b)}")
    k, n = (b[-1], b[-2]) if attributes["transpose_b"] else (b[-2], b[-1])
    if a[-1] != k:
        raise ShapeError(f"matmul contracts {a[-1]} elements of {show_shape(a)} with {k} of {show_shape(b)}")
    return (*broadcast_shapes([a[:-2], b[:-2]]), a[-2], n)


def indexed(tiles: Tiles, attributes: Attributes) -> Shape:
    """Solve the indexing ``spec`` for the extents of the result's indices."""
    indexing, extents = index_extents(tiles, attributes)
    return tuple(extents[name] for name in indexing.result)


def index_extents(tiles: Tiles, attributes: Attributes) -> tuple[Indexing, dict[str, Extent]]:
    """Return the indexing of ``contract`` or ``map`` and the extent of each index."""
    indexing = parse_indexing(attributes["spec"])
    shapes = [tile.shape for tile in tiles]
    known = {name: canonical(extent) for name, extent in attributes["sizes"]}
    extents = solve_extents(indexing, shapes, known)
    if not attributes["pad"]:
        check_inside(indexing, shapes, extents)
    return indexing, extents


def axis_of(shape: Shape, axis: int) -> int:
    """Return the axis counted from 0; raises ShapeError."""
    if not -len(shape) <= axis < len(shape):
        raise ShapeError(f"axis {axis} is not an axis of {show_shape(shape)}")
    return axis % len(shape)


def replaced(shape: Shape, axis: int, extent: Extent) -> Shape:
    """Return the shape with one extent replaced."""
    return (*shape[:axis], extent, *shape[axis + 1 :])


def reduced(tiles: Tiles, attributes: Attributes) -> Shape:
    """Reduce ``axis`` to 1, or drop it unless ``keep``."""
    shape = tiles[0].shape
    axis = axis_of(shape, attributes["axis"])
    return replaced(shape, axis, 1) if attributes["keep"] else shape[:axis] + shape[axis + 1 :]


def broadcast(tiles: Tiles, attributes: Attributes) -> Shape:
    """Stretch to the attribute ``shape``."""
    target = given(tiles, attributes)
    if broadcast_shapes([tiles[0].shape, target]) != target:
        raise ShapeError(f"{show_shape(tiles[0].shape)} does not broadcast to {show_shape(target)}")
    return target


def reshaped(tiles: Tiles, attributes: Attributes) -> Shape:
    """Keep the number of elements."""
    target = given(tiles, attributes)
    if product(tiles[0].shape) != product(target):
        raise ShapeError(f"cannot reshape {show_shape(tiles[0].shape)} to {show_shape(target)}: sizes differ")
    return target


def transposed(tiles: Tiles, attributes: Attributes) -> Shape:
    """Permute axes: result axis i is operand axis ``permutation[i]``."""
    shape, permutation = tiles[0].shape, attributes["permutation"]
    if sorted(permutation) != list(range(len(shape))):
        raise ShapeError(f"{permutation} is no permutation of the axes of {show_shape(shape)}")
    return tuple(shape[axis] for axis in permutation)


def concatenated(tiles: Tiles, attributes: Attributes) -> Shape:
    """Join along ``axis``; the other extents agree."""
    shape = tiles[0].shape
    axis = axis_of(shape, attributes["axis"])
    for tile in tiles[1:]:
        if len(tile.shape) != len(shape) or replaced(tile.shape, axis, 0) != replaced(shape, axis, 0):
            raise ShapeError(
                f"cannot concat {show_shape(shape)} and {show_shape(tile.shape)} along axis {axis}"
            )
    return replaced(shape, axis, total(tile.shape[axis] for tile in tiles))


def repeated(tiles: Tiles, attributes: Attributes) -> Shape:
    """Repeat each element along ``axis`` and cut to ``extent`` (the last group may be partial)."""
    shape, times = tiles[0].shape, attributes["times"]
    axis = axis_of(shape, attributes["axis"])
    extent = canonical(attributes["extent"] or product([shape[axis], times]))
    if ceildiv(extent, times) != shape[axis] and isinstance(shape[axis], int) and isinstance(extent, int):
        raise ShapeError(f"{shape[axis]} groups of {times} along axis {axis} do not cover {extent} elements")
    return replaced(shape, axis, extent)


def sliced(tiles: Tiles, attributes: Attributes) -> Shape:
    """Take ``shape`` elements from ``begin`` on, every ``step``-th."""
    source, shape, begin = tiles[0].shape, given(tiles, attributes), attributes["begin"]
    step = attributes["step"] or (1,) * len(shape)
    if not len(source) == len(shape) == len(begin) == len(step):
        raise ShapeError(f"slice of {show_shape(source)} needs begin, shape and step of rank {len(source)}")
    for axis, (start, count, stride, extent) in enumerate(zip(begin, shape, step, source, strict=True)):
        if not isinstance(extent, int) or not isinstance(start, int) or not isinstance(count, int):
            continue
        if start < 0 or stride < 1 or (count and start + (count - 1) * stride >= extent):
            raise ShapeError(
                f"slice from {start}, {count} by {stride}, leaves axis {axis} of {show_shape(source)}"
            )
    return shape


def padded(tiles: Tiles, attributes: Attributes) -> Shape:
    """Add ``low`` elements before and ``high`` after on each axis."""
    shape, low, high = tiles[0].shape, attributes["low"], attributes["high"]
    if not len(low) == len(high) == len(shape):
        raise ShapeError(f"pad of {show_shape(shape)} needs low and high of rank {len(shape)}")
    return tuple(total(extents) for extents in zip(low, shape, high, strict=True))


def loaded(tiles: Tiles, attributes: Attributes) -> Shape:
    """Take the tile ``shape``; every mapped grid or loop dimension names one of its axes."""
    shape = given(tiles, attributes)
    if len(shape) != len(tiles[0].shape):
        raise ShapeError(f"a tile {show_shape(shape)} cannot be loaded from {show_shape(tiles[0].shape)}")
    _check_partition(shape, (*attributes["grid"], *attributes["loop"]))
    return shape


def stored(tiles: Tiles, attributes: Attributes) -> Shape:
    """Give the full ``shape``; the grid dimensions say which part each block writes."""
    shape = given(tiles, attributes)
    if len(shape) != len(tiles[0].shape):
        raise ShapeError(f"a tile {show_shape(tiles[0].shape)} cannot be stored into {show_shape(shape)}")
    _check_partition(shape, attributes["grid"])
    return shape


def _check_partition(shape: Shape, axes: tuple[int, ...]) -> None:
    for axis in axes:
        if not -1 <= axis < len(shape):
            raise ShapeError(
                f"grid and loop dimensions map to an axis of {show_shape(shape)} or -1, got {axis}"
            )


def accumulated(tiles: Tiles, attributes: Attributes) -> Shape:
    """Keep the tile's shape, or join all iterations along ``axis`` for kind ``concat``."""
    shape = tiles[0].shape
    if (attributes["kind"] == "rescale") != (len(tiles) == 2):
        raise ShapeError(
            "accumulate takes (value, local maximum) for kind 'rescale' and one operand otherwise"
        )
    if len(tiles) == 2:
        broadcast_shapes([shape, tiles[1].shape])
    if attributes["kind"] != "concat":
        return shape
    axis = axis_of(shape, attributes["axis"])
    return replaced(shape, axis, product([shape[axis], attributes["extent"]]))


def metadata(tiles: Tiles, attributes: Attributes) -> Shape:
    """One entry per block along the last axis, or a scalar for tensor-wide metadata."""
    ttype = tiles[0].ttype
    found = ttype.metadata_named(attributes["field"])
    if found is None:
        names = ", ".join(m.name for m in ttype.metadata) or "none"
        raise ShapeError(f"{ttype.name} has no metadata {attributes['field']!r}; it has {names}")
    shape = tiles[0].shape
    return () if found.scope == "tensor" else (*shape[:-1], ceildiv(shape[-1], ttype.block_size))


def metadata_type(tiles: Tiles, attributes: Attributes) -> TType:
    """Type of the metadata array."""
    found = tiles[0].ttype.metadata_named(attributes["field"])
    return get_type(found.ttype) if found else get_type("float32")


def element_type(tiles: Tiles, attributes: Attributes) -> TType:
    """Type of the codes."""
    return tiles[0].ttype.element_type


def any_type(tiles: Tiles, attributes: Attributes) -> TType:
    """Keep the first operand's type, block types included."""
    for tile in tiles[1:]:
        if tile.ttype != tiles[0].ttype:
            raise DTypeError(f"operands have types {tiles[0].ttype} and {tile.ttype}")
    return tiles[0].ttype


def accumulated_type(tiles: Tiles, attributes: Attributes) -> TType:
    """Type of the accumulated value (the second operand only rescales)."""
    return any_type(tiles[:1], attributes)


def target_type(tiles: Tiles, attributes: Attributes) -> TType:
    """Take the attribute ``type``, which must be element-wise."""
    ttype = get_type(attributes["type"])
    if ttype.is_block:
        raise DTypeError(f"convert and encode give element types, {ttype.name} is a block type")
    return ttype


def contract_flops(tiles: Tiles, attributes: Attributes) -> Extent:
    """Multiplies and adds of a contraction: operands x all index extents."""
    _, extents = index_extents(tiles, attributes)
    return product([len(tiles), *extents.values()])
