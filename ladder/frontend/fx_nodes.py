"""Types, extents, strides and random draws of the nodes of an ATen graph."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping
from functools import reduce
from typing import Any

import torch
import torch._dispatch.python
import torch.fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ladder.frontend.joined import MOVES
from ladder.ir.build import GraphBuilder
from ladder.ir.extents import canonical
from ladder.partition.subgraphs import OURS
from ladder.runtime import operator as torch_operators  # noqa: F401  registers ladder::attention
from ladder.runtime.functional import hint_of
from ladder.runtime.model.program import ImportRefused
from ladder.runtime.model.sizes import NUMBER
from tile_types.arrays import torch_dtype
from tile_types.errors import DTypeError
from tile_types.tile import Extent

TYPES = {
    torch_dtype(name): name
    for name in (
        *("float32", "float16", "bfloat16", "float64", "fp8_e4m3", "fp8_e5m2"),
        *("int64", "int32", "int16", "uint16", "int8", "uint8", "bool"),
    )
}
"""torch's dtype -> name of the type, of tensors that rows take."""


CARRIED = {
    getattr(torch, name): name for name in ("uint32", "uint64", "complex32", "complex64", "complex128")
}
"""torch's dtype -> name of the type, of tensors that only calls of torch take."""


def first_result(node: torch.fx.Node) -> Any:
    """Return the first result of a node, without values."""
    value = node.meta["val"]
    return value[0] if isinstance(value, list | tuple) else value


def tensors_around(node: torch.fx.Node) -> list[torch.Tensor]:
    """Return what a node takes and gives of tensors, without values."""
    values = [node.meta.get("val"), *(other.meta.get("val") for other in node.all_input_nodes)]
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
    return [value for value in flat if isinstance(value, torch.Tensor)]


def is_open(node: torch.fx.Node) -> bool:
    """Tell whether sizes around a node are symbols."""
    sizes = (size for tensor in tensors_around(node) for size in tensor.shape)
    numbers = (other.meta.get("val") for other in node.all_input_nodes)
    return any(isinstance(size, torch.SymInt) for size in (*sizes, *numbers))


def used_results(node: torch.fx.Node) -> frozenset[int]:
    """Return which results of a node are used; an operator with one has result 0."""
    parts: set[Any] = {user.args[1] for user in node.users if user.target is operator.getitem}
    return frozenset(parts or {0})


STRIDED: tuple[Any, ...] = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")
)
"""Operators that read the memory of a tensor without regard to its axes."""


LAID_OUT = "ladder.laid_out.default"
RELAID = dict.fromkeys(("aten.view.default", "aten._unsafe_view.default"), "aten.reshape.default")
"""Views that depend on strides, which a plan may change -> the operator that copies where it has to."""

ASKING = tuple(
    f"aten.{name}" for name in ("view.dtype", "view_as_complex.default", "_scaled_mm", "_grouped_mm")
)
"""Prefixes of the names of operators that refuse operands of other strides than they need."""

KNOWN = ("aten.", *OURS, "_c10d_functional.")
"""Prefixes of the names of operators that take operands of any strides, but for those above."""


def depends_on_strides(node: torch.fx.Node) -> bool:
    """Tell whether the results of a call may depend on the strides of its operands.

    Random numbers are drawn in the order of memory, and operators of others may read memory as it was traced.
    """
    name = str(node.target)
    if name.startswith(OURS):
        return False
    return node.target in STRIDED or draws(node) or name.startswith(ASKING) or not name.startswith(KNOWN)


def may_turn(graph: GraphBuilder, value: str, strided: Container[str]) -> bool:
    """Tell whether rewriting may change the strides of a value, as it does for results of convolutions.

    strided: Inputs that are `out_of_order`; a value that equals such an input may have its strides.
    """
    waiting, met = [value], set()
    while waiting:
        node = graph.node(waiting.pop())
        if node.operator in ("contract", "transpose", "restride") or node.name in strided:
            return True
        if node.name not in met and not (node.operator == "matmul" and len(node.tile.shape) == 2):
            waiting += node.inputs
        met.add(node.name)
    return False


def out_of_order(inputs: Iterable[torch.fx.Node], names: Mapping[torch.fx.Node, str]) -> set[str]:
    """Return the names of the input tensors that are not contiguous."""
    found = ((one, one.meta.get("val")) for one in inputs)  # numbers have none
    return {
        names[one] for one, value in found if isinstance(value, torch.Tensor) and not value.is_contiguous()
    }


def shows_copy(node: torch.fx.Node) -> bool:
    """Tell whether a value is a copy with other strides: plans drop copies, and calls may rely on them."""
    while str(node.target) in MOVES or str(node.target) in ("aten.unsqueeze.default", "aten.squeeze.dim"):
        node = node.args[0]  # type: ignore[assignment]
    if str(node.target) != "aten.clone.default":
        return False
    before, after = (other.meta["val"].stride() for other in (node.args[0], node))  # type: ignore[union-attr]
    return [*map(str, before)] != [*map(str, after)]


def draws(node: torch.fx.Node) -> bool:
    """Tell whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_whole(value: torch.Tensor) -> bool:
    """Tell whether the elements of a tensor are all that is in its memory."""
    nbytes = value.numel() * value.element_size()
    dense = torch._prims_common.is_non_overlapping_and_dense_or_false(value)
    return bool(dense and not value.storage_offset() and value.untyped_storage().nbytes() == nbytes)


def stays_within(node: torch.fx.Node, value: torch.Tensor) -> bool:
    """Tell whether one of `STRIDED` reads only elements of a tensor without gaps, as examples have it.

    Where others need more, torch refuses to read them of a copy.
    """
    target, (_, sizes, steps, *offset) = str(node.target), node.args
    if target not in ("aten.as_strided.default", "aten.as_strided_copy.default") or offset or node.kwargs:
        return False
    extents, strides = ([_example(each) for each in numbers] for numbers in (sizes, steps))  # type: ignore[union-attr]
    last = sum((extent - 1) * step for extent, step in zip(extents, strides, strict=True))
    return value.is_contiguous() and (0 in extents or last < hint_of(value.numel()))


def _example(number: Any) -> int:
    return hint_of(number.meta["val"] if isinstance(number, torch.fx.Node) else number)


def stored_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Return the axes of a tensor as they lie in memory, the outermost first; None where that has gaps."""
    if value.is_contiguous():
        return tuple(range(value.ndim))
    if not torch._prims_common.is_non_overlapping_and_dense_or_false(value):
        return None
    return tuple(torch._prims_common.compute_elementwise_output_logical_to_physical_perm(value)[0])


def inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    """Return the permutation that takes another one back."""
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))


def type_and_shape(value: torch.Tensor | None) -> tuple[str, tuple[Extent, ...]]:
    """Return the name of a tensor's type, and its extents; for None, which nothing reads, of no elements.

    Raises DTypeError if tile graphs have no such type.
    """
    if value is None:
        return "uint8", (0,)
    name = TYPES.get(value.dtype) or CARRIED.get(value.dtype)
    if name is None or value.layout is not torch.strided:
        raise DTypeError(f"tile graphs have no type for {value.dtype}, {value.layout}")
    return name, tuple(size_of(size) for size in value.shape)


def sizes_shown(value: Any, at: int, number: int = NUMBER) -> dict[str, tuple[int, int]]:
    """Return the symbolic sizes that argument ``at`` shows -> (``at``, axis).

    value: The argument, or a number: itself, or read from it as ``number`` says; see `runtime.model.sizes`.
    """
    shown = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(number, value)]
    open_sizes = [(axis, str(size_of(size))) for axis, size in shown if isinstance(size, torch.SymInt)]
    return {name: (at, axis) for axis, name in reversed(open_sizes) if name.isidentifier()}


def size_of(size: Any) -> Extent:
    """Return a size as an extent; divisions are written as tile graphs write them."""
    if isinstance(size, int):
        return size
    if free_unbacked_symbols(size):
        raise ImportRefused(f"the size {size} depends on values")
    return extent_of(size.node.expr)


def extent_of(expression: Any) -> Extent:
    """Return an expression of sympy as an extent.

    Raises ImportRefused if it is no polynomial of sizes and `ladder.ir.extents.FUNCTIONS` of them.
    """
    import sympy  # type: ignore[import-untyped, unused-ignore]

    def text(part: Any) -> str:
        if isinstance(part, sympy.Integer | sympy.Symbol):
            return str(part)
        if isinstance(part, sympy.Add):
            return "(" + " + ".join(map(text, part.args)) + ")"
        if isinstance(part, sympy.Mul):
            return "*".join(map(text, part.args))
        if isinstance(part, sympy.Pow) and part.exp.is_Integer and part.exp > 0:
            return "*".join([text(part.base)] * int(part.exp))
        name, arguments = type(part).__name__, [text(argument) for argument in part.args]
        if name in ("FloorDiv", "CleanDiv"):
            return f"floordiv({', '.join(arguments)})"
        if name in ("Mod", "PythonMod"):
            return f"({arguments[0]} - {arguments[1]}*floordiv({', '.join(arguments)}))"
        if name in ("Max", "Min"):
            function = name.lower()
            return reduce(lambda found, argument: f"{function}({found}, {argument})", arguments)
        raise ImportRefused(f"the size {expression} is no polynomial of sizes")

    return canonical(text(expression))
