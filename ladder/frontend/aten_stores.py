"""Writes into slices of an argument: one operator that writes there, where nothing reads the old argument.

Functional graphs hold ``cache[:batch, at : at + n] = x`` as a nest, ``slice_scatter(cache,
slice_scatter(slice(cache, ...), x, ...), ...)``: each makes a new tensor, and the argument takes the last.
Where nothing else reads the argument, the nest becomes the functional form of ``ladder::store``, which plans
let write the argument itself.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

from ladder.runtime.functional import functional_form
from ladder.runtime.stores import SELECTED, SLICED, STORE, TO_THE_END

_VIEWS = {torch.ops.aten.slice.Tensor: SLICED, torch.ops.aten.select.int: SELECTED}
_SCATTERS = {torch.ops.aten.slice_scatter.default: SLICED, torch.ops.aten.select_scatter.default: SELECTED}
_COPY, _COPY_ = torch.ops.aten.copy.default, torch.ops.aten.copy_.default

_SHAPED = (_COPY, torch.ops.aten.full_like.default)
"""Operators whose results do not depend on the elements of their first operand."""


class _Write(NamedTuple):
    """One part that is written, where in the argument, and the nodes of the nest that stand for it."""

    part: torch.fx.Node
    bounds: tuple[Any, ...]
    nest: tuple[torch.fx.Node, ...]


def with_stores(traced: torch.fx.GraphModule) -> bool:
    """Make of each nest that an argument takes one operator; return whether there is one.

    What is left of the nests in the graph has no users.
    """
    found = False
    for update in [node for node in traced.graph.nodes if node.target is _COPY_]:
        base, value = update.args[:2]
        if value.target is _COPY and value.args[0] is base and _is_like(value.args[1], value):
            value = value.args[1]
        if base.op == "placeholder" and isinstance(value, torch.fx.Node):
            writes = _writes(value, base)
            if writes and base.meta["val"].is_contiguous() and _is_alone(base, update, writes):
                _replace(traced.graph, base, value, writes)
                found = True
    return found


def _replace(graph: torch.fx.Graph, base: torch.fx.Node, value: torch.fx.Node, writes: list[_Write]) -> None:
    """Let the operator give the value of a nest."""
    held = base.meta["val"]
    whole = [0, 0, 0, held.dim(), *held.shape, *held.stride(), 0]
    bounds = [number for write in writes for number in write.bounds]
    with graph.inserting_before(value):
        given: Any = ([base], whole, [], None, [write.part for write in writes], bounds)
        made = graph.call_function(functional_form(STORE), given)
        made.meta["val"] = [value.meta["val"]]
        taken = graph.call_function(operator.getitem, (made, 0))
        taken.meta["val"] = value.meta["val"]
    value.replace_all_uses_with(taken)


def _writes(value: torch.fx.Node, base: torch.fx.Node) -> list[_Write] | None:
    """Return what nests write into an argument one after the other; None if a value is no such nest."""
    found: list[_Write] = []
    while value is not base:
        if value.target not in _SCATTERS:
            return None
        found.insert(0, _write(value, base.meta["val"]))
        value = value.args[0]  # type: ignore[assignment]
    return found


def _write(value: torch.fx.Node, held: torch.Tensor) -> _Write:
    """Return what one nest writes: it ends where a part is no nest in the same slice of the same tensor."""
    nest, bounds = [value], [_bounds(value, 2)]
    while True:
        below, part = nest[-1].args[:2]
        if part.target not in _SCATTERS or not _is_view(part.args[0], below, nest[-1]):  # type: ignore
            break
        nest.append(part)  # type: ignore[arg-type]
        bounds.append(_bounds(part, 2))  # type: ignore[arg-type]
    if part.target is _COPY and _lies_beside(part.args[1], held):  # type: ignore[union-attr]
        part = part.args[1]  # type: ignore[union-attr]
    return _Write(part, (len(bounds), *(number for one in bounds for number in one)), tuple(nest))  # type: ignore


def _lies_beside(value: Any, held: torch.Tensor) -> bool:
    """Tell whether a value is a tensor of the argument's device."""
    return isinstance(value, torch.fx.Node) and value.meta["val"].device == held.device


def _is_like(one: Any, other: torch.fx.Node) -> bool:
    """Tell whether a value is a tensor of another one's shape and type."""
    given: Any = one.meta["val"] if isinstance(one, torch.fx.Node) else None
    held = other.meta["val"]
    return isinstance(given, torch.Tensor) and given.dtype is held.dtype and given.shape == held.shape


def _is_view(view: Any, below: Any, scatter: torch.fx.Node) -> bool:
    """Tell whether a node shows the part of a tensor that a scatter replaces."""
    if view.target not in _VIEWS or view.args[0] is not below:
        return False
    one, other = _bounds(view, 1), _bounds(scatter, 2)
    return [*map(_number, one)] == [*map(_number, other)]


def _bounds(node: torch.fx.Node, first: int) -> tuple[Any, ...]:
    """Return kind, axis, begin, end and step of a view, or a scatter: they follow `first` operands."""
    given = dict(zip(("dim", "start", "end", "step"), node.args[first:], strict=False)) | node.kwargs
    if (_VIEWS | _SCATTERS)[node.target] == SELECTED:  # type: ignore[index]
        return SELECTED, given["dim"], given.get("index", given.get("start")), 0, 1
    begin, end = given.get("start"), given.get("end")
    whole = TO_THE_END if end is None else end
    return SLICED, given.get("dim", 0), 0 if begin is None else begin, whole, given.get("step", 1)


def _number(value: Any) -> Any:
    """Return a bound as what compares: a number, or the expression of an open one."""
    found = value.meta["val"] if isinstance(value, torch.fx.Node) else value
    return str(found.node.expr) if isinstance(found, torch.SymInt) else found


def _is_alone(base: torch.fx.Node, update: torch.fx.Node, writes: list[_Write]) -> bool:
    """Tell whether nothing but nests reads what they replace: the argument, and all but the last result."""
    nest = {node for write in writes for node in write.nest}
    outermost = [write.nest[0] for write in writes]
    inner = [node for node in nest if node not in outermost]
    read = all(_feeds(node, user, nest) for node in outermost[:-1] for user in node.users)
    read = read and all(user in nest for node in inner for user in node.users)
    return read and all(user is update or _feeds(base, user, nest) for user in base.users)


def _feeds(node: torch.fx.Node, user: torch.fx.Node, nest: set[torch.fx.Node]) -> bool:
    """Tell whether a user of a node reads no element of it but to make a nest."""
    if user.op != "call_function":
        return False
    if not isinstance(user.meta.get("val"), torch.Tensor | list | tuple):
        return user.target is torch.ops.aten.sym_size.int
    if sum(given is node for given in (*user.args, *user.kwargs.values())) != 1 or user.args[0] is not node:
        return False
    if user in nest or user.target in _SHAPED:
        return True
    return user.target in _VIEWS and all(_feeds(user, other, nest) for other in user.users)
