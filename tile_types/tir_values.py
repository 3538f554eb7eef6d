"""What kernels would compute of a decode expression: its TIR, evaluated by numpy for every code.

Kernels read a type's own expression only where this gives the reference's values. Python's operators mean
other things in TIR (the quotient of integers is one), or nothing (``**``, numpy's functions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tile_types.ops import Decode, TirOps

_Array = npt.NDArray[Any]

_BINARY: dict[str, Callable[[_Array, _Array], _Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
}
_UNARY: dict[str, Callable[[_Array], _Array]] = {
    "Not": np.logical_not,
    "Cast": np.asarray,
    "BitwiseNot": np.invert,
    "exp2": np.exp2,
}


class _Unknown(Exception):
    """A node that no decode expression should have."""


def kernel_values(decode: Decode, codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64] | None:
    """Return the float32 values that a kernel computes of codes; None if the expression has no TIR."""
    from tvm import tirx

    code = tirx.Var("code", "uint32")
    with np.errstate(all="ignore"):
        try:
            values = _Evaluator({code: codes}).value(tirx.Cast("float32", decode(code, TirOps())))
        except Exception:  # a program's own function, with arguments that it may not have been written for
            return None
        return np.broadcast_to(values, codes.shape).astype(np.float64)


class _Evaluator:
    """Evaluates each node once."""

    def __init__(self, known: dict[Any, _Array]) -> None:
        self.known = known

    def value(self, node: Any) -> _Array:
        """Return the value of a node, of its type."""
        if node not in self.known:
            self.known[node] = self._value(node)
        return self.known[node]

    def _value(self, node: Any) -> _Array:
        kind, dtype = type(node).__name__, str(node.ty.dtype)
        if kind in ("IntImm", "FloatImm"):
            return np.asarray(node.value).astype(dtype)
        if kind == "Div" and not dtype.startswith("float"):
            raise _Unknown(kind)
        given = [self.value(operand) for operand in _operands(node, kind)]
        name = node.op.name.rpartition(".")[2] if kind == "Call" else kind
        if name == "reinterpret":
            return np.ascontiguousarray(given[0]).view(dtype).reshape(given[0].shape)
        return self._computed(name, given).astype(dtype)

    def _computed(self, name: str, given: list[_Array]) -> _Array:
        if name in ("Select", "if_then_else"):
            return np.where(*given)
        if name == "Div":
            return np.divide(*given)
        if name in _BINARY:
            return np.asarray(_BINARY[name](*given))
        if name in _UNARY:
            return np.asarray(_UNARY[name](*given))
        raise _Unknown(name)


def _operands(node: Any, kind: str) -> list[Any]:
    if kind == "Call":
        return list(node.args)
    if kind == "Select":
        return [node.condition, node.true_value, node.false_value]
    if kind == "Cast":
        return [node.value]
    return [node.a] if kind in ("Not", "BitwiseNot") else [node.a, node.b]
