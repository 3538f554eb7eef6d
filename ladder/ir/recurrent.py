"""Recurrent layers that kernels compute: LSTM and GRU of float32 with the functions that the standard has.

An LSTM's weights may be codes of 8 bits; its inputs and its state are rounded to such codes then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from tile_types.errors import ShapeError

CELLS = {"onnx.LSTM": "LSTM", "onnx.GRU": "GRU", "onnx.DynamicQuantizeLSTM": "LSTM"}
GATES = {"LSTM": 4, "GRU": 3}
FUNCTIONS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh")}

CODES = "onnx.DynamicQuantizeLSTM"
"""The layer whose weights are codes; they are stored ``[directions, K, N]``."""

OPERANDS = ("x", "w", "r", "b", "lengths", "h", "c", "p", "w_s", "w_z", "r_s", "r_z")
"""Of a node, in order: scales and zero points belong to codes. Bias, lengths and states may be left out."""

TYPES = {"lengths": ("int32",), "w_z": ("int8", "uint8"), "r_z": ("int8", "uint8")}
"""Role -> types; other operands are float32, and weights of codes as their zero points."""

LANES = 16
"""Elements of a vector that a gate's elements are made up to."""

FOUR = 4
"""Codes in a word of a weight of codes."""

PLAIN = {"clip": 0, "input_forget": 0, "layout": 0}
"""Attributes that a layer of a kernel leaves out, or gives these values."""


@dataclass(frozen=True)
class Recurrent:
    """A layer.

    cell: ``"LSTM"`` or ``"GRU"``.
    hidden: Elements of the state.
    backward: For each direction whether it goes from the last step to the first.
    inside: Of a GRU: whether the reset gate multiplies the product of the state, not the state.
    codes: Whether weights are codes of 8 bits, and states are rounded to such codes before they are
        multiplied.
    """

    cell: str
    hidden: int
    backward: tuple[bool, ...]
    inside: bool = False
    codes: bool = False

    @property
    def gates(self) -> int:
        """Gates of a cell."""
        return GATES[self.cell]

    @property
    def padded(self) -> int:
        """Elements of a gate in memory: whole vectors."""
        return -(-self.hidden // LANES) * LANES


def operands_of(node: Node) -> dict[str, str]:
    """Return role -> value that a layer reads."""
    given: Any = node_attributes(node)["arguments"]
    places = zip(OPERANDS, given, strict=False)
    return {role: node.inputs[value[1]] for role, value in places if value is not None}


def as_recurrent(graph: Graph, node: Node) -> Recurrent:
    """Recognise a layer.

    Raises ShapeError if it is none that a kernel computes; the message says why.
    """
    given = node_attributes(node)
    target = str(given.get("target", ""))
    if target not in CELLS:
        raise ShapeError(f"{target or node.operator} is no LSTM or GRU")
    keywords: Any = dict(given["keywords"])
    stated: dict[str, Any] = dict(keywords["attributes"])
    values, cell, codes = operands_of(node), CELLS[target], target == CODES
    tile = graph.tile(values["r"])
    directions, hidden = tile.shape[0], tile.shape[1 if codes else 2]
    inputs = graph.tile(values["w"]).shape[1 if codes else 2]
    if not (isinstance(directions, int) and isinstance(hidden, int) and isinstance(inputs, int) and hidden):
        raise ShapeError("its weights have open sizes")
    if "p" in values or any(stated.get(name, value) != value for name, value in PLAIN.items()):
        raise ShapeError("it has peepholes, a clip, coupled gates or another layout")
    functions = tuple(str(name).lower() for name in stated.get("activations") or ())
    if functions not in ((), FUNCTIONS[cell] * directions):
        raise ShapeError(f"its functions are {', '.join(functions)}")
    types = {**TYPES, **({"w": TYPES["w_z"], "r": TYPES["r_z"]} if codes else {})}
    if any(graph.tile(v).ttype.name not in types.get(role, ("float32",)) for role, v in values.items()):
        raise ShapeError("it is not of float32")
    first = stated.get("direction", "forward") == "reverse"
    backward = (first,) if directions == 1 else (False, True)
    return Recurrent(cell, hidden, backward, bool(stated.get("linear_before_reset", 0)), codes)
