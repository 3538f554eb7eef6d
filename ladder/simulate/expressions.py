"""Expressions of a PrimFunc as closures from a cohort to a value, and the names that they refer to.

A vector of TIR (``float32x4``, a `Ramp` as an index) has its elements on the last axis; one access of
memory with a vector is one wide access.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ladder.simulate.banks import Banks
from ladder.simulate.cohort import Cohort
from ladder.simulate.memory import WIDEST, Pointer, Region
from ladder.simulate.operators import BINARY, UNARY_CALLS, binary, select
from ladder.simulate.program import Read, Step
from ladder.simulate.values import LANES, NUMPY, Value, cast, constant, element_of, is_array, reinterpret
from tile_types.errors import LadderError


class UnknownCallError(LadderError):
    """The simulator has no semantics for a call of the TIR."""


@dataclass(frozen=True)
class Registers:
    """A buffer in registers: slots ``first ..`` of an element type."""

    first: int
    count: int
    dtype: str


@dataclass(frozen=True)
class SharedBuffer:
    """A buffer in shared memory."""

    region: Region
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class GlobalBuffer:
    """A tensor argument."""

    tensor: Any
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class CallView:
    """A call as the tables see it.

    name: Operator, or the helper's name.
    operands: Arguments that are no strings.
    modifiers: Non-empty string arguments: the parts of a PTX spelling.
    statement: Number of the statement that it is part of.
    dtype: Type of the result.
    """

    name: str
    operands: tuple[Any, ...]
    modifiers: tuple[str, ...]
    statement: int
    dtype: str


@dataclass
class Calls:
    """Meanings of calls, by operator: return a value, have an effect, or may wait.

    Each entry makes a closure from the translator and a `CallView`. ``lanes`` is the width of a warp,
    ``banks`` are those of shared memory; ``named`` gives a call the name under which the tables have it.
    """

    # The first argument is the `Translator`, which this module does not know.
    reads: Mapping[str, Callable[[Any, CallView], Any]]
    steps: Mapping[str, Callable[[Any, CallView], Step]]
    stops: Mapping[str, Callable[[Any, CallView], Any]]
    helpers: Callable[[Any, CallView, str], Any]
    lanes: int = LANES
    banks: Banks = field(default_factory=Banks)
    named: Callable[[Any, CallView], CallView] = lambda translator, call: call


class HostPlace:
    """Memory on the host's stack that nothing has filled yet."""


@dataclass
class Launch:
    """Launch parameters that a function declares.

    grid, cluster, threads: Extents: of the grid, blocks of a cluster, threads of a block.
    shared_bytes: Shared memory of a block.
    narrowest: Bytes of the narrowest store to shared memory.
    unit: Warps that collective instructions need together.
    together: Whether blocks of different clusters wait for each other.
    block_slots, rank_slots, thread_slot: Registers in which threads find their numbers.
    axes: Extent and register of the grid's axes, 0 for x, where they are declared one by one.
    """

    grid: list[int] = field(default_factory=list)
    cluster: int = 1
    threads: int = 0
    shared_bytes: int = 0
    narrowest: int = 4
    unit: int = 1
    together: bool = False
    block_slots: list[int] = field(default_factory=list)
    rank_slots: list[int] = field(default_factory=list)
    thread_slot: int = -1
    axes: dict[int, tuple[int, int]] = field(default_factory=dict)


class Expressions:
    """Translates the expressions of one PrimFunc for one launch.

    function: The PrimFunc.
    values: Extents by their variables.
    tensors: Tensors by the variables of the buffer parameters.
    calls: Semantics of calls.
    kernels: Functions that it launches, by name, where it is no kernel itself.
    """

    def __init__(
        self,
        function: Any,
        values: Mapping[Any, int],
        tensors: Mapping[Any, Any],
        calls: Calls,
        kernels: Mapping[str, Any],
    ) -> None:
        self.function, self.calls, self.kernels = function, calls, kernels
        self.names: dict[Any, Any] = dict(values)
        self.statements: list[Any] = []
        self.slots = 0
        self.launch = Launch()
        self.now = -1
        self.workspace: Any = None
        self.fixed: dict[Any, int] = {}
        for variable, tensor in tensors.items():
            shape = tuple(self.number(extent) for extent in variable.shape)
            self.names[variable] = GlobalBuffer(tensor, shape, str(variable.dtype))

    # ---- names -----------------------------------------------------------------------------------
    def slot(self, count: int = 1) -> int:
        """Reserve registers and return the first."""
        self.slots += count
        return self.slots - count

    def number(self, expression: Any) -> int:
        """Return an expression that must be known on the host."""
        value = self.expression(expression)
        if callable(value):
            raise UnknownCallError(f"the host must know {expression}")
        return int(value)

    # ---- expressions -----------------------------------------------------------------------------
    def expression(self, e: Any) -> Any:
        """Return a number if an expression is constant, else a closure from a cohort to its value."""
        kind = type(e).__name__
        if kind in ("int", "float", "bool"):
            return e
        if kind in BINARY:
            operands = self.expression(e.a), self.expression(e.b)
            return binary(kind, *operands, str(e.a.ty))
        handler = getattr(self, f"_read_{kind.lower()}", None)
        if handler is None:
            raise UnknownCallError(f"the simulator has no expression {kind}: {e}")
        return handler(e)

    def read(self, e: Any) -> Read:
        """Return a closure for an expression, constant or not."""
        value = self.expression(e)
        return value if callable(value) else lambda c: value

    def _read_intimm(self, e: Any) -> Value:
        return constant(int(e.value), str(e.ty))

    def _read_floatimm(self, e: Any) -> Value:
        return constant(float(e.value), str(e.ty))

    def _read_var(self, e: Any) -> Any:
        held = self.names.get(e)
        if held is None:
            raise UnknownCallError(f"{e} has no value")
        if isinstance(held, Registers):
            slot = held.first
            if slot in self.fixed:
                return self.fixed[slot]
            return lambda c: c.slots[slot]
        return held

    def _read_cast(self, e: Any) -> Any:
        value, dtype = self.expression(e.value), str(e.ty)
        return (lambda c: cast(value(c), dtype)) if callable(value) else cast(value, dtype)

    def _read_not(self, e: Any) -> Any:
        value = self.expression(e.a)
        return (lambda c: np.logical_not(value(c))) if callable(value) else not value

    def _read_select(self, e: Any) -> Any:
        parts = (self.expression(e.condition), self.expression(e.true_value), self.expression(e.false_value))
        return select(*parts, str(e.ty))

    def _read_let(self, e: Any) -> Any:
        value, slot = self.read(e.value), self.slot()
        self.names[e.var] = Registers(slot, 1, str(e.var.ty))
        body = self.read(e.body)

        def read(c: Cohort) -> Value:
            c.slots[slot] = value(c)
            return body(c)

        return read

    def _read_tensorload(self, e: Any) -> Any:
        held, (indices, lanes) = self.names[e.source], consecutive(e.indices)
        if lanes > 1 and isinstance(held, Registers):
            return self.wide_read(held.first + self.number(indices[0]), held.dtype, lanes)
        return self.load(held, indices, lanes)

    def _read_broadcast(self, e: Any) -> Any:
        value = self.expression(e.value)
        if not callable(value):
            return value
        return lambda c: _elements(value(c))

    def _read_ramp(self, e: Any) -> Any:
        base, steps = self.expression(e.base), np.arange(self.number(e.lanes)) * self.number(e.stride)
        if not callable(base):
            return (base + steps).astype(NUMPY[str(e.ty)])
        return lambda c: _elements(base(c)) + steps

    def _read_shuffle(self, e: Any) -> Any:
        """Concatenate vectors and pick elements: LLVM's shufflevector with indices that are known."""
        sizes = [element_of(str(vector.ty))[1] for vector in e.vectors]
        vectors, picked = [self.read(v) for v in e.vectors], [self.number(i) for i in e.indices]
        kind = NUMPY[str(e.ty)]

        def value(c: Cohort) -> Value:
            parts = []
            for vector, size in zip(vectors, sizes, strict=True):
                found = np.asarray(vector(c), kind)
                found = found[..., None] if size == 1 else found
                shape = np.broadcast_shapes(found.shape, (c.count, c.lanes, size))
                parts.append(np.broadcast_to(found, shape))
            joined = np.concatenate(parts, axis=2)[:, :, picked]
            return joined if len(picked) > 1 else joined[:, :, 0]

        return value

    def _read_call(self, e: Any) -> Any:
        call = self.view(e)
        if call.name in UNARY_CALLS:
            function, value = UNARY_CALLS[call.name], self.read(call.operands[0])
            kind = np.float64 if call.dtype == "float64" else np.float32
            return lambda c: function(np.asarray(value(c), kind))
        special = getattr(self, f"_call_{call.name.rpartition('.')[2]}", None)
        if special is not None and call.name.split(".")[0] in ("tirx", "prim") and call.name.count(".") == 1:
            return special(e, call)
        if call.name == "tirx.cuda.func_call":
            return self._helper(e, call)
        if call.name == "tirx.tvm_call_packed":
            call = self._packed(e)
        if call.name not in self.calls.reads:
            raise UnknownCallError(f"the simulator does not know what {call.name} returns: {e}")
        return self.calls.reads[call.name](self, call)

    def _helper(self, e: Any, call: CallView) -> Any:
        strings = [str(a.value) for a in e.args if type(a).__name__ == "StringImm"]
        return self.calls.helpers(self, replace(call, name=strings[0]), strings[1])

    def _call_fmod(self, e: Any, call: CallView) -> Any:
        kind = NUMPY[str(e.ty.dtype)]
        a, b = (self.read(operand) for operand in call.operands)
        return lambda c: np.fmod(np.asarray(a(c), kind), np.asarray(b(c), kind))

    def _call_pow(self, e: Any, call: CallView) -> Any:
        base, exponent = (self.read(operand) for operand in call.operands[:2])
        kind = np.float64 if call.dtype == "float64" else np.float32
        return lambda c: np.power(np.asarray(base(c), kind), np.asarray(exponent(c), kind))

    def _call_if_then_else(self, e: Any, call: CallView) -> Any:
        condition = self.expression(call.operands[0])
        if not callable(condition):
            return self.expression(call.operands[1] if condition else call.operands[2])
        then, other = self.read(call.operands[1]), self.read(call.operands[2])
        kind = NUMPY[call.dtype]

        def value(c: Cohort) -> Value:
            chosen = condition(c)
            if not is_array(chosen):
                return then(c) if chosen else other(c)
            results, saved = [], c.mask
            for sense, branch in ((True, then), (False, other)):
                # Only the threads that take a side may read memory for it.
                mask = c.narrowed(chosen, sense)
                c.mask = mask
                results.append(branch(c) if mask.any() else 0)
                c.mask = saved
            return np.where(chosen, *results).astype(kind, copy=False)

        return value

    def _call_reinterpret(self, e: Any, call: CallView) -> Any:
        value = self.expression(call.operands[0])
        if element_of(call.dtype)[0] not in NUMPY:  # of a pointer
            return value
        source, dtype = str(call.operands[0].ty), call.dtype
        if callable(value):
            return lambda c: reinterpret(value(c), source, dtype)
        return reinterpret(value, source, dtype)

    def _call_address_of(self, e: Any, call: CallView) -> Any:
        target = call.operands[0]
        if type(target).__name__ == "Var":
            held = self.names[target]
            if not isinstance(held, (Registers, SharedBuffer, GlobalBuffer)):
                return held
            return self.address(held, [0])
        return self.address(self.names[target.source], target.indices)

    def _call_tvm_stack_alloca(self, e: Any, call: CallView) -> Any:
        """Return a place on the host's stack; what the host puts there replaces it."""
        return HostPlace()

    def view(self, e: Any) -> CallView:
        """Return a call with its strings apart."""
        operands = tuple(a for a in e.args if type(a).__name__ != "StringImm")
        strings = tuple(str(a.value) for a in e.args if type(a).__name__ == "StringImm" and a.value)
        return self.calls.named(self, CallView(str(e.op.name), operands, strings, self.now, str(e.ty)))

    def _packed(self, e: Any) -> CallView:
        """Return a call of the host's runtime: its function's name, and every argument in order."""
        return CallView(str(e.args[0].value), tuple(e.args[1:]), (), self.now, "")

    # ---- buffers ---------------------------------------------------------------------------------
    def index(self, shape: tuple[int, ...], indices: Any) -> Any:
        """Return the row-major element index."""
        total: Any = 0
        for position, index in enumerate(indices):
            total = binary("Mul", total, shape[position] if position else 1, "int64")
            total = binary("Add", total, self.expression(index), "int64")
        return total

    def register(self, e: Any) -> tuple[int, str]:
        """Return the slot and type of a register operand."""
        held = self.names[e.source if type(e).__name__ == "TensorLoad" else e]
        index = self.number(e.indices[0]) if type(e).__name__ == "TensorLoad" and len(e.indices) else 0
        if not isinstance(held, Registers) or not 0 <= index < held.count:
            raise UnknownCallError(f"{e} is no register")
        return held.first + index, held.dtype

    def address(self, held: Any, indices: Any) -> Any:
        """Return the address of an element: a `Pointer` or a closure that returns one."""
        if isinstance(held, Registers):
            return Pointer("local", held.first + self.number(indices[0]) if len(indices) else held.first, 0)
        size = NUMPY[held.dtype].itemsize
        offset = binary("Mul", self.index(held.shape, indices), size, "int64")
        shared = isinstance(held, SharedBuffer)
        base, target = (held.region.start, held.region) if shared else (0, held.tensor)
        space = "shared" if shared else "global"
        if not callable(offset):
            return Pointer(space, target, base + offset)
        return lambda c: Pointer(space, target, base + _wide(offset(c)))

    def load(self, held: Any, indices: Any, lanes: int = 1) -> Any:
        """Return a closure that loads an element (or ``lanes`` of them, ``[warps, 32, lanes]``)."""
        statement = self.now
        if isinstance(held, Registers):
            slot, kind = held.first + (self.number(indices[0]) if len(indices) else 0), NUMPY[held.dtype]
            return lambda c: c.load(slot, statement, kind)
        pointer, dtype = self.pointer(self.address(held, indices)), held.dtype
        width = access_width(dtype, lanes)
        shared = isinstance(held, SharedBuffer)

        def value(c: Cohort) -> Value:
            at, memory = pointer(c), c.machine.memory
            if shared:
                data = memory.load_shared(c, at.offset, width, at.target, statement)
            else:
                data = memory.load_global(c, at, width, statement)
            elements = data.view(NUMPY[dtype])
            return elements if lanes > 1 else elements[:, :, 0]

        return value

    def wide_read(self, first: int, dtype: str, extent: int) -> Read:
        """Return a closure that collects registers into ``[warps, 32, extent]``."""
        statement, kind = self.now, NUMPY[dtype]

        def value(c: Cohort) -> Value:
            loaded = [c.spread(c.load(first + i, statement, kind), kind) for i in range(extent)]
            return np.stack(loaded, axis=2)

        return value

    def pointer(self, address: Any) -> Callable[[Cohort], Pointer]:
        """Return a closure for an address, constant or not."""
        return address if callable(address) else lambda c: address


def access_width(dtype: str, lanes: int) -> int:
    """Return the bytes that a thread accesses at once, if an instruction can."""
    width = int(NUMPY[dtype].itemsize) * lanes
    if width > WIDEST or width & (width - 1):
        raise UnknownCallError(f"no instruction accesses {width} bytes at once ({lanes} of {dtype})")
    return width


def consecutive(indices: Any) -> tuple[list[Any], int]:
    """Return indices of one element, and how many consecutive ones a vector access takes from there."""
    *outer, last = list(indices) or [0]
    if type(last).__name__ != "Ramp":
        return list(indices), 1
    if int(last.stride) != 1:
        raise UnknownCallError(f"a vector access with stride {last.stride}")
    return [*outer, last.base], int(last.lanes)


def _elements(value: Value) -> Value:
    """Return a value with an axis for the elements of a vector."""
    return value[..., None] if is_array(value) else value


def vector(c: Cohort, value: Value, kind: Any, count: int) -> Any:
    """Return a vector as ``[warps, lanes, count]`` of a type."""
    held = np.asarray(value).astype(kind, copy=False)
    return np.broadcast_to(held, (c.count, c.lanes, count))


def _wide(value: Value) -> Value:
    return value.astype(np.int64, copy=False) if is_array(value) else value
