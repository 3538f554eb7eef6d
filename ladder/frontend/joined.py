"""Horizontal fusion of products: products of one value with several weights become one product.

``x · Aᵀ`` and ``x · Bᵀ`` are columns of ``x · [A; B]ᵀ``: one launch that reads as many bytes. The joined
weight is laid side by side once (`ladder.runtime.model.joined`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.fx

from ladder.ir.gemm import Gemm
from ladder.runtime.compile import Request
from schedules.dense import serves_dense
from targets import get_device

Node = torch.fx.Node
Key = tuple[Any, ...]
Serves = Callable[[Gemm, int], bool]
"""(Product of plain halves with what follows it, its tokens) -> whether a kernel of ours computes it."""

ROW_MULTIPLE = 128
"""Packed weights are padded to this many rows: only multiples of it lie side by side without a gap."""

HALVES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""torch's dtype -> name of the type, of weights that kernels take as they are."""

PARAMETER = "parameter"
"""Marks, in the ``meta`` of placeholders, a model's own parameters: they are the same at every call."""


VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
"""Operators that give the same elements in order."""

MOVES = (*VIEWS, "aten.permute.default", "aten.transpose.int", "aten.t.default", "aten.slice.Tensor")
"""Operators whose result may be a view."""


FUNCTIONS: Mapping[str, str] = {
    "aten.gelu.default": "gelu",
    "aten.relu.default": "relu",
    "aten.sigmoid.default": "sigmoid",
    "aten.silu.default": "silu",
    "aten.tanh.default": "tanh",
}
"""Functions of one number that kernels apply to sums."""


def mark_arguments(
    traced: torch.fx.GraphModule, examples: Sequence[Any], of_model: Sequence[bool] | None
) -> None:
    """Note of each placeholder, in its ``meta``, whether it is a parameter, and whether it is the model's.

    examples: One argument per placeholder.
    of_model: Whether each is a parameter or a buffer of a module; None: its parameters are.
    """
    nodes = [node for node in traced.graph.nodes if node.op == "placeholder"]
    parameters = [isinstance(value, torch.nn.Parameter) for value in examples]
    for node, parameter, owned in zip(nodes, parameters, of_model or parameters, strict=True):
        node.meta[PARAMETER], node.meta["of_model"] = parameter, owned


def served_on(target: str) -> Serves | None:
    """Return which products the kernels of a target serve; None where there is no target."""
    return partial(serves_dense, get_device(target)) if target else None


def joined_products(
    module: torch.fx.GraphModule, serves: Serves | None = None
) -> dict[Node, tuple[Node, ...]]:
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
    wanted = (group for group in groups.values() if len(group) > 1 or is_packed(group, serves))
    return {node: tuple(group) for group in wanted for node in group}


def is_packed(group: Sequence[Node], serves: Serves | None) -> bool:
    """Tell whether the products of a group, of plain halves, are one product by a kernel of ours."""
    value = group[0].meta["val"]
    if serves is None or not str(group[0].target).startswith("aten.") or value.dtype not in HALVES:
        return False
    weight: Any = group[0].args[-1]
    rows, depth = (
        size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
        for size in (value.shape[0], weight.meta["val"].shape[0])
    )
    if not rows or not depth:  # open, or empty
        return False
    return serves(dense_gemm(group, HALVES[value.dtype]), rows)


def dense_gemm(group: Sequence[Node], ttype: str) -> Gemm:
    """Return the products of a group, of plain halves, as one problem; a single one with its function."""
    weight: Any = group[0].args[-1]
    width, depth = sum(map(width_of, group)), int(weight.meta["val"].shape[0])
    after = function_after(group[0]) if len(group) == 1 else ()
    bias = len(group[0].args) == 3
    return Gemm(width, depth, ttype, ttype, ttype, scale=False, bias=bias, epilogue=after)


def function_after(node: Node) -> tuple[str, ...]:
    """Return the function of one number that alone reads a product, or a view of it; empty if none does."""
    users = list(node.users)
    while len(users) == 1 and str(users[0].target) in VIEWS:
        users = list(users[0].users)
    name = FUNCTIONS.get(str(users[0].target)) if len(users) == 1 else None
    if name is None:
        return ()
    tanh = "tanh" in (*users[0].args[1:], *users[0].kwargs.values())
    return (f"{name}_tanh" if tanh else name,)


def width_of(node: Node) -> int:
    """Return the columns of a product's result."""
    return int(node.meta["val"].shape[-1])


def stored_weight(node: Node) -> tuple[Node, bool] | None:
    """Return the parameter that is a product's second operand ``[K, N]``, and whether it is stored so.

    Others are stored as ``[N, K]``, and transposed by a view.
    """
    if node.op == "placeholder":
        return (node, True) if node.meta.get(PARAMETER) and node.meta["val"].ndim == 2 else None
    swaps = str(node.target) == "aten.t.default" or (
        str(node.target) == "aten.permute.default" and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    )
    return (node.args[0], False) if swaps and _is_parameter(node.args[0]) else None  # type: ignore[return-value]


def _is_parameter(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "placeholder"


def _is_returned(node: Node) -> bool:
    """Tell whether the graph returns a value or a view of it."""
    ahead, seen = [node], {node}
    while ahead:
        for user in ahead.pop().users:
            if user.op == "output":
                return True
            if str(user.target) in MOVES and user not in seen:
                seen.add(user)
                ahead.append(user)
    return False


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
    stored = stored_weight(weight)  # type: ignore[arg-type]
    return None if stored is None else ("plain", _same(x), node.meta["val"].dtype, stored[1])


def _biased_key(node: Node) -> Key | None:
    bias, x, weight = node.args
    stored = stored_weight(weight)  # type: ignore[arg-type]
    if node.kwargs or not _is_parameter(bias) or stored is None:
        return None
    fits = bias.meta["val"].ndim == 1  # type: ignore[union-attr]
    return ("biased", _same(x), node.meta["val"].dtype, stored[1]) if fits else None


_KEYS: Mapping[str, Callable[[Node], Key | None]] = {
    "ladder.matmul.default": _quantized_key,
    "ladder.matmul_with_gradient.default": _quantized_key,
    "aten.mm.default": _plain_key,
    "aten.addmm.default": _biased_key,
}
"""Operator -> what products must share to be joined; None: it is none that can be."""
