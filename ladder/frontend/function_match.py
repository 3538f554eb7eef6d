"""Pattern match of activation functions that are written as several operators of an ATen graph.

``0.5 x (1 + tanh(0.798 (x + 0.0447 x³)))`` is GELU in whatever order its products are taken: polynomials in x
and in the inner function of x are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

Node = torch.fx.Node

Polynomial = dict[tuple[int, int], float]
"""(Power of x, power of the inner function) -> coefficient."""

LARGEST_POWER = 4
"""Of polynomials that are followed."""

CLOSE = 1e-6
"""Relative difference of coefficients that are taken for equal: constants are written with some digits."""

RUN = "run"
"""Key of what nodes hold that are run though nothing uses them: they may raise."""

REACH = 8
"""Operators on a path that are looked through."""


@dataclass(frozen=True)
class Form:
    """An activation function as arithmetic around an inner function.

    inner: What the inner function is applied to, a polynomial in x.
    outer: What the function is, in x and the inner function.
    target, options: The operator.
    """

    inner: Polynomial
    outer: Polynomial
    target: Any
    options: Mapping[str, Any]


_HALF: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
_GELU = torch.ops.aten.gelu.default

FORMS: Mapping[str, Form] = {
    "aten.tanh.default": Form(
        {(1, 0): math.sqrt(2 / math.pi), (3, 0): 0.044715 * math.sqrt(2 / math.pi)},
        _HALF,
        _GELU,
        {"approximate": "tanh"},
    ),
    "aten.erf.default": Form({(1, 0): math.sqrt(0.5)}, _HALF, _GELU, {}),
    "aten.sigmoid.default": Form({(1, 0): 1.0}, {(1, 1): 1.0}, torch.ops.aten.silu.default, {}),
}
"""Inner function -> the activation function around it."""


def match_functions(module: torch.fx.GraphModule) -> None:
    """Replace matched activation functions of an ATen graph by one operator each."""
    for node in list(module.graph.nodes):
        form = FORMS.get(str(node.target))
        found = None if form is None else _matched(node, form)
        if form is None or found is None:
            continue
        root, x = found
        with module.graph.inserting_before(root):
            named = module.graph.call_function(form.target, (x,), dict(form.options))
        named.meta = dict(root.meta)
        root.replace_all_uses_with(named)
    drop_unused(module.graph)


def drop_unused(graph: torch.fx.Graph) -> None:
    """Remove unused nodes, except random draws: later draws depend on them; and those that are `RUN`."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or bool(node.meta.get(RUN)))


def _matched(inner: Node, form: Form) -> tuple[Node, Node] | None:
    """Return the node that computes a function with a given inner one, and its argument."""
    if not isinstance(inner.args[0], Node):
        return None
    for x in _within(inner.args[0], lambda node: node.all_input_nodes):
        if not _equal(_polynomial(inner.args[0], {x: (1, 0)}), form.inner):
            continue
        for root in _within(inner, lambda node: list(node.users)):
            if _same_type(root, x) and _equal(_polynomial(root, {x: (1, 0), inner: (0, 1)}), form.outer):
                return root, x
    return None


def _same_type(a: Node, b: Node) -> bool:
    one, other = a.meta.get("val"), b.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.dtype == other.dtype and one.shape == other.shape and one.is_floating_point()


def _within(start: Node, step: Callable[[Node], list[Node]]) -> Iterator[Node]:
    """Yield nodes that arithmetic leads to, nearest first."""
    level, seen = [start], {start}
    for _ in range(REACH):
        yield from level
        nearer = [
            other for node in level if str(node.target) in _RULES or node is start for other in step(node)
        ]
        level = [node for node in dict.fromkeys(nearer) if node not in seen]
        seen.update(level)


def _equal(found: Polynomial | None, wanted: Polynomial) -> bool:
    if found is None or found.keys() != wanted.keys():
        return False
    return all(math.isclose(found[power], wanted[power], rel_tol=CLOSE) for power in wanted)


def _polynomial(
    value: Any, variables: Mapping[Node, tuple[int, int]], reach: int = REACH
) -> Polynomial | None:
    """Return a value as a polynomial; None if it is none of them alone, or deeper than `reach`."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return {(0, 0): float(value)} if value else {}
    if not isinstance(value, Node):
        return None
    if value in variables:
        return {variables[value]: 1.0}
    rule = _RULES.get(str(value.target))
    if rule is None or value.kwargs or not reach:
        return None
    found: Polynomial | None = rule(*value.args, of=lambda v: _polynomial(v, variables, reach - 1))
    return found


def _sum(a: Any, b: Any, *, of: Any, sign: float = 1.0) -> Polynomial | None:
    left, right = of(a), of(b)
    if left is None or right is None:
        return None
    total = {p: left.get(p, 0.0) + sign * right.get(p, 0.0) for p in {**left, **right}}
    return {power: factor for power, factor in total.items() if factor}


def _product(a: Any, b: Any, *, of: Any) -> Polynomial | None:
    return _times(of(a), of(b))


def _times(left: Polynomial | None, right: Polynomial | None) -> Polynomial | None:
    if left is None or right is None:
        return None
    found: Polynomial = {}
    for (i, j), factor in left.items():
        for (k, m), other in right.items():
            found[i + k, j + m] = found.get((i + k, j + m), 0.0) + factor * other
    return found if all(max(power) <= LARGEST_POWER for power in found) else None


def _quotient(a: Any, b: Any, *, of: Any) -> Polynomial | None:
    return _product(a, 1.0 / b, of=of) if isinstance(b, int | float) and b else None


def _power(a: Any, b: Any, *, of: Any) -> Polynomial | None:
    value = of(a)
    return _times(value, _times(value, value) if b == 3 else value) if b in (2, 3) else None


_RULES: Mapping[str, Callable[..., Polynomial | None]] = {
    "aten.add.Tensor": _sum,
    "aten.add.Scalar": _sum,
    "aten.sub.Tensor": lambda a, b, of: _sum(a, b, of=of, sign=-1.0),
    "aten.mul.Tensor": _product,
    "aten.mul.Scalar": _product,
    "aten.div.Tensor": _quotient,
    "aten.div.Scalar": _quotient,
    "aten.pow.Tensor_Scalar": _power,
    "aten.neg.default": lambda a, of: _product(a, -1.0, of=of),
}
"""Operator -> its result as a polynomial of its arguments'."""
