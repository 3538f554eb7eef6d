"""tType-annotated tensor expressions: index lambdas with input, accumulator and output types.

>>> A = tensor("A", ("M", 4096), "float16")
>>> B = tensor("B", (4096, 4096), "nf4", group_size=64)
>>> C = compute(("M", 4096), lambda m, n, k: A[m, k] * B[n, k], reduce={"k": 4096}, output="float16")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ladder.ir.extents import Shape, canonical, show_shape
from ladder.ir.indexing import Affine
from ladder.ir.ops import OPERATORS, get_operator
from tile_types.errors import (
    DTypeError,
    ShapeError,
    require_callable,
    require_kind,
    sequence_of,
    whole_number,
)
from tile_types.library import get_type, group_scaled
from tile_types.tile import Extent
from tile_types.ttype import TType


class Scalar:
    """A scalar expression over indices: the body of a `compute`. Combine with ``+ - * /``."""

    def __add__(self, other: ScalarLike) -> Scalar:
        return Apply("add", (self, scalar(other)))

    def __radd__(self, other: ScalarLike) -> Scalar:
        return Apply("add", (scalar(other), self))

    def __sub__(self, other: ScalarLike) -> Scalar:
        return Apply("sub", (self, scalar(other)))

    def __rsub__(self, other: ScalarLike) -> Scalar:
        return Apply("sub", (scalar(other), self))

    def __mul__(self, other: ScalarLike) -> Scalar:
        return Apply("mul", (self, scalar(other)))

    def __rmul__(self, other: ScalarLike) -> Scalar:
        return Apply("mul", (scalar(other), self))

    def __truediv__(self, other: ScalarLike) -> Scalar:
        return Apply("div", (self, scalar(other)))

    def __rtruediv__(self, other: ScalarLike) -> Scalar:
        return Apply("div", (scalar(other), self))

    def __neg__(self) -> Scalar:
        return Apply("neg", (self,))


@dataclass(frozen=True, eq=False)
class Constant(Scalar):
    """A number."""

    value: float


@dataclass(frozen=True, eq=False)
class Access(Scalar):
    """One element of a tensor or of a computed tensor."""

    source: Source
    indices: tuple[Affine, ...]


@dataclass(frozen=True, eq=False)
class Apply(Scalar):
    """An element-wise row of the operator table."""

    operator: str
    arguments: tuple[Scalar, ...]


@dataclass(frozen=True, eq=False)
class Convert(Scalar):
    """Conversion (decode) to a type by name."""

    argument: Scalar
    ttype: str


@dataclass(frozen=True, eq=False)
class Reduce(Scalar):
    """Sum or maximum over indices."""

    kind: str
    argument: Scalar
    axes: tuple[str, ...]


ScalarLike = Scalar | float | int
REDUCTIONS = {"sum": "reduce_sum", "max": "reduce_max"}
"""Kind of `Reduce` -> operator."""


def scalar(value: ScalarLike) -> Scalar:
    """Return a scalar expression; numbers become constants."""
    if isinstance(value, Scalar):
        return value
    if isinstance(value, int | float):
        return Constant(float(value))
    raise DTypeError(f"an expression is built from tensors, indices in [] and numbers, got {value!r}")


@dataclass(frozen=True)
class Index:
    """An index variable; combine with integers and other indices by ``+ - *``."""

    affine: Affine

    def __add__(self, other: Index | int) -> Index:
        return Index(self.affine.plus(_affine(other)))

    __radd__ = __add__

    def __sub__(self, other: Index | int) -> Index:
        return Index(self.affine.plus(_affine(other), -1))

    def __rsub__(self, other: int) -> Index:
        return Index(_affine(other).plus(self.affine, -1))

    def __mul__(self, factor: int) -> Index:
        if not isinstance(factor, int):
            raise ShapeError(f"indices are affine: multiply by an integer, not by {factor!r}")
        return Index(self.affine.times(factor))

    __rmul__ = __mul__


def _affine(value: Index | int) -> Affine:
    if isinstance(value, Index):
        return value.affine
    if isinstance(value, int):
        return Affine((), value)
    raise ShapeError(f"an index is affine in index variables, got {value!r}")


@dataclass(frozen=True, eq=False)
class Source:
    """A value that can be indexed: an input tensor or a computed one."""

    name: str
    shape: Shape
    ttype: TType

    def __getitem__(self, indices: Index | int | tuple[Index | int, ...]) -> Access:
        """Return one element; raises ShapeError on a wrong number of indices."""
        given = indices if isinstance(indices, tuple) else (indices,)
        if len(given) != len(self.shape):
            raise ShapeError(
                f"tensor {self.name!r} has shape {show_shape(self.shape)}, got {len(given)} indices"
            )
        return Access(self, tuple(_affine(index) for index in given))


@dataclass(frozen=True, eq=False)
class Tensor(Source):
    """An input."""


@dataclass(frozen=True, eq=False)
class Compute(Source):
    """A computed tensor.

    axes: Names of the result's indices.
    reduce: Index name -> extent of what is summed over.
    body: The value of one element.
    accumulator: Type of running sums, or None: int32 for integers, else float32.
    pad: Whether reads outside a tensor give zero.
    """

    axes: tuple[str, ...]
    reduce: Mapping[str, Extent]
    body: Scalar
    accumulator: str | None
    pad: bool

    @property
    def sizes(self) -> dict[str, Extent]:
        """Extent of every index."""
        return {**dict(zip(self.axes, self.shape, strict=True)), **self.reduce}


def _extents(shape: object) -> tuple[Extent, ...]:
    """Return extents in their canonical form."""
    kinds = "a shape is a list or tuple of whole numbers and names"
    return tuple(canonical(extent) for extent in sequence_of((int, str), shape, kinds))


def tensor(
    name: str,
    shape: Sequence[Extent],
    ttype: str | TType,
    *,
    group_size: int | None = None,
    zero: str | None = None,
    scale: str = "float16",
) -> Tensor:
    """Declare an input tensor.

    Parameters
    ----------
    name
        An identifier.
    shape
        Extents; a string is a size known at run time.
    ttype
        Any type of the library, by name.
    group_size
        Elements along the last axis that share a scale; -1 for one scale per row. None: no scale.
    zero
        ``"none"``, ``"integer"`` or ``"float"`` zero points per group.
    scale
        Type of the scales.

    Raises
    ------
    UnknownNameError, ConversionError, ShapeError
        From `tile_types.group_scaled`, or if a group size is needed and absent.
    """
    require_kind(name, str, "the name of a tensor is a text")
    extents = _extents(shape)
    found = get_type(ttype)
    if group_size is None:
        if (zero or "none") != "none":
            raise ShapeError(f"tensor {name!r}: zero points need group_size (-1 for one per row)")
        return Tensor(name, extents, found)
    width = whole_number(group_size, f"tensor {name!r}: group_size")
    size = extents[-1] if width == -1 else width
    if not isinstance(size, int):
        raise ShapeError(f"tensor {name!r}: group_size=-1 needs a known last extent, it is {size!r}")
    return Tensor(name, extents, group_scaled(found.name, size, scale=scale, zero=zero))


def compute(
    shape: Sequence[Extent],
    body: Callable[..., ScalarLike],
    *,
    reduce: Mapping[str, Extent] | None = None,
    accumulator: str | None = None,
    output: str = "float16",
    name: str = "C",
    pad: bool = False,
) -> Compute:
    """Define a tensor by the value of one element.

    Parameters
    ----------
    shape
        Extents of the result.
    body
        Takes one `Index` per axis, then one per reduced index (matched by name), and returns a
        scalar expression. If it does not sum itself (`sum_`, `max_`), all of it is summed over
        the reduced indices.
    reduce
        Index name -> extent.
    accumulator
        Type of running sums.
    output
        Element type of the result.
    pad
        Read zeros outside of tensors (convolution with padding).

    Raises
    ------
    ShapeError
        If the arguments of ``body`` do not fit ``shape`` and ``reduce``.
    """
    require_callable(body, "the body of a computation is a function of its indices")
    extents = _extents(shape)
    require_kind(reduce, (Mapping, type(None)), "reduce is a dict from names of indices to extents")
    reduced = {key: canonical(extent) for key, extent in (reduce or {}).items()}
    axes = _axis_names(body, len(extents), reduced)
    indices = {key: Index(Affine(((key, 1),))) for key in (*axes, *reduced)}
    value = scalar(body(**indices))
    if reduced and not any(isinstance(part, Reduce) for part in walk(value)):
        value = Reduce("sum", value, tuple(reduced))
    return Compute(name, extents, get_type(output), axes, reduced, value, accumulator, pad)


def _axis_names(body: Callable[..., Any], rank: int, reduced: Mapping[str, Extent]) -> tuple[str, ...]:
    names = tuple(inspect.signature(body).parameters)
    axes = tuple(name for name in names if name not in reduced)
    missing = [name for name in reduced if name not in names]
    if missing or len(axes) != rank:
        raise ShapeError(
            f"the body takes ({', '.join(names)}); it must take {rank} indices for the result"
            f" and {', '.join(reduced) or 'none'} for the reduction"
        )
    return axes


def sum_(value: ScalarLike, *axes: Index) -> Scalar:
    """Sum over indices of the reduction."""
    return Reduce("sum", scalar(value), _axis_list(axes))


def max_(value: ScalarLike, *axes: Index) -> Scalar:
    """Return the maximum over indices of the reduction."""
    return Reduce("max", scalar(value), _axis_list(axes))


def _axis_list(axes: Sequence[Index]) -> tuple[str, ...]:
    names = [axis.affine.index for axis in axes]
    if not names or None in names:
        raise ShapeError("a reduction names its index variables, e.g. sum_(A[m, k] * B[n, k], k)")
    return tuple(name for name in names if name is not None)


def convert(value: ScalarLike, ttype: str) -> Scalar:
    """Decode or convert to a type."""
    return Convert(scalar(value), get_type(ttype).name)


def apply(operator: str, *arguments: ScalarLike) -> Scalar:
    """Apply an element-wise operator by name, e.g. ``apply("silu", x)``.

    Raises UnknownNameError if there is no such operator.
    Raises DTypeError if it is not element-wise.
    """
    row = get_operator(operator)
    if not row.elementwise:
        raise DTypeError(f"{operator} is not element-wise and cannot stand in an index lambda")
    row.check_arity(len(arguments))
    return Apply(operator, tuple(scalar(argument) for argument in arguments))


def __getattr__(name: str) -> Callable[..., Scalar]:
    """Return an element-wise operator as a function: ``from ladder.ir.expr import silu``."""
    row = OPERATORS.get(name)
    if row is None or not row.elementwise:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda *arguments: apply(name, *arguments)


def walk(value: Scalar) -> Iterator[Scalar]:
    """Yield an expression and its parts, outermost first."""
    yield value
    for part in children(value):
        yield from walk(part)


def children(value: Scalar) -> tuple[Scalar, ...]:
    """Return the direct parts of an expression."""
    if isinstance(value, Apply):
        return value.arguments
    return (value.argument,) if isinstance(value, Convert | Reduce) else ()


def sources(result: Compute) -> tuple[Source, ...]:
    """Return the tensors a computation reads directly, by first appearance."""
    found = {part.source: None for part in walk(result.body) if isinstance(part, Access)}
    return tuple(found)


def input_tensors(result: Compute) -> tuple[Tensor, ...]:
    """Return all input tensors, through computed ones, by first appearance."""
    found: dict[Tensor, None] = {}
    for source in sources(result):
        found.update(
            {source: None} if isinstance(source, Tensor) else dict.fromkeys(input_tensors(_computed(source)))
        )
    return tuple(found)


def _computed(source: Source) -> Compute:
    assert isinstance(source, Compute)  # the only other kind of source
    return source
