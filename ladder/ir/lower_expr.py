"""From tensor expressions to tile graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce as fold
from typing import Any

from ladder.ir.build import GraphBuilder
from ladder.ir.expr import (
    REDUCTIONS,
    Access,
    Apply,
    Compute,
    Constant,
    Convert,
    Reduce,
    Scalar,
    Source,
    input_tensors,
    walk,
)
from ladder.ir.extents import Shape
from ladder.ir.gemm import ACTIVATIONS
from ladder.ir.graph import Graph
from ladder.ir.indexing import Affine, Indexing
from ladder.ir.reference import evaluate as evaluate_graph
from tile_types.errors import ShapeError
from tile_types.library import get_type
from tile_types.tile import Extent
from tile_types.ttype import TType


def to_graph(result: Compute) -> Graph:
    """Return the kernel graph of a computation; its inputs are in order of first appearance.

    A sum over a product becomes one ``contract``; quantized operands are decoded to the type
    of the widest operand that is not (the core's type); what follows a reduction is computed
    in the accumulator's type.

    Raises ShapeError, DTypeError if indices leave their tensors (without ``pad``) or types do not fit.
    """
    builder = GraphBuilder(result.name)
    values: dict[Source, str] = {}
    for source in input_tensors(result):
        values[source] = builder.input(source.name, source.ttype, source.shape)
    output = _lower_compute(builder, result, values)
    return builder.finish(output)


def evaluate(program: Compute | Graph, inputs: Mapping[str, Any] | Sequence[Any]) -> Any:
    """Execute an expression or a graph in float64, see `ladder.ir.reference.evaluate`."""
    return evaluate_graph(to_graph(program) if isinstance(program, Compute) else program, inputs)


def _lower_compute(builder: GraphBuilder, result: Compute, values: dict[Source, str]) -> str:
    for part in walk(result.body):
        if isinstance(part, Access) and part.source not in values:
            assert isinstance(part.source, Compute)  # inputs were declared before
            values[part.source] = _lower_compute(builder, part.source, values)
    lowering = _Lowering(builder, result, values)
    element = lowering.lower(result.body)
    free = [name for name in element.axes if name not in result.axes]
    if free:
        raise ShapeError(
            f"{result.name!r}: index {free[0]!r} is neither summed over nor an axis of the result"
        )
    value = lowering.aligned(element, result.axes, exact=True)
    if builder.tile(value).ttype != result.ttype:
        value = builder.add("convert", value, type=result.ttype.name)
    return value


@dataclass(frozen=True)
class _Labelled:
    """A value whose axes are index variables."""

    value: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class _Factor:
    """A value read through affine indices: an operand of a contraction."""

    value: str
    indices: tuple[Affine, ...]


class _Lowering:
    """Lowers the body of one computation."""

    def __init__(self, builder: GraphBuilder, result: Compute, values: Mapping[Source, str]) -> None:
        self.builder = builder
        self.result = result
        self.values = values
        self.sizes = result.sizes
        self.outer = self.outer_type()

    def outer_type(self) -> str:
        """Return the arithmetic type outside of reductions."""
        body = self.result.body
        if isinstance(body, Reduce):
            return self.accumulator(body)
        if not any(isinstance(part, Reduce) for part in walk(body)):
            return core_type(body)
        given = self.result.accumulator
        return given if given is not None and not get_type(given).is_integer else "float32"

    def accumulator(self, value: Reduce) -> str:
        """Return the type of a running sum: as given, else int32 for integers and float32."""
        return self.result.accumulator or ("int32" if _is_integer(value.argument) else "float32")

    def lower(self, value: Scalar, ttype: str | None = None) -> _Labelled:
        """Lower an expression to a value in arithmetic type ``ttype``."""
        wanted = ttype or self.outer
        if isinstance(value, Constant):
            return _Labelled(self.builder.add("constant", value=value.value, type=wanted), ())
        if isinstance(value, Access):
            return self.as_type(self.viewed(_Factor(self.values[value.source], value.indices)), wanted)
        if isinstance(value, Convert):
            inner = value.ttype if isinstance(value.argument, Access) else wanted
            return self.as_type(self.as_type(self.lower(value.argument, inner), value.ttype), wanted)
        if isinstance(value, Reduce):
            return self.as_type(self.reduced(value), wanted)
        assert isinstance(value, Apply)  # the remaining kind
        return self.applied(value, wanted)

    def as_type(self, labelled: _Labelled, ttype: str) -> _Labelled:
        if self.builder.tile(labelled.value).ttype.name == ttype:
            return labelled
        return _Labelled(self.builder.add("convert", labelled.value, type=ttype), labelled.axes)

    def viewed(self, factor: _Factor) -> _Labelled:
        """Turn an affine access into a value labelled by distinct indices."""
        self.check_range(factor)
        plain = [axis.index for axis in factor.indices]
        names = tuple(dict.fromkeys(name for axis in factor.indices for name in axis.names))
        if plain == list(names) and self.whole(factor, names):
            return _Labelled(factor.value, names)
        return _Labelled(self.indexed("map", [factor], names), names)

    def whole(self, factor: _Factor, names: Sequence[str]) -> bool:
        return tuple(self.sizes[name] for name in names) == self.builder.tile(factor.value).shape

    def check_range(self, factor: _Factor) -> None:
        for name in (name for axis in factor.indices for name in axis.names):
            if name not in self.sizes:
                raise ShapeError(f"index {name!r} belongs to another expression")

    def indexed(self, operator: str, factors: Sequence[_Factor], result: Sequence[str], **rest: Any) -> str:
        """Add a contract or map; sizes are given only where the operands do not tell them."""
        operands = tuple(factor.indices for factor in factors)
        indexing = Indexing(operands, tuple(result))
        alone = {
            axis.index: extent
            for factor in factors
            for axis, extent in zip(factor.indices, self.builder.tile(factor.value).shape, strict=True)
        }
        unsure = [name for name in indexing.names if alone.get(name) != self.sizes[name]]
        sizes = tuple((name, self.sizes[name]) for name in unsure)
        values = [factor.value for factor in factors]
        return self.builder.add(
            operator, *values, spec=str(indexing), sizes=sizes, pad=self.result.pad, **rest
        )

    def applied(self, value: Apply, wanted: str) -> _Labelled:
        parts = [self.lower(argument, wanted) for argument in value.arguments]
        axes = self.ordered({name for part in parts for name in part.axes})
        operands = [self.aligned(part, axes) for part in parts]
        return _Labelled(self.builder.add(value.operator, *operands), axes)

    def ordered(self, names: set[str]) -> tuple[str, ...]:
        return tuple(name for name in self.sizes if name in names)

    def aligned(self, part: _Labelled, axes: Sequence[str], exact: bool = False) -> str:
        """Bring axes into order; axes it lacks get extent 1 (or are stretched if ``exact``)."""
        value = part.value
        order = [part.axes.index(name) for name in axes if name in part.axes]
        if order != sorted(order):
            value = self.builder.add("transpose", value, permutation=tuple(order))
        if not part.axes and not exact:
            return value
        lacking = [name for name in axes if name not in part.axes]
        if lacking and list(axes[: len(lacking)]) != lacking:
            shape: Shape = tuple(self.sizes[name] if name in part.axes else 1 for name in axes)
            value = self.builder.add("reshape", value, shape=shape)
        if lacking and exact:
            full: tuple[Extent, ...] = tuple(self.sizes[name] for name in axes)
            value = self.builder.add("broadcast", value, shape=full)
        return value

    def reduced(self, value: Reduce) -> _Labelled:
        factors = _factors(value.argument)
        if value.kind == "sum" and factors is not None:
            return self.contracted(value, factors)
        inner = self.lower(value.argument, self.accumulator(value))
        labels, current = inner.axes, inner.value
        for name in value.axes:
            if name not in labels:
                raise ShapeError(f"the reduction over {name!r} does not depend on it")
            current = self.builder.add(REDUCTIONS[value.kind], current, axis=labels.index(name), keep=False)
            labels = tuple(label for label in labels if label != name)
        return _Labelled(current, labels)

    def contracted(self, value: Reduce, parts: Sequence[Scalar]) -> _Labelled:
        core = core_type(value.argument)
        factors = [self.factor(part, core) for part in parts]
        names = {name for factor in factors for axis in factor.indices for name in axis.names}
        missing = [name for name in value.axes if name not in names]
        if missing:
            raise ShapeError(f"the sum over {missing[0]!r} does not depend on it")
        result = self.ordered(names - set(value.axes))
        contraction = self.indexed("contract", factors, result, type=self.accumulator(value))
        return _Labelled(contraction, result)

    def factor(self, part: Scalar, core: str) -> _Factor:
        """Lower one operand of a contraction; a plain access keeps its affine indices."""
        if isinstance(part, Access):
            self.check_range(_Factor("", part.indices))
            decoded = self.as_type(_Labelled(self.values[part.source], ()), core)
            return _Factor(decoded.value, part.indices)
        if isinstance(part, Convert) and isinstance(part.argument, Access):
            decoded = self.as_type(_Labelled(self.values[part.argument.source], ()), part.ttype)
            return _Factor(decoded.value, part.argument.indices)
        lowered = self.lower(part, core)
        return _Factor(lowered.value, tuple(Affine(((name, 1),)) for name in lowered.axes))


def _factors(value: Scalar) -> list[Scalar] | None:
    """Return the factors of a product of at least one tensor, or None."""
    if isinstance(value, Apply) and value.operator == "mul":
        parts = [_factors(argument) or [argument] for argument in value.arguments]
        return [factor for part in parts for factor in part]
    return [value] if isinstance(value, Access | Convert) else None


def core_type(body: Scalar) -> str:
    """Return the type that operands meet in: an activation type, floats first, then the widest.

    Quantized blocks are decoded to it.
    """
    types = [part.source.ttype for part in walk(body) if isinstance(part, Access)]
    plain = [ttype for ttype in types if not ttype.is_block]
    if not plain:
        return "float32"
    return fold(lambda a, b: b if _rank(b) > _rank(a) else a, plain).name


def _rank(ttype: TType) -> tuple[bool, bool, int]:
    return (ttype.name in ACTIVATIONS, not ttype.is_integer, ttype.elem_bits)


def _is_integer(body: Scalar) -> bool:
    types = [part.source.ttype for part in walk(body) if isinstance(part, Access)]
    return bool(types) and all(not ttype.is_block and ttype.is_integer for ttype in types)
