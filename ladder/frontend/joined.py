"""Products of one value with several weights: found in an ATen graph, so that they become one product.

``x · Aᵀ`` and ``x · Bᵀ`` are columns of ``x · [A; B]ᵀ``: one launch that reads as many bytes. The joined
weight is laid side by side once (`ladder.runtime.model.joined`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.fx

from ladder.runtime.compile import Request

Node = torch.fx.Node
Key = tuple[Any, ...]

ROW_MULTIPLE = 128
"""Packed weights are padded to this many rows: only multiples of it lie side by side without a gap."""

VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
"""Operators that give the same elements in order."""

MOVES = (*VIEWS, "aten.permute.default", "aten.transpose.int", "aten.t.default", "aten.slice.Tensor")
"""Operators whose result may be a view."""


def joined_products(module: torch.fx.GraphModule, few: int = 0) -> dict[Node, tuple[Node, ...]]:
    """Return product -> all products of the same value whose weights can lie side by side, itself included.

    A product that the graph returns stays alone: its result would be columns of a wider matrix. So does one
    that is alone anyway, unless `is_packed` says that its weight must be laid out.
    """
    groups: dict[Key, list[Node]] = {}
    for node in module.graph.nodes:
        describe = _KEYS.get(str(node.target)) if node.op == "call_function" else None
        key = None if describe is None else describe(node)
        if key is not None:
            alone = width_of(node) % ROW_MULTIPLE or _is_returned(node)
            groups.setdefault((key, node) if alone else (key,), []).append(node)
    wanted = (group for group in groups.values() if len(group) > 1 or is_packed(group[0], few))
    return {node: tuple(group) for group in wanted for node in group}


def is_packed(node: Node, few: int) -> bool:
    """Tell whether a product of plain halves is for kernels of ours: it has ``few`` tokens or less."""
    value = node.meta["val"]
    rows = value.shape[0]
    known = rows.node.maybe_as_int() if isinstance(rows, torch.SymInt) else rows
    small = known is not None and 0 < known <= few
    return small and str(node.target).startswith("aten.") and value.dtype in (torch.float16, torch.bfloat16)


def width_of(node: Node) -> int:
    """Return the columns of a product's result."""
    return int(node.meta["val"].shape[-1])


def stored_weight(node: Node) -> Node | None:
    """Return the parameter ``[N, K]`` whose transpose a value is."""
    swaps = str(node.target) == "aten.t.default" or (
        str(node.target) == "aten.permute.default" and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    )
    return node.args[0] if swaps and _is_parameter(node.args[0]) else None  # type: ignore[return-value]


def _is_parameter(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "placeholder"


def _is_returned(node: Node) -> bool:
    """Tell whether the graph returns a value or a view of it."""
    moved = (user for user in node.users if str(user.target) in MOVES)
    return any(user.op == "output" for user in node.users) or any(map(_is_returned, moved))


def _same(value: Any) -> Any:
    """Return what is equal for equal values: views and quantized tokens are seen through."""
    if not isinstance(value, Node):
        return value
    if str(value.target) in VIEWS:
        root = value
        while isinstance(root, Node) and str(root.target) in VIEWS:
            root = root.args[0]  # type: ignore[assignment]
        return ("view", _same(root), tuple(map(str, value.meta["val"].shape)))
    if value.target is operator.getitem or str(value.target) == "ladder.quantize_tokens.default":
        return (str(value.target), *map(_same, value.args))
    return value


def _quantized_key(node: Node) -> Key | None:
    x, packed, bias, token_scale, text = node.args
    request = Request.parse(str(text))
    gemm = request.gemm
    parameters = [*packed, *([] if bias is None else [bias])]  # type: ignore[misc]
    if (
        request.plan is not None
        or gemm.experts
        or gemm.token_group
        or not all(map(_is_parameter, parameters))
    ):
        return None
    return ("quantized", _same(x), _same(token_scale), request.device, replace(gemm, n=ROW_MULTIPLE))


def _plain_key(node: Node) -> Key | None:
    x, weight = node.args
    if stored_weight(weight) is None:  # type: ignore[arg-type]
        return None
    return ("plain", _same(x), node.meta["val"].dtype)


def _biased_key(node: Node) -> Key | None:
    bias, x, weight = node.args
    if node.kwargs or not _is_parameter(bias) or stored_weight(weight) is None:  # type: ignore[arg-type]
        return None
    fits = bias.meta["val"].ndim == 1  # type: ignore[union-attr]
    return ("biased", _same(x), node.meta["val"].dtype) if fits else None


_KEYS: Mapping[str, Callable[[Node], Key | None]] = {
    "ladder.matmul.default": _quantized_key,
    "ladder.matmul_without_gradient.default": _quantized_key,
    "aten.mm.default": _plain_key,
    "aten.addmm.default": _biased_key,
}
"""Operator -> what products must share to be joined; None: it is none that can be."""
