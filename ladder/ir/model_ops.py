"""Rows of the operator table that whole models need: comparisons, gathers, attention, library calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ladder.ir import numeric, scalars, shapes
from ladder.ir.attention_row import ATTENTION
from ladder.ir.extents import Shape, canonical, show_shape
from ladder.ir.formulas import of_scalars
from ladder.ir.operator import (
    AbstractExpression,
    Attribute,
    Attributes,
    Operator,
    Tiles,
    arithmetic_type,
    flops_per_element,
)
from tile_types.errors import DTypeError, ShapeError
from tile_types.library import get_type
from tile_types.ttype import TType

Values = Sequence[Any]


def _named(name: str) -> Callable[[Any, Tiles, Attributes], AbstractExpression]:
    return lambda arguments, tiles, attributes: (name, *arguments)


def _other(name: str, arity: int, reference: Any, lower: Any, flops: int = 1, **rest: Any) -> Operator:
    """Return an element-wise row outside LAX."""
    return Operator(
        name,
        (arity, arity),
        shapes.elementwise,
        numeric.pointwise(reference),
        None,
        _named(name),
        "other",
        flops_per_element(flops),
        lower=lower,
        **rest,
    )


def _truth(tiles: Tiles, attributes: Attributes) -> TType:
    """Comparisons give truth values."""
    return get_type("bool")


def _branch_type(tiles: Tiles, attributes: Attributes) -> TType:
    """Return the type of what is chosen; the condition has its own."""
    return shapes.any_type(tiles[1:], attributes)


def _bits_type(tiles: Tiles, attributes: Attributes) -> TType:
    """Bits are those of 32 or 64 bits that all operands have; narrower integers are computed in 32."""
    found = arithmetic_type(tiles, attributes)
    if found.name not in ("int32", "int64"):
        raise DTypeError(f"operators of bits take int32 or int64, got {found.name}")
    return found


def _bits_of(taken: str, result: str) -> Callable[[Tiles, Attributes], TType]:
    """Return the rule of a type whose bits are taken for another's."""

    def rule(tiles: Tiles, attributes: Attributes) -> TType:
        if tiles[0].ttype.name != taken:
            raise DTypeError(f"bits of {taken} are taken for {result}, got {tiles[0].ttype.name}")
        return get_type(result)

    return rule


def _truthful(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: function(*values).astype(np.float64)


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    return np.where(np.asarray(condition) != 0, yes, no)


def _count(values: Values, attributes: Attributes) -> Any:
    count, shape = int(attributes["extent"]), [1] * attributes["rank"]
    shape[attributes["axis"]] = count
    return (attributes["begin"] + attributes["step"] * np.arange(count, dtype=np.float64)).reshape(shape)


def _count_shape(tiles: Tiles, attributes: Attributes) -> Shape:
    """Axis ``axis`` of ``rank`` axes has ``extent`` elements, the others one."""
    rank, axis = attributes["rank"], attributes["axis"]
    if not 0 <= axis < rank:
        raise ShapeError(f"iota counts along axis {axis} of {rank} axes")
    return tuple(canonical(attributes["extent"]) if at == axis else 1 for at in range(rank))


def _size(values: Values, attributes: Attributes) -> Any:
    return np.asarray(float(attributes["extent"]))


def _no_shape(tiles: Tiles, attributes: Attributes) -> Shape:
    return ()


def _taken(tiles: Tiles, attributes: Attributes) -> Shape:
    """``table[N, ...]`` and ``ids[...]`` give ``[ids..., ...]``."""
    table, ids = tiles[0].shape, tiles[1].shape
    if not table:
        raise ShapeError("take needs a table of at least one axis, got a number")
    return (*ids, *table[1:])


def _take(values: Values, attributes: Attributes) -> Any:
    return np.asarray(values[0])[np.asarray(values[1]).astype(np.int64)]


def _gathered(tiles: Tiles, attributes: Attributes) -> Shape:
    """Numbers of elements along an axis: ``x[i, ids[...], j]``, or along it ``x[i, ids[i, k, j], j]``."""
    x, ids, axis = tiles[0].shape, tiles[1].shape, attributes["axis"]
    if not 0 <= axis < len(x):
        raise ShapeError(f"gather along axis {axis} cannot take {show_shape(x)}")
    if not attributes["along"]:
        return (*x[:axis], *ids, *x[axis + 1 :])
    if len(ids) != len(x) or (*ids[:axis], *ids[axis + 1 :]) != (*x[:axis], *x[axis + 1 :]):
        raise ShapeError(f"gather along axis {axis} cannot take {show_shape(x)}, {show_shape(ids)}")
    return ids


def _gather(values: Values, attributes: Attributes) -> Any:
    x, ids, axis = np.asarray(values[0]), np.asarray(values[1]).astype(np.int64), attributes["axis"]
    return np.take_along_axis(x, ids, axis) if attributes["along"] else np.take(x, ids, axis)


def _put_shape(tiles: Tiles, attributes: Attributes) -> Shape:
    """Numbers ``ids[n]`` say where the ``n`` rows along ``axis`` go in what is otherwise of their shape."""
    base, ids, rows = (tile.shape for tile in tiles)
    axis = attributes["axis"]
    fits = 0 <= axis < len(base)
    if attributes["along"]:
        fits = fits and ids == rows and (*rows[:axis], *rows[axis + 1 :]) == (*base[:axis], *base[axis + 1 :])
    else:
        fits = fits and len(ids) == 1 and rows == (*base[:axis], *ids, *base[axis + 1 :])
    if not fits:
        raise ShapeError(f"put along axis {axis} cannot take {', '.join(map(show_shape, (base, ids, rows)))}")
    return base


_COMBINED: dict[str, Any] = {"add": np.add.at, "max": np.maximum.at, "min": np.minimum.at}


def _put(values: Values, attributes: Attributes) -> Any:
    base, ids, rows = (np.asarray(value) for value in values)
    axis, combine = attributes["axis"], attributes["combine"]
    result, ids = np.array(base, np.float64), ids.astype(np.int64)
    if attributes["along"]:
        at = list(np.indices(rows.shape))
        at[axis] = ids
        place: Any = tuple(at)
    else:
        place = (*(slice(None),) * axis, ids)
    if combine:
        _COMBINED[combine](result, place, rows)
    else:
        result[place] = rows
    return result


def _table_type(tiles: Tiles, attributes: Attributes) -> TType:
    return tiles[0].ttype


def _refuse(values: Values, attributes: Attributes) -> Any:
    raise ShapeError(f"the library call {attributes['target']} has no reference of ours")


SOURCES = (
    Operator(
        "iota", (0, 0), _count_shape, _count, None, _named("iota"), "other",
        attributes={
            "extent": Attribute("extent"), "axis": Attribute("int", 0), "rank": Attribute("int", 1),
            "begin": Attribute("extent", 0), "step": Attribute("int", 1), "type": Attribute("type"),
        },
        result_type=shapes.target_type, doc="begin, begin + step, ... along one axis",
    ),
    Operator(
        "size", (0, 0), _no_shape, _size, None, _named("size"), "other",
        attributes={"extent": Attribute("extent"), "type": Attribute("type")},
        result_type=shapes.target_type, engine="leaf", doc="an extent as a number",
    ),
)  # fmt: skip

ELEMENTWISE = (
    _other("log", 1, np.log, scalars.log, 8),
    _other("log10", 1, np.log10, scalars.log10, 20),
    _other("log2", 1, np.log2, scalars.log2, 8),
    _other("exp2", 1, np.exp2, scalars.exp2, 8),
    _other("log1p", 1, np.log1p, scalars.log_beyond_one, 20, doc="log(1 + x), of float32"),
    _other("logaddexp", 2, np.logaddexp, scalars.log_of_sum, 30, doc="log(exp(a) + exp(b)), of float32"),
    _other("sin", 1, np.sin, scalars.sin, 16),
    _other("cos", 1, np.cos, scalars.cos, 16),
    _other("abs", 1, np.abs, scalars.absolute),
    _other("floor", 1, np.floor, scalars.floor),
    _other("round", 1, np.rint, scalars.nearest),
    _other("erf", 1, numeric.erf, of_scalars("erf"), 20),
    _other("pow", 2, np.power, scalars.power, 16),
    _other("quotient", 2, numeric.quotient, scalars.quotient, 8, doc="a / b rounded toward 0"),
    _other("fmod", 2, np.fmod, scalars.left_over, 40, doc="a - b * quotient(a, b), exactly, of float32"),
    *(
        _other(name, 2, numeric.of_integers(reference), lower, result_type=_bits_type, doc=doc)
        for name, reference, lower, doc in (
            ("bitwise_and", np.bitwise_and, scalars.bitwise_and, "1 where both bits are"),
            ("bitwise_or", np.bitwise_or, scalars.bitwise_or, "1 where a bit is"),
            ("bitwise_xor", np.bitwise_xor, scalars.bitwise_xor, "1 where bits differ"),
            ("shift_left", numeric.shifted_left, scalars.shift_left, "0 beyond the width, and of b < 0"),
            ("shift_right", numeric.shifted_right, scalars.shift_right, "sign bits beyond it, and of b < 0"),
        )
    ),
    _other("bits", 1, numeric.bits, scalars.bits, result_type=_bits_of("float32", "int32"), doc="of float32"),
    _other(
        "of_bits",
        1,
        numeric.of_bits,
        scalars.of_bits,
        result_type=_bits_of("int32", "float32"),
        doc="the float32 of these bits",
    ),
    _other("less", 2, _truthful(np.less), scalars.less, result_type=_truth),
    _other("less_equal", 2, _truthful(np.less_equal), scalars.less_equal, result_type=_truth),
    _other("equal", 2, _truthful(np.equal), scalars.equal, result_type=_truth),
    _other("both", 2, _truthful(np.logical_and), scalars.both, result_type=_truth),
    _other("either", 2, _truthful(np.logical_or), scalars.either, result_type=_truth),
    _other("negation", 1, _truthful(np.logical_not), scalars.negation, result_type=_truth),
    _other("fused", 3, lambda a, b, c: a * b + c, scalars.fused, 2, doc="a * b + c, rounded once or twice"),
    _other("exp_ftz", 1, np.exp, scalars.exp_ftz, 4, doc="exp; what is subnormal may be 0"),
    _other("div_ftz", 2, np.divide, scalars.divide_ftz, doc="a / b of a b whose reciprocal is normal"),
    _other("select", 3, _choose, scalars.select, result_type=_branch_type),
)

GATHERS = (
    Operator(
        "gather",
        (2, 2),
        _gathered,
        _gather,
        None,
        _named("gather"),
        "other",
        attributes={
            "axis": Attribute("int"),
            "along": Attribute("flag", False),
            "from_end": Attribute("flag", False),
        },
        result_type=_table_type,
        doc="elements by their numbers along an axis; ``along``: one of each row",
    ),
)

LIBRARY = (
    Operator(
        "take", (2, 2), _taken, _take, None, _named("take"), "other", result_type=_table_type,
        engine="library", doc="rows of a table by number (embedding)",
    ),
    Operator(
        "put", (3, 3), _put_shape, _put, None, _named("put"), "other",
        attributes={
            "axis": Attribute("int"), "from_end": Attribute("flag", False), "along": Attribute("flag", False),
            "combine": Attribute("name", "", ("", "add", "max", "min")),
        },
        result_type=_table_type, engine="library",
        doc="rows replaced by number (a cache of keys or values), or combined with those that are there;"
        " ``along``: an element of each row",
    ),
    ATTENTION,
    Operator(
        "call", (0, None), shapes.given, _refuse, None, _named("call"), "other",
        attributes={
            "target": Attribute("name"), "arguments": Attribute("literal", ()),
            "keywords": Attribute("literal", ()), "draws": Attribute("flag", False),
        },
        role="call", levels=("kernel",), engine="library",
        doc="a call of torch's library; the results' tiles are stated; draws: random numbers",
    ),
)  # fmt: skip

MODEL_ROWS = (*SOURCES, *ELEMENTWISE, *GATHERS, *LIBRARY)
"""All rows of this module."""
