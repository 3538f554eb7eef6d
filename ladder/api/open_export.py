"""Export with open sizes: which axes of a call's tensors are left open, and what must hold between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from ladder.capture.values.shapes import LEAST_OPEN, OPEN_LIMIT, extent_path
from ladder.frontend.fx_nodes import extent_of
from ladder.runtime.model.whole import Limits
from tile_types.errors import LadderError, ShapeError, unknown_name

OpenAxes = Mapping[str, Sequence[int]]
"""Parameter -> the axes of its tensor whose extents are open."""

Paths = dict[str, tuple[torch.Tensor, int]]


def open_paths(
    axes: OpenAxes, arguments: Sequence[Any], named: Mapping[str, Any], names: Sequence[str]
) -> Paths:
    """Return the paths by which capture knows open extents, with tensor and axis.

    names: Of the parameters that ``arguments`` are for.
    Raises ShapeError, UnknownNameError if a parameter is no tensor, or has no such axis, or an example extent
        below 2 there.
    """
    given = {
        name: (f"args[{at}]", value) for at, (name, value) in enumerate(zip(names, arguments, strict=False))
    }
    given |= {name: (name, value) for name, value in named.items()}
    found: Paths = {}
    for name, dims in axes.items():
        if name not in given:
            raise unknown_name("parameter", name, given)
        path, value = given[name]
        if not isinstance(value, torch.Tensor):
            raise ShapeError(f"{name} is no tensor: only extents of tensors can be open")
        for dim in dims:
            if not 0 <= dim < value.ndim or value.shape[dim] < LEAST_OPEN:
                raise ShapeError(
                    f"axis {dim} of {name} {list(value.shape)} cannot be open: give an example with an axis"
                    f" {dim} of {LEAST_OPEN} or more elements"
                )
            found[extent_path(path, dim)] = value, dim
    return found


def require_open(wanted: Paths, captured: Any, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> None:
    """Raise ShapeError unless all extents stayed open."""
    opened = graph.meta.get("open", examples)
    known = {id(value): fake for value, fake in zip(examples, opened, strict=True)}
    for path, (tensor, dim) in wanted.items():
        extent: Any = known[id(tensor)].shape[dim] if id(tensor) in known else None
        if extent is None or (isinstance(extent, torch.SymInt) and extent.node.expr.free_symbols):
            continue
        checks = (check.why for record in captured.records for check in record.checks)
        reasons = [why for why in checks if why.startswith(f"{path} ==")]
        also = "; ".join(reasons) or f"another size that is not open makes it {tensor.shape[dim]}"
        raise ShapeError(f"{path} cannot be open: {also}")


def decide(captured: Any, graph: torch.fx.GraphModule) -> None:
    """Let torch's symbols note what the program decided by its sizes: ``if x.shape[0] > 5`` is such a guard.

    Raises ShapeError if the program asks something else of its sizes.
    """
    places = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    fakes = dict(zip(places, graph.meta.get("open", ()), strict=False))
    (record,) = captured.records
    known: dict[str, Any] = {}
    for check in record.checks:
        names = set(_NAME.findall(check.text))
        extent = _EXTENT.fullmatch(check.text)
        if check.binds is not None and extent and extent[1] in fakes:
            known[check.binds] = fakes[extent[1]].shape[int(extent[2])]
        elif names & known.keys() and check.binds is not None:
            known[check.binds] = eval(check.text, {**record.run.__globals__, **known})  # capture's own text
        elif names & known.keys() and check.text != check.why:
            values = [known[name] for name in sorted(names & known.keys())]
            if not all(isinstance(value, torch.SymBool | bool) for value in values):
                raise ShapeError(f"a file cannot hold what the model asks of its sizes: {check.why}")
            for value in values:
                bool(value)  # becomes a guard of the symbols


_NAME = re.compile(r"[A-Za-z_]\w*")
_EXTENT = re.compile(r"(\w+)\.shape\[(\d+)\]")


def limits_of(graph: torch.fx.GraphModule) -> Limits:
    """Return what must hold between open sizes, as pairs (extent, at most).

    Raises ShapeError if something else must hold; the message says what.
    """
    fakes = [value for value in graph.meta.get("open", ()) if isinstance(value, torch._subclasses.FakeTensor)]
    opened = [value for value in fakes if any(isinstance(size, torch.SymInt) for size in value.shape)]
    if not opened:
        return ()
    env = opened[0].fake_mode.shape_env
    assert env is not None  # that is what symbols belong to
    sizes: list[Any] = [size for value in opened for size in value.shape]
    symbols = {s for size in sizes if isinstance(size, torch.SymInt) for s in size.node.expr.free_symbols}
    found: list[tuple[Any, Any]] = []
    for symbol in sorted(map(str, symbols)):
        found += [(LEAST_OPEN, symbol), (symbol, OPEN_LIMIT - 1)]
    for guard in env.guards:
        found += _pairs(env.replace(guard.expr))
    return tuple(dict.fromkeys(found))


def _pairs(relation: Any) -> Iterator[tuple[Any, Any]]:
    """Return a relation of integers as pairs (extent, at most)."""
    import sympy  # type: ignore[import-untyped, unused-ignore]

    if relation in (True, sympy.true):
        return
    kinds = {sympy.Le: (0, 0), sympy.Lt: (0, 1), sympy.Ge: (1, 0), sympy.Gt: (1, 1), sympy.Eq: (0, 0)}
    if type(relation) not in kinds:
        raise ShapeError(f"a file cannot hold what the model needs of its sizes: {relation}")
    turned, step = kinds[type(relation)]
    left, right = (relation.rhs, relation.lhs) if turned else (relation.lhs, relation.rhs)
    try:
        low, high = extent_of(left + step), extent_of(right)
    except LadderError as error:
        raise ShapeError(f"a file cannot hold what the model needs of its sizes: {relation}") from error
    yield low, high
    if type(relation) is sympy.Eq:
        yield high, low
