"""The operator table. To add an operator, add a row here; nothing else knows operator kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ladder.ir import arrange, finite_rows, numeric, scalars, shapes
from ladder.ir.extents import product
from ladder.ir.formulas import of_scalars
from ladder.ir.model_ops import MODEL_ROWS
from ladder.ir.operator import (
    AbstractExpression,
    Attribute,
    Attributes,
    Operator,
    Tiles,
    flops_per_element,
)
from tile_types.errors import unknown_name
from tile_types.tile import Extent, Tile

ACCUMULATOR_KINDS = tuple(numeric.ACCUMULATORS)
_AXES = Attribute("ints", ())
_ANY_TYPE = shapes.any_type


def _first(arguments: Any, tiles: Tiles, attributes: Attributes) -> AbstractExpression:
    """Rearrangements and conversions are transparent to abstract expressions (Mirage §4.3)."""
    expression: AbstractExpression = arguments[0]
    return expression


def _named(name: str) -> Callable[[Any, Tiles, Attributes], AbstractExpression]:
    return lambda arguments, tiles, attributes: (name, *arguments)


def _literal(arguments: Any, tiles: Tiles, attributes: Attributes) -> AbstractExpression:
    return ("const", attributes["value"])


def _projection(arguments: Any, tiles: Tiles, attributes: Attributes) -> AbstractExpression:
    return (attributes.get("field", "elements"), *arguments)


def _summed(extent: Extent, expression: AbstractExpression) -> AbstractExpression:
    return expression if extent == 1 else ("sum", extent, expression)


def _sum_of_products(arguments: Any, tiles: Tiles, attributes: Attributes) -> AbstractExpression:
    indexing, extents = shapes.index_extents(tiles, attributes)
    factors: AbstractExpression = arguments[0]
    for argument in arguments[1:]:
        factors = ("mul", factors, argument)
    return _summed(product(extents[name] for name in indexing.reduced), factors)


def _matmul_expression(arguments: Any, tiles: Tiles, attributes: Attributes) -> AbstractExpression:
    return _summed(tiles[0].shape[-1], ("mul", *arguments))


def _reduced(name: str) -> Callable[[Any, Tiles, Attributes], AbstractExpression]:
    def build(arguments: Any, tiles: Tiles, attributes: Attributes) -> AbstractExpression:
        extent = tiles[0].shape[attributes["axis"]]
        return arguments[0] if extent == 1 else (name, extent, arguments[0])

    return build


def _squared(arguments: Any, tiles: Tiles, attributes: Attributes) -> AbstractExpression:
    return ("mul", arguments[0], arguments[0])


def _reciprocal_root(arguments: Any, tiles: Tiles, attributes: Attributes) -> AbstractExpression:
    return ("div", ("const", 1.0), ("sqrt", arguments[0]))


def _negated(arguments: Any, tiles: Tiles, attributes: Attributes) -> AbstractExpression:
    return ("mul", ("const", -1.0), arguments[0])


def _difference(arguments: Any, tiles: Tiles, attributes: Attributes) -> AbstractExpression:
    return ("add", arguments[0], ("mul", ("const", -1.0), arguments[1]))


def _accumulated(arguments: Any, tiles: Tiles, attributes: Attributes) -> AbstractExpression:
    kind, extent = attributes["kind"], attributes["extent"]
    if kind in ("sum", "rescale"):
        return _summed(extent, arguments[0])
    return _shift(arguments, tiles, attributes) if kind == "max" else arguments[0]


def _shift(arguments: Any, tiles: Tiles, attributes: Attributes) -> AbstractExpression:
    """Take a maximum as 0: programs that are compared are equal whatever it is, so at 0 as well."""
    return ("const", 0.0)


_ACCUMULATOR_LAX = {"max": "maximum", "rescale": "exp"}


def _accumulate_lax(attributes: Attributes) -> str:
    return _ACCUMULATOR_LAX.get(attributes["kind"], "multilinear")


def _matmul_flops(tiles: Tiles, result: Tile, attributes: Attributes) -> Extent:
    return product([2, *result.shape, tiles[0].shape[-1]])


def _contract_flops(tiles: Tiles, result: Tile, attributes: Attributes) -> Extent:
    return shapes.contract_flops(tiles, attributes)


def _reduction_flops(tiles: Tiles, result: Tile, attributes: Attributes) -> Extent:
    return product(tiles[0].shape)


def _pointwise(
    name: str, reference: Any, field: Any, lower: Any, lax: str, operands: int, flops: int, **rest: Any
) -> Operator:
    return Operator(
        name,
        (operands, operands),
        shapes.same if operands == 1 else shapes.elementwise,
        numeric.pointwise(reference),
        field,
        rest.pop("abstract", _named(name)),
        lax,
        flops_per_element(flops),
        lower=lower,
        **rest,
    )


def _unary(name: str, reference: Any, field: Any, lower: Any, lax: str, flops: int, **rest: Any) -> Operator:
    return _pointwise(name, reference, field, lower, lax, 1, flops, **rest)


def _binary(name: str, reference: Any, field: Any, lower: Any, lax: str, **rest: Any) -> Operator:
    return _pointwise(name, reference, field, lower, lax, 2, 1, **rest)


def _move(name: str, shape: Any, function: Any, attributes: Mapping[str, Attribute], **rest: Any) -> Operator:
    return Operator(
        name,
        rest.pop("arity", (1, 1)),
        shape,
        function,
        rest.pop("finite", finite_rows.arranged(function)),
        rest.pop("abstract", _first),
        attributes=attributes,
        **rest,
    )


def _reduce(name: str, reference: Any, field: Any, lax: str, abstract: Any) -> Operator:
    return Operator(
        name,
        (1, 1),
        shapes.reduced,
        numeric.reduction(reference),
        field,
        abstract,
        lax,
        _reduction_flops,
        attributes={"axis": Attribute("int"), "keep": Attribute("flag", True), "type": _TYPE},
        doc="along axis; keep leaves it with extent 1",
    )


_TYPE = Attribute("type", None)
_EXTREME = "NaN if an operand is; of zeros of two signs, either"
_INDEXED = {"spec": Attribute("name"), "sizes": Attribute("sizes", ()), "pad": Attribute("flag", False)}
_BLOCK_ONLY = ("block",)

_SOURCES = (
    Operator(
        "input", (0, 0), shapes.given, arrange.identity, None, _first, role="input",
        doc="an operand of the graph; its tile is stated",
    ),
    Operator(
        "constant", (0, 0), shapes.given, numeric.constant, finite_rows.constant, _literal,
        attributes={
            "value": Attribute("number"), "shape": Attribute("extents", ()), "type": Attribute("type"),
        },
        result_type=shapes.target_type, engine="leaf", doc="one number in every element",
    ),
)  # fmt: skip

_CONVERSIONS = (
    Operator(
        "convert", (1, 1), shapes.same, numeric.convert, finite_rows.convert, _first,
        attributes={"type": Attribute("type"), "exact": Attribute("flag", False)},
        result_type=shapes.target_type, flops=flops_per_element(1),
        doc="decode, or change the type; where exact, kernels round there, else they may keep more",
    ),
    Operator(
        "encode", (1, 1), shapes.same, numeric.encode, None, _named("encode"), "other",
        attributes={"type": Attribute("type")}, result_type=shapes.target_type,
        flops=flops_per_element(1), doc="round to the nearest value of a type, saturating; NaN has no code",
    ),
    Operator(
        "elements", (1, 1), shapes.same, numeric.elements, finite_rows.elements, _projection,
        result_type=shapes.element_type, doc="codes of a quantized operand without its metadata",
    ),
    Operator(
        "metadata", (1, 1), shapes.metadata, numeric.metadata, finite_rows.metadata, _projection,
        attributes={"field": Attribute("name")}, result_type=shapes.metadata_type,
        doc="scale, zero or tensor_scale of a quantized operand",
    ),
)  # fmt: skip

_CONTRACTIONS = (
    Operator(
        "contract", (1, None), shapes.indexed, numeric.contract, finite_rows.contract, _sum_of_products,
        flops=_contract_flops, attributes={**_INDEXED, "type": _TYPE}, engine="product",
        doc="sum of products under an affine indexing such as 'm k, n k -> m n'",
    ),
    Operator(
        "matmul", (2, 2), shapes.matmul, numeric.matmul, finite_rows.matmul, _matmul_expression,
        flops=_matmul_flops, attributes={"transpose_b": Attribute("flag", False), "type": _TYPE},
        engine="product",
        doc="batched matrix product; the type is the accumulator's",
    ),
)  # fmt: skip

_ELEMENTWISE = (
    _binary("add", np.add, finite_rows.calls("add"), scalars.add, "multilinear"),
    _binary(
        "sub", np.subtract, finite_rows.calls("subtract"), scalars.subtract, "multilinear",
        abstract=_difference,
    ),
    _binary("mul", np.multiply, finite_rows.calls("multiply"), scalars.multiply, "multilinear"),
    _binary("div", np.divide, finite_rows.calls("divide"), scalars.divide, "division"),
    _binary("maximum", np.maximum, None, scalars.maximum, "other", doc=_EXTREME),
    _binary("minimum", np.minimum, None, scalars.minimum, "other", doc=_EXTREME),
    _unary(
        "neg", np.negative, finite_rows.calls("negate"), scalars.negate, "multilinear", 1, abstract=_negated,
    ),
    _unary(
        "square", np.square, finite_rows.square, scalars.square, "multilinear", 1, abstract=_squared,
    ),
    _unary("exp", np.exp, finite_rows.calls("exponential"), scalars.exp, "exp", 4),
    _unary("sqrt", np.sqrt, finite_rows.calls("root"), scalars.sqrt, "root", 4),
    _unary(
        "rsqrt", lambda x: 1 / np.sqrt(x), finite_rows.inverse_root, scalars.rsqrt, "root", 5,
        abstract=_reciprocal_root,
    ),
    _unary("sigmoid", numeric.sigmoid, finite_rows.sigmoid, of_scalars("sigmoid"), "exp", 7),
    _unary("silu", numeric.silu, finite_rows.silu, of_scalars("silu"), "exp", 8),
    _unary("tanh", np.tanh, finite_rows.tanh, of_scalars("tanh"), "exp", 8),
    _unary("relu", lambda x: np.maximum(x, 0), None, of_scalars("relu"), "other", 1, doc=_EXTREME),
    _unary("gelu", numeric.gelu, None, of_scalars("gelu"), "exp", 20),
    _unary("gelu_tanh", numeric.gelu_tanh, None, of_scalars("gelu_tanh"), "exp", 14),
)  # fmt: skip

_REDUCTIONS = (
    _reduce("reduce_sum", np.sum, finite_rows.reduce_sum, "multilinear", _reduced("sum")),
    _reduce("reduce_max", numeric.greatest, finite_rows.reduce_max, "maximum", _shift),
)

_SCANS = tuple(
    Operator(
        name, (1, 1), shapes.same, numeric.accumulation(accumulate, nothing), None, _named(name), "other",
        _reduction_flops, attributes={"axis": Attribute("int"), "exclusive": Attribute("flag", False)},
        doc="all elements up to each along axis, taken together; exclusive: all before each, of floats; on"
        " GPUs only",
    )
    for name, accumulate, nothing in (
        ("scan_sum", np.cumsum, 0.0), ("scan_max", np.maximum.accumulate, -np.inf),
        ("scan_product", np.cumprod, 1.0), ("scan_logsumexp", np.logaddexp.accumulate, -np.inf),
    )
)  # fmt: skip

_MOVES = (
    _move("broadcast", shapes.broadcast, arrange.broadcast, {"shape": Attribute("extents")}, engine="view"),
    _move("reshape", shapes.reshaped, arrange.reshape, {"shape": Attribute("extents")}, engine="view"),
    _move(
        "transpose", shapes.transposed, arrange.transpose, {"permutation": Attribute("ints")}, engine="view"
    ),
    _move(
        "restride", shapes.transposed, arrange.transpose, {"permutation": Attribute("ints")},
        engine="library", doc="a transpose of memory as it lies: rules leave it, to read or leave that order",
    ),
    _move(
        "concat", shapes.concatenated, arrange.concat, {"axis": Attribute("int")}, arity=(1, None),
        abstract=_named("concat"),
    ),
    _move(
        "repeat", shapes.repeated, arrange.repeat,
        {"axis": Attribute("int"), "times": Attribute("int"), "extent": Attribute("extent", None)},
        doc="each element times times along axis, cut to extent (groups of scales)",
    ),
    _move(
        "slice", shapes.sliced, arrange.slice_,
        {"begin": Attribute("extents"), "shape": Attribute("extents"), "step": Attribute("ints", ())},
        engine="view",
    ),
    _move(
        "map", shapes.indexed, numeric.view, _INDEXED, finite=finite_rows.view,
        doc="affine view: 'h+r -> h r'",
    ),
    _move(
        "pad", shapes.padded, arrange.pad,
        {"low": Attribute("extents"), "high": Attribute("extents"), "value": Attribute("number", 0.0)},
        finite=finite_rows.pad, abstract=_named("pad"),
    ),
)  # fmt: skip

_BLOCK_GRAPH = (
    _move(
        "load", shapes.loaded, arrange.load,
        {"shape": Attribute("extents"), "grid": _AXES, "loop": _AXES}, finite=finite_rows.load,
        result_type=_ANY_TYPE, role="load", levels=_BLOCK_ONLY,
        doc="input iterator: grid (imap) and loop (fmap) give the axis each dimension splits, -1 replicates",
    ),
    Operator(
        "accumulate", (1, 2), shapes.accumulated, numeric.accumulate, finite_rows.accumulate, _accumulated,
        _accumulate_lax, attributes={
            "kind": Attribute("name", "sum", ACCUMULATOR_KINDS), "axis": Attribute("int", 0),
        },
        flops=flops_per_element(1), result_type=shapes.accumulated_type, role="accumulate",
        levels=_BLOCK_ONLY,
        doc="loop accumulator; rescale takes (x, local maximum m) and sums x * exp(m - max m)",
    ),
    _move(
        "store", shapes.stored, arrange.store, {"shape": Attribute("extents"), "grid": _AXES},
        role="store", levels=_BLOCK_ONLY,
        doc="stores an output: grid (omap) gives the axis each dimension splits",
    ),
    Operator(
        "block", (1, None), shapes.given, arrange.identity, None, _first, role="graph", levels=("kernel",),
        doc="a block graph: what one thread block does",
    ),
)  # fmt: skip

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        row.name: row
        for rows in (
            *(_SOURCES, _CONVERSIONS, _CONTRACTIONS, _ELEMENTWISE, _REDUCTIONS, _SCANS, _MOVES),
            *(_BLOCK_GRAPH, MODEL_ROWS),
        )
        for row in rows
    }
)
"""Every operator by name."""


def get_operator(name: str) -> Operator:
    """Return a row of the table; raises UnknownNameError with the nearest names."""
    try:
        return OPERATORS[name]
    except KeyError:
        raise unknown_name("operator", name, OPERATORS) from None


def unary_operators() -> tuple[str, ...]:
    """Return the names that may stand in an epilogue."""
    return tuple(name for name, row in OPERATORS.items() if row.unary)
