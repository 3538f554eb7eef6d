"""The operations a decode expression may use, and their three evaluators.

A type's decode is one Python function ``decode(code, ops)`` built from ordinary
operators (``& | ^ << >> + - * ==``) and the methods below. numpy evaluates it as the
exact reference, torch on any device, and TIR inside a kernel. ``code`` counts as
uint32: after a left shift that may leave 32 bits, apply ``ops.cast(x, "int32")``,
``ops.cast(x, "uint32")`` or ``ops.bitcast`` before shifting right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from tile_types.errors import ValueRangeError


class Ops(Protocol):
    """Functions that a decode expression can call besides ordinary operators."""

    def constant(self, value: float, dtype: str) -> Any:
        """Return ``value`` as a scalar of ``dtype``."""
        ...

    def cast(self, value: Any, dtype: str) -> Any:
        """Convert the value; integers wrap to the width of ``dtype``."""
        ...

    def select(self, condition: Any, then: Any, otherwise: Any) -> Any:
        """Return ``then`` where ``condition`` holds, else ``otherwise``."""
        ...

    def bitcast(self, value: Any, dtype: str) -> Any:
        """Reinterpret the bits as ``dtype`` of the same width."""
        ...

    def exp2(self, value: Any) -> Any:
        """Return 2 to the power of a float32 value."""
        ...

    def lookup(self, table: Sequence[float], code: Any) -> Any:
        """Return the float32 ``table[code]``."""
        ...


Decode = Callable[[Any, Any], Any]
"""``decode(code, ops) -> value``; the second argument is an `Ops`."""


class NumpyOps:
    """Evaluate on numpy arrays: the exact reference."""

    def constant(self, value: float, dtype: str) -> Any:
        """Return ``value`` as a numpy scalar."""
        return np.asarray(value).astype(dtype)[()]

    def cast(self, value: Any, dtype: str) -> Any:
        """Convert with C semantics (integers wrap)."""
        return np.asarray(value).astype(dtype)

    def select(self, condition: Any, then: Any, otherwise: Any) -> Any:
        """Return ``numpy.where``; a Python number takes the dtype of the other branch."""
        then, otherwise = _same_dtype(then, otherwise, self.constant)
        return np.where(condition, then, otherwise)

    def bitcast(self, value: Any, dtype: str) -> Any:
        """Reinterpret by ``ndarray.view``."""
        return np.ascontiguousarray(value).view(dtype).reshape(np.shape(value))

    def exp2(self, value: Any) -> Any:
        """Return ``numpy.exp2`` in float32."""
        return np.exp2(np.asarray(value, np.float32))

    def lookup(self, table: Sequence[float], code: Any) -> Any:
        """Index the table.

        Raises
        ------
        ValueRangeError
            If a finite entry is too large for float32, or so small that it would become 0.
        """
        with np.errstate(all="ignore"):
            entries, given = np.asarray(table, np.float32), np.asarray(table, np.float64)
        lost = np.isfinite(given) & (np.isinf(entries) | ((entries == 0) & (given != 0)))
        if lost.any():
            raise ValueRangeError(
                f"ops.lookup: entry {int(lost.argmax())} of the table, {given[lost][0]:g}, is beyond float32;"
                " divide the table by a power of two and multiply scales by it, or write 0 or what is largest"
            )
        return entries[code]


class TorchOps:
    """Evaluate on torch tensors; unsigned integers are kept in int64, torch lacks uint32 arithmetic."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def constant(self, value: float, dtype: str) -> Any:
        """Return ``value`` as a zero-dimensional tensor."""
        held = "int64" if dtype.startswith("uint") else dtype
        return self._torch.tensor(value, dtype=getattr(self._torch, held), device="cpu")

    def cast(self, value: Any, dtype: str) -> Any:
        """Convert; unsigned results are masked to their width."""
        if dtype.startswith("uint"):
            return value.to(self._torch.int64) & ((1 << int(dtype[4:])) - 1)
        return value.to(getattr(self._torch, dtype))

    def select(self, condition: Any, then: Any, otherwise: Any) -> Any:
        """Return ``torch.where``; a Python number takes the dtype of the other branch."""
        then, otherwise = _same_dtype(then, otherwise, self.constant)
        like = condition if condition.dim() else then
        return self._torch.where(condition, then.to(like.device), otherwise.to(like.device))

    def bitcast(self, value: Any, dtype: str) -> Any:
        """Reinterpret by ``Tensor.view`` through the signed integer of the same width."""
        size = np.dtype(dtype).itemsize
        integer = self._signed[size]
        bits = value.view(integer) if value.is_floating_point() else value.to(integer)
        if dtype.startswith("float"):
            return bits.view(getattr(self._torch, dtype))
        return self.cast(bits, dtype)

    def exp2(self, value: Any) -> Any:
        """Return ``torch.exp2`` in float32."""
        return self._torch.exp2(value.to(self._torch.float32))

    def lookup(self, table: Sequence[float], code: Any) -> Any:
        """Index the table."""
        entries = self._torch.tensor(list(table), dtype=self._torch.float32, device=code.device)
        return entries[code.to(self._torch.int64)]


class TirOps:
    """Build a TIR expression; ``code`` is a uint32 ``PrimExpr``."""

    def __init__(self) -> None:
        from tvm import tirx  # type: ignore[import-untyped, unused-ignore]

        self._tirx: Any = tirx

    def constant(self, value: float, dtype: str) -> Any:
        """Return a typed constant."""
        return self._tirx.const(value, dtype)

    def cast(self, value: Any, dtype: str) -> Any:
        """Return a cast node."""
        return self._tirx.Cast(dtype, value)

    def select(self, condition: Any, then: Any, otherwise: Any) -> Any:
        """Return a select node (both branches are evaluated)."""
        then, otherwise = _same_dtype(then, otherwise, self.constant)
        return self._tirx.Select(condition, then, otherwise)

    def bitcast(self, value: Any, dtype: str) -> Any:
        """Return a reinterpret node."""
        return self._tirx.reinterpret(dtype, value)

    def exp2(self, value: Any) -> Any:
        """Return an exp2 call in float32."""
        return self._tirx.exp2(self.cast(value, "float32"))

    def lookup(self, table: Sequence[float], code: Any) -> Any:
        """Return a balanced tree of selects on the bits of ``code``: no memory is touched."""
        entries = [self.constant(float(entry), "float32") for entry in table]
        bit = 0
        while len(entries) > 1:
            odd = (code >> bit) & 1
            pairs = [entries[i : i + 2] for i in range(0, len(entries), 2)]
            entries = [self.select(odd == 1, p[1], p[0]) if len(p) == 2 else p[0] for p in pairs]
            bit += 1
        return entries[0]


def _dtype_of(value: Any) -> str:
    """Return the element type's name of an array, a tensor or a TIR expression."""
    dtype = value.dtype if hasattr(value, "dtype") else value.ty.dtype
    return str(dtype).removeprefix("torch.")


def _same_dtype(then: Any, otherwise: Any, constant: Callable[[float, str], Any]) -> tuple[Any, Any]:
    """Give a bare Python number the dtype of the other branch; two of them become float32 or int32."""
    bare = [isinstance(branch, (bool, int, float)) for branch in (then, otherwise)]
    if all(bare):
        dtype = "float32" if isinstance(then, float) or isinstance(otherwise, float) else "int32"
        return constant(then, dtype), constant(otherwise, dtype)
    if bare[0]:
        return constant(then, _dtype_of(otherwise)), otherwise
    return (then, constant(otherwise, _dtype_of(then))) if bare[1] else (then, otherwise)
