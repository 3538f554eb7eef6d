"""Sizes that an ONNX file names, where shapes of its inputs fix them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ladder.frontend.importer import identifier
from ladder.frontend.onnx_check import graphs_of
from ladder.ir.extents import canonical, is_size_name, product, quotient, size_names
from ladder.runtime.model.program import ImportRefused
from tile_types.errors import ShapeError, unknown_name
from tile_types.tile import Extent

Shapes = Mapping[str, Sequence[int]]
"""Input -> its shape."""


INVENTED = "unk__"
"""How the standard's rules begin the names of sizes that they know nothing of."""


def stated(graph: Any) -> Iterator[Any]:
    """Yield what a graph states of values."""
    yield from (*graph.input, *graph.value_info, *graph.output)


def _dims(infos: Iterator[Any]) -> Iterator[Any]:
    return (dim for info in infos for dim in info.type.tensor_type.shape.dim if dim.dim_param)


def own_names(model: Any) -> dict[str, str]:
    """Return names of sizes that a file has and that extents cannot have -> names instead of them.

    The standard allows any text. One that reads as arithmetic is that if inputs show each size in it.
    """
    shown = {dim.dim_param for dim in _dims(iter(model.graph.input)) if is_size_name(dim.dim_param)}
    inputs = [dim.dim_param for dim in _dims(iter(model.graph.input)) if not _follows(dim.dim_param, shown)]
    every = [dim.dim_param for dim in _dims(chain(*map(stated, graphs_of(model.graph))))]
    taken, found = {text for text in every if is_size_name(text)}, dict[str, str]()
    for text in dict.fromkeys((*inputs, *(text for text in every if not _follows(text, None)))):
        own = identifier(text).replace(INVENTED, "open_")
        while own in taken or not is_size_name(own):
            own += "_"
        found[text] = own
        taken.add(own)
    return found


def _follows(text: str, shown: set[str] | None) -> bool:
    """Tell whether a text is a size, or arithmetic of sizes, of those that are shown."""
    try:
        extent = canonical(text)
    except ShapeError:
        return False
    names = set(size_names((extent,)))
    return bool(names) and (shown is None or names <= shown) and INVENTED not in text


def give_names(model: Any) -> None:
    """Let sizes have names that extents can have."""
    names = own_names(model)
    for dim in _dims(chain(*map(stated, graphs_of(model.graph)))):
        dim.dim_param = names.get(dim.dim_param, dim.dim_param)


def fixed_sizes(inputs: Mapping[str, Any], shapes: Shapes) -> dict[str, int]:
    """Return size that a file names -> its extent, by shapes of inputs that are the same in every call.

    Raises ShapeError, UnknownNameError if there is no such input, or its type has no such shape.
    """
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        if name not in inputs:
            raise unknown_name("input", name, inputs)
        dims = inputs[name].tensor_type.shape.dim
        if len(dims) != len(shape) or not all(isinstance(extent, int) and extent >= 0 for extent in shape):
            raise ShapeError(f"input {name!r} has {len(dims)} axes, its shape is to be {tuple(shape)}")
        for dim, extent in zip(dims, shape, strict=True):
            stated = dim.dim_value if dim.HasField("dim_value") and dim.dim_value != -1 else None
            if found.setdefault(dim.dim_param, extent) != extent and dim.dim_param:
                raise ShapeError(f"the size {dim.dim_param!r} cannot be {found[dim.dim_param]} and {extent}")
            if stated not in (None, extent):
                raise ShapeError(f"input {name!r} has {stated} elements along an axis, not {extent}")
    found.pop("", None)
    return found


class SizeDecided(ImportRefused):
    """A size that a file leaves open can only be one number for a node: the import begins again with it."""

    def __init__(self, name: str, extent: int) -> None:
        super().__init__(f"the size {name!r} can only be {extent}")
        self.name, self.extent = name, extent


def require_as_many(shape: Sequence[Extent], target: Sequence[Extent]) -> None:
    """Raise SizeDecided if shapes have as many elements for one number in place of one size alone.

    Exporters write the sizes of an example where a model was traced: if ``[N, B, 576]`` is made
    ``[N, 1, 3, 192]``, ``B`` can only be 1.
    """
    counts, found = (product(shape), product(target)), dict[str, int]()
    for count, other in (counts, counts[::-1]) if counts[0] != counts[1] else ():
        for name in size_names((count,)):
            rest = quotient(count, name)
            extent = None if rest is None else quotient(other, rest)
            if isinstance(extent, int) and extent > 0:
                found[name] = extent
    if len(found) == 1:
        raise SizeDecided(*found.popitem())
