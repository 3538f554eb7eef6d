"""What is computed of parameters alone, by torch: once, in the types that the graph states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ladder.ir.build import node_attributes
from ladder.ir.folding import PURE
from ladder.ir.graph import Graph, Node
from ladder.runtime.model.library import torch_type

Function = Callable[..., torch.Tensor]


def computed(graph: Graph, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the only result of a graph of `ladder.ir.folding.PURE` operators, contiguous.

    Parameters
    ----------
    graph
        Its shapes are known.
    values
        One per input, in order.
    """
    found: dict[str, torch.Tensor] = dict(zip((node.name for node in graph.inputs), values, strict=True))
    where = values[0].device
    for node in graph.nodes:
        if node.operator != "input":
            result = _ROWS[node.operator](node, *(found[value] for value in node.inputs))
            found[node.name] = result.to(where)
    return found[graph.outputs[0]].contiguous()


def _plain(function: Function) -> Function:
    return lambda node, *values: function(*values)


def _constant(node: Node) -> torch.Tensor:
    given = node_attributes(node)
    return torch.full(_shape(node), given["value"], dtype=torch_type(node.tile.ttype.name), device="cpu")


def _sum(node: Node, x: torch.Tensor) -> torch.Tensor:
    given = node_attributes(node)
    return x.sum(given["axis"], keepdim=given["keep"])


def _padded(node: Node, x: torch.Tensor) -> torch.Tensor:
    given = node_attributes(node)
    borders = [int(extent) for pair in zip(given["low"], given["high"], strict=True) for extent in pair[::-1]]
    return torch.nn.functional.pad(x, borders[::-1], value=given["value"])


def _shape(node: Node) -> Any:
    return node.tile.shape


_ROWS: Mapping[str, Function] = {
    "convert": lambda node, x: x.to(torch_type(node.tile.ttype.name)),
    "add": _plain(torch.add),
    "sub": _plain(torch.sub),
    "mul": _plain(torch.mul),
    "div": _plain(torch.div),
    "neg": _plain(torch.neg),
    "square": _plain(torch.square),
    "sqrt": _plain(torch.sqrt),
    "rsqrt": _plain(torch.rsqrt),
    "reshape": lambda node, x: x.reshape(_shape(node)),
    "transpose": lambda node, x: x.permute(node_attributes(node)["permutation"]),
    "broadcast": lambda node, x: x.expand(_shape(node)),
    "constant": _constant,
    "reduce_sum": _sum,
    "pad": _padded,
}
assert set(_ROWS) == set(PURE)
