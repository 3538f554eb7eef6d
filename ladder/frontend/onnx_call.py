"""One ONNX node with its operands, as the rows of the tables take it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx

from ladder import faults
from ladder.frontend.importer import Importer
from ladder.frontend.onnx_stages import Piece
from ladder.frontend.onnx_values import Known, type_name
from ladder.ir.extents import show_shape
from ladder.ir.gemm import Gemm
from ladder.runtime.model.program import ImportRefused
from ladder.runtime.onnx_ops.operation import Operation
from tile_types.errors import DTypeError
from tile_types.tile import Extent, Tile

Problem = Callable[..., Gemm]
"""``(n, k, weight type, activation type, **options)`` -> the product's normal form."""

Value = str | Known
"""A value of the tile graph by name, or one that is known at import."""


class Invalid(ImportRefused):
    """A node that the standard does not allow; no other way to run it is looked for."""


@dataclass(frozen=True)
class Call:
    """One node with its operands, as rows of the tables take it.

    piece: The plan that values are added to.
    given: Its attributes.
    inputs: Its operands; None for those left out.
    version: Of the operator's domain.
    problem: Gives the normal form of a product with a quantized weight.
    array: Returns a tensor of the file.
    """

    piece: Piece
    node: Any
    given: Mapping[str, Any]
    inputs: tuple[Value | None, ...]
    version: int
    problem: Problem
    array: Callable[[Any], Known]

    @property
    def im(self) -> Importer:
        return self.piece.im

    @property
    def operation(self) -> Operation:
        """The node as rows of torch take it, but for attributes that are tensors or graphs."""
        text = {name: value.decode() for name, value in self.given.items() if isinstance(value, bytes)}
        return Operation(self.node.op_type, self.version, {**self.given, **text})

    @property
    def out(self) -> str:
        """Type of the first operand, which most operators return."""
        return self.ttype(0)

    def refuse(self, why: str) -> ImportRefused:
        """Return the error that says why this node cannot be imported."""
        return ImportRefused(f"{title(self.node)}: {why}")

    def invalid(self, why: str) -> Invalid:
        """Return the error that says that no implementation could run this node."""
        return Invalid(f"{title(self.node)}: {why}")

    def has(self, at: int) -> bool:
        """Tell whether an operand is given."""
        return at < len(self.inputs) and self.inputs[at] is not None

    def known(self, at: int) -> Known | None:
        """Return an operand if it is known at import."""
        value = self.inputs[at] if self.has(at) else None
        return value if isinstance(value, Known) else None

    def is_computed(self, at: int) -> bool:
        """Tell whether an operand is given and not known at import."""
        return self.has(at) and self.known(at) is None

    def ttype(self, at: int) -> str:
        """Return the type's name of an operand."""
        value = self.inputs[at]
        if value is None:
            raise self.refuse(f"operand {at} is missing")
        return value.ttype if isinstance(value, Known) else self.im.ttype(value)

    def shape(self, at: int) -> tuple[Extent, ...]:
        value = self.inputs[at]
        if value is None:
            raise self.refuse(f"operand {at} is missing")
        return value.shape if isinstance(value, Known) else self.im.shape(value)

    def tensor(self, at: int) -> str:
        """Return an operand as a value of the graph."""
        value = self.inputs[at] if at < len(self.inputs) else None
        if value is None:
            raise self.refuse(f"operand {at} is missing")
        return self.piece.tensor(value)

    def optional(self, at: int) -> str | None:
        """Return an operand as a value of the graph, None if it is left out."""
        return self.tensor(at) if self.has(at) else None

    def operands(self) -> list[Any]:
        """Return all operands; known numbers that only stretch as Python numbers."""
        rank = max((len(self.shape(at)) for at in range(len(self.inputs)) if not self.known(at)), default=0)
        return [self._operand(at, rank) for at in range(len(self.inputs))]

    def _operand(self, at: int, rank: int) -> Any:
        known = self.known(at)
        stretches = known is not None and known.array.size == 1 and len(known.shape) <= rank
        return known.scalar() if known is not None and stretches else self.tensor(at)

    def number(self, at: int) -> Any:
        """Return a known number; None if the operand is left out."""
        known = self.known(at)
        if known is None and self.has(at):
            raise self.refuse(f"operand {at} ({self.node.input[at]!r}) must be known at import")
        return None if known is None else known.scalar()

    def extents(self, at: int) -> list[Extent]:
        """Return a shape, or other known integers."""
        known = self.known(at)
        if known is None:
            name = self.node.input[at] if at < len(self.node.input) else "left out"
            raise self.refuse(
                f"operand {at} ({name}) must be known at import: it depends on values of inputs"
            )
        return known.extents()

    def ints(self, at: int, attribute: str = "") -> list[int] | None:
        """Return known integers, from an operand or from an attribute; None if neither is given."""
        if attribute in self.given:
            return [int(value) for value in self.given[attribute]]
        if not self.has(at):
            return None
        found = self.extents(at)
        if not all(isinstance(value, int) for value in found):
            raise self.refuse(f"operand {at} must be numbers, got {found}")
        return [int(value) for value in found]

    def single(self, found: Any) -> Any:
        """Return the first of several results, where the model uses no other."""
        if any(self.node.output[1:]):
            raise self.refuse("only its first result is supported")
        return found[0] if isinstance(found, tuple) else found


Row = Callable[[Call], Any]
"""What a table holds: returns a value, a tuple of values, or None for a form that is not supported."""


def title(node: Any) -> str:
    """Return how messages name a node."""
    return (
        f"{node.op_type} {node.name!r}" if node.name else f"{node.op_type} that computes {node.output[0]!r}"
    )


def element_type(code: int, name: str) -> str:
    """Return our name of an ONNX element type."""
    try:
        return type_name(onnx.helper.tensor_dtype_to_np_dtype(code))
    except (KeyError, DTypeError) as error:
        stated = onnx.TensorProto.DataType.Name(code)
        raise ImportRefused(f"{name!r} has the type {stated}, which models of ours cannot have") from error


def check_stated(call: str, model: str, info: Any, tile: Tile) -> None:
    """Compare what a row gives for a value with what the file states of it; another shape is a warning.

    Raises DTypeError if the type is another.
    """
    kind, stated = info.type.tensor_type, list(tile.shape)
    ttype = element_type(kind.elem_type, info.name) if kind.elem_type else tile.ttype.name
    if kind.HasField("shape"):
        stated = [dim.dim_value if dim.HasField("dim_value") else "?" for dim in kind.shape.dim]
    if tile.ttype.name != ttype:
        raise DTypeError(f"{call} gives {tile.ttype}, the file states {ttype} for {info.name!r}")
    fits = len(stated) == len(tile.shape) and all(
        a == b or not isinstance(a, int) or not isinstance(b, int)
        for a, b in zip(stated, tile.shape, strict=True)
    )
    if not fits:
        faults.warn_once(
            f"{model} {info.name}",
            f"{model} states {show_shape(stated)} for {info.name!r}, {call} gives {show_shape(tile.shape)}:"
            " what it gives is taken",
        )
