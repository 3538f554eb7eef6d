"""Loop nests in TIR as Python: PrimFuncs for CPUs, before or after TVM's passes, every access checked.

`translate` writes one Python function per PrimFunc. Loops run one after the other, vectors are numpy
arrays, memory that nothing wrote is not a number; an access outside its buffer is an `OutsideError`.
Before the passes every axis is checked alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tvm

from ladder.simulate.values import MASKS, NUMPY

BINARY = {
    "Add": "({} + {})",
    "Sub": "({} - {})",
    "Mul": "({} * {})",
    "FloorDiv": "({} // {})",
    "FloorMod": "({} % {})",
    "Div": "_divide({}, {})",
    "Mod": "_remainder({}, {})",
    "Min": "_least({}, {})",
    "Max": "_most({}, {})",
    "EQ": "({} == {})",
    "NE": "({} != {})",
    "LT": "({} < {})",
    "LE": "({} <= {})",
    "GT": "({} > {})",
    "GE": "({} >= {})",
    "And": "_and({}, {})",
    "Or": "_or({}, {})",
    "BitwiseAnd": "({} & {})",
    "BitwiseOr": "({} | {})",
    "BitwiseXor": "({} ^ {})",
    "LShift": "({} << {})",
    "RShift": "({} >> {})",
}
"""Node -> Python."""

CALLS = {
    "bitwise_and": "({} & {})",
    "bitwise_or": "({} | {})",
    "bitwise_xor": "({} ^ {})",
    "shift_left": "({} << {})",
    "shift_right": "({} >> {})",
    "if_then_else": "({1} if {0} else {2})",
    "likely": "{}",
    "exp": "np.exp(np.float32({}))",
    "log": "np.log(np.float32({}))",
    "sqrt": "np.sqrt(np.float32({}))",
    "rsqrt": "(1 / np.sqrt(np.float32({})))",
    "tanh": "np.tanh(np.float32({}))",
    "fabs": "np.abs({})",
    "floor": "np.floor({})",
    "nearbyint": "np.rint({})",
    "isnan": "np.isnan({})",
}
"""Call -> Python."""


LLVM = {
    "llvm.arithmetic.fence": "{}",
    "llvm.rint": "np.rint({})",
    "llvm.maximum": "np.maximum({}, {})",
    "llvm.minimum": "np.minimum({}, {})",
    "llvm.fmuladd": "({} * {} + {})",
}
"""Intrinsic -> Python."""


class OutsideError(AssertionError):
    """An access outside a buffer."""


class Held:
    """The memory of one buffer."""

    def __init__(self, array: np.ndarray[Any, Any], name: str) -> None:
        self.cells, self.name = array.reshape(-1), name

    def viewed(self, dtype: str) -> Held:
        """Return the same memory as elements of a type of the same size."""
        return self if self.cells.dtype == NUMPY[dtype] else Held(self.cells.view(NUMPY[dtype]), self.name)

    def load(self, at: Any) -> Any:
        """Return an element, or several."""
        cells = self.cells
        if isinstance(at, np.ndarray):
            if at.min() < 0 or at.max() >= cells.size:
                raise OutsideError(
                    f"reads {self.name}[{at.min()}..{at.max()}], which has {cells.size} elements"
                )
            return cells[at]
        if not 0 <= at < cells.size:
            raise OutsideError(f"reads {self.name}[{at}], which has {cells.size} elements")
        return cells.item(at)

    def store(self, at: Any, value: Any) -> None:
        """Set an element, or several."""
        low, high = (at.min(), at.max()) if isinstance(at, np.ndarray) else (at, at)
        if low < 0 or high >= self.cells.size:
            raise OutsideError(f"writes {self.name}[{low}..{high}], which has {self.cells.size} elements")
        self.cells[at] = value


def _flat(name: str, shape: Sequence[int], *index: Any) -> Any:
    """Return the position of an element, each axis checked."""
    at: Any = 0
    for axis, (extent, i) in enumerate(zip(shape, index, strict=True)):
        low, high = (i.min(), i.max()) if isinstance(i, np.ndarray) else (i, i)
        if low < 0 or high >= extent:
            raise OutsideError(f"index {low}..{high} of axis {axis} of {name}, which has shape {list(shape)}")
        at = at * extent + i
    return at


def _is_vector(*values: Any) -> bool:
    return any(isinstance(value, np.ndarray) for value in values)


def _divide(a: Any, b: Any) -> Any:
    """Divide as C does: towards zero, or floats as they are."""
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    with np.errstate(all="ignore"):
        quotient = np.float64(a) / b if not _is_vector(a) else a / b
    return quotient if not _is_vector(a) or a.dtype.kind == "f" else np.trunc(quotient).astype(a.dtype)


def _remainder(a: Any, b: Any) -> Any:
    return a - _divide(a, b) * b


def _least(a: Any, b: Any) -> Any:
    return np.minimum(a, b) if _is_vector(a, b) else min(a, b)


def _most(a: Any, b: Any) -> Any:
    return np.maximum(a, b) if _is_vector(a, b) else max(a, b)


def _and(a: Any, b: Any) -> Any:
    return np.logical_and(a, b) if _is_vector(a, b) else bool(a) and bool(b)


def _or(a: Any, b: Any) -> Any:
    return np.logical_or(a, b) if _is_vector(a, b) else bool(a) or bool(b)


def _not(a: Any) -> Any:
    return np.logical_not(a) if _is_vector(a) else not a


def _select(condition: Any, then: Any, other: Any) -> Any:
    if _is_vector(condition):
        return np.where(condition, then, other)
    return then if condition else other


def _cast(value: Any, dtype: str) -> Any:
    kind = NUMPY[dtype]
    if _is_vector(value):
        with np.errstate(all="ignore"):
            return value.astype(kind)
    if kind == np.bool_:
        return bool(value)
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(kind).item()


def _bits(value: Any, source: str, dtype: str) -> Any:
    held = np.atleast_1d(np.asarray(value).astype(NUMPY[source]))
    found = held.view(NUMPY[dtype])
    return found if _is_vector(value) and value.size > 1 else found.item(0)


def _shuffle(vectors: Sequence[Any], picked: Sequence[int]) -> Any:
    joined = np.concatenate([np.atleast_1d(vector) for vector in vectors])[list(picked)]
    return joined if len(picked) > 1 else joined.item(0)


def _fresh(count: int, dtype: str) -> Held:
    """Return memory that nothing wrote."""
    kind = NUMPY[dtype]
    fill = kind.type(float("nan")) if kind.kind in "fV" or kind == ml_dtypes.bfloat16 else kind.type(77)
    return Held(np.full(count, fill, kind), "scratch")


NAMES = {
    name: globals()[name]
    for name in (
        "np", "_flat", "_divide", "_remainder", "_least", "_most", "_and", "_or", "_not", "_select",
        "_cast", "_bits", "_shuffle", "_fresh",
    )
}  # fmt: skip


def translate(function: Any) -> Callable[..., None]:
    """Return a PrimFunc as a Python function of its arguments: numbers and numpy arrays."""
    return _Writer(function).function()


def _element(dtype: str) -> str:
    """Return the type of a vector's elements."""
    return dtype.partition("x")[0] if dtype.rpartition("x")[2].isdigit() else dtype


class _Writer:
    """Writes one PrimFunc as Python."""

    def __init__(self, func: Any) -> None:
        self.func, self.lines = func, list[str]()
        self.names: dict[Any, str] = {}
        self.checked: set[Any] = set()

    def function(self) -> Callable[..., None]:
        params = []
        for parameter in self.func.params:
            name = self.name(parameter)
            params.append(name)
        self.lines.append(f"def kernel({', '.join(params)}):")
        self.statement(self.func.body, 1)
        scope = dict(NAMES)
        self.lines.append("    return")
        exec(compile("\n".join(self.lines), "<kernel>", "exec"), scope)
        kernel = scope["kernel"]

        def call(*values: Any) -> None:
            kernel(*(v if isinstance(v, int) else Held(v, n) for v, n in zip(values, params, strict=True)))

        return call

    def name(self, variable: Any) -> str:
        if variable not in self.names:
            self.names[variable] = f"v{len(self.names)}"
        return self.names[variable]

    def line(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    # ---- statements
    def statement(self, s: Any, depth: int) -> None:
        getattr(self, f"do_{type(s).__name__.lower()}")(s, depth)

    def do_seqstmt(self, s: Any, depth: int) -> None:
        for part in s.seq:
            self.statement(part, depth)

    def do_bind(self, s: Any, depth: int) -> None:
        self.line(depth, f"{self.name(s.var)} = {self.expression(s.value)}")

    def do_for(self, s: Any, depth: int) -> None:
        start, extent = self.expression(s.min), self.expression(s.extent)
        self.line(depth, f"for {self.name(s.loop_var)} in range({start}, {start} + {extent}):")
        self.statement(s.body, depth + 1)
        self.line(depth + 1, "pass")

    def do_ifthenelse(self, s: Any, depth: int) -> None:
        self.line(depth, f"if {self.expression(s.condition)}:")
        self.statement(s.then_case, depth + 1)
        if s.else_case is not None:
            self.line(depth, "else:")
            self.statement(s.else_case, depth + 1)

    def do_attrstmt(self, s: Any, depth: int) -> None:
        self.statement(s.body, depth)

    def do_evaluate(self, s: Any, depth: int) -> None:
        assert type(s.value).__name__ == "IntImm", f"a call for its effect: {s}"
        self.line(depth, "pass")

    def do_allocbuffer(self, s: Any, depth: int) -> None:
        shape = " * ".join(self.expression(extent) for extent in s.buffer.shape) or "1"
        self.line(depth, f"{self.name(s.buffer)} = _fresh({shape}, {str(s.buffer.dtype)!r})")

    def do_declbuffer(self, s: Any, depth: int) -> None:
        data = s.data
        while type(data).__name__ == "Call":
            data = data.args[0]
        self.line(depth, f"{self.name(s.buffer)} = {self.name(data)}.viewed({str(s.buffer.dtype)!r})")

    def do_bufferstore(self, s: Any, depth: int) -> None:
        at, value = self.place(s.buffer, s.indices), self.expression(s.value)
        self.line(depth, f"{self.name(s.buffer)}.store({at}, {value})")

    # ---- expressions
    def place(self, buffer: Any, indices: Sequence[Any]) -> str:
        if len(indices) == 1:
            return self.expression(indices[0])
        shape = ", ".join(self.expression(extent) for extent in buffer.shape)
        parts = ", ".join(self.expression(index) for index in indices)
        return f"_flat({self.name(buffer)!r}, ({shape},), {parts})"

    def expression(self, e: Any) -> str:
        kind = type(e).__name__
        if kind in BINARY:
            text = BINARY[kind].format(self.expression(e.a), self.expression(e.b))
            bits = MASKS.get(str(e.ty), 0) if kind in ("Add", "Sub", "Mul", "LShift") else 0
            return f"({text} & {bits})" if bits else text
        return str(getattr(self, f"read_{kind.lower()}")(e))

    def read_int(self, e: int) -> str:
        return str(e)

    def read_intimm(self, e: Any) -> str:
        return str(bool(e.value)) if str(e.ty) == "bool" else f"({int(e.value)})"

    def read_floatimm(self, e: Any) -> str:
        return f"({float(e.value)!r})" if math.isfinite(e.value) else f"float({str(float(e.value))!r})"

    def read_var(self, e: Any) -> str:
        return self.name(e)

    def read_cast(self, e: Any) -> str:
        return f"_cast({self.expression(e.value)}, {_element(str(e.ty))!r})"

    def read_not(self, e: Any) -> str:
        return f"_not({self.expression(e.a)})"

    def read_select(self, e: Any) -> str:
        parts = (e.condition, e.true_value, e.false_value)
        return f"_select({', '.join(map(self.expression, parts))})"

    def read_tensorload(self, e: Any) -> str:
        return f"{self.name(e.source)}.load({self.place(e.source, e.indices)})"

    def read_broadcast(self, e: Any) -> str:
        repeated = f"np.repeat({self.expression(e.value)}, {int(e.lanes)})"
        kind = _element(str(e.ty))
        return f"{repeated}.astype({kind!r})" if kind.startswith("uint") else repeated

    def read_ramp(self, e: Any) -> str:
        return f"({self.expression(e.base)} + np.arange({int(e.lanes)}) * {self.expression(e.stride)})"

    def read_shuffle(self, e: Any) -> str:
        vectors = ", ".join(map(self.expression, e.vectors))
        return f"_shuffle(({vectors},), ({', '.join(map(self.expression, e.indices))},))"

    def read_call(self, e: Any) -> str:
        name = str(e.op.name).rpartition(".")[2]
        operands = [self.expression(a) for a in e.args if type(a).__name__ != "StringImm"]
        if name == "reinterpret":
            types = _element(str(e.args[0].ty)), _element(str(e.ty))
            return f"_bits({operands[0]}, {types[0]!r}, {types[1]!r})"
        if name == "call_llvm_pure_intrin":
            intrinsic = tvm.get_global_func("target.llvm_get_intrinsic_name")(int(e.args[0].value))
            return LLVM[str(intrinsic)].format(*operands[1:])
        return CALLS[name].format(*operands)
