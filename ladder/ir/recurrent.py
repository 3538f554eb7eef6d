"""Recurrent layers that kernels compute: LSTM and GRU of float32 with the functions that the standard has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from tile_types.errors import ShapeError

GATES = {"onnx.LSTM": 4, "onnx.GRU": 3}
FUNCTIONS = {"onnx.LSTM": ("sigmoid", "tanh", "tanh"), "onnx.GRU": ("sigmoid", "tanh")}

OPERANDS = ("x", "w", "r", "b", "lengths", "h", "c", "p")
"""Of a node, in order; all but the first three may be left out."""

PLAIN = {"clip": 0, "input_forget": 0, "layout": 0}
"""Attributes that a layer of a kernel leaves out, or gives these values."""


@dataclass(frozen=True)
class Recurrent:
    """A layer.

    Parameters
    ----------
    cell
        ``"LSTM"`` or ``"GRU"``.
    hidden
        Elements of the state.
    backward
        For each direction whether it goes from the last step to the first.
    inside
        Of a GRU: whether the reset gate multiplies the product of the state, not the state.
    """

    cell: str
    hidden: int
    backward: tuple[bool, ...]
    inside: bool = False

    @property
    def gates(self) -> int:
        """Gates of a cell."""
        return GATES[f"onnx.{self.cell}"]


def operands_of(node: Node) -> dict[str, str]:
    """Return role -> value that a layer reads."""
    given: Any = node_attributes(node)["arguments"]
    places = zip(OPERANDS, given, strict=False)
    return {role: node.inputs[value[1]] for role, value in places if value is not None}


def as_recurrent(graph: Graph, node: Node) -> Recurrent:
    """Recognise a layer.

    Raises
    ------
    ShapeError
        If it is none that a kernel computes; the message says why.
    """
    given = node_attributes(node)
    target = str(given.get("target", ""))
    if target not in GATES:
        raise ShapeError(f"{target or node.operator} is no LSTM or GRU")
    keywords: Any = dict(given["keywords"])
    stated: dict[str, Any] = dict(keywords["attributes"])
    values = operands_of(node)
    tile = graph.tile(values["r"])
    directions, hidden = tile.shape[0], tile.shape[2]
    if not isinstance(directions, int) or not isinstance(hidden, int) or not hidden:
        raise ShapeError("its weights have open sizes")
    if "p" in values or any(stated.get(name, value) != value for name, value in PLAIN.items()):
        raise ShapeError("it has peepholes, a clip, coupled gates or another layout")
    functions = tuple(str(name).lower() for name in stated.get("activations") or ())
    if functions not in ((), FUNCTIONS[target] * directions):
        raise ShapeError(f"its functions are {', '.join(functions)}")
    if any(graph.tile(values[role]).ttype.name != "float32" for role in values if role != "lengths"):
        raise ShapeError("it is not of float32")
    first = stated.get("direction", "forward") == "reverse"
    backward = (first,) if directions == 1 else (False, True)
    return Recurrent(target.partition(".")[2], hidden, backward, bool(stated.get("linear_before_reset", 0)))
