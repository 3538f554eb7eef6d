"""What torch computes of a model: products, convolutions, attention, embedding, any ATen call, views."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from ladder.ir.build import node_attributes
from ladder.ir.convolution import Convolution, as_convolution
from ladder.ir.extents import bind, bind_shape
from ladder.ir.graph import Graph, Node
from ladder.runtime.model.attention import library_attention
from tile_types.errors import LadderError

Run = Callable[..., Any]
Sizes = Mapping[str, int]

TORCH_TYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def torch_type(name: str) -> torch.dtype:
    """Return torch's dtype of a type that tensors have."""
    found = getattr(torch, TORCH_TYPES.get(name, name))
    assert isinstance(found, torch.dtype)
    return found


def library_run(graph: Graph, sizes: Sizes) -> Run:
    """Return ``(operands) -> result`` (a tuple if there are several) of a one-node part."""
    node = next(node for node in graph.nodes if node.operator != "input")
    return _RUNS[node.operator](node, sizes)


def library_title(graph: Graph) -> str:
    """Return the name of the function that computes a part."""
    node = next(node for node in graph.nodes if node.operator != "input")
    if node.operator in _TITLES:
        return _TITLES[node.operator]
    target = str(dict(node.attributes)["target"])
    return f"ladder {target.split('.')[1]}" if target.startswith("ladder.") else f"torch.ops.{target}"


_TITLES = {
    "take": "torch.embedding",
    "put": "torch.index_copy",
    "attention": "torch.scaled_dot_product_attention",
}


def _take(node: Node, sizes: Sizes) -> Run:
    return torch.embedding


def _put(node: Node, sizes: Sizes) -> Run:
    axis = node_attributes(node)["axis"]
    return lambda base, ids, rows: torch.index_copy(base, axis, ids, rows)


def _call(node: Node, sizes: Sizes) -> Run:
    given = node_attributes(node)
    function = resolve(given["target"])
    arguments, keywords = given["arguments"], given["keywords"]

    def run(*operands: torch.Tensor) -> Any:
        named = {key: literal(value, operands, sizes) for key, value in keywords}
        return function(*(literal(value, operands, sizes) for value in arguments), **named)

    return run


_RUNS: Mapping[str, Callable[[Node, Sizes], Run]] = {
    "take": _take,
    "put": _put,
    "attention": lambda node, sizes: library_attention(node),
    "call": _call,
}


def resolve(target: str) -> Any:
    """Return the operator of a name such as ``aten.topk.default``.

    Raises
    ------
    LadderError
        If this torch has none of that name.
    """
    try:
        return reduce(getattr, target.split("."), torch.ops)
    except AttributeError as error:
        raise LadderError(f"torch {torch.__version__} has no operator {target}") from error


_WORDS: Mapping[str, Callable[[Any, Sequence[Any], Sizes], Any]] = {
    "%": lambda value, operands, sizes: operands[value],
    "extent": lambda value, operands, sizes: bind(value, sizes),
    "torch": lambda value, operands, sizes: getattr(torch, value),
    "device": lambda value, operands, sizes: torch.device(value),
}
"""First element of a pair that stands for something else than itself."""


def literal(value: Any, operands: Sequence[Any], sizes: Sizes) -> Any:
    """Return an argument of a library call from the attribute that holds it."""
    if not isinstance(value, tuple):
        return value
    if len(value) == 2 and isinstance(value[0], str) and value[0] in _WORDS:
        return _WORDS[value[0]](value[1], operands, sizes)
    return [literal(item, operands, sizes) for item in value]


# products -------------------------------------------------------------------------------------------


def product_run(graph: Graph, sizes: Sizes) -> tuple[Run, bool]:
    """Return ``(operands..., out=)`` of a product with an optional bias, and whether it takes ``out``."""
    first = _product_node(graph)
    if first.operator == "contract":
        return _convolution(as_convolution(graph, first), sizes), False
    transposed = bool(node_attributes(first)["transpose_b"])
    names = [node.name for node in graph.inputs]
    order = tuple(names.index(value) for value in first.inputs)
    bias = tuple(at for at, name in enumerate(names) if name not in first.inputs)
    ranks = {len(graph.tile(value).shape) for value in first.inputs}
    if bias:
        return _linear_and_bias(transposed, (*bias, *order)), True
    makes = _RANKED.get(ranks.pop()) if len(ranks) == 1 and order == (0, 1) else None
    return (_any_rank(transposed, order), False) if makes is None else (makes(transposed), True)


def _product_node(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.operator in ("matmul", "contract"))


def _convolution(form: Convolution, sizes: Sizes) -> Run:
    shape = tuple(int(extent) for extent in bind_shape(form.shape, sizes))
    function = getattr(torch.nn.functional, f"conv{form.rank}d")

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if form.groups > 1:
            x, weight = x.flatten(1, 2), weight.flatten(0, 1)
        y = function(x, weight, None, form.stride, form.padding, form.dilation, form.groups)
        return y.reshape(shape)  # type: ignore[no-any-return]

    return run


def _linear(transposed: bool) -> Run:
    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mm(a, b.t() if transposed else b, out=out)

    return run


def _linear_and_bias(transposed: bool, order: Sequence[int]) -> Run:
    """Return the product whose bias and two factors are the operands ``order``."""
    bias, left, right = order

    def run(*operands: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        b = operands[right]
        return torch.addmm(operands[bias], operands[left], b.t() if transposed else b, out=out)

    return run


def _batched(transposed: bool) -> Run:
    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.bmm(a, b.mT if transposed else b, out=out)

    return run


def _any_rank(transposed: bool, order: Sequence[int]) -> Run:
    left, right = order

    def run(*operands: torch.Tensor) -> torch.Tensor:
        b = operands[right]
        return torch.matmul(operands[left], b.mT if transposed else b)

    return run


_RANKED: Mapping[int, Callable[[bool], Run]] = {2: _linear, 3: _batched}
"""Axes of both operands -> their product."""


def product_title(graph: Graph) -> str:
    """Return the name of torch's function for a product."""
    first = _product_node(graph)
    if first.operator == "contract":
        return f"torch.conv{as_convolution(graph, first).rank}d"
    return "torch.addmm" if len(graph.inputs) > 2 else "torch.matmul"


# views ----------------------------------------------------------------------------------------------


def view_run(graph: Graph, sizes: Sizes) -> Run:
    """Return ``(operand) -> view`` of a chain of views; one that needs a copy copies."""
    steps = [_view(node, sizes) for node in graph.nodes if node.operator != "input"]
    if len(steps) == 1:
        return steps[0]
    return lambda value: reduce(lambda current, step: step(current), steps, value)


def _view(node: Node, sizes: Sizes) -> Run:
    given = node_attributes(node)
    shape = tuple(int(extent) for extent in bind_shape(node.tile.shape, sizes))
    if node.operator == "reshape":
        return operator.methodcaller("reshape", shape)
    if node.operator == "broadcast":
        return operator.methodcaller("expand", shape)
    if node.operator == "transpose":
        return operator.methodcaller("permute", given["permutation"])
    begin = [int(extent) for extent in bind_shape(given["begin"], sizes)]
    step = given["step"] or (1,) * len(shape)
    box = tuple(slice(b, b + n * s, s) for b, n, s in zip(begin, shape, step, strict=True))
    return operator.itemgetter(box)
