"""Tile graphs by torch, node by node, in the types that they state.

What parameters alone decide is computed so, once; and parts whose kernels cannot be built, at every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import Affine, parse_indexing
from ladder.partition.rows import SCANS
from ladder.runtime.model.convolutions import contract_run
from ladder.runtime.model.library import RUNS, VIEWS, Run
from ladder.runtime.model.sizes import CallSizes
from tile_types.arrays import torch_dtype
from tile_types.errors import DTypeError
from tile_types.library import get_type

Make = Callable[[Node, CallSizes, torch.device], Run]
"""Returns ``(operands) -> result`` of a node."""


def graph_run(graph: Graph, now: CallSizes, where: torch.device) -> Run:
    """Return ``(operands) -> results`` of a graph: one tensor, or a tuple of several.

    Raises DTypeError if a node has no function of torch: one that takes packed codes.
    """
    steps = [
        (
            node.name,
            node.inputs,
            contract_run(graph, node, now) if node.operator == "contract" else node_run(node, now, where),
        )
        for node in graph.nodes
        if node.operator != "input"
    ]
    names, outputs = [node.name for node in graph.inputs], graph.outputs

    def run(*operands: torch.Tensor) -> Any:
        found: dict[str, Any] = dict(zip(names, operands, strict=True))
        for name, read, step in steps:
            found[name] = step(*(found[value] for value in read))
        results = tuple(found[value] for value in outputs)
        return results if len(results) > 1 else results[0]

    return run


def node_run(node: Node, now: CallSizes, where: torch.device) -> Run:
    """Return ``(operands) -> result`` of one node.

    Raises DTypeError if it has no function of torch.
    """
    if node.operator in VIEWS:
        return VIEWS[node.operator](node, now)
    if node.operator in RUNS:
        return RUNS[node.operator](node, now)
    make = _ROWS.get(node.operator)
    if make is None:
        raise DTypeError(f"{node.operator} has no function of torch")
    return make(node, now, where)


def _plain(function: Callable[..., Any]) -> Make:
    return lambda node, now, where: function


def _type(node: Node) -> torch.dtype:
    return torch_dtype(node.tile.ttype.name)


def _convert(node: Node, now: CallSizes, where: torch.device) -> Run:
    dtype = _type(node)
    return lambda x: x.to(dtype)


def _encode(node: Node, now: CallSizes, where: torch.device) -> Run:
    dtype, ttype = _type(node), get_type(node.tile.ttype.name)
    low, high = ttype.minimum, ttype.maximum
    return lambda x: (x.round() if ttype.is_integer else x).clamp(low, high).to(dtype)


def _constant(node: Node, now: CallSizes, where: torch.device) -> Run:
    shape, dtype, value = now.numbers(node.tile.shape), _type(node), node_attributes(node)["value"]
    return lambda: torch.full(shape(), value, dtype=dtype, device=where)


def _size(node: Node, now: CallSizes, where: torch.device) -> Run:
    extent, dtype = now.numbers((node_attributes(node)["extent"],)), _type(node)
    return lambda: torch.full((), extent()[0], dtype=dtype, device=where)


def _iota(node: Node, now: CallSizes, where: torch.device) -> Run:
    given, dtype, shape = node_attributes(node), _type(node), now.numbers(node.tile.shape)
    begin, extent = now.numbers((given["begin"],)), now.numbers((given["extent"],))

    def run() -> torch.Tensor:
        counted = torch.arange(extent()[0], device=where) * given["step"] + begin()[0]
        return counted.reshape(shape()).to(dtype)  # type: ignore[no-any-return]

    return run


def _sum(node: Node, now: CallSizes, where: torch.device) -> Run:
    given, dtype = node_attributes(node), _type(node)
    return lambda x: x.sum(given["axis"], keepdim=given["keep"], dtype=dtype)


def _scan(node: Node, now: CallSizes, where: torch.device) -> Run:
    """Accumulate in the operand's type; of nothing but values are asked."""
    axis, dtype = node_attributes(node)["axis"], _type(node)
    if node_attributes(node)["exclusive"]:
        whole = _scan(replace(node, attributes=(("axis", axis),)), now, where)
        nothing = {"scan_sum": 0.0, "scan_product": 1.0}.get(node.operator, -math.inf)

        def before(x: torch.Tensor) -> torch.Tensor:
            first = torch.full_like(x.narrow(axis, 0, 1), nothing, dtype=dtype)
            return torch.cat([first, whole(x.narrow(axis, 0, x.shape[axis] - 1))], axis)

        return before
    if node.operator == "scan_max":
        return lambda x: torch.cummax(x, axis).values
    if node.operator == "scan_logsumexp":
        return lambda x: torch.logcumsumexp(x, axis)
    accumulate = torch.cumsum if node.operator == "scan_sum" else torch.cumprod
    return lambda x: accumulate(x, axis, dtype=dtype)


def _largest(node: Node, now: CallSizes, where: torch.device) -> Run:
    given, dtype, shape = node_attributes(node), _type(node), now.numbers(node.tile.shape)

    def run(x: torch.Tensor) -> torch.Tensor:
        if not x.numel():  # torch has no largest of no elements
            least = -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min
            return torch.full(shape(), least, dtype=dtype, device=where)
        return x.amax(given["axis"], keepdim=given["keep"]).to(dtype)

    return run


def _concat(node: Node, now: CallSizes, where: torch.device) -> Run:
    axis = node_attributes(node)["axis"]
    return lambda *parts: torch.cat(parts, axis)


def _repeat(node: Node, now: CallSizes, where: torch.device) -> Run:
    given = node_attributes(node)
    axis, times, extent = given["axis"], given["times"], now.numbers((node.tile.shape[given["axis"]],))
    return lambda x: x.repeat_interleave(times, axis).narrow(axis, 0, extent()[0])


def _pad(node: Node, now: CallSizes, where: torch.device) -> Run:
    given = node_attributes(node)
    low, high = now.numbers(given["low"]), now.numbers(given["high"])

    def run(x: torch.Tensor) -> torch.Tensor:
        borders = [extent for pair in zip(high(), low(), strict=True) for extent in pair]
        return torch.nn.functional.pad(x, borders[::-1], value=given["value"])

    return run


def _map(node: Node, now: CallSizes, where: torch.device) -> Run:
    """Read an operand through an affine view; where positions may lie outside, zeros."""
    given = node_attributes(node)
    indexing, shape = parse_indexing(given["spec"]), now.numbers(node.tile.shape)
    axes, names = indexing.operands[0], indexing.result

    def run(x: torch.Tensor) -> torch.Tensor:
        extents = shape()
        steps = {
            name: torch.arange(extent, device=where).reshape(-1, *[1] * (len(names) - 1 - at))
            for at, (name, extent) in enumerate(zip(names, extents, strict=True))
        }
        places = [_position(axis, steps, where) for axis in axes]
        if not given["pad"]:
            return x[tuple(places)].expand(extents)
        inside = [(place >= 0) & (place < extent) for place, extent in zip(places, x.shape, strict=True)]
        kept = [place.clamp(0, extent - 1) for place, extent in zip(places, x.shape, strict=True)]
        zero = torch.zeros((), dtype=x.dtype, device=where)
        return torch.where(reduce(torch.logical_and, inside), x[tuple(kept)], zero).expand(extents)

    return run


def _gather(node: Node, now: CallSizes, where: torch.device) -> Run:
    """Take elements by number; of one operator torch wants numbers that are not negative."""
    given = node_attributes(node)
    axis = given["axis"]
    if given["along"]:
        return lambda x, ids: torch.gather(x, axis, ids.long())
    before = (slice(None),) * axis
    return lambda x, ids: x[(*before, ids)]


def _position(axis: Affine, steps: Mapping[str, torch.Tensor], where: torch.device) -> torch.Tensor:
    place = torch.full((), axis.offset, device=where)
    for name, factor in axis.terms:
        place = place + steps[name] * factor
    return place


def _matmul(node: Node, now: CallSizes, where: torch.device) -> Run:
    given, dtype = node_attributes(node), _type(node)

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b = b.mT if given["transpose_b"] else b
        return torch.matmul(a, b) if a.dtype == dtype else torch.matmul(a.to(dtype), b.to(dtype))

    return run


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_floating_point():
        return torch.div(a, b, rounding_mode="trunc")
    usual = (b != 0) & (b != -1)  # no processor divides by 0, nor the least number by -1
    return torch.where(usual, torch.div(a, torch.where(usual, b, 1), rounding_mode="trunc"), a * b)


_ROWS: Mapping[str, Make] = {
    **{
        name: _plain(getattr(torch, name))
        for name in (
            *("add", "sub", "mul", "div", "maximum", "minimum", "neg", "square", "exp", "sqrt", "rsqrt"),
            *(
                "sigmoid",
                "tanh",
                "relu",
                "log",
                "log10",
                "log2",
                "exp2",
                "log1p",
                "logaddexp",
                "sin",
                "cos",
                "abs",
                "floor",
                "round",
                "erf",
                "pow",
            ),
            *("less", "less_equal", "bitwise_and", "bitwise_or", "bitwise_xor"),
        )
    },
    "fmod": _plain(torch.fmod),
    "bits": _plain(lambda x: x.view(torch.int32)),
    "of_bits": _plain(lambda x: x.view(torch.float32)),
    "quotient": _plain(_quotient),
    "shift_left": _plain(torch.bitwise_left_shift),
    "shift_right": _plain(torch.bitwise_right_shift),
    "equal": _plain(torch.eq),
    "both": _plain(torch.logical_and),
    "either": _plain(torch.logical_or),
    "negation": _plain(torch.logical_not),
    "select": _plain(torch.where),
    "silu": _plain(torch.nn.functional.silu),
    "gelu": _plain(torch.nn.functional.gelu),
    "gelu_tanh": _plain(_gelu_tanh),
    "convert": _convert,
    "encode": _encode,
    "constant": _constant,
    "size": _size,
    "iota": _iota,
    "reduce_sum": _sum,
    "reduce_max": _largest,
    **dict.fromkeys(SCANS, _scan),
    "concat": _concat,
    "repeat": _repeat,
    "pad": _pad,
    "map": _map,
    "gather": _gather,
    "matmul": _matmul,
}
"""Operator -> what makes its function; views and library calls are tables of `library`."""

EVALUATED = frozenset({*_ROWS, *VIEWS, "take"} - {"size"})
"""Operators whose function reads its operands alone, and writes nothing."""
